"""Actor and critic: directions of their gradients. `test_context.py` has salience's gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_dreamer import random_features, read_of

from hephaestus.agents import distributions
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import config as dreamer_config


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('masked')


@pytest.fixture(scope='module')
def policy(dreamer):
  return dreamer.actor_critic


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)['actor_critic']


# Losses on imagined steps.


@pytest.fixture(scope='module')
def steps(dreamer):
  """Four random steps of three dreams, the first of which is the task's; actions 2 and 3 are illegal in
  the first two steps, and not taken there."""
  rng = np.random.default_rng(0)
  choice = rng.integers(0, 4, (4, 3), np.int32)
  choice[:2] %= 2
  mask = np.ones((4, 3, 4), bool)
  mask[:2, :, 2:] = False
  return ac.ImaginedSteps(
    read=read_of(random_features(dreamer, rng, 4, 3)),
    choice=choice,
    log_prob=np.zeros((4, 3), np.float32),
    mask=mask,
  )


def no_context(features):
  return features.recalled[..., :0]


@pytest.fixture(scope='module')
def gradient(policy):
  """(params, steps, targets, ratio=1) -> (loss, metrics), and the gradient.

  The choices are `ratio` times as likely, [4, 3], as they were when they were chosen.
  """

  @jax.jit
  def compiled(params, steps, targets, ratio):
    pooled = policy.context.pool(params, steps.read)
    now = policy.dreamt_policy(params, steps.read.features, pooled, steps.mask)
    steps = steps._replace(log_prob=now.log_prob(steps.choice) - jnp.log(ratio))
    return jax.value_and_grad(policy.loss, has_aux=True)(params, steps, targets)

  return lambda params, steps, targets, ratio=1.0: jax.device_get(
    compiled(params, steps, targets, np.full((4, 3), ratio, np.float32))
  )


@pytest.fixture(scope='module')
def judge(policy, steps):
  """params -> log pi(choice), entropy, and of each head the loss of its return, 3 of the task, 2 of novelty: [R, B]."""

  @jax.jit
  def judge(params):
    pooled = policy.context.pool(params, steps.read)
    distribution = policy.dreamt_policy(params, steps.read.features, pooled, steps.mask)
    values = policy.values(params, steps.read.features, pooled)
    fill = lambda x: jnp.full((4, 3), x)
    return (
      distribution.log_prob(steps.choice),
      distribution.entropy(),
      {name: values[name].loss(fill(x)) for name, x in ((ac.TASK, 3.0), (ac.NOVELTY, 2.0))},
    )

  return lambda params: jax.device_get(judge(params))


def targets(advantage=0.0, weight=1 / 12):
  fill = lambda x: np.full((4, 3), x, np.float32)  # or an array that broadcasts
  return ac.Targets(
    returns={ac.TASK: fill(3.0), ac.NOVELTY: fill(2.0)},
    advantage=fill(advantage),
    weight=fill(weight),
  )


def descend(params, grads, names, rate=0.02):
  step = lambda x, grad: x - np.float32(rate) * grad
  return params | {name: jax.tree.map(step, params[name], grads[name]) for name in names}


@pytest.mark.parametrize('advantage', [1.0, -1.0])
def test_actor_raises_the_likelihood_of_advantageous_actions(
  params, steps, gradient, judge, advantage
):
  _, grads = gradient(params, steps, targets(advantage))
  before, after = judge(params)[0], judge(descend(params, grads, ['actor', 'explorer']))[0]
  for dreams in (slice(0, 1), slice(1, 3)):  # of the task, and of the explorer
    change = after[:, dreams].mean() - before[:, dreams].mean()
    assert np.sign(change) == advantage


@pytest.mark.parametrize(('advantage', 'ratio'), [(1.0, 1.3), (-1.0, 0.7)])
def test_actor_learns_no_more_from_a_choice_whose_probability_has_changed_enough(
  params, steps, gradient, advantage, ratio
):
  """There only the entropy has a gradient; where the change is to be undone, the advantage has one, too."""
  of = lambda *given: gradient(params, steps, *given)[1]['actor']
  entropy = of(targets())
  close = lambda found: jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), found, entropy
  )
  close(of(targets(advantage), ratio))
  with pytest.raises(AssertionError):
    close(of(targets(-advantage), ratio))


def test_steps_that_no_dream_reached_count_for_nothing_whatever_their_density(
  params, steps, gradient
):
  reached = np.array([1, 1, 1, 0], np.float32)[:, None]
  given = targets(advantage=reached, weight=reached / 12)
  found = [gradient(params, steps, given, np.where(reached > 0, 1, x)) for x in (1.0, np.inf)]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), *found)


def test_parts_of_dreams_are_equal_shares_of_either_actors(policy):
  dreams = np.arange(3 * 16).reshape(3, 16)
  parts = [policy.part({'x': dreams}, index, 4, 4)['x'] for index in range(4)]
  np.testing.assert_array_equal(np.sort(np.concatenate(parts, axis=1), axis=1), dreams)
  own = policy.dreams(ac.TASK, 16)
  for part in parts:
    assert np.isin(part, dreams[:, own]).sum(axis=1).tolist() == [2, 2, 2]
    assert np.isin(part[:, policy.dreams(ac.TASK, 4)], dreams[:, own]).all()


def test_entropy_weighs_more_the_more_certain_a_policy_is():
  def weight(*probs, **options):
    logits = np.log(np.float32(probs))
    policy = distributions.MaskedCategorical.from_logits(logits)
    found = ac.entropy_weight(policy, 0.4, **options)
    return float(found), float(policy.entropy() / np.log(len(probs)))

  assert weight(1 - 1e-9, 1e-9)[0] == pytest.approx(np.exp(5), rel=1e-4)
  for probs in ((0.5, 0.5), (0.9, 0.1), (0.6, 0.2, 0.2)):
    found, share = weight(*probs)
    assert found == pytest.approx(np.exp(5 * (1 - share / 0.4)), rel=1e-4)
  forced = np.array([True, False])
  only = distributions.MaskedCategorical.from_logits(np.zeros(2, np.float32), forced)
  assert np.isfinite(ac.entropy_weight(only, 0.4))
  assert weight(0.5, 0.5, least_lack=0.0)[0] == 1.0


def test_advantages_cannot_make_the_explorer_certain(policy, params, steps, gradient):
  """One action has the same advantage at each step; the task's actor becomes certain of it."""
  given = targets(advantage=0.01, weight=np.array([1, 0.5, 0.5]) / 4)
  steps = steps._replace(choice=np.zeros_like(steps.choice))
  for _ in range(300):
    _, grads = gradient(params, steps, given)
    params = descend(params, grads, ['actor', 'explorer'], rate=10.0)
  _, metrics = gradient(params, steps, given)[0]
  assert metrics['entropy'] < 0.1
  assert metrics['explorer_entropy'] > 0.15


def test_certain_actor_returns_to_other_actions(policy, params, steps, monkeypatch):
  """Their probabilities have almost no gradient left when they turn out to be right: only entropy's weight is."""
  chosen = steps._replace(choice=np.zeros_like(steps.choice), mask=np.ones_like(steps.mask))

  def gradient(params, given):
    now = policy.dreamt_policy(
      params, chosen.read.features, no_context(chosen.read.features), chosen.mask
    )
    tried = chosen._replace(log_prob=jax.lax.stop_gradient(now.log_prob(chosen.choice)))
    return jax.grad(lambda params: policy.loss(params, tried, given)[0])(params)

  def step(params, _):
    return descend(params, gradient(params, targets(1.0)), ['actor'], rate=1.0), None

  certain, _ = jax.jit(lambda params: jax.lax.scan(step, params, None, length=1000))(params)
  size = lambda: optax.global_norm(
    jax.jit(lambda *both: gradient(*both))(certain, targets(0.0))['actor']
  )
  weighted = size()
  monkeypatch.setattr(dreamer_config, 'TASK_ENTROPY', 1e-6)
  assert weighted > 20 * size()


def test_each_actor_and_head_learns_from_its_own_dreams(policy, params, steps, gradient):
  """Dreams of the other actor change neither its gradient nor its critic's."""
  given = jax.tree.map(jnp.asarray, targets(1.0))
  other = {'task': slice(1, 3), 'novelty': slice(0, 1)}

  def learned(name, changed):
    """Gradients of an actor and of its critic."""
    _, grads = gradient(params, steps, changed)
    own = ('actor', 'critic') if name == 'task' else ('explorer', 'explorer_critic')
    return [grads[network] for network in own]

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
  features = jax.tree.map(lambda x: x[0], steps.read.features)
  context = no_context(features)
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


def test_critic_learns_its_returns(params, steps, gradient, judge):
  _, grads = gradient(params, steps, targets())
  log_prob, _, before = judge(params)
  same_log_prob, _, after = judge(descend(params, grads, ['critic', 'explorer_critic']))
  for name in (ac.TASK, ac.NOVELTY):
    assert after[name].mean() < before[name].mean()
  np.testing.assert_array_equal(same_log_prob, log_prob)


def test_loss_is_the_weighted_sum_of_its_formula(params, steps, gradient, judge):
  _, entropy, critics = judge(params)
  of_task = np.array([True, False, False])
  least = 0.4 * np.log(steps.mask.sum(-1))
  scale = 3e-4 * np.where(of_task, 1, np.exp(5 * (1 - entropy / least)))
  errors = np.where(of_task, critics[ac.TASK], critics[ac.NOVELTY])
  rng = np.random.default_rng(0)
  advantage, weight = rng.normal(size=(4, 3)), rng.uniform(size=(4, 3))
  ratio = rng.uniform(0.5, 1.5, size=(4, 3))
  gain = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
  expected = np.sum(weight * (-gain - scale * entropy + errors))
  given = targets()._replace(
    advantage=advantage.astype(np.float32), weight=weight.astype(np.float32)
  )
  (loss, metrics), _ = gradient(params, steps, given, ratio)
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
  by_actor = (weight * entropy)[:, of_task].sum(), (weight * entropy)[:, ~of_task].sum()
  found = metrics['entropy'], metrics['explorer_entropy']
  np.testing.assert_allclose(found, by_actor, rtol=1e-4)
  np.testing.assert_allclose(metrics['return'], 3 * weight[:, of_task].sum(), rtol=1e-4)


@pytest.fixture(scope='module')
def read(policy, steps):
  """(params, features, mask) -> log probabilities, and mean values of the critic's heads."""

  @jax.jit
  def read(params, features, mask):
    context = no_context(features)
    chosen = policy.policy(params, features, context, mask).log_probs
    values = policy.values(params, features, context)
    return chosen, {name: value.mean() for name, value in values.items()}

  return lambda params, features, mask: jax.device_get(read(params, features, mask))


def test_actor_and_critic_do_not_read_the_inputs_of_the_transition(params, steps, read):
  features, mask = steps.read.features, np.ones_like(steps.mask)
  before = read(params, features, mask)
  led = features._replace(transition=features.transition + 1)
  jax.tree.map(np.testing.assert_array_equal, read(params, led, mask), before)
  differs = lambda x, y: np.abs(x - y).max() > 1e-3
  for name in ('state', 'numbers'):
    other = features._replace(**{name: getattr(features, name) + 1})
    moved = jax.tree.map(differs, read(params, other, mask), before)
    assert all(jax.tree.leaves(moved)), name


def test_fresh_policy_is_nearly_uniform_and_fresh_values_are_zero(fresh_params, steps, read):
  mask = np.ones_like(steps.mask)
  features = jax.tree.map(lambda x: 3 * x, steps.read.features)
  log_probs, values = read(fresh_params()['actor_critic'], features, mask)
  np.testing.assert_allclose(np.exp(log_probs), np.full((4, 3, 4), 1 / 4), atol=0.15)
  assert list(values) == sorted([ac.TASK, ac.NOVELTY])
  for value in values.values():
    np.testing.assert_array_equal(value, np.zeros((4, 3)))


def test_policy_mixes_one_per_cent_over_legal_actions(params, steps, read):
  sure = params | {'actor': jax.tree.map(lambda x: 100 * x, params['actor'])}
  probs = np.exp(read(sure, steps.read.features, steps.mask)[0])
  legal = steps.mask
  assert (probs[~legal] == 0).all()
  assert (probs >= 0.99 * 0.01 / legal.sum(-1, keepdims=True))[legal].all()


# The critic's loss on replayed steps.


@pytest.fixture(scope='module')
def replayed(policy, params, make_sequence, dreamer):
  """The replayed loss and its gradients, along the streams of conftest.

  It takes the arguments of the gradient, (params, features, reward), then discounts, and where the
  explorer acted.
  """
  sequence = make_sequence(dreamer)
  rng = np.random.default_rng(3)
  size = (6, 3)
  features = random_features(dreamer, rng, *size)
  novelty = rng.uniform(size=size).astype(np.float32)

  def loss(params, features, reward, discount, explores):
    last = jnp.asarray(sequence.step_type == 2)
    rewards = {ac.TASK: reward, ac.NOVELTY: jnp.asarray(novelty)}
    replayed = ac.Replayed(read_of(features), rewards, discount, last, None, explores)
    return policy.replayed_value_loss(params, replayed)

  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))

  def gradient(*arguments, explores=None):
    explores = np.zeros(size, bool) if explores is None else explores
    return jax.device_get(compiled(*arguments, explores))

  return sequence, gradient, (params, features, sequence.reward)


def test_replayed_loss_trains_the_critic_and_not_the_actor(replayed):
  sequence, gradient, arguments = replayed
  _, (grads, *_) = gradient(*arguments, sequence.discount)
  size = lambda grads: max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  assert size(grads['critic']) > 1e-3
  assert size(grads['actor']) == size(grads['explorer']) == 0


def test_replayed_loss_reads_all_rewards_except_at_first_steps(replayed):
  sequence, gradient, arguments = replayed
  _, (*_, by_reward) = gradient(*arguments, sequence.discount)
  unread = np.array(sequence.step_type == 0)
  unread[0] = True  # earned before the sequence
  np.testing.assert_array_equal(np.asarray(by_reward)[unread], 0)
  assert (np.asarray(by_reward)[~unread] != 0).all()


def test_last_step_bootstraps_only_if_truncated_and_is_worth_0_if_terminated(replayed):
  """Step 3 of stream 0 terminates, step 2 of stream 1 is truncated, which has no loss of its own."""
  sequence, gradient, (params, features, reward) = replayed

  def reads(step, stream, discount):
    """Whether the loss depends on the features of the step."""
    changed = jax.tree.map(np.array, features)
    for part in changed:
      part[step, stream] *= -3
    losses = {float(gradient(params, x, reward, discount)[0]) for x in (features, changed)}
    return len(losses) == 2

  assert reads(3, 0, sequence.discount) and reads(2, 1, sequence.discount)
  _, (_, by_features, _) = gradient(params, features, reward, sequence.discount)
  moves = np.abs(by_features.numbers).max(-1) > 0
  assert moves[3, 0] and not moves[2, 1]
  swapped = np.array(sequence.discount)
  swapped[[3, 2], [0, 1]] = 1, 0
  _, (_, by_features, _) = gradient(params, features, reward, swapped)
  moves = np.abs(by_features.numbers).max(-1) > 0
  assert moves[2, 1] and not moves[3, 0]


def test_return_is_cut_where_the_actor_of_another_head_acted(policy, replayed):
  sequence, gradient, (params, features, reward) = replayed
  explores = np.zeros((6, 3), bool)
  explores[:, 2] = True  # a stream of one episode
  later = np.array(reward)
  later[5, 2] += 1.0

  def change(explores):
    """Of the gradient of the values of steps, by a later reward."""
    found = [
      gradient(params, features, x, sequence.discount, explores=explores)[1][1].numbers[:, 2]
      for x in (reward, later)
    ]
    return (found[1] != found[0]).any(-1)

  assert change(np.zeros_like(explores))[:5].all()
  assert change(explores)[:5].tolist() == [False, False, False, False, True]


def test_targets_of_replayed_steps_have_no_gradient(replayed):
  """Features of a LAST step, whose value only bootstraps, therefore get none."""
  sequence, gradient, arguments = replayed
  _, (_, by_features, _) = gradient(*arguments, sequence.discount)
  truncated = np.asarray((sequence.step_type == 2) & (sequence.discount > 0))
  assert truncated.sum() == 1 and all((part[truncated] == 0).all() for part in by_features)
  for part in (by_features.state, by_features.numbers):
    assert (np.abs(part).max(-1)[:-1][~truncated[:-1]] > 0).all()


# Scales of the advantages.


@pytest.fixture(scope='module')
def follow(dreamer):
  """(batches of ranges of task and novelty, scales before, squares of errors) -> scales."""
  update = jax.jit(functools.partial(ac.update_scales, config=dreamer.config))

  def follow(*batches, scales=None, error=0.0, advantage=0.0):
    scales = scales or ac.initial_scales((ac.TASK, ac.NOVELTY))
    for task, novelty in batches:
      ranges = {ac.TASK: np.float32(task), ac.NOVELTY: np.float32(novelty)}
      squares = np.float32(advantage), np.float32(error)
      scales = update(scales, {name: ac.Spread(x, *squares) for name, x in ranges.items()})
    return jax.tree.map(np.asarray, scales)

  return follow


def test_scale_of_the_task_is_the_range_of_its_returns_down_to_a_floor(follow, dreamer):
  floor = dreamer.config.return_floor
  assert follow((3 * floor, 0)).divisors[ac.TASK] == pytest.approx(3 * floor)
  assert follow((0, 0)).divisors[ac.TASK] == pytest.approx(floor)


def test_scales_are_the_errors_where_these_are_larger_than_the_range(follow):
  scales = follow((0, 0), error=400, advantage=100)
  assert scales.divisors[ac.TASK] == pytest.approx(10)
  assert scales.units[ac.TASK] == pytest.approx(20)


def test_value_of_returns_that_are_rarely_large_is_their_mean(unit=17.0):
  returns = np.where(np.arange(100) < 3, 100, 0).astype(np.float32)
  loss = lambda output: distributions.Scaled(jnp.full(100, output), unit).loss(returns).mean()
  output, step = np.float32(0), jax.jit(lambda x: x - 0.5 * jax.grad(loss)(x))
  for _ in range(30):
    output = step(output)
  np.testing.assert_allclose(unit * output, 3.0, rtol=1e-3)


def test_scale_of_novelty_is_the_range_of_its_returns_down_to_a_floor(follow):
  first = follow((0, 2.0))
  assert first.divisors[ac.NOVELTY] == pytest.approx(2)
  smaller = follow(*[(0, 0.2)] * 500, scales=first)  # an average over batches
  assert smaller.divisors[ac.NOVELTY] == pytest.approx(0.2, rel=0.1)
  assert follow((0, 0)).divisors[ac.NOVELTY] == pytest.approx(1e-3)


def test_rollouts_that_begin_at_a_termination_change_no_scale(follow):
  before = follow((1, 2.0))
  assert follow((np.nan, np.nan), scales=before, error=np.nan, advantage=np.nan) == before


def test_values_are_the_same_in_other_units(policy, params, steps, read):
  features, mask = steps.read.features, np.ones_like(steps.mask)
  units = {ac.TASK: np.float32(7), ac.NOVELTY: np.float32(0.01)}
  _, before = read(params, features, mask)
  _, after = read(params | policy.in_units(policy.critics(params), units), features, mask)
  for name, value in before.items():
    np.testing.assert_allclose(after[name], value, rtol=1e-4, atol=1e-6)


def test_large_values_of_a_bfloat16_agent_are_told_apart(make_dreamer, policy, params):
  """In bfloat16 numbers of 97 are half a unit apart."""
  critic = jax.tree.map(np.array, params[ac.CRITIC])
  last = critic['rest'][f'Dense_{policy.config.policy_layers - 1}']
  last['bias'][:] = 97.3
  last['kernel'] *= 0.1
  critic[ac.UNITS] = np.ones_like(critic[ac.UNITS])
  found = {}
  for dtype in ('float32', 'bfloat16'):
    dreamer = make_dreamer('masked', compute_dtype=dtype)
    features = random_features(dreamer, np.random.default_rng(0), 4, 3)
    values = dreamer.actor_critic.values({ac.CRITIC: critic}, features, no_context(features))
    found[dtype] = np.asarray(values[ac.TASK].mean())
  assert found['bfloat16'].dtype == np.float32 and np.ptp(found['float32']) > 0.1
  np.testing.assert_allclose(found['bfloat16'], found['float32'], atol=0.02)


def test_loss_of_a_critic_and_its_gradient_do_not_depend_on_the_scale_of_returns(
  policy, params, steps, gradient
):
  """In units ten times as large, the outputs for returns ten times as large have the same loss."""

  def learned(scale):
    in_units = params | {
      name: params[name] | {ac.UNITS: np.full_like(params[name][ac.UNITS], scale)}
      for name in policy.critics(params)
    }
    aims = targets()
    aims = aims._replace(returns={name: scale * x for name, x in aims.returns.items()})
    (loss, _), grads = gradient(in_units, steps, aims)
    return loss, grads['critic']

  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), learned(10), learned(1)
  )
  assert (learned(10)[1][ac.UNITS] == 0).all()  # no optimizer changes them
