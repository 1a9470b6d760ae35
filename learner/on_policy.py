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

  Actors act while the learner learns, so a sequence comes from the policy of some updates ago. Within
  a bound that is corrected for (`agents.masked_ppo`, `rows`: clipped around the newest policy, as
  Hilton et al., 2022, and weighted by what it makes of the old one); beyond it the weights say less
  and less of the newest policy, and the sequence is discarded.

  By itself nothing gets that old: an actor begins an unroll when the last one has left its hands,
  so what it plays is one update old when it is read, and one more for each batch that fits into the
  queue (`updates_behind`), or where batches begin within unrolls, as they may once a node has died.
  Only an actor that is slower than others falls further behind. Newer than the learner is what was
  done before it went back to a checkpoint, and that is as good.

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


def sequences_in_flight(max_in_flight: int, batch_size: int) -> int:
  """Sequences that a reader may hold ahead: they make the queue longer, and so what is read older."""
  return max(1, min(max_in_flight, batch_size // 8))


def updates_behind(queue_size: int, in_flight: int, batch_size: int) -> int:
  """How old what is read can be while batches are whole unrolls; all sizes in sequences."""
  return 1 + (queue_size + in_flight) // batch_size
