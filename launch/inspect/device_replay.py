"""Replay of a fused run, read from its newest checkpoint, since it is in the memory of a device."""

import pathlib
import time
from typing import Any

import jax
import numpy as np

from hephaestus.agents import experience
from hephaestus.launch import config as launch_config
from hephaestus.launch.inspect import live
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import checkpoint
from hephaestus.learner.sources import unrolled
from hephaestus.replay import buffer as buffer_lib


def report(
  folder: pathlib.Path, config: launch_config.ExperimentConfig, warnings: list[str]
) -> live.Report:
  """Reports on the replay in the newest checkpoint; ValueError if none is saved yet."""
  fields: dict[str, Any] = dict.fromkeys(experience.Sequence._fields, ())
  fields['version'] = jax.ShapeDtypeStruct((), np.int32)
  fields['identity'] = jax.ShapeDtypeStruct((), np.uint32)
  restored = _restore(folder, experience.Sequence(**fields))
  stored = restored.state.replay.buffer
  identities, inserted = stored.storage.identity, int(stored.inserted)
  fields = buffer_lib.Saved(
    config.replay, inserted, stored.storage.version, restored.step, config.batch_size
  ).poll()
  fields['ages'] = {name: age for name, age in fields['ages'].items() if age is not None}
  num_steps = config.steps_per_sequence
  for row in fields['tables'].values():
    row['steps'] = row['size'] * num_steps
  return live.Report(
    time=time.time(),
    running=False,
    warnings=warnings,
    environment_step=inserted * num_steps,
    checkpoint={
      'learner_step': restored.step,
      'sequences': len(identities),
      'duplicates': len(identities) - len(np.unique(identities)),
    },
    **fields,
  )


def _restore(folder: pathlib.Path, schema: experience.Sequence) -> checkpoint.Restored:
  """Restores those fields of the stored sequences that `schema` contains."""
  number: Any = jax.ShapeDtypeStruct((), np.int32)
  storage = jax.tree.map(lambda x: jax.ShapeDtypeStruct((0, *x.shape), x.dtype), schema)
  empty: Any = ()
  replay = unrolled.ReplayState(buffer_lib.Buffer(storage, number), number)
  saver = checkpoint.Checkpointer(folder / 'checkpoints', read_only=True)
  restored = saver.restore(
    unrolled.FusedState(empty, empty, empty, replay), any_length=('replay.buffer.storage',)
  )
  saver.close()
  if restored is None:
    raise parts_lib.no_checkpoint(folder)
  return restored
