"""Reports on the replay of a fused run by its newest checkpoint, since the replay is on a device."""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

from hephaestus.agents import experience
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.inspect import live
from hephaestus.launch.inspect import report as report_lib
from hephaestus.learner import checkpoint
from hephaestus.learner.sources import unrolled
from hephaestus.replay import buffer as buffer_lib
from hephaestus.replay import inspector


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceReport(report_lib.Report):
  """A report on the strata in a checkpoint of a fused run.

  Attributes:
    learner_step: update of the checkpoint.
    sequences: number of stored sequences.
    duplicates: how many of them are copies of another.
  """

  learner_step: int
  sequences: int
  duplicates: int

  @property
  def state(self) -> str:
    """Sentence that says of which update the numbers are; the run may still be training."""
    return (
      f'a fused run; shown is its checkpoint of update {self.learner_step:,}, with '
      f'{self.sequences:,} sequences'
    )

  def to_json(self) -> dict[str, Any]:
    """The report as `--json` prints it, with fewer keys than without a device's replay.

    A stratum has 'size' and 'max_size' in sequences, its 'share' of each batch, 'steps' of the
    environment and 'age' in updates.
    """
    strata = {
      name: {key: self.tables[name][key] for key in ('size', 'max_size', 'share', 'steps')}
      | {'age': stratum.age_updates}
      for name, stratum in self.strata.items()
    }
    names = ('time', 'learner_step', 'environment_step', 'sequences', 'duplicates', 'warnings')
    return {
      **{name: getattr(self, name) for name in names},
      'replay_ratio': self.replay_ratio['achieved'],
      'strata': strata,
    }


def read(target: str) -> DeviceReport:
  """Reports on the strata in the newest checkpoint of a run, which may still be training.

  Args:
    target: the folder of a fused run with replay.

  Raises:
    ValueError: the target is not a run's folder, or nothing has been saved yet.
  """
  folder = pathlib.Path(target)
  config = folder_lib.load_config(folder)
  version: Any = jax.ShapeDtypeStruct((), np.int32)
  identity: Any = jax.ShapeDtypeStruct((), np.uint32)
  fields: dict[str, Any] = dict.fromkeys(experience.Sequence._fields, ())
  schema = experience.Sequence(**fields | {'version': version, 'identity': identity})
  restored = _restore(target, schema)
  stored = restored.state.replay.buffer
  inserted, num_steps = int(stored.inserted), config.steps_per_sequence
  slots = len(stored.storage.version)
  held = {
    each.name: buffer_lib.newest(inserted, slots, each.max_size) for each in config.replay.strata
  }
  sizes = {name: len(newest) for name, newest in held.items()}
  shown, strata = {}, {}
  for each in config.replay.strata:
    size = sizes[each.name]
    shown[each.name] = report_lib.stopped_table(
      size, each.max_size, inserted=inserted, share=each.share, steps=size * num_steps
    )
    strata[each.name] = report_lib.newest(
      size,
      sizes,
      num_steps=num_steps,
      ages=inspector.quantiles(restored.step - stored.storage.version[held[each.name]]),
      learner_step=restored.step,
    )
  achieved = restored.step * config.batch_size / max(1, inserted - config.replay.warm_up)
  return DeviceReport(
    time=time.time(),
    running=False,
    tables=shown,
    strata=strata,
    replay_ratio={'configured': config.replay.replay_ratio, 'achieved': achieved, 'recent': None},
    environment_step=inserted * num_steps,
    warnings=live.warnings(folder),
    learner_step=restored.step,
    sequences=slots,
    duplicates=len(stored.storage.identity) - len(np.unique(stored.storage.identity)),
  )


def sequences(target: str, schema: experience.Sequence) -> tuple[experience.Sequence, np.ndarray]:
  """Reads all sequences in the newest checkpoint.

  Args:
    target: the folder of a fused run with replay.
    schema: tree of shapes and dtypes of one sequence.

  Returns:
    The sequences, [S, ...] host arrays, and [S] their indices from the oldest to the newest. In this
    order, the sequences of one unroll are adjacent, one for each environment in a fixed order.

  Raises:
    ValueError: nothing has been saved yet.
  """
  stored = _restore(target, schema).state.replay.buffer
  slots = len(stored.storage.version)
  return stored.storage, buffer_lib.newest(int(stored.inserted), slots, slots)


def _restore(target: str, schema: experience.Sequence) -> checkpoint.Restored:
  """Restores from the newest checkpoint those fields of the stored sequences that `schema` contains.

  Raises:
    ValueError: nothing has been saved yet.
  """
  number: Any = jax.ShapeDtypeStruct((), np.int32)
  storage = jax.tree.map(lambda x: jax.ShapeDtypeStruct((0, *x.shape), x.dtype), schema)
  empty: Any = ()
  replay = unrolled.ReplayState(buffer_lib.Buffer(storage, number), number)
  saver = checkpoint.Checkpointer(pathlib.Path(target) / 'checkpoints', read_only=True)
  restored = saver.restore(
    unrolled.FusedState(empty, empty, empty, replay), any_length=('replay.buffer.storage',)
  )
  saver.close()
  if restored is None:
    raise ValueError(f'{target}: nothing has been saved yet; wait for the first checkpoint')
  return restored
