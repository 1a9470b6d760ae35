"""Reads batches from a Reverb server, mixed by share, ahead of the one who asks."""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from replay import columns as columns_lib
from replay import connection as connection_lib
from replay import tables

_INFO_COLUMNS = 5  # key, probability, table size, priority, times sampled
_ENDLESS = 10**12
_WATCH_PERIOD = 1.0  # seconds
_REJECTED_PERIOD = 60.0  # seconds between two words about sequences that do not fit


class Reader:
  """Batches of sequences, each with the exact mixture; safe from any thread.

  One background thread fills batches; another watches the server, since Reverb's samplers never
  raise when it dies but wait until it is back, and then go on by themselves.

  The server stores what it is given, whatever its tables' signature says; a sequence that does not
  fit the schema is rejected here, that is logged, and another is read in its place.
  """

  def __init__(
    self,
    address: str,
    strata: Sequence[tables.Stratum],
    schema: Any,
    *,
    batch_size: int,
    max_in_flight: int = 8,
    prefetch: int = 2,
    keep: Callable[[Any], bool] | None = None,
    timeout_seconds: float = 5.0,
  ):
    """Starts reading; the server may still be starting.

    Args:
      address: HOST:PORT of the server.
      strata: with their shares of a batch.
      schema: tree of jax.ShapeDtypeStruct of one sequence.
      batch_size: sequences of a batch, over all devices.
      max_in_flight: sequences held ahead by Reverb, per stratum; they count as sampled.
      prefetch: batches held ahead; they count as sampled. 0: a batch is begun when it is asked for,
        so that what is read once and in order lies in the server until then.
      keep: asked of every sequence, [1, ...], in the order in which they are read; what it declines
        is in no batch.
      timeout_seconds: silence after which the server counts as down.
    """
    self._strata = tuple(strata)
    self._columns = columns_lib.Columns(schema)
    self._connection = connection_lib.Connection(address, 'reader', timeout_seconds=timeout_seconds)
    self._row_strata = tables.row_strata(self._strata, batch_size)
    self._max_in_flight = max_in_flight
    self._keep = keep
    self._ahead = prefetch > 0
    self._wanted = threading.Semaphore(0)  # batches asked for and not begun
    self._asked = False  # a batch is asked for and not given
    self._asking = threading.Lock()
    self._batches: queue.Queue[list[np.ndarray] | None] = queue.Queue(maxsize=max(1, prefetch))
    self._closed = threading.Event()
    self._failure: Exception | None = None
    self._starved_seconds = 0.0
    self._rejected = 0
    self._rejected_said = -math.inf
    # Daemons: a sampler without data or server waits for ever, and nothing can wake it.
    self._threads = [
      threading.Thread(target=self._fill, name='replay-reader', daemon=True),
      threading.Thread(target=self._watch, name='replay-watch', daemon=True),
    ]
    for thread in self._threads:
      thread.start()
    atexit.register(self.close)  # a thread inside Reverb must not outlive the interpreter

  @property
  def starved_seconds(self) -> float:
    """Seconds that `get` and `next` have waited."""
    return self._starved_seconds

  @property
  def rejected(self) -> int:
    """Sequences read that did not fit the schema."""
    return self._rejected

  @property
  def server_alive(self) -> bool:
    """Whether the server has answered within the last `timeout_seconds`."""
    return self._connection.alive

  def get(self, timeout_seconds: float) -> Any | None:
    """The next batch, or None when there is none in time.

    Returns:
      Tree of numpy arrays [B, ...], the caller's to keep. The strata's rows are interleaved, so
      that each of D equal contiguous slices holds the mixture too.

    Raises:
      ValueError: the server stores another schema, or lacks a stratum.
    """
    start = time.monotonic()
    with self._asking:
      if not self._asked:
        self._asked = True
        self._wanted.release()
    try:
      batch = self._batches.get(timeout=0 if self._failure else timeout_seconds)
    except queue.Empty:
      batch = None
    self._starved_seconds += time.monotonic() - start
    if batch is not None:
      self._asked = False
      return self._columns.unflatten(batch)
    if self._failure is not None:
      raise self._failure
    return None

  def __iter__(self) -> Iterator[Any]:
    return self

  def __next__(self) -> Any:
    while not self._closed.is_set():
      batch = self.get(timeout_seconds=0.5)
      if batch is not None:
        return batch
    raise StopIteration

  def close(self) -> None:
    """Stops reading. A thread that waits inside Reverb is left behind, and does no harm."""
    self._closed.set()
    atexit.unregister(self.close)
    for thread in self._threads:
      if thread is not threading.current_thread():
        thread.join(timeout=1.0)

  def _fill(self) -> None:
    due = self._ahead
    try:
      while not self._closed.is_set():
        samplers = self._make_samplers()
        try:
          while samplers and not self._closed.is_set():
            due = due or self._wanted.acquire(timeout=0.2)
            batch = self._read(samplers) if due else None
            if batch is not None:
              self._put(batch)
              due = self._ahead
        except RuntimeError as error:
          logging.warning('reader: %s; reading anew', error)
          self._closed.wait(1.0)
    except Exception as error:  # handed to whoever reads
      self._failure = error
      self._put(None)  # wakes it

  def _make_samplers(self) -> list[Any]:
    """One sampler per stratum once the server answers; none when closed before."""
    infos = None
    while infos is None:
      if self._closed.wait(0.05):
        return []
      infos = self._connection.info(1.0)
    for stratum in self._strata:
      if stratum.name not in infos:
        raise ValueError(
          f'replay: the server at {self._connection.address} has the tables {sorted(infos)}, '
          f'and not {stratum.name!r}'
        )
      self._columns.check_signature(stratum.name, infos[stratum.name].signature)
    # The public client.sample holds one sequence ahead, which is four times slower.
    new_sampler = self._connection.client._client.NewSampler
    return [new_sampler(stratum.name, _ENDLESS, self._max_in_flight) for stratum in self._strata]

  def _read(self, samplers: list[Any]) -> list[np.ndarray] | None:
    """One batch of columns [B, ...], in fresh memory since the last may still be in use."""
    batch = [
      np.empty((len(self._row_strata), *shape), dtype)
      for shape, dtype in zip(self._columns.shapes, self._columns.wire_dtypes, strict=True)
    ]
    for row, stratum in enumerate(self._row_strata):
      kept = False
      while not kept:
        values = samplers[stratum].GetNextTrajectory()[_INFO_COLUMNS:]
        if self._closed.is_set():
          return None
        mismatch = self._columns.mismatch(values)
        if mismatch:
          self._reject(self._strata[stratum].name, mismatch)
          continue
        kept = self._keep is None or self._keep(self._columns.unflatten(values))
      for column, value in zip(batch, values, strict=True):
        column[row] = value[0]
    return batch

  def _reject(self, stratum: str, mismatch: str) -> None:
    self._rejected += 1
    if time.monotonic() - self._rejected_said > _REJECTED_PERIOD:
      self._rejected_said = time.monotonic()
      logging.error(
        'reader: rejecting a sequence of %r: %s; %d so far', stratum, mismatch, self._rejected
      )

  def _put(self, batch: list[np.ndarray] | None) -> None:
    while not self._closed.is_set():
      try:
        self._batches.put(batch, timeout=0.2)
      except queue.Full:
        continue
      break

  def _watch(self) -> None:
    while not self._closed.wait(_WATCH_PERIOD):
      self._connection.info(1.0)
