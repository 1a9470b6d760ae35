"""`hephaestus bench`: speed of the parts, of an accelerator, learning on a suite, and dreams."""

import argparse
import pathlib
import re
import sys
from typing import Any

from hephaestus.launch import records
from hephaestus.launch.report import commands as report_commands
from hephaestus.launch.run import flags
from hephaestus.launch.run import request as request_lib

SECTIONS = ('learner', 'environments', 'replay', 'run')


def add(commands: Any) -> None:
  """Adds the command `bench` and its sub-commands to the parser."""
  bench = commands.add_parser(
    'bench', allow_abbrev=False, help='measure speed, and learning on a suite of environments'
  )
  parsers = bench.add_subparsers(dest='target', required=True)
  _add_speed(parsers)
  _add_accelerator(parsers)
  _add_learning(parsers)
  _add_dreams(parsers)


def _add_speed(parsers: Any) -> None:
  parser = parsers.add_parser(
    'speed', allow_abbrev=False, help='speed of learner, environments, replay and a whole run',
    description='Measures each section, compared with its limit: updates with the rate of a plain '
    'matrix product, environments and replay with the bandwidth of copying, a run with the learner '
    'by itself.',
  )  # fmt: skip
  add = parser.add_argument
  add('sections', nargs='*', metavar='SECTION', help=f'of {", ".join(SECTIONS)} (default: all)')
  add('--size', help="laptop, 1m or full: a named model, in place of a preset's")
  add('--preset', metavar='NAME', help='as of train (default: laptop)')
  add('--env', metavar='NAME', help='as of train (default: catch)')
  add('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
  add('--phases', action='store_true', help='also measure the phases of the update')
  add('--num-envs', type=int, nargs='+', default=[256, 2048], metavar='N',
      help='parallel environments (default: 256 2048)')  # fmt: skip
  add('--stored', type=int, default=2048, help='sequences in replay (default: 2048)')
  add('--seconds', type=float, help='of each measurement (default: 5, of a run 180)')
  add('--json', action='store_true')
  parser.set_defaults(call=_speed)


def _add_accelerator(parsers: Any) -> None:
  parser = parsers.add_parser(
    'accelerator', allow_abbrev=False, help='all benchmarks of a GPU or TPU, unattended, in one file',
    description='Measures section by section, and writes the file after each. The same command again '
    'continues with the sections that are missing or failed.',
  )  # fmt: skip
  add = parser.add_argument
  add('--out', type=pathlib.Path, metavar='FILE',
      help='the file (default: runs/accelerator.json, or -rehearsal.json)')  # fmt: skip
  add('--minutes', type=float, default=38.0, metavar='N', help='for all (default: 38)')
  add('--sections', nargs='+', action='extend', metavar='NAME', help='(default: all)')
  add('--rehearse', action='store_true', help='smallest sizes, on the CPU')
  parser.set_defaults(call=_accelerator)


def _add_learning(parsers: Any) -> None:
  parser = parsers.add_parser(
    'learning', allow_abbrev=False,
    help='scores of agents on a suite of environments, one configuration for all',
    description='Trains each agent in each environment with each seed, one run on a core of its own, '
    'and appends a row for each to OUT/rows.jsonl. The same command again continues where it '
    'stopped; once all rows are there, it only prints the table.',
  )  # fmt: skip
  add = parser.add_argument
  add('--environments', nargs='+', action='extend', metavar='NAME',
      help='of the suite (default: all of it)')  # fmt: skip
  add('--agents', nargs='+', default=['dreamer', 'ppo'], metavar='NAME',
      help=f'of {", ".join(records.AGENTS)} (default: dreamer ppo)')  # fmt: skip
  add('--seeds', type=int, nargs='+', default=[0, 1, 2], metavar='N', help='(default: 0 1 2)')
  add('--preset', default='laptop', metavar='NAME', help='as of train (default: laptop)')
  add('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE',
      help='override the config of all runs, as an ablation; give it a --label')  # fmt: skip
  add('--label', default='default', metavar='NAME',
      help='name of these settings in rows and tables (default: default)')  # fmt: skip
  add('--out', type=pathlib.Path, default=pathlib.Path('runs/bench-learning'), metavar='DIR',
      help='folder of rows, runs and table (default: runs/bench-learning)')  # fmt: skip
  add('--jobs', type=int, metavar='N', help='runs at a time (default: number of available cores)')
  add('--table', action='store_true', help='show the rows that are there, and train nothing')
  add('--json', action='store_true', help='print the rows instead of the table')
  parser.set_defaults(call=_learning)


def _add_dreams(parsers: Any) -> None:
  parser = parsers.add_parser(
    'dreams', allow_abbrev=False,
    help='imagination rollouts of a trained dreamer, compared with its environment',
  )  # fmt: skip
  add = parser.add_argument
  report_commands.add_agent(parser)
  add('--steps', type=int, default=8_192, metavar='N',
      help='environment steps, at least (default: 8192)')  # fmt: skip
  add('--seed', type=int, default=0, metavar='N', help='(default: 0)')
  add('--json', action='store_true')
  request_lib.add(parser, 'trust')
  parser.set_defaults(call=_dreams)


def _speed(arguments: argparse.Namespace) -> int:
  """Measures the sections that were asked for, and prints their figures."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.run import validation

  sections, seconds = arguments.sections or SECTIONS, arguments.seconds
  for section in sections:
    if section not in SECTIONS:
      raise ValueError(f'{section}: choose sections of {", ".join(SECTIONS)}')
  if seconds is not None and not 0 < seconds < float('inf'):
    raise ValueError(f'--seconds {seconds}: must be positive')
  if 'replay' in sections:
    validation.check_distributed('bench speed replay', 'give the other sections')
  from hephaestus.launch.bench import speed

  if arguments.size is None:
    config = launch_config.of_preset(
      records.DREAMER, arguments.preset or 'laptop', arguments.env or 'catch'
    )
    config = launch_config.override(config, arguments.set)
  elif arguments.preset or arguments.env:
    raise ValueError(f'--size {arguments.size}: takes neither --preset nor --env')
  else:
    config = launch_config.override(speed.of_size(arguments.size), arguments.set)
  name = arguments.size or config.environment['name']
  short = seconds or 5.0
  measured = []
  for section in sections:
    if section == 'learner':
      measured += speed.learner(config, name, seconds=short, phases=arguments.phases)
    elif section == 'environments':
      measured += speed.environments(config, arguments.num_envs, short)
    elif section == 'replay':
      measured += speed.replay(config, stored=arguments.stored, seconds=short)
    else:
      measured += speed.run(config, name, seconds or speed.RUN_SECONDS)
  speed.show(measured, as_json=arguments.json)
  return 0


def _accelerator(arguments: argparse.Namespace) -> int:
  from hephaestus.launch.bench import accelerator

  return accelerator.accelerator(
    arguments.out, arguments.minutes, arguments.sections, rehearse=arguments.rehearse
  )


def _learning(arguments: argparse.Namespace) -> int:
  """Trains the runs that have no row of results yet, then shows all rows that were asked for."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.bench.learning import runs as runs_lib
  from hephaestus.launch.bench.learning import suite, table
  from hephaestus.launch.files import metrics
  from hephaestus.launch.processes import jobs

  for assignment in arguments.set:
    if assignment.startswith(('environment.', 'seed=', 'max_environment_steps=')):
      raise ValueError(f'--set {assignment}: is decided by the suite and --seeds')
  for agent in arguments.agents:
    launch_config.override(launch_config.of_preset(agent, arguments.preset, 'catch'), arguments.set)
  if not re.fullmatch(r'[\w.-]+', arguments.label):
    raise ValueError(f'--label {arguments.label}: takes letters, digits, _, . and -')
  settings = runs_lib.Settings(arguments.out, arguments.label, arguments.preset, arguments.set)
  tasks = suite.chosen(arguments.environments or None)
  asked = [
    runs_lib.SuiteRun(task, agent, seed)
    for seed in dict.fromkeys(arguments.seeds)
    for task in tasks
    for agent in dict.fromkeys(arguments.agents)
  ]
  say = lambda text: print(text, file=sys.stderr, flush=True)
  missing = [] if arguments.table else runs_lib.missing(asked, settings)
  code = 0
  if missing:
    cores = jobs.available_cores(arguments.jobs)
    say(f'{len(missing)} runs of {len(asked)} to do, {len(cores)} at a time, in {arguments.out}')
    code = runs_lib.run_all(missing, settings, cores, say)
  rows = runs_lib.read_rows(arguments.out)
  if not arguments.table:
    names = {(run.task.name, run.agent, run.seed) for run in asked}
    rows = [row for row in rows if (row['environment'], row['agent'], row['seed']) in names]
  if arguments.json:
    print(metrics.to_json(rows))
  elif rows:
    print(table.markdown(rows), end='')
  if rows:
    (arguments.out / 'results.md').write_text(table.markdown(rows))
    say(f'{arguments.out / "results.md"}: the table')
  return code


def _dreams(arguments: argparse.Namespace) -> int:
  """Prints a comparison of imagination rollouts of a checkpoint with the environment."""
  if arguments.steps < 1:
    raise ValueError(f'--steps {arguments.steps}: must be at least 1')
  flags.check_seed(arguments.seed)
  flags.leave_accelerators()
  from hephaestus.launch.agents import dreamer as dreamer_record
  from hephaestus.launch.bench import dreams
  from hephaestus.launch.files import metrics
  from hephaestus.launch.interface import policy as policy_lib

  dreamer_record.settings(policy_lib.load_config(arguments.run))  # refuses other agents
  policy = policy_lib.load(arguments.run, arguments.checkpoint)
  found = dreams.compare(policy, num_steps=arguments.steps, seed=arguments.seed)
  if arguments.json:
    rows = [row._asdict() for row in found.rows]
    step = {'learner_step': policy.learner_step}
    print(metrics.to_json(step | found._asdict() | {'rows': rows}))
  else:
    print(dreams.table(found, policy.learner_step))
  return 0
