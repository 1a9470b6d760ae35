"""Reads the metrics of runs as their files grow, row by row, and thins them for plots."""

import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics

POINTS = 240  # most points of a thinned curve; more cannot be distinguished on a screen
CHUNK = 1 << 18  # bytes that are read at a time, some milliseconds of parsing
FIRST_LEARNER = ('learner', 'learner-0')  # the only process of the learner, or the first of several
NODES = ('evaluator', 'learner', 'actor')
X_AXES = {
  'environment_step': 'environment steps',
  'learner_step': 'updates of the learner',
  'minutes': 'minutes of running',
}
PLACES = ('time', 'environment_step', 'learner_step', 'parameter_version')
NO_CURVES = (*PLACES, 'final', 'episodes')
# The median of a distribution is drawn as a curve, and the quantiles LOW and HIGH as its band.
MEDIAN, LOW, HIGH = '/median', '/low', '/high'
NO_CURVE_ENDS = (LOW, HIGH, '/lowest', '/highest')
_NUMBERS = {float, int, bool, type(None)}


class Series(NamedTuple):
  """A metric along the x-axis, as a step function: each value is valid until the next position.

  Attributes:
    x: [N] f64, increasing positions.
    value: [N] f64, finite values.
  """

  x: np.ndarray
  value: np.ndarray

  def at(self, x: np.ndarray) -> np.ndarray:
    """Returns [M] f64, the last value at or before each of the positions x, [M]; NaN before the first."""
    index = np.searchsorted(self.x, x, side='right') - 1
    return np.where(index < 0, np.nan, self.value[np.maximum(index, 0)])


class Thinned(NamedTuple):
  """A metric along the x-axis, reduced to at most POINTS positions.

  Each position stands for the rows of metrics since the position before.

  Attributes:
    x: [N] f64, increasing positions.
    mean: [N] f64, mean of the metric over these rows, weighted as in `History.series`.
    low: [N] f64, lowest value of these rows; for a metric that is a median, mean of the 5 % quantiles.
    high: [N] f64, highest value; for a metric that is a median, mean of the 95 % quantiles.
  """

  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray


class _Tail:
  """Reads the lines of a file that may grow, be replaced by a shorter one, or be deleted."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.generation = 0  # increases when all earlier lines become invalid
    self.unread = path.stat().st_size if path.exists() else 0  # bytes
    self._inode: int | None = None
    self._offset = 0

  def lines(self) -> list[bytes]:
    """The next complete lines, up to CHUNK bytes; empty if there are none."""
    try:
      with metrics.open_regular(self.path) as file:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset:
          self._begin(status.st_ino)
        file.seek(self._offset)
        content = file.read(CHUNK)
    except FileNotFoundError:
      if self._inode is not None:
        self._begin(None)
      return []
    end = content.rfind(b'\n') + 1
    if end == 0 and len(content) == CHUNK:  # longer than any row, so it is damaged
      end = len(content)
    self._offset += end
    self.unread = status.st_size - self._offset if end else 0
    return content[:end].splitlines()

  def _begin(self, inode: int | None) -> None:
    self.generation += self._inode is not None
    self._inode, self._offset, self.unread = inode, 0, 0


class File:
  """Reads one file of metrics as it grows, into a column for each key.

  Args:
    path: path of the file, which need not exist yet.
    keep_rows: whether `rows` keeps all rows, too.

  Attributes:
    rows: all rows in their written order; empty unless made with `keep_rows`.
    broken: number of damaged lines, which are skipped; 1 if the file cannot be read.
  """

  def __init__(self, path: pathlib.Path, *, keep_rows: bool = False):
    self.tail = _Tail(path)
    self.broken = 0
    self.rows: list[dict[str, Any]] = []
    self._keep_rows = keep_rows
    self._generation = 0
    self._count = 0
    self._columns: dict[str, np.ndarray] = {}

  @property
  def version(self) -> tuple[int, int]:
    """Pair of counters that changes with every row that is read, and when the file was replaced."""
    return self._generation, self._count

  @property
  def keys(self) -> list[str]:
    return list(self._columns)

  def __len__(self) -> int:
    return self._count

  def column(self, key: str) -> np.ndarray:
    """[N] f64, the values of a key in all rows; NaN where a row has no number for it."""
    column = self._columns.get(key)
    return np.full(self._count, np.nan) if column is None else column[: self._count]

  def last(self, key: str) -> float | None:
    """Value of a key in the newest row; None if that row has none."""
    value = float(self.column(key)[-1]) if self._count else np.nan
    return None if np.isnan(value) else value

  def read(self) -> bool:
    """Reads up to CHUNK new bytes; returns whether there were any."""
    try:
      lines = self.tail.lines()
    except OSError:  # a folder or a link, or nobody may read it
      self.broken = max(1, self.broken)
      return False
    if self.tail.generation != self._generation:
      self._generation = self.tail.generation
      self._count, self._columns, self.rows, self.broken = 0, {}, [], 0
    rows = []
    for line in lines:
      try:
        rows.append(metrics.row(line, self.tail.path))
      except ValueError:
        self.broken += 1
    if self._keep_rows:
      self.rows += rows
    self._append(rows)
    return bool(lines)

  def _append(self, rows: list[dict[str, Any]]) -> None:
    start, end = self._count, self._count + len(rows)
    for key in dict.fromkeys((*self._columns, *(key for row in rows for key in row))):
      values = _numbers([row.get(key) for row in rows])
      column = self._columns.get(key)
      if column is None and np.isnan(values).all():
        continue
      if column is None or len(column) < end:
        grown = np.empty(max(64, 2 * end))  # pages that are not written take no memory
        grown[:start] = np.nan if column is None else column[:start]
        self._columns[key] = column = grown
      column[start:end] = values
    self._count = end


def _numbers(values: list[Any]) -> np.ndarray:
  """[N] f64 of values; NaN for those that are no numbers."""
  if not set(map(type, values)) <= _NUMBERS:
    values = [value if type(value) in _NUMBERS else None for value in values]
  return np.array(values, np.float64)


class History:
  """Metrics and events of a run; each call of `read` continues where the last one stopped.

  A "kind of node" is one of NODES; a "node" is one process of the run, such as 'actor-0'.

  Attributes:
    folder: folder of the run.
    config: config of the run.
    is_gone: whether the folder was deleted, or is no longer one of a run.
  """

  def __init__(self, folder: pathlib.Path):
    """Reads the config, and no metrics yet.

    Raises:
      ValueError: it is not the folder of a run, or its config is broken.
    """
    self.folder = folder
    self.config: launch_config.ExperimentConfig = folder_lib.load_config(folder)
    self.is_gone = False
    self._events = File(folder / 'metrics' / 'events.jsonl', keep_rows=True)
    self._nodes: dict[str, File] = {}
    self._times: tuple[Any, np.ndarray] | None = None
    self._thinned: dict[tuple[str, str, str], tuple[Any, Thinned | None]] = {}
    self._places: dict[tuple[str, str], tuple[Any, tuple[np.ndarray, Any, Any]]] = {}

  def read(self, deadline: float = math.inf) -> None:
    """Reads the new rows of all files.

    Args:
      deadline: value of `time.monotonic` at which to stop; the next call continues.
    """
    self.is_gone = not (self.folder / folder_lib.CONFIG).exists()
    for path in sorted((self.folder / 'metrics').glob('*.jsonl')):
      if path.stem != 'events' and path.stem not in self._nodes:
        self._nodes[path.stem] = File(path)
    for file in (self._events, *self._nodes.values()):
      while file.read():
        if time.monotonic() >= deadline:
          return

  @property
  def environment(self) -> str:
    """Name of the environment."""
    return self.config.environment['name']

  @property
  def unread(self) -> int:
    """Bytes that are still to be read."""
    return sum(file.tail.unread for file in (self._events, *self._nodes.values()))

  @property
  def broken(self) -> int:
    """Number of damaged lines."""
    return sum(file.broken for file in (self._events, *self._nodes.values()))

  @property
  def version(self) -> tuple[Any, ...]:
    """Value that differs after every new row of metrics."""
    return (*((name, file.version) for name, file in self._nodes.items()), len(self.launches))

  @property
  def events(self) -> list[dict[str, Any]]:
    """Rows of the run's events: starts and ends of nodes, see `supervisor.Event`, and warnings."""
    return self._events.rows

  @property
  def launches(self) -> list[float]:
    """Unix seconds at which the run was started or resumed."""
    return [
      row['time'] for row in self.events
      if row.get('kind') == 'started' and row.get('name') in FIRST_LEARNER
      and not row.get('restarts')
    ]  # fmt: skip

  def names(self, node: str) -> list[str]:
    """Names of the nodes of a kind that have written metrics, sorted."""
    known = sorted(name for name, file in self._nodes.items() if len(file))
    return [name for name in known if name == node or name.startswith(f'{node}-')]

  def last(self, name: str, key: str) -> float | None:
    """Value of a key in the newest row of a node; None if that row has none."""
    return self._nodes[name].last(key) if name in self._nodes else None

  def mean(self, name: str, key: str) -> float | None:
    """Mean of a key over all rows of a node; None if no row has it."""
    values = self._nodes[name].column(key) if name in self._nodes else np.zeros(0)
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None

  def keys(self, node: str) -> set[str]:
    """Keys of the metrics for which a node of a kind has reported at least one number."""
    return {key for name in self.names(node) for key in self._nodes[name].keys} - {'time', 'final'}

  @property
  def running_minutes(self) -> float:
    """Minutes from the first metrics to the newest, without the time between launches."""
    written = self._written()
    return float(minutes(written, self.launches, written[-1:])[0])

  def metrics(self) -> list[tuple[str, str]]:
    """Pairs (kind of node, key) of all metrics that are drawn as curves."""
    found = {
      (node, key): None
      for node in NODES
      for name in self.names(node)
      for key in self._nodes[name].keys
      if key not in NO_CURVES and not key.endswith(NO_CURVE_ENDS)
    }
    return list(found)

  def series(self, node: str, metric: str, x: str) -> Series | None:
    """Returns a metric along the x-axis; None if it has no numbers.

    Where a resumed run has repeated steps, the later rows count. Several actors are averaged, each by
    its last value; metrics of episodes are weighted by the number of episodes.

    Args:
      node: kind of node, one of NODES.
      metric: a key of its rows.
      x: the x-axis, one of X_AXES; an actor's learner step is the version of its parameters.
    """
    parts = []
    for name in self.names(node):
      places, values, weights, _ = self._valid(name, node, metric, x)
      if len(places):
        parts.append((places, values, np.ones(len(places)) if weights is None else weights))
    return joined(parts) if parts else None

  def thinned(self, node: str, metric: str, x: str) -> Thinned | None:
    """Returns `series`, reduced to at most POINTS positions; cached until there are new rows."""
    names = self.names(node)
    version = tuple((name, self._nodes[name].version) for name in names)
    if x == 'minutes':
      version += (self.version,)  # minutes count from the first metrics of any node
    known = self._thinned.get((node, metric, x))
    if known is None or known[0] != version:
      parts = [self._thin(name, node, metric, x) for name in names]
      thin = _join([part for part in parts if part is not None])
      known = self._thinned[node, metric, x] = version, thin
    return known[1]

  def _thin(self, name: str, node: str, metric: str, x: str) -> tuple[Thinned, np.ndarray] | None:
    """Thins a metric of one file; returns also the weight of each position."""
    places, values, weights, valid = self._valid(name, node, metric, x)
    if not len(places):
      return None
    thinned, total = thin(places, values, weights)
    if metric.endswith(MEDIAN):
      low, high = (valid(self._quantile(name, metric, end)) for end in (LOW, HIGH))
      thinned = thinned._replace(
        low=thin(places, low, weights)[0].mean, high=thin(places, high, weights)[0].mean
      )
    return thinned, total

  def _valid(
    self, name: str, node: str, metric: str, x: str
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, Callable[[np.ndarray], np.ndarray]]:
    """Valid positions, values and weights (or None) of a metric, and a function: column -> valid rows."""
    places, rows, valid = self._axis(name, node, x)
    finite = np.isfinite(self._nodes[name].column(metric)[rows])
    if not finite.all():  # a row without the metric repeats no step of it
      known = np.flatnonzero(finite)
      valid = known[holds(places[known])]
    pick = lambda column: column[rows][valid]
    weights = None
    if node == 'actor' and metric.startswith(('episode_', 'environment/')):
      weights = np.nan_to_num(pick(self._nodes[name].column('episodes')), nan=1.0)
    return places[valid], pick(self._nodes[name].column(metric)), weights, pick

  def _quantile(self, name: str, median: str, end: str) -> np.ndarray:
    """[N] another quantile of the same distribution; the median where a row has none."""
    file = self._nodes[name]
    values = file.column(median.removesuffix(MEDIAN) + end)
    return np.where(np.isfinite(values), values, file.column(median))

  def _written(self) -> np.ndarray:
    """[N] f64, the times of all rows, sorted."""
    if self._times is None or self._times[0] != self.version:
      times = np.concatenate([each.column('time') for each in self._nodes.values()])
      self._times = self.version, np.sort(times, kind='stable')  # fast on almost sorted input
    return self._times[1]

  def _axis(self, name: str, node: str, x: str) -> tuple[np.ndarray, Any, Any]:
    """Positions of the rows of a file that have one, their indices, and which of them are valid.

    Indices are a slice where they are of all rows, which avoids a copy.
    """
    file = self._nodes[name]
    version = self.version if x == 'minutes' else file.version
    known = self._places.get((name, x))
    if known is None or known[0] != version:
      key = 'parameter_version' if (node, x) == ('actor', 'learner_step') else x
      if x == 'minutes':
        places = minutes(self._written(), self.launches, file.column('time'))
      else:
        places = file.column(key)
      rows: Any = np.flatnonzero(np.isfinite(places))
      if len(rows) == len(places):
        rows = slice(None)
      valid: Any = np.flatnonzero(holds(places[rows]))
      if len(valid) == len(places[rows]):
        valid = slice(None)
      known = self._places[name, x] = version, (places[rows], rows, valid)
    return known[1]


def read(folder: pathlib.Path) -> History:
  """Reads all metrics of a run that exist by now.

  Raises:
    ValueError: it is not the folder of a run, its config is broken, it has no metrics yet, or a file
      cannot be read.
  """
  run = History(folder)
  try:
    run.read()
  except OSError as error:
    raise ValueError(f'{error.filename}: cannot be read ({error.strerror})') from None
  if not any(run.names(node) for node in NODES):
    if run.broken:
      raise ValueError(f'{folder}: all {run.broken} lines of its metrics are damaged')
    raise ValueError(f'{folder}: has no metrics yet; wait until its nodes have written some')
  return run


def thin(
  places: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None
) -> tuple[Thinned, np.ndarray]:
  """Thins a curve of more than POINTS values: summarises those in each of POINTS equal parts of the x-axis.

  Args:
    places: [N] f64, increasing positions on the x-axis, at least one.
    values: [N] f64, finite values.
    weights: [N] f64, weights of the values in a mean; None for equal weights.

  Returns:
    The thinned curve of M <= POINTS positions, and [M] f64 the total weight at each of them.
  """
  starts = np.arange(len(places))
  if len(places) > POINTS:
    edges = np.linspace(places[0], places[-1], POINTS + 1)[1:-1]
    starts = np.unique(np.append(0, np.searchsorted(places, edges, side='right')))
    starts = starts[starts < len(places)]
  ends = np.append(starts[1:], len(places)) - 1
  counts = ends - starts + 1
  mean = np.add.reduceat(values, starts) / counts
  total = counts.astype(np.float64)
  if weights is not None:
    total = np.add.reduceat(weights, starts)
    weighted = np.add.reduceat(values * weights, starts) / np.where(total > 0, total, 1)
    mean = np.where(total > 0, weighted, mean)
  return Thinned(
    places[ends],
    mean,
    np.minimum.reduceat(values, starts),
    np.maximum.reduceat(values, starts),
  ), total


def minutes(written: np.ndarray, launches: Sequence[float], times: np.ndarray) -> np.ndarray:
  """[N] f64, minutes of running since a run's first metrics, without the time between launches.

  Args:
    written: [M] unix seconds of all its rows, sorted, at least one.
    launches: unix seconds at which the run was started or resumed.
    times: [N] unix seconds to convert.
  """
  pauses = set()
  for index in np.searchsorted(written, launches, side='right'):
    if 0 < index < len(written):
      pauses.add((written[index - 1], written[index]))
  seconds = times - written[0]
  for before, after in pauses:
    seconds = seconds - np.where(times >= after, after - before, 0.0)
  return seconds / 60


def holds(places: np.ndarray) -> np.ndarray:
  """[N] bool, whether each row is valid: no later row, of a resumed run, is at or before its position.

  Args:
    places: [N] positions of the rows of a file on the x-axis, in their written order.
  """
  if not len(places):
    return np.zeros(0, bool)
  return places < np.append(np.minimum.accumulate(places[::-1])[::-1][1:], np.inf)


def joined(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Series:
  """Averages the curves of several files into one, at every position of any of them.

  Args:
    parts: increasing positions, values and weights of each file, [N] f64 each.

  Returns:
    The weighted mean of the last value of each file; a file counts from its first position on.
  """
  if len(parts) == 1:
    return Series(*parts[0][:2])
  axis = np.unique(np.concatenate([x for x, _, _ in parts]))
  values = np.stack([Series(x, value).at(axis) for x, value, _ in parts])
  weights = np.stack([Series(x, weight).at(axis) for x, _, weight in parts])
  return Series(axis, np.nansum(values * weights, axis=0) / np.nansum(weights, axis=0))


def _join(parts: Sequence[tuple[Thinned, np.ndarray]]) -> Thinned | None:
  """Joins the thinned curves, with their weights, of nodes of one kind; None without any."""
  if len(parts) < 2:
    return parts[0][0] if parts else None
  mean = joined([(each.x, each.mean, weight) for each, weight in parts])
  known = lambda values: np.stack(
    [Series(each.x, value).at(mean.x) for (each, _), value in zip(parts, values, strict=True)]
  )
  low = np.nanmin(known([each.low for each, _ in parts]), axis=0)
  high = np.nanmax(known([each.high for each, _ in parts]), axis=0)
  return Thinned(mean.x, mean.value, low, high)
