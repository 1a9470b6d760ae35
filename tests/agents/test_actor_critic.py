"""Actor and critic: directions of their gradients, also through the context module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import context

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


def random_steps(policy, num_steps, batch, seed=0):
  """R steps with random episode boundaries, and the window before them."""
  rng = np.random.default_rng(seed)
  size = WINDOW - 1 + num_steps
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  track = context.Window(
    features=array(batch, size, policy.feature_size),
    novelty=jnp.abs(array(batch, size)),
    episode=jnp.asarray(np.cumsum(rng.uniform(size=(batch, size)) < 0.3, axis=1), jnp.int32),
  )
  return ac.Steps(
    features=track.features[:, WINDOW - 1 :],
    track=track,
    choice=jnp.asarray(rng.integers(0, policy.action_size, (batch, num_steps)), jnp.int32),
    mask=jnp.ones((batch, num_steps, policy.action_size), bool),
  )


# Losses on imagined steps.


@pytest.fixture(scope='module')
def steps(policy):
  steps = random_steps(policy, 4, 3)
  # Action 2 is illegal in the first two steps, and not taken there.
  mask = steps.mask.at[:, :2, 2].set(False)
  return steps._replace(mask=mask, choice=steps.choice.at[:, :2].set(steps.choice[:, :2] % 2))


@pytest.fixture(scope='module')
def gradient(policy):
  return jax.jit(jax.grad(policy.loss, has_aux=True))


@pytest.fixture(scope='module')
def judge(policy, steps):
  """params -> (log pi(choice), entropy, log p(return 3), log p(slow value -1)), each [B, R]."""

  @jax.jit
  def judge(params):
    pooled = policy.context.pool(params, steps.track, steps.features)
    distribution = policy.policy(params, steps.features, pooled, steps.mask)
    value = policy.value(params, steps.features, pooled)
    target = lambda x: value.log_prob(jnp.full((3, 4), x))
    return distribution.log_prob(steps.choice), distribution.entropy(), target(3.0), target(-1.0)

  return judge


def targets(advantage=0.0, weight=1 / 12):
  fill = lambda x: jnp.full((3, 4), x, jnp.float32)
  return ac.Targets(fill(3.0), fill(advantage), fill(-1.0), fill(weight))


def descend(params, grads, names, rate=0.02):
  step = lambda x, grad: x - rate * grad
  return params | {name: jax.tree.map(step, params[name], grads[name]) for name in names}


@pytest.mark.parametrize('advantage', [1.0, -1.0])
def test_actor_raises_the_likelihood_of_advantageous_actions(
  params, steps, gradient, judge, advantage
):
  grads, _ = gradient(params, steps, targets(advantage))
  before, after = judge(params)[0], judge(descend(params, grads, ['actor']))[0]
  assert np.sign(after.mean() - before.mean()) == advantage


def test_actor_without_advantage_seeks_entropy(params, steps, gradient, judge):
  grads, _ = gradient(params, steps, targets(0.0))
  largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads['actor']))
  assert 0 < largest < 1e-3  # entropy_scale is 3e-4
  before, after = judge(params)[1], judge(descend(params, grads, ['actor'], rate=100.0))[1]
  assert after.mean() > before.mean()


def test_critic_learns_the_return_and_stays_near_the_slow_critic(params, steps, gradient, judge):
  grads, _ = gradient(params, steps, targets())
  before, after = judge(params), judge(descend(params, grads, ['critic']))
  assert after[2].mean() > before[2].mean()
  assert after[3].mean() > before[3].mean()
  np.testing.assert_array_equal(after[0], before[0])


def test_loss_is_the_weighted_sum_of_its_formula(policy, params, steps, judge):
  log_prob, entropy, of_return, of_slow_value = map(np.asarray, judge(params))
  rng = np.random.default_rng(0)
  advantage, weight = rng.normal(size=(3, 4)), rng.uniform(size=(3, 4))
  expected = np.sum(weight * (-advantage * log_prob - 3e-4 * entropy - of_return - of_slow_value))
  given = targets()._replace(
    advantage=jnp.asarray(advantage, jnp.float32), weight=jnp.asarray(weight, jnp.float32)
  )
  loss, metrics = jax.jit(policy.loss)(params, steps, given)
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
  np.testing.assert_allclose(metrics['entropy'], np.sum(weight * entropy), rtol=1e-4)
  np.testing.assert_allclose(metrics['return'], 3 * weight.sum(), rtol=1e-4)


def test_salience_learns_from_actor_and_critic(policy, params, steps):
  """Its gradient is not zero without the critic's part, nor without the actor's."""
  salience = jax.jit(
    jax.grad(
      lambda salience, targets: policy.loss(params | {'salience': salience}, steps, targets)[0]
    )
  )
  size = lambda grads: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  both, critic = (salience(params['salience'], targets(advantage)) for advantage in (1.0, 0.0))
  assert size(critic) > 1e-3
  assert size(jax.tree.map(jnp.subtract, both, critic)) > 1e-3


def test_fresh_policy_is_nearly_uniform_and_fresh_value_zero(make_dreamer, fresh_params, steps):
  dreamer = make_dreamer('masked')
  params, policy = fresh_params(dreamer)['actor_critic'], dreamer.actor_critic
  features = 3 * steps.features
  distribution = policy.policy(params, features, features, jnp.ones((3, 4, 4), bool))
  np.testing.assert_allclose(jnp.exp(distribution.log_probs), np.full((3, 4, 4), 1 / 4), atol=0.15)
  np.testing.assert_array_equal(policy.value(params, features, features).mean(), np.zeros((3, 4)))


def test_policy_mixes_one_per_cent_over_legal_actions(policy, params, steps):
  sure = params | {'actor': jax.tree.map(lambda x: 100 * x, params['actor'])}
  features = steps.features
  probs = np.exp(policy.policy(sure, features, features, steps.mask).log_probs)
  legal = np.asarray(steps.mask)
  assert (probs[~legal] == 0).all()
  assert (probs >= 0.99 * 0.01 / legal.sum(-1, keepdims=True))[legal].all()


# The critic's loss on replayed steps.


@pytest.fixture(scope='module')
def replayed(policy, params, make_sequence, dreamer, make_params):
  """Gradients of the replayed loss by (params, features, reward), along the streams of conftest."""
  sequence = make_sequence(dreamer)
  rng = np.random.default_rng(3)
  size = (6, 3)
  first, last = sequence.step_type == 0, sequence.step_type == 2
  features = jnp.asarray(rng.normal(size=(*size, policy.feature_size)), jnp.float32)
  novelty = jnp.asarray(rng.uniform(size=size), jnp.float32)
  slow_critic = make_params(dreamer, seed=1)['actor_critic']['critic']

  def loss(params, features, reward, discount):
    track = policy.context.replayed(features, novelty, first)
    replayed = ac.Replayed(features, track, reward, discount, last)
    return policy.replayed_value_loss(params, slow_critic, replayed)

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  return sequence, gradient, (params, features, sequence.reward)


def test_replayed_loss_trains_critic_and_salience_but_not_the_actor(replayed):
  sequence, gradient, arguments = replayed
  grads, *_ = gradient(*arguments, sequence.discount)
  size = lambda grads: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  assert size(grads['critic']) > 1e-3 and size(grads['salience']) > 1e-4
  assert size(grads['actor']) == 0


def test_replayed_loss_reads_all_rewards_but_those_of_first_steps(replayed):
  sequence, gradient, arguments = replayed
  _, _, by_reward = gradient(*arguments, sequence.discount)
  unread = np.array(sequence.step_type == 0)
  unread[0] = True  # earned before the sequence
  np.testing.assert_array_equal(np.asarray(by_reward)[unread], 0)
  assert (np.asarray(by_reward)[~unread] != 0).all()


def test_last_step_bootstraps_only_if_truncated(replayed):
  """Step 3 of stream 0 terminates, step 2 of stream 1 is truncated; neither has its own loss."""
  sequence, gradient, arguments = replayed
  size = lambda by_features, step, stream: float(jnp.abs(by_features[step, stream]).max())
  _, by_features, _ = gradient(*arguments, sequence.discount)
  assert size(by_features, 3, 0) == 0
  assert size(by_features, 2, 1) > 1e-5
  _, by_features, _ = gradient(*arguments, sequence.discount.at[3, 0].set(1).at[2, 1].set(0))
  assert size(by_features, 3, 0) > 1e-5
  assert size(by_features, 2, 1) == 0
