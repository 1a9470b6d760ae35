"""Reports on the replay of a run: its strata, rates and bottleneck, live or as last known."""

import dataclasses
import itertools
import pathlib
import re
import time
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import psutil

from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history, metrics
from hephaestus.launch.inspect import report as report_lib
from hephaestus.launch.run import packages
from hephaestus.learner import advice
from hephaestus.replay import inspector, tables

MINUTE = 60.0  # seconds over which waiting is averaged


class Target(NamedTuple):
  """A run, or a replay server without its run.

  Attributes:
    folder: folder of the run; None for a server.
    config: config of the run; None for a server.
    address: HOST:PORT of a server; None for a run, whose address may change at each start.
  """

  folder: pathlib.Path | None
  config: launch_config.ExperimentConfig | None
  address: str | None

  @property
  def is_fused(self) -> bool:
    """Whether it is a fused run, whose replay is on a device and in its checkpoints."""
    return self.config is not None and self.config.fused


def find(target: str) -> Target:
  """Parses a target: the folder of a run, or HOST:PORT of a replay server.

  Raises:
    ValueError: it is neither, it is a fused run without replay, or it needs Reverb, which is not
      installed.
  """
  folder = pathlib.Path(target)
  found = None
  if folder.is_dir():
    found = Target(folder, folder_lib.load_config(folder), None)
  elif ':' in target and target.rsplit(':', 1)[1].isdigit():
    found = Target(None, None, target)
  if found is None:
    raise ValueError(f'{target}: is neither the folder of a run nor HOST:PORT')
  if not found.is_fused:
    remedy = '`hephaestus dashboard` and `report` show its metrics without'
    packages.check_distributed(f'{target}: its replay', remedy)
  elif found.config is not None and found.config.record.on_policy:
    raise ValueError(f'{target}: a fused run is one compiled program, without a replay server')
  return found


def starts_of_replay(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
  """Reads the events of all starts of one replay server of a run, such as 'replay-0', the oldest first."""
  return [
    row
    for row in metrics.read(folder / 'metrics' / 'events.jsonl')
    if row.get('kind') == 'started' and row.get('name') == name
  ]


class Inspection:
  """Makes reports on the replay of a run, or on a replay server whose run is not given."""

  def __init__(
    self, target: str, timeout_seconds: float = 4.0, *, read_seconds: float = float('inf')
  ):
    """Parses the target, see `find`, without calling the server yet.

    Args:
      target: a run's folder, or HOST:PORT of a replay server; numbers that come from the metrics of
        a run are then None.
      timeout_seconds: longest wait for an answer of the server.
      read_seconds: longest time to read the actors' metrics in one report; the next report
        continues from there.
    """
    self._read_seconds = read_seconds
    self._actors: dict[pathlib.Path, history.File] = {}
    self._name = target
    self._target = find(target)
    self._folder, self._config, self._given = self._target
    self._saved: tuple[int, report_lib.Report] | None = None
    self._timeout_seconds = timeout_seconds
    self._addresses: list[str] = []
    self._source: inspector.Source | None = None
    # Reverb crashes when Ctrl-C interrupts its call in the main thread.
    self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix='look')

  @property
  def is_fused(self) -> bool:
    """Whether reports are made from a checkpoint of a fused run, also while it is running."""
    return self._target.is_fused

  @property
  def address(self) -> str:
    """HOST:PORT of the last report's server, or of all its shards, separated by commas."""
    return ', '.join(self._addresses)

  def report(self) -> report_lib.Report:
    """Makes a report from the server's tables and the metrics that the run's processes write.

    If no server answers, or the run is fused, it is made from the newest checkpoint and the metrics.

    Raises:
      ValueError: the folder is no longer one of a run, or a fused run has saved nothing yet.
      ConnectionError: no server answers, unless the run is not running and has metrics to report.
    """
    folder, config = self._folder, self._config
    if folder is not None and config is not None and config.fused:
      return self._of_device(folder, config)
    fields = self._poll()
    if folder is not None and config is not None:
      fields |= _of_nodes(folder, config, fields['shards'])
      self._read_actors(folder)
    report = report_lib.Report(time=time.time(), address=self.address, **fields)
    bottleneck = _bottleneck(report) if report.running else None
    return dataclasses.replace(report, strata=self._strata(report), bottleneck=bottleneck)

  def _of_device(
    self, folder: pathlib.Path, config: launch_config.ExperimentConfig
  ) -> report_lib.Report:
    """Reports on the newest checkpoint of a fused run; reads it only if there is a newer one."""
    checkpoints = folder / 'checkpoints'
    changed = checkpoints.stat().st_mtime_ns if checkpoints.exists() else 0
    if self._saved is None or self._saved[0] != changed:
      from hephaestus.launch.inspect import device_replay  # JAX

      source, checkpoint = device_replay.load(folder, config)
      fields = source.poll()
      num_steps = config.steps_per_sequence
      for row in fields['tables'].values():
        row['steps'] = row['size'] * num_steps
      strata = report_lib.strata(
        {name: row['size'] for name, row in fields['tables'].items()},
        fields.pop('ages'),
        learner_step=checkpoint['learner_step'],
        num_steps=num_steps,
      )
      report = report_lib.Report(
        time=time.time(), running=False, strata=strata, warnings=_warnings(folder),
        environment_step=source.inserted * num_steps, checkpoint=checkpoint, **fields,
      )  # fmt: skip
      self._saved = changed, report
    return self._saved[1]

  def _poll(self) -> dict[str, Any]:
    """Polls the server; if none answers, reports the last known state of a run that is not running."""
    addresses = self._newest_addresses()
    if self._source is None or addresses != self._addresses:
      self._addresses = addresses
      replay = None if self._config is None else self._config.replay
      self._source = inspector.Inspector(addresses, replay, timeout_seconds=self._timeout_seconds)
    try:
      return self._thread.submit(self._source.poll).result()
    except ConnectionError as error:
      folder, config, reason = self._folder, self._config, ''
      if folder is not None and config is not None:
        if self._has_process(folder):
          reason = '; its process is running: it is still starting, or too busy to answer'
        else:
          known = _last_known(folder, config)
          if known['tables'] or metrics.last(folder / 'metrics' / 'learner.jsonl') is not None:
            return known
          command = folder_lib.resume_command(folder, config)
          reason = f'; the run is not running, resume it with: {command}'
      raise ConnectionError(f'{error}{reason}') from None

  def _strata(self, report: report_lib.Report) -> dict[str, report_lib.Stratum]:
    """Statistics of the strata, computed without sampling, which would move the rate limiter.

    Versions are from the sequences that the learner sampled between its last two rows of metrics.
    Returns are from the actors' metrics.
    """
    folder, config = self._folder, self._config
    sizes = {name: row['size'] for name, row in report.tables.items() if name != tables.PARAMS}
    learner = (metrics.last(folder / 'metrics' / 'learner.jsonl') if folder else None) or {}
    num_steps = None if config is None else config.steps_per_sequence
    ages: dict[str, Any] = {}
    for name, size in sizes.items():
      of_stratum = {each: learner.get(f'replay/{name}/age/{each}') for each in inspector.QUANTILES}
      ages[name] = of_stratum if size and None not in of_stratum.values() else None
    strata = report_lib.strata(
      sizes, ages, learner_step=learner.get('learner_step') or 0, num_steps=num_steps
    )
    if num_steps and report.environment_step is not None:
      for name, size in sizes.items():
        if size:
          episodes, returns = self._returns(report.environment_step - size * num_steps)
          strata[name] = dataclasses.replace(
            strata[name], episodes=episodes, episode_return=returns
          )
    return strata

  def _returns(self, start: float) -> tuple[int, dict[str, float] | None]:
    """Number of the episodes that ended after environment step `start`, and quantiles of their returns."""
    found, counts = [], []
    for file in self._actors.values():
      places = file.column('environment_step')
      rows = np.flatnonzero(np.isfinite(places))
      rows = rows[places[rows] > start]
      written = [file.column(f'episode_return/{name}')[rows] for name in inspector.QUANTILES]
      known = np.isfinite(written).all(axis=0)
      found.append(np.stack(written, axis=1)[known])
      counts.append(file.column('episodes')[rows][known])
    if not found:
      return 0, None
    count = np.concatenate(counts)
    return int(count.sum()), inspector.pooled(np.concatenate(found), count)

  def _read_actors(self, folder: pathlib.Path) -> None:
    deadline = time.monotonic() + self._read_seconds
    for path in sorted((folder / 'metrics').glob('actor-*.jsonl')):
      file = self._actors.setdefault(path, history.File(path))
      while file.read():
        if time.monotonic() >= deadline:
          return

  def _newest_addresses(self) -> list[str]:
    folder = self._folder
    if folder is None:
      return [self._given or '']
    if not (folder / folder_lib.CONFIG).exists():
      raise ValueError(f'{self._name}: the folder is gone, or no longer one of a run')
    try:
      addresses = (folder / folder_lib.ADDRESS).read_text(errors='replace').split()
    except FileNotFoundError:
      raise ConnectionError(f'{self._name}: this run was never started') from None
    for address in addresses:  # gRPC also connects to sockets of files and others
      if not re.fullmatch(r'[\w.:\[\]-]+:\d+', address, re.ASCII):
        raise ValueError(
          f'{folder / folder_lib.ADDRESS}: {address!r} is not HOST:PORT; delete the file'
        )
    return addresses

  def _has_process(self, folder: pathlib.Path) -> bool:
    """Whether a process of the run's replay exists on this machine."""
    from hephaestus.launch.run import parts as parts_lib  # JAX

    names = parts_lib.replay_names(len(self._addresses))
    started = [rows[-1] for name in names if (rows := starts_of_replay(folder, name))]
    return any(psutil.pid_exists(row['pid']) for row in started if 'pid' in row)


def inspect(target: str, timeout_seconds: float = 4.0, seconds: float = 1.0) -> report_lib.Report:
  """Makes one report with rates, by two calls of the server `seconds` apart; see `Inspection.report`."""
  inspection = Inspection(target, timeout_seconds)
  report = inspection.report()
  if not report.running:
    return report
  time.sleep(seconds)
  return inspection.report()


def _last_known(folder: pathlib.Path, config: launch_config.ExperimentConfig) -> dict[str, Any]:
  """Fields of a stopped run's `report.Report`, by the counts in the newest checkpoint of each shard.

  'tables' is empty and 'saved' is None without a checkpoint on this machine, and for an on-policy
  queue, which has none.
  """
  from hephaestus.launch.run import parts as parts_lib  # JAX
  from hephaestus.replay import contents  # TensorFlow and Reverb

  folders = parts_lib.replay_folders(folder, config.replay.num_shards)
  found = [] if config.record.on_policy else [contents.counts(each) for each in folders]
  shards = [each[1] if each else {} for each in found]
  return inspector.of_counts(shards, config.replay) | {
    'running': False,
    'saved': min((each[0] for each in found if each), default=None),
  }


def _of_nodes(
  folder: pathlib.Path, config: launch_config.ExperimentConfig, shards: list[dict[str, Any]]
) -> dict[str, Any]:
  """Entries of a report that are from the metrics of the learner and the actors."""
  learner_file = folder / 'metrics' / 'learner.jsonl'
  learner = metrics.last(learner_file) or {}
  files = sorted((folder / 'metrics').glob('actor-*.jsonl'))
  actors = [row for path in files if (row := metrics.last(path)) is not None]
  lost, step = learner.get('lost_steps') or 0, learner.get('environment_step') or 0
  if not config.record.on_policy:  # the queue restarts its count with each launch
    # A shard that is down counts with its last answer.
    stratum = config.replay.limiting_stratum.name
    known = [shard['tables'][stratum] for shard in shards if stratum in shard['tables']]
    inserted = sum(row['inserted'] for row in known) * config.steps_per_sequence
    step = max(step, inserted + lost if known else 0)
  versions = [v for row in actors if (v := row.get('parameter_version')) is not None]
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
    'learner_starved_fraction': _lately([learner_file], 'starved_fraction'),
    'actors_throttled_fraction': _lately(files, 'throttled_fraction'),
    'staleness': staleness,
    'warnings': _warnings(folder),
  }


def _warnings(folder: pathlib.Path) -> list[str]:
  """Sentences on parts of a run's agent that do nothing, by the newest metrics of its learner."""
  rows = metrics.newest(folder / 'metrics' / 'learner.jsonl', advice.WINDOW)
  return [*advice.of_replay(rows).values()]


def _lately(files: Sequence[pathlib.Path], key: str) -> float | None:
  """Mean over nodes of a share of their time in the last minute; None without any row.

  A row covers the time since the row before it, and is weighted by that time. A node without a row
  in the last minute counts by its newest one.
  """
  shares = []
  begin = time.time() - MINUTE
  for path in files:
    rows = [row for row in metrics.since(path, begin) if row.get(key) is not None]
    if not rows:
      newest = metrics.last(path)
      shares += [] if newest is None or newest.get(key) is None else [newest[key]]
      continue
    times = [begin, *(row['time'] for row in rows)]
    spans = [later - earlier for earlier, later in itertools.pairwise(times)]
    shares.append(sum(row[key] * span for row, span in zip(rows, spans, strict=True)) / sum(spans))
  return sum(shares) / len(shares) if shares else None


def _bottleneck(report: report_lib.Report) -> str | None:
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


def waiting(report: report_lib.Report) -> tuple[float, float]:
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
