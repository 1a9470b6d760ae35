"""What the agent sees: 10 numbers of the player, 23 of programs, and 42 of each cell, in one row.

The cells of all worlds are most of what a step writes, so they are not written channel by channel:
a few integers hold all of a cell, and every channel is a field of bits in one of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from actors.environments.hackmatrix import state as state_lib
from actors.environments.hackmatrix.state import SIZE, State

NUM_PLAYER = 10
NUM_CHANNELS = 42
NUM_FEATURES = NUM_PLAYER + state_lib.NUM_PROGRAMS + SIZE * SIZE * NUM_CHANNELS

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

MAX_RESOURCES = 50.0  # credits and energy are seen up to here
MAX_TURNS = 4  # of a transmission


class Codes(NamedTuple):
  """An observation before it is spread out.

  Attributes:
    features: [33, ...] float32, of the player and of programs.
    cells: [4, 36, ...] uint32, whose fields of bits are the channels.
  """

  features: jax.Array
  cells: jax.Array


class _Field(NamedTuple):
  """Where in a cell's integers a channel is, and what it is divided by."""

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
_KINDS = (1 << state_lib.NUM_KINDS) - 1


def encode(state: State) -> Codes:
  """What is to be seen of a state, for any axes of worlds."""
  return Codes(features=_features(state), cells=_cells(state))


def decode(codes: Codes) -> jax.Array:
  """[1545] float32, the observation of one world."""
  word = np.array([field.word for field in _CHANNELS])
  shift = np.array([field.shift for field in _CHANNELS], np.uint32)
  mask = np.array([(1 << field.width) - 1 for field in _CHANNELS], np.uint32)
  divisor = np.array([field.divisor for field in _CHANNELS], np.float32)
  held = jnp.zeros((), np.uint32)
  for i in range(_NUM_WORDS):
    held = jnp.where(word == i, codes.cells[i][:, None], held)
  channels = ((held >> shift) & mask).astype(np.int32).astype(np.float32) / divisor
  return jnp.concatenate([codes.features, channels.reshape(-1)])


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
    state.data_siphons / 10.0,
    (state.attack - 1) / (state_lib.MAX_ATTACK - 1.0),
    state.show_active.astype(np.float32),
    state.tasks_disabled.astype(np.float32),
  ]
  return jnp.concatenate([jnp.stack(player), state.owned.astype(np.float32)])


def _cells(state: State) -> jax.Array:
  """[4, 36, ...] uint32, each cell's channels in the places that `_FIELDS` gives them."""
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
  """[6, 6, ...] int32, the fields of visible enemies, and of transmissions, in their cells.

  Of several in a cell the last counts, but that kinds add up.
  """
  cells = state_lib.column(np.arange(SIZE * SIZE).reshape(SIZE, SIZE), state.row.ndim)
  slots = state.enemies
  is_visible = slots.active & (
    (slots.kind != state_lib.CRYPTOG)
    | state.show_active
    | (slots.row == state.row)
    | (slots.col == state.col)
  )
  cell = jnp.where(is_visible, SIZE * slots.row + slots.col, -1)
  code = (
    (1 << slots.kind)
    | (slots.stunned.astype(np.int32) << _FIELDS[ENEMY_STUNNED].shift)
    | (slots.from_siphon.astype(np.int32) << _FIELDS[ENEMY_FROM_SIPHON].shift)
    | (slots.hp << _FIELDS[ENEMY_HP].shift)
  )
  seen = jnp.zeros_like(state.block_type)
  for i in range(state_lib.NUM_ENEMIES):
    seen = jnp.where(cells == cell[i], (seen & _KINDS) | code[i], seen)

  slots = state.transmissions
  cell = jnp.where(slots.active, SIZE * slots.row + slots.col, -1)
  turns = jnp.clip(slots.turns, 0, MAX_TURNS)
  countdown = jnp.zeros_like(state.block_type)
  for i in range(state_lib.NUM_TRANSMISSIONS):
    countdown = jnp.where(cells == cell[i], turns[i], countdown)
  return seen | (countdown << _FIELDS[TRANSMISSION_TURNS].shift)
