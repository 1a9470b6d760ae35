import functools

import jax
import numpy as np
import pytest

from hephaestus.actors.environments import catch

LEFT, STAY, RIGHT = range(3)


@functools.partial(jax.jit, static_argnums=0)
def compiled_step(env, state, action):
  return env.step(jax.random.key(0), state, action)


def step(env, state, action):
  return jax.device_get(compiled_step(env, state, action))


def state_of(ball_row, ball_column, paddle_column):
  return catch.State(
    ball_row=np.int32(ball_row),
    ball_column=np.int32(ball_column),
    paddle_column=np.int32(paddle_column),
  )


def test_observation_has_ball_and_paddle():
  env = catch.Catch(rows=4, columns=3)
  _, timestep = step(env, state_of(0, 2, 1), LEFT)
  expected = [[0, 0, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]]
  np.testing.assert_array_equal(timestep.observation.reshape(4, 3), expected)


def test_reset_puts_paddle_in_the_middle_and_ball_anywhere_on_top():
  env = catch.Catch()
  states, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 64))
  assert set(states.paddle_column.tolist()) == {2}
  assert set(states.ball_row.tolist()) == {0}
  assert set(states.ball_column.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
  'paddle_column, action, landed_on', [(0, LEFT, 0), (4, RIGHT, 4), (2, STAY, 2)]
)
def test_paddle_stays_on_the_board(paddle_column, action, landed_on):
  state, _ = step(catch.Catch(), state_of(0, 0, paddle_column), action)
  assert state.paddle_column == landed_on


@pytest.mark.parametrize('action, reward', [(LEFT, -1.0), (STAY, -1.0), (RIGHT, 1.0)])
def test_reward_at_last_is_for_catching_the_ball(action, reward):
  _, timestep = step(catch.Catch(), state_of(8, 3, 2), action)
  assert timestep.last()
  assert timestep.discount == 0.0
  assert timestep.reward == reward


def test_image_shows_each_cell_as_a_square_of_pixels():
  env = catch.Catch(rows=4, columns=3, cell_pixels=2)
  _, timestep = step(env, state_of(0, 2, 1), LEFT)
  expected = np.zeros((8, 6, 3), np.uint8)
  expected[2:4, 4:6] = 255  # the ball
  expected[6:8, 0:2] = 255  # the paddle
  np.testing.assert_array_equal(timestep.observation, expected)
  assert timestep.observation.dtype == np.uint8
  np.testing.assert_array_equal(env.draw(timestep.observation), expected)
