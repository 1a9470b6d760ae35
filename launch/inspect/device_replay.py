"""Reports on the replay of a fused run by its newest checkpoint, since the replay is on a device."""

import pathlib
from typing import Any

import jax
import numpy as np
import rich.console
import rich.table

from hephaestus.agents import experience
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.inspect import console as console_lib
from hephaestus.launch.inspect import live
from hephaestus.learner import checkpoint
from hephaestus.learner.sources import unrolled
from hephaestus.replay import buffer as buffer_lib
from hephaestus.replay import inspector


def read(target: str) -> dict[str, Any]:
  """Reports on the strata in the newest checkpoint of a run, which may still be training.

  Args:
    target: the folder of a fused run with replay.

  Returns:
    {'learner_step', 'environment_step', 'replay_ratio',
     'sequences': number of stored sequences, 'duplicates': how many of them are copies of another,
     'warnings': see `live.Inspection.report`,
     'strata': {NAME: {'size', 'max_size': sequences, 'share': of each batch, 'steps': environment
       steps, 'age': {QUANTILE: updates}}}}.
    'age' has the `inspector.QUANTILES` of the updates between acting and the checkpoint; it is None
    for an empty stratum.

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
  strata = {}
  for stratum in config.replay.strata:
    newest = buffer_lib.newest(inserted, slots, stratum.max_size)
    size = len(newest)
    strata[stratum.name] = {
      'size': size,
      'max_size': stratum.max_size,
      'share': stratum.share,
      'steps': size * num_steps,
      'age': inspector.quantiles(restored.step - stored.storage.version[newest]),
    }
  collected = max(1, inserted - config.replay.warm_up)
  return {
    'learner_step': restored.step,
    'environment_step': inserted * num_steps,
    'replay_ratio': restored.step * config.batch_size / collected,
    'sequences': slots,
    'duplicates': len(stored.storage.identity) - len(np.unique(stored.storage.identity)),
    'strata': strata,
    'warnings': live.warnings(folder),
  }


def show(target: str, report: dict[str, Any], console: rich.console.Console | None = None) -> None:
  """Prints a report of `read` as a table.

  Args:
    target: the folder of the run, for the heading.
    report: the report.
    console: where to print; stdout by default.
  """
  table = rich.table.Table(box=None, header_style='bold')
  rows = cells(report)
  for heading in rows[0]:
    table.add_column(heading, justify='left' if heading == 'stratum' else 'right')
  for row in rows:
    table.add_row(*row.values())
  console = console or console_lib.make()
  console.print(table)
  console.print(
    f'{target} at update {report["learner_step"]:,}: {report["environment_step"]:,} environment steps, '
    f'replay ratio {report["replay_ratio"]:.2f}, {report["sequences"]:,} sequences in the checkpoint'
  )
  for warning in report['warnings']:
    console.print(f'warning: {warning}')


def cells(report: dict[str, Any]) -> list[dict[str, str]]:
  """Formats the strata of a report of `read` as table rows, {HEADING: TEXT} for each stratum."""
  rows = []
  for name, row in report['strata'].items():
    age = row['age']
    rows.append(
      {
        'stratum': name,
        'size': f'{row["size"]:,}',
        'max_size': f'{row["max_size"]:,}',
        'share': f'{row["share"]:g}',
        'steps': f'{row["steps"]:,}',
        'age in updates': f'{age["lowest"]:,.0f} to {age["highest"]:,.0f}' if age else '-',
      }
    )
  return rows


def numbers(report: dict[str, Any]) -> dict[str, str]:
  """Formats the other numbers of a report of `read`: {NAME: TEXT}, with units."""
  named = {
    'state': f'the run is not running; shown is its checkpoint of update {report["learner_step"]:,}',
    'replay ratio': f'{report["replay_ratio"]:.2f} achieved',
    'environment steps': f'{report["environment_step"]:,}',
    'sequences': f'{report["sequences"]:,} in the checkpoint',
  }
  return named | ({'warning': '; '.join(report['warnings'])} if report['warnings'] else {})


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
