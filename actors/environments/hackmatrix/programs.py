"""The 23 programs: their costs, conditions and effects.

Under vmap every branch of a switch would be computed, so the effects are computed together: an effect
of several programs, such as damage to some enemies, is computed once.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments.hackmatrix import board, enemies
from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import Enemies, Program, State

# fmt: off
CREDITS = np.array([0, 0, 3, 2, 1, 0, 3, 3, 3, 1, 0, 5, 4, 2, 0, 2, 3, 1, 3, 0, 2, 4, 2], np.int32)
ENERGY = np.array([2, 2, 2, 2, 1, 1, 0, 1, 1, 0, 3, 0, 0, 0, 4, 4, 0, 2, 0, 5, 1, 4, 2], np.int32)
# fmt: on
EXCHANGED_ENERGY = 4  # energy that EXCH gives
DELAY_TURNS = 3  # turns that DELAY adds to every transmission
HACK_DAMAGE = 2

_FAR = 1 << 16


def usable(state: State) -> jax.Array:
  """Programs that are owned, affordable and applicable, [23, ...] bool."""
  slots = state.enemies
  blocks, siphoned = board.of_cells(state.has_block), state.block_siphoned
  rows, cols = _offsets(state)
  is_surrounding = jnp.maximum(jnp.abs(rows), jnp.abs(cols)) == 1
  # An enemy or a transmission in one of the eight cells around the player, or a block.
  is_surrounded = jnp.any(is_surrounding & state.has_block, axis=(0, 1))
  for things in (state.enemies, state.transmissions):
    distance = jnp.maximum(jnp.abs(things.row - state.row), jnp.abs(things.col - state.col))
    is_surrounded = is_surrounded | jnp.any(things.active & (distance == 1), axis=0)
  any_enemy = jnp.any(slots.active, axis=0)
  any_transmission = jnp.any(state.transmissions.active, axis=0)
  conditions = {
    Program.PUSH: any_enemy,
    Program.PULL: any_enemy,
    Program.CRASH: is_surrounded,
    Program.WARP: any_enemy | any_transmission,
    Program.POLY: any_enemy,
    Program.DEBUG: jnp.any(slots.active & board.contains(blocks, slots.row, slots.col), axis=0),
    Program.ROW: jnp.any(slots.active & (slots.row == state.row), axis=0),
    Program.COL: jnp.any(slots.active & (slots.col == state.col), axis=0),
    Program.UNDO: state.history_valid,
    Program.SHOW: ~state.show_active,
    Program.RESET: state.hp < state_lib.MAX_HP,
    Program.CALM: ~state.tasks_disabled,
    Program.D_BOM: jnp.any(slots.active & (slots.kind == state_lib.DAEMON), axis=0),
    Program.DELAY: any_transmission,
    Program.ANTI_V: jnp.any(slots.active & (slots.kind == state_lib.VIRUS), axis=0),
    Program.SCORE: state.stage < state_lib.LAST_STAGE,
    Program.REDUC: jnp.any(state.has_unsiphoned_block & (state.block_spawn > 0), axis=(0, 1)),
    Program.ATK_PLUS: (state.attack_upgrades < state_lib.MAX_ATTACK_UPGRADES)
    & (state.attack < state_lib.MAX_ATTACK),
    Program.HACK: jnp.any(siphoned, axis=(0, 1)),
  }
  always = jnp.ones_like(any_enemy)
  applicable = jnp.stack([conditions.get(program, always) for program in Program])
  credits = state_lib.column(CREDITS, state.row.ndim)
  energy = state_lib.column(ENERGY, state.row.ndim)
  return state.owned & (state.credits >= credits) & (state.energy >= energy) & applicable


def execute(state: State, action: jax.Array, bits: jax.Array, warp_bits: jax.Array) -> State:
  """Pays for the program of an action and applies it; other actions change nothing.

  It does not check `usable`. WAIT only ends the turn, which the caller does. UNDO goes back only
  to the start of its own step, since no earlier state is stored, so it costs and changes nothing.
  POLY reads `bits`, [20, ...], and WARP `warp_bits`, [...].
  """
  is_ = {program: action == program.action for program in Program}
  programs = state_lib.column(
    np.arange(state_lib.NUM_PROGRAMS) + state_lib.FIRST_PROGRAM, action.ndim
  )
  is_paid = (programs == action) & (programs != Program.UNDO.action)

  def price(table):
    return jnp.sum(jnp.where(is_paid, state_lib.column(table, action.ndim), 0), axis=0)

  attack_upgrade = is_[Program.ATK_PLUS] & (state.attack_upgrades < state_lib.MAX_ATTACK_UPGRADES)
  reduced = is_[Program.REDUC] & state.has_unsiphoned_block
  transmissions = state.transmissions
  spent = state.replace(
    credits=state.credits - price(CREDITS),
    energy=state.energy - price(ENERGY) + EXCHANGED_ENERGY * is_[Program.EXCH],
    data_siphons=state.data_siphons + is_[Program.SIPH_PLUS],
    score=state.score + jnp.where(is_[Program.SCORE], state_lib.LAST_STAGE - state.stage, 0),
    hp=jnp.where(is_[Program.RESET], state_lib.MAX_HP, state.hp),
    step_active=state.step_active | is_[Program.STEP],
    show_active=state.show_active | is_[Program.SHOW],
    tasks_disabled=state.tasks_disabled | is_[Program.CALM],
    attack=jnp.where(
      attack_upgrade, jnp.minimum(state.attack + 1, state_lib.MAX_ATTACK), state.attack
    ),
    attack_upgrades=state.attack_upgrades + attack_upgrade,
    block_spawn=jnp.where(reduced, jnp.maximum(state.block_spawn - 1, 0), state.block_spawn),
    transmissions=transmissions.replace(
      turns=transmissions.turns + DELAY_TURNS * is_[Program.DELAY]
    ),
  )
  warped = _warp(spent, is_[Program.WARP], warp_bits)
  slots = _damage(warped, is_)
  slots = _push(warped, slots, is_[Program.PUSH].astype(np.int32) - is_[Program.PULL])
  return warped.replace(enemies=_transform(slots, is_[Program.POLY], bits))


def _warp(state: State, is_warp: jax.Array, bits: jax.Array) -> State:
  """Moves the player to the cell of a random enemy or transmission and removes that; to (0, 0) if none."""
  slots, transmissions = state.enemies, state.transmissions
  num_enemies = jnp.sum(slots.active, axis=0, dtype=np.int32)
  num_targets = num_enemies + jnp.sum(transmissions.active, axis=0, dtype=np.int32)
  target = board.below(bits, num_targets).astype(np.int32)
  enemy = slots.active & is_warp & (state_lib.rank_among(slots.active) == target)
  transmission = (
    transmissions.active
    & is_warp
    & (state_lib.rank_among(transmissions.active) + num_enemies == target)
  )

  def coordinate(of_enemies, of_transmissions):
    found = jnp.where(enemy, of_enemies, 0) + jnp.where(transmission, of_transmissions, 0)
    return jnp.sum(found, axis=0, dtype=np.int32)

  return state.replace(
    row=jnp.where(is_warp, coordinate(slots.row, transmissions.row), state.row),
    col=jnp.where(is_warp, coordinate(slots.col, transmissions.col), state.col),
    enemies=slots.replace(active=slots.active & ~enemy),
    transmissions=transmissions.replace(active=transmissions.active & ~transmission),
  )


def _damage(state: State, is_: dict[Program, jax.Array]) -> Enemies:
  """The enemies after CRASH, DEBUG, ROW, COL, D_BOM, ANTI_V or HACK.

  D_BOM removes the daemon that `_bomb` names. DEBUG, D_BOM and ANTI_V stun the enemies that they hit.
  """
  slots = state.enemies
  is_bomb, is_splashed = _bomb(state)
  is_bomb = is_bomb & is_[Program.D_BOM]
  slots = slots.replace(active=slots.active & ~is_bomb)
  on_block = board.contains(board.of_cells(state.has_block), slots.row, slots.col)
  on_siphoned = board.contains(board.of_cells(state.block_siphoned), slots.row, slots.col)
  is_hit = (
    is_[Program.CRASH]
    | (is_[Program.DEBUG] & on_block)
    | (is_[Program.ROW] & (slots.row == state.row))
    | (is_[Program.COL] & (slots.col == state.col))
    | (is_[Program.D_BOM] & is_splashed)
    | (is_[Program.ANTI_V] & (slots.kind == state_lib.VIRUS))
    | (is_[Program.HACK] & on_siphoned)
  )
  return enemies.damage(
    slots,
    is_hit,
    amount=jnp.where(is_[Program.HACK], HACK_DAMAGE, 1),
    stuns=is_[Program.DEBUG] | is_[Program.ANTI_V] | is_[Program.D_BOM],
  )


def _bomb(state: State) -> tuple[jax.Array, jax.Array]:
  """Slots of the daemon nearest to the player, and of all in the 8 cells around it; [20, ...] bool each."""
  slots = state.enemies
  is_daemon = slots.active & (slots.kind == state_lib.DAEMON)
  distance = jnp.abs(slots.row - state.row) + jnp.abs(slots.col - state.col)
  order = 32 * distance + state_lib.column(np.arange(len(slots.row)), state.row.ndim)
  order = jnp.where(is_daemon, order, _FAR)
  nearest = jnp.min(order, axis=0)
  is_bomb = is_daemon & (order == nearest)
  row = jnp.sum(jnp.where(is_bomb, slots.row, 0), axis=0)
  col = jnp.sum(jnp.where(is_bomb, slots.col, 0), axis=0)
  around = jnp.maximum(jnp.abs(slots.row - row), jnp.abs(slots.col - col)) == 1
  return is_bomb, around & (nearest < _FAR)


def _push(state: State, slots: Enemies, away: jax.Array) -> Enemies:
  """Moves enemies one cell on both axes: away from the player (`away` 1), towards it (-1) or not (0)."""
  last = state_lib.SIZE - 1
  row = jnp.clip(slots.row + away * jnp.sign(slots.row - state.row), 0, last)
  col = jnp.clip(slots.col + away * jnp.sign(slots.col - state.col), 0, last)
  return slots.replace(row=row, col=col)


def _transform(slots: Enemies, is_poly: jax.Array, bits: jax.Array) -> Enemies:
  """Where `is_poly`, changes each enemy to a random one of the three other kinds, with full HP."""
  other = 1 + board.below(bits, np.uint32(state_lib.NUM_KINDS - 1)).astype(np.int32)
  kind = (slots.kind + other) % state_lib.NUM_KINDS
  return slots.replace(
    kind=jnp.where(is_poly, kind, slots.kind),
    hp=jnp.where(is_poly, enemies.full_hp(kind), slots.hp),
  )


def _offsets(state: State) -> tuple[jax.Array, jax.Array]:
  """Rows and columns of the cells relative to the player, [6, 6, ...] int32."""
  rows, cols = state_lib.column(np.indices((state_lib.SIZE,) * 2, np.int32), state.row.ndim)
  return rows - state.row, cols - state.col
