"""Constants of HackMatrix, its immutable `State`, and functions on masks and slots of entities.

In all modules of the game, `...` in a shape stands for any axes of environments, which come last. The
rules take a state in int32, see `widen`, an `action`, [...] int32, and random `bits`, uint32.
"""

import enum
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

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

# Fields of a state: an array, or a number in a state built by hand; and the dtype that is stored.
Bool = Annotated[Any, np.bool_]
Int8 = Annotated[Any, np.int8]
Int16 = Annotated[Any, np.int16]
Int32 = Annotated[Any, np.int32]
Tree = TypeVar('Tree')


class Enemies(flax.struct.PyTreeNode):
  """The 20 slots for enemies; a new enemy takes the lowest inactive slot."""

  active: Bool  # [20]; where False, the other fields are meaningless
  kind: Int8  # [20] VIRUS to CRYPTOG
  row: Int8  # [20]
  col: Int8  # [20]
  hp: Int8  # [20]
  disabled_turns: Int8  # [20] enemy turns in which it will not move; no rule sets it
  stunned: Bool  # [20] whether it neither moves nor attacks in the next enemy turn
  from_siphon: Bool  # [20] whether a siphon released it
  from_scheduled: Bool  # [20] whether a scheduled task sent it; no rule reads it


class Transmissions(flax.struct.PyTreeNode):
  """The 20 slots for transmissions, which become enemies; filled like the slots of `Enemies`."""

  active: Bool  # [20]; where False, the other fields are meaningless
  kind: Int8  # [20] kind of the enemy that it becomes
  row: Int8  # [20]
  col: Int8  # [20]
  turns: Int16  # [20] enemy turns until it becomes an enemy
  from_siphon: Bool  # [20], see `Enemies`
  from_scheduled: Bool  # [20], see `Enemies`


class State(flax.struct.PyTreeNode):
  """State of one game. Cells are [row, column]; scalars are int32 where no dtype is given.

  UNDO returns to the start of its own step, so it only refunds its own cost, and no earlier state is
  stored.
  """

  row: Int32  # [] row of the player
  col: Int32  # [] column of the player
  hp: Int32  # [] hit points of the player, 0 to 3; 0 is dead
  attack: Int32  # [] damage of the player's attack, 1 to 3
  credits: Int32  # [] one of two currencies that pay for programs
  energy: Int32  # [] the other one
  data_siphons: Int32  # [] number of siphons that the player can use
  score: Int32  # [] points from data blocks and the program SCORE
  exit_row: Int32  # [] row of the exit
  exit_col: Int32  # [] column of the exit
  block_type: Int8  # [6, 6] NO_BLOCK to QUESTION
  block_points: Int16  # [6, 6] points of a data block, which siphoning it adds to the score
  block_program: Int8  # [6, 6] program of a program block, which siphoning it makes the player own
  block_spawn: Int16  # [6, 6] number of transmissions that siphoning the block releases
  block_siphoned: Bool  # [6, 6] a siphoned block stays, and can be walked on
  siphon_center: Bool  # [6, 6] cells from which the player siphoned a block
  cell_credits: Int16  # [6, 6] credits to be picked up
  cell_energy: Int16  # [6, 6] energy to be picked up
  cell_data_siphon: Bool  # [6, 6] data siphons to be picked up
  enemies: Enemies
  transmissions: Transmissions
  owned: Bool  # [23] whether the player owns each `Program`
  stage: Int32  # [] number of the stage, 1 to 8; 9 after victory
  turn: Int32  # [] turns since the reset
  # [] whether cryptogs are observed also outside the player's row and column; SHOW sets it until
  # the stage ends
  show_active: Bool
  tasks_disabled: Bool  # [] whether there are no more scheduled tasks in this episode
  step_active: Bool  # [] whether no enemy moves in the next enemy turn
  attack_upgrades: Int32  # [] uses of ATK+ in this stage
  next_task_turn: Int32  # [] turn of the next scheduled task
  task_interval: Int32  # [] turns from one scheduled task to the next; 0: there are none
  history_valid: Bool  # [] whether UNDO is legal

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


def _dtypes(kind: Any) -> Any:
  """The record `kind` with the dtype of every field in its place."""
  found = {}
  for name, hint in kind.__annotations__.items():
    found[name] = hint.__metadata__[0] if hasattr(hint, '__metadata__') else _dtypes(hint)
  return kind(**found)


DTYPES = _dtypes(State)


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
  """Constants with `num_axes` axes of size 1 appended, to broadcast over axes of environments."""
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
  """The tree with a change in the environments where the condition, [...] bool, holds.

  The change is computed only if the condition holds in any environment. Even if it always does, this
  is faster: the change is compiled as a unit, and its inputs and outputs are computed once. Otherwise
  XLA would repeat them wherever they are used.
  """

  def change_some():
    return select(condition, change(), otherwise)

  return jax.lax.cond(jnp.any(condition), change_some, lambda: otherwise)


def make_if_any(condition: jax.Array, make: Callable[[], Tree]) -> Tree:
  """Result of `make` if the condition, [...] bool, holds in any environment, else zeros.

  As with `where_any`, it is computed once, so use it for a few numbers from which many others are
  computed: XLA would otherwise repeat them for every slot and cell. Results of environments where the
  condition does not hold are meaningless.
  """
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))
  return jax.lax.cond(jnp.any(condition), make, lambda: zeros)


def lowest_free(active: jax.Array, count: chex.Numeric) -> tuple[jax.Array, jax.Array]:
  """Assigns the lowest inactive slots to `count` new entries; entries without a slot are dropped.

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
