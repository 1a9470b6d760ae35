"""The reader of replay: prefetches batches from Reverb servers and mixes strata by share."""

from __future__ import annotations

import atexit
import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from hephaestus.replay import columns as columns_lib
from hephaestus.replay import connection as connection_lib
from hephaestus.replay import tables

_INFO_COLUMNS = 5  # key, probability, table size, priority, times sampled
_ENDLESS = 10**12
_WATCH_PERIOD = 1.0  # seconds
_LATE_SECONDS = 0.5  # without a sequence from a shard, while another has filled its places
_REJECTED_PERIOD = 60.0  # seconds between two log lines about rejected sequences


class _Draft(NamedTuple):
  """A batch that is being filled.

  Attributes:
    columns: arrays [B, ...], in new memory, because the last batch may still be in use.
    places: for each shard, the indices in the batch that it is to fill; a thread that removes one
      fills it.
    filled: for each shard, the number of places it has filled.
    begun: time at which it was begun, monotonic seconds.
  """

  columns: list[np.ndarray]
  places: list[collections.deque[int]]
  filled: list[int]
  begun: float


class Reader:
  """Gives batches of sequences, mixed exactly by the strata's shares. Thread-safe.

  A background thread for each shard fills places, indices of sequences in a batch. Another thread
  polls the servers: if one crashes, Reverb's samplers do not raise, but wait for its restart.

  The places of each stratum are assigned evenly to the active shards. A shard without a sequence
  for half a second, while another has filled all of its places, becomes inactive until its next
  sequence, and the others fill its places.

  A server does not check sequences against the signature of its tables. The reader rejects and logs
  a sequence that does not match the schema or is not finite, and reads another in its place.
  """

  def __init__(
    self,
    address: str | Sequence[str],
    strata: Sequence[tables.Stratum],
    schema: Any,
    *,
    batch_size: int,
    max_in_flight: int = 8,
    prefetch: int = 2,
    keep: Callable[[Any], bool] | None = None,
    timeout_seconds: float = 5.0,
  ):
    """Starts reading; the servers may still be starting.

    Args:
      address: HOST:PORT of the server, or of each shard; ValueError if there is none.
      strata: the strata to sample, with their shares of a batch.
      schema: tree of jax.ShapeDtypeStruct of one sequence; ValueError if it cannot be stored.
      batch_size: number of sequences in a batch, over all devices.
      max_in_flight: sequences prefetched by Reverb, per stratum and shard; they count as sampled.
      prefetch: batches prefetched; they count as sampled. With 0 a batch is begun by `get`, so that
        the sequences of a queue stay in the server until then.
      keep: returns whether a sequence, leaves [1, ...], goes into a batch; None keeps all. Called in
        the order in which a shard returns sequences; the threads of several shards may call it at once.
      timeout_seconds: time without an answer after which a server counts as down.
    """
    self._strata = tuple(strata)
    self._columns = columns_lib.Columns(schema)
    self._connections = connection_lib.connect(address, 'reader', timeout_seconds=timeout_seconds)
    self._stratum_of = tables.batch_strata(self._strata, batch_size)
    self._max_in_flight = max_in_flight
    self._prefetch = prefetch
    self._keep = keep
    count = len(self._connections)
    self._changed = threading.Condition()  # guards the fields from here to `_failure`
    self._asked = False  # `get` waits, or has timed out
    self._draft: _Draft | None = None
    self._batches: collections.deque[list[np.ndarray]] = collections.deque()
    self._is_active = [False] * count  # whether places are assigned to a shard
    self._assigned = [0] * len(self._strata)  # places of each stratum so far, which give the turn
    self._failure: Exception | None = None
    self._sampling_since = [0.0] * count
    self._closed = threading.Event()
    self._rejected = 0
    self._rejected_logged = -math.inf
    # Daemons: a sampler without data or server waits for ever, and cannot be interrupted.
    self._threads = [
      *(
        threading.Thread(
          target=self._fill, args=(shard,), name=f'replay-reader-{shard}', daemon=True
        )
        for shard in range(count)
      ),
      threading.Thread(target=self._watch, name='replay-watch', daemon=True),
    ]
    for thread in self._threads:
      thread.start()
    atexit.register(self.close)  # a thread inside Reverb must not outlive the interpreter

  @property
  def rejected(self) -> int:
    """Number of sequences rejected so far: they did not match the schema, or were not finite."""
    return self._rejected

  def get(self, timeout_seconds: float) -> Any | None:
    """Waits for the next batch.

    Args:
      timeout_seconds: longest wait.

    Returns:
      Tree of numpy arrays [B, ...], which the reader does not use again; None if no batch is ready in
      time. Strata are interleaved, so each of D equal contiguous slices (one a device) has their shares.

    Raises:
      ValueError: a server stores another schema, or lacks a stratum.
      Exception: any other error of a background thread, such as one that `keep` raised.
    """
    batch = None
    with self._changed:
      if not self._asked:
        self._asked = True
        self._changed.notify_all()
      self._changed.wait_for(lambda: self._batches or self._failure, timeout_seconds)
      if self._batches:
        batch = self._batches.popleft()
        self._asked = False
        self._changed.notify_all()
    if self._failure is not None:  # although other shards may still give batches
      raise self._failure
    return None if batch is None else self._columns.unflatten(batch)

  def close(self) -> None:
    """Stops reading. A thread that waits inside Reverb is abandoned, and blocks no exit."""
    self._closed.set()
    with self._changed:
      self._changed.notify_all()
    atexit.unregister(self.close)
    end = time.monotonic() + 1.0
    for thread in self._threads:
      if thread is not threading.current_thread():
        thread.join(timeout=max(0.0, end - time.monotonic()))

  def _fill(self, shard: int) -> None:
    """Fills a shard's places of one batch after another."""
    spare: dict[int, list[np.ndarray]] = {}  # by stratum, for places that others filled meanwhile
    try:
      while not self._closed.is_set():
        try:
          samplers = self._make_samplers(self._connections[shard])
          while not self._closed.is_set():
            draft = self._next_draft(shard)
            if draft is not None:
              self._fill_places(draft, shard, samplers, spare)
        except RuntimeError as error:
          logging.warning('reader: %s; connecting again', error)
          self._closed.wait(1.0)
    except Exception as error:  # raised by `get`
      with self._changed:
        self._failure = error
        self._changed.notify_all()

  def _make_samplers(self, connection: connection_lib.Connection) -> list[Any]:
    """Waits for the server and makes one sampler per stratum; none if closed before."""
    infos = None
    while infos is None:
      if self._closed.wait(0.05):
        return []
      infos = connection.info(1.0)
    names = [stratum.name for stratum in self._strata]
    self._columns.check_tables(connection.address, names, infos)
    # The public client.sample prefetches one sequence only, which is four times slower.
    new_sampler = connection.client._client.NewSampler
    return [new_sampler(stratum.name, _ENDLESS, self._max_in_flight) for stratum in self._strata]

  def _next_draft(self, shard: int) -> _Draft | None:
    """Waits for a draft with places for a shard; None if closed before."""
    with self._changed:
      self._is_active[shard] = True
      while not self._closed.is_set():
        if self._draft is None and self._is_due():
          self._draft = self._begin()
          self._changed.notify_all()
        if self._draft is not None:
          if not self._draft.places[shard]:
            self._take_from_late(self._draft, shard)
          if self._draft.places[shard]:
            return self._draft
        self._changed.wait(timeout=0.2)
    return None

  def _is_due(self) -> bool:
    if self._prefetch:
      return len(self._batches) <= self._prefetch  # one more for `get`
    return self._asked and not self._batches

  def _begin(self) -> _Draft:
    """A new draft, whose places of each stratum are assigned to the active shards in turn."""
    active = [shard for shard, is_active in enumerate(self._is_active) if is_active]
    places: list[collections.deque[int]] = [collections.deque() for _ in self._connections]
    for place, stratum in enumerate(self._stratum_of):
      # Strata begin at different shards, so that a batch of one each is not read from one shard.
      shard = active[(self._assigned[stratum] + stratum) % len(active)]
      self._assigned[stratum] += 1
      places[shard].append(place)
    columns = [
      np.empty((len(self._stratum_of), *shape), dtype)
      for shape, dtype in zip(self._columns.shapes, self._columns.wire_dtypes, strict=True)
    ]
    return _Draft(columns, places, [0] * len(places), time.monotonic())

  def _take_from_late(self, draft: _Draft, shard: int) -> None:
    """Moves the places of late shards to a shard that has filled all of its own."""
    for other, places in enumerate(draft.places):
      since = max(self._sampling_since[other], draft.begun)
      if other != shard and places and time.monotonic() - since > _LATE_SECONDS:
        self._is_active[other] = False
        with contextlib.suppress(IndexError):  # its thread took the last place meanwhile
          while True:
            draft.places[shard].append(places.pop())

  def _fill_places(
    self, draft: _Draft, shard: int, samplers: list[Any], spare: dict[int, list[np.ndarray]]
  ) -> None:
    """Fills a shard's places of a draft; the shard that fills the last one completes the batch."""
    places = draft.places[shard]
    try:
      while places:
        try:
          stratum = self._stratum_of[places[0]]
          if stratum not in spare:
            self._sampling_since[shard] = time.monotonic()
            values = self._sample(samplers[stratum], stratum)
            if values is None:
              return
            spare[stratum] = values
          place = places.popleft()  # still the first, because others take from the end
        except IndexError:  # others took all
          return
        for column, value in zip(draft.columns, spare.pop(stratum), strict=True):
          column[place] = value[0]
        draft.filled[shard] += 1  # at once: the next sample may block for ever
    finally:
      with self._changed:
        is_filled = draft is self._draft and sum(draft.filled) == len(self._stratum_of)
        if is_filled and self._is_finite(draft, shard):
          self._batches.append(draft.columns)
          self._draft = None
          self._changed.notify_all()

  def _is_finite(self, draft: _Draft, shard: int) -> bool:
    """Whether a full batch is finite; assigns places of sequences that are not to `shard` again.

    For small sequences, checking a batch takes a tenth of the time of checking each.
    """
    found = self._columns.out_of_range(draft.columns)
    for place, fault in found.items():
      self._reject(self._strata[self._stratum_of[place]].name, fault)
    draft.places[shard].extend(found)
    draft.filled[shard] -= len(found)
    return not found

  def _sample(self, sampler: Any, stratum: int) -> list[np.ndarray] | None:
    """Samples a valid sequence of a stratum, in columns [1, ...]; None if closed meanwhile."""
    while True:
      values = sampler.GetNextTrajectory()[_INFO_COLUMNS:]
      if self._closed.is_set():
        return None
      mismatch = self._columns.mismatch(values)
      if mismatch:
        self._reject(self._strata[stratum].name, mismatch)
      elif self._keep is None or self._keep(self._columns.unflatten(values)):
        return values

  def _reject(self, stratum: str, fault: str) -> None:
    self._rejected += 1
    if time.monotonic() - self._rejected_logged > _REJECTED_PERIOD:
      self._rejected_logged = time.monotonic()
      logging.error(
        'reader: rejecting a sequence of %r: %s; %d so far', stratum, fault, self._rejected
      )

  def _watch(self) -> None:
    count = answering = len(self._connections)
    while not self._closed.wait(_WATCH_PERIOD):
      for connection in self._connections:
        connection.info(1.0)
      before, answering = answering, sum(connection.alive for connection in self._connections)
      if answering != before and count > 1:
        logging.info('reader: sampling from %d of %d replay servers', answering, count)
