"""Checks, summarises and shows the sequences in the newest checkpoint of a run's replay."""

import collections
import dataclasses
import datetime
import functools
import pathlib
from collections.abc import Iterator, Sequence
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
from hephaestus.launch.inspect import live, terminal
from hephaestus.launch.inspect import report as report_lib
from hephaestus.launch.run import parts as parts_lib
from hephaestus.replay import columns as columns_lib
from hephaestus.replay import contents as contents_lib
from hephaestus.replay import inspector, tables

_SHOWN = 6  # numbers of an array that are printed one by one


class StoredSequence(NamedTuple):
  """One item of a table that stores sequences.

  `sequence` has host arrays [T, ...]; it is None if it differs from the schema. Only samples have
  observations, because all of them would not fit in memory.
  """

  table: str
  item: contents_lib.Item  # the table's reference to the sequence
  age_rank: int  # among the table's items; 0 is the oldest
  digest: bytes  # of the sequence
  is_sample: bool
  sequence: Any


class Stored(NamedTuple):
  """Content of a checkpoint of replay."""

  violations: list[str]  # a line for each fault
  saved: float  # unix seconds at which the checkpoint was complete
  sequences: int  # number of different sequences
  strata: dict[str, report_lib.Stratum]  # ages in updates are before the newest acting version
  samples: list[StoredSequence]  # of each stratum, evenly spaced from the oldest to the newest
  draw: videos.Draw  # how the run's environment draws an observation; see `Environment.draw`

  def to_json(self) -> dict[str, Any]:
    """All of it as JSON values: {'stored': statistics, 'samples', 'violations'}.

    Samples have the step types, actions, rewards and discounts of each step.
    """
    return {
      'stored': {
        'checkpoint': {'saved': self.saved, 'sequences': self.sequences},
        'strata': {name: dataclasses.asdict(each) for name, each in self.strata.items()},
      },
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
    num_samples: number of sequences to return of each stratum.

  Returns:
    The faults, statistics and samples.

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
  saved, violations, shards = [], [], {}
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
    saved.append(checkpoint.saved)
    strata = [each.name for each in config.replay.strata]
    shards[name], faults = _read(checkpoint, strata, parts.sequence_schema, num_samples, restarts)
    violations += [f'{name}, {text}' if len(here) > 1 else text for text in faults]
  rows = [row for each in shards.values() for row in each]
  # An actor writes to several shards in turn, so neighbours in a shard are not consecutive.
  num_envs = config.actor.num_envs if len(names) == 1 else None
  return Stored(
    violations=[*violations, *_duplicates(shards)],
    saved=min(saved),
    sequences=len({row.item.chunks for row in rows}),
    strata=_strata(rows, config.replay.strata, num_envs, config.steps_per_sequence),
    samples=[row for row in rows if row.is_sample],
    draw=parts.environment.draw,
  )


def _read(
  checkpoint: contents_lib.Contents,
  strata: Sequence[str],
  schema: Any,
  num_samples: int,
  restarts: list[float],
) -> tuple[list[StoredSequence], list[str]]:
  """Reads and checks the checkpoint of one shard, in one pass.

  Returns:
    All items by table, the oldest first; and a line for each fault.
  """
  columns = columns_lib.Columns(schema)
  rows: list[StoredSequence] = []
  violations = list(checkpoint.broken)
  for name in sorted({*checkpoint.items} - {*strata, tables.PARAMS}):
    violations.append(f'table {name!r}: is no stratum of the run; it is not read')
    del checkpoint.items[name]
  violations += [f'table {name!r}: is missing' for name in strata if name not in checkpoint.items]
  checked: set[tuple[int, ...]] = set()
  digests = collections.defaultdict(list)
  for name in filter(checkpoint.items.__contains__, strata):
    is_sound = True
    try:
      columns.check_signature(name, checkpoint.signatures[name])
    except ValueError as error:
      is_sound = False
      violations.append(_place(name) + str(error))
    count = len(checkpoint.items[name])
    wanted = set(np.linspace(0, count - 1, min(num_samples, count)).round().astype(int).tolist())
    for rank, (item, arrays) in enumerate(checkpoint.read(name)):
      digests[name].append(contents_lib.digest(arrays))
      sequence, is_sample = None, False
      if mismatch := columns.mismatch(arrays):
        if is_sound:  # else it is reported once, with the table's signature
          violations.append(_place(name, item.key) + mismatch)
      else:
        sequence = jax.tree.map(lambda x: x[0], columns.unflatten(arrays))
        if item.chunks not in checked:
          checked.add(item.chunks)
          faults = experience.faults(sequence)
          violations += [_place(name, item.key, step) + text for step, text in faults]
        is_sample = rank in wanted
        if not is_sample:
          sequence = sequence._replace(observation=(), initial_state=())
      rows.append(StoredSequence(name, item, rank, digests[name][-1], is_sample, sequence))
  violations += [
    _place(fault.table, fault.key) + fault.text
    for fault in contents_lib.faults(checkpoint, digests, restarts)
  ]
  return rows, violations


def _strata(
  rows: list[StoredSequence],
  strata: Sequence[tables.Stratum],
  num_envs: int | None,
  steps_per_sequence: int,
) -> dict[str, report_lib.Stratum]:
  """Statistics of each stratum, over all shards.

  Args:
    rows: the items of all shards.
    strata: the strata of the run's config.
    num_envs: number of environments whose sequences alternate in the stream of one writer. None if
      consecutive sequences are unknown; then only episodes within one sequence have a return.
    steps_per_sequence: environment steps of a sequence.
  """
  whole = {
    each.name: [row for row in rows if row.table == each.name and row.sequence is not None]
    for each in strata
  }
  versions = {
    name: np.array([int(row.sequence.version) for row in each]) for name, each in whole.items()
  }
  newest = max((int(each.max()) for each in versions.values() if len(each)), default=0)
  found = report_lib.strata(
    {name: sum(row.table == name for row in rows) for name in whole},
    {name: inspector.quantiles(newest - each) for name, each in versions.items()},
    learner_step=newest,
    num_steps=steps_per_sequence,
  )
  for name, each in whole.items():
    streams = [[row.sequence] for row in each] if num_envs is None else _streams(each, num_envs)
    returns = [value for stream in streams for value in experience.episode_returns(stream)]
    found[name] = dataclasses.replace(
      found[name], episodes=len(returns), episode_return=inspector.quantiles(np.array(returns))
    )
  return found


def _duplicates(shards: dict[str, list[StoredSequence]]) -> Iterator[str]:
  """Yields a violation for each sequence that an earlier shard stores, too."""
  seen: dict[bytes, str] = {}
  for name, rows in shards.items():
    for row in rows:
      other = seen.setdefault(row.digest, name)
      if other != name:
        yield f'{name}, {_place(row.table, row.item.key)}{other} stores the same sequence'


def _place(table: str, key: int | None = None, step: int | None = None) -> str:
  """Beginning of a violation's line: its table, key of the item, and step of the sequence."""
  place = f'table {table}'
  place += '' if key is None else f', key {key}'
  return place + ('' if step is None else f', step {step}') + ': '


def _streams(rows: Sequence[StoredSequence], num_envs: int) -> Iterator[list[experience.Sequence]]:
  """Yields lists of consecutive sequences, each list of one environment.

  An actor writes sequences of its environments in turn, so the next one of an environment is
  `num_envs` positions later.
  """
  places = {(row.item.writer, row.item.position): row.sequence for row in rows}
  for writer, position in sorted(places):
    if (writer, position - num_envs) in places:
      continue
    stream = []
    while (writer, position) in places:
      stream.append(places[writer, position])
      position += num_envs
    yield stream


def show(target: str, stored: Stored) -> None:
  """Prints the summary of a run's checkpoint and its samples as tables."""
  console = console_lib.make()
  say = functools.partial(console.print, markup=False, highlight=False)
  moment = datetime.datetime.fromtimestamp(stored.saved)
  say(
    f'{target}: checkpoint of {moment:%Y-%m-%d %H:%M:%S}, {stored.sequences:,} different sequences'
  )
  for name, row in stored.strata.items():
    shared = '' if row.shared is None else f', {live.share(row.shared)} also in the other strata'
    say(f'{name}: {row.sequences:,} sequences{shared}; {row.episodes:,} episodes ended')
  say('')
  console.print(terminal.distribution_table(stored.strata))
  for sample in stored.samples:
    version = int(sample.sequence.version)
    stratum = stored.strata[sample.table]
    assert stratum.version is not None  # of the sample, at least
    say(
      f'\n{sample.table}, key {sample.item.key}, {sample.age_rank + 1:,} of '
      f'{stratum.sequences:,} from the oldest: version '
      f'{version:,} of actor {int(sample.sequence.actor_id)}, '
      f'{stratum.version["highest"] - version:,.0f} updates before the newest; '
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
