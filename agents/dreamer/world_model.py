"""RSSM with an ensemble of priors: encoder, posterior, recurrence and heads, and its loss.

    h_t = GRU(h_{t-1}, [z_{t-1}, a_{t-1}, e(x_{t-1})])      p_k(z_t | h_t)
    q(z_t | h_t, encoder(o_t))                              decoder(h_t, z_t, c_t)
    heads on (h_t, c_t, x_t), and on z_t where there are images; c_t = [a_{t-1}, e(x_{t-1})]

Hafner et al. (2019), "Learning latent dynamics for planning from pixels", with K priors in place of
one. All members read the same state and predict in one latent space, so their disagreement is
comparable; Sekar et al. (2020), "Planning to explore via self-supervised world models", likewise
put the ensemble in heads of one recurrence.

The state also holds x_t, the numbers of the observation: observed along real sequences, decoded in
imagination. They are decoded from those of the step before, of which most may stay as they were: see
`observation.Numbers`. So latents need not carry what every observation repeats, and actor, critic,
reward and continue head read observations as a model-free agent does.

CNNs encode and decode images, which are not part of the state: see `networks.Encoder`. Then heads
read z_t, too. Without images x_t is the whole observation, so z_t would only add noise: a sample that
tells nothing hides the trace of an observation of long ago.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import dm_env
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.agents import distributions, experience, kernels, networks
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import intrinsic, recurrence

Tree = Any
FIRST = int(dm_env.StepType.FIRST)

UNROLL = 2
"""Steps unrolled in the scan: on a CPU a gradient took 0.6 of the time without unrolling."""

STATISTICS = 'statistics'
"""Name of the running statistics of numbers among the parameters; not trained."""


class Latent(NamedTuple):
  """The model's belief about the environment at one step, and the numbers observed at that step.

  Attributes:
    deterministic: [..., H] in the compute dtype.
    stochastic: [..., Z] in the compute dtype.
    numbers: [..., F] float32, observed or imagined; see `observation.Numbers`.
    cause: [..., C] in the compute dtype, what led to the step: the encoded action and the embedded
      numbers of the step before; zeros at FIRST.
  """

  deterministic: jax.Array
  stochastic: jax.Array
  numbers: jax.Array
  cause: jax.Array

  @property
  def belief(self) -> jax.Array:
    """[..., H + Z + C], input of the decoder."""
    return jnp.concatenate([self.deterministic, self.stochastic, self.cause], axis=-1)


class Recurrent(NamedTuple):
  """The model's state between steps: its belief, and the action chosen from it.

  Attributes:
    latent: of the previous step.
    action: [..., A] float32, the encoded action of the previous step.
  """

  latent: Latent
  action: jax.Array


class Posterior(NamedTuple):
  """Posterior latents of a sequence, and the moments of its priors.

  Attributes:
    latent: [T, B, ...].
    features: [T, B, ...], see `WorldModel.features`.
    moments: of the members' priors.
    first: [T, B] bool, steps that begin an episode.
  """

  latent: Latent
  features: jax.Array
  moments: intrinsic.Moments
  first: jax.Array


class Prior(NamedTuple):
  """The members' predictions of the next step.

  Attributes:
    belief: about the stochastic state, [K, ..., Z].
    change: [K, ..., R] float32, of real numbers, in standard deviations.
    noise: [R] float32, mean squared error of predicted changes.
  """

  belief: Any
  change: jax.Array
  noise: jax.Array

  def moments(self) -> intrinsic.Moments:
    """Means and variances of latents, and of changes of real numbers where there are any."""
    latent = self.belief.moments()
    if not self.change.shape[-1]:
      return (latent,)
    return latent, (self.change, jnp.broadcast_to(self.noise, self.change.shape))


class NormalisedGRU(nn.Module):
  """A GRU cell with one fused matrix over input and state, and a layer norm before its gates.

  Attributes:
    size: of the state.
    memory_steps: see `gated`.
    dtype: of the computation.
  """

  size: int
  memory_steps: int
  dtype: Any

  @nn.compact
  def __call__(self, state: jax.Array, inputs: jax.Array) -> jax.Array:
    """[B, H] state and [B, F] inputs to the next [B, H] state."""
    joined = jnp.concatenate([inputs, state], axis=-1).astype(self.dtype)
    gates = networks.Dense(3 * self.size, use_bias=False, dtype=self.dtype)(joined)
    gates = networks.LayerNorm(dtype=self.dtype)(gates)
    return gated(gates, state.astype(self.dtype), self.memory_steps)


def gated(gates: jax.Array, state: jax.Array, memory_steps: int) -> jax.Array:
  """[..., 3 H] normalised gates and the [..., H] state to the next, in their dtype.

  Units forget at different rates: with gates of 0 the time constants form a geometric sequence from
  2 steps to `memory_steps`. Initial gradients then reach observations of long ago. Tallec and
  Ollivier (2018), "Can recurrent neural networks warp time?".
  """
  reset, candidate, update = jnp.split(gates, 3, axis=-1)
  candidate = jnp.tanh(kernels.sigmoid(reset) * candidate)
  steps = np.geomspace(2, memory_steps, state.shape[-1])
  update = kernels.sigmoid(update - jnp.asarray(np.log(steps - 1), update.dtype))
  return update * candidate + (1 - update) * state


@dataclasses.dataclass(frozen=True)
class WorldModel:
  """The world model of one environment; every method is a pure function of `params`.

  Attributes:
    config: sizes and constants.
    observation_spec: tree of `dm_env.specs.Array`.
    action_spec: see `distributions.Actions`.
  """

  config: dreamer_config.DreamerConfig
  observation_spec: Any
  action_spec: specs.BoundedArray

  @property
  def dtype(self):
    return self.config.dtype

  @property
  def latent_type(self):
    return distributions.LATENTS[self.config.latent]

  @property
  def latent_size(self) -> int:
    return self.latent_type.size(self.config.stochastic_size, self.config.classes)

  @property
  def belief_size(self) -> int:
    return self.config.deterministic_size + self.latent_size + self.cause_size

  @property
  def cause_size(self) -> int:
    """C."""
    return self.action_size + self._recall_size

  @property
  def memory_size(self) -> int:
    """Width of the part of `features` that the model remembers or infers."""
    inferred = self.latent_size if self.codec.image_specs else 0
    return self.config.deterministic_size + inferred

  @property
  def feature_size(self) -> int:
    """Width of `features`."""
    return self.memory_size + self.numbers.input_size + self.cause_size

  @property
  def action_size(self) -> int:
    return distributions.Actions(self.action_spec).size

  @property
  def has_mask(self) -> bool:
    return observation_lib.action_mask(self.observation_spec) is not None

  @property
  def codec(self) -> observation_lib.Codec:
    return observation_lib.Codec(self.observation_spec, cnn=self.config.image_channels > 0)

  @property
  def numbers(self) -> observation_lib.Numbers:
    return observation_lib.Numbers(self.codec.flat_spec)

  def _mlp(self, output_size: int | None, num_layers: int = 1, **others: Any) -> networks.MLP:
    return networks.MLP(
      self.config.hidden_size, num_layers, output_size, dtype=self.dtype, **others
    )

  def _head(self, output_size: int, output_scale: float = 1.0) -> networks.TwoTowers:
    return networks.TwoTowers(
      self.config.hidden_size, 1, output_size, output_scale, dtype=self.dtype
    )

  def _modules(self) -> dict[str, nn.Module]:
    config = self.config
    belief = self.latent_type.num_outputs(config.stochastic_size, config.classes)
    modules: dict[str, nn.Module] = {
      'encoder': self._mlp(None, config.encoder_layers, raw=True),
      'posterior': self._mlp(belief),
      'transition': NormalisedGRU(config.deterministic_size, config.memory_steps, self.dtype),
      'prior': self._mlp(belief + self.numbers.num_reals),
      'decoder': self._mlp(self.numbers.num_outputs, config.encoder_layers),
      'reward': self._head(config.num_bins, 0.0),
      'continue': self._head(1),
    }
    if self.codec.image_specs:
      shapes = tuple(spec.shape for spec in self.codec.image_specs)
      modules['encoder'] = networks.Encoder(modules['encoder'], config.image_channels)
      modules['decoder'] = networks.Decoder(modules['decoder'], config.image_channels, shapes)
    if self.numbers.size:
      modules['recall'] = self._mlp(None, raw=True)
    if self.has_mask:
      modules['mask'] = self._head(self.action_size)
    return modules

  @property
  def _recall_size(self) -> int:
    """Width of the embedding of the numbers of the step before."""
    return self.config.hidden_size if self.numbers.size else 0

  def init(self, key: chex.PRNGKey) -> Tree:
    """Parameters, float32; those of 'prior' have a leading axis K."""
    modules = self._modules()
    keys = dict(zip(modules, jax.random.split(key, len(modules)), strict=True))
    state = jnp.zeros((1, self.config.deterministic_size))
    belief = jnp.zeros((1, self.belief_size))
    memory = jnp.zeros((1, self.memory_size + self.cause_size))
    numbers = jnp.zeros((1, self.numbers.input_size))
    images = self.codec.image_specs
    encoded = (numbers, *(jnp.zeros((1, *spec.shape)) for spec in images))
    embed = lambda: modules['encoder'].init_with_output(key, *encoded)[0]
    embedded = jnp.zeros(jax.eval_shape(embed).shape)
    inputs = {
      'encoder': encoded,
      'recall': (numbers,),
      'posterior': (jnp.concatenate([state, embedded], axis=-1),),
      'transition': (
        state,
        jnp.zeros((1, self.latent_size + self.action_size + self._recall_size)),
      ),
      'prior': (state,),
      'decoder': (belief,),
    }
    params = {}
    for name, module in modules.items():
      inputs_of = inputs.get(name, ((memory,), (numbers,)))
      init = lambda key, module=module, inputs_of=inputs_of: module.init(key, *inputs_of)['params']
      if name == 'prior':  # a key for each member
        params[name] = jax.vmap(init)(jax.random.split(keys[name], self.config.ensemble_size))
      else:
        params[name] = init(keys[name])
    return params | {STATISTICS: self.numbers.initial_statistics()}

  def _apply(self, params: Tree, name: str, *inputs: Any) -> jax.Array:
    return networks.apply(self._modules()[name], params[name], *inputs)

  def _predict(self, params: Tree, head: str, features: jax.Array) -> jax.Array:
    """[..., F] features to the [..., outputs] of a head."""
    ends = [self.memory_size, self.memory_size + self.numbers.input_size]
    memory, numbers, cause = jnp.split(features, ends, axis=-1)
    return self._apply(params, head, (memory, cause), (numbers,))

  def belief(self, outputs: jax.Array):
    """The distribution of a latent, from a network's [..., 2 Z] or [..., Z C] outputs."""
    return self.latent_type.from_outputs(outputs, self.config.classes, self.config.unimix)

  def initial(self, batch: int) -> Recurrent:
    """Zeros: the state before a FIRST step."""
    return Recurrent(
      latent=Latent(
        deterministic=jnp.zeros((batch, self.config.deterministic_size), self.dtype),
        stochastic=jnp.zeros((batch, self.latent_size), self.dtype),
        numbers=jnp.zeros((batch, self.numbers.size), jnp.float32),
        cause=jnp.zeros((batch, self.cause_size), self.dtype),
      ),
      action=jnp.zeros((batch, self.action_size), jnp.float32),
    )

  def encode_action(self, action: jax.Array) -> jax.Array:
    """[..., action] to [..., A] float32, one-hot or in [-1, 1]; see `distributions.Actions`."""
    return distributions.Actions(self.action_spec).encode(action)

  def _read(self, params: Tree, numbers: jax.Array) -> jax.Array:
    """[..., F] numbers to the inputs of a network, in the compute dtype."""
    statistics = jax.lax.stop_gradient(params[STATISTICS])
    return self.numbers.inputs(numbers, statistics).astype(self.dtype)

  def features(self, params: Tree, latent: Latent) -> jax.Array:
    """[..., H, Z where there are images, inputs of the numbers, C], input of all heads.

    Actor and critic do not read the last: what led to a step does not matter to what follows.
    """
    inferred = [latent.stochastic] if self.codec.image_specs else []
    parts = [latent.deterministic, *inferred, self._read(params, latent.numbers), latent.cause]
    return jnp.concatenate(parts, axis=-1)

  def embed(self, params: Tree, observation: Tree) -> tuple[jax.Array, jax.Array]:
    """[..., observation] to [..., features] for the posterior, and its numbers [..., F]."""
    numbers = self.numbers.read(observation)
    _, *images = self.codec.encode(observation)
    return self._apply(params, 'encoder', self._read(params, numbers), *images), numbers

  def fuse(self, params: Tree) -> Tree:
    """Prepares matrices once, before a loop of `advance`, which only reads them.

    They are cast to the compute dtype; that of the recurrence is centred, since a layer norm follows.
    """
    dense = params['transition']['Dense_0']
    dense = dense | {'kernel': kernels.centre(dense['kernel'])}
    params = params | {'transition': params['transition'] | {'Dense_0': dense}}
    cast = lambda path, x: x.astype(self.dtype) if path[-1].key == 'kernel' else x
    return jax.tree_util.tree_map_with_path(cast, params)

  def _recall(self, params: Tree, numbers: jax.Array) -> jax.Array:
    """[..., F] numbers of the step before to their embedding, [..., hidden]; none without numbers."""
    if not self._recall_size:
      return jnp.zeros((*numbers.shape[:-1], 0), self.dtype)
    return self._apply(params, 'recall', self._read(params, numbers))

  def _recalled(self, params: Tree, recall: jax.Array) -> jax.Array:
    """[..., hidden] embedded numbers of the step before to their term in the gates, [..., 3 H]."""
    kernel = kernels.centre(params['transition']['Dense_0']['kernel'])
    begin = self.latent_size + self.action_size
    kernel = kernel[begin : begin + self._recall_size].astype(self.dtype)
    return recall @ kernel

  def _step_params(self, params: Tree) -> tuple[dict[str, jax.Array], Tree]:
    """Parameters of `_observe`: its matrices, and all others."""
    posterior = params['posterior']
    kernel = kernels.centre(params['transition']['Dense_0']['kernel'])  # a layer norm follows
    begin = self.latent_size + self.action_size
    matrices = {
      'transition': jnp.concatenate([kernel[:begin], kernel[begin + self._recall_size :]]),
      'posterior': posterior['Dense_0']['kernel'][: self.config.deterministic_size],
      'belief': posterior['Dense_1']['kernel'],
    }
    rest = {
      'transition': params['transition']['LayerNorm_0'],
      'posterior': posterior['LayerNorm_0'],
      'belief': posterior['Dense_1']['bias'],
    }
    return matrices, rest

  def advance(self, params: Tree, recurrent: Recurrent) -> tuple[jax.Array, jax.Array]:
    """The next deterministic state, [B, H], and its cause, [B, C].

    Args:
      params: of `fuse`.
      recurrent: [B, ...] of a step.
    """
    latent, action = recurrent
    cause = [action.astype(self.dtype), self._recall(params, latent.numbers)]
    transition = params['transition']
    joined = kernels.concatenate([latent.stochastic, *cause, latent.deterministic])
    gates = joined @ transition['Dense_0']['kernel']
    state = joined[..., -latent.deterministic.shape[-1] :]
    state = self._gated(gates, transition['LayerNorm_0'], state)
    return state, jnp.concatenate(cause, axis=-1)

  def _gated(self, gates: jax.Array, norm: Tree, deterministic: jax.Array) -> jax.Array:
    """[B, 3 H] centred products and the [B, H] state to the next."""
    gates = kernels.normalise(gates, **norm, centred=True).astype(self.dtype)
    return gated(gates, deterministic, self.config.memory_steps)

  def priors(self, params: Tree, deterministic: jax.Array) -> Prior:
    """[..., H] to the members' predictions of the step."""
    return self.prior(params, self.prior_outputs(params, deterministic))

  def prior(self, params: Tree, outputs: jax.Array) -> Prior:
    """Predictions from the outputs of prior networks, [..., outputs]."""
    reals = self.numbers.num_reals
    latent, change = jnp.split(outputs, [outputs.shape[-1] - reals], axis=-1)
    noise = jnp.zeros(0)
    if reals:
      noise = self.numbers.noise(jax.lax.stop_gradient(params[STATISTICS]))
    return Prior(self.belief(latent), change.astype(jnp.float32), noise)

  def prior_outputs(self, params: Tree, deterministic: jax.Array) -> jax.Array:
    """[..., H] to the outputs of the members' prior networks, [K, ..., outputs]."""
    prior = lambda params: networks.apply(self._modules()['prior'], params, deterministic)
    return jax.vmap(prior)(params['prior'])

  def clear(self, recurrent: Recurrent, first: jax.Array) -> Recurrent:
    """Zeros where a step is FIRST, so that no state passes from one episode to the next."""
    keep = lambda x: jnp.where(first.reshape(-1, *[1] * (x.ndim - 1)), 0, x).astype(x.dtype)
    return jax.tree.map(keep, recurrent)

  def imagine_numbers(self, params: Tree, belief: jax.Array, before: jax.Array) -> jax.Array:
    """[..., H + Z] and the numbers of the step before to the most likely numbers, [..., F]."""
    if not self.numbers.size:
      return before
    decoder = self._modules()['decoder']
    module, of = (
      (decoder.mlp, params['decoder']['mlp'])
      if self.codec.image_specs
      else (decoder, params['decoder'])
    )
    outputs = networks.apply(module, of, belief).astype(jnp.float32)
    follows = jnp.ones(before.shape[:-1], bool)
    predicted = self.numbers.predict(outputs, before, follows, params[STATISTICS])
    return self.numbers.expected(predicted, params[STATISTICS])

  def observe(
    self,
    params: Tree,
    recurrent: Recurrent,
    embedded: tuple[jax.Array, jax.Array],
    first: jax.Array,
    noise: jax.Array | None,
  ) -> tuple[Latent, Any]:
    """One step: [B, ...] to the latent and the posterior belief.

    Args:
      params: of the world model.
      recurrent: carried from the previous step.
      embedded: of the observation, from `embed`.
      first: [B] bool, whether the step is FIRST.
      noise: [B, ...] of `noise`, or None for the mode.
    """
    features, numbers = embedded
    matrices, rest = self._step_params(params)
    multiply = lambda name, x: x @ matrices[name].astype(x.dtype)
    recall = jnp.where(first[:, None], 0, self._recall(params, recurrent.latent.numbers))
    recalled = self._recalled(params, recall)
    inputs = (self._hoisted(params, features), recall, recalled, numbers, first, noise)
    return self._observe(multiply, rest, recurrent, inputs)

  def _hoisted(self, params: Tree, embedded: jax.Array) -> jax.Array:
    """[..., hidden], the observation's term in the posterior's hidden layer, before its norm."""
    kernel = params['posterior']['Dense_0']['kernel'][self.config.deterministic_size :]
    return embedded @ kernel.astype(self.dtype)

  def _observe(
    self, multiply: recurrence.Multiply, rest: Tree, recurrent: Recurrent, inputs: tuple[Any, ...]
  ) -> tuple[Latent, Any]:
    """`observe`, with a `multiply` and the other parameters: see `recurrence.scan`."""
    hoisted, recall, recalled, numbers, first, noise = inputs
    latent, action = self.clear(recurrent, first)
    action = action.astype(self.dtype)
    joined = jnp.concatenate([latent.stochastic, action, latent.deterministic], axis=-1)
    gates = multiply('transition', joined) + recalled
    deterministic = self._gated(gates, rest['transition'], latent.deterministic)
    hidden = kernels.normalise(multiply('posterior', deterministic) + hoisted, **rest['posterior'])
    hidden = kernels.silu(hidden.astype(self.dtype))
    belief = self.belief(multiply('belief', hidden) + rest['belief'].astype(self.dtype))
    stochastic = belief.mode() if noise is None else belief.sample(noise)
    cause = jnp.concatenate([action, recall], axis=-1)
    return Latent(deterministic, stochastic.astype(self.dtype), numbers, cause), belief

  def noise(self, key: chex.PRNGKey) -> jax.Array:
    """Noise for one latent; see `distributions.LATENTS`."""
    return self.latent_type.noise(key, self.config.stochastic_size, self.config.classes)

  def reward(self, params: Tree, features: jax.Array) -> distributions.TwoHot:
    """[..., features] to the distribution of the reward that arrived at the step."""
    return distributions.TwoHot.from_logits(
      self._predict(params, 'reward', features), self.config.bin_limit
    )

  def discount(self, params: Tree, features: jax.Array) -> jax.Array:
    """[..., features] to [...] float32, the probability that the episode continues."""
    return jax.nn.sigmoid(self._predict(params, 'continue', features)[..., 0].astype(jnp.float32))

  def action_mask(self, params: Tree, features: jax.Array) -> jax.Array:
    """[..., features] to [..., A] bool, actions predicted to be legal; without a mask, all."""
    if not self.has_mask:
      return jnp.ones((*features.shape[:-1], self.action_size), bool)
    return self._predict(params, 'mask', features) > 0

  def infer(
    self, params: Tree, keys: jax.Array, sequence: experience.Sequence
  ) -> tuple[Posterior, Any, Any]:
    """Infers posteriors along real sequences.

    Args:
      params: of the world model.
      keys: [B] one for each sequence, so that the result does not depend on the batching.
      sequence: [T, B, ...], `initial_state` being a `Recurrent`.

    Returns:
      The Posterior, the posterior beliefs [T, B, Z] and the members' priors [K, T, B, Z].
    """
    num_steps = sequence.reward.shape[0]
    first = sequence.step_type == FIRST
    embedded, numbers = self.embed(params, sequence.observation)
    noise = jax.vmap(
      lambda key: jax.vmap(self.noise)(jax.random.split(key, num_steps)), out_axes=1
    )(keys)
    action = self.encode_action(sequence.action)

    def step(multiply, rest, recurrent, inputs):
      *inputs, action = inputs
      latent, belief = self._observe(multiply, rest, recurrent, inputs)
      return Recurrent(latent, action), (latent, belief)

    initial = self.initial(first.shape[1])
    if self.config.stored_state:
      initial = jax.tree.map(lambda x, like: x.astype(like.dtype), sequence.initial_state, initial)
    before = jnp.concatenate([initial.latent.numbers[None], numbers[:-1]])
    recall = jnp.where(first[..., None], 0, self._recall(params, before))
    recalled = self._recalled(params, recall)
    inputs = (self._hoisted(params, embedded), recall, recalled, numbers, first, noise, action)
    _, (latent, belief) = recurrence.scan(
      step, min(UNROLL, num_steps), *self._step_params(params), initial, inputs
    )
    priors = self.priors(params, latent.deterministic)  # outside of the recurrence
    posterior = Posterior(latent, self.features(params, latent), priors.moments(), first)
    return posterior, belief, priors

  def decode(self, params: Tree, belief: jax.Array, before: jax.Array, first: jax.Array) -> Tree:
    """The most likely observation, [..., *shape] float32 and without a mask.

    Args:
      params: of the world model.
      belief: [..., H + Z] of this step.
      before: [..., F] numbers of the previous step.
      first: [...] bool, steps without a previous step.
    """
    outputs, images = self._decoded(params, belief)
    predicted = self.numbers.predict(outputs, before, ~first, params[STATISTICS])
    flat = self.numbers.to_flat(self.numbers.expected(predicted, params[STATISTICS]))
    return self.codec.assemble(flat, images)

  def _decoded(self, params: Tree, belief: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Outputs of the decoder for the numbers, and decoded images, [..., H, W, C] each; float32."""
    outputs = self._apply(params, 'decoder', belief).astype(jnp.float32)
    ends = np.cumsum(
      [self.numbers.num_outputs, *(np.prod(s.shape) for s in self.codec.image_specs)]
    )
    numbers, *images = jnp.split(outputs, ends[:-1].astype(int), axis=-1)
    shapes = [spec.shape for spec in self.codec.image_specs]
    return numbers, [
      x.reshape(*x.shape[:-1], *shape) for x, shape in zip(images, shapes, strict=True)
    ]

  def loss(
    self,
    params: Tree,
    keys: jax.Array,
    sequence: experience.Sequence,
    value_loss: Callable[[jax.Array], jax.Array] = lambda features: jnp.zeros(()),
  ) -> tuple[jax.Array, tuple[Posterior, jax.Array, Tree, dict[str, jax.Array]]]:
    """Negative evidence bound of real sequences, in float32.

      reconstruction + reward_scale reward + continue + mask + value
        + mean_k m_k [ b_dyn KL(sg q || p_k) + b_rep max(free, KL(q || sg p_k)) ]

    with m_k the bootstrap mask of (member, sequence), which the sequence's identity seeds, so that
    it is the same in every replay. No transition leads to a FIRST step, so its reward is not
    learned.

    Args:
      params: of the world model.
      keys: [B] one for each sequence.
      sequence: [T, B, ...].
      value_loss: of the [T, B, ...] features; its gradient makes latents keep what later rewards
        depend on.

    Returns:
      The loss [], and (Posterior, predicted rewards [T, B], moments of numbers, metrics).
    """
    config = self.config
    posterior, belief, priors = self.infer(params, keys, sequence)
    features = posterior.features
    reconstruction, moments = self._reconstruction_loss(params, posterior, sequence)
    rewards = self.reward(params, features)
    reward = -rewards.log_prob(sequence.reward)
    reward = jnp.where(posterior.first, 0.0, reward)
    continues, mask = self._heads_loss(params, features, sequence)
    dynamics_kl, kl = self._kl(belief, priors.belief, sequence.identity)
    change = self._change_loss(params, priors, posterior, sequence)
    loss = jnp.mean(reconstruction + config.reward_scale * reward + continues + mask + kl + change)
    loss += value_loss(features)
    metrics = {
      'loss': loss,
      'reconstruction': reconstruction.mean(),
      'reward': reward.mean(),
      'continue': continues.mean(),
      'mask': mask.mean(),
      'change': change.mean(),
      'kl': dynamics_kl.mean(),
      # A mean over all steps, since devices average it without their counts of other than FIRST.
      'kl_after_first': jnp.where(posterior.first, 0.0, dynamics_kl).mean(),
    }
    stop = jax.lax.stop_gradient
    return loss, (*stop((posterior, rewards.mean(), moments)), metrics)

  def _reconstruction_loss(
    self, params: Tree, posterior: Posterior, sequence: experience.Sequence
  ) -> tuple[jax.Array, Tree]:
    """Loss [T, B] of decoded observations, and the moments of numbers: see `statistics`."""
    numbers = posterior.latent.numbers
    outputs, decoded = self._decoded(params, posterior.latent.belief)
    before = _numbers_before(numbers, sequence)
    statistics = jax.lax.stop_gradient(params[STATISTICS])
    predicted = self.numbers.predict(outputs, before, ~posterior.first, statistics)
    loss, error = self.numbers.loss(predicted, numbers, statistics)
    _, *images = self.codec.encode(sequence.observation)
    loss += self.codec.image_loss(decoded, images)
    return loss, self.numbers.moments(numbers, error)

  def statistics(self, params: Tree, moments: Tree) -> Tree:
    """Parameters with the running statistics of numbers after one more batch.

    Args:
      params: of the world model.
      moments: of the batch, from `loss`, averaged over devices.
    """
    return params | {STATISTICS: self.numbers.updated(params[STATISTICS], moments)}

  def _heads_loss(
    self, params: Tree, features: jax.Array, sequence: experience.Sequence
  ) -> tuple[jax.Array, jax.Array]:
    """Losses [T, B] of the continue and mask heads at [T, B, ...] features."""
    logits = self._predict(params, 'continue', features)[..., 0].astype(jnp.float32)
    continues = jax.nn.softplus(logits) - sequence.discount * logits
    mask = jnp.zeros_like(continues)
    legal_actions = observation_lib.action_mask(sequence.observation)
    if legal_actions is not None:
      logits = self._predict(params, 'mask', features).astype(jnp.float32)
      legal = legal_actions.astype(jnp.float32)
      mask = jnp.sum(jax.nn.softplus(logits) - legal * logits, axis=-1)
    return continues, mask

  def _change_loss(
    self, params: Tree, priors: Prior, posterior: Posterior, sequence: experience.Sequence
  ) -> jax.Array:
    """Loss [T, B] of the members' predictions of real numbers' changes; 0 at FIRST steps."""
    if not self.numbers.num_reals:
      return jnp.zeros(posterior.first.shape)
    statistics = jax.lax.stop_gradient(params[STATISTICS])
    numbers = posterior.latent.numbers
    before = _numbers_before(numbers, sequence)
    change = self.numbers.change(before, numbers, statistics)
    error = jnp.square(priors.change - change) / priors.noise
    loss = jnp.sum(jnp.log1p(error / 2), axis=-1)
    learns = bootstrap_mask(
      sequence.identity, self.config.ensemble_size, self.config.bootstrap_share
    )
    return jnp.where(posterior.first, 0.0, jnp.mean(learns[:, None] * loss, axis=0))

  def _kl(self, belief: Any, priors: Any, identity: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The dynamics' divergence [K, T, B], and the loss [T, B] of both divergences.

    Members learn from their own share of the sequences: see `bootstrap_mask`.
    """
    config, stop = self.config, jax.lax.stop_gradient
    dynamics_kl = stop(belief).kl(priors)
    representation_kl = jnp.maximum(config.free_nats, belief.kl(stop(priors)))
    learns = bootstrap_mask(identity, config.ensemble_size, config.bootstrap_share)
    loss = config.dynamics_scale * learns[:, None] * dynamics_kl
    loss += config.representation_scale * representation_kl
    return dynamics_kl, jnp.mean(loss, axis=0)


def _numbers_before(numbers: jax.Array, sequence: experience.Sequence) -> jax.Array:
  """[T, B, F] numbers of the steps of a sequence to those of the steps before them."""
  initial = sequence.initial_state.latent.numbers.astype(numbers.dtype)
  return jnp.concatenate([initial[None], numbers[:-1]])


def bootstrap_mask(identity: jax.Array, num_members: int, share: float) -> jax.Array:
  """Assigns sequences to members at random.

  Args:
    identity: [B] uint32, random ID of each sequence.
    num_members: K.
    share: expected share of sequences that a member learns from.

  Returns:
    [K, B] float32; `1 / share` or 0, so that its mean is 1.
  """
  draw = lambda seed: jax.random.bernoulli(jax.random.key(seed), share, (num_members,))
  return jax.vmap(draw, out_axes=1)(identity).astype(jnp.float32) / share
