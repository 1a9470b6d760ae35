"""What environments there are: ours and those of other packages, and what one of them is like."""

import importlib.util
from typing import Any

import jax
import rich
import rich.table
from dm_env import specs

from hephaestus.actors import environments
from hephaestus.actors.environments import environment as environment_lib

HEADINGS = ('world', 'observation', 'actions', 'mask', 'longest episode')


def look_up(name: str | None = None) -> dict[str, Any]:
  """What there is under a name.

  Args:
    name: an environment, as `environments.make` takes it, or a family; None for everything, where environments
      of families are only named, since making them takes long.

  Returns:
    'environments', by name: what `describe` says; or 'refused', why it cannot be played. Without a name
    also 'families', by name: 'installed', and 'environments', the names, or None where not installed.

  Raises:
    ValueError: there is nothing of that name, or its package is not installed.
  """
  if name is None:
    return {
      'worlds': {world: describe(world) for world in sorted(environments.ENVIRONMENTS)},
      'families': {family: _family(family) for family in sorted(environments.FAMILIES)},
    }
  if name not in environments.FAMILIES:
    return {'worlds': {name: describe(name)}}
  worlds: dict[str, Any] = {}
  for world in sorted(environments.family(name).names()):
    try:
      worlds[f'{name}/{world}'] = describe(f'{name}/{world}')
    except ValueError as error:
      worlds[f'{name}/{world}'] = {'refused': str(error)}
  return {'worlds': worlds}


def _family(name: str) -> dict[str, Any]:
  is_installed = importlib.util.find_spec(name) is not None
  names = sorted(environments.family(name).names()) if is_installed else None
  return {'installed': is_installed, 'worlds': names}


def describe(name: str) -> dict[str, Any]:
  """An environment's 'observation', 'actions', 'mask', 'max_steps' and 'options' with their defaults.

  Raises:
    ValueError: as of `environments.make`.
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
  """Prints `look_up`'s report for people."""
  view = rich.table.Table()
  for heading in HEADINGS:
    view.add_column(heading, justify='right' if heading == HEADINGS[-1] else 'left')
  for name, world in report['worlds'].items():
    if 'refused' not in world:
      observation = '\n'.join(f'{key} {what}'.strip() for key, what in world['observation'].items())
      mask = 'yes' if world['mask'] else 'no'
      view.add_row(name, observation, world['actions'], mask, f'{world["max_steps"]:,}')
  rich.print(view)
  for name, world in report['worlds'].items():
    if 'refused' in world:
      print(f'cannot be played: {world["refused"]}')
    elif len(report['worlds']) == 1:
      print('options, set by `--set environment.NAME=VALUE`:')
      for option, default in world['options'].items():
        print(f'  {option:<24} {default}')
      print(f'hephaestus train --env {name}')
  if 'families' in report:
    _show_families(report['families'])


def _show_families(families: dict[str, Any]) -> None:
  view = rich.table.Table()
  for heading in ('family', 'installed', 'worlds'):
    view.add_column(heading)
  for name, family in families.items():
    worlds = ', '.join(family['worlds'] or ['(uv sync --extra envs)'])
    view.add_row(name, 'yes' if family['installed'] else 'no', worlds)
  rich.print(view)
  print(
    'An environment is FAMILY/NAME, such as gymnax/CartPole-v1. `hephaestus environments FAMILY` and'
  )
  print('`hephaestus environments FAMILY/NAME` tell more.')
