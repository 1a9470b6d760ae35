"""One process of a learner, as a program: FOLDER COORDINATOR RANK SIZE KIND NUM_UPDATES ENDING.

After NUM_UPDATES the last process asks for the end ('stop'), or stops like a machine that
is frozen, within an update that the others have begun ('freeze'); or no process has more to read
('starve'); or all are asked to stop while their first update compiles for ever ('compile').
"""

import gc
import pathlib
import signal
import sys
import threading
import time
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.learner import checkpoint, devices, dreamer_update, loop, process_group
from hephaestus.learner import config as learner_config
from hephaestus.learner.sources import collected, replayed, sampled

BATCH = 8

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

  return dreamer_update.Update(init, update)


class Batches:
  """A reader of the same batches in every run; a process gets its part of each."""

  def __init__(self, make, rank, size, count):
    self._make, self._count = make, count
    self._part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    self._read = 0

  def get(self, timeout_seconds):
    if self._read == self._count:
      time.sleep(timeout_seconds)
      return None
    self._read += 1
    return jax.tree.map(lambda x: x[self._part], self._make(self._read - 1))


class Nobody:
  """Takes parameters."""

  def publish(self, snapshot):
    return True


def main(folder, coordinator, rank, size, kind, num_updates, ending):
  place = process_group.Place(coordinator, rank, size)
  stuck_seconds = 2.0 if ending == 'freeze' else 0.0
  group = process_group.ProcessGroup(place, stuck_seconds=stuck_seconds, should_stop=lambda: False)
  node = None
  compiling = threading.Event()

  def compile_for_ever():
    compiling.set()
    threading.Event().wait()

  is_done = lambda: rank == size - 1 and node is not None and node.step >= num_updates
  if ending == 'freeze':
    begin = group.begin_update
    group.begin_update = lambda step: (
      signal.raise_signal(signal.SIGSTOP) if is_done() else begin(step)
    )
  if kind == 'dreamer':
    sys.path.append(str(pathlib.Path(__file__).parents[1]))  # helpers of the tests
    import small_dreamer

    dreamer = small_dreamer.make_dreamer()
    update = dreamer_update.make_update(dreamer, small_dreamer.RATES)
    make_batch = lambda seed: small_dreamer.make_batch(dreamer, seed)
  else:
    update = mean_update(compile_for_ever if ending == 'compile' else lambda: None)
    make_batch = lambda seed: np.arange(BATCH, dtype=np.float32) + seed
  should_stop = lambda: compiling.is_set() or (ending == 'stop' and is_done())
  source = replayed.FromReplay(
    sampled.Trained(update, lambda params: params),
    sampled.Link(
      Batches(make_batch, rank, size, num_updates if ending == 'starve' else None),
      Nobody() if rank == 0 else None,
      launch_id=1,
      should_stop=should_stop,
    ),
    replayed.Experience(
      save=lambda: print('replay is saved', flush=True),
      collected=lambda: collected.Steps(taken=0, lost=0),
      steps_per_batch=BATCH,
      warm_up_steps=0,
    ),
    publish_period=25,
    num_processes=size,
  )
  node = loop.Loop(
    source,
    learner_config.LearnerConfig(batch_size=BATCH, checkpoint_updates=1),
    loop.Budget(max_environment_steps=1),
    loop.Hooks(should_stop=should_stop, make_logger=lambda step: mock.Mock()),
    checkpointer=checkpoint.Checkpointer(folder / 'checkpoints') if rank == 0 else None,
    seed=rank,  # overridden by the first process's state
    group=group,
  )
  print(f'begins at {node.step}', flush=True)
  try:
    node.run()
  finally:
    state = checkpoint.replica(node.state)
    np.savez(folder / f'{rank}.npz', *jax.tree.leaves(state))


if __name__ == '__main__':
  folder, coordinator, rank, size, kind, num_updates, ending = sys.argv[1:]
  main(pathlib.Path(folder), coordinator, int(rank), int(size), kind, int(num_updates), ending)
