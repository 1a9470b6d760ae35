"""The nodes of a run, each built in its own process from the config and clients of replay.

Actors and the learner communicate only through replay, so any node may crash and be restarted.
"""

import atexit
import contextlib
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
from hephaestus.launch.run import composition
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import loop, process
from hephaestus.learner import process_group as process_group_lib
from hephaestus.learner import profile as profile_lib
from hephaestus.learner.sources import collected as collected_lib
from hephaestus.learner.sources import on_policy, replayed, sampled
from hephaestus.learner.sources import stale_filter as stale_filter_lib
from hephaestus.learner.sources import staleness as staleness_lib
from hephaestus.replay import checkpoint as replay_checkpoint
from hephaestus.replay import connection, parameters, reader, tables, writer

if TYPE_CHECKING:
  import reverb

COUNTS_PERIOD = 0.5  # seconds between two writes of the learner's counts


def _stop_signal(config: launch_config.ExperimentConfig) -> Callable[[], bool]:
  """Returns a function that tells whether this node was asked to stop, watched by `watchdog.watched`."""
  _end_quietly()
  return watchdog.watched(lp.stop_event().is_set, config.learner.stuck_seconds)


def _end_quietly() -> None:
  """Lets a stopping node end with its own exit code.

  Launchpad sends SIGALRM every second after SIGTERM. It would kill the node once Python no longer
  handles signals, and make its orderly end look like a crash.
  """
  atexit.register(signal.signal, signal.SIGALRM, signal.SIG_IGN)


def _addresses(replay: Sequence['reverb.Client']) -> list[str]:
  return [client.server_address for client in replay]


def collected_steps(
  config: launch_config.ExperimentConfig,
  replay: Sequence['reverb.Client'],
  name: str,
  file: pathlib.Path | None = None,
) -> collected_lib.Collected:
  """Makes a counter of the environment steps of a run.

  Args:
    config: config of the run.
    replay: clients of all shards of replay.
    name: name of the calling node, for the logs.
    file: file in which the counts outlive a restart; None for no file.

  Returns:
    A `collected.Collected`; a call asks replay for the steps so far, None if no shard answers.

  Raises:
    ValueError: the file exists and does not hold counts.
  """
  return collected_lib.Collected(
    _addresses(replay),
    name,
    stratum=config.replay.limiting_stratum.name,
    steps_per_sequence=config.steps_per_sequence,
    timeout_seconds=config.replay.timeout_seconds,
    file=file,
  )


def _params_source(
  parts: parts_lib.Parts, run: pathlib.Path, replay: Sequence['reverb.Client'], name: str
) -> parameters.Subscription:
  """Subscribes a node to acting parameters; its `environment_step` begins with that in the node's metrics."""
  row = metrics.last(run / 'metrics' / f'{name}.jsonl') or {}
  return parameters.Subscription(
    _addresses(replay),
    parts.params_schema,
    name=name,
    least_step=row.get('environment_step') or 0,
  )


def replay_saver(
  replay: Sequence['reverb.Client'], folders: Sequence[str | None]
) -> Callable[[], Any]:
  """Makes a function that has every shard of replay write its checkpoint.

  The function tries all shards, then raises RuntimeError or OSError if one failed.

  Args:
    replay: client of each shard.
    folders: folder of each shard's checkpoints, in which the newest is kept; None for a shard of
      another host, which keeps its own.
  """
  if len(replay) == 1:
    (client,), (folder,) = replay, folders
    return client.checkpoint if folder is None else lambda: replay_checkpoint.save(client, folder)
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


def _count_writer(run: pathlib.Path) -> Callable[[loop.Status], None]:
  """Makes the learner's hook that writes `folder.COUNTS`, at most twice a second.

  It writes nothing before the first change: until then nodes compile.
  """
  begun: tuple[int, int] | None = None
  written = 0.0

  def write(status: loop.Status) -> None:
    nonlocal begun, written
    if time.monotonic() - written < COUNTS_PERIOD:
      return
    counts = status.step, status.environment_step
    begun = begun or counts
    if counts != begun:
      written = time.monotonic()
      row = {'time': time.time(), 'learner_step': counts[0], 'environment_step': counts[1]}
      with contextlib.suppress(OSError):  # a full disk: the line then shows the reports
        (run / folder_lib.COUNTS).write_text(metrics.to_json(row) + '\n')

  return write


def build_learner(
  config: launch_config.ExperimentConfig,
  run: pathlib.Path,
  launch_id: int,
  shards_here: Sequence[int],
  place: process_group_lib.Place | None,
  profile: profile_lib.Span | None,
  replay: Sequence['reverb.Client'],
) -> loop.Loop:
  """Makes the learner node, or one of the processes of a learner that has several.

  Args:
    config: config of the run.
    run: folder of the run.
    launch_id: number of this launch, see `program.make_program`.
    shards_here: shards of replay on this host, whose checkpoints are written into `run`.
    place: rank of this process in a learner of several; None for a learner of one process.
    profile: learner updates to trace; None for none.
    replay: clients of all shards of replay.

  Raises:
    ValueError: the newest checkpoint is of another config, or a batch does not divide over the devices.
    RuntimeError: the processes of a learner that has several do not find each other.
  """
  process.prepare()
  should_stop = _stop_signal(config)
  group: process_group_lib.Group = process_group_lib.ONE_PROCESS
  if place is not None:  # before any array is made
    group = process_group_lib.ProcessGroup(
      place, stuck_seconds=config.learner.stuck_seconds, should_stop=should_stop
    )
  source = _make_source(config, run, launch_id, shards_here, place, should_stop, group, replay)
  hooks = loop.Hooks(
    should_stop=should_stop,
    make_logger=lambda step: composition.make_logger(config, run, parts_lib.LEARNER, resume=step),
    **({'between': _count_writer(run)} if group.is_first else {}),
  )
  return composition.make_loop(config, run, source, hooks, profile=profile, group=group)


def _make_source(
  config: launch_config.ExperimentConfig,
  run: pathlib.Path,
  launch_id: int,
  shards_here: Sequence[int],
  place: process_group_lib.Place | None,
  should_stop: Callable[[], bool],
  group: process_group_lib.Group,
  replay: Sequence['reverb.Client'],
) -> loop.Source:
  """Makes the source of batches: a queue for on-policy agents, else replay; the first process publishes."""
  parts = parts_lib.make_parts(config)
  address = _addresses(replay)
  is_first = group.is_first
  trained = sampled.Trained(
    config.record.make_update(config, parts.trained, num_devices=jax.device_count()),
    parts.agent.acting_params,
  )
  publisher = parameters.Publisher(address, parts.params_schema) if is_first else None
  if config.record.on_policy:
    stale_filter = stale_filter_lib.StaleFilter(config.learner.max_staleness)
    link = sampled.Link(
      _make_reader(config, parts, address, place, stale_filter), publisher, launch_id, should_stop
    )
    return on_policy.OnPolicy(
      trained, link, stale_filter, steps_per_sequence=config.steps_per_sequence, group=group
    )
  link = sampled.Link(
    _make_reader(config, parts, address, place), publisher, launch_id, should_stop
  )
  return replayed.FromReplay(
    trained,
    link,
    _experience(config, run, shards_here, replay, is_first),
    publish_period=config.learner.publish_period,
    num_processes=config.learner.num_processes,
  )


def _make_reader(
  config: launch_config.ExperimentConfig,
  parts: parts_lib.Parts,
  address: Sequence[str],
  place: process_group_lib.Place | None,
  stale_filter: stale_filter_lib.StaleFilter | None = None,
) -> reader.Reader:
  """Makes the reader of one learner process, from shards of its own if there are enough for all.

  On-policy, it prefetches few sequences, and drops those that the filter rejects as too old.
  """
  if place is not None and len(address) >= place.size:
    address = address[place.rank :: place.size]
  batch_size = config.batch_size // config.learner.num_processes
  reading: dict[str, Any] = {'max_in_flight': config.replay.max_in_flight}
  if stale_filter is not None:
    ahead = stale_filter_lib.sequences_in_flight(config.replay.max_in_flight, batch_size)
    reading = {'max_in_flight': ahead, 'prefetch': 0, 'keep': stale_filter.keep}
  return reader.Reader(
    address,
    config.replay.strata,
    parts.sequence_schema,
    batch_size=batch_size,
    timeout_seconds=config.replay.timeout_seconds,
    **reading,
  )


def _experience(
  config: launch_config.ExperimentConfig,
  run: pathlib.Path,
  shards_here: Sequence[int],
  replay: Sequence['reverb.Client'],
  is_first: bool,
) -> replayed.Experience:
  """Makes the learner's access to the counts and checkpoints of replay; only its first process counts."""
  folders = enumerate(parts_lib.replay_folders(run, len(replay)))
  collected: Callable[[], collected_lib.StepCounts | None] = lambda: None
  staleness = None
  if is_first:
    collected = collected_steps(config, replay, parts_lib.LEARNER, run / folder_lib.COLLECTED)
    strata = tables.batch_strata(
      config.replay.strata, config.batch_size // config.learner.num_processes
    )
    staleness = staleness_lib.Staleness([config.replay.strata[index].name for index in strata])
  return replayed.Experience(
    save=replay_saver(
      replay, [folder if shard in shards_here else None for shard, folder in folders]
    ),
    collected=collected,
    steps_per_batch=config.batch_size * config.steps_per_sequence,
    warm_up_steps=config.replay.warm_up * config.steps_per_sequence,
    staleness=staleness,
  )


def build_actor(
  config: launch_config.ExperimentConfig,
  run: pathlib.Path,
  actor_id: int,
  launch_id: int,
  profile: profile_lib.Span | None,
  replay: Sequence['reverb.Client'],
) -> actor.Actor:
  """Makes an actor node.

  Args:
    config: config of the run.
    run: folder of the run.
    actor_id: index of the actor, from 0, unique among all hosts.
    launch_id: number of this launch, see `program.make_program`.
    profile: learner updates; actor 0 is traced at about the same time. None for no trace.
    replay: clients of all shards of replay.
  """
  should_stop = _stop_signal(config)
  parts = parts_lib.make_parts(config, should_stop)
  name = f'{parts_lib.ACTOR}-{actor_id}'
  profiler = None
  if profile is not None and actor_id == 0:
    # The last version that the learner has published when the span begins.
    start = max(0, profile.start + 1 - config.learner.publish_period)
    profiler = profile_lib.Profiler(
      profile._replace(start=start),
      profile.folder(run) / name,
      most=profile_lib.MOST_UNROLLS,
      late=True,
    )
  source = _params_source(parts, run, replay, name)
  collected = collected_steps(config, replay, name)

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
    identity=actor.Identity(actor_id, config.seed, launch_id),
    config=config.actor,
    logger=composition.make_logger(config, run, name),
    should_stop=should_stop,
    profiler=profiler,
  )


def build_evaluator(
  config: launch_config.ExperimentConfig,
  run: pathlib.Path,
  launch_id: int,
  replay: Sequence['reverb.Client'],
) -> evaluator.Evaluator:
  """Makes the evaluator node.

  Args:
    config: config of the run.
    run: folder of the run.
    launch_id: number of this launch, see `program.make_program`.
    replay: clients of all shards of replay.
  """
  should_stop = _stop_signal(config)
  parts = parts_lib.make_parts(config)
  return evaluator.Evaluator(
    composition.make_scorer(config, parts, run, should_stop),
    _params_source(parts, run, replay, parts_lib.EVALUATOR),
    should_stop,
    launch_id,
  )


class Ending:
  """A node that exits when the run ends, and does nothing else.

  Args:
    source: subscription to acting parameters, the final ones of which say that the run has ended.
    should_stop: whether the node was asked to stop.
    launch_id: number of this launch; final parameters of other launches are ignored.
  """

  def __init__(
    self, source: parameters.Subscription, should_stop: Callable[[], bool], launch_id: int
  ):
    self._source = source
    self._should_stop = should_stop
    self._launch_id = launch_id

  def run(self) -> None:
    """Returns once the learner has published its final parameters, or the node was asked to stop."""
    while not self._should_stop():
      snapshot = self._source.newest(timeout_seconds=1.0)
      if snapshot is not None and snapshot.ended_launch == self._launch_id:
        return
      time.sleep(0.5)


def build_ending(
  config: launch_config.ExperimentConfig, launch_id: int, replay: Sequence['reverb.Client']
) -> Ending:
  """Makes the node that exits when the run ends, for a host with only replay."""
  schema = parts_lib.make_parts(config).params_schema
  source = parameters.Subscription(_addresses(replay), schema, name=parts_lib.ENDING)
  return Ending(source, _stop_signal(config), launch_id)
