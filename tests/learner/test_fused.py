"""The fused run: one program for any number of updates, and a run that resumes bitwise."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors import environments, rollout
from hephaestus.actors.environments import catch, environment
from hephaestus.agents import masked_ppo
from hephaestus.launch.files import metrics
from hephaestus.learner import checkpoint, loop, ppo_update
from hephaestus.learner import config as learner_config
from hephaestus.learner.sources import unrolled

NUM_WORLDS, NUM_STEPS = 16, 8
END = 10**6  # where the rate is 0
CONFIG = learner_config.PPOLearnerConfig(
  num_minibatches=2, num_epochs=2, learning_rate=1e-2, log_period=2
)


def make_fused(
  num_devices=1,
  num_envs=NUM_WORLDS,
  *,
  on_trace=lambda: None,
  world=None,
  compiled=True,
  **changes,
):
  world = world or environments.make('catch', rows=4, columns=3)
  ppo = masked_ppo.make_ppo(
    masked_ppo.PPOConfig(**{'hidden_size': 16, 'num_layers': 1} | changes),
    world.observation_spec,
    world.action_spec,
  )
  scale = ppo_update.auto_scale(
    CONFIG, num_envs=num_envs, num_steps=NUM_STEPS, num_devices=num_devices,
    recurrent=bool(ppo.config.recurrent_size),
  )  # fmt: skip
  update = ppo_update.make_update(ppo, CONFIG, scale, max_environment_steps=END)
  unroll = rollout.make_unroll(
    world, ppo.agent, num_envs=num_envs // num_devices, sequence_length=NUM_STEPS + 1
  )

  def act(*arguments):
    on_trace()
    return unroll.unroll(*arguments)

  made = unrolled.FusedProgram(
    update, ppo.agent.acting_params, unroll._replace(unroll=act), jax.local_devices()[:num_devices],
    num_envs=num_envs, num_steps=NUM_STEPS,
  )  # fmt: skip
  if compiled:
    made.compile()
  return made


TRACES = []


@pytest.fixture(scope='module')
def program():
  return make_fused(on_trace=lambda: TRACES.append(1), recurrent_size=4)


@pytest.fixture(scope='module')
def on_eight_devices():
  return make_fused(8, recurrent_size=4)


def begin(made, seed=0):
  return made.place(made.init(jax.random.key(seed)))


def plain(state):
  """A whole run's state as host arrays."""
  is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), state)


def assert_equal(one, other):
  jax.tree.map(np.testing.assert_array_equal, plain(one), plain(other))


def test_one_call_of_n_updates_equals_n_calls(program):
  traces, state = len(TRACES), begin(program)
  with pytest.raises((TypeError, ValueError)):
    program.iterate(jax.tree.map(lambda x: x[:, :1] if x.ndim > 1 else x, begin(program)), 1)
  together, sums = program.iterate(state, 3)
  apart, total = begin(program), None
  for _ in range(3):
    apart, part = program.iterate(apart, 1)
    total = part if total is None else jax.tree.map(np.add, total, part)
  assert_equal(program.gather(together), program.gather(apart))
  for name, value in sums.items():
    np.testing.assert_allclose(value, total[name], rtol=1e-5, atol=1e-6)
  # An episode takes 3 steps and the one that resets: 4 of each environment's 24 steps are starts.
  assert sums['episodes'][0] == NUM_WORLDS * 3 * NUM_STEPS / 4
  assert sums['episode_length'][0] == 3 * sums['episodes'][0]
  assert sums['ended_episodes'][0] == sums['episodes'][0]  # none is an explorer's
  assert len(TRACES) == traces  # at compilation only


def test_eight_devices_split_environments_and_keep_replicas_equal(on_eight_devices):
  made = on_eight_devices
  state, sums = made.iterate(begin(made), 3)
  arrays = plain(state)
  for device in range(1, 8):
    same = lambda x, d=device: np.testing.assert_array_equal(x[0], x[d])
    jax.tree.map(same, (arrays.train, arrays.key))
  assert sums['episodes'][0] == NUM_WORLDS * 3 * NUM_STEPS / 4
  balls = plain(made.gather(state)).worlds.env_state.env_state.ball_column
  assert balls.shape == (NUM_WORLDS,)
  assert len(set(balls)) > 1


def test_episodes_of_the_explorer_count_for_the_task_only_if_it_acts_on_all_devices():
  made = make_fused(2, compiled=False)
  of_task = made.unroll.unroll

  def unroll(*arguments):
    state, sequence, episodes = of_task(*arguments)
    explores = jax.lax.axis_index('devices') == 0
    explored = jnp.full_like(episodes.ended, explores)
    return state, sequence, episodes._replace(explored=explored, everywhere=explores)

  made.unroll = made.unroll._replace(unroll=unroll, explores=True)
  made.compile()
  _, sums = made.iterate(begin(made), 3)
  assert sums['episodes'][0] == sums['explorer_episodes'][0] == sums['ended_episodes'][0] / 2 > 0


def test_gathered_state_can_be_placed_on_other_devices(program, on_eight_devices):
  state, _ = program.iterate(begin(program), 1)
  gathered = program.gather(state)
  elsewhere = on_eight_devices.place(gathered)
  assert_equal(gathered, on_eight_devices.gather(elsewhere))


class Folder:
  """Successive runs on one folder."""

  def __init__(self, path, made, *, max_environment_steps, max_seconds=None, **changes):
    self.path = path
    self.seen, self.warnings = [], []
    self.stop_after = None
    source = unrolled.Unrolled(
      made,
      max_environment_steps=max_environment_steps,
      warn=self.warnings.append,
    )
    make_logger = lambda step: metrics.make_logger(
      path, 'learner', steps_key='learner_step', resume=('learner_step', step)
    )
    self.run = loop.Loop(
      source,
      dataclasses.replace(CONFIG, **changes),
      loop.Hooks(should_stop=self.should_stop, make_logger=make_logger, between=self.between),
      max_environment_steps=max_environment_steps,
      max_seconds=max_seconds,
      checkpointer=checkpoint.Checkpointer(path / 'checkpoints'),
      seed=5,
    )

  def should_stop(self):
    return self.stop_after is not None and self.run.step >= self.stop_after

  def between(self, status):
    params = status.acting_params()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    self.seen.append((status.step, status.environment_step, status.finished))

  def rows(self):
    return [json.loads(line) for line in (self.path / 'metrics' / 'learner.jsonl').open()]

  def saved(self, made):
    return checkpoint.Checkpointer(self.path / 'checkpoints', read_only=True).restore(made.shapes())


def test_run_ends_with_the_update_that_reaches_its_steps(program, tmp_path):
  folder = Folder(tmp_path, program, max_environment_steps=5 * NUM_WORLDS * NUM_STEPS - 3)
  assert folder.run.run()
  rows = folder.rows()
  assert [row['learner_step'] for row in rows] == [2, 4, 5]
  assert rows[-1]['environment_step'] == 5 * NUM_WORLDS * NUM_STEPS
  assert {
    'steps_per_second',
    'episodes_per_minute',
    'episode_return',
    'ppo/approx_kl',
    'ppo/entropy',
  } <= set(rows[0])
  assert rows[0]['episode_length'] == 3
  assert folder.seen[0] == (0, 0, False) and folder.seen[-1] == (5, 640, True)
  assert not any(finished for _, _, finished in folder.seen[:-1])
  assert folder.saved(program).step == 5


def test_stopped_run_resumes_bitwise(program, tmp_path):
  steps = 6 * NUM_WORLDS * NUM_STEPS
  whole = Folder(tmp_path / 'whole', program, max_environment_steps=steps)
  assert whole.run.run()
  first = Folder(tmp_path / 'parts', program, max_environment_steps=steps)
  first.stop_after = 1
  assert not first.run.run()
  stopped_at = first.saved(program).step
  assert 0 < stopped_at < 6
  assert not any(finished for _, _, finished in first.seen)  # Ctrl-C waits for no evaluation
  second = Folder(tmp_path / 'parts', program, max_environment_steps=steps)
  assert second.run.run()
  assert_equal(whole.saved(program).state, second.saved(program).state)
  drop = ('time', 'steps_per_second', 'episodes_per_minute')
  numbers = lambda rows: {
    row['learner_step']: {key: value for key, value in row.items() if key not in drop}
    for row in rows
  }
  assert numbers(whole.rows())[6] == pytest.approx(numbers(second.rows())[6], rel=1e-5)


def test_stop_between_two_reports_loses_no_episode(program, tmp_path):
  options = {'max_environment_steps': 6 * NUM_WORLDS * NUM_STEPS, 'log_period': 4}
  whole = Folder(tmp_path / 'whole', program, **options)
  assert whole.run.run()
  stopped = Folder(tmp_path / 'parts', program, **options)
  stopped.stop_after = 1
  assert not stopped.run.run()
  resumed = Folder(tmp_path / 'parts', program, **options)
  assert resumed.run.run()
  assert [row['learner_step'] for row in resumed.rows()] == [1, 4, 6]
  episodes = lambda folder: sum(row['episodes'] for row in folder.rows())
  assert episodes(resumed) == episodes(whole) > 0


def test_run_resumes_with_another_number_of_environments(program, tmp_path):
  steps = NUM_WORLDS * NUM_STEPS
  first = Folder(tmp_path, program, max_environment_steps=3 * steps)
  assert first.run.run()
  before = first.saved(program).state.train
  assert first.warnings == []

  wider = make_fused(num_envs=2 * NUM_WORLDS, recurrent_size=4)
  second = Folder(tmp_path, wider, max_environment_steps=7 * steps - 1)
  (warning,) = second.warnings
  assert 'all begin new episodes' in warning
  begun = wider.gather(second.run.state)
  assert_equal(begun.train, before)
  assert (np.asarray(begun.worlds.episode_length) == 0).all()
  assert second.run.run()
  rows = second.rows()
  assert [row['environment_step'] for row in rows] == [2 * steps, 3 * steps, 5 * steps, 7 * steps]
  rates = [CONFIG.learning_rate * (1 - begin * steps / END) for begin in (0.5, 2, 3, 5)]
  assert [row['ppo/learning_rate'] for row in rows] == pytest.approx(rates, rel=1e-6)
  saved = second.saved(wider)
  assert saved.step == 5
  assert ppo_update.environment_step(saved.state.train) == 7 * steps


@pytest.mark.parametrize('changes', [{'checkpoint_updates': 2}, {'checkpoint_period': 1e-9}])
def test_run_is_saved_every_n_updates_or_seconds_and_at_its_end(program, tmp_path, changes):
  folder = Folder(tmp_path, program, max_environment_steps=5 * NUM_WORLDS * NUM_STEPS, **changes)
  assert folder.run.run()
  saved = sorted(int(path.name) for path in (tmp_path / 'checkpoints').iterdir())
  assert len(saved) == 3 and saved[-1] == 5


def test_run_ends_at_its_time_limit(program, tmp_path):
  folder = Folder(tmp_path, program, max_environment_steps=10**12, max_seconds=1e-6)
  assert folder.run.run()
  assert folder.seen[-1][2]


class Puzzle(environment.Environment):
  """Three steps that show a number at the first or at each, and reward it as the third action."""

  def __init__(self, *, shown_once, continuous):
    self.shown_once = shown_once
    self.action_spec = (
      specs.BoundedArray((1,), np.float32, -2, 2) if continuous else specs.DiscreteArray(2)
    )

  observation_spec = specs.Array((1,), np.float32)
  action_spec = None
  max_steps = 3

  def reset(self, key):
    number = jax.random.bernoulli(key).astype(jnp.float32)
    return (number, jnp.zeros((), jnp.int32)), environment.restart(2 * number[None] - 1)

  def step(self, key, state, action):
    number, count = state
    right = 1.0 - jnp.abs(action.astype(jnp.float32).reshape(()) - number)
    over = count == 2
    observation = jnp.where(self.shown_once, 0.0, 2 * number[None] - 1)
    timestep = jax.lax.cond(
      over,
      environment.termination,
      environment.transition,
      jnp.where(over, right, 0.0),
      observation,
    )
    return (number, count + 1), timestep


@pytest.mark.parametrize(
  ('world', 'changes', 'before', 'after'),
  [
    ({'shown_once': False, 'continuous': True}, {}, 0.5, 0.75),
    ({'shown_once': True, 'continuous': False}, {'recurrent_size': 8}, 0.7, 0.95),
  ],
  ids=['continuous', 'memory'],
)
def test_small_environments_are_learned(world, changes, before, after):
  made = make_fused(num_envs=32, world=Puzzle(**world), gamma=0.9, **changes)
  state, first = made.iterate(begin(made), 3)
  state, _ = made.iterate(state, 70)
  state, last = made.iterate(state, 5)
  mean = lambda sums: float(sums['episode_return'][0] / sums['episodes'][0])
  assert mean(first) < before
  assert mean(last) > after


def test_reward_that_is_not_finite_is_an_error_with_its_environment_steps():
  class Broken(catch.Catch):
    def step(self, key, state, action):
      state, timestep = super().step(key, state, action)
      return state, timestep._replace(reward=jnp.where(timestep.last(), jnp.nan, timestep.reward))

  made = make_fused(world=Broken(rows=4, columns=3))
  source = unrolled.Unrolled(made, max_environment_steps=END)
  state = source.place(source.init(jax.random.key(0)), 0)
  with pytest.raises(
    FloatingPointError, match=r'^environment steps 1 to 128: 32 rewards of the env'
  ):
    source.update(state, 0, 1)
