"""Environments of gymnax (classic control, bsuite, MinAtar and others), as `gymnax/NAME`."""

import dataclasses
import functools
import inspect
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs
from gymnax.environments import spaces

from hephaestus.actors.environments import adapter, wrappers

TIME = 'max_steps_in_episode'  # the name of the time limit in gymnax


def names() -> list[str]:
  """Names of all registered environments."""
  return list(gymnax.registered_envs)


def options(name: str) -> dict[str, Any]:
  """Option -> default: options of an environment's class, its gymnax parameters, and `max_steps`.

  Raises:
    ValueError: its data could not be fetched.
  """
  env, params = _construct(name, {})
  values = _constructor_options(env) | dataclasses.asdict(params)
  plain = lambda value: (
    value if isinstance(value, (bool, int, float, str)) else np.asarray(value).tolist()
  )
  return {
    'max_steps': int(values.pop(TIME)),
    **{key: plain(value) for key, value in values.items()},
  }


def make(name: str, max_steps: int | None = None, **options: Any) -> wrappers.TimeLimit:
  """Makes an environment of gymnax with `options` of it, whose time limit truncates; None for gymnax's own.

  The planes of MinAtar become booleans.

  Raises:
    ValueError: the space of its actions or observations is not supported, or its data could not be
      fetched.
  """
  taken = _constructor_options(_construct(name, {})[0])
  env, params = _construct(name, {key: options.pop(key) for key in taken if key in options})
  limit = getattr(params, TIME)
  max_steps = int(limit) if max_steps is None else max_steps
  # Some environments observe their time limit, and before gymnax 1.0 they terminate at it.
  params = params.replace(**_typed(options, params), **{TIME: type(limit)(max_steps)})
  without_limit = params.replace(**{TIME: type(limit)(2**30)})
  ends_by_limit = not hasattr(env, 'is_truncated')
  space = env.observation_space(params)
  is_unit = _is_unit(space)

  def observe(observation):
    if isinstance(space, spaces.Discrete):
      return jnp.asarray(observation, jnp.int32)
    # Rounding may leave [0, 1].
    return jnp.clip(observation, 0.0, 1.0) if is_unit else observation

  def begin(key):
    observation, state = env.reset_env(key, params)
    return state, observe(observation)

  def advance(key, state, action):
    observation, following, reward, is_terminated, _ = env.step_env(key, state, action, params)
    if ends_by_limit:
      *_, is_terminated, _ = env.step_env(key, state, action, without_limit)
    return following, observe(observation), reward, is_terminated

  unlimited = adapter.Adapter(
    begin=begin,
    advance=advance,
    observation_spec=functools.partial(_observation_spec, name, space),
    action_spec=_action_spec(name, env.action_space(params)),
  )
  return wrappers.TimeLimit(unlimited, max_steps)


def _construct(name: str, arguments: dict[str, Any]) -> tuple[Any, Any]:
  try:
    return gymnax.make(name, **arguments)
  except OSError as error:
    raise ValueError(
      f"environment.name='gymnax/{name}': its data could not be fetched ({error})"
    ) from error


def _typed(options: dict[str, Any], params: Any) -> dict[str, Any]:
  """Options in the types of their defaults: whole numbers become real ones, and lists arrays.

  ValueError if the default is an array, and the option is no list of numbers of its shape.
  """
  found = {}
  for key, value in options.items():
    default = getattr(params, key)
    if isinstance(default, float):
      value = float(value)
    elif isinstance(default, (np.ndarray, jax.Array)):
      try:
        value = jnp.asarray(value, default.dtype).reshape(default.shape)
      except (TypeError, ValueError):
        raise ValueError(
          f'environment.{key}={value!r}: a list of numbers is needed, such as {default.tolist()}'
        ) from None
    found[key] = value
  return found


def _constructor_options(env: Any) -> dict[str, Any]:
  parameters = inspect.signature(type(env)).parameters
  kinds = (bool, int, float, str)
  return {key: p.default for key, p in parameters.items() if isinstance(p.default, kinds)}


def _is_unit(space: Any) -> bool:
  if not isinstance(space, spaces.Box):
    return False
  return bool(np.all(np.asarray(space.low) == 0) and np.all(np.asarray(space.high) == 1))


def _observation_spec(name: str, space: Any, like: jax.ShapeDtypeStruct) -> specs.Array:
  if isinstance(space, spaces.Discrete):
    return specs.DiscreteArray(space.n, np.int32)
  if not isinstance(space, spaces.Box):
    raise ValueError(f"environment.name='gymnax/{name}': cannot read the observations of {space}")
  if name.endswith('-MinAtar'):  # float32 in gymnax
    return specs.BoundedArray(like.shape, bool, False, True)
  if _is_unit(space):
    return specs.BoundedArray(like.shape, like.dtype, 0.0, 1.0)
  return specs.Array(like.shape, like.dtype)  # some environments exceed their other bounds


def _action_spec(name: str, space: Any) -> specs.BoundedArray:
  if isinstance(space, spaces.Discrete):
    return specs.DiscreteArray(space.n, np.int32)
  if not isinstance(space, spaces.Box):
    raise ValueError(f"environment.name='gymnax/{name}': cannot play the actions of {space}")
  low, high = np.asarray(space.low, np.float32), np.asarray(space.high, np.float32)
  return specs.BoundedArray(space.shape, np.float32, low, high)
