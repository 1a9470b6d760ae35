"""Checks and shows the sequences in the newest checkpoint of a run's replay."""

import collections
import dataclasses
import datetime
import functools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dm_env
import jax
import numpy as np
import rich.text

from hephaestus.actors import videos
from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.inspect import console as console_lib
from hephaestus.launch.inspect import live
from hephaestus.launch.run import parts as parts_lib
from hephaestus.replay import columns as columns_lib
from hephaestus.replay import contents as contents_lib
from hephaestus.replay import tables

_SHOWN = 6  # numbers of an array that are printed one by one


class Sample(NamedTuple):
  """A stored sequence, host arrays [T, ...], and a table's reference to it; `place` is by age, in words."""

  table: str
  item: contents_lib.Item
  place: str
  sequence: experience.Sequence


@dataclasses.dataclass
class Stored:
  """Content of a checkpoint of replay."""

  draw: videos.Draw  # how the run's environment draws an observation; see `Environment.draw`
  violations: list[str] = dataclasses.field(default_factory=list)  # a line for each fault
  saved: float = math.inf  # unix seconds at which the checkpoint was complete
  sequences: int = 0  # number of different sequences
  newest: int = 0  # version of the parameters that acted last
  samples: list[Sample] = dataclasses.field(default_factory=list)

  def to_json(self) -> dict[str, Any]:
    """All of it as JSON values; samples have the step types, actions, rewards and discounts of each step."""
    return {
      'stored': {'checkpoint': {'saved': self.saved, 'sequences': self.sequences}},
      'samples': [
        {
          'table': sample.table,
          'key': sample.item.key,
          'times_sampled': sample.item.times_sampled,
          'inserted': sample.item.inserted,
          'version': int(sample.sequence.version),
          'actor_id': int(sample.sequence.actor_id),
          'rows': {
            name: metrics.plain(getattr(sample.sequence, name))
            for name in ('step_type', 'action', 'reward', 'discount')
          },
        }
        for sample in self.samples
      ],
      'violations': self.violations,
    }


def read(target: str, num_samples: int = 0) -> Stored:
  """Reads and checks the newest checkpoint of replay, so a running server is unaffected.

  Args:
    target: a run's folder.
    num_samples: number of samples of each stratum, evenly spaced from its oldest to its newest sequence.

  Raises:
    ValueError: the target is not the folder of a distributed run of an off-policy agent, it has no
      checkpoint of replay, or Reverb is not installed.
  """
  run = live.find(target)
  if run is None:
    raise ValueError(f"{target}: --check and --sample read a checkpoint; give the run's folder")
  if run.config.record.on_policy:
    raise ValueError(
      f'{target}: keeps no checkpoint of its queue, since each sequence is read once'
    )
  folder, config = run
  parts = parts_lib.make_parts(config)
  names = parts_lib.replay_names(config.replay.num_shards)
  folders = map(pathlib.Path, parts_lib.replay_folders(folder, config.replay.num_shards))
  places = dict(zip(names, folders, strict=True))
  found, seen = Stored(parts.environment.draw), dict[bytes, str]()
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
    digests = _read(checkpoint, strata, parts.sequence_schema, num_samples, found)
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
  num_samples: int,
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
    count = len(checkpoint.items[name])
    wanted = set(np.linspace(0, count - 1, min(num_samples, count)).round().astype(int).tolist())
    for rank, (item, arrays) in enumerate(checkpoint.read(name)):
      digests[name].append(contents_lib.digest(arrays))
      if mismatch := columns.mismatch(arrays):
        if is_sound:  # else it is reported once, with the table's signature
          found.violations.append(_place(name, item.key) + mismatch)
        continue
      sequence = jax.tree.map(lambda x: x[0], columns.unflatten(arrays))
      found.newest = max(found.newest, int(sequence.version))
      if item.chunks not in checked:
        checked.add(item.chunks)
        for step, text in experience.faults(sequence):
          found.violations.append(_place(name, item.key, step) + text)
      if rank in wanted:
        place = f'{rank + 1:,} of {count:,} from the oldest'
        found.samples.append(Sample(name, item, place, sequence))
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


def show(target: str, stored: Stored) -> None:
  """Prints when a run's checkpoint was made, and its samples as tables."""
  console = console_lib.make()
  say = functools.partial(console.print, markup=False, highlight=False)
  moment = datetime.datetime.fromtimestamp(stored.saved)
  say(
    f'\n{target}: checkpoint of {moment:%Y-%m-%d %H:%M:%S}, {stored.sequences:,} different sequences'
  )
  for sample in stored.samples:
    version = int(sample.sequence.version)
    say(
      f'\n{sample.table}, key {sample.item.key}, {sample.place}: version {version:,} of actor '
      f'{int(sample.sequence.actor_id)}, {stored.newest - version:,} updates before the newest; '
      f'sampled {sample.item.times_sampled:,} times'
    )
    console.print(_steps(sample.sequence))


def _steps(sequence: experience.Sequence) -> rich.text.Text:
  """Table with a line for each step of a sequence."""
  # The last step has no decision.
  of_decision: dict[str, Any] = {'action': sequence.action, **_named(sequence.extras, '')}
  others: dict[str, Any] = {'reward': sequence.reward, 'discount': sequence.discount}
  others |= _named(sequence.observation, 'observation')
  last = len(sequence.step_type) - 1
  rows = []
  for step, kind in enumerate(sequence.step_type.tolist()):
    name = dm_env.StepType(kind).name if kind in (0, 1, 2) else str(kind)
    chosen = ['-' if step == last else _cell(leaf[step]) for leaf in of_decision.values()]
    rows.append([str(step), name, *chosen, *(_cell(leaf[step]) for leaf in others.values())])
  return console_lib.table(['step', 'step type', *of_decision, *others], [rows], left=2)


def _named(tree: Any, name: str) -> dict[str, np.ndarray]:
  """{NAME/PATH: leaf} of a tree; {PATH: leaf} if the name is empty."""
  return {
    '/'.join(filter(None, [name, jax.tree_util.keystr(path, simple=True, separator='/')])): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _cell(value: np.ndarray) -> str:
  """Formats a value of one step; a large array as its shape and range."""
  numbers = np.asarray(value, np.float64).ravel()  # of any dtype, such as bfloat16
  if numbers.size <= _SHOWN:
    return ' '.join(f'{number:.4g}' for number in numbers)
  shape = ' x '.join(map(str, np.shape(value)))
  return f'[{shape}] {numbers.min():.4g} to {numbers.max():.4g}'


def write_videos(stored: Stored, folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes a GIF of each sample, FOLDER/TABLE-NUMBER.gif, by `videos.drawing`; returns their paths.

  Replay does not store the environment's state, so a GIF may show less than a rendered episode.
  """
  made: list[pathlib.Path] = []
  numbers: collections.Counter[str] = collections.Counter()
  for sample in stored.samples:
    numbers[sample.table] += 1
    made.append(folder / f'{sample.table}-{numbers[sample.table]}.gif')
    observation = observation_lib.without_mask(sample.sequence.observation)
    draw = videos.drawing(stored.draw, observation)
    steps = range(len(sample.sequence.step_type))
    frames = [draw(jax.tree.map(lambda x, at=step: x[at], observation)) for step in steps]
    videos.write(frames, made[-1])
  return made
