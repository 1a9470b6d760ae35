"""Reads the metrics of runs as their files grow, row by row, and thins them for plots."""

import array
import collections
import contextlib
import math
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics

POINTS = 240  # most points of a curve; more cannot be distinguished on a screen
CHUNK = 1 << 18  # bytes that are read at a time, some milliseconds of parsing
FIRST_LEARNER = ('learner', 'learner-0')  # the only process of the learner, or the first of several
NODES = ('evaluator', 'learner', 'actor')
X_AXES = {
  'environment_step': 'environment steps',
  'learner_step': 'updates of the learner',
  'minutes': 'minutes of running',
}
NO_CURVES = (
  'time', 'environment_step', 'learner_step', 'parameter_version', 'final', 'episodes'
)  # fmt: skip
# The median of a distribution is drawn as a curve, and the quantiles LOW and HIGH as its band.
MEDIAN, LOW, HIGH = '/median', '/low', '/high'
NO_CURVE_ENDS = (LOW, HIGH, '/lowest', '/highest')


class Curve(NamedTuple):
  """A metric along the x-axis, a step function: each value is valid until the next position.

  Each position stands for one row of metrics, or, once thinned, for those since the position before. For a
  metric that is a median, `low` and `high` are means of the 5 % and the 95 % quantiles.
  """

  x: np.ndarray  # [N] f64, increasing positions
  mean: np.ndarray  # [N] f64, mean over these rows; of several actors, weighted by episodes
  low: np.ndarray  # [N] f64, lowest value of these rows
  high: np.ndarray  # [N] f64, highest value
  weight: np.ndarray  # [N] f64, weight of these rows in a mean


class File:
  """Reads one file of metrics, which may grow, be replaced or be deleted, into a column for each key.

  Args:
    path: path of the file, which need not exist yet.
    keep_rows: whether `rows` keeps all rows, too.

  Attributes:
    rows: all rows in their written order; empty unless made with `keep_rows`.
    broken: number of damaged lines, which are skipped; 1 if the file cannot be read.
    unread: bytes that are still to be read.
    version: number that increases whenever there are new rows, or the file was replaced.
  """

  def __init__(self, path: pathlib.Path, *, keep_rows: bool = False):
    self.unread = path.stat().st_size if path.exists() else 0
    self.version = 0
    self._path = path
    self._keep_rows = keep_rows
    self._begin(None)

  def _begin(self, inode: int | None) -> None:
    self.version += 1
    self.rows: list[dict[str, Any]] = []
    self.broken = 0
    self._inode = inode
    self._offset = 0
    self._count = 0
    # Of each key, the rows that have a number for it, and the numbers.
    self._columns: dict[str, tuple[array.array[int], array.array[float]]] = {}

  @property
  def keys(self) -> list[str]:
    return list(self._columns)

  def __len__(self) -> int:
    return self._count

  def column(self, key: str) -> np.ndarray:
    """[N] f64, the values of a key in all rows; NaN where a row has no number for it."""
    column = np.full(self._count, np.nan)
    if key in self._columns:
      rows, values = self._columns[key]
      column[np.asarray(rows)] = values
    return column

  def last(self, key: str) -> float | None:
    """Value of a key in the newest row; None if that row has none."""
    if key not in self._columns:
      return None
    rows, values = self._columns[key]
    return values[-1] if rows[-1] == self._count - 1 else None

  def read(self) -> bool:
    """Reads the next complete lines, up to CHUNK bytes; returns whether there were any."""
    try:
      with metrics.open_regular(self._path) as file:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset:
          self._begin(status.st_ino)
        file.seek(self._offset)
        content = file.read(CHUNK)
    except FileNotFoundError:
      if self._inode is not None:
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
    for line in content[:end].splitlines():
      try:
        self._append(metrics.row(line, self._path))
      except ValueError:
        self.broken += 1
    self.version += end > 0
    return end > 0

  def _append(self, row: dict[str, Any]) -> None:
    if len(self._columns) + len(row.keys() - self._columns.keys()) > metrics.MOST_KEYS:
      raise ValueError('it has too many metrics')
    if self._keep_rows:
      self.rows.append(row)
    for key, value in row.items():
      if isinstance(value, int | float):
        rows, values = self._columns.setdefault(key, (array.array('q'), array.array('d')))
        rows.append(self._count)
        values.append(value)
    self._count += 1


class History:
  """Metrics and events of a run; each call of `read` continues where the last one stopped.

  A "kind of node" is one of NODES; a "node" is one process of the run, such as 'actor-0'.

  Attributes:
    folder: folder of the run.
    config: config of the run, the newest that `read` has found.
    config_values: values of the config, by their paths.
    origin: RUN@STEP with which the run began, see `train --from`; None if with nothing.
    is_gone: whether the folder was deleted, or is no longer one of a run.
  """

  def __init__(self, folder: pathlib.Path):
    """Reads the config, and no metrics yet.

    Raises:
      ValueError: it is not the folder of a run, or its config is broken.
    """
    self.folder = folder
    self.origin = folder_lib.origin(folder)
    self.is_gone = False
    self._load_config()
    self._events = File(folder / 'metrics' / 'events.jsonl', keep_rows=True)
    self._nodes: dict[str, File] = {}

  def _load_config(self) -> None:
    at = self._config_time()  # before it is read: what is written meanwhile is read again
    self.config: launch_config.ExperimentConfig = folder_lib.load_config(self.folder)
    self.config_values = launch_config.values_of(self.config)
    self._config_at = at

  def _config_time(self) -> int | None:
    """When the config was written, in nanoseconds; None without one."""
    try:
      return (self.folder / folder_lib.CONFIG).stat().st_mtime_ns
    except OSError:
      return None

  def read(self, deadline: float = math.inf) -> None:
    """Reads the new rows of all files, and the config if a resume has changed it.

    Args:
      deadline: value of `time.monotonic` at which to stop; the next call continues.
    """
    self.is_gone = not (self.folder / folder_lib.CONFIG).exists()
    with contextlib.suppress(ValueError):  # of a config that is gone or broken the last one holds
      if self._config_time() != self._config_at:
        self._load_config()
    for path in sorted((self.folder / 'metrics').glob('*.jsonl')):
      if path.stem != 'events' and path.stem not in self._nodes:
        self._nodes[path.stem] = File(path)
    for file in self._files():
      while file.read():
        if time.monotonic() >= deadline:
          return

  def _files(self) -> list[File]:
    return [self._events, *self._nodes.values()]

  @property
  def unread(self) -> int:
    """Bytes that are still to be read."""
    return sum(file.unread for file in self._files())

  @property
  def version(self) -> int:
    """Number that increases with new rows of metrics."""
    return sum(file.version for file in self._files())

  @property
  def damage(self) -> str | None:
    """Sentence on its damaged lines; None without any."""
    broken = sum(file.broken for file in self._files())
    lines = 'line of its metrics is' if broken == 1 else 'lines of its metrics are'
    return f'{broken} {lines} damaged and left out' if broken else None

  @property
  def events(self) -> list[dict[str, Any]]:
    """Rows of the run's events: starts and ends of nodes, see `supervisor.Event`, and warnings."""
    return self._events.rows

  def names(self, node: str) -> list[str]:
    """Names of the nodes of a kind that have written metrics, sorted."""
    known = sorted(name for name, file in self._nodes.items() if len(file))
    return [name for name in known if name == node or name.startswith(f'{node}-')]

  def last(self, name: str, key: str) -> float | None:
    """Value of a key in the newest row of a node; None if that row has none."""
    return self._nodes[name].last(key) if name in self._nodes else None

  def curves(self, x: str) -> dict[str, Curve]:
    """All metrics along the x-axis by 'NODE/METRIC', at no more than POINTS positions.

    Where a resumed run has repeated steps, the later rows count. Several actors are averaged, each by
    its last value; metrics of episodes are weighted by the number of episodes.

    Args:
      x: the x-axis, one of X_AXES; an actor's learner step is the version of its parameters.
    """
    parts = collections.defaultdict(list)
    for node in NODES:
      for name in self.names(node):
        file = self._nodes[name]
        if x == 'minutes':
          places = self._minutes(file.column('time'))
        else:
          places = file.column('parameter_version' if (node, x) == ('actor', 'learner_step') else x)
        for key in file.keys:
          if key not in NO_CURVES and not key.endswith(NO_CURVE_ENDS):
            curve = _curve(file, key, places, node == 'actor')
            if len(curve.x):
              is_there = folder_lib.is_node(name, self.config)
              end = math.inf if is_there else curve.x[-1]
              parts[f'{node}/{key}'].append((thin(curve, key.endswith(MEDIAN)), end))
    return {key: joined(*zip(*each, strict=True)) for key, each in parts.items()}

  def _minutes(self, times: np.ndarray) -> np.ndarray:
    """[N] f64, minutes of running since the first metrics, without the time between launches."""
    written = np.sort(np.concatenate([each.column('time') for each in self._nodes.values()]))
    launches = [
      row['time'] for row in self.events
      if row['kind'] == 'started' and row.get('name') in FIRST_LEARNER and not row.get('restarts')
    ]  # fmt: skip
    seconds = times - written[0]
    for index in np.unique(np.searchsorted(written, launches, side='right')):
      if 0 < index < len(written):
        before, after = written[index - 1], written[index]
        seconds = seconds - np.where(times >= after, after - before, 0.0)
    return seconds / 60


def _curve(file: File, metric: str, places: np.ndarray, is_actor: bool) -> Curve:
  """The valid rows of a metric in a file, at their positions on the x-axis, [N] f64."""
  values = file.column(metric)
  rows = np.flatnonzero(np.isfinite(values) & np.isfinite(places))
  rows = rows[holds(places[rows])]
  weights = np.ones(len(rows))
  if is_actor and metric.startswith(('episode_', 'environment/')):
    weights = np.nan_to_num(file.column('episodes')[rows], nan=1.0)
  low = high = values
  if metric.endswith(MEDIAN):  # a row may lack other quantiles
    ends = [file.column(metric.removesuffix(MEDIAN) + end) for end in (LOW, HIGH)]
    low, high = (np.where(np.isfinite(end), end, values) for end in ends)
  return Curve(places[rows], values[rows], low[rows], high[rows], weights)


def holds(places: np.ndarray) -> np.ndarray:
  """[N] bool, whether each row is valid: no later row, of a resumed run, is at or before its position.

  Args:
    places: [N] positions of the rows of a file on the x-axis, in their written order.
  """
  later = np.minimum.accumulate(np.append(places, np.inf)[::-1])[::-1][1:]
  return places < later


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


def at(x: np.ndarray, values: np.ndarray, places: np.ndarray) -> np.ndarray:
  """[M] f64, the last of the values, [N] at positions x, at or before each place; NaN before the first."""
  index = np.searchsorted(x, places, side='right') - 1
  return np.where(index < 0, np.nan, values[np.maximum(index, 0)])


def joined(parts: Sequence[Curve], ends: Sequence[float]) -> Curve:
  """Averages the curves of one or more files into one, at every position of any of them.

  The mean is of the last value of each file, by its weight; a file counts from its first position on, and until
  its end: the last position of a node that a resumed run does not have, else infinity.
  """
  if len(parts) == 1:
    return parts[0]
  x = np.unique(np.concatenate([each.x for each in parts]))
  mean, low, high, weight = (
    np.stack(
      [
        np.where(x <= end, at(each.x, values, x), np.nan)
        for each, values, end in zip(parts, column, ends, strict=True)
      ]
    )
    for column in zip(*(each[1:] for each in parts), strict=True)
  )
  total = np.nansum(weight, axis=0)
  mean = np.nansum(mean * weight, axis=0) / total
  return Curve(x, mean, np.nanmin(low, axis=0), np.nanmax(high, axis=0), total)
