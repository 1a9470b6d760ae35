"""Scores of a run: its curve by tenths of the steps, the mean of the curve, retention and targets."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hephaestus.launch.bench.learning import suite
from hephaestus.launch.files import history, metrics

Points = list[float | None]
"""Mean episode return in each tenth of the steps; None for a tenth without data."""
NOTHING_LEARNED = 0.1  # gains below this share of the scale of scores count as noise


class Ended(NamedTuple):
  """Episodes that ended between two rows of metrics of one process."""

  begin: float  # environment steps of the run at the first of the two rows
  end: float  # environment steps at the second row, above `begin`
  episodes: int
  mean: float  # return


def read(folder: pathlib.Path) -> tuple[list[Ended], int]:
  """Reads the episodes while acting from a run's metrics.

  These are the metrics of the actors, or of the learner of a fused run, which acts itself. Steps that
  a resumed run has repeated count once.

  Returns:
    The episodes between rows of metrics, and the number of environment steps so far.
  """
  files = sorted((folder / 'metrics').glob('actor-*.jsonl')) or [
    folder / 'metrics' / 'learner.jsonl'
  ]
  spans: list[Ended] = []
  last = 0
  for path in files:
    rows = [row for row in metrics.read(path) if row.get('environment_step') is not None]
    if not rows:
      continue
    held = history.holds(np.array([row['environment_step'] for row in rows], np.float64))
    kept = [row for row, is_held in zip(rows, held, strict=True) if is_held]
    steps = [0, *(row['environment_step'] for row in kept)]
    for row, (begin, end) in zip(kept, itertools.pairwise(steps), strict=True):
      if row.get('episodes') and row.get('episode_return') is not None:
        spans.append(Ended(min(begin, end - 1), end, row['episodes'], row['episode_return']))
    last = max(last, steps[-1])
  return spans, last


def curve(spans: Sequence[Ended], steps: int, last_step: int) -> Points:
  """Mean episode return in each tenth of the steps.

  The episodes of a span are taken as evenly spread over it, so a span that crosses from one tenth
  into the next counts in both by its share. A tenth in which no episode ended has the mean of the
  tenth before. None for those before the first episode, such as while only an explorer acts, and for a tenth that
  begins at `last_step`, the last step of the run, or later.
  """
  edges = np.linspace(0, steps, suite.NUM_POINTS + 1)
  points: Points = []
  for low, high in itertools.pairwise(edges[: np.count_nonzero(edges < last_step) + 1]):
    weights = [
      max(0.0, min(span.end, high) - max(span.begin, low)) / (span.end - span.begin) * span.episodes
      for span in spans
    ]
    sums = sum(weight * span.mean for weight, span in zip(weights, spans, strict=True))
    points.append(sums / sum(weights) if sum(weights) else points[-1] if points else None)
  return points + [None] * (suite.NUM_POINTS - len(points))


def retention(points: Sequence[float], base: float, target: float | None = None) -> float:
  """Share of the best score that the end of a run retains, on a scale from a random policy's score.

    retention = (last fifth - base) / (best - base)

  `best` is the highest mean of two neighbouring tenths, and the last fifth is one of these, so the
  result is at most 1; it is negative where the end is worse than the random policy. It is 1 where
  nothing was learned: best - base is at most a tenth of the largest of |base|, |best| and |target|.

  Args:
    points: means of the tenths, at least one.
    base: score of a random policy.
    target: the task's target score, if it has one.
  """
  fifths = [sum(pair) / 2 for pair in itertools.pairwise(points)] or list(points)
  best = max(fifths)
  scale = max(abs(base), abs(best), abs(target or 0.0))
  if best - base <= NOTHING_LEARNED * scale:
    return 1.0
  return (fifths[-1] - base) / (best - base)


def reaches_target(task: suite.Task, points: Points, sampled: float | None) -> bool | None:
  """Whether a run reaches the target score of its task; None for a task without a target.

  `sampled`, the mean episode return of its evaluation with sampled actions, counts if the task says so.
  """
  if task.target is None:
    return None
  score = sampled if task.is_evaluated else points[task.point(task.target_step)]
  return score is not None and score >= task.target


def beats_ppo(task: suite.Task, points: Points, ppo: Sequence[Points]) -> bool | None:
  """Whether a curve is above the median of PPO's times `task.times_ppo`, in all tenths that the task compares.

  None if the task has no comparison, or if the curve or all of PPO's lack a value in one.
  """
  if task.times_ppo is None:
    return None
  for step in task.ppo_steps or (task.steps,):
    at = task.point(step)
    ours = points[at]
    theirs = [each[at] for each in ppo if each[at] is not None]
    if not theirs or ours is None:
      return None
    if not ours > task.times_ppo * float(np.median(np.array(theirs, np.float64))):
      return False
  return True


def row(task: suite.Task, folder: pathlib.Path, evaluations: dict[str, Any]) -> dict[str, Any]:
  """Scores of a finished run, as in its row of results; see docs/results.md.

  Args:
    task: the task of the run.
    folder: folder of the run.
    evaluations: mean episode returns after the last step, of the agent with 'greedy' and with 'sampled'
      actions, and of the 'random' policy.
  """
  found = summary(task, *read(folder), **evaluations)
  updates = (metrics.last(folder / 'metrics' / 'learner.jsonl') or {}).get('learner_step')
  return {'updates': updates, **found}


def summary(
  task: suite.Task,
  spans: Sequence[Ended],
  last_step: int,
  *,
  random: float | None = None,
  greedy: float | None = None,
  sampled: float | None = None,
) -> dict[str, Any]:
  """The same of the episodes of any agent, for `last_step` steps; without a random policy's score no retention."""
  points = curve(spans, task.steps, last_step)
  known = [point for point in points if point is not None]
  retained = retention(known, random, task.target) if known and random is not None else None
  return {
    'steps': last_step,
    'episodes': sum(span.episodes for span in spans),
    'curve': points,
    'final': known[-1] if known else None,
    'area': sum(known) / len(known) if known else None,
    'retention': retained,
    'random': random,
    'greedy': greedy,
    'sampled': sampled,
    'target': task.target,
    'reached': reaches_target(task, points, sampled),
  }
