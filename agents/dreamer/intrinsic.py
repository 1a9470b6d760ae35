"""Intrinsic motivation: novelty, competence on two timescales, boredom and the horizon.

All arithmetic is float32: in bfloat16, rounding would dominate variances and slow averages.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents.dreamer import config as dreamer_config

Moments = tuple[tuple[jax.Array, jax.Array], ...]
"""Predictions in groups: means and variances of each, [K, ..., F] float32."""


class IntrinsicState(NamedTuple):
  """Running statistics of novelty; equal on all replicas.

  Attributes:
    fast: [] float32, biased fast average of novelty over updates.
    slow: [] float32, biased slow average.
    largest: [] float32, largest slow average since the end of warm-up.
    boredom: [] float32 in [0, 1].
    num_updates: [] int32.
  """

  fast: jax.Array
  slow: jax.Array
  largest: jax.Array
  boredom: jax.Array
  num_updates: jax.Array


class Motivation(NamedTuple):
  """Averages of novelty, and what they imply for the next update.

  Attributes:
    horizon: [] int32, imagination horizon.
    novelty_fast: [] float32, the fast average of novelty.
    novelty_mean: [] float32, the slow average of novelty.
    novelty_scale: [] float32, the largest slow average, which divides novelty to give the intrinsic
      reward. Divided by the current average, the reward would stay when nothing is left to learn.
    competence: [] float32, relative learning progress.
    boredom: [] float32.
  """

  horizon: jax.Array
  novelty_fast: jax.Array
  novelty_mean: jax.Array
  novelty_scale: jax.Array
  competence: jax.Array
  boredom: jax.Array


def initial() -> IntrinsicState:
  """The state before any update."""
  return IntrinsicState(
    fast=jnp.zeros((), jnp.float32),
    slow=jnp.zeros((), jnp.float32),
    largest=jnp.zeros((), jnp.float32),
    boredom=jnp.zeros((), jnp.float32),
    num_updates=jnp.zeros((), jnp.int32),
  )


def clean_novelty(means: jax.Array, variances: jax.Array) -> jax.Array:
  """Disagreement of the ensemble beyond the predicted noise.

    novelty = sum_F relu( Var_K[means] - Mean_K[variances] )

  Args:
    means: [K, ..., F] predicted means of the next latent.
    variances: [K, ..., F] predicted variances, in units of means^2.

  Returns:
    [...] float32 novelty; zero where the members agree.
  """
  chex.assert_equal_shape([means, variances])
  means, variances = means.astype(jnp.float32), variances.astype(jnp.float32)
  disagreement = jnp.var(means, axis=0)
  noise = jnp.mean(variances, axis=0)
  return jnp.sum(jax.nn.relu(disagreement - noise), axis=-1)


def information_gain(means: jax.Array, variances: jax.Array) -> jax.Array:
  """Expected information gain about the members from observing the next latent.

    novelty = 1/2 sum_F log( 1 + Var_K[means] / Mean_K[variances] )

  Positive whenever members disagree; noise that all members predict divides out.

  Args:
    means: [K, ..., F] predicted means of the next latent.
    variances: [K, ..., F] predicted variances, in units of means^2.

  Returns:
    [...] float32 novelty, nats.
  """
  chex.assert_equal_shape([means, variances])
  if len(means) == 1:  # no disagreement; saves the logarithms of 1
    return jnp.zeros(means.shape[1:-1], jnp.float32)
  means, variances = means.astype(jnp.float32), variances.astype(jnp.float32)
  noise = jnp.mean(variances, axis=0) + 1e-6
  return 0.5 * jnp.sum(jnp.log1p(jnp.var(means, axis=0) / noise), axis=-1)


def prediction_error(means: jax.Array, variances: jax.Array) -> jax.Array:
  """Expected squared error of the ensemble's prediction; a baseline.

    novelty = sum_F ( Mean_K[variances] + Var_K[means] )

  It is the variance of the members' mixture. Noise keeps it high even under a perfect model, so it
  attracts an agent to noise: Burda et al. (2018), "Large-scale study of curiosity-driven learning",
  section 4.2.

  Args:
    means: [K, ..., F] predicted means of the next latent.
    variances: [K, ..., F] predicted variances, in units of means^2.

  Returns:
    [...] float32 novelty, in units of means^2.
  """
  chex.assert_equal_shape([means, variances])
  means, variances = means.astype(jnp.float32), variances.astype(jnp.float32)
  return jnp.sum(jnp.mean(variances, axis=0) + jnp.var(means, axis=0), axis=-1)


NOVELTIES = {
  'clean': clean_novelty,
  'information_gain': information_gain,
  'prediction_error': prediction_error,
}


def novelty_of(kind: str, moments: Moments) -> jax.Array:
  """[...] float32 novelty of a `kind` in NOVELTIES, summed over groups of predictions."""
  first, *others = (NOVELTIES[kind](*group) for group in moments)
  return sum(others, first)


def update(
  state: IntrinsicState,
  novelty: jax.Array,
  config: dreamer_config.DreamerConfig,
  *,
  trained: jax.Array | bool = True,
) -> tuple[IntrinsicState, Motivation]:
  """Updates competence, boredom and horizon with the novelty of one batch.

    C <- (1 - alpha) C + alpha novelty, corrected by 1 - (1 - alpha)^num_updates  (as in Adam)
    competence = relu( (C_slow - C_fast) / C_slow )
    boredom <- clip( boredom + 0.1 if competence < threshold else boredom - 0.2, 0, 1)
    horizon = round( H_max - boredom (H_max - H_min) )

  Without the correction the fast average would lead during the first updates, so that competence
  would be 0 and boredom would saturate.

  Args:
    state: before the batch.
    novelty: [] float32, mean over the batch, equal on all replicas.
    config: rates, threshold and bounds.
    trained: [] bool, whether warm-up is over. Before, the maximum stays 0, since the novelty of an
      untrained model is large everywhere.

  Returns:
    The next state, and the averages with what they imply.
  """
  novelty = novelty.astype(jnp.float32)
  num_updates = state.num_updates + 1
  fast = state.fast + dreamer_config.COMPETENCE_FAST * (novelty - state.fast)
  slow = state.slow + dreamer_config.COMPETENCE_SLOW * (novelty - state.slow)
  # expm1 and log1p: 1 - (1 - 0.005)^1 loses digits in float32.
  correct = lambda value, rate: value / -jnp.expm1(num_updates * jnp.log1p(-jnp.float32(rate)))
  corrected_fast = correct(fast, dreamer_config.COMPETENCE_FAST)
  corrected_slow = correct(slow, dreamer_config.COMPETENCE_SLOW)
  competence = jax.nn.relu((corrected_slow - corrected_fast) / (corrected_slow + 1e-8))
  change = jnp.where(
    competence < config.boredom_threshold, config.boredom_rise, -config.boredom_fall
  )
  boredom = jnp.clip(state.boredom + change, 0.0, 1.0)
  horizon = jnp.round(config.horizon_max - boredom * (config.horizon_max - config.horizon_min))
  largest = jnp.where(trained, jnp.maximum(state.largest, corrected_slow), 0.0)
  return IntrinsicState(fast, slow, largest, boredom, num_updates), Motivation(
    horizon.astype(jnp.int32), corrected_fast, corrected_slow, largest, competence, boredom
  )
