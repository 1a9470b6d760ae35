"""The `hephaestus` command line."""

import argparse
import logging
import os
import re
import signal
import sys
import warnings
from typing import Any, NoReturn

from absl import app
from absl.flags import argparse_flags

import hephaestus
from hephaestus.actors.environments import names
from hephaestus.launch import records, user_errors
from hephaestus.launch.bench import commands as bench_commands
from hephaestus.launch.cluster import commands as cluster_commands
from hephaestus.launch.doctor import commands as doctor_commands
from hephaestus.launch.dream import commands as dream_commands
from hephaestus.launch.inspect import commands as inspect_commands
from hephaestus.launch.interface import commands as interface_commands
from hephaestus.launch.processes import fork_server
from hephaestus.launch.report import commands as report_commands
from hephaestus.launch.run import commands as run_commands
from hephaestus.launch.run import flags

COMMANDS = (
  run_commands, cluster_commands, report_commands, dream_commands, interface_commands,
  inspect_commands, doctor_commands, bench_commands,
)  # fmt: skip


def parse(arguments: list[str]) -> argparse.Namespace:
  """Parses an argument vector, like `sys.argv` with the program's name first.

  Returns:
    The arguments of the chosen command, with the function `call` that runs it.

  Raises:
    SystemExit: the vector is malformed, or asks for help or the version.
  """
  parser = _Parser(
    prog='hephaestus',
    description='World-model agents, trained by several processes on one machine or many.',
    allow_abbrev=False,  # absl's own flags would make --run ambiguous
  )
  version = f'hephaestus {hephaestus.__version__}'
  parser.add_argument('--version', action='version', version=version)
  commands = parser.add_subparsers(dest='command', required=True)
  for module in COMMANDS:
    module.add(commands)
  parsed, unknown = parser.parse_known_args(arguments[1:])
  if unknown:
    command = commands.choices[parsed.command]
    known = command._option_string_actions
    first = unknown[0].partition('=')[0]
    hint = names.nearest(first, known) if first.startswith('-') else ''
    if not first.startswith('-') and '--env' in known:
      hint = f'did you mean --env {first}? '
    command.error(f'unrecognized arguments: {" ".join(unknown)}{hint and "; "}{hint.strip()}')
  return parsed


class _Parser(argparse_flags.ArgumentParser):
  """A parser whose errors are one line, and whose help does not show --helpfull, the flags of absl."""

  def __init__(self, **options: Any):
    super().__init__(**options)
    for action in self._actions:
      if '--helpfull' in action.option_strings:
        action.help = argparse.SUPPRESS

  def error(self, message: str) -> NoReturn:
    if wrong := re.match(
      r"argument command: invalid choice: '(.*?)' \(choose from (.*)\)", message
    ):
      known = re.findall(r'[\w-]+', wrong[2])
      message = f'there is no command {wrong[1]!r}; {names.choices(wrong[1], known)}'
    self.exit(2, f'{self.prog}: {message}; see {self.prog} --help\n')


def run(arguments: argparse.Namespace) -> int:
  """Runs a parsed command.

  Args:
    arguments: arguments from `parse`.

  Returns:
    The exit code: the command's own; 2 for bad input, after one line on stderr; 130 after Ctrl-C;
    141 if the reader of stdout has gone.

  Raises:
    Exception: an error in this package, neither in the input, nor in a file, nor in the user's own code.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  logging.getLogger('jax').setLevel(logging.WARNING)  # it logs missing accelerators
  # The launcher only starts programs; it never calls JAX in a forked copy of itself.
  warnings.filterwarnings('ignore', message='os.fork', category=RuntimeWarning)
  try:
    with records.trusting(getattr(arguments, 'trust', False)):
      exit_code = arguments.call(arguments)
    sys.stdout.flush()
    return exit_code
  except BrokenPipeError:  # the reader of stdout has gone
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # 128 + SIGPIPE
  except KeyboardInterrupt:
    print('stopped', file=sys.stderr)
    return 130  # 128 + SIGINT, as after a run
  except Exception as error:
    line = user_errors.line(error)
    if isinstance(error, OSError) and error.filename is not None:  # a file that a user has named
      line = line or f'{error.filename}: {error.strerror}'
    elif isinstance(error, (ValueError, ConnectionError)):
      line = line or user_errors.message(error)
    if line is None:
      raise  # an error of ours
    print(f'hephaestus {arguments.command}: {user_errors.printable(line)}', file=sys.stderr)
    return 2


def _run_aloud(arguments: argparse.Namespace) -> int:
  """Runs a parsed command after a line on stderr, since its imports take seconds, on a slow disk many."""
  prints_data = arguments.command == 'config' or getattr(arguments, 'json', False)
  if not prints_data or sys.stdout.isatty():
    flags.say_import(f'hephaestus {arguments.command}')
  return run(arguments)


def main() -> None:
  """Runs the command of `sys.argv` and exits with its exit code, see `run`."""
  parent = os.environ.pop(fork_server.PARENT, None)
  if parent is None:
    fork_server.accept_interrupts()
  else:
    fork_server.bind_to(int(parent))
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
      # The default action would leave the environments open that a command has made.
      signal.signal(number, lambda number, frame: sys.exit(128 + number))
  app.run(_run_aloud, flags_parser=parse)


if __name__ == '__main__':
  main()
