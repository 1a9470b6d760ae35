"""One update: every part learns, and the result does not depend on the number of devices."""

import functools

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_dreamer import BATCH, NUM_STEPS, RATES, make_batch, make_dreamer, random_features
from trainer import WARM_UP, Counted, assert_same_step, shapes_after

from hephaestus.agents import experience, returns
from hephaestus.agents.cognition import survival
from hephaestus.agents.dreamer import actor_critic, dream, intrinsic, rssm, world_model
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import targets as targets_lib
from hephaestus.learner import devices, dreamer_update

TASK, NOVELTY = actor_critic.TASK, actor_critic.NOVELTY


@pytest.fixture(scope='module')
def dreamer():
  return make_dreamer()


@pytest.fixture(scope='module', autouse=True)
def several_chunks():
  """Tiny rollouts have several chunks."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(dreamer_config, 'MOST_STEPS_PER_CHUNK', 2)
    yield


def test_one_update_changes_every_module(dreamer, one_device):
  before = one_device.begin().arrays()
  metrics = one_device.step(make_batch(dreamer))
  after = one_device.arrays()
  assert metrics['dream/horizon'] >= 2
  for part in ('world_model', 'actor_critic'):
    for module, params in before.params[part].items():
      moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, after.params[part][module])
      assert max(jax.tree.leaves(moved)) > 1e-5, f'{part}/{module} did not learn'


def test_eight_devices_take_the_step_of_one(dreamer, one_device):
  assert_same_step(one_device, Counted(8), make_batch(dreamer))


def test_update_fits_a_tiny_batch(dreamer, one_device):
  """All within warm-up: without imagination updates take a fraction of the time."""
  one_device.begin(step=-300)
  batch = make_batch(dreamer)
  losses = [one_device.step(batch) for _ in range(300)]
  for name in ('reward', 'continue', 'reconstruction', 'loss'):
    first, last = (losses[i][f'world_model/{name}'] for i in (0, -1))
    assert last < 0.8 * first, name
  # Rewards are predicted after training, and hardly before.
  assert losses[0]['world_model/reward_correlation'] < 0.3
  assert losses[-1]['world_model/reward_correlation'] > 0.5


@functools.partial(jax.pmap, axis_name=devices.DEVICES)
def correlate(*arrays):
  return returns.correlation(*arrays, devices.mean_total)


@pytest.mark.parametrize(
  ('expected', 'real', 'correlation'),
  [
    ([1.0, 3.0, 2.0, 9.0], [0.2, 0.9, 0.4, -7.0], np.corrcoef([1, 3, 2], [0.2, 0.9, 0.4])[0, 1]),
    ([3e-9, 1e-9, 2e-9, 0.0], [10.0, 30.0, 20.0, 0.0], -1),
    ([0.1, 0.1, 0.1, 5.0], [0.0, 1.0, 0.0, 5.0], 0),
    ([0.3, 0.1, 0.2, 5.0], [0.1, 0.1, 0.1, 5.0], 1),
  ],
  ids=['as numpy has it', 'of any size', 'nothing is known', 'there is nothing to know'],
)
def test_correlation_is_over_the_steps_that_count_on_two_devices(expected, real, correlation):
  counts = [True, True, True, False]
  shards = [np.reshape(x, (2, -1)) for x in (np.float32(expected), np.float32(real), counts)]
  np.testing.assert_allclose(correlate(*shards), correlation, atol=1e-5)


def test_imagination_after_a_last_step_does_not_scale_advantages(dreamer, one_device):
  one_device.begin()
  batch = make_batch(dreamer)
  one_device.step(batch)
  before = one_device.arrays().scales
  one_device.step(batch._replace(step_type=np.full_like(batch.step_type, dm_env.StepType.LAST)))
  assert all(before.spreads[name].range.value > 0 for name in (TASK, NOVELTY))
  after = one_device.arrays().scales
  assert after._replace(evidence=before.evidence) == before


def test_critics_are_in_the_units_of_the_newest_scales(dreamer, one_device):
  one_device.begin().step(make_batch(dreamer))
  state = one_device.arrays()
  assert state.scales.units[NOVELTY] != 1  # as it was before
  for name, head in (('critic', TASK), ('explorer_critic', NOVELTY)):
    for critics in (state.params['actor_critic'], state.slow_critic):
      np.testing.assert_allclose(critics[name]['units'], [state.scales.units[head]], rtol=1e-6)


def test_range_of_returns_is_a_bias_corrected_float32_average(dreamer, one_device):
  """After one update with returns 5 apart, another one counts for half, and is not rounded."""
  batch, rate = make_batch(dreamer), dreamer_config.RETURN_RATE
  one_device.begin().step(batch)
  seen = one_device.arrays().scales.spreads[TASK].range.value / rate
  fresh = one_device.begin().state
  spreads = fresh.scales.spreads
  old = spreads[TASK].range
  spread = spreads[TASK]._replace(range=returns.Average(old.value + rate * 5, old.num_updates + 1))
  one_device.state = fresh._replace(scales=fresh.scales._replace(spreads=spreads | {TASK: spread}))
  expected = ((1 - rate) * 5 + seen) / (2 - rate)
  assert expected > dreamer.config.return_floor
  metrics = one_device.step(batch)
  assert metrics['actor_critic/return_divisor'] == pytest.approx(expected, rel=1e-4)


def targets_of(*arguments, **options):
  """The targets of `imagined_of`."""
  return imagined_of(*arguments, **options)[1]


def imagined_of(dreamer, rewards, values, known=None, evidence=1.0, replayed=0.0, **of_dream):
  """Scales and targets of imagined steps, of which both actors dream the same, so that either half has all.

  Args:
    dreamer: with the constants.
    rewards: [H + 1, B'] for TASK; novelty is the reward for NOVELTY.
    values: [H + 1, B'] of each head of the critic.
    known: [H + 1, B'], novelty in the dreams of the task's actor; None if it is the same there.
    evidence: that real returns differ.
    replayed: mean square of the errors at replayed steps, of each head.
    **of_dream: other fields of the dream, [H + 1, B', ...].
  """
  scales = actor_critic.initial_scales(dreamer.actor_critic.heads)
  scales = scales._replace(evidence=jnp.float32(evidence))
  times = 2 if dreamer.actor_critic.explores else 1
  as_arrays = lambda named: {
    name: jnp.concatenate([jnp.asarray(x, jnp.float32)] * times, axis=1)
    for name, x in named.items()
  }
  rewards, values, of_dream = as_arrays(rewards), as_arrays(values), as_arrays(of_dream)
  if known is not None:
    rewards[NOVELTY] = rewards[NOVELTY].at[:, : len(known[0])].set(jnp.float32(known))
  num_steps, batch = len(rewards[TASK]) - 1, len(rewards[TASK][0])
  start = dream.Start(None, None, None, weight=jnp.ones(batch), keys=None)
  dreamt = dream.Dream(
    start=start, read=None, novelty=rewards[NOVELTY], mask=None, reward=rewards[TASK],
    choice=jnp.zeros((num_steps, batch), jnp.int32), log_prob=None, discount=jnp.ones((num_steps + 1, batch)),
    values=values, horizon=jnp.int32(num_steps),
    rewards={name: rewards[name] for name in dreamer.model.rewards},
  )._replace(**of_dream)  # fmt: skip
  target = functools.partial(
    targets_lib.imagined, dreamer.actor_critic, dreamer.model.rewards, batch=dreamer_update.BATCH
  )
  add_axis = lambda tree: jax.tree.map(lambda x: x[None], tree)
  arguments = add_axis((scales, dreamt, {name: jnp.float32(replayed) for name in scales.units}))
  scales, targets, _ = jax.tree.map(
    lambda x: np.asarray(x)[0], jax.vmap(target, axis_name=devices.DEVICES)(*arguments)
  )
  return scales, targets


def test_scales_follow_the_errors_of_returns_that_are_rarely_large():
  """Of a hundred returns three are 100, and their range is 0; errors at replayed steps count where they are larger."""
  dreamer = make_dreamer(lambda_=0.0)
  rewards, values = np.zeros((2, 100)), {TASK: np.zeros((2, 100)), NOVELTY: np.zeros((2, 100))}
  rewards[1, :3] = 100
  of = functools.partial(imagined_of, dreamer, {TASK: rewards, NOVELTY: 0 * rewards}, values)
  scales, targets = of()
  assert scales.divisors[TASK] == pytest.approx(100 * np.sqrt(0.03 * 0.97), rel=1e-4)
  assert scales.units[TASK] == pytest.approx(100 * np.sqrt(0.03), rel=1e-4)
  np.testing.assert_allclose(targets.returns[TASK][0, :100], rewards[1])
  other, _ = of(replayed=900.0)
  assert other.divisors[TASK] == scales.divisors[TASK]
  assert other.units[TASK] == pytest.approx(30)


def test_shift_of_the_critic_does_not_change_the_actors_gradient():
  """The actor's gradient reads only the advantages, which are centred at each imagined step.

  With lambda = 0 a shift c of the critic shifts every temporal-difference error by (gamma - 1) c, and
  one that differs between imagined steps shifts all errors at a step alike.
  """
  dreamer = make_dreamer(lambda_=0.0, gamma=0.5)
  rewards = {TASK: [[0, 0], [3, 9], [6, -3]], NOVELTY: [[0, 0], [1, 0], [0, 3]]}
  zeros = np.zeros((3, 2))
  expected = targets_of(dreamer, rewards, {TASK: zeros, NOVELTY: zeros})
  for shift in (4, np.array([[4], [0], [-7]])):
    found = targets_of(dreamer, rewards, {TASK: zeros + shift, NOVELTY: zeros - shift / 2})
    np.testing.assert_allclose(found.advantage, expected.advantage, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.weight, expected.weight)
  assert np.abs(expected.advantage).max() > 0.1
  for part in np.split(expected.weight * expected.advantage, 2, axis=1):  # of each actor
    np.testing.assert_allclose(part.sum(axis=1), 0, atol=1e-6)
  np.testing.assert_allclose(found.returns[TASK], expected.returns[TASK] + 0.5 * shift[1:])


def test_advantages_are_scaled_and_weighted():
  dreamer = make_dreamer(lambda_=0.0, novelty_scale=0.5, return_floor=0.3)
  zeros = np.zeros((2, 2))
  rewards = {TASK: [[0, 0], [-0.02, 0.02]], NOVELTY: [[0, 0], [-1.0, 1.0]]}
  targets = targets_of(dreamer, rewards, {TASK: zeros, NOVELTY: zeros})
  of_task, of_novelty = np.split(targets.advantage[0], 2)
  half = targets_of(dreamer, rewards, {TASK: zeros, NOVELTY: zeros}, evidence=0.5)
  np.testing.assert_allclose(half.advantage[0], [*of_task / 2, *of_novelty], rtol=1e-5)
  np.testing.assert_allclose(of_task, np.array([-1, 1]) * 0.02 / 0.3, rtol=1e-4)
  np.testing.assert_allclose(of_novelty, 0.5 * np.array([-1, 1]) / (0.9 * 2), rtol=1e-4)
  np.testing.assert_allclose(targets.weight[0], 1 / 2)  # 1 for each actor


def test_novelty_beyond_its_mean_over_dreams_is_the_reward_of_its_critic():
  """An agent that is rewarded at every step would not finish an episode."""
  zeros = np.zeros((2, 2))
  rewards = {TASK: zeros, NOVELTY: [[0, 0], [1.0, 3.0]]}
  values = {TASK: zeros, NOVELTY: zeros}
  targets = targets_of(make_dreamer(), rewards, values)
  np.testing.assert_allclose(targets.returns[NOVELTY][0, 2:], [-1, 1])
  np.testing.assert_allclose(targets.returns[TASK], 0)


def test_novelty_of_the_tasks_dreams_does_not_count():
  zeros = np.zeros((2, 2))
  rewards, values = {TASK: zeros, NOVELTY: [[0, 0], [1.0, 3.0]]}, {TASK: zeros, NOVELTY: zeros}
  new, known = (
    targets_of(make_dreamer(novelty_scale=0.2), rewards, values, known=known)
    for known in (None, [[0, 0], [0.0, 0.25]])
  )
  np.testing.assert_allclose(new.advantage, known.advantage)
  assert np.abs(new.advantage[0, 2:]).min() > 0.05


def survival_of(vitals, discount):
  """Rewards [H + 1, B'] of survival along imagined vitals, whose set-points are 1."""
  reward = survival.reduction(vitals[:-1], vitals[1:], discount[1:], np.ones(2, np.float32))
  return jnp.concatenate([jnp.zeros_like(reward[:1]), reward])


def test_imagined_survival_is_rewarded_and_scaled_and_death_costs():
  """Four rollouts: one eats, one does not, one starves on, one is caught. There is no other reward."""
  names = (TASK, NOVELTY, survival.NAME)
  zeros = {name: np.zeros((2, 4)) for name in names}
  vitals = np.full((2, 4, 2), 0.5, np.float32)
  vitals[1, :3, 0] = [1.0, 0.5, 0.25]
  discount = jnp.ones((2, 4)).at[1, 3].set(0.0)
  dreamer = make_dreamer(lambda_=0.0, survival_scale=0.5, novelty_scale=0.0)
  rewards = zeros | {survival.NAME: survival_of(vitals, discount)}
  targets = targets_of(dreamer, rewards, zeros, discount=discount)
  lack = lambda *h: sum((1 - x) ** 4 for x in h) ** (1 / 3)
  now = lack(0.5, 0.5)
  expected = now - np.array([lack(1, 0.5), now, lack(0.25, 0.5), lack(0, 0)])
  np.testing.assert_allclose(targets.returns[survival.NAME][0], expected, rtol=1e-4, atol=1e-6)
  spread = np.subtract(*np.percentile(expected, [95, 5]))
  advantage = 0.5 * (expected - expected.mean()) / spread
  np.testing.assert_allclose(targets.advantage[0], advantage, rtol=1e-3)
  np.testing.assert_array_equal(targets.returns[TASK], 0)


def test_explorer_leaves_environments_once_real_returns_differ(dreamer, one_device):
  """Only from then on do the advantages of the task count."""
  batch = make_batch(dreamer)
  alike = batch._replace(
    reward=np.where(batch.step_type == dm_env.StepType.FIRST, 0, -1).astype(np.float32),
    discount=np.ones_like(batch.discount),
  )
  one_device.begin()
  metrics = [one_device.step(alike) for _ in range(2)]
  assert [row['intrinsic/exploring'] for row in metrics] == [1.0, 1.0]
  assert [row['intrinsic/evidence'] for row in metrics] == [0.0, 0.0]
  one_reward = alike._replace(reward=alike.reward.copy())
  one_reward.reward[-1, -1] = 0.0
  metrics = one_device.step(one_reward)
  assert metrics['intrinsic/evidence'] == pytest.approx(0.01)
  # Towards a quarter, by the evidence.
  assert 1 - metrics['intrinsic/exploring'] == pytest.approx(0.01 * 0.01 * 0.75, rel=0.01)
  assert one_device.step(alike)['intrinsic/exploring'] < metrics['intrinsic/exploring']


def test_many_small_rewards_are_evidence_by_their_sum(dreamer, one_device):
  """Half of the sequences have 0.02 a step, so no step differs by more than 0.02."""
  batch = make_batch(dreamer)
  follows = batch.step_type != dm_env.StepType.FIRST
  paid = follows & (np.arange(len(follows)) % 2 == 0)[:, None]
  reward = np.where(paid, 0.02, 0).astype(np.float32)
  small = batch._replace(reward=reward, discount=np.ones_like(batch.discount))
  assert one_device.begin().step(small)['intrinsic/evidence'] > 0.01 * 0.025 / 0.1


def no_novelty(model, step):
  """Stands in for `WorldModel.novelty` at steps without predictions."""
  del model
  return jnp.zeros(step.first.shape)


def test_values_of_replayed_steps_train_the_model_only_after_warm_up(one_device, monkeypatch):
  """Their gradient reaches the features, so that latents keep what later rewards depend on."""
  dreamer = make_dreamer(warm_up_updates=WARM_UP)
  batch = experience.time_major(make_batch(dreamer))
  one_device.begin().step(make_batch(dreamer))  # the last layers begin with zeros
  monkeypatch.setattr(world_model.WorldModel, 'novelty', no_novelty)
  state = one_device.arrays()
  learner = dreamer_update.DreamerUpdate(dreamer, None, None)

  @jax.jit
  def largest(step):
    like = dreamer.model.networks.empty_features(NUM_STEPS, BATCH)
    of = lambda features: rssm.Step(None, features, None, None, None, batch.step_type == 0)
    loss = lambda features: learner._value_loss(state._replace(step=step), batch, of(features))
    return jnp.abs(jax.grad(loss)(jax.tree.map(jnp.ones_like, like)).state).max()

  assert largest(jnp.int32(WARM_UP - 1)) == 0 and largest(jnp.int32(WARM_UP)) > 0


def test_values_that_train_the_model_have_the_context_that_they_were_trained_with(monkeypatch):
  dreamer = make_dreamer(window=4)
  learner, policy = dreamer_update.make_update(dreamer, RATES), dreamer.actor_critic
  batch, random = experience.time_major(make_batch(dreamer)), np.random.default_rng(0)
  novelty = np.exp(3 * random.normal(size=batch.reward.shape)).astype(np.float32)
  monkeypatch.setattr(world_model.WorldModel, 'novelty', lambda model, step: novelty)
  features = random_features(dreamer, random, *batch.reward.shape)
  step = rssm.Step(None, features, None, None, None, batch.step_type == 0)
  shapes = initial(dreamer).params['actor_critic']
  params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), shapes)

  @jax.jit
  def losses():
    state = initial(dreamer)._replace(params={'actor_critic': params}, step=jnp.int32(0))
    replayed = actor_critic.Replayed(
      policy.along(params, step, novelty), {TASK: batch.reward}, batch.discount,
      batch.step_type == 2, batch.action, policy.explored(batch),
    )  # fmt: skip
    return learner._value_loss(state, batch, step), policy.replayed_value_loss(params, replayed)

  found, expected = map(float, losses())
  assert found == pytest.approx(dreamer.config.replayed_value_scale * expected, rel=1e-5)


def test_value_loss_does_not_pool_over_the_end_of_an_episode(monkeypatch):
  """Without a bootstrap, later steps could read a LAST step only through salience's context.

  Then what the loss changes with the LAST step would depend on later rewards.
  """
  monkeypatch.setattr(world_model.WorldModel, 'novelty', no_novelty)
  dreamer = make_dreamer(window=3)
  learner = dreamer_update.make_update(dreamer, RATES)
  state = jax.eval_shape(learner.init, jax.random.key(0))
  batch = make_batch(dreamer)
  batch = batch._replace(
    step_type=np.full_like(batch.step_type, 1), discount=np.ones_like(batch.discount)
  )
  batch.step_type[:, 2], batch.step_type[:, 3], batch.discount[:, 2] = 2, 0, 0.0
  batch = experience.time_major(batch)
  random = np.random.default_rng(0)
  features = random_features(dreamer, random, *batch.reward.shape)
  # The critic's last layer begins with zeros, which would hide its context.
  policy = jax.tree.map(lambda x: random.normal(size=x.shape), state.params['actor_critic'])
  state = state._replace(params={'actor_critic': policy}, slow_critic=policy, step=np.int32(0))
  step = lambda features: rssm.Step(None, features, None, None, None, batch.step_type == 0)

  @jax.jit
  def loss(features, reward):
    return learner._value_loss(state, batch._replace(reward=reward), step(features))

  other, later = jax.tree.map(np.array, features), np.array(batch.reward)
  for part in other:
    part[2] += 10
  later[4:] += 1.0
  change, expected = (float(loss(other, x) - loss(features, x)) for x in (later, batch.reward))
  assert abs(expected) > 0.1 and abs(loss(features, later) - loss(features, batch.reward)) > 0.1
  assert change == pytest.approx(expected, rel=1e-4)


def test_each_update_has_its_own_key(dreamer, one_device):
  one_device.begin()
  keys = []
  for _ in range(3):
    keys.append(tuple(one_device.arrays().key))
    one_device.step(make_batch(dreamer))
  assert len(set(keys)) == 3


def test_warm_up_trains_only_the_world_model(dreamer, one_device):
  """The policy's optimizer, averages and ranges do not change either; real returns are compared."""

  def parts():
    state = one_device.arrays()
    return (
      state.params
      | state.params['actor_critic']
      | {
        'optimizer': state.policy_opt_state,
        'slow critic': state.slow_critic,
        'scales': state.scales._replace(evidence=0),
      }
    )

  one_device.begin(step=0)
  found = []
  for seed in range(WARM_UP + 1):
    before = parts()
    one_device.step(make_batch(dreamer, seed))
    same = jax.tree.map(np.array_equal, before, parts())
    found.append({name for name, equal in same.items() if not all(jax.tree.leaves(equal))})
  known = {intrinsic.EXPLORING}  # as the evidence
  assert [changed - known for changed in found] == [{'world_model'}] * WARM_UP + [
    set(before) - known
  ]


def test_update_computes_only_the_steps_of_its_horizon(dreamer, one_device):
  """A short horizon saves computation in all parts, rather than masking it, in the same program."""
  for step, boredom, horizon, chunks in (
    (0, 0.0, 0, 0),  # warm-up
    (WARM_UP, 0.9, 2, 1),
    (WARM_UP, 0.4, 3, 2),
    (WARM_UP, 0.0, 4, 2),
  ):
    one_device.begin(step, boredom).counts[:] = 0
    metrics = one_device.step(make_batch(dreamer))
    jax.effects_barrier()
    assert metrics['dream/horizon'] == horizon
    assert one_device.counts.tolist() == [horizon, chunks]
  assert one_device.traces == 1


# Shapes and dtypes, of which tracing is enough.


def trace(dreamer):
  """Shapes of a state, of the next one and of the metrics, from one update of one device."""
  made, state = dreamer_update.make_update(dreamer, RATES), initial(dreamer)
  return state, *shapes_after(made, state, make_batch(dreamer))


def initial(dreamer):
  return jax.eval_shape(dreamer_update.make_update(dreamer, RATES).init, jax.random.key(0))


def test_explorer_can_learn_by_competence_alone():
  _, _, metrics = trace(make_dreamer(competence_scale=1.0, novelty_scale=0.0))
  assert 'actor_critic/competence_advantage' in metrics
  assert 'actor_critic/novelty_advantage' not in metrics


@pytest.fixture(scope='module')
def traced_in_bfloat16():
  """An agent in bfloat16, and its `trace`, which fails where a key is used twice."""
  dreamer = make_dreamer(compute_dtype='bfloat16')
  with jax.debug_key_reuse(True):
    return dreamer, *trace(dreamer)


def test_no_key_is_used_twice_and_none_is_returned_typed(traced_in_bfloat16):
  _, before, after, _ = traced_in_bfloat16
  assert before == after
  is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  assert not any(map(is_key, jax.tree.leaves(after)))


def test_bfloat16_reaches_neither_losses_nor_state(traced_in_bfloat16):
  dreamer, *shapes = traced_in_bfloat16
  assert dreamer.model.rssm.initial(1).latent.deterministic.dtype == jnp.bfloat16
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  assert {x.dtype for x in filter(is_float, jax.tree.leaves(shapes))} == {jnp.dtype('float32')}


@pytest.mark.parametrize(
  'changes', [{'ensemble_size': 1}, {'novelty_scale': 0.0}], ids=['one member', 'no weight']
)
def test_without_novelty_the_critic_has_one_head(changes):
  dreamer = make_dreamer(**changes)
  state = initial(dreamer)
  assert list(state.scales.spreads) == [TASK]
  assert intrinsic.EXPLORING not in state.statistics
  assert state.slow_critic['critic']['rest']['Dense_0']['bias'].shape == (1,)
