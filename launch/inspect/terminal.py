"""Shows live reports in a terminal, as tables or as a line for each."""

import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import rich.console
import rich.filesize
import rich.table
import rich.text

from hephaestus.launch.files import metrics
from hephaestus.launch.inspect import console as console_lib
from hephaestus.launch.inspect import live
from hephaestus.replay import tables

LABEL = 18  # columns of the name of a number
_LIMITER_STATES = {
  'open': 'blocks neither inserts nor sampling',
  'warming up': 'blocks sampling until {} inserted',
  'inserts wait': 'blocks inserts until {} sampled',
  'samples wait': 'blocks sampling until {} inserted',
}


class Lost(NamedTuple):
  """Takes the place of a report while no server answers: unix seconds, address as of the last report, and reason."""

  time: float
  address: str
  error: str

  def to_json(self) -> dict[str, Any]:
    """As `--json` prints it."""
    return self._asdict()


Reported = live.Report | Lost


def _count(value: int | None) -> str:
  return '-' if value is None else f'{value:,}'


def _rate(value: float | None) -> str:
  return '-' if value is None else f'{value:,.1f}'


def _size(count: float | None) -> str:
  return '-' if count is None else rich.filesize.decimal(int(count))


# Key in `Report.tables` of each column, and how its value is shown.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
  'table': ('', str),
  'size': ('size', _count),
  'capacity': ('max_size', _count),
  'full': ('fill', live.share),
  'inserted': ('inserted', _count),
  'inserts/s': ('inserts_per_second', _rate),
  'sampled': ('sampled', _count),
  'samples/s': ('samples_per_second', _rate),
  'unique': ('unique_share', live.share),
  'memory': ('bytes', _size),
}


def show(report: live.Report, console: rich.console.Console | None = None) -> None:
  """Prints a report of `live.Inspection` as tables, by default to stdout."""
  console = console or console_lib.make()
  if report.tables:
    console.print(_table(report, console.width))
  console.print(_grid(numbers(report)))


def watch(target: str, period: float, *, as_json: bool = False) -> None:
  """Prints a line, or a line of JSON, for each report on a run until Ctrl-C.

  If the server is lost, this reports it and retries; a supervised run restarts its server.

  Args:
    target: see `live.find`; ValueError if it is not valid, or the run's folder was deleted meanwhile.
    period: seconds between two reports.
  """
  try:
    for report in _reports(target, period):
      print(metrics.to_json(report.to_json()) if as_json else _line(report), flush=True)
  except KeyboardInterrupt:
    if not as_json:
      print('stopped')


def _reports(target: str, period: float) -> Iterator[Reported]:
  """Yields a report for each period, for ever.

  The first report has no rates; the second follows soon, about a second later.
  """
  inspection = live.Inspection(target)
  wait = min(1.0, period)
  while True:
    begin = time.monotonic()
    try:
      yield inspection.report()
    except ConnectionError as error:
      yield Lost(time.time(), inspection.address, str(error))
    time.sleep(max(0.0, begin + wait - time.monotonic()))
    wait = period


def _table(report: live.Report, width: int) -> rich.table.Table:
  """A line for each table, summed over shards, then a line for each table of each shard.

  Only a terminal of at least 100 columns has room for the counts of inserts and samples.
  """
  narrow = width < 100
  headings = [each for each in COLUMNS if not (narrow and each in ('inserted', 'sampled'))]
  view = rich.table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
  for heading in headings:
    view.add_column(heading, justify='left' if heading == 'table' else 'right', no_wrap=True)

  def add(tables_of: Mapping[str, Mapping[str, Any]], prefix: str) -> None:
    for name, row in sorted(tables_of.items()):
      texts = [show(row[key]) for key, show in (COLUMNS[each] for each in headings[1:])]
      view.add_row(rich.text.Text(prefix + name), *texts)

  add(report.tables, '')
  for number, shard in enumerate(report.shards if len(report.shards) > 1 else ()):
    if report.running and not shard['alive']:
      view.add_row(f'{number}: no answer')
    else:
      add(shard['tables'], f'{number}: ')
  return view


def numbers(report: live.Report) -> dict[str, str]:
  """Formats what the printed tables leave out of a report of `live.Inspection`, as {NAME: TEXT}."""
  ratio, limiter, memory = report.replay_ratio, report.limiter, report.memory
  named = {} if report.running else {'state': _state(report)}
  named |= {
    'replay ratio': f'{ratio["achieved"]:.2f} achieved, {_rate(ratio["recent"])} recent, '
    + f'{"?" if ratio["configured"] is None else format(ratio["configured"], ".2f")} configured'
  }
  if len(report.shards) > 1 and report.running:
    lost = [shard['address'] for shard in report.shards if not shard['alive']]
    alive = f'{len(report.shards) - len(lost)} of {len(report.shards)} answer'
    named['shards'] = f'{alive}; no answer: {", ".join(lost)}' if lost else alive
  if limiter is not None:
    state = _LIMITER_STATES[limiter['state']].format(f'{limiter["missing"]:,} more sequences are')
    named['limiter'] = f'{limiter["table"]}: {state}'
  if report.bottleneck is not None:
    named['bottleneck'] = report.bottleneck
  if report.environment_step is not None:
    of_them = f', {report.lost_steps:,} of them lost by replay' if report.lost_steps else ''
    named['environment steps'] = f'{report.environment_step:,}{of_them}'
  if report.parameter_version is not None:
    named['parameters'] = f'version {report.parameter_version:,}'
  elif report.environment_step is None and tables.PARAMS in report.tables:  # no run
    published = report.tables[tables.PARAMS]['inserted']
    named['parameters'] = f"published {published:,} times; give the run's folder for the version"
  if report.staleness:
    newest, oldest = report.staleness['newest_updates'], report.staleness['oldest_updates']
    span = f'{oldest:,}' if newest == oldest else f'{newest:,} to {oldest:,}'
    named['staleness'] = f'actors use parameters {span} updates old'
  for name, age in sorted(report.ages.items()):
    low, median, high = (f'{age[each]:,.0f}' for each in ('lowest', 'median', 'highest'))
    named[f'age of {name}'] = f'{low} to {high} updates, median {median}'
  if report.warnings:
    named['warning'] = '; '.join(report.warnings)
  if report.running:
    server = _size(memory['server'])
    where = f'the server {server}' if server != '-' else 'the server is not on this machine'
    named['memory'] = f'sequences {_size(memory["sequences"])} uncompressed; {where}'
  return named


def _state(report: live.Report) -> str:
  """Says from when the numbers of a report are, for which no server answered."""
  if report.checkpoint:
    step, count = report.checkpoint['learner_step'], report.checkpoint['sequences']
    return f'a fused run; shown is its checkpoint of update {step:,}, with {count:,} sequences'
  if report.saved is None:
    return 'the run is not running; shown is the end of its metrics, replay has no checkpoint here'
  moment = datetime.datetime.fromtimestamp(report.saved)
  return f'the run is not running; shown is its checkpoint of {moment:%Y-%m-%d %H:%M:%S}'


def _grid(named: dict[str, str]) -> rich.table.Table:
  view = rich.table.Table.grid(padding=(0, 1))
  view.add_column(min_width=LABEL, no_wrap=True)
  view.add_column()
  for name, value in named.items():
    view.add_row(name, value)
  return view


def _line(report: Reported) -> str:
  """Formats a report as one line."""
  clock = f'{datetime.datetime.fromtimestamp(report.time):%H:%M:%S}'
  if isinstance(report, Lost):
    return f'{clock}  {report.error}; retrying'
  strata = [name for name in sorted(report.tables) if name != tables.PARAMS]
  sizes = [
    f'{name} {report.tables[name]["size"]:,}/{report.tables[name]["max_size"]:,}' for name in strata
  ]
  rate = throttled = starved = None
  sampling = '-'
  if report.limiter is not None and report.seconds is not None:  # the first report has no rates
    throttled, starved = live.waiting(report)
    rate = report.tables[report.limiter['table']]['inserts_per_second']
    sampling = _rate(sum(report.tables[name]['samples_per_second'] for name in strata))
  return '  '.join(
    [
      clock if report.running else f'{clock}  not running',
      *sizes,
      f'{_rate(rate)} inserts/s',
      f'{sampling} samples/s',
      f'ratio {report.replay_ratio["achieved"]:.2f}',
      f'throttled {live.share(throttled)}',
      f'starved {live.share(starved)}',
    ]
  )
