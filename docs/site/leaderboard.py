"""Writes docs/leaderboard.md and its picture of curves from docs/results.

python docs/site/leaderboard.py
"""

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from hephaestus.launch.bench.learning import runs, suite, table

DOCS = pathlib.Path(__file__).resolve().parents[1]
PAGE = DOCS / 'leaderboard.md'
PICTURE = DOCS / 'images' / 'leaderboard.png'
# Each axis of the picture has a title, an environment of the suite or None, and a run on the accelerator.
DRAWN = (
  ('Space Invaders (MinAtar)', 'space_invaders', 'gymnax/SpaceInvaders-MinAtar'),
  ('Breakout (MinAtar)', 'breakout', 'gymnax/Breakout-MinAtar'),
  ('navix DoorKey-5x5', None, 'navix/Navix-DoorKey-5x5-v0'),
)
# When the agent got its explorer. Rows from before are of another agent.
SINCE = 1795730000.0
_GYMNAX = '[PPO](https://github.com/RobertTLange/gymnax#implemented-accelerated-environments)'
_DREAMER = '[DreamerV3](https://arxiv.org/abs/2301.04104), bsuite score'
PUBLISHED = {
  'cartpole': f'500 at 150,000 steps, {_GYMNAX}',
  'acrobot': f'-80 at 500,000 steps, {_GYMNAX}',
  'mountain_car': f'-118 at 250,000 steps, {_GYMNAX}',
  'pendulum': f'-130 at 1,000,000 steps, {_GYMNAX}',
  'deep_sea_12': f'0, {_DREAMER}',
  'deep_sea_20': f'0, {_DREAMER}',
  'deep_sea_30': f'0, {_DREAMER}',
  'memory_chain_5': f'0.1 at 150,000 steps, {_GYMNAX}',
  'memory_chain_20': f'0.1 at 150,000 steps, {_GYMNAX}',
  'breakout': f'28 at 10,000,000 steps, {_GYMNAX}',
  'asterix': f'15 at 10,000,000 steps, {_GYMNAX}',
  'freeway': f'58 at 10,000,000 steps, {_GYMNAX}',
  'space_invaders': f'131 at 10,000,000 steps, {_GYMNAX}',
}
HEADINGS = (
  'environment', 'steps', 'target', 'reach it, keep it', 'steps to it', 'return', 'CPU minutes', 'PPO',
  'published', 'commit',
)  # fmt: skip
HEAD = """# Leaderboard

This page has one row for each environment of the suite, with the dreamer's steps to the target and what they cost. It
is made from [all rows](results/rows.jsonl) by `python docs/site/leaderboard.py`; [results.md](results.md) has their
curves, and [says](results.md#the-suite) what changed between the commits. All environments have the configuration of
their commit, without settings of their own. Each run is one process on one core:

```
hephaestus bench learning --environments NAME --agents dreamer ppo --seeds 0 1 2
```

| column | meaning |
|---|---|
| target | mean return of the episodes in a tenth of the steps, while acting with sampled actions; "n x PPO": n times the return of our PPO after as many steps |
| reach it, keep it | seeds of those that were run that reach the target in some tenth of the steps, and in the last |
| steps to it | end of the first tenth of the steps that reaches the target, a median over the seeds that do |
| return | mean return in the last tenth of the steps, a median over seeds |
| CPU minutes | of a whole run on one core, a median; other jobs made some up to twice as long |
| PPO | return of our PPO in the last tenth of as many steps; it takes a tenth of the CPU time |
| published | returns of others, mostly after more steps; environments are the same or ports of them |

![Returns over steps in three environments](images/leaderboard.png)

Runs on an accelerator were ended by the clock, see [results.md](results.md#on-an-accelerator).
"""


def _steps_to(task: suite.Task, row: dict[str, Any], target: float) -> list[int]:
  """Ends of the tenths of the steps that reach the target."""
  curve = row['curve']
  if task.is_evaluated:  # the curve is too noisy
    curve = [None] * (suite.NUM_POINTS - 1) + [row['sampled']]
  return [
    task.steps * (index + 1) // suite.NUM_POINTS
    for index, point in enumerate(curve)
    if point is not None and point >= target
  ]


def _line(
  task: suite.Task, dreamers: Sequence[dict[str, Any]], ppo: Sequence[dict[str, Any]]
) -> str:
  median = lambda values: statistics.median(values) if (values := list(values)) else None
  shown = lambda value: '–' if value is None else table.number(value)
  baseline = median(row['final'] for row in ppo if row['final'] is not None)
  target, text = task.target, f'{task.target:g}' if task.target is not None else ''
  if target is None and task.times_ppo is not None:
    text = f'{task.times_ppo:g} x PPO'
    target = None if baseline is None else baseline * task.times_ppo
  steps = [] if target is None else [_steps_to(task, row, target) for row in dreamers]
  reached = [each[0] for each in steps if each]
  kept = sum(task.steps in each for each in steps)
  finals = [row['final'] for row in dreamers if row['final'] is not None]
  ended = [row['steps'] for row in dreamers if row['final'] is None]
  cells = [
    task.name,
    f'{task.steps:,}',
    text,
    f'{len(reached)}, {kept} of {len(dreamers)}' if steps else '–',
    f'{round(median(reached)):,}' if reached else '–',
    shown(median(finals)) if finals else f'ended at {ended[0]:,}' if ended else '–',
    shown(median(row['cpu_minutes'] for row in dreamers)),
    shown(baseline),
    PUBLISHED.get(task.name, '–'),
    ', '.join(dict.fromkeys(row['commit'] or '–' for row in dreamers)) or '–',
  ]
  return '| ' + ' | '.join(cells) + ' |'


def page(rows: Sequence[dict[str, Any]]) -> str:
  """Makes the page.

  Args:
    rows: rows of `bench learning`.

  Returns:
    The text in Markdown.
  """
  tables: dict[str, list[str]] = {'now': [], 'before': [], 'none': []}
  for task in suite.SUITE:
    if task.target is None and task.times_ppo is None:
      continue  # its reward says nothing
    of_task = [
      row
      for row in rows
      if (row['environment'], row['label'], row['budget']) == (task.name, 'default', task.steps)
    ]
    dreamers = [row for row in of_task if row['agent'] == 'dreamer']
    ppo = [row for row in of_task if row['agent'] == suite.BASELINE]
    present = [row for row in dreamers if row['time'] >= SINCE]
    place = 'now' if present else 'before' if dreamers else 'none'
    tables[place].append(_line(task, present or dreamers, ppo))
    heading = ['| ' + ' | '.join(HEADINGS) + ' |', '|' + '---|' * len(HEADINGS)]
  text = [HEAD, '## The agent of 25 to 27 November', *heading, *tables['now']]
  if tables['before']:
    text += ['', '## Rows of the agent before it had an explorer', *heading, *tables['before']]
  if tables['none']:
    text += ['', '## Not run by the dreamer', *heading, *tables['none']]
  return '\n'.join(text) + '\n'


def draw(rows: Sequence[dict[str, Any]], device: dict[str, Any]) -> Any:
  """Draws curves of returns over steps, on one core and on an accelerator.

  Args:
    rows: rows of `bench learning`.
    device: run -> its curve, of the section "several runs" of results/accelerators.json.

  Returns:
    A matplotlib figure, with one axis for each of DRAWN.
  """
  from matplotlib import figure as figure_lib

  figure = figure_lib.Figure(figsize=(10, 3), layout='constrained')
  for axis, (title, name, on_device) in zip(figure.subplots(1, len(DRAWN)), DRAWN, strict=True):
    axis.set(title=title, xlabel='environment steps (thousands)')
    for row in rows:
      if (row['environment'], row['label']) == (name, 'default') and row['budget'] == 100_000:
        is_dreamer = row['agent'] == 'dreamer'
        steps = [
          row['budget'] / 1e3 * (i + 1) / len(row['curve']) for i in range(len(row['curve']))
        ]
        label = 'dreamer, one core' if is_dreamer else 'PPO, one core'
        axis.plot(steps, row['curve'], color='C0' if is_dreamer else 'C1', label=label)
    curve = device[on_device]
    steps = [curve['steps_per_point'] / 1e3 * (i + 1) for i in range(len(curve['returns']))]
    axis.plot(steps, curve['returns'], color='C2', label='dreamer, a share of an H100')
    axis.legend(fontsize=7)
  figure.axes[0].set_ylabel('mean return')
  return figure


if __name__ == '__main__':
  found = runs.read_rows(DOCS / 'results')
  measured = json.loads((DOCS / 'results' / 'accelerators.json').read_text())
  draw(found, measured['sections']['several runs']['runs']).savefig(PICTURE, dpi=110)
  PAGE.write_text(page(found))
