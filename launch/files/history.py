"""Reads the metrics of runs as their files grow, row by row, and thins them for plots."""

import functools
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from omegaconf import OmegaConf

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


class Curve(NamedTuple):
  """A metric along the x-axis with a band.

  Each position stands for one row of metrics, or, once thinned, for those since the position before.

  Attributes:
    x: [N] f64, increasing positions.
    mean: [N] f64, mean of the metric over these rows, weighted as in `History.series`.
    low: [N] f64, lowest value of these rows; for a metric that is a median, mean of the 5 % quantiles.
    high: [N] f64, highest value; for a metric that is a median, mean of the 95 % quantiles.
    weight: [N] f64, weight of these rows in a mean.
  """

  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  weight: np.ndarray


class File:
  """Reads one file of metrics, which may grow, be replaced or be deleted, into a column for each key.

  Args:
    path: path of the file, which need not exist yet.
    keep_rows: whether `rows` keeps all rows, too.

  Attributes:
    rows: all rows in their written order; empty unless made with `keep_rows`.
    broken: number of damaged lines, which are skipped; 1 if the file cannot be read.
    unread: bytes that are still to be read.
  """

  def __init__(self, path: pathlib.Path, *, keep_rows: bool = False):
    self.unread = path.stat().st_size if path.exists() else 0
    self._path = path
    self._keep_rows = keep_rows
    self._generation = 0  # increases when all earlier rows become invalid
    self._begin(None)

  def _begin(self, inode: int | None) -> None:
    self.rows: list[dict[str, Any]] = []
    self.broken = 0
    self._inode = inode
    self._offset = 0
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
    """Reads the next complete lines, up to CHUNK bytes; returns whether there were any."""
    try:
      with metrics.open_regular(self._path) as file:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset:
          self._generation += self._inode is not None
          self._begin(status.st_ino)
        file.seek(self._offset)
        content = file.read(CHUNK)
    except FileNotFoundError:
      self._generation += self._inode is not None
      self._begin(None)
      self.unread = 0
      return False
    except OSError:  # a folder or a link, or nobody may read it
      self.broken = max(1, self.broken)
      return False
    end = content.rfind(b'\n') + 1
    if end == 0 and len(content) == CHUNK:  # longer than any row, so it is damaged
      end = len(content)
    self._offset += end
    self.unread = status.st_size - self._offset if end else 0
    rows = []
    for line in content[:end].splitlines():
      try:
        rows.append(metrics.row(line, self._path))
      except ValueError:
        self.broken += 1
    if self._keep_rows:
      self.rows += rows
    self._append(rows)
    return end > 0

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
    self._cache: dict[Any, tuple[Any, Any]] = {}  # version and value

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

  @functools.cached_property
  def config_values(self) -> dict[str, Any]:
    """Values of the config by their paths."""
    return launch_config.flatten(OmegaConf.to_container(OmegaConf.structured(self.config)))

  @property
  def unread(self) -> int:
    """Bytes that are still to be read."""
    return sum(file.unread for file in (self._events, *self._nodes.values()))

  @property
  def broken(self) -> int:
    """Number of damaged lines."""
    return sum(file.broken for file in (self._events, *self._nodes.values()))

  @property
  def damage(self) -> str | None:
    """Sentence on its damaged lines; None without any."""
    lines = 'line of its metrics is' if self.broken == 1 else 'lines of its metrics are'
    return f'{self.broken} {lines} damaged and left out' if self.broken else None

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
    curve = joined(self._curves(node, metric, x))
    return None if curve is None else Series(curve.x, curve.mean)

  def thinned(self, node: str, metric: str, x: str) -> Curve | None:
    """Returns `series` with its band, at no more than POINTS positions; cached until there are new rows."""
    version = [(name, self._nodes[name].version) for name in self.names(node)]
    if x == 'minutes':
      version += self.version  # minutes count from the first metrics of any node
    mean_of_band = metric.endswith(MEDIAN)
    make = lambda: joined([thin(each, mean_of_band) for each in self._curves(node, metric, x)])
    return self._cached((node, metric, x), version, make)

  def _cached(self, key: Any, version: Any, make: Callable[[], Any]) -> Any:
    """Result of `make`, which is called again only for another version."""
    if key not in self._cache or self._cache[key][0] != version:
      self._cache[key] = version, make()
    return self._cache[key][1]

  def _curves(self, node: str, metric: str, x: str) -> list[Curve]:
    """The valid rows of a metric in each file of a kind of node; files without any are left out."""
    found = []
    for name in self.names(node):
      file = self._nodes[name]
      values, places = file.column(metric), self._places(file, node, x)
      rows = np.flatnonzero(np.isfinite(values) & np.isfinite(places))
      rows = rows[holds(places[rows])]
      weights = np.ones(len(rows))
      if node == 'actor' and metric.startswith(('episode_', 'environment/')):
        weights = np.nan_to_num(file.column('episodes')[rows], nan=1.0)
      low = high = values
      if metric.endswith(MEDIAN):  # a row may lack other quantiles
        ends = [file.column(metric.removesuffix(MEDIAN) + end) for end in (LOW, HIGH)]
        low, high = (np.where(np.isfinite(end), end, values) for end in ends)
      if len(rows):
        found.append(Curve(places[rows], values[rows], low[rows], high[rows], weights))
    return found

  def _places(self, file: File, node: str, x: str) -> np.ndarray:
    """[N] f64, positions of the rows of a file on the x-axis; NaN for those without one."""
    if x == 'minutes':
      return minutes(self._written(), self.launches, file.column('time'))
    return file.column('parameter_version' if (node, x) == ('actor', 'learner_step') else x)

  def _written(self) -> np.ndarray:
    """[N] f64, the times of all rows, sorted."""
    times = lambda: np.concatenate([each.column('time') for each in self._nodes.values()])
    in_order = lambda: np.sort(times(), kind='stable')  # fast on almost sorted input
    return self._cached('written', self.version, in_order)


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
    reason = run.damage or 'wait until its nodes have written some'
    raise ValueError(f'{folder}: has no metrics yet; {reason}')
  return run


def thin(curve: Curve, mean_of_band: bool = False) -> Curve:
  """Thins a curve of more than POINTS values: summarises those in each of POINTS equal parts of the x-axis.

  Args:
    curve: the curve, of at least one position.
    mean_of_band: whether the ends of the band are averaged; else it covers all values.

  Returns:
    The curve of at most POINTS positions, whose weights are sums.
  """
  if len(curve.x) <= POINTS:
    return curve
  edges = np.linspace(curve.x[0], curve.x[-1], POINTS + 1)[1:-1]
  starts = np.unique(np.append(0, np.searchsorted(curve.x, edges, side='right')))
  starts = starts[starts < len(curve.x)]
  ends = np.append(starts[1:], len(curve.x)) - 1
  total = np.add.reduceat(curve.weight, starts)

  def mean(values: np.ndarray) -> np.ndarray:
    weighted = np.add.reduceat(values * curve.weight, starts) / np.where(total > 0, total, 1)
    return np.where(total > 0, weighted, np.add.reduceat(values, starts) / (ends - starts + 1))

  low = mean(curve.low) if mean_of_band else np.minimum.reduceat(curve.low, starts)
  high = mean(curve.high) if mean_of_band else np.maximum.reduceat(curve.high, starts)
  return Curve(curve.x[ends], mean(curve.mean), low, high, total)


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


def joined(parts: Sequence[Curve]) -> Curve | None:
  """Averages the curves of several files into one, at every position of any of them; None without any.

  The mean is of the last value of each file, by its weight; a file counts from its first position on.
  """
  if len(parts) < 2:
    return parts[0] if parts else None
  x = np.unique(np.concatenate([each.x for each in parts]))
  mean, low, high, weight = (
    np.stack([Series(each.x, values).at(x) for each, values in zip(parts, column, strict=True)])
    for column in zip(*(each[1:] for each in parts), strict=True)
  )
  total = np.nansum(weight, axis=0)
  mean = np.nansum(mean * weight, axis=0) / total
  return Curve(x, mean, np.nanmin(low, axis=0), np.nanmax(high, axis=0), total)
