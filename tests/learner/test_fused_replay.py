"""A fused run with replay: its ratio is exact, and it resumes bitwise."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
import tiny

from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.files import metrics
from hephaestus.launch.run import fused, parts, request
from hephaestus.learner import checkpoint, loop
from hephaestus.learner.sources import staleness, unrolled

# 2.5 updates for each unroll of 4 sequences after the first two; the ring of 32 is full after eight.
STEPS_PER_UNROLL, UPDATES_PER_UNROLL, WARM_UP = 4 * 5, 2.5, 2
OPTIONS = (
  *tiny.SHAPES, 'learner.fused=true', 'agent.warm_up_updates=2', 'replay.replay_ratio=5',
  'replay.strata=[{name: frontier, max_size: 16, share: 0.5}, {name: episodic, max_size: 32, share: 0.5}]',
  'learner.log_period=4',
)  # fmt: skip
CONFIG = config.override(presets.laptop('catch'), [*OPTIONS])
COGNITION = request.TrainRequest(
  cognition=True,
  env='oasis',
  preset='laptop',
  set=(
    *(each for each in OPTIONS if not each.startswith('environment.')),
    'environment.image=true', 'agent.memory_size=64', 'agent.slots=3', 'agent.slot_size=4',
  ),
)  # fmt: skip
# The agent of most tests has a memory: a part of its state that no optimizer changes.
MEMORY = config.override(CONFIG, ['agent.memory_size=64'])
IMAGES = config.override(
  CONFIG, ['environment.cell_pixels=9', 'agent.image_channels=4', 'actor.num_envs=8']
)


def make_program(num_devices=1, *, base=CONFIG, compiled=True, learns=True, **changes):
  """The program of a run; one that does not learn compiles within seconds."""
  made = config.override(base, [f'{key}={value}' for key, value in changes.items()])
  program = fused.build(made, parts.make_parts(made), jax.local_devices()[:num_devices])
  if not learns:
    count = lambda state, batch: (
      state._replace(step=state.step + 1),
      {'reward': batch.reward.sum()},
    )
    program.update = types.SimpleNamespace(init=program.update.init, update=count)
  if compiled:
    program.num_bytes = program.compile()
  return program


@pytest.fixture(scope='module')
def program():
  return make_program(base=MEMORY)


def begin(program, seed=0):
  return program.place(program.init(jax.random.key(seed)))


def assert_equal(one, other):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), one, other)


def test_run_does_not_depend_on_the_lengths_of_calls(program):
  together, sums = program.iterate(begin(program), 7)
  apart, total = begin(program), None
  for count in (1, 4, 2):
    apart, part = program.iterate(apart, count)
    total = part if total is None else jax.tree.map(np.add, total, part)
  assert_equal(program.gather(together), program.gather(apart))
  for name, value in sums.items():
    np.testing.assert_allclose(value, total[name], rtol=1e-4, atol=1e-5, err_msg=name)
  assert program.environment_step(together) == 5 * STEPS_PER_UNROLL
  # Each takes three steps and one that resets, in 25. All are of the explorer, so they are reported, too.
  assert sums['episodes'][0] == sums['explorer_episodes'][0] == 4 * 6


def test_updates_follow_the_replay_ratio_exactly(program):
  state, unrolls = begin(program), []
  assert program.gather(state).replay.buffer.storage.reward.shape == (0, 6)
  for _ in range(6):
    state, _ = program.iterate(state, 1)
    unrolls.append(program.environment_step(state) // STEPS_PER_UNROLL - WARM_UP)
  assert unrolls == [1, 1, 2, 2, 2, 3]
  left = program.updates_left(5 * STEPS_PER_UNROLL, 6, 7 * STEPS_PER_UNROLL - 3)
  assert left == 5 * UPDATES_PER_UNROLL // 1 - 6


@pytest.fixture(scope='module')
def shared():
  """Programs on one and on eight devices that share eight environments of images, and do not learn."""
  return [make_program(count, base=IMAGES, learns=False) for count in (1, 8)]


def test_replay_is_not_copied_between_updates(shared):
  size = {'replay.strata[1].max_size': 32 * 40}
  program, larger = shared[0], make_program(base=IMAGES, learns=False, **size)
  num_bytes = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  storage = num_bytes(larger._replay_shapes()) - num_bytes(program._replay_shapes())
  assert storage > 1e5
  assert larger.num_bytes - program.num_bytes == pytest.approx(storage, rel=0.02)


def test_observation_of_only_images_is_stored_and_resumed(shared):
  """Its state has no numbers, [N, 0], of which no axis follows from the others."""
  program = shared[0]
  state, _ = program.iterate(begin(program), 3)
  whole = program.gather(state)
  assert whole.replay.buffer.storage.observation.shape[1:] == (6, 36, 27, 3)
  assert whole.replay.buffer.storage.initial_state.latent.numbers.shape[1:] == (0,)
  again, _ = program.iterate(program.place(whole), 1)
  state, _ = program.iterate(state, 1)
  assert_equal(program.gather(state), program.gather(again))


def test_eight_devices_split_replay_and_keep_replicas_equal(shared):
  made = shared[1]
  state, sums = made.iterate(begin(made), 17)  # 5 for each unroll after the first; the ring is full
  jax.tree.map(
    lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)),
    jax.device_get((state.train, state.key, state.replay.credit, state.replay.buffer.inserted)),
  )
  assert set(sums['episodes'].tolist()) == {8 * 6}
  whole = made.gather(state)
  assert whole.replay.buffer.inserted == 8 * 5
  assert len(set(whole.replay.buffer.storage.identity)) == 32
  assert_equal(whole, made.gather(made.place(whole)))


def test_eight_devices_collect_store_and_report_as_one(shared, tmp_path):
  """Each device has environments and a ring of its own, so what is collected and sampled differs."""
  folders = [
    Folder(tmp_path / str(count), program, max_environment_steps=6 * 8 * 5)
    for count, program in enumerate(shared)
  ]
  assert all(folder.run.run() for folder in folders)
  one, eight = (folder.state().replay for folder in folders)
  assert (one.credit, one.buffer.inserted) == (eight.credit, eight.buffer.inserted) == (0, 48)
  np.testing.assert_array_equal(one.buffer.storage.version, eight.buffer.storage.version)
  drop = (
    'time', 'steps_per_second', 'replayed_steps_per_second', 'reward', 'episodes', 'episode_return',
    'explorer_return', 'episodes_per_minute',
  )  # fmt: skip
  counts = [
    [{k: v for k, v in row.items() if k not in drop} for row in folder.rows()] for folder in folders
  ]
  assert counts[0] == counts[1]
  assert counts[0][-1]['replay/frontier/age/highest'] == 10


class Folder:
  """Successive runs on one folder."""

  def __init__(self, path, program, *, max_environment_steps, stop_after=None):
    self.path, self.stop_after = path, stop_after
    make_logger = lambda step: metrics.make_logger(
      path, 'learner', steps_key='learner_step', resume=('learner_step', step)
    )
    self.run = loop.Loop(
      unrolled.Unrolled(program, max_environment_steps=max_environment_steps),
      dataclasses.replace(CONFIG.learner),
      loop.Hooks(should_stop=self.should_stop, make_logger=make_logger),
      max_environment_steps=max_environment_steps,
      checkpointer=checkpoint.Checkpointer(path / 'checkpoints'),
      seed=5,
    )

  def should_stop(self):
    return self.stop_after is not None and self.run.step >= self.stop_after

  def rows(self):
    return [json.loads(line) for line in (self.path / 'metrics' / 'learner.jsonl').open()]

  def state(self):
    return self.run._source.gather(self.run.state)


STEPS = 13 * STEPS_PER_UNROLL  # 27 updates, and a ring that is full
ENDS = {'max_environment_steps': STEPS - 3}


@pytest.fixture(scope='module')
def whole(program, tmp_path_factory):
  """A run that has ended."""
  folder = Folder(tmp_path_factory.mktemp('whole'), program, **ENDS)
  assert folder.run.run()
  return folder


def test_stopped_run_resumes_bitwise(program, whole, tmp_path):
  for stop_after in (2, 15):  # before and after the ring is full
    stopped = Folder(tmp_path, program, stop_after=stop_after, **ENDS)
    assert not stopped.run.run()
    assert stop_after <= stopped.run.step < 27
  resumed = Folder(tmp_path, program, **ENDS)
  assert resumed.run.step == stopped.run.step
  assert resumed.run.run()
  assert_equal(whole.state(), resumed.state())
  assert (whole.state().train.statistics['memory']['written'] > 0).sum() > 8
  drop = ('time', 'steps_per_second', 'replayed_steps_per_second', 'episodes_per_minute')
  last = lambda folder: {k: v for k, v in folder.rows()[-1].items() if k not in drop}
  assert last(whole) == pytest.approx(last(resumed), rel=1e-4, abs=1e-6)


@pytest.mark.faults
def test_run_with_cognition_resumes_bitwise():
  made = make_program(base=request.make_config(COGNITION))
  whole, _ = made.iterate(begin(made), 7)
  parts, _ = made.iterate(begin(made), 3)
  parts, sums = made.iterate(made.place(made.gather(parts)), 4)
  assert_equal(made.gather(whole), made.gather(parts))
  assert set(sums) >= {
    'intrinsic/survival',
    'intrinsic/empowerment',
    'intrinsic/progress',
    'memory/filled',
    'dream/remembered',
    'slots/change_error',
    'workspace/share_vitals',
    'workspace/share_slot_2',
  }


def test_run_reports_as_a_distributed_one_and_ends_with_the_last_allowed_update(whole):
  rows, stored = whole.rows(), whole.state().replay.buffer
  assert stored.inserted == 4 * 13 and stored.storage.reward.shape == (32, 6)
  assert len(set(stored.storage.identity)) == 32  # the strata share one ring
  assert [row['learner_step'] for row in rows] == [4, 8, 12, 16, 20, 24, 27]
  assert rows[-1]['environment_step'] == STEPS
  assert rows[-1]['replay_ratio'] == pytest.approx(27 * 8 * 5 / (11 * STEPS_PER_UNROLL))
  assert {'replayed_steps_per_second', 'episodes', 'episode_return', 'world_model/loss'} <= set(
    rows[0]
  )
  # The newest unrolls are of the updates 7, 10, 12, 15, 17, 20, 22 and 25; frontier holds four.
  age = lambda name: [
    rows[-1][f'replay/{name}/age/{which}'] for which in ('lowest', 'median', 'highest')
  ]
  assert age('frontier') == [2, 6, 10]
  assert age('episodic') == [2, 11, 20]
  assert set(rows[-1]) >= set(staleness.report({'frontier': np.zeros(1), 'episodic': np.zeros(1)}))


@pytest.mark.parametrize(
  ('devices', 'changes', 'words'),
  [
    (8, {}, r'actor.num_envs=4: does not divide over 8 devices; 8 would'),
    (
      2, {'replay.strata[1].max_size': 33},
      r'replay.strata.episodic.max_size=33: does not divide over 2 devices; 32 would',
    ),
    (1, {'actor.num_envs': 40}, r'actor.num_envs=40: .* use at most 32'),
  ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(devices, changes, words):
  with pytest.raises(ValueError, match=words):
    make_program(devices, compiled=False, **changes)
