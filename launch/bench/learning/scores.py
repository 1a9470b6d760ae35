"""Scores of a run: its curve by tenths of the steps, area under it, retention, and target scores."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hephaestus.launch.bench.learning import suite
from hephaestus.launch.report import history
from hephaestus.launch.run import metrics

Points = list[float | None]
NOTHING_LEARNED = 0.1  # share of the scale of scores, below which a gain is noise


class Ended(NamedTuple):
  """Episodes that ended between two reports of one node.

  Attributes:
    begin: environment steps of the run at the report before.
    end: at this report, above `begin`.
    episodes: how many ended.
    mean: of their returns.
  """

  begin: float
  end: float
  episodes: int
  mean: float


class Summary(NamedTuple):
  """Scores of a run, each None where no episode has ended.

  Attributes:
    curve: mean of each tenth of the steps.
    final: the last tenth's.
    area: mean of the curve.
    retention: see `retention`.
  """

  curve: Points
  final: float | None
  area: float | None
  retention: float | None


def read(folder: pathlib.Path) -> tuple[list[Ended], int]:
  """Episodes while acting, from a run's metrics, and the environment steps so far.

  These are the rows of the actors, or of the learner of a fused run, which acts itself. Steps that a
  resumed run has repeated count once.
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
      if row['episodes']:
        spans.append(Ended(min(begin, end - 1), end, row['episodes'], row['episode_return']))
    last = max(last, steps[-1])
  return spans, last


def curve(spans: Sequence[Ended], steps: int, last_step: int) -> Points:
  """Mean episode return in each tenth of the steps.

  The episodes of a span are taken as evenly spread over it, so a span that crosses from one tenth
  into the next counts in both by its share. A tenth in which no episode ended has the mean of the
  tenth before, or of the first that has one.

  Args:
    spans: of a run.
    steps: of its budget.
    last_step: that it made; tenths that begin after it are None.
  """
  edges = np.linspace(0, steps, suite.NUM_POINTS + 1)
  points: Points = []
  for low, high in itertools.pairwise(edges):
    weights = [
      max(0.0, min(span.end, high) - max(span.begin, low)) / (span.end - span.begin) * span.episodes
      for span in spans
    ]
    total = sum(weights)
    sums = sum(weight * span.mean for weight, span in zip(weights, spans, strict=True))
    if low >= last_step:
      points.append(None)
    else:
      points.append(sums / total if total else points[-1] if points else None)
  first = next((point for point in points if point is not None), None)
  return [
    first if point is None and low < last_step else point
    for point, low in zip(points, edges[:-1], strict=True)
  ]


def retention(points: Sequence[float], base: float, target: float | None = None) -> float:
  """Share of the best score that the end of a run retains, on a scale from a random policy's score.

    retention = (last fifth - base) / (best - base)

  `best` is the highest mean of two neighbouring tenths, and the last fifth is one of these, so the
  result is at most 1; it is negative where the end is worse than the random policy. It is 1 where
  nothing was learned: best - base is below a tenth of the largest of |base|, |best| and |target|.

  Args:
    points: mean of each tenth, at least one.
    base: score of a random policy.
    target: of the task, if it has one.
  """
  fifths = [sum(pair) / 2 for pair in itertools.pairwise(points)] or list(points)
  best = max(fifths)
  scale = max(abs(base), abs(best), abs(target or 0.0))
  if best - base <= NOTHING_LEARNED * scale:
    return 1.0
  return (fifths[-1] - base) / (best - base)


def summary(points: Points, base: float, target: float | None = None) -> Summary:
  """Scores of a run by its curve; `base` and `target` as of `retention`."""
  known = [point for point in points if point is not None]
  if not known:
    return Summary(points, None, None, None)
  return Summary(points, known[-1], sum(known) / len(known), retention(known, base, target))


def reaches_target(task: suite.Task, points: Points, sampled: float | None) -> bool | None:
  """Whether a run reaches the target of its task; None for a task without one.

  Args:
    task: of the run.
    points: its curve.
    sampled: score of its evaluation with sampled actions.
  """
  if task.target is None:
    return None
  score = sampled if task.is_evaluated else points[task.point(task.target_step)]
  return score is not None and score >= task.target


def beats_ppo(task: suite.Task, points: Points, ppo: Sequence[Points]) -> bool | None:
  """Whether a curve is above `times_ppo` times PPO's at equal steps.

  Args:
    task: of the runs.
    points: curve of a run of another agent.
    ppo: curves of PPO, whose median counts.

  Returns:
    None where there is nothing to compare.
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
  """The scores of a finished run, as part of a row of results.

  Args:
    task: of the run.
    folder: of the run.
    evaluations: mean episode return after the last step with `greedy` and `sampled` actions, and of
      the `random` policy.
  """
  spans, last_step = read(folder)
  points = curve(spans, task.steps, last_step)
  found = summary(points, evaluations['random'], task.target)
  updates = (metrics.last(folder / 'metrics' / 'learner.jsonl') or {}).get('learner_step')
  return {
    'steps': last_step,
    'updates': updates,
    'episodes': sum(span.episodes for span in spans),
    **found._asdict(),
    **evaluations,
    'target': task.target,
    'reached': reaches_target(task, points, evaluations['sampled']),
  }
