"""Replay of a fused run, read from its newest checkpoint, since it is in the memory of a device."""

import pathlib
from typing import Any

import jax
import numpy as np

from hephaestus.agents import experience
from hephaestus.launch import config as launch_config
from hephaestus.learner import checkpoint
from hephaestus.learner.sources import unrolled
from hephaestus.replay import buffer as buffer_lib


def load(
  folder: pathlib.Path, config: launch_config.ExperimentConfig
) -> tuple[buffer_lib.Saved, dict[str, int]]:
  """Loads the replay in the newest checkpoint, without its sequences; ValueError if none is saved yet.

  Returns:
    The replay; and the checkpoint's 'learner_step', number of 'sequences', and how many of these are
    'duplicates' of another.
  """
  fields: dict[str, Any] = dict.fromkeys(experience.Sequence._fields, ())
  fields['version'] = jax.ShapeDtypeStruct((), np.int32)
  fields['identity'] = jax.ShapeDtypeStruct((), np.uint32)
  restored = _restore(folder, experience.Sequence(**fields))
  stored = restored.state.replay.buffer
  versions, identities = stored.storage.version, stored.storage.identity
  saved = buffer_lib.Saved(
    config=config.replay,
    inserted=int(stored.inserted),
    versions=versions,
    learner_step=restored.step,
    batch_size=config.batch_size,
  )
  return saved, {
    'learner_step': restored.step,
    'sequences': len(versions),
    'duplicates': len(identities) - len(np.unique(identities)),
  }


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
    raise ValueError(f'{folder}: nothing has been saved yet; wait for the first checkpoint')
  return restored
