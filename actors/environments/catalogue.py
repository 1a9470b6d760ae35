"""Lists the environments of this project and of other packages, and describes each."""

import importlib.util
from typing import Any

import jax
import rich
import rich.table
from dm_env import specs

from hephaestus.actors import environments
from hephaestus.actors.environments import environment as environment_lib

HEADINGS = ('environment', 'observation', 'actions', 'mask', 'longest episode')


def look_up(name: str | None = None) -> dict[str, Any]:
  """Describes one environment, a family (another package's environments), or all of them.

  Args:
    name: name of an environment, see `environments.make`, or of a family such as 'gymnax'. None for
      everything; then the environments of families are only listed, since making them takes long.

  Returns:
    `{'worlds': {NAME: DESCRIPTION}}`, where a description is a result of `describe`, or `{'refused':
    REASON}` for an environment that is not supported. Without a name also `{'families': {NAME:
    {'installed', 'worlds'}}}`; there `'worlds'` lists the names of the family's environments, and is
    None if the family is not installed.

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

  Args:
    name: name of the environment, see `environments.make`.

  Returns:
    {'observation': {PATH: dtype and shape}, 'actions': text, 'mask': whether observations have an
    action mask, 'max_steps': steps of an episode at most, 'options': {OPTION: default}}

  Raises:
    ValueError: the environment cannot be made, see `environments.make`.
  """
  environment = environments.make(name)
  fields = {
    jax.tree_util.keystr(path): _describe_spec(spec)
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


def _describe_spec(spec: specs.Array) -> str:
  return f'{spec.dtype}{list(spec.shape)}'


def _describe_actions(spec: specs.BoundedArray) -> str:
  if choices := environment_lib.num_choices(spec):
    return f'{" x ".join(map(str, choices))} choices'
  low, high = spec.minimum.min(), spec.maximum.max()
  return f'{_describe_spec(spec)} in [{low:g}, {high:g}]'


def show(report: dict[str, Any]) -> None:
  """Prints the report of `look_up` as tables."""
  view = rich.table.Table()
  for heading in HEADINGS:
    view.add_column(heading, justify='right' if heading == HEADINGS[-1] else 'left')
  for name, each in report['worlds'].items():
    if 'refused' not in each:
      observation = '\n'.join(f'{key} {spec}'.strip() for key, spec in each['observation'].items())
      mask = 'yes' if each['mask'] else 'no'
      view.add_row(name, observation, each['actions'], mask, f'{each["max_steps"]:,}')
  rich.print(view)
  for name, each in report['worlds'].items():
    if 'refused' in each:
      print(f'not supported: {each["refused"]}')
    elif len(report['worlds']) == 1:
      print('options, set by `--set environment.NAME=VALUE`:')
      for option, default in each['options'].items():
        print(f'  {option:<24} {default}')
      print(f'hephaestus train --env {name}')
  if 'families' in report:
    _show_families(report['families'])


def _show_families(families: dict[str, Any]) -> None:
  view = rich.table.Table()
  for heading in ('family', 'installed', 'environments'):
    view.add_column(heading)
  for name, family in families.items():
    names = ', '.join(family['worlds'] or ['(uv sync --inexact --extra envs)'])
    view.add_row(name, 'yes' if family['installed'] else 'no', names)
  rich.print(view)
  print(
    'An environment of a family is FAMILY/NAME, such as gymnax/CartPole-v1. For details:\n'
    '  hephaestus environments FAMILY\n'
    '  hephaestus environments FAMILY/NAME'
  )
