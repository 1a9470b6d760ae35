"""Catch, broken on purpose in ways that a diagnosis must tell apart."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import catch


def _hidden(game, state):
  """The state with the ball behind the paddle."""
  return state.replace(ball_row=game.rows - 1, ball_column=state.paddle_column)


class LateState(flax.struct.PyTreeNode):
  """The state of the game, and the action that waits for the next step."""

  game: catch.State
  pending: jax.Array


class Late(catch.Catch):
  """Each action moves the paddle one step too late."""

  def reset(self, key):
    state, timestep = super().reset(key)
    return LateState(state, jnp.ones((), jnp.int32)), timestep

  def step(self, key, state, action):
    game, timestep = super().step(key, state.game, state.pending)
    return LateState(game, jnp.asarray(action, jnp.int32)), timestep

  def scripted_action(self, state):
    return super().scripted_action(state.game)

  def render(self, state):
    return super().render(state.game)


class Forgetful(catch.Catch):
  """Only the first observation shows the ball, so the task needs memory."""

  def observe(self, state):
    hidden = super().observe(_hidden(self, state))
    return jnp.where(state.ball_row == 0, super().observe(state), hidden)


class Endless(catch.Catch):
  """The ball falls one or two rows; every end is marked as a truncation."""

  def step(self, key, state, action):
    fast = jax.random.bernoulli(key) & (state.ball_row < self.rows - 2)
    state, timestep = super().step(key, state.replace(ball_row=state.ball_row + fast), action)
    return state, timestep._replace(discount=jnp.ones_like(timestep.discount))


class Beyond(catch.Catch):
  """Observations of 7 where the spec allows at most 1."""

  @property
  def observation_spec(self):
    return specs.BoundedArray((self.rows * self.columns,), np.float32, 0.0, 1.0, 'board')

  def observe(self, state):
    return 7.0 * super().observe(state)
