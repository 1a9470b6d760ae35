"""Jobs: runs by commands of this project, as many at a time as there are cores for them."""

import abc
import dataclasses
import functools
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hephaestus.launch.run import fork_server, supervisor

INTERRUPTED = 130  # exit code, as of a shell: 128 + SIGINT
POLL_SECONDS = 0.1
PROGRESS_SECONDS = 60.0
COMMAND = (sys.executable, '-m', 'hephaestus.launch.main')


class Command(NamedTuple):
  """A command of this project.

  Attributes:
    label: names its work, such as 'training'.
    words: after `hephaestus`.
    output: file of its stdout; None for the log of its job.
    max_seconds: after which it is killed; None for no limit.
  """

  label: str
  words: Sequence[str]
  output: pathlib.Path | None = None
  max_seconds: float | None = None


class Ended(NamedTuple):
  """A command that has ended.

  Attributes:
    label: of the command.
    code: its exit code.
    cpu_seconds: of it and of all processes that it waited for.
    wall_seconds: from its start to its end.
    cores: that it had.
  """

  label: str
  code: int
  cpu_seconds: float
  wall_seconds: float
  cores: Collection[int]


class Failed(Exception):  # noqa: N818  it is what happened
  """Says why a job cannot continue."""


class Job(abc.ABC):
  """A run, as commands one after another.

  Attributes:
    name: for lines of progress.
    log: of its commands.
  """

  name: str
  log: pathlib.Path

  @abc.abstractmethod
  def begin(self) -> Command:
    """The first command; `Failed` where it cannot begin."""

  @abc.abstractmethod
  def after(self, ended: Ended) -> Command | None:
    """The command after one that has ended, also by an error; None where nothing is left to do.

    Raises:
      Failed: nothing can follow.
    """

  @abc.abstractmethod
  def line(self, seconds: float) -> str:
    """Results so far, for a line of progress.

    Args:
      seconds: since the start of the command that runs; 0 where none does.
    """

  def failure(self, ended: Ended) -> Failed:
    """Names the command that has ended by an error, with the last line of the log."""
    lines = self.log.read_text(errors='replace').strip().splitlines()
    last = lines[-1] if lines else 'it printed nothing'
    return Failed(f'{ended.label} ended with exit code {ended.code}: {last}')


class Outcome(NamedTuple):
  """The end of all jobs.

  Attributes:
    code: 0, 1 where a job failed, or INTERRUPTED.
    left: number of jobs that are not done.
  """

  code: int
  left: int


def available_cores(jobs: int | None = None) -> list[int]:
  """The cores for so many jobs of one core each; all that are available for None.

  Raises:
    ValueError: there are fewer.
  """
  has_affinity = hasattr(os, 'sched_getaffinity')
  available = sorted(os.sched_getaffinity(0)) if has_affinity else list(range(os.cpu_count() or 1))
  if jobs is not None and not 1 <= jobs <= len(available):
    raise ValueError(f'--jobs {jobs}: from 1 to {len(available)}, the number of available cores')
  return available[:jobs]


def run_all(
  jobs: Sequence[Job], cores: Sequence[Collection[int]], say: Callable[[str], None]
) -> Outcome:
  """Does jobs, as many at a time as there are shares of the cores.

  A job that fails is named, and the others continue. SIGINT stops all of them in order, a second
  one at once.

  Args:
    jobs: to do, in this order.
    cores: a share for each job that runs at a time.
    say: takes lines of progress.
  """
  with supervisor.Interrupts() as interrupts:
    pool = _Pool(jobs, cores, say)
    passed_on = 0
    while pool.advance(stopping=interrupts.count > 0):
      if interrupts.count > passed_on:
        passed_on = interrupts.count
        say('stopping the runs; a second Ctrl-C kills them')
        pool.interrupt(again=passed_on > 1)
      time.sleep(POLL_SECONDS)
  code = INTERRUPTED if interrupts.count else 1 if pool.failed else 0
  return Outcome(code, pool.left)


class _Child:
  """A command of this project as a child process on some cores, killed with this process.

  Attributes:
    label: of the command.
  """

  def __init__(self, command: Command, cores: Collection[int], log: pathlib.Path):
    self.label, self._cores = command.label, cores
    self._max_seconds = math.inf if command.max_seconds is None else command.max_seconds
    self._begin = time.monotonic()
    with open(log, 'a') as errors, open(command.output or os.devnull, 'w') as output:
      self._popen = subprocess.Popen(
        [*COMMAND, *command.words],
        stdin=subprocess.DEVNULL,
        stdout=errors if command.output is None else output,
        stderr=errors,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C, which is passed on in order
        preexec_fn=functools.partial(_begin_child, os.getpid(), cores),
      )

  def poll(self) -> Ended | None:
    """How it has ended; None while it runs. Not called again afterwards."""
    pid, status, usage = os.wait4(self._popen.pid, os.WNOHANG)
    if not pid:
      if self.wall_seconds > self._max_seconds:
        self.send(signal.SIGKILL)
      return None
    self._popen.returncode = os.waitstatus_to_exitcode(status)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Ended(self.label, self._popen.returncode, cpu_seconds, self.wall_seconds, self._cores)

  @property
  def wall_seconds(self) -> float:
    """Since its start."""
    return time.monotonic() - self._begin

  def send(self, number: int) -> None:
    """Sends a signal to it, while it runs."""
    os.kill(self._popen.pid, number)  # Popen would also wait for it, without its usage


def _begin_child(parent_pid: int, cores: Collection[int]) -> None:
  fork_server.bind_to(parent_pid)
  if hasattr(os, 'sched_setaffinity'):  # else the system chooses
    os.sched_setaffinity(0, set(cores))


@dataclasses.dataclass(frozen=True, eq=False)
class _Turn:
  """A job that has begun, its number from 1, and its cores."""

  job: Job
  number: int
  cores: Collection[int]


class _Pool:
  """Jobs on shares of the cores.

  Attributes:
    failed: number of jobs that failed.
  """

  def __init__(
    self, jobs: Sequence[Job], cores: Sequence[Collection[int]], say: Callable[[str], None]
  ):
    self.failed = 0
    self._waiting = list(enumerate(jobs, start=1))
    self._total = len(jobs)
    self._say = say
    self._free = list(cores)
    self._running: dict[_Turn, _Child] = {}
    self._done = 0
    self._reported = time.monotonic()

  @property
  def left(self) -> int:
    """Number of jobs that are not done."""
    return self._total - self._done

  def interrupt(self, *, again: bool) -> None:
    """Stops all jobs in order, or `again` at once."""
    for child in self._running.values():
      child.send(signal.SIGKILL if again else signal.SIGINT)

  def advance(self, *, stopping: bool) -> bool:
    """Starts and ends commands; returns whether any is left."""
    while self._waiting and self._free and not stopping:
      number, job = self._waiting.pop(0)
      self._next(_Turn(job, number, self._free.pop(0)), job.begin, stopping=stopping)
    is_due = time.monotonic() - self._reported > PROGRESS_SECONDS
    for turn, child in list(self._running.items()):
      ended = child.poll()
      if ended is not None:
        del self._running[turn]
        self._next(turn, functools.partial(turn.job.after, ended), stopping=stopping)
      elif is_due:
        self._say(f'{self._number(turn)} {turn.job.line(child.wall_seconds)} so far, {child.label}')
    if is_due:
      self._reported = time.monotonic()
    return bool(self._running or (self._waiting and not stopping))

  def _next(
    self, turn: '_Turn', make_command: Callable[[], Command | None], *, stopping: bool
  ) -> None:
    """Begins the next command of a job, or ends the job."""
    try:
      command = make_command()
    except Failed as failed:
      self._free.append(turn.cores)
      if not stopping:
        self.failed += 1
        words = f'warning: {turn.job.name}: {failed} (log: {turn.job.log})'
        self._say(f'{self._number(turn)} {words}')
      return
    if command is not None and not stopping:
      self._running[turn] = _Child(command, turn.cores, turn.job.log)
      return
    self._free.append(turn.cores)
    if command is None:
      self._done += 1
      self._say(f'{self._number(turn)} {turn.job.line(0.0)}')

  def _number(self, turn: '_Turn') -> str:
    return f'[{turn.number}/{self._total}]'
