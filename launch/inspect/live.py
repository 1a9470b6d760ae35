"""Live report on the replay of a run, its bottleneck, and the views of that report."""

import collections
import datetime
import http.server
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import psutil
import rich.console
import rich.live
import rich.markup
import rich.table
import rich.text

from hephaestus.launch import config as launch_config
from hephaestus.launch.inspect import last_known
from hephaestus.launch.report import history
from hephaestus.launch.run import folder as folder_lib
from hephaestus.launch.run import metrics, preflight
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import advice
from hephaestus.replay import inspector, tables

MINUTE = 60.0  # seconds over which waiting is averaged
WIDE = 130  # columns of a terminal from which curves are to the right of the numbers
LABEL = 18  # columns of the name of a number
# Distributions over the sequences of a stratum, by the key of the report.
DISTRIBUTIONS = {
  'version': 'acting version',
  'age_updates': 'age, updates',
  'age_steps': 'age, steps',
  'episode_return': 'episode return',
}
HEADINGS = {
  'lowest': 'lowest',
  'low': '5 %',
  'median': 'median',
  'high': '95 %',
  'highest': 'highest',
}
_BLOCKS = '▁▂▃▄▅▆▇█'
_ACTIVITIES = {
  'sleeping': 'idle',
  'waiting_for_sampling': 'inserts blocked',
  'waiting_for_inserts': 'sampling blocked',
  'sampling': 'sampling',
  'inserting': 'inserting',
  'running': 'other',
}


class Target(NamedTuple):
  """A run, or a replay server without its run.

  Attributes:
    folder: of a run; None for a server alone.
    config: of the run; None for a server alone.
    address: HOST:PORT of the server alone; that of a run may change whenever it is started.
  """

  folder: pathlib.Path | None
  config: launch_config.ExperimentConfig | None
  address: str | None


def find(target: str) -> Target:
  """Parses a target: the folder of a run, or HOST:PORT.

  Raises:
    ValueError: it is neither, the run has no replay, or Reverb is not installed.
  """
  folder = pathlib.Path(target)
  if folder.is_dir():
    config = folder_lib.load_config(folder)
    if config.fused:
      raise ValueError(f'{target}: a fused run is one compiled program, without a replay server')
    _check_packages(target)
    return Target(folder, config, None)
  if ':' in target and target.rsplit(':', 1)[1].isdigit():
    _check_packages(target)
    return Target(None, None, target)
  raise ValueError(f'{target}: is neither the folder of a run nor HOST:PORT')


def _check_packages(target: str) -> None:
  remedy = '`hephaestus dashboard` and `report` show its metrics without'
  preflight.check_distributed(f'{target}: its replay', remedy)


def starts_of_replay(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
  """Events of every start of one of a run's replay servers, in all launches.

  Args:
    folder: of the run.
    name: of the server's node.

  Returns:
    {'time': unix seconds, 'pid', ...} of each start.
  """
  return [
    row
    for row in metrics.read(folder / 'metrics' / 'events.jsonl')
    if row.get('kind') == 'started' and row.get('name') == name
  ]


class Inspection:
  """Makes reports on a run, or on a server alone."""

  def __init__(
    self, target: str, timeout_seconds: float = 4.0, *, read_seconds: float = float('inf')
  ):
    """Parses the target; makes no call yet.

    Args:
      target: a run's folder, or HOST:PORT of a replay server. Numbers that the nodes of a run write
        are None for a server alone.
      timeout_seconds: for the server to answer.
      read_seconds: longest time for reading the actors' metrics in one report; the next report
        continues from there.

    Raises:
      ValueError: the target is neither.
    """
    self._read_seconds = read_seconds
    self._actors: dict[pathlib.Path, history.File] = {}
    self._name = target
    self._target = find(target)
    self._timeout_seconds = timeout_seconds
    self._addresses: list[str] = []
    self._inspector: inspector.Inspector | None = None
    # Reverb crashes when Ctrl-C interrupts its call in the main thread.
    self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix='look')

  @property
  def address(self) -> str:
    """HOST:PORT of the last report; of all shards, separated by commas."""
    return ', '.join(self._addresses)

  def report(self) -> dict[str, Any]:
    """Report of `inspector.Inspector.poll`, with the metrics of the run's nodes.

    Returns:
      Its keys, and

        'time': unix seconds.
        'running': whether a server answered. Otherwise the report is of the newest checkpoints of
          replay and of the metrics, without rates.
        'saved': unix seconds of those checkpoints; None of a server that answers, and without any.
        'address': of the server.
        'environment_step': taken so far.
        'lost_steps': of those, lost by replay when it was restarted, by the newest metrics.
        'parameter_version': the newest that an actor uses.
        'learner_starved_fraction', 'actors_throttled_fraction': of the last minute, or of the
          newest metrics if those are older.
        'staleness': {'newest_updates', 'oldest_updates'}, age of the actors' parameters.
        'bottleneck': in words.
        'alarms': in words, parts of the agent that do nothing; see `advice.alarms`.
        'strata': {NAME: {'sequences', 'version', 'age_updates', 'age_steps', 'episodes',
          'episode_return', 'shared'}}, as of `stored.Stored` but for the live tables. Distributions
          are by `inspector.QUANTILES`, and None where they are unknown.

    Raises:
      ValueError: the folder is no longer one of a run.
      ConnectionError: no server answers, though one should, or nothing is known of the run.
    """
    report = self._poll()
    folder, config, _ = self._target
    report = {
      'running': True,
      'saved': None,
      'time': time.time(),
      'address': self.address,
      **report,
      'environment_step': None,
      'lost_steps': None,
      'parameter_version': None,
      'learner_starved_fraction': None,
      'actors_throttled_fraction': None,
      'staleness': {},
      'alarms': [],
    }
    if folder is not None and config is not None:
      report |= _of_nodes(folder, config, report['shards'])
      self._read_actors(folder)
    report['strata'] = self._strata(report)
    return report | {'bottleneck': _bottleneck(report) if report['running'] else None}

  def _poll(self) -> dict[str, Any]:
    """The report of the server, or what is known of a run that is not running."""
    folder, config, address = self._target
    addresses = [address] if address is not None else []
    if folder is not None:
      addresses = self._newest_addresses(folder)
    if self._inspector is None or addresses != self._addresses:
      self._addresses = addresses
      self._inspector = inspector.Inspector(
        addresses,
        None if config is None else config.replay,
        timeout_seconds=self._timeout_seconds,
      )
    try:
      report = self._thread.submit(self._inspector.poll).result()
    except ConnectionError as error:
      known = self._last_known()
      if known is None:
        raise ConnectionError(f'{error}{self._why(folder)}') from None
      return known
    return report

  def _last_known(self) -> dict[str, Any] | None:
    """A report on a run that is not running; None if it runs, or nothing is known of it."""
    folder, config, _ = self._target
    if folder is None or config is None or self._has_process(folder):
      return None
    report = last_known.of_replay(folder, config)
    if not report['tables'] and metrics.last(folder / 'metrics' / 'learner.jsonl') is None:
      return None
    return report | {'running': False}

  def _strata(self, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Statistics of the strata, computed without sampling, which would move the rate limiter.

    Every stratum drops its oldest sequences first, so it holds the newest ones. Its size gives
    their age in steps, and the share that other strata hold, too. Versions are those of the
    sequences that the learner sampled between its last two rows of metrics. Returns are from the
    actors' metrics.
    """
    folder, config, _ = self._target
    sizes = {name: row['size'] for name, row in report['tables'].items() if name != tables.PARAMS}
    learner = None if folder is None else metrics.last(folder / 'metrics' / 'learner.jsonl')
    names = list(inspector.QUANTILES)
    strata = {}
    for name, size in sizes.items():
      ages = versions = steps = None
      if size and learner is not None and f'replay/{name}/age/median' in learner:
        ages = {quantile: learner[f'replay/{name}/age/{quantile}'] for quantile in names}
        versions = {  # the oldest sequence has the lowest version
          quantile: learner['learner_step'] - ages[other]
          for quantile, other in zip(names, reversed(names), strict=True)
        }
      episodes, returns = 0, None
      if size and folder is not None and config is not None:
        span = size * config.steps_per_sequence
        steps = {
          quantile: at * (size - 1) * config.steps_per_sequence
          for quantile, at in inspector.QUANTILES.items()
        }
        if report['environment_step'] is not None:
          episodes, returns = self._returns(folder, report['environment_step'] - span)
      strata[name] = {
        'sequences': size,
        'version': versions,
        'age_updates': ages,
        'age_steps': steps,
        'episodes': episodes,
        'episode_return': returns,
        'shared': min(sizes.values()) / size if size and len(sizes) > 1 else None,
      }
    return strata

  def _returns(self, folder: pathlib.Path, start: float) -> tuple[int, dict[str, float] | None]:
    """Number and returns of the episodes that ended after an environment step, by the metrics."""
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

  def _newest_addresses(self, folder: pathlib.Path) -> list[str]:
    if not (folder / folder_lib.CONFIG).exists():
      raise ValueError(f'{self._name}: the folder is gone, or no longer one of a run')
    try:
      return (folder / folder_lib.ADDRESS).read_text().split()
    except FileNotFoundError:
      raise ConnectionError(f'{self._name}: this run was never started') from None

  def _why(self, folder: pathlib.Path | None) -> str:
    """The probable reason why the server of a run does not answer."""
    if folder is None:
      return ''
    if self._has_process(folder):
      return '; its process is running: it is still starting, or too busy to answer'
    return f'; the run is not running, resume it with: hephaestus train --run {folder}'

  def _has_process(self, folder: pathlib.Path) -> bool:
    """Whether a process of the run's replay exists on this machine."""
    names = parts_lib.replay_names(len(self._addresses))
    started = [rows[-1] for name in names if (rows := starts_of_replay(folder, name))]
    return any(psutil.pid_exists(row['pid']) for row in started)


def inspect(target: str, timeout_seconds: float = 4.0, seconds: float = 1.0) -> dict[str, Any]:
  """One report with rates, which takes two calls of the server; one of a run that is not running.

  Args:
    target: as of `Inspection`.
    timeout_seconds: likewise.
    seconds: between the calls.

  Raises:
    ValueError: the target is not valid.
    ConnectionError: no server answers.
  """
  inspection = Inspection(target, timeout_seconds)
  report = inspection.report()
  if not report['running']:
    return report
  time.sleep(seconds)
  return inspection.report()


def _of_nodes(
  folder: pathlib.Path, config: launch_config.ExperimentConfig, shards: list[dict[str, Any]]
) -> dict[str, Any]:
  """Statistics from the metrics of the learner and the actors."""
  learner_file = folder / 'metrics' / 'learner.jsonl'
  learner = metrics.last(learner_file)
  files = sorted((folder / 'metrics').glob('actor-*.jsonl'))
  actors = [row for path in files if (row := metrics.last(path)) is not None]
  stratum = config.replay.limiting_stratum.name
  # A shard that is down counts with its last answer.
  known = [shard['tables'][stratum] for shard in shards if stratum in shard['tables']]
  step = sum(row['inserted'] for row in known) * config.steps_per_sequence if known else None
  reached = 0 if learner is None else learner.get('environment_step', 0)
  lost = 0 if learner is None else learner.get('lost_steps', 0)
  if config.record.on_policy:  # the queue restarts its count with each launch
    step = reached
  else:
    step = reached if step is None else max(step + lost, reached)
  versions = [row['parameter_version'] for row in actors]
  staleness = {}
  if versions and learner is not None:
    staleness = {
      'newest_updates': max(0, learner['learner_step'] - max(versions)),
      'oldest_updates': max(0, learner['learner_step'] - min(versions)),
    }
  return {
    'environment_step': step,
    'lost_steps': lost,
    'parameter_version': max(versions, default=None),
    'learner_starved_fraction': _lately([learner_file], 'starved_fraction'),
    'actors_throttled_fraction': _lately(files, 'throttled_fraction'),
    'staleness': staleness,
    'alarms': alarms(folder),
  }


def alarms(folder: pathlib.Path) -> list[str]:
  """Parts of a run's agent that do nothing, in words, by the newest metrics of its learner."""
  return advice.alarms(metrics.newest(folder / 'metrics' / 'learner.jsonl', advice.WINDOW))


def _lately(files: Sequence[pathlib.Path], key: str) -> float | None:
  """Mean over nodes of a share of their time in the last minute; None without any row.

  A row covers the time since the row before it, and is weighted by that time.
  """
  shares = []
  begin = time.time() - MINUTE
  for path in files:
    rows = metrics.since(path, begin)
    if not rows:
      newest = metrics.last(path)
      shares += [] if newest is None else [newest[key]]
      continue
    times = [begin, *(row['time'] for row in rows)]
    spans = [later - earlier for earlier, later in itertools.pairwise(times)]
    shares.append(sum(row[key] * span for row, span in zip(rows, spans, strict=True)) / sum(spans))
  return sum(shares) / len(shares) if shares else None


def _bottleneck(report: dict[str, Any]) -> str | None:
  """The bottleneck of a run, in words; None where it is unknown."""
  throttled, starved = report['actors_throttled_fraction'], report['learner_starved_fraction']
  during = 'the last minute'
  if throttled is None or starved is None:
    if report['limiter'] is None:
      return None
    throttled, starved = _waiting(report)
    during = 'the time' if report['seconds'] is None else f'the last {report["seconds"]:.1f} s'
  if max(throttled, starved) < 0.01:
    return 'neither actors nor the learner wait'
  if throttled >= starved:
    return f'actors throttled {_share(throttled)} of {during}: the learner is the bottleneck'
  return f'learner starved {_share(starved)} of {during}: the actors are the bottleneck'


def _waiting(report: dict[str, Any]) -> tuple[float, float]:
  """Shares of time for which the rate limiter blocked inserts and sampling since the last report."""
  worked = report['tables'][report['limiter']['table']]['worker_time']
  return worked['waiting_for_sampling'], worked['waiting_for_inserts']


def show(report: dict[str, Any], console: rich.console.Console | None = None) -> None:
  """Prints a report as tables."""
  console = console or rich.console.Console()
  if report['tables']:
    console.print(_table(report, console.width))
  console.print(_grid(numbers(report)))
  if distributions(report):
    console.print()
    console.print(_distribution_table(report))


def watch(
  target: str,
  period: float,
  *,
  as_json: bool = False,
  console: rich.console.Console | None = None,
) -> None:
  """Shows a run until Ctrl-C: a live view in a terminal, a line for each report elsewhere.

  If the server is lost, this reports it and retries; a supervised run restarts its server.

  Args:
    target: as of `Inspection`.
    period: seconds between two reports.
    as_json: prints each report as a line of JSON instead. Without a server the line is {'time',
      'address', 'error'}.
    console: to show it on.

  Raises:
    ValueError: the target is not valid, or no longer.
  """
  console = console or rich.console.Console()
  reports: collections.deque[dict[str, Any]] = collections.deque(maxlen=1000)
  try:
    if console.is_terminal and not as_json:
      with rich.live.Live(console=console, auto_refresh=False, screen=True) as live:
        for report in _reports(target, period):
          reports.append(report)
          live.update(frame(target, reports, period, console.width), refresh=True)
    else:
      for report in _reports(target, period):
        line = json.dumps(metrics.plain(report)) if as_json else _line(report)
        print(line, file=console.file, flush=True)
  except BrokenPipeError:  # the reader of the lines has exited
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except KeyboardInterrupt:
    if not as_json:
      console.print('stopped')


def _reports(target: str, period: float) -> Iterator[dict[str, Any]]:
  """Yields a report for each period, for ever. The first has no rates; the second follows soon."""
  inspection = Inspection(target)
  wait = min(1.0, period)
  while True:
    begin = time.monotonic()
    try:
      report = inspection.report()
    except ConnectionError as error:
      report = {'time': time.time(), 'address': inspection.address, 'error': str(error)}
    yield report
    time.sleep(max(0.0, begin + wait - time.monotonic()))
    wait = period


def make_exporter(target: str, port: int) -> http.server.HTTPServer:
  """A web server for Prometheus, on the loopback interface; each GET of /metrics makes a report.

  Args:
    target: as of `Inspection`.
    port: to listen at; 0 for a free one.

  Raises:
    ValueError: the target is not valid, or the port is in use.
  """
  inspection = Inspection(target)

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
      # Against DNS rebinding: another site's name may resolve to this address.
      host = self.headers.get('Host', '').rsplit(':', 1)[0]
      if host not in ('127.0.0.1', 'localhost'):
        self.send_error(403, 'only 127.0.0.1 and localhost are served')
        return
      if self.path != '/metrics':
        self.send_error(404, 'only /metrics is served')
        return
      try:
        text = exposition(inspection.report())
      except (ConnectionError, ValueError):
        text = 'hephaestus_up 0\n'
      self.send_response(200)
      self.send_header('Content-Type', 'text/plain; version=0.0.4; charset=utf-8')
      self.end_headers()
      self.wfile.write(text.encode())

    def log_message(self, *unused: Any) -> None:
      pass

  try:
    return http.server.HTTPServer(('127.0.0.1', port), Handler)
  except (OSError, OverflowError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise ValueError(f'--prometheus {port}: cannot be used ({reason}); give another') from None


def exposition(report: dict[str, Any]) -> str:
  """A report in Prometheus' text format: a line for each number, with tables and states as labels."""
  if not report['running']:
    return 'hephaestus_up 0\n'
  lines = ['hephaestus_up 1']
  nested = ('tables', 'time', 'shards', 'strata', 'running', 'saved')
  rest = {key: value for key, value in report.items() if key not in nested}
  for key, value in launch_config.flatten(rest).items():
    lines += _sample(key.replace('.', '_'), '', value)
  for shard in report['shards']:
    lines += _sample('shard_up', f'{{address="{shard["address"]}"}}', int(shard['alive']))
  for table, row in report['tables'].items():
    for key, value in row.items():
      if key == 'worker_time':
        for state, share in value.items():
          lines += _sample('table_worker_time', f'{{table="{table}",state="{state}"}}', share)
      else:
        lines += _sample(f'table_{key}', f'{{table="{table}"}}', value)
  for stratum, row in report['strata'].items():
    for key, value in row.items():
      if key in DISTRIBUTIONS:
        for name, each in (value or {}).items():
          labels = f'{{stratum="{stratum}",quantile="{inspector.QUANTILES[name]:g}"}}'
          lines += _sample(f'stratum_{key}', labels, each)
      else:
        lines += _sample(f'stratum_{key}', f'{{stratum="{stratum}"}}', value)
  return '\n'.join(sorted(lines)) + '\n'


def _sample(name: str, labels: str, value: Any) -> list[str]:
  """A line for a number; nothing for other values."""
  return [f'hephaestus_{name}{labels} {value}'] if isinstance(value, int | float) else []


def cells(report: dict[str, Any]) -> list[dict[str, str]]:
  """Cells of the tables of a report, or of one of its shards: a row for each table, by heading."""
  return [
    {
      'table': name,
      'size': f'{row["size"]:,}',
      'capacity': f'{row["max_size"]:,}',
      'full': _share(row['fill']),
      'inserted': f'{row["inserted"]:,}',
      'inserts/s': _rate(row['inserts_per_second']),
      'sampled': f'{row["sampled"]:,}',
      'samples/s': _rate(row['samples_per_second']),
      'unique': _share(row['unique_share']),
      'memory': _size(row['bytes']),
    }
    for name, row in sorted(report['tables'].items())
  ]


def _table(report: dict[str, Any], width: int) -> rich.text.Text:
  """A line for each table, with counts on a wide terminal; shards summed, then one by one."""
  totals = width >= 100
  headings = ['table', 'size', 'capacity', 'full']
  headings += ['inserted'] * totals + ['inserts/s'] + ['sampled'] * totals + ['samples/s']
  headings += ['unique', 'memory']
  blocks = [[[row[heading] for heading in headings] for row in cells(report)]]
  for number, shard in enumerate(report['shards'] if len(report['shards']) > 1 else ()):
    if report['running'] and not shard['alive']:
      blocks.append([[f'shard {number}: no answer', *[''] * (len(headings) - 1)]])
      continue
    named = [row | {'table': f'{number}: {row["table"]}'} for row in cells(shard)]
    blocks.append([[row[heading] for heading in headings] for row in named])
  return _aligned(headings, blocks, left=1)


def _aligned(
  headings: Sequence[str], blocks: Sequence[Sequence[Sequence[str]]], left: int
) -> rich.text.Text:
  """Blocks of rows below headings, each under a line.

  `rich.table` takes ten times as long, on the cores that the run needs.

  Args:
    headings: of the columns.
    blocks: rows of cells.
    left: number of columns, from the first, that are aligned left.
  """
  rows = [headings, *itertools.chain(*blocks)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  drawn = [
    '  '.join(
      cell.ljust(width) if at < left else cell.rjust(width)
      for at, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    for row in rows
  ]
  heading, *lines = drawn
  text = rich.text.Text.assemble((heading, 'bold'), no_wrap=True)
  for block in blocks:
    shown, lines = lines[: len(block)], lines[len(block) :]
    text.append('\n'.join(['', '─' * len(heading), *shown]))
  return text


def distributions(report: dict[str, Any]) -> list[dict[str, str]]:
  """Cells of the distributions of the strata, a row for each one that is known."""
  return [
    {'stratum': name, 'distribution of': label, **distribution_cells(key, row[key])}
    for name, row in sorted(report['strata'].items())
    for key, label in DISTRIBUTIONS.items()
    if row[key] is not None
  ]


def distribution_cells(key: str, values: dict[str, float] | None) -> dict[str, str]:
  """Cells of a distribution, by HEADINGS.

  Args:
    key: of DISTRIBUTIONS.
    values: by `inspector.QUANTILES`; None if unknown.
  """
  number = lambda value: f'{value:,.5g}' if key == 'episode_return' else f'{value:,.0f}'
  return {
    heading: '-' if values is None else number(values[name]) for name, heading in HEADINGS.items()
  }


def _distribution_table(report: dict[str, Any]) -> rich.text.Text:
  """The distributions of the strata, for a terminal."""
  rows = distributions(report)
  if not rows:
    return rich.text.Text()
  lines, before = [], ''
  for row in rows:
    stratum, *rest = row.values()
    lines.append(['' if stratum == before else stratum, *rest])
    before = stratum
  return _aligned(list(rows[0]), [lines], left=2)


def worker_times(report: dict[str, Any]) -> dict[str, dict[str, float]]:
  """Share of time by activity of the worker thread of each stratum's table."""
  return {
    name: {_ACTIVITIES[state]: share for state, share in row['worker_time'].items()}
    for name, row in sorted(report['tables'].items())
    if name != tables.PARAMS
  }


def numbers(report: dict[str, Any]) -> dict[str, str]:
  """Numbers outside of the tables, by name and with units."""
  ratio, limiter, memory = report['replay_ratio'], report['limiter'], report['memory']
  named = {} if report['running'] else {'state': _stopped(report)}
  named |= {
    'replay ratio': f'{ratio["achieved"]:.2f} achieved, {_rate(ratio["recent"])} recent, '
    + ('?' if ratio['configured'] is None else f'{ratio["configured"]:.2f}')
    + ' configured'
  }
  if len(report['shards']) > 1 and report['running']:
    lost = [shard['address'] for shard in report['shards'] if not shard['alive']]
    alive = f'{len(report["shards"]) - len(lost)} of {len(report["shards"])} answer'
    named['shards'] = f'{alive}; no answer: {", ".join(lost)}' if lost else alive
  if limiter is not None:
    named['limiter'] = _limiter(limiter)
  if report['bottleneck'] is not None:
    named['bottleneck'] = report['bottleneck']
  if report['environment_step'] is not None:
    of_them = f', {report["lost_steps"]:,} of them lost by replay' if report['lost_steps'] else ''
    named['environment steps'] = f'{report["environment_step"]:,}{of_them}'
  if report['parameter_version'] is not None:
    named['parameters'] = f'version {report["parameter_version"]:,}'
  elif report['environment_step'] is None and tables.PARAMS in report['tables']:  # a server alone
    published = report['tables'][tables.PARAMS]['inserted']
    named['parameters'] = (
      f'published {published:,} times; the version is unknown, since sampling it would change the '
      "table's counters: give the run's folder"
    )
  if report['staleness']:
    newest, oldest = report['staleness']['newest_updates'], report['staleness']['oldest_updates']
    span = f'{oldest:,}' if newest == oldest else f'{newest:,} to {oldest:,}'
    named['staleness'] = f'actors use parameters {span} updates old'
  shared = {name: row['shared'] for name, row in sorted(report['strata'].items()) if row['shared']}
  if shared:
    parts = ', '.join(f'{_share(share)} of {name}' for name, share in shared.items())
    named['overlap'] = f'{parts} is in the other strata, too'
  episodes = {name: row['episodes'] for name, row in sorted(report['strata'].items())}
  if any(episodes.values()):
    counts = ', '.join(f'{count:,} in {name}' for name, count in episodes.items())
    named['episodes'] = f'{counts} ended'
  if report['alarms']:
    named['alarm'] = '; '.join(report['alarms'])
  if not report['running']:
    return named
  named['memory'] = f'sequences {_size(memory["sequences"])} uncompressed; ' + (
    f'the server {_size(memory["server"])}'
    if memory['server'] is not None
    else 'the server is not on this machine'
  )
  for name, shares in worker_times(report).items():
    named[f'time of {name}'] = _worked(shares)
  return named


def _stopped(report: dict[str, Any]) -> str:
  """The age of what is shown of a run that is not running."""
  if report['saved'] is None:
    return 'the run is not running; shown is the end of its metrics, replay has no checkpoint here'
  moment = datetime.datetime.fromtimestamp(report['saved'])
  return f'the run is not running; shown is its checkpoint of {moment:%Y-%m-%d %H:%M:%S}'


def _limiter(limiter: dict[str, Any]) -> str:
  missing = f'{limiter["missing"]:,}'
  words = {
    'open': 'blocks neither inserts nor sampling',
    'warming up': f'blocks sampling until {missing} more sequences are inserted',
    'inserts wait': f'blocks inserts until {missing} more sequences are sampled',
    'samples wait': f'blocks sampling until {missing} more sequences are inserted',
  }
  return f'{limiter["table"]}: {words[limiter["state"]]}'


def _worked(shares: dict[str, float]) -> str:
  """Shares of a worker thread's time, the largest first."""
  parts = sorted(shares.items(), key=lambda part: -part[1])
  return ', '.join(f'{activity} {_share(share)}' for activity, share in parts if share >= 0.005)


def _grid(named: dict[str, str]) -> rich.table.Table:
  view = rich.table.Table.grid(padding=(0, 1))
  view.add_column(min_width=LABEL, no_wrap=True)
  view.add_column()
  for name, value in named.items():
    view.add_row(name, value)
  return view


def frame(
  target: str, reports: Sequence[dict[str, Any]], period: float, width: int
) -> rich.console.RenderableType:
  """The live view: the newest report with numbers, and curves of the last reports."""
  newest = reports[-1]
  moment = datetime.datetime.fromtimestamp(newest['time'])
  heading = f'{target}  {newest["address"]}  {moment:%H:%M:%S}  every {period:g} s, Ctrl-C to stop'
  parts: list[Any] = [rich.markup.escape(heading)]
  if 'error' in newest:
    parts.append(rich.markup.escape(f'{newest["error"]}; retrying'))
  answered = next((report for report in reversed(reports) if 'error' not in report), None)
  if answered is None:
    return rich.console.Group(*parts)
  parts.append(_table(answered, width))
  named = _grid(numbers(answered))
  if width < WIDE:
    # A low terminal cuts off the end.
    return rich.console.Group(
      *parts, named, '', _curves(reports, width - LABEL - 12), '', _distribution_table(answered)
    )
  half = width // 2 - 2
  beside = rich.table.Table.grid(padding=(0, 2), expand=True)
  beside.add_column(width=half)
  beside.add_column(width=half)
  right = rich.console.Group(_curves(reports, half - LABEL - 12), '', _distribution_table(answered))
  beside.add_row(named, right)
  return rich.console.Group(*parts, beside)


def _curves(reports: Sequence[dict[str, Any]], width: int) -> rich.text.Text:
  """A curve of blocks for each number of `moving`, the newest at the right."""
  columns = [moving(report) for report in list(reports)[-width:]]
  lines = []
  for name in ('inserts/s', 'samples/s', 'replay ratio', 'throttled', 'starved'):
    values = [column.get(name) for column in columns]
    is_share = name in ('throttled', 'starved')
    top = 1.0 if is_share else max((value for value in values if value is not None), default=0.0)
    newest = _share(values[-1]) if is_share else _rate(values[-1])
    lines.append(f'{name:{LABEL}} {curve(values, top):{width}} {newest:>9}')
  return rich.text.Text('\n'.join(lines), no_wrap=True)


def moving(report: dict[str, Any]) -> dict[str, float | None]:
  """The numbers of a report that are drawn as curves; none while a server is lost or restarts."""
  if 'error' in report or report['limiter'] is None or report['seconds'] is None:
    return {}
  throttled, starved = _waiting(report)
  strata = [row for name, row in report['tables'].items() if name != tables.PARAMS]
  limited = report['tables'][report['limiter']['table']]
  return {
    'inserts/s': limited['inserts_per_second'],
    'samples/s': sum(row['samples_per_second'] for row in strata),
    'replay ratio': report['replay_ratio']['recent'],
    'throttled': throttled,
    'starved': starved,
  }


def curve(values: Iterable[float | None], top: float) -> str:
  """A block character for each value, higher for larger ones; a space for None.

  Args:
    values: at least 0.
    top: value of a full block.
  """
  last = len(_BLOCKS) - 1
  height = lambda value: min(last, int(value / top * (last + 1))) if top > 0 else 0
  return ''.join(' ' if value is None else _BLOCKS[height(value)] for value in values)


def _line(report: dict[str, Any]) -> str:
  """A report on one line."""
  clock = f'{datetime.datetime.fromtimestamp(report["time"]):%H:%M:%S}'
  if 'error' in report:
    return f'{clock}  {report["error"]}; retrying'
  strata = [name for name in sorted(report['tables']) if name != tables.PARAMS]
  sizes = [
    f'{name} {report["tables"][name]["size"]:,}/{report["tables"][name]["max_size"]:,}'
    for name in strata
  ]
  rates = moving(report)
  return '  '.join(
    [
      clock if report['running'] else f'{clock}  not running',
      *sizes,
      f'{_rate(rates.get("inserts/s"))} inserts/s',
      f'{_rate(rates.get("samples/s"))} samples/s',
      f'ratio {report["replay_ratio"]["achieved"]:.2f}',
      f'throttled {_share(rates.get("throttled"))}',
      f'starved {_share(rates.get("starved"))}',
    ]
  )


def _share(value: float | None) -> str:
  return '-' if value is None else f'{100 * value:.0f} %'


def _rate(value: float | None) -> str:
  return '-' if value is None else f'{value:,.1f}'


def _size(count: float | None) -> str:
  """Bytes in a decimal unit."""
  if count is None:
    return '-'
  for unit in ('B', 'kB', 'MB'):
    if count < 1000:
      return f'{count:.0f} B' if unit == 'B' else f'{count:.1f} {unit}'
    count /= 1000
  return f'{count:.1f} GB'
