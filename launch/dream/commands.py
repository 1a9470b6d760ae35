"""`hephaestus dream`: steer the dream of a world model in the browser."""

import argparse
from typing import Any

from hephaestus.launch.report import commands as report_commands
from hephaestus.launch.run import flags
from hephaestus.launch.run import request as request_lib


def add(commands: Any) -> None:
  """Adds the command to the parser."""
  dream = commands.add_parser(
    'dream',
    allow_abbrev=False,
    help="steer an agent's world model in the browser",
    description='Serves a web page on the loopback interface, on which you act, or the policy does: on its '
    'left in the environment, on its right in the dream of the world model. Ctrl-C ends it. Needs a run of '
    'the dreamer, and the extra `dashboard`.',
  )
  report_commands.add_agent(dream)
  dream.add_argument('--seed', type=int, default=0)
  dream.add_argument('--port', type=int, default=0, help='port of 127.0.0.1 (default: a free one)')
  request_lib.add(dream, 'trust')
  dream.set_defaults(call=_dream)


def _dream(arguments: argparse.Namespace) -> int:
  flags.leave_accelerators()
  flags.check_seed(arguments.seed)
  from hephaestus.launch.interface import places
  from hephaestus.launch.report import server

  places.check(arguments.run)  # before imports that take seconds
  server.check_packages('dashboard', *server.PACKAGES)
  from hephaestus.launch.dream import pages

  pages.serve(arguments.run, arguments.checkpoint, seed=arguments.seed, port=arguments.port)
  return 0
