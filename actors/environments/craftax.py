"""Craftax and Craftax-Classic with symbolic or pixel observations, as `craftax/NAME`."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from craftax import craftax_env
from dm_env import specs

from hephaestus.actors.environments import adapter, environment, wrappers

NAMES = (
  'Craftax-Classic-Pixels-v1',
  'Craftax-Classic-Symbolic-v1',
  'Craftax-Pixels-v1',
  'Craftax-Symbolic-v1',
)
PIXELS_PER_BLOCK = 16  # in rendered frames
CLASSIC_VITALS = ('health', 'food', 'drink', 'energy')
FIRST_VITAL = -10  # position of health in the observation of Craftax-Classic, counted from its end
SET_POINT = 0.9  # the maximum of a vital: 9, observed in tenths


def names() -> list[str]:
  """Names of the four environments."""
  return list(NAMES)


def options(name: str) -> dict[str, Any]:
  """Option -> default: numbers and bools of a craftax environment's parameters, and `max_steps`."""
  values = dataclasses.asdict(_construct(name).default_params)
  max_steps = values.pop('max_timesteps')
  return {
    'max_steps': max_steps,
    **{k: v for k, v in values.items() if isinstance(v, (int, float))},
  }


def make(name: str, max_steps: int | None = None, **options: Any) -> wrappers.TimeLimit:
  """Makes an environment of craftax without auto-reset; its time limit, None for its own, truncates."""
  env = _construct(name)
  params = env.default_params.replace(**options)
  max_steps = params.max_timesteps if max_steps is None else max_steps
  params = params.replace(max_timesteps=int(np.iinfo(np.int32).max))

  # Craftax keeps a key in the state only for the noise of its image; here the state holds none.
  def begin(key):
    observation, state = env.reset_env(key, params)
    return state.replace(state_rng=None), observation

  def advance(key, state, action):
    observation, state, reward, is_terminated, _ = env.step_env(key, state, action, params)
    return state.replace(state_rng=None), observation, reward, is_terminated

  unlimited = adapter.Adapter(
    begin=begin,
    advance=advance,
    observation_spec=functools.partial(_observation_spec, name),
    action_spec=specs.DiscreteArray(env.num_actions, np.int32),
    frame=functools.partial(_frame, 'Classic' in name),
  )
  return wrappers.TimeLimit(unlimited, max_steps)


def _observation_spec(name: str, like: jax.ShapeDtypeStruct) -> specs.Array:
  if name == 'Craftax-Symbolic-v1':
    return specs.Array(like.shape, like.dtype, 'view')  # some of its numbers exceed 1
  if name != 'Craftax-Classic-Symbolic-v1':
    return specs.BoundedArray(like.shape, like.dtype, 0.0, 1.0, 'view')
  (size,) = like.shape
  vitals = [
    environment.Vital(vital, size + FIRST_VITAL + place, SET_POINT)
    for place, vital in enumerate(CLASSIC_VITALS)
  ]
  # The reward contains a tenth of the change of health, which depends on the other vitals.
  return environment.VitalsSpec(
    like.shape, like.dtype, 0.0, 1.0, vitals, are_paid=True, name='view'
  )


def _construct(name: str) -> Any:
  with contextlib.redirect_stdout(sys.stderr):  # it prints messages about its textures
    return craftax_env.make_craftax_env_from_name(name, auto_reset=False)


def _frame(is_classic: bool, state: Any) -> np.ndarray:
  pixels = _renderer(is_classic)(state.replace(state_rng=jax.random.key(0)))
  return np.asarray(pixels).clip(0, 255).astype(np.uint8)


@functools.cache
def _renderer(is_classic: bool) -> Callable[[Any], jax.Array]:
  if is_classic:
    from craftax.craftax_classic import renderer
  else:
    from craftax.craftax import renderer
  with contextlib.redirect_stdout(sys.stderr):
    return jax.jit(renderer.make_craftax_pixel_renderer(PIXELS_PER_BLOCK))
