"""Returns: by hand, in their limits, against the forward view, and where episodes end."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from hephaestus.agents import returns

lambda_returns = jax.jit(returns.lambda_returns, static_argnames=('gamma', 'lambda_'))
UNREAD = np.nan


def column(*values):
  return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize('function', [returns.lambda_returns, lambda_returns])
def test_lambda_returns_by_hand(function):
  reward, discount = column(UNREAD, 1, 2), column(UNREAD, 1, 1)
  result = function(reward, discount, column(UNREAD, 10, 20), gamma=0.5, lambda_=0.5)
  # G_1 = 2 + 0.5 * 20 = 12;    G_0 = 1 + 0.5 * (0.5 * 10 + 0.5 * 12) = 6.5
  np.testing.assert_allclose(result, [6.5, 12.0])


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  constants=st.sampled_from([(0.5, 0.0), (0.99, 0.95), (1.0, 0.3), (0.9, 1.0)]),
)
def test_recursion_equals_the_weighted_average_of_n_step_returns(seed, constants):
  gamma, lambda_ = constants
  rng = np.random.default_rng(seed)
  reward, value = rng.normal(size=(2, 6))
  discount = rng.choice([0.0, 0.5, 1.0], size=6)
  result = lambda_returns(
    *(jnp.asarray(x, jnp.float32) for x in (reward, discount, value)), gamma=gamma, lambda_=lambda_
  )

  def n_step(t, n):
    total, factor = 0.0, 1.0
    for i in range(t + 1, t + n + 1):
      total += factor * reward[i]
      factor *= gamma * discount[i]
    return total + factor * value[t + n]

  for t in range(5):
    longest = 5 - t
    expected = lambda_ ** (longest - 1) * n_step(t, longest)
    expected += sum((1 - lambda_) * lambda_ ** (n - 1) * n_step(t, n) for n in range(1, longest))
    np.testing.assert_allclose(result[t], expected, rtol=1e-4, atol=1e-4)


def test_steps_after_a_bootstrap_step_do_not_count():
  reward, discount = column(0, 1, 2, UNREAD, UNREAD), column(1, 1, 1, UNREAD, UNREAD)
  value = column(5, 6, 7, UNREAD, UNREAD)
  bootstrap = jnp.array([False, False, True, False, False])
  options = {'gamma': 0.9, 'lambda_': 0.95}
  whole = lambda_returns(reward, discount, value, bootstrap_t=bootstrap, **options)
  cut = lambda_returns(reward[:3], discount[:3], value[:3], **options)
  np.testing.assert_array_equal(whole[:2], cut)


@pytest.mark.parametrize(
  ('discount_at_last', 'expected'),
  [
    (0.0, 3.0),  # terminated: the last reward only
    (1.0, 3.0 + 0.5 * 100.0),  # truncated: the value at LAST is bootstrapped
  ],
)
def test_termination_and_truncation(discount_at_last, expected):
  # Steps MID, LAST, FIRST, MID; the next episode's reward of 1e6 belongs to neither.
  reward, value = column(0, 3, 0, 1e6), column(7, 100, 1e5, 1e5)
  last = jnp.array([False, True, False, False])
  discount = column(1, discount_at_last, 1, 1)
  result = lambda_returns(reward, discount, value, gamma=0.5, lambda_=0.95, bootstrap_t=last)
  np.testing.assert_allclose(result[0], expected)


def test_time_is_the_first_axis_and_columns_are_independent():
  rng = np.random.default_rng(0)
  reward, discount, value = jnp.asarray(rng.uniform(size=(3, 5, 2)), jnp.float32)
  bootstrap = jnp.asarray(rng.uniform(size=(5, 2)) < 0.3)
  function = functools.partial(lambda_returns, gamma=0.9, lambda_=0.8)
  together = function(reward, discount, value, bootstrap_t=bootstrap)
  assert together.shape == (4, 2)
  for b in range(2):
    single = function(reward[:, b], discount[:, b], value[:, b], bootstrap_t=bootstrap[:, b])
    np.testing.assert_allclose(together[:, b], single, rtol=1e-6)
