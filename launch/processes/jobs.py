"""Jobs, each a sequence of `hephaestus` commands, run in parallel on shares of the CPU cores."""

import abc
import functools
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Generator, Sequence
from typing import NamedTuple

from hephaestus.launch.processes import fork_server, supervisor

INTERRUPTED = 130  # exit code, as of a shell: 128 + SIGINT
POLL_SECONDS = 0.1
PROGRESS_SECONDS = 60.0
COMMAND = (sys.executable, '-m', 'hephaestus.launch.main')


class Command(NamedTuple):
  """A `hephaestus` command, to be run in a process of its own."""

  label: str  # what it does, such as 'training', in lines of progress
  words: Sequence[str]  # command-line arguments after `hephaestus`
  output: pathlib.Path | None = None  # file for its stdout; None for the log of its job
  max_seconds: float = math.inf  # wall time after which it is killed


class Ended(NamedTuple):
  """A command that has ended."""

  label: str
  code: int  # exit code, negative for a signal
  cpu_seconds: float  # of its process and of all descendants that were waited for
  wall_seconds: float
  cores: Collection[int]  # indices of the CPU cores that it had


class Failed(Exception):  # noqa: N818  it is what happened
  """Raised by a job that cannot continue; the message says why."""


class Job(abc.ABC):
  """One or more commands, one after another."""

  name: str  # for lines of progress
  log: pathlib.Path  # to which the output of its commands is appended

  @abc.abstractmethod
  def commands(self) -> Generator[Command, Ended, None]:
    """Yields each command, and is sent how it has ended; raises `Failed` if the job cannot continue."""

  @abc.abstractmethod
  def line(self, seconds: float) -> str:
    """A line of progress, `seconds` after the start of the running command; 0 once the job is done."""

  def check(self, ended: Ended) -> None:
    """Raises `Failed`, which quotes the last line of the log, for a command that ended with an error."""
    if ended.code:
      lines = self.log.read_text(errors='replace').strip().splitlines()
      last = lines[-1] if lines else 'it printed nothing'
      raise Failed(f'{ended.label} ended with exit code {ended.code}: {last}')


def available_cores(jobs: int | None = None) -> list[int]:
  """Indices of the CPU cores that this process may use, or of one for each job; ValueError if too few."""
  has_affinity = hasattr(os, 'sched_getaffinity')
  available = sorted(os.sched_getaffinity(0)) if has_affinity else list(range(os.cpu_count() or 1))
  if jobs is not None and not 1 <= jobs <= len(available):
    raise ValueError(f'--jobs {jobs}: from 1 to {len(available)}, the number of available cores')
  return available[:jobs]


def run_all(
  jobs: Sequence[Job], cores: Sequence[Collection[int]], say: Callable[[str], None]
) -> tuple[int, int]:
  """Runs jobs, as many at a time as there are shares of the cores.

  A job that fails is reported, and the others continue. SIGINT, SIGTERM or SIGHUP stops the running
  jobs in order; a second one kills them.

  Args:
    jobs: jobs to run, started in this order.
    cores: core indices of each share; one job at a time runs on a share.
    say: prints a line of progress.

  Returns:
    The exit code, 0, 1 if a job failed, or `INTERRUPTED` after a signal; and the number of jobs that are
    not done.
  """
  waiting = [_Turn(job, f'[{at}/{len(jobs)}]') for at, job in enumerate(jobs, start=1)]
  free, running = list(cores), list[_Turn]()
  done = failed = passed_on = 0
  reported = time.monotonic()
  with supervisor.Interrupts() as interrupts:
    while running or (waiting and not interrupts.count):
      ended: list[tuple[_Turn, Ended | None]] = []
      while waiting and free and not interrupts.count:
        turn = waiting.pop(0)
        turn.cores = free.pop(0)
        ended.append((turn, None))
      for turn in running:
        if (end := turn.poll()) is not None:
          ended.append((turn, end))
      for turn, end in ended:
        if end is not None:
          running.remove(turn)
        try:
          command = next(turn.commands) if end is None else turn.commands.send(end)
          if not interrupts.count:
            turn.start(command)
            running.append(turn)
            continue
        except StopIteration:
          done += 1
          say(f'{turn.number} {turn.job.line(0.0)}')
        except Failed as failure:
          if not interrupts.count:
            failed += 1
            say(f'{turn.number} warning: {turn.job.name}: {failure} (log: {turn.job.log})')
        free.append(turn.cores)
      if time.monotonic() - reported > PROGRESS_SECONDS:
        reported = time.monotonic()
        for turn in running:
          say(f'{turn.number} {turn.job.line(turn.wall_seconds)} so far, {turn.label}')
      if interrupts.count > passed_on:
        passed_on = interrupts.count
        say('stopping the runs; a second Ctrl-C kills them')
        for turn in running:
          turn.send(signal.SIGKILL if passed_on > 1 else signal.SIGINT)
      time.sleep(POLL_SECONDS)
  code = INTERRUPTED if interrupts.count else 1 if failed else 0
  return code, len(jobs) - done


class _Turn:
  """A job and its running command, a child process on some cores that is killed with this process."""

  def __init__(self, job: Job, number: str):
    self.job, self.number, self.commands = job, number, job.commands()
    self.cores: Collection[int] = ()

  def start(self, command: Command) -> None:
    self.label = command.label
    self._max_seconds = command.max_seconds
    self._begin = time.monotonic()
    with open(self.job.log, 'a') as errors, open(command.output or os.devnull, 'w') as output:
      self._popen = subprocess.Popen(
        [*COMMAND, *command.words],
        stdin=subprocess.DEVNULL,
        stdout=errors if command.output is None else output,
        stderr=errors,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C, which is passed on in order
        preexec_fn=functools.partial(_begin_child, os.getpid(), self.cores),
      )

  def poll(self) -> Ended | None:
    """How the command has ended, after which it is not to be called again; None while it runs."""
    pid, status, usage = os.wait4(self._popen.pid, os.WNOHANG)
    if not pid:
      if self.wall_seconds > self._max_seconds:
        self.send(signal.SIGKILL)
      return None
    self._popen.returncode = os.waitstatus_to_exitcode(status)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Ended(self.label, self._popen.returncode, cpu_seconds, self.wall_seconds, self.cores)

  @property
  def wall_seconds(self) -> float:
    """Wall time since the start of the command."""
    return time.monotonic() - self._begin

  def send(self, number: int) -> None:
    os.kill(self._popen.pid, number)  # Popen would also wait for it, without its usage


def _begin_child(parent_pid: int, cores: Collection[int]) -> None:
  fork_server.bind_to(parent_pid)
  if hasattr(os, 'sched_setaffinity'):  # else the system chooses
    os.sched_setaffinity(0, set(cores))
