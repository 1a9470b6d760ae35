"""Updates between unrolls on the host: what is stored, how often it updates, and a stop within an unroll."""

import collections
import fractions
import time
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.actors import rollout
from hephaestus.learner import checkpoint, loop, ppo_update
from hephaestus.learner import config as learner_config
from hephaestus.learner.sources import stepped
from hephaestus.replay import buffer

NUM_ENVS, NUM_STEPS = 8, 3


class Sequence(NamedTuple):
  """Number of the unroll and of the environment; and the fields that a source reads."""

  number: np.ndarray
  version: np.ndarray


class Train(NamedTuple):
  params: jax.Array
  step: jax.Array
  environment_step: jax.Array
  opt_state: tuple = ()


class Update:
  """An update whose parameter is the sum of what it has read, on all devices."""

  def init(self, key):
    del key
    return Train(jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32))

  def update(self, train, batch):
    read = jax.lax.psum(batch.number.sum(), 'devices')
    steps = train.environment_step + jnp.asarray([NUM_ENVS * NUM_STEPS, 0], jnp.uint32)
    return Train(train.params + read, train.step + 1, steps), {'read': read}

  def environment_step(self, train):
    return ppo_update.environment_step(train)


class Environments:
  """Environments whose sequences have numbers; stops within an unroll, once."""

  metrics = ()

  def __init__(self, stops_at=None):
    self.unrolls = self.inits = self.closed = 0
    self.stopped = False
    self.versions = []
    self._stops_at = stops_at

  def init(self, key):
    del key
    self.inits += 1
    return 'state'

  def unroll(self, params, key, state, version, actor_id):
    assert state == 'state' and np.shape(params) == () and actor_id == 0
    del key
    if self.unrolls == self._stops_at:
      self.stopped = True
      return None
    self.versions.append(int(version))
    number = 10.0 * self.unrolls + np.arange(NUM_ENVS)
    self.unrolls += 1
    sequence = Sequence(number.astype(np.float32), np.full(NUM_ENVS, version, np.int32))
    ended = np.zeros((NUM_STEPS, NUM_ENVS), bool)
    ended[1, :2] = True
    return (
      state,
      sequence,
      rollout.Episodes(
        ended, np.full(ended.shape, 7.0), np.full(ended.shape, 4), np.zeros_like(ended), np.False_
      ),
    )

  def shapes(self, params):
    del params
    shape = lambda dtype: jax.ShapeDtypeStruct((NUM_ENVS,), dtype)
    return Sequence(shape(np.float32), shape(np.int32))

  def close(self):
    self.closed += 1


def make(envs, num_devices, replay=None, update=None):
  program = stepped.HostProgram(
    update or Update(), lambda params: params, envs, jax.local_devices()[:num_devices], replay,
    num_envs=NUM_ENVS, num_steps=NUM_STEPS,
  )  # fmt: skip
  program.compile()
  return program


def make_replay(**changes):
  values = {
    'sizes': np.full(8, 16, np.int32),
    'strata': {'all': 16},
    'capacity': 16,
    'warm_up': 8,
    'rate': fractions.Fraction(3, 8),
  }
  return buffer.ReplaySizes(**values | changes)


class Rows(list):
  write = list.append

  def close(self):
    pass


def train(program, envs, max_environment_steps, max_seconds=None, folder=None):
  """Trains; returns the loop, whether it finished, and its rows of metrics. Checkpoints are in `folder`, if any."""
  rows = Rows()
  made = loop.Loop(
    stepped.Stepped(program, max_environment_steps=max_environment_steps),
    learner_config.PPOLearnerConfig(log_period=100),
    loop.Hooks(should_stop=lambda: envs.stopped, make_logger=lambda step: rows),
    max_environment_steps=max_environment_steps,
    max_seconds=max_seconds,
    checkpointer=folder and checkpoint.Checkpointer(folder),
    seed=0,
  )
  return made, made.run(), rows


@pytest.mark.parametrize('num_devices', [1, 8])
def test_replay_keeps_the_newest_sequences_and_allows_updates_by_the_ratio(num_devices):
  envs = Environments()
  program = make(envs, num_devices, make_replay())
  made, finished, rows = train(program, envs, max_environment_steps=5 * NUM_ENVS * NUM_STEPS)
  assert finished and (envs.inits, envs.unrolls, envs.closed) == (1, 5, 1)
  assert made.step == 4 * 3  # none after the first unroll, which is warm-up
  assert envs.versions == [0, 0, 3, 6, 9]  # each unroll has the newest parameters
  whole = program.gather(made.state)
  assert whole.worlds == () and whole.replay.buffer.inserted == 40
  newest = {10.0 * unroll + env for unroll in (3, 4) for env in range(NUM_ENVS)}
  assert set(whole.replay.buffer.storage.number.tolist()) == newest
  (row,) = rows
  assert row['episodes'] == 10 and row['episode_return'] == 7 and row['episode_length'] == 4
  assert row['replay_ratio'] == pytest.approx(12 * 8 / 32)


@pytest.mark.parametrize('num_devices', [1, 8])
def test_on_policy_update_reads_each_unroll_once(num_devices):
  envs = Environments()
  program = make(envs, num_devices)
  made, finished, _ = train(program, envs, max_environment_steps=3 * NUM_ENVS * NUM_STEPS)
  assert finished and made.step == envs.unrolls == 3 and envs.versions == [0, 1, 2]
  whole = program.gather(made.state)
  assert whole.train.params == sum(80 * unroll + 28 for unroll in range(3))
  assert ppo_update.environment_step(whole.train) == 3 * NUM_ENVS * NUM_STEPS


def test_update_that_cannot_count_its_steps_is_refused_with_what_it_lacks():
  params = collections.namedtuple('Params', ['params'])
  update = types.SimpleNamespace(init=lambda key: params(jnp.zeros(())))
  with pytest.raises(ValueError, match=r'environment_step.*the field step.*opt_state'):
    make(Environments(), 1, update=update)


def test_stop_within_an_unroll_keeps_the_state_before_it():
  envs = Environments(stops_at=2)
  program = make(envs, 1, make_replay())
  made, finished, _ = train(program, envs, max_environment_steps=10**4)
  assert not finished and envs.closed == 1 and made.step == 3
  whole = program.gather(made.state)
  assert whole.replay.buffer.inserted == 16
  placed = program.place(whole)
  assert program.updates_allowed(placed) == 0
  after = program.collect(placed)
  assert after is None  # still asked to stop


def test_experience_of_each_start_within_warm_up_is_kept(tmp_path):
  for start in (1, 2):  # each of which is asked to stop in its second unroll
    program = make(Environments(stops_at=1), 1, make_replay(warm_up=100))
    made, finished, _ = train(program, program.unroll, 10**4, folder=tmp_path)
    assert not finished and made.step == 0
    assert program.gather(made.state).replay.buffer.inserted == 8 * start


def test_run_whose_time_ends_in_an_unroll_without_update_reports(monkeypatch):
  envs = Environments()
  # An hour passes in the fifth unroll, after the only update.
  clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * (envs.unrolls > 4))
  monkeypatch.setattr(loop, 'time', clock)
  program = make(envs, 1, make_replay(warm_up=0, rate=fractions.Fraction(1, 32)))
  made, finished, (row,) = train(program, envs, max_environment_steps=10**4, max_seconds=1800)
  assert finished and (made.step, envs.unrolls) == (1, 5)
  assert row['episodes'] == 5 * 2
  assert row['learner_step'] == 1 and row['environment_step'] == 5 * NUM_ENVS * NUM_STEPS
  # One unroll has the first parameters, the other the newest.
  assert row['replay/all/age/median'] == 0.5
