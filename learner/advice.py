"""Warnings for runs that will not learn, each with the setting to change."""

import collections
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WINDOW = 16  # reports over which a trend is judged
LEAST_EVIDENCE = 1e-3  # mean number of memories of an action, below which nothing is recalled
LEAST_CHANGE = 1e-4  # of a vital's mean over a batch; it changes by more where it changes at all
VITAL = 'intrinsic/vital_'  # metrics of vitals, and of the model's error of them


def warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Warns of parts of the dreamer that have no effect, judged by the newest reports of its learner.

  These are replay that was not saved, a memory that is never read, and a vital (such as food) that stays
  the same.

  Args:
    rows: metrics of each report by name, the oldest first; fewer than WINDOW warn of replay only.

  Returns:
    A text for each warning, with the setting to change.
  """
  rows = list(rows)[-WINDOW:]
  found = []
  if rows and rows[-1].get('replay/failed_saves'):
    found.append(
      'replay was not saved: a restart of its server would lose what it has collected since; the log '
      'of the learner has the reason'
    )
  if len(rows) < WINDOW:
    return found
  # Reports of older parts of a run may lack a metric.
  values = lambda name: [row[name] for row in rows if row.get(name) is not None]
  filled, evidence = values('memory/filled'), values('memory/evidence')
  if len(evidence) == WINDOW and min(filled) > 0 and max(evidence) < LEAST_EVIDENCE:
    found.append(
      'memory is never read: no observation occurs twice; use agent.memory_size=0, or an '
      'observation without what is never the same again'
    )
  for name in rows[-1]:
    vital = name.removeprefix(VITAL)
    seen = values(name) if name.startswith(VITAL) and vital != 'error' else []
    if len(seen) == WINDOW and max(seen) - min(seen) < LEAST_CHANGE:
      found.append(
        f"vital {vital} stays at {seen[-1]:.3g}: nothing changes it; leave it out of the environment's "
        'VitalsSpec'
      )
  return found


class CognitionAdvice:
  """Reports each warning about the dreamer once, see `warnings`.

  Args:
    say: called with the text of each warning.

  Attributes:
    score: unused; callers set it, as in `Advice`.
  """

  def __init__(self, say: Callable[[str], None]):
    self._say = say
    self._rows: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=WINDOW)
    self._said: set[str] = set()
    self.score: float | None = None

  def look(self, row: Mapping[str, Any]) -> None:
    """Judges one more report of the learner, metrics by name."""
    self._rows.append(row)
    for text in warnings(self._rows):
      kind = text.partition(' stays at ')[0]
      if kind not in self._said:
        self._said.add(kind)
        self._say(text)


class Advice:
  """Warns once of PPO's high KL, high clip fraction, collapse of entropy, and longer episodes without gain.

  Args:
    say: called with the text of each warning.
    entropy_scale: the agent's `entropy_scale`, which warnings quote.

  Attributes:
    score: the newest normalised score (1: the scripted policy), set by the caller; a good one stops
      warnings. None where the environment gives none.
  """

  MOST_KL, MOST_CLIPPED = 0.08, 0.35
  LEAST_ENTROPY = 0.05  # share of the entropy of the first report
  GOOD_SCORE = 0.9  # above it, a policy may well be nearly deterministic

  def __init__(self, say: Callable[[str], None], entropy_scale: float):
    self._say = say
    self._entropy_scale = entropy_scale
    self._said: set[str] = set()
    self._rows: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=2 * WINDOW)
    self._first_entropy: float | None = None
    self.score: float | None = None

  def look(self, row: Mapping[str, Any]) -> None:
    """Judges one more report of the learner, metrics by name.

    Skips a report in which a number is None. Such a number was not finite, which ends the run.
    """
    needed = ('approx_kl', 'clip_fraction', 'entropy', 'learning_rate')
    if any(row.get(f'ppo/{name}') is None for name in needed):
      return
    if None not in (row.get('episode_return'), row.get('episode_length')):  # else no episode ended
      self._rows.append(row)
    rate = f'learner.learning_rate (now {row["ppo/learning_rate"]:.2g})'
    if row['ppo/approx_kl'] > self.MOST_KL:
      self._once(
        'kl',
        f'KL {row["ppo/approx_kl"]:.3f} is above {self.MOST_KL}: the policy moves too far on one '
        f'unroll; lower {rate} or learner.num_epochs',
      )
    if row['ppo/clip_fraction'] > self.MOST_CLIPPED:
      self._once(
        'clip',
        f'clip fraction {row["ppo/clip_fraction"]:.2f} is above {self.MOST_CLIPPED}: much of the '
        f'experience gives no gradient; lower {rate} or learner.num_epochs, or use fewer '
        'learner.num_minibatches',
      )
    # A differential entropy may be negative from the start; its share then means nothing.
    self._first_entropy = self._first_entropy or row['ppo/entropy']
    good = self.score is not None and self.score >= self.GOOD_SCORE
    collapsed = row['ppo/entropy'] < self.LEAST_ENTROPY * self._first_entropy
    if self._first_entropy > 0 and collapsed and not good:
      self._once(
        'entropy',
        f'entropy collapsed from {self._first_entropy:.2f} to {row["ppo/entropy"]:.3f}: nothing '
        f'new is tried; begin again with a larger agent.entropy_scale (now {self._entropy_scale})',
      )
    if not good and self._oscillates():
      self._once(
        'oscillation',
        'episodes get longer while their return is flat: the agent may be going to and fro; raise '
        f'agent.entropy_scale (now {self._entropy_scale}), or have the environment charge for each step',
      )

  def _oscillates(self) -> bool:
    """Whether episodes got longer over the last WINDOW reports, without a higher return."""
    rows = list(self._rows)
    if len(rows) < 2 * WINDOW:
      return False
    old, new = rows[:WINDOW], rows[WINDOW:]
    lengths, returns = (
      [[row[name] for row in part] for part in (old, new)]
      for name in ('episode_length', 'episode_return')
    )
    longer = statistics.mean(lengths[1]) > 1.2 * statistics.mean(lengths[0])
    gain = statistics.mean(returns[1]) - statistics.mean(returns[0])
    noise = statistics.stdev(returns[0] + returns[1])
    return longer and gain < 0.5 * noise

  def _once(self, kind: str, text: str) -> None:
    if kind not in self._said:
      self._said.add(kind)
      self._say(text)
