"""Acting parameters through the table `params`: a Publisher for the learner, a Source for actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from absl import logging

from hephaestus.replay import columns as columns_lib
from hephaestus.replay import connection as connection_lib
from hephaestus.replay import tables

if TYPE_CHECKING:
  import reverb

# Columns before those of the parameters: numbers [3] int64 of a Snapshot, and the schema's digest.
_NUMBERS = '-numbers'
_DIGEST = '-schema'
_HEADERS = 2
_NEWS_SECONDS = 5.0  # without any, before another shard is looked at
_MOST_UPDATES = 1 << 31  # sequences have room for no larger version


class Snapshot(NamedTuple):
  """Parameters to act with.

  Attributes:
    version: learner step they come from.
    environment_step: steps collected by then.
    ended_launch: the launch whose learner ended with these, so that none will follow in it; 0 while
      it goes on. A restored table may still hold the end of an older launch.
    params: tree of host arrays.
  """

  version: int
  environment_step: int
  ended_launch: int
  params: Any


class Publisher:
  """Puts snapshots into the table of every shard, which holds the last."""

  def __init__(self, address: str | Sequence[str], schema: Any, *, timeout_seconds: float = 5.0):
    """Makes no call yet.

    Args:
      address: HOST:PORT of the server, or of each shard.
      schema: tree of jax.ShapeDtypeStruct of the parameters.
      timeout_seconds: for a server to answer, and again for it to take a snapshot.
    """
    self._columns = columns_lib.Columns(schema)
    self._connections = connection_lib.connect(
      address, 'publisher', timeout_seconds=timeout_seconds
    )
    self._timeout_seconds = timeout_seconds
    self._writers: dict[str, reverb.TrajectoryWriter] = {}

  @property
  def server_alive(self) -> bool:
    """Whether a server answered when last asked."""
    return any(connection.alive for connection in self._connections)

  def publish(self, snapshot: Snapshot) -> bool:
    """Replaces the published snapshot.

    Args:
      snapshot: `params` are copied before this returns.

    Returns:
      False when no server answered, or one that did was too slow; the next call starts afresh.
    """
    leaves = self._columns.flatten(snapshot.params, batched=False)
    numbers = (snapshot.version, snapshot.environment_step, snapshot.ended_launch)
    step = dict(zip(self._columns.names, leaves, strict=True))
    step |= {_NUMBERS: np.asarray(numbers, np.int64), _DIGEST: self._columns.digest}
    answering = []
    for connection in self._connections:
      if connection.look(self._timeout_seconds) is None:
        self._drop(connection)
      else:
        answering.append(connection)
    took = [self._publish(connection, snapshot.version, step) for connection in answering]
    return bool(took) and all(took)

  def close(self) -> None:
    """Drops what is pending. Never blocks."""
    for connection in self._connections:
      self._drop(connection)
      connection.close()

  def _publish(
    self, connection: connection_lib.Connection, version: int, step: dict[str, np.ndarray]
  ) -> bool:
    """Has one server take it."""
    writer = self._writers.get(connection.address)
    if writer is None:
      writer = connection.client.trajectory_writer(1, validate_items=False)
      self._writers[connection.address] = writer
    try:
      writer.append(step)
      trajectory = {name: column[-1:] for name, column in writer.history.items()}
      writer.create_item(tables.PARAMS, float(version), trajectory)
      writer.flush(timeout_ms=round(1000 * self._timeout_seconds))
    except connection_lib.errors() as error:
      logging.warning(
        'publisher: version %d was not published at %s: %s', version, connection.address, error
      )
      self._drop(connection)
      return False
    return True

  def _drop(self, connection: connection_lib.Connection) -> None:
    writer = self._writers.pop(connection.address, None)
    if writer is not None:
      writer.close()


class Source:
  """Looks for snapshots, cheaply, and hands over sound ones. Not for several threads at once.

  Of several shards it looks at one, until that does not answer, holds nothing or has had no news
  for some seconds; then at the next.
  """

  def __init__(self, address: str | Sequence[str], schema: Any, *, name: str = 'source'):
    """Makes no call yet.

    Args:
      address: HOST:PORT of the server, or of each shard.
      schema: tree of jax.ShapeDtypeStruct of the parameters.
      name: who asks, for the logs.
    """
    self._columns = columns_lib.Columns(schema)
    self._shards = [_Shard(connection) for connection in connection_lib.connect(address, name)]
    self._current = 0
    self._is_new_here = False  # has come from another shard, and seen nothing of this one
    self._news = time.monotonic()
    self._name = name
    self._numbers: tuple[int, ...] = ()

  @property
  def server_alive(self) -> bool:
    """Whether a server answered when last asked."""
    return any(shard.connection.alive for shard in self._shards)

  @property
  def environment_step(self) -> int | None:
    """Of the snapshot last returned; None before the first."""
    return self._numbers[1] if self._numbers else None

  def newest(self, timeout_seconds: float = 5.0) -> Snapshot | None:
    """The published snapshot, when it is another than the last one returned.

    Costs about 1 ms when there is none. Any other counts as newer: a learner that went back to a
    checkpoint goes on from an older version. Only where another shard was looked at before, an
    older one does not: the shard may have come back with it.

    Args:
      timeout_seconds: for the server to answer, and again for the parameters to arrive.

    Returns:
      None when there is nothing newer, nothing at all, nothing sound, or no server.
    """
    shard = self._shards[self._current]
    infos = shard.connection.info(timeout_seconds)
    info = (infos or {}).get(tables.PARAMS)
    if info is None or not info.current_size:
      self._look_elsewhere()
      return None
    inserted = info.rate_limiter_info.insert_stats.completed
    if shard.fetch is None:
      if inserted == shard.inserted:
        if time.monotonic() - self._news > _NEWS_SECONDS:
          self._look_elsewhere()
        return None
      shard.fetch = _Fetch(shard.connection.client, inserted)
    fetch = shard.fetch
    if not fetch.ended(timeout_seconds):
      self._look_elsewhere()  # the server died meanwhile; the fetch ends when it is back
      return None
    shard.fetch = None
    arrays = fetch.arrays
    if arrays is None:
      return None
    shard.inserted = fetch.inserted
    fault = self._fault(arrays)
    if fault:
      logging.error('%s: ignoring published parameters: %s', self._name, fault)
      return None
    numbers = tuple(int(number) for number in arrays[0][0])
    is_first, self._is_new_here = self._is_new_here, False
    version, environment_step, ended_launch = numbers
    if numbers == self._numbers or (is_first and not ended_launch and numbers < self._numbers):
      return None
    self._news = time.monotonic()
    self._numbers = numbers
    params = self._columns.unflatten([np.squeeze(array, 0) for array in arrays[_HEADERS:]])
    return Snapshot(
      version=version,
      environment_step=environment_step,
      ended_launch=ended_launch,
      params=params,
    )

  def _look_elsewhere(self) -> None:
    """Has the next call look at the next shard."""
    if len(self._shards) > 1:
      self._current = (self._current + 1) % len(self._shards)
      self._is_new_here = True
      self._news = time.monotonic()

  def _fault(self, arrays: list[np.ndarray]) -> str:
    """Why these columns are not acted upon; empty when they may be."""
    if len(arrays) < _HEADERS:
      return f'{len(arrays)} columns'
    numbers, digest = arrays[:_HEADERS]
    if numbers.shape != (1, 3) or numbers.dtype != np.int64:
      return f'the numbers are {numbers.dtype.name}{list(numbers.shape)}'
    if not np.array_equal(digest, self._columns.digest[None]):
      return 'they belong to another schema'
    if not (0 <= numbers[0, 0] < _MOST_UPDATES and numbers.min() >= 0):
      return f'version, environment step and launch are {numbers[0].tolist()}'
    params = arrays[_HEADERS:]
    return self._columns.mismatch(params) or self._columns.not_finite(params).get(0, '')


class _Shard:
  """What is known of the table of one server.

  Attributes:
    connection: to the server.
    inserted: snapshots ever inserted when the last one was fetched.
    fetch: that has not ended yet.
  """

  def __init__(self, connection: connection_lib.Connection):
    self.connection = connection
    self.inserted = 0
    self.fetch: _Fetch | None = None


class _Fetch:
  """One sample of the table in a thread of its own, since it cannot be given a deadline."""

  def __init__(self, client: reverb.Client, inserted: int):
    self.inserted = inserted  # snapshots ever inserted when this began
    self.arrays: list[np.ndarray] | None = None  # columns sorted by name; None when it failed
    self._client = client
    self._thread = threading.Thread(target=self._run, name='replay-params', daemon=True)
    self._thread.start()

  def ended(self, timeout_seconds: float) -> bool:
    """Whether it has ended within a time."""
    self._thread.join(timeout_seconds)
    return not self._thread.is_alive()

  def _run(self) -> None:
    try:
      sample = next(self._client.sample(tables.PARAMS, 1, emit_timesteps=False))
      self.arrays = list(sample.data)
    except Exception as error:  # of the server, or whatever a forged item makes the client raise
      logging.warning('params: %s', error)
