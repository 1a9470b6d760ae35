"""The observation: a vector of 10 numbers of the player, 23 of programs, and 42 channels of each cell.

The cells of all environments are most of the memory that a step writes. So they are first packed into
a few integers per cell, in which every channel is a field of bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import SIZE, State

NUM_PLAYER = 10
NUM_CHANNELS = 42
NUM_FEATURES = NUM_PLAYER + state_lib.NUM_PROGRAMS + SIZE * SIZE * NUM_CHANNELS

# Positions among the player's numbers.
PLAYER_HP, PLAYER_CREDITS, PLAYER_ENERGY, PLAYER_DATA_SIPHONS = 2, 3, 4, 6

# The channels of a cell.
ENEMY_KIND = 0  # four, one for each kind
ENEMY_HP = 4
ENEMY_STUNNED = 5
ENEMY_FROM_SIPHON = 6
BLOCK_TYPE = 7  # three: data, program, question
BLOCK_POINTS = 10
BLOCK_SIPHONED = 11
BLOCK_PROGRAM = 12  # 23, one for each program
BLOCK_SPAWN = 35
TRANSMISSION_TURNS = 36
CELL_CREDITS = 37
CELL_ENERGY = 38
CELL_DATA_SIPHON = 39
EXIT = 40
SIPHON_CENTER = 41

MAX_RESOURCES = 50.0  # observed credits and energy are clipped to it, and divided by it
DATA_SIPHONS = 10.0  # divisor of their number
MAX_TURNS = 4  # observed turns of a transmission are clipped to it, and divided by it

# LLVM vectorises an expression of ten slots, and none of twenty; the last ten are rarely active.
_SLOTS_AT_ONCE = 10


class Codes(NamedTuple):
  """A packed observation."""

  features: jax.Array  # [33, ...] float32, the numbers of the player and of programs
  # [4, 36, ...] uint32, four integers for each cell; fields of their bits are the channels
  cells: jax.Array


class _Field(NamedTuple):
  """A channel: `width` bits of integer `word` of a cell, from bit `shift`, divided by `divisor`."""

  word: int
  shift: int
  width: int = 1
  divisor: float = 1.0


_HP_BITS, _TURN_BITS, _AMOUNT_BITS = 8, 3, 16
_FIELDS = {
  **{ENEMY_KIND + kind: _Field(0, kind) for kind in range(state_lib.NUM_KINDS)},
  ENEMY_STUNNED: _Field(0, 4),
  ENEMY_FROM_SIPHON: _Field(0, 5),
  ENEMY_HP: _Field(0, 6, _HP_BITS, 3.0),
  **{BLOCK_TYPE + kind: _Field(0, 14 + kind) for kind in range(3)},
  BLOCK_SIPHONED: _Field(0, 17),
  CELL_DATA_SIPHON: _Field(0, 18),
  EXIT: _Field(0, 19),
  SIPHON_CENTER: _Field(0, 20),
  TRANSMISSION_TURNS: _Field(0, 21, _TURN_BITS, float(MAX_TURNS)),
  **{BLOCK_PROGRAM + program: _Field(1, program) for program in range(state_lib.NUM_PROGRAMS)},
  BLOCK_POINTS: _Field(2, 0, _AMOUNT_BITS, 9.0),
  BLOCK_SPAWN: _Field(2, 16, _AMOUNT_BITS, 9.0),
  CELL_CREDITS: _Field(3, 0, _AMOUNT_BITS, 3.0),
  CELL_ENERGY: _Field(3, 16, _AMOUNT_BITS, 3.0),
}
_NUM_WORDS = 4
_CHANNELS = [_FIELDS[channel] for channel in range(NUM_CHANNELS)]


def encode(state: State) -> Codes:
  """Packs the observation of a state with any axes of environments."""
  return Codes(features=_features(state), cells=_cells(state))


def decode(codes: Codes) -> jax.Array:
  """Unpacks the observation of one environment into [1545] float32.

  A loop writes cell by cell. In one concatenation XLA on a CPU would divide and branch for every
  number to find its operand, which takes 15 times as long.
  """
  word = np.array([field.word for field in _CHANNELS])
  shift = np.array([field.shift for field in _CHANNELS], np.uint32)
  mask = np.array([(1 << field.width) - 1 for field in _CHANNELS], np.uint32)
  divisor = np.array([field.divisor for field in _CHANNELS], np.float32)

  def write_cell(cell, features):
    words = jax.lax.dynamic_index_in_dim(codes.cells, cell, axis=1, keepdims=False)
    selected = words[0]
    for i in range(1, _NUM_WORDS):
      selected = jnp.where(word == i, words[i], selected)
    channels = ((selected >> shift) & mask).astype(np.int32).astype(np.float32) / divisor
    start = len(codes.features) + NUM_CHANNELS * cell
    return jax.lax.dynamic_update_slice(features, channels, (start,))

  features = jnp.pad(codes.features, (0, SIZE * SIZE * NUM_CHANNELS))
  return jax.lax.fori_loop(0, SIZE * SIZE, write_cell, features)


def _features(state: State) -> jax.Array:
  """[33, ...] float32, the player's 10 numbers and the 23 programs."""
  last = SIZE - 1.0
  player = [
    state.row / last,
    state.col / last,
    state.hp / float(state_lib.MAX_HP),
    jnp.minimum(state.credits / MAX_RESOURCES, 1.0),
    jnp.minimum(state.energy / MAX_RESOURCES, 1.0),
    (state.stage - 1) / (state_lib.LAST_STAGE - 1.0),
    state.data_siphons / DATA_SIPHONS,
    (state.attack - 1) / (state_lib.MAX_ATTACK - 1.0),
    state.show_active.astype(np.float32),
    state.tasks_disabled.astype(np.float32),
  ]
  return jnp.concatenate([jnp.stack(player), state.owned.astype(np.float32)])


def _cells(state: State) -> jax.Array:
  """[4, 36, ...] uint32, the channels of each cell packed by `_FIELDS`."""
  types = (state_lib.DATA, state_lib.PROGRAM, state_lib.QUESTION)
  is_exit = state_lib.is_cell(state.exit_row, state.exit_col)
  has_program = state.block_type >= state_lib.PROGRAM
  flags = {
    **{BLOCK_TYPE + i: state.block_type == kind for i, kind in enumerate(types)},
    BLOCK_SIPHONED: state.block_siphoned,
    CELL_DATA_SIPHON: state.cell_data_siphon,
    EXIT: is_exit,
    SIPHON_CENTER: state.siphon_center,
  }
  first = _entities(state)
  for channel, flag in flags.items():
    first = first | (flag.astype(np.int32) << _FIELDS[channel].shift)
  words = [
    first,
    jnp.where(has_program, 1 << state.block_program, 0),
    state.block_points | (state.block_spawn << _AMOUNT_BITS),
    state.cell_credits | (state.cell_energy << _AMOUNT_BITS),
  ]
  return jnp.stack(words).reshape(_NUM_WORDS, SIZE * SIZE, *state.row.shape).astype(np.uint32)


def _entities(state: State) -> jax.Array:
  """[6, 6, ...] int32, the fields of visible enemies and of transmissions in their cells.

  If several enemies share a cell, the one of the highest slot counts, except that all their kinds are
  set; if several transmissions do, the one of the highest slot counts.
  """
  enemies, transmissions = state.enemies, state.transmissions
  is_visible = enemies.active & (
    (enemies.kind != state_lib.CRYPTOG)
    | state.show_active
    | (enemies.row == state.row)
    | (enemies.col == state.col)
  )
  details = (
    (1 << enemies.kind)
    | (enemies.stunned.astype(np.int32) << _FIELDS[ENEMY_STUNNED].shift)
    | (enemies.from_siphon.astype(np.int32) << _FIELDS[ENEMY_FROM_SIPHON].shift)
    | (enemies.hp << _FIELDS[ENEMY_HP].shift)
  )
  turns = jnp.clip(transmissions.turns, 0, MAX_TURNS)
  kinds = np.int16((1 << state_lib.NUM_KINDS) - 1)
  visible = _scatter(is_visible, enemies, details, lambda code, below: code | (below & kinds))
  countdown = _scatter(transmissions.active, transmissions, turns, lambda code, below: code)
  return visible | countdown << _FIELDS[TRANSMISSION_TURNS].shift


def _scatter(
  is_visible: jax.Array,
  slots: Any,
  code: jax.Array,
  cover: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
  """Scatters codes of slots into their cells, [6, 6, ...] int32; 0 in empty cells.

  A loop over slots is vector arithmetic over environments, where a reduction over slots would be
  scalar. Codes are from 0 to 2^15 - 1; `cover` joins one with that of lower slots in the same cell.
  """
  cell = jnp.where(is_visible, SIZE * slots.row + slots.col, -1).astype(np.int8)
  code = code.astype(np.int16)
  cells = state_lib.column(np.arange(SIZE**2, dtype=np.int8).reshape(SIZE, SIZE), cell.ndim - 1)
  result = jnp.zeros((SIZE, SIZE, *cell.shape[1:]), np.int16)

  def add(result, cell, code):
    for slot in range(len(cell)):
      result = jnp.where(cell[slot] == cells, cover(code[slot], result), result)
    return result

  for first in range(0, len(cell), _SLOTS_AT_ONCE):
    some = slice(first, first + _SLOTS_AT_ONCE)
    result = jax.lax.cond(
      jnp.any(is_visible[some]), add, lambda result, *_: result, result, cell[some], code[some]
    )
  return result.astype(np.int32)
