"""Warnings for runs that will not learn, each with the setting to change, by the metrics of their learner."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 16  # reports over which a trend is judged
LEAST_EVIDENCE = 1e-3  # mean number of memories of an action, below which nothing is recalled
LEAST_CHANGE = 1e-4  # of a vital's mean over a batch; it changes by more where it changes at all
VITAL = 'intrinsic/vital_'  # metrics of vitals, and of the model's error of them
MOST_KL, MOST_CLIPPED = 0.08, 0.35
LEAST_ENTROPY = 0.05  # share of the entropy of the first report
GOOD_SCORE = 0.9  # normalised score above which a policy may well be nearly deterministic

Rows = Sequence[Mapping[str, Any]]
"""Metrics of reports by name, the oldest first; None where a number was not finite."""


def of_replay(rows: Rows) -> dict[str, str]:
  """Warns of rejected sequences, a replay that was not saved, and of parts of the dreamer that have no effect, by the newest reports.

  The parts are a memory that is never read, and a vital (such as food) that stays the same.

  Returns:
    A text for each warning, with the setting to change, by the name of its kind.
  """
  rows = rows[-WINDOW:]
  found = _of_rejected(rows)
  if rows and rows[-1].get('replay/failed_saves'):
    found['replay'] = (
      'replay was not saved: a restart of its server would lose what it has collected since; the log '
      'of the learner has the reason'
    )
  if len(rows) < WINDOW:
    return found
  # Reports of older parts of a run may lack a metric.
  values = lambda name: [row[name] for row in rows if row.get(name) is not None]
  filled, evidence = values('memory/filled'), values('memory/evidence')
  if len(evidence) == WINDOW and min(filled) > 0 and max(evidence) < LEAST_EVIDENCE:
    found['memory'] = (
      'memory is never read: no observation occurs twice; use agent.memory_size=0, or an '
      'observation without what is never the same again'
    )
  for name in rows[-1]:
    vital = name.removeprefix(VITAL)
    seen = values(name) if name.startswith(VITAL) and vital != 'error' else []
    if len(seen) == WINDOW and max(seen) - min(seen) < LEAST_CHANGE:
      found[name] = (
        f"vital {vital} stays at {seen[-1]:.3g}: nothing changes it; leave it out of the environment's "
        'VitalsSpec'
      )
  return found


def _of_rejected(rows: Rows) -> dict[str, str]:
  if not (rows and rows[-1].get('rejected_sequences')):
    return {}
  text = (
    'sequences were rejected: the environment may give numbers that are not finite (`hephaestus doctor '
    'ENVIRONMENT` plays it); the log of the learner has the reason'
  )
  return {'rejected': text}


def of_ppo(rows: Rows, score: float | None, entropy_scale: float) -> dict[str, str]:
  """Warns of PPO's rejected sequences, high KL, high clip fraction, collapse of entropy, and longer episodes without gain.

  Args:
    rows: reports; the first is of the beginning, later ones may be left out.
    score: newest normalised score (1: the scripted policy); a good one stops the last two warnings. None if
      unknown.
    entropy_scale: the agent's `entropy_scale`, which warnings quote.

  Returns:
    As `of_replay`.
  """
  needed = [f'ppo/{name}' for name in ('approx_kl', 'clip_fraction', 'entropy', 'learning_rate')]
  rows = [row for row in rows if all(row.get(name) is not None for name in needed)]
  if not rows:
    return {}
  found = _of_rejected(rows)
  largest = lambda name, rows=rows: max((row[f'ppo/{name}'] for row in rows), default=0.0)
  rate = f'learner.learning_rate (now {rows[-1]["ppo/learning_rate"]:.2g})'
  if (kl := largest('approx_kl')) > MOST_KL:
    found['kl'] = (
      f'KL {kl:.3f} is above {MOST_KL}: the policy moves too far on one unroll; lower {rate} or '
      'learner.num_epochs'
    )
  # In the first report a new policy moves fast.
  if (clipped := largest('clip_fraction', rows[1:])) > MOST_CLIPPED:
    found['clip'] = (
      f'clip fraction {clipped:.2f} is above {MOST_CLIPPED}: much of the experience gives no gradient; '
      f'lower {rate} or learner.num_epochs, or use fewer learner.num_minibatches'
    )
  if score is not None and score >= GOOD_SCORE:
    return found
  # A differential entropy may be negative from the start; its share then means nothing.
  first, least = rows[0]['ppo/entropy'], min(row['ppo/entropy'] for row in rows)
  if first > 0 and least < LEAST_ENTROPY * first:
    found['entropy'] = (
      f'entropy collapsed from {first:.2f} to {least:.3f}: nothing new is tried; begin again with a '
      f'larger agent.entropy_scale (now {entropy_scale})'
    )
  if _oscillates(rows):
    found['oscillation'] = (
      'episodes get longer while their return is flat: the agent may be going to and fro; raise '
      f'agent.entropy_scale (now {entropy_scale}), or have the environment charge for each step'
    )
  return found


def _oscillates(rows: Rows) -> bool:
  """Whether episodes got longer over the newest WINDOW reports in which one ended, without a higher return."""
  lengths, returns = (
    [row[name] for row in rows if row.get(name) is not None][-2 * WINDOW :]
    for name in ('episode_length', 'episode_return')
  )
  if len(lengths) < 2 * WINDOW or len(returns) < 2 * WINDOW:
    return False
  change = lambda values: statistics.mean(values[WINDOW:]) - statistics.mean(values[:WINDOW])
  longer = change(lengths) > 0.2 * statistics.mean(lengths[:WINDOW])
  return longer and change(returns) < 0.5 * statistics.stdev(returns)
