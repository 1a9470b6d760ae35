"""Novelty: disagreement of the ensemble about a step, which falls as the model learns.

All arithmetic is float32: in bfloat16, rounding would dominate variances.
"""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import sockets

Tree = Any
NAME = 'novelty'

Moments = tuple[tuple[jax.Array, jax.Array, float], ...]
"""Predictions of K members in groups (latents, changes of numbers).

Each group has means and variances, [K, ..., F] float32, and the square of a usual difference: see
`information_gain`.
"""


@dataclasses.dataclass(frozen=True)
class Novelty(sockets.Reward):
  """The reward of novelty: how much the members learn from a step. An explorer maximises it."""

  name = NAME
  explores = True
  is_centred = True

  @classmethod
  def weight(cls, config: dreamer_config.DreamerConfig) -> float:
    """See `Reward.weight`; one member has no novelty."""
    return config.novelty_scale if config.ensemble_size > 1 else 0.0

  def metrics(self, params: Tree, replayed: Any, rewards: jax.Array) -> sockets.Metrics:
    """See `Reward.metrics`; the learner reports novelty also where it is no reward."""
    return {}


def clean_novelty(means: jax.Array, variances: jax.Array) -> jax.Array:
  """Disagreement of the ensemble beyond the predicted noise.

    novelty = sum_F relu( Var_K[means] - Mean_K[variances] )

  Args:
    means: [K, ..., F] predicted means, of the next latent or of changes of numbers.
    variances: [K, ..., F] predicted variances, in units of means^2.

  Returns:
    [...] float32 novelty; zero where the members agree.
  """
  chex.assert_equal_shape([means, variances])
  means, variances = means.astype(jnp.float32), variances.astype(jnp.float32)
  disagreement = jnp.var(means, axis=0)
  noise = jnp.mean(variances, axis=0)
  return jnp.sum(jax.nn.relu(disagreement - noise), axis=-1)


def information_gain(means: jax.Array, variances: jax.Array, usual: float = 0.0) -> jax.Array:
  """Expected information gain about the members from observing the next latent.

    novelty = 1/2 sum_F log( 1 + Var_K[means] / ( Mean_K[variances] + usual ) )

  Positive whenever members disagree; noise that all members predict divides out.

  Args:
    means: [K, ..., F] predicted means, of the next latent or of changes of numbers.
    variances: [K, ..., F] predicted variances, in units of means^2.
    usual: in the same units, the square of differences that count as noise.

  Returns:
    [...] float32 novelty, nats.
  """
  chex.assert_equal_shape([means, variances])
  if len(means) == 1:  # no disagreement; saves the logarithms of 1
    return jnp.zeros(means.shape[1:-1], jnp.float32)
  means, variances = means.astype(jnp.float32), variances.astype(jnp.float32)
  noise = jnp.mean(variances, axis=0) + (usual + 1e-6)
  return 0.5 * jnp.sum(jnp.log1p(jnp.var(means, axis=0) / noise), axis=-1)


NOVELTIES = {
  'clean': lambda means, variances, _=0.0: clean_novelty(means, variances),
  'information_gain': information_gain,
}


def novelty_of(kind: str, moments: Moments) -> jax.Array:
  """Novelty, [...] float32, by the measure `kind` of NOVELTIES, summed over groups of predictions."""
  first, *others = (NOVELTIES[kind](*group) for group in moments)
  return sum(others, first)
