"""Returns and advantages; the one place where gamma meets discount."""

import chex
import jax
import jax.numpy as jnp


def lambda_returns(
  reward_t: jax.Array,
  discount_t: jax.Array,
  value_t: jax.Array,
  *,
  gamma: float,
  lambda_: float,
  bootstrap_t: jax.Array | None = None,
) -> jax.Array:
  """The lambda-return of each row but the last.

    G_t = r_{t+1} + gamma d_{t+1} ( (1 - lambda) v_{t+1} + lambda G_{t+1} ),    G_T = v_T

  Sutton and Barto (2018), equation 12.18 in its recursive form.

  Args:
    reward_t: [T, ...] float32, reward that arrived at row t; row 0 is unread.
    discount_t: [T, ...] float32, the environment's discount at row t; row 0 is unread.
    value_t: [T, ...] float32, value of row t.
    gamma: the agent's discount factor.
    lambda_: 0 trusts the next value, 1 only the last one.
    bootstrap_t: [T, ...] bool, rows whose return *is* their value, so nothing behind them counts:
      the row at a dream's horizon, or the last row of an episode within a sequence.

  Returns:
    [T - 1, ...] float32.
  """
  chex.assert_equal_shape([reward_t, discount_t, value_t])
  if bootstrap_t is None:
    bootstrap_t = jnp.zeros(value_t.shape, bool)

  def step(return_t, row):
    reward, discount, value, bootstrap = row
    return_t = jnp.where(bootstrap, value, return_t)
    return_tm1 = reward + gamma * discount * ((1 - lambda_) * value + lambda_ * return_t)
    return return_tm1, return_tm1

  rows = jax.tree.map(lambda x: x[1:], (reward_t, discount_t, value_t, bootstrap_t))
  _, returns = jax.lax.scan(step, value_t[-1], rows, reverse=True)
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
  """GAE of each row but the last, and the lambda-return that the value should be.

    A_t = G_t - v_t = sum_k (gamma lambda)^k delta_{t+k},  delta_t = r_{t+1} + gamma d_{t+1} v_{t+1} - v_t

  Schulman et al. (2016), equation 16; the sum ends with the row before LAST, whose value counts in
  full where the episode was cut off (d = 1) and not at all where it terminated (d = 0).

  Args:
    reward_t: [T, ...] float32; row 0 is unread.
    discount_t: [T, ...] float32; row 0 is unread.
    value_t: [T, ...] float32.
    last_t: [T, ...] bool, rows that end an episode; what is returned for them means nothing.
    gamma: the agent's discount factor.
    lambda_: 0 for the one-step error, 1 for the whole return.

  Returns:
    [T - 1, ...] advantages and [T - 1, ...] returns, float32.
  """
  return_ = lambda_returns(
    reward_t, discount_t, value_t, gamma=gamma, lambda_=lambda_, bootstrap_t=last_t
  )
  return return_ - value_t[:-1], return_
