"""Learning from a queue: which of its sequences are fresh enough, and how many have come."""

from typing import Any, NamedTuple

Tree = Any


class State(NamedTuple):
  """What a checkpoint of a run on a queue holds.

  Attributes:
    train: the train state, one replica.
    sequences: [] int64, read from the queue in the whole run; a queue that begins anew has
      forgotten how many were inserted.
  """

  train: Tree
  sequences: Tree


class Intake:
  """Declines what too old a policy did, and counts what came.

  Actors act while the learner learns, so a sequence may come from the policy of some updates ago.
  Within a bound PPO needs no correction for it: the ratio is taken to the log-probability stored by
  the policy that acted, so the surrogate is right for that policy, and the clip leaves out what has
  moved too far from it (Schulman et al., 2017, equation 7; that this policy need not be the newest:
  Hilton et al., 2022, "Batch size-invariance for policy optimization"). Beyond the bound more and
  more is clipped and teaches nothing, and it is discarded.

  With a queue of one batch, read when it is due, nothing is older than 2 updates: of what was done
  with the parameters of an update, one batch may lie in the queue and one in the actors' hands.
  Only an actor that is slower than others falls further behind. Newer than the learner is what
  was done before it went back to a checkpoint, and that is as good.

  `keep` is called by the thread that reads, and only while the learner waits for a batch.

  Args:
    max_staleness: updates by which a sequence may be older than the learner.

  Attributes:
    learner_step: against which staleness is counted; the learner sets it.
    sequences: read in the whole run, kept or not; a learner that resumes sets it.
  """

  def __init__(self, max_staleness: int):
    self._max_staleness = max_staleness
    self.learner_step = 0
    self.sequences = 0
    self._begin_window()

  def keep(self, sequence: Any) -> bool:
    """Whether a sequence of [1, ...] is learned from."""
    staleness = self.learner_step - int(sequence.version[0])
    self.sequences += 1
    kept = staleness <= self._max_staleness
    self._kept += kept
    self._discarded += not kept
    self._staleness += staleness if kept else 0
    return kept

  def report(self) -> dict[str, float]:
    """Mean staleness of what was kept since the last call, in updates, and the share that was not."""
    report = {
      'staleness': self._staleness / max(1, self._kept),
      'discarded_fraction': self._discarded / max(1, self._kept + self._discarded),
    }
    self._begin_window()
    return report

  def _begin_window(self) -> None:
    self._kept = self._discarded = self._staleness = 0
