"""Robotics environments of brax, as `brax/NAME`."""

import inspect
from typing import Any

import numpy as np
from brax import envs
from dm_env import specs

from hephaestus.actors.environments import adapter, wrappers

BACKENDS = ('generalized', 'mjx', 'positional', 'spring')


def names() -> list[str]:
  """Names of all registered environments."""
  return [name for name in envs._envs if name != 'fast']  # for tests of brax only


def options(name: str) -> dict[str, Any]:
  """Option -> default: numbers and strings that an environment's class takes, and `max_steps`."""
  parameters = inspect.signature(envs._envs[name]).parameters
  known = {key: p.default for key, p in parameters.items()}
  scalars = {key: value for key, value in known.items() if isinstance(value, (int, float, str))}
  return {'max_steps': 1000, **scalars}


def make(name: str, max_steps: int = 1000, **options: Any) -> wrappers.TimeLimit:
  """Makes an environment of brax without brax's wrappers; its time limit truncates.

  Raises:
    ValueError: there is no such backend.
  """
  backend = options.get('backend', BACKENDS[0])
  if backend not in BACKENDS:
    raise ValueError(f'environment.backend={backend!r}: choose one of {", ".join(BACKENDS)}')
  env = envs.get_environment(name, **options)

  def begin(key):
    state = env.reset(key)
    return state, state.obs

  def advance(key, state, action):
    del key  # Only the reset is random.
    state = env.step(state, action)
    return state, state.obs, state.reward, state.done > 0

  unlimited = adapter.Adapter(
    begin=begin,
    advance=advance,
    observation_spec=lambda like: specs.Array(like.shape, like.dtype, 'joints'),
    action_spec=specs.BoundedArray((env.action_size,), np.float32, -1.0, 1.0, 'actuators'),
  )
  return wrappers.TimeLimit(unlimited, max_steps)
