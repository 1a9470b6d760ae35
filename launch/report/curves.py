"""Learning curves: runs grouped by config, with confidence intervals over seeds, and tables of them."""

import collections
import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hephaestus.launch.files import history
from hephaestus.launch.report import server

Y_AXES = {
  'normalised_score': 'score (0: random policy, 1: scripted policy)',
  'episode_return': 'mean episode return',
}
CURVE_POINTS = 101
RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST_SEEDS = 3  # for a confidence interval; fewer get their range instead
TABLE_POINTS = 10
# Config keys that may differ between the runs of one curve. They do not change learning, but only when
# and where metrics are written.
INDIFFERENT = (
  'seed', 'max_minutes', 'tensorboard', 'wandb', 'replay.port', 'replay.timeout_seconds',
  'learner.log_period', 'learner.checkpoint_period', 'learner.checkpoint_updates',
  'actor.log_period', 'evaluator.period', 'evaluator.period_steps', 'evaluator.video_period',
)  # fmt: skip
INDIFFERENT_OF_FUSED = (
  'learner.max_staleness', 'learner.publish_period', 'replay.max_in_flight', 'replay.num_shards',
)  # fmt: skip
INDIFFERENT_OF_FUSED_ON_POLICY = (*INDIFFERENT_OF_FUSED, 'replay')
MAX_KEYS = 3  # most config keys in a label that is not the user's


class Group(NamedTuple):
  """Runs that form one curve, such as several seeds of one config.

  Attributes:
    label: name of the group, unique in its environment.
    environment: name of the environment of all its runs.
    runs: its runs.
  """

  label: str
  environment: str
  runs: list[history.History]


class Curve(NamedTuple):
  """One learning curve: runs that differ only in their seed, or that the user has grouped.

  Attributes:
    label: name of the curve, unique in its environment.
    runs: the runs of `series`, whose folders and configs the notes name.
    series: the metric of each run along the x-axis.
  """

  label: str
  runs: list[history.History]
  series: list[history.Series]

  @property
  def range(self) -> tuple[float, float]:
    """First and last x at which all seeds have values; first > last if there is no such x."""
    return max(each.x[0] for each in self.series), min(each.x[-1] for each in self.series)

  def at(self, x: np.ndarray) -> np.ndarray:
    """Returns the last value of each of S seeds at or before each position.

    Args:
      x: [M] positions on the x-axis.

    Returns:
      [S, M] f64; NaN outside of `range`.
    """
    start, end = self.range
    values = np.stack([each.at(x) for each in self.series])
    return np.where((x < start) | (x > end), np.nan, values)

  def is_measured(self, x: np.ndarray) -> np.ndarray:
    """Says for which positions any seed has a new value, at the position or since the one before.

    Args:
      x: [M] increasing positions on the x-axis.

    Returns:
      [M] bool.
    """
    before = np.concatenate([[-np.inf], x[:-1]])
    counts = [np.searchsorted(each.x, [before, x], side='right') for each in self.series]
    return np.any([since < until for since, until in counts], axis=0)


class Estimate(NamedTuple):
  """A statistic over seeds, at each of M positions.

  Attributes:
    point: [M] f64, the estimate.
    low: [M] f64, lower end of the confidence interval; with fewer than three seeds, the lowest seed.
    high: [M] f64, upper end of the confidence interval, or the highest seed.
  """

  point: np.ndarray
  low: np.ndarray
  high: np.ndarray


class Comparison(NamedTuple):
  """The curves of one environment, the content of its picture, and its table.

  Attributes:
    environment: name of the environment.
    metric: key of the metric on the y-axis.
    node: kind of process that reported it, one of history.NODES.
    x: the x-axis, one of history.X_AXES.
    curves: the curves; those with a user's label come first, then in the order of the runs.
    notes: a line on each curve: its runs, and what to be careful about; with Markdown's `code`, as the
      other texts.
    caption: what the table shows, a sentence or two each.
    headings: headings of the columns of the table.
    rows: cells of each curve in the table.
  """

  environment: str
  metric: str
  node: str
  x: str
  curves: list[Curve]
  notes: list[str]
  caption: list[str]
  headings: list[str]
  rows: list[list[str]]

  @property
  def key(self) -> str:
    """'NODE/METRIC', the key of its chart on the page."""
    return f'{self.node}/{self.metric}'

  def table(self) -> dict[str, Any]:
    """Its 'environment', 'caption', 'headings', 'rows' and 'notes', as the page reads them."""
    names = ('environment', 'caption', 'headings', 'rows', 'notes')
    return {name: getattr(self, name) for name in names}


class Report(NamedTuple):
  """A report on runs.

  Attributes:
    markdown: the whole report: all tables, and the runs that were left out.
    left_out: a line for each run or environment that is not in the report, with the reason.
    figures: the curves of each environment.
    groups: all runs that could be read, in groups.
  """

  markdown: str
  left_out: list[str]
  figures: list[Comparison]
  groups: list[Group]


def make(
  folders: Sequence[pathlib.Path],
  labelled: Sequence[tuple[str, Sequence[pathlib.Path]]] = (),
  *,
  metric: str | None = None,
  node: str | None = None,
  x: str = 'environment_step',
  pictures: bool = False,
  all_panels: bool = False,
) -> Report:
  """Reports on runs, finished or running, with interquartile means and medians over seeds.

  rliable computes confidence intervals by stratified bootstrap over the seeds (Agarwal et al.,
  2021, "Deep reinforcement learning at the edge of the statistical precipice"). They are
  deterministic.

  Args:
    folders: folders of runs; those that differ only in their seed become one curve.
    labelled: pairs of a curve's label and the folders of its runs, which are not grouped with others.
    metric: key of the metric to show. None: the normalised score or the episode return, whichever
      more runs of an environment have; the score if equally many.
    node: kind of process whose metrics are read, one of history.NODES; None: the evaluator without a
      metric, else the one that reports the metric in most runs.
    x: the x-axis, one of history.X_AXES.
    pictures: whether the tables refer to the pictures of `page.write`.
    all_panels: whether a report without any curve of the metric is still useful, since `page.write`
      shows all panels of the runs.

  Returns:
    The report.

  Raises:
    ValueError: there is nothing to show, a label is given twice, or a package of the extra `report` is
      not installed.
  """
  check_packages()
  runs, left_out = _read_all(folders, labelled)
  found = groups([run for _, run in runs], [label for label, _ in runs])
  figures = []
  for environment in dict.fromkeys(group.environment for group in found):
    members = [group for group in found if group.environment == environment]
    try:
      figures.append(_make_figure(members, metric, node, x, left_out))
    except ValueError as error:
      left_out.append(str(error))
  if not (found if all_panels else figures):
    raise ValueError('; '.join(left_out) or 'no runs are given; name their folders')
  texts = [_markdown(figure, picture=pictures) for figure in figures]
  if left_out:
    texts.append('\n'.join(f'* left out: {reason}' for reason in left_out))
  return Report('\n\n'.join(texts) + '\n', left_out, figures, found)


def _read_all(
  folders: Sequence[pathlib.Path], labelled: Sequence[tuple[str, Sequence[pathlib.Path]]]
) -> tuple[list[tuple[str | None, history.History]], list[str]]:
  """Reads each folder once, labelled ones first, since they may be among the others, too.

  Returns:
    Label and run of each folder that could be read, and why the others could not.

  Raises:
    ValueError: a label is given twice.
  """
  names = [label for label, _ in labelled]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(f'--label {name}: is given twice; name all its runs in one')
  runs: list[tuple[str | None, history.History]] = []
  left_out: list[str] = []
  taken: set[pathlib.Path] = set()
  for label, members in (*labelled, (None, folders)):
    for folder in members:
      if folder.resolve() in taken:
        continue
      taken.add(folder.resolve())
      try:
        runs.append((label, history.read(folder)))
      except ValueError as error:
        left_out.append(str(error))
  return runs, left_out


def check_packages() -> None:
  """Raises ValueError if a package of the extra `report` is not installed; names it."""
  server.check_packages('report', 'matplotlib', 'rliable', 'uplot')


def _make_figure(
  members: Sequence[Group], metric: str | None, node: str | None, x: str, left_out: list[str]
) -> Comparison:
  """Makes the curves of one environment; adds runs without one to `left_out`; ValueError if all are."""
  environment = members[0].environment
  node, metric = _choose([run for group in members for run in group.runs], metric, node)
  curves: list[Curve] = []
  for group in members:
    known = {run: run.series(node, metric, x) for run in group.runs}
    left_out += [
      f'{run.folder}: has no {metric} of the {node} by {history.X_AXES[x]}'
      for run, series in known.items()
      if series is None
    ]
    series = {run: each for run, each in known.items() if each is not None}
    curve = Curve(group.label, list(series), list(series.values()))
    if series and curve.range[0] > curve.range[1]:
      names = ', '.join(str(run.folder) for run in curve.runs)
      left_out.append(f'{names}: have no {history.X_AXES[x]} in common; give longer runs')
    elif series:
      curves.append(curve)
  if not curves:
    raise ValueError(f'{environment}: has no curve')
  firsts = [curve.runs[0] for curve in curves]
  notes = [
    _notes(curve, x, _differing(_of_agent(firsts, curve.runs[0].config.agent_name)))
    for curve in curves
  ]
  return _with_table(Comparison(environment, metric, node, x, curves, notes, [], [], []))


def _choose(
  runs: Sequence[history.History], metric: str | None, node: str | None
) -> tuple[str, str]:
  """Kind of node and metric to show: the first candidate that most runs have; ValueError if none has one."""
  names = ('normalised_score', 'episode_return') if metric is None else (metric,)
  nodes = (node,) if node else history.NODES[:1] if metric is None else history.NODES
  known = [{each: run.keys(each) for each in history.NODES} for run in runs]
  counts = {
    (each, name): sum(name in metrics_of[each] for metrics_of in known)
    for name in names
    for each in nodes
  }
  best = max(counts, key=lambda pair: counts[pair])
  if counts[best]:
    return best
  lists = [
    f'{each}: {", ".join(sorted(set().union(*(metrics_of[each] for metrics_of in known)))) or "none"}'
    for each in nodes
  ]
  asked = f'--metric {metric}' if metric is not None else ' and '.join(names)
  raise ValueError(
    f'{asked}: {runs[0].environment} has no such numbers; it has, {"; ".join(lists)}'
  )


def _notes(curve: Curve, x: str, keys: Sequence[str]) -> str:
  """Lists the runs of a curve, and warns of mixed configs, repeated seeds and short runs.

  Args:
    curve: the curve.
    x: the x-axis, one of history.X_AXES.
    keys: config keys in which it differs from other curves of its environment and agent.
  """
  runs = ', '.join(f'{run.folder} (seed {run.config.seed})' for run in curve.runs)
  text = [f'`{curve.label}`: {runs}']
  if len(keys) > MAX_KEYS:  # the label has a few of them
    own = _config_values(curve.runs[0])
    text.append('with ' + ', '.join(f'{key}={_plain(own.get(key))}' for key in keys))
  mixed = _differing(curve.runs)
  if len({run.config.agent_name for run in curve.runs}) > 1:
    text.append('its runs have different agents')
  elif mixed:
    text.append(f'its runs differ in {", ".join(mixed)}')
  seeds = [run.config.seed for run in curve.runs]
  again = sorted({seed for seed in seeds if seeds.count(seed) > 1})
  if again:
    text.append(f'seed {", ".join(map(str, again))} is in it more than once')
  ends = [each.x[-1] for each in curve.series]
  if min(ends) < 0.9 * max(ends):
    shortest = curve.runs[int(np.argmin(ends))].folder
    text.append(
      f'all seeds have values until {_place(min(ends), x)} only, where {shortest} ends; the longest '
      f'run ends at {_place(max(ends), x)}'
    )
  return '; '.join(text)


def _is_indifferent(key: str, run: history.History) -> bool:
  """Whether a run's curve does not depend on the config key at this path."""
  names = [*INDIFFERENT, *run.config.record.indifferent_keys]
  if run.config.fused:
    on_policy = run.config.record.on_policy
    names += INDIFFERENT_OF_FUSED_ON_POLICY if on_policy else INDIFFERENT_OF_FUSED
  return any(key == name or key.startswith(f'{name}.') for name in names)


def _config_values(run: history.History) -> dict[str, Any]:
  """Config values that a run's curve depends on, by path."""
  return {key: value for key, value in run.config_values.items() if not _is_indifferent(key, run)}


def _kinds(values: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
  """Number of different configs, compared only by `keys`."""
  return len({tuple(str(each.get(key)) for key in keys) for each in values})


def _differing(runs: Sequence[history.History]) -> list[str]:
  """Paths of the config keys that differ between runs and change their curves."""
  values = [_config_values(run) for run in runs]
  known = dict.fromkeys(key for each in values for key in each)
  keys = [key for key in known if _kinds(values, [key]) > 1]
  # A key that one run does not use is no difference, unless it is needed to tell runs apart.
  of_all = [key for key in keys if not any(_is_indifferent(key, run) for run in runs)]
  return of_all if _kinds(values, of_all) == _kinds(values, keys) else keys


def groups(
  histories: Sequence[history.History], labels: Sequence[str | None] | None = None
) -> list[Group]:
  """Groups runs into curves.

  Within an environment, runs with the same label from the user form a group, and so do runs without a
  label that differ only in their seed, or in other config keys that do not change learning.

  Args:
    histories: the runs.
    labels: the user's label of each run, or None; None for no labels at all.

  Returns:
    The groups in the order of their first runs; groups of one environment are adjacent.

  Raises:
    ValueError: two groups of an environment have the same label.
  """
  given = labels or [None] * len(histories)
  found: list[Group] = []
  for environment in dict.fromkeys(run.environment for run in histories):
    members: dict[Any, list[history.History]] = collections.defaultdict(list)
    for label, run in zip(given, histories, strict=True):
      if run.environment == environment:
        key = label or (run.config.agent_name, json.dumps(_config_values(run), sort_keys=True))
        members[key].append(run)
    unlabelled = [key for key in members if not isinstance(key, str)]
    made = _labels([members[key][0] for key in unlabelled])
    names = dict(zip(unlabelled, made, strict=True))
    all_names = [names.get(key, key) for key in members]
    for name in all_names:
      if all_names.count(name) > 1:
        raise ValueError(f'--label {name}: is the name of another curve, too; give another')
    found += map(Group, all_names, [environment] * len(members), members.values())
  return found


def _labels(runs: Sequence[history.History]) -> list[str]:
  """A label for each run that tells it apart: the agent, and a few `key=value`."""
  labels = []
  for run in runs:
    rivals = _of_agent(runs, run.config.agent_name)
    keys = _differing(rivals)
    shown = (
      keys
      if len(keys) <= MAX_KEYS
      else _separating_keys([_config_values(each) for each in rivals], keys)
    )
    parts = [f'{_short(key, keys)}={_plain(_config_values(run).get(key))}' for key in shown]
    if len(shown) < len(keys):
      parts.append('…')
    words = [run.config.agent_name] if len(rivals) < len(runs) or not parts else []
    labels.append(' '.join([*words, ', '.join(parts)]).strip())
  return labels


def _of_agent(runs: Sequence[history.History], name: str) -> list[history.History]:
  """The runs of the agent of this name."""
  return [run for run in runs if run.config.agent_name == name]


def _separating_keys(values: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[str]:
  """A few keys that tell all configs apart, chosen greedily by the number of different ones."""
  chosen: list[str] = []
  while _kinds(values, chosen) < _kinds(values, keys):
    chosen.append(max(keys, key=lambda key: _kinds(values, [*chosen, key])))
  return chosen


def _short(key: str, keys: Sequence[str]) -> str:
  """The last part of a path, or the whole path if another one ends with the same part."""
  last = key.rsplit('.', 1)[-1]
  return key if [other.rsplit('.', 1)[-1] for other in keys].count(last) > 1 else last


def _plain(value: Any) -> str:
  """A config value as text: JSON, but text without quotes."""
  return value if isinstance(value, str) else json.dumps(value)


def interquartile_mean(values: np.ndarray) -> np.ndarray:
  """Mean over seeds without the lowest and the highest quarter, as in rliable.

  Args:
    values: [S, M] f64, values of S seeds at M positions.

  Returns:
    [M] f64; NaN where a seed is NaN.
  """
  quarter = len(values) // 4
  middle = np.sort(values, axis=0)[quarter : len(values) - quarter]
  return np.where(np.isnan(values).any(axis=0), np.nan, middle.mean(axis=0))


def estimate(values: np.ndarray, statistic: str) -> Estimate:
  """Estimates a statistic over seeds with its 95 % confidence interval; deterministic.

  Args:
    values: [S, M] f64, values of S seeds at M positions; NaN where a seed has no value.
    statistic: 'iqm', the interquartile mean, or 'median'.

  Returns:
    The statistic at each position; NaN where a seed is NaN.
  """
  from rliable import library

  aggregate: Any = {'iqm': interquartile_mean, 'median': functools.partial(np.median, axis=0)}[
    statistic
  ]
  known = ~np.isnan(values).any(axis=0)
  if len(values) < FEWEST_SEEDS or not known.any():
    return Estimate(aggregate(values), values.min(axis=0), values.max(axis=0))
  # Many positions have the same values, and resampling is slow.
  columns, place = np.unique(values[:, known], axis=1, return_inverse=True)
  before = np.random.get_state()
  np.random.seed(0)  # rliable always draws from the global generator
  try:
    points, intervals = library.get_interval_estimates(
      {'all': columns[:, None]},  # one task
      lambda scores: aggregate(scores[:, 0]),
      reps=RESAMPLES,
      confidence_interval_size=CONFIDENCE,
    )
  finally:
    np.random.set_state(before)
  result = np.full((3, len(known)), np.nan)
  result[:, known] = np.stack([points['all'], *intervals['all']])[:, place.reshape(-1)]
  return Estimate(*result)


def grid(curve: Curve) -> np.ndarray:
  """[M] positions at which to draw a curve: every change of a seed, but at most CURVE_POINTS."""
  start, end = curve.range
  changes = np.unique(np.concatenate([each.x for each in curve.series]))
  changes = changes[(changes >= start) & (changes <= end)]
  return changes if len(changes) <= CURVE_POINTS else np.linspace(start, end, CURVE_POINTS)


def _positions(figure: Comparison) -> np.ndarray:
  """About ten round positions on the x-axis for the columns of the table, from 0 on."""
  end = max(curve.range[1] for curve in figure.curves)
  if end <= 0:
    return np.zeros(1)
  power = 10.0 ** math.floor(math.log10(end / TABLE_POINTS))
  step = power * min(
    each for each in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if each * power * TABLE_POINTS >= end
  )
  if figure.x != 'minutes':
    step = math.ceil(step)
  return step * np.arange(math.floor(end / step) + 1)


def _with_table(figure: Comparison) -> Comparison:
  """Adds the table of an environment to its curves."""
  positions = _positions(figure)
  over_x = [estimate(curve.at(positions), 'iqm') for curve in figure.curves]
  last = [np.array([curve.range[1]]) for curve in figure.curves]
  finals = [
    [estimate(curve.at(x), statistic) for statistic in ('iqm', 'median')]
    for curve, x in zip(figure.curves, last, strict=True)
  ]
  shown = np.concatenate([each.point for each in over_x] + [each[0].point for each in finals])
  number = _number_format(float(np.nanmax(np.abs(shown))))
  metric = Y_AXES.get(figure.metric, f'`{figure.metric}`')
  caption = [
    f'{metric[0].upper()}{metric[1:]}, of the {figure.node}, by {history.X_AXES[figure.x]}: the '
    'interquartile mean over seeds (the mean of fewer than four).',
    f'In parentheses: its {100 * CONFIDENCE:.0f} % confidence interval by stratified bootstrap over '
    f'seeds; with fewer than {FEWEST_SEEDS} seeds, their range. A column has the last value since the '
    'column before; – where nothing was measured.',
  ]
  headings = ['curve', 'seeds', *map(_round_place, positions), 'last', 'median', 'minutes']
  rows = []
  for curve, along, x, (iqm, median) in zip(figure.curves, over_x, last, finals, strict=True):
    minutes = [run.running_minutes for run in curve.runs]
    cells = [
      curve.label,
      str(len(curve.runs)),
      *(
        number(value) if is_measured and not np.isnan(value) else '–'
        for value, is_measured in zip(along.point, curve.is_measured(positions), strict=True)
      ),
      f'{_with_interval(iqm, number, len(curve.runs))} at {_place(float(x[0]), figure.x)}',
      _with_interval(median, number, len(curve.runs)),
      ' to '.join(dict.fromkeys(f'{value:,.1f}' for value in (min(minutes), max(minutes)))),
    ]
    rows.append(cells)
  return figure._replace(caption=caption, headings=headings, rows=rows)


def _markdown(table: Comparison, *, picture: bool) -> str:
  """A table in Markdown, with its notes."""
  lines = [f'## {table.environment}', '']
  if picture:
    lines += [f'![Curves of {table.environment}]({file_name(table.environment)}.png)', '']
  lines += [*table.caption, '']
  rows = [
    '| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |'
    for cells in (table.headings, *table.rows)
  ]
  lines += [rows[0], '|' + '---|' * len(table.headings), *rows[1:]]
  return '\n'.join([*lines, '', *(f'* {note}' for note in table.notes)])


def file_name(environment: str) -> str:
  """Converts an environment's name to a file name without suffix."""
  return environment.replace('/', '-').replace(':', '-')


def _with_interval(estimate: Estimate, number: Callable[[float], str], seeds: int) -> str:
  point, low, high = (number(float(each[0])) for each in estimate)
  if seeds == 1:
    return point
  return f'{point} ({"range " if seeds < FEWEST_SEEDS else ""}{low} to {high})'


def _number_format(largest: float) -> Callable[[float], str]:
  """Makes the function that formats the numbers of one table: about three digits of the largest."""
  power = math.floor(math.log10(largest)) if largest > 0 else 0
  decimals = 1 - power if power < -1 else min(2, max(0, 2 - power))

  def write(value: float) -> str:
    text = f'{value:,.{decimals}f}'
    return text if float(text.replace(',', '')) else text.lstrip('-')  # no -0.00

  return write


def _round_place(x: float) -> str:
  for unit, suffix in ((1e6, 'M'), (1e3, 'k')):
    if x >= unit:
      return f'{x / unit:g}{suffix}'
  return f'{x:g}'


def _place(x: float, axis: str) -> str:
  if axis != 'minutes':
    return f'{x:,.0f}'
  return f'{x:,.1f} minutes' if x >= 10 else f'{x:.2f} minutes'
