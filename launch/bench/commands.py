"""`hephaestus bench`: the throughput of each part, compared with its limit."""

import argparse
import os
import pathlib
import re
import sys
from typing import Any

from hephaestus.launch import records
from hephaestus.launch.run import flags


def add(commands: Any) -> None:
  """Adds the command `bench` and its sub-commands to the parser."""
  bench = commands.add_parser(
    'bench', allow_abbrev=False, help='compare the throughput of a part with its limit'
  )
  targets = bench.add_subparsers(dest='target', required=True)
  for add_one in (
    _add_env, _add_replay, _add_learner, _add_end_to_end, _add_learning, _add_dreams, _add_scaling,
    _add_accelerator,
  ):  # fmt: skip
    add_one(targets)
  bench.set_defaults(call=_bench)


def _add_measured(
  parser: argparse.ArgumentParser, seconds: float = 5.0, what: str = 'of each measurement'
) -> None:
  """Adds --seconds and --json."""
  parser.add_argument(
    '--seconds', type=float, default=seconds, help=f'{what} (default: {seconds:g})'
  )
  parser.add_argument('--json', action='store_true')


def _add_config(parser: argparse.ArgumentParser) -> None:
  """Adds --preset, --env and --set, for `flags.preset_config`."""
  parser.add_argument('--preset', help='as of train (default: laptop)')
  parser.add_argument('--env', help='as of train (default: catch)')
  parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')


def _add_sizes(parser: argparse.ArgumentParser, size: str) -> None:
  """Adds --size, of which `size` is the help, and the flags CHANGES that change a named size."""
  parser.add_argument('--size', help=size)
  parser.add_argument('--ensemble', type=int, metavar='K', help='prior heads of the ensemble')
  parser.add_argument('--horizon', type=int, metavar='H', help='longest imagined horizon')
  parser.add_argument('--batch', type=int, metavar='B', help='sequences per device')
  parser.add_argument('--length', type=int, metavar='T', help='steps of a sequence')
  parser.add_argument('--dtype', help='float32 or bfloat16')


def _add_env(targets: Any) -> None:
  env = targets.add_parser('env', allow_abbrev=False, help='environment steps per second')
  env.add_argument(
    '--env', nargs='+', default=['catch'], help='environments, each as of train (default: catch)'
  )
  env.add_argument(
    '--num-envs', type=int, nargs='+', default=[256, 2048], metavar='N',
    help='parallel environments (default: 256 2048)',
  )  # fmt: skip
  env.add_argument('--set', nargs='+', action='extend', default=[], metavar='environment.KEY=VALUE')
  _add_measured(env)


def _add_replay(targets: Any) -> None:
  replay = targets.add_parser(
    'replay', allow_abbrev=False, help='sequences and parameters per second of replay servers'
  )
  replay.add_argument(
    '--env', default='catch', help='environment of the sequences (default: catch)'
  )
  replay.add_argument('--shards', type=int, nargs='+', default=[1, 2, 4], metavar='S')
  replay.add_argument('--writers', type=int, nargs='+', default=[1, 4, 16], metavar='N')
  replay.add_argument(
    '--parameters', type=float, nargs='+', default=[5.0, 40.0, 140.0], metavar='MB'
  )
  replay.add_argument('--batch', type=int, default=256, metavar='B', help='sequences')
  replay.add_argument('--length', type=int, default=50, metavar='T', help='steps of a sequence')
  replay.add_argument('--stored', type=int, default=2048, metavar='N', help='sequences')
  replay.add_argument(
    '--sizes', type=int, nargs='+', metavar='N',
    help='numbers of sequences to store: measures only small sequences, in Reverb and in a fused '
    "run's replay, at each of these sizes",
  )  # fmt: skip
  _add_measured(replay)


def _add_learner(targets: Any) -> None:
  learner = targets.add_parser(
    'learner', allow_abbrev=False, help="the dreamer's update, without actors and replay",
    description='Measures the update of a model of --size, or of a run by --preset, --env and --set.',
  )  # fmt: skip
  _add_sizes(learner, 'laptop, 1m or full, without an environment')
  _add_config(learner)
  learner.add_argument('--boredom', type=float, nargs='+', default=[0.0, 1.0], metavar='B')
  learner.add_argument('--phases', action='store_true', help='also measure each of its phases')
  _add_measured(learner)


def _add_end_to_end(targets: Any) -> None:
  end_to_end = targets.add_parser(
    'end-to-end', allow_abbrev=False, help='a whole run of the dreamer, compared with its parts'
  )
  _add_config(end_to_end)
  _add_measured(end_to_end, 180.0, 'after the warm-up')


def _add_learning(targets: Any) -> None:
  learning = targets.add_parser(
    'learning',
    allow_abbrev=False,
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


def _add_dreams(targets: Any) -> None:
  dreams = targets.add_parser(
    'dreams',
    allow_abbrev=False,
    help='imagination rollouts of a trained dreamer, compared with its environment',
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


def _add_scaling(targets: Any) -> None:
  scaling = targets.add_parser(
    'scaling',
    allow_abbrev=False,
    help='traffic of an update between simulated devices; its program and memory on TPUs',
  )
  scaling.add_argument(
    '--tpu', nargs='+', metavar='TOPOLOGY',
    help='v4:2x2x1, v5e:2x2, v6e:4x4, ...: compile presets for these TPUs, by the extra `tpu`',
  )  # fmt: skip
  scaling.add_argument(
    '--programs', nargs='+', choices=['dreamer', 'dreamer-fused', 'ppo'],
    help='with --tpu (default: all)',
  )  # fmt: skip
  scaling.add_argument('--preset', help='with --tpu (default: tpu-v4-8)')
  scaling.add_argument('--env', help='with --tpu (default: catch)')
  scaling.add_argument('--set', nargs='+', action='extend', metavar='KEY=VALUE', help='with --tpu')
  scaling.add_argument(
    '--devices', type=int, nargs='+', metavar='D', help='simulated (default: 1 2 4 8)'
  )
  _add_sizes(scaling, 'laptop, 1m or full (default: laptop)')
  scaling.add_argument('--json', action='store_true')


def _add_accelerator(targets: Any) -> None:
  accelerator = targets.add_parser(
    'accelerator',
    allow_abbrev=False,
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


NEED_NONE = 'bench learner, env, learning, dreams, scaling and accelerator need none of it'
LIMITS = {
  'env': 'the rate at which observations could be copied, by the bandwidth of copying measured here',
  'replay': 'the bandwidth of one thread that copies memory, measured here',
  'learner': 'the rate of a plain matrix product on this device, measured here',
  'end-to-end': 'an update without acting, and an unroll without learning, measured after the run',
  'scaling': 'the memory of a chip, which is one device',
}
"""Sentence for each target of `bench` on the limit that its figures are compared with."""
CHANGES = ('ensemble', 'horizon', 'batch', 'length', 'dtype')  # flags that change a named size


def _bench(arguments: argparse.Namespace) -> int:
  if arguments.target == 'learning':
    return _learning(arguments)
  if arguments.target == 'dreams':
    return _dreams(arguments)
  if arguments.target == 'accelerator':
    from hephaestus.launch.bench import accelerator

    return accelerator.accelerator(
      arguments.out, arguments.minutes, arguments.sections, rehearse=arguments.rehearse
    )
  if arguments.target == 'scaling':  # JAX reads both when it initializes its devices
    os.environ['JAX_PLATFORMS'] = 'cpu'
    simulated = f'--xla_force_host_platform_device_count={max(arguments.devices or [8])}'
    os.environ.setdefault('XLA_FLAGS', simulated)
  from hephaestus.launch.files import metrics
  from hephaestus.launch.run import packages
  from hephaestus.learner import bench as learner_bench

  if arguments.target in ('end-to-end', 'replay'):
    packages.check_distributed(f'bench {arguments.target}', NEED_NONE)
  measure = {
    'learner': _learner_figures,
    'end-to-end': _end_to_end_figures,
    'scaling': _scaling_figures,
    'replay': _replay_figures,
    'env': _environment_figures,
  }
  figures = measure[arguments.target](arguments)
  if arguments.json:
    print(metrics.to_json(learner_bench.to_rows(figures)))
  else:
    learner_bench.show(figures)
    if any(figure.limit is not None for figure in figures):
      print(f'limit: {LIMITS[arguments.target]}')
  return 0


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
  from hephaestus.learner import bench as learner_bench

  return learner_bench.update(
    _learner_work(arguments).changed(**{name: getattr(arguments, name) for name in CHANGES}),
    arguments.boredom,
    seconds=arguments.seconds,
    phases=arguments.phases,
  )


def _end_to_end_figures(arguments: argparse.Namespace) -> Any:
  from hephaestus.launch.bench import end_to_end

  return end_to_end.end_to_end(flags.preset_config(arguments), arguments.seconds)


def _scaling_figures(arguments: argparse.Namespace) -> Any:
  from hephaestus.launch.bench import tpu
  from hephaestus.learner import bench as learner_bench
  from hephaestus.learner import scaling

  simulated, compiled = ('size', 'devices', *CHANGES), ('programs', 'preset', 'env', 'set')
  for name in compiled if arguments.tpu is None else simulated:
    if getattr(arguments, name) is not None:
      raise ValueError(f'--{name}: goes {"only" if arguments.tpu is None else "not"} with --tpu')
  if arguments.tpu is not None:
    return tpu.tpu(
      arguments.tpu,
      arguments.programs or tpu.PROGRAMS,
      arguments.preset or 'tpu-v4-8',
      arguments.env or 'catch',
      arguments.set or [],
    )
  work = learner_bench.Work.of_size(arguments.size or 'laptop')
  work = work.changed(**{name: getattr(arguments, name) for name in CHANGES})
  return scaling.scaling(work, arguments.devices or [1, 2, 4, 8])


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

  given = {'batch_size': arguments.batch, 'seconds': arguments.seconds}
  if arguments.sizes:
    rows = replay_bench.by_size(arguments.sizes, **given)
  else:
    length = f'actor.sequence_length={arguments.length}'
    config = launch_config.override(presets.laptop(arguments.env), [length])
    rows = replay_bench.measure(
      parts_lib.make_parts(config).sequence_schema,
      shards=arguments.shards,
      writers=arguments.writers,
      megabytes=arguments.parameters,
      stored=arguments.stored,
      **given,
    )
  return [learner_bench.Figure(*row) for row in rows]


def _learner_work(arguments: argparse.Namespace) -> Any:
  """Returns the update to measure, by a named size, or by a preset and an environment."""
  from hephaestus.launch.agents import dreamer
  from hephaestus.learner import bench as learner_bench

  if arguments.size is not None:
    if arguments.preset or arguments.env or arguments.set:
      raise ValueError(f'--size {arguments.size}: takes neither --preset, --env nor --set')
    return learner_bench.Work.of_size(arguments.size)
  config = flags.preset_config(arguments)
  agent_config, learner_config = dreamer.settings(config)
  environment = config.make_environment()
  return learner_bench.Work(
    name=str(config.environment['name']),
    agent=agent_config,
    learner=learner_config,
    observation_spec=environment.observation_spec,
    action_spec=environment.action_spec,
    sequence_length=config.actor.sequence_length,
  )
