"""One update: every part learns, and the result does not depend on the number of devices."""

import dataclasses

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.agents import experience, returns
from hephaestus.agents.dreamer import actor_critic, dream, intrinsic, modules, rssm, world_model
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.learner import checkpoint, devices, dreamer_update
from hephaestus.learner import config as learner_config

pytestmark = pytest.mark.usefixtures('little_optimization')

TASK, NOVELTY = actor_critic.TASK, actor_critic.NOVELTY

NUM_ROWS, BATCH = 6, 8
TINY = dict(
  latent='gaussian', deterministic_size=8, stochastic_size=4, hidden_size=16, encoder_layers=1,
  ensemble_size=3,
  num_bins=11, bin_limit=3.0, horizon_max=4, horizon_min=2, steps_per_chunk=2, policy_layers=1,
  window=3, starts_per_sequence=4, warm_up_updates=0, compute_dtype='float32',
)  # fmt: skip
RATES = learner_config.LearnerConfig(
  batch_size=BATCH, rate_warm_up=1, model_learning_rate=3e-3, policy_learning_rate=1e-3
)


def make_dreamer(**changes):
  config = dreamer_config.DreamerConfig(**(TINY | changes))
  observation_spec = {
    'bounded': specs.BoundedArray((3,), np.float32, 0, 1),
    'real': specs.Array((2,), np.float32),
  }
  return dreamer_agent.make_dreamer(config, observation_spec, specs.DiscreteArray(3))


def make_batch(dreamer, seed=0, batch=BATCH):
  random = np.random.default_rng(seed)
  step_type = np.full((batch, NUM_ROWS), dm_env.StepType.MID, np.int32)
  step_type[::2, 0] = dm_env.StepType.FIRST
  step_type[::3, 3] = dm_env.StepType.LAST
  step_type[::3, 4] = dm_env.StepType.FIRST
  latent = dreamer.model.rssm.initial(batch)
  return experience.Sequence(
    observation={
      'bounded': random.uniform(size=(batch, NUM_ROWS, 3)).astype(np.float32),
      'real': random.normal(2.0, 3.0, (batch, NUM_ROWS, 2)).astype(np.float32),
    },
    action=random.integers(0, 3, (batch, NUM_ROWS)).astype(np.int32),
    reward=random.normal(size=(batch, NUM_ROWS)).astype(np.float32),
    discount=np.where(step_type == dm_env.StepType.LAST, 0.0, 1.0).astype(np.float32),
    step_type=step_type,
    extras={'log_prob': np.zeros((batch, NUM_ROWS), np.float32)},
    initial_state=jax.device_get(latent),
    identity=random.integers(0, 2**32, batch, dtype=np.uint32),
    version=np.zeros(batch, np.int32),
    actor_id=np.zeros(batch, np.int32),
  )


class Trainer:
  """The update on the first D devices."""

  def __init__(self, dreamer, num_devices, rates=RATES):
    self.devices = jax.local_devices()[:num_devices]
    self.traces = 0
    made = dreamer_update.make_update(dreamer, rates)
    self._init = jax.jit(made.init)

    def update(state, sequence):
      self.traces += 1
      return made.update(state, sequence)

    self._update = jax.pmap(update, axis_name=devices.DEVICES, devices=self.devices)
    self.begin()

  def begin(self):
    """A fresh state; what was compiled stays."""
    state = self._init(jax.random.key(0))
    self.state = jax.device_put_replicated(state, self.devices)
    return self

  def step(self, batch):
    count = len(self.devices)
    shard = lambda x: x.reshape(count, len(x) // count, *x.shape[1:])
    self.state, metrics = self._update(self.state, jax.tree.map(shard, batch))
    return {name: float(np.asarray(value)[0]) for name, value in metrics.items()}

  def arrays(self, device=0):
    """One replica as host arrays."""
    return jax.tree.map(lambda x: np.asarray(x)[device], self.state)


@pytest.fixture(scope='module')
def dreamer():
  return make_dreamer()


@pytest.fixture(scope='module')
def one_device(dreamer):
  return Trainer(dreamer, 1)


@pytest.fixture(scope='module')
def eight_devices(dreamer):
  return Trainer(dreamer, 8)


def test_one_update_changes_every_module(dreamer, one_device):
  before = one_device.begin().arrays()
  metrics = one_device.step(make_batch(dreamer))
  after = one_device.arrays()
  assert metrics['dream/horizon'] >= 2
  for room in ('world_model', 'actor_critic'):
    for module, params in before.params[room].items():
      moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, after.params[room][module])
      assert max(jax.tree.leaves(moved)) > 1e-5, f'{room}/{module} did not learn'


def test_replicas_stay_bitwise_equal_on_eight_devices(dreamer, eight_devices):
  eight_devices.begin()
  for seed in range(3):
    eight_devices.step(make_batch(dreamer, seed))
  first = eight_devices.arrays(0)
  for device in range(1, 8):
    jax.tree.map(np.testing.assert_array_equal, first, eight_devices.arrays(device))


def test_eight_devices_take_the_step_of_one(dreamer, one_device, eight_devices):
  expected = one_device.begin().step(make_batch(dreamer))
  found = eight_devices.begin().step(make_batch(dreamer))
  for name, value in expected.items():
    assert found[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
  # Adam's moments are sums of gradients; its first steps would only show their signs.
  moments = lambda trainer: jax.tree.leaves(
    (trainer.arrays().model_opt_state, trainer.arrays().policy_opt_state)
  )
  for one, eight in zip(moments(one_device), moments(eight_devices), strict=True):
    np.testing.assert_allclose(eight, one, rtol=1e-2, atol=1e-6)


@pytest.mark.timeout(600)
def test_two_processes_of_four_devices_take_the_steps_of_one_of_eight(
  dreamer, eight_devices, processes
):
  both = processes('dreamer', 1, 'starve')
  eight_devices.begin().step(make_batch(dreamer))
  both.wait_for(both.saved, 'an update')
  ours = checkpoint.Checkpointer(both.folder / 'checkpoints', read_only=True)
  state, step = ours.restore(checkpoint.replica(eight_devices.state))
  assert step == 1
  moments = lambda state: jax.tree.leaves((state.model_opt_state, state.policy_opt_state))
  for found, expected in zip(moments(state), moments(eight_devices.arrays()), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-6)
  # Waiting for something to learn from, both are there; one does not outlive the other.
  both.running[1].kill()
  assert both.end(0, seconds=30) != 0


def test_update_fits_a_tiny_batch(dreamer, one_device):
  one_device.begin()
  batch = make_batch(dreamer)
  losses = [one_device.step(batch) for _ in range(300)]
  for name in ('reward', 'continue', 'reconstruction', 'loss'):
    first, last = (losses[i][f'world_model/{name}'] for i in (0, -1))
    assert last < 0.8 * first, name
  # Rewards are predicted after training, and hardly before.
  assert losses[0]['world_model/reward_correlation'] < 0.3
  assert losses[-1]['world_model/reward_correlation'] > 0.5


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
@pytest.mark.parametrize('num_devices', [1, 2])
def test_correlation_is_over_the_steps_that_count(expected, real, correlation, num_devices):
  rows = [np.float32(x).reshape(num_devices, -1) for x in (expected, real)]
  counts = np.array([True, True, True, False]).reshape(num_devices, -1)
  found = jax.pmap(
    lambda *arrays: returns.correlation(*arrays, devices.mean_total), axis_name=devices.DEVICES
  )(*rows, counts)
  np.testing.assert_allclose(found, correlation, atol=1e-5)


def test_wide_priors_hide_disagreement_from_the_clean_novelty_alone(dreamer, one_device):
  """And the metrics report how often it is positive."""

  def step(bias):
    output = one_device.begin().state.params['world_model']['prior']['Dense_1']
    size = dreamer.config.stochastic_size
    output['bias'] = output['bias'].at[..., size : 2 * size].set(bias)
    metrics = one_device.step(make_batch(dreamer))
    names = ('novelty', 'clean_novelty', 'clean_novelty_positive')
    return [metrics[f'intrinsic/{name}'] for name in names]

  novelty, clean, positive = step(3.0)  # variances of 13 and more
  assert novelty > 1e-3 and clean == positive == 0
  novelty, clean, positive = step(-10.0)  # of 0.01
  assert novelty > 1 and clean > 0 and 0.1 < positive <= 1


def test_imagination_after_a_last_step_does_not_scale_advantages(dreamer, one_device):
  one_device.begin()
  batch = make_batch(dreamer)
  one_device.step(batch)
  values = lambda: {name: x.value for name, x in one_device.arrays().return_ranges.items()}
  before = values()
  one_device.step(batch._replace(step_type=np.full_like(batch.step_type, dm_env.StepType.LAST)))
  assert min(before.values()) > 0 and values() == before


def test_range_of_returns_is_a_bias_corrected_float32_average(dreamer, one_device):
  """After one update with returns 5 apart, another one counts for half, and is not rounded."""
  batch, rate = make_batch(dreamer), dreamer_config.RETURN_RATE
  one_device.begin().step(batch)
  seen = one_device.arrays().return_ranges[TASK].value / rate
  fresh = one_device.begin().state
  old = fresh.return_ranges[TASK]
  spread = returns.PercentileRange(old.value + rate * 5, old.num_updates + 1)
  one_device.state = fresh._replace(return_ranges=fresh.return_ranges | {TASK: spread})
  expected = ((1 - rate) * 5 + seen) / (2 - rate)
  assert expected > dreamer.config.return_floor
  metrics = one_device.step(batch)
  assert metrics['actor_critic/return_spread'] == pytest.approx(expected, rel=1e-4)


def targets_of(dreamer, rewards, values, state=None, *, novelty_mean=0.0):
  """Targets of imagined steps, and the TrainState with their ranges.

  Args:
    dreamer: with the constants.
    rewards: [H + 1, B'] of TASK, and novelty as that of NOVELTY, on the scale of its largest mean.
    values: [H + 1, B'] of each head of the critic.
    state: with the ranges before; None: of no returns.
    novelty_mean: slow average of novelty.
  """
  learner = dreamer_update._Learner(dreamer, None, None)
  fresh = {name: returns.initial_range() for name in dreamer.actor_critic.heads}
  empty = dreamer_update.TrainState(*[None] * len(dreamer_update.TrainState._fields))
  state = state or empty._replace(return_ranges=fresh, largest_novelty_range=jnp.float32(0.0))
  as_arrays = lambda named: {name: jnp.asarray(x, jnp.float32) for name, x in named.items()}
  rewards, values = as_arrays(rewards), as_arrays(values)
  num_steps, batch = len(rewards[TASK]) - 1, len(rewards[TASK][0])
  start = dream.Start(None, None, None, None, None, weight=jnp.ones(batch), keys=None)
  dreamt = dream.Dream(
    start=start, features=None, novelty=rewards[NOVELTY], mask=None, reward=rewards[TASK],
    choice=jnp.zeros((num_steps, batch), jnp.int32), discount=jnp.ones((num_steps + 1, batch)),
    values=values, slow_values=values, horizon=jnp.int32(num_steps),
  )  # fmt: skip
  motivation = intrinsic.Motivation(*[jnp.float32(0.0)] * 6)._replace(
    novelty_mean=jnp.float32(novelty_mean), novelty_scale=jnp.float32(1.0)
  )
  imagined = dreamer_update._Imagined(dreamt, None, motivation)
  add_axis = lambda tree: jax.tree.map(lambda x: x[None], tree)
  ranges, largest, _, targets = jax.tree.map(
    lambda x: np.asarray(x)[0],
    jax.vmap(learner._targets, axis_name=devices.DEVICES)(add_axis(state), add_axis(imagined)),
  )
  return targets, state._replace(return_ranges=ranges, largest_novelty_range=largest)


def test_shift_of_the_critic_does_not_change_the_actors_gradient():
  """The actor's gradient reads the advantages alone, which are centred by their weighted mean.

  With lambda = 0 a shift c of the critic shifts every temporal-difference error by (gamma - 1) c.
  """
  dreamer = make_dreamer(lambda_=0.0, gamma=0.5)
  rewards = {TASK: [[0, 0], [3, 9], [6, -3]], NOVELTY: [[0, 0], [1, 0], [0, 3]]}
  zeros = np.zeros((3, 2))
  expected, _ = targets_of(dreamer, rewards, {TASK: zeros, NOVELTY: zeros})
  found, _ = targets_of(dreamer, rewards, {TASK: zeros + 4, NOVELTY: zeros - 2})
  np.testing.assert_allclose(found.advantage, expected.advantage, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found.weight, expected.weight)
  assert np.abs(expected.advantage).max() > 0.1
  assert np.sum(expected.weight * expected.advantage) == pytest.approx(0, abs=1e-6)
  np.testing.assert_allclose(found.returns[TASK], expected.returns[TASK] + 0.5 * 4)


def test_advantage_of_novelty_is_divided_by_the_largest_range_so_far():
  """So novelty fades as the model learns, where that of the task is on a scale of its own."""
  dreamer = make_dreamer(lambda_=0.0, novelty_scale=0.1)
  zeros = np.zeros((2, 2))
  rewards = lambda size: {TASK: zeros, NOVELTY: [[0, 0], [0, size]]}
  values = {TASK: zeros, NOVELTY: zeros}
  targets, first = targets_of(dreamer, rewards(2.0), values)
  spread = 0.9 * 2  # from 5 to 95 % of the returns 0 and 2
  assert first.largest_novelty_range == pytest.approx(spread)
  np.testing.assert_allclose(targets.advantage[0], np.array([-1, 1]) / spread, rtol=1e-5)
  targets, second = targets_of(dreamer, rewards(0.2), values, first)
  np.testing.assert_allclose(targets.advantage[0], 0.1 * np.array([-1, 1]) / spread, rtol=1e-5)
  assert second.largest_novelty_range == first.largest_novelty_range
  _, third = targets_of(dreamer, rewards(20.0), values, second)
  assert third.largest_novelty_range > second.largest_novelty_range
  assert third.largest_novelty_range == pytest.approx(
    third.return_ranges[NOVELTY].value / (1 - 0.99**3), rel=1e-4
  )


@pytest.mark.parametrize(
  'width, expected', [(0.0, 1.0), (0.15, 0.5), (0.3, 0.1), (3.0, 0.1)], ids=lambda x: f'{x:g}'
)
def test_weight_of_novelty_falls_as_returns_of_the_task_begin_to_differ(width, expected):
  """From 1 to `novelty_scale`, which it reaches with the least scale of the task's advantages."""
  dreamer = make_dreamer(lambda_=0.0, novelty_scale=0.1, return_floor=0.3)
  zeros, batch = np.zeros((2, 2)), np.array([0.0, width / 0.9])  # from 5 to 95 %: the range
  rewards = {TASK: [[0, 0], batch - batch.mean()], NOVELTY: [[0, 0], [0, 2.0]]}
  values = {TASK: zeros, NOVELTY: zeros}
  targets, _ = targets_of(dreamer, rewards, values)
  task = (batch - batch.mean()) / max(width, 0.3)
  novelty = targets.advantage[0] - task
  np.testing.assert_allclose(novelty, expected * np.array([-1, 1]) / (0.9 * 2), rtol=1e-4)


def test_largest_range_of_novelty_never_falls(dreamer, one_device):
  one_device.begin()
  largest = [0.0]
  for seed in range(6):
    one_device.step(make_batch(dreamer, seed))
    largest.append(float(one_device.arrays().largest_novelty_range))
  assert largest[1] > 0 and largest == sorted(largest)


def test_novelty_beyond_its_mean_is_the_reward_of_its_critic():
  """An agent that is paid for every step would not finish an episode."""
  zeros = np.zeros((2, 2))
  rewards = {TASK: zeros, NOVELTY: [[0, 0], [1.0, 3.0]]}
  values = {TASK: zeros, NOVELTY: zeros}
  targets, _ = targets_of(make_dreamer(), rewards, values, novelty_mean=2.0)
  np.testing.assert_allclose(targets.returns[NOVELTY][0], [-1, 1])
  np.testing.assert_allclose(targets.returns[TASK], 0)


def test_advantages_are_divided_by_a_tenth_of_the_returns_at_least():
  dreamer = make_dreamer(lambda_=0.0, novelty_scale=0.0)
  zeros = np.zeros((2, 2))
  rewards = {TASK: [[0, 0], [99.0, 101.0]], NOVELTY: zeros}
  targets, _ = targets_of(dreamer, rewards, {TASK: zeros})
  np.testing.assert_allclose(targets.advantage[0], [-0.1, 0.1], rtol=1e-5)


def test_statistics_of_real_numbers_follow_the_batches_on_all_devices(dreamer, eight_devices):
  eight_devices.begin()
  batches = [make_batch(dreamer, seed) for seed in range(3)]
  for batch in batches:
    eight_devices.step(batch)
  real = np.concatenate([batch.observation['real'].reshape(-1, 2) for batch in batches])
  symlog = np.sign(real) * np.log1p(np.abs(real))
  for device in range(8):
    found = eight_devices.arrays(device).params['world_model'][modules.STATISTICS]
    assert found['count'] == 3
    np.testing.assert_allclose(found['mean'], symlog.mean(0), rtol=1e-4)
    np.testing.assert_allclose(found['square'], np.square(symlog).mean(0), rtol=1e-4)


def test_values_of_replayed_steps_train_the_model_after_warm_up_alone(one_device):
  """Their gradient reaches the features, so that latents keep what later rewards depend on."""
  dreamer = make_dreamer(warm_up_updates=2)
  batch = experience.time_major(make_batch(dreamer))
  one_device.begin().step(make_batch(dreamer))  # the last layers begin with zeros
  state = one_device.arrays()
  learner = dreamer_update._Learner(dreamer, None, None)

  @jax.jit
  def largest(step):
    features = jnp.ones((NUM_ROWS, BATCH, dreamer.model.networks.feature_size))
    loss = lambda features: learner._value_loss(state._replace(step=step), batch, features)
    return jnp.abs(jax.grad(loss)(features)).max()

  assert largest(jnp.int32(1)) == 0 and largest(jnp.int32(2)) > 0


@pytest.mark.parametrize(
  'changes', [{'ensemble_size': 1}, {'novelty_scale': 0.0}], ids=['one member', 'no weight']
)
def test_without_novelty_the_critic_has_one_head(changes):
  dreamer = make_dreamer(**changes)
  update = dreamer_update.make_update(dreamer, RATES)
  state = jax.eval_shape(update.init, jax.random.key(0))
  assert list(state.return_ranges) == [TASK]
  bins = dreamer.config.num_bins
  assert state.slow_critic['rest']['Dense_0']['bias'].shape == (bins,)
  add_axis = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
  replica, batch = jax.tree.map(add_axis, (state, make_batch(dreamer)))
  new_state, metrics = jax.eval_shape(
    jax.vmap(update.update, axis_name=devices.DEVICES), replica, batch
  )
  assert new_state == replica and 'actor_critic/critic_loss' in metrics


def test_updates_are_traced_once(dreamer, one_device):
  one_device.begin()
  for seed in range(3):
    one_device.step(make_batch(dreamer, seed))
  assert one_device.traces == 1


def test_each_update_has_its_own_key(dreamer, one_device):
  one_device.begin()
  keys = []
  for _ in range(3):
    keys.append(tuple(one_device.arrays().key))
    one_device.step(make_batch(dreamer))
  assert len(set(keys)) == 3


class Dreamt:
  """The update of one device that learns from imagination alone, and counts computed steps."""

  def __init__(self):
    rows, chunks = [], []

    @dataclasses.dataclass(frozen=True)
    class CountingRSSM(rssm.RSSM):
      def imagine(self, *arguments):
        jax.debug.callback(rows.append, jnp.int32(1))
        return super().imagine(*arguments)

    class CountingModel(world_model.WorldModel):
      @property
      def rssm(self):
        return CountingRSSM(self.networks)

    @dataclasses.dataclass(frozen=True)
    class CountingActorCritic(actor_critic.ActorCritic):
      def loss(self, params, rows, targets):
        jax.debug.callback(chunks.append, jnp.int32(1))
        return super().loss(params, rows, targets)

    made = make_dreamer(
      boredom_threshold=10.0, boredom_rise=0.5, warm_up_updates=2, entropy_scale=0.0,
      replayed_value_scale=0.0,
    )  # fmt: skip
    of = lambda part: {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    self.dreamer = made._replace(
      model=CountingModel(**of(made.model)),
      actor_critic=CountingActorCritic(**of(made.actor_critic)),
    )
    self.trainer = Trainer(self.dreamer, 1)
    self._counts = rows, chunks

  def step(self, seed=0):
    """Metrics; whether each part of the policy's state changed; computed steps and chunks."""
    for count in self._counts:
      count.clear()

    def policy():
      state = self.trainer.arrays()
      return state.params['actor_critic'] | {
        'optimizer': state.policy_opt_state,
        'slow critic': state.slow_critic,
        'return ranges': state.return_ranges,
        'largest range': state.largest_novelty_range,
      }

    before = policy()
    metrics = self.trainer.step(make_batch(self.dreamer, seed))
    jax.effects_barrier()
    moved = {
      name: not all(jax.tree.leaves(jax.tree.map(np.array_equal, before[name], params)))
      for name, params in policy().items()
    }
    return metrics, moved, *map(len, self._counts)


@pytest.fixture(scope='module')
def dreamt():
  """Four updates: two of warm-up, and maximal boredom in all of them."""
  made = Dreamt()
  return made, [made.step(seed) for seed in range(4)]


def test_boredom_shortens_imagination_without_a_second_trace(dreamt):
  made, steps = dreamt
  assert [metrics['dream/horizon'] for metrics, *_ in steps] == [0, 0, 2, 2]
  assert made.trainer.traces == 1


def test_imagination_alone_trains_salience_actor_and_critic(dreamt):
  """Their gradient comes from stored imagined steps, without entropy and replayed steps."""
  _, steps = dreamt
  parts = ('salience', 'actor', 'critic', 'optimizer', 'slow critic', 'return ranges')
  everyone = lambda moves: dict.fromkeys(parts, moves)
  for _, moved, *_ in steps[:2]:
    assert moved == everyone(False) | {'largest range': False}
  assert steps[2][1] == everyone(True) | {'largest range': True}
  assert steps[3][1] | {'largest range': None} == everyone(True) | {
    'largest range': None
  }  # see its own test


def test_update_computes_only_the_steps_of_its_horizon(dreamt):
  """A short horizon saves computation in all parts, rather than masking it."""
  made, steps = dreamt
  assert [counts for _, _, *counts in steps] == [[0, 0], [0, 0], [2, 1], [2, 1]]
  made.trainer.begin()
  made.trainer.state = made.trainer.state._replace(step=made.trainer.state.step + 2)
  metrics, _, *counts = made.step()  # after warm-up, and less bored
  assert metrics['dream/horizon'] == 3 and counts == [3, 2]


def test_update_returns_no_typed_key(dreamer):
  made = dreamer_update.make_update(dreamer, RATES)
  state = jax.eval_shape(made.init, jax.random.key(0))
  is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  assert not any(map(is_key, jax.tree.leaves(state)))


def test_no_key_is_used_twice(dreamer):
  made = dreamer_update.make_update(dreamer, RATES)
  batch = jax.tree.map(lambda x: x[None], make_batch(dreamer))
  with jax.debug_key_reuse(True):  # noticed when it is traced
    state = jax.eval_shape(made.init, jax.random.key(0))
    replica = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), state)
    jax.eval_shape(jax.vmap(made.update, axis_name=devices.DEVICES), replica, batch)


def test_bfloat16_reaches_neither_losses_nor_state():
  dreamer = make_dreamer(compute_dtype='bfloat16')
  update = dreamer_update.make_update(dreamer, RATES)
  state = jax.eval_shape(update.init, jax.random.key(0))
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), make_batch(dreamer))
  add_axis = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
  new_state, metrics = jax.eval_shape(
    jax.vmap(update.update, axis_name=devices.DEVICES), jax.tree.map(add_axis, state), batch
  )
  floats = [x.dtype for x in jax.tree.leaves((state, new_state, metrics))
            if jnp.issubdtype(x.dtype, jnp.floating)]  # fmt: skip
  assert set(floats) == {jnp.dtype('float32')}
  assert isinstance(batch.initial_state, rssm.Recurrent)
