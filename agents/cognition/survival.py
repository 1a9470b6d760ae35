"""Survival: the reduction of the lack of vitals, such as food."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import rssm as rssm_lib
from hephaestus.agents.dreamer import sockets

Tree = Any
NAME = 'survival'


@dataclasses.dataclass(frozen=True)
class Survival(sockets.Reward):
  """The reward of survival; see `reduction`.

  Raises:
    ValueError: the observation has no vitals, or the environment's reward already depends on them.
  """

  name = NAME

  def __post_init__(self):
    _ = self.vitals  # so errors are raised here

  @functools.cached_property
  def vitals(self) -> observation_lib.Vitals:
    networks = self.rssm.networks
    given = f'agent.survival_scale={networks.config.survival_scale:g}'
    found = observation_lib.vitals(networks.codec.flat_spec)
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

  def read(self, numbers: jax.Array) -> jax.Array:
    """The vitals among numbers [..., F], [..., V] in the observation's units."""
    return self.rssm.networks.numbers.pick(numbers, self.vitals.indices)

  def loss(
    self,
    params: Tree,
    keys: jax.Array,
    replayed: rssm_lib.Step,
    sequence: experience.Sequence,
    expected: jax.Array,
  ) -> tuple[jax.Array | float, sockets.Metrics]:
    """See `Reward.loss`; there is nothing to learn, and the error of decoded vitals is a metric."""
    error = jnp.abs(self.read(expected) - self.read(replayed.latent.numbers)).mean(-1)
    return 0.0, {'intrinsic/vital_error': jnp.where(replayed.first, 0.0, error).mean()}

  def reward(self, params: Tree, before: rssm_lib.Step, after: rssm_lib.Step) -> jax.Array:
    return reduction(
      self.read(before.latent.numbers),
      self.read(after.latent.numbers),
      after.discount,
      self.vitals.set_points,
    )

  def metrics(self, params: Tree, replayed: rssm_lib.Step, rewards: jax.Array) -> sockets.Metrics:
    """Means over replayed steps of the reward and of each vital."""
    means = jnp.mean(self.read(replayed.latent.numbers), axis=(0, 1))
    vitals = {f'vital_{name}': means[i] for i, name in enumerate(self.vitals.names)}
    return {self.name: rewards.mean(), **vitals}


def lack(vitals: jax.Array, set_points: chex.Array) -> jax.Array:
  """The lack of vitals (in the paper, the drive D): how far they lie below their set-points.

    D = ( sum_V max(0, h* - h)^4 )^(1/3)

  Keramati and Gutkin (2014), "Homeostatic reinforcement learning for integrating reward collection and
  physiological stability", equation 1. A lack twice as large counts two and a half times.

  Args:
    vitals: [..., V] float32, h.
    set_points: [V] float32, h*, values at which nothing is lacking.

  Returns:
    [...] float32, D; 0 where no vital lies below its set-point.
  """
  return jnp.cbrt(jnp.sum(jnp.maximum(set_points - vitals, 0.0) ** 4, axis=-1))


def reduction(
  before: jax.Array, after: jax.Array, discount: jax.Array, set_points: chex.Array
) -> jax.Array:
  """The reward of survival that arrives at a step: the reduction of the lack of vitals D.

    r_t+1 = D_t - ( d_t+1 D_t+1 + (1 - d_t+1) D(0) )

  So a step that restores vitals is rewarded, a step that loses some is a cost, and a termination costs
  as much as if all vitals fell to 0. D is `lack`.

  Args:
    before: [..., V] float32, vitals of the step before, observed or imagined.
    after: [..., V] float32, vitals of the step.
    discount: [...] float32, d, which arrived at the step: 0 at termination; in imagination the
      probability that the episode continues.
    set_points: [V] float32, values at which nothing is lacking.

  Returns:
    [...] float32.
  """
  now, worst = lack(after, set_points), lack(jnp.zeros_like(set_points), set_points)
  chex.assert_equal_shape([now, discount])
  return lack(before, set_points) - (discount * now + (1.0 - discount) * worst)
