"""Reads batches from Reverb servers, mixed by share, ahead of the one who asks."""

from __future__ import annotations

import atexit
import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from hephaestus.replay import columns as columns_lib
from hephaestus.replay import connection as connection_lib
from hephaestus.replay import tables

_INFO_COLUMNS = 5  # key, probability, table size, priority, times sampled
_ENDLESS = 10**12
_WATCH_PERIOD = 1.0  # seconds
_LATE_SECONDS = 0.5  # without a sequence from a shard, while another has nothing left to do
_REJECTED_PERIOD = 60.0  # seconds between two words about sequences that do not fit


class _Draft(NamedTuple):
  """A batch in the making.

  Attributes:
    columns: [B, ...] each, in fresh memory since the last batch may still be in use.
    rows: for each shard those that it is to fill; whoever takes one out, fills it.
    filled: for each shard how many it has filled.
    begun: seconds, monotonic.
  """

  columns: list[np.ndarray]
  rows: list[collections.deque[int]]
  filled: list[int]
  begun: float


class Reader:
  """Batches of sequences, each with the exact mixture; safe from any thread.

  A background thread for each shard fills rows of a batch; another watches the servers, since
  Reverb's samplers never raise when one dies but wait until it is back, and then go on by
  themselves.

  Each stratum's rows are dealt out evenly to the shards that give. A shard that gives nothing for
  half a second, while another has filled all of its rows, is left out until it gives again; its
  rows are filled from the others.

  A server stores what it is given, whatever its tables' signature says; a sequence that does not
  fit the schema, or whose numbers are not all finite, is rejected here, that is logged, and another
  is read in its place.
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
      address: HOST:PORT of the server, or of each shard.
      strata: with their shares of a batch.
      schema: tree of jax.ShapeDtypeStruct of one sequence.
      batch_size: sequences of a batch, over all devices.
      max_in_flight: sequences held ahead by Reverb, per stratum and shard; they count as sampled.
      prefetch: batches held ahead; they count as sampled. 0: a batch is begun when it is asked for,
        so that what is read once and in order lies in the server until then.
      keep: asked of every sequence, [1, ...], in the order in which a shard gives them; what it
        declines is in no batch. Several shards ask at once.
      timeout_seconds: silence after which a server counts as down.
    """
    self._strata = tuple(strata)
    self._columns = columns_lib.Columns(schema)
    self._connections = connection_lib.connect(address, 'reader', timeout_seconds=timeout_seconds)
    self._row_strata = tables.row_strata(self._strata, batch_size)
    self._max_in_flight = max_in_flight
    self._prefetch = prefetch
    self._keep = keep
    count = len(self._connections)
    self._changed = threading.Condition()  # guards what follows, down to the failure
    self._asked = False  # a batch is asked for and not given
    self._draft: _Draft | None = None
    self._batches: collections.deque[list[np.ndarray]] = collections.deque()
    self._gives = [False] * count  # which shards rows are dealt to
    self._dealt = [0] * len(self._strata)  # rows of each stratum, so that the next shard is in turn
    self._failure: Exception | None = None
    self._drawing_since = [0.0] * count
    self._closed = threading.Event()
    self._starved_seconds = 0.0
    self._rejected = 0
    self._rejected_said = -math.inf
    # Daemons: a sampler without data or server waits for ever, and nothing can wake it.
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
  def starved_seconds(self) -> float:
    """Seconds that `get` and `next` have waited."""
    return self._starved_seconds

  @property
  def rejected(self) -> int:
    """Sequences read that did not fit the schema, or were not finite."""
    return self._rejected

  @property
  def server_alive(self) -> bool:
    """Whether a server has answered within the last `timeout_seconds`."""
    return any(connection.alive for connection in self._connections)

  def get(self, timeout_seconds: float) -> Any | None:
    """The next batch, or None when there is none in time.

    Returns:
      Tree of numpy arrays [B, ...], the caller's to keep. The strata's rows are interleaved, so
      that each of D equal contiguous slices holds the mixture too.

    Raises:
      ValueError: a server stores another schema, or lacks a stratum.
    """
    start = time.monotonic()
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
    self._starved_seconds += time.monotonic() - start
    if self._failure is not None:  # also where other shards go on giving
      raise self._failure
    return None if batch is None else self._columns.unflatten(batch)

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
    with self._changed:
      self._changed.notify_all()
    atexit.unregister(self.close)
    end = time.monotonic() + 1.0
    for thread in self._threads:
      if thread is not threading.current_thread():
        thread.join(timeout=max(0.0, end - time.monotonic()))

  def _fill(self, shard: int) -> None:
    """Fills a shard's rows of one batch after the other."""
    drawn: dict[int, list[np.ndarray]] = {}  # by stratum, for rows that others filled meanwhile
    try:
      while not self._closed.is_set():
        try:
          samplers = self._make_samplers(self._connections[shard])
          while not self._closed.is_set():
            draft = self._next_draft(shard)
            if draft is not None:
              self._fill_rows(draft, shard, samplers, drawn)
        except RuntimeError as error:
          logging.warning('reader: %s; reading anew', error)
          self._closed.wait(1.0)
    except Exception as error:  # handed to whoever reads
      with self._changed:
        self._failure = error
        self._changed.notify_all()

  def _make_samplers(self, connection: connection_lib.Connection) -> list[Any]:
    """One sampler per stratum once the server answers; none when closed before."""
    infos = None
    while infos is None:
      if self._closed.wait(0.05):
        return []
      infos = connection.info(1.0)
    for stratum in self._strata:
      if stratum.name not in infos:
        raise ValueError(
          f'replay: the server at {connection.address} has the tables {sorted(infos)}, '
          f'and not {stratum.name!r}'
        )
      self._columns.check_signature(stratum.name, infos[stratum.name].signature)
    # The public client.sample holds one sequence ahead, which is four times slower.
    new_sampler = connection.client._client.NewSampler
    return [new_sampler(stratum.name, _ENDLESS, self._max_in_flight) for stratum in self._strata]

  def _next_draft(self, shard: int) -> _Draft | None:
    """The batch in the making once it has rows for a shard; None when closed before."""
    with self._changed:
      self._gives[shard] = True
      while not self._closed.is_set():
        if self._draft is None and self._is_due():
          self._draft = self._begin()
          self._changed.notify_all()
        if self._draft is not None:
          if not self._draft.rows[shard]:
            self._take_from_late(self._draft, shard)
          if self._draft.rows[shard]:
            return self._draft
        self._changed.wait(timeout=0.2)
    return None

  def _is_due(self) -> bool:
    if self._prefetch:
      return len(self._batches) <= self._prefetch  # beside the one that is waited for
    return self._asked and not self._batches

  def _begin(self) -> _Draft:
    """Deals the rows of a batch to the shards that give, each stratum's in turn."""
    givers = [shard for shard, gives in enumerate(self._gives) if gives]
    rows: list[collections.deque[int]] = [collections.deque() for _ in self._connections]
    for row, stratum in enumerate(self._row_strata):
      # Strata begin at different shards, so that one of each does not take both from the same.
      shard = givers[(self._dealt[stratum] + stratum) % len(givers)]
      self._dealt[stratum] += 1
      rows[shard].append(row)
    columns = [
      np.empty((len(self._row_strata), *shape), dtype)
      for shape, dtype in zip(self._columns.shapes, self._columns.wire_dtypes, strict=True)
    ]
    return _Draft(columns, rows, [0] * len(rows), time.monotonic())

  def _take_from_late(self, draft: _Draft, shard: int) -> None:
    """Gives a shard that has filled all of its rows those of others that give nothing."""
    for other, rows in enumerate(draft.rows):
      since = max(self._drawing_since[other], draft.begun)
      if other != shard and rows and time.monotonic() - since > _LATE_SECONDS:
        self._gives[other] = False
        with contextlib.suppress(IndexError):  # it gives just now
          while True:
            draft.rows[shard].append(rows.pop())

  def _fill_rows(
    self, draft: _Draft, shard: int, samplers: list[Any], drawn: dict[int, list[np.ndarray]]
  ) -> None:
    """Fills those rows of a batch that are a shard's; the last one to have done so hands it over."""
    rows = draft.rows[shard]
    try:
      while rows:
        try:
          stratum = self._row_strata[rows[0]]
          if stratum not in drawn:
            self._drawing_since[shard] = time.monotonic()
            values = self._draw(samplers[stratum], stratum)
            if values is None:
              return
            drawn[stratum] = values
          row = rows.popleft()  # others take from the end, so it is the one looked at
        except IndexError:  # others took all
          return
        for column, value in zip(draft.columns, drawn.pop(stratum), strict=True):
          column[row] = value[0]
        draft.filled[shard] += 1  # at once: the next draw may take for ever
    finally:
      with self._changed:
        is_filled = draft is self._draft and sum(draft.filled) == len(self._row_strata)
        if is_filled and self._is_finite(draft, shard):
          self._batches.append(draft.columns)
          self._draft = None
          self._changed.notify_all()

  def _is_finite(self, draft: _Draft, shard: int) -> bool:
    """Whether a whole batch is; rows that are not are for a shard to fill anew.

    Looked at together, since that costs a small sequence a tenth of what it would by itself.
    """
    found = self._columns.not_finite(draft.columns)
    for row, fault in found.items():
      self._reject(self._strata[self._row_strata[row]].name, fault)
    draft.rows[shard].extend(found)
    draft.filled[shard] -= len(found)
    return not found

  def _draw(self, sampler: Any, stratum: int) -> list[np.ndarray] | None:
    """A sequence of a stratum, in columns [1, ...]; None when closed meanwhile."""
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
    if time.monotonic() - self._rejected_said > _REJECTED_PERIOD:
      self._rejected_said = time.monotonic()
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
        logging.info('reader: drawing from %d of %d replay servers', answering, count)
