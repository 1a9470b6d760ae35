"""Batches from a queue, each sequence read once; sequences of an old policy are discarded."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hephaestus.learner import loop
from hephaestus.learner import process_group as process_group_lib
from hephaestus.learner.sources import sampled
from hephaestus.learner.sources import stale_filter as stale_filter_lib

Tree = Any


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
    stale_filter: stale_filter_lib.StaleFilter,
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

  def init(self, key: jax.Array) -> stale_filter_lib.State:
    return stale_filter_lib.State(super().init(key), np.zeros((), np.int64))

  def shapes(self) -> stale_filter_lib.State:
    return stale_filter_lib.saved_shapes(super().shapes())

  def place(self, whole: stale_filter_lib.State, step: int) -> Tree:
    self._sequences = int(whole.sequences)
    is_first = self._group.is_first  # and also counts what was read before
    self._stale_filter.learner_step = step
    self._stale_filter.sequences = self._sequences if is_first else 0
    return super().place(whole.train, step)

  def gather(self, state: Tree) -> stale_filter_lib.State:
    return stale_filter_lib.State(super().gather(state), np.asarray(self._sequences, np.int64))

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
