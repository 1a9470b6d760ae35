"""Keeps the node processes of a host alive: restart, back-off, give up, no orphans.

It knows commands, exit codes and signals, and not the work of the processes.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import BinaryIO, NamedTuple

from hephaestus.launch.processes import fork_server

POLL_SECONDS = 0.1
TICK_SECONDS = 0.5
LAST_LINES = 20
GROUP_SECONDS = 1.0  # longest wait until the children of a killed process are gone
_KILLED = {-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM}  # exit codes
CANNOT_START = 127  # as a shell reports a command that it cannot run
# One press of Ctrl-C may arrive twice: `timeout`, for one, signals its child and then its group.
SAME_INTERRUPT_SECONDS = 0.5
LEAVE_SECONDS = 1.0  # in which a process ends by itself after the second signal

# Receives every process group, and outlives the supervisor by the moment it takes to kill them:
# the kernel's death signal reaches a child, but not the child's own children.
GUARD = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
  (groups.add if line[0] == '+' else groups.discard)(int(line[1:]))
for group in groups:
  try:
    os.killpg(group, signal.SIGKILL)
  except OSError:
    pass
"""


class Process(NamedTuple):
  """A command to run, and the log of its output."""

  name: str  # unique on this host, such as `actor-0`
  command: Sequence[str]
  environment: Mapping[str, str]  # variables added to the supervisor's own
  log: pathlib.Path  # to which stdout and stderr are appended
  # By these the process says that it ended because of another one, such as a peer on another host.
  external_exit_codes: Set[int] = frozenset()


class Event(NamedTuple):
  """Something happened to a process.

  `kind` is `started`, or `exited`, followed by `finished` (it was 0), `restarting` or `gave_up`. When
  the run stops it is `stopping`, followed by `exited`, or by `killed` after the grace period. A
  process that shares the fate of a restarted one is `killed` as well, and restarts with it.
  """

  kind: str
  name: str  # of the process
  pid: int  # since its last start; 0 if it could not be started
  exit_code: int | None  # of its last end, negative for a signal; None before
  restarts: int  # so far
  delay_seconds: float = 0.0  # until it is restarted, for `restarting`


class Outcome(NamedTuple):
  """How a run ended: well, interrupted by a signal, or because a process was given up."""

  interrupted: int = 0  # number of the signal; 0 for none
  failed: str | None = None  # name of the process that was given up
  failed_exit_code: int | None = None  # its last one
  last_lines: Sequence[str] = ()  # of its log, at most LAST_LINES, since its last start


class Interrupts:
  """Counts the signals that ask to stop, while it is entered in the main thread; in others there are none.

  These are SIGINT, SIGTERM and, unless it is ignored as under `nohup`, SIGHUP.

  Args:
    on_only: called at the first signal, even while a library keeps the main thread from its handlers, as XLA
      does while it compiles. Then signals act as before this object was entered, so that another ends the process;
      where the main thread does not leave in `LEAVE_SECONDS`, it ends at once, unless Python is interactive.
      None to count all signals.

  Attributes:
    count: number of these signals so far; those within half a second count as one.
    first: number of the first signal; 0 before.
  """

  def __init__(self, on_only: Callable[[], None] | None = None):
    self.count = self.first = 0
    self._at = 0.0
    self._on_only = on_only
    self._stack = contextlib.ExitStack()
    self._listening = contextlib.ExitStack()
    self._lock = threading.RLock()

  def __enter__(self) -> 'Interrupts':
    numbers = [signal.SIGINT, signal.SIGTERM]
    if threading.current_thread() is not threading.main_thread():
      numbers = []  # only the main thread may set handlers
    elif signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
      numbers.append(signal.SIGHUP)
    for number in numbers:
      self._stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
    if numbers and self._on_only is not None:
      self._listening.enter_context(self._listen(numbers))
    return self

  def __exit__(self, *unused: object) -> None:
    self._stack.close()
    self._listening.close()

  def _on_signal(self, number, frame) -> None:
    del frame
    if self._on_only is not None:
      self._stack.close()
      self._note_only(number)
      return
    self.first = self.first or number
    now = time.monotonic()
    if not self.count or now - self._at > SAME_INTERRUPT_SECONDS:
      self.count += 1
      self._at = now

  def _note_only(self, number: int) -> None:
    assert self._on_only is not None
    with self._lock:
      if not self.count:
        self.count, self.first = 1, number
        self._on_only()

  @contextlib.contextmanager
  def _listen(self, numbers: Sequence[int]) -> Iterator[None]:
    """Runs `_hear` in a thread, to which Python writes each signal at once."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    left = threading.Event()
    thread = threading.Thread(target=self._hear, args=(ours, numbers, left), daemon=True)
    thread.start()
    try:
      yield
    finally:
      left.set()
      signal.set_wakeup_fd(before)
      theirs.close()
      thread.join()
      ours.close()

  def _hear(self, signals: socket.socket, numbers: Sequence[int], left: threading.Event) -> None:
    heard: float | None = None
    while number := signals.recv(1):
      if number[0] not in numbers:
        continue
      now = time.monotonic()
      if heard is None:
        heard = now
        self._note_only(number[0])
        continue
      is_another = now - heard > SAME_INTERRUPT_SECONDS
      if is_another and not left.wait(LEAVE_SECONDS) and not hasattr(sys, 'ps1'):
        os._exit(128 + number[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts:
  """Rules by which a process is restarted, or given up, which ends the run.

  Attributes:
    backoff_seconds: time before the first restart; doubles with each further failure in a row.
    max_backoff_seconds: longest time before a restart.
    healthy_seconds: a process that ran this long has recovered from earlier failures.
    max_fast_failures: failures in a row, each before `healthy_seconds`, after which a process is given
      up: one that fails three times in a row, each in its first minute, will go on failing.
    max_fast_kills: the same for ends by SIGKILL or SIGTERM, by a person or for want of memory, also in order
      with code 143, and by the `external_exit_codes` of a process.
    together: names of processes that are restarted as one: when one exits with an error, the others
      are killed.
  """

  backoff_seconds: float = 0.5
  max_backoff_seconds: float = 30.0
  healthy_seconds: float = 60.0
  max_fast_failures: int = 3
  max_fast_kills: int = 20
  together: Sequence[str] = ()

  def delay(self, failures: int) -> float:
    """Seconds before the restart after `failures` failures in a row."""
    doublings = min(max(failures - 1, 0), 30)
    return min(self.backoff_seconds * 2**doublings, self.max_backoff_seconds)


@dataclasses.dataclass
class _Child:
  """The state of a process: running, waiting for its restart, or finished."""

  process: Process
  running: subprocess.Popen[bytes] | fork_server.Forked | None = None
  pid: int = 0
  exit_code: int | None = None
  finished: bool = False
  started_at: float = 0.0
  restart_at: float | None = None
  fast_failures: int = 0
  fast_kills: int = 0
  restarts: int = 0
  log_offset: int = 0


class Supervisor:
  """Runs processes until some of them are finished, one fails for good, or a signal arrives.

  A process that exits 0 is finished. Any other exit leads to a restart after
  `backoff_seconds · 2^n`, where n counts the failures in a row before, each within `healthy_seconds`.
  Ends by SIGKILL or SIGTERM, or with one of the `external_exit_codes` of the process, have a maximum of
  their own, because they are rarely its fault. A signal (see `Interrupts`) stops all processes in order; a second
  one kills them. If the supervisor itself is killed, so are its processes and their process groups.

  Args:
    processes: processes to run, started in this order by `run`; their names differ.
    is_over: names of finished processes -> whether the run is finished; by default it ends by a signal
      or a failure only.
    restarts: when to restart and when to give up.
    groups: names of processes, stopped one group after another, and seconds between SIGTERM and SIGKILL
      for each group, or what says them then; None for all processes at once, with 10 s.
    on_signal: called, before anything is stopped, if a signal has asked to stop.
    on_event: called with every event, from the thread that runs.
    on_tick: called about every `TICK_SECONDS`, also while stopping.
    forks: fork server for the commands that it can run, which saves their imports. Other commands,
      and all commands if it is gone, run as new programs.
  """

  def __init__(
    self,
    processes: Sequence[Process],
    *,
    is_over: Callable[[Set[str]], bool] = lambda finished: False,
    restarts: Restarts = Restarts(),
    groups: Sequence[tuple[Sequence[str], float | Callable[[], float]]] | None = None,
    on_signal: Callable[[], None] = lambda: None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_tick: Callable[[], None] = lambda: None,
    forks: fork_server.ForkServer | None = None,
  ):
    self._groups = groups or [([process.name for process in processes], 10.0)]
    self._children = {process.name: _Child(process) for process in processes}
    self._is_over = is_over
    self._restarts = restarts
    self._on_signal = on_signal
    self._on_event = on_event
    self._on_tick = on_tick
    self._forks = forks
    self._next_tick = 0.0
    self._interrupts = Interrupts()
    self._failed: _Child | None = None
    self._guard_pipe = -1

  def run(self) -> Outcome:
    """Starts all processes and returns when all have ended; in the main thread only.

    Signals are handled there, and the kernel's death signal follows the thread that starts a
    process, not the program.
    """
    with contextlib.ExitStack() as stack:
      stack.enter_context(self._interrupts)
      stack.enter_context(self._run_guard())
      stack.callback(self._kill, self._children.values())
      for child in self._children.values():
        self._start(child)
      finished = lambda: {name for name, child in self._children.items() if child.finished}
      while not (self._failed or self._interrupts.count or self._is_over(finished())):
        self._pause()
        self._restart_ended()
      interrupted = self._interrupts.count > 0 and not self._failed
      if interrupted:
        with contextlib.suppress(OSError):  # as in _emit
          self._on_signal()
      self._stop()
    if failed := self._failed:
      return Outcome(0, failed.process.name, failed.exit_code, _last_lines(failed))
    return Outcome(self._interrupts.first if interrupted else 0)

  @contextlib.contextmanager
  def _run_guard(self) -> Iterator[None]:
    guard_end, self._guard_pipe = os.pipe()
    guard = subprocess.Popen(
      [sys.executable, '-I', '-S', '-c', GUARD],
      stdin=guard_end,
      start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )
    try:
      yield
    finally:
      os.close(self._guard_pipe)
      guard.wait()
      os.close(guard_end)  # open until now, so that writes to the pipe never raise

  def _start(self, child: _Child) -> None:
    process = child.process
    with _open_log(process.log) as log:
      now = time.strftime('%Y-%m-%d %H:%M:%S')
      _note(log, f'--- {now} {process.name}: start {child.restarts + 1}\n')
      child.log_offset = log.tell()
      child.started_at = time.monotonic()
      child.restart_at = None
      try:
        child.running = self._execute(process, log)
      except OSError as error:
        _note(log, f'{error}\n')
    child.pid = child.running.pid if child.running else 0
    if child.running:
      self._emit('started', child)
    else:
      self._on_exit(child, CANNOT_START)

  def _execute(
    self, process: Process, log: BinaryIO
  ) -> fork_server.Forked | subprocess.Popen[bytes]:
    """Starts a command by the fork server, or as a new program where that is impossible."""
    if self._forks is not None and self._forks.runs(process.command):
      try:
        return self._forks.start(
          process.name, process.command, process.environment, log.fileno(), self._guard_pipe
        )
      except OSError as error:
        self._forks = None
        _note(log, f'{error}; starting it as a new program\n')
    return subprocess.Popen(
      process.command,
      env={**os.environ, **process.environment},
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      preexec_fn=functools.partial(fork_server.bind_to, os.getpid(), self._guard_pipe),
    )

  def _restart_ended(self) -> None:
    for child in self._children.values():
      exit_code = self._reap(child)
      if exit_code is not None:
        self._on_exit(child, exit_code)
      elif child.restart_at is not None and time.monotonic() >= child.restart_at:
        child.restarts += 1
        self._start(child)

  def _on_exit(self, child: _Child, exit_code: int) -> None:
    child.exit_code = exit_code
    self._emit('exited', child)
    if exit_code == 0:
      child.finished = True
      self._emit('finished', child)
      return
    rules = self._restarts
    if time.monotonic() - child.started_at >= rules.healthy_seconds:
      child.fast_failures = child.fast_kills = 0
    elif exit_code in _KILLED | child.process.external_exit_codes:
      child.fast_kills += 1
    else:
      child.fast_failures += 1
    if child.fast_failures >= rules.max_fast_failures or child.fast_kills >= rules.max_fast_kills:
      self._failed = self._failed or child
      self._emit('gave_up', child)
      return
    delay_seconds = rules.delay(child.fast_failures + child.fast_kills)
    child.restart_at = time.monotonic() + delay_seconds
    self._emit('restarting', child, delay_seconds)
    name = child.process.name
    others = [self._children[other] for other in rules.together if other != name]
    others = others if name in rules.together else []
    self._kill(others)
    for other in others:
      other.finished = False
      other.restart_at = child.restart_at
      other.fast_failures, other.fast_kills = child.fast_failures, child.fast_kills

  def _stop(self) -> None:
    for names, grace in self._groups:
      children = [self._children[name] for name in names]
      for child in children:
        if child.running and self._reap_stopped(child):
          os.kill(child.pid, signal.SIGTERM)
          self._emit('stopping', child)
      deadline = time.monotonic() + (grace() if callable(grace) else grace)
      while alive := [child for child in children if self._reap_stopped(child)]:
        if self._interrupts.count > 1 or time.monotonic() >= deadline:
          self._kill(alive)
          break
        self._pause()

  def _reap_stopped(self, child: _Child) -> bool:
    """Records the end of a child that will not be restarted; returns whether it still runs."""
    exit_code = self._reap(child)
    if exit_code is not None:
      child.exit_code = exit_code
      self._emit('exited', child)
    return child.running is not None

  def _reap(self, child: _Child) -> int | None:
    """Exit code of a child that has ended since the last call, whose process group is killed; else None."""
    if child.running is None:
      return None
    # Not collected yet, so that its number cannot have passed on to another group.
    if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
      return None
    return self._collect(child)

  def _kill(self, children: Iterable[_Child]) -> None:
    children = [child for child in children if child.running]
    for child in children:
      os.killpg(child.pid, signal.SIGKILL)
    for child in children:
      child.exit_code = self._collect(child)
    for child in children:
      self._emit('killed', child)

  def _collect(self, child: _Child) -> int:
    assert child.running is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(child.pid, signal.SIGKILL)
    exit_code = child.running.wait()
    child.running = None
    deadline = time.monotonic() + GROUP_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
      while time.monotonic() < deadline:
        os.killpg(child.pid, 0)
        time.sleep(0.005)
    os.write(self._guard_pipe, f'-{child.pid}\n'.encode())
    return exit_code

  def _pause(self) -> None:
    time.sleep(POLL_SECONDS)
    if time.monotonic() >= self._next_tick:
      self._next_tick = time.monotonic() + TICK_SECONDS
      with contextlib.suppress(OSError):  # as in _emit
        self._on_tick()

  def _emit(self, kind: str, child: _Child, delay_seconds: float = 0.0) -> None:
    event = Event(
      kind, child.process.name, child.pid, child.exit_code, child.restarts, delay_seconds
    )
    with contextlib.suppress(OSError):  # a closed terminal is no reason to kill the learner
      self._on_event(event)


def _open_log(path: pathlib.Path) -> BinaryIO:
  """A log to append to, or /dev/null if it cannot be made: a full disk is no reason to end a run."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, 'ab', buffering=0)
  except OSError:
    return open(os.devnull, 'ab', buffering=0)


def _note(log: BinaryIO, text: str) -> None:
  with contextlib.suppress(OSError):
    log.write(text.encode())


def _last_lines(child: _Child) -> list[str]:
  """The last lines of a child's log since its last start."""
  if not child.process.log.exists():
    return []
  with open(child.process.log, 'rb') as log:
    log.seek(child.log_offset)
    lines = collections.deque(log, maxlen=LAST_LINES)
  return [line.decode(errors='replace').rstrip() for line in lines]
