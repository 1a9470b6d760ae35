"""Resolves names of environments and agents: built-in names, and import paths of users' classes."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

INSTANCE = 'instance:'  # begins the names of environments that were given as instances

_trusted: set[str] = set()
_read: dict[str, str] = {}  # import path -> the file that it was read from


class UntrustedError(ValueError):
  """A name of a file would import a module, and nobody has said that the file is to be trusted."""


def trust(name: str) -> None:
  """Lets `resolve` import a name from now on, also if files give it: the user gave it, or trusts a file."""
  _trusted.add(name)


def read(name: str, file: str) -> None:
  """Notes that a file gives this name; if that imports a module, it takes `trust` to do so."""
  if needs_trust(name):
    _read.setdefault(name, file)


def needs_trust(name: str) -> bool:
  """Whether a name, or an option of the environment with that name, gives a module to import."""
  is_instance = name.startswith(INSTANCE)
  return (':' in name and not is_instance) or name.startswith('gymnasium/GymV')


def check_trust(name: str, field: str) -> None:
  """Raises UntrustedError if the name was read from a file and is not trusted, see `resolve`.

  A name that may import a module puts the working directory behind all other folders of modules. Without such
  a name it is none of them: it may be a stranger's, with a module that some package imports if there is one.
  """
  if name in _read and name not in _trusted:
    module = name.rpartition('/')[2].partition(':')[0]
    raise UntrustedError(
      f'{_read[name]}: {field}={name!r} would import and run the module {module}; if you trust the author '
      'of this file, add --trust (in Python: trust=True)'
    )
  if needs_trust(name) and os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())


def resolve(
  name: str, known: Mapping[str, str], *, field: str, kind: str, listing: str = ''
) -> Callable[..., Any]:
  """Imports the class or function that a name stands for, and does not call it.

  A name is a key of `known`, whose values are import paths, or itself one, 'package.module:Class'. The
  other arguments are for error messages: the field that holds the name, what it is, such as 'agent', and a
  sentence on where all known names are listed.

  Raises:
    ValueError: there is no such name, module or class, or it is of Python's standard library, which
      a config file must not run. The message names the nearest known names.
    UntrustedError: the name is an import path of a file that the user does not trust, see `trust`.
    ModuleNotFoundError: the user's module exists, but imports a module that does not.
  """
  given = f'{field}={name!r}'
  module_name, colon, attribute = known.get(name, name).partition(':')
  if not is_import_path(f'{module_name}{colon}{attribute}'):
    raise ValueError(
      f'{given}: no such {kind}; {choices(name, known)}; {listing and f"{listing}; "}one of '
      "your own is named by its import path, 'package.module:Class'"
    )
  if _is_pythons_own(module_name):
    raise ValueError(f"{given}: {module_name} is Python's own and has no {kind}")
  check_trust(name, field)
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    # A missing import within the user's module is reported as it is.
    if error.name is None or not f'{module_name}.'.startswith(f'{error.name}.'):
      raise
    raise ValueError(
      f'{given}: there is no module {error.name!r}; is the folder that holds it on PYTHONPATH?'
    ) from error
  found = getattr(module, attribute, None)
  if not callable(found):
    classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
    raise ValueError(
      f'{given}: {module_name} has no class {attribute!r}; {choices(attribute, classes)}'
    )
  if _is_pythons_own(getattr(found, '__module__', None) or ''):
    raise ValueError(f"{given}: {attribute} is Python's own and no {kind}")
  return found


def is_import_path(name: str) -> bool:
  """Whether a name has the form 'package.module:Class'."""
  module_name, colon, attribute = name.partition(':')
  return bool(colon) and all(part.isidentifier() for part in (*module_name.split('.'), attribute))


def choices(given: str, known: Iterable[str]) -> str:
  """Text for an error message: the known names nearest to a given one, then all of them."""
  known = sorted(known)
  return f'{nearest(given, known)}known are: {", ".join(known) or "none"}'


def nearest(given: str, known: Iterable[str]) -> str:
  """'did you mean A or B? ' with known names that are similar, else that the given one contains; '' without any."""
  by_lower = {name.lower(): name for name in known}
  found = difflib.get_close_matches(given.lower(), by_lower) or [
    name for name in by_lower if len(name) > 2 and name in given.lower()
  ]
  names = ' or '.join(by_lower[name] for name in found)
  return f'did you mean {names}? ' if names else ''


def _is_pythons_own(module_name: str) -> bool:
  return module_name.partition('.')[0] in sys.stdlib_module_names
