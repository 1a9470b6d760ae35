"""Validates a run: what its flags and its config ask for, before anything is made. Imports no JAX at first.

`ExperimentConfig` itself refuses values that are impossible or contradict each other. Here is what more is known
from the flags (`validate`), and from this machine (`validate_here`). What only making or
compiling a part can show is checked by `preflight` and `fused`.
"""

from __future__ import annotations

import fractions
import importlib.util
import math
from typing import TYPE_CHECKING

from hephaestus.actors.environments import packages

if TYPE_CHECKING:
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.run import request as request_lib

# The packages of several processes, for a refusal.
DISTRIBUTED = f'the extra `distributed` ({packages.install("distributed")}, only for Python 3.10 on Linux x86-64)'
# Keys that ask for a run of several processes where they are above 1.
SEVERAL = ('actor.num_actors', 'learner.num_processes', 'replay.num_shards')
# Least updates that may suffice, by docs/results.md: PPO reached no target in at most 49 (it learned only
# grid worlds), and the dreamer learned nothing in 200 after its warm-up.
FEW_UPDATES = {'on_policy': 50, 'off_policy': 200}


def validate(request: request_lib.TrainRequest, config: launch_config.ExperimentConfig) -> None:
  """Raises ValueError, which names flag or key and a remedy, if they cannot make a run on any machine."""
  from hephaestus.actors import environments
  from hephaestus.actors.environments import names

  environments.check_name(config.environment['name'])
  if config.logger is not None:
    names.resolve(config.logger, {}, field='logger', kind='logger')
  record, fused = config.record, config.fused
  if request.fused and not record.can_fuse:
    raise ValueError(
      f'--fused: {config.agent_name} runs with actors of its own; leave it out, or give another --agent'
    )
  for key, count, lacks in (
    ('actor.num_actors', config.actor.num_actors, 'actors of its own'),
    ('replay.num_shards', config.replay.num_shards, 'servers of replay'),
  ):
    if fused and count > 1:
      raise ValueError(f'{key}={count}: a fused run has no {lacks}; use 1, or add --no-fused')
  if fused and request.expose:
    raise ValueError('--expose: a fused run listens at no port; leave it out, or add --no-fused')


def validate_here(
  request: request_lib.TrainRequest, config: launch_config.ExperimentConfig
) -> list[str]:
  """Validates a run for this machine; ValueError as `validate`.

  Returns lines to print: that an accelerator is not used, and the number of updates.
  """
  from hephaestus.launch.agents import machine

  if config.wandb.enabled:
    from hephaestus.launch.files import metrics  # which imports TensorBoard's writer

    metrics.check_wandb()
  here = machine.find()
  if config.fused or config.learner.num_processes == 1:  # several are for tests, on the CPU
    machine.check(config, here)
  if not config.fused:
    check_distributed(*_asks_for_several(request, config))
  lines = [f'{here.lack}. Training on the CPU'] if here.lack and not config.accelerator else []
  lines.append(check_budget(config))
  return lines


def has_distributed() -> bool:
  """Whether the packages that a run of several processes needs are installed; imports none of them."""
  return all(importlib.util.find_spec(name) for name in ('launchpad', 'portpicker', 'reverb'))


def check_distributed(name: str, remedy: str) -> None:
  """Raises ValueError, from `name`, what needs them, to a `remedy`, unless these packages are installed."""
  if not has_distributed():
    raise ValueError(f'{name}: needs {DISTRIBUTED}; {remedy}')


def asked_for_several(
  request: request_lib.TrainRequest, config: launch_config.ExperimentConfig
) -> list[str]:
  """Flags and assignments of a request that only a run of several processes has."""
  found = []
  for key in SEVERAL:
    section, name = key.split('.')
    count = getattr(getattr(config, section), name)
    if count > 1 and request.sets(key):
      found.append(f'{key}={count}')
  return found + ['--expose'] * request.expose


def _asks_for_several(
  request: request_lib.TrainRequest, config: launch_config.ExperimentConfig
) -> tuple[str, str]:
  """What asks for several processes, and how to train in one."""
  if request.says_fused:
    return '--no-fused', 'train in one process with --fused'
  if not config.record.can_fuse:
    return (
      f'--agent {config.agent_name}',
      'agents that train in one process are dreamer, plain and ppo',
    )
  for asked in asked_for_several(request, config):
    return asked, 'leave it out to train in one process (--fused)'
  return f'--run {request.run}', 'it has several processes; begin another run with --fused'


def check_budget(config: launch_config.ExperimentConfig) -> str:
  """Returns a line to print: how many updates the steps of a run are, and whether that is too few.

  ValueError if the run would end before its first update.
  """
  updates, steps = num_updates(config), config.max_environment_steps
  if config.record.on_policy:
    enough, more = FEW_UPDATES['on_policy'], 'less actor.num_envs'
  else:
    if not updates:
      least = config.replay.warm_up + math.ceil(1 / _updates_per_sequence(config))
      raise ValueError(
        f'max_environment_steps={steps}: the run would end before its first update; use at least '
        f'{least * config.steps_per_sequence}, or less replay.warm_up'
      )
    enough = getattr(config.agent, 'warm_up_updates', 0) + FEW_UPDATES['off_policy']
    more = 'more replay.replay_ratio'
  count = f'{updates:,} update{"s" * (updates != 1)}'
  line = f'{steps:,} steps are {count} of {config.agent_name}'
  return line if updates >= enough else f'{line}: too few to learn; give more --steps, or {more}'


def num_updates(config: launch_config.ExperimentConfig) -> int:
  """Number of updates of a whole run; with several processes, as its replay ratio is meant."""
  per_unroll = config.actor.num_envs * config.actor.num_actors
  unrolls = math.ceil(config.max_environment_steps / (per_unroll * config.steps_per_sequence))
  sequences = per_unroll * unrolls
  if config.record.on_policy:
    return math.ceil(sequences / config.batch_size)
  return math.floor(max(0, sequences - config.replay.warm_up) * _updates_per_sequence(config))


def _updates_per_sequence(config: launch_config.ExperimentConfig) -> fractions.Fraction:
  from hephaestus.replay import buffer

  return buffer.updates_per_sequence(config.replay, config.batch_size)
