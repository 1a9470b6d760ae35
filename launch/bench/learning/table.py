"""Shows the results of `bench learning`: tables in Markdown and pictures of the curves."""

import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hephaestus.launch.bench.learning import scores, suite

Row = Mapping[str, Any]
HEADINGS = (
  'environment', 'steps', 'agent', 'seeds', 'final score', 'area', 'retention', 'greedy', 'sampled',
  'random', 'target', 'reached', 'CPU min',
)  # fmt: skip
RUN_HEADINGS = (
  'environment', 'agent', 'seed', 'mean return in each tenth of the steps', 'retention', 'greedy',
  'sampled', 'commit',
)  # fmt: skip
NOTES = """
Medians over seeds; in parentheses the lowest and the highest. Score: mean episode return while
acting, in the last tenth of the steps. Area: mean of the curve of tenths. Retention: (last fifth -
random) / (best fifth - random), 1 where nothing was learned. Greedy, sampled and random: evaluations
after the last step. Reached: number of seeds that reach the target score. For a comparison with PPO
the target is the median of PPO's seeds, at equal steps.
"""


def markdown(rows: Sequence[Row], pictures: Mapping[str, str] | None = None) -> str:
  """Makes a table with a line for each environment, agent and label, and a table of all runs.

  Args:
    rows: rows of results, see `runs.read_rows`.
    pictures: file of the picture of each environment, to be linked; None for no pictures.

  Returns:
    The text in Markdown.
  """
  lines = _heading(HEADINGS)
  for task, groups in _grouped(rows):
    for (agent, label), group in groups.items():
      cells = [
        task.name,
        f'{task.steps:,}',
        _name(agent, label),
        str(len(group)),
        _median(row['final'] for row in group),
        _median(row['area'] for row in group),
        _median(row['retention'] for row in group),
        *(_median((row[key] for row in group), extremes=False) for key in ('greedy', 'sampled')),
        _median((row['random'] for row in group), extremes=False),
        *_targets(task, agent, group, _ppo(groups, label)),
        _median((row['cpu_minutes'] for row in group), extremes=False),
      ]
      lines.append(_line(cells))
  lines += [NOTES, *_runs(rows), '']
  shown = [f'![Curves of {name}]({file})' for name, file in (pictures or {}).items()]
  return '\n'.join([*lines, *shown]).rstrip() + '\n'


def _runs(rows: Sequence[Row]) -> list[str]:
  """Lines of a Markdown table with the curve of each run."""
  lines = _heading(RUN_HEADINGS)
  for task, groups in _grouped(rows):
    for (agent, label), group in groups.items():
      for row in group:
        curve = ' '.join('–' if point is None else number(point) for point in row['curve'])
        scores = [_median([row[key]]) for key in ('retention', 'greedy', 'sampled')]
        commit = row.get('commit') or '–'
        lines.append(
          _line([task.name, _name(agent, label), str(row['seed']), curve, *scores, commit])
        )
  return lines


def _heading(names: Sequence[str]) -> list[str]:
  return [_line(names), '|' + '---|' * len(names)]


def _line(cells: Sequence[str]) -> str:
  return '| ' + ' | '.join(cells) + ' |'


def write(rows: Sequence[Row], out: pathlib.Path) -> list[str]:
  """Writes OUT/results.md, and a picture of the curves in each environment.

  Args:
    rows: rows of results, see `runs.read_rows`.
    out: an existing folder.

  Returns:
    Lines on what was written or left out.
  """
  pictures, remarks = {}, []
  try:
    pictures = draw(rows, out)
  except ValueError as error:
    remarks.append(f'no pictures: {error}')
  (out / 'results.md').write_text(markdown(rows, pictures))
  return [*remarks, f'{out / "results.md"}: the table, {len(pictures)} pictures (PNG)']


def draw(rows: Sequence[Row], out: pathlib.Path) -> dict[str, str]:
  """Draws the curves of all agents in each environment: medians and confidence intervals over seeds.

  Args:
    rows: rows of results, see `runs.read_rows`.
    out: an existing folder for the PNG files.

  Returns:
    Name of the file in OUT, by environment.

  Raises:
    ValueError: matplotlib, of the extra `report`, is not installed.
  """
  from hephaestus.launch.files import history
  from hephaestus.launch.report import panels, plot

  files = {}
  for task, groups in _grouped(rows):
    edges = np.linspace(0, task.steps, suite.NUM_POINTS + 1)
    lines = {}
    for (agent, label), group in groups.items():
      # A point is drawn along its tenth of the steps, until the next.
      points = np.array([[*row['curve'], row['curve'][-1]] for row in group], np.float64)
      known = ~np.isnan(points).any(axis=0)
      if not known.any():
        continue
      x, points = edges[known], points[:, known]
      each = [history.Curve(x, seed, seed, seed, np.ones_like(x)) for seed in points]
      seeds = each if len(group) > 1 else []
      lines[_name(agent, label)] = panels.GroupCurve(
        x, np.median(points, axis=0), *_interval(points), seeds=seeds
      )
    if lines:
      files[task.name] = f'{task.name}.png'
      plot.draw(
        out / files[task.name],
        lines,
        title=task.name,
        x_label=history.X_AXES['environment_step'],
        y_label='mean episode return while acting',
        levels=() if task.target is None else (task.target,),
      )
  return files


def _interval(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Ends of the 95 % confidence interval of the median of S seeds, [S, M]; of fewer than 3, their range."""
  if len(points) < 3:
    return points.min(axis=0), points.max(axis=0)
  from scipy import stats

  found = stats.bootstrap(
    (points,), np.median, n_resamples=2000, method='percentile', random_state=0
  ).confidence_interval
  return found.low, found.high


def _grouped(
  rows: Iterable[Row],
) -> list[tuple[suite.Task, dict[tuple[str, str], list[Row]]]]:
  """Pairs of a task, in the suite's order, and its rows by (agent, label), without other step budgets."""
  rows = list(rows)
  found = []
  for task in suite.SUITE:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row['agent'], row['label'], row['seed'])):
      if row['environment'] == task.name and row['budget'] == task.steps:
        groups.setdefault((row['agent'], row['label']), []).append(row)
    if groups:
      found.append((task, groups))
  return found


def _ppo(groups: Mapping[tuple[str, str], list[Row]], label: str) -> list[Row]:
  """PPO's rows with a label, or else those with the default label; empty without any."""
  return groups.get((suite.BASELINE, label)) or groups.get((suite.BASELINE, 'default')) or []


def _targets(
  task: suite.Task, agent: str, group: Sequence[Row], ppo: Sequence[Row]
) -> tuple[str, str]:
  """Texts of two cells: the task's target scores, and how many seeds of the group reach each."""
  targets, reached = [], []
  count = lambda flags: f'{sum(flag is True for flag in flags)}/{len(group)}'
  if task.target is not None:
    by = '' if task.target_step is None else f' by {task.target_step:,}'
    targets.append(f'{task.target:g}{by}')
    reached.append(count([row['reached'] for row in group]))
  if task.times_ppo is not None and agent != suite.BASELINE:
    targets.append(f'{task.times_ppo:g} x PPO')
    curves = [row['curve'] for row in ppo]
    flags = [scores.beats_ppo(task, row['curve'], curves) for row in group]
    reached.append('–' if None in flags else count(flags))
  return '; '.join(targets) or '–', '; '.join(reached) or '–'


def _name(agent: str, label: str) -> str:
  return agent if label == 'default' else f'{agent}, {label}'


def _median(values: Iterable[float | None], *, extremes: bool = True) -> str:
  known = [value for value in values if value is not None]
  if not known:
    return '–'
  shown = number(statistics.median(known))
  if len(known) == 1 or not extremes:
    return shown
  return f'{shown} ({number(min(known))} to {number(max(known))})'


def number(value: float) -> str:
  """Formats a number with about three digits."""
  digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
  text = f'{value:,.{digits}f}'
  return text if float(text.replace(',', '')) else text.lstrip('-')  # no -0.00
