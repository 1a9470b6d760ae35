"""`hephaestus train --seeds` and `--grid`: several runs by one command."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from hephaestus.launch.run import commands as run_commands
from hephaestus.launch.run import packages, validation
from hephaestus.launch.run import request as request_lib


def add(commands: Any) -> None:
  """Adds --seeds, --grid and --jobs to the parser of `train`, and has it run them.

  Args:
    commands: sub-parsers of the command line, to which `run.commands` has added `train`.
  """
  train = commands.choices['train']
  several = train.add_argument_group(
    'several runs, each in a folder of its own below --run; the same command resumes them'
  )
  several.add_argument(
    '--seeds', nargs='+', type=int, metavar='N', help='a run for each seed, shown as one curve'
  )
  several.add_argument(
    '--grid',
    nargs='+',
    action='extend',
    default=[],
    metavar='KEY=VALUE,VALUE',
    help='runs for each value, of several keys for each combination, such as agent.gamma=0.9,0.99',
  )
  several.add_argument(
    '--jobs', type=int, metavar='N', help='runs at a time (default: by cores and accelerators)'
  )
  train.set_defaults(call=_train)


def _train(arguments: argparse.Namespace) -> int:
  if arguments.seeds is None and not arguments.grid:
    if arguments.jobs is not None:
      raise ValueError(f'--jobs {arguments.jobs}: is of several runs; add --seeds or --grid')
    return run_commands.train(request_lib.of(arguments))
  request = request_lib.of(arguments)
  _check(request, arguments.seeds)
  from hephaestus.launch.sweep import grid, jobs

  say = lambda text: print(text, flush=True)
  runs = grid.plan(request, arguments.seeds, arguments.grid)
  parent = runs[0].folder.parent
  missing = [run for run in runs if not grid.is_done(run)]
  code = 0
  if missing:
    shares = grid.shares(missing, arguments.jobs)
    _check_first(missing[0].config)
    say(f'{len(missing)} runs of {len(runs)} to do, {len(shares)} at a time, in {parent}')
    code, left = jobs.run_all([grid.Training(run) for run in missing], shares, say)
    if code == jobs.INTERRUPTED:
      say(f'stopped with {left} runs left; resume them by the same command with --run {parent}')
      return code
  return code if _show(runs, parent) else max(code, 1)


def _check(request: request_lib.TrainRequest, seeds: Sequence[int] | None) -> None:
  """Raises ValueError for flags that only a single run has."""
  from hephaestus.launch.files import folder as folder_lib

  if seeds is not None and request.seed is not None:
    raise ValueError(f'--seed {request.seed}: is one of --seeds; give one of the two options')
  if words := request.words(*request_lib.SINGLE):
    raise ValueError(f'{words[0]}: is of a single run; leave it out, or --seeds and --grid')
  if folder_lib.resumes(request.run):
    raise ValueError(
      f'--run {request.run}: is the folder of a single run; give another for several, or leave out '
      '--seeds and --grid to resume it'
    )


def _check_first(config: Any) -> None:
  """Checks one config as `train` would, before any folder is made; each run checks its own later."""
  import jax

  from hephaestus.launch.agents import machine
  from hephaestus.launch.run import fused, preflight

  machine.check(config, machine.find())
  jax.config.update('jax_platforms', 'cpu')  # accelerators are for the runs
  if not config.fused:
    packages.check_distributed('--no-fused', 'train in one process with --fused')
  validation.check_budget(config)
  preflight.check_environment(config)
  if config.fused and not config.accelerator:
    fused.prepare(config)


def _show(runs: Any, parent: pathlib.Path) -> bool:
  """Prints the table of the runs; False if there are no curves, True also if a package is missing."""
  from hephaestus.launch.report import curves
  from hephaestus.launch.sweep import grid

  try:
    curves.check_packages()
  except ValueError as error:
    print(f'no table: {error}; then hephaestus report {parent}/*', file=sys.stderr)
    return True
  try:
    markdown, remarks = grid.table(runs)
  except ValueError as error:
    print(f'hephaestus train: no table: {error}', file=sys.stderr)
    return False
  print(f'\n{markdown}', end='')
  for remark in remarks:
    print(f'hephaestus train: {remark}', file=sys.stderr)
  return True
