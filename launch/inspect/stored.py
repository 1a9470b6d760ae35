"""Checks, summarises and shows the sequences in the newest checkpoint of a run's replay."""

import collections
import dataclasses
import datetime
import pathlib
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any, NamedTuple

import dm_env
import jax
import numpy as np
import rich.box
import rich.console
import rich.table

from hephaestus.actors import videos
from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.inspect import console as console_lib
from hephaestus.launch.inspect import live, targets, terminal
from hephaestus.launch.inspect import report as report_lib
from hephaestus.launch.run import parts as parts_lib
from hephaestus.replay import columns as columns_lib
from hephaestus.replay import contents as contents_lib
from hephaestus.replay import inspector, tables

_SHOWN = 6  # numbers of an array that are printed one by one


class Sample(NamedTuple):
  """One stored sequence.

  Attributes:
    table: name of the table that stores it.
    item: the table's reference to it.
    age_rank: its rank among the table's items by age; 0 is the oldest.
    sequence: host arrays [T, ...].
  """

  table: str
  item: contents_lib.Item
  age_rank: int
  sequence: experience.Sequence


class Stored(NamedTuple):
  """Content of a checkpoint of replay.

  Attributes:
    violations: a line for each fault that was found.
    saved: unix seconds at which the checkpoint was complete.
    sequences: number of different sequences.
    strata: statistics of each table of sequences; ages in updates are before the newest acting version.
    samples: sequences of each stratum, evenly spaced from the oldest to the newest.
    draw: how the run's environment draws an observation; see `Environment.draw`.
  """

  violations: list[str]
  saved: float
  sequences: int
  strata: dict[str, report_lib.Stratum]
  samples: list[Sample]
  draw: videos.Draw

  def summary(self) -> dict[str, Any]:
    """The statistics as JSON values: {'checkpoint': {'saved', 'sequences'}, 'strata'}."""
    return {
      'checkpoint': {'saved': self.saved, 'sequences': self.sequences},
      'strata': {name: dataclasses.asdict(each) for name, each in self.strata.items()},
    }


def read(target: str, num_samples: int = 0) -> Stored:
  """Reads and checks the newest checkpoint of replay, from a copy, so a running server is unaffected.

  Reading needs as much memory as the replay server. Ctrl-C stops it, and deletes the copy.

  Args:
    target: a run's folder.
    num_samples: number of sequences to return of each stratum.

  Returns:
    The faults, statistics and samples.

  Raises:
    ValueError: the target is not the folder of a distributed run of an off-policy agent, it has no
      checkpoint of replay, or Reverb is not installed.
  """
  stop = threading.Event()
  # Reverb crashes when Ctrl-C interrupts its call in the main thread.
  with futures.ThreadPoolExecutor(1, thread_name_prefix='read') as thread:
    reading = thread.submit(_read, target, num_samples, stop)
    try:
      return reading.result()
    except KeyboardInterrupt:
      stop.set()
      raise


def _read(target: str, num_samples: int, stop: threading.Event) -> Stored:
  folder, config, _ = targets.find(target)
  if folder is None or config is None:
    raise ValueError(f"{target}: --check and --sample read a checkpoint; give the run's folder")
  if config.record.on_policy:
    raise ValueError(
      f'{target}: keeps no checkpoint of its queue, since each sequence is read once'
    )
  parts = parts_lib.make_parts(config)
  num_shards = config.replay.num_shards
  places = dict(
    zip(
      parts_lib.replay_names(num_shards), parts_lib.replay_folders(folder, num_shards), strict=True
    )
  )
  # In a run on several hosts, each host keeps the checkpoints of its own shards.
  here = {name: place for name, place in places.items() if pathlib.Path(place).is_dir()} or places
  readings: list[_Reading] = []
  for name, place in here.items():
    if stop.is_set():
      raise InterruptedError
    try:
      copy = contents_lib.Contents(place)
    except FileNotFoundError as error:
      raise ValueError(
        f'{error}; a run makes one every learner.checkpoint_period='
        f'{config.learner.checkpoint_period:g} seconds of learning, and at its end'
      ) from None
    with copy:
      restarts = [row['time'] for row in live.starts_of_replay(folder, name)]
      readings.append(_Reading(copy, parts.sequence_schema, num_samples, restarts, stop))
  # An actor writes to several shards in turn, so neighbours in a shard are not consecutive.
  num_envs = config.actor.num_envs if num_shards == 1 else None
  draw = parts.environment.draw
  return _result(readings, list(here), num_envs, config.steps_per_sequence, draw)


class _Reading:
  """Reads the checkpoint of one shard, in one pass.

  Attributes:
    saved: unix seconds at which the checkpoint was complete.
    items: items of each table, the oldest first.
    strata: names of the tables that store sequences.
    violations: a line for each fault that was found.
    samples: sequences of each stratum, evenly spaced from the oldest to the newest.
    digests: hashes of each stratum's sequences, in the order of its items.
    kept: items and sequences of each stratum; the sequences lack their observations, which would not
      fit in memory.
  """

  def __init__(
    self,
    copy: contents_lib.Contents,
    schema: experience.Sequence,
    num_samples: int,
    restarts: list[float],
    stop: threading.Event,
  ):
    self._copy = copy
    self.saved = copy.saved
    self.items = copy.items
    self._schema = columns_lib.Columns(schema)
    self.strata = [name for name in copy.items if name != tables.PARAMS]
    self.violations = list(copy.broken)
    self.samples: list[Sample] = []
    self.digests: dict[str, list[bytes]] = {}
    self.kept: dict[str, list[tuple[contents_lib.Item, experience.Sequence]]] = {}
    checked: set[tuple[int, ...]] = set()
    for name in self.strata:
      self.digests[name], self.kept[name] = [], []
      is_sound = self._check_signature(name)
      count = len(copy.items[name])
      wanted = set(np.linspace(0, count - 1, min(num_samples, count)).round().astype(int).tolist())
      for index, (item, arrays) in enumerate(copy.read(name)):
        if stop.is_set():
          raise InterruptedError
        self.digests[name].append(contents_lib.digest(arrays))
        mismatch = self._schema.mismatch(arrays)
        if mismatch:  # reported once if the table's signature differs
          self.violations += [_place(name, item.key) + mismatch] if is_sound else []
          continue
        sequence = jax.tree.map(lambda x: x[0], self._schema.unflatten(arrays))
        if item.chunks not in checked:
          checked.add(item.chunks)
          self.violations += [
            _place(name, item.key, step) + text for step, text in experience.faults(sequence)
          ]
        if index in wanted:
          self.samples.append(Sample(name, item, index, sequence))
        self.kept[name].append((item, sequence._replace(observation=(), initial_state=())))
    self.violations += [
      _place(fault.table, fault.key) + fault.text
      for fault in contents_lib.faults(copy, self.digests, restarts)
    ]

  def _check_signature(self, name: str) -> bool:
    try:
      self._schema.check_signature(name, self._copy.signatures[name])
    except ValueError as error:
      self.violations.append(_place(name) + str(error))
      return False
    return True


def _result(
  readings: list[_Reading],
  names: list[str],
  num_envs: int | None,
  steps_per_sequence: int,
  draw: videos.Draw,
) -> Stored:
  """Merges the readings of all shards.

  Args:
    readings: one of each shard.
    names: names of the shards' processes.
    num_envs: number of environments whose sequences alternate in the stream of one writer. None if
      consecutive sequences are unknown; then only episodes within one sequence have a return.
    steps_per_sequence: environment steps of a sequence.
    draw: how the run's environment draws an observation.
  """
  several = len(readings) > 1
  violations = [
    f'{name}, {text}' if several else text
    for name, reading in zip(names, readings, strict=True)
    for text in reading.violations
  ]
  if several:
    violations += _duplicates(readings, names)
  strata = {}
  newest = max(
    (int(row.version) for reading in readings for kept in reading.kept.values() for _, row in kept),
    default=0,
  )
  for name in readings[0].strata:
    kept = [pair for reading in readings for pair in reading.kept.get(name, ())]
    count = sum(len(reading.items.get(name, ())) for reading in readings)
    versions = np.array([int(sequence.version) for _, sequence in kept], np.int64)
    streams = [[row] for _, row in kept] if num_envs is None else _streams(kept, num_envs)
    returns = [value for stream in streams for value in experience.episode_returns(stream)]
    chunks, shared = _chunks(readings, name), _chunks(readings, name)
    others = [other for other in readings[0].strata if other != name]
    for other in others:
      shared &= _chunks(readings, other)
    shared = shared if others else set()
    strata[name] = report_lib.Stratum(
      sequences=count,
      version=inspector.quantiles(versions),
      age_updates=inspector.quantiles(newest - versions),
      age_steps=inspector.quantiles(np.arange(count) * steps_per_sequence),
      episodes=len(returns),
      episode_return=inspector.quantiles(np.asarray(returns)),
      shared=len(shared) / len(chunks) if chunks else None,
    )
  different = len(set().union(*(_chunks(readings, name) for name in readings[0].strata)))
  saved = min(reading.saved for reading in readings)
  samples = [sample for reading in readings for sample in reading.samples]
  return Stored(violations, saved, different, strata, samples, draw)


def _chunks(readings: list[_Reading], table: str) -> set[tuple[int, ...]]:
  """Keys of the chunks of each of a table's items, in all shards; see `contents.Item`."""
  return {item.chunks for reading in readings for item in reading.items.get(table, ())}


def _duplicates(readings: list[_Reading], names: list[str]) -> Iterator[str]:
  """Yields a violation for each sequence that an earlier shard stores, too."""
  seen: dict[bytes, str] = {}
  for name, reading in zip(names, readings, strict=True):
    for table, digests in reading.digests.items():
      for item, digest in zip(reading.items[table], digests, strict=True):
        other = seen.setdefault(digest, name)
        if other != name:
          yield f'{name}, {_place(table, item.key)}{other} stores the same sequence'


def _place(table: str, key: int | None = None, step: int | None = None) -> str:
  """Beginning of a violation's line: its table, key of the item, and step of the sequence."""
  place = f'table {table}'
  place += '' if key is None else f', key {key}'
  return place + ('' if step is None else f', step {step}') + ': '


def _streams(
  kept: list[tuple[contents_lib.Item, experience.Sequence]], num_envs: int
) -> Iterator[list[experience.Sequence]]:
  """Yields lists of consecutive sequences, each list of one environment.

  An actor writes sequences of its environments in turn, so the next one of an environment is
  `num_envs` positions later.
  """
  places = {(item.writer, item.position): sequence for item, sequence in kept}
  for writer, position in sorted(places):
    if (writer, position - num_envs) in places:
      continue
    stream = []
    while (writer, position) in places:
      stream.append(places[writer, position])
      position += num_envs
    yield stream


def show(target: str, stored: Stored, console: rich.console.Console | None = None) -> None:
  """Prints the summary and the samples as tables.

  Args:
    target: the run's folder, for the heading.
    stored: content of its checkpoint.
    console: where to print; stdout by default.
  """
  console = console or console_lib.make()
  moment = datetime.datetime.fromtimestamp(stored.saved)
  say = lambda text: console.print(text, markup=False, highlight=False)
  say(
    f'{target}: checkpoint of {moment:%Y-%m-%d %H:%M:%S}, {stored.sequences:,} different sequences'
  )
  for name, row in stored.strata.items():
    shared = '' if row.shared is None else f', {live.share(row.shared)} also in the other strata'
    say(f'\n{name}: {row.sequences:,} sequences{shared}')
    console.print(_distribution_table(row))
  for sample in stored.samples:
    console.print()
    version = int(sample.sequence.version)
    stratum = stored.strata[sample.table]
    assert stratum.version is not None  # of the sample, at least
    newest = stratum.version['highest']
    say(
      f'{sample.table}, key {sample.item.key}, {sample.age_rank + 1:,} of '
      f'{stratum.sequences:,} from the oldest: version '
      f'{version:,} of actor {int(sample.sequence.actor_id)}, {newest - version:,.0f} updates before '
      f'the newest; sampled {sample.item.times_sampled:,} times'
    )
    console.print(_steps(sample.sequence))


def _distribution_table(stratum: report_lib.Stratum) -> rich.table.Table:
  """Table of the distributions of a stratum."""
  view = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
  view.add_column('')
  for heading in terminal.HEADINGS.values():
    view.add_column(heading, justify='right')
  episodes = {'episode_return': f'episode return, {stratum.episodes:,} episodes'}
  for key, label in (report_lib.DISTRIBUTIONS | episodes).items():
    view.add_row(label, *terminal.distribution_cells(key, getattr(stratum, key)).values())
  return view


def _steps(sequence: experience.Sequence) -> rich.table.Table:
  """Table with a line for each step of a sequence."""
  view = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
  leaves: dict[str, Any] = {
    'action': sequence.action,
    'reward': sequence.reward,
    'discount': sequence.discount,
    **_named(sequence.extras, ''),
    **_named(sequence.observation, 'observation'),
  }
  for heading in ('step', 'step type', *leaves):
    view.add_column(heading, justify='left' if heading == 'step type' else 'right')
  last = len(sequence.step_type) - 1
  of_decision = {'action', *_named(sequence.extras, '')}
  for step, kind in enumerate(sequence.step_type.tolist()):
    name = dm_env.StepType(kind).name if kind in (0, 1, 2) else str(kind)
    cells = [
      '-' if step == last and label in of_decision else _cell(leaf[step])
      for label, leaf in leaves.items()
    ]
    view.add_row(str(step), name, *cells)
  return view


def _named(tree: Any, name: str) -> dict[str, np.ndarray]:
  """{NAME/PATH: leaf} of a tree; {PATH: leaf} if the name is empty."""
  return {
    '/'.join(filter(None, [name, jax.tree_util.keystr(path, simple=True, separator='/')])): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _cell(value: np.ndarray) -> str:
  """Formats a value of one step; a large array as its shape and range."""
  value = np.asarray(value)
  if value.dtype.kind not in 'biuf':  # such as bfloat16
    value = value.astype(np.float32)
  show = lambda number: f'{number:.4g}'
  if value.size <= _SHOWN:
    return ' '.join(show(number) for number in value.reshape(-1))
  shape = ' x '.join(map(str, value.shape))
  return f'[{shape}] {show(value.min())} to {show(value.max())}'


def samples_json(samples: list[Sample]) -> list[dict[str, Any]]:
  """Converts samples to JSON values, with step types, actions, rewards and discounts of each step."""
  return [
    {
      'table': sample.table,
      'key': sample.item.key,
      'times_sampled': sample.item.times_sampled,
      'inserted': sample.item.inserted,
      'version': int(sample.sequence.version),
      'actor_id': int(sample.sequence.actor_id),
      'rows': {
        'step_type': metrics.plain(sample.sequence.step_type),
        'action': metrics.plain(sample.sequence.action),
        'reward': metrics.plain(sample.sequence.reward),
        'discount': metrics.plain(sample.sequence.discount),
      },
    }
    for sample in samples
  ]


def write_videos(stored: Stored, folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes a GIF of each sample, FOLDER/TABLE-NUMBER.gif, and returns their paths.

  `videos.drawing` draws the observations. Replay does not store the environment's state, so a GIF may
  show less than a rendered episode.

  Args:
    stored: content of a checkpoint, with samples.
    folder: where to write the GIFs.
  """
  made = []
  numbers: collections.Counter[str] = collections.Counter()
  for sample in stored.samples:
    observation = observation_lib.without_mask(sample.sequence.observation)
    show = videos.drawing(stored.draw, observation)
    steps = range(len(sample.sequence.step_type))
    numbers[sample.table] += 1
    path = folder / f'{sample.table}-{numbers[sample.table]}.gif'
    frames = [show(jax.tree.map(lambda x, step=step: x[step], observation)) for step in steps]
    videos.write(frames, path)
    made.append(path)
  return made
