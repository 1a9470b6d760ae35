"""The writer of replay: stores each sequence once, on one Reverb server, in all of its strata."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hephaestus.replay import columns as columns_lib
from hephaestus.replay import connection as connection_lib
from hephaestus.replay import tables

if TYPE_CHECKING:
  import reverb

_PENDING_ITEMS = 32  # items that wait for confirmation at once; Reverb warns from 50 on
_FLUSH_SECONDS = 0.5  # between two calls of should_stop
_TURN_SECONDS = 0.1  # of waiting for a shard before the next has its turn
_BLOCKED_SECONDS = 0.001  # of waiting for a shard whose rate limiter is known to block inserts
_PROBE_SECONDS = 1.0
# Time for only sending; a flush that takes longer counts as throttled.
_LATENCY_SECONDS = 0.02
_BYTES_PER_SECOND = 50e6


class Writer:
  """Inserts an actor's sequences into every stratum. Not thread-safe.

  With several shards, each takes groups of at most 32 / len(strata) sequences in turn. A shard that
  is down, or whose rate limiter blocks inserts, is skipped while another is free.

  A restart of a server stores no sequence twice: unconfirmed sequences are not sent to another
  shard, and Reverb sends them again with the same keys.
  """

  def __init__(
    self,
    address: str | Sequence[str],
    strata: Sequence[tables.Stratum],
    schema: Any,
    *,
    timeout_seconds: float = 5.0,
  ):
    """Sets up the connections; sends no request yet, so the servers may still be starting.

    Args:
      address: HOST:PORT of the server, or of each shard; ValueError if there is none.
      strata: all strata of the server.
      schema: tree of jax.ShapeDtypeStruct of one sequence; ValueError if it cannot be stored.
      timeout_seconds: time without an answer after which a server counts as down.
    """
    self._columns = columns_lib.Columns(schema)
    self._group = max(1, _PENDING_ITEMS // len(strata))
    names = [stratum.name for stratum in strata]
    self._shards = [
      _Shard(connection, names, self._columns)
      for connection in connection_lib.connect(address, 'writer', timeout_seconds=timeout_seconds)
    ]
    self._turn = 0

  @property
  def throttled_seconds(self) -> float:
    """Seconds in which rate limiters blocked `write` so far; servers that were down do not count."""
    return sum(shard.throttled_seconds for shard in self._shards)

  @property
  def sequences_written(self) -> int:
    """Number of sequences that the servers have confirmed."""
    return sum(shard.sequences_written for shard in self._shards)

  def write(self, sequences: Any, should_stop: Callable[[], bool]) -> float:
    """Inserts N sequences into every stratum, and waits while no shard is free.

    A single server has confirmed all sequences when this returns; of several shards, at least one
    has no unconfirmed sequences.

    Args:
      sequences: tree of host arrays, [N, ...] each; they must not change before they are confirmed.
      should_stop: called at least every 1.5 seconds, plus 1 second for each server that stops
        answering meanwhile. Once it returns True, sequences not yet sent are dropped, and those
        sent stay pending until the next `write` or `close`.

    Returns:
      Seconds in which rate limiters blocked this call.

    Raises:
      ValueError: the sequences do not match the schema, or a server stores another schema or lacks a
        stratum.
      RuntimeError: Reverb's own writer failed, which a restart of a server does not cause.
    """
    arrays = self._columns.flatten(sequences, batched=True)
    throttled_before = self.throttled_seconds
    count = len(arrays[0])
    for start in range(0, count, self._group):
      shard = self._next_free(should_stop)
      if shard is None:
        break
      shard.hand_over(
        [
          {name: array[i] for name, array in zip(self._columns.names, arrays, strict=True)}
          for i in range(start, min(start + self._group, count))
        ]
      )
    else:
      self._next_free(should_stop, take=False)
    return self.throttled_seconds - throttled_before

  def close(self) -> None:
    """Drops sequences that are not yet confirmed. Never blocks."""
    for shard in self._shards:
      shard.close()

  def _next_free(self, should_stop: Callable[[], bool], *, take: bool = True) -> _Shard | None:
    """Waits for a shard without unconfirmed sequences, in turn; None if asked to stop before.

    Args:
      should_stop: see `write`.
      take: whether the caller sends to the shard, so that the turn passes to the next.
    """
    count = len(self._shards)
    timeout = _FLUSH_SECONDS if count == 1 else _TURN_SECONDS
    blocked_timeout = _FLUSH_SECONDS if count == 1 else _BLOCKED_SECONDS
    while True:
      for offset in range(count):
        index = (self._turn + offset) % count
        shard = self._shards[index]
        if shard.settle(blocked_timeout if shard.is_blocked else timeout):
          self._turn = (index + take) % count
          return shard
      if should_stop():
        return None
      if not any(shard.is_connected for shard in self._shards):
        time.sleep(0.05)
      timeout = blocked_timeout = _FLUSH_SECONDS / count  # none is free: take the first that is


class _Shard:
  """One server and its unconfirmed sequences.

  Attributes:
    connection: the connection to the server.
    is_blocked: whether its rate limiter blocks the unconfirmed sequences.
    throttled_seconds, sequences_written: as of `Writer`, for this server.
  """

  def __init__(
    self,
    connection: connection_lib.Connection,
    names: list[str],
    columns: columns_lib.Columns,
  ):
    self.connection = connection
    self.is_blocked = False
    self.throttled_seconds = 0.0
    self.sequences_written = 0
    self._names = names
    self._columns = columns
    self._writer: reverb.TrajectoryWriter | None = None
    self._unconfirmed: list[dict[str, np.ndarray]] = []
    self._sent = False
    self._is_unreachable = False

  @property
  def is_connected(self) -> bool:
    """Whether Reverb's writer exists and the server answered last; else `settle` may return at once."""
    return self._writer is not None and not self._is_unreachable

  def hand_over(self, steps: list[dict[str, np.ndarray]]) -> None:
    """Sends sequences, each a dict of arrays by column; only once all sent before are confirmed."""
    assert not self._unconfirmed
    self._unconfirmed = steps
    self._sent = False
    self._push()

  def close(self) -> None:
    if self._writer is not None:
      self._writer.close()
    self._writer = None
    self._unconfirmed = []
    self.connection.close()

  def settle(self, timeout_seconds: float) -> bool:
    """Waits for confirmation; returns whether the server is up and has confirmed all in time."""
    if self._writer is None or self._is_unreachable:
      if not self._answers():
        return False
      self._is_unreachable = False
    if self._writer is None:
      # Reverb's own validation asks the server without a deadline; `_answers` has compared already.
      self._writer = self.connection.client.trajectory_writer(1, validate_items=False)
    if not self._unconfirmed:
      return True
    self._push()
    import reverb  # here, as in `connection`

    start = time.monotonic()
    try:
      self._writer.flush(timeout_ms=round(1000 * timeout_seconds))
    except reverb.errors.DeadlineExceededError:
      waited = time.monotonic() - start
      self._is_unreachable = not self._answers()
      if not self._is_unreachable:
        self.throttled_seconds += waited
        self.is_blocked = True
      return False
    waited = time.monotonic() - start
    size = len(self._unconfirmed) * self._columns.nbytes
    if not self.connection.alive:
      self._answers()  # logs that it is back
    elif self.is_blocked or waited > _LATENCY_SECONDS + size / _BYTES_PER_SECOND:
      self.throttled_seconds += waited
    self.sequences_written += len(self._unconfirmed)
    self._unconfirmed = []
    self.is_blocked = False
    return True

  def _push(self) -> None:
    """Sends sequences not yet sent."""
    if self._writer is None or self._sent:
      return
    for step in self._unconfirmed:
      self._writer.append(step)
      trajectory = {name: column[-1:] for name, column in self._writer.history.items()}
      for name in self._names:
        self._writer.create_item(name, 1.0, trajectory)
    self._sent = True

  def _answers(self) -> bool:
    """Whether the server answers now; raises ValueError if it stores another schema."""
    infos = self.connection.probe(_PROBE_SECONDS)
    if infos is None:
      return False
    self._columns.check_tables(self.connection.address, self._names, infos)
    return True
