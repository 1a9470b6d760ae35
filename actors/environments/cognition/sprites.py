"""Sprites: touch the object of the colour and shape that a sign shows; to test object perception."""

import dataclasses
import itertools
from typing import ClassVar

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
AGENT, SIGN = (255, 255, 255), (70, 70, 80)  # colours of the agent and of the sign's ground

PIXELS = 8  # enlargement of a pixel in a frame


class State(flax.struct.PyTreeNode):
  """State of one environment with N objects, of which the first is the wanted one."""

  pairs: jax.Array  # [N] int32, colour and shape of each object, as an index of PAIRS
  # [1 + N] int32, cells of the agent and of the objects, numbered in row-major order; the sign is
  # in cell 0
  cells: jax.Array
  # [N, 2] int32, offset of each object from its cell's corner in rows and columns, 0 or 1 pixel
  offsets: jax.Array
  step_count: jax.Array  # [] int32, steps since the reset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sprites(environment.DiscreteEnvironment):
  """An image of 16 by 16 pixels with objects, a sign that shows one of them, and the agent.

  The square has 4 by 4 cells of 4 by 4 pixels. The sign, top left, shows the colour and shape of the
  wanted object on grey ground. Actions are up, down, left and right, by a cell; the agent, a white
  dot of 2 by 2 pixels, does not leave the square and does not enter the sign's cell. Entering an
  object's cell touches it: the episode terminates with reward 1 for the wanted object, -1 for another.
  Else it is truncated after `max_steps`.

  In each episode cells are random, an object lies up to one pixel from its cell's corner, and all
  objects differ in colour or shape. There are 16 pairs of colour and shape. Four are held out, one of
  each colour and each shape: by default they are never shown. With `held_out` the wanted object is
  one of these four, and the other objects are of any pairs.

  The observation is [16, 16, 3] uint8.
  """

  num_objects: int = 3  # N, number of objects, from 1 to 12
  held_out: bool = False  # whether the wanted object is of a held-out pair, to test generalisation
  max_steps: int = 25  # time limit

  action_names: ClassVar[tuple[str, ...]] = ('up', 'down', 'left', 'right')

  def __post_init__(self):
    if not 1 <= self.num_objects <= NUM_PAIRS - len(COLOURS):
      raise ValueError(
        f'environment.num_objects={self.num_objects}: choose from 1 to {NUM_PAIRS - len(COLOURS)}'
      )
    self._check_least(max_steps=1)

  @property
  def observation_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((WIDTH, WIDTH, 3), np.uint8, 0, 255, 'image')

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    pair_bits, cell_bits, offset_bits = jax.random.bits(key, (3, NUM_PAIRS), jnp.uint32)
    state = State(
      pairs=self._pairs(pair_bits),
      cells=1 + _least(cell_bits[: NUM_CELLS - 1], 1 + self.num_objects),
      offsets=(offset_bits[: self.num_objects, None] >> jnp.arange(2) & 1).astype(jnp.int32),
      step_count=jnp.zeros((), jnp.int32),
    )
    return state, environment.restart(self.observe(state))

  def _pairs(self, bits: jax.Array) -> jax.Array:
    """[N] int32, different random pairs, the wanted one first.

    By default they are the pairs with the least of the [16] random `bits`, without those held out. With
    `held_out` the first is the least of those held out, and the others are the least of all others.
    """
    held_out = jnp.asarray(IS_HELD_OUT)
    most = jnp.uint32(2**32 - 1)
    if not self.held_out:
      return _least(jnp.where(held_out, most, bits), self.num_objects)
    wanted = jnp.argmin(jnp.where(held_out, bits, most))
    return _least(jnp.where(jnp.arange(NUM_PAIRS) == wanted, 0, bits), self.num_objects)

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    del key
    cell = _neighbours(state.cells[0])[action]
    touched = state.cells[1:] == cell
    state = state.replace(cells=state.cells.at[0].set(cell), step_count=state.step_count + 1)
    reward = jnp.where(touched[0], 1.0, jnp.where(touched.any(), -1.0, 0.0))
    return self._stepped(state, reward, touched.any())

  def scripted_action(self, state: State) -> jax.Array:
    """The first action of a shortest path to the wanted object that touches no other object."""
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

  def draw(self, observation: environment.Observation) -> np.ndarray:
    """The image with each pixel enlarged to 8 by 8, [128, 128, 3] uint8."""
    image = np.asarray(observation).clip(0, 255).astype(np.uint8)
    return image.repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)

  def observe(self, state: State) -> jax.Array:
    """The image of a state, [16, 16, 3] uint8."""
    # Colours of one number each: XLA's CPU is slow on axes of 3.
    colours = jnp.asarray(_packed(COLOURS))[state.pairs // len(SHAPES)]
    sign, agent = _packed(np.array([SIGN, AGENT]))
    ground, front, *objects = _parts(state)
    image = jnp.where(ground, sign, jnp.zeros((WIDTH, WIDTH), jnp.uint32))
    for part, colour in zip(objects, colours, strict=True):
      image = jnp.where(part, colour, image)
    image = jnp.where(front, agent, image)
    shown = _bitmaps(state.pairs[:1], jnp.zeros((1, 2), jnp.int32))[0]
    shown = jnp.pad(shown, (0, WIDTH - CELL))
    image = jnp.where(shown, colours[0], image)
    return jax.lax.bitcast_convert_type(image, jnp.uint8)[..., :3]


def segments(state: State) -> jax.Array:
  """Ground truth of a segmentation, [16, 16] int32: 0 background, 1 sign, 2 agent, 3 + i object i."""
  parts = _parts(state)
  return jnp.argmax(jnp.concatenate([~parts.any(0)[None], parts]), axis=0).astype(jnp.int32)


def _least(bits: jax.Array, count: int) -> jax.Array:
  """[count] int32, indices of the least of [L] numbers, the least first; faster than a sort on a CPU."""
  places = jnp.arange(bits.shape[0])
  is_less = (bits < bits[:, None]) | ((bits == bits[:, None]) & (places < places[:, None]))
  order = jnp.sum(is_less, axis=-1)
  return jnp.sum(jnp.where(order == jnp.arange(count)[:, None], places, 0), -1, jnp.int32)


def _neighbours(cell: jax.Array) -> jax.Array:
  """[4] int32, the cell to which each action leads from `cell`: the same one at an edge or the sign."""
  place = jnp.stack(jnp.divmod(cell, SIZE))
  row, column = jnp.clip(place + jnp.asarray(MOVES), 0, SIZE - 1).T
  moved = row * SIZE + column
  return jnp.where(moved == 0, cell, moved).astype(jnp.int32)


def _parts(state: State) -> jax.Array:
  """[2 + N, 16, 16] bool, the pixels of the sign, the agent and each object.

  None overlap but for the agent and an object that it touches; the agent is in front.
  """
  dot, whole = np.zeros((2, CELL, CELL), bool)
  dot[1:-1, 1:-1] = whole[:] = True
  bitmaps = jnp.concatenate([np.stack([whole, dot]), _bitmaps(state.pairs, state.offsets)])
  cells = jnp.concatenate([jnp.zeros(1, jnp.int32), state.cells])
  is_there = cells[:, None] == jnp.arange(NUM_CELLS)
  pixels = is_there.reshape(-1, SIZE, 1, SIZE, 1) & bitmaps[:, None, :, None]
  return pixels.reshape(-1, WIDTH, WIDTH)


def _bitmaps(pairs: jax.Array, offsets: jax.Array) -> jax.Array:
  """[N, 4, 4] bool, the pixels of each object within its cell."""
  side = SHAPES.shape[1]
  room = CELL - side + 1  # offsets along an axis
  table = np.zeros((len(SHAPES), room, room, CELL, CELL), bool)
  for row, column in itertools.product(range(room), repeat=2):
    table[:, row, column, row : row + side, column : column + side] = SHAPES
  row, column = offsets.T
  return jnp.asarray(table)[pairs % len(SHAPES), row, column]


def _packed(colours: np.ndarray) -> np.ndarray:
  """Packs colours, [..., 3] bytes, into [...] uint32, with red in the lowest byte."""
  return (colours.astype(np.uint32) << np.arange(0, 24, 8, dtype=np.uint32)).sum(
    -1, dtype=np.uint32
  )
