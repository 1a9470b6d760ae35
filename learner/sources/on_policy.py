"""Batches from a queue, each sequence read once; those of an old policy are discarded."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hephaestus.learner import loop
from hephaestus.learner.sources import drawn
from hephaestus.learner.sources import intake as intake_lib

Tree = Any


class OnPolicy(drawn.Drawn):
  """Draws a batch once the update before it is published, so that none waits here and gets old.

  Args:
    trained: the agent.
    link: to the other nodes.
    intake: which the reader asks about each sequence.
    steps_per_sequence: transitions that a sequence counts for, T - 1.
    devices: local devices; None for all.
  """

  def __init__(
    self,
    trained: drawn.Trained,
    link: drawn.Link,
    intake: intake_lib.Intake,
    *,
    steps_per_sequence: int,
    devices: list[jax.Device] | None = None,
  ):
    super().__init__(trained, link, devices=devices)
    self._intake = intake
    self._steps_per_sequence = steps_per_sequence

  def init(self, key: jax.Array) -> intake_lib.State:
    return intake_lib.State(super().init(key), np.zeros((), np.int64))

  def shapes(self) -> intake_lib.State:
    return intake_lib.saved_shapes(super().shapes())

  def place(self, whole: intake_lib.State, step: int) -> Tree:
    self._intake.learner_step, self._intake.sequences = step, int(whole.sequences)
    return super().place(whole.train, step)

  def gather(self, state: Tree) -> intake_lib.State:
    return intake_lib.State(super().gather(state), np.asarray(self._intake.sequences, np.int64))

  @property
  def environment_step(self) -> int:
    """As read from the queue."""
    return self._intake.sequences * self._steps_per_sequence

  def update(self, state: Tree, step: int, most: int) -> tuple[Tree, loop.Done]:
    state, done = super().update(state, step, most)
    if done.compiled:
      self._intake.report()  # the first batch may have waited long before this process began
    return state, done

  def report(self, span: loop.Span, totals: Mapping[str, float]) -> dict[str, Any]:
    """Metrics of an average update, throughput and staleness."""
    return {
      **self._waiting_report(span),
      'steps_per_second': span.environment_steps / span.seconds,
      **self._intake.report(),
      **loop.means(totals, span),
    }

  def on_update(self, status: loop.Status) -> None:
    """Publishes before there is room in the queue, for whose sequences other nodes may wait."""
    self._intake.learner_step = status.step
    self._publish(self._snapshot(status))

  def _make_batches(self) -> drawn.Batches:
    return drawn.OnDemand(self._link.reader, self._place_batch)
