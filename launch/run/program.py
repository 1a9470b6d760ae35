"""A run as a Launchpad program: its nodes, their connections, and the command that runs each of them."""

import functools
import pathlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import launchpad as lp

from hephaestus.launch import config as launch_config
from hephaestus.launch.processes import watchdog
from hephaestus.launch.run import composition
from hephaestus.launch.run import nodes as nodes_lib
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import process_group
from hephaestus.replay import connection, tables

# Seconds that Launchpad gives a node before it kills it; the supervisor does so sooner.
TERMINATION_NOTICE = 24 * 3600


class _ReplayNode(lp.ReverbNode):
  """A node that runs `tables.make_server`, with checkpoints in `directory`; not Launchpad's own server."""

  def __init__(self, config: launch_config.ExperimentConfig, directory: str, exposed: bool):
    super().__init__(functools.partial(nodes_lib.build_tables, config))
    self._config = config
    self._directory = directory
    self._exposed = exposed

  def run(self) -> None:
    """Serves until the node is asked to stop."""
    address = self.reverb_address.resolve()
    _server = tables.make_server(  # it serves while it is referenced
      nodes_lib.build_tables(self._config),
      port=lp.get_port_from_address(address),
      directory=self._directory,
      exposed=self._exposed,
    )
    serve(lp.stop_event(), address, self._config.learner.stuck_seconds)
    raise SystemExit(process_group.ASKED)


class _Node:
  """A node that ends with `process_group.ASKED` if it was asked to stop, since then the run is not over."""

  def __init__(self, build: Callable[..., Any], *arguments: Any):
    self._node = build(*arguments)

  def run(self) -> None:
    self._node.run()
    if lp.stop_event().is_set():
      raise SystemExit(process_group.ASKED)


def serve(stop: threading.Event, address: str, stuck_seconds: float) -> None:
  """Waits, in the main thread, until a replay node is asked to stop; exits with code 1 if its server hangs.

  It hangs if it gives no answer at the port of `address` for `stuck_seconds`; 0: never.
  """
  answered = watchdog.watched(stop.is_set, stuck_seconds)
  period = stuck_seconds / 10
  local_address = f'127.0.0.1:{lp.get_port_from_address(address)}'
  while not stop.wait(period or None):
    if connection.answers(local_address, timeout_seconds=period):
      answered()


def make_program(launch: composition.Launch) -> lp.Program:
  """Makes the Launchpad program of a run, not yet bound to addresses: the nodes of `parts.nodes`, and `ENDING`."""
  config = launch.config
  program = lp.Program('hephaestus')
  replay: list[Any] = []

  def add(label: str, build: Callable[..., Any], *indices: int) -> None:
    program.add_node(lp.PyClassNode(_Node, build, launch, *indices, replay), label=label)

  for folder in parts_lib.replay_folders(launch.folder, config.replay.num_shards):
    node = _ReplayNode(config, folder, launch.exposed)
    replay.append(program.add_node(node, label=parts_lib.REPLAY))
  for rank in range(config.learner.num_processes):
    add(parts_lib.LEARNER, nodes_lib.build_learner, rank)
  for actor_id in range(config.actor.num_actors):
    add(parts_lib.ACTOR, nodes_lib.build_actor, actor_id)
  add(parts_lib.EVALUATOR, nodes_lib.build_evaluator)
  add(parts_lib.ENDING, nodes_lib.Ending)
  return program


class _StaticAddress(lp.AbstractAddressBuilder):
  """An address that is known before any node runs."""

  def __init__(self, address: str):
    self._address = address

  def build(self) -> str:
    return self._address


def commands(
  program: lp.Program, addresses: Sequence[str], scratch: pathlib.Path
) -> list[list[str]]:
  """Pickles the nodes of a program, and returns the command that runs each of them, in its order.

  Launchpad's own launcher neither restarts a node nor reports its end (docs/design.md), so its
  nodes are bound here, and their commands go to the supervisor of this project. Only the shards of
  replay listen, at `addresses`. The pickled nodes in `scratch` must exist as long as the run.
  """
  notice = (
    f'--lp_termination_notice_secs={TERMINATION_NOTICE}'  # as an option it would need absl's flags
  )
  for node in program.get_all_nodes():
    node.launch_context.initialize(lp.LaunchType.LOCAL_MULTI_PROCESSING, None)
  for node, address in zip(program.groups[parts_lib.REPLAY], addresses, strict=True):
    node.reverb_address.bind(_StaticAddress(address))
  result: list[list[str]] = []
  previous, tempfile.tempdir = tempfile.tempdir, str(scratch)
  try:
    for label, nodes in program.groups.items():
      executables = nodes[0].to_executables(nodes, label, nodes[0].launch_context)
      result += [[*command.command_as_list, notice] for command in executables]
  finally:
    tempfile.tempdir = previous
  return result
