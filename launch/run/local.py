"""Runs the nodes of a run on this machine, all or a host's share of them, under the supervisor."""

import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

import portpicker
import psutil

from hephaestus.actors.environments import host
from hephaestus.launch import config as launch_config
from hephaestus.launch import user_errors
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import fork_server, supervisor
from hephaestus.launch.run import composition, preflight, variables
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import progress as progress_lib
from hephaestus.learner import process_group
from hephaestus.learner import profile as profile_lib
from hephaestus.replay import checkpoint as replay_checkpoint
from hephaestus.replay import connection

STOPPED = process_group.ASKED  # the exit code of a host's share that was asked to stop
# For the learner's last checkpoint, and for that of replay by its size: a third of what Reverb writes when quiet.
LAST_SAVE_SECONDS, SAVED_BYTES_PER_SECOND = 60.0, 1e7
DRAIN_SECONDS = 3.0  # without a connection after which replay stops: a restarting node reconnects
MAX_DRAIN_SECONDS = 60.0  # that replay waits for the connections of other hosts to end


class Share(NamedTuple):
  """The nodes of a run on this host; `launch_id` and `coordinator` are as of `Launch`."""

  nodes: Sequence[str]  # their names, as in `program.commands`
  addresses: Sequence[str]  # HOST:PORT of each shard of replay, as this host reaches it
  launch_id: int
  on_tick: Callable[[], None] | None  # called about twice a second; None in a run on one host
  coordinator: str | None


def whole(config: launch_config.ExperimentConfig) -> Share:
  """All nodes of a run, at ports of this host that are free, or that follow `replay.port`."""
  first, free = config.replay.port, portpicker.pick_unused_port
  shards = range(config.replay.num_shards)
  return Share(
    nodes=parts_lib.nodes(config),
    addresses=[f'127.0.0.1:{free() if first is None else first + shard}' for shard in shards],
    launch_id=time.time_ns(),
    on_tick=None,
    coordinator=f'127.0.0.1:{free()}' if config.learner.num_processes > 1 else None,
  )


def train(
  config: launch_config.ExperimentConfig,
  folder: pathlib.Path,
  forks: fork_server.ForkServer | None = None,
  share: Share | None = None,
  *,
  exposed: bool = False,
  profile: profile_lib.Span | None = None,
) -> int:
  """Runs all nodes, or a host's share of them, until the run ends, is interrupted or fails.

  Args:
    forks: forks the nodes; None: each node is a new program, which imports everything itself.
    share: nodes of this host, in a run on several; None for `whole`.
    exposed, profile: as of `Launch`.

  Returns:
    The exit code: 0 when finished or stopped in order by SIGTERM (130 by Ctrl-C, `STOPPED` for a
    stopped share), 1 when a node failed for good or the learner's last checkpoint failed.

  Raises:
    ValueError: another launcher has locked the folder, or a port or an address cannot be used.
  """
  with folder_lib.only_one(folder):
    if share is None and config.learner.num_processes > 1:
      # One process owns all accelerators of a machine; several on one machine are for tests.
      config = dataclasses.replace(config, accelerator=False)
    share = share or whole(config)
    shards = parts_lib.replay_names(config.replay.num_shards)
    here = [shard for shard, name in enumerate(shards) if name in share.nodes]
    _announce(config, share, here, exposed)
    if not share.on_tick:  # else the launcher of all hosts has written it
      launch_config.save(config, folder / folder_lib.CONFIG)  # which nothing refuses from here on
    launch = composition.Launch(
      config=config,
      folder=folder,
      profile=profile,
      launch_id=share.launch_id,
      shards_here=here,
      exposed=exposed,
      coordinator=share.coordinator,
    )
    (folder / folder_lib.ADDRESS).write_text('\n'.join(share.addresses))
    with _commands(launch, share) as commands:
      watcher = _Watcher(launch, share)
      learners, replay = watcher.learners, watcher.replay
      others = [name for name in commands if name not in (*learners, *replay)]
      learning = [name for name in commands if name in learners]
      peers = connection.without_proxy([*share.addresses, *filter(None, [share.coordinator])])
      external = process_group.PEER_GONE if len(learners) > 1 else frozenset()
      outcome = supervisor.Supervisor(
        [
          supervisor.Process(
            name,
            command,
            variables.of_node(name, config) | peers,
            watcher.log(name),
            external_exit_codes=external if name in learners else frozenset(),
          )
          for name, command in commands.items()
        ],
        is_over=watcher.is_over,
        restarts=supervisor.Restarts(together=learning),
        # Actors first: nothing is inserted after the last checkpoints, which the learner asks for.
        groups=[
          (others, 3.0),
          (learning, lambda: LAST_SAVE_SECONDS + _size(launch, here) / SAVED_BYTES_PER_SECOND),
          ([name for name in commands if name in replay], 2.0),
        ],
        on_signal=lambda: watcher.progress.say(folder_lib.STOPPING),
        on_event=watcher.on_event,
        on_tick=watcher.on_tick,
        forks=forks,
      ).run()
  watcher.progress.end()
  if profile is not None and {learners[0], f'{parts_lib.ACTOR}-0'} & commands.keys():
    print(profile_lib.report(profile, folder), flush=True)
  code = watcher.report(outcome)
  if code is not None:
    return code
  if outcome.interrupted or parts_lib.EVALUATOR in commands:
    return progress_lib.farewell(folder, config, outcome.interrupted)
  print('done')
  return 0


def _announce(
  config: launch_config.ExperimentConfig, share: Share, shards: Sequence[int], exposed: bool
) -> None:
  """Checks and prints the ports at which these shards of replay, and a learner, will listen on this host.

  ValueError if a port or an address cannot be used, or is not to be `exposed` and cannot be restricted.
  """
  reach = preflight.reach(exposed) if shards else ''
  for shard in shards:
    port = _port_of(share.addresses[shard])
    refusal = f'replay.port={port}: cannot be used ({{}}); give another, or null for a free one'
    preflight.check_listening('::', port, refusal)
    name = parts_lib.replay_names(len(share.addresses))[shard]
    print(f'{name} listens at port {port}: {reach}', flush=True)
  learner = parts_lib.learners(config.learner.num_processes)[0]
  if share.coordinator is not None and learner in share.nodes:
    address, port = share.coordinator.rpartition(':')[0], _port_of(share.coordinator)
    refusal = 'cannot be used on this host ({}); give one of its own addresses, and a free port'
    keys = f'learner.address={address}, learner.port={port}'
    preflight.check_listening(address, port, f'{keys}: {refusal}')
    print(
      f'{learner} listens at {share.coordinator}: {preflight.coordinator_reach(address)}',
      flush=True,
    )


@contextlib.contextmanager
def _commands(launch: composition.Launch, share: Share) -> Iterator[dict[str, Sequence[str]]]:
  """Yields node name -> command, for this host's nodes; the pickled nodes exist while it is entered."""
  from hephaestus.launch.run import program  # Launchpad, Reverb and TensorFlow take seconds

  scratch = launch.folder / 'nodes'
  shutil.rmtree(scratch, ignore_errors=True)
  scratch.mkdir(mode=0o700)  # pickles are code: nobody else may write them
  topology = program.make_program(dataclasses.replace(launch, folder=launch.folder.resolve()))
  commands = program.commands(topology, share.addresses, scratch)
  known = dict(zip([*parts_lib.nodes(launch.config), parts_lib.ENDING], commands, strict=True))
  yield {name: known[name] for name in share.nodes}
  shutil.rmtree(scratch, ignore_errors=True)


class _Watcher:
  """Shows and records the events of the supervisor, and decides when the run is over.

  `replay` and `learners` are names of all nodes of replay and of the learner, also on other hosts.
  """

  def __init__(self, launch: composition.Launch, share: Share):
    config, nodes, self._launch, self._share = launch.config, share.nodes, launch, share
    self.replay = parts_lib.replay_names(config.replay.num_shards)
    self.learners = parts_lib.learners(config.learner.num_processes)
    ending = (*self.learners, parts_lib.EVALUATOR, parts_lib.ENDING)
    self._ends = {name for name in nodes if name in ending}
    self._events = metrics.JsonLines(launch.folder / 'metrics' / 'events.jsonl')
    self.progress = progress_lib.make(config, launch.folder, nodes)
    if isinstance(config.make_environment(), host.HostEnvironment):
      self.progress.say(host.SLOW)
    self._warnings: progress_lib.Warnings | None = None
    if self.learners[0] in nodes:
      self._warnings = progress_lib.Warnings(config, launch.folder, self._events, self.progress.say)
    self._is_drained: Callable[[], bool] = lambda: True
    if share.on_tick and launch.shards_here:
      self._is_drained = Drain([_port_of(share.addresses[each]) for each in launch.shards_here])
    self._failed_late: str | None = None  # learner process that failed last, not restarted since

  def log(self, name: str) -> pathlib.Path:
    """Path of the log of a node."""
    return self._launch.folder / 'logs' / f'{name}.log'

  def on_event(self, event: supervisor.Event) -> None:
    """Records an event, shows a restart, and remembers a learner that failed."""
    self._events.write(event._asdict())
    if event.kind == 'restarting':
      reason = user_errors.logged(self.log(event.name))
      self.progress.say(
        f'{event.name} exited with code {event.exit_code}{"" if reason is None else f": {reason}"}; '
        f'restart {event.restarts + 1} in {event.delay_seconds:.1f} s'
      )
    is_end = event.kind in ('exited', 'killed') and event.exit_code not in (0, STOPPED)
    if is_end and event.name in self.learners:
      self._failed_late = event.name
    if event.kind == 'started' and event.name == self._failed_late:
      self._failed_late = None

  def on_tick(self) -> None:
    """Updates progress and warnings; a host without the learner also keeps replay's newest checkpoints."""
    self.progress.tick()
    if self._warnings is not None:
      self._warnings.tick()
    if self._share.on_tick is None:
      return
    self._share.on_tick()
    if self._warnings is None:
      folders = parts_lib.replay_folders(self._launch.folder, len(self.replay))
      for shard in self._launch.shards_here:
        replay_checkpoint.keep(folders[shard])

  def is_over(self, finished: Set[str]) -> bool:
    """Whether the nodes that end the run have finished, and nobody needs replay; see `Drain`."""
    # On a host with only actors, the first one that finishes ends this host's part of the run.
    is_finished = finished >= self._ends if self._ends else bool(finished)
    return is_finished and self._is_drained()

  def report(self, outcome: supervisor.Outcome) -> int | None:
    """Prints why a run, or a stopped share of one, ended early; returns the exit code, None if it did not."""
    if outcome.failed is not None:
      log = self.log(outcome.failed)
      reason = user_errors.logged(log)
      print(f'{outcome.failed} failed again and again (last exit code {outcome.failed_exit_code}):')
      for line in outcome.last_lines if reason is None else [reason]:
        print(f'  {line}')
      print(f'the whole log: {log}')
      return 1
    if self._failed_late is not None:
      print(
        'the learner did not end in order: its last checkpoint, or that of replay, may be missing; see '
        f'{self.log(self._failed_late)}'
      )
      return 1
    if outcome.interrupted and self._share.on_tick:
      print('stopped')
      return STOPPED
    return None


class Drain:
  """Tells whether replay may stop: other hosts disconnect once they have seen the end of the run.

  A call returns True after `DRAIN_SECONDS` without a connection to the ports of replay here. From
  `MAX_DRAIN_SECONDS` after the first call on, connections are ignored.
  """

  def __init__(self, ports: Sequence[int]):
    self._ports = ports
    self._asked = self._first = self._connected = 0.0

  def __call__(self) -> bool:
    now = time.monotonic()
    if now - self._asked > 0.5:
      self._asked = now
      self._first = self._first or now
      is_connected = any(
        each.status == psutil.CONN_ESTABLISHED and each.laddr and each.laddr[1] in self._ports
        for each in psutil.net_connections('tcp')
      )
      if now - self._first < MAX_DRAIN_SECONDS and is_connected:
        self._connected = now
    return now - max(self._first, self._connected) > DRAIN_SECONDS


def _size(launch: composition.Launch, shards: Sequence[int]) -> int:
  """Bytes of the newest complete checkpoints of these shards of replay."""
  folders = parts_lib.replay_folders(launch.folder, launch.config.replay.num_shards)
  return sum(replay_checkpoint.size(folders[shard]) for shard in shards)


def _port_of(address: str) -> int:
  return int(address.rsplit(':', 1)[1])
