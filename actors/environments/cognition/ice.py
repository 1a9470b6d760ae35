"""Ice: half of the ground is slippery, and an agent in a pit cannot leave it; to test empowerment."""

import dataclasses
from typing import ClassVar

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments import environment

SIZE = 9  # cells a side; a coordinate is a multiple of 1/8, which agents read and predict by level
ICE_LINES = 4  # rows or columns of ice, from one side to the middle one, which is firm
AGENT, ICE_PIT, FIRM_PIT = range(3)  # order of `State.places`
UP, DOWN, LEFT, RIGHT, STAY = range(5)  # the first four are also the sides where the ice may be
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]], np.int32)
CELLS = np.moveaxis(np.indices((SIZE, SIZE)), 0, -1)  # [9, 9, 2]
NUM_COORDINATES, NUM_SIDES = 6, 4

IN_PIT, BESIDE_PIT = 1000.0, 0.5  # cost of a cell to the scripted policy, in lines of ice

CELL_PIXELS = 16
LINE = (214, 222, 228)
GROUND = {False: (247, 240, 222), True: (178, 221, 240)}  # firm, ice
PIT, DISC = (60, 60, 66), (213, 94, 0)


class State(flax.struct.PyTreeNode):
  """State of one environment."""

  # [3, 2] int32, row and column of the agent, the pit on ice and the pit on firm ground
  places: jax.Array
  side: jax.Array  # [] int32, side of the square at which the ice is: UP, DOWN, LEFT or RIGHT
  step_count: jax.Array  # [] int32, steps since the reset


def around(observation: jax.Array) -> jax.Array:
  """View of an observation, [10] float32, see `environment.ViewSpec`: what is around the agent.

  It has [2 * 2 * 17 + 5] float32: for both pits, the offset from the agent in rows and in columns, one-hot;
  then for each of the five actions, whether the cell that it leads to without a slip is ice.
  """
  places, sides = _split(observation)
  levels = jnp.arange(1 - SIZE, SIZE, dtype=jnp.float32)
  offset = (places[1:] - places[AGENT])[..., None]
  offsets = jax.nn.relu(1 - jnp.abs(offset - levels)).reshape(-1)
  cells = jnp.clip(places[AGENT] + jnp.asarray(MOVES), 0, SIZE - 1)
  return jnp.concatenate([offsets, jnp.minimum(_lines_to_firm(cells, sides), 1.0)])


def is_in_pit(observation: jax.Array) -> jax.Array:
  """Whether the agent is in a pit, [...] bool, by observations [..., 10]."""
  places = jnp.rint(_split(observation)[0])
  return (places[..., 1:, :] == places[..., :1, :]).all(-1).any(-1)


def is_firm(observation: jax.Array) -> jax.Array:
  """Whether the agent is on firm ground and not in a pit, [...] bool, by observations [..., 10]."""
  places, sides = _split(observation)
  on_ice = _lines_to_firm(jnp.rint(places[..., AGENT, :]), sides) > 0
  return ~on_ice & ~is_in_pit(observation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ice(environment.DiscreteEnvironment):
  """A square of 9 by 9 cells, of which four lines at one side are ice; all rewards are 0.

  Actions are up, down, left, right and stay. On firm ground they have exactly that effect. In a cell of
  ice the action is replaced, with probability `slip`, by one of the five, each equally likely. In a pit
  no action has an effect, to the end of the episode. An episode is truncated after `max_steps`.

  In each episode the side of the ice is random. One pit is on ice and one on firm ground, so they cannot
  close off a corner. The agent begins in any other cell, with probability 35/79 on ice.

  The agent controls its next state on firm ground, hardly on ice, and not at all in a pit:
  `empowerment` is the exact measure of that. `is_firm` and `is_in_pit` tell where the agent of an
  observation is.

  The observation is [10] float32: row and column of agent, pit on ice and pit on firm ground,
  divided by 8; and the side of the ice (up, down, left, right), one-hot. Agents also read the view `around`.
  """

  slip: float = 0.9  # probability that an action in a cell of ice is replaced
  max_steps: int = 100  # time limit

  action_names: ClassVar[tuple[str, ...]] = ('up', 'down', 'left', 'right', 'stay')

  def __post_init__(self):
    if not 0 <= self.slip <= 1:
      raise ValueError(f'environment.slip={self.slip}: a probability from 0 to 1 is needed')
    self._check_least(max_steps=1)

  @property
  def observation_spec(self) -> environment.ViewSpec:
    shape = (NUM_COORDINATES + NUM_SIDES,)
    return environment.ViewSpec(shape, np.float32, 0.0, 1.0, around, 'places_and_side')

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    side, ice, firm, start = jax.random.bits(key, (4,), jnp.uint32)
    # Cells are numbered line by line, from the side of the ice.
    num_ice = ICE_LINES * SIZE
    ice_pit, firm_pit = ice % num_ice, num_ice + firm % (SIZE**2 - num_ice)
    agent = start % (SIZE**2 - 2)
    agent += agent >= ice_pit
    agent += agent >= firm_pit
    line, along = jnp.divmod(jnp.stack([agent, ice_pit, firm_pit]).astype(jnp.int32), SIZE)
    side = (side % NUM_SIDES).astype(jnp.int32)
    line = jnp.where((side == DOWN) | (side == RIGHT), SIZE - 1 - line, line)
    is_row = side <= DOWN
    places = jnp.stack([jnp.where(is_row, line, along), jnp.where(is_row, along, line)], axis=-1)
    state = State(places, side, jnp.zeros((), jnp.int32))
    return state, environment.restart(self.observe(state))

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    slip_bits, move_bits = jax.random.bits(key, (2,), jnp.uint32)
    agent = state.places[AGENT]
    on_ice = _lines_to_firm(agent, _one_hot(state.side)) > 0
    slips = on_ice & ((slip_bits >> 8) * 2.0**-24 < self.slip)
    move = jnp.where(slips, (move_bits % len(MOVES)).astype(jnp.int32), action)
    moved = jnp.clip(agent + jnp.asarray(MOVES)[move], 0, SIZE - 1)
    is_stuck = (state.places[1:] == agent).all(-1).any()
    state = State(
      places=state.places.at[AGENT].set(jnp.where(is_stuck, agent, moved)),
      side=state.side,
      step_count=state.step_count + 1,
    )
    return self._stepped(state, 0.0)

  def transition_probabilities(self, state: State) -> jax.Array:
    """P(next cell | cell, action), [81, 5, 81] float32, with cells in row-major order.

    It follows from the places of pits and ice in the state; the agent's own place is not read.
    """
    cells = CELLS.reshape(-1, 2)
    targets = np.clip(cells[:, None] + MOVES, 0, SIZE - 1) @ [SIZE, 1]
    chosen = np.eye(SIZE**2, dtype=np.float32)[targets]
    slippery = (1 - self.slip) * chosen + self.slip * chosen.mean(axis=1, keepdims=True)
    on_ice = _lines_to_firm(jnp.asarray(cells), _one_hot(state.side)) > 0
    is_pit = (cells[:, None] == state.places[1:]).all(-1).any(-1)
    moved = jnp.where(on_ice[:, None, None], slippery, chosen)
    held = np.eye(SIZE**2, dtype=np.float32)[:, None]
    return jnp.where(is_pit[:, None, None], held, moved)

  def empowerment(self, state: State) -> jax.Array:
    """One-step empowerment in each cell, [9, 9] float32 in nats, for uniform actions.

      I(A; S' | s) = H[ mean_a P(S' | s, a) ] − mean_a H[ P(S' | s, a) ]

    The mutual information of the action A and the next cell S' of an agent in cell s (Klyubin et al.,
    2005, "Empowerment"), for uniform actions in place of the distribution that maximises it. H is the
    entropy, and mean_a the mean over the five actions. It is ln 5 = 1.609 on firm ground away from the
    edges, and 0 in a pit.
    """
    probabilities = self.transition_probabilities(state)
    entropy = lambda p: jax.scipy.special.entr(p).sum(-1)
    gained = entropy(probabilities.mean(axis=1)) - entropy(probabilities).mean(axis=1)
    return gained.reshape(SIZE, SIZE)

  def scripted_action(self, state: State) -> jax.Array:
    """Walks to firm ground, not through pits and if possible not next to them, and stays there."""
    agent, *pits = state.places
    cells = jnp.clip(agent + jnp.asarray(MOVES), 0, SIZE - 1)
    lines = _lines_to_firm(cells, _one_hot(state.side))
    distance = jnp.abs(cells[:, None] - jnp.stack(pits)).sum(-1).min(-1)
    risk = jnp.where(distance == 0, IN_PIT, jnp.where(distance == 1, BESIDE_PIT, 0.0))
    return jnp.where(lines[STAY] == 0, STAY, jnp.argmin(lines + risk)).astype(jnp.int32)

  def draw(self, observation: environment.Observation) -> np.ndarray:
    """Draws firm ground and ice, the pits as dark squares, and the agent as a disc."""
    places, sides = np.split(np.asarray(observation, np.float32), [NUM_COORDINATES])
    places = np.rint(places.reshape(-1, 2) * (SIZE - 1)).astype(int).clip(0, SIZE - 1)
    side = np.eye(NUM_SIDES, dtype=np.float32)[sides.argmax()]
    on_ice = np.asarray(_lines_to_firm(jnp.asarray(CELLS), side)) > 0
    pixels = np.empty((SIZE, CELL_PIXELS, SIZE, CELL_PIXELS, 3), np.uint8)
    pixels[...] = np.where(on_ice[..., None], GROUND[True], GROUND[False])[:, None, :, None]
    pixels[:, 0] = pixels[:, :, :, 0] = LINE
    for row, column in places[1:]:
      pixels[row, 2:-1, column, 2:-1] = PIT
    disc = np.hypot(*(np.indices((CELL_PIXELS, CELL_PIXELS)) - CELL_PIXELS / 2)) <= CELL_PIXELS / 3
    row, column = places[AGENT]
    pixels[row, :, column][disc] = DISC
    return pixels.reshape(SIZE * CELL_PIXELS, SIZE * CELL_PIXELS, 3)

  def observe(self, state: State) -> jax.Array:
    places = state.places.reshape(-1).astype(jnp.float32) / (SIZE - 1)
    return jnp.concatenate([places, _one_hot(state.side)])


def _split(observation: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Places [..., 3, 2] in cells, and sides [..., 4], of observations [..., 10]."""
  places = observation[..., :NUM_COORDINATES] * (SIZE - 1)
  return places.reshape(*places.shape[:-1], -1, 2), observation[..., NUM_COORDINATES:]


def _one_hot(side: jax.Array) -> jax.Array:
  return (jnp.arange(NUM_SIDES) == side).astype(jnp.float32)


def _lines_to_firm(cells: jax.Array, sides: jax.Array) -> jax.Array:
  """Distance of cells, [..., 2], to firm ground, [...] float32: 0 on it, at most 4 on ice.

  The sides where the ice is, [..., 4], are one-hot.
  """
  row, column = cells[..., 0], cells[..., 1]
  from_side = jnp.stack([row, SIZE - 1 - row, column, SIZE - 1 - column], axis=-1)
  return jnp.sum(jax.nn.relu(ICE_LINES - from_side) * sides, axis=-1)
