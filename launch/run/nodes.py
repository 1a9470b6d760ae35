"""The nodes of a run, each built in its own process from the config and clients of replay.

Actors and the learner communicate only through replay, so any node may crash and be restarted.
"""

import atexit
import pathlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import launchpad as lp

from hephaestus.actors import actor, evaluator
from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import watchdog
from hephaestus.launch.run import composition, progress
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import loop, process
from hephaestus.learner import process_group as process_group_lib
from hephaestus.learner import profile as profile_lib
from hephaestus.learner.sources import collected as collected_lib
from hephaestus.learner.sources import on_policy, replayed, sampled
from hephaestus.learner.sources import staleness as staleness_lib
from hephaestus.replay import checkpoint as replay_checkpoint
from hephaestus.replay import connection, parameters, reader, tables, writer

if TYPE_CHECKING:
  import reverb

Clients = Sequence['reverb.Client']  # of all shards of replay


def _stop_signal(config: launch_config.ExperimentConfig) -> Callable[[], bool]:
  """Whether this node was asked to stop; `watchdog` ends the node if it stops asking."""
  _end_quietly()
  return watchdog.watched(lp.stop_event().is_set, config.learner.stuck_seconds)


def _end_quietly() -> None:
  """Lets a stopping node end with its own exit code.

  Launchpad sends SIGALRM every second after SIGTERM. It would kill the node once Python no longer
  handles signals, and make its orderly end look like a crash.
  """
  atexit.register(signal.signal, signal.SIGALRM, signal.SIG_IGN)


def _addresses(replay: Clients) -> list[str]:
  return [client.server_address for client in replay]


def _collected(
  config: launch_config.ExperimentConfig,
  replay: Clients,
  name: str,
  file: pathlib.Path | None = None,
) -> collected_lib.Collected:
  """Makes a node's counter of the run's environment steps, whose counts outlive a restart in a `file`."""
  return collected_lib.Collected(
    _addresses(replay),
    name,
    stratum=config.replay.limiting_stratum.name,
    steps_per_sequence=config.steps_per_sequence,
    timeout_seconds=config.replay.timeout_seconds,
    file=file,
  )


def _params_source(
  parts: parts_lib.Parts, run: pathlib.Path, replay: Clients, name: str
) -> parameters.Subscription:
  """Subscribes a node to acting parameters; its `environment_step` begins with that in the node's metrics."""
  row = metrics.last(run / 'metrics' / f'{name}.jsonl') or {}
  return parameters.Subscription(
    _addresses(replay),
    parts.params_schema,
    name=name,
    least_step=row.get('environment_step') or 0,
  )


def _replay_saver(replay: Clients, folders: Sequence[str | None]) -> Callable[[], Any]:
  """Makes a function that has every shard of replay write its checkpoint; RuntimeError if one failed.

  In the folder of a shard the newest checkpoint is kept; a shard of another host has None, and keeps its own.
  """
  links = connection.connect(_addresses(replay), parts_lib.LEARNER)

  def save() -> None:
    errors = []
    for link, client, folder in zip(links, replay, folders, strict=True):
      try:
        if link.probe(1.0) is None:  # its checkpoint would block
          raise RuntimeError(f'the replay server at {link.address} does not answer')
        client.checkpoint() if folder is None else replay_checkpoint.save(client, folder)
      except (RuntimeError, OSError) as error:
        errors.append(str(error))
    if errors:
      raise RuntimeError('; '.join(errors))

  return save


def build_tables(config: launch_config.ExperimentConfig) -> list['reverb.Table']:
  """Makes the Reverb tables of a replay node; called in that node's process."""
  _end_quietly()
  parts = parts_lib.make_parts(config)
  return tables.make_tables(
    config.replay,
    parts.sequence_schema,
    batch_size=config.batch_size,
    insert_size=config.actor.num_envs * config.actor.num_actors,
  )


def build_learner(launch: composition.Launch, rank: int, replay: Clients) -> loop.Loop:
  """Makes the learner node, or the process `rank` of a learner that has several.

  ValueError if the newest checkpoint is of another config, or a batch does not divide over the devices;
  RuntimeError if the processes of a learner that has several do not find each other.
  """
  process.prepare()
  config = launch.config
  should_stop = _stop_signal(config)
  group: process_group_lib.Group = process_group_lib.ONE_PROCESS
  if launch.coordinator is not None:  # before any array is made
    group = process_group_lib.ProcessGroup(
      launch.coordinator, rank, config.learner.num_processes, should_stop=should_stop
    )
  parts, address = parts_lib.make_parts(config), _addresses(replay)
  trained = sampled.Trained(
    config.record.make_update(config, parts.trained, num_devices=jax.device_count()),
    parts.agent.acting_params,
  )
  publisher = parameters.Publisher(address, parts.params_schema) if group.is_first else None
  count = config.learner.num_processes
  batch_size = config.batch_size // count

  def make_link(max_in_flight: int, **options: Any) -> sampled.Link:
    read_from = reader.Reader(
      # From shards of its own if there are enough for all processes.
      address[rank::count] if len(address) >= count else address,
      config.replay.strata,
      parts.sequence_schema,
      batch_size=batch_size,
      timeout_seconds=config.replay.timeout_seconds,
      max_in_flight=max_in_flight,
      **options,
    )
    return sampled.Link(read_from, publisher, launch.launch_id, should_stop)

  most = config.replay.max_in_flight
  source: loop.Source
  if config.record.on_policy:
    stale_filter = on_policy.StaleFilter(config.learner.max_staleness)
    ahead = config.learner.in_flight(most, config.batch_size)
    source = on_policy.OnPolicy(
      trained,
      make_link(ahead, prefetch=0, keep=stale_filter.keep),
      stale_filter,
      steps_per_sequence=config.steps_per_sequence,
      group=group,
    )
  else:
    source = replayed.FromReplay(
      trained,
      make_link(most),
      _experience(launch, replay, is_first=group.is_first),
      publish_period=config.learner.publish_period,
      num_processes=count,
    )
  hooks = loop.Hooks(
    should_stop=should_stop,
    make_logger=lambda step: launch.make_logger(parts_lib.LEARNER, resume=step),
    between=progress.count_writer(launch.folder) if group.is_first else lambda status: None,
  )
  return launch.make_loop(source, hooks, group)


def _experience(
  launch: composition.Launch, replay: Clients, *, is_first: bool
) -> replayed.Experience:
  """Makes the learner's access to the counts and checkpoints of replay; only its first process counts."""
  config, run = launch.config, launch.folder
  collected: Callable[[], collected_lib.StepCounts | None] = lambda: None
  staleness = None
  if is_first:
    collected = _collected(config, replay, parts_lib.LEARNER, run / folder_lib.COLLECTED)
    strata = tables.batch_strata(
      config.replay.strata, config.batch_size // config.learner.num_processes
    )
    staleness = staleness_lib.Staleness([config.replay.strata[index].name for index in strata])
  folders = [
    folder if shard in launch.shards_here else None
    for shard, folder in enumerate(parts_lib.replay_folders(run, len(replay)))
  ]
  return replayed.Experience(
    save=_replay_saver(replay, folders),
    collected=collected,
    steps_per_batch=config.batch_size * config.steps_per_sequence,
    warm_up_steps=config.replay.warm_up * config.steps_per_sequence,
    staleness=staleness,
  )


def build_actor(launch: composition.Launch, actor_id: int, replay: Clients) -> actor.Actor:
  """Makes an actor node; `actor_id` is its index, from 0, unique among all hosts."""
  config, profile = launch.config, launch.profile
  parts_lib.seed_generators(config.seed, 1 + actor_id)
  should_stop = _stop_signal(config)
  parts = parts_lib.make_parts(config, should_stop)
  name = f'{parts_lib.ACTOR}-{actor_id}'
  profiler = None
  if profile is not None and actor_id == 0:
    # The last version that the learner has published when the span begins.
    start = max(0, profile.start + 1 - config.learner.publish_period)
    profiler = profile_lib.Profiler(
      profile._replace(start=start),
      profile.folder(launch.folder) / name,
      most=profile_lib.MOST_UNROLLS,
      late=True,
    )
  source = _params_source(parts, launch.folder, replay, name)
  collected = _collected(config, replay, name)

  def environment_step() -> int:
    """Environment steps of the run: the larger of the newest counts of the learner and of replay."""
    if not config.record.on_policy:  # whose queue loses its count where it is restarted
      collected()
    return max(source.environment_step, collected.steps.taken)

  return actor.Actor(
    unroll=parts.unroll,
    replay=actor.ReplayConnections(
      source=source,
      writer=writer.Writer(
        _addresses(replay),
        config.replay.strata,
        parts.sequence_schema,
        timeout_seconds=config.replay.timeout_seconds,
      ),
      environment_step=environment_step,
    ),
    identity=actor.Identity(actor_id, config.seed, launch.launch_id),
    config=config.actor,
    logger=launch.make_logger(name),
    should_stop=should_stop,
    profiler=profiler,
  )


def build_evaluator(launch: composition.Launch, replay: Clients) -> evaluator.Evaluator:
  """Makes the evaluator node."""
  should_stop = _stop_signal(launch.config)
  parts_lib.seed_generators(launch.config.seed, 0)
  parts = parts_lib.make_parts(launch.config)
  return evaluator.Evaluator(
    launch.make_scorer(parts, should_stop),
    _params_source(parts, launch.folder, replay, parts_lib.EVALUATOR),
    should_stop,
    launch.launch_id,
  )


class Ending:
  """A node that exits when the run ends, and does nothing else; for a host with only replay."""

  def __init__(self, launch: composition.Launch, replay: Clients):
    schema = parts_lib.make_parts(launch.config).params_schema
    self._source = parameters.Subscription(_addresses(replay), schema, name=parts_lib.ENDING)
    self._should_stop = _stop_signal(launch.config)
    self._launch_id = launch.launch_id  # final parameters of other launches are ignored

  def run(self) -> None:
    """Returns once the learner has published its final parameters, or the node was asked to stop."""
    while not self._should_stop():
      snapshot = self._source.newest(timeout_seconds=1.0)
      if snapshot is not None and snapshot.ended_launch == self._launch_id:
        return
      time.sleep(0.5)
