"""Batches from a queue, each sequence read once; sequences of an old policy are discarded."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from hephaestus.learner import loop
from hephaestus.learner import process_group as process_group_lib
from hephaestus.learner.sources import sampled

Tree = Any


class State(NamedTuple):
  """Content of a checkpoint of a run that learns from a queue."""

  train: Tree  # the train state, one replica
  sequences: Tree  # [] int64, read from the queue in the whole run, which a restarted queue forgets


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


class OnPolicy(sampled.Sampled):
  """Source of batches from a queue, for on-policy learning.

  It reads a batch only after it has published the parameters of the update before, so that no batch
  gets old here. Several processes read from one queue. Each keeps its part of a batch, and none reads
  before the first has published.

  Args:
    link: connections to the other nodes; its reader must call `stale_filter.keep`.
    stale_filter: decides which sequences are kept.
    steps_per_sequence: environment steps of a sequence, T - 1.
    group: the processes that learn as one.
  """

  def __init__(
    self,
    trained: sampled.Trained,
    link: sampled.Link,
    stale_filter: StaleFilter,
    *,
    steps_per_sequence: int,
    devices: list[jax.Device] | None = None,
    group: process_group_lib.Group = process_group_lib.ONE_PROCESS,
  ):
    super().__init__(trained, link, devices=devices, num_processes=group.size)
    self._group = group
    self._stale_filter = stale_filter
    self._sequences = 0  # read in the whole run by all processes, until the last update
    self._steps_per_sequence = steps_per_sequence

  def init(self, key: jax.Array) -> State:
    return State(super().init(key), np.zeros((), np.int64))

  def shapes(self) -> State:
    return saved_shapes(super().shapes())

  def place(self, whole: State, step: int) -> Tree:
    self._sequences = int(whole.sequences)
    is_first = self._group.is_first  # and also counts what was read before
    self._stale_filter.learner_step = step
    self._stale_filter.sequences = self._sequences if is_first else 0
    return super().place(whole.train, step)

  def gather(self, state: Tree) -> State:
    return State(super().gather(state), np.asarray(self._sequences, np.int64))

  @property
  def environment_step(self) -> int:
    """Environment steps of the sequences read until the last update; so a run ends with a whole batch."""
    return self._sequences * self._steps_per_sequence

  def update(self, state: Tree, step: int, most: int) -> tuple[Tree, loop.Done]:
    read = self._stale_filter.sequences
    self._sequences = self._group.sum(read, self._link.should_stop)
    state, done = super().update(state, step, most)
    if done.compiled:
      self._stale_filter.report()  # the first batch may have waited long before this process began
    return state, done

  def report(self, span: loop.Interval, totals: Mapping[str, float]) -> dict[str, Any]:
    """Means of metrics over updates, throughput and staleness."""
    return {
      **self._waiting_report(span),
      'steps_per_second': span.environment_steps / span.seconds,
      **self._stale_filter.report(),
      **loop.means(totals, span),
    }

  def on_update(self, status: loop.Status) -> None:
    """Publishes before the next batch is read, which makes room in the queue and unblocks actors."""
    self._stale_filter.learner_step = status.step
    self._publish(self._snapshot(status))
    self._group.meet(self._link.should_stop)
