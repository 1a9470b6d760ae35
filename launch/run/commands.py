"""`hephaestus train`, a run on this machine, and `hephaestus config`, which prints its config."""

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

from hephaestus.launch.run import request as request_lib
from hephaestus.launch.run import validation
from hephaestus.learner import process


def add(commands: Any) -> None:
  """Adds the commands `train` and `config`."""
  parser = commands.add_parser(
    'train',
    allow_abbrev=False,
    add_help=False,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    help='train an agent, or resume the run of a folder',
  )
  parser.add_argument('-h', '--help', action=_Help, help='show this help message and exit')
  request_lib.add(parser)
  several = parser.add_argument_group(
    'several runs, each in a folder of its own below --run; the same command resumes them'
  )
  several.add_argument(
    '--seeds', nargs='+', type=int, metavar='N', help='a run for each seed, shown as one curve'
  )
  several.add_argument(
    '--jobs', type=int, metavar='N', help='runs at a time (default: by cores and accelerators)'
  )
  parser.set_defaults(call=_train)
  config = commands.add_parser(
    'config',
    allow_abbrev=False,
    help='print the config that `train` would have with the same flags, with a comment on each key',
    description='Prints a file for `train --config`: all keys with their comments.',
  )
  request_lib.add(config, *request_lib.CONFIG)
  config.set_defaults(call=lambda arguments: _config(request_lib.of(arguments)))


class _Help(argparse.Action):
  """Prints the help with the basic config keys, whose module imports JAX."""

  def __init__(self, option_strings: list[str], dest: str, help: str | None = None):
    super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

  def __call__(self, parser: argparse.ArgumentParser, *unused: Any) -> None:
    from hephaestus.launch import config as launch_config
    from hephaestus.launch.agents import dreamer, presets

    meanings = launch_config.meanings(presets.laptop('catch'))
    width = max(map(len, dreamer.BASIC))
    parser.epilog = '\n'.join([
      'basic keys for --set, as in --set agent.gamma=0.995 actor.num_envs=32:',
      *(f'  {key:<{width}}  {meanings[key]}' for key in dreamer.BASIC),
      'These are keys of the dreamer; ppo has others, such as learner.learning_rate and agent.clip.',
      'All keys, their values and comments: `hephaestus config`, with the same flags.',
    ])  # fmt: skip
    parser.print_help()
    parser.exit()


def _train(arguments: argparse.Namespace) -> int:
  request = request_lib.of(arguments)
  if arguments.seeds is not None:
    from hephaestus.launch import seeds  # whose imports take seconds

    return seeds.train(request, arguments.seeds, arguments.jobs)
  if arguments.jobs is not None:
    raise ValueError(f'--jobs {arguments.jobs}: is of several runs; add --seeds')
  # Imports and tracing make millions of objects that stay: with Python's threshold of 700, collections
  # take up to a third of their time.
  gc.set_threshold(100_000, 20, 20)
  if request.fused:
    process.prepare()  # before the environment's module, which may make arrays; forks would inherit it
  return begin(request, request_lib.make_config(request))


def _config(request: request_lib.TrainRequest) -> int:
  from hephaestus.actors import environments
  from hephaestus.launch import config as launch_config

  with contextlib.redirect_stdout(sys.stderr):  # stdout is a file for --config
    config = request_lib.make_config(request)
    options = dict(config.environment)
    environments.check(options.pop('name'), options)
  print(launch_config.to_commented_yaml(config), end='')
  return 0


def begin(request: request_lib.TrainRequest, config: Any) -> int:
  """Makes or opens the folder of a run, and trains until it ends; returns the exit code.

  Args:
    request: what the user asks for, from which `request.make_config` has made the config.
    config: config of the run.

  Raises:
    ValueError: this machine or the folder cannot run it; names a flag or key.
  """
  from hephaestus.launch.files import folder as folder_lib

  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(folder_lib.claimed(config, request.run))  # before long imports
    lines = [f'run folder: {folder}', *validation.validate_here(request, config)]
    from hephaestus.launch.run import fused, parts, preflight
    from hephaestus.launch.run import origin as origin_lib

    forks = None if config.fused else stack.enter_context(fork_server())
    lines += preflight.check_environment(config)
    origin = None if request.origin is None else origin_lib.load(request.origin, config)
    prepared = fused.prepare(config) if config.fused else None

    def begin_with_origin() -> None:
      if origin is not None:
        origin_lib.begin(origin, config, folder, prepared and prepared.program)

    folder_lib.open_run(folder, config, begin_with_origin, keep=True)
    if prepared is None:
      parts.saved_train(
        folder, parts.saved_shapes(config)
      )  # refuses a checkpoint with other arrays
    print(*lines, sep='\n', flush=True)
    if prepared is not None:
      return fused.train(prepared, folder, profile=request.span)
    from hephaestus.launch.run import local  # whose packages a fused run does not need

    return local.train(config, folder, forks, exposed=request.expose, profile=request.span)


@contextlib.contextmanager
def fork_server() -> Iterator[Any]:
  """Yields a `ForkServer`, made after all imports and before anything starts the threads of JAX.

  The server ends with the context.
  """
  gc.disable()  # modules stay: to scan them again and again takes a fifth of the time of their import
  from hephaestus.launch.processes import fork_server as fork_server_lib
  from hephaestus.launch.run import program  # noqa: F401, so that forked nodes have it imported

  gc.freeze()  # nor do the nodes scan them
  gc.enable()
  with contextlib.closing(fork_server_lib.ForkServer()) as forks:
    yield forks
