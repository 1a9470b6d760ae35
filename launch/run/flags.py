"""Command-line flags that several commands share, and the config that they ask for."""

import argparse
import dataclasses
import math
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from hephaestus.launch import records
from hephaestus.launch.run import packages

if TYPE_CHECKING:
  from hephaestus.launch import config as launch_config

IMPORTING = 'importing JAX and more, some seconds'  # first line of a command, on stderr
# Keys that ask for a run of several processes where they are above 1.
SEVERAL = ('actor.num_actors', 'learner.num_processes', 'replay.num_shards')


def add_config_flags(parser: argparse.ArgumentParser) -> None:
  """Adds --preset, --env, --agent, --run, --steps, --seed and --set, which `make_config` reads."""
  parser.add_argument(
    '--preset', help='sizes: laptop, gpu or tpu-v4-8 (default: by the hardware found)'
  )
  parser.add_argument(
    '--env',
    help='an environment of `hephaestus environments`, or package.module:Class (default: catch)',
  )
  parser.add_argument(
    '--agent',
    help=f'{", ".join(records.AGENTS)}, or package.module:Class (default: dreamer); plain is a baseline '
    'like DreamerV3, without novelty',
  )
  parser.add_argument('--run', type=pathlib.Path, help='folder of the run (default: a new one)')
  parser.add_argument('--steps', type=whole_number, help='environment steps to collect in total')
  parser.add_argument('--seed', type=int, help='random seed of the whole run (default: 0)')
  parser.add_argument(
    '--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE', help='override the config'
  )
  add_trust_flag(parser)


def add_trust_flag(parser: argparse.ArgumentParser) -> None:
  """Adds --trust, with which `main` lets a file name agents and environments to import."""
  parser.add_argument(
    '--trust',
    action='store_true',
    help='import the agent and the environment that a folder or file names by an import path',
  )


def add_train_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of a run on this machine: `add_config_flags`, --config and --fused."""
  add_config_flags(parser)
  parser.add_argument(
    '--config',
    type=pathlib.Path,
    metavar='FILE',
    help='configuration file, such as config.yaml of a run; keys that it lacks are as without it, and '
    'flags override it',
  )
  parser.add_argument(
    '--fused',
    action=argparse.BooleanOptionalAction,
    help='one process: environments, replay and update in one program, or threads for environments '
    'that are not in JAX (default for ppo)',
  )


def whole_number(text: str) -> int:
  """Parses a whole number, also as 1e5 or 100_000; `argparse.ArgumentTypeError` for other text."""
  try:
    return int(text)
  except ValueError:
    pass
  try:
    number = float(text)
  except ValueError:
    number = math.nan
  if not number.is_integer():
    raise argparse.ArgumentTypeError(f'{text!r}: write a whole number, such as 100000 or 1e5')
  return int(number)


def say_import(who: str) -> None:
  """Prints to stderr that imports take seconds, unless the module that needs most of them is imported."""
  if 'hephaestus.launch.config' not in sys.modules:
    print(f'{who}: {IMPORTING}', file=sys.stderr, flush=True)


def check_seed(seed: int) -> None:
  """Raises ValueError for a value of --seed that JAX does not take."""
  if not 0 <= seed < 2**63:
    raise ValueError(f'--seed {str(seed)[:24]}: must be at least 0, and below 2^63')


def add_profile_flag(parser: argparse.ArgumentParser) -> None:
  """Adds --profile, the learner updates to trace."""
  parser.add_argument(
    '--profile',
    metavar='START:STOP',
    help='trace these updates of the learner, and an actor meanwhile; such as 100:110',
  )


def given_config_flags(arguments: argparse.Namespace) -> list[str]:
  """Lists the flags of `add_config_flags` that were given, except --run, as words of a command line."""
  names = ('preset', 'env', 'agent', 'steps', 'seed')
  given = [(name, getattr(arguments, name)) for name in names]
  flags = [word for name, value in given if value is not None for word in (f'--{name}', str(value))]
  return flags + (['--set', *arguments.set] if arguments.set else [])


def make_config(arguments: argparse.Namespace) -> Any:
  """Makes the `ExperimentConfig` that the flags ask for.

  It begins with the config of the run folder to resume, of the run of --from, or of a preset. Values
  of --config replace some of it, then --set, --fused, --steps and --seed do. Where the packages
  that several processes need are not installed, a new run becomes a fused one, if its agent can train
  so and neither --no-fused nor `learner.fused` is given.

  Args:
    arguments: parsed flags of `train` or of a command with the same config flags.

  Raises:
    ValueError: a flag or key is invalid, or needs packages that are not installed; names it.
  """
  from hephaestus.actors import environments
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.agents import presets
  from hephaestus.launch.files import folder as folder_lib

  records.given_names(arguments.agent, arguments.env)
  file = _file(arguments)
  given = {name: getattr(arguments, name) or getattr(file, name) for name in file._fields[:3]}
  arguments = argparse.Namespace(**vars(arguments) | given)
  if getattr(arguments, 'origin', None) is not None:
    config, is_new = _config_of_origin(arguments), True
  elif folder_lib.resumes(arguments.run):
    config, is_new = _config_to_resume(arguments), False
  else:
    is_new = True
    config = launch_config.of_preset(
      arguments.agent or records.DREAMER,
      arguments.preset or presets.default_preset(),
      arguments.env or 'catch',
    )
  overrides = list(arguments.set)
  if config.record.can_fuse:
    overrides += [] if arguments.fused is None else [f'learner.fused={arguments.fused}']
  elif arguments.fused:
    raise ValueError(
      f'--fused: {config.agent_name} runs with actors of its own; leave it out, or give another --agent'
    )
  if arguments.fused and not config.fused:  # presets are of runs with actors, which may be several
    overrides.insert(0, 'actor.num_actors=1')
  if arguments.steps is not None:
    overrides.append(f'max_environment_steps={arguments.steps}')
  if arguments.seed is not None:
    overrides.append(f'seed={arguments.seed}')
  config = launch_config.override(config, overrides, _values(file, config))
  environments.check_name(config.environment['name'])
  is_asked = arguments.fused is not None or sets(arguments, 'learner.fused')
  can_change = is_new and not is_asked and config.record.can_fuse and not config.fused
  if can_change:
    config = _in_one_process(arguments, config)
  if arguments.reset_moments and not (config.fused and config.record.on_policy):
    raise ValueError('--reset-moments: is for fused runs of an on-policy agent; leave it out')
  if config.fused and config.actor.num_actors > 1:
    raise ValueError(
      f'actor.num_actors={config.actor.num_actors}: a fused run has no actors of its own; use 1, or '
      'add --no-fused'
    )
  return config


def several_processes(arguments: argparse.Namespace, config: Any) -> tuple[str, str]:
  """Returns the flag that asks for several processes, and how to train in one; for an error message."""
  if arguments.fused is not None or sets(arguments, 'learner.fused'):
    return '--no-fused', 'train in one process with --fused'
  if not config.record.can_fuse:
    return (
      f'--agent {config.agent_name}',
      'agents that train in one process are dreamer, plain and ppo',
    )
  return f'--run {arguments.run}', 'it has several processes; begin another run with --fused'


def _in_one_process(arguments: argparse.Namespace, config: Any) -> Any:
  """Converts the config of a run of several processes to a fused run's where their packages are missing.

  Raises:
    ValueError: a flag asks for several processes; names it.
  """
  from hephaestus.launch import config as launch_config

  if packages.has_distributed():
    return config
  for key in SEVERAL:
    section, name = key.split('.')
    count = getattr(getattr(config, section), name)
    if count > 1 and sets(arguments, key):
      packages.check_distributed(f'{key}={count}', 'leave it out to train in one process (--fused)')
  if arguments.expose:
    packages.check_distributed('--expose', 'leave it out to train in one process (--fused)')
  print(f'one process, as with --fused: several need {packages.DISTRIBUTED}', flush=True)
  return launch_config.override(config, ['actor.num_actors=1', 'learner.fused=True'])


def sets(arguments: argparse.Namespace, key: str) -> bool:
  """Whether --set or --config gives a value for a config key, by path."""
  return any(each.startswith(f'{key}=') for each in arguments.set) or key in _file(arguments).values


def _file(arguments: argparse.Namespace) -> 'launch_config.ConfigFile':
  """Reads the file of --config, see `launch_config.read_partial`; an empty content where there is no such flag."""
  from hephaestus.launch import config as launch_config

  return launch_config.read_partial(getattr(arguments, 'config', None), arguments.agent)


def _values(file: 'launch_config.ConfigFile', config: Any) -> dict[str, Any]:
  """The values of a configuration file; if `config` has another environment, without `environment.*`."""
  if file.env in (None, config.environment['name']):
    return dict(file.values)
  return {key: value for key, value in file.values.items() if not key.startswith('environment.')}


def _config_to_resume(arguments: argparse.Namespace) -> Any:
  """The config of the run in the folder of --run.

  With --preset it is the config of that preset, but with environment, seed and limits of the folder's
  run, and fused if that is.

  Raises:
    ValueError: --agent or --env differs from the folder's, or there is no such preset.
  """
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.files import folder as folder_lib

  config = folder_lib.load_config(arguments.run)
  has = {'agent': config.agent_name, 'env': config.environment['name']}
  is_same = {
    'agent': lambda given: records.find_record(given).name == config.agent_name,
    'env': lambda given: given == config.environment['name'],
  }
  for name, known in has.items():
    given = getattr(arguments, name)
    if given is not None and not is_same[name](given):
      raise ValueError(
        f'--run {arguments.run}: was made with another configuration. --{name}: the folder has {known}, '
        f'you gave {given}. Leave out --{name} or give another folder'
      )
  if arguments.preset is None:
    return config
  agent = (
    arguments.agent or config.agent_name
  )  # `plain` is another name of the dreamer, with other sizes
  sized = launch_config.of_preset(agent, arguments.preset, has['env'])
  kept = ('environment', 'seed', 'max_environment_steps', 'max_minutes')
  sized = dataclasses.replace(sized, **{name: getattr(config, name) for name in kept})
  if not config.fused:
    return sized if not sized.fused else launch_config.override(sized, ['learner.fused=False'])
  return launch_config.override(sized, ['actor.num_actors=1', 'learner.fused=True'])


def _config_of_origin(arguments: argparse.Namespace) -> Any:
  """The config of the run of --from, with the environment of --env if given.

  Raises:
    ValueError: a flag does not go with --from, or there is no such run; names the flag or the folder.
  """
  from hephaestus.launch.files import folder as folder_lib

  if folder_lib.resumes(arguments.run):
    raise ValueError(
      f'--from {arguments.origin}: begins a new run, and --run {arguments.run} is one already; give a '
      'new folder, or leave out --from to resume'
    )
  for name in ('preset', 'agent'):
    if getattr(arguments, name) is not None:
      raise ValueError(
        f'--{name} {getattr(arguments, name)}: a run --from another has its agent and sizes; leave it '
        'out, and change the rest with --set'
      )
  config = folder_lib.load_config(parse_origin(arguments.origin)[0])
  if arguments.env is not None and arguments.env != config.environment['name']:
    config = dataclasses.replace(config, environment={'name': arguments.env})
  return config


def parse_origin(text: str) -> tuple[pathlib.Path, str | None]:
  """Splits RUN[@best|@STEP] into the run's folder and 'best' or STEP, None for the newest checkpoint."""
  folder, separator, which = text.rpartition('@')
  if not separator or pathlib.Path(text).is_dir():
    return pathlib.Path(text), None
  return pathlib.Path(folder), which


def preset_config(arguments: argparse.Namespace) -> Any:
  """Makes a config of the dreamer from --preset (default: laptop), --env (default: catch) and --set.

  Raises:
    ValueError: a flag is invalid; names it.
  """
  from hephaestus.launch import config as launch_config

  config = launch_config.of_preset(
    records.DREAMER, arguments.preset or 'laptop', arguments.env or 'catch'
  )
  return launch_config.override(config, arguments.set)
