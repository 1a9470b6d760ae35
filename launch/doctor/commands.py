"""`hephaestus doctor`: finds the part of a run or of an environment that does not work."""

import argparse
import pathlib
import warnings
from typing import Any

from hephaestus.launch.run import flags
from hephaestus.launch.run import request as request_lib


def add(commands: Any) -> None:
  """Adds the command `doctor` to the parser."""
  doctor = commands.add_parser(
    'doctor',
    allow_abbrev=False,
    help='find out which part of a run or of an environment does not work',
    description='Plays an environment at random, and with a run also its newest agent, and compares what '
    'each part predicts with what comes. Each number that is not fine is shown with its likely cause '
    'and the setting to try. Exit code 1 if there is one.',
  )
  add = doctor.add_argument
  add('target', metavar='RUN|ENVIRONMENT', help='folder of a run, or a name as of --env')
  add('--steps', type=int, default=8_192, help='environment steps to play of each kind')
  add('--seed', type=int, default=0)
  add('--checkpoint', metavar='best|STEP',
      help='of a run, by evaluation or by update (default: the newest)')  # fmt: skip
  add('--json', action='store_true')
  request_lib.add(doctor, 'trust')
  doctor.set_defaults(call=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
  flags.leave_accelerators()
  warnings.simplefilter('ignore')  # of the packages of environments
  if arguments.steps < 2_048:
    raise ValueError(f'--steps {arguments.steps}: must be at least 2048, else noise dominates')
  flags.check_seed(arguments.seed)
  from hephaestus.actors import environments
  from hephaestus.launch.files import folder as folder_lib

  target, which = arguments.target, arguments.checkpoint
  folder = pathlib.Path(target)
  is_run = (folder / folder_lib.CONFIG).exists()
  if is_run:  # refuses before imports that take seconds
    folder_lib.load_config(folder)
  elif which is not None:
    raise ValueError(f'--checkpoint {which}: {target} is no folder of a run')
  else:
    environments.check_name(target)
  from hephaestus.launch.doctor import check, diagnosis
  from hephaestus.launch.files import metrics

  given = {'num_steps': arguments.steps, 'seed': arguments.seed}
  if is_run:
    checks = diagnosis.of_run(folder, checkpoint=which, **given)
  else:
    checks = diagnosis.of_environment(target, **given)
  if arguments.json:
    print(metrics.to_json([each._asdict() for each in checks]))
  else:
    check.show(target, checks)
  return 1 if check.findings(checks) else 0
