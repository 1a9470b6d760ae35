"""GridWorld: walk on a square of cells and collect all resources before the time limit."""

import dataclasses
from typing import ClassVar

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment

NUM_TYPES = 8
EMPTY = 255  # in `State.grid`, a cell without a resource
UP, DOWN, LEFT, RIGHT, COLLECT = range(5)
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]], np.int32)

STEP_REWARD = -0.01  # of every step
COLLECT_REWARD = 1.0  # of a resource
DISCOVERY_REWARD = 0.1  # of the first visit only, or it could be earned for ever

CELL_PIXELS = 16
BACKGROUND, LINE, AGENT = (250, 250, 247), (226, 226, 220), (30, 30, 34)
TYPE_COLOURS = np.array(  # the colour-blind safe palette of Okabe and Ito; the last two lightened
  [
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
    (150, 150, 150),
  ],
  np.uint8,
)


class State(flax.struct.PyTreeNode):
  """State of a grid of S by S cells."""

  position: jax.Array  # [2] int32, the agent's row and column
  grid: jax.Array  # [S, S] uint8, the type of the resource in each cell, or EMPTY
  inventory: jax.Array  # [NUM_TYPES] int32, how many of each type were collected
  step_count: jax.Array  # [] int32, steps since the reset
  visited: jax.Array  # [S, S] bool, cells the agent has stood on, the first included
  cumulative_reward: jax.Array  # [] float32, the return so far


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridWorld(environment.DiscreteEnvironment):
  """A square of cells with resources of 8 types on some of them.

  Actions are up, down, left, right and collect; a wall stops a move. The reward is 1 for collecting
  the resource of the agent's cell, 0.1 for the first visit to a cell with a resource, and -0.01 for
  every step. The episode terminates when no resource is left, and is truncated after `max_steps`.

  The observation is [10 + size²] float32 in [0, 1]: the inventory divided by `num_resources`; row and column
  divided by size - 1; and the cells row by row, 0 if empty, else (type + 1) / 8. Up to 16 by 16 cells,
  bfloat16 keeps all of these values distinct.
  """

  size: int = 16  # cells along a side
  num_resources: int = 24  # resources at the beginning of an episode
  max_steps: int = 256  # time limit
  # whether agents read the cells as those of a board, all alike; else as any other vector, which is faster
  cells: bool = True

  action_names: ClassVar[tuple[str, ...]] = ('up', 'down', 'left', 'right', 'collect')

  def __post_init__(self):
    self._check_least(size=2, max_steps=1)
    self._check_size(self.size**2, 'size')
    most = self.size**2 - 1
    if not 1 <= self.num_resources <= most:
      raise ValueError(
        f'environment.num_resources={self.num_resources}: a grid of size {self.size} '
        f'takes 1 to {most}'
      )

  @property
  def observation_spec(self) -> specs.Array:
    shape, name = (NUM_TYPES + 2 + self.size**2,), 'inventory_position_cells'
    if not self.cells:
      return specs.BoundedArray(shape, np.float32, 0.0, 1.0, name)
    board, player = (self.size, self.size, 1), (NUM_TYPES, NUM_TYPES + 1)
    return environment.BoardSpec(shape, np.float32, board, name, player=player)

  @property
  def has_costly_reset(self) -> bool:
    return True

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    grid_key, position_key = jax.random.split(key)
    position = jax.random.randint(position_key, (2,), 0, self.size)
    state = State(
      position=position,
      grid=self._scatter_resources(grid_key),
      inventory=jnp.zeros((NUM_TYPES,), jnp.int32),
      step_count=jnp.zeros((), jnp.int32),
      visited=self._is_at(position),
      cumulative_reward=jnp.zeros((), jnp.float32),
    )
    return state, environment.restart(self.observe(state))

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    del key  # Only the reset is random.
    position = jnp.clip(state.position + jnp.asarray(MOVES)[action], 0, self.size - 1)
    row, column = position[0], position[1]
    type_here = state.grid[row, column]
    is_resource = type_here != EMPTY
    collected = is_resource & (action == COLLECT)
    # Read before the write, so that XLA need not copy it.
    visited, known = jax.lax.optimization_barrier((state.visited, state.visited[row, column]))
    discovered = is_resource & ~known
    reward = STEP_REWARD + COLLECT_REWARD * collected + DISCOVERY_REWARD * discovered
    left_here = jnp.where(collected, jnp.uint8(EMPTY), type_here)
    state = state.replace(
      position=position,
      grid=state.grid.at[row, column].set(left_here),
      inventory=state.inventory + (collected & (jnp.arange(NUM_TYPES) == type_here)),
      step_count=state.step_count + 1,
      visited=visited.at[row, column].set(True),
      cumulative_reward=state.cumulative_reward + reward,
    )
    nothing_left = jnp.sum(state.inventory) == self.num_resources
    return self._stepped(state, reward, nothing_left)

  def scripted_action(self, state: State) -> jax.Array:
    """Moves to the nearest resource by Manhattan distance, first up or down, and collects it."""
    rows, columns = np.indices((self.size, self.size), np.int32)
    distance = jnp.abs(rows - state.position[0]) + jnp.abs(columns - state.position[1])
    nearest = jnp.argmin(jnp.where(state.grid == EMPTY, 2 * self.size, distance))
    row, column = nearest // self.size, nearest % self.size
    return jnp.select(
      [
        row < state.position[0],
        row > state.position[0],
        column < state.position[1],
        column > state.position[1],
      ],
      [UP, DOWN, LEFT, RIGHT],
      COLLECT,
    ).astype(jnp.int32)

  def draw(self, observation: environment.Observation) -> np.ndarray:
    """Draws resources as coloured tiles of a light grid, the agent as a dark disc: [H, W, 3] uint8."""
    _, position, cells = np.split(np.asarray(observation), [NUM_TYPES, NUM_TYPES + 2])
    kinds = np.rint(cells * NUM_TYPES).astype(int).clip(0, NUM_TYPES).reshape(self.size, -1)
    pixels = np.empty((self.size, CELL_PIXELS, self.size, CELL_PIXELS, 3), np.uint8)
    pixels[...] = BACKGROUND
    pixels[:, 0] = pixels[:, :, :, 0] = LINE
    for row, column in np.argwhere(kinds):
      pixels[row, 3:-2, column, 3:-2] = TYPE_COLOURS[kinds[row, column] - 1]
    down, right = np.indices((CELL_PIXELS, CELL_PIXELS)) - CELL_PIXELS / 2
    row, column = np.rint(position * (self.size - 1)).astype(int).clip(0, self.size - 1)
    pixels[row, :, column][np.hypot(down, right) <= CELL_PIXELS / 4] = AGENT
    return pixels.reshape(self.size * CELL_PIXELS, self.size * CELL_PIXELS, 3)

  def _scatter_resources(self, key: chex.PRNGKey) -> jax.Array:
    """Random grid, [S, S] uint8: all sets of `num_resources` cells are equally likely, types uniform.

    Floyd's algorithm (Bentley and Floyd, 1987): for each `last` of the final `num_resources`
    cells, sample a cell up to `last`, and take `last` itself if that one is taken. It needs one random
    number per resource, not per cell, and no sort.
    """
    num_cells = self.size**2
    last = jnp.arange(num_cells - self.num_resources, num_cells, dtype=jnp.uint32)
    bits = jax.random.bits(key, (self.num_resources,), jnp.uint32)
    types = (bits % NUM_TYPES).astype(jnp.uint8)
    cells = bits // NUM_TYPES % (last + 1)

    def place(grid, resource):
      cell, last, type_ = resource
      cell = jnp.where(grid[cell] == EMPTY, cell, last)
      return grid.at[cell].set(type_), None

    grid = jnp.full((num_cells,), EMPTY, jnp.uint8)
    grid, _ = jax.lax.scan(place, grid, (cells, last, types))
    return grid.reshape(self.size, self.size)

  def _is_at(self, position: jax.Array) -> jax.Array:
    """[S, S] bool, True in the cell at `position`; under vmap a mask is cheaper than a scatter."""
    cells = np.arange(self.size)
    return (cells[:, None] == position[0]) & (cells == position[1])

  def observe(self, state: State) -> jax.Array:
    # Concatenated as small integers and then scaled: a fourth of the copying.
    counts = jnp.uint8 if max(self.num_resources, self.size - 1) <= 255 else jnp.int32
    parts = (
      state.inventory,
      state.position,
      (state.grid + jnp.uint8(1)).reshape(-1),  # EMPTY becomes 0
    )
    most = (self.num_resources, self.size - 1, NUM_TYPES)
    scale = np.repeat(1 / np.array(most, np.float32), (NUM_TYPES, 2, self.size**2))
    return jnp.concatenate([part.astype(counts) for part in parts]).astype(jnp.float32) * scale
