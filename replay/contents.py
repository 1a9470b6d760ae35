"""Contents of replay, sequence by sequence, read from the files of its newest checkpoint.

Sampling a running server's table would change its counters and its rate limiter, and so the run.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import cramjam
import numpy as np
import tensorflow as tf
from reverb import reverb_types
from reverb.cc import schema_pb2
from reverb.cc.checkpointing import checkpoint_pb2

from hephaestus.replay import checkpoint, tables

# Sequences that a writer may have inserted into one table and not yet into the other: those not yet
# confirmed, and those inserted after one table is saved and before the next.
IN_BETWEEN = 64
_RECORDS = 1024  # read at once


class Item(NamedTuple):
  """One table's reference to a sequence.

  Attributes:
    key: Reverb's key of the reference.
    chunks: keys of the chunks that hold the sequence's data, one per column. Items of several tables
      have equal keys where they share the stored sequence.
    inserted: time of the insert, unix seconds.
    writer: ID of the stream in which it was written, one for each connection of an actor.
    position: position in that stream, from 0.
  """

  key: int
  chunks: tuple[int, ...]
  inserted: float
  writer: int
  position: int


class Fault(NamedTuple):
  """An inconsistency between strata: of a table, and of one item or (None) of the table as a whole."""

  table: str
  key: int | None
  text: str


def counts(directory: str) -> tuple[float, dict[str, dict[str, int]]] | None:
  """Reads the counters, and no sequence, of the newest checkpoint whose tables can be read.

  Args:
    directory: folder of the run's replay, as given to `checkpoint.checkpointer`.

  Returns:
    Unix seconds at which the checkpoint was complete, and for each table the sequences that it has of
    'size' and 'max_size', and those ever 'inserted', 'sampled' (samples) and 'unique_sampled'; None
    without such a checkpoint.
  """
  for folder in checkpoint.complete(directory):
    try:
      saved = os.path.getmtime(os.path.join(folder, 'DONE'))
      return saved, {
        table.table_name: {
          'size': table.rate_limiter.insert_count - table.rate_limiter.delete_count,
          'max_size': table.max_size,
          'inserted': table.rate_limiter.insert_count,
          'sampled': table.rate_limiter.sample_count,
          'unique_sampled': table.num_unique_samples,
        }
        for table in _tables(folder)
      }
    except Exception:  # broken, or replaced by a newer one meanwhile
      continue
  return None


class Contents:
  """The newest whole checkpoint, read into memory.

  Attributes:
    saved: time at which the checkpoint was complete, unix seconds.
    broken: a message for each newer checkpoint that is broken.
    items: items of each table, the oldest first, by its name.
    max_sizes: capacity of each table in sequences, by its name.
    signatures: Reverb's signature of each table, by its name; None for a table without one.
  """

  def __init__(self, directory: str):
    """Reads the checkpoint, whose chunks stay compressed; a server may be running.

    Args:
      directory: folder of the run's replay, as given to `checkpoint.checkpointer`.

    Raises:
      FileNotFoundError: there is no whole checkpoint.
    """
    broken: dict[str, None] = {}  # two places may hold the same
    for folder in checkpoint.complete(directory):
      try:
        fault = checkpoint.fault(folder)
        if not fault:
          self._read(folder)
          self.broken = list(broken)
          return
      except (OSError, tf.errors.NotFoundError):
        continue  # a newer one has taken its place
      except Exception as error:  # whatever records of somebody else make their parsers raise
        fault = _reason(error)
      if os.path.exists(folder):
        broken[f'checkpoint {os.path.basename(folder)} is broken ({fault})'] = None
    raise FileNotFoundError('; '.join([f'no whole checkpoint in {directory}', *broken]))

  def _read(self, folder: str) -> None:
    self.saved = os.path.getmtime(os.path.join(folder, 'DONE'))
    saved_tables = _tables(folder)
    self.max_sizes = {table.table_name: table.max_size for table in saved_tables}
    self.signatures = {table.table_name: _signature(table) for table in saved_tables}
    self.items: dict[str, list[Item]] = {name: [] for name in self.max_sizes}
    self._chunks: dict[int, bytes] = {}
    self._columns: dict[int, Sequence[schema_pb2.FlatTrajectory.Column]] = {}
    ranges = {}
    for record in _records(folder, 'chunks'):
      chunk = schema_pb2.ChunkData.FromString(record)
      self._chunks[chunk.chunk_key] = record
      ranges[chunk.chunk_key] = (chunk.sequence_range.episode_id, chunk.sequence_range.start)
    for record in _records(folder, 'items'):
      item = schema_pb2.PrioritizedItem.FromString(record)
      columns = self._columns[item.key] = item.flat_trajectory.columns
      keys = tuple(piece.chunk_key for column in columns for piece in column.chunk_slices)
      inserted = item.inserted_at.ToNanoseconds() * 1e-9
      self.items[item.table].append(Item(item.key, keys, inserted, *ranges[keys[0]]))

  def read(self, table: str) -> Iterator[tuple[Item, list[np.ndarray]]]:
    """Yields each item of a table, the oldest first, with the columns of its sequence, [1, ...] each.

    ValueError, which names the item, if it is broken.
    """
    for item in self.items[table]:
      try:
        columns = [
          np.concatenate(list(map(self._steps, each.chunk_slices)))
          for each in self._columns[item.key]
        ]
      except Exception as error:  # as in the constructor
        raise ValueError(
          f'replay: key {item.key} of table {table} is broken ({_reason(error)})'
        ) from None
      yield item, columns

  def _steps(self, piece: schema_pb2.FlatTrajectory.ChunkSlice) -> np.ndarray:
    """[length, ...] the steps of a column in one of its chunks."""
    chunk = schema_pb2.ChunkData.FromString(self._chunks[piece.chunk_key])
    assert not chunk.delta_encoded  # by `writer.Writer`
    tensor = chunk.data.tensors[piece.index]
    dtype = tf.dtypes.as_dtype(tensor.dtype).as_numpy_dtype
    shape = [axis.size for axis in tensor.tensor_shape.dim]
    values = _decompress(tensor.tensor_content).view(dtype).reshape(shape)
    return values[piece.offset : piece.offset + piece.length]


def digest(columns: list[np.ndarray]) -> bytes:
  """Hash of the columns of a sequence, [1, ...] each: 16 bytes, equal for equal sequences."""
  hashed = hashlib.blake2b(digest_size=16)
  for column in columns:
    hashed.update(np.ascontiguousarray(column).view(np.uint8).data)
  return hashed.digest()


def faults(
  contents: Contents, digests: Mapping[str, list[bytes]], restarts: Sequence[float] = ()
) -> list[Fault]:
  """Finds inconsistencies between strata: smaller ones must share the newest sequences of the largest.

  Tables are saved one after the other, and sequences written meanwhile may be in only one. These
  are no fault. They are at the end of a writer's stream, or also at its beginning or within it if the
  server was restarted from that checkpoint.

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
  oldest = min((item.inserted for item in contents.items[small]), default=0.0)
  is_full = len(contents.items[large]) >= contents.max_sizes[large]
  our_streams, their_streams = _streams(contents.items[small]), _streams(contents.items[large])
  for writer in our_streams.keys() | their_streams.keys():
    ours, theirs = our_streams.get(writer, []), their_streams.get(writer, [])
    times = [item.inserted for item in (*ours, *theirs)]
    allowed = IN_BETWEEN * sum(min(times) < restart < max(times) for restart in restarts)
    early, missing = _absent([item for item in ours if item.key not in reported], theirs, allowed)
    # A full table has dropped the early ones; of another they are those before a restart.
    for item in missing if is_full or len(early) <= allowed else early + missing:
      yield Fault(small, item.key, f'is not in {large}')
    if not ours:  # tables insert at times of their own, so positions say more, where there are any
      theirs = [item for item in theirs if item.inserted > oldest]
    _, missing = _absent(theirs, ours, allowed)
    if missing:
      yield Fault(
        small, None,
        f'lacks {len(missing):,} of {large} that are newer than its oldest, such as key '
        f'{missing[0].key}',
      )  # fmt: skip


def _absent(stream: list[Item], other: list[Item], allowed: int) -> tuple[list[Item], list[Item]]:
  """Items that a writer's stream in another table lacks: before its first, and too many later ones.

  Args:
    stream: items in one table.
    other: the stream of the same writer in the other table.
    allowed: number of items that may be absent between its first and its last.
  """
  chunks = {item.chunks for item in other}
  absent = [item for item in stream if item.chunks not in chunks]
  first, last = (other[0].position, other[-1].position) if other else (-math.inf, -math.inf)
  inside = [item for item in absent if first < item.position < last]
  late = [item for item in absent if item.position > last]
  missing = (inside if len(inside) > allowed else []) + (late if len(late) > IN_BETWEEN else [])
  return [item for item in absent if item.position < first], missing


def _streams(items: list[Item]) -> dict[int, list[Item]]:
  streams = defaultdict(list)
  for item in sorted(items, key=lambda item: item.position):
    streams[item.writer].append(item)
  return streams


def _records(folder: str, name: str) -> Iterator[bytes]:
  records = tf.data.TFRecordDataset(f'{folder}/{name}.tfrecord', 'ZLIB').batch(_RECORDS)
  options = tf.data.Options()
  options.autotune.enabled = False  # it logs a warning where it is cancelled by the end of the file
  for batch in records.with_options(options):
    yield from batch.numpy()


def _tables(folder: str) -> list[checkpoint_pb2.PriorityTableCheckpoint]:
  return list(map(checkpoint_pb2.PriorityTableCheckpoint.FromString, _records(folder, 'tables')))


def _signature(
  table: checkpoint_pb2.PriorityTableCheckpoint,
) -> Mapping[str, tf.TensorSpec] | None:
  if not table.HasField('signature'):
    return None
  info = schema_pb2.TableInfo(signature=table.signature)
  return reverb_types.TableInfo.from_serialized_proto(info.SerializeToString()).signature


def _reason(error: Exception) -> str:
  return f'{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ""}'


def _decompress(block: bytes) -> np.ndarray:
  """[size] uint8, the content of a block of Snappy, in which Reverb stores arrays; ValueError if damaged."""
  try:
    return np.frombuffer(cramjam.snappy.decompress_raw(block), np.uint8)
  except cramjam.DecompressionError:
    raise ValueError('replay: a chunk of a checkpoint cannot be decompressed') from None
