"""Samples the next stage: its exit, blocks, resources and transmissions.

If one environment completes a stage, this is computed for all that are stepped together, so it must
be cheap. The 32 cells that are no corners are the bits of one integer, and sets of them are sampled bit
by bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments.hackmatrix import board, options
from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import SIZE, State

MIN_BLOCKS, MAX_BLOCKS = 5, 11
MAX_POINTS = 9  # of a data block, which releases as many transmissions
PROGRAM_SPAWN = 2  # transmissions that a program block releases
TRANSMISSION_TURNS = 1

NUM_INNER = SIZE * SIZE - len(state_lib.CORNERS)  # cells that are no corners, in the grid's order
_IS_CORNER = np.zeros((SIZE, SIZE), bool)
_IS_CORNER[tuple(state_lib.CORNERS.T)] = True
_BIT = np.zeros((SIZE, SIZE), np.uint32)  # of each inner cell; corners have none
_BIT[~_IS_CORNER] = np.uint32(1) << np.arange(NUM_INNER, dtype=np.uint32)


class Chance(NamedTuple):
  """Random bits for one stage."""

  exit: Any  # [...] uint32, for the corner of the exit
  num_blocks: Any  # [...] uint32, for the number of blocks
  blocks: Any  # [11, ...] uint32, for the cell of each block
  cells: Any  # [36, ...] uint32, for the contents of each cell
  transmissions: Any  # [8, ...] uint32, for the cell and kind of each transmission


NUM_BITS = Chance(  # numbers of integers
  exit=1, num_blocks=1, blocks=MAX_BLOCKS, cells=SIZE * SIZE, transmissions=state_lib.LAST_STAGE
)


class Layout(NamedTuple):
  """Positions in a new stage."""

  exit_row: jax.Array  # [...] int32
  exit_col: jax.Array  # [...] int32
  blocks: jax.Array  # [...] uint32, a bit for each inner cell (no corner), set if it has a block
  transmissions: jax.Array  # [8, ...] int32, number of the inner cell of each transmission


def sample_layout(state: State, chance: Chance) -> Layout:
  """Samples where exit, blocks and transmissions of the next stage are, at the end of the stage before.

  Not a part of `advance`, because XLA would then repeat the computation for every cell.
  """
  exit_row, exit_col = _sample_exit(state, chance.exit)
  blocks = _sample_blocks(chance)
  bit = state_lib.column(_BIT, state.row.ndim)
  player = jnp.sum(jnp.where(state.is_player_cell, bit, 0), axis=(0, 1), dtype=np.uint32)
  return Layout(
    exit_row=exit_row,
    exit_col=exit_col,
    blocks=blocks,
    transmissions=_sample_cells(~(blocks | player), chance.transmissions),
  )


def advance(state: State, layout: Layout, chance: Chance, chosen: options.Options) -> State:
  """The state at the start of the next stage, of its layout and the same chance; other fields stay."""
  num_axes = state.row.ndim
  is_inner = state_lib.column(~_IS_CORNER, num_axes)
  is_exit = state_lib.is_cell(layout.exit_row, layout.exit_col)
  is_block = layout.blocks & state_lib.column(_BIT, num_axes) != 0
  random_bits = chance.cells.reshape(SIZE, SIZE, *chance.cells.shape[1:])
  is_heads, amount = random_bits & 1 != 0, random_bits >> 1  # a coin, and a number for the rest
  is_data, is_program = is_block & is_heads, is_block & ~is_heads
  points = jnp.where(is_data, 1 + amount % MAX_POINTS, 0).astype(np.int32)
  program = jnp.where(is_program, amount % state_lib.NUM_PROGRAMS, 0).astype(np.int32)
  # Probabilities are in twentieths: 9 for one, 9 for two, 2 for three.
  twentieth = amount % 20
  resource = 1 + (twentieth >= 9).astype(np.int32) + (twentieth >= 18)
  resource = jnp.where(is_inner & ~is_block, resource, 0)

  return state.replace(
    hp=jnp.minimum(state.hp + 1, state_lib.MAX_HP),
    exit_row=layout.exit_row,
    exit_col=layout.exit_col,
    block_type=jnp.where(
      is_data, state_lib.DATA, jnp.where(is_program, state_lib.PROGRAM, state_lib.NO_BLOCK)
    ),
    block_points=points,
    block_program=program,
    block_spawn=jnp.where(is_program, PROGRAM_SPAWN, points),
    block_siphoned=jnp.zeros_like(state.block_siphoned),
    siphon_center=jnp.zeros_like(state.siphon_center),
    cell_credits=jnp.where(is_heads, resource, 0),
    cell_energy=jnp.where(is_heads, 0, resource),
    cell_data_siphon=state_lib.column(_IS_CORNER, num_axes) & ~state.is_player_cell & ~is_exit,
    enemies=jax.tree.map(jnp.zeros_like, state.enemies),
    transmissions=_transmissions(
      state, layout.transmissions, chance.transmissions, chosen.transmission_scale
    ),
    stage=state.stage + 1,
    show_active=jnp.zeros_like(state.show_active),
    step_active=jnp.zeros_like(state.step_active),
    attack_upgrades=jnp.zeros_like(state.attack_upgrades),
  )


def _sample_exit(state: State, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Samples the row and the column of the exit, [...] int32 each: a corner other than the player's."""
  last = SIZE - 1
  rows_edge = (state.row == 0) | (state.row == last)
  is_cornered = rows_edge & ((state.col == 0) | (state.col == last))
  corner = 2 * (state.row == last).astype(np.int32) + (state.col == last)
  other = (bits % (len(state_lib.CORNERS) - 1)).astype(np.int32)
  other = other + (other >= corner)
  any_ = (bits % len(state_lib.CORNERS)).astype(np.int32)
  index = jnp.where(is_cornered, other, any_)
  return last * (index // 2), last * (index % 2)


def _sample_blocks(chance: Chance) -> jax.Array:
  """Random inner cells with blocks, [...] uint32; sets of equal size are equally likely.

  Floyd's algorithm (Bentley and Floyd, 1987): for each `last` of the final n cells, sample a cell up to
  `last`, and take `last` itself if that one is taken.
  """
  num_choices = np.uint32(MAX_BLOCKS - MIN_BLOCKS + 1)
  num_blocks = MIN_BLOCKS + board.below(chance.num_blocks, num_choices)
  blocks = jnp.zeros_like(num_blocks)
  for i in range(MAX_BLOCKS):
    last = NUM_INNER + i - num_blocks
    cell = np.uint32(1) << board.below(chance.blocks[i], last + 1)
    cell = jnp.where(blocks & cell != 0, np.uint32(1) << last, cell)
    blocks = jnp.where(i < num_blocks, blocks | cell, blocks)
  return blocks


def _sample_cells(free: jax.Array, bits: jax.Array) -> jax.Array:
  """Samples 8 different ones of the free inner cells, [8, ...] int32, by [8, ...] uint32 random bits."""
  cells = []
  for i in range(state_lib.LAST_STAGE):
    cell = board.nth_bit(free, board.below(bits[i], jax.lax.population_count(free)))
    free = free & ~(np.uint32(1) << cell)
    cells.append(cell.astype(np.int32))
  return jnp.stack(cells)


def _transmissions(
  state: State, cell: jax.Array, bits: jax.Array, scale: float
) -> state_lib.Transmissions:
  """Transmissions of the stage after `state`, scaled: as many as its number, up to 8.

  `cell`, [8, ...] int32, is the inner cell of each, and of `bits`, [8, ...] uint32, `_sample_cells` does
  not use the lowest.
  """
  num_slots = state_lib.NUM_TRANSMISSIONS
  # Adds the number of corners before a cell in the grid's order: one, two or three.
  cell = cell + 1 + (cell >= SIZE - 2) + (cell >= NUM_INNER - SIZE + 2)
  # Slot i is used from the first stage with more than i transmissions on, here the stage before that.
  numbers = np.rint(
    scale * np.minimum(np.arange(1, state_lib.LAST_STAGE + 2), state_lib.LAST_STAGE)
  )
  since = np.searchsorted(numbers, np.arange(state_lib.LAST_STAGE), side='right')
  used = state_lib.column(since, state.row.ndim) <= state.stage

  def fill(values):
    rest = jnp.zeros((num_slots - len(values), *values.shape[1:]), values.dtype)
    return jnp.concatenate([jnp.where(used, values, 0), rest])

  no = jnp.zeros_like(state.transmissions.from_siphon)
  return state_lib.Transmissions(
    active=fill(used.astype(np.int32)) != 0,
    kind=fill((bits & 3).astype(np.int32)),
    row=fill(cell // SIZE),
    col=fill(cell % SIZE),
    turns=fill(jnp.full_like(cell, TRANSMISSION_TURNS)),
    from_siphon=no,
    from_scheduled=no,
  )
