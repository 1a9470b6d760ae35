"""Actor and critic: directions of their gradients; those of salience are in `test_context.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.dreamer import actor_critic as ac


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('plain')


@pytest.fixture(scope='module')
def policy(dreamer):
  return dreamer.actor_critic


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)['actor_critic']


# Losses on imagined steps.


@pytest.fixture(scope='module')
def steps(policy):
  """Four random steps of three dreams, the first of which is the task's; action 2 is illegal in the
  first two steps, and not taken there."""
  rng = np.random.default_rng(0)
  choice = rng.integers(0, 3, (4, 3))
  choice[:2] %= 2
  return ac.Steps(
    features=jnp.asarray(rng.normal(size=(4, 3, policy.feature_size)), jnp.float32),
    history=(),
    choice=jnp.asarray(choice, jnp.int32),
    mask=jnp.ones((4, 3, 3), bool).at[:2, :, 2].set(False),
  )


def no_context(features):
  return features[..., :0]


@pytest.fixture(scope='module')
def gradient(policy):
  return jax.jit(jax.grad(policy.loss, has_aux=True))


@pytest.fixture(scope='module')
def judge(policy, steps):
  """params -> log pi(choice), entropy, and of each head log p(return) and log p(slow value).

  The task's are 3 and -1, those of novelty 2 and 0. Each result is [R, B].
  """

  @jax.jit
  def judge(params):
    pooled = policy.context.pool(params, steps.history, steps.features)
    distribution = policy.dreamt_policy(params, steps.features, pooled, steps.mask)
    values = policy.values(params, steps.features, pooled)
    value, novelty = values[ac.TASK], values[ac.NOVELTY]
    fill = lambda x: jnp.full((4, 3), x)
    return (
      distribution.log_prob(steps.choice),
      distribution.entropy(),
      {
        ac.TASK: (value.log_prob(fill(3.0)), value.log_prob(fill(-1.0))),
        ac.NOVELTY: (novelty.log_prob(fill(2.0)), novelty.log_prob(fill(0.0))),
      },
    )

  return judge


def targets(advantage=0.0, weight=1 / 12):
  fill = lambda x: jnp.full((4, 3), x, jnp.float32)
  return ac.Targets(
    returns={ac.TASK: fill(3.0), ac.NOVELTY: fill(2.0)},
    advantage=fill(advantage),
    slow_values={ac.TASK: fill(-1.0), ac.NOVELTY: fill(0.0)},
    weight=fill(weight),
  )


def descend(params, grads, names, rate=0.02):
  step = lambda x, grad: x - rate * grad
  return params | {name: jax.tree.map(step, params[name], grads[name]) for name in names}


@pytest.mark.parametrize('advantage', [1.0, -1.0])
def test_actor_raises_the_likelihood_of_advantageous_actions(
  params, steps, gradient, judge, advantage
):
  grads, _ = gradient(params, steps, targets(advantage))
  before, after = judge(params)[0], judge(descend(params, grads, ['actor', 'explorer']))[0]
  for dreams in (slice(0, 1), slice(1, 3)):  # of the task, and of the explorer
    change = after[:, dreams].mean() - before[:, dreams].mean()
    assert np.sign(change) == advantage


def test_actor_without_advantage_seeks_entropy(params, steps, gradient, judge):
  grads, _ = gradient(params, steps, targets(0.0))
  largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads['actor']))
  assert 0 < largest < 1e-3  # entropy_scale is 3e-4
  names = ['actor', 'explorer']
  before, after = judge(params)[1], judge(descend(params, grads, names, rate=100.0))[1]
  assert after.mean() > before.mean()


def test_each_actor_and_head_learns_from_its_own_dreams(policy, params, steps, gradient):
  """Dreams of the other actor change neither its gradient nor that of its head of the critic."""
  given = targets(1.0)
  other = {'task': slice(1, 3), 'novelty': slice(0, 1)}

  def learned(name, changed):
    """Gradients of an actor and of the last layer of its head."""
    grads, _ = gradient(params, steps, changed)
    of_heads = jnp.split(grads['critic']['rest']['Dense_0']['bias'], 2)
    return grads['actor' if name == 'task' else 'explorer'], of_heads[name == 'novelty']

  for name, dreams in other.items():
    changed = given._replace(
      advantage=given.advantage.at[:, dreams].set(-7.0),
      returns={head: x.at[:, dreams].set(9.0) for head, x in given.returns.items()},
    )
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7),
      learned(name, changed), learned(name, given),
    )  # fmt: skip
    rest = 'novelty' if name == 'task' else 'task'
    different = jax.tree.map(
      lambda x, y: float(jnp.abs(x - y).max()), learned(rest, changed), learned(rest, given)
    )
    assert max(jax.tree.leaves(different)) > 1e-3


def test_policy_is_the_explorers_where_it_explores(policy, params, steps):
  features, context = steps.features[0], no_context(steps.features[0])
  read = lambda explores: np.asarray(
    policy.policy(params, features, context, steps.mask[0], explores).log_probs
  )
  task, both = read(None), read(jnp.array([False, True, False]))
  np.testing.assert_array_equal(both[[0, 2]], task[[0, 2]])
  assert np.abs(both[1] - task[1]).max() > 1e-2
  swapped = policy.policy(
    params | {'actor': params['explorer']}, features, context, steps.mask[0]
  ).log_probs
  np.testing.assert_allclose(both[1], swapped[1], rtol=1e-5)


def test_critic_learns_its_returns_and_stays_near_the_slow_critic(params, steps, gradient, judge):
  grads, _ = gradient(params, steps, targets())
  log_prob, _, before = judge(params)
  same_log_prob, _, after = judge(descend(params, grads, ['critic']))
  for name in (ac.TASK, ac.NOVELTY):
    for likelihood, old in zip(after[name], before[name], strict=True):
      assert likelihood.mean() > old.mean()
  np.testing.assert_array_equal(same_log_prob, log_prob)


def test_loss_is_the_weighted_sum_of_its_formula(policy, params, steps, judge):
  log_prob, entropy, critics = jax.tree.map(np.asarray, judge(params))
  of_task = np.array([True, False, False])
  likelihoods = np.where(of_task, sum(critics[ac.TASK]), sum(critics[ac.NOVELTY]))
  rng = np.random.default_rng(0)
  advantage, weight = rng.normal(size=(4, 3)), rng.uniform(size=(4, 3))
  expected = np.sum(weight * (-advantage * log_prob - 3e-4 * entropy - likelihoods))
  given = targets()._replace(
    advantage=jnp.asarray(advantage, jnp.float32), weight=jnp.asarray(weight, jnp.float32)
  )
  loss, metrics = jax.jit(policy.loss)(params, steps, given)
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
  by_actor = (weight * entropy)[:, of_task].sum(), (weight * entropy)[:, ~of_task].sum()
  found = metrics['entropy'], metrics['explorer_entropy']
  np.testing.assert_allclose(found, by_actor, rtol=1e-4)
  np.testing.assert_allclose(metrics['return'], 3 * weight[:, of_task].sum(), rtol=1e-4)


def test_actor_and_critic_do_not_read_the_inputs_of_the_transition(policy, params):
  features = jax.random.normal(jax.random.key(0), (5, policy.feature_size))
  context = no_context(features)

  @jax.jit
  def read(features):
    chosen = policy.policy(params, features, context, None).log_probs
    return chosen, policy.values(params, features, context)['task'].mean()

  led = features.at[:, policy.state_size :].add(1.0)
  state = features.at[:, : policy.state_size].add(1.0)
  jax.tree.map(np.testing.assert_array_equal, read(led), read(features))
  assert all(np.abs(x - y).max() > 1e-3 for x, y in zip(read(state), read(features), strict=True))


def test_fresh_policy_is_nearly_uniform_and_fresh_values_are_zero(make_dreamer, fresh_params):
  dreamer = make_dreamer('masked')
  params, policy = fresh_params(dreamer)['actor_critic'], dreamer.actor_critic
  features = 3 * jax.random.normal(jax.random.key(0), (3, 4, policy.feature_size))
  distribution = policy.policy(params, features, no_context(features), jnp.ones((3, 4, 4), bool))
  np.testing.assert_allclose(jnp.exp(distribution.log_probs), np.full((3, 4, 4), 1 / 4), atol=0.15)
  values = policy.values(params, features, no_context(features))
  assert list(values) == [ac.TASK, ac.NOVELTY]
  for value in values.values():
    np.testing.assert_array_equal(value.mean(), np.zeros((3, 4)))


def test_policy_mixes_one_per_cent_over_legal_actions(policy, params, steps):
  sure = params | {'actor': jax.tree.map(lambda x: 100 * x, params['actor'])}
  features = steps.features
  probs = np.exp(policy.policy(sure, features, no_context(features), steps.mask).log_probs)
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
    history = policy.context.replayed(features, novelty, first)
    rewards = {ac.TASK: reward, ac.NOVELTY: novelty}
    replayed = ac.Replayed(features, history, rewards, discount, last)
    return policy.replayed_value_loss(params, slow_critic, replayed)

  gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
  return sequence, gradient, (params, features, sequence.reward)


def test_replayed_loss_trains_the_critic_and_not_the_actor(replayed):
  sequence, gradient, arguments = replayed
  _, (grads, *_) = gradient(*arguments, sequence.discount)
  size = lambda grads: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  assert size(grads['critic']) > 1e-3
  assert size(grads['actor']) == size(grads['explorer']) == 0


def test_replayed_loss_reads_all_rewards_but_those_of_first_steps(replayed):
  sequence, gradient, arguments = replayed
  _, (*_, by_reward) = gradient(*arguments, sequence.discount)
  unread = np.array(sequence.step_type == 0)
  unread[0] = True  # earned before the sequence
  np.testing.assert_array_equal(np.asarray(by_reward)[unread], 0)
  assert (np.asarray(by_reward)[~unread] != 0).all()


def test_last_step_bootstraps_only_if_truncated(replayed):
  """Step 3 of stream 0 terminates, step 2 of stream 1 is truncated; neither has its own loss."""
  sequence, gradient, (params, features, reward) = replayed

  def reads(step, stream, discount):
    """Whether the loss depends on the features of the step."""
    changed = features.at[step, stream].multiply(-3)
    losses = {float(gradient(params, x, reward, discount)[0]) for x in (features, changed)}
    return len(losses) == 2

  assert not reads(3, 0, sequence.discount) and reads(2, 1, sequence.discount)
  swapped = sequence.discount.at[3, 0].set(1).at[2, 1].set(0)
  assert reads(3, 0, swapped) and not reads(2, 1, swapped)


def test_targets_of_replayed_steps_have_no_gradient(replayed):
  """So features of a LAST step, whose value only bootstraps, get none."""
  sequence, gradient, arguments = replayed
  _, (_, by_features, _) = gradient(*arguments, sequence.discount)
  last = np.asarray(sequence.step_type == 2)
  assert last.sum() == 2 and (np.asarray(by_features)[last] == 0).all()
  assert (np.abs(by_features).max(-1)[:-1][~last[:-1]] > 0).all()


def test_replayed_loss_trains_only_heads_with_rewards(policy, params, make_dreamer, make_sequence):
  """Rewards of one head add its own loss alone."""
  sequence = make_sequence(make_dreamer('plain'))
  features = jax.random.normal(jax.random.key(0), (6, 3, policy.feature_size))
  history = policy.context.replayed(features, jnp.zeros((6, 3)), sequence.step_type == 0)

  @functools.partial(jax.jit, static_argnums=1)
  def gradient(params, names):
    rewards = {name: sequence.reward for name in names}
    last = sequence.step_type == 2
    replayed = ac.Replayed(features, history, rewards, sequence.discount, last)
    loss = jax.value_and_grad(policy.replayed_value_loss)
    return loss(params, params['critic'], replayed)

  (task, grads), (novelty, _), (both, _) = (
    gradient(params, names) for names in ((ac.TASK,), (ac.NOVELTY,), (ac.TASK, ac.NOVELTY))
  )
  np.testing.assert_allclose(both, task + novelty, rtol=1e-5)
  of_task, of_novelty = jnp.split(grads['critic']['rest']['Dense_0']['bias'], 2)
  assert (of_novelty == 0).all() and (of_task != 0).any()


# Without novelty.


@pytest.mark.parametrize('changes', [{'ensemble_size': 1}, {'novelty_scale': 0.0}])
def test_without_novelty_the_loss_is_that_of_the_task(make_dreamer, make_params, steps, changes):
  dreamer = make_dreamer('plain', **changes)
  policy, params = dreamer.actor_critic, make_params(dreamer)['actor_critic']
  assert policy.heads == (ac.TASK,)
  assert set(params) == {'actor', 'critic'}
  given = targets()
  alone = given._replace(
    returns={ac.TASK: given.returns[ac.TASK]}, slow_values={ac.TASK: given.slow_values[ac.TASK]}
  )
  loss, _ = policy.loss(params, steps, alone)
  assert np.isfinite(loss)


# Scales of the advantages.


@pytest.fixture(scope='module')
def follow(dreamer):
  """(batches of first returns of task and novelty, scales before, mean |G|) -> scales, divisors."""
  update = jax.jit(functools.partial(ac.update_scales, config=dreamer.config))

  def follow(*batches, scales=None, size=0.0):
    scales = scales or ac.initial_scales((ac.TASK, ac.NOVELTY))
    for task, novelty in batches:
      first = {
        ac.TASK: jnp.asarray(task, jnp.float32),
        ac.NOVELTY: jnp.asarray(novelty, jnp.float32),
      }
      scales, divisors = update(scales, first, jnp.float32(size))
    return jax.tree.map(np.asarray, (scales, divisors))

  return follow


def test_scale_of_the_task_is_the_range_of_its_returns_down_to_a_floor(follow, dreamer):
  floor = dreamer.config.return_floor
  _, wide = follow(([0, 3 * floor], [0, 0]))
  assert wide[ac.TASK] == pytest.approx(0.9 * 3 * floor)
  _, alike = follow(([0, 0], [0, 0]))
  assert alike[ac.TASK] == pytest.approx(floor)
  _, large = follow(([0, 0], [0, 0]), size=20 * floor)  # the floor is a tenth of it
  assert large[ac.TASK] == pytest.approx(2 * floor)


def test_scale_of_novelty_is_its_largest_range_so_far(follow):
  """So novelty fades as the model learns, where that of the task is on a scale of its own."""
  scales, first = follow(([0, 0], [0, 2.0]))
  assert first[ac.NOVELTY] == pytest.approx(0.9 * 2)  # from 5 to 95 %
  scales, smaller = follow(([0, 0], [0, 0.2]), scales=scales)
  assert smaller[ac.NOVELTY] == first[ac.NOVELTY]
  scales, larger = follow(([0, 0], [0, 20.0]), scales=scales)
  novelty = scales.ranges[ac.NOVELTY]
  assert larger[ac.NOVELTY] == pytest.approx(novelty.value / (1 - 0.99**3), rel=1e-4)
  assert larger[ac.NOVELTY] > first[ac.NOVELTY]


def test_rollouts_that_begin_at_a_termination_change_no_scale(follow):
  before, _ = follow(([0, 1], [0, 2.0]))
  after, _ = follow(([np.nan, np.nan], [np.nan, np.nan]), scales=before)
  assert after == before
