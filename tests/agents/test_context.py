"""Context modules: salience pools the window of an episode, and no context is empty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import context

WINDOW, FEATURES = 3, 2


@pytest.fixture(scope='module')
def policy(make_dreamer):
  return make_dreamer('plain').actor_critic


@pytest.fixture(scope='module')
def params(make_dreamer, make_params):
  return make_params(make_dreamer('plain'))['actor_critic']


class Scored(context.Salience):
  """Salience whose scores are the novelties, in place of a network's."""

  def scores(self, params, history):
    return history.novelty


@pytest.fixture
def scored():
  return Scored(WINDOW, FEATURES, 8, jnp.float32)


def window_of(features, scores, episode):
  return context.Window(
    jnp.asarray(features, jnp.float32)[:, None],
    jnp.asarray(scores, jnp.float32)[:, None],
    jnp.asarray(episode, jnp.int32)[:, None],
  )


def pool(scored, window):
  return scored.pool({}, window, window.features[WINDOW - 1 :])[0]


def random_history(num_steps, batch, size):
  """R steps with random episode boundaries, and the window before them."""
  rng = np.random.default_rng(0)
  total = WINDOW - 1 + num_steps
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return context.Window(
    features=array(total, batch, size),
    novelty=jnp.abs(array(total, batch)),
    episode=jnp.asarray(np.cumsum(rng.uniform(size=(total, batch)) < 0.3, axis=0), jnp.int32),
  )


def test_context_is_the_mean_of_the_window_weighted_by_salience(scored):
  window = window_of([[8, 0], [0, 8], [8, 8]], np.log([1, 2, 5]), [4, 4, 4])
  np.testing.assert_allclose(pool(scored, window), [[1 + 5, 2 + 5]], rtol=1e-6)


def test_steps_of_another_episode_are_left_out(scored):
  pooled = lambda first: pool(
    scored, window_of([[first, 0], [0, 3], [3, 3]], [50.0, np.log(1), np.log(2)], [6, 7, 7])
  )
  np.testing.assert_allclose(pooled(1.0), [[2, 3]], rtol=1e-6)
  np.testing.assert_array_equal(pooled(1.0), pooled(1e6))


def test_steps_that_are_left_out_get_no_gradient(scored):
  window = window_of([[1, 0], [0, 3], [3, 3]], [5.0, 1.0, 2.0], [6, 7, 7])
  grads = jax.grad(lambda window: pool(scored, window).sum(), allow_int=True)(window)
  np.testing.assert_array_equal(grads.features[0], np.zeros((1, 2)))
  assert float(grads.novelty[0, 0]) == 0
  assert np.isfinite(grads.novelty).all() and np.abs(grads.novelty[1:]).min() > 0


def test_context_depends_on_features_and_novelty_of_every_step(policy, params):
  history = random_history(1, 1, policy.feature_size)
  history = history._replace(episode=jnp.zeros((WINDOW, 1), jnp.int32))
  pooled = jax.jit(lambda history: policy.context.pool(params, history, history.features[-1:]))
  before = pooled(history)
  for step in range(WINDOW):
    by_features = pooled(history._replace(features=history.features.at[step].add(1)))
    by_novelty = pooled(history._replace(novelty=history.novelty.at[step].add(10)))
    assert np.abs(by_features - before).max() > 1e-3
    assert np.abs(by_novelty - before).max() > 1e-3


def test_advancing_step_by_step_pools_as_a_whole_sequence(policy, params):
  """Also across the beginnings of episodes, from a memory without any step."""
  rng = np.random.default_rng(0)
  features = jnp.asarray(rng.normal(size=(7, 4, policy.feature_size)), jnp.float32)
  novelty = jnp.asarray(rng.uniform(size=(7, 4)), jnp.float32)
  begins = jnp.asarray(rng.uniform(size=(7, 4)) < 0.3).at[0].set(True)
  assert begins[1:].any()
  history = policy.context.replayed(features, novelty, begins)
  together = policy.context.pool(params, history, features)
  assert together.shape == (7, 4, policy.feature_size)
  memory, advance = policy.context.initial(4), jax.jit(policy.context.advance)
  for step in range(7):
    at = policy.context.memory_at(history, jnp.full(4, step), jnp.arange(4))
    arguments = features[step], novelty[step], begins[step]
    _, again = advance(params, at, *arguments)
    memory, alone = advance(params, memory, *arguments)
    np.testing.assert_allclose(together[step], alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(again, alone, rtol=1e-4, atol=1e-5)


def test_steps_before_a_sequence_are_not_read(policy, params):
  """Zeros in their place would pull a context towards zero."""
  features = jnp.ones((2, 1, policy.feature_size))
  history = policy.context.replayed(features, jnp.ones((2, 1)), jnp.zeros((2, 1), bool))
  pooled = policy.context.pool(params, history, features)
  np.testing.assert_allclose(pooled, np.ones_like(pooled), rtol=1e-5)


def test_without_context_there_are_no_parameters_and_no_memory(make_dreamer):
  policy = make_dreamer('plain', window=1).actor_critic
  assert isinstance(policy.context, context.NoContext)
  params = policy.init(jax.random.key(1))
  assert set(params) == {'actor', 'critic'}
  features = jax.random.normal(jax.random.key(0), (2, 5, policy.feature_size))
  history = policy.context.replayed(features, jnp.ones((2, 5)), jnp.zeros((2, 5), bool))
  assert history == policy.context.initial(5) == ()
  pooled = policy.context.pool(params, history, features)
  assert pooled.shape == (2, 5, 0)
  assert policy.values(params, features, pooled)[ac.TASK].mean().shape == (2, 5)
