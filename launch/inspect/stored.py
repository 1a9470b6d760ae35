"""Checks the sequences in the newest checkpoint of a run's replay."""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from hephaestus.agents import experience
from hephaestus.launch.files import metrics
from hephaestus.launch.inspect import live
from hephaestus.launch.run import parts as parts_lib
from hephaestus.replay import columns as columns_lib
from hephaestus.replay import contents as contents_lib
from hephaestus.replay import tables


@dataclasses.dataclass
class Stored:
  """What is wrong with a checkpoint of replay."""

  violations: list[str] = dataclasses.field(default_factory=list)  # a line for each fault
  saved: float = math.inf  # unix seconds at which the checkpoint was complete
  sequences: int = 0  # number of different sequences


def read(target: str) -> Stored:
  """Reads and checks the newest checkpoint of replay, so a running server is unaffected.

  Args:
    target: a run's folder.

  Raises:
    ValueError: the target is not the folder of a distributed run of an off-policy agent, it has no
      checkpoint of replay, or Reverb is not installed.
  """
  run = live.find(target)
  if run is None:
    raise ValueError(f"{target}: --check reads a checkpoint; give the run's folder")
  if run.config.record.on_policy:
    raise ValueError(
      f'{target}: keeps no checkpoint of its queue, since each sequence is read once'
    )
  folder, config = run
  parts = parts_lib.make_parts(config)
  names = parts_lib.replay_names(config.replay.num_shards)
  folders = map(pathlib.Path, parts_lib.replay_folders(folder, config.replay.num_shards))
  places = dict(zip(names, folders, strict=True))
  found, seen = Stored(), dict[bytes, str]()
  strata = [each.name for each in config.replay.strata]
  # In a run on several hosts, each host keeps the checkpoints of its own shards.
  here = {name: place for name, place in places.items() if place.is_dir()} or places
  for name, place in here.items():
    try:
      checkpoint = contents_lib.Contents(str(place))
    except FileNotFoundError as error:
      raise ValueError(
        f'{error}; a run makes one every learner.checkpoint_period='
        f'{config.learner.checkpoint_period:g} seconds of learning, and at its end'
      ) from None
    restarts = [
      row['time']
      for row in metrics.read(folder / 'metrics' / 'events.jsonl')
      if row['kind'] == 'started' and row.get('name') == name
    ]
    found.saved = min(found.saved, checkpoint.saved)
    before = len(found.violations)
    digests = _read(checkpoint, strata, parts.sequence_schema, found)
    found.violations += [
      _place(fault.table, fault.key) + fault.text
      for fault in contents_lib.faults(checkpoint, digests, restarts)
    ]
    found.violations += _duplicates(name, checkpoint, digests, seen)
    found.sequences += len({item.chunks for name in digests for item in checkpoint.items[name]})
    if len(here) > 1:
      found.violations[before:] = [f'{name}, {text}' for text in found.violations[before:]]
  return found


def _read(
  checkpoint: contents_lib.Contents,
  strata: Sequence[str],
  schema: Any,
  found: Stored,
) -> dict[str, list[bytes]]:
  """Reads and checks the checkpoint of one shard, in one pass; returns the digests of each table's items."""
  columns = columns_lib.Columns(schema)
  found.violations += checkpoint.broken
  for name in sorted({*checkpoint.items} - {*strata, tables.PARAMS}):
    found.violations.append(f'table {name!r}: is no stratum of the run; it is not read')
    del checkpoint.items[name]
  found.violations += [
    f'table {name!r}: is missing' for name in strata if name not in checkpoint.items
  ]
  checked: set[tuple[int, ...]] = set()
  digests = collections.defaultdict(list)
  for name in filter(checkpoint.items.__contains__, strata):
    is_sound = True
    try:
      columns.check_signature(name, checkpoint.signatures[name])
    except ValueError as error:
      is_sound = False
      found.violations.append(_place(name) + str(error))
    for item, arrays in checkpoint.read(name):
      digests[name].append(contents_lib.digest(arrays))
      if mismatch := columns.mismatch(arrays):
        if is_sound:  # else it is reported once, with the table's signature
          found.violations.append(_place(name, item.key) + mismatch)
        continue
      if item.chunks not in checked:
        checked.add(item.chunks)
        sequence = jax.tree.map(lambda x: x[0], columns.unflatten(arrays))
        for step, text in experience.faults(sequence):
          found.violations.append(_place(name, item.key, step) + text)
  return digests


def _duplicates(
  shard: str,
  checkpoint: contents_lib.Contents,
  digests: Mapping[str, list[bytes]],
  seen: dict[bytes, str],
) -> Iterator[str]:
  """Yields a violation for each sequence that an earlier shard, by `seen`, stores, too."""
  for name, each in digests.items():
    for item, digest in zip(checkpoint.items[name], each, strict=True):
      other = seen.setdefault(digest, shard)
      if other != shard:
        yield f'{_place(name, item.key)}{other} stores the same sequence'


def _place(table: str, key: int | None = None, step: int | None = None) -> str:
  """Beginning of a violation's line: its table, key of the item, and step of the sequence."""
  place = f'table {table}'
  place += '' if key is None else f', key {key}'
  return place + ('' if step is None else f', step {step}') + ': '
