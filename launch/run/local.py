"""Everything on one machine: the program's nodes under the supervisor, and one live line."""

import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import portpicker
import psutil

from hephaestus.actors.environments import host
from hephaestus.agents import agent as agent_lib
from hephaestus.launch import config as launch_config
from hephaestus.launch.run import fork_server as template_lib
from hephaestus.launch.run import metrics, supervisor
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import fused, process_group
from hephaestus.learner import profile as profile_lib
from hephaestus.replay import checkpoint as replay_checkpoint
from hephaestus.replay import loopback, tables

ADDRESS, CONFIG, LOCK = 'address', 'config.yaml', 'lock'
QUIET_PERIOD = 15.0  # seconds between progress lines where no terminal shows them live
STOPPED = 143  # the exit code of a host's share that was asked to stop: 128 + SIGTERM
LEAVING_SECONDS = 3.0  # without a connection before replay goes: whoever is restarting comes back
MOST_LEAVING_SECONDS = 60.0  # that it waits for the connections of others to end

CACHE = pathlib.Path(os.environ.get('XDG_CACHE_HOME', '~/.cache')).expanduser() / 'hephaestus'

COMMON = {
  'TF_CPP_MIN_LOG_LEVEL': '3',
  'GRPC_VERBOSITY': 'ERROR',
  'PYTHONUNBUFFERED': '1',
  'JAX_COMPILATION_CACHE_DIR': str(CACHE / 'jax'),
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.5',
}
# Reverb keeps what it frees without these; docs/design.md has the figures.
FRUGAL = {
  'MALLOC_ARENA_MAX': '2',
  'MALLOC_TRIM_THRESHOLD_': '131072',
  'MALLOC_MMAP_THRESHOLD_': '131072',
}
# Acting is many small steps: threads would only take turns on the learner's cores. By the flag XLA
# still divides what it compiles over all cores that it sees, so it is shown one.
ONE_THREAD = {
  'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false',
  'PJRT_NPROC': '1',
  'OMP_NUM_THREADS': '1',
}
CPU_ONLY = {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': ''}


def open_run(
  folder: pathlib.Path, config: launch_config.ExperimentConfig
) -> launch_config.ExperimentConfig:
  """Makes or checks the folder of a run, and writes the config into it.

  Raises:
    ValueError: it cannot be written to, is something else's, or does not fit the config.
  """
  known = folder / CONFIG
  try:
    if known.exists():
      differences = launch_config.conflicts(launch_config.load(known), config)
      if differences:
        raise ValueError(
          f'--run {folder}: was made with another configuration. ' + '; '.join(differences)
          + '. Give the old values or another folder'
        )  # fmt: skip
    elif folder.exists() and any(folder.iterdir()):
      raise ValueError(f'--run {folder}: is not empty and has no {CONFIG}; give another folder')
    for name in ('metrics', 'logs', 'checkpoints', 'replay', 'videos', 'tensorboard'):
      (folder / name).mkdir(parents=True, exist_ok=True)
    launch_config.save(config, known)
  except OSError as error:
    raise ValueError(f'--run {folder}: cannot be written to ({error.strerror})') from None
  return config


@contextlib.contextmanager
def only_one(folder: pathlib.Path) -> Iterator[None]:
  """Holds the folder, so that no second launcher works on it; ValueError if one does."""
  with open(folder / LOCK, 'w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f'--run {folder}: is being trained already; stop that run or give another folder'
      ) from None
    yield


def is_running(folder: pathlib.Path) -> bool:
  """Whether a launcher of this machine holds the folder; asked without touching the lock."""
  try:
    # By the inode alone: some file systems show another device here than there.
    place = f':{(folder / LOCK).stat().st_ino} '
    return any(place in line for line in pathlib.Path('/proc/locks').read_text().splitlines())
  except OSError:
    return False


def _port(port: int | None) -> int:
  """One that replay can listen on: that of the config, or any."""
  if port is None:
    return portpicker.pick_unused_port()
  with socket.socket(socket.AF_INET6) as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind(('::', port))
    except OSError as error:
      raise ValueError(
        f'replay.port={port}: cannot be used ({error.strerror}); give another, or null for a free one'
      ) from None
  return port


def _ports(config: launch_config.ExperimentConfig) -> list[int]:
  """One for each shard of replay."""
  ports: list[int] = []
  while len(ports) < config.replay.num_shards:
    first = config.replay.port
    port = _port(None if first is None else first + len(ports))
    ports += [] if port in ports else [port]
  return ports


def _environment(name: str, config: launch_config.ExperimentConfig) -> dict[str, str]:
  variables = dict(COMMON)
  if name in parts_lib.learners(config.learner.num_processes):
    return variables | ({} if config.accelerator else CPU_ONLY)
  variables |= CPU_ONLY | ONE_THREAD
  return variables | FRUGAL if parts_lib.is_replay(name) else variables


def _port_of(address: str) -> int:
  return int(address.rsplit(':', 1)[1])


def _reach(exposed: bool) -> tuple[bool, str]:
  """Whether replay will be exposed, and who can then reach it, in words; replay is on this host."""
  refusal = '' if exposed else loopback.refusal()
  if not exposed and not refusal:
    return False, 'reached from this machine alone'
  why = f' (this system does not keep it from others: {refusal})' if refusal else ''
  return True, f'reached without a password by whoever reaches this machine{why}'


def replay_bytes(config: launch_config.ExperimentConfig) -> int:
  """What replay will take of memory once its strata are full, if nothing compresses."""
  return tables.nbytes(config.replay, parts_lib.make_parts(config).sequence_schema)


def _check_coordinator(address: str) -> None:
  """Refuses an address that the learner cannot listen at."""
  host, port = address.rsplit(':', 1)
  with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind((host, int(port)))
    except OSError as error:
      raise ValueError(
        f'learner.address={host}, learner.port={port}: cannot be used on this host '
        f'({error.strerror}); give one of its own addresses, and a free port'
      ) from None


def _coordinator_reach(address: str) -> str:
  if address.startswith('127.'):
    return 'reached from this machine alone'
  return (
    'reached without a password by whoever reaches that address; so are ports that the learner '
    'takes as it likes, where it learns on CPUs'
  )


def check_memory(config: launch_config.ExperimentConfig, shards: int | None = None) -> str:
  """What replay will take of this machine's memory once its strata are full, in a line.

  Args:
    config: of the run.
    shards: of replay that are on this machine; None for all.

  Raises:
    ValueError: it is more than there is.
  """
  here = config.replay.num_shards if shards is None else shards
  needed = -(-replay_bytes(config) * here // config.replay.num_shards)
  available = _memory()
  strata = config.replay.strata
  index = max(range(len(strata)), key=lambda index: strata[index].max_size)
  most = strata[index].max_size
  there = -(-most * here // config.replay.num_shards)
  if needed > available:
    raise ValueError(
      f'replay.strata[{index}].max_size={most}: that many sequences take {_size(needed)}, this machine '
      f'has {_size(available)}; use at most {most * available // (2 * needed)}'
    )
  return (
    f'replay takes up to {_size(needed)} of {_size(available)}: {there:,} sequences, if they do not '
    'compress'
  )


def _size(count: int) -> str:
  return f'{count / 1e6:.1f} MB' if count < 1e9 else f'{count / 1e9:.1f} GB'


def _memory() -> int:
  """Bytes that this machine has, or the container that we are in may use."""
  limit = pathlib.Path('/sys/fs/cgroup/memory.max')
  text = limit.read_text().strip() if limit.exists() else 'max'
  total = psutil.virtual_memory().total
  return min(total, int(text)) if text.isdigit() else total


def prepare_profile(
  profile: profile_lib.Span, config: launch_config.ExperimentConfig, folder: pathlib.Path
) -> None:
  """Makes room for the trace of some updates; ValueError as of `check_profile`."""
  check_profile(profile, config, folder)
  shutil.rmtree(profile.folder(folder), ignore_errors=True)


def check_profile(
  profile: profile_lib.Span, config: launch_config.ExperimentConfig, folder: pathlib.Path
) -> None:
  """Refuses updates that a run will not do, as far as its folder tells here.

  Args:
    profile: updates to be traced.
    config: of the run.
    folder: of the run, which may be new.

  Raises:
    ValueError: the run will not get there, or is there already.
  """
  text = f'--profile {profile.start}:{profile.stop}'
  checkpoints = (folder / 'checkpoints').glob('*')
  done = max((int(path.name) for path in checkpoints if path.name.isdigit()), default=0)
  if profile.start < done:
    raise ValueError(f'{text}: the run goes on from update {done:,}; begin there or later')
  newest = metrics.last(folder / 'metrics' / 'learner.jsonl') or {}
  missing = max(0, config.max_environment_steps - newest.get('environment_step', 0))
  if config.agent_name == 'dreamer':
    warm_up = 0 if newest else config.replay.warm_up * config.steps_per_sequence
    missing = math.ceil(config.replay.replay_ratio * max(0, missing - warm_up))
  most = newest.get('learner_step', 0) - (
    -missing // (config.batch_size * config.steps_per_sequence)
  )
  if profile.start >= most:
    raise ValueError(
      f'{text}: the run ends after about {most:,} updates; begin earlier, or give it more --steps'
    )


@contextlib.contextmanager
def open_fork_server() -> Iterator[template_lib.Template]:
  """The server that forks into nodes.

  It is made once all is imported and before anything starts the threads of JAX.
  """
  from hephaestus.launch.run import program  # noqa: F401  for the nodes, which then import nothing

  with contextlib.closing(template_lib.Template()) as fork_server:
    yield fork_server


class Share(NamedTuple):
  """What of a run is this host's, when it has several.

  Attributes:
    nodes: their names, as `program.commands` gives them.
    addresses: HOST:PORT of each shard of replay, as this host reaches it.
    launch_id: the same on all hosts, and another at each launch.
    on_tick: called about twice a second.
    coordinator: HOST:PORT of the first process of a learner that has several.
  """

  nodes: Sequence[str]
  addresses: Sequence[str]
  launch_id: int
  on_tick: Callable[[], None]
  coordinator: str | None


def train(
  config: launch_config.ExperimentConfig,
  folder: pathlib.Path,
  template: template_lib.Template | None = None,
  share: Share | None = None,
  *,
  exposed: bool = False,
  profile: profile_lib.Span | None = None,
) -> int:
  """Runs everything, or a host's share, until it is learned, interrupted or failed.

  Args:
    config: of the run.
    folder: of the run, opened.
    template: forks the nodes; without it each imports everything itself.
    share: of this host; None for everything.
    exposed: whether other machines may reach replay, where it is this host's.
    profile: updates that are traced; None for none.

  Returns:
    The exit code: 0 when learned or stopped in order (`STOPPED` then, of a host's share), 1 when a
    node was given up or its last save failed.
  """
  from hephaestus.launch.run import (
    program,  # here, since Launchpad, Reverb and TensorFlow take seconds
  )

  with only_one(folder):
    replay = parts_lib.replay_names(config.replay.num_shards)
    shards_here = [i for i, name in enumerate(replay) if share is None or name in share.nodes]
    if share is None:
      addresses: Sequence[str] = [f'127.0.0.1:{port}' for port in _ports(config)]
    else:
      addresses = share.addresses
      for shard in shards_here:
        _port(_port_of(addresses[shard]))  # refuses one that is taken
    (folder / ADDRESS).write_text('\n'.join(addresses))
    if shards_here:
      exposed, reach = _reach(exposed)
    for shard in shards_here:
      print(f'{replay[shard]} listens at port {_port_of(addresses[shard])}: {reach}', flush=True)
    learners = parts_lib.learners(config.learner.num_processes)
    coordinator = share.coordinator if share else None
    if share is None and len(learners) > 1:
      # One process has all accelerators of a machine; several are there to be tried out.
      config = dataclasses.replace(config, accelerator=False)
      coordinator = f'127.0.0.1:{portpicker.pick_unused_port()}'
    if coordinator is not None and (share is None or learners[0] in share.nodes):
      _check_coordinator(coordinator)
      print(
        f'{learners[0]} listens at {coordinator}: {_coordinator_reach(coordinator)}', flush=True
      )
    scratch = folder / 'nodes'
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)  # the nodes, pickled, for themselves alone
    topology = program.make_program(
      config,
      folder.resolve(),
      launch_id=share.launch_id if share else time.time_ns(),
      shards_here=shards_here,
      exposed=exposed,
      coordinator=coordinator,
      profile=profile,
    )
    commands = program.commands(topology, addresses, scratch)
    here = share.nodes if share else [name for name in commands if name != parts_lib.ENDING]
    commands = {name: commands[name] for name in here}
    processes = [
      supervisor.Process(
        name,
        command,
        _environment(name, config),
        folder / 'logs' / f'{name}.log',
        blameless=process_group.PEER_GONE
        if len(learners) > 1 and name in learners
        else frozenset(),
      )
      for name, command in commands.items()
    ]
    events = metrics.JsonLines(folder / 'metrics' / 'events.jsonl')
    progress = Progress(config, folder)
    if learners[0] not in commands:
      acts = any(name.startswith(parts_lib.ACTOR) for name in commands)
      progress = ActorsProgress(config, folder) if acts else NoProgress(config, folder)
    if isinstance(config.make_environment(), host.HostEnvironment):
      progress.say(
        'this environment is stepped outside the compiled program, by threads: far slower than one in JAX'
      )
    is_watched = config.agent_name == 'ppo' and learners[0] in commands
    watch = Watch(config, folder, events, progress.say) if is_watched else None
    is_left: Callable[[], bool] = lambda: True
    if share and shards_here:
      is_left = _Leaving([_port_of(addresses[shard]) for shard in shards_here])
    failed_late: list[str] = []

    def on_event(event: supervisor.Event) -> None:
      events.write(event._asdict())
      if event.kind == 'restarting':
        progress.say(
          f'{event.name} ended with code {event.exit_code}; restart {event.restarts} '
          f'in {event.delay_seconds:.1f} s'
        )
      if event.kind in ('exited', 'killed') and event.exit_code and event.name in learners:
        failed_late[:] = [event.name]
      if event.kind == 'started' and event.name in failed_late:
        failed_late.clear()

    def on_tick() -> None:
      progress.tick()
      if watch is not None:
        watch.tick()
      if share is not None:
        share.on_tick()
        if learners[0] not in commands:
          folders = parts_lib.replay_folders(folder, len(replay))
          for shard in shards_here:
            replay_checkpoint.keep(folders[shard])

    ends = [name for name in commands if name in (*learners, parts_lib.EVALUATOR, parts_lib.ENDING)]

    def is_over(finished: Set[str]) -> bool:
      # Where only actors are, the first that has seen the end speaks for all of them.
      return (finished >= set(ends) if ends else bool(finished)) and is_left()

    outcome = supervisor.Supervisor(
      processes,
      until=ends,
      is_over=is_over,
      # Actors first, so that nothing is inserted behind the last checkpoints; replay last, because
      # the learner has it save.
      stop_order=[
        [name for name in commands if name not in (*learners, *replay)],
        [name for name in commands if name in learners],
        [name for name in commands if name in replay],
      ],
      fates=[[name for name in commands if name in learners]],
      grace_seconds=[3.0, 60.0, 2.0],
      stop_seconds=75.0,
      # Whoever fails three times in a row, in its first minute, will go on failing.
      max_fast_failures=3,
      healthy_seconds=60.0,
      on_event=on_event,
      on_tick=on_tick,
      template=template,
    ).run()
    shutil.rmtree(scratch, ignore_errors=True)
  progress.end()
  traced = {learners[0], f'{parts_lib.ACTOR}-0'}
  if profile is not None and not traced.isdisjoint(commands):
    print(profile_lib.report(profile, folder), flush=True)
  if outcome.failed is not None:
    print(f'{outcome.failed} failed again and again (last exit code {outcome.failed_exit_code}):')
    print('\n'.join(f'  {line}' for line in outcome.last_lines))
    print(f'all of it: {folder / "logs" / (outcome.failed + ".log")}')
    return 1
  if failed_late:
    log = folder / 'logs' / f'{failed_late[0]}.log'
    print(f'the learner did not save at the end; see {log}')
    return 1
  if outcome.interrupted:
    print('stopped' if share else f'stopped; go on with: hephaestus train --run {folder}')
    return STOPPED if share else 0
  print(summary(folder) if parts_lib.EVALUATOR in commands else 'done')
  return 0


class _Leaving:
  """Whether replay may go: the other hosts have seen the end once they no longer speak to it.

  Args:
    ports: of replay, here.
  """

  def __init__(self, ports: Sequence[int]):
    self._ports = ports
    self._asked = self._first = self._connected = 0.0

  def __call__(self) -> bool:
    now = time.monotonic()
    if now - self._asked > 0.5:
      self._asked = now
      self._first = self._first or now
      if now - self._first < MOST_LEAVING_SECONDS and _is_connected(self._ports):
        self._connected = now
    return now - max(self._first, self._connected) > LEAVING_SECONDS


def _is_connected(ports: Sequence[int]) -> bool:
  return any(
    connection.status == psutil.CONN_ESTABLISHED
    and connection.laddr
    and connection.laddr[1] in ports
    for connection in psutil.net_connections('tcp')
  )


class Watch:
  """Warns of runs of PPO that will not learn, by the rows that learner and actors write."""

  def __init__(
    self,
    config: launch_config.ExperimentConfig,
    folder: pathlib.Path,
    events: metrics.JsonLines,
    say: Callable[[str], None],
  ):
    """Says nothing yet; rows from before are not judged."""

    def warn(text: str) -> None:
      events.write({'kind': 'warning', 'name': parts_lib.LEARNER, 'text': text})
      say(f'warning: {text}')

    self._advice = fused.Advice(warn, config.ppo()[0].entropy_scale)
    self._metrics = folder / 'metrics'
    self._newest = time.time()

  def tick(self) -> None:
    """Judges the newest row, once."""
    row = metrics.last(self._metrics / 'learner.jsonl')
    if row is None or row['time'] <= self._newest:
      return
    self._newest = row['time']
    played = metrics.last(self._metrics / 'actor-0.jsonl') or {}
    scored = metrics.last(self._metrics / 'evaluator.jsonl') or {}
    self._advice.score = scored.get('normalised_score')
    names = ('episode_return', 'episode_length')
    self._advice.look(row | {name: played.get(name) for name in names})


def summary(folder: pathlib.Path) -> str:
  """The last line of a finished run."""
  final = metrics.last(folder / 'metrics' / 'evaluator.jsonl') or {}
  show = lambda value: f'{value:.3f}' if isinstance(value, float) else str(value)
  names = ('environment_step', 'learner_step', 'episode_return', 'normalised_score')
  return 'done: ' + ' '.join(f'{name}={show(final.get(name))}' for name in names)


class Progress:
  """One line on how far the run is, rewritten in a terminal, and repeated now and then elsewhere."""

  def __init__(
    self,
    config: launch_config.ExperimentConfig,
    folder: pathlib.Path,
    *,
    starting: str = 'nodes import and compile, about half a minute',
  ):
    """Shows nothing yet; `starting` is shown until something is learned."""
    self._config = config
    self._folder = folder
    self._starting = starting
    self._live = sys.stdout.isatty()
    self._start, self._started_at = time.monotonic(), time.time()
    self._first: tuple[float, int] | None = None
    self._shown = 0.0

  def tick(self) -> None:
    """Shows the line when it is due."""
    now = time.monotonic()
    if self._live:
      width = shutil.get_terminal_size().columns
      sys.stdout.write('\r' + self.line()[: width - 1].ljust(width - 1))
      sys.stdout.flush()
    elif now - self._shown > QUIET_PERIOD:
      self._shown = now
      print(self.line(), flush=True)

  def say(self, text: str) -> None:
    """Shows a line that stays."""
    self.end()
    print(text, flush=True)

  def end(self) -> None:
    """Leaves the live line."""
    if self._live:
      sys.stdout.write('\r' + ' ' * (shutil.get_terminal_size().columns - 1) + '\r')
      sys.stdout.flush()

  def line(self) -> str:
    """Steps, score, return, speed, ratio, staleness and the time left."""
    learner = metrics.last(self._folder / 'metrics' / 'learner.jsonl')
    evaluator = metrics.last(self._folder / 'metrics' / 'evaluator.jsonl') or {}
    actor = metrics.last(self._folder / 'metrics' / 'actor-0.jsonl') or {}
    elapsed = time.monotonic() - self._start
    name = self._config.environment['name']
    if learner is None or learner['time'] < self._started_at:
      return f'{name}  {_clock(elapsed)}  starting: {self._starting}'
    # What an actor says may be newer than what the learner says.
    step = max(learner['environment_step'], actor.get('environment_step') or 0)
    total = self._config.max_environment_steps
    if self._first is None:
      self._first = (time.monotonic(), step)
    began, first_step = self._first
    rate = (step - first_step) / max(1e-9, time.monotonic() - began)
    remaining = (total - step) / rate if rate > 0 else None
    if self._config.max_minutes is not None:
      by_time = 60 * self._config.max_minutes - (time.monotonic() - began)
      remaining = by_time if remaining is None else min(remaining, by_time)
    parts = [
      f'{name}  {_clock(elapsed)}  {step:,}/{total:,} steps',
      _labelled('score', evaluator.get('normalised_score')),
      _labelled('return', evaluator.get('episode_return')),
      *self._details(learner, actor),
      'ETA ' + (_clock(max(0.0, remaining)) if remaining is not None else '?'),
    ]
    return '  '.join(part for part in parts if part)

  def _details(self, learner: dict[str, Any], actor: dict[str, Any]) -> list[str]:
    """What there is to say of learner and actor, besides how far they are."""
    if self._config.agent_name == 'ppo':
      names = {'ppo/entropy': 'entropy', 'ppo/approx_kl': 'KL', 'ppo/clip_fraction': 'clipped'}
      details = [f'{label} {learner[name]:.3f}' for name, label in names.items()]
      if not self._config.fused:
        details.append(f'staleness {learner["staleness"]:.1f}')
      return [f'{learner["steps_per_second"]:,.0f} steps/s', *details]
    per_update = self._config.dreamer()[1].batch_size * self._config.steps_per_sequence
    details = [
      f'{learner["replayed_steps_per_second"] / per_update:.1f} updates/s',
      f'ratio {learner["replay_ratio"]:.1f}',
    ]
    if actor:
      details.append(f'staleness {max(0, learner["learner_step"] - actor["parameter_version"])}')
    return details


class ActorsProgress(Progress):
  """The line of a host that does not learn."""

  def line(self) -> str:
    """Steps of all actors, and version, speed and waiting of those that are here."""
    elapsed = time.monotonic() - self._start
    begin = f'{self._config.environment["name"]}  {_clock(elapsed)}  '
    newest = map(metrics.last, (self._folder / 'metrics').glob('actor-*.jsonl'))
    rows = [row for row in newest if row is not None and row['time'] >= self._started_at]
    if not rows:
      return begin + f'starting: {self._starting}'
    steps = max(row['environment_step'] or 0 for row in rows)
    throttled = sum(row['throttled_fraction'] for row in rows) / len(rows)
    parts = [
      f'{begin}{steps:,}/{self._config.max_environment_steps:,} steps',
      f'actors {len(rows)}',
      f'{sum(row["steps_per_second"] for row in rows):,.0f} steps/s',
      f'throttled {throttled:.0%}',
      f'version {max(row["parameter_version"] for row in rows):,}',
    ]
    return '  '.join(parts)


class NoProgress(Progress):
  """The line of a host that neither acts nor has the learner's first process."""

  def line(self) -> str:
    """That it runs."""
    elapsed = _clock(time.monotonic() - self._start)
    return f'{self._config.environment["name"]}  {elapsed}  who measures is on other hosts'


def _labelled(label: str, value: float | None) -> str:
  return '' if value is None else f'{label} {value:.2f}'


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes}:{seconds:02d}'


class Saved(NamedTuple):
  """What a run's newest checkpoint acts by.

  Attributes:
    config: of the run.
    environment: its environment.
    agent: whose parameters they are.
    params: that act.
    all_params: those, and what dreams and judges.
    step: the learner step at which they were saved.
  """

  config: launch_config.ExperimentConfig
  environment: Any
  agent: agent_lib.Agent
  params: Any
  all_params: Any
  step: int


def newest(folder: pathlib.Path) -> Saved:
  """A run's newest checkpoint; the run may be going on.

  Args:
    folder: of the run.

  Raises:
    ValueError: not a run, or nothing saved yet.
  """
  from hephaestus.launch.run import fused as fused_run

  config = load_config(folder)
  agent: agent_lib.Agent
  if config.fused:
    environment, agent, like = fused_run.saved(config)
  else:
    parts = parts_lib.make_parts(config)
    environment, agent, like = parts.environment, parts.agent, parts_lib.saved_shapes(config, parts)
  found = parts_lib.newest_params(folder, like)
  if found is None:
    raise ValueError(f'{folder}: nothing has been saved yet; wait for the first checkpoint')
  step, params = found
  return Saved(config, environment, agent, agent.acting_params(params), params, step)


def load_config(folder: pathlib.Path) -> launch_config.ExperimentConfig:
  """The config of a run; ValueError where the folder is not that of one."""
  if not (folder / CONFIG).exists():
    raise ValueError(f'{folder}: is not the folder of a run, it has no {CONFIG}')
  return launch_config.load(folder / CONFIG)
