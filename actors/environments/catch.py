"""Catch: move a paddle under a falling ball. A small environment to copy when writing another."""

import dataclasses
from typing import ClassVar

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment


class State(flax.struct.PyTreeNode):
  """Positions, [] int32 each. The paddle stays in the bottom row."""

  ball_row: jax.Array
  ball_column: jax.Array
  paddle_column: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Catch(environment.DiscreteEnvironment):
  """Catch of bsuite: the episode terminates with +1 if the paddle catches the ball, else with -1.

  Actions are left, stay, right. The observation is the board, bool, flattened row by row, True at the
  ball and at the paddle. On the default board the paddle can reach every column in time.
  """

  rows: int = 10  # rows of the board; an episode takes rows - 1 steps
  columns: int = 5  # columns of the board
  # 0: the board is observed. Else an image of it is observed in its place, white on black, with so
  # many pixels along each side of a cell: [rows * cell_pixels, columns * cell_pixels, 3] uint8.
  cell_pixels: int = 0

  action_names: ClassVar[tuple[str, ...]] = ('left', 'stay', 'right')

  def __post_init__(self):
    self._check_least(rows=2, columns=2, cell_pixels=0)
    size = self.rows * self.columns * max(1, 3 * self.cell_pixels**2)
    self._check_size(size, 'rows', 'columns', 'cell_pixels')

  @property
  def observation_spec(self) -> specs.BoundedArray:
    if self.cell_pixels:
      shape = (self.rows * self.cell_pixels, self.columns * self.cell_pixels, 3)
      return specs.BoundedArray(shape, np.uint8, 0, 255, 'image')
    return specs.BoundedArray((self.rows * self.columns,), bool, False, True, 'board')

  @property
  def max_steps(self) -> int:
    return self.rows - 1

  def reset(self, key: chex.PRNGKey) -> tuple[State, environment.TimeStep]:
    state = State(
      ball_row=jnp.zeros((), jnp.int32),
      ball_column=jax.random.randint(key, (), 0, self.columns),
      paddle_column=jnp.full((), self.columns // 2, jnp.int32),
    )
    return state, environment.restart(self.observe(state))

  def step(
    self, key: chex.PRNGKey, state: State, action: jax.Array
  ) -> tuple[State, environment.TimeStep]:
    del key  # The ball falls straight.
    paddle_column = jnp.clip(state.paddle_column + action - 1, 0, self.columns - 1)
    state = state.replace(ball_row=state.ball_row + 1, paddle_column=paddle_column)
    landed = state.ball_row == self.rows - 1
    caught = state.ball_column == state.paddle_column
    reward = jnp.where(landed, jnp.where(caught, 1.0, -1.0), 0.0)
    timestep = jax.lax.cond(
      landed, environment.termination, environment.transition, reward, self.observe(state)
    )
    return state, timestep

  def scripted_action(self, state: State) -> jax.Array:
    return 1 + jnp.sign(state.ball_column - state.paddle_column)

  def draw(self, observation: environment.Observation) -> np.ndarray:
    """Draws the board in white on black, with 16 x 16 pixels a cell; an observed image is unchanged."""
    if self.cell_pixels:
      return np.clip(np.rint(np.asarray(observation)), 0, 255).astype(np.uint8)
    board = np.asarray(observation).reshape(self.rows, self.columns)
    pixels = np.kron(board, np.full((16, 16), 255)).astype(np.uint8)
    return np.stack([pixels] * 3, axis=-1)

  def observe(self, state: State) -> jax.Array:
    board = jnp.zeros((self.rows, self.columns), bool)
    board = board.at[state.ball_row, state.ball_column].set(True)
    board = board.at[self.rows - 1, state.paddle_column].set(True)
    if not self.cell_pixels:
      return board.reshape(-1)
    cell = jnp.full((self.cell_pixels, self.cell_pixels), 255, jnp.uint8)
    return jnp.repeat(jnp.kron(board.astype(jnp.uint8), cell)[..., None], 3, axis=-1)
