"""Starts the hosts of a run over ssh or gcloud, shows their output, restarts and stops them."""

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hephaestus.launch.cluster import handshake
from hephaestus.launch.cluster import hosts as hosts_lib
from hephaestus.launch.processes import supervisor

# A connection survives five minutes without the network; then both ends give up.
ALIVE = ('-oServerAliveInterval=30', '-oServerAliveCountMax=10')
STOP_SECONDS = 90.0  # for a host to stop in order: its learner writes a checkpoint
LAST_SECONDS = 900.0  # for other hosts to end after the learner's: one may still evaluate
BACKOFF_SECONDS = 1.0, 30.0  # before a lost host is restarted: at first, and at most
HEALTHY_SECONDS = 60.0  # a host that was up for this long has recovered from earlier losses
LOST_SECONDS = 3600.0  # after which a lost host is given up
_ENDED = (0, 1)  # exit codes of a share that is over: the run ended, or a node failed for good
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # as Popen and as a shell say it


def command(
  hosts: hosts_lib.Hosts, host: hosts_lib.Host, run: str, forwarded_ports: Sequence[int]
) -> list[str] | None:
  """Makes the command by which this machine starts `hephaestus node` on a host.

  Args:
    hosts: all hosts of the run.
    host: the host to start.
    run: run folder on that host.
    forwarded_ports: a free port of this machine for each shard of replay, for tunnels.

  Returns:
    Program and arguments; None for a host that is not reached from here.
  """
  words = f'exec {host.command} ' + shlex.join(['node', '-', '--host', host.name, '--run', run])
  there = words if host.directory is None else f'cd {shlex.quote(host.directory)} && {words}'
  flags = [*ALIVE, *_forwarding(hosts, host, forwarded_ports)]
  if host.ssh is not None:
    return ['ssh', '-T', *host.ssh.options, '-oBatchMode=yes', *flags, host.ssh.target, there]
  if host.gcloud is not None:
    vm = host.gcloud
    project = [] if vm.project is None else [f'--project={vm.project}']
    return [
      *('gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', vm.name, f'--zone={vm.zone}', *project),
      *(f'--worker={vm.worker or 0}', '--quiet', *vm.options),
      *(f'--ssh-flag={flag}' for flag in flags),
      f'--command={there}',
    ]
  return ['sh', '-c', there] if host.local else None


def _forwarding(
  hosts: hosts_lib.Hosts, host: hosts_lib.Host, forwarded_ports: Sequence[int]
) -> list[str]:
  """Flags of ssh for tunnels: from a host to this machine, and from here to the hosts of replay."""
  if not any(each.tunnel for each in hosts.hosts):
    return []
  forwards = []
  for keeper, port, forwarded in zip(hosts.keepers, hosts.ports, forwarded_ports, strict=True):
    entry = port if keeper.local else forwarded
    if host.tunnel:
      forwards.append(f'-R127.0.0.1:{port}:127.0.0.1:{entry}')
    elif host is keeper and not host.local:
      forwards.append(f'-L127.0.0.1:{entry}:127.0.0.1:{port}')
  return ['-oExitOnForwardFailure=yes', *forwards] if forwards else []


class _Connection:
  """A connection to a host: a local process, such as ssh, that ends with the host's `node`.

  A host that was up and then is lost, because its connection or its `node` failed, is restarted. A
  host that never was up is not, because it would fail again.

  Args:
    host: host that the command reaches.
    command: program and arguments, from `command`.
    first_line: line sent to the host first, a RunSpec.
    lines: queue of (connection, line of output, None), and at the end (connection, None, exit code).

  Attributes:
    host: as given.
    exit_code: exit code of the process; None while it runs.
    told_to_stop: whether `stop` was called.
    restart_at: `time.monotonic()` at which the host is to be restarted; None if it is not.

  Raises:
    ValueError: the command cannot be run here; also raised by `start`.
  """

  def __init__(
    self, host: hosts_lib.Host, command: Sequence[str], first_line: bytes, lines: queue.Queue
  ):
    self.host = host
    self.exit_code: int | None = None
    self.told_to_stop = False
    self.restart_at: float | None = None
    self._command = command
    self._first_line = first_line
    self._lines = lines
    self._losses = 0
    self._up_at: float | None = None
    self._lost_at: float | None = None
    self.start()

  def start(self) -> None:
    """Starts `node` on the host, for the first time or after the previous process has ended."""
    self.exit_code = self.restart_at = self._up_at = None
    try:
      self._popen = subprocess.Popen(
        self._command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # out of reach of Ctrl-C, which stops the hosts in order
      )
    except OSError as error:
      raise ValueError(
        f'hosts.{self.host.name}: needs {self._command[0]} here, which cannot be run '
        f'({error.strerror})'
      ) from None
    self._tell(self._first_line)
    threading.Thread(
      target=self._read, args=(self._popen,), name=self.host.name, daemon=True
    ).start()

  def hear(self, line: str) -> None:
    """Notes from a line of its output that the host is up."""
    if line.startswith('up: ') and self._up_at is None:
      self._up_at = time.monotonic()

  def end(self, exit_code: int) -> float | None:
    """Records the end of the process, and decides whether it is to be restarted.

    Returns:
      Seconds until it is restarted; None if it is not.
    """
    now = time.monotonic()
    self.exit_code = exit_code
    if self._up_at is not None:
      self._losses = 0 if now - self._up_at > HEALTHY_SECONDS else self._losses
      self._lost_at = now
    if exit_code in _ENDED or self.told_to_stop or self._lost_at is None:
      return None
    if now - self._lost_at > LOST_SECONDS:
      return None
    first, most = BACKOFF_SECONDS
    seconds = min(first * 2 ** min(self._losses, 10), most)
    self._losses += 1
    self.restart_at = now + seconds
    return seconds

  @property
  def health(self) -> str:
    """State of the host: 'starting', 'up', 'stopping', 'lost' (to be restarted), or 'exit CODE'."""
    if self.exit_code is not None:
      return f'exit {self.exit_code}' if self.restart_at is None else 'lost'
    return 'stopping' if self.told_to_stop else 'starting' if self._up_at is None else 'up'

  @property
  def failed(self) -> bool:
    """Whether the process ended with an error and is not restarted."""
    if self.exit_code is None or self.restart_at is not None:
      return False
    return self.exit_code not in ((0, *_TERMINATED) if self.told_to_stop else (0,))

  def heartbeat(self) -> None:
    if not self.told_to_stop:
      self._tell(b'\n')

  def stop(self) -> None:
    """Asks the host to stop in order, by closing its stdin."""
    self.told_to_stop = True
    self.restart_at = None
    assert self._popen.stdin is not None
    with contextlib.suppress(OSError):
      self._popen.stdin.close()

  def cut(self) -> None:
    """Closes the connection by SIGTERM to the local process; the host then stops by itself."""
    self.stop()
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._popen.pid, signal.SIGTERM)

  def _tell(self, text: bytes) -> None:
    assert self._popen.stdin is not None
    with contextlib.suppress(OSError):  # it has ended; its exit code says why
      self._popen.stdin.write(text)
      self._popen.stdin.flush()

  def _read(self, popen: subprocess.Popen[bytes]) -> None:
    assert popen.stdout is not None
    for line in popen.stdout:
      self._lines.put((self, line.decode(errors='replace').rstrip(), None))
    self._lines.put((self, None, popen.wait()))


class Launch:
  """A launch of all hosts that can be reached from here.

  A lost host is restarted with back-off until the learner has ended. A failed host is reported. The
  launch ends when the run cannot continue: without any shard of replay, without a host of the
  learner, or without actors.

  Args:
    hosts: all hosts of the run.
    commands: name of each host that is reached from here -> the command that starts it.
    spec: run specification that is sent to each of them.
    say: prints a line.
  """

  def __init__(
    self,
    hosts: hosts_lib.Hosts,
    commands: Mapping[str, Sequence[str]],
    spec: handshake.RunSpec,
    say: Callable[[str], None],
  ):
    self._hosts = hosts
    self._commands = commands
    self._spec = spec
    self._say = say
    self._lines: queue.Queue = queue.Queue()
    self._connections: list[_Connection] = []
    self._interrupts = supervisor.Interrupts()
    self._beaten = 0.0
    self._health = ''

  def run(self) -> int:
    """Starts the hosts and returns when all have ended; in the main thread only.

    Returns:
      The exit code: 0 when all hosts succeeded, or stopped in order; 1 when any failed.

    Raises:
      ValueError: ssh or gcloud is not installed here.
    """
    with contextlib.ExitStack() as stack:
      stack.enter_context(self._interrupts)
      stack.callback(self._cut)
      for name, words in self._commands.items():
        host = self._hosts.find(name)
        self._connections.append(_Connection(host, words, self._spec.to_line(), self._lines))
      self._follow()
      self._stop()
    for connection in self._connections:
      if connection.failed:
        self._say(f'{connection.host.name} failed: {connection.health}')
    return 1 if any(connection.failed for connection in self._connections) else 0

  def _follow(self) -> None:
    """Shows output and restarts lost hosts until all have ended, a signal, or the run cannot continue."""
    deadline: float | None = None
    is_active = lambda each: each.exit_code is None or each.restart_at is not None
    while any(map(is_active, self._connections)) and not self._interrupts.count:
      self._pump()
      if reason := self._hopeless():
        self._say(f'{reason}: stopping the others')
        return
      learned = [each for each in self._connections if each.host.learner and each.exit_code == 0]
      if learned and deadline is None:
        deadline = time.monotonic() + LAST_SECONDS
      for each in self._connections:
        if each.restart_at is not None and deadline is not None:
          each.restart_at = None
        elif each.restart_at is not None and time.monotonic() >= each.restart_at:
          each.start()
      if deadline is not None and time.monotonic() > deadline:
        self._say('the learner has ended: stopping the other hosts')
        return

  def _hopeless(self) -> str:
    """Reason why the run cannot continue; '' when it can."""
    keeping = [each for each in self._connections if each.host.replay]
    is_kept = not keeping or not all(each.failed for each in keeping)
    for connection in self._connections:
      needed = connection.host.learner or (connection.host.replay and not is_kept)
      if connection.failed and needed:
        return f'{connection.host.name} failed'
    acting = [each for each in self._connections if each.host.actors]
    elsewhere = any(host.actors for host in self._hosts.hosts if host.name not in self._commands)
    if acting and not elsewhere and all(each.failed for each in acting):
      return 'no actors are left'
    return ''

  def _stop(self) -> None:
    """Stops actors first, then the learner, which checkpoints replay, then replay."""
    groups: list[list[_Connection]] = [[], [], []]
    for connection in self._connections:
      host = connection.host
      # Processes of a learner end together, so all of them stop with the one on a host with replay.
      last = host.replay or (host.learner and any(each.learner for each in self._hosts.keepers))
      groups[2 if last else 1 if host.learner else 0].append(connection)
    for group in groups:
      for connection in group:
        connection.stop()
      deadline = time.monotonic() + STOP_SECONDS
      while self._alive(group) and self._interrupts.count < 2 and time.monotonic() < deadline:
        self._pump()
    if left := self._alive(self._connections):
      self._cut()
      names = ', '.join(connection.host.name for connection in left)
      self._say(f'the connection to {names} is closed; the nodes there stop by themselves')
      deadline = time.monotonic() + 5.0
      while self._alive(left) and time.monotonic() < deadline:
        self._pump()

  def _cut(self) -> None:
    for connection in self._connections:
      if connection.exit_code is None:
        connection.cut()

  def _alive(self, connections: Sequence[_Connection]) -> list[_Connection]:
    return [connection for connection in connections if connection.exit_code is None]

  def _pump(self) -> None:
    """Shows the next line of output, if one comes within half a second; sends heartbeats when due."""
    now = time.monotonic()
    if now - self._beaten > handshake.HEARTBEAT_PERIOD:
      self._beaten = now
      for connection in self._alive(self._connections):
        connection.heartbeat()
    with contextlib.suppress(queue.Empty):
      connection, line, exit_code = self._lines.get(timeout=0.5)
      if line is None:
        seconds = connection.end(exit_code)
        if seconds is not None:
          self._say(
            f'{connection.host.name} is lost (exit {exit_code}); restarting it in {seconds:g} s'
          )
      else:
        connection.hear(line)
        self._say(f'{connection.host.name}| {line}')
    health = '  '.join(f'{each.host.name}: {each.health}' for each in self._connections)
    if health != self._health:
      self._health = health
      self._say(f'hosts  {health}')
