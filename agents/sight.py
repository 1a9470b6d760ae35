"""Sight: egocentric views of the map in an observation.

A flat network learns the neighbours of every position of a map separately. So where the spec of an
observation marks numbers as a map and a position on it, both are carried beside the belief:
observed along real sequences, decoded in imagination. Policy, value and reward read the map shifted
so that the agent is in the middle.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import observation as observation_lib


@dataclasses.dataclass(frozen=True)
class Sight:
  """Layouts of a map: as a vector, as an egocentric view, and by cells.

  The vector, `seen`, is [..., S]: the R x C cells row by row, then row and column of the agent
  over R - 1 and C - 1, all in [0, 1]. Without a map, S and the sizes of all layouts are 0.

  Attributes:
    map_shape: (R, C), or (0, 0) without a map.
    levels: L, by which cells are encoded; a cell below half a level is empty.
  """

  map_shape: tuple[int, int]
  levels: int

  @classmethod
  def of(cls, observation_spec: Any, levels: int) -> 'Sight':
    """From the spec of an observation, which has a map if it has a `map_shape`.

    Cells are encoded by levels, so without levels the map is ignored.
    """
    map_shape = getattr(observation_spec, 'map_shape', None)
    return cls(map_shape if map_shape and levels else (0, 0), levels)

  @property
  def _num_cells(self) -> int:
    return math.prod(self.map_shape)

  @property
  def size(self) -> int:
    """S."""
    return self._num_cells + 2 if self._num_cells else 0

  @property
  def view_size(self) -> int:
    """V = 2 (2 R - 1) (2 C - 1)."""
    return 2 * math.prod(2 * length - 1 for length in self.map_shape) if self.size else 0

  @property
  def location_size(self) -> int:
    """G = R + C + 1."""
    return sum(self.map_shape) + 1 if self.size else 0

  def pick(self, observation: jax.Array) -> jax.Array:
    """[..., O] numbers of an observation, the map first and the position last, to [..., S]."""
    if not self.size:
      return observation[..., :0]
    return jnp.concatenate([observation[..., : self._num_cells], observation[..., -2:]], axis=-1)

  def view(self, seen: jax.Array) -> jax.Array:
    """[..., S] to [..., V]: each cell's number, and 1 where it is filled, around the agent."""
    if not self.size:
      return seen
    rows, columns = self.map_shape
    cells, position = self._split(seen.reshape(-1, self.size))
    shown = jnp.stack([cells, self._filled(cells)], axis=-1)
    around = ((0, 0), (rows - 1, rows - 1), (columns - 1, columns - 1), (0, 0))
    window = (2 * rows - 1, 2 * columns - 1, 2)
    # On a padded map, the window that begins at the agent's position is centred on the agent.
    cut = lambda shown, position: jax.lax.dynamic_slice(shown, (*position, 0), window)
    return jax.vmap(cut)(jnp.pad(shown, around), position).reshape(*seen.shape[:-1], self.view_size)

  def location(self, seen: jax.Array) -> jax.Array:
    """[..., S] to [..., G]: row and column of the agent as one-hot, and whether its cell is filled.

    A small part of the view, sufficient for predicting the next state.
    """
    if not self.size:
      return seen
    cells, position = self._split(seen)
    row, column = (
      jax.nn.one_hot(position[..., axis], length, dtype=seen.dtype)
      for axis, length in enumerate(self.map_shape)
    )
    here = jnp.einsum('...rc,...r,...c->...', self._filled(cells), row, column)
    return jnp.concatenate([row, column, here[..., None]], axis=-1)

  def cells(self, seen: jax.Array) -> jax.Array:
    """[..., S] to [..., R C, L + 1]: each cell by levels, and whether the agent is there."""
    cells, position = self._split(seen)
    rows, columns = self.map_shape
    here = jax.nn.one_hot(
      position[..., 0] * columns + position[..., 1], rows * columns, dtype=seen.dtype
    )
    numbers = cells.reshape(*seen.shape[:-1], rows * columns)
    by_level = observation_lib.by_level(numbers, self.levels).astype(seen.dtype)
    return jnp.concatenate([by_level, here[..., None]], axis=-1)

  def _split(self, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., S] to [..., R, C] cells and the position, [..., 2] int32."""
    cells = seen[..., : self._num_cells].reshape(*seen.shape[:-1], *self.map_shape)
    furthest = np.array(self.map_shape) - 1
    position = jnp.round(seen[..., -2:].astype(jnp.float32) * furthest).astype(jnp.int32)
    return cells, position

  def _filled(self, cells: jax.Array) -> jax.Array:
    return (cells > 0.5 / (self.levels - 1)).astype(cells.dtype)
