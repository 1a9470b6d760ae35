"""One process of a learner, as a program: FOLDER COORDINATOR RANK SIZE UPDATE NUM_UPDATES ENDING.

The last process asks for the end when so many updates are done; an ENDING of `freeze` has it stop
like a frozen machine then, within an update that the others have begun.
"""

import pathlib
import signal
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import test_dreamer_update as dreaming

from learner import checkpoint, dreamer_update, learner, process_group
from learner import config as learner_config

STUCK_SECONDS = 2.0


class Mean(NamedTuple):
  """The state of an update that costs nothing: a mean over all that was ever read."""

  params: jax.Array
  key: jax.Array
  step: jax.Array


def mean_update():
  def init(key):
    return Mean(jnp.zeros(()), key, jnp.zeros((), jnp.int32))

  def update(state, batch):
    mean = dreamer_update.over_devices(batch.mean())
    params = state.params + (mean - state.params) / (state.step + 1)
    return state._replace(params=params, step=state.step + 1), {'mean': mean}

  return dreamer_update.Update(init, update)


class Batches:
  """A reader of the same batches in every run, of which a process gets its part."""

  def __init__(self, make, rank, size):
    self._make, self._rank, self._size = make, rank, size
    self._seed = 0

  def get(self, timeout_seconds):
    del timeout_seconds
    count = dreaming.BATCH // self._size
    part = slice(self._rank * count, (self._rank + 1) * count)
    batch = jax.tree.map(lambda x: x[part], self._make(self._seed))
    self._seed += 1
    return batch


class Nobody:
  """Takes parameters."""

  def publish(self, snapshot):
    return True


def main(folder, coordinator, rank, size, kind, num_updates, ending):
  place = process_group.Place(coordinator, rank, size)
  group = process_group.ProcessGroup(place, stuck_seconds=STUCK_SECONDS, should_stop=lambda: False)
  is_last, node = rank == size - 1, None
  is_done = lambda: is_last and node is not None and node._step >= num_updates
  if ending == 'freeze':
    dispatch = group.begin_update
    group.begin_update = lambda step: (
      signal.raise_signal(signal.SIGSTOP) if is_done() else dispatch(step)
    )
  update, make_batch = mean_update(), lambda seed: np.arange(8.0, dtype=np.float32) + seed
  if kind == 'dreamer':
    dreamer = dreaming.make_dreamer()
    update = dreamer_update.make_update(dreamer, dreaming.RATES)
    make_batch = lambda seed: dreaming.make_batch(dreamer, seed)
  node = learner.Learner(
    update=update,
    acting_params=lambda params: params,
    config=learner_config.LearnerConfig(batch_size=dreaming.BATCH, checkpoint_updates=10),
    batch_size=dreaming.BATCH,
    reader=Batches(make_batch, rank, size),
    publisher=Nobody(),
    checkpointer=checkpoint.Checkpointer(folder / 'checkpoints') if rank == 0 else None,
    save_replay=lambda: None,
    environment_step=lambda: 0,
    make_logger=lambda step: learner.loggers.NoOpLogger(),
    should_stop=lambda: ending == 'stop' and is_done(),
    max_environment_steps=1,
    steps_per_sequence=1,
    warm_up_steps=0,
    seed=0,
    launch_id=1,
    process_group=group,
  )
  print(f'begins at {node._step}', flush=True)
  try:
    node.run()
  finally:
    state = checkpoint.replica(node._state)
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    np.savez(folder / f'{rank}.npz', *leaves)


if __name__ == '__main__':
  folder, coordinator, rank, size, kind, num_updates, ending = sys.argv[1:]
  main(pathlib.Path(folder), coordinator, int(rank), int(size), kind, int(num_updates), ending)
