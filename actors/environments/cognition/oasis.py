"""Oasis: eat, drink and rest in time, and keep away from the predator. All rewards are 0."""

import dataclasses
from typing import ClassVar

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment

SIZE = 9  # cells a side; a coordinate is a multiple of 1/8, which agents read and predict by level
AGENT, PREDATOR, FOOD, WATER, DEN = range(5)  # order of `State.places`
UP, DOWN, LEFT, RIGHT, STAY = range(5)
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]], np.int32)

SOURCES = (FOOD, WATER, DEN)  # each restores one vital
VITALS = ('food', 'water', 'energy')
MOST = np.array([60, 40, 90], np.int32)  # steps from a restored vital to death
SIGHT = 3  # cells by Manhattan distance, from which the predator hunts
SPARE = 28  # steps left at which the scripted policy leaves its den
RISK = (8.0, 8.0, 2.0, 0.0)  # cost of a cell to that policy, by distance from the predator: 0 to 3
HIGH, LOW = 0.5, 0.3  # values of a vital above and below which `level_bonus` counts

CELL_PIXELS, BAR_PIXELS = 16, 8
SHAPES = np.array([np.eye(2), 1 - np.eye(2), *[np.ones((2, 2))] * 3], bool)
"""[5, 2, 2] bool, pixels of the agent, predator, food, water and den in a cell of an observed image."""
WIDTH = SIZE * SHAPES.shape[-1]  # of that image
SAND, LINE = (247, 240, 222), (232, 222, 196)
COLOURS = {  # the colour-blind safe palette of Okabe and Ito
  AGENT: (30, 30, 34),
  PREDATOR: (213, 94, 0),
  FOOD: (0, 158, 115),
  WATER: (86, 180, 233),
  DEN: (150, 130, 110),
}


class State(flax.struct.PyTreeNode):
  """State of one environment."""

  places: jax.Array  # [5, 2] int32, row and column of agent, predator, food, water and den
  # [3] int32, steps left until food, water and energy are 0, unless they are restored
  left: jax.Array
  step_count: jax.Array  # [] int32, steps since the reset


def offsets(places: jax.Array) -> jax.Array:
  """View of an observation's places, [10] float32, see `environment.ViewSpec`.

  It has [4 * 2 * 17] float32: for predator, food, water and den, the offset from the agent in rows and in
  columns, one-hot.
  """
  places = places.reshape(5, 2) * (SIZE - 1)
  offset = places[1:] - places[0]
  levels = jnp.arange(1 - SIZE, SIZE, dtype=jnp.float32)
  return jax.nn.relu(1 - jnp.abs(offset[..., None] - levels)).reshape(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oasis(environment.DiscreteEnvironment):
  """A square of 9 by 9 cells with food, water, a den and a predator; staying alive is the task.

  Actions are up, down, left, right and stay. The vitals food, water and energy fall by 1/60, 1/40 and
  1/90 a step. Arriving at food, at water or in the den restores food, water or energy to 1; food then
  grows in another cell. An episode begins in the den, terminates when a vital is 0 or the predator has
  caught the agent, and is truncated after `max_steps`. The score compares lengths of episodes.

  The predator moves with probability 1/2 at each step. Half of its moves are in a random direction; the
  others are towards the agent if it is at most 3 cells away and not in the den, else random, too. The
  predator does not enter the den.

  The observation is 'places', [10] float32, row and column of agent, predator, food, water and den
  divided by 8, with the `offsets` from the agent as a view; and 'vitals', [3] float32. With `image` it is
  'image', [18, 18, 3] uint8, and 'vitals': a cell is 2 by 2 pixels, which food, water and den fill, and of
  which agent and predator fill one diagonal each. So none of them hides another.

  Rewards are 0 by default. Two options add rewards for survival: baselines for agents that make their
  own intrinsic rewards of the vitals.
  """

  max_steps: int = 500  # time limit
  alive_reward: float = 0.0  # reward of each step that the agent survives
  # reward of each such step for each vital above 0.5, and minus that for each below 0.3
  level_bonus: float = 0.0
  image: bool = False  # whether the cells are observed as an image in place of numbers

  action_names: ClassVar[tuple[str, ...]] = ('up', 'down', 'left', 'right', 'stay')

  def __post_init__(self):
    self._check_least(max_steps=1)

  @property
  def observation_spec(self) -> dict[str, specs.Array]:
    vitals = [environment.Vital(name, index) for index, name in enumerate(VITALS)]
    are_paid = self.alive_reward != 0 or self.level_bonus != 0
    read = environment.VitalsSpec(
      (3,), np.float32, 0.0, 1.0, vitals, name='vitals', are_paid=are_paid
    )
    if self.image:
      return {
        'image': specs.BoundedArray((WIDTH, WIDTH, 3), np.uint8, 0, 255, 'image'),
        'vitals': read,
      }
    return {
      'places': environment.ViewSpec((10,), np.float32, 0.0, 1.0, offsets, 'places'),
      'vitals': read,
    }

  @property
  def scored_by(self) -> str:
    return 'length'

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    den, *random = jax.random.bits(key, (4,), jnp.uint32)
    cells = (den % SIZE**2).astype(jnp.int32)[None]
    for bits in random:
      cells = jnp.append(cells, _free_cell(bits, cells))
    den, predator, food, water = jnp.stack([cells // SIZE, cells % SIZE], axis=-1)
    state = State(
      places=jnp.stack([den, predator, food, water, den]),
      left=jnp.asarray(MOST),
      step_count=jnp.zeros((), jnp.int32),
    )
    return state, environment.restart(self.observe(state))

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    food_bits, predator_bits = jax.random.bits(key, (2,), jnp.uint32)
    places = state.places
    agent = jnp.clip(places[AGENT] + jnp.asarray(MOVES)[action], 0, SIZE - 1)
    arrived = (places[jnp.asarray(SOURCES)] == agent).all(-1)
    is_safe = arrived[SOURCES.index(DEN)]
    # The agent may also walk into the predator.
    predator = _hunt(predator_bits, places[PREDATOR], agent, places[DEN])
    is_caught = ~is_safe & ((places[PREDATOR] == agent).all() | (predator == agent).all())
    fixed = places[jnp.asarray(SOURCES)] @ np.array([SIZE, 1])
    grown = _free_cell(food_bits, fixed)
    food = jnp.where(
      arrived[SOURCES.index(FOOD)], jnp.stack([grown // SIZE, grown % SIZE]), places[FOOD]
    )
    state = State(
      places=jnp.stack([agent, predator, food, places[WATER], places[DEN]]),
      left=jnp.where(arrived, MOST, state.left - 1),
      step_count=state.step_count + 1,
    )
    is_dead = is_caught | (state.left == 0).any()
    vitals = state.left / MOST
    bonus = jnp.sum((vitals > HIGH).astype(jnp.float32) - (vitals < LOW))
    reward = jnp.where(is_dead, 0.0, self.alive_reward + self.level_bonus * bonus)
    return self._stepped(state, reward, is_dead)

  def scripted_action(self, state: State) -> jax.Array:
    """Walks to the source of the vital that runs out first; stays in the den while none is urgent.

    It avoids the predator: the cost of cell x to the target is V(x) = min_y [V(y) + 1 + risk(y)] over its
    neighbours y, 0 at the target, and cells next to the predator are the last resort.
    """
    agent, predator, *sources = state.places
    den = state.places[DEN]
    distance = lambda x, y: jnp.abs(x - y).sum(-1)
    first = jnp.argmin(state.left)
    target = jnp.where(state.left[first] > SPARE, den, jnp.stack(sources)[first])
    grid = jnp.stack(jnp.indices((SIZE, SIZE)), axis=-1)
    risk = jnp.asarray(RISK)[jnp.minimum(distance(grid, predator), len(RISK) - 1)]
    enter = 1.0 + jnp.where((grid == den).all(-1), 0.0, risk)
    is_target = (grid == target).all(-1)

    def sweep(_, cost):
      around = jnp.pad(cost + enter, 1, constant_values=jnp.inf)
      rows = jnp.minimum(around[:-2, 1:-1], around[2:, 1:-1])
      columns = jnp.minimum(around[1:-1, :-2], around[1:-1, 2:])
      return jnp.where(is_target, 0.0, jnp.minimum(rows, columns))

    cost = jax.lax.fori_loop(0, 3 * SIZE, sweep, jnp.where(is_target, 0.0, jnp.inf))
    cells = jnp.clip(agent + jnp.asarray(MOVES), 0, SIZE - 1)
    may_be_caught = (distance(cells, predator) <= 1) & ~(cells == den).all(-1)
    costs = (cost + enter)[cells[:, 0], cells[:, 1]] + jnp.where(may_be_caught, 1000.0, 0.0)
    return jnp.argmin(costs).astype(jnp.int32)

  def draw(self, observation: environment.Observation) -> np.ndarray:
    """Draws the board, or the image enlarged, and the vitals as bars below."""
    board = self._draw_image(observation) if self.image else self._draw_places(observation)
    bars = np.full((3 * BAR_PIXELS, SIZE * CELL_PIXELS, 3), LINE, np.uint8)
    width = SIZE * CELL_PIXELS
    for index, (source, vital) in enumerate(zip(SOURCES, observation['vitals'], strict=True)):
      length = round(width * min(max(float(vital), 0.0), 1.0))
      bars[index * BAR_PIXELS + 1 : (index + 1) * BAR_PIXELS, :length] = COLOURS[source]
    return np.concatenate([board, bars])

  def _draw_image(self, observation: environment.Observation) -> np.ndarray:
    image = np.asarray(observation['image']).clip(0, 255).astype(np.uint8)
    size = SIZE * CELL_PIXELS // WIDTH
    return image.repeat(size, axis=0).repeat(size, axis=1)

  def _draw_places(self, observation: environment.Observation) -> np.ndarray:
    places = np.rint(np.asarray(observation['places']) * (SIZE - 1)).astype(int).clip(0, SIZE - 1)
    pixels = np.empty((SIZE, CELL_PIXELS, SIZE, CELL_PIXELS, 3), np.uint8)
    pixels[...] = SAND
    pixels[:, 0] = pixels[:, :, :, 0] = LINE
    disc = np.hypot(*(np.indices((CELL_PIXELS, CELL_PIXELS)) - CELL_PIXELS / 2)) <= CELL_PIXELS / 3
    for thing in (DEN, WATER, FOOD, PREDATOR, AGENT):
      row, column = places[2 * thing : 2 * thing + 2]
      if thing in SOURCES:
        pixels[row, 2:-1, column, 2:-1] = COLOURS[thing]
      else:
        pixels[row, :, column][disc] = COLOURS[thing]
    return pixels.reshape(SIZE * CELL_PIXELS, SIZE * CELL_PIXELS, 3)

  def observe(self, state: State) -> dict[str, jax.Array]:
    vitals = (state.left / MOST).astype(jnp.float32)
    if self.image:
      return {'image': _image(state.places), 'vitals': vitals}
    places = state.places.reshape(-1).astype(jnp.float32) / (SIZE - 1)
    return {'places': places, 'vitals': vitals}


def _image(places: jax.Array) -> jax.Array:
  """The image of five places, [18, 18, 3] uint8, of `State.places`, [5, 2]."""
  row, column = (places[:, axis, None] == jnp.arange(SIZE) for axis in (0, 1))
  pixels = (row[:, :, None, None, None] & column[:, None, None, :, None]) & SHAPES[:, None, :, None]
  pixels = pixels.reshape(-1, WIDTH, WIDTH)
  image = jnp.broadcast_to(jnp.asarray(SAND, jnp.uint8), (WIDTH, WIDTH, 3))
  for thing in (DEN, WATER, FOOD, PREDATOR, AGENT):
    image = jnp.where(pixels[thing, :, :, None], jnp.asarray(COLOURS[thing], jnp.uint8), image)
  return image


def _free_cell(bits: jax.Array, occupied: jax.Array) -> jax.Array:
  """A cell, [] int32, uniform over all but n occupied ones, which are distinct, by random bits, [] uint32."""
  cell = (bits % (SIZE**2 - len(occupied))).astype(jnp.int32)
  free_before = occupied - jnp.sum(occupied < occupied[:, None], axis=-1)
  return cell + jnp.sum(free_before <= cell)


def _hunt(bits: jax.Array, predator: jax.Array, agent: jax.Array, den: jax.Array) -> jax.Array:
  """Next place of the predator, [2] int32, from random bits, [] uint32, and three places, [2] each."""
  towards = agent - predator
  by_row = jnp.abs(towards[0]) >= jnp.abs(towards[1])
  hunts = (jnp.abs(towards).sum() <= SIGHT) & ~(agent == den).all() & (bits // 2 % 2 == 0)
  hunt = jnp.where(jnp.stack([by_row, ~by_row]), jnp.sign(towards), 0)
  roam = jnp.asarray(MOVES)[bits // 4 % 4]
  moved = jnp.clip(predator + jnp.where(hunts, hunt, roam), 0, SIZE - 1)
  stays = (bits % 2 == 0) | (moved == den).all()
  return jnp.where(stays, predator, moved)
