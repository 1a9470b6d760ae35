"""The `hephaestus` command."""

import argparse
import os
import sys
import warnings

from absl import app
from absl.flags import argparse_flags

from hephaestus.launch.bench import commands as bench_commands
from hephaestus.launch.cluster import commands as cluster_commands
from hephaestus.launch.inspect import commands as inspect_commands
from hephaestus.launch.report import commands as report_commands
from hephaestus.launch.run import commands as run_commands
from hephaestus.launch.run import fork_server

COMMANDS = (run_commands, cluster_commands, report_commands, inspect_commands, bench_commands)


def parse(arguments: list[str]) -> argparse.Namespace:
  """The command of an argument vector, whose first word is ignored; exits where it is malformed."""
  parser = argparse_flags.ArgumentParser(
    prog='hephaestus',
    description='World-model agents, trained by several processes on one machine or many.',
    allow_abbrev=False,  # absl's own flags would make --run ambiguous
  )
  commands = parser.add_subparsers(dest='command', required=True)
  for module in COMMANDS:
    module.add(commands)
  return parser.parse_args(arguments[1:])


def run(arguments: argparse.Namespace) -> int:
  """Runs a command, and returns its exit code; bad input is one line and 2."""
  sys.path.append(os.getcwd())  # finds the user's own environments, after every installed package
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  # The launcher only starts programs; it never calls JAX in a forked copy of itself.
  warnings.filterwarnings('ignore', message='os.fork', category=RuntimeWarning)
  try:
    exit_code = arguments.call(arguments)
    sys.stdout.flush()
    return exit_code
  except BrokenPipeError:  # the reader of stdout has gone
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # 128 + SIGPIPE
  except (ValueError, ConnectionError) as error:
    print(f'hephaestus {arguments.command}: {error}', file=sys.stderr)
    return 2


def main() -> None:
  """Runs the command; bad input ends with one line and exit code 2."""
  fork_server.accept_interrupts()
  app.run(run, flags_parser=parse)


if __name__ == '__main__':
  main()
