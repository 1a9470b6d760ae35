"""The reward of a step, in 15 parts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments.hackmatrix import board, options
from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import Program, State

STAGE_REWARDS = np.array([1, 2, 4, 8, 16, 32, 64, 100], np.float32)  # for completing stages 1 to 8
STEP, SCORE, KILL, HP = 0.01, 0.5, 0.3, 1.0
VICTORY, VICTORY_SCORE = 500.0, 100.0
DEATH = 0.5  # fraction of the rewards of completed stages that death costs
GAIN, HOLDING = 0.05, 0.01  # for each credit, and each energy
WASTE = 0.3
SIPHON_QUALITY = 0.5 * 0.05
UNREACHABLE = 2 * (state_lib.SIZE - 1)  # distance that the potential has without a path to the exit


class Reward(NamedTuple):
  """Reward of one step in parts, [...] float32 each; the reward is their sum."""

  step_penalty: jax.Array  # for every step
  stage_completion: jax.Array  # for completing a stage
  score_gain: jax.Array  # for the change of the score
  kills: jax.Array  # for a decrease of the number of active enemies, whatever its cause
  data_siphon: jax.Array  # for an increase of the number of data siphons
  distance_shaping: jax.Array  # for a decrease of the walking distance to the exit, see `shape`
  damage_penalty: jax.Array  # for HP lost
  hp_recovery: jax.Array  # for HP gained
  victory: jax.Array  # for completing the last stage; it grows with the score
  death_penalty: jax.Array  # for death; it grows with the stage
  siphon_death_penalty: jax.Array  # for death next to an enemy that a siphon released
  resource_gain: jax.Array  # for the change of credits and energy
  resource_holding: jax.Array  # for credits and energy owned when a stage is completed
  program_waste: jax.Array  # a penalty for RESET when only one HP is missing
  # a penalty for a siphon while a better cell existed; see `missed_resources`
  siphon_quality: jax.Array

  def total(self) -> jax.Array:
    return sum(self[1:], start=self.step_penalty)


def earn(
  before: State,
  action: jax.Array,
  after: State,
  *,
  died: jax.Array,
  completed: jax.Array,
  won: jax.Array,
  chosen: options.Options,
) -> Reward:
  """The reward of a step from a state before to one after, which is in the next stage if one was completed.

  `died`, `completed` and `won`, [...] bool, say whether the player died, completed a stage, and the last
  stage.
  """
  num_axes = action.ndim
  stages = state_lib.column(np.arange(1, state_lib.LAST_STAGE + 1), num_axes)
  stage_rewards = state_lib.column(STAGE_REWARDS, num_axes)

  def stage_sum(is_counted):
    return jnp.sum(jnp.where(is_counted, stage_rewards, 0), axis=0)

  num_kills = _count(before.enemies.active) - _count(after.enemies.active)
  slots = after.enemies
  is_adjacent = jnp.abs(slots.row - after.row) + jnp.abs(slots.col - after.col) == 1
  is_siphoned = jnp.any(slots.active & slots.from_siphon & is_adjacent, axis=0)
  healed = after.hp - before.hp
  shaping = shape(before, after, ended=died | won, chosen=chosen)
  gained = after.credits - before.credits + after.energy - before.energy
  wasted = (action == Program.RESET.action) & (before.hp == state_lib.MAX_HP - 1)
  missed = state_lib.where_any(
    action == state_lib.SIPHON, lambda: missed_resources(before), jnp.zeros_like(before.row)
  )
  zero = np.float32(0)
  return Reward(
    step_penalty=jnp.full_like(before.row, -STEP, np.float32),
    stage_completion=jnp.where(completed, stage_sum(stages == before.stage), zero),
    score_gain=_scale(SCORE, after.score - before.score),
    kills=_scale(KILL, jnp.maximum(num_kills, 0)),
    data_siphon=_scale(
      chosen.data_siphon_reward, jnp.maximum(after.data_siphons - before.data_siphons, 0)
    ),
    distance_shaping=shaping,
    damage_penalty=_scale(HP, jnp.minimum(healed, 0)),
    hp_recovery=_scale(HP, jnp.maximum(healed, 0)),
    victory=jnp.where(won, VICTORY + _scale(VICTORY_SCORE, after.score), zero),
    death_penalty=jnp.where(died, -DEATH * stage_sum(stages < after.stage), zero),
    siphon_death_penalty=jnp.where(
      died & is_siphoned, np.float32(-chosen.siphon_death_penalty), zero
    ),
    resource_gain=_scale(GAIN, gained),
    resource_holding=jnp.where(completed, _scale(HOLDING, after.credits + after.energy), zero),
    program_waste=jnp.where(wasted, np.float32(-WASTE), zero),
    siphon_quality=_scale(-SIPHON_QUALITY, missed),
  )


class _Reach(NamedTuple):
  """Resources that a siphon reaches from each cell: on the cell itself and on its four neighbours.

  Siphoned blocks have none, and from a cell with a block nothing is reached.
  """

  credits: jax.Array  # [6, 6, ...] int32, sum over reached cells without a block
  energy: jax.Array  # [6, 6, ...] int32, likewise
  # five arrays, [6, 6, ...] int32: points of the reached data blocks, in ascending order
  points: list[jax.Array]
  # [6, 6, ...] uint32, a bit for each program block's program that is not owned yet
  programs: jax.Array


def missed_resources(state: State) -> jax.Array:
  """Credits plus energy, [...] int32, that a siphon from a better cell would reach beyond one from here.

  A cell is better than the player's if it reaches the same points and programs, no fewer credits
  and energy, and more of at least one of the two. The largest surplus of credits and the largest of
  energy are added, even if they are of different cells. It is 0 without a better cell or data siphon.
  """
  reach = _reach(state)
  here = state.is_player_cell

  def at_player(cells):
    return jnp.sum(jnp.where(here, cells, 0), axis=(0, 1), dtype=cells.dtype)

  player_credits, player_energy = at_player(reach.credits), at_player(reach.energy)
  is_alike = reach.programs == at_player(reach.programs)
  for x in reach.points:
    is_alike = is_alike & (x == at_player(x))
  more_credits, more_energy = reach.credits - player_credits, reach.energy - player_energy
  is_better = is_alike & (more_credits >= 0) & (more_energy >= 0) & (more_credits + more_energy > 0)
  is_better = is_better & (state.data_siphons > 0)
  return jnp.max(jnp.where(is_better, more_credits, 0), axis=(0, 1)) + jnp.max(
    jnp.where(is_better, more_energy, 0), axis=(0, 1)
  )


def _reach(state: State) -> _Reach:
  num_axes = state.row.ndim
  is_open, is_fresh = ~state.has_block, ~state.block_siphoned
  lies = is_open & is_fresh
  is_data = is_fresh & (state.block_type == state_lib.DATA)
  programs = state_lib.column(np.arange(state_lib.NUM_PROGRAMS, dtype=np.uint32), num_axes)
  one = np.uint32(1)
  not_owned = jnp.sum(jnp.where(state.owned, 0, one << programs), axis=0, dtype=np.uint32)
  is_program = is_fresh & (state.block_type == state_lib.PROGRAM)
  program = jnp.where(
    is_program, (one << state.block_program.astype(np.uint32)) & not_owned, np.uint32(0)
  )
  credits = jnp.where(is_open, sum(_cross(jnp.where(lies, state.cell_credits, 0))), 0)
  energy = jnp.where(is_open, sum(_cross(jnp.where(lies, state.cell_energy, 0))), 0)
  points = [
    jnp.where(is_open, x, 0) for x in _sort(_cross(jnp.where(is_data, state.block_points, 0)))
  ]
  found = jnp.zeros_like(program)
  for x in _cross(program):
    found = found | x
  return _Reach(credits, energy, points, jnp.where(is_open, found, 0))


def _cross(cells: jax.Array) -> list[jax.Array]:
  """The values of each cell and of its four neighbours, 0 off the board; five of [6, 6, ...]."""
  margin = [(1, 1), (1, 1)] + [(0, 0)] * (cells.ndim - 2)
  cells = jnp.pad(cells, margin)
  middle = slice(1, -1)
  return [
    cells[middle, middle],
    cells[2:, middle],
    cells[:-2, middle],
    cells[middle, :-2],
    cells[middle, 2:],
  ]


def _sort(values: list[jax.Array]) -> list[jax.Array]:
  """Sorts five arrays, element by element, with the nine comparisons of a sorting network."""
  values = list(values)
  for i, j in ((0, 3), (1, 4), (0, 2), (1, 3), (0, 1), (2, 4), (1, 2), (3, 4), (2, 3)):
    low, high = values[i], values[j]
    values[i], values[j] = jnp.minimum(low, high), jnp.maximum(low, high)
  return values


def shape(before: State, after: State, *, ended: jax.Array, chosen: options.Options) -> jax.Array:
  """The reward for the walking distance d to the exit, [...] float32; w is `chosen.distance_shaping`.

    'original':   w max(0, d - d')
    'potential':  gamma Phi(s') - Phi(s),    Phi(s) = -w d,    Phi = 0 at the end of an episode

  The potential (Ng, Harada and Russell, 1999) leaves the order of policies unchanged: discounted by
  gamma, its terms of an episode sum to -Phi of the first state. After a stage change d' is the distance
  to the new exit. Where no path leads to the exit d is 0 in 'original', as at the exit. In 'potential'
  it is then 10, as far as across the empty board, because a pocket without a path is no goal.
  """
  old, new = _distances(before, after)
  if chosen.shaping == 'original':
    return _scale(chosen.distance_shaping, jnp.maximum(old - new, 0))
  old, new = (
    jnp.where(
      (distance > 0) | ((state.row == state.exit_row) & (state.col == state.exit_col)),
      distance,
      UNREACHABLE,
    )
    for distance, state in ((old, before), (new, after))
  )
  later = np.float32(chosen.gamma) * jnp.where(ended, 0, new).astype(np.float32)
  return chosen.distance_shaping * (old.astype(np.float32) - later)


def _distances(before: State, after: State) -> jax.Array:
  """Walking distances to the exit around all blocks in both states, [2, ...] int32."""
  boards = [
    (
      board.of_cells(state.has_block),
      board.of_cell(state.row, state.col),
      board.of_cell(state.exit_row, state.exit_col),
    )
    for state in (before, after)
  ]
  stacked = jax.tree.map(lambda *halves: jnp.stack(halves), *boards)
  return board.walking_distance(*stacked)


def _count(active: jax.Array) -> jax.Array:
  return jnp.sum(active, axis=0, dtype=np.int32)


def _scale(factor: float, amount: jax.Array) -> jax.Array:
  return np.float32(factor) * amount.astype(np.float32)
