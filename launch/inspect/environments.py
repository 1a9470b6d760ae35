"""Prints environments as tables, for `hephaestus environments`."""

import sys
from typing import Any

import rich.table

from hephaestus.actors import environments
from hephaestus.actors.environments import packages
from hephaestus.launch.inspect import console

HEADINGS = ('environment', 'observation', 'actions', 'mask', 'longest episode')


def show(report: dict[str, Any]) -> None:
  """Prints a report of `catalogue.look_up` as tables."""
  view = rich.table.Table(*HEADINGS[:-1])
  view.add_column(HEADINGS[-1], justify='right')
  for name, each in report['worlds'].items():
    if 'refused' not in each:
      observation = '\n'.join(f'{key} {spec}'.strip() for key, spec in each['observation'].items())
      mask = 'yes' if each['mask'] else 'no'
      view.add_row(name, observation, each['actions'], mask, f'{each["max_steps"]:,}')
  console.make().print(view)
  for name, each in report['worlds'].items():
    if 'refused' in each:
      print(f'not supported: {each["refused"]}')
    elif len(report['worlds']) == 1:
      print('options, set by `--set environment.NAME=VALUE`:')
      for option, default in each['options'].items():
        print(f'  {option:<24} {default}')
      print(f'hephaestus train --env {name}')
  if 'families' in report:
    view = rich.table.Table('family', 'installed', 'environments')
    for name, family in report['families'].items():
      names = ', '.join(family['worlds'] or [])
      view.add_row(name, 'yes' if family['installed'] else 'no', names)
    console.make().print(view)
    missing = [name for name, family in report['families'].items() if not family['installed']]
    if any(sys.version_info >= environments.NEEDS_PYTHON.get(name, (3,)) for name in missing):
      print(f'to install the families: {packages.install("envs")}')
    print(
      'An environment of a family is FAMILY/NAME, such as gymnax/CartPole-v1. For details:\n'
      '  hephaestus environments FAMILY\n'
      '  hephaestus environments FAMILY/NAME'
    )
