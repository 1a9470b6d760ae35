"""`hephaestus inspect` and `environments`: reports on the replay of a run and on environments."""

import argparse
import dataclasses
import json
import warnings
from typing import Any

from hephaestus.launch.run import flags
from hephaestus.launch.run import request as request_lib


def add(commands: Any) -> None:
  """Adds the commands `inspect` and `environments` to the parser."""
  inspect = commands.add_parser(
    'inspect', allow_abbrev=False, help='show the replay tables of a run and its bottleneck'
  )
  add = inspect.add_argument
  add('target', metavar='RUN|HOST:PORT')
  add('--json', action='store_true')
  add('--watch', type=float, nargs='?', const=5.0, metavar='SECONDS',
      help='repeat the report until Ctrl-C (default: every 5 seconds)')  # fmt: skip
  add('--check', action='store_true',
      help='check the newest checkpoint of replay; exit code 1 if it has faults')  # fmt: skip
  request_lib.add(inspect, 'trust')
  inspect.set_defaults(call=_inspect)

  environments = commands.add_parser(
    'environments', allow_abbrev=False, help='list all environments, or describe one'
  )
  environments.add_argument(
    'name', nargs='?', metavar='FAMILY|ENVIRONMENT', help='such as gymnax or gymnax/CartPole-v1'
  )
  environments.add_argument('--json', action='store_true')
  environments.set_defaults(call=_environments)


def _inspect(arguments: argparse.Namespace) -> int:
  flags.leave_accelerators()
  target, period = arguments.target, arguments.watch
  if period is not None and not period > 0:
    raise ValueError(f'--watch {period:g}: must be positive seconds')
  if period is not None and arguments.check:
    raise ValueError('--watch: reports on a live run; leave out --check, or call twice')
  from hephaestus.launch.inspect import live

  # Refuses before imports that take seconds.
  run = live.find(target)
  if run is not None and run.config.fused and (period is not None or arguments.check):
    raise ValueError(
      f'{target}: a fused run keeps its replay in its checkpoints; leave out all options but --json'
    )
  if arguments.check:
    return _check(target, arguments.json)
  from hephaestus.launch.files import metrics
  from hephaestus.launch.inspect import terminal

  if period is not None:
    terminal.watch(target, period, as_json=arguments.json)
  else:
    report = live.inspect(target)
    print(metrics.to_json(report.to_json())) if arguments.json else terminal.show(report)
  return 0


def _check(target: str, as_json: bool) -> int:
  """Reports on the newest checkpoint; returns 1 if it has a fault."""
  from hephaestus.launch.files import metrics
  from hephaestus.launch.inspect import stored

  found = stored.read(target)
  checked = f'{found.sequences:,} sequences of its newest checkpoint'
  print(
    metrics.to_json(dataclasses.asdict(found))
    if as_json
    else '\n'.join(found.violations) or f'{target}: nothing is wrong with {checked}'
  )
  return int(bool(found.violations))


def _environments(arguments: argparse.Namespace) -> int:
  flags.leave_accelerators()
  warnings.simplefilter('ignore')  # of the packages of environments
  from hephaestus.actors.environments import catalogue
  from hephaestus.launch.inspect import environments

  report = catalogue.look_up(arguments.name)
  print(json.dumps(report)) if arguments.json else environments.show(report)
  return 0
