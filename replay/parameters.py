"""Acting parameters through the table `params`: a Publisher for the learner, a Source for actors."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import jax
import numpy as np
import reverb
from absl import logging

from replay import columns as columns_lib
from replay import connection as connection_lib
from replay import tables

# Columns before those of the parameters: numbers [3] int64 of a Snapshot, and the schema's digest.
_NUMBERS = '-numbers'
_DIGEST = '-schema'
_HEADERS = 2
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
  """Puts snapshots into the table, which holds the last."""

  def __init__(self, address: str, schema: Any, *, timeout_seconds: float = 5.0):
    """Makes no call yet.

    Args:
      address: HOST:PORT of the server.
      schema: tree of jax.ShapeDtypeStruct of the parameters.
      timeout_seconds: for the server to answer, and again for it to take a snapshot.
    """
    self._columns = columns_lib.Columns(schema)
    self._connection = connection_lib.Connection(
      address, 'publisher', timeout_seconds=timeout_seconds
    )
    self._timeout_seconds = timeout_seconds
    self._writer: reverb.TrajectoryWriter | None = None

  @property
  def server_alive(self) -> bool:
    """Whether the server answered when last asked."""
    return self._connection.alive

  def publish(self, snapshot: Snapshot) -> bool:
    """Replaces the published snapshot.

    Args:
      snapshot: `params` are copied before this returns.

    Returns:
      False when the server was down or too slow; the next call starts afresh.
    """
    leaves = self._columns.flatten(snapshot.params, batched=False)
    if self._connection.info() is None:
      self.close()
      return False
    if self._writer is None:
      self._writer = self._connection.client.trajectory_writer(1, validate_items=False)
    numbers = (snapshot.version, snapshot.environment_step, snapshot.ended_launch)
    step = dict(zip(self._columns.names, leaves, strict=True))
    step |= {_NUMBERS: np.asarray(numbers, np.int64), _DIGEST: self._columns.digest}
    try:
      self._writer.append(step)
      trajectory = {name: column[-1:] for name, column in self._writer.history.items()}
      self._writer.create_item(tables.PARAMS, float(snapshot.version), trajectory)
      self._writer.flush(timeout_ms=round(1000 * self._timeout_seconds))
    except connection_lib.ERRORS as error:
      logging.warning('publisher: version %d was not published: %s', snapshot.version, error)
      self.close()
      return False
    return True

  def close(self) -> None:
    """Drops what is pending. Never blocks."""
    if self._writer is not None:
      self._writer.close()
    self._writer = None


class Source:
  """Looks for snapshots, cheaply, and hands over sound ones. Not for several threads at once."""

  def __init__(self, address: str, schema: Any, *, name: str = 'source'):
    """Makes no call yet.

    Args:
      address: HOST:PORT of the server.
      schema: tree of jax.ShapeDtypeStruct of the parameters.
      name: who asks, for the logs.
    """
    self._columns = columns_lib.Columns(schema)
    self._connection = connection_lib.Connection(address, name)
    self._name = name
    self._inserted = 0
    self._numbers: tuple[int, ...] = ()
    self._fetch: _Fetch | None = None

  @property
  def server_alive(self) -> bool:
    """Whether the server answered when last asked."""
    return self._connection.alive

  @property
  def environment_step(self) -> int | None:
    """Of the snapshot last returned; None before the first."""
    return self._numbers[1] if self._numbers else None

  def newest(self, timeout_seconds: float = 5.0) -> Snapshot | None:
    """The published snapshot, when it is another than the last one returned.

    Costs about 1 ms when there is none. Any other counts as newer: a learner that went back to a
    checkpoint goes on from an older version.

    Args:
      timeout_seconds: for the server to answer, and again for the parameters to arrive.

    Returns:
      None when there is nothing newer, nothing at all, nothing sound, or no server.
    """
    infos = self._connection.info(timeout_seconds)
    info = (infos or {}).get(tables.PARAMS)
    if info is None or not info.current_size:
      return None
    inserted = info.rate_limiter_info.insert_stats.completed
    if self._fetch is None:
      if inserted == self._inserted:
        return None
      self._fetch = _Fetch(self._connection.client, inserted)
    fetch = self._fetch
    if not fetch.ended(timeout_seconds):
      return None  # the server died meanwhile; the fetch ends when it is back
    self._fetch = None
    arrays = fetch.arrays
    if arrays is None:
      return None
    self._inserted = fetch.inserted
    fault = self._fault(arrays)
    if fault:
      logging.error('%s: ignoring published parameters: %s', self._name, fault)
      return None
    numbers = tuple(int(number) for number in arrays[0][0])
    if numbers == self._numbers:
      return None
    self._numbers = numbers
    version, environment_step, ended_launch = numbers
    params = self._columns.unflatten([np.squeeze(array, 0) for array in arrays[_HEADERS:]])
    return Snapshot(
      version=version,
      environment_step=environment_step,
      ended_launch=ended_launch,
      params=params,
    )

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
    mismatch = self._columns.mismatch(arrays[_HEADERS:])
    if mismatch:
      return mismatch
    for path, dtype, array in zip(
      self._columns.paths, self._columns.dtypes, arrays[_HEADERS:], strict=True
    ):
      values = array.view(dtype)
      if jax.dtypes.issubdtype(dtype, np.inexact) and not np.isfinite(values).all():
        return f'{path} is not finite'
    return ''


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
