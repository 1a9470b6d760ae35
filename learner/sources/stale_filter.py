"""Filter of stale sequences: which ones of a queue a learner keeps, and how many it has read."""

from typing import Any, NamedTuple

import jax
import numpy as np

Tree = Any


class State(NamedTuple):
  """Content of a checkpoint of a run that learns from a queue.

  Attributes:
    train: the train state, one replica.
    sequences: [] int64, number of sequences read from the queue in the whole run, which a restarted
      queue no longer has.
  """

  train: Tree
  sequences: Tree


class StaleFilter:
  """Discards sequences of too old a policy, and counts the sequences read.

  Actors act while the learner learns, so a sequence comes from the policy of some updates ago. Up to
  `max_staleness` updates, PPO corrects for that (`agents.masked_ppo`, `steps`: clipped around the
  newest policy, as in Hilton et al., 2022, and weighted by its ratio to the old one). Beyond, the
  weights become useless, and the sequence is discarded.

  Normally no sequence gets that old. An actor begins an unroll once the last one is written, so an
  unroll is one update old when it is read, and one more for each batch that fits into the queue,
  or if batches begin within unrolls, as they may after a node has crashed. Only
  an actor that is slower than others falls further behind. A version newer than the learner's was
  made before the learner resumed from a checkpoint, and is kept.

  `keep` is called by the thread that reads, and only while the learner waits for a batch.

  Args:
    max_staleness: number of updates by which a sequence may be older than the learner.

  Attributes:
    learner_step: the current learner step, set by the source. Staleness is this minus a sequence's
      version, the learner step of the policy that collected it.
    sequences: number of sequences read in the whole run, kept or not; a source that resumes sets it.
  """

  def __init__(self, max_staleness: int):
    self._max_staleness = max_staleness
    self.learner_step = 0
    self.sequences = 0
    self._begin_span()

  def keep(self, sequence: Any) -> bool:
    """Counts a sequence, leaves [1, ...], as read; returns whether the learner keeps it."""
    staleness = self.learner_step - int(sequence.version[0])
    self.sequences += 1
    kept = staleness <= self._max_staleness
    self._kept += kept
    self._discarded += not kept
    self._staleness += staleness if kept else 0
    return kept

  def report(self) -> dict[str, float]:
    """Metrics since the last call: mean staleness of kept sequences in updates, fraction discarded."""
    report = {
      'staleness': self._staleness / max(1, self._kept),
      'discarded_fraction': self._discarded / max(1, self._kept + self._discarded),
    }
    self._begin_span()
    return report

  def _begin_span(self) -> None:
    self._kept = self._discarded = self._staleness = 0


def saved_shapes(train: Tree) -> State:
  """Shapes and dtypes of a checkpoint, from the shapes of a train state."""
  return State(train, jax.ShapeDtypeStruct((), np.int64))


def sequences_in_flight(max_in_flight: int, batch_size: int) -> int:
  """Number of sequences that a reader of a queue may prefetch: `max_in_flight`, at most an eighth of its batch.

  They lengthen the queue, and so raise the age of the sequences read.
  """
  return max(1, min(max_in_flight, batch_size // 8))
