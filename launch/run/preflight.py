"""Checks that make a part of a run: environment, agent, checkpoint and addresses; see also `validation`."""

import pathlib
import socket

import jax
import psutil

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host, wrappers
from hephaestus.launch import config as launch_config
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import variables
from hephaestus.learner import process
from hephaestus.replay import loopback, tables


def check_environment(config: launch_config.ExperimentConfig) -> list[str]:
  """Makes environment and agent of a run once, and checks the values that the environment emits.

  Unless a fused run may use an accelerator, it restricts JAX in this process to the CPU. ValueError if the
  environment is unknown or breaks its specs, or the agent does not support these.

  Returns:
    A line for each warning, of the agent or the environment.
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
  except host.Failure:  # which names it
    raise
  except ValueError as error:
    raise ValueError(f'environment.name={name!r}: {error}') from error
  found = [*config.record.warnings(parts_lib.make_parts(config).trained), *found]
  return [f'environment.name={name}: {warning}' for warning in found]


def check_values(environment: environment_lib.Environment, seed: int) -> list[str]:
  """A line for each warning about the values that an environment emits; ValueError if it breaks its specs."""
  if isinstance(environment, host.HostEnvironment):
    return host.check_values(environment, seed)
  return wrappers.check_values(environment, jax.random.key(seed))


def replay_bytes(config: launch_config.ExperimentConfig) -> int:
  """Bytes of memory that all of replay takes once its strata are full, if nothing compresses."""
  return tables.nbytes(config.replay, parts_lib.make_parts(config).sequence_schema)


def memory() -> int:
  """Bytes of memory of this machine, or the limit of its container if that is less."""
  limit = pathlib.Path('/sys/fs/cgroup/memory.max')
  text = limit.read_text().strip() if limit.exists() else 'max'
  total = psutil.virtual_memory().total
  return min(total, int(text)) if text.isdigit() else total


def reach(exposed: bool) -> str:
  """Describes who can reach replay on this host.

  ValueError if it should not be `exposed` and the system cannot restrict the port to this machine.
  """
  if exposed:
    return 'reachable without a password from every machine that reaches this one'
  if refusal := loopback.refusal():
    raise ValueError(
      f"replay's port cannot be restricted to this machine ({refusal}); add --expose, or leave tunnel out "
      'of a hosts file, to let every machine that reaches this one use it; --fused has no port'
    )
  return 'reachable from this machine only'


def check_listening(host: str, port: int, refusal: str) -> None:
  """Raises ValueError, `refusal` with the reason for {}, if nothing can listen at this port here."""
  with socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET) as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind((host, port))
    except OSError as error:
      raise ValueError(refusal.format(error.strerror)) from None


def coordinator_reach(address: str) -> str:
  """Describes who can reach the learner's first process at an address."""
  if address.startswith('127.'):
    return 'reachable from this machine only'
  return (
    'reachable without a password from every machine that reaches that address; so are the ports '
    'that the learner chooses freely when it learns on CPUs'
  )
