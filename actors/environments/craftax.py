"""Craftax and Craftax-Classic with symbolic or pixel observations, as `craftax/NAME`."""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
CLASSIC_MAP = (7, 9, 21)  # cells that Craftax-Classic shows, and the features of each
CLASSIC_VITALS = ('health', 'food', 'drink', 'energy')
FIRST_VITAL = 12  # position of health among the numbers of Craftax-Classic, after the inventory
NUM_DIRECTIONS = 4
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
  """Makes an environment of craftax without auto-reset; its time limit, None for its own, truncates.

  The observation of Craftax-Classic as symbols is `map`, [7, 9, 25] bool, for each cell around the player the
  17 kinds of blocks, the 4 of creatures, and, in the middle, the 4 directions in which the player may look;
  and `status`, [18] float32: inventory, health, food, drink and energy in tenths, light, and sleep.
  """
  env = _construct(name)
  params = env.default_params.replace(**options)
  max_steps = params.max_timesteps if max_steps is None else max_steps
  params = params.replace(max_timesteps=int(np.iinfo(np.int32).max))

  show = show_classic if name == 'Craftax-Classic-Symbolic-v1' else lambda observation: observation

  # Craftax keeps a key in the state only for the noise of its image; here the state holds none.
  def begin(key):
    observation, state = env.reset_env(key, params)
    return state.replace(state_rng=None), show(observation)

  def advance(key, state, action):
    observation, state, reward, is_terminated, _ = env.step_env(key, state, action, params)
    return state.replace(state_rng=None), show(observation), reward, is_terminated

  unlimited = adapter.Adapter(
    begin=begin,
    advance=advance,
    observation_spec=functools.partial(_observation_spec, name),
    action_spec=specs.DiscreteArray(env.num_actions, np.int32),
    frame=functools.partial(_frame, 'Classic' in name),
    has_costly_reset=True,  # it generates a world
  )
  return wrappers.TimeLimit(unlimited, max_steps)


def show_classic(observation: jax.Array) -> dict[str, jax.Array]:
  """Divides an observation of Craftax-Classic as symbols, [1345] float32, into `map` and `status`: see `make`."""
  begin = len(observation) - 2 - NUM_DIRECTIONS  # of the direction, which light and sleep follow
  ends = [math.prod(CLASSIC_MAP), begin, begin + NUM_DIRECTIONS]
  cells, inventory_and_vitals, direction, others = jnp.split(observation, ends)
  height, width, _ = CLASSIC_MAP
  look = jnp.zeros((height, width, NUM_DIRECTIONS)).at[height // 2, width // 2].set(direction)
  shown = jnp.concatenate([cells.reshape(CLASSIC_MAP), look], axis=-1) > 0.5
  return {'map': shown, 'status': jnp.concatenate([inventory_and_vitals, others])}


def _observation_spec(name: str, like: Any) -> Any:
  if name == 'Craftax-Symbolic-v1':
    return specs.Array(like.shape, like.dtype, 'view')  # some of its numbers exceed 1
  if name != 'Craftax-Classic-Symbolic-v1':
    return specs.BoundedArray(like.shape, like.dtype, 0.0, 1.0, 'view')
  cells, status = like['map'], like['status']
  vitals = [
    environment.Vital(vital, FIRST_VITAL + place, SET_POINT)
    for place, vital in enumerate(CLASSIC_VITALS)
  ]
  # The reward contains a tenth of the change of health, which depends on the other vitals.
  return {
    'map': specs.BoundedArray(cells.shape, bool, False, True, 'map'),
    'status': environment.VitalsSpec(
      status.shape, status.dtype, 0.0, 1.0, vitals, are_paid=True, name='status'
    ),
  }


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
