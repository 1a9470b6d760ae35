"""Acting parameters in the table `params`: a Publisher for the learner, a Subscription for actors."""

from __future__ import annotations

import dataclasses
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

# Columns before the parameters: the numbers of a Snapshot, [3] int64, and the schema's digest.
_NUMBERS = '-numbers'
_DIGEST = '-schema'
_HEADERS = 2
_NEWS_SECONDS = 5.0  # without a new snapshot, before the next shard is polled
# Bound of environment steps, 10^12: a forged count would stay, as it never decreases.
MOST_STEPS = 1 << 40


class Snapshot(NamedTuple):
  """Acting parameters of one version.

  Attributes:
    version: the learner step.
    environment_step: environment steps collected by then.
    ended_launch: ID of the launch whose final parameters these are; 0 while training continues. A
      restored table may hold the final parameters of an older launch.
    params: tree of host arrays.
  """

  version: int
  environment_step: int
  ended_launch: int
  params: Any


class Publisher:
  """Publishes acting parameters: inserts snapshots into the table `params` of every shard.

  The table holds only the newest snapshot.
  """

  def __init__(self, address: str | Sequence[str], schema: Any, *, timeout_seconds: float = 5.0):
    """Sets up the connections; sends no request yet.

    Args:
      address: HOST:PORT of the server, or of each shard; ValueError if there is none.
      schema: tree of jax.ShapeDtypeStruct of the parameters; ValueError if it cannot be stored.
      timeout_seconds: longest wait for a server to answer, and again for it to confirm a snapshot.
    """
    self._columns = columns_lib.Columns(schema)
    self._connections = connection_lib.connect(
      address, 'publisher', timeout_seconds=timeout_seconds
    )
    self._timeout_seconds = timeout_seconds
    self._writers: dict[str, reverb.TrajectoryWriter] = {}

  def publish(self, snapshot: Snapshot) -> bool:
    """Replaces the published snapshot on every shard.

    Args:
      snapshot: the new one; its `params` are copied before this returns.

    Returns:
      True if at least one server answered, and all that answered confirmed the snapshot in time.

    Raises:
      ValueError: the parameters do not match the schema.
    """
    leaves = self._columns.flatten(snapshot.params, batched=False)
    numbers = (snapshot.version, snapshot.environment_step, snapshot.ended_launch)
    step = dict(zip(self._columns.names, leaves, strict=True))
    step |= {_NUMBERS: np.asarray(numbers, np.int64), _DIGEST: self._columns.digest}
    answering = []
    for connection in self._connections:
      if connection.probe(self._timeout_seconds) is None:
        self._drop(connection)
      else:
        answering.append(connection)
    took = [self._publish(connection, snapshot.version, step) for connection in answering]
    return bool(took) and all(took)

  def close(self) -> None:
    """Drops snapshots that are not yet confirmed. Never blocks."""
    for connection in self._connections:
      self._drop(connection)
      connection.close()

  def _publish(
    self, connection: connection_lib.Connection, version: int, step: dict[str, np.ndarray]
  ) -> bool:
    """Inserts a snapshot at one server; False if that failed."""
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


class Subscription:
  """Polls for new snapshots of acting parameters, fetches and checks them. Not thread-safe.

  It polls one shard. If that does not answer, holds no snapshot or has no new one for 5 seconds, it
  polls the next shard.
  """

  def __init__(
    self,
    address: str | Sequence[str],
    schema: Any,
    *,
    name: str = 'source',
    least_step: int = 0,
  ):
    """Sets up the connections; sends no request yet.

    Args:
      address: HOST:PORT of the server, or of each shard.
      schema: tree of jax.ShapeDtypeStruct of the parameters; ValueError if it cannot be stored.
      name: name of the caller in log lines.
      least_step: number of environment steps that this run has surely collected already; the first
        value of `environment_step`.
    """
    self._columns = columns_lib.Columns(schema)
    self._shards = [_Shard(connection) for connection in connection_lib.connect(address, name)]
    self._current = 0
    self._is_first_fetch = False  # of this shard, after another
    self._news = time.monotonic()
    self._name = name
    self._numbers: tuple[int, ...] = ()
    self._environment_step = least_step

  @property
  def environment_step(self) -> int:
    """The highest environment step of the snapshots returned so far, and at least `least_step`."""
    return self._environment_step

  def newest(self, timeout_seconds: float = 5.0) -> Snapshot | None:
    """Fetches the published snapshot if it differs from the last one returned.

    A poll without a new snapshot takes about 1 ms. A lower version counts as new, because a learner
    may resume from an older checkpoint. Only the first snapshot of another shard must have a higher
    version (or be the final one), because that shard may have been restored with an older one. The
    environment step never decreases, even if a restored server holds an older snapshot.

    Args:
      timeout_seconds: longest wait for the server to answer, and again for the parameters to arrive.

    Returns:
      The snapshot; None if the server does not answer, or has no snapshot that is new and valid.
    """
    shard = self._shards[self._current]
    info = (shard.connection.info(timeout_seconds) or {}).get(tables.PARAMS)
    if info is None or not info.current_size:
      self._next_shard()
      return None
    inserted = info.rate_limiter_info.insert_stats.completed
    if shard.fetch is None:
      if inserted == shard.inserted:
        if time.monotonic() - self._news > _NEWS_SECONDS:
          self._next_shard()
        return None
      shard.fetch = _Fetch(shard.connection.client, inserted)
    fetch = shard.fetch
    if not fetch.ended(timeout_seconds):
      self._next_shard()  # the server crashed; the fetch ends when it is restarted
      return None
    shard.fetch = None
    arrays = fetch.arrays
    if arrays is None:
      return None
    shard.inserted = fetch.inserted
    found = fault(self._columns, arrays)
    if found:
      logging.error('%s: ignoring published parameters: %s', self._name, found)
      return None
    numbers = tuple(int(number) for number in arrays[0][0])
    is_first, self._is_first_fetch = self._is_first_fetch, False
    version, environment_step, ended_launch = numbers
    if numbers == self._numbers or (is_first and not ended_launch and numbers < self._numbers):
      return None
    self._news = time.monotonic()
    self._numbers = numbers
    self._environment_step = max(self._environment_step, environment_step)
    params = self._columns.unflatten([np.squeeze(array, 0) for array in arrays[_HEADERS:]])
    return Snapshot(
      version=version,
      environment_step=self._environment_step,
      ended_launch=ended_launch,
      params=params,
    )

  def _next_shard(self) -> None:
    """Makes the next call poll the next shard."""
    if len(self._shards) > 1:
      self._current = (self._current + 1) % len(self._shards)
      self._is_first_fetch = True
      self._news = time.monotonic()


def fault(columns: columns_lib.Columns, arrays: list[np.ndarray]) -> str:
  """Describes what is wrong with a fetched snapshot; '' if it is valid.

  Args:
    columns: the columns of the parameters' schema.
    arrays: the fetched columns, [1, ...] each: [1, 3] int64 version, environment step and launch; the
      schema's digest; and the parameters' leaves.
  """
  if len(arrays) < _HEADERS:
    return f'{len(arrays)} columns'
  numbers, digest = arrays[:_HEADERS]
  if numbers.shape != (1, 3) or numbers.dtype != np.int64:
    return f'the numbers are {numbers.dtype.name}{list(numbers.shape)}'
  if not np.array_equal(digest, columns.digest[None]):
    return 'they belong to another schema'
  version, environment_step, launch = numbers[0].tolist()
  in_range = version < columns_lib.MOST_UPDATES and environment_step <= MOST_STEPS
  if not in_range or min(version, environment_step, launch) < 0:
    return f'version, environment step and launch are {numbers[0].tolist()}'
  params = arrays[_HEADERS:]
  return columns.mismatch(params) or columns.out_of_range(params).get(0, '')


@dataclasses.dataclass
class _Shard:
  """The table `params` of one server: inserts ever when it was last fetched, and a pending fetch."""

  connection: connection_lib.Connection
  inserted: int = 0
  fetch: _Fetch | None = None


class _Fetch:
  """Fetches one sample of the table in a thread, because Reverb has no deadline for sampling.

  Attributes:
    inserted: number of snapshots ever inserted when this began.
    arrays: columns sorted by name; None before the end and after a failure.
  """

  def __init__(self, client: reverb.Client, inserted: int):
    self.inserted = inserted
    self.arrays: list[np.ndarray] | None = None
    self._client = client
    self._thread = threading.Thread(target=self._run, name='replay-params', daemon=True)
    self._thread.start()

  def ended(self, timeout_seconds: float) -> bool:
    """Waits for the end of the fetch; returns whether it ended in time, also by a failure."""
    self._thread.join(timeout_seconds)
    return not self._thread.is_alive()

  def _run(self) -> None:
    try:
      sample = next(self._client.sample(tables.PARAMS, 1, emit_timesteps=False))
      self.arrays = list(sample.data)
    except Exception as error:  # of the server, or of the client for an item of another writer
      logging.warning('params: %s', error)
