"""Salience pooling looks back within an episode; the losses pull where they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.dreamer import actor_critic as ac

WINDOW = 3


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('plain')


@pytest.fixture(scope='module')
def policy(dreamer):
  return dreamer.actor_critic


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)['actor_critic']


def window_of(features, scores, episode):
  return ac.Window(
    jnp.asarray(features, jnp.float32)[None],
    jnp.asarray(scores, jnp.float32)[None],
    jnp.asarray(episode, jnp.int32)[None],
  )


def random_rows(policy, num_rows, batch, seed=0):
  """[B, W - 1 + R] rows with episodes that change now and then, as `ac.Rows` has them."""
  rng = np.random.default_rng(seed)
  size = WINDOW - 1 + num_rows
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return ac.Rows(
    features=array(batch, size, policy.feature_size),
    novelty=jnp.abs(array(batch, size)),
    episode=jnp.asarray(np.cumsum(rng.uniform(size=(batch, size)) < 0.3, axis=1), jnp.int32),
    choice=jnp.asarray(rng.integers(0, policy.action_size, (batch, num_rows)), jnp.int32),
    mask=jnp.ones((batch, num_rows, policy.action_size), bool),
  )


# Pooling.


def test_a_context_is_the_average_of_the_window_weighed_by_salience(policy):
  window = window_of([[8, 0], [0, 8], [8, 8]], np.log([1, 2, 5]), [4, 4, 4])
  np.testing.assert_allclose(policy.pool(window), [[1 + 5, 2 + 5]], rtol=1e-6)


def test_rows_of_another_episode_are_left_out(policy):
  context = lambda first_row: policy.pool(
    window_of([[first_row, 0], [0, 3], [3, 3]], [50.0, np.log(1), np.log(2)], [6, 7, 7])
  )
  np.testing.assert_allclose(context(1.0), [[2, 3]], rtol=1e-6)
  np.testing.assert_array_equal(context(1.0), context(1e6))


def test_a_context_depends_on_every_row_of_its_episode(policy, params):
  rows = random_rows(policy, 1, 1)._replace(episode=jnp.zeros((1, WINDOW), jnp.int32))

  @jax.jit
  def context(features, novelty):
    scores = policy.scores(params, features, novelty)
    return policy.pool(ac.Window(features, scores, rows.episode))

  before = context(rows.features, rows.novelty)
  for row in range(WINDOW):
    by_features = context(rows.features.at[:, row].add(1), rows.novelty)
    by_novelty = context(rows.features, rows.novelty.at[:, row].add(3))
    assert np.abs(by_features - before).max() > 1e-3
    assert np.abs(by_novelty - before).max() > 1e-3


def test_pooling_rows_together_is_pooling_them_one_by_one(policy):
  rows = random_rows(policy, 7, 4)
  assert np.ptp(np.asarray(rows.episode), axis=1).max() > 1
  scores = jnp.asarray(np.random.default_rng(1).normal(size=rows.novelty.shape), jnp.float32)
  window = ac.Window(rows.features, scores, rows.episode)
  together = policy.pool_rows(window)
  assert together.shape == (4, 7, policy.feature_size)
  for row in range(7):
    alone = policy.pool(jax.tree.map(lambda x, row=row: x[:, row : row + WINDOW], window))
    np.testing.assert_allclose(together[:, row], alone, rtol=1e-4, atol=1e-5)


def test_a_window_of_one_row_needs_no_salience(make_dreamer):
  policy = make_dreamer('plain', window=1).actor_critic
  params = policy.init(jax.random.key(1))
  assert set(params) == {'actor', 'critic'}
  features = jax.random.normal(jax.random.key(0), (2, 5, policy.feature_size))
  episode = jnp.zeros((2, 5), jnp.int32)
  window = ac.Window(features, policy.scores(params, features, jnp.ones((2, 5))), episode)
  context = policy.pool_rows(window)
  assert context.shape == (2, 5, 0)
  assert policy.value(params, features, context).mean().shape == (2, 5)
  assert policy.pool(jax.tree.map(lambda x: x[:, -1:], window)).shape == (2, 0)


def test_what_is_left_out_of_a_window_gets_no_gradient_and_spoils_none(policy):
  window = window_of([[1, 0], [0, 3], [3, 3]], [5.0, 1.0, 2.0], [6, 7, 7])
  grads = jax.grad(lambda window: policy.pool(window).sum(), allow_int=True)(window)
  np.testing.assert_array_equal(grads.features[:, 0], np.zeros((1, 2)))
  assert float(grads.scores[0, 0]) == 0
  assert np.isfinite(grads.scores).all() and np.abs(grads.scores[:, 1:]).min() > 0


# Losses on dreamt rows.


@pytest.fixture(scope='module')
def rows(policy):
  rows = random_rows(policy, 4, 3)
  # Action 2 is illegal in the first two rows, and not chosen there.
  mask = rows.mask.at[:, :2, 2].set(False)
  return rows._replace(mask=mask, choice=rows.choice.at[:, :2].set(rows.choice[:, :2] % 2))


@pytest.fixture(scope='module')
def gradient(policy):
  return jax.jit(jax.grad(policy.loss, has_aux=True))


@pytest.fixture(scope='module')
def judge(policy, rows):
  """params -> (log pi(choice), entropy, log p(return 3), log p(slow value -1)), each [B, R]."""

  @jax.jit
  def judge(params):
    scores = policy.scores(params, rows.features, rows.novelty)
    context = policy.pool_rows(ac.Window(rows.features, scores, rows.episode))
    features = rows.features[:, WINDOW - 1 :]
    chances = policy.policy(params, features, context, rows.mask)
    value = policy.value(params, features, context)
    target = lambda x: value.log_prob(jnp.full((3, 4), x))
    return chances.log_prob(rows.choice), chances.entropy(), target(3.0), target(-1.0)

  return judge


def targets(advantage=0.0, weight=1 / 12):
  rows = lambda x: jnp.full((3, 4), x, jnp.float32)
  return ac.Targets(rows(3.0), rows(advantage), rows(-1.0), rows(weight))


def descend(params, grads, names, rate=0.02):
  step = lambda x, grad: x - rate * grad
  return params | {name: jax.tree.map(step, params[name], grads[name]) for name in names}


@pytest.mark.parametrize('advantage', [1.0, -1.0])
def test_an_action_becomes_likelier_if_it_was_better_than_expected(
  params, rows, gradient, judge, advantage
):
  grads, _ = gradient(params, rows, targets(advantage))
  before, after = judge(params)[0], judge(descend(params, grads, ['actor']))[0]
  assert np.sign(after.mean() - before.mean()) == advantage


def test_without_an_advantage_the_actor_seeks_entropy_alone(params, rows, gradient, judge):
  grads, _ = gradient(params, rows, targets(0.0))
  largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads['actor']))
  assert 0 < largest < 1e-3  # entropy_scale is 3e-4
  before, after = judge(params)[1], judge(descend(params, grads, ['actor'], rate=100.0))[1]
  assert after.mean() > before.mean()


def test_the_critic_learns_the_return_and_stays_near_its_slow_self(params, rows, gradient, judge):
  grads, _ = gradient(params, rows, targets())
  before, after = judge(params), judge(descend(params, grads, ['critic']))
  assert after[2].mean() > before[2].mean()
  assert after[3].mean() > before[3].mean()
  np.testing.assert_array_equal(after[0], before[0])


def test_the_loss_is_the_weighed_sum_of_its_formula(policy, params, rows, judge):
  log_prob, entropy, of_return, of_slow_value = map(np.asarray, judge(params))
  rng = np.random.default_rng(0)
  advantage, weight = rng.normal(size=(3, 4)), rng.uniform(size=(3, 4))
  expected = np.sum(weight * (-advantage * log_prob - 3e-4 * entropy - of_return - of_slow_value))
  given = targets()._replace(
    advantage=jnp.asarray(advantage, jnp.float32), weight=jnp.asarray(weight, jnp.float32)
  )
  loss, metrics = jax.jit(policy.loss)(params, rows, given)
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
  np.testing.assert_allclose(metrics['entropy'], np.sum(weight * entropy), rtol=1e-4)
  np.testing.assert_allclose(metrics['return'], 3 * weight.sum(), rtol=1e-4)


def test_salience_learns_from_actor_and_critic(policy, params, rows):
  """Its gradient is there with the critic's part taken away, and with the actor's."""
  salience = jax.jit(
    jax.grad(
      lambda salience, targets: policy.loss(params | {'salience': salience}, rows, targets)[0]
    )
  )
  size = lambda grads: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  both, critic = (salience(params['salience'], targets(advantage)) for advantage in (1.0, 0.0))
  assert size(critic) > 1e-3
  assert size(jax.tree.map(jnp.subtract, both, critic)) > 1e-3


def test_a_fresh_policy_is_nearly_uniform_and_a_fresh_value_zero(make_dreamer, fresh_params, rows):
  dreamer = make_dreamer('masked')
  params, policy = fresh_params(dreamer)['actor_critic'], dreamer.actor_critic
  features = 3 * rows.features[:, WINDOW - 1 :]
  chances = policy.policy(params, features, features, jnp.ones((3, 4, 4), bool))
  np.testing.assert_allclose(jnp.exp(chances.log_probs), np.full((3, 4, 4), 1 / 4), atol=0.15)
  np.testing.assert_array_equal(policy.value(params, features, features).mean(), np.zeros((3, 4)))


def test_a_policy_keeps_one_per_cent_for_all_legal_actions(policy, params, rows):
  sure = params | {'actor': jax.tree.map(lambda x: 100 * x, params['actor'])}
  features = rows.features[:, WINDOW - 1 :]
  probs = np.exp(policy.policy(sure, features, features, rows.mask).log_probs)
  legal = np.asarray(rows.mask)
  assert (probs[~legal] == 0).all()
  assert (probs >= 0.99 * 0.01 / legal.sum(-1, keepdims=True))[legal].all()


# The critic's loss on replayed rows.


@pytest.fixture(scope='module')
def replayed(policy, params, make_sequence, dreamer, make_params):
  """Gradients of the replayed loss by (params, features, reward), along the streams of conftest."""
  sequence = make_sequence(dreamer)
  rng = np.random.default_rng(3)
  size = (3, WINDOW - 1 + 6)
  first, last = sequence.step_type == 0, sequence.step_type == 2
  before = jnp.full((3, WINDOW - 1), -1, jnp.int32)
  episode = jnp.concatenate([before, jnp.cumsum(first.T, axis=1, dtype=jnp.int32)], axis=1)
  features = jnp.asarray(rng.normal(size=(*size, policy.feature_size)), jnp.float32)
  novelty = jnp.asarray(rng.uniform(size=size), jnp.float32)
  slow_critic = make_params(dreamer, seed=1)['actor_critic']['critic']

  def loss(params, features, reward, discount):
    window = ac.Window(features, novelty, episode)
    return policy.replayed_value_loss(params, slow_critic, window, novelty, reward, discount, last)

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  return sequence, gradient, (params, features, sequence.reward)


def test_replayed_rows_teach_critic_and_salience_and_not_the_actor(replayed):
  sequence, gradient, arguments = replayed
  grads, *_ = gradient(*arguments, sequence.discount)
  size = lambda grads: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  assert size(grads['critic']) > 1e-3 and size(grads['salience']) > 1e-4
  assert size(grads['actor']) == 0


def test_rewards_of_first_rows_are_not_read_and_all_others_are(replayed):
  sequence, gradient, arguments = replayed
  _, _, by_reward = gradient(*arguments, sequence.discount)
  unread = np.array(sequence.step_type == 0)
  unread[0] = True  # earned before the sequence
  np.testing.assert_array_equal(np.asarray(by_reward)[unread], 0)
  assert (np.asarray(by_reward)[~unread] != 0).all()


def test_a_last_row_lends_its_value_only_if_it_was_cut_off(replayed):
  """Row 3 of stream 0 terminated, row 2 of stream 1 was cut off: no loss of their own either."""
  sequence, gradient, arguments = replayed
  size = lambda by_features, row, stream: float(
    jnp.abs(by_features[stream, WINDOW - 1 + row]).max()
  )
  _, by_features, _ = gradient(*arguments, sequence.discount)
  assert size(by_features, 3, 0) == 0
  assert size(by_features, 2, 1) > 1e-5
  _, by_features, _ = gradient(*arguments, sequence.discount.at[3, 0].set(1).at[2, 1].set(0))
  assert size(by_features, 3, 0) > 1e-5
  assert size(by_features, 2, 1) == 0


def test_rows_before_a_sequence_are_not_read(replayed):
  sequence, gradient, arguments = replayed
  _, by_features, _ = gradient(*arguments, sequence.discount)
  np.testing.assert_array_equal(by_features[:, : WINDOW - 1], 0)
