"""Shows the results of `bench learning` as tables in Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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


def markdown(rows: Sequence[Row]) -> str:
  """Makes a table with a line for each environment, agent and label, and a table of all runs.

  Rows of results, see `runs.read_rows`, of another step budget than the suite's are left out.
  """
  lines: list[Sequence[str]] = [HEADINGS]
  of_runs: list[Sequence[str]] = [RUN_HEADINGS]
  for task, groups in _grouped(rows):
    for (agent, label), group in groups.items():
      name = agent if label == 'default' else f'{agent}, {label}'
      # PPO with the same label, or else with the default one.
      ppo = groups.get((suite.BASELINE, label)) or groups.get((suite.BASELINE, 'default')) or []
      lines.append((
        task.name, f'{task.steps:,}', name, str(len(group)),
        *(median(group, key, extremes=True) for key in ('final', 'area', 'retention')),
        *(median(group, key) for key in ('greedy', 'sampled', 'random')),
        *_targets(task, agent, group, ppo), median(group, 'cpu_minutes'),
      ))  # fmt: skip
      of_runs += [
        (
          task.name, name, str(row['seed']), ' '.join(map(shown, row['curve'])),
          *(shown(row[key]) for key in ('retention', 'greedy', 'sampled')),
          row.get('commit') or '–',
        )
        for row in group
      ]  # fmt: skip
  return '\n'.join([*in_markdown(lines), NOTES, *in_markdown(of_runs)]) + '\n'


def in_markdown(lines: Sequence[Sequence[str]]) -> list[str]:
  """Lines of a table in Markdown, of the texts of its cells; the first line has the headings."""
  heading, *rows = ('| ' + ' | '.join(cells) + ' |' for cells in lines)
  return [heading, '|' + '---|' * len(lines[0]), *rows]


def _grouped(
  rows: Iterable[Row],
) -> list[tuple[suite.Task, dict[tuple[str, str], list[Row]]]]:
  """Pairs of a task, in the suite's order, and its rows by (agent, label)."""
  rows = sorted(rows, key=lambda row: (row['agent'], row['label'], row['seed']))
  found = []
  for task in suite.SUITE:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
      if (row['environment'], row['budget']) == (task.name, task.steps):
        groups.setdefault((row['agent'], row['label']), []).append(row)
    if groups:
      found.append((task, groups))
  return found


def _targets(
  task: suite.Task, agent: str, group: Sequence[Row], ppo: Sequence[Row]
) -> tuple[str, str]:
  """Texts of two cells: the task's target scores, and how many seeds of the group reach each."""
  targets, reached = [], []
  count = lambda flags: '–' if None in flags else f'{sum(flags)}/{len(group)}'
  if task.target is not None:
    by = '' if task.target_step is None else f' by {task.target_step:,}'
    targets.append(f'{task.target:g}{by}')
    reached.append(count([row['reached'] for row in group]))
  if task.times_ppo is not None and agent != suite.BASELINE:
    targets.append(f'{task.times_ppo:g} x PPO')
    curves = [row['curve'] for row in ppo]
    reached.append(count([scores.beats_ppo(task, row['curve'], curves) for row in group]))
  return '; '.join(targets) or '–', '; '.join(reached) or '–'


def median(rows: Sequence[Row], key: str, *, extremes: bool = False) -> str:
  """The median of a field of rows, as a text, with its lowest and highest value if asked for."""
  known = [row[key] for row in rows if row[key] is not None]
  text = shown(statistics.median(known) if known else None)
  if len(known) < 2 or not extremes:
    return text
  return f'{text} ({number(min(known))} to {number(max(known))})'


def shown(value: float | None) -> str:
  """A number of a row as a text; a dash where there is none."""
  return '–' if value is None else number(value)


def number(value: float) -> str:
  """Formats a number with about three digits."""
  digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
  text = f'{value:,.{digits}f}'
  return text if float(text.replace(',', '')) else text.lstrip('-')  # no -0.00
