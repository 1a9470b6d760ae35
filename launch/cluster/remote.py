"""Starts the hosts of a run over ssh or gcloud, shows their output, restarts and stops them."""

import contextlib
import dataclasses
import math
import os
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
ALIVE = ('-oConnectTimeout=60', '-oServerAliveInterval=30', '-oServerAliveCountMax=10')
STOP_SECONDS = 90.0  # for a host to stop in order: its learner writes a checkpoint
LAST_SECONDS = 900.0  # for other hosts to end after the learner's: one may still evaluate
# Of a lost host, which has recovered from earlier losses once it was up for `healthy_seconds`.
RESTARTS = supervisor.Restarts(backoff_seconds=1.0, max_backoff_seconds=30.0, healthy_seconds=60.0)
LOST_SECONDS = 3600.0  # after which a lost host is given up
_ENDED = (0, 1)  # exit codes of a share that is over: the run ended, or a node failed for good
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # as Popen and as a shell say it


def command(
  hosts: hosts_lib.Hosts, host: hosts_lib.Host, run: str, forwarded_ports: Sequence[int]
) -> list[str] | None:
  """The command by which this machine starts `hephaestus node` on a host; None if it reaches it in no way.

  Args:
    run: run folder on that host.
    forwarded_ports: a free port of this machine for each shard of replay, for tunnels.
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


@dataclasses.dataclass(eq=False, kw_only=True)
class _Connection:
  """A connection to a host: a local process, such as ssh, that ends with the host's `node`.

  A host that was up and then is lost, because its connection or its `node` failed, is restarted. A
  host that never was up is not, because it would fail again.
  """

  host: hosts_lib.Host
  command: Sequence[str]  # ValueError if it cannot be run here
  first_line: bytes  # sent to the host, a RunSpec
  say: Callable[[str], None]  # prints a line; called from a thread
  health: str = 'starting'  # or 'up', 'stopping', 'lost' (to be restarted), 'exit CODE'
  exit_code: int | None = None  # once the process has ended and is not restarted
  is_stopping: bool = False  # whether `stop` was called
  restarts_no_more: threading.Event = dataclasses.field(default_factory=threading.Event)

  def __post_init__(self):
    self._start()
    threading.Thread(target=self._run, name=self.host.name, daemon=True).start()

  def _start(self) -> None:
    """Starts `node` on the host."""
    self.health = 'starting'
    try:
      self._popen = subprocess.Popen(
        self.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # out of reach of Ctrl-C, which stops the hosts in order
      )
    except OSError as error:
      raise ValueError(
        f'hosts.{self.host.name}: needs {self.command[0]} here, which cannot be run '
        f'({error.strerror})'
      ) from None
    self.tell(self.first_line)

  def _run(self) -> None:
    """Shows the output of the process, and restarts it, until it has ended for good."""
    losses, lost_at = 0, -math.inf
    while True:
      up_at = None
      # A machine may take connections, and never answer.
      limit = threading.Timer(LOST_SECONDS, self._terminate, [self._popen])
      limit.daemon = True
      if losses:
        limit.start()
      assert self._popen.stdout is not None
      for line in self._popen.stdout:
        text = line.decode(errors='replace').rstrip()
        if text.startswith('up: ') and up_at is None:
          up_at = time.monotonic()
          limit.cancel()
          self.health = 'stopping' if self.is_stopping else 'up'
        self.say(f'{self.host.name}| {text}')
      exit_code, now = self._popen.wait(), time.monotonic()
      limit.cancel()
      if up_at is not None:
        lost_at = now
        losses = 0 if now - up_at > RESTARTS.healthy_seconds else losses
      losses += 1
      if exit_code in _ENDED or self.restarts_no_more.is_set() or now - lost_at > LOST_SECONDS:
        break
      seconds = RESTARTS.delay(losses)
      self.health = 'lost'
      self.say(f'{self.host.name} is lost (exit {exit_code}); restarting it in {seconds:g} s')
      if self.restarts_no_more.wait(seconds):
        break
      try:
        self._start()
      except ValueError as error:
        self.say(str(error))
        break
      if self.is_stopping:  # meanwhile
        self.stop()
    self.health, self.exit_code = f'exit {exit_code}', exit_code

  @property
  def failed(self) -> bool:
    """Whether the process has ended for good with an error."""
    return self.exit_code not in (None, 0, *(_TERMINATED if self.is_stopping else ()))

  def tell(self, text: bytes) -> None:
    """Writes to the host's stdin, unless it stops."""
    assert self._popen.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it has ended, as its exit code says, or stops
      if not self.is_stopping:
        self._popen.stdin.write(text)
        self._popen.stdin.flush()

  def stop(self) -> None:
    """Asks the host to stop in order, by closing its stdin."""
    self.is_stopping = True
    self.restarts_no_more.set()
    if self.exit_code is None:
      self.health = 'stopping'
    assert self._popen.stdin is not None
    with contextlib.suppress(OSError):
      self._popen.stdin.close()

  def cut(self) -> None:
    """Closes the connection by SIGTERM to the local process; the host then stops by itself."""
    self.stop()
    self._terminate(self._popen)

  def _terminate(self, process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


class Launch:
  """A launch of all hosts that can be reached from here.

  A lost host is restarted with back-off until the learner has ended. A failed host is reported. The
  launch ends when the run cannot continue: without any shard of replay, without a host of the
  learner, or without actors.

  Args:
    hosts: all hosts of the run.
    commands: name of each host that is reached from here -> the command that starts it.
    spec: run specification that is sent to each of them.
    say: prints a line; called from several threads.
  """

  def __init__(
    self,
    hosts: hosts_lib.Hosts,
    commands: Mapping[str, Sequence[str]],
    spec: handshake.RunSpec,
    say: Callable[[str], None],
  ):
    self._hosts, self._commands, self._spec, self._say = hosts, commands, spec, say
    self._connections: list[_Connection] = []
    self._interrupts = supervisor.Interrupts()
    self._beaten, self._health = 0.0, ''

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
        host, line = self._hosts.find(name), self._spec.to_line()
        self._connections.append(
          _Connection(host=host, command=words, first_line=line, say=self._say)
        )
      self._follow()
      self._stop()
    self._pause()  # which shows how all have ended
    failed = [each for each in self._connections if each.failed]
    for each in failed:
      self._say(f'{each.host.name} failed: {each.health}')
    return 1 if failed else 0

  def _follow(self) -> None:
    """Returns when all hosts have ended, a signal asks to stop, or the run cannot continue."""
    deadline = math.inf
    while self._alive(self._connections) and not self._interrupts.count:
      self._pause()
      if reason := self._hopeless():
        self._say(f'{reason}: stopping the others')
        return
      if any(each.host.learner and each.exit_code == 0 for each in self._connections):
        deadline = min(deadline, time.monotonic() + LAST_SECONDS)
        for each in self._connections:
          each.restarts_no_more.set()
      if time.monotonic() > deadline:
        self._say('the learner has ended: stopping the other hosts')
        return

  def _hopeless(self) -> str:
    """Reason why the run cannot continue; '' when it can."""
    failed = [each.host for each in self._connections if each.failed]
    keepers = [each.host for each in self._connections if each.host.replay]
    is_kept = any(host not in failed for host in keepers)
    for host in failed:
      if host.learner or (host.replay and not is_kept):
        return f'{host.name} failed'
    acts = any(host.actors and host not in failed for host in self._hosts.hosts)
    return '' if acts else 'no actors are left'

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
        self._pause()
    if left := self._alive(self._connections):
      self._cut()
      names = ', '.join(connection.host.name for connection in left)
      self._say(f'the connection to {names} is closed; the nodes there stop by themselves')
      deadline = time.monotonic() + 5.0
      while self._alive(left) and time.monotonic() < deadline:
        self._pause()

  def _cut(self) -> None:
    for connection in self._alive(self._connections):
      connection.cut()

  def _alive(self, connections: Sequence[_Connection]) -> list[_Connection]:
    return [connection for connection in connections if connection.exit_code is None]

  def _pause(self) -> None:
    """Waits a moment; sends heartbeats when due, and shows how the hosts are when that has changed."""
    time.sleep(0.1)
    if time.monotonic() - self._beaten > handshake.HEARTBEAT_PERIOD:
      self._beaten = time.monotonic()
      for connection in self._alive(self._connections):
        connection.tell(b'\n')
    health = '  '.join(f'{each.host.name}: {each.health}' for each in self._connections)
    if health != self._health:
      self._health = health
      self._say(f'hosts  {health}')
