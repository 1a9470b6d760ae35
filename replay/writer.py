"""Writes sequences to Reverb servers, each stored once, in one of them, and seen by every stratum."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from hephaestus.replay import columns as columns_lib
from hephaestus.replay import connection as connection_lib
from hephaestus.replay import tables

if TYPE_CHECKING:
  import reverb

_PENDING_ITEMS = 32  # confirmed before more is sent; Reverb complains from 50 on
_FLUSH_SECONDS = 0.5  # between two looks at should_stop
_TURN_SECONDS = 0.1  # that a shard is waited for before another has its turn
_GLANCE_SECONDS = 0.001  # that one is waited for which is known to be held back
_PROBE_SECONDS = 1.0
# What sending itself may take before it counts as being held back.
_LATENCY_SECONDS = 0.02
_BYTES_PER_SECOND = 50e6


class Writer:
  """An actor's way into replay. Not for use by several threads at once.

  With several shards each takes the next at most 32 / len(strata) sequences in turn. One that is
  down, or that its rate limiter holds back, is passed over while another is free.

  Nothing is stored twice when a server dies and comes back: what it has not confirmed stays with
  it, and an item keeps its key when Reverb sends it again. Only when Reverb's own writer breaks
  (which a restart does not cause) are the at most 32 / len(strata) sequences not yet confirmed sent
  once more with new keys, at the risk that the server already had them; a second break of the same
  sequences is raised.
  """

  def __init__(
    self,
    address: str | Sequence[str],
    strata: Sequence[tables.Stratum],
    schema: Any,
    *,
    timeout_seconds: float = 5.0,
  ):
    """Makes no call yet, so the servers may still be starting.

    Args:
      address: HOST:PORT of the server, or of each shard.
      strata: every one of the server's.
      schema: tree of jax.ShapeDtypeStruct of one sequence.
      timeout_seconds: silence after which a server counts as down.
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
    """Seconds the rate limiters held `write` back; servers that were down do not count."""
    return sum(shard.throttled_seconds for shard in self._shards)

  @property
  def sequences_written(self) -> int:
    """Sequences the servers have confirmed."""
    return sum(shard.sequences_written for shard in self._shards)

  @property
  def server_alive(self) -> bool:
    """Whether a server answered when last asked."""
    return any(shard.connection.alive for shard in self._shards)

  def write(self, sequences: Any, should_stop: Callable[[], bool]) -> float:
    """Inserts N sequences into every stratum, waiting while no shard is free to take more.

    One server has confirmed them when this returns; of several, one has nothing left to confirm.

    Args:
      sequences: tree of host arrays, [N, ...] each; left unchanged until they are confirmed.
      should_stop: asked at least every 1.5 seconds, and one more for each server that falls silent
        meanwhile; once true, what was not sent is dropped, and what was sent stays pending until
        the next `write` or `close`.

    Returns:
      Seconds throttled.
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
    """Drops what is pending. Never blocks."""
    for shard in self._shards:
      shard.close()

  def _next_free(self, should_stop: Callable[[], bool], *, take: bool = True) -> _Shard | None:
    """The next shard in turn that can be handed more; None when told to stop before there is one."""
    count = len(self._shards)
    patience = _FLUSH_SECONDS if count == 1 else _TURN_SECONDS
    impatience = _FLUSH_SECONDS if count == 1 else _GLANCE_SECONDS
    while True:
      for offset in range(count):
        index = (self._turn + offset) % count
        shard = self._shards[index]
        if shard.settle(impatience if shard.held_back else patience):
          self._turn = (index + take) % count
          return shard
      if should_stop():
        return None
      if not any(shard.is_connected for shard in self._shards):
        time.sleep(0.05)
      patience = impatience = _FLUSH_SECONDS / count  # nobody is free, and the first will do


class _Shard:
  """One server, and what it was handed and has not confirmed.

  Attributes:
    connection: to it.
    held_back: whether its limiter has made `settle` wait for what is not yet confirmed.
    throttled_seconds: that it made it wait in all.
    sequences_written: that it has confirmed.
  """

  def __init__(
    self,
    connection: connection_lib.Connection,
    names: list[str],
    columns: columns_lib.Columns,
  ):
    self.connection = connection
    self.held_back = False
    self.throttled_seconds = 0.0
    self.sequences_written = 0
    self._names = names
    self._columns = columns
    self._writer: reverb.TrajectoryWriter | None = None
    self._unconfirmed: list[dict[str, np.ndarray]] = []
    self._sent = False
    self._sent_again = False
    self._is_silent = False

  @property
  def is_connected(self) -> bool:
    """Whether `settle` waits by itself."""
    return self._writer is not None and not self._is_silent

  def hand_over(self, steps: list[dict[str, np.ndarray]]) -> None:
    """Sends sequences, once all before are confirmed."""
    assert not self._unconfirmed
    self._unconfirmed = steps
    self._sent = self._sent_again = False
    self._push()

  def close(self) -> None:
    if self._writer is not None:
      self._writer.close()
    self._writer = None
    self._unconfirmed = []
    self.connection.close()

  def settle(self, timeout_seconds: float) -> bool:
    """Whether the server is there, as far as is known, and has confirmed all in time."""
    if self._writer is None or self._is_silent:
      if not self._answers():
        return False
      self._is_silent = False
    if self._writer is None:
      # Reverb's own validation asks the server without a deadline; `_answers` has compared already.
      self._writer = self.connection.client.trajectory_writer(1, validate_items=False)
    if not self._unconfirmed:
      return True
    if not self._push():
      return False
    import reverb  # here, as in `connection`

    start = time.monotonic()
    try:
      self._writer.flush(timeout_ms=round(1000 * timeout_seconds))
    except reverb.errors.DeadlineExceededError:
      waited = time.monotonic() - start
      self._is_silent = not self._answers()
      if not self._is_silent:
        self.throttled_seconds += waited
        self.held_back = True
      return False
    except RuntimeError as error:
      self._break(error)
      return False
    waited = time.monotonic() - start
    size = len(self._unconfirmed) * self._columns.nbytes
    if not self.connection.alive:
      self._answers()  # says that it is back
    elif self.held_back or waited > _LATENCY_SECONDS + size / _BYTES_PER_SECOND:
      self.throttled_seconds += waited
    self.sequences_written += len(self._unconfirmed)
    self._unconfirmed = []
    self.held_back = False
    return True

  def _push(self) -> bool:
    """Sends what was not sent yet; False when the writer broke."""
    assert self._writer is not None
    if self._sent:
      return True
    try:
      for step in self._unconfirmed:
        self._writer.append(step)
        trajectory = {name: column[-1:] for name, column in self._writer.history.items()}
        for name in self._names:
          self._writer.create_item(name, 1.0, trajectory)
    except RuntimeError as error:
      self._break(error)
      return False
    self._sent = True
    return True

  def _break(self, error: RuntimeError) -> None:
    """Begins anew after Reverb's writer broke; raises when it has broken for these before."""
    if self._sent_again:
      raise error
    logging.warning('writer: %s; sending %d sequences again', error, len(self._unconfirmed))
    assert self._writer is not None
    self._writer.close()
    self._writer = None
    self._sent, self._sent_again = False, True

  def _answers(self) -> bool:
    """Whether the server answers now; refuses one that stores another schema."""
    infos = self.connection.look(_PROBE_SECONDS)
    if infos is None:
      return False
    for name in self._names:
      if name not in infos:
        raise ValueError(
          f'replay: the server at {self.connection.address} has the tables {sorted(infos)}, '
          f'and not {name!r}'
        )
      self._columns.check_signature(name, infos[name].signature)
    return True
