"""RSSM with an ensemble of transitions: shared encoder, posterior and heads, and its loss.

    h_t^k = GRU_k(h_{t-1}, [z_{t-1}, a_{t-1}])      p_k(z_t | h_t^k)      h_t = mean_k h_t^k
    q(z_t | h_t, encoder(o_t))                      decoder, reward, continue, mask on (h_t, z_t)

Hafner et al. (2019), "Learning latent dynamics for planning from pixels", with K transition
members in place of one. All members read the same state, so they predict in one latent space and
their disagreement is comparable.

Where the observation has a map (see `sight`), the transitions also read the agent's position and
the content of its cell. The reward then reads the egocentric view of the previous step's map, which
is observed along real sequences and decoded in imagination. One network, shared by all cells, also
decodes each cell of the map from the previous cell, so that imagination keeps an unfamiliar layout.

CNNs encode and decode images: see `networks.Encoder`.
"""

import dataclasses
from typing import Any, NamedTuple

import chex
import dm_env
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.agents import distributions, experience, kernels, networks, sight
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import recurrence

Tree = Any
FIRST = int(dm_env.StepType.FIRST)

CHANGE_SIZE = 32  # hidden units of `Change`

UNROLL = 2
"""Steps unrolled in the scan: on a CPU a gradient took 0.6 of the time without unrolling."""


class Latent(NamedTuple):
  """The model's belief about the environment at one step, and the map of that step.

  Attributes:
    deterministic: [..., H] in the compute dtype.
    stochastic: [..., Z] in the compute dtype.
    seen: [..., S] in the compute dtype, the map, observed or decoded; S is 0 without a map.
  """

  deterministic: jax.Array
  stochastic: jax.Array
  seen: jax.Array

  @property
  def belief(self) -> jax.Array:
    """[..., H + Z], input of decoder, reward, continue and mask."""
    return jnp.concatenate([self.deterministic, self.stochastic], axis=-1)

  @property
  def features(self) -> jax.Array:
    """[..., H + Z + S], input of actor and critic."""
    return jnp.concatenate(self, axis=-1)


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
    moments: (means, variances) of the members' priors, each [K, T, B, F] float32.
    first: [T, B] bool, steps that begin an episode.
  """

  latent: Latent
  moments: tuple[jax.Array, jax.Array]
  first: jax.Array


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


class Change(nn.Module):
  """Predicts each cell of the next map from the cell; one network for all cells.

  Attributes:
    levels: L, of a cell.
    dtype: of the computation.
  """

  levels: int
  dtype: Any

  @nn.compact
  def __call__(self, cause: jax.Array, cells: jax.Array) -> jax.Array:
    """[..., F] input shared by all cells, and [..., N, L + 1] cells, to [..., N, L] logits."""
    dense = lambda size, **options: networks.Dense(size, dtype=self.dtype, **options)
    hidden = dense(CHANGE_SIZE)(cells.astype(self.dtype))
    hidden += dense(CHANGE_SIZE, use_bias=False)(cause.astype(self.dtype))[..., None, :]
    return dense(self.levels, kernel_init=nn.initializers.zeros)(nn.silu(hidden))


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
    return self.config.deterministic_size + self.latent_size

  @property
  def feature_size(self) -> int:
    return self.belief_size + self.sight.size

  @property
  def sight(self) -> sight.Sight:
    return sight.Sight.of(self.observation_spec, self.config.levels)

  @property
  def action_size(self) -> int:
    return distributions.Actions(self.action_spec).size

  @property
  def has_mask(self) -> bool:
    return observation_lib.action_mask(self.observation_spec) is not None

  @property
  def codec(self) -> observation_lib.Codec:
    return observation_lib.Codec(
      self.observation_spec, levels=self.config.levels, cnn=self.config.image_channels > 0
    )

  def _mlp(self, output_size: int | None, num_layers: int = 1, **others: Any) -> networks.MLP:
    return networks.MLP(
      self.config.hidden_size, num_layers, output_size, dtype=self.dtype, **others
    )

  def _modules(self) -> dict[str, nn.Module]:
    config = self.config
    belief = self.latent_type.num_outputs(config.stochastic_size, config.classes)
    modules: dict[str, nn.Module] = {
      'encoder': self._mlp(None, config.encoder_layers, raw=True),
      'posterior': self._mlp(belief),
      'transition': NormalisedGRU(config.deterministic_size, config.memory_steps, self.dtype),
      'prior': self._mlp(belief),
      'decoder': self._mlp(self.codec.num_decoded, config.encoder_layers),
      'reward': self._mlp(config.num_bins, output_scale=0.0),
      'continue': self._mlp(1),
    }
    if self.codec.image_specs:
      shapes = tuple(spec.shape for spec in self.codec.image_specs)
      modules['encoder'] = networks.Encoder(modules['encoder'], config.image_channels)
      modules['decoder'] = networks.Decoder(modules['decoder'], config.image_channels, shapes)
    if self.has_mask:
      modules['mask'] = self._mlp(self.action_size)
    if self.sight.size:
      modules['change'] = Change(config.levels, self.dtype)
    return modules

  def init(self, key: chex.PRNGKey) -> Tree:
    """Parameters, float32; those of 'transition' and 'prior' have a leading axis K."""
    modules = self._modules()
    keys = dict(zip(modules, jax.random.split(key, len(modules)), strict=True))
    state = jnp.zeros((1, self.config.deterministic_size))
    belief = jnp.zeros((1, self.belief_size))
    observation = jax.tree.map(
      lambda spec: jnp.zeros((1, *spec.shape), spec.dtype), self.observation_spec
    )
    encoded = self.codec.encode(observation)
    embed = lambda: modules['encoder'].init_with_output(key, *encoded)[0]
    embedded = jnp.zeros(jax.eval_shape(embed).shape)
    inputs = {
      'encoder': encoded,
      'posterior': (jnp.concatenate([state, embedded], axis=-1),),
      'transition': (
        state,
        jnp.zeros((1, self.latent_size + self.action_size + self.sight.location_size)),
      ),
      'prior': (state,),
      'reward': (jnp.zeros((1, self.belief_size + self._reward_cause_size)),),
      'change': (
        jnp.zeros((1, self.belief_size + self.action_size)),
        self.sight.cells(jnp.zeros((1, self.sight.size))) if self.sight.size else None,
      ),
    }
    params = {}
    for name, module in modules.items():
      init = lambda key, module=module, name=name: module.init(key, *inputs.get(name, (belief,)))[
        'params'
      ]
      if name in ('transition', 'prior'):  # a key for each member
        params[name] = jax.vmap(init)(jax.random.split(keys[name], self.config.ensemble_size))
      else:
        params[name] = init(keys[name])
    return params

  def _apply(self, params: Tree, name: str, *inputs: jax.Array) -> jax.Array:
    return networks.apply(self._modules()[name], params[name], *inputs)

  def belief(self, outputs: jax.Array):
    """The distribution of a latent, from a network's [..., 2 Z] or [..., Z C] outputs."""
    return self.latent_type.from_outputs(outputs, self.config.classes, self.config.unimix)

  def initial(self, batch: int) -> Recurrent:
    """Zeros: the state before a FIRST step."""
    return Recurrent(
      latent=Latent(
        deterministic=jnp.zeros((batch, self.config.deterministic_size), self.dtype),
        stochastic=jnp.zeros((batch, self.latent_size), self.dtype),
        seen=jnp.zeros((batch, self.sight.size), self.dtype),
      ),
      action=jnp.zeros((batch, self.action_size), jnp.float32),
    )

  def encode_action(self, action: jax.Array) -> jax.Array:
    """[..., action] to [..., A] float32, one-hot or in [-1, 1]; see `distributions.Actions`."""
    return distributions.Actions(self.action_spec).encode(action)

  def embed(self, params: Tree, observation: Tree) -> jax.Array:
    """[..., observation] to [..., features]: a hidden size for the numbers and for each image."""
    return self._apply(params, 'encoder', *self.codec.encode(observation))

  def fuse(self, params: Tree) -> Tree:
    """Converts parameters once, before a loop that only reads them.

    The members' matrices are joined into one, [F, K 3H], and all matrices are cast to the compute
    dtype.
    """
    transition = params['transition'] | {'Dense_0': {'kernel': self._wide(params)}}
    cast = lambda path, x: x.astype(self.dtype) if path[-1].key == 'kernel' else x
    return jax.tree_util.tree_map_with_path(cast, params | {'transition': transition})

  def _wide(self, params: Tree) -> jax.Array:
    """The members' matrices joined along their outputs, [F, K 3H]; all read the same inputs.

    Each is centred, since a layer norm reads its outputs.
    """
    kernel = params['transition']['Dense_0']['kernel']
    return kernel if kernel.ndim == 2 else jnp.concatenate(list(kernels.centre(kernel)), axis=-1)

  def members(self, params: Tree, recurrent: Recurrent) -> jax.Array:
    """[B, ...] to each member's next deterministic state, [K, B, H]; see `fuse`."""
    gates = self._cause(recurrent) @ self._wide(params).astype(self.dtype)
    return self._step(params['transition']['LayerNorm_0'], gates, recurrent)

  def _cause(self, recurrent: Recurrent) -> jax.Array:
    """Inputs of the members' matrices, [B, F]."""
    latent, action = recurrent
    location = self.sight.location(latent.seen)
    parts = [latent.stochastic, action.astype(self.dtype), location, latent.deterministic]
    return jnp.concatenate(parts, axis=-1)

  def _step(self, norm: Tree, gates: jax.Array, recurrent: Recurrent) -> jax.Array:
    """Outputs of the members' matrices, [B, K 3H], to the next deterministic states, [K, B, H]."""
    state = recurrent.latent.deterministic

    def step(gates, scale, bias):
      gates = kernels.normalise(gates, scale, bias, centred=True).astype(self.dtype)
      return gated(gates, state, self.config.memory_steps)

    gates = gates.reshape(len(gates), self.config.ensemble_size, -1)
    return jax.vmap(step, in_axes=(1, 0, 0))(gates, norm['scale'], norm['bias'])

  def priors(self, params: Tree, members: jax.Array):
    """[K, ..., H] to the members' beliefs about the next stochastic state, [K, ..., Z]."""
    return self.belief(self.prior_outputs(params, members))

  def prior_outputs(self, params: Tree, members: jax.Array) -> jax.Array:
    """[K, ..., H] to the outputs of the members' prior networks, [K, ..., outputs]."""
    prior = lambda params, state: networks.apply(self._modules()['prior'], params, state)
    return jax.vmap(prior)(params['prior'], members)

  def clear(self, recurrent: Recurrent, first: jax.Array) -> Recurrent:
    """Zeros where a step is FIRST, so that no state passes from one episode to the next."""
    keep = lambda x: jnp.where(first.reshape(-1, *[1] * (x.ndim - 1)), 0, x).astype(x.dtype)
    return jax.tree.map(keep, recurrent)

  def observed_map(self, observation: Tree) -> jax.Array:
    """[..., observation] to its map, [..., S]; see `Latent.seen`."""
    flat = observation_lib.flatten(observation, self.codec.flat_spec)
    return networks.symexp(self.sight.pick(flat)).astype(self.dtype)

  def imagine(self, params: Tree, belief: jax.Array, before: Recurrent) -> jax.Array:
    """[..., H + Z] and the previous step to the most likely map, [..., S]."""
    if not self.sight.size:
      return belief[..., :0]
    first = jnp.zeros(belief.shape[:-1], bool)
    # All numbers of the map lie in [0, 1]: see MapSpec.
    decoded = self._decoded(params, belief, before.latent.seen, before.action, first)
    decoded = decoded.reshape(*decoded.shape[:-1], -1, self.config.levels)
    return observation_lib.most_likely(
      self.sight.pick(decoded.swapaxes(-1, -2)).swapaxes(-1, -2)
    ).astype(self.dtype)

  def _decoded(
    self,
    params: Tree,
    belief: jax.Array,
    seen: jax.Array,
    action: jax.Array,
    first: jax.Array,
  ) -> jax.Array:
    """Output of the decoder, [..., D].

    Args:
      params: of the world model.
      belief: [..., H + Z] of this step.
      seen: [..., S] of the previous step; unread where this step is FIRST.
      action: [..., A] float32, the encoded action of the previous step; likewise.
      first: [...] bool, whether this step is FIRST.
    """
    decoded = self._apply(params, 'decoder', belief)
    if not self.sight.size:
      return decoded
    follows = ~first[..., None]
    cells = self.sight.cells(seen.astype(self.dtype)) * follows[..., None]
    cause = jnp.concatenate([belief, (action * follows).astype(self.dtype)], axis=-1)
    change = self._apply(params, 'change', cause, cells)
    change = change.reshape(*change.shape[:-2], -1)
    rest = jnp.zeros((*change.shape[:-1], decoded.shape[-1] - change.shape[-1]), change.dtype)
    return decoded + jnp.concatenate([change, rest], axis=-1)

  def observe(
    self,
    params: Tree,
    recurrent: Recurrent,
    embedded: jax.Array,
    seen: jax.Array,
    first: jax.Array,
    noise: jax.Array | None,
  ) -> tuple[Latent, jax.Array, Any]:
    """One step: [B, ...] to the latent, the members' states [K, B, H] and the posterior belief.

    Args:
      params: of the world model.
      recurrent: carried from the previous step.
      embedded: [B, features] of the observation, from `embed`.
      seen: [B, S] of the observation, from `observed_map`.
      first: [B] bool, whether the step is FIRST.
      noise: [B, ...] of `noise`, or None for the mode.
    """
    matrices, rest = self._step_params(params)
    multiply = lambda name, x: x @ matrices[name].astype(x.dtype)
    inputs = (self._hoisted(params, embedded), seen, first, noise)
    return self._observe(multiply, rest, recurrent, inputs)

  def _hoisted(self, params: Tree, embedded: jax.Array) -> jax.Array:
    """[..., hidden], the observation's term in the posterior's hidden layer, before its norm."""
    kernel = params['posterior']['Dense_0']['kernel'][self.config.deterministic_size :]
    return embedded @ kernel.astype(self.dtype)

  def _step_params(self, params: Tree) -> tuple[dict[str, jax.Array], Tree]:
    """Parameters of `_observe`: its matrices, and all others."""
    posterior = params['posterior']
    matrices = {
      'transition': self._wide(params),
      'posterior': posterior['Dense_0']['kernel'][: self.config.deterministic_size],
      'belief': posterior['Dense_1']['kernel'],
    }
    rest = {
      'transition': params['transition']['LayerNorm_0'],
      'posterior': posterior['LayerNorm_0'],
      'belief': posterior['Dense_1']['bias'],
    }
    return matrices, rest

  def _observe(
    self, multiply: recurrence.Multiply, rest: Tree, recurrent: Recurrent, inputs: tuple[Any, ...]
  ) -> tuple[Latent, jax.Array, Any]:
    """`observe`, with a `multiply` and the other parameters: see `recurrence.scan`."""
    hoisted, seen, first, noise = inputs
    recurrent = self.clear(recurrent, first)
    gates = multiply('transition', self._cause(recurrent))
    members = self._step(rest['transition'], gates, recurrent)
    deterministic = jnp.mean(members, axis=0, dtype=jnp.float32).astype(self.dtype)
    hidden = kernels.normalise(multiply('posterior', deterministic) + hoisted, **rest['posterior'])
    hidden = kernels.silu(hidden.astype(self.dtype))
    belief = self.belief(multiply('belief', hidden) + rest['belief'].astype(self.dtype))
    stochastic = belief.mode() if noise is None else belief.sample(noise)
    return Latent(deterministic, stochastic.astype(self.dtype), seen), members, belief

  def noise(self, key: chex.PRNGKey) -> jax.Array:
    """Noise for one latent; see `distributions.LATENTS`."""
    return self.latent_type.noise(key, self.config.stochastic_size, self.config.classes)

  @property
  def _reward_cause_size(self) -> int:
    return self.sight.view_size + self.action_size if self.sight.size else 0

  def reward(
    self, params: Tree, belief: jax.Array, seen: jax.Array, action: jax.Array
  ) -> distributions.TwoHot:
    """The distribution of the reward that arrived at a step.

    Args:
      params: of the world model.
      belief: [..., H + Z] of this step.
      seen: [..., S] of the previous step.
      action: [..., A] float32, the encoded action of the previous step.
    """
    if self.sight.size:
      belief = jnp.concatenate([belief, self.sight.view(seen), action.astype(self.dtype)], axis=-1)
    return distributions.TwoHot.from_logits(
      self._apply(params, 'reward', belief), self.config.bin_limit
    )

  def discount(self, params: Tree, belief: jax.Array) -> jax.Array:
    """[..., H + Z] to [...] float32, the probability that the episode continues."""
    return jax.nn.sigmoid(self._apply(params, 'continue', belief)[..., 0].astype(jnp.float32))

  def action_mask(self, params: Tree, belief: jax.Array) -> jax.Array:
    """[..., H + Z] to [..., A] bool, actions predicted to be legal; without a mask, all."""
    if not self.has_mask:
      return jnp.ones((*belief.shape[:-1], self.action_size), bool)
    return self._apply(params, 'mask', belief) > 0

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
    embedded = self.embed(params, sequence.observation)
    seen = self.observed_map(sequence.observation)
    noise = jax.vmap(
      lambda key: jax.vmap(self.noise)(jax.random.split(key, num_steps)), out_axes=1
    )(keys)
    action = self.encode_action(sequence.action)

    def step(multiply, rest, recurrent, inputs):
      *inputs, action = inputs
      latent, members, belief = self._observe(multiply, rest, recurrent, inputs)
      return Recurrent(latent, action), (latent, members, belief)

    initial = self.initial(first.shape[1])
    if self.config.stored_state:
      initial = jax.tree.map(lambda x, like: x.astype(like.dtype), sequence.initial_state, initial)
    inputs = (self._hoisted(params, embedded), seen, first, noise, action)
    _, (latent, members, belief) = recurrence.scan(
      step, min(UNROLL, num_steps), *self._step_params(params), initial, inputs
    )
    priors = self.priors(params, jnp.swapaxes(members, 0, 1))  # outside of the recurrence
    return Posterior(latent, priors.moments(), first), belief, priors

  def decode(
    self, params: Tree, belief: jax.Array, seen: jax.Array, action: jax.Array, first: jax.Array
  ) -> Tree:
    """The most likely observation, [..., *shape] float32 and without a mask; see `Codec.decode`.

    Args:
      params: of the world model.
      belief: [..., H + Z] of this step.
      seen: [..., S] of the previous step.
      action: [..., A] float32, the encoded action of the previous step.
      first: [...] bool, steps without a previous step.
    """
    decoded = self._decoded(params, belief, seen, action, first)
    return self.codec.decode(decoded.astype(jnp.float32))

  def loss(
    self, params: Tree, keys: jax.Array, sequence: experience.Sequence
  ) -> tuple[jax.Array, tuple[Posterior, jax.Array, dict[str, jax.Array]]]:
    """Negative evidence bound of real sequences, in float32.

      reconstruction + reward_scale reward + continue + mask
        + mean_k m_k [ b_dyn KL(sg q || p_k) + b_rep max(free, KL(q || sg p_k)) ]

    with m_k the bootstrap mask of (member, sequence), which the sequence's identity seeds, so that
    it is the same in every replay. No transition leads to a FIRST step, so its reward is not
    learned.

    Args:
      params: of the world model.
      keys: [B] one for each sequence.
      sequence: [T, B, ...].

    Returns:
      The loss [], and (Posterior, predicted rewards [T, B], metrics).
    """
    config = self.config
    posterior, belief, priors = self.infer(params, keys, sequence)
    latents = posterior.latent.belief

    before = lambda initial, x: jnp.concatenate([initial[None].astype(x.dtype), x[:-1]])
    seen_before = before(sequence.initial_state.latent.seen, posterior.latent.seen)
    action_before = before(sequence.initial_state.action, self.encode_action(sequence.action))
    decoded = self._decoded(params, latents, seen_before, action_before, posterior.first)
    flat = observation_lib.flatten(sequence.observation, self.codec.flat_spec)
    _, *images = self.codec.encode(sequence.observation)
    reconstruction = self.codec.loss(decoded.astype(jnp.float32), flat, images)
    rewards = self.reward(params, latents, seen_before, action_before)
    reward = -rewards.log_prob(sequence.reward)
    reward = jnp.where(posterior.first, 0.0, reward)
    continues, mask = self._heads_loss(params, latents, sequence)
    dynamics_kl, kl = self._kl(belief, priors, sequence.identity)
    loss = jnp.mean(reconstruction + config.reward_scale * reward + continues + mask + kl)
    metrics = {
      'loss': loss,
      'reconstruction': reconstruction.mean(),
      'reward': reward.mean(),
      'continue': continues.mean(),
      'mask': mask.mean(),
      'kl': dynamics_kl.mean(),
      # A mean over all steps, since devices average it without their counts of other than FIRST.
      'kl_after_first': jnp.where(posterior.first, 0.0, dynamics_kl).mean(),
    }
    return loss, (*jax.lax.stop_gradient((posterior, rewards.mean())), metrics)

  def _heads_loss(
    self, params: Tree, features: jax.Array, sequence: experience.Sequence
  ) -> tuple[jax.Array, jax.Array]:
    """Losses [T, B] of the continue and mask heads at [T, B, H + Z] latents."""
    logits = self._apply(params, 'continue', features)[..., 0].astype(jnp.float32)
    continues = jax.nn.softplus(logits) - sequence.discount * logits
    mask = jnp.zeros_like(continues)
    legal_actions = observation_lib.action_mask(sequence.observation)
    if legal_actions is not None:
      logits = self._apply(params, 'mask', features).astype(jnp.float32)
      legal = legal_actions.astype(jnp.float32)
      mask = jnp.sum(jax.nn.softplus(logits) - legal * logits, axis=-1)
    return continues, mask

  def _kl(self, belief: Any, priors: Any, identity: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The dynamics' divergence [K, T, B], and the loss [T, B] of both divergences.

    Members learn from their own share of the sequences: see `bootstrap_mask`.
    """
    config, stop = self.config, jax.lax.stop_gradient
    dynamics_kl = stop(belief).kl(priors)
    representation_kl = jnp.maximum(config.free_nats, belief.kl(stop(priors)))
    learns = bootstrap_mask(identity, config.ensemble_size, config.bootstrap_share)
    loss = config.dynamics_scale * dynamics_kl + config.representation_scale * representation_kl
    return dynamics_kl, jnp.mean(learns[:, None] * loss, axis=0)


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
