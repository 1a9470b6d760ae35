"""Prints environments as tables, for `hephaestus environments`."""

from typing import Any

import rich.table

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
      names = ', '.join(family['worlds'] or ['(uv sync --inexact --extra envs)'])
      view.add_row(name, 'yes' if family['installed'] else 'no', names)
    console.make().print(view)
    print(
      'An environment of a family is FAMILY/NAME, such as gymnax/CartPole-v1. For details:\n'
      '  hephaestus environments FAMILY\n'
      '  hephaestus environments FAMILY/NAME'
    )
