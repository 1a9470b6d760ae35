"""`hephaestus inspect` and `environments`: reports on the replay of a run and on environments."""

import argparse
import contextlib
import json
import pathlib
import sys
import warnings
from typing import Any

from hephaestus.launch.run import flags


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
  add('--sample', type=int, metavar='N',
      help='show N sequences of each stratum, from that checkpoint')  # fmt: skip
  add('--gif', type=pathlib.Path, metavar='DIR',
      help='write a GIF of the observations of each sample')  # fmt: skip
  flags.add_trust_flag(inspect)
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
  reads_checkpoint = arguments.sample is not None or arguments.check
  if period is not None and not period > 0:
    raise ValueError(f'--watch {period:g}: must be positive seconds')
  if arguments.sample is not None and arguments.sample < 1:
    raise ValueError(f'--sample {arguments.sample}: must be at least 1')
  if period is not None and reads_checkpoint:
    raise ValueError(
      '--watch: reports on a live run; leave out --check and --sample, or call twice'
    )
  if arguments.gif is not None and arguments.sample is None:
    raise ValueError(f'--gif {arguments.gif}: shows samples; add --sample N')
  from hephaestus.launch.inspect import live

  # Refuses before imports that take seconds.
  run = live.find(target)
  if run is not None and run.config.fused and (period is not None or reads_checkpoint):
    raise ValueError(
      f'{target}: a fused run keeps its replay in its checkpoints; leave out all options but --json'
    )
  if reads_checkpoint:
    return _inspect_stored(arguments)
  from hephaestus.launch.files import metrics
  from hephaestus.launch.inspect import terminal

  if period is not None:
    terminal.watch(target, period, as_json=arguments.json)
  else:
    report = live.inspect(target)
    print(metrics.to_json(report.to_json())) if arguments.json else terminal.show(report)
  return 0


def _inspect_stored(arguments: argparse.Namespace) -> int:
  """Reports on the newest checkpoint; returns 1 if `--check` finds a fault."""
  from hephaestus.launch.files import metrics
  from hephaestus.launch.inspect import live, stored, terminal

  found = stored.read(arguments.target, arguments.sample or 0)
  videos = [] if arguments.gif is None else stored.write_videos(found, arguments.gif)
  exit_code = int(arguments.check and bool(found.violations))
  report = None
  if arguments.json or arguments.sample is not None:
    with contextlib.suppress(ConnectionError):  # the checkpoint can be read without a server
      report = live.inspect(arguments.target)
  if arguments.json:
    print(metrics.to_json(({} if report is None else report.to_json()) | found.to_json()))
    return exit_code
  if arguments.sample is not None:
    if report is not None:
      terminal.show(report)
    stored.show(arguments.target, found)
    if not found.samples and not arguments.check:
      for violation in found.violations:  # why none could be read
        print(violation, file=sys.stderr)
  if arguments.gif is not None:
    print(f'\n{arguments.gif}: {len(videos)} videos')
  if arguments.check:
    checked = f'{found.sequences:,} sequences of its newest checkpoint'
    print('\n'.join(found.violations) or f'{arguments.target}: nothing is wrong with {checked}')
  return exit_code


def _environments(arguments: argparse.Namespace) -> int:
  flags.leave_accelerators()
  warnings.simplefilter('ignore')  # of the packages of environments
  from hephaestus.actors.environments import catalogue
  from hephaestus.launch.inspect import environments

  report = catalogue.look_up(arguments.name)
  print(json.dumps(report)) if arguments.json else environments.show(report)
  return 0
