"""Sets of cells of the board as bits of two integers, because each step computes many sets."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments.hackmatrix import state as state_lib

SIZE = state_lib.SIZE
_HALF_ROWS = SIZE // 2
_HALF = _HALF_ROWS * SIZE
_ALL = np.uint32((1 << _HALF) - 1)
_FIRST_COLUMN = np.uint32(sum(1 << SIZE * row for row in range(_HALF_ROWS)))
_LAST_COLUMN = np.uint32(_FIRST_COLUMN << (SIZE - 1))
_UNROLL = 4  # steps of a flood fill between two checks of its end


class Board(NamedTuple):
  """A set of cells, with any axes of environments."""

  low: jax.Array  # [...] uint32, rows 0 to 2: bit 6 * row + column is set if the cell is in the set
  high: jax.Array  # [...] uint32, rows 3 to 5: bit 6 * (row - 3) + column

  def __and__(self, other: 'Board') -> 'Board':
    return Board(self.low & other.low, self.high & other.high)

  def __or__(self, other: 'Board') -> 'Board':
    return Board(self.low | other.low, self.high | other.high)

  def __invert__(self) -> 'Board':
    return Board(self.low ^ _ALL, self.high ^ _ALL)


def of_cells(mask: jax.Array) -> Board:
  """The set of cells where a mask, [6, 6, ...] bool, is True."""
  cells = mask.reshape(SIZE * SIZE, *mask.shape[2:])
  return Board(state_lib.pack(cells[:_HALF]), state_lib.pack(cells[_HALF:]))


def of_cell(row: chex.Numeric, col: chex.Numeric, included: chex.Numeric = True) -> Board:
  """The set of one cell, or the empty set where `included` is False; arguments broadcast."""
  bit = jnp.uint32(1) << _shift(row, col)
  is_low = jnp.asarray(row < _HALF_ROWS)
  zero = np.uint32(0)
  return Board(jnp.where(included & is_low, bit, zero), jnp.where(included & ~is_low, bit, zero))


def of_slots(active: jax.Array, row: jax.Array, col: jax.Array) -> Board:
  """The set of the cells (row, col) of the active ones of n slots; all arguments are [n, ...]."""
  cells = of_cell(row, col, active)
  return Board(*(jnp.bitwise_or.reduce(half, axis=0) for half in cells))


def contains(board: Board, row: jax.Array, col: jax.Array) -> jax.Array:
  """Whether each cell is in the set, bool; `row` and `col` may have more leading axes than the board."""
  half = jnp.where(row < _HALF_ROWS, board.low, board.high)
  return (half >> _shift(row, col)) & 1 != 0


def sample(board: Board, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Samples a cell of the set uniformly by random bits, [...] uint32.

  Returns:
    The cell's row and column, [...] int32 each; (0, 0) if the set is empty.
  """
  num_low = jax.lax.population_count(board.low)
  count = num_low + jax.lax.population_count(board.high)
  rank = below(bits, count)
  is_low = rank < num_low
  half = jnp.where(is_low, board.low, board.high)
  cell = nth_bit(half, jnp.where(is_low, rank, rank - num_low)).astype(np.int32)
  any_ = count > 0
  cell = jnp.where(any_, cell + jnp.where(is_low, 0, _HALF), 0)
  return cell // SIZE, cell % SIZE


def walking_distance(obstacles: Board, start: Board, goal: Board) -> jax.Array:
  """Shortest distances around obstacles, [...] int32 steps, by a flood fill.

  Start and goal are sets of one cell, which do not count as obstacles. The distance is 0 if the goal
  is the start or cannot be reached.
  """
  open_ = ~obstacles | goal

  def flood(state):
    reached, distance, _ = state
    for _ in range(_UNROLL):
      before = reached
      arrived = _meets(reached, goal)
      distance = distance + ~arrived
      reached = reached | (_neighbours(reached) & open_)
    changed = (reached.low != before.low) | (reached.high != before.high)
    return reached, distance, changed & ~_meets(reached, goal)

  distance = jnp.zeros_like(start.low, np.int32)
  reached, distance, _ = jax.lax.while_loop(
    lambda state: jnp.any(state[2]), flood, (start, distance, jnp.ones_like(distance, np.bool_))
  )
  return jnp.where(_meets(reached, goal), distance, 0)


def below(bits: jax.Array, count: chex.Numeric) -> jax.Array:
  """Random integers from 0 to count - 1, [...] uint32, by the upper 24 of random bits; count <= 255."""
  return ((bits >> 8) * jnp.asarray(count, np.uint32)) >> 24


def nth_bit(word: jax.Array, n: jax.Array) -> jax.Array:
  """Index of the set bit of a word that has `n` set bits below it, [...] uint32.

  Binary search by the number of set bits in the lower half (Anderson, Bit Twiddling Hacks: select
  the bit position with the given count).
  """
  pairs = word - ((word >> 1) & 0x55555555)
  nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
  bytes_ = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
  halves = bytes_ + (bytes_ >> 8)
  index = jnp.zeros_like(word)
  for counts, width, field in (
    (halves, 16, 0xFF),
    (bytes_, 8, 0xFF),
    (nibbles, 4, 0xF),
    (pairs, 2, 0x3),
    (word, 1, 0x1),
  ):
    in_lower = (counts >> index) & field
    is_upper = n >= in_lower
    n = jnp.where(is_upper, n - in_lower, n)
    index = jnp.where(is_upper, index + width, index)
  return index


def _shift(row: chex.Numeric, col: chex.Numeric) -> jax.Array:
  shift = SIZE * jnp.where(row < _HALF_ROWS, row, row - _HALF_ROWS) + col
  return shift.astype(np.uint32)


def _meets(one: Board, other: Board) -> jax.Array:
  both = one & other
  return (both.low | both.high) != 0


def _neighbours(board: Board) -> Board:
  """The cells to the left, to the right, above and below the cells of the set."""
  low, high = board
  last_row = np.uint32(((1 << SIZE) - 1) << (SIZE * (_HALF_ROWS - 1)))
  up = Board((low & ~last_row) << SIZE, ((high & ~last_row) << SIZE) | (low >> (_HALF - SIZE)))
  down = Board((low >> SIZE) | ((high << (_HALF - SIZE)) & last_row), high >> SIZE)
  left = Board((low & ~_FIRST_COLUMN) >> 1, (high & ~_FIRST_COLUMN) >> 1)
  right = Board((low & ~_LAST_COLUMN) << 1, (high & ~_LAST_COLUMN) << 1)
  return up | down | left | right
