"""Shows live reports: as lines, tables and curves in a terminal, and as texts for the web page."""

import collections
import datetime
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import rich.console
import rich.filesize
import rich.live
import rich.markup
import rich.table
import rich.text

from hephaestus.launch.files import metrics
from hephaestus.launch.inspect import console as console_lib
from hephaestus.launch.inspect import live
from hephaestus.replay import tables

LABEL = 18  # columns of the name of a number
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
  for part in _parts(report, console.width):
    console.print(part)


def _parts(report: live.Report, width: int, *between: Any) -> list[Any]:
  """The parts of a printed report; `between` comes before the distributions."""
  parts: list[Any] = [_table(report, width)] if report.tables else []
  parts += [_grid(numbers(report)), *between]
  known = distribution_table(report.strata)
  return parts + (['', known] if known else [])


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
    target: see `live.find`; ValueError if it is not valid, or the run's folder was deleted meanwhile.
    period: seconds between two reports.
    as_json: whether to print each report as a line of JSON instead.
    console: where to show it; stdout by default.
  """
  console = console or console_lib.make()
  reports: collections.deque[Reported] = collections.deque(maxlen=1000)
  try:
    if console.is_terminal and not as_json:
      with rich.live.Live(console=console, auto_refresh=False, screen=True) as view:
        for report in _reports(target, period):
          reports.append(report)
          view.update(frame(target, reports, period, console.width), refresh=True)
    else:
      for report in _reports(target, period):
        line = metrics.to_json(report.to_json()) if as_json else _line(report)
        print(line, file=console.file, flush=True)
  except KeyboardInterrupt:
    if not as_json:
      console.print('stopped')


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


def cells(tables_of: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
  """Formats the tables of a report, or of one of its shards: {HEADING: TEXT} for each table."""
  return [
    {'table': name} | {heading: show(row[key]) for heading, (key, show) in COLUMNS.items() if key}
    for name, row in sorted(tables_of.items())
  ]


def _table(report: live.Report, width: int) -> rich.text.Text:
  """Text with a line for each table, summed over shards, then a line for each table of each shard.

  Only a terminal of at least 100 columns has room for the counts of inserts and samples.
  """
  narrow = width < 100
  headings = [each for each in COLUMNS if not (narrow and each in ('inserted', 'sampled'))]
  blocks = [cells(report.tables)]
  for number, shard in enumerate(report.shards if len(report.shards) > 1 else ()):
    rows = cells(shard['tables'])
    if report.running and not shard['alive']:
      rows = [dict.fromkeys(headings, '') | {'table': 'no answer'}]
    blocks.append([row | {'table': f'{number}: {row["table"]}'} for row in rows])
  texts = [[[row[heading] for heading in headings] for row in block] for block in blocks]
  return console_lib.table(headings, texts, left=1)


def distributions(strata: Mapping[str, live.Stratum]) -> list[dict[str, str]]:
  """Formats the known distributions of strata: {HEADING: TEXT} for each."""
  rows = []
  for name, stratum in sorted(strata.items()):
    for key, label in live.DISTRIBUTIONS.items():
      number = ',.5g' if key == 'episode_return' else ',.0f'
      if (values := getattr(stratum, key)) is not None:
        shown = {heading: format(values[each], number) for each, heading in HEADINGS.items()}
        rows.append({'stratum': name, 'distribution of': label, **shown})
  return rows


def distribution_table(strata: Mapping[str, live.Stratum]) -> rich.text.Text:
  """The distributions of strata, for a terminal; empty if none is known."""
  rows = distributions(strata)
  lines = [list(row.values()) for row in rows]
  return console_lib.table(list(rows[0]), [lines], left=2) if rows else rich.text.Text()


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
  shared = {name: row.shared for name, row in sorted(report.strata.items()) if row.shared}
  if shared:
    parts = ', '.join(f'{live.share(share)} of {name}' for name, share in shared.items())
    named['overlap'] = f'{parts} is in the other strata, too'
  episodes = {name: row.episodes for name, row in sorted(report.strata.items())}
  if any(episodes.values()):
    counts = ', '.join(f'{count:,} in {name}' for name, count in episodes.items())
    named['episodes'] = f'{counts} ended'
  if report.warnings:
    named['warning'] = '; '.join(report.warnings)
  if report.running:
    server = _size(memory['server'])
    where = f'the server {server}' if server != '-' else 'the server is not on this machine'
    named['memory'] = f'sequences {_size(memory["sequences"])} uncompressed; {where}'
    for name, row in sorted(report.tables.items()):
      if name != tables.PARAMS:
        largest_first = sorted(row['worker_time'].items(), key=lambda part: -part[1])
        named[f'time of {name}'] = ', '.join(
          f'{_ACTIVITIES[state]} {live.share(part)}'
          for state, part in largest_first
          if part >= 0.005
        )
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


def frame(
  target: str, reports: Sequence[Reported], period: float, width: int
) -> rich.console.RenderableType:
  """Makes the live view: the newest of the last reports as tables, and curves of all of them."""
  newest = reports[-1]
  moment = datetime.datetime.fromtimestamp(newest.time)
  heading = f'{target}  {newest.address}  {moment:%H:%M:%S}  every {period:g} s, Ctrl-C to stop'
  parts: list[Any] = [rich.markup.escape(heading)]
  if isinstance(newest, Lost):
    parts.append(rich.markup.escape(f'{newest.error}; retrying'))
  answered = next((each for each in reversed(reports) if isinstance(each, live.Report)), None)
  if answered is not None:  # a low terminal cuts off the end
    parts += _parts(answered, width, '', _curves(reports, width - LABEL - 12))
  return rich.console.Group(*parts)


def _curves(reports: Sequence[Reported], width: int) -> rich.text.Text:
  """A curve of blocks for each number of `moving`, the newest at the right."""
  columns = [moving(report) for report in list(reports)[-width:]]
  lines = []
  for name in dict.fromkeys(itertools.chain(*columns)):
    values = [column.get(name) for column in columns]
    is_share = name in ('throttled', 'starved')
    top = 1.0 if is_share else max((value for value in values if value is not None), default=0.0)
    newest = live.share(values[-1]) if is_share else _rate(values[-1])
    lines.append(f'{name:{LABEL}} {curve(values, top):{width}} {newest:>9}')
  return rich.text.Text('\n'.join(lines), no_wrap=True)


def moving(report: Reported) -> dict[str, float | None]:
  """Returns the numbers of a report that are drawn as curves.

  Returns:
    'inserts/s', 'samples/s' (sequences), 'replay ratio', 'throttled' and 'starved' (shares of time);
    {} without an answer of a server, and without rates, as in the first report.
  """
  if isinstance(report, Lost) or report.limiter is None or report.seconds is None:
    return {}
  throttled, starved = live.waiting(report)
  strata = [row for name, row in report.tables.items() if name != tables.PARAMS]
  limited = report.tables[report.limiter['table']]
  return {
    'inserts/s': limited['inserts_per_second'],
    'samples/s': sum(row['samples_per_second'] for row in strata),
    'replay ratio': report.replay_ratio['recent'],
    'throttled': throttled,
    'starved': starved,
  }


def for_page(report: live.Report) -> dict[str, Any]:
  """The answer of the dashboard's server for its replay panel.

  Returns:
    {'report': as JSON, 'cells', 'numbers', 'distributions', 'moving': results of the functions of these
    names}
  """
  return {
    'report': metrics.plain(report.to_json()),
    'cells': cells(report.tables),
    'numbers': numbers(report),
    'distributions': distributions(report.strata),
    'moving': metrics.plain(moving(report)),
  }


def curve(values: Iterable[float | None], top: float) -> str:
  """Draws a curve as one block character for each value, a full one at `top`; a space for None."""
  last = len(_BLOCKS) - 1
  height = lambda value: min(last, int(value / top * (last + 1))) if top > 0 else 0
  return ''.join(' ' if value is None else _BLOCKS[height(value)] for value in values)


def _line(report: Reported) -> str:
  """Formats a report as one line."""
  clock = f'{datetime.datetime.fromtimestamp(report.time):%H:%M:%S}'
  if isinstance(report, Lost):
    return f'{clock}  {report.error}; retrying'
  strata = [name for name in sorted(report.tables) if name != tables.PARAMS]
  sizes = [
    f'{name} {report.tables[name]["size"]:,}/{report.tables[name]["max_size"]:,}' for name in strata
  ]
  rates = moving(report)
  return '  '.join(
    [
      clock if report.running else f'{clock}  not running',
      *sizes,
      f'{_rate(rates.get("inserts/s"))} inserts/s',
      f'{_rate(rates.get("samples/s"))} samples/s',
      f'ratio {report.replay_ratio["achieved"]:.2f}',
      f'throttled {live.share(rates.get("throttled"))}',
      f'starved {live.share(rates.get("starved"))}',
    ]
  )
