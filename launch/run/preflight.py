"""Checks before anything starts: environment, steps, addresses and the updates to profile."""

import math
import pathlib
import shutil
import socket

import jax
import psutil

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host, wrappers
from hephaestus.launch import config as launch_config
from hephaestus.launch.files import metrics
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import variables
from hephaestus.learner import checkpoint, process
from hephaestus.learner import profile as profile_lib
from hephaestus.replay import buffer, loopback, tables

# Least updates that may suffice, by docs/results.md: PPO reached no target in at most 49 (it learned only
# grid worlds), and the dreamer learned nothing in 200 after its warm-up.
FEW_UPDATES = {'on_policy': 50, 'off_policy': 200}


def check_environment(config: launch_config.ExperimentConfig) -> list[str]:
  """Makes the environment of a run once and checks the values that it emits.

  Unless a fused run may use an accelerator, it restricts JAX in this process to the CPU.

  Returns:
    A line for each warning.

  Raises:
    ValueError: the environment is unknown, or breaks its specs.
  """
  process.prepare()
  if not config.accelerator or not config.fused:
    jax.config.update('jax_platforms', 'cpu')  # an accelerator is the learner's, not the launcher's
  # Compilation takes most of the time, and is the same at every start.
  variables.keep_compiled()
  environment = config.make_environment()
  name = config.environment['name']
  try:
    found = check_values(environment, config.seed)
  except ValueError as error:
    raise ValueError(f'environment.name={name!r}: {error}') from error
  return [f'environment.name={name}: {warning}' for warning in found]


def check_values(environment: environment_lib.Environment, seed: int) -> list[str]:
  """Checks the values that an environment emits in some steps; returns a line for each warning.

  Raises:
    ValueError: the environment breaks its specs.
  """
  if isinstance(environment, host.HostEnvironment):
    return host.check_values(environment, seed)
  return wrappers.check_values(environment, jax.random.key(seed))


def check_budget(config: launch_config.ExperimentConfig) -> str:
  """Returns a line to print: how many updates the steps of a run are, and whether that is too few.

  ValueError if the run would end before its first update.
  """
  updates, steps = num_updates(config), config.max_environment_steps
  if config.record.on_policy:
    enough, more = FEW_UPDATES['on_policy'], 'less actor.num_envs'
  else:
    if not updates:
      rate = buffer.updates_per_sequence(config.replay, config.batch_size)
      least = (config.replay.warm_up + math.ceil(1 / rate)) * config.steps_per_sequence
      raise ValueError(
        f'max_environment_steps={steps}: the run would end before its first update; use at least {least}, '
        'or less replay.warm_up'
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
  rate = buffer.updates_per_sequence(config.replay, config.batch_size)
  return math.floor(max(0, sequences - config.replay.warm_up) * rate)


def check_checkpoint(config: launch_config.ExperimentConfig, folder: pathlib.Path) -> None:
  """Raises ValueError if the run's newest checkpoint has other arrays than its config asks for."""
  if (folder / 'checkpoints').exists():
    parts_lib.saved_train(folder, parts_lib.saved_shapes(config))


def warnings(config: launch_config.ExperimentConfig) -> list[str]:
  """Lines to print when the run starts, from `AgentRecord.warnings`."""
  name = config.environment['name']
  found = config.record.warnings(parts_lib.make_parts(config).trained)
  return [f'environment.name={name}: {line}' for line in found]


def replay_bytes(config: launch_config.ExperimentConfig) -> int:
  """Bytes of memory that all of replay takes once its strata are full, if nothing compresses."""
  return tables.nbytes(config.replay, parts_lib.make_parts(config).sequence_schema)


def memory() -> int:
  """Bytes of memory of this machine, or the limit of its container if that is less."""
  limit = pathlib.Path('/sys/fs/cgroup/memory.max')
  text = limit.read_text().strip() if limit.exists() else 'max'
  total = psutil.virtual_memory().total
  return min(total, int(text)) if text.isdigit() else total


def check_profile(
  profile: profile_lib.Span, config: launch_config.ExperimentConfig, folder: pathlib.Path
) -> None:
  """Checks that a run will do the updates to trace, as far as its folder shows, which need not exist.

  Raises:
    ValueError: the run ends before the first of these updates, or resumes after it.
  """
  text = f'--profile {profile.start}:{profile.stop}'
  done = max(checkpoint.saved_steps(folder / 'checkpoints'), default=0)
  if profile.start < done:
    raise ValueError(f'{text}: the run resumes from update {done:,}; begin there or later')
  newest = metrics.last(folder / 'metrics' / 'learner.jsonl') or {}
  missing = max(0, config.max_environment_steps - int(newest.get('environment_step') or 0))
  if not config.record.on_policy:
    warm_up = 0 if newest else config.replay.warm_up * config.steps_per_sequence
    missing = math.ceil(config.replay.replay_ratio * max(0, missing - warm_up))
  most = int(newest.get('learner_step', 0)) - (
    -missing // (config.batch_size * config.steps_per_sequence)
  )
  if profile.start >= most:
    raise ValueError(
      f'{text}: the run ends after about {most:,} updates; begin earlier, or give it more --steps'
    )


def prepare_profile(
  profile: profile_lib.Span, config: launch_config.ExperimentConfig, folder: pathlib.Path
) -> None:
  """Checks as `check_profile`, and then deletes an older trace of the same updates."""
  check_profile(profile, config, folder)
  shutil.rmtree(profile.folder(folder), ignore_errors=True)


def reach(exposed: bool) -> tuple[bool, str]:
  """Decides whether replay on this host is exposed to other machines.

  Args:
    exposed: whether the user wants it to be. If the system cannot restrict the port to this machine,
      replay is exposed anyway.

  Returns:
    Whether replay will be exposed, and a description of who can reach it.
  """
  refusal = '' if exposed else loopback.refusal()
  if not exposed and not refusal:
    return False, 'reachable from this machine only'
  why = f' (this system cannot restrict it: {refusal})' if refusal else ''
  return True, f'reachable without a password from every machine that reaches this one{why}'


def check_listening(host: str, port: int, refusal: str) -> None:
  """Raises ValueError if nothing can listen at this port of this machine, with `refusal` around the reason.

  Args:
    host: address to listen at, '::' for all.
    port: port to listen at.
    refusal: message, with {} for the reason.
  """
  with socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET) as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind((host, port))
    except OSError as error:
      raise ValueError(refusal.format(error.strerror)) from None


def coordinator_reach(address: str) -> str:
  """Describes who can reach the learner's first process at HOST:PORT."""
  if address.startswith('127.'):
    return 'reachable from this machine only'
  return (
    'reachable without a password from every machine that reaches that address; so are the ports '
    'that the learner chooses freely when it learns on CPUs'
  )
