"""Rules of enemies: damage, and their turn of five phases after each turn of the player."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments.hackmatrix import board
from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import Enemies, State, Transmissions

SCHEDULED_TURNS = 1


def damage(
  enemies: Enemies, is_hit: jax.Array, amount: jax.Array, stuns: chex.Numeric = False
) -> Enemies:
  """Takes `amount` HP from the active enemies that are hit, [20, ...] bool; removes those with none left.

  Those that survive are stunned where `stuns`, [...] bool.
  """
  is_hit = is_hit & enemies.active
  hp = jnp.where(is_hit, jnp.maximum(enemies.hp - amount, 0), enemies.hp)
  survives = ~is_hit | (hp > 0)
  return enemies.replace(
    active=enemies.active & survives,
    hp=hp,
    stunned=enemies.stunned | (is_hit & survives & stuns),
  )


def full_hp(kind: jax.Array) -> jax.Array:
  """Full HP of enemies by kind, int32; by comparison, because a table look-up is slow."""
  daemon, other = state_lib.FULL_HP[state_lib.DAEMON], state_lib.FULL_HP[state_lib.VIRUS]
  return jnp.where(kind == state_lib.DAEMON, daemon, other)


def turn(state: State, plays: jax.Array, bits: jax.Array) -> State:
  """The enemies' turn: transmissions become enemies, enemies move, attack, a task is due, stuns end.

  Where `plays`, [...] bool, is False, the state stays as it is.
  """
  state = _hatch(state, plays)
  state = state.replace(enemies=_move(state, plays & ~state.step_active))
  state = _attack(state, plays)
  state = _schedule(state, plays, bits)
  slots = state.enemies
  return state.replace(
    enemies=slots.replace(
      stunned=slots.stunned & ~plays,
      disabled_turns=jnp.maximum(slots.disabled_turns - plays, 0),
    ),
    step_active=state.step_active & ~plays,
  )


def _hatch(state: State, plays: jax.Array) -> State:
  """Counts transmissions down; at 0 each becomes an enemy in its cell, in the order of slots."""
  slots = state.transmissions
  turns = slots.turns - plays
  hatches = slots.active & plays & (turns <= 0)
  entry_of = jnp.where(hatches, state_lib.rank_among(hatches), state_lib.NUM_TRANSMISSIONS)
  taken, rank = state_lib.lowest_free(
    state.enemies.active, jnp.sum(hatches, axis=0, dtype=np.int32)
  )

  # A transmission is packed into one number, so that each slot selects only once.
  packed = slots.row | slots.col << 3 | slots.kind << 6 | slots.from_siphon << 8
  packed = packed | slots.from_scheduled << 9
  code = state_lib.make_if_any(
    hatches, lambda: jnp.sum(jnp.where(entry_of[:, None] == rank, packed[:, None], 0), axis=0)
  )
  kind = code >> 6 & 3
  hatched = Enemies(
    active=True,
    kind=kind,
    row=code & 7,
    col=code >> 3 & 7,
    hp=full_hp(kind),
    disabled_turns=0,
    stunned=False,
    from_siphon=code >> 8 & 1 != 0,
    from_scheduled=code >> 9 & 1 != 0,
  )
  return state.replace(
    transmissions=slots.replace(active=slots.active & ~hatches, turns=turns),
    enemies=state_lib.select(taken, hatched, state.enemies),
  )


def _move(state: State, plays: jax.Array) -> Enemies:
  """Moves enemies greedily towards the player, independently of each other; a virus twice."""
  slots = state.enemies
  blocks = board.of_cells(state.has_unsiphoned_block)
  moves = plays & slots.active & ~slots.stunned & (slots.disabled_turns <= 0)
  row, col = slots.row, slots.col
  for is_moving in (moves, moves & (slots.kind == state_lib.VIRUS)):
    next_row, next_col = _approach(state, row, col, slots.kind == state_lib.GLITCH, blocks)
    row, col = jnp.where(is_moving, next_row, row), jnp.where(is_moving, next_col, col)
  return slots.replace(row=row, col=col)


def _approach(
  state: State, row: jax.Array, col: jax.Array, is_glitch: jax.Array, blocks: board.Board
) -> tuple[jax.Array, jax.Array]:
  """Row and column, [20, ...] int32, after one step towards the player.

  A step is on the axis of the larger distance, by row if both are equal. If that leads to the player's
  cell, the enemy stays. If it leads to a block, an enemy other than a glitch also moves one cell along
  the other axis, even onto a block or the player.
  """
  rows, cols = state.row - row, state.col - col
  step_row, step_col = jnp.sign(rows), jnp.sign(cols)
  by_row = jnp.abs(rows) >= jnp.abs(cols)
  next_row = row + jnp.where(by_row, step_row, 0)
  next_col = col + jnp.where(by_row, 0, step_col)
  stays = (next_row == state.row) & (next_col == state.col)
  next_row, next_col = jnp.where(stays, row, next_row), jnp.where(stays, col, next_col)
  shifts = ~is_glitch & board.contains(blocks, next_row, next_col)
  next_row = next_row + jnp.where(shifts & ~by_row, step_row, 0)
  next_col = next_col + jnp.where(shifts & by_row, step_col, 0)
  return next_row, next_col


def _attack(state: State, plays: jax.Array) -> State:
  """Takes 1 HP from the player for each enemy next to it that is not stunned; none for one in its cell."""
  slots = state.enemies
  distance = jnp.abs(slots.row - state.row) + jnp.abs(slots.col - state.col)
  attackers = slots.active & ~slots.stunned & (distance == 1)
  hp = jnp.maximum(state.hp - jnp.sum(attackers, axis=0, dtype=np.int32), 0)
  return state.replace(hp=jnp.where(plays, hp, state.hp))


def _schedule(state: State, plays: jax.Array, bits: jax.Array) -> State:
  """If the scheduled task is due, sends one transmission to an empty cell."""
  falls_due = (
    plays & ~state.tasks_disabled & (state.task_interval > 0) & (state.turn >= state.next_task_turn)
  )

  def sample():
    occupied = board.of_cell(state.row, state.col) | board.of_cells(state.has_unsiphoned_block)
    for slots in (state.enemies, state.transmissions):
      occupied = occupied | board.of_slots(slots.active, slots.row, slots.col)
    return board.sample(~occupied, bits)

  row, col = state_lib.make_if_any(falls_due, sample)
  sent = Transmissions(
    active=True,
    kind=(bits & 3).astype(np.int32),  # sampling the cell does not use these bits
    row=row,
    col=col,
    turns=SCHEDULED_TURNS,
    from_siphon=False,
    from_scheduled=True,
  )
  taken, _ = state_lib.lowest_free(state.transmissions.active, falls_due.astype(np.int32))
  return state.replace(
    transmissions=state_lib.select(taken, sent, state.transmissions),
    next_task_turn=jnp.where(falls_due, state.turn + state.task_interval, state.next_task_turn),
  )
