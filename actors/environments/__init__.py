"""Environments: `make` builds one from its name, or from the import path of a user's class.

The package itself imports no JAX, so that a wrong name is refused soon.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import numbers
import sys
import types
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hephaestus.actors.environments import names, packages

if TYPE_CHECKING:
  from hephaestus.actors.environments import host
  from hephaestus.actors.environments.environment import Environment

# Built-in environments: name -> import path. A module is imported when its environment is made.
ENVIRONMENTS = {
  'catch': 'hephaestus.actors.environments.catch:Catch',
  'errands': 'hephaestus.actors.environments.cognition.errands:Errands',
  'grid_world': 'hephaestus.actors.environments.grid_world:GridWorld',
  'hackmatrix': 'hephaestus.actors.environments.hackmatrix:make',
  'ice': 'hephaestus.actors.environments.cognition.ice:Ice',
  'noisy_corridor': 'hephaestus.actors.environments.cognition.noisy_corridor:NoisyCorridor',
  'oasis': 'hephaestus.actors.environments.cognition.oasis:Oasis',
  'rooms': 'hephaestus.actors.environments.cognition.rooms:Rooms',
  'sprites': 'hephaestus.actors.environments.cognition.sprites:Sprites',
}

LISTING = '`hephaestus environments` lists them'

# Environments of other packages have names FAMILY/NAME. The module of a family has `names()`,
# `options(name)` with their defaults, and `make(name, **options)`; no other module imports the package.
FAMILIES = {
  'brax': 'hephaestus.actors.environments.brax',
  'craftax': 'hephaestus.actors.environments.craftax',
  'gymnax': 'hephaestus.actors.environments.gymnax',
  'jumanji': 'hephaestus.actors.environments.jumanji',
  'navix': 'hephaestus.actors.environments.navix',
}

# The lowest Python version that a family's package runs on, where it is above the version of this project.
NEEDS_PYTHON = {'navix': (3, 12)}

# Families of environments that are stepped on the host. Nobody can list all their names, so the module
# of such a family has `make(name, **options)` and `check(name)`, which raise ValueError for an unknown one.
HOST_FAMILIES = {
  'dm_env': 'hephaestus.actors.environments.dm_env',
  'gymnasium': 'hephaestus.actors.environments.gymnasium',
}


INSTANCE = names.INSTANCE
_instances: dict[str, Any] = {}


def register(environment: Any, known: str | None = None) -> str:
  """Gives an object a name by which `make` makes its environment, until this process ends.

  Args:
    environment: an `Environment`; a class or function that makes an environment of gymnasium or dm_env,
      or a class of an `Environment`; or an environment that `gymnasium.make` has made, of which others
      are made by its spec.
    known: name that an object of the same class, or a class or function of the same name, had in an
      earlier process, such as that of a run which is resumed; this one takes it over. Another is ignored.

  Returns:
    The name, 'instance:CLASS-NUMBER'; the same one if the object was registered before.

  Raises:
    ValueError: it is none of these.
  """
  from hephaestus.actors.environments.environment import Environment  # which imports JAX

  _check_is_one(
    f'env={environment!r}', environment if inspect.isclass(environment) else type(environment)
  )
  is_made = 'gymnasium' in _libraries(type(environment))
  if not (isinstance(environment, Environment) or callable(environment) or is_made):
    raise ValueError(
      f'env={environment!r}: give a name, an instance of '
      'hephaestus.actors.environments.environment.Environment, or a class or function that makes an '
      'environment of gymnasium or dm_env'
    )
  if is_made and environment.spec is None:
    raise ValueError(
      f'env={environment!r}: is one instance, of which no others can be made; give its class, or a '
      'function that makes one'
    )
  for name, registered in _instances.items():
    if registered is environment:
      return name
  inner = environment.unwrapped if is_made else environment
  stem = f'{INSTANCE}{getattr(inner, "__name__", type(inner).__name__).strip("<>")}'
  if known is not None and known.rpartition('-')[0] == stem:
    _instances[known] = environment
    return known
  name = next(free for n in itertools.count() if (free := f'{stem}-{n}') not in _instances)
  _instances[name] = environment
  return name


def _instance(name: str, chosen: dict[str, Any]) -> Environment:
  from hephaestus.actors.environments.environment import Environment  # which imports JAX

  if name not in _instances:
    raise ValueError(
      f'environment.name={name!r}: was given as an instance, in another process; give it again, to '
      'hephaestus.train or, as environment=, to hephaestus.load'
    )
  given = _instances[name]
  if isinstance(given, Environment):
    for option, value in chosen.items():
      raise ValueError(
        f'environment.{option}={value!r}: {name} was given as an instance; give one with this option'
      )
    return given
  if inspect.isclass(given) and issubclass(given, Environment):
    check_options(name, given, chosen)
    return given(**chosen)
  return _from_factory(name, given, **chosen)


def _from_factory(
  name: str,
  given: Any,
  *,
  max_steps: int | None = None,
  metrics: Mapping[str, str] | None = None,
  **options: Any,
) -> Environment:
  """Makes an environment on the host from a class, a function or a made environment, see `register`."""
  from hephaestus.actors.environments import host  # which imports JAX

  make_one = given
  if 'gymnasium' in _libraries(type(given)):
    make_one = functools.partial(_family('gymnasium/').make_again, given)
  # An instance of dm_env is made again at its first reset, with a seed of its own.
  given_first = {'seed': 0} | options if _needs_seed(make_one) else options
  check_options(name, make_one, given_first)

  def adapted() -> host.LibraryEnv:
    made = make_one(**given_first)
    _check_is_one('it gives a vector', type(made))
    for library in _libraries(type(made)) & HOST_FAMILIES.keys():
      if library != 'dm_env':
        check_options(name, make_one, options)
      env: host.LibraryEnv = _family(f'{library}/').adapt(made, make_one, options)
      return env
    raise ValueError(f'gives {made!r}; an environment of gymnasium or dm_env is needed')

  return host.HostEnvironment(adapted, max_steps, metrics, name=name)


def _needs_seed(make_one: Callable[..., Any]) -> bool:
  try:
    parameter = inspect.signature(make_one).parameters.get('seed')
  except ValueError:  # of a class or function that is not written in Python
    return False
  return parameter is not None and parameter.default is parameter.empty


def _check_is_one(field: str, kind: type) -> None:
  """Raises ValueError for a class of vector environments, of gymnasium or stable-baselines3."""
  if {'VectorEnv', 'VecEnv'} & {base.__name__ for base in kind.__mro__}:
    raise ValueError(
      f'{field}: {kind.__name__} is a vector of environments; give one environment, as gymnasium.make or '
      'its class makes it, and set actor.num_envs'
    )


def _libraries(kind: type) -> set[str]:
  """Names of the packages of a class and its bases."""
  return {base.__module__.partition('.')[0] for base in kind.__mro__}


def make(name: str, /, **chosen: Any) -> Environment:
  """Makes an environment and checks it against its specs.

  The check traces an environment written in JAX, and takes one reset and one step of one that is
  stepped on the host.

  Args:
    name: a key of `ENVIRONMENTS`, FAMILY/NAME for an environment of `FAMILIES` or `HOST_FAMILIES`,
      'package.module:Class' for a user's environment, or a name that `register` returned.
    **chosen: options, passed to the environment's constructor.

  Returns:
    The environment, without auto-reset.

  Raises:
    ValueError: the name, an option or its value is invalid, the family's package is not installed, or
      the environment contradicts its own specs. The message names the field and the valid choices.
    ModuleNotFoundError: the module of a user's environment imports a module that does not exist.
  """
  from hephaestus.actors.environments import environment as environment_lib  # which import JAX
  from hephaestus.actors.environments import host

  family_name, slash, env_name = name.partition('/')
  if name.startswith(INSTANCE):
    environment = _instance(name, chosen)
  elif family_name in HOST_FAMILIES and slash:
    names.check_trust(name, 'environment.name')
    environment = _family(name).make(env_name, **chosen)
  else:
    check(name, chosen)
    environment = _family(name).make(env_name, **chosen) if slash else _constructor(name)(**chosen)
    _check_kind(name, type(environment))
  if isinstance(environment, host.HostEnvironment):
    return environment  # which has checked itself
  try:
    environment_lib.check(environment)
  except ValueError as error:
    raise ValueError(f'environment.name={name!r}: {error}') from error
  return environment


def check(name: str, chosen: Mapping[str, Any]) -> None:
  """Checks name and options as `make` does, without making an environment.

  Options of a family of `HOST_FAMILIES` are not known.
  """
  family_name, slash, env_name = name.partition('/')
  if family_name in HOST_FAMILIES and slash:
    names.check_trust(name, 'environment.name')
    _family(name).check(env_name)
  elif slash:
    known = options(name)
    for option, value in chosen.items():
      _check_option(name, option, value, known)
  else:
    check_options(name, _constructor(name), chosen)


def _check_kind(name: str, kind: type) -> None:
  """Raises ValueError for a class that is no environment; environments of gymnasium and dm_env have families."""
  from hephaestus.actors.environments.environment import Environment  # which imports JAX

  _check_is_one(f'environment.name={name!r}', kind)
  remedies = {
    'gymnasium': 'register it by gymnasium.register and give gymnasium/'
    f'{name.partition(":")[0]}:ID, where ID is the name that was registered',
    'dm_env': f'give dm_env/{name}',
  }
  for library in _libraries(kind) & remedies.keys():
    raise ValueError(f'environment.name={name!r}: is of {library}; {remedies[library]}')
  if not issubclass(kind, Environment):
    raise ValueError(
      f'environment.name={name!r}: is a {kind.__name__}, and no actors.environments.environment.Environment'
    )


def check_name(name: str) -> None:
  """Checks a name soon: imports no JAX, and nothing but gymnasium and what an import path names.

  Raises:
    ValueError, ModuleNotFoundError: as `make`, which finds out more of families that import JAX; or a file that
      is not trusted gives the name.
  """
  names.check_trust(name, 'environment.name')
  family_name, slash, env_name = name.partition('/')
  is_family = family_name in FAMILIES | HOST_FAMILIES
  if slash and not (is_family and importlib.util.find_spec(family_name)):
    _family(name)
  elif family_name == 'gymnasium' and not names.needs_trust(name):
    from hephaestus.actors.environments import gymnasium_registry

    gymnasium_registry.check(env_name)
  elif not (slash or name.startswith(INSTANCE) or name in ENVIRONMENTS):
    names.resolve(name, ENVIRONMENTS, field='environment.name', kind='environment', listing=LISTING)


def family(name: str) -> types.ModuleType:
  """Imports and returns the module of a family of environments.

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
        else f'`{packages.install("envs", error.name)}` installs it'
      )
    ) from error


def package(name: str) -> str | None:
  """Name and version of the package that an environment of this name is from; None if it is of no family."""
  family, separator, _ = name.partition('/')
  if not separator or family not in FAMILIES | HOST_FAMILIES:
    return None
  return f'{family} {metadata.version(family.replace("_", "-"))}'


def _family(name: str) -> types.ModuleType:
  """The module of the family in FAMILY/NAME."""
  try:
    return family(name.partition('/')[0])
  except ValueError as error:
    raise ValueError(f'environment.name={name!r}: {error}') from error


def options(name: str) -> dict[str, Any]:
  """Options of an environment that have a default, with their defaults; for names see `make`.

  Empty for an instance that was registered, and for a family of `HOST_FAMILIES`, whose options are not
  known.

  Raises:
    ValueError: there is no such environment, or its family's package is not installed.
    ModuleNotFoundError: see `make`.
  """
  family_name, slash, env_name = name.partition('/')
  if not slash:
    is_registered = name.startswith(INSTANCE)
    constructor = _instances.get(name) if is_registered else _constructor(name)
    if not callable(constructor):  # an instance, whose options are chosen
      return {}
    parameters = inspect.signature(constructor).parameters.values()
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
  """The class or function that makes an environment, not called; a class is one of an `Environment`."""
  found = names.resolve(
    name, ENVIRONMENTS, field='environment.name', kind='environment', listing=LISTING
  )
  if inspect.isclass(found):
    _check_kind(name, found)
  return found


def check_options(name: str, constructor: Callable[..., Any], options: Mapping[str, Any]) -> None:
  """Checks that a constructor can be called with some options; `name` is for error messages.

  Raises:
    ValueError: the class is abstract, an option is unknown or has another type than its default, or
      a parameter without a default has no value.
  """
  lacking = sorted(getattr(constructor, '__abstractmethods__', ()))
  if lacking:
    raise ValueError(
      f'environment.name={name!r}: the class lacks {", ".join(lacking)}: attributes of the class or '
      'properties, since those that __init__ sets come too late; see docs/environments.md'
    )
  try:
    parameters = inspect.signature(constructor).parameters
  except ValueError:  # of a class or function that is not written in Python
    return
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
