"""Worlds: `make` builds one by its name, or by the import path of a world of the user's own."""

import difflib
import importlib
import inspect
import numbers
import types
from collections.abc import Callable, Iterable
from typing import Any

from actors.environments import environment as environment_lib
from actors.environments import host
from actors.environments.environment import Environment

# A new world is known by its name once it has a line here; importing waits until it is asked for.
WORLDS = {
  'catch': 'actors.environments.catch:Catch',
  'grid_world': 'actors.environments.grid_world:GridWorld',
  'hackmatrix': 'actors.environments.hackmatrix:make',
}

# Worlds that are stepped on the host, known as FAMILY/NAME. The module of a family offers
# `make(name, **options)`, which refuses what it does not know; it alone imports the package.
HOST_FAMILIES = {
  'dm_env': 'actors.environments.dm_env',
  'gymnasium': 'actors.environments.gymnasium',
}


def make(name: str, /, **options: Any) -> Environment:
  """Makes a world and checks that it keeps its promises.

  A world in JAX is checked by shapes alone, one that is stepped on the host by a reset and a step.

  Args:
    name: a key of `WORLDS`, FAMILY/NAME for a world of `HOST_FAMILIES`, or
      'package.module:Class' for a world of the user's.
    **options: given to the world's constructor.

  Returns:
    The world, without auto-reset.

  Raises:
    ValueError: the name, an option or its value is not one that works, the family's package is not
      installed, or the world contradicts its own specs; the message names the field and says what
      would do.
  """
  family_name, slash, world_name = name.partition('/')
  if slash and family_name in HOST_FAMILIES:
    environment = _host_family(family_name).make(world_name, **options)
  else:
    constructor = _find(name, WORLDS.get(name, name))
    _check_options(name, constructor, options)
    environment = constructor(**options)
  try:
    is_on_host = isinstance(environment, host.HostEnvironment)
    host.check(environment) if is_on_host else environment_lib.check(environment)
  except ValueError as error:
    raise ValueError(f'environment.name={name!r}: {error}') from error
  return environment


def _host_family(name: str) -> types.ModuleType:
  try:
    return importlib.import_module(HOST_FAMILIES[name])
  except ModuleNotFoundError as error:
    raise ValueError(
      f'environment.name: the worlds of {name} need the package {error.name!r}, which is not '
      'installed; `uv sync --extra envs` installs it, and so does `make train EXTRAS=envs`'
    ) from error


def _find(name: str, path: str) -> Callable[..., Any]:
  module_name, colon, attribute = path.partition(':')
  if not (module_name and colon and attribute):
    raise ValueError(
      f'environment.name={name!r}: no such world; {_choices(name, WORLDS)}; '
      "a world of your own is named by its import path, 'package.module:Class'"
    )
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    # Only the named module's absence is the user's slip; a missing import within it is its own.
    if error.name is None or not f'{module_name}.'.startswith(f'{error.name}.'):
      raise
    raise ValueError(
      f'environment.name={name!r}: there is no module {error.name!r}; '
      'is the folder that holds it on PYTHONPATH?'
    ) from error
  constructor = getattr(module, attribute, None)
  if not callable(constructor):
    classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
    raise ValueError(
      f'environment.name={name!r}: {module_name} has no class {attribute!r}; '
      f'{_choices(attribute, classes)}'
    )
  return constructor


def _check_options(name: str, constructor: Callable[..., Any], options: dict[str, Any]) -> None:
  parameters = inspect.signature(constructor).parameters
  takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
  for option, parameter in parameters.items():
    is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    if is_named and parameter.default is parameter.empty and option not in options:
      raise ValueError(f'environment.{option}: {name} needs a value for it')
  for option, value in options.items():
    if option not in parameters:
      if takes_any:
        continue
      raise ValueError(
        f'environment.{option}={value!r}: {name} has no such option; {_choices(option, parameters)}'
      )
    default = parameters[option].default
    if type(default) is int and (
      isinstance(value, bool) or not isinstance(value, numbers.Integral)
    ):
      raise ValueError(
        f'environment.{option}={value!r}: a whole number is needed, such as {default}'
      )


def _choices(given: str, known: Iterable[str]) -> str:
  known = sorted(known)
  nearest = difflib.get_close_matches(given, known)
  did_you_mean = f'did you mean {" or ".join(nearest)}? ' if nearest else ''
  return f'{did_you_mean}known are: {", ".join(known) or "none"}'
