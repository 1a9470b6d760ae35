"""One process of a learner, as a program: FOLDER COORDINATOR RANK SIZE KIND NUM_UPDATES ENDING.

After NUM_UPDATES the last process asks for the end ('stop'); or no process has more to read ('starve'); or
all are asked to stop while their first update compiles for ever ('compile').
"""

import gc
import pathlib
import sys
import threading
import time
import types
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.learner import checkpoint, devices, dreamer_update, loop, process_group
from hephaestus.learner import config as learner_config
from hephaestus.learner.sources import collected, on_policy, replayed, sampled

BATCH = 8
OLD = -100  # version of a sequence that PPO does not learn from

gc.set_threshold(100_000, 20, 20)  # as in conftest.py


class Mean(NamedTuple):
  """The state of a trivial update: the mean of all batches."""

  params: jax.Array
  key: jax.Array
  step: jax.Array


def mean_update(compiles=lambda: None):
  def init(key):
    return Mean(jax.random.normal(key), jax.random.key_data(key), jnp.zeros((), jnp.int32))

  def update(state, batch):
    compiles()
    mean = devices.over_devices(batch.mean())
    params = state.params + (mean - state.params) / (state.step + 1)
    return state._replace(params=params, step=state.step + 1), {'mean': mean}

  return types.SimpleNamespace(init=init, update=update)


class Batches:
  """A reader of the same batches in every run; a process gets its part of each."""

  rejected = 0

  def __init__(self, make, rank, size, count):
    self._make, self._rank, self._size, self._count = make, rank, size, count
    self._read = 0

  def get(self, timeout_seconds):
    if self._read == self._count:
      time.sleep(timeout_seconds)
      return None
    self._read += 1
    return jax.tree.map(self._part, self._make(self._read - 1))

  def _part(self, x):
    return np.split(x, self._size)[self._rank]


class Turns:
  """Files by which the first process publishes only once the other one waits for it, or reads."""

  def __init__(self, folder):
    self._folder = folder
    self._updates = 0

  def follow(self, source):
    """Counts the updates of a source."""
    on_update = source.on_update

    def count(status):
      self._updates = status.step
      on_update(status)

    source.on_update = count
    return source

  def published(self, version):
    return self._folder / f'published-{version}'

  def reached(self, version):
    return self._folder / f'reached-{version}'

  def wait(self):
    """Says that this process has done its newest update; it asks whether to stop while it waits."""
    self.reached(self._updates).touch()
    return False


class Queue(Batches):
  """The same for PPO: process r also reads r old sequences with each batch that it gets."""

  def __init__(self, turns, keep, *arguments):
    super().__init__(*arguments)
    self._turns, self._keep = turns, keep
    self.rejected = 0

  def get(self, timeout_seconds):
    if self._read and not self._turns.published(self._read).exists():
      self._turns.wait()
      raise AssertionError(f'batch {self._read} is read before its parameters are published')
    batch = super().get(timeout_seconds)
    if batch is not None:
      for version in [OLD] * self._rank + list(batch.version):
        self._keep(batch._replace(version=np.asarray([version])))
    return batch


class Nobody:
  """Takes parameters."""

  def publish(self, snapshot):
    return True


class Slow:
  """Takes parameters of an update once the other process waits; adds their step to a file."""

  def __init__(self, turns):
    self._turns = turns

  def publish(self, snapshot):
    import polling

    if snapshot.version:
      polling.until(self._turns.reached(snapshot.version).exists, 'the other process')
    with self._turns.published(snapshot.version).open('a') as file:
      file.write(f'{snapshot.environment_step}\n')
    return True


def make_on_policy(folder, group, rank, num_updates):
  """PPO on a queue; at its end the first process has a batch, and publishes again meanwhile."""
  import small_ppo

  is_first = rank == 0
  turns = Turns(folder)
  sampled.REPUBLISH_PERIOD = 0.5

  ppo = small_ppo.make_ppo()
  kept = on_policy.StaleFilter(max_staleness=50)
  make_batch = lambda seed: small_ppo.make_batch(ppo, seed)
  source = on_policy.OnPolicy(
    sampled.Trained(small_ppo.make_update(ppo, jax.device_count()), ppo.agent.acting_params),
    sampled.Link(
      Queue(turns, kept.keep, make_batch, rank, group.size, num_updates + is_first),
      Slow(turns) if is_first else None,
      launch_id=1,
      should_stop=(lambda: False) if is_first else turns.wait,
    ),
    kept,
    steps_per_sequence=small_ppo.NUM_STEPS,
    group=group,
  )
  return turns.follow(source)


def make_replayed(rank, size, kind, num_updates, should_stop, compiles):
  """The dreamer, or a trivial update, on replay; ends at a number of updates, or None."""
  if kind == 'dreamer':
    import small_dreamer

    dreamer = small_dreamer.make_dreamer()
    update = dreamer_update.make_update(dreamer, small_dreamer.RATES)
    make_batch = lambda seed: small_dreamer.make_batch(dreamer, seed)
  else:
    update = mean_update(compiles)
    make_batch = lambda seed: np.arange(BATCH, dtype=np.float32) + seed
  return replayed.FromReplay(
    sampled.Trained(update, lambda params: params),
    sampled.Link(
      Batches(make_batch, rank, size, num_updates),
      Nobody() if rank == 0 else None,
      launch_id=1,
      should_stop=should_stop,
    ),
    replayed.Experience(
      save=lambda: print('replay is saved', flush=True),
      collected=lambda: collected.StepCounts(taken=0, lost=0),
      steps_per_batch=BATCH,
      warm_up_steps=0,
    ),
    publish_period=25,
    num_processes=size,
  )


def main(folder, coordinator, rank, size, kind, num_updates, ending):
  group = process_group.ProcessGroup(coordinator, rank, size, should_stop=lambda: False)
  node = None
  compiling = threading.Event()

  def compile_for_ever():
    compiling.set()
    threading.Event().wait()

  is_done = lambda: rank == size - 1 and node is not None and node.step >= num_updates
  sys.path.append(str(pathlib.Path(__file__).parents[1]))  # helpers of the tests
  should_stop = lambda: compiling.is_set() or (ending == 'stop' and is_done())
  most = num_updates if ending == 'starve' else None
  if kind == 'ppo':
    source = make_on_policy(folder, group, rank, num_updates)
    config = learner_config.PPOLearnerConfig(checkpoint_updates=1, fused=False)
  else:
    compiles = compile_for_ever if ending == 'compile' else lambda: None
    source = make_replayed(rank, size, kind, most, should_stop, compiles)
    config = learner_config.LearnerConfig(batch_size=BATCH, checkpoint_updates=1)
  node = loop.Loop(
    source,
    config,
    loop.Hooks(should_stop=should_stop, make_logger=lambda step: mock.Mock()),
    max_environment_steps=10**9,
    checkpointer=checkpoint.Checkpointer(folder / 'checkpoints') if rank == 0 else None,
    seed=rank,  # overridden by the first process's state
    group=group,
  )
  print(f'begins at {node.step}', flush=True)
  try:
    node.run()
  finally:
    state = devices.first_replica(node.state)
    np.savez(folder / f'{rank}.npz', *jax.tree.leaves(state))


if __name__ == '__main__':
  folder, coordinator, rank, size, kind, num_updates, ending = sys.argv[1:]
  main(pathlib.Path(folder), coordinator, int(rank), int(size), kind, int(num_updates), ending)
