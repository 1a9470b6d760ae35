"""Empowerment: how much of the next observation the next action decides.

    E(s) = I(A; X' | s) = ln n - H(A | s, X')  >=  ln n + mean ln q(a | s, x'),    a ~ uniform

over the n legal actions, x' being the numbers and slots of the observation that one imagined step predicts. A
classifier q learns to infer the action from s and x', and a head e(s) learns the mean of the bound, so that
no action needs to be imagined where empowerment is read. Mohamed and Rezende (2015), "Variational
information maximisation for intrinsically motivated reinforcement learning"; the bound is from
Barber and Agakov (2003).

The classifier does not read the next model state h', z', which depends on the action directly, so all
actions would seem to matter. An action whose effect is observed only later does not count.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import dm_env
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.agents import distributions, experience
from hephaestus.agents import networks as networks_lib
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import modules as modules_lib
from hephaestus.agents.dreamer import rssm as rssm_lib
from hephaestus.agents.dreamer import sockets

Tree = Any
LAST = int(dm_env.StepType.LAST)
NAME = 'empowerment'
INVERSE, HEAD = 'inverse', NAME
"""Names of its networks among the parameters: the classifier q, and the head e."""

SHARE = 4
"""Empowerment learns at one in SHARE replayed steps, by one imagined step each."""


@dataclasses.dataclass(frozen=True)
class Empowerment(sockets.Reward):
  """The reward of empowerment, as a share of its maximum, ln A.

  Its mean is not subtracted: where an action decides nothing, ending an episode costs nothing.

  Raises:
    ValueError: the action is not one discrete choice among at least two, or the observation has only
      images for CNNs.
  """

  name = NAME
  shown = (HEAD,)

  def __post_init__(self):
    networks = self.rssm.networks
    given = f'agent.empowerment_scale={networks.config.empowerment_scale:g}'
    if not isinstance(networks.action_spec, specs.DiscreteArray) or networks.actions.size < 2:
      raise ValueError(
        f'{given}: empowerment is of one discrete action with at least two choices, and here it is '
        f'{networks.action_spec}; set agent.empowerment_scale=0'
      )
    if not networks.embedding_size:
      raise ValueError(
        f'{given}: empowerment is over numbers and slots of an observation, and here are only images, which '
        'dreams do not decode; set agent.empowerment_scale=0'
      )

  def modules(self) -> Mapping[str, tuple[nn.Module, Any]]:
    """See `Reward.modules`: the classifier, which infers the action, and the head."""
    sizes, config = self.rssm.networks, self.rssm.networks.config
    tower = lambda outputs, scale: networks_lib.Towers(
      config.hidden_size, 1, outputs, scale, dtype=config.dtype
    )
    features = sizes.empty_features(1)
    numbers = features.numbers
    state = features.state[..., : config.deterministic_size]
    return {
      INVERSE: (tower(sizes.actions.size, 1.0), ((state,), (numbers, numbers))),
      HEAD: (tower(1, 0.0), ((features.state,), (numbers,))),
    }

  def _apply(self, params: Tree, name: str, *inputs: Any) -> jax.Array:
    module, _ = self.modules()[name]
    return networks_lib.apply(module, params[name], *inputs)

  def nats(self, params: Tree, features: modules_lib.Features) -> jax.Array:
    """The head's estimate e of empowerment, [...] float32 nats, at features [..., ...]."""
    nats = self._apply(params, HEAD, (features.state,), (features.numbers,))
    return nats[..., 0].astype(jnp.float32)

  def reward(self, params: Tree, before: rssm_lib.Step, after: rssm_lib.Step) -> jax.Array:
    return self.nats(params, after.features) / np.log(self.rssm.networks.actions.size)

  def metrics(self, params: Tree, replayed: rssm_lib.Step, rewards: jax.Array) -> sockets.Metrics:
    """The mean over all replayed steps, those at which an episode begins included."""
    return {self.name: self.reward(params, replayed, replayed).mean()}

  def explain(self, params: Tree, step: rssm_lib.Step) -> dict[str, jax.Array]:
    """Empowerment in nats."""
    return {self.name: self.nats(params, step.features)}

  def loss(
    self,
    params: Tree,
    keys: jax.Array,
    replayed: rssm_lib.Step,
    sequence: experience.Sequence,
    expected: jax.Array,
  ) -> tuple[jax.Array, sockets.Metrics]:
    """Loss of the classifier and the head, the only ones that get a gradient; see `Reward.loss`.

    A mean over the imagined steps, where those after an episode's end, after which no action follows, count as
    0. The metric is the classifier's part of it, nats.
    """
    num_steps, batch = sequence.reward.shape
    keys = jax.vmap(lambda key: jax.random.fold_in(key, num_steps))(keys)
    legal = observation_lib.action_mask(sequence.observation)
    if legal is None:
      legal = jnp.ones((num_steps, batch, self.rssm.networks.actions.size), bool)
    count = max(1, num_steps // SHARE)
    keys = jax.vmap(lambda key: jax.random.split(key, 1 + count), out_axes=1)(keys)
    choose = lambda key: jax.random.permutation(key, num_steps)[:count]
    step = jax.vmap(choose, out_axes=1)(keys[0])  # [count, B]
    pick = lambda x: x[step, jnp.arange(batch)].reshape(count * batch, *x.shape[2:])
    latent, features = jax.tree.map(
      pick, jax.lax.stop_gradient((replayed.latent, replayed.features))
    )
    legal, weight = pick(legal), pick(sequence.step_type != LAST).astype(jnp.float32)
    log_prob = self._log_prob(params, keys[1:].reshape(-1), latent, legal)
    num_legal = jnp.maximum(jnp.sum(legal, axis=-1), 1).astype(jnp.float32)
    bound = jax.lax.stop_gradient(jnp.log(num_legal) + log_prob)
    error = jnp.square(self.nats(params, features) - bound)
    inverse = -jnp.mean(weight * log_prob)
    return jnp.mean(weight * (error - log_prob)), {'world_model/inverse': inverse}

  def _log_prob(
    self, params: Tree, keys: jax.Array, latent: rssm_lib.Latent, legal: jax.Array
  ) -> jax.Array:
    """ln q of a uniform legal action at each of N latents, after one imagined step, [N] float32."""
    networks, frozen = self.rssm.networks, jax.lax.stop_gradient(params)
    action_key, member_key, noise_key = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(
      keys
    )
    uniform = distributions.MaskedCategorical.from_logits(jnp.zeros(legal.shape), legal)
    action = uniform.sample(jax.vmap(networks.actions.noise)(action_key))
    choose = lambda key: jax.random.randint(key, (), 0, networks.config.ensemble_size)
    imagined = self.rssm.imagine(
      frozen,
      self.rssm.matrices(frozen),
      rssm_lib.Recurrent(latent, networks.actions.encode(action)),
      jax.vmap(choose)(member_key),
      jax.vmap(self.rssm.imagined_noise)(noise_key),
    )
    numbers = tuple(self.rssm.inputs(frozen, x).numbers for x in (latent, imagined.latent))
    outputs = self._apply(params, INVERSE, (latent.deterministic,), numbers)
    return distributions.MaskedCategorical.from_logits(outputs, legal).log_prob(action)
