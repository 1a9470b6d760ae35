"""Writes all tables of the suite's results from docs/results/rows.jsonl: README, docs/results.md, docs/leaderboard.md.

python docs/site/results.py

Also the picture of curves.
"""

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hephaestus.launch.bench.learning import runs, suite, table

Row = Mapping[str, Any]
DOCS = pathlib.Path(__file__).resolve().parents[1]
README, RESULTS, LEADERBOARD = (
  DOCS.parent / 'README.md',
  DOCS / 'results.md',
  DOCS / 'leaderboard.md',
)
PICTURE = DOCS / 'images' / 'leaderboard.png'
BEGIN, END = '<!-- rows, by docs/site/results.py -->\n', '<!-- end of rows -->'
OURS, DREAMERV3 = 'dreamer', 'dreamerv3'
NAMES = {OURS: 'Hephaestus', DREAMERV3: 'DreamerV3', suite.BASELINE: 'own PPO'}
# Rows of the README, with what they are called there.
SHOWN = {
  'catch': '`catch`',
  'cartpole': 'CartPole',
  'mountain_car': 'MountainCar',
  'acrobot': 'Acrobot',
  'deep_sea_12': 'DeepSea of size 12',
  'memory_chain_5': 'MemoryChain of length 5',
  'breakout': 'Breakout (MinAtar)',
  'snake': 'Snake (jumanji)',
}
MEASURED = ('3d34c293', '9249d9c7', 'eae605ad')  # commits whose rows the README shows
DRAWN = {
  'cartpole': 'CartPole',
  'deep_sea_12': 'DeepSea of size 12',
  'memory_chain_5': 'MemoryChain',
}
_GYMNAX = '[PPO](https://github.com/RobertTLange/gymnax#implemented-accelerated-environments)'
PUBLISHED = {
  'cartpole': f'500 at 150,000 steps, {_GYMNAX}',
  'acrobot': f'-80 at 500,000 steps, {_GYMNAX}',
  'mountain_car': f'-118 at 250,000 steps, {_GYMNAX}',
  'pendulum': f'-130 at 1,000,000 steps, {_GYMNAX}',
  'memory_chain_5': f'0.1 at 150,000 steps, {_GYMNAX}',
  'memory_chain_20': f'0.1 at 150,000 steps, {_GYMNAX}',
  'breakout': f'28 at 10,000,000 steps, {_GYMNAX}',
  'asterix': f'15 at 10,000,000 steps, {_GYMNAX}',
  'freeway': f'58 at 10,000,000 steps, {_GYMNAX}',
  'space_invaders': f'131 at 10,000,000 steps, {_GYMNAX}',
}


Lines = list[Sequence[str]]
"""The texts of the cells of a table, line by line; the first has the headings."""


def newest(rows: Sequence[Row]) -> list[Row]:
  """The rows of each environment, agent and label that are of the commit of the newest of them."""
  commits = {
    (row['environment'], row['agent'], row['label']): row['commit']
    for row in sorted(rows, key=lambda row: row['time'])
  }
  return [
    row for row in rows if row['commit'] == commits[row['environment'], row['agent'], row['label']]
  ]


def _by_task(rows: Sequence[Row]) -> list[tuple[suite.Task, dict[str, list[Row]]]]:
  """Pairs of a task that has rows, in the suite's order, and its rows by agent; with a label, by both."""
  found = []
  for task in suite.SUITE:
    groups: dict[str, list[Row]] = {agent: [] for agent in NAMES}
    for row in sorted(rows, key=lambda row: row['seed']):
      if (row['environment'], row['budget']) == (task.name, task.steps):
        name = row['agent'] if row['label'] == 'default' else f'{row["agent"]} {row["label"]}'
        groups.setdefault(name, []).append(row)
    if any(groups.values()):
      found.append((task, groups))
  return found


def readme(rows: Sequence[Row]) -> Lines:
  """The README's table: the return in the last tenth of the steps, of ours at the commits MEASURED."""
  rows = [row for row in rows if row['commit'] in MEASURED or row['agent'] == DREAMERV3]
  lines: Lines = [('task', 'steps', 'seeds', *NAMES.values())]
  for task, groups in _by_task(rows):
    if task.name in SHOWN and groups[OURS]:
      seeds = ', '.join(str(len(groups[agent])) for agent in NAMES)
      finals = (table.median(groups[agent], 'final', extremes=True) for agent in NAMES)
      lines.append((SHOWN[task.name], f'{task.steps:,}', seeds, *finals))
  return lines


def results(rows: Sequence[Row]) -> Lines:
  """The table of docs/results.md: the curve of each run, its evaluations and its cost."""
  numbers = 'retention', 'greedy', 'sampled', 'random', 'cpu_minutes'
  lines: Lines = [
    ('environment', 'steps', 'agent, seed', 'mean return in each tenth of the steps', *numbers[:-1], 'CPU min', 'commit')
  ]  # fmt: skip
  for task, groups in _by_task(rows):
    for agent, group in groups.items():
      name, *label = agent.split()
      for row in group:
        lines.append((
          task.name, f'{task.steps:,}', f'{" ".join([NAMES[name], *label])}, {row["seed"]}',
          ' '.join(map(table.shown, row['curve'])), *(table.shown(row[number]) for number in numbers),
          row['commit'][:7],
        ))  # fmt: skip
  return lines


def leaderboard(rows: Sequence[Row]) -> Lines:
  """The table of docs/leaderboard.md: steps to the target, and what they cost."""
  minutes = [f'CPU min, {name}' for name in NAMES.values()]
  lines: Lines = [
    ('environment', 'steps', 'target', *NAMES.values(), *minutes, 'published', 'commit')
  ]
  for task, groups in _by_task(rows):
    if task.target is None and task.times_ppo is None:
      continue  # its reward says nothing
    target, text = task.target, f'{task.target:g}' if task.target is not None else '–'
    baseline = [row['final'] for row in groups[suite.BASELINE] if row['final'] is not None]
    of_ppo = target is None
    if of_ppo:
      text = f'{task.times_ppo:g} x PPO'
      least = [row['random'] for row in groups[suite.BASELINE] if row['random'] is not None]
      multiple = [statistics.median(baseline) * task.times_ppo] if baseline else []
      target = max(multiple + least, default=None)  # PPO may be worse than a random policy
    reached = {agent: _reached(task, groups[agent], target) for agent in NAMES}
    if of_ppo:
      reached[suite.BASELINE] = '–'
    lines.append((
      task.name, f'{task.steps:,}', text, *reached.values(),
      *(table.median(groups[agent], 'cpu_minutes') for agent in NAMES), PUBLISHED.get(task.name, '–'),
      ', '.join(dict.fromkeys(row['commit'][:7] for row in groups[OURS])) or '–',
    ))  # fmt: skip
  return lines


def _reached(task: suite.Task, group: Sequence[Row], target: float | None) -> str:
  """How many of the rows reach a target in some tenth of the steps, and in the last, and the median of the steps."""
  if target is None or not group:
    return '–'
  steps = [
    [
      task.steps * (index + 1) // suite.NUM_POINTS
      for index, point in enumerate(row['curve'])
      if point is not None and point >= target
    ]
    if not task.is_evaluated
    else [task.steps] * (row['sampled'] is not None and row['sampled'] >= target)  # curve too noisy
    for row in group
  ]
  first = [each[0] for each in steps if each]
  median = f': {round(statistics.median(first)):,}' if first else ''
  return f'{len(first)}, {sum(task.steps in each for each in steps)} of {len(group)}{median}'


PAGES: Mapping[pathlib.Path, Callable[[Sequence[Row]], Lines]] = {
  README: readme,
  RESULTS: results,
  LEADERBOARD: leaderboard,
}
"""Pages and what makes their tables, each between BEGIN and END."""


def page(path: pathlib.Path, rows: Sequence[Row]) -> str:
  """The text of a page, with the table of `rows`."""
  before, rest = path.read_text().split(BEGIN)
  _, after = rest.split(END)
  return '\n'.join([before + BEGIN.rstrip(), *table.in_markdown(PAGES[path](rows)), END + after])


def draw(rows: Sequence[Row]) -> Any:
  """Draws the returns of each agent over steps, a matplotlib figure with one axis for each of DRAWN."""
  from matplotlib import figure as figure_lib

  found = {task.name: groups for task, groups in _by_task(rows)}
  figure = figure_lib.Figure(figsize=(10, 3), layout='constrained')
  for axis, (name, title) in zip(figure.subplots(1, len(DRAWN)), DRAWN.items(), strict=True):
    axis.set(title=title, xlabel='environment steps (thousands)')
    for colour, agent in enumerate(NAMES):
      for number, row in enumerate(found[name][agent]):
        steps = [row['budget'] / 1e3 * (i + 1) / suite.NUM_POINTS for i in range(suite.NUM_POINTS)]
        label = None if number else NAMES[agent]
        axis.plot(steps, row['curve'], color=f'C{colour}', label=label)
    axis.legend(fontsize=7)
  figure.axes[0].set_ylabel('mean return')
  return figure


if __name__ == '__main__':
  measured = runs.read_rows(DOCS / 'results')
  draw(measured).savefig(PICTURE, dpi=110)
  for path in PAGES:
    path.write_text(page(path, measured))
