"""Warnings for runs that will not learn, each with the setting to change."""

import collections
import statistics
from collections.abc import Callable, Mapping
from typing import Any

WINDOW = 16  # reports over which a trend is judged


class MemoryAdvice:
  """Warns once if an episodic memory holds entries and nothing is recalled over WINDOW reports.

  Args:
    say: takes a warning.

  Attributes:
    score: as of `Advice`; unread.
  """

  def __init__(self, say: Callable[[str], None]):
    self._say = say
    self._unread = 0
    self.score: float | None = None

  def look(self, row: Mapping[str, Any]) -> None:
    """Judges one more report."""
    never = row['memory/filled'] > 0 and row['memory/evidence'] < 1e-3
    self._unread = self._unread + 1 if never else 0
    if self._unread == WINDOW:
      self._say(
        'memory is never read: no observation occurs twice; use agent.memory_size=0, or an '
        'observation without what is never the same again'
      )


class Advice:
  """Warns about high KL, high clip fraction, entropy collapse and oscillation, once each.

  Args:
    say: takes a warning.
    entropy_scale: of the agent.

  Attributes:
    score: the newest normalised score, None where the environment gives none.
  """

  MOST_KL, MOST_CLIPPED = 0.08, 0.35
  LEAST_ENTROPY = 0.05  # share of that of the first report
  GOOD_SCORE = 0.9  # above it, a policy may well be nearly deterministic

  def __init__(self, say: Callable[[str], None], entropy_scale: float):
    self._say = say
    self._entropy_scale = entropy_scale
    self._said: set[str] = set()
    self._rows: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=2 * WINDOW)
    self._first_entropy: float | None = None
    self.score: float | None = None

  def look(self, row: Mapping[str, Any]) -> None:
    """Judges one more report."""
    if row['episode_return'] is not None:  # else no episode ended
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
