"""The command `train`."""

import argparse
import contextlib
from typing import Any

from hephaestus.launch import flags


def add(commands: Any) -> None:
  """Adds the command.

  Args:
    commands: sub-commands of the parser, as `ArgumentParser.add_subparsers` returns them.
  """
  parser = commands.add_parser(
    'train', allow_abbrev=False, help='train an agent, or resume the run of a folder'
  )
  flags.add_config_flags(parser)
  flags.add_profile_flag(parser)
  parser.add_argument(
    '--fused',
    action=argparse.BooleanOptionalAction,
    help="environment and update in one program on the learner's devices (ppo's default)",
  )
  parser.add_argument(
    '--expose',
    action='store_true',
    help="let other machines reach replay's port, which asks for no password",
  )
  parser.add_argument(
    '--reset-moments',
    action='store_true',
    help='when a run of ppo resumes, reset its optimizer: after a change of the number of environments',
  )
  parser.set_defaults(call=_train)


def _train(arguments: argparse.Namespace) -> int:
  from hephaestus.launch.run import fused, local
  from hephaestus.learner import profile as profile_lib

  config = flags.make_config(arguments)
  with contextlib.nullcontext() if config.fused else local.open_fork_server() as fork_server:
    if arguments.expose and config.fused:
      raise ValueError('--expose: a fused run listens at no port; leave it out, or add --no-fused')
    profile = None if arguments.profile is None else profile_lib.parse(arguments.profile)
    folder = arguments.run or flags.new_folder(config)
    flags.check_environment(config)
    memory = '' if config.fused else local.check_memory(config)
    if profile is not None:
      local.prepare_profile(profile, config, folder)
    local.open_run(folder, config)
    print(f'run folder: {folder}', flush=True)
    if config.fused:
      return fused.train(config, folder, reset_moments=arguments.reset_moments, profile=profile)
    print(memory, flush=True)
    assert fork_server is not None
    return local.train(config, folder, fork_server, exposed=arguments.expose, profile=profile)
