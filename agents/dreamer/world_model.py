"""The world model: an RSSM with heads for reward, continuation and legal actions, and its loss."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import dm_env
import jax
import jax.numpy as jnp
from dm_env import specs

from hephaestus.agents import distributions, experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import empowerment as empowerment_lib
from hephaestus.agents.dreamer import intrinsic, modules
from hephaestus.agents.dreamer import memory as memory_lib
from hephaestus.agents.dreamer import numbers as numbers_lib
from hephaestus.agents.dreamer import rssm as rssm_lib

Tree = Any
LAST = int(dm_env.StepType.LAST)


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

  @functools.cached_property
  def networks(self) -> modules.Networks:
    return modules.Networks(self.config, self.observation_spec, self.action_spec)

  @functools.cached_property
  def rssm(self) -> rssm_lib.RSSM:
    return rssm_lib.RSSM(self.networks)

  @functools.cached_property
  def vitals(self) -> observation_lib.Vitals | None:
    """Vitals that the agent keeps up; None without survival.

    Raises:
      ValueError: survival without vitals, or the environment's reward already pays for them.
    """
    if not self.config.survival_scale:
      return None
    given = f'agent.survival_scale={self.config.survival_scale:g}'
    found = observation_lib.vitals(self.networks.codec.flat_spec)
    if found is None:
      raise ValueError(
        f'{given}: this environment names no vitals among its numbers (environment.VitalsSpec); '
        'set agent.survival_scale=0'
      )
    if found.are_paid:
      raise ValueError(
        f'{given}: the reward of this environment already depends on its vitals '
        f'({", ".join(found.names)}), which would count twice; set agent.survival_scale=0'
      )
    return found

  def read_vitals(self, numbers: jax.Array) -> Any:
    """[..., F] numbers, observed or imagined, to the vitals [..., V]; None without survival."""
    if self.vitals is None:
      return None
    return self.networks.numbers.pick(numbers, self.vitals.indices)

  def survival(self, vitals: jax.Array | None, discount: jax.Array) -> jax.Array | None:
    """The reward of survival [T, ...], see `intrinsic.survival`; None without survival."""
    if self.vitals is None or vitals is None:
      return None
    return intrinsic.survival(vitals, discount, self.vitals.set_points)

  @functools.cached_property
  def empowerment(self) -> empowerment_lib.Empowerment | None:
    """None without empowerment.

    Raises:
      ValueError: empowerment with other actions than one discrete one, or without numbers.
    """
    return empowerment_lib.Empowerment(self.rssm) if self.config.empowerment_scale else None

  def empowered(self, params: Tree, features: jax.Array) -> Any:
    """[..., features] to the reward of empowerment, [...] float32; None without it."""
    return self.empowerment.reward(params, features) if self.empowerment else None

  def init(self, key: chex.PRNGKey) -> Tree:
    """Parameters, float32; those of 'prior' have a leading axis K."""
    return self.networks.init(key)

  def recall(
    self, params: Tree, observation: Tree, version: jax.Array | None = None
  ) -> tuple[jax.Array | None, memory_lib.Recall | None]:
    """[..., R] inputs of networks, and all that the memory holds; None each without a memory.

    Args:
      params: of all parts.
      observation: [..., observation].
      version: see `memory.Memory.read`.
    """
    memory = self.networks.memory
    if memory is None:
      return None, None
    found = memory.read(params[memory_lib.NAME], memory.key(observation), version)
    return memory.recalled(found), found

  # Heads.

  def reward(self, params: Tree, features: jax.Array) -> distributions.TwoHot:
    """[..., features] to the distribution of the reward that arrived at the step."""
    logits = self._head(params, 'reward', features)
    return distributions.TwoHot.from_logits(logits, self.config.bin_limit)

  def discount(self, params: Tree, features: jax.Array) -> jax.Array:
    """[..., features] to [...] float32, the probability that the episode continues."""
    return jax.nn.sigmoid(self._head(params, 'continue', features)[..., 0].astype(jnp.float32))

  def action_mask(self, params: Tree, features: jax.Array) -> jax.Array:
    """[..., features] to [..., A] bool, actions predicted to be legal; without a mask, all."""
    if not self.networks.has_mask:
      return jnp.ones((*features.shape[:-1], self.networks.actions.size), bool)
    return self._head(params, 'mask', features) > 0

  def _head(self, params: Tree, name: str, features: jax.Array) -> jax.Array:
    """[..., F] features to the [..., outputs] of a head, which reads what the step before recalled."""
    memory, numbers, transition = self.networks.split(features)
    return self.networks.apply(params, name, (memory, transition), (numbers,))

  def decode(
    self,
    params: Tree,
    latent: rssm_lib.Latent,
    previous: jax.Array,
    before: jax.Array,
    first: jax.Array,
  ) -> Tree:
    """The most likely observation, [..., *shape] float32 and without a mask.

    Args:
      params: of the world model.
      latent: [..., H] and [..., Z] of the step; its numbers are not read.
      previous: [..., C], inputs of the transition to the step.
      before: [..., F] numbers of the previous step.
      first: [...] bool, steps without a previous step.
    """
    numbers, statistics = self.networks.numbers, params[modules.STATISTICS]
    outputs, images = self.rssm.decoder(params, latent, previous)
    predicted = numbers.predict(outputs, before, ~first, statistics)
    flat = numbers.to_flat(numbers.expected(predicted, statistics))
    return self.networks.codec.assemble(flat, images)

  # The loss.

  def loss(
    self,
    params: Tree,
    keys: jax.Array,
    sequence: experience.Sequence,
    value_loss: Callable[[jax.Array], jax.Array] = lambda features: jnp.zeros(()),
    recalled: jax.Array | None = None,
  ) -> tuple[jax.Array, tuple[rssm_lib.Posterior, jax.Array, Tree, dict[str, jax.Array]]]:
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
      value_loss: of the [T, B, F] features; its gradient makes latents keep what later rewards
        depend on.
      recalled: [T, B, R] float32, from the episodic memory; None without one.

    Returns:
      The loss [], and (Posterior, predicted rewards [T, B], moments of numbers, metrics).
    """
    posterior = self.rssm.infer(params, keys, sequence, recalled)
    features = posterior.features
    reconstruction, moments, errors = self._reconstruction_loss(params, posterior, sequence)
    rewards = self.reward(params, features)
    reward = jnp.where(posterior.first, 0.0, -rewards.log_prob(sequence.reward))
    continues = self._continue_loss(params, features, sequence)
    mask = self._mask_loss(params, features, sequence)
    learns = bootstrap_mask(
      sequence.identity, self.config.ensemble_size, self.config.bootstrap_share
    )
    dynamics_kl, kl = self._kl(posterior, learns)
    change, change_moments = self._change_loss(params, posterior, sequence, learns)
    scaled_reward = self.config.reward_scale * reward
    loss = jnp.mean(reconstruction + scaled_reward + continues + mask + kl + change)
    empowerment, inverse = self._empowerment_loss(params, keys, posterior, sequence)
    loss += value_loss(features) + empowerment
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
      **(errors | inverse),
    }
    stop = jax.lax.stop_gradient
    return loss, (*stop((posterior, rewards.mean(), moments | change_moments)), metrics)

  def statistics(self, params: Tree, moments: Tree) -> Tree:
    """Parameters with the running statistics of numbers after one more batch.

    Args:
      params: of the world model.
      moments: of the batch, from `loss`, averaged over devices.
    """
    updated = self.networks.numbers.updated(params[modules.STATISTICS], moments)
    return params | {modules.STATISTICS: updated}

  def _reconstruction_loss(
    self, params: Tree, posterior: rssm_lib.Posterior, sequence: experience.Sequence
  ) -> tuple[jax.Array, Tree, dict[str, jax.Array]]:
    """Loss [T, B] of decoded observations, the moments of numbers (see `statistics`), and metrics."""
    numbers, codec = self.networks.numbers, self.networks.codec
    observed = posterior.latent.numbers
    outputs, decoded = self.rssm.decoder(params, posterior.latent, posterior.previous)
    statistics = jax.lax.stop_gradient(params[modules.STATISTICS])
    before = _numbers_before(observed, sequence)
    predicted = numbers.predict(outputs, before, ~posterior.first, statistics)
    loss, error = numbers.loss(predicted, observed, statistics)
    _, *images = codec.encode(sequence.observation)
    errors = {}
    if self.vitals is not None:
      expected = numbers.expected(predicted, statistics)
      difference = jnp.abs(self.read_vitals(expected) - self.read_vitals(observed)).mean(-1)
      errors['vital_error'] = jnp.where(posterior.first, 0.0, difference).mean()
    return loss + codec.image_loss(decoded, images), numbers.moments(observed, error), errors

  def _continue_loss(
    self, params: Tree, features: jax.Array, sequence: experience.Sequence
  ) -> jax.Array:
    """Loss [T, B] of the continue head at [T, B, F] features."""
    logits = self._head(params, 'continue', features)[..., 0].astype(jnp.float32)
    return jax.nn.softplus(logits) - sequence.discount * logits

  def _mask_loss(
    self, params: Tree, features: jax.Array, sequence: experience.Sequence
  ) -> jax.Array:
    """Loss [T, B] of the mask head at [T, B, F] features; 0 without a mask."""
    legal = observation_lib.action_mask(sequence.observation)
    if legal is None:
      return jnp.zeros(sequence.reward.shape)
    logits = self._head(params, 'mask', features).astype(jnp.float32)
    return jnp.sum(jax.nn.softplus(logits) - legal.astype(jnp.float32) * logits, axis=-1)

  def _empowerment_loss(
    self,
    params: Tree,
    keys: jax.Array,
    posterior: rssm_lib.Posterior,
    sequence: experience.Sequence,
  ) -> tuple[jax.Array | float, dict[str, jax.Array]]:
    """Loss [] of empowerment, and metrics; 0 and none without it."""
    if self.empowerment is None:
      return 0.0, {}
    keys = jax.vmap(lambda key: jax.random.fold_in(key, len(sequence.reward)))(keys)
    legal = observation_lib.action_mask(sequence.observation)
    if legal is None:
      legal = jnp.ones((*sequence.reward.shape, self.networks.actions.size), bool)
    return self.empowerment.loss(params, keys, posterior, sequence.step_type == LAST, legal)

  def _change_loss(
    self,
    params: Tree,
    posterior: rssm_lib.Posterior,
    sequence: experience.Sequence,
    learns: jax.Array,
  ) -> tuple[jax.Array, Tree]:
    """Loss [T, B] of the members' predictions of the numbers' changes, and the moment of these.

    No transition leads to a FIRST step: its loss is 0, and its moment is the statistic, which so
    stays as it is.
    """
    numbers, first = self.networks.numbers, posterior.first
    if not numbers.num_changes:
      return jnp.zeros(first.shape), {}
    statistics = jax.lax.stop_gradient(params[modules.STATISTICS])
    observed = posterior.latent.numbers
    change = numbers.change(_numbers_before(observed, sequence), observed, statistics)
    scale = jnp.sqrt(jnp.maximum(statistics['change'], numbers_lib.MIN_CHANGE_SQUARE))
    loss = posterior.priors.change.loss(change / scale)
    square = jnp.where(first[..., None], statistics['change'], jnp.square(change))
    loss = jnp.where(first, 0.0, jnp.mean(learns[:, None] * loss, axis=0))
    return loss, {'change': jnp.mean(square, axis=(0, 1))}

  def _kl(self, posterior: rssm_lib.Posterior, learns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The dynamics' divergence [K, T, B], and the loss [T, B] of both divergences."""
    config, stop = self.config, jax.lax.stop_gradient
    belief, priors = posterior.belief, posterior.priors.belief
    dynamics_kl = stop(belief).kl(priors)
    representation_kl = jnp.maximum(config.free_nats, belief.kl(stop(priors)))
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
