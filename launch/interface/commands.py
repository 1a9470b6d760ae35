"""`hephaestus export`: writes the policy of a run into a folder, for use in other programs."""

import argparse
import pathlib
from typing import Any

from hephaestus.launch.report import commands as report_commands
from hephaestus.launch.run import flags
from hephaestus.launch.run import request as request_lib


def add(commands: Any) -> None:
  """Adds the command `export` to the parser."""
  export = commands.add_parser(
    'export', allow_abbrev=False, help='write the policy of a run as safetensors and JSON'
  )
  report_commands.add_agent(export)
  export.add_argument('--out', type=pathlib.Path, required=True, help='new folder for the policy')
  request_lib.add(export, 'trust')
  export.set_defaults(call=_export)


def _export(arguments: argparse.Namespace) -> int:
  from hephaestus.launch.interface import places

  places.check(arguments.run)  # before imports that take seconds
  flags.leave_accelerators()
  from hephaestus.launch.interface import exported, policy

  written = policy.export(arguments.run, arguments.out, arguments.checkpoint)
  files = [arguments.out / name for name in (exported.PARAMS, places.POLICY)]
  sizes = ', '.join(f'{file.name} ({file.stat().st_size / 1e3:.0f} kB)' for file in files)
  print(f'{arguments.out}: update {written.learner_step:,}, {sizes}')
  return 0
