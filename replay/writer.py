"""Writes sequences to a Reverb server, each stored once and seen by every stratum."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import reverb
from absl import logging

from replay import columns as columns_lib
from replay import connection as connection_lib
from replay import tables

_PENDING_ITEMS = 32  # confirmed before more is sent; Reverb complains from 50 on
_FLUSH_SECONDS = 0.5  # between two looks at should_stop
_PROBE_SECONDS = 1.0
# What sending itself may take before it counts as being held back.
_LATENCY_SECONDS = 0.02
_BYTES_PER_SECOND = 50e6


class Writer:
  """An actor's way into replay. Not for use by several threads at once.

  Nothing is stored twice when the server dies and comes back: an item keeps its key when Reverb
  sends it again. Only when Reverb's own writer breaks (which a restart does not cause) are the at
  most 32 / len(strata) sequences not yet confirmed sent once more with new keys, at the risk that
  the server already had them; a second break of the same sequences is raised.
  """

  def __init__(
    self,
    address: str,
    strata: Sequence[tables.Stratum],
    schema: Any,
    *,
    timeout_seconds: float = 5.0,
  ):
    """Makes no call yet, so the server may still be starting.

    Args:
      address: HOST:PORT of the server.
      strata: every one of the server's.
      schema: tree of jax.ShapeDtypeStruct of one sequence.
      timeout_seconds: silence after which the server counts as down.
    """
    self._names = [stratum.name for stratum in strata]
    self._columns = columns_lib.Columns(schema)
    self._connection = connection_lib.Connection(address, 'writer', timeout_seconds=timeout_seconds)
    self._writer: reverb.TrajectoryWriter | None = None
    self._unconfirmed: list[dict[str, np.ndarray]] = []
    self._sent = False
    self._sent_again = False
    self._throttled_seconds = 0.0
    self._sequences_written = 0

  @property
  def throttled_seconds(self) -> float:
    """Seconds the rate limiter held `write` back; a server that was down does not count."""
    return self._throttled_seconds

  @property
  def sequences_written(self) -> int:
    """Sequences the server has confirmed."""
    return self._sequences_written

  @property
  def server_alive(self) -> bool:
    """Whether the server answered when last asked."""
    return self._connection.alive

  def write(self, sequences: Any, should_stop: Callable[[], bool]) -> float:
    """Inserts N sequences into every stratum, waiting while throttled or while the server is down.

    Args:
      sequences: tree of host arrays, [N, ...] each; left unchanged until they are confirmed.
      should_stop: asked at least every 1.5 seconds; once true, what was not sent is dropped, and
        what was sent stays pending until the next `write` or `close`.

    Returns:
      Seconds throttled.
    """
    arrays = self._columns.flatten(sequences, batched=True)
    throttled_before = self._throttled_seconds
    group = max(1, _PENDING_ITEMS // len(self._names))
    count = len(arrays[0])
    for start in range(0, count, group):
      if not self._settle(should_stop):  # what an interrupted call left
        break
      self._unconfirmed = [
        {name: array[i] for name, array in zip(self._columns.names, arrays, strict=True)}
        for i in range(start, min(start + group, count))
      ]
      self._sent = self._sent_again = False
      if not self._settle(should_stop):
        break
    return self._throttled_seconds - throttled_before

  def close(self) -> None:
    """Drops what is pending. Never blocks."""
    if self._writer is not None:
      self._writer.close()
    self._writer = None
    self._unconfirmed = []

  def _settle(self, should_stop: Callable[[], bool]) -> bool:
    """Waits until all that was handed over is confirmed; False when told to stop before."""
    held_back = False
    while self._unconfirmed:
      if self._writer is None and not self._connect(should_stop):
        return False
      assert self._writer is not None
      start = time.monotonic()
      try:
        if not self._sent:
          self._send(self._writer)
          self._sent = True
        self._writer.flush(timeout_ms=round(1000 * _FLUSH_SECONDS))
      except reverb.errors.DeadlineExceededError:
        waited = time.monotonic() - start
        if self._answers():
          self._throttled_seconds += waited
          held_back = True
        if should_stop():
          return False
      except RuntimeError as error:
        if self._sent_again:
          raise
        logging.warning('writer: %s; sending %d sequences again', error, len(self._unconfirmed))
        self._writer.close()
        self._writer = None
        self._sent, self._sent_again = False, True
      else:
        waited = time.monotonic() - start
        size = len(self._unconfirmed) * self._columns.nbytes
        if not self._connection.alive:
          self._answers()  # says that it is back
        elif held_back or waited > _LATENCY_SECONDS + size / _BYTES_PER_SECOND:
          self._throttled_seconds += waited
        self._sequences_written += len(self._unconfirmed)
        self._unconfirmed = []
    return True

  def _send(self, writer: reverb.TrajectoryWriter) -> None:
    for step in self._unconfirmed:
      writer.append(step)
      trajectory = {name: column[-1:] for name, column in writer.history.items()}
      for name in self._names:
        writer.create_item(name, 1.0, trajectory)

  def _connect(self, should_stop: Callable[[], bool]) -> bool:
    while not self._answers():
      if should_stop():
        return False
      time.sleep(0.05)
    # Reverb's own validation asks the server without a deadline; `_answers` has compared already.
    self._writer = self._connection.client.trajectory_writer(1, validate_items=False)
    return True

  def _answers(self) -> bool:
    """Whether the server answers now; refuses one that stores another schema."""
    infos = self._connection.info(_PROBE_SECONDS)
    if infos is None:
      return False
    for name in self._names:
      if name not in infos:
        raise ValueError(
          f'replay: the server at {self._connection.address} has the tables {sorted(infos)}, '
          f'and not {name!r}'
        )
      self._columns.check_signature(name, infos[name].signature)
    return True
