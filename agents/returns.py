"""Lambda-returns, advantages and their statistics; only here is gamma multiplied with `discount`."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

Total = Callable[[jax.Array], jax.Array]
"""Function from [...] to []: sums all elements, then takes the sum, or else the mean, over devices."""


def lambda_returns(
  reward_t: jax.Array,
  discount_t: jax.Array,
  value_t: jax.Array,
  *,
  gamma: float,
  lambda_: float,
  bootstrap_t: jax.Array | None = None,
) -> jax.Array:
  """The lambda-return of each step but the last.

    G_t = r_{t+1} + gamma d_{t+1} ( (1 - lambda) v_{t+1} + lambda G_{t+1} ),    G_{T-1} = v_{T-1}

  Sutton and Barto (2018), equation 12.18 in its recursive form.

  Args:
    reward_t: [T, ...] float32, reward that arrived at step t; step 0 is unread.
    discount_t: [T, ...] float32, the environment's discount at step t; step 0 is unread.
    value_t: [T, ...] float32, value of step t.
    gamma: the agent's discount factor.
    lambda_: 0 bootstraps from the next value, 1 only from the last one (or at a `bootstrap_t`).
    bootstrap_t: [T, ...] bool, steps whose return *is* their value, so later steps do not count:
      the step at the imagination horizon, or the last step of an episode within a sequence.

  Returns:
    [T - 1, ...] float32, the returns G of steps 0 to T - 2.
  """
  chex.assert_equal_shape([reward_t, discount_t, value_t])
  if bootstrap_t is None:
    bootstrap_t = jnp.zeros(value_t.shape, bool)

  def step(return_t, inputs):
    reward, discount, value, bootstrap = inputs
    return_t = jnp.where(bootstrap, value, return_t)
    return_tm1 = reward + gamma * discount * ((1 - lambda_) * value + lambda_ * return_t)
    return return_tm1, return_tm1

  inputs = jax.tree.map(lambda x: x[1:], (reward_t, discount_t, value_t, bootstrap_t))
  # Unrolled, since a GPU starts a program for each turn.
  _, returns = jax.lax.scan(step, value_t[-1], inputs, reverse=True, unroll=8)
  return returns


def generalised_advantages(
  reward_t: jax.Array,
  discount_t: jax.Array,
  value_t: jax.Array,
  last_t: jax.Array,
  *,
  gamma: float,
  lambda_: float,
) -> tuple[jax.Array, jax.Array]:
  """GAE of each step but the last, and the lambda-return, the target of the value.

    A_t = G_t - v_t = sum_k (gamma lambda)^k delta_{t+k}
    delta_t = r_{t+1} + gamma d_{t+1} v_{t+1} - v_t

  Schulman et al. (2016), equation 16. The sum ends with the step before LAST. The value at LAST
  counts in full in a truncated episode (d = 1) and not at all in a terminated one (d = 0).

  Arguments are as of `lambda_returns`; `last_t`, [T, ...] bool, are the steps that end an episode, whose
  advantages and returns are meaningless.

  Returns:
    [T - 1, ...] advantages and [T - 1, ...] returns, float32.
  """
  return_ = lambda_returns(
    reward_t, discount_t, value_t, gamma=gamma, lambda_=lambda_, bootstrap_t=last_t
  )
  return return_ - value_t[:-1], return_


class Average(NamedTuple):
  """State of an exponential moving average; see `update_average`."""

  value: jax.Array  # [] float32, the average, biased towards 0, from which it began
  num_updates: jax.Array  # [] int32, how many numbers were added


def no_average() -> Average:
  """The state of an average before any number is added."""
  return Average(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


def update_average(average: Average, x: jax.Array, *, rate: float) -> tuple[Average, jax.Array]:
  """Adds a number [] float32, of weight `rate` in (0, 1], to an average; NaN changes nothing.

  Returns the next state, and the average [] float32, its bias towards 0 corrected as in Adam; before any
  number it is 0.
  """
  counts = ~jnp.isnan(x)
  value = average.value + jnp.where(counts, rate * (x - average.value), 0.0)
  average = Average(value, average.num_updates + counts)
  return average, value / jnp.maximum(1 - (1 - rate) ** average.num_updates, rate)


def percentile_range(return_: jax.Array) -> jax.Array:
  """Range from the 5th to the 95th percentile of [...] returns, [] float32.

  Hafner et al. (2023), equation 7. NaN leaves a return out; if all are left out, the result is NaN.
  """
  low, high = jnp.nanpercentile(return_, jnp.array([5.0, 95.0]))
  return high - low


def standardise(x: jax.Array, weight: jax.Array, total: Total) -> jax.Array:
  """Shifts and scales a sample, [...] float32, to mean 0 and standard deviation 1.

  The weights of its elements, [...] float32, are scaled so that `total(weight)` is 1.
  """
  centred = x - total(weight * x)
  deviation = jnp.sqrt(total(weight * jnp.square(centred)))
  return centred / (deviation + 1e-8)


def explained_variance(
  return_: jax.Array, value: jax.Array, weight: jax.Array, total: Total
) -> jax.Array:
  """Explained variance of a critic: 1 if it is perfect, 0 if it always predicts the mean return.

    1 - Var[G - v] / Var[G], [] float32

  of returns G and values v, [...] float32 each. The scale of the weights of steps does not matter.
  """
  weight = weight / jnp.maximum(total(weight), 1e-8)

  def variance(x: jax.Array) -> jax.Array:
    return total(weight * jnp.square(x - total(weight * x)))

  return 1.0 - variance(return_ - value) / jnp.maximum(variance(return_), 1e-8)


def correlation(
  predicted: jax.Array, real: jax.Array, counts: jax.Array, total: Total
) -> jax.Array:
  """Pearson's correlation of predictions with observed values, [...] float32 each, at steps that count.

  [] float32. It is 1 where the observed values are constant, since there is nothing to predict; 0 where
  only the predictions are constant.
  """
  weight = counts / jnp.maximum(total(counts.astype(jnp.float32)), 1e-8)

  def centred(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sample less its mean, its variance, and whether that exceeds rounding errors."""
    left = x - total(weight * x)
    variance = total(weight * jnp.square(left))
    return left, variance, variance > 1e-10 * total(weight * jnp.square(x))

  predicted, predicted_variance, differs = centred(predicted)
  real, real_variance, varies = centred(real)
  scale = jnp.where(differs & varies, jnp.sqrt(predicted_variance) * jnp.sqrt(real_variance), 1.0)
  result = jnp.where(differs, total(weight * predicted * real) / scale, 0.0)
  return jnp.where(varies, result, 1.0)
