"""The command `bench` and its targets."""

import argparse
import logging
import os
import pathlib
from typing import TYPE_CHECKING, Any

from hephaestus.launch import flags

if TYPE_CHECKING:
  from hephaestus.launch import config as launch_config

SIZES = ('ensemble', 'horizon', 'batch', 'length', 'dtype')  # flags that change a learner's work


def add(commands: Any) -> None:
  """Adds the command; see `run.commands.add`."""
  bench = commands.add_parser(
    'bench', allow_abbrev=False, help='measure the speed of a part, and what limits it'
  )
  targets = bench.add_subparsers(dest='target', required=True)
  _add_env(targets)
  _add_replay(targets)
  _add_learner(targets)
  _add_end_to_end(targets)
  _add_watching(targets)
  _add_scaling(targets)
  _add_compare(targets)


def _add_env(targets: Any) -> None:
  parser = targets.add_parser('env', allow_abbrev=False, help='steps of environments per second')
  parser.add_argument(
    '--env', nargs='+', default=['catch'], help='environments, each as of train (default: catch)'
  )
  parser.add_argument('--worlds', type=int, nargs='+', default=[256, 2048], metavar='N')
  parser.add_argument('--seconds', type=float, default=5.0, help='of each measurement')
  parser.add_argument(
    '--set', nargs='+', action='extend', default=[], metavar='environment.KEY=VALUE'
  )
  parser.add_argument('--json', action='store_true')
  parser.set_defaults(call=_env)


def _add_replay(targets: Any) -> None:
  parser = targets.add_parser(
    'replay', allow_abbrev=False, help='sequences and parameters through replay servers'
  )
  parser.add_argument('--env', default='catch', help='whose sequences (default: catch)')
  parser.add_argument('--shards', type=int, nargs='+', default=[1, 2, 4], metavar='S')
  parser.add_argument('--writers', type=int, nargs='+', default=[1, 4, 16], metavar='N')
  parser.add_argument(
    '--parameters', type=float, nargs='+', default=[5.0, 40.0, 140.0], metavar='MB'
  )
  parser.add_argument('--batch', type=int, default=256, metavar='B', help='sequences')
  parser.add_argument('--length', type=int, default=50, metavar='T', help='rows of a sequence')
  parser.add_argument('--stored', type=int, default=2048, metavar='N', help='sequences')
  parser.add_argument('--seconds', type=float, default=5.0, help='of each measurement')
  parser.add_argument('--json', action='store_true')
  parser.set_defaults(call=_replay)


def _add_learner(targets: Any) -> None:
  parser = targets.add_parser(
    'learner', allow_abbrev=False, help="the dreamer's update alone, and what limits it"
  )
  parser.add_argument('--size', help='laptop, 1m or full: with no environment, and of no preset')
  parser.add_argument('--preset', help='as of train (default: laptop)')
  parser.add_argument('--env', help='as of train (default: catch)')
  parser.add_argument('--ensemble', type=int, metavar='K', help='transition members')
  parser.add_argument('--horizon', type=int, metavar='H', help='rows of the longest dream')
  parser.add_argument('--batch', type=int, metavar='B', help='sequences')
  parser.add_argument('--length', type=int, metavar='T', help='rows of a sequence')
  parser.add_argument('--dtype', help='float32 or bfloat16')
  parser.add_argument('--boredom', type=float, nargs='+', default=[0.0, 1.0], metavar='B')
  parser.add_argument('--seconds', type=float, default=5.0, help='of each measurement')
  parser.add_argument('--phases', action='store_true', help='also its parts alone')
  parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
  parser.add_argument('--json', action='store_true')
  parser.set_defaults(call=_learner)


def _add_end_to_end(targets: Any) -> None:
  parser = targets.add_parser(
    'end-to-end', allow_abbrev=False, help='a whole run of the dreamer, beside its parts alone'
  )
  parser.add_argument('--preset', help='as of train (default: laptop)')
  parser.add_argument('--env', help='as of train (default: catch)')
  parser.add_argument('--seconds', type=float, default=180.0, help='once it has warmed up')
  parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
  parser.add_argument('--json', action='store_true')
  parser.set_defaults(call=_end_to_end)


def _add_watching(targets: Any) -> None:
  parser = targets.add_parser(
    'watching', allow_abbrev=False, help='what a dashboard and inspect --watch cost a run'
  )
  parser.add_argument('--preset', help='as of train (default: laptop)')
  parser.add_argument('--env', help='as of train (default: catch)')
  parser.add_argument(
    '--pairs', type=int, default=30, metavar='N', help='of windows, one of them watched'
  )
  parser.add_argument(
    '--window',
    type=float,
    default=20.0,
    metavar='SECONDS',
    help='of which the first fifth is left out',
  )
  parser.add_argument(
    '--period',
    type=float,
    default=5.0,
    metavar='SECONDS',
    help='between two looks; with fewer, what they cost is easier to see',
  )
  parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
  parser.add_argument('--json', action='store_true')
  parser.set_defaults(call=_watching)


def _add_scaling(targets: Any) -> None:
  parser = targets.add_parser(
    'scaling',
    allow_abbrev=False,
    help='what an update exchanges between simulated devices, and predicts for TPU v4',
  )
  parser.add_argument('--size', default='laptop', help='laptop, 1m or full (default: laptop)')
  parser.add_argument('--devices', type=int, nargs='+', default=[1, 2, 4, 8], metavar='D')
  parser.add_argument('--ensemble', type=int, metavar='K', help='transition members')
  parser.add_argument('--horizon', type=int, metavar='H', help='rows of the longest dream')
  parser.add_argument('--batch', type=int, metavar='B', help='sequences of each device')
  parser.add_argument('--length', type=int, metavar='T', help='rows of a sequence')
  parser.add_argument('--dtype', help='float32 or bfloat16')
  parser.add_argument('--json', action='store_true')
  parser.set_defaults(call=_scaling)


def _add_compare(targets: Any) -> None:
  parser = targets.add_parser(
    'compare',
    allow_abbrev=False,
    help='what two --json files of one target say; exit code 1 if something is worse',
  )
  parser.add_argument('old', type=pathlib.Path, metavar='OLD.json')
  parser.add_argument('new', type=pathlib.Path, metavar='NEW.json')
  parser.add_argument(
    '--threshold',
    type=float,
    default=0.1,
    help='the part of the old value by which a figure may be worse (default: 0.1)',
  )
  parser.set_defaults(call=_compare)


def _print_figures(arguments: argparse.Namespace, figures: Any) -> int:
  from hephaestus.launch.run import metrics
  from hephaestus.learner import bench as learner_bench

  if arguments.json:
    print(metrics.to_json([figure._asdict() for figure in figures]))
  else:
    learner_bench.show(figures)
  return 0


def _quieten_jax() -> None:
  """Keeps JAX from reporting accelerators that are not there."""
  logging.getLogger('jax').setLevel(logging.WARNING)


def _env(arguments: argparse.Namespace) -> int:
  _quieten_jax()
  from hephaestus.launch import config as launch_config
  from hephaestus.launch import presets
  from hephaestus.launch.bench import environments as bench
  from hephaestus.launch.run import local

  if arguments.set and len(arguments.env) > 1:
    raise ValueError(f'--set {arguments.set[0]}: goes with one environment; call once for each')
  foreign = [each for each in arguments.set if not each.startswith('environment.')]
  configs = {
    name: launch_config.override(presets.laptop(name), arguments.set) for name in arguments.env
  }
  if foreign:
    raise ValueError(f'--set {foreign[0]}: bench env knows only environment.KEY=VALUE')
  environments = {name: config.make_environment for name, config in configs.items()}
  figures = bench.environments(
    environments, arguments.worlds, arguments.seconds, of_actors=local.ONE_THREAD
  )
  return _print_figures(arguments, figures)


def _replay(arguments: argparse.Namespace) -> int:
  """Measures replay with sequences as an actor of the laptop preset makes them."""
  _quieten_jax()
  from hephaestus.launch import config as launch_config
  from hephaestus.launch import presets
  from hephaestus.launch.bench import replay
  from hephaestus.launch.run import parts as parts_lib

  config = launch_config.override(
    presets.laptop(arguments.env), [f'actor.sequence_length={arguments.length}']
  )
  figures = replay.replay(
    parts_lib.make_parts(config).sequence_schema,
    shards=arguments.shards,
    writers=arguments.writers,
    megabytes=arguments.parameters,
    batch_size=arguments.batch,
    stored=arguments.stored,
    seconds=arguments.seconds,
  )
  return _print_figures(arguments, figures)


def _learner(arguments: argparse.Namespace) -> int:
  _quieten_jax()
  from hephaestus.learner import bench as learner_bench

  figures = learner_bench.update(
    _learner_work(arguments).changed(**{name: getattr(arguments, name) for name in SIZES}),
    arguments.boredom,
    seconds=arguments.seconds,
    phases=arguments.phases,
  )
  return _print_figures(arguments, figures)


def _learner_work(arguments: argparse.Namespace) -> Any:
  """The work that `bench learner` measures: a named size, or a preset in an environment."""
  from hephaestus.learner import bench as learner_bench

  if arguments.size is not None:
    if arguments.preset or arguments.env or arguments.set:
      raise ValueError(f'--size {arguments.size}: takes neither --preset, --env nor --set')
    return learner_bench.Work.of_size(arguments.size)
  config = _preset_config(arguments)
  agent_config, learner_config = config.dreamer()
  environment = config.make_environment()
  return learner_bench.Work(
    name=str(config.environment['name']),
    agent=agent_config,
    learner=learner_config,
    observation_spec=environment.observation_spec,
    action_spec=environment.action_spec,
    num_rows=config.actor.sequence_length,
  )


def _end_to_end(arguments: argparse.Namespace) -> int:
  _quieten_jax()
  from hephaestus.launch.bench import end_to_end

  return _print_figures(
    arguments, end_to_end.end_to_end(_preset_config(arguments), arguments.seconds)
  )


def _watching(arguments: argparse.Namespace) -> int:
  _quieten_jax()
  from hephaestus.launch.bench import watching

  config = _preset_config(arguments)
  figures = watching.watching(config, arguments.pairs, arguments.window, arguments.period)
  return _print_figures(arguments, figures)


def _scaling(arguments: argparse.Namespace) -> int:
  os.environ['JAX_PLATFORMS'] = 'cpu'  # read when JAX first looks for devices, as are XLA's flags
  simulated = f'--xla_force_host_platform_device_count={max(arguments.devices)}'
  os.environ.setdefault('XLA_FLAGS', simulated)
  _quieten_jax()
  from hephaestus.learner import bench as learner_bench
  from hephaestus.learner import scaling

  work = learner_bench.Work.of_size(arguments.size)
  work = work.changed(**{name: getattr(arguments, name) for name in SIZES})
  return _print_figures(arguments, scaling.scaling(work, arguments.devices))


def _compare(arguments: argparse.Namespace) -> int:
  from hephaestus.launch.bench import comparison

  return comparison.show(arguments.old, arguments.new, arguments.threshold)


def _preset_config(arguments: argparse.Namespace) -> 'launch_config.ExperimentConfig':
  """The config of --preset, --env and --set; ValueError where one of them cannot be."""
  from hephaestus.launch import config as launch_config

  config = flags.preset_config(arguments.preset or 'laptop', arguments.env)
  return launch_config.override(config, arguments.set)
