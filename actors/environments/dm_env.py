"""Environments of dm_env, as `dm_env/package.module:callable`, where the callable returns one."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import dm_env
import numpy as np
from dm_env import specs

from hephaestus.actors import environments
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host, names


def make(path: str, /, *, max_steps: int = 1000, **options: Any) -> host.HostEnvironment:
  """Makes an environment of dm_env; its step types and discounts stay unchanged, but for the time limit.

  The path, 'package.module:callable', is of what returns a `dm_env.Environment` by these options. If it
  takes a `seed`, each instance gets a seed of its own, and a run can be repeated.

  Raises:
    ValueError: there is no such callable, it does not take an option, a `seed` is given, it returns
      something else, a spec is not supported, or `max_steps` is invalid.
    ModuleNotFoundError: the callable's module imports a module that does not exist.
  """
  name = f'dm_env/{path}'
  make_one = check(path)
  environments.check_options(
    name, make_one, {'seed': 0} | options if _takes_seed(make_one) else options
  )
  return host.HostEnvironment(functools.partial(_of_path, path, options), max_steps, name=name)


def check(path: str) -> Callable[..., Any]:
  """Imports the callable and returns it; raises as `make`, which calls it."""
  name = f'dm_env/{path}'
  if ':' not in path:
    raise ValueError(f"environment.name={name!r}: write it as 'dm_env/package.module:callable'")
  make_one = _resolve(path)
  if inspect.isclass(make_one) and not issubclass(make_one, dm_env.Environment):
    raise ValueError(
      f'environment.name={name!r}: is a class {make_one.__name__}, a dm_env.Environment is needed'
    )
  return make_one


def _resolve(path: str) -> Callable[..., Any]:
  name = f'dm_env/{path}'
  return names.resolve(name, {name: path}, field='environment.name', kind='environment')


def _takes_seed(make_one: Callable[..., Any]) -> bool:
  return 'seed' in inspect.signature(make_one).parameters


def _of_path(path: str, options: dict[str, Any]) -> '_DmEnv':
  return _DmEnv(_resolve(path), options)


def adapt(
  made: dm_env.Environment, make_one: Callable[..., Any], options: dict[str, Any]
) -> host.LibraryEnv:
  """Adapts an environment that a user's class or function has made with these options."""
  return _DmEnv(make_one, options, made)


class _DmEnv(host.LibraryEnv):
  """One environment of dm_env, made by the first reset.

  Its reset takes no seed, so if the callable takes one, a new seed makes a new environment.
  """

  def __init__(
    self,
    make_one: Callable[..., Any],
    options: dict[str, Any],
    made: dm_env.Environment | None = None,
  ):
    """Args: the callable, its `options`, and the environment that it has `made`, if any."""
    if 'seed' in options:
      raise ValueError(
        f'environment.seed={options["seed"]!r}: all parallel environments would be the same; leave it out, '
        "as the run's --seed gives each a seed of its own"
      )
    self._takes_seed = _takes_seed(make_one)
    self._make_one = functools.partial(make_one, **options)
    self._environment: Any = None
    if made is not None:
      self._take(made)

  def _make(self, seed: int) -> None:
    self.close()
    self._take(self._make_one(seed=seed) if self._takes_seed else self._make_one())

  def _take(self, environment: Any) -> None:
    if not isinstance(environment, dm_env.Environment):
      raise ValueError(f'gives {environment!r}, a dm_env.Environment is needed')
    self._environment = environment
    self._given_action = given = environment.action_spec()
    # A range of integers is a set of choices too, whatever its minimum.
    self._are_choices = isinstance(given, specs.BoundedArray) and given.dtype.kind in 'iu'

  @property
  def inner(self) -> Any:
    return self._environment

  @property
  def observation_spec(self) -> Any:
    return self._environment.observation_spec()

  @property
  def action_spec(self) -> Any:
    given = self._given_action
    if not self._are_choices:
      return given
    # In 64 bits, because the difference may overflow a narrow dtype.
    start = np.broadcast_to(np.asarray(given.minimum, np.int64), given.shape)
    last = np.asarray(given.maximum, np.int64) - start
    if given.shape == ():
      return environment_lib.ChoiceSpec(int(last) + 1, int(start))
    starts = tuple(start.tolist())
    return environment_lib.ChoicesSpec(given.shape, np.int32, 0, last, starts, given.name)

  def reset(self, seed: int | None) -> dm_env.TimeStep:
    if self._environment is None or (seed is not None and self._takes_seed):
      self._make(seed or 0)
    return self._environment.reset()

  def step(self, action: np.ndarray) -> dm_env.TimeStep:
    given = self._given_action
    action = np.asarray(action, given.dtype)
    if given.dtype.kind == 'f':  # float32 may round a bound outwards, which some refuse
      action = np.clip(action, given.minimum, given.maximum)
    return self._environment.step(action)

  def close(self) -> None:
    environment, self._environment = self._environment, None
    if environment is not None:
      environment.close()
