"""What replay holds, sequence by sequence, read from its newest checkpoint.

To sample a running server's table is to change it: its counters, its limiter, and so the run. So
this takes a copy of the newest checkpoint, and a server of its own to decode it. In the copy every
table gives each item once, the oldest first, and holds nobody back.
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

from hephaestus.replay import checkpoint, tables

# Sequences that a writer may have put into one table and not yet into the other: those it has not
# seen confirmed, and what comes between the moments at which two tables are saved.
IN_BETWEEN = 64
_RECORDS = 1024  # read at once
_COPY = '.copy-'


class Item(NamedTuple):
  """One table's reference to a sequence.

  Attributes:
    key: Reverb's, of the reference.
    chunks: keys of what is stored, a column each; equal where two items share it.
    times_sampled: from this table.
    inserted: unix seconds.
    writer: the stream it came in, one for each connection of an actor.
    position: in that stream, from 0 on.
  """

  key: int
  chunks: tuple[int, ...]
  times_sampled: int
  inserted: float
  writer: int
  position: int


class Fault(NamedTuple):
  """What should not be.

  Attributes:
    table: where.
    key: of the item; None where none is meant.
    text: what is wrong with it.
  """

  table: str
  key: int | None
  text: str


class Contents:
  """A copy of the newest checkpoint.

  Attributes:
    saved: unix seconds at which it was finished.
    broken: what is wrong with newer ones.
    items: by table, the oldest first.
    max_sizes: sequences that each table can hold.
    signatures: what each table says that it stores; None where it says nothing.
  """

  def __init__(self, directory: str):
    """Copies, and starts the server; close it when done.

    It takes as much memory as the server that wrote the checkpoint, in this process.

    Args:
      directory: of the run's replay, as given to `checkpoint.checkpointer`.

    Raises:
      FileNotFoundError: there is no whole checkpoint.
    """
    with contextlib.ExitStack() as stack:
      target = stack.enter_context(_place(directory))
      folder, self.broken = checkpoint.copy(directory, target)
      if folder is None:
        raise FileNotFoundError('; '.join([f'no whole checkpoint in {directory}', *self.broken]))
      self.saved = os.path.getmtime(os.path.join(folder, 'DONE'))
      self.items = _loosen_items(folder)
      self.max_sizes = _loosen_tables(folder)
      self.items = {name: self.items.get(name, []) for name in self.max_sizes}
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
    """Each item of a table, the oldest first, with its columns [1, ...]; only once.

    Args:
      table: its name.
    """
    items = {item.key: item for item in self.items[table]}
    samples = iter(self._client.sample(table, len(items), emit_timesteps=False) if items else ())
    for _ in range(len(items)):
      with _quiet():  # of the first
        sample = next(samples)
      yield items[sample.info.key], list(sample.data)

  def _stop(self) -> None:
    with _quiet():
      self._server.stop()


@contextlib.contextmanager
def _place(directory: str) -> Iterator[str]:
  """A folder for a copy; beside the original where that can be, so that the copy is of links.

  Its owner holds a lock on it, so that those whose owners were killed are known, and deleted.
  """
  if not os.access(directory, os.W_OK):
    with tempfile.TemporaryDirectory(prefix=_COPY) as target:
      yield target
    return
  with contextlib.ExitStack() as stack:
    with _locked(directory):  # lest another take a new one for an old one
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
  """Holds a folder; OSError where another process does, and it is not waited for."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks is no reason not to look
      if not wait:
        raise
    yield
  finally:
    os.close(descriptor)


def digest(columns: list[np.ndarray]) -> bytes:
  """[16] of what a sequence is; equal for equal ones."""
  hashed = hashlib.blake2b(digest_size=16)
  for column in columns:
    hashed.update(np.ascontiguousarray(column).view(np.uint8).data)
  return hashed.digest()


def faults(
  contents: Contents, digests: Mapping[str, list[bytes]], restarts: Sequence[float] = ()
) -> list[Fault]:
  """Where the strata disagree: the small ones must hold the newest of the largest, stored once.

  No fault is what was being written while tables were saved one after the other: it is missing at
  the end of a writer's stream, or in its midst once the server was restarted with what was saved.

  Args:
    contents: of a checkpoint.
    digests: of each stratum's items, in their order; sequences are taken to be all different, as
      those with something random in them are.
    restarts: unix seconds at which a server was started.
  """
  strata = [name for name in contents.items if name != tables.PARAMS]
  if not strata:
    return []
  largest = max(reversed(strata), key=contents.max_sizes.__getitem__)
  found: list[Fault] = []
  seen: dict[bytes, tuple[str, Item]] = {}
  again: set[int] = set()
  for name in [largest, *(name for name in strata if name != largest)]:
    for item, what in zip(contents.items[name], digests[name], strict=True):
      other_name, other = seen.setdefault(what, (name, item))
      same = other is not item and name == other_name
      if same or other.chunks != item.chunks:
        again.add(item.key)
        how = 'is there twice' if same else 'is stored twice'
        found.append(Fault(name, item.key, f'{how}: key {other.key} of {other_name} is the same'))
  for name in strata:
    if name != largest:
      found += _against(contents, name, largest, again, restarts)
  return found


def _against(
  contents: Contents, small: str, large: str, known: set[int], restarts: Sequence[float]
) -> Iterator[Fault]:
  """Where a stratum holds other than the newest of a larger one, writer by writer."""
  ours, theirs = contents.items[small], contents.items[large]
  our_chunks, their_chunks = ({item.chunks for item in items} for items in (ours, theirs))
  is_full = len(theirs) >= contents.max_sizes[large]
  oldest = min((item.inserted for item in ours), default=0.0)
  our_streams, their_streams = _streams(ours), _streams(theirs)
  for writer in our_streams.keys() | their_streams.keys():
    our, their = our_streams.get(writer, []), their_streams.get(writer, [])
    times = [item.inserted for item in (*our, *their)]
    allowed = IN_BETWEEN * sum(min(times) < restart < max(times) for restart in restarts)

    absent = [item for item in our if item.chunks not in their_chunks and item.key not in known]
    first, last = _ends(their)
    late = [item for item in absent if item.position > last]
    inside = [item for item in absent if first < item.position < last]
    early = [item for item in absent if item.position < first]  # a full table has dropped them
    missing = _unless(inside, allowed) + _unless(late, IN_BETWEEN) + ([] if is_full else early)
    for item in missing:
      yield Fault(small, item.key, f'is not in {large}')

    absent = [item for item in their if item.chunks not in our_chunks]
    first, last = _ends(our)
    late = [item for item in absent if item.position > last and item.inserted > oldest]
    inside = [item for item in absent if first < item.position < last]
    missing = _unless(inside, allowed) + _unless(late, IN_BETWEEN)
    if missing:
      yield Fault(
        small, None,
        f'lacks {len(missing):,} of {large} that are newer than its oldest, such as key '
        f'{missing[0].key}',
      )  # fmt: skip


def _ends(stream: list[Item]) -> tuple[float, float]:
  """First and last position; an empty stream ends before all others begin."""
  return (stream[0].position, stream[-1].position) if stream else (-math.inf, -math.inf)


def _unless(items: list[Item], few: int) -> list[Item]:
  return items if len(items) > few else []


def _streams(items: list[Item]) -> dict[int, list[Item]]:
  streams = defaultdict(list)
  for item in sorted(items, key=lambda item: item.position):
    streams[item.writer].append(item)
  return streams


def _records(path: str) -> Iterator[bytes]:
  for batch in tf.data.TFRecordDataset(path, 'ZLIB').batch(_RECORDS):
    yield from batch.numpy()


def _loosen_items(folder: str) -> dict[str, list[Item]]:
  """Makes each item one that was never sampled, so that it leaves when it is."""
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


def _loosen_tables(folder: str) -> dict[str, int]:
  """Makes each table a queue without a limit, and tells what it could hold."""
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
  """Replaces the file, and not what its link shares with the original."""
  changed = f'{path}.changed'
  with tf.io.TFRecordWriter(changed, 'ZLIB') as file:
    for record in _records(path):
      file.write(change(record))
  os.replace(changed, path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Reverb tells of each hundred records, past every switch."""
  sys.stderr.flush()
  kept = os.dup(2)
  with open(os.devnull, 'wb') as nowhere:
    os.dup2(nowhere.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
