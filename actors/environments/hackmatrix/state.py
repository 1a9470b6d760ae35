"""Constants of HackMatrix, its immutable `State`, and functions on masks and slots of entities.

In all modules of the game, `...` in a shape stands for any axes of environments, which come last.
"""

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

SIZE = 6  # cells a side; row 0 is at the bottom
NUM_ENEMIES = 20  # slots, active or not
NUM_TRANSMISSIONS = 20
NUM_PROGRAMS = 23
LAST_STAGE = 8  # completing it wins, and the stage is then 9
MAX_HP = 3
MAX_ATTACK = 3
MAX_ATTACK_UPGRADES = 2  # uses of ATK+ in one stage
TASK_INTERVAL = 12  # turns between scheduled tasks
CORNERS = np.array([[0, 0], [0, SIZE - 1], [SIZE - 1, 0], [SIZE - 1, SIZE - 1]], np.int32)

UP, DOWN, LEFT, RIGHT, SIPHON, FIRST_PROGRAM = range(6)
NUM_ACTIONS = FIRST_PROGRAM + NUM_PROGRAMS


class Program(enum.IntEnum):
  """Indices into `State.owned`; the action that executes one is `FIRST_PROGRAM` more."""

  PUSH = 0
  PULL = 1
  CRASH = 2
  WARP = 3
  POLY = 4
  WAIT = 5
  DEBUG = 6
  ROW = 7
  COL = 8
  UNDO = 9
  STEP = 10
  SIPH_PLUS = 11
  EXCH = 12
  SHOW = 13
  RESET = 14
  CALM = 15
  D_BOM = 16
  DELAY = 17
  ANTI_V = 18
  SCORE = 19
  REDUC = 20
  ATK_PLUS = 21
  HACK = 22

  @property
  def action(self) -> int:
    return FIRST_PROGRAM + self.value


VIRUS, DAEMON, GLITCH, CRYPTOG = range(4)  # kinds of enemies, and of what transmissions become
NUM_KINDS = 4
FULL_HP = np.array([2, 3, 2, 2], np.int32)  # by kind
NO_BLOCK, DATA, PROGRAM, QUESTION = range(4)  # kinds of blocks

Field = Any  # an array, or a number in a state built by hand
Tree = TypeVar('Tree')


class Enemies(flax.struct.PyTreeNode):
  """The 20 slots for enemies; a new enemy takes the lowest inactive slot.

  Attributes:
    active: [20] bool; where False, the other fields are meaningless.
    kind: [20] int8, VIRUS to CRYPTOG.
    row: [20] int8.
    col: [20] int8.
    hp: [20] int8.
    disabled_turns: [20] int8, enemy turns in which it will not move; no rule sets it.
    stunned: [20] bool, whether it neither moves nor attacks in the next enemy turn.
    from_siphon: [20] bool, whether a siphon released it.
    from_scheduled: [20] bool, whether a scheduled task sent it; no rule reads it.
  """

  active: Field
  kind: Field
  row: Field
  col: Field
  hp: Field
  disabled_turns: Field
  stunned: Field
  from_siphon: Field
  from_scheduled: Field


class Transmissions(flax.struct.PyTreeNode):
  """The 20 slots for transmissions, which become enemies; filled like the slots of `Enemies`.

  Attributes:
    active: [20] bool; where False, the other fields are meaningless.
    kind: [20] int8, kind of the enemy that it becomes.
    row: [20] int8.
    col: [20] int8.
    turns: [20] int16, enemy turns until it becomes an enemy.
    from_siphon: [20] bool, see `Enemies`.
    from_scheduled: [20] bool, see `Enemies`.
  """

  active: Field
  kind: Field
  row: Field
  col: Field
  turns: Field
  from_siphon: Field
  from_scheduled: Field


class State(flax.struct.PyTreeNode):
  """State of one game. Cells are [row, column]; scalars are int32 where no dtype is given.

  UNDO returns to the start of its own step, so it only refunds its own cost, and no earlier state is
  stored.

  Attributes:
    row: [] row of the player.
    col: [] column of the player.
    hp: [] hit points of the player, 0 to 3; 0 is dead.
    attack: [] damage of the player's attack, 1 to 3.
    credits: [] one of two currencies that pay for programs.
    energy: [] the other one.
    data_siphons: [] number of siphons that the player can use.
    score: [] points from data blocks and the program SCORE.
    exit_row: [] row of the exit.
    exit_col: [] column of the exit.
    block_type: [6, 6] int8, NO_BLOCK to QUESTION.
    block_points: [6, 6] int16, points of a data block, which siphoning it adds to the score.
    block_program: [6, 6] int8, program of a program block, which siphoning it makes the player own.
    block_spawn: [6, 6] int16, number of transmissions that siphoning the block releases.
    block_siphoned: [6, 6] bool; a siphoned block stays, and can be walked on.
    siphon_center: [6, 6] bool, cells from which the player siphoned a block.
    cell_credits: [6, 6] int16, credits to be picked up.
    cell_energy: [6, 6] int16, energy to be picked up.
    cell_data_siphon: [6, 6] bool, data siphons to be picked up.
    enemies: see `Enemies`.
    transmissions: see `Transmissions`.
    owned: [23] bool, whether the player owns each `Program`.
    stage: [] number of the stage, 1 to 8; 9 after victory.
    turn: [] turns since the reset.
    show_active: [] bool, whether cryptogs are observed also outside the player's row and column; SHOW
      sets it until the stage ends.
    tasks_disabled: [] bool, whether there are no more scheduled tasks in this episode.
    step_active: [] bool, whether no enemy moves in the next enemy turn.
    attack_upgrades: [] uses of ATK+ in this stage.
    next_task_turn: [] turn of the next scheduled task.
    task_interval: [] turns from one scheduled task to the next; 0: there are none.
    history_valid: [] bool, whether UNDO is legal.
  """

  row: Field
  col: Field
  hp: Field
  attack: Field
  credits: Field
  energy: Field
  data_siphons: Field
  score: Field
  exit_row: Field
  exit_col: Field
  block_type: Field
  block_points: Field
  block_program: Field
  block_spawn: Field
  block_siphoned: Field
  siphon_center: Field
  cell_credits: Field
  cell_energy: Field
  cell_data_siphon: Field
  enemies: Enemies
  transmissions: Transmissions
  owned: Field
  stage: Field
  turn: Field
  show_active: Field
  tasks_disabled: Field
  step_active: Field
  attack_upgrades: Field
  next_task_turn: Field
  task_interval: Field
  history_valid: Field

  @property
  def has_block(self) -> jax.Array:
    """[6, 6] bool, cells with a block, siphoned or not."""
    return self.block_type != NO_BLOCK

  @property
  def has_unsiphoned_block(self) -> jax.Array:
    """[6, 6] bool, cells with a block that is not siphoned; it cannot be walked on."""
    return self.has_block & ~self.block_siphoned

  @property
  def is_player_cell(self) -> jax.Array:
    """[6, 6] bool, True in the player's cell."""
    return is_cell(self.row, self.col)


def _dtypes() -> State:
  """The dtype of every field."""
  slots = {name: np.int8 for name in ('kind', 'row', 'col', 'hp', 'disabled_turns')}
  flags = {name: np.bool_ for name in ('active', 'stunned', 'from_siphon', 'from_scheduled')}
  fields: dict[str, Any] = {name: np.int32 for name in State.__annotations__}
  fields.update({name: np.int8 for name in ('block_type', 'block_program')})
  fields.update(
    {name: np.int16 for name in ('block_points', 'block_spawn', 'cell_credits', 'cell_energy')}
  )
  for name in ('block_siphoned', 'siphon_center', 'cell_data_siphon', 'owned', 'show_active'):
    fields[name] = np.bool_
  for name in ('tasks_disabled', 'step_active', 'history_valid'):
    fields[name] = np.bool_
  fields['enemies'] = Enemies(**slots, **flags)
  fields['transmissions'] = Transmissions(
    **{name: slots[name] for name in ('kind', 'row', 'col')},
    **{name: flags[name] for name in ('active', 'from_siphon', 'from_scheduled')},
    turns=np.int16,
  )
  return State(**fields)


DTYPES = _dtypes()


def initial() -> State:
  """The state after a reset: the first stage, an empty board."""
  slots = np.zeros((NUM_ENEMIES,))
  fields: dict[str, Any] = {name: np.zeros(()) for name in State.__annotations__}
  for name in fields:
    if name.startswith(('block_', 'cell_', 'siphon_')):
      fields[name] = np.zeros((SIZE, SIZE))
  fields['enemies'] = Enemies(**{name: slots for name in Enemies.__annotations__})
  fields['transmissions'] = Transmissions(**{name: slots for name in Transmissions.__annotations__})
  return narrow(
    State(**fields).replace(
      hp=MAX_HP,
      attack=1,
      exit_row=SIZE - 1,
      exit_col=SIZE - 1,
      owned=np.zeros((NUM_PROGRAMS,)),
      stage=1,
      next_task_turn=TASK_INTERVAL,
      task_interval=TASK_INTERVAL,
    )
  )


def widen(state: State) -> State:
  """Converts integers of any dtype to int32, in which the rules compute."""

  def convert(dtype, x):
    return jnp.asarray(x, np.bool_ if dtype == np.bool_ else np.int32)

  return jax.tree.map(convert, DTYPES, state)


def narrow(state: State) -> State:
  """Converts every field to the dtype in which it is stored."""
  return jax.tree.map(lambda dtype, x: jnp.asarray(x).astype(dtype), DTYPES, state)


def column(values: Any, num_axes: int) -> np.ndarray:
  """Constants with `num_axes` axes of size 1 appended, which broadcast over axes of environments."""
  values = np.asarray(values)
  return values.reshape(values.shape + (1,) * num_axes)


def is_cell(row: jax.Array, col: jax.Array) -> jax.Array:
  """[6, 6, ...] bool, True in the cell at [row, col]; a mask is cheaper than an index."""
  rows, cols = column(np.indices((SIZE, SIZE), np.int32), row.ndim)
  return (rows == row) & (cols == col)


def select(condition: jax.Array, one: Tree, other: Tree) -> Tree:
  """Selects `one` where the condition holds, `other` elsewhere, field by field."""
  # A field that is the same array in both is passed through, so that XLA does not copy it.
  return jax.tree.map(lambda x, y: x if x is y else jnp.where(condition, x, y), one, other)


def where_any(condition: jax.Array, change: Callable[[], Tree], otherwise: Tree) -> Tree:
  """The tree with a change in the environments where the condition holds.

  The change is computed only if the condition holds in any environment. Even if it always does, this
  is faster: the change is compiled as a unit, and its inputs and outputs are computed once. Otherwise
  XLA would repeat them wherever they are used.

  Args:
    condition: [...] bool.
    change: function without arguments that returns the changed tree, for all environments.
    otherwise: the tree before the change, which stays where the condition does not hold.
  """

  def change_some():
    return select(condition, change(), otherwise)

  return jax.lax.cond(jnp.any(condition), change_some, lambda: otherwise)


def make_if_any(condition: jax.Array, make: Callable[[], Tree]) -> Tree:
  """Result of `make` if the condition holds in any environment, else zeros.

  As with `where_any`, it is computed once, so use it for a few numbers from which many others are
  computed: XLA would otherwise repeat them for every slot and cell. Results of environments where the
  condition does not hold are meaningless.

  Args:
    condition: [...] bool.
    make: function without arguments that returns a tree of arrays.
  """
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))
  return jax.lax.cond(jnp.any(condition), make, lambda: zeros)


def lowest_free(active: jax.Array, count: chex.Numeric) -> tuple[jax.Array, jax.Array]:
  """Assigns the lowest inactive slots to `count` new entries; entries without a slot are dropped.

  Args:
    active: [20, ...] bool.
    count: [...] int32.

  Returns:
    [20, ...] bool, the slots taken; and [20, ...] int32, the index, from 0, of the new entry that
    takes each slot.
  """
  rank = rank_among(~active)
  return ~active & (rank < count), rank


def rank_among(mask: jax.Array) -> jax.Array:
  """[n, ...] int32, number of True entries before each entry of a mask, [n, ...] bool with n <= 32."""
  below = column(
    (np.uint64(1) << np.arange(len(mask), dtype=np.uint64)) - np.uint64(1), mask.ndim - 1
  )
  return jax.lax.population_count(pack(mask) & below.astype(np.uint32)).astype(np.int32)


def pack(mask: jax.Array) -> jax.Array:
  """Packs a mask, [n, ...] bool with n <= 32, into [...] uint32 with bit i from mask[i]."""
  bits = column(np.uint32(1) << np.arange(len(mask), dtype=np.uint32), mask.ndim - 1)
  return jnp.sum(jnp.where(mask, bits, np.uint32(0)), axis=0, dtype=np.uint32)
