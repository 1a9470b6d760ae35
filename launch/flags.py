"""Flags that commands share, and the config of the run that they ask for."""

import argparse
import pathlib
from typing import Any

from hephaestus.launch import records


def add_config_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags that `make_config` reads."""
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


def given_config_flags(arguments: argparse.Namespace) -> list[str]:
  """The config flags that were given, as words of a command, without the folder."""
  names = ('preset', 'env', 'agent', 'steps', 'seed')
  given = [(name, getattr(arguments, name)) for name in names]
  flags = [word for name, value in given if value is not None for word in (f'--{name}', str(value))]
  return flags + (['--set', *arguments.set] if arguments.set else [])


def make_config(arguments: argparse.Namespace) -> Any:
  """The config that the flags ask for: that of a preset, or of the run folder to resume.

  Raises:
    ValueError: naming the flag or key that is invalid.
  """
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.agents import presets
  from hephaestus.launch.run import folder as folder_lib

  folder = arguments.run
  config: launch_config.ExperimentConfig | None = None
  if folder is not None and (folder / folder_lib.CONFIG).exists():
    config = launch_config.load(folder / folder_lib.CONFIG)
    other_agent = arguments.agent not in (None, config.agent_name)
    if arguments.preset is not None or arguments.env is not None or other_agent:
      config = None  # `open_run` compares the new config with that of the folder
  if config is None:
    config = launch_config.of_preset(
      arguments.agent or records.DREAMER,
      arguments.preset or presets.default_preset(),
      arguments.env or 'catch',
    )
  overrides = list(arguments.set)
  if config.record.can_fuse:
    # Last, so that a run with actors is checked with all values together.
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
  config = launch_config.override(config, overrides)
  if arguments.reset_moments and not (config.fused and config.record.on_policy):
    raise ValueError('--reset-moments: is for fused runs of an on-policy agent; leave it out')
  if config.fused and config.actor.num_actors > 1:
    raise ValueError(
      f'actor.num_actors={config.actor.num_actors}: a fused run has no actors of its own; use 1, or '
      'add --no-fused'
    )
  return config


def preset_config(arguments: argparse.Namespace) -> Any:
  """The config of --preset, --env and --set; ValueError names the invalid flag."""
  from hephaestus.launch import config as launch_config

  config = launch_config.of_preset(
    records.DREAMER, arguments.preset or 'laptop', arguments.env or 'catch'
  )
  return launch_config.override(config, arguments.set)
