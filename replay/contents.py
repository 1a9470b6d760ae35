"""Contents of replay, sequence by sequence, read from its newest checkpoint.

Sampling a running server's table would change its counters and its rate limiter, and so the run. So
this copies the newest checkpoint, and starts a server of its own to decode the copy. There every
table returns each item once, the oldest first, without a rate limiter.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import reverb
import tensorflow as tf
from reverb.cc import schema_pb2
from reverb.cc.checkpointing import checkpoint_pb2

from hephaestus.replay import checkpoint, connection, tables

# Sequences that a writer may have inserted into one table and not yet into the other: those not yet
# confirmed, and those inserted after one table is saved and before the next.
IN_BETWEEN = 64
_RECORDS = 1024  # read at once
_COPY = '.copy-'


class Item(NamedTuple):
  """One table's reference to a sequence.

  Attributes:
    key: Reverb's key of the reference.
    chunks: keys of the chunks that hold the sequence's data, one per column. Items of several tables
      have equal keys where they share the stored sequence.
    times_sampled: number of samples from this table.
    inserted: time of the insert, unix seconds.
    writer: ID of the stream in which it was written, one for each connection of an actor.
    position: position in that stream, from 0.
  """

  key: int
  chunks: tuple[int, ...]
  times_sampled: int
  inserted: float
  writer: int
  position: int


class Fault(NamedTuple):
  """An inconsistency between strata.

  Attributes:
    table: name of the table that has it.
    key: key of the item; None if the fault is of the table as a whole.
    text: description of the fault.
  """

  table: str
  key: int | None
  text: str


class Counts(NamedTuple):
  """Counters of one table.

  Attributes:
    size: sequences that it holds.
    max_size: sequences that it may hold.
    inserted: inserts ever.
    sampled: samples ever.
    unique_sampled: sequences ever sampled, each counted once.
  """

  size: int
  max_size: int
  inserted: int
  sampled: int
  unique_sampled: int


class Counted(NamedTuple):
  """The counters of a checkpoint.

  Attributes:
    saved: time at which it was complete, unix seconds.
    tables: counters of each table, by name.
  """

  saved: float
  tables: dict[str, Counts]


def counts(directory: str) -> Counted | None:
  """Reads the counters, and no sequence, of the newest checkpoint whose tables can be read.

  Args:
    directory: folder of the run's replay, as given to `checkpoint.checkpointer`.

  Returns:
    The counters; None without such a checkpoint.
  """
  for folder in checkpoint.complete(directory):
    try:
      saved = os.path.getmtime(os.path.join(folder, 'DONE'))
      records = list(_records(os.path.join(folder, 'tables.tfrecord')))
    except (OSError, tf.errors.OpError):  # broken, or replaced by a newer one meanwhile
      continue
    saved_tables = map(checkpoint_pb2.PriorityTableCheckpoint.FromString, records)
    return Counted(saved, {table.table_name: _counts(table) for table in saved_tables})
  return None


def _counts(table: checkpoint_pb2.PriorityTableCheckpoint) -> Counts:
  limiter = table.rate_limiter
  return Counts(
    size=limiter.insert_count - limiter.delete_count,
    max_size=table.max_size,
    inserted=limiter.insert_count,
    sampled=limiter.sample_count,
    unique_sampled=table.num_unique_samples,
  )


class Contents:
  """Reads a copy of the newest checkpoint, item by item.

  Attributes:
    saved: time at which the checkpoint was complete, unix seconds.
    broken: a message for each newer checkpoint that is broken.
    items: items of each table, the oldest first, by its name.
    max_sizes: capacity of each table in sequences, by its name.
    signatures: Reverb's signature of each table, by its name; None for a table without one.
  """

  def __init__(self, directory: str):
    """Copies the checkpoint and starts the server; `close` stops it.

    The server takes as much memory as the one that wrote the checkpoint, in this process.

    Args:
      directory: folder of the run's replay, as given to `checkpoint.checkpointer`.

    Raises:
      FileNotFoundError: there is no whole checkpoint.
    """
    with contextlib.ExitStack() as stack:
      target = stack.enter_context(_copy_folder(directory))
      folder, self.broken = checkpoint.copy(directory, target)
      if folder is None:
        raise FileNotFoundError('; '.join([f'no whole checkpoint in {directory}', *self.broken]))
      self.saved = os.path.getmtime(os.path.join(folder, 'DONE'))
      self.items = _reset_items(folder)
      self.max_sizes = _make_queues(folder)
      self.items = {name: self.items.get(name, []) for name in self.max_sizes}
      os.environ.update(connection.without_proxy([]))
      with _quiet():
        self._server = reverb.Server(
          [reverb.Table.queue(name, 1) for name in self.max_sizes],
          port=None,
          checkpointer=reverb.checkpointers.DefaultCheckpointer(target),
        )
      stack.callback(self._stop)
      self._client = self._server.localhost_client()
      self.signatures = {
        name: info.signature for name, info in self._client.server_info(timeout=60).items()
      }
      self._resources = stack.pop_all()

  def __enter__(self) -> Contents:
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()

  def close(self) -> None:
    """Stops the server and deletes the copy."""
    self._resources.close()

  def read(self, table: str) -> Iterator[tuple[Item, list[np.ndarray]]]:
    """Yields each item of a table, the oldest first, with its arrays; works only once per table.

    Args:
      table: name of the table.

    Yields:
      The item, and the columns of its sequence, [1, ...] each.
    """
    items = {item.key: item for item in self.items[table]}
    samples = iter(self._client.sample(table, len(items), emit_timesteps=False) if items else ())
    for _ in range(len(items)):
      with _quiet():  # Reverb logs at the first
        sample = next(samples)
      yield items[sample.info.key], list(sample.data)

  def _stop(self) -> None:
    with _quiet():
      self._server.stop()


@contextlib.contextmanager
def _copy_folder(directory: str) -> Iterator[str]:
  """Makes a folder for a copy, next to the original if its folder is writable, so that links suffice.

  The owner holds a lock on the folder. A folder without a lock was left by a killed process, and is
  deleted.
  """
  if not os.access(directory, os.W_OK):
    with tempfile.TemporaryDirectory(prefix=_COPY) as target:
      yield target
    return
  with contextlib.ExitStack() as stack:
    with _locked(directory):  # so that no other process deletes a folder before it is locked
      for name in os.listdir(directory):
        if name.startswith(_COPY):
          path = os.path.join(directory, name)
          with contextlib.suppress(OSError), _locked(path, wait=False):
            shutil.rmtree(path)
      target = stack.enter_context(tempfile.TemporaryDirectory(prefix=_COPY, dir=directory))
      stack.enter_context(_locked(target))
    yield target


@contextlib.contextmanager
def _locked(folder: str, *, wait: bool = True) -> Iterator[None]:
  """Locks a folder; with `wait=False` raises OSError if another process holds the lock."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks: continue without one
      if not wait:
        raise
    yield
  finally:
    os.close(descriptor)


def digest(columns: list[np.ndarray]) -> bytes:
  """Hash of a sequence's content, 16 bytes; equal for equal sequences.

  Args:
    columns: the arrays of one sequence, [1, ...] each: a batch of one.
  """
  hashed = hashlib.blake2b(digest_size=16)
  for column in columns:
    hashed.update(np.ascontiguousarray(column).view(np.uint8).data)
  return hashed.digest()


def faults(
  contents: Contents, digests: Mapping[str, list[bytes]], restarts: Sequence[float] = ()
) -> list[Fault]:
  """Finds inconsistencies between strata: smaller ones must share the newest sequences of the largest.

  Tables are saved one after the other, and sequences written meanwhile may be in only one. These
  are no fault. They are at the end of a writer's stream, or within it if the server was restarted
  from that checkpoint.

  Args:
    contents: the copy of a checkpoint.
    digests: by stratum, `digest` of each item's sequence in the order of `contents.items`. Two
      sequences with the same digest count as one stored twice, so sequences must have a random field.
    restarts: times at which a server was started, unix seconds.

  Returns:
    The faults; [] if the strata are consistent.
  """
  strata = [name for name in contents.items if name != tables.PARAMS]
  if not strata:
    return []
  largest = max(reversed(strata), key=contents.max_sizes.__getitem__)
  found: list[Fault] = []
  known: dict[bytes, tuple[str, Item]] = {}
  again: set[int] = set()
  for name in [largest, *(name for name in strata if name != largest)]:
    for item, content in zip(contents.items[name], digests[name], strict=True):
      other_name, other = known.setdefault(content, (name, item))
      same = other is not item and name == other_name
      if same or other.chunks != item.chunks:
        again.add(item.key)
        how = 'is there twice' if same else 'is stored twice'
        found.append(Fault(name, item.key, f'{how}: key {other.key} of {other_name} is the same'))
  for name in strata:
    if name != largest:
      found += _compare(contents, name, largest, again, restarts)
  return found


def _compare(
  contents: Contents, small: str, large: str, reported: set[int], restarts: Sequence[float]
) -> Iterator[Fault]:
  """Differences between a stratum and the newest items of a larger one, writer by writer."""
  ours, theirs = contents.items[small], contents.items[large]
  our_chunks, their_chunks = ({item.chunks for item in items} for items in (ours, theirs))
  is_full = len(theirs) >= contents.max_sizes[large]
  oldest = min((item.inserted for item in ours), default=0.0)
  our_streams, their_streams = _streams(ours), _streams(theirs)
  for writer in our_streams.keys() | their_streams.keys():
    our, their = our_streams.get(writer, []), their_streams.get(writer, [])
    times = [item.inserted for item in (*our, *their)]
    allowed = IN_BETWEEN * sum(min(times) < restart < max(times) for restart in restarts)

    absent = [item for item in our if item.chunks not in their_chunks and item.key not in reported]
    first, last = _ends(their)
    late = [item for item in absent if item.position > last]
    inside = [item for item in absent if first < item.position < last]
    early = [item for item in absent if item.position < first]  # a full table has dropped them
    missing = _if_more(inside, allowed) + _if_more(late, IN_BETWEEN) + ([] if is_full else early)
    for item in missing:
      yield Fault(small, item.key, f'is not in {large}')

    absent = [item for item in their if item.chunks not in our_chunks]
    first, last = _ends(our)
    late = [item for item in absent if item.position > last and item.inserted > oldest]
    inside = [item for item in absent if first < item.position < last]
    missing = _if_more(inside, allowed) + _if_more(late, IN_BETWEEN)
    if missing:
      yield Fault(
        small, None,
        f'lacks {len(missing):,} of {large} that are newer than its oldest, such as key '
        f'{missing[0].key}',
      )  # fmt: skip


def _ends(stream: list[Item]) -> tuple[float, float]:
  """First and last position in a stream; minus infinity if it is empty."""
  return (stream[0].position, stream[-1].position) if stream else (-math.inf, -math.inf)


def _if_more(items: list[Item], allowed: int) -> list[Item]:
  return items if len(items) > allowed else []


def _streams(items: list[Item]) -> dict[int, list[Item]]:
  streams = defaultdict(list)
  for item in sorted(items, key=lambda item: item.position):
    streams[item.writer].append(item)
  return streams


def _records(path: str) -> Iterator[bytes]:
  for batch in tf.data.TFRecordDataset(path, 'ZLIB').batch(_RECORDS):
    yield from batch.numpy()


def _reset_items(folder: str) -> dict[str, list[Item]]:
  """Resets items' sample counts, so that each is removed at its first sample; returns them by table."""
  ranges = {}
  for record in _records(os.path.join(folder, 'chunks.tfrecord')):
    chunk = schema_pb2.ChunkData.FromString(record)
    ranges[chunk.chunk_key] = (chunk.sequence_range.episode_id, chunk.sequence_range.start)
  items: dict[str, list[Item]] = {}

  def read(record: bytes) -> bytes:
    item = schema_pb2.PrioritizedItem.FromString(record)
    chunks = tuple(
      piece.chunk_key for column in item.flat_trajectory.columns for piece in column.chunk_slices
    )
    writer, position = ranges[chunks[0]]
    items.setdefault(item.table, []).append(
      Item(
        item.key, chunks, item.times_sampled, item.inserted_at.ToNanoseconds() * 1e-9, writer,
        position,
      )
    )  # fmt: skip
    item.times_sampled = 0
    return item.SerializeToString()

  _rewrite(os.path.join(folder, 'items.tfrecord'), read)
  return items


def _make_queues(folder: str) -> dict[str, int]:
  """Makes each table a queue without a rate limiter; returns their capacities by name."""
  max_sizes: dict[str, int] = {}

  def read(record: bytes) -> bytes:
    table = checkpoint_pb2.PriorityTableCheckpoint.FromString(record)
    max_sizes[table.table_name] = table.max_size
    table.max_times_sampled = 1
    table.sampler.Clear()
    table.sampler.fifo = True
    table.rate_limiter.min_size_to_sample = 1
    table.rate_limiter.min_diff = -sys.float_info.max
    table.rate_limiter.max_diff = sys.float_info.max
    return table.SerializeToString()

  _rewrite(os.path.join(folder, 'tables.tfrecord'), read)
  return max_sizes


def _rewrite(path: str, change: Callable[[bytes], bytes]) -> None:
  """Rewrites the records of a file into a new one, which leaves the linked original unchanged."""
  changed = f'{path}.changed'
  with tf.io.TFRecordWriter(changed, 'ZLIB') as file:
    for record in _records(path):
      file.write(change(record))
  os.replace(changed, path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Discards stderr, to which Reverb logs each hundred records without an option to disable it."""
  sys.stderr.flush()
  kept = os.dup(2)
  with open(os.devnull, 'wb') as nowhere:
    os.dup2(nowhere.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
