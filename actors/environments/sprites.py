"""Sprites: touch the object of the colour and shape that is shown; to test perception of objects."""

import dataclasses
import itertools

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment

SIZE = 4  # cells a side
CELL = 4  # pixels a side of a cell
WIDTH = SIZE * CELL  # of the image
NUM_CELLS = SIZE**2
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]], np.int32)

COLOURS = np.array([(220, 50, 40), (40, 180, 60), (60, 110, 240), (240, 200, 40)], np.uint8)
SHAPES = np.array(
  [
    [[1, 1, 1], [1, 1, 1], [1, 1, 1]],  # a square
    [[0, 1, 0], [1, 1, 1], [0, 1, 0]],  # a plus
    [[1, 0, 1], [0, 1, 0], [1, 0, 1]],  # a cross
    [[1, 1, 1], [1, 0, 1], [1, 1, 1]],  # a frame
  ],
  bool,
)
NUM_PAIRS = len(COLOURS) * len(SHAPES)
PAIRS = np.array(list(itertools.product(range(len(COLOURS)), range(len(SHAPES)))), np.int32)
IS_HELD_OUT = PAIRS[:, 0] == PAIRS[:, 1]  # one of each colour and each shape
AGENT, SIGN = (255, 255, 255), (70, 70, 80)  # the agent, and the ground of the sign

PIXELS = 8  # of a drawn pixel


class State(flax.struct.PyTreeNode):
  """One environment; the wanted object is the first.

  Attributes:
    pairs: [N] int32, colour and shape of each object, an index of PAIRS.
    cells: [1 + N] int32, cell of the agent and of each object, row by row; cell 0 has the sign.
    offsets: [N, 2] int32, rows and columns of an object from its cell's corner, 0 or 1.
    step_count: [] int32, steps since the reset.
  """

  pairs: jax.Array
  cells: jax.Array
  offsets: jax.Array
  step_count: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sprites(environment.Environment):
  """An image of 16 by 16 pixels with objects, a sign that shows one of them, and the agent.

  The square has 4 by 4 cells of 4 by 4 pixels. The sign, top left, shows the colour and shape of the
  wanted object on grey ground. Actions are up, down, left and right, by a cell; the agent, a white
  dot of 2 by 2 pixels, does not leave the square and does not enter the sign's cell. Entering an
  object's cell touches it, which ends the episode and pays 1 for the wanted object, -1 for another.
  Else an episode is truncated after `max_steps`.

  In each episode cells are random, an object lies up to one pixel from its cell's corner, and all
  objects differ in colour or shape. There are 16 pairs of colour and shape. Four are held out, one of
  each colour and each shape: by default they are never shown. With `held_out` the wanted object is
  one of these, and the others are any.

  The observation is [16, 16, 3] uint8.

  Attributes:
    num_objects: N, from 1 to 12.
    held_out: whether the wanted object is of a pair that is otherwise never shown.
    max_steps: of an episode.
  """

  num_objects: int = 3
  held_out: bool = False
  max_steps: int = 25

  def __post_init__(self):
    if not 1 <= self.num_objects <= NUM_PAIRS - len(COLOURS):
      raise ValueError(
        f'environment.num_objects={self.num_objects}: choose from 1 to {NUM_PAIRS - len(COLOURS)}'
      )
    if self.max_steps < 1:
      raise ValueError(f'environment.max_steps={self.max_steps}: at least 1 is needed')

  @property
  def observation_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((WIDTH, WIDTH, 3), np.uint8, 0, 255, 'image')

  @property
  def action_spec(self) -> specs.DiscreteArray:
    return specs.DiscreteArray(len(MOVES), np.int32, 'up_down_left_right')

  @property
  def action_names(self) -> tuple[str, ...]:
    return ('up', 'down', 'left', 'right')

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    pair_key, cell_key, offset_key = jax.random.split(key, 3)
    state = State(
      pairs=self._sample_pairs(pair_key),
      cells=1 + jax.random.permutation(cell_key, NUM_CELLS - 1)[: 1 + self.num_objects],
      offsets=jax.random.randint(offset_key, (self.num_objects, 2), 0, 2),
      step_count=jnp.zeros((), jnp.int32),
    )
    return state, environment.restart(_observe(state))

  def _sample_pairs(self, key: chex.PRNGKey) -> jax.Array:
    """[N] different pairs, the wanted one first."""
    order = jax.random.permutation(key, NUM_PAIRS)
    is_held_out = jnp.asarray(IS_HELD_OUT)[order]
    if not self.held_out:
      return order[jnp.argsort(is_held_out)][: self.num_objects]
    wanted = jnp.argmax(is_held_out)
    return order[jnp.argsort(jnp.arange(NUM_PAIRS) != wanted)][: self.num_objects]

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    del key
    cell = _neighbours(state.cells[0])[action]
    touched = state.cells[1:] == cell
    state = state.replace(cells=state.cells.at[0].set(cell), step_count=state.step_count + 1)
    reward = jnp.where(touched[0], 1.0, jnp.where(touched.any(), -1.0, 0.0))
    observation = _observe(state)
    timestep = jax.lax.switch(
      jnp.where(touched.any(), 0, jnp.where(state.step_count >= self.max_steps, 1, 2)),
      [environment.termination, environment.truncation, environment.transition],
      reward,
      observation,
    )
    return state, timestep

  def scripted_action(self, state: State) -> jax.Array:
    """The first step of a shortest way to the wanted object that touches no other."""
    cells = jnp.arange(NUM_CELLS)
    is_closed = (cells[:, None] == state.cells[2:]).any(-1) | (cells == 0)
    goal = cells == state.cells[1]
    far = float(NUM_CELLS)
    ways = jax.vmap(_neighbours)(cells)

    def nearer(distance, _):
      stepped = jnp.where(is_closed, far, 1 + jnp.min(distance[ways], axis=-1))
      return jnp.where(goal, 0.0, jnp.minimum(distance, stepped)), None

    distance, _ = jax.lax.scan(nearer, jnp.where(goal, 0.0, far), None, length=NUM_CELLS)
    return jnp.argmin(jnp.where(is_closed, far + 1, distance)[ways[state.cells[0]]]).astype(
      jnp.int32
    )

  def render(self, state: State) -> np.ndarray:
    return self.draw(_observe(state))

  def draw(self, observation: environment.Observation) -> np.ndarray:
    """The image, each pixel 8 by 8."""
    image = np.asarray(observation).clip(0, 255).astype(np.uint8)
    return image.repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)


def segments(state: State) -> jax.Array:
  """Which part each pixel of the observation shows: the truth that a segmentation is judged by.

  Returns:
    [16, 16] int32: 0 the background, 1 the sign, 2 the agent, 3 and more the objects.
  """
  kinds, _ = _paint(state)
  return kinds


def _neighbours(cell: jax.Array) -> jax.Array:
  """[4] int32, the cell that each action leads to from a cell without objects."""
  place = jnp.stack(jnp.divmod(cell, SIZE))
  row, column = jnp.clip(place + jnp.asarray(MOVES), 0, SIZE - 1).T
  moved = row * SIZE + column
  return jnp.where(moved == 0, cell, moved).astype(jnp.int32)


def _observe(state: State) -> jax.Array:
  return _paint(state)[1]


def _paint(state: State) -> tuple[jax.Array, jax.Array]:
  """[16, 16] int32 parts, see `segments`, and [16, 16, 3] uint8 colours, of all pixels."""
  pixels = jnp.asarray(np.moveaxis(np.indices((WIDTH, WIDTH)), 0, -1))  # [16, 16, 2]
  kinds = jnp.zeros((WIDTH, WIDTH), jnp.int32)
  image = jnp.zeros((WIDTH, WIDTH, 3), jnp.uint8)

  def cover(covered: jax.Array, kind: int, colour):
    nonlocal kinds, image
    kinds = jnp.where(covered, kind, kinds)
    image = jnp.where(covered[..., None], colour, image)

  def sprite(pair: jax.Array, corner: jax.Array) -> jax.Array:
    colour, shape = jnp.asarray(PAIRS)[pair]
    place = pixels - corner
    within = ((place >= 0) & (place < SHAPES.shape[1])).all(-1)
    row, column = jnp.moveaxis(jnp.clip(place, 0, SHAPES.shape[1] - 1), -1, 0)
    return within & jnp.asarray(SHAPES)[shape, row, column], jnp.asarray(COLOURS)[colour]

  corner = lambda cell: CELL * jnp.stack(jnp.divmod(cell, SIZE))
  cover((pixels < CELL).all(-1), 1, jnp.array(SIGN, jnp.uint8))
  covered, colour = sprite(state.pairs[0], jnp.zeros(2, jnp.int32))
  cover(covered, 1, colour)
  for index in range(state.pairs.shape[0]):
    place = corner(state.cells[1 + index]) + state.offsets[index]
    covered, colour = sprite(state.pairs[index], place)
    cover(covered, 3 + index, colour)
  place = pixels - corner(state.cells[0])
  cover(((place >= 1) & (place < CELL - 1)).all(-1), 2, jnp.array(AGENT, jnp.uint8))
  return kinds, image
