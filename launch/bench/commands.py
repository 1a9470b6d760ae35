"""`hephaestus bench`: the throughput of each part, compared with its limit."""

import argparse
import functools
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from hephaestus.launch import records
from hephaestus.launch.run import flags

Figures = Callable[[argparse.Namespace], Any]
CHANGES = ('ensemble', 'horizon', 'batch', 'length')  # flags that change a named size
NEED_NONE = 'bench learner, env, learning, dreams and accelerator need none of it'
PARAMETERS = (5.0, 40.0, 140.0)  # MB that `bench replay` publishes
BATCH, LENGTH = 256, 50  # sequences that it samples, and their steps


def add(commands: Any) -> None:
  """Adds the command `bench` and its sub-commands to the parser."""
  bench = commands.add_parser(
    'bench', allow_abbrev=False, help='compare the throughput of a part with its limit'
  )
  targets = bench.add_subparsers(dest='target', required=True)
  for add_one in (
    _add_env, _add_replay, _add_learner, _add_end_to_end, _add_learning, _add_dreams, _add_accelerator,
  ):  # fmt: skip
    add_one(functools.partial(targets.add_parser, allow_abbrev=False))


def _measures(
  parser: argparse.ArgumentParser,
  figures: Figures,
  limit: str,
  seconds: float = 5.0,
  what: str = 'of each measurement',
) -> None:
  """Adds --seconds and --json, and makes the parser's command show figures.

  Args:
    limit: what the figures are compared with.
    seconds: default of --seconds.
    what: help of --seconds.
  """
  parser.add_argument(
    '--seconds', type=float, default=seconds, help=f'{what} (default: {seconds:g})'
  )
  parser.add_argument('--json', action='store_true')
  parser.set_defaults(call=functools.partial(_show, figures, limit))


def _show(figures: Figures, limit: str, arguments: argparse.Namespace) -> int:
  """Measures, and prints the figures."""
  from hephaestus.launch.files import metrics
  from hephaestus.launch.run import packages
  from hephaestus.learner import bench as learner_bench

  if arguments.target in ('end-to-end', 'replay'):
    packages.check_distributed(f'bench {arguments.target}', NEED_NONE)
  measured = figures(arguments)
  if arguments.json:
    print(metrics.to_json(learner_bench.to_rows(measured)))
  else:
    learner_bench.show(measured)
    if any(figure.limit is not None for figure in measured):
      print(f'limit: {limit}')
  return 0


def _add_config(parser: argparse.ArgumentParser) -> None:
  """Adds --preset, --env and --set, for `flags.preset_config`."""
  parser.add_argument('--preset', help='as of train (default: laptop)')
  parser.add_argument('--env', help='as of train (default: catch)')
  parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')


def _add_env(add: Any) -> None:
  env = add('env', help='environment steps per second')
  env.add_argument(
    '--env', nargs='+', default=['catch'], help='environments, each as of train (default: catch)'
  )
  env.add_argument(
    '--num-envs', type=int, nargs='+', default=[256, 2048], metavar='N',
    help='parallel environments (default: 256 2048)',
  )  # fmt: skip
  env.add_argument('--set', nargs='+', action='extend', default=[], metavar='environment.KEY=VALUE')
  limit = (
    'the rate at which observations could be copied, by the bandwidth of copying measured here'
  )
  _measures(env, _environment_figures, limit)


def _add_replay(add: Any) -> None:
  replay = add('replay', help='sequences and parameters per second of replay servers')
  replay.add_argument(
    '--env', default='catch', help='environment of the sequences (default: catch)'
  )
  replay.add_argument('--shards', type=int, nargs='+', default=[1, 2, 4], metavar='S')
  replay.add_argument('--writers', type=int, nargs='+', default=[1, 4, 16], metavar='N')
  replay.add_argument('--stored', type=int, default=2048, metavar='N', help='sequences')
  replay.add_argument(
    '--sizes', type=int, nargs='+', metavar='N',
    help='numbers of sequences to store: measures only small sequences, in Reverb and in a fused '
    "run's replay, at each of these sizes",
  )  # fmt: skip
  limit = 'the bandwidth of one thread that copies memory, measured here'
  _measures(replay, _replay_figures, limit)


def _add_learner(add: Any) -> None:
  learner = add(
    'learner', help="the dreamer's update, without actors and replay",
    description='Measures the update of a model of --size, or of a run by --preset, --env and --set.',
  )  # fmt: skip
  learner.add_argument('--size', help='laptop, 1m or full, without an environment')
  learner.add_argument('--ensemble', type=int, metavar='K', help='prior heads of the ensemble')
  learner.add_argument('--horizon', type=int, metavar='H', help='longest imagined horizon')
  learner.add_argument('--batch', type=int, metavar='B', help='sequences per device')
  learner.add_argument('--length', type=int, metavar='T', help='steps of a sequence')
  _add_config(learner)
  learner.add_argument('--boredom', type=float, nargs='+', default=[0.0, 1.0], metavar='B')
  learner.add_argument('--phases', action='store_true', help='also measure each of its phases')
  limit = 'the rate of a plain matrix product on this device, measured here'
  _measures(learner, _learner_figures, limit)


def _add_end_to_end(add: Any) -> None:
  end_to_end = add('end-to-end', help='a whole run of the dreamer, compared with its parts')
  _add_config(end_to_end)
  limit = 'an update without acting, and an unroll without learning, measured after the run'
  _measures(end_to_end, _end_to_end_figures, limit, 180.0, 'after the warm-up')


def _add_learning(add: Any) -> None:
  learning = add(
    'learning',
    help='scores of agents on a suite of environments, one configuration for all',
    description='Trains each agent in each environment with each seed, one run on a core of its own, '
    'and appends a row for each to OUT/rows.jsonl. The same command again continues where it '
    'stopped; once all rows are there, it only prints the table.',
  )
  learning.add_argument(
    '--environments', nargs='+', metavar='NAME', help='of the suite (default: all of it)'
  )
  learning.add_argument(
    '--agents', nargs='+', choices=list(records.AGENTS), default=['dreamer', 'ppo'],
    help='default: dreamer ppo',
  )  # fmt: skip
  learning.add_argument('--seeds', nargs='+', type=int, default=[0, 1, 2], metavar='N')
  learning.add_argument('--preset', default='laptop', help='as of train (default: laptop)')
  learning.add_argument(
    '--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE',
    help='override the config of all runs, as an ablation; give it a --label',
  )  # fmt: skip
  learning.add_argument(
    '--label', default='default', help='name of these settings in rows and tables'
  )
  learning.add_argument(
    '--out', type=pathlib.Path, default=pathlib.Path('runs/bench-learning'),
    help='folder of rows, runs, table and pictures (default: runs/bench-learning)',
  )  # fmt: skip
  learning.add_argument(
    '--jobs', type=int, metavar='N', help='runs at a time (default: number of available cores)'
  )
  learning.add_argument(
    '--max-minutes', type=float, metavar='N', help='of training, after which a run ends early'
  )
  learning.add_argument(
    '--table', action='store_true', help='show the rows that are there, and train nothing'
  )
  learning.add_argument(
    '--distributed',
    action='store_true',
    help='train in several processes; by default each run is one process if its agent can be fused',
  )
  learning.add_argument('--json', action='store_true', help='print the rows instead of the table')
  learning.set_defaults(call=_learning)


def _add_dreams(add: Any) -> None:
  dreams = add(
    'dreams', help='imagination rollouts of a trained dreamer, compared with its environment'
  )
  dreams.add_argument('run', type=pathlib.Path)
  dreams.add_argument(
    '--checkpoint', help="a learner step, or 'best' by evaluation (default: the newest)"
  )
  dreams.add_argument(
    '--steps', type=int, default=8_192, help='environment steps, at least (default: 8192)'
  )
  dreams.add_argument('--seed', type=int, default=0)
  flags.add_trust_flag(dreams)
  dreams.add_argument('--json', action='store_true')
  dreams.set_defaults(call=_dreams)


def _add_accelerator(add: Any) -> None:
  accelerator = add(
    'accelerator',
    help='run all benchmarks of a GPU or TPU unattended, and write one file',
    description='Measures section by section, and writes the file after each. The same command again '
    'continues with the sections that are missing or failed.',
  )
  accelerator.add_argument(
    '--out', type=pathlib.Path, help='the file (default: runs/accelerator.json, or -rehearsal.json)'
  )
  accelerator.add_argument('--minutes', type=float, default=38.0, help='for all (default: 38)')
  accelerator.add_argument('--sections', nargs='+', metavar='NAME', help='(default: all)')
  accelerator.add_argument('--rehearse', action='store_true', help='smallest sizes, on the CPU')
  accelerator.set_defaults(call=_accelerator)


def _accelerator(arguments: argparse.Namespace) -> int:
  from hephaestus.launch.bench import accelerator

  return accelerator.accelerator(
    arguments.out, arguments.minutes, arguments.sections, rehearse=arguments.rehearse
  )


def _learning(arguments: argparse.Namespace) -> int:
  """Trains the runs that have no row of results yet, then shows all rows that were asked for."""
  from hephaestus.launch.bench.learning import runs as runs_lib
  from hephaestus.launch.bench.learning import suite, table
  from hephaestus.launch.files import metrics
  from hephaestus.launch.sweep import jobs

  tasks = suite.chosen(arguments.environments)
  asked = [
    runs_lib.SuiteRun(task, agent, seed)
    for seed in dict.fromkeys(arguments.seeds)
    for task in tasks
    for agent in dict.fromkeys(arguments.agents)
  ]
  settings = _learning_settings(arguments)
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
    for remark in table.write(rows, arguments.out):
      say(remark)
  return code


def _dreams(arguments: argparse.Namespace) -> int:
  """Prints a comparison of imagination rollouts of a checkpoint with the environment."""
  from hephaestus.launch.bench import dreams
  from hephaestus.launch.files import metrics

  if arguments.steps < 1:
    raise ValueError(f'--steps {arguments.steps}: must be at least 1')
  result = dreams.dreams(
    arguments.run, checkpoint=arguments.checkpoint, num_steps=arguments.steps, seed=arguments.seed
  )
  if arguments.json:
    rows = [row._asdict() for row in result.summary.rows]
    found = result.summary._asdict() | {'rows': rows}
    print(metrics.to_json({'learner_step': result.learner_step, **found}))
  else:
    print(dreams.table(result))
  return 0


def _learning_settings(arguments: argparse.Namespace) -> Any:
  """Settings of all runs; raises ValueError for an invalid flag before anything starts."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.bench.learning import runs as runs_lib
  from hephaestus.launch.run import packages

  if arguments.distributed:
    packages.check_distributed('--distributed', 'leave it out for runs of one process')
  for assignment in arguments.set:
    if assignment.startswith(('environment.', 'seed=', 'max_environment_steps=')):
      raise ValueError(f'--set {assignment}: is decided by the suite and --seeds')
  for agent in arguments.agents:
    launch_config.override(launch_config.of_preset(agent, arguments.preset, 'catch'), arguments.set)
  if not re.fullmatch(r'[\w.-]+', arguments.label):
    raise ValueError(f'--label {arguments.label}: takes letters, digits, _, . and -')
  if arguments.max_minutes is not None and not arguments.max_minutes > 0:
    raise ValueError(f'--max-minutes {arguments.max_minutes:g}: must be positive')
  return runs_lib.Settings(
    arguments.out,
    arguments.label,
    arguments.preset,
    arguments.set,
    arguments.max_minutes,
    fused=not arguments.distributed,
  )


def _learner_figures(arguments: argparse.Namespace) -> Any:
  """Measures the update of a named size, or of a preset and an environment."""
  from hephaestus.launch.bench import end_to_end
  from hephaestus.learner import bench as learner_bench

  if arguments.size is None:
    config = flags.preset_config(arguments)
    work = end_to_end.make_work(config, str(config.environment['name']))
  elif arguments.preset or arguments.env or arguments.set:
    raise ValueError(f'--size {arguments.size}: takes neither --preset, --env nor --set')
  else:
    work = learner_bench.Work.of_size(arguments.size)
  return learner_bench.update(
    work.changed(**{name: getattr(arguments, name) for name in CHANGES}),
    arguments.boredom,
    seconds=arguments.seconds,
    phases=arguments.phases,
  )


def _end_to_end_figures(arguments: argparse.Namespace) -> Any:
  from hephaestus.launch.bench import end_to_end

  return end_to_end.end_to_end(flags.preset_config(arguments), arguments.seconds)


def _environment_figures(arguments: argparse.Namespace) -> Any:
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.agents import presets
  from hephaestus.launch.bench import environments
  from hephaestus.launch.run import variables

  if arguments.set and len(arguments.env) > 1:
    raise ValueError(f'--set {arguments.set[0]}: needs a single environment; run once for each')
  foreign = [each for each in arguments.set if not each.startswith('environment.')]
  configs = {
    name: launch_config.override(presets.laptop(name), arguments.set) for name in arguments.env
  }
  if foreign:
    raise ValueError(f'--set {foreign[0]}: bench env takes environment.KEY=VALUE only')
  makers = {name: config.make_environment for name, config in configs.items()}
  return environments.environments(
    makers, arguments.num_envs, arguments.seconds, of_actors=variables.ONE_THREAD
  )


def _replay_figures(arguments: argparse.Namespace) -> Any:
  """Measures replay with sequences like those that an actor of the laptop preset writes."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.agents import presets
  from hephaestus.launch.run import parts as parts_lib
  from hephaestus.learner import bench as learner_bench
  from hephaestus.replay import bench as replay_bench

  given = {'batch_size': BATCH, 'seconds': arguments.seconds}
  if arguments.sizes:
    rows = replay_bench.by_size(arguments.sizes, **given)
  else:
    length = f'actor.sequence_length={LENGTH}'
    config = launch_config.override(presets.laptop(arguments.env), [length])
    rows = replay_bench.measure(
      parts_lib.make_parts(config).sequence_schema,
      shards=arguments.shards,
      writers=arguments.writers,
      megabytes=PARAMETERS,
      stored=arguments.stored,
      **given,
    )
  return [learner_bench.Figure(*row) for row in rows]
