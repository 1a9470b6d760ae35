"""An environment with metrics that are known exactly, in JAX and in gymnasium; used as `climb:Climb`.

The value at step t of an episode of random length L is t, so every metric is linear in L.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment

LONGEST = 4
METRICS = {'height': 'mean', 'steps': 'sum', 'depth': 'max', 'top': 'last'}


def expected(length):
  """Metrics of an episode of so many steps, or their means for episodes of that mean length."""
  return {
    'environment/height': (length + 1) / 2,
    'environment/steps': length,
    'environment/depth': -1.0,
    'environment/top': length,
  }


def measure(t):
  return {'height': t, 'steps': 1.0, 'depth': -t, 'top': t}


@dataclasses.dataclass(frozen=True)
class Climb(environment.Environment):
  """Ends after 1 to LONGEST steps, sampled at the reset; the actions have no effect.

  Attributes:
    length: length of the observation.
  """

  length: int = 1

  action_spec = specs.DiscreteArray(2, np.int32)
  max_steps = LONGEST
  metrics = METRICS

  @property
  def observation_spec(self):
    return specs.BoundedArray((self.length,), np.float32, 0.0, LONGEST)

  def reset(self, key):
    state = jnp.zeros((), jnp.int32), jax.random.randint(key, (), 1, LONGEST + 1)
    return state, environment.restart(jnp.zeros(self.length), dict.fromkeys(METRICS, 7.0))

  def step(self, key, state, action):
    t, length = state[0] + 1, state[1]
    end, go_on = environment.termination, environment.transition
    observation = jnp.full(self.length, t, jnp.float32)
    timestep = jax.lax.cond(t >= length, end, go_on, jnp.float32(1.0), observation, measure(t))
    return (t, length), timestep


def make_gymnasium():
  """The same environment in gymnasium, which names all metrics but 'top'."""
  import gymnasium

  class Walk(gymnasium.Env):
    metadata = {'metrics': {name: METRICS[name] for name in METRICS if name != 'top'}}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, LONGEST, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
      super().reset(seed=seed)
      self.t, self.length = 0, self.np_random.integers(1, LONGEST + 1)
      return np.zeros(1, np.float32), {'height': 7.0}

    def step(self, action):
      self.t += 1
      ends = self.t == self.length
      return np.full(1, self.t, np.float32), 1.0, ends, False, measure(self.t)

  return Walk()
