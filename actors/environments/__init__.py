"""Environments: `make` builds one by its name, or by the import path of a user's environment."""

import contextlib
import importlib
import inspect
import numbers
import sys
import types
from collections.abc import Callable
from typing import Any

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host, names
from hephaestus.actors.environments.environment import Environment

# A new environment gets its name by a line here; its module is imported when it is made.
ENVIRONMENTS = {
  'catch': 'hephaestus.actors.environments.catch:Catch',
  'errands': 'hephaestus.actors.environments.errands:Errands',
  'grid_world': 'hephaestus.actors.environments.grid_world:GridWorld',
  'hackmatrix': 'hephaestus.actors.environments.hackmatrix:make',
  'ice': 'hephaestus.actors.environments.ice:Ice',
  'noisy_corridor': 'hephaestus.actors.environments.noisy_corridor:NoisyCorridor',
  'oasis': 'hephaestus.actors.environments.oasis:Oasis',
  'rooms': 'hephaestus.actors.environments.rooms:Rooms',
  'sprites': 'hephaestus.actors.environments.sprites:Sprites',
}

LISTING = '`hephaestus environments` lists them'

# Environments of other packages have names FAMILY/NAME. The module of a family has `names()`,
# `options(name)` with their defaults, and `make(name, **options)`; it alone imports the package.
FAMILIES = {
  'brax': 'hephaestus.actors.environments.brax',
  'craftax': 'hephaestus.actors.environments.craftax',
  'gymnax': 'hephaestus.actors.environments.gymnax',
  'jumanji': 'hephaestus.actors.environments.jumanji',
  'navix': 'hephaestus.actors.environments.navix',
}

# The least Python of a family's package, where it is above ours.
NEEDS_PYTHON = {'navix': (3, 12)}

# Families of environments that are stepped on the host. Their names are open, so the module of such
# a family has only `make(name, **options)`, which raises ValueError for an unknown name.
HOST_FAMILIES = {
  'dm_env': 'hephaestus.actors.environments.dm_env',
  'gymnasium': 'hephaestus.actors.environments.gymnasium',
}


INSTANCE = 'instance:'  # begins the names of environments that were given as instances
_instances: dict[str, Environment] = {}


def register(environment: Environment, known: str | None = None) -> str:
  """Names an instance, so that `make` returns it in this process; it lives as long as that.

  Args:
    environment: the instance.
    known: name of an instance of the same class in an earlier process, which this one replaces.

  Raises:
    ValueError: it is no environment.
  """
  if not isinstance(environment, Environment):
    raise ValueError(
      f'env={environment!r}: give a name, or an instance of '
      'hephaestus.actors.environments.environment.Environment'
    )
  for name, registered in _instances.items():
    if registered is environment:
      return name
  stem = f'{INSTANCE}{type(environment).__name__}'
  if known is not None and known.rpartition('-')[0] == stem:
    _instances[known] = environment
    return known
  number = sum(name.startswith(f'{stem}-') for name in _instances)
  _instances[f'{stem}-{number}'] = environment
  return f'{stem}-{number}'


def _instance(name: str, chosen: dict[str, Any]) -> Environment:
  for option, value in chosen.items():
    raise ValueError(
      f'environment.{option}={value!r}: {name} was given as an instance; give one with this option'
    )
  if name not in _instances:
    raise ValueError(
      f'environment.name={name!r}: was given as an instance, in another process; give it again, to '
      'hephaestus.train or, as environment=, to hephaestus.load'
    )
  return _instances[name]


def make(name: str, /, **chosen: Any) -> Environment:
  """Makes an environment and checks it against its specs.

  An environment in JAX is checked by its shapes alone, one that is stepped on the host by a reset and
  a step.

  Args:
    name: a key of `ENVIRONMENTS`, FAMILY/NAME for an environment of `FAMILIES` or `HOST_FAMILIES`, or
      'package.module:Class' for a user's environment.
    **chosen: options, passed to the environment's constructor.

  Returns:
    The environment, without auto-reset.

  Raises:
    ValueError: the name, an option or its value is invalid, the family's package is not installed, or
      the environment contradicts its own specs. The message names the field and the valid choices.
  """
  family_name, slash, env_name = name.partition('/')
  if name.startswith(INSTANCE):
    environment = _instance(name, chosen)
  elif family_name in HOST_FAMILIES and slash:
    environment = _family(name).make(env_name, **chosen)
  elif slash:
    known = options(name)
    for option, value in chosen.items():
      _check_option(name, option, value, known)
    environment = _family(name).make(env_name, **chosen)
  else:
    constructor = _constructor(name)
    check_options(name, constructor, chosen)
    environment = constructor(**chosen)
    _check_library(name, environment)
  try:
    if isinstance(environment, host.HostEnvironment):
      host.check(environment)
    else:
      environment_lib.check(environment)
  except ValueError as error:
    raise ValueError(f'environment.name={name!r}: {error}') from error
  return environment


def _check_library(name: str, environment: Any) -> None:
  """Refuses an environment of another library's class, which has a family of its own."""
  libraries = {base.__module__.partition('.')[0] for base in type(environment).__mro__}
  remedies = {
    'gymnasium': 'register it by gymnasium.register and give gymnasium/'
    f'{name.partition(":")[0]}:ID, where ID is the name that was registered',
    'dm_env': f'give dm_env/{name}',
  }
  for library in libraries & remedies.keys():
    raise ValueError(f'environment.name={name!r}: is of {library}; {remedies[library]}')


def family(name: str) -> types.ModuleType:
  """The module of a family of environments.

  Args:
    name: a key of `FAMILIES` or `HOST_FAMILIES`.

  Raises:
    ValueError: there is no such family, or its package is not installed.
  """
  families = FAMILIES | HOST_FAMILIES
  if name not in families:
    raise ValueError(
      f'no such family of environments: {name!r}; {names.choices(name, families)}; {LISTING}'
    )
  try:
    with contextlib.redirect_stdout(sys.stderr):  # some packages print at import
      return importlib.import_module(families[name])
  except ModuleNotFoundError as error:
    needs_newer = sys.version_info < NEEDS_PYTHON.get(name, (3,))
    raise ValueError(
      f'the environments of {name} need the package {error.name!r}, which is not installed; '
      + (
        f'it needs Python {".".join(map(str, NEEDS_PYTHON[name]))} or newer'
        if needs_newer
        else f'`pip install {error.name}` installs it, in a checkout `uv sync --inexact --extra envs` or '
        '`make train EXTRAS=envs`'
      )
    ) from error


def _family(name: str) -> types.ModuleType:
  """The module of the family in FAMILY/NAME."""
  try:
    return family(name.partition('/')[0])
  except ValueError as error:
    raise ValueError(f'environment.name={name!r}: {error}') from error


def options(name: str) -> dict[str, Any]:
  """Options of an environment that have a default, with their defaults.

  Args:
    name: see `make`.

  Returns:
    Empty for a family of `HOST_FAMILIES`.

  Raises:
    ValueError: see `make`.
  """
  family_name, slash, env_name = name.partition('/')
  if not slash:
    parameters = inspect.signature(_constructor(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
  module = _family(name)
  if family_name in HOST_FAMILIES:
    return {}
  known = module.names()
  if env_name not in known:
    raise ValueError(
      f'environment.name={name!r}: {family_name} has no environment {env_name!r}; '
      f'{names.nearest(env_name, known)}{LISTING}'
    )
  return module.options(env_name)


def _constructor(name: str) -> Callable[..., Any]:
  return names.resolve(
    name, ENVIRONMENTS, field='environment.name', kind='environment', listing=LISTING
  )


def check_options(name: str, constructor: Callable[..., Any], options: dict[str, Any]) -> None:
  """Raises ValueError for an abstract class, and options that a constructor does not take, or lacks.

  Args:
    name: of the environment, for the message.
    constructor: a class or a function.
    options: its keyword arguments.
  """
  lacking = sorted(getattr(constructor, '__abstractmethods__', ()))
  if lacking:
    raise ValueError(
      f'environment.name={name!r}: the class lacks {", ".join(lacking)}: attributes of the class or '
      'properties, since those that __init__ sets come too late; see docs/environments.md'
    )
  parameters = inspect.signature(constructor).parameters
  takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
  for option, parameter in parameters.items():
    is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    if is_named and parameter.default is parameter.empty and option not in options:
      raise ValueError(f'environment.{option}: {name} needs a value for it')
  known = {option: parameter.default for option, parameter in parameters.items()}
  for option, value in options.items():
    if option in known or not takes_any:
      _check_option(name, option, value, known)


def _check_option(name: str, option: str, value: Any, known: dict[str, Any]) -> None:
  """Raises ValueError for an unknown option, or a value of another type than the default."""
  if option not in known:
    raise ValueError(
      f'environment.{option}={value!r}: {name} has no such option; {names.choices(option, known)}'
    )
  default = known[option]
  is_flag = isinstance(value, bool)
  if type(default) is int and (is_flag or not isinstance(value, numbers.Integral)):
    raise ValueError(f'environment.{option}={value!r}: a whole number is needed, such as {default}')
  if type(default) is float and (is_flag or not isinstance(value, numbers.Real)):
    raise ValueError(f'environment.{option}={value!r}: a number is needed, such as {default}')
  if type(default) is bool and not is_flag:
    raise ValueError(f'environment.{option}={value!r}: true or false is needed')
