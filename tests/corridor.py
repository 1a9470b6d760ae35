"""One corridor in JAX, dm_env and gymnasium, from a hole at place 0 to the end at LENGTH.

Actions are a step to the left, none, and a step to the right; the reward is the place. The wind is
sampled at every reset and only observed.
"""

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors import environments
from hephaestus.actors.environments import environment, wrappers

MAX_STEPS, LENGTH = 9, 4


class InJax(environment.Environment):
  action_spec = specs.DiscreteArray(3)
  max_steps = 2**31 - 1
  observation_spec = {  # noqa: RUF012  as in other environments
    'place': specs.BoundedArray((1,), np.int32, 0, LENGTH),
    'wind': specs.Array((), np.float32),
    'action_mask': specs.BoundedArray((3,), bool, False, True),
  }

  def reset(self, key):
    state = jnp.int32(1), jax.random.uniform(key)
    return state, environment.restart(self._observe(state))

  def step(self, key, state, action):
    del key
    place, wind = jnp.maximum(state[0] + action - 1, 0), state[1]
    end, go_on = environment.termination, environment.transition
    observation = self._observe((place, wind))
    reward = place.astype(jnp.float32)
    return (place, wind), jax.lax.cond(place == LENGTH, end, go_on, reward, observation)

  def _observe(self, state):
    place, wind = state
    mask = jnp.stack([place > 0, jnp.array(True), jnp.array(True)])
    return {'place': place[None], 'wind': wind, 'action_mask': mask}


class Corridor(dm_env.Environment):
  num_steps = 0  # of all instances

  def __init__(self, seed=0):
    self._random = np.random.RandomState(seed)

  def observation_spec(self):
    return {
      'place': specs.BoundedArray((1,), np.int64, 0, LENGTH),
      'wind': specs.Array((), np.float64),
      'action_mask': specs.Array((3,), bool),
    }

  def action_spec(self):
    return specs.BoundedArray((), np.int64, -1, 1)

  def reset(self):
    self._place, self._wind = 1, self._random.uniform()
    return dm_env.restart(self._observe())

  def step(self, action):
    Corridor.num_steps += 1
    self._place += int(action)
    end = self._place == LENGTH
    return (dm_env.termination if end else dm_env.transition)(self._place, self._observe())

  def _observe(self):
    mask = np.array([self._place > 0, True, True])
    return {'place': np.array([self._place]), 'wind': self._wind, 'action_mask': mask}


def make_gymnasium():
  """The corridor in gymnasium, with the action mask in `info`."""
  gymnasium = pytest.importorskip('gymnasium')

  class Walk(gymnasium.Env):
    metadata = {'render_modes': ['rgb_array']}  # noqa: RUF012  as in gymnasium
    action_space = gymnasium.spaces.Discrete(3, start=-1)
    observation_space = gymnasium.spaces.Dict(
      place=gymnasium.spaces.Box(0, LENGTH, (1,), np.int64),
      wind=gymnasium.spaces.Box(0, 1, (), np.float64),
    )

    def __init__(self, render_mode=None):
      self.render_mode = render_mode

    def reset(self, seed=None, options=None):
      super().reset(seed=seed)
      self._place, self._wind = 1, self.np_random.uniform()
      return self._observe()

    def step(self, action):
      self._place += action
      end = self._place == LENGTH
      observation, info = self._observe()
      return observation, float(self._place), end, False, info

    def render(self):
      return np.full((2, LENGTH, 3), self._place, np.uint8)

    def _observe(self):
      mask = np.array([self._place > 0, 1, 1], np.int8)
      observation = {'place': np.array([self._place]), 'wind': self._wind}
      return observation, {'action_mask': mask}

  if 'Walk-v0' not in gymnasium.registry:
    gymnasium.register('Walk-v0', Walk, max_episode_steps=MAX_STEPS)
  return environments.make('gymnasium/Walk-v0')


def make(family):
  """The corridor with its time limit in 'jax', 'dm_env' or 'gymnasium'."""
  if family == 'jax':
    return wrappers.TimeLimit(InJax(), MAX_STEPS)
  if family == 'gymnasium':
    return make_gymnasium()
  return environments.make('dm_env/corridor:Corridor', max_steps=MAX_STEPS)
