"""Checks names against gymnasium's registry; imports no JAX, so that wrong names are refused soon."""

import difflib
import importlib

import gymnasium
from gymnasium import error as gymnasium_error
from gymnasium.envs import registration

from hephaestus.actors.environments import packages


def check(id: str) -> None:
  """Raises ValueError if gymnasium is older than 1.0 or has no such environment; imports its module."""
  name = f'environment.name={f"gymnasium/{id}"!r}'
  if int(gymnasium.__version__.partition('.')[0]) < 1:  # in 0.29 `max_episode_steps=-1` is a limit
    raise ValueError(
      f'{name}: needs gymnasium 1 or newer, {gymnasium.__version__} is installed; '
      f'`{packages.install("envs", "gymnasium>=1")}` updates it'
    )
  module, _, known = id.rpartition(':')
  try:
    if module:
      importlib.import_module(module)
    namespace, stem, version = registration.parse_env_id(known)
    if version is None:  # as `gymnasium.make` does
      version = registration.find_highest_version(namespace, stem)
    gymnasium.spec(registration.get_env_id(namespace, stem, version))
  except gymnasium_error.UnregisteredEnv as error:
    raise ValueError(f'{name}: no such environment; {_nearest(id)}') from error
  except (gymnasium_error.Error, ImportError) as error:
    raise ValueError(f'{name}: {str(error).splitlines()[0]}') from error


def _nearest(id: str) -> str:
  nearest = difflib.get_close_matches(id, gymnasium.registry)
  if nearest:
    return f'did you mean {" or ".join(nearest)}?'
  return (
    f'gymnasium has {len(gymnasium.registry)}, and those that a package of your own registers, as '
    "'gymnasium/package:Name-v0'"
  )
