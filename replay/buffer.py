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

from hephaestus.replay import inspector, tables

Tree = Any


class ReplaySizes(NamedTuple):
  """Sizes and replay ratio of a replay in device memory, over all devices together.

  Attributes:
    sizes: [B] int32, for each of the B sequences of a batch the size of its stratum, see `sample`.
    strata: size of each stratum in sequences, by name.
    capacity: largest number of sequences stored.
    warm_up: number of sequences stored before the first update; they allow no update.
    rate: number of updates that each sequence after warm-up allows.
  """

  sizes: np.ndarray
  strata: Mapping[str, int]
  capacity: int
  warm_up: int
  rate: fractions.Fraction

  def updates(self, sequences: int) -> int:
    """Total number of updates allowed once `sequences` were added in all, warm-up included."""
    return math.floor(max(0, sequences - self.warm_up) * self.rate)


class Buffer(NamedTuple):
  """The newest C sequences; sequence i of all that were added lies in slot i mod C.

  Attributes:
    storage: tree of arrays [C, ...].
    inserted: [] int32, number of sequences added so far.
  """

  storage: Tree
  inserted: Any


def init(schema: Tree, capacity: int) -> Buffer:
  """Makes an empty buffer of C = `capacity` slots for sequences of a schema of jax.ShapeDtypeStruct."""
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
  """Samples a batch uniformly, with replacement.

  Args:
    buffer: the buffer, with at least one sequence.
    key: PRNG key.
    sizes: [B] int32, at most the capacity C; sample j is one of the newest `sizes[j]` sequences, or
      of all of them while there are fewer.

  Returns:
    [B, ...] sequences.
  """
  age = jax.random.randint(key, sizes.shape, 0, jnp.minimum(sizes, buffer.inserted))
  slots = (buffer.inserted - 1 - age) % _length(buffer.storage)
  return jax.tree.map(lambda stored: stored.at[slots].get(mode='promise_in_bounds'), buffer.storage)


def newest(inserted: int, capacity: int, size: int) -> np.ndarray:
  """Slots of the newest `size` sequences of `inserted`, [n] int, the oldest first; fewer if there are."""
  first = max(0, inserted - min(size, capacity))
  return np.arange(first, inserted) % max(1, capacity)


def gather(parts: Sequence[Buffer]) -> Buffer:
  """Joins the buffers of all devices to one on the host, without empty slots.

  Args:
    parts: the buffer of each device. All hold equally many sequences: the first ones of each unroll
      were added on the first device, and so on.

  Returns:
    A copy with storage [n, ...] of all n sequences, in which sequences of the same slot are adjacent; and `inserted`
    summed over the devices.
  """
  inserted = int(parts[0].inserted)
  count = min(inserted, _length(parts[0].storage))

  def join(*leaves: jax.Array) -> np.ndarray:
    stacked = np.stack([np.asarray(x)[:count] for x in leaves], axis=1)
    return stacked.reshape(count * len(leaves), *leaves[0].shape[1:])

  storage = jax.tree.map(join, *(part.storage for part in parts))
  return Buffer(storage, np.asarray(inserted * len(parts), np.int32))


def scatter(saved: Buffer, capacity: int, num_devices: int) -> Buffer:
  """Splits a buffer over devices: the inverse of `gather`, also for other devices or capacity.

  Args:
    saved: result of `gather`.
    capacity: C, slots of all devices together; the oldest sequences are dropped if there are more.
    num_devices: D, which divides the number of sequences kept.

  Returns:
    A buffer of host arrays: storage [D, n / D, ...], each device's part of the n sequences kept,
    without empty slots; and `inserted`, [D] int32. If more fit than are stored, newer ones fill the
    slots of sequences that were dropped before, because `sample` reads every slot up to `inserted`.
  """
  inserted, count = int(saved.inserted), _length(saved.storage)
  newest = np.arange(inserted - min(inserted, capacity), inserted)
  order = np.empty_like(newest)
  order[newest % max(1, len(newest))] = newest % max(1, count)

  def split(x: np.ndarray) -> np.ndarray:
    parts = x[order].reshape(len(order) // num_devices, num_devices, *x.shape[1:])
    return np.swapaxes(parts, 0, 1)

  storage = jax.tree.map(split, saved.storage)
  return Buffer(storage, np.full(num_devices, inserted // num_devices, np.int32))


def pad(part: Buffer, capacity: int) -> Buffer:
  """Extends one device's part of `scatter`, storage [n, ...], to a buffer of `capacity` slots."""
  grow = lambda x: jnp.zeros((capacity, *x.shape[1:]), x.dtype).at[: len(x)].set(x)
  return Buffer(jax.tree.map(grow, part.storage), part.inserted)


class Saved(NamedTuple):
  """A replay in device memory as a checkpoint has it, inspected like Reverb's tables: an `inspector.Source`.

  Attributes:
    config: config of replay.
    inserted: number of sequences added so far, over all devices.
    versions: [n] learner step of the parameters that collected each stored sequence, by slot.
    learner_step: learner step of the checkpoint.
    batch_size: number of sequences in a batch, over all devices.
  """

  config: tables.ReplayConfig
  inserted: int
  versions: np.ndarray
  learner_step: int
  batch_size: int

  def poll(self) -> dict[str, Any]:
    """As `Inspector.poll`, and 'ages': quantiles of the ages of each stratum in updates, by its name."""
    counts = tables.batch_counts(self.config.strata, self.batch_size)
    shown, ages = {}, {}
    for each in self.config.strata:
      slots = newest(self.inserted, len(self.versions), each.max_size)
      ages[each.name] = inspector.quantiles(self.learner_step - self.versions[slots])
      sampled = self.learner_step * counts[each.name]
      shown[each.name] = {
        'size': len(slots), 'max_size': each.max_size,
        'inserted': self.inserted, 'sampled': sampled, 'share': each.share,
      }  # fmt: skip
    return inspector.of_counts([shown], self.config) | {'ages': ages}


def batch_sizes(config: tables.ReplayConfig, batch_size: int) -> np.ndarray:
  """[B] int32, the size of the stratum that each sequence of a batch is sampled from."""
  strata = tables.batch_strata(config.strata, batch_size)
  return np.array([config.strata[index].max_size for index in strata], np.int32)


def updates_per_sequence(config: tables.ReplayConfig, batch_size: int) -> fractions.Fraction:
  """Number of updates for each sequence added after warm-up: replay ratio / batch size, as a fraction.

  A sequence of T time steps counts as T - 1 steps when collected and when replayed, so T cancels.
  """
  return fractions.Fraction(config.replay_ratio).limit_denominator(1000) / batch_size


def _length(tree: Tree) -> int:
  return jax.tree.leaves(tree)[0].shape[0]
