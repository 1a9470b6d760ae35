"""Columns: the mapping between a tree of arrays and Reverb's flat columns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
  import reverb
  import tensorflow as tf

MOST_UPDATES = 1 << 30  # bound of counters of updates, which are int32, so that ages fit as well
# Paths of the columns that count. Any other integer, such as an agent's state, may be negative.
_COUNTERS = ('version', 'actor_id')


class Columns:
  """The flat columns of a tree of arrays, one per leaf, in the order of the tree's leaves.

  A leaf of a dtype that is not NumPy's own, such as bfloat16, is stored as unsigned integers of its
  width, bit for bit.

  Attributes:
    names: name of each column, such as '0003_observation/grid'; numbered, because Reverb sorts columns.
    paths: the names without their numbers, for messages.
    shapes: shape of each leaf of the schema.
    dtypes: dtype of each leaf of the schema.
    wire_dtypes: dtype of each column as stored in Reverb.
    nbytes: bytes of one tree, over all columns.
    digest: [32] uint8, SHA-256 of paths, shapes and dtypes.
  """

  def __init__(self, schema: Any):
    """Derives the columns from a schema.

    Args:
      schema: a tree whose leaves have `shape` and `dtype`, such as jax.ShapeDtypeStruct.

    Raises:
      ValueError: the tree has no leaves, or a leaf has an extended dtype, such as typed PRNG keys.
    """
    import jax

    leaves, treedef = jax.tree_util.tree_flatten_with_path(schema)
    self._treedef: Any = treedef
    if not leaves:
      raise ValueError('replay schema: no leaves were given; give a tree of jax.ShapeDtypeStruct')
    self.paths = tuple(jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves)
    self.names = tuple(f'{index:04d}_{path}' for index, path in enumerate(self.paths))
    self.shapes = tuple(tuple(leaf.shape) for _, leaf in leaves)
    for path, (_, leaf) in zip(self.paths, leaves, strict=True):
      if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(
          f'replay schema: {path} has dtype {leaf.dtype}, which cannot be stored; '
          'store jax.random.key_data of it'
        )
    self.dtypes = tuple(np.dtype(leaf.dtype) for _, leaf in leaves)
    self.wire_dtypes = tuple(_wire_dtype(dtype) for dtype in self.dtypes)
    self._inexact = [
      index for index, dtype in enumerate(self.dtypes) if jax.dtypes.issubdtype(dtype, np.inexact)
    ]
    self._counters = [
      index
      for index, (path, shape, dtype) in enumerate(
        zip(self.paths, self.shapes, self.dtypes, strict=True)
      )
      if path in _COUNTERS and not shape and dtype.kind == 'i'
    ]
    each = list(zip(self.paths, self.shapes, self.dtypes, strict=True))
    self.nbytes = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in each)
    text = '\n'.join(f'{path} {shape} {dtype.name}' for path, shape, dtype in each)
    self.digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)

  def flatten(self, values: Any, *, batched: bool) -> list[np.ndarray]:
    """Flattens a tree to its columns.

    Args:
      values: a tree with the structure of the schema.
      batched: whether each leaf has one leading axis [N], of the same length in all.

    Returns:
      One array per column, in the dtype stored in Reverb.

    Raises:
      ValueError: the structure, or a shape or dtype, differs from the schema.
    """
    import jax

    leaves, treedef = jax.tree_util.tree_flatten(values)
    if treedef != self._treedef:
      raise ValueError(f'replay: a tree of {treedef} was given, the schema is {self._treedef}')
    arrays = [np.asarray(leaf, order='C') for leaf in leaves]
    if batched and not arrays[0].ndim:
      raise ValueError(f'replay: {self.paths[0]} is a scalar; give it a leading axis [N]')
    leading = arrays[0].shape[:1] if batched else ()
    for path, shape, dtype, array in zip(self.paths, self.shapes, self.dtypes, arrays, strict=True):
      if array.shape != leading + shape or array.dtype != dtype:
        raise ValueError(
          f'replay: {path} is {array.dtype.name}{list(array.shape)}, '
          f'the schema says {dtype.name}{list(leading + shape)}'
        )
    return [array.view(wire) for array, wire in zip(arrays, self.wire_dtypes, strict=True)]

  def unflatten(self, arrays: Sequence[np.ndarray]) -> Any:
    """Rebuilds the tree from its columns, with any leading axes; the leaves are views of the arrays."""
    leaves = [array.view(dtype) for array, dtype in zip(arrays, self.dtypes, strict=True)]
    return self._treedef.unflatten(leaves)

  def mismatch(self, arrays: Sequence[np.ndarray]) -> str:
    """Describes how columns of a server, [1, ...] each, differ from the schema; '' if they do not."""
    if len(arrays) != len(self.names):
      return f'{len(arrays)} columns, the schema has {len(self.names)}'
    for path, shape, dtype, array in zip(
      self.paths, self.shapes, self.wire_dtypes, arrays, strict=True
    ):
      if array.shape != (1, *shape) or array.dtype != dtype:
        return (
          f'{path} is {array.dtype.name}{list(array.shape)}, '
          f'the schema says {dtype.name}{[1, *shape]}'
        )
    return ''

  def out_of_range(self, arrays: Sequence[np.ndarray]) -> dict[int, str]:
    """Finds infinities, NaNs and impossible counters in a batch of columns, [B, ...] each.

    The counters of a sequence are its version and the number of its actor; parameters have none.

    Returns:
      A message by index b in the batch, for each index with such a value; {} if all are in range.
    """
    found = {}
    for index in self._counters:
      values = arrays[index]
      for b in np.flatnonzero((values < 0) | (values >= MOST_UPDATES)).tolist():
        found[b] = f'{self.paths[index]} is {values[b]}, out of the range of a counter'
    for index in self._inexact:
      array = arrays[index].view(self.dtypes[index])
      with np.errstate(over='ignore', invalid='ignore'):
        # A sum is finite only if its terms are, and needs no array of booleans.
        total = np.add.reduce(array, axis=tuple(range(1, array.ndim)))
      for b in np.flatnonzero(~np.isfinite(total)).tolist():
        if not np.isfinite(array[b]).all():
          found[b] = f'{self.paths[index]} is not finite'
    return found

  def signature(self) -> dict[str, tf.TensorSpec]:
    """Signature of a Reverb table, by name of column; each has a leading axis of length 1."""
    import tensorflow as tf

    return {
      name: tf.TensorSpec((1, *shape), dtype, name)
      for name, shape, dtype in zip(self.names, self.shapes, self.wire_dtypes, strict=True)
    }

  def check_tables(
    self,
    address: str,
    names: Sequence[str],
    infos: Mapping[str, reverb.reverb_types.TableInfo],
  ) -> None:
    """Checks that a server has tables of this schema; ValueError for a missing or different one."""
    for name in names:
      if name not in infos:
        raise ValueError(
          f'replay: the server at {address} has the tables {sorted(infos)}, and not {name!r}'
        )
      self.check_signature(name, infos[name].signature)

  def check_signature(self, table: str, signature: Mapping[str, tf.TensorSpec] | None) -> None:
    """Checks that a table stores this schema; ValueError if a column differs.

    Args:
      table: name of the table, for the message.
      signature: signature of the table, by name of column; None is accepted.
    """
    if signature is None:
      return
    expected = self.signature()
    for name in sorted(expected.keys() | signature.keys()):
      ours, theirs = expected.get(name), signature.get(name)
      if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(
          f'replay: table {table!r} stores {theirs or "nothing"} where the schema says '
          f'{ours or "nothing"}; a changed environment or agent needs an empty replay directory'
        )


def _wire_dtype(dtype: np.dtype) -> np.dtype:
  # `isbuiltin` is 2 for dtypes of other packages, 1 for NumPy's own, and 0 for those once unpickled.
  if dtype.isbuiltin < 2 and dtype.isnative and dtype.kind in 'biufc':
    return dtype
  return np.dtype(f'u{dtype.itemsize}')
