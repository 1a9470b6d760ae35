"""Errands: eight countdowns, and the right button for the one that is due; to test attention."""

import dataclasses
from typing import ClassVar

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment

NUM_ERRANDS = 8
NUM_BUTTONS = 4
LONGEST = 8  # longest countdown; a multiple of 1/8 is a level that agents read and predict

CELL_PIXELS = 16
EMPTY, DUE = (247, 240, 222), (222, 210, 178)
LINE = (232, 222, 196)
COLOURS = ((213, 94, 0), (0, 158, 115), (86, 180, 233), (204, 121, 167))  # of Okabe and Ito


class State(flax.struct.PyTreeNode):
  """State of one environment."""

  # [8] int32, steps until each errand is due: different numbers from 0 to 8, one of them 0
  countdown: jax.Array
  wanted: jax.Array  # [8] int32, button of each errand, 0 to 3
  step_count: jax.Array  # [] int32, steps since the reset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errands(environment.DiscreteEnvironment):
  """At each step one errand of eight is due: the reward is 1 for pressing its button, else -1.

  Each errand has one of four buttons and a countdown, which falls by 1 a step. An errand that was due
  gets a random button and a new countdown: 8, or the one value from 0 to 7 that no other errand has,
  with equal probability. Where that value is 0 it is always taken, so the errand is due again at once.
  So exactly one errand is due at each step, the order is not periodic, and an errand that was observed
  once is known until it is due.

  An episode is truncated after `max_steps`. The observation is a dict of 'errand_0' to 'errand_7', each
  [5] float32: the countdown divided by 8, and the button, one-hot.
  """

  max_steps: int = 50  # time limit

  action_names: ClassVar[tuple[str, ...]] = ('first', 'second', 'third', 'fourth')

  def __post_init__(self):
    self._check_least(max_steps=1)

  @property
  def observation_spec(self) -> dict[str, specs.Array]:
    return {
      name: specs.BoundedArray((1 + NUM_BUTTONS,), np.float32, 0.0, 1.0, name) for name in NAMES
    }

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    bits = jax.random.bits(key, (NUM_ERRANDS,), jnp.uint32)
    order = bits // NUM_ERRANDS * NUM_ERRANDS + jnp.arange(NUM_ERRANDS, dtype=jnp.uint32)
    state = State(
      countdown=jnp.sum(order < order[:, None], axis=-1),
      wanted=(bits % NUM_BUTTONS).astype(jnp.int32),
      step_count=jnp.zeros((), jnp.int32),
    )
    return state, environment.restart(self.observe(state))

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    bits = jax.random.bits(key, (), jnp.uint32)
    is_due = state.countdown == 0
    is_right = action == _wanted_now(state)
    countdown = state.countdown - 1
    missing = sum(range(LONGEST)) - jnp.sum(jnp.where(is_due, 0, countdown))
    restarted = jnp.where((missing == 0) | (bits % 2 == 0), missing, LONGEST)
    state = State(
      countdown=jnp.where(is_due, restarted, countdown),
      wanted=jnp.where(is_due, (bits // 2 % NUM_BUTTONS).astype(jnp.int32), state.wanted),
      step_count=state.step_count + 1,
    )
    return self._stepped(state, jnp.where(is_right, 1.0, -1.0))

  def scripted_action(self, state: State) -> jax.Array:
    return _wanted_now(state)

  def draw(self, observation: environment.Observation) -> np.ndarray:
    """Draws each errand as a line of cells: a tile in its button's colour at its countdown, 0 leftmost."""
    pixels = np.empty((NUM_ERRANDS, CELL_PIXELS, 1 + LONGEST, CELL_PIXELS, 3), np.uint8)
    pixels[...] = EMPTY
    pixels[:, :, 0] = DUE
    pixels[:, 0] = pixels[:, :, :, 0] = LINE
    for index, name in enumerate(NAMES):
      countdown, *wanted = np.asarray(observation[name], np.float32)
      column = int(np.rint(countdown * LONGEST).clip(0, LONGEST))
      pixels[index, 2:-1, column, 2:-1] = COLOURS[int(np.argmax(wanted))]
    return pixels.reshape(NUM_ERRANDS * CELL_PIXELS, -1, 3)

  def observe(self, state: State) -> dict[str, jax.Array]:
    countdown = state.countdown.astype(jnp.float32)[:, None] / LONGEST
    wanted = (state.wanted[:, None] == jnp.arange(NUM_BUTTONS)).astype(jnp.float32)
    return dict(zip(NAMES, jnp.concatenate([countdown, wanted], axis=-1), strict=True))


NAMES = tuple(f'errand_{index}' for index in range(NUM_ERRANDS))


def _wanted_now(state: State) -> jax.Array:
  """The button of the errand that is due, [] int32."""
  return jnp.sum(jnp.where(state.countdown == 0, state.wanted, 0))
