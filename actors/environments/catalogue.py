"""The environments of this project and of other packages: their names, specs and options."""

import importlib.util
from typing import Any

import jax
from dm_env import specs

from hephaestus.actors import environments
from hephaestus.actors.environments import environment as environment_lib


def look_up(name: str | None = None) -> dict[str, Any]:
  """Describes one environment, or all of a family (another package's), by its name; for None, everything.

  Returns:
    `{'worlds': {NAME: DESCRIPTION}}`, where a description is a result of `describe`, or `{'refused':
    REASON}` for an environment that is not supported. Without a name, environments of families are only
    listed, since making them takes long: `{'families': {NAME: {'installed', 'worlds'}}}`, where
    `'worlds'` has their names, and is None if the family is not installed.

  Raises:
    ValueError: the name is unknown, or its package is not installed.
  """
  if name is None:
    return {
      'worlds': {each: describe(each) for each in sorted(environments.ENVIRONMENTS)},
      'families': {family: _family(family) for family in sorted(environments.FAMILIES)},
    }
  if name not in environments.FAMILIES:
    return {'worlds': {name: describe(name)}}
  found: dict[str, Any] = {}
  for each in sorted(environments.family(name).names()):
    try:
      found[f'{name}/{each}'] = describe(f'{name}/{each}')
    except ValueError as error:
      found[f'{name}/{each}'] = {'refused': str(error)}
  return {'worlds': found}


def _family(name: str) -> dict[str, Any]:
  is_installed = importlib.util.find_spec(name) is not None
  names = sorted(environments.family(name).names()) if is_installed else None
  return {'installed': is_installed, 'worlds': names}


def describe(name: str) -> dict[str, Any]:
  """Describes the specs and the options of an environment.

  Returns:
    {'observation': {PATH: dtype and shape}, 'actions': text, 'mask': whether observations have an
    action mask, 'max_steps': steps of an episode at most, 'options': {OPTION: default}}

  Raises:
    ValueError: the environment cannot be made, see `environments.make`.
  """
  environment = environments.make(name)
  fields = {
    jax.tree_util.keystr(path): f'{spec.dtype}{list(spec.shape)}'
    for path, spec in jax.tree_util.tree_leaves_with_path(environment.observation_spec)
  }
  mask = fields.pop("['action_mask']", None)
  return {
    'observation': fields,
    'actions': _describe_actions(environment.action_spec),
    'mask': mask is not None,
    'max_steps': environment.max_steps,
    'options': environments.options(name),
  }


def _describe_actions(spec: specs.BoundedArray) -> str:
  if choices := environment_lib.num_choices(spec):
    return f'{" x ".join(map(str, choices))} choices'
  low, high = spec.minimum.min(), spec.maximum.max()
  return f'{spec.dtype}{list(spec.shape)} in [{low:g}, {high:g}]'
