"""Rules of the player's own actions: moving, attacking along a line, and siphoning."""

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments.hackmatrix import board, enemies
from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import State

MAX_RELEASED = 9  # most transmissions that one siphon releases
RELEASED_TURNS = 3  # enemy turns until they become enemies
SIPHON_DELAY = 5  # turns by which a siphon puts off the scheduled task
PROGRAM_VALUE = 100  # points that a program block counts as, where a siphon ranks blocks

_NO_TARGET = 1 << 16


def legal_moves(state: State) -> jax.Array:
  """Legal moves, [4, ...] bool (up, down, left, right): the next cell is open, or a target is in line.

  A target is an enemy or a transmission in the direction of the move, see `move`.
  """
  row, col = state.row, state.col
  blocks = board.of_cells(state.has_unsiphoned_block)
  has_target = [jnp.zeros_like(state.history_valid)] * 4
  for slots in (state.enemies, state.transmissions):
    in_column = slots.active & (slots.col == col)
    in_row = slots.active & (slots.row == row)
    lines = (
      in_column & (slots.row > row),
      in_column & (slots.row < row),
      in_row & (slots.col < col),
      in_row & (slots.col > col),
    )
    has_target = [old | jnp.any(line, axis=0) for old, line in zip(has_target, lines, strict=True)]
  last = state_lib.SIZE - 1
  legal = []
  for can_attack, is_inside, (step_row, step_col) in zip(
    has_target,
    (row < last, row > 0, col > 0, col < last),
    ((1, 0), (-1, 0), (0, -1), (0, 1)),
    strict=True,
  ):
    is_open = ~board.contains(blocks, row + step_row, col + step_col)
    legal.append(is_inside & (is_open | can_attack))
  return jnp.stack(legal)


def move(state: State, action: jax.Array) -> State:
  """Attacks the nearest enemy or transmission in the direction of the action, or else walks one cell.

  Walking picks up what lies in the new cell. Blocks do not stop an attack. Walking off the board has no
  effect, and walking into an unsiphoned block succeeds; the action mask forbids both. Other actions
  change nothing.
  """
  step_row = (action == state_lib.UP).astype(np.int32) - (action == state_lib.DOWN)
  step_col = (action == state_lib.RIGHT).astype(np.int32) - (action == state_lib.LEFT)

  def order_of(slots, first):
    """[20, ...] int32, ascending in the order in which slots are hit."""
    rows, cols = slots.row - state.row, slots.col - state.col
    distance = rows * step_row + cols * step_col
    is_in_line = slots.active & (distance > 0) & (jnp.abs(rows) + jnp.abs(cols) == distance)
    order = state_lib.column(np.arange(first, first + len(slots.row), dtype=np.int32), action.ndim)
    return jnp.where(is_in_line, 64 * distance + order, _NO_TARGET)

  enemy_order = order_of(state.enemies, 0)
  transmission_order = order_of(state.transmissions, state_lib.NUM_ENEMIES)
  nearest = jnp.minimum(jnp.min(enemy_order, axis=0), jnp.min(transmission_order, axis=0))
  attacks = nearest < _NO_TARGET
  transmissions = state.transmissions.replace(
    active=state.transmissions.active & ((transmission_order != nearest) | ~attacks)
  )
  hit_enemies = enemies.damage(state.enemies, attacks & (enemy_order == nearest), state.attack)

  row, col = state.row + step_row, state.col + step_col
  last = state_lib.SIZE - 1
  walks = (
    (action <= state_lib.RIGHT) & ~attacks & (row >= 0) & (row <= last) & (col >= 0) & (col <= last)
  )
  row, col = jnp.where(walks, row, state.row), jnp.where(walks, col, state.col)
  here = state_lib.is_cell(row, col) & walks

  def found(cells):
    return jnp.sum(jnp.where(here, cells, 0), axis=(0, 1))

  return state.replace(
    row=row,
    col=col,
    credits=state.credits + found(state.cell_credits),
    energy=state.energy + found(state.cell_energy),
    data_siphons=state.data_siphons + found(state.cell_data_siphon),
    cell_credits=jnp.where(here, 0, state.cell_credits),
    cell_energy=jnp.where(here, 0, state.cell_energy),
    cell_data_siphon=state.cell_data_siphon & ~here,
    enemies=hit_enemies,
    transmissions=transmissions,
  )


def siphon(state: State, action: jax.Array, bits: jax.Array) -> State:
  """Siphons the most valuable block next to the player, which releases transmissions.

  Program blocks rank before data blocks, more points before fewer, and equals in the order up, down,
  left, right. A data block without points cannot be siphoned. The action uses up a data siphon even if
  there is no block to siphon. The `bits`, [20, ...], set the kinds of the transmissions. Other actions
  change nothing.
  """
  is_siphon = action == state_lib.SIPHON
  rows, cols = state_lib.column(np.indices((state_lib.SIZE,) * 2, np.int32), action.ndim)
  rows, cols = rows - state.row, cols - state.col
  is_adjacent = jnp.abs(rows) + jnp.abs(cols) == 1
  is_program = state.block_type == state_lib.PROGRAM
  worth = jnp.where(is_program, PROGRAM_VALUE, state.block_points)
  preference = jnp.where(rows == 1, 3, jnp.where(rows == -1, 2, jnp.where(cols == -1, 1, 0)))
  is_candidate = is_siphon & is_adjacent & state.has_unsiphoned_block & (worth > 0)
  appeal = jnp.where(is_candidate, 4 * worth + preference, 0)
  best = jnp.max(appeal, axis=(0, 1))
  found = best > 0
  chosen = found & (appeal == best)

  def of_chosen(cells):
    return jnp.sum(jnp.where(chosen, cells, 0), axis=(0, 1))

  program = of_chosen(jnp.where(is_program, state.block_program + 1, 0)) - 1
  programs = state_lib.column(np.arange(state_lib.NUM_PROGRAMS), action.ndim)
  num_released = jnp.minimum(of_chosen(state.block_spawn), MAX_RELEASED)
  slots = state.transmissions
  taken, _ = state_lib.lowest_free(slots.active, num_released)
  released = state_lib.Transmissions(
    active=True,
    kind=(bits & 3).astype(np.int32),
    row=of_chosen(rows) + state.row,
    col=of_chosen(cols) + state.col,
    turns=RELEASED_TURNS,
    from_siphon=True,
    from_scheduled=False,
  )
  return state.replace(
    score=state.score + of_chosen(jnp.where(state.block_type == state_lib.DATA, worth, 0)),
    owned=state.owned | (programs == program),
    data_siphons=state.data_siphons - is_siphon,
    next_task_turn=state.next_task_turn + SIPHON_DELAY * found,
    block_siphoned=state.block_siphoned | chosen,
    siphon_center=state.siphon_center | (found & state.is_player_cell),
    transmissions=state_lib.select(taken, released, slots),
  )


def towards_exit(state: State, mask: jax.Array) -> jax.Array:
  """Action of the scripted policy in one environment, [] int32, see `HackMatrix.scripted_action`."""
  step_rows, step_cols = np.array([[1, -1, 0, 0], [0, 0, -1, 1]], np.int32)
  rows, cols = state.row + step_rows, state.col + step_cols
  goal = board.of_cell(state.exit_row, state.exit_col)
  distance = board.walking_distance(
    board.of_cells(state.has_unsiphoned_block), board.of_cell(rows, cols), goal
  )
  arrives = (rows == state.exit_row) & (cols == state.exit_col)
  has_path = arrives | (distance > 0)
  # Without a path, an attack may clear one.
  length = jnp.where(has_path, distance, 2 * state_lib.SIZE**2)
  moves = mask[: state_lib.SIPHON]
  best = jnp.argmin(jnp.where(moves, length, 4 * state_lib.SIZE**2))
  siphons = mask[state_lib.SIPHON] & ~jnp.any(moves & has_path)
  return jnp.where(siphons, state_lib.SIPHON, best).astype(np.int32)
