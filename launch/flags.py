"""The flags that make the config of a run, and that config, for the commands that need one."""

import argparse
import pathlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports JAX, which parsing a command line can do without
  from hephaestus.launch import config as launch_config


def add_config_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags that `make_config` reads."""
  parser.add_argument(
    '--preset', help='sizes: laptop, gpu or tpu-v4-8 (default: by the accelerator of this machine)'
  )
  parser.add_argument(
    '--env',
    help='an environment of `hephaestus environments`, or package.module:Class (default: catch)',
  )
  parser.add_argument(
    '--agent',
    choices=['dreamer', 'plain', 'ppo'],
    help="default: dreamer; plain is DreamerV3's configuration of it, a baseline",
  )
  parser.add_argument('--run', type=pathlib.Path, help='folder of the run (default: a new one)')
  parser.add_argument('--steps', type=int, help='environment steps to collect in total')
  parser.add_argument('--seed', type=int, help='random seed of the whole run (default: 0)')
  parser.add_argument(
    '--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE', help='override the config'
  )


def add_profile_flag(parser: argparse.ArgumentParser) -> None:
  """Adds --profile."""
  parser.add_argument(
    '--profile',
    metavar='START:STOP',
    help='trace these updates of the learner, and an actor meanwhile; such as 100:110',
  )


def config_flags(arguments: argparse.Namespace) -> list[str]:
  """The config flags that were given, except --run, as words of a command line."""
  names = ('preset', 'env', 'agent', 'steps', 'seed')
  given = [(name, getattr(arguments, name)) for name in names]
  flags = [word for name, value in given if value is not None for word in (f'--{name}', str(value))]
  return flags + (['--set', *arguments.set] if arguments.set else [])


def make_config(arguments: argparse.Namespace) -> 'launch_config.ExperimentConfig':
  """The config that the flags ask for: that of a preset, or of the run folder to resume.

  Raises:
    ValueError: naming the flag or key that cannot work.
  """
  from hephaestus.launch import config as launch_config

  config = _base_config(arguments)
  overrides = list(arguments.set)
  if config.agent_name == 'ppo':
    # Last, so that a run with actors is checked with all values together.
    overrides += [] if arguments.fused is None else [f'learner.fused={arguments.fused}']
  elif arguments.fused:
    raise ValueError('--fused: the dreamer learns from replay; leave it out, or add --agent ppo')
  if arguments.steps is not None:
    overrides.append(f'max_environment_steps={arguments.steps}')
  if arguments.seed is not None:
    overrides.append(f'seed={arguments.seed}')
  config = launch_config.override(config, overrides)
  if arguments.reset_moments and not config.fused:
    raise ValueError('--reset-moments: is for fused runs of ppo; leave it out')
  if config.fused and config.actor.num_actors > 1:
    raise ValueError(
      f'actor.num_actors={config.actor.num_actors}: a fused run has no actors of its own; use 1, or '
      'add --no-fused'
    )
  return config


def _base_config(arguments: argparse.Namespace) -> 'launch_config.ExperimentConfig':
  """The config before overrides."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch import presets
  from hephaestus.launch.run import local

  folder = arguments.run
  if folder is not None and (folder / local.CONFIG).exists():
    config = launch_config.load(folder / local.CONFIG)
    other_agent = arguments.agent not in (None, config.agent_name)
    if arguments.preset is None and arguments.env is None and not other_agent:
      return config
    # Otherwise the flags make a config, and `open_run` compares it with that of the folder.
  return preset_config(
    arguments.preset or presets.default_preset(), arguments.env, arguments.agent or 'dreamer'
  )


def preset_config(
  preset: str, environment: str | None, agent: str = 'dreamer'
) -> 'launch_config.ExperimentConfig':
  """The config of a preset; ValueError where there is no such preset or environment.

  Args:
    preset: its name.
    environment: its name; None for catch.
    agent: as of --agent.
  """
  from hephaestus.launch import presets

  if preset not in presets.PRESETS:
    raise ValueError(f'--preset {preset}: choose one of {", ".join(presets.PRESETS)}')
  return presets.AGENTS[agent][preset](environment or 'catch')


def check_environment(config: 'launch_config.ExperimentConfig') -> None:
  """Raises ValueError for an environment that is unknown or unfit for training.

  It is called before anything is written.
  """
  import jax

  from hephaestus.actors.environments import host, wrappers
  from hephaestus.launch.run import local

  if not config.accelerator or not config.fused:
    jax.config.update('jax_platforms', 'cpu')  # an accelerator is the learner's, not the launcher's
  # Compiling is most of the time this takes, and the same at every start.
  jax.config.update('jax_compilation_cache_dir', local.COMMON['JAX_COMPILATION_CACHE_DIR'])
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  environment = config.make_environment()
  if isinstance(environment, host.HostEnvironment):  # its constructor has taken a step
    if config.fused:
      raise ValueError(f'environment.name={config.environment["name"]!r}: {host.REFUSAL}')
    return
  try:
    wrappers.check_values(environment, jax.random.key(config.seed))
  except ValueError as error:
    raise ValueError(f'environment.name={config.environment["name"]!r}: {error}') from error


def new_folder(config: 'launch_config.ExperimentConfig') -> pathlib.Path:
  """A run folder named after the environment and the time."""
  name = config.environment['name'].replace('/', '-').replace(':', '-')
  return pathlib.Path('runs') / f'{name}-{time.strftime("%Y%m%d-%H%M%S")}'
