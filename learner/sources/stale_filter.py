"""Filter of stale sequences: which ones of a queue a learner keeps, and how many it has read."""

from typing import Any, NamedTuple

import jax
import numpy as np

Tree = Any


class State(NamedTuple):
  """Content of a checkpoint of a run on a queue.

  Attributes:
    train: the train state, one replica.
    sequences: [] int64, read from the queue in the whole run; a restarted queue has forgotten how
      many were inserted.
  """

  train: Tree
  sequences: Tree


class StaleFilter:
  """Discards sequences of too old a policy, and counts what was read.

  Actors act while the learner learns, so a sequence comes from the policy of some updates ago. Within
  a bound that is corrected for (`agents.masked_ppo`, `rows`: clipped around the newest policy, as
  Hilton et al., 2022, and weighted by its ratio to the old one); beyond it the weights say less and
  less of the newest policy, and the sequence is discarded.

  By itself nothing gets that old: an actor begins an unroll when the last one has left its hands,
  so an unroll is one update old when it is read, and one more for each batch that fits into the
  queue (`updates_behind`), or where batches begin within unrolls, as they may after a node has
  crashed. Only an actor that is slower than others falls further behind. A version newer than the
  learner's was made before it resumed from a checkpoint, and serves as well.

  `keep` is called by the thread that reads, and only while the learner waits for a batch.

  Args:
    max_staleness: updates by which a sequence may be older than the learner.

  Attributes:
    learner_step: against which staleness is counted; the source sets it.
    sequences: read in the whole run, kept or not; a source that resumes sets it.
  """

  def __init__(self, max_staleness: int):
    self._max_staleness = max_staleness
    self.learner_step = 0
    self.sequences = 0
    self._begin_span()

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
    """Mean staleness of kept sequences since the last call, in updates; the share discarded."""
    report = {
      'staleness': self._staleness / max(1, self._kept),
      'discarded_fraction': self._discarded / max(1, self._kept + self._discarded),
    }
    self._begin_span()
    return report

  def _begin_span(self) -> None:
    self._kept = self._discarded = self._staleness = 0


def saved_shapes(train: Tree) -> State:
  """Shapes and dtypes of a checkpoint, from those of a train state."""
  return State(train, jax.ShapeDtypeStruct((), np.int64))


def sequences_in_flight(max_in_flight: int, batch_size: int) -> int:
  """Sequences that a reader may hold ahead: they lengthen the queue, and so the age of what is read."""
  return max(1, min(max_in_flight, batch_size // 8))


def updates_behind(queue_size: int, in_flight: int, batch_size: int) -> int:
  """The greatest age of a sequence, in updates, while batches are whole unrolls; sizes in sequences."""
  return 1 + (queue_size + in_flight) // batch_size
