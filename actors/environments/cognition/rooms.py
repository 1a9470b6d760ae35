"""Rooms: a name on the wall and four doors, one of which is rewarded; to test episodic memory."""

import dataclasses
from typing import ClassVar

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment

NAME_BITS = 24
NUM_DOORS = 4
VISITS = 4
"""Visits of each fresh room; then all fresh rooms of the stream are replaced by others."""
CELL_PIXELS = 16
NAME_ROWS = 4


class State(flax.struct.PyTreeNode):
  """State of a stream: the consecutive episodes of one environment, of one choice each."""

  stream: jax.Array  # [] uint32, random seed of the stream's fresh rooms
  choices: jax.Array  # [] int32, number of choices made in this stream so far
  name: jax.Array  # [] uint32 below 2^24, name of the current room
  opened: jax.Array  # [] int32, door that was opened, 0 to 3; -1 before the choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rooms(environment.DiscreteEnvironment):
  """Each episode is one choice in one room: the reward is 1 for the right door of four, else 0.

  The right door is a hash of the room's name, so an agent can only learn it in that room. At first,
  each episode is in one of `num_rooms` rooms, the same rooms in all streams. After `fresh_after` choices
  a stream (the consecutive episodes of one environment) enters fresh rooms, which no agent has seen: it
  visits `fresh_rooms` of its own one after another, VISITS times in the same order, and then as many
  others.

  Parallel environments make equally many choices, so all are at the same visit at the same time
  (`visit`), and a run's mean return between two steps is the success rate at that visit. With perfect
  memory it is 0.25, 0.50, 0.75 and 1 at visits 1 to 4; without memory 0.25.

  The observation is [28] bool: the 24 bits of the name, and the opened door, one-hot; before the choice
  all doors are False.
  """

  num_rooms: int = 1024  # number of rooms before `fresh_after`
  fresh_after: int = 0  # number of choices after which a stream enters fresh rooms; 0: never
  fresh_rooms: int = 64  # number of fresh rooms that a stream visits in turn

  action_names: ClassVar[tuple[str, ...]] = ('first', 'second', 'third', 'fourth')

  def __post_init__(self):
    self._check_least(num_rooms=1, fresh_after=0, fresh_rooms=1)

  @property
  def observation_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((NAME_BITS + NUM_DOORS,), bool, False, True, 'name_and_door')

  @property
  def max_steps(self) -> int:
    return 1

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    stream_key, room_key = jax.random.split(key)
    return self._enter(room_key, jax.random.bits(stream_key), jnp.zeros((), jnp.int32))

  def next_episode(self, key: chex.PRNGKey, state: State) -> tuple[State, environment.TimeStep]:
    return self._enter(key, state.stream, state.choices)

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    del key  # A door is rewarded always or never.
    # A step after LAST, whose result is of no use, must not count as a choice.
    choices = state.choices + (state.opened < 0)
    state = state.replace(choices=choices, opened=jnp.asarray(action, jnp.int32))
    reward = jnp.where(action == right_door(state.name), 1.0, 0.0)
    return state, environment.termination(reward, self.observe(state))

  def visit(self, choices: jax.Array | int) -> jax.Array | int:
    """Number of the visit of a fresh room, 1 to VISITS, after so many choices; 0 for no fresh room."""
    if not self.fresh_after:
      return 0 * choices
    beyond = choices - self.fresh_after
    return (beyond >= 0) * (1 + beyond // self.fresh_rooms % VISITS)

  def scripted_action(self, state: State) -> jax.Array:
    return right_door(state.name)

  def render(self, state: State) -> np.ndarray:
    """Renders the room; the opened door is green if it was right, else red."""
    frame = self.draw(self.observe(state))
    if state.opened < 0:
      return frame
    hidden = [0, 2] if state.opened == right_door(state.name) else [1, 2]
    frame[NAME_ROWS * CELL_PIXELS :, :, hidden] = 0
    return frame

  def draw(self, observation: environment.Observation) -> np.ndarray:
    """Draws the name, 4 x 6 cells, above the doors, of which the opened one is bright."""
    name, doors = np.split(np.asarray(observation, np.float32), [NAME_BITS])
    pixels = np.ones((CELL_PIXELS, CELL_PIXELS), np.float32)
    wall = np.kron(255 * name.reshape(NAME_ROWS, -1), pixels)
    width = wall.shape[1] // NUM_DOORS
    door = np.zeros((2 * CELL_PIXELS, width), np.float32)
    door[4:, 4:-4] = 1.0
    row = np.concatenate([door * (80 + 175 * opened) for opened in doors], axis=1)
    return np.stack([np.concatenate([wall, row]).astype(np.uint8)] * 3, axis=-1)

  def _enter(
    self, key: chex.PRNGKey, stream: jax.Array, choices: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    """Begins the episode of a stream's next choice: its state and FIRST time step."""
    room = jax.random.randint(key, (), 0, self.num_rooms).astype(jnp.uint32)
    if self.fresh_after:
      beyond = choices - self.fresh_after
      turn, index = beyond // self.fresh_rooms, beyond % self.fresh_rooms
      fresh = scramble(stream + scramble(turn // VISITS * self.fresh_rooms + index))
      room = jnp.where(beyond >= 0, fresh, room)
    name = scramble(room) >> (32 - NAME_BITS)
    state = State(stream, choices, name, jnp.full((), -1, jnp.int32))
    return state, environment.restart(self.observe(state))

  def observe(self, state: State) -> jax.Array:
    name = (state.name >> jnp.arange(NAME_BITS, dtype=jnp.uint32)) & 1
    return jnp.concatenate([name == 1, jnp.arange(NUM_DOORS) == state.opened])


def right_door(name: jax.Array) -> jax.Array:
  """The right door of each room, [...] int32 from 0 to 3, by its name, [...] uint32."""
  return (scramble(name + 1) % NUM_DOORS).astype(jnp.int32)


def scramble(x: jax.Array) -> jax.Array:
  """Hashes integers to [...] uint32: the finalizer of MurmurHash3, after a constant is added."""
  x = jnp.asarray(x).astype(jnp.uint32) + np.uint32(0x9E3779B9)
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
