"""Replay in device memory: one ring of sequences for all strata, as pure functions.

A stratum of size n holds the newest n sequences, so strata share one ring. flashbax's buffers sample
all that they store, so each stratum would need a copy of its own.
"""

import fractions
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.replay import tables

Tree = Any


class Replay(NamedTuple):
  """Numbers of a replay in device memory, on all devices together.

  Attributes:
    sizes: [B], of the stratum of each sequence of a batch, see `sample`.
    strata: name and size of each.
    capacity: sequences stored.
    warm_up: sequences stored before the first update; they allow none.
    rate: updates that each later sequence allows.
  """

  sizes: np.ndarray
  strata: Mapping[str, int]
  capacity: int
  warm_up: int
  rate: fractions.Fraction

  def updates(self, sequences: int) -> int:
    """Updates that so many sequences allow in all."""
    return math.floor(max(0, sequences - self.warm_up) * self.rate)


class Buffer(NamedTuple):
  """The newest C sequences; sequence i of all that were added lies in slot i mod C.

  Attributes:
    storage: tree of [C, ...].
    inserted: [] int32, sequences added so far.
  """

  storage: Tree
  inserted: Any


def init(schema: Tree, capacity: int) -> Buffer:
  """An empty buffer.

  Args:
    schema: tree of jax.ShapeDtypeStruct of one sequence.
    capacity: C.
  """
  storage = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), schema)
  return Buffer(storage, jnp.zeros((), jnp.int32))


def add(buffer: Buffer, sequences: Tree) -> Buffer:
  """Adds [N, ...] sequences in place of the oldest; N is at most C."""
  capacity, count = _length(buffer.storage), _length(sequences)
  slots = (buffer.inserted + jnp.arange(count)) % capacity
  storage = jax.tree.map(
    lambda stored, new: stored.at[slots].set(new, unique_indices=True, mode='promise_in_bounds'),
    buffer.storage,
    sequences,
  )
  return Buffer(storage, buffer.inserted + count)


def sample(buffer: Buffer, key: chex.PRNGKey, sizes: jax.Array) -> Tree:
  """A batch of uniform samples with replacement.

  Args:
    buffer: holds at least one sequence.
    key: for the samples.
    sizes: [B] int32, at most the capacity C; sample j is one of the newest `sizes[j]` sequences, or
      of all of them while there are fewer.

  Returns:
    [B, ...] sequences.
  """
  age = jax.random.randint(key, sizes.shape, 0, jnp.minimum(sizes, buffer.inserted))
  slots = (buffer.inserted - 1 - age) % _length(buffer.storage)
  return jax.tree.map(lambda stored: stored.at[slots].get(mode='promise_in_bounds'), buffer.storage)


def newest(inserted: int, capacity: int, size: int) -> np.ndarray:
  """[n] slots of the newest `size` sequences, or of all while there are fewer; the oldest comes first."""
  first = max(0, inserted - min(size, capacity))
  return np.arange(first, inserted) % max(1, capacity)


def gather(parts: Sequence[Buffer]) -> Buffer:
  """A copy on the host of all slots that hold sequences.

  Args:
    parts: one of each device, which got equally many of all sequences: the first ones of each `add`
      went to the first device, and so on.

  Returns:
    [n, ...] of one buffer, where sequences that were added together lie together.
  """
  inserted = int(parts[0].inserted)
  count = min(inserted, _length(parts[0].storage))

  def join(*leaves: jax.Array) -> np.ndarray:
    stacked = np.stack([np.asarray(x)[:count] for x in leaves], axis=1)
    return stacked.reshape(count * len(leaves), *leaves[0].shape[1:])

  storage = jax.tree.map(join, *(part.storage for part in parts))
  return Buffer(storage, np.asarray(inserted * len(parts), np.int32))


def scatter(saved: Buffer, capacity: int, num_devices: int) -> Buffer:
  """The inverse of `gather`, for devices and a capacity that may be others.

  Args:
    saved: of `gather`.
    capacity: C, of all devices; the oldest sequences are dropped where there are more.
    num_devices: D.

  Returns:
    [D, n / D, ...] filled slots of each device, and `inserted` [D], on the host.
  """
  inserted, count = int(saved.inserted), _length(saved.storage)
  newest = np.arange(inserted - min(count, capacity), inserted)
  order = np.empty_like(newest)
  order[newest % max(1, len(newest))] = newest % max(1, count)

  def split(x: np.ndarray) -> np.ndarray:
    parts = x[order].reshape(len(order) // num_devices, num_devices, *x.shape[1:])
    return np.swapaxes(parts, 0, 1)

  storage = jax.tree.map(split, saved.storage)
  return Buffer(storage, np.full(num_devices, inserted // num_devices, np.int32))


def pad(part: Buffer, capacity: int) -> Buffer:
  """The buffer of one device from its filled slots [n, ...]."""
  grow = lambda x: jnp.zeros((capacity, *x.shape[1:]), x.dtype).at[: len(x)].set(x)
  return Buffer(jax.tree.map(grow, part.storage), part.inserted)


def batch_sizes(config: tables.ReplayConfig, batch_size: int) -> np.ndarray:
  """[B] int32, the size of the stratum of each sequence of a batch."""
  strata = tables.batch_strata(config.strata, batch_size)
  return np.array([config.strata[index].max_size for index in strata], np.int32)


def updates_per_sequence(config: tables.ReplayConfig, batch_size: int) -> fractions.Fraction:
  """Updates for each sequence added after warm-up, by the replay ratio; both count T - 1 transitions."""
  return fractions.Fraction(config.replay_ratio).limit_denominator(1000) / batch_size


def _length(tree: Tree) -> int:
  return jax.tree.leaves(tree)[0].shape[0]
