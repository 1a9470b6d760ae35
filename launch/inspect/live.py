"""Reports on the replay of a run, live or as last known: its tables, rates and bottleneck."""

import dataclasses
import itertools
import pathlib
import re
import time
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.run import validation
from hephaestus.learner import advice
from hephaestus.replay import inspector

MINUTE = 60.0  # seconds over which waiting is averaged


Quantiles = dict[str, float]
"""A distribution, by the keys of `inspector.QUANTILES`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """A report on the replay of a run, live or as last known. The first six fields: see `Inspector.poll`."""

  tables: dict[str, dict[str, Any]]
  replay_ratio: dict[str, float | None]
  limiter: dict[str, Any] | None
  memory: dict[str, float | None]
  shards: list[dict[str, Any]]
  seconds: float | None
  time: float  # unix seconds
  running: bool = True  # whether a server answered
  saved: float | None = None  # unix seconds of the oldest checkpoint that it is made from
  address: str = '-'  # HOST:PORT of all shards, separated by commas
  environment_step: int | None = None
  lost_steps: int | None = None  # how many of these a restart of replay has lost
  parameter_version: int | None = None  # the newest that an actor uses
  # Shares of time spent waiting, over the last minute, or by the newest metrics if those are older.
  learner_starved_fraction: float | None = None
  actors_throttled_fraction: float | None = None
  # Age of the actors' parameters in updates: 'newest_updates', 'oldest_updates'.
  staleness: dict[str, int] = dataclasses.field(default_factory=dict)
  warnings: list[str] = dataclasses.field(default_factory=list)  # see `advice.of_replay`
  # Ages in updates of the sequences of a stratum; missing if unknown.
  ages: dict[str, Quantiles] = dataclasses.field(default_factory=dict)
  bottleneck: str | None = None  # sentence that names it
  # The one that it is made from, of a fused run: 'learner_step', number of 'sequences' and 'duplicates'.
  checkpoint: dict[str, int] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    """The report as `--json` prints it: keys stay the same between versions.

    The report on a fused run has fewer: a stratum has 'size' and 'max_size' in sequences, its 'share' of each
    batch, 'steps' of the environment and 'age' in updates.
    """
    if not self.checkpoint:
      return dataclasses.asdict(self)
    keys = ('size', 'max_size', 'share', 'steps')
    return {
      'time': self.time,
      'environment_step': self.environment_step,
      'warnings': self.warnings,
      **self.checkpoint,
      'replay_ratio': self.replay_ratio['achieved'],
      'strata': {
        name: {key: row[key] for key in keys} | {'age': self.ages.get(name)}
        for name, row in self.tables.items()
      },
    }


class Run(NamedTuple):
  """A run whose replay is inspected."""

  folder: pathlib.Path
  config: launch_config.ExperimentConfig

  def last(self, node: str) -> dict[str, Any]:
    """The newest row of metrics of a node; {} without one."""
    return metrics.last(self.folder / 'metrics' / f'{node}.jsonl') or {}


def find(target: str) -> Run | None:
  """Finds the run in a folder; None if the target is HOST:PORT, of a replay server.

  Raises:
    ValueError: it is neither, it is a fused run without replay, or it needs Reverb, which is not
      installed.
  """
  folder = pathlib.Path(target)
  run = Run(folder, folder_lib.load_config(folder)) if folder.is_dir() else None
  if run is None and not re.fullmatch(r'.*:\d+', target):
    raise ValueError(f'{target}: is neither the folder of a run nor HOST:PORT')
  if run is None or not run.config.fused:
    remedy = '`hephaestus dashboard` and `report` show its metrics without'
    validation.check_distributed(f'{target}: its replay', remedy)
  elif run.config.record.on_policy:
    raise ValueError(
      f'{target}: a fused run is one compiled program, without a replay server; `hephaestus dashboard {target}` shows it'
    )
  return run


class Inspection:
  """Makes reports on the replay of a run, or on a replay server whose run is not given.

  Attributes:
    address: HOST:PORT of the last report's server, or of all its shards, separated by commas.
  """

  def __init__(self, target: str, timeout_seconds: float = 4.0):
    """Parses the target, see `find`, without calling the server yet.

    Args:
      target: a run's folder, or HOST:PORT of a replay server; numbers that come from metrics are then None.
      timeout_seconds: longest wait for an answer of the server.
    """
    self.address = ''
    self._target = target
    self._run = find(target)
    self._timeout_seconds = timeout_seconds
    self._source: inspector.Inspector | None = None
    # Reverb crashes when Ctrl-C interrupts its call in the main thread.
    self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix='look')

  def report(self) -> Report:
    """Makes a report from the server's tables and the metrics that the run's processes write.

    If no server answers, or the run is fused, it is made from the newest checkpoint and the metrics.

    Raises:
      ValueError: the folder is no longer one of a run, or a fused run has saved nothing yet.
      ConnectionError: no server answers, unless the run is not running and has metrics to report.
    """
    run = self._run
    if run is not None and run.config.fused:
      from hephaestus.launch.inspect import device_replay  # JAX

      return device_replay.report(*run, _warnings(run))
    fields = self._poll()
    if run is not None:
      fields |= _of_nodes(run, fields['shards'])
    report = Report(time=time.time(), address=self.address, **fields)
    return dataclasses.replace(report, bottleneck=_bottleneck(report) if report.running else None)

  def _poll(self) -> dict[str, Any]:
    """Polls the server; if none answers, reports the last known state of a run that is not running."""
    run = self._run
    addresses = [self._target] if run is None else _addresses(run.folder)
    if self._source is None or ', '.join(addresses) != self.address:
      self.address = ', '.join(addresses)
      replay = None if run is None else run.config.replay
      self._source = inspector.Inspector(addresses, replay, timeout_seconds=self._timeout_seconds)
    try:
      return self._thread.submit(self._source.poll).result()
    except ConnectionError as error:
      if run is None:
        raise
      if folder_lib.is_running(run.folder):
        reason = 'the run is running: replay is still starting, or too busy to answer'
      else:
        known = _last_known(run)
        if known['tables'] or run.last('learner'):
          return known
        command = folder_lib.resume_command(*run)
        reason = f'the run is not running, resume it with: {command}'
      raise ConnectionError(f'{error}; {reason}') from None


def inspect(target: str) -> Report:
  """Makes one report with rates, by two calls of the server a second apart; see `Inspection.report`."""
  inspection = Inspection(target)
  report = inspection.report()
  if not report.running:
    return report
  time.sleep(1.0)
  return inspection.report()


def _addresses(folder: pathlib.Path) -> list[str]:
  """HOST:PORT of each shard of a run's replay."""
  if not (folder / folder_lib.CONFIG).exists():
    raise ValueError(f'{folder}: the folder is gone, or no longer one of a run')
  file = folder / folder_lib.ADDRESS
  try:
    addresses = file.read_text(errors='replace').split()
  except FileNotFoundError:
    raise ConnectionError(f'{folder}: this run was never started') from None
  for address in addresses:  # gRPC also connects to sockets of files and others
    if not re.fullmatch(r'[\w.:\[\]-]+:\d+', address, re.ASCII):
      raise ValueError(f'{file}: {address!r} is not HOST:PORT; delete the file')
  return addresses


def _last_known(run: Run) -> dict[str, Any]:
  """Fields of a stopped run's `report.Report`, by the counts in the newest checkpoint of each shard.

  'tables' is empty and 'saved' is None without a checkpoint on this machine, and for an on-policy
  queue, which has none.
  """
  from hephaestus.launch.run import parts as parts_lib  # JAX
  from hephaestus.replay import contents  # TensorFlow and Reverb

  folders = parts_lib.replay_folders(run.folder, run.config.replay.num_shards)
  found = [] if run.config.record.on_policy else [contents.counts(each) for each in folders]
  shards = [each[1] if each else {} for each in found]
  return inspector.of_counts(shards, run.config.replay) | {
    'running': False,
    'saved': min((each[0] for each in found if each), default=None),
  }


def _of_nodes(run: Run, shards: list[dict[str, Any]]) -> dict[str, Any]:
  """Entries of a report that are from the metrics of the learner and the actors."""
  learner = run.last('learner')
  written = sorted((run.folder / 'metrics').glob('actor-*.jsonl'))
  files = [path for path in written if folder_lib.is_node(path.stem, run.config)]
  lost, step = learner.get('lost_steps') or 0, learner.get('environment_step') or 0
  if not run.config.record.on_policy:  # the queue restarts its count with each launch
    # A shard that is down counts with its last answer.
    stratum = run.config.replay.limiting_stratum.name
    known = [shard['tables'][stratum] for shard in shards if stratum in shard['tables']]
    inserted = sum(row['inserted'] for row in known) * run.config.steps_per_sequence
    step = max(step, inserted + lost if known else 0)
  rows = [run.last(path.stem) for path in files]
  versions = [v for row in rows if (v := row.get('parameter_version')) is not None]
  ages = {}
  for each in run.config.replay.strata:  # of what the learner has sampled lately
    age = {key: learner.get(f'replay/{each.name}/age/{key}') for key in inspector.QUANTILES}
    if None not in age.values():
      ages[each.name] = age
  staleness = {}
  if versions and (updates := learner.get('learner_step')) is not None:
    staleness = {
      'newest_updates': max(0, updates - max(versions)),
      'oldest_updates': max(0, updates - min(versions)),
    }
  return {
    'environment_step': step,
    'lost_steps': lost,
    'parameter_version': max(versions, default=None),
    'learner_starved_fraction': _lately(
      [run.folder / 'metrics' / 'learner.jsonl'], 'starved_fraction'
    ),
    'actors_throttled_fraction': _lately(files, 'throttled_fraction'),
    'staleness': staleness,
    'ages': ages,
    'warnings': _warnings(run),
  }


def _warnings(run: Run) -> list[str]:
  """Sentences on parts of a run's agent that do nothing, by the newest metrics of its learner."""
  rows = metrics.newest(run.folder / 'metrics' / 'learner.jsonl', advice.WINDOW)
  return [*advice.of_replay(rows).values()]


def _lately(files: Sequence[pathlib.Path], key: str) -> float | None:
  """Mean over nodes of a share of their time in the last minute; None without any row.

  A row covers the time since the row before it, and is weighted by that time. A node without a row
  in the last minute counts by its newest one.
  """
  shares = []
  begin = time.time() - MINUTE
  for path in files:
    newest = metrics.newest(path, 256)  # more than the last minute has, but for very short periods
    rows = [row for row in newest if row['time'] > begin] or newest[-1:]
    if known := [row for row in rows if row.get(key) is not None]:
      times = [begin, *(row['time'] for row in known)]
      weights = [max(1e-9, later - earlier) for earlier, later in itertools.pairwise(times)]
      shares.append(float(np.average([row[key] for row in known], weights=weights)))
  return sum(shares) / len(shares) if shares else None


def _bottleneck(report: Report) -> str | None:
  """The bottleneck of a run, in words; None where it is unknown."""
  throttled, starved = report.actors_throttled_fraction, report.learner_starved_fraction
  during = 'the last minute'
  if throttled is None or starved is None:
    if report.limiter is None:
      return None
    throttled, starved = waiting(report)
    during = 'the time' if report.seconds is None else f'the last {report.seconds:.1f} s'
  if max(throttled, starved) < 0.01:
    return 'neither actors nor the learner wait'
  if throttled >= starved:
    return f'actors throttled {share(throttled)} of {during}: the learner is the bottleneck'
  return f'learner starved {share(starved)} of {during}: the actors are the bottleneck'


def waiting(report: Report) -> tuple[float, float]:
  """Shares of time for which the rate limiter blocked inserts, and sampling, since the last report.

  Args:
    report: a report, whose limiter is not None.
  """
  assert report.limiter is not None
  worked = report.tables[report.limiter['table']]['worker_time']
  return worked['waiting_for_sampling'], worked['waiting_for_inserts']


def share(value: float | None) -> str:
  """Formats a share of 1 as a percentage; '-' for None."""
  return '-' if value is None else f'{100 * value:.0f} %'
