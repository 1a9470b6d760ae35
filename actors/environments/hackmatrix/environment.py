"""HackMatrix, a turn-based game on 6 by 6 cells with 28 actions."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import StepType, specs

from hephaestus.actors.environments import environment
from hephaestus.actors.environments.hackmatrix import (
  enemies,
  observation,
  options,
  player,
  programs,
  rendering,
  rewards,
  stages,
)
from hephaestus.actors.environments.hackmatrix import state as state_lib
from hephaestus.actors.environments.hackmatrix.state import Program, State

ACTION_NAMES = ('up', 'down', 'left', 'right', 'siphon', *(program.name for program in Program))


METRICS = {
  **{f'reward_{part}': 'sum' for part in rewards.Reward._fields},
  'moves': 'mean',
  'siphons': 'mean',
  'programs': 'mean',
  'siphon_legal': 'mean',
  'highest_stage': 'max',
  'stages_completed': 'sum',
}

_BLOCK = 64  # environments stepped at a time, so that intermediate arrays fit a core's cache


class _Bits(NamedTuple):
  """Random integers of one step, by their use; the defaults are how many of them each use needs."""

  warp: Any = 1
  task: Any = 1
  stage: stages.Chance = stages.NUM_BITS


class _Outcome(NamedTuple):
  """Result of a step."""

  state: State  # the next state
  reward: rewards.Reward  # the reward, in its parts
  done: jax.Array  # [...] bool, whether the episode terminated
  codes: observation.Codes  # packed observation
  mask: jax.Array  # [28, ...] bool, legal actions


@dataclasses.dataclass(frozen=True, kw_only=True)
class HackMatrix(options.Options, environment.Environment):
  """Reach the exits of eight stages, past enemies and with the help of programs.

  Actions are up, down, left, right, siphon, and the 23 of `Program`. `step` executes an action also
  where the mask forbids it; the mask may be all False. An episode terminates with death or victory, and
  has no time limit; `make` of this package adds one. The rules are in `player`, `programs`, `enemies`,
  `stages` and `rewards`; its attributes are the options, see `options.Options`.

  A `State` may be built by hand, with `initial` and `.replace`, and passed to `step`, `play`, `observe`
  and `action_mask`. Its integers may be of any dtype.
  """

  @property
  def observation_spec(self) -> dict[str, specs.Array]:
    num_actions = state_lib.NUM_ACTIONS
    return {
      'features': environment.BoardSpec(
        (observation.NUM_FEATURES,),
        np.float32,
        (state_lib.SIZE, state_lib.SIZE, observation.NUM_CHANNELS),
        'player_programs_cells',
        player=(0, 1),
      ),
      'action_mask': specs.BoundedArray((num_actions,), bool, False, True, 'action_mask'),
    }

  @property
  def action_spec(self) -> specs.DiscreteArray:
    return specs.DiscreteArray(state_lib.NUM_ACTIONS, np.int32, 'move_siphon_program')

  @property
  def max_steps(self) -> int:
    """The largest int32, because there is no time limit."""
    return int(np.iinfo(np.int32).max)

  @property
  def action_names(self) -> tuple[str, ...]:
    return ACTION_NAMES

  @property
  def scored_by(self) -> str:
    return 'stages_completed'

  @property
  def metrics(self) -> Mapping[str, str]:
    """Parts of the return; shares of steps by action, and of those at which a siphon is legal; stages.

    The highest stage is 9 after victory.
    """
    return METRICS

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    """Begins an episode on the empty first stage; only a fraction of `starting_siphons` is random."""
    num_siphons = math.floor(self.starting_siphons)
    first = self._first(num_siphons)
    if more := self.starting_siphons - num_siphons:
      first = state_lib.select(jax.random.bernoulli(key, more), self._first(num_siphons + 1), first)
    state, seen = first
    return state, environment.restart(seen, dict.fromkeys(METRICS, 0.0))

  def _first(self, num_siphons: int) -> tuple[State, dict[str, jax.Array]]:
    """The state at the start of an episode, and its observation."""
    state = state_lib.initial().replace(
      data_siphons=jnp.int32(num_siphons),
      credits=jnp.int32(self.starting_credits),
      energy=jnp.int32(self.starting_energy),
    )
    # The result of `observe` as constants, because auto-reset would compute it at every step.
    features = np.zeros((observation.NUM_FEATURES,), np.float32)
    features[observation.PLAYER_HP] = 1.0
    features[observation.PLAYER_CREDITS] = min(self.starting_credits / observation.MAX_RESOURCES, 1)
    features[observation.PLAYER_ENERGY] = min(self.starting_energy / observation.MAX_RESOURCES, 1)
    features[observation.PLAYER_DATA_SIPHONS] = num_siphons / observation.DATA_SIPHONS
    features[observation.NUM_FEATURES - observation.NUM_CHANNELS + observation.EXIT] = 1.0
    legal = (state_lib.UP, state_lib.RIGHT, *[state_lib.SIPHON] * (num_siphons > 0))
    mask = np.isin(np.arange(state_lib.NUM_ACTIONS), legal)
    return state, {'features': jnp.asarray(features), 'action_mask': jnp.asarray(mask)}

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    outcome = _step_of(self)(state, action, _draw(key))
    timestep = environment.TimeStep(
      step_type=jnp.where(outcome.done, StepType.LAST.value, StepType.MID.value).astype(np.int32),
      reward=outcome.reward.total(),
      discount=jnp.where(outcome.done, 0.0, 1.0).astype(np.float32),
      observation=_observation(outcome.codes, outcome.mask),
      metrics=_metrics(state, action, outcome),
    )
    return outcome.state, timestep

  def play(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, rewards.Reward, jax.Array]:
    """Takes one action like `step`; returns the state, the reward in parts, and whether it terminated."""
    outcome = _step_of(self)(state, action, _draw(key))
    return outcome.state, outcome.reward, outcome.done

  def observe(self, state: State) -> dict[str, jax.Array]:
    """The observation of a state.

    It has 'features', [1545] float32: 10 numbers of the player, 23 of programs, and 42 channels of each
    cell, row by row, as the module `observation` names them; and 'action_mask', see `action_mask`.
    """
    state = state_lib.widen(state)
    return _observation(observation.encode(state), _legal(state))

  def action_mask(self, state: State) -> jax.Array:
    """Legal actions of a state, [28] bool; also of the state of a finished episode."""
    return _legal(state_lib.widen(state))

  def scripted_action(self, state: State) -> jax.Array:
    """Walks to the exit around blocks; a step towards an enemy in its line attacks that enemy.

    Without a path it siphons if it can, because siphoned blocks can be walked on.
    """
    return player.towards_exit(state_lib.widen(state), self.action_mask(state))

  def render(self, state: State) -> np.ndarray:
    """Renders the board, the player's numbers and the programs; see `rendering.frame`."""
    return rendering.frame(state)


def _metrics(before: State, action: jax.Array, outcome: _Outcome) -> dict[str, jax.Array]:
  """Values of `METRICS` at a step, which takes an action in the state `before`."""
  stage = outcome.state.stage
  values = {
    **{f'reward_{part}': value for part, value in outcome.reward._asdict().items()},
    'moves': action <= state_lib.RIGHT,
    'siphons': action == state_lib.SIPHON,
    'programs': action >= state_lib.FIRST_PROGRAM,
    'siphon_legal': jnp.asarray(before.data_siphons) > 0,
    'highest_stage': stage,
    'stages_completed': stage - before.stage,
  }
  return {name: jnp.asarray(value, np.float32) for name, value in values.items()}


def _draw(key: chex.PRNGKey) -> jax.Array:
  """Samples all random integers of a step, [n] uint32, see `_Bits`."""
  return jax.random.bits(key, (sum(jax.tree.leaves(_Bits())),), np.uint32)


def _assign(bits: jax.Array) -> _Bits:
  """Splits random integers by their use: [...] for one integer, [n, ...] for n."""
  sizes, tree = jax.tree.flatten(_Bits())
  starts = np.cumsum([0, *sizes])
  parts = [
    bits[start] if size == 1 else bits[start : start + size]
    for start, size in zip(starts, sizes, strict=False)
  ]
  return jax.tree.unflatten(tree, parts)


def _envs_last(function: Callable[..., Any]) -> Callable[..., Any]:
  """Transforms a function of arrays so that, under vmap, the axis of environments comes last.

  A field with one number per environment is then one contiguous vector over environments, and every
  rule is vector arithmetic. With the axis first, contiguous runs would be as short as a board. The jit
  makes all programs of a process share one trace of the rules.
  """
  batched = jax.custom_batching.custom_vmap(jax.jit(function))

  @jax.jit
  def call(args):
    outs = function(*jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), args))
    return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), outs)

  @batched.def_vmap
  def _(axis_size, in_batched, *args):
    def batch(x, is_batched):
      return x if is_batched else jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))

    args = jax.tree.map(batch, args, tuple(in_batched))
    num_blocks, rest = divmod(axis_size, _BLOCK)
    if num_blocks > 1 and not rest:
      blocks = jax.tree.map(lambda x: x.reshape(num_blocks, _BLOCK, *x.shape[1:]), args)
      outs = jax.lax.map(call, blocks)
      outs = jax.tree.map(lambda x: x.reshape(axis_size, *x.shape[2:]), outs)
    else:
      outs = call(args)
    return outs, jax.tree.map(lambda _: True, outs)

  return batched


@functools.cache
def _step_of(chosen: options.Options) -> Callable[..., _Outcome]:
  """Makes a function (state, action, bits) that takes one step with some options, see `_step`."""
  return _envs_last(functools.partial(_step, chosen))


def _step(chosen: options.Options, state: State, action: jax.Array, bits: jax.Array) -> _Outcome:
  """Takes one step, in the order of the rules, for any trailing axes of environments."""
  before = state_lib.widen(state)
  action = jnp.asarray(action, np.int32)
  chance = _assign(bits)
  # A siphon, POLY and the end of a stage exclude each other in one step, so they share their bits.
  slot_bits = chance.stage.cells[: state_lib.NUM_ENEMIES]

  state = player.move(before, action)
  state = player.siphon(state, action, slot_bits)
  is_program = action >= state_lib.FIRST_PROGRAM
  state = state_lib.where_any(
    is_program, lambda: programs.execute(state, action, slot_bits, chance.warp), state
  )
  ends_turn = (action <= state_lib.SIPHON) | (action == Program.WAIT.action)
  state = state.replace(turn=state.turn + ends_turn, history_valid=action != Program.UNDO.action)
  state = enemies.turn(state, ends_turn, chance.task)
  died = state.hp <= 0

  may_leave = (action <= state_lib.RIGHT) | (action == Program.WARP.action)
  is_at_exit = (state.row == state.exit_row) & (state.col == state.exit_col)
  completed = may_leave & is_at_exit & (state.stage <= state_lib.LAST_STAGE)
  layout = state_lib.make_if_any(completed, lambda: stages.sample_layout(state, chance.stage))
  state = state_lib.where_any(
    completed, lambda: stages.advance(state, layout, chance.stage, chosen), state
  )
  won = state.stage > state_lib.LAST_STAGE
  reward = rewards.earn(
    before, action, state, died=died, completed=completed, won=won, chosen=chosen
  )
  return _Outcome(
    state=state_lib.narrow(state),
    reward=reward,
    done=died | won,
    codes=observation.encode(state),
    mask=_legal(state),
  )


def _legal(state: State) -> jax.Array:
  """Legal actions, [28, ...] bool."""
  siphon = (state.data_siphons > 0)[None]
  return jnp.concatenate([player.legal_moves(state), siphon, programs.usable(state)])


def _observation(codes: observation.Codes, mask: jax.Array) -> dict[str, jax.Array]:
  return {'features': observation.decode(codes), 'action_mask': mask}
