"""Batches sampled from replay servers, for off-policy learning: each step is sampled many times."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from absl import logging

from hephaestus.learner import loop
from hephaestus.learner.sources import collected as collected_lib
from hephaestus.learner.sources import sampled
from hephaestus.learner.sources import staleness as staleness_lib

Tree = Any
POLL_PERIOD = 0.5  # seconds between two questions how much was collected


class Experience(NamedTuple):
  """The replay servers of a run, as its learner sees them."""

  save: Callable[[], Any]  # makes replay write its checkpoint; may raise RuntimeError or OSError
  # -> environment steps of all actors so far; None while replay does not answer
  collected: Callable[[], collected_lib.StepCounts | None]
  steps_per_batch: int  # environment steps of a batch, over all processes: B (T - 1)
  warm_up_steps: int  # collected before the first batch; the replay ratio omits them
  staleness: staleness_lib.Staleness | None = (
    None  # ages of sequences from every batch; None: omitted
  )


class FromReplay(sampled.Sampled):
  """Source of batches sampled from replay: prefetches them, and publishes in the background."""

  def __init__(
    self,
    trained: sampled.Trained,
    link: sampled.Link,
    experience: Experience,
    *,
    publish_period: int,
    devices: list[jax.Device] | None = None,
    num_processes: int = 1,
  ):
    super().__init__(trained, link, devices=devices, num_processes=num_processes)
    self._experience = experience
    self._publish_period = publish_period
    self._collected = collected_lib.StepCounts(taken=0, lost=0)
    self._asked: float | None = None
    self._prefetched: sampled.Prefetched | None = None
    self._failed_saves = 0  # since the last one that did not fail

  @property
  def environment_step(self) -> int:
    """Environment steps of all actors so far; replay is asked at most every half a second."""
    if self._asked is None or time.monotonic() - self._asked > POLL_PERIOD:
      collected = self._experience.collected()
      self._asked = time.monotonic()
      if collected is not None:
        self._collected = collected
    return self._collected.taken

  def report(self, span: loop.Interval, totals: Mapping[str, float]) -> dict[str, Any]:
    """Means of metrics over updates, throughput, replay ratio and ages of the sampled sequences.

    The replay ratio counts all steps that were collected, also those that replay has lost since.
    """
    steps = self._experience.steps_per_batch
    staleness = self._experience.staleness
    collected = max(1, self._collected.taken - self._experience.warm_up_steps)
    return {
      **self._waiting_report(span),
      **(staleness.report(span.step) if staleness is not None else {}),
      'lost_steps': self._collected.lost,
      'replay/failed_saves': self._failed_saves,
      'replay_ratio': span.step * steps / collected,
      'replayed_steps_per_second': span.updates * steps / span.seconds,
      **loop.means(totals, span),
    }

  def on_update(self, status: loop.Status) -> None:
    if status.step % self._publish_period == 0:
      self._publish_in_background(status)

  def on_save(self) -> None:
    if self._background is not None:
      self._background.submit(sampled.SAVE, self.save_experience)

  def save_experience(self) -> None:
    """Makes replay write its checkpoint; logs a failure. Only the first process of a learner does so."""
    if self._link.publisher is None:
      return
    try:
      self._experience.save()
      self._failed_saves = 0
    except (RuntimeError, OSError) as error:
      self._failed_saves += 1
      logging.warning('Replay was not saved: %s', error)

  def on_start(self, status: loop.Status) -> None:
    self._prefetched = sampled.Prefetched(self._link.reader, self._place_batch)
    super().on_start(status)

  def close(self) -> None:
    if self._prefetched is not None:
      self._prefetched.close()
    super().close()
    self._is_saved &= not self._failed_saves

  def _next_batch(self, timeout_seconds: float) -> Tree | None:
    assert self._prefetched is not None
    return self._prefetched.get(timeout_seconds)

  def _place_batch(self, batch: Tree) -> Tree:
    if self._experience.staleness is not None:
      self._experience.staleness.note(batch)
    return super()._place_batch(batch)
