"""Trains and evaluates the runs of the suite in child processes, each on a core of its own."""

import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hephaestus.launch import records
from hephaestus.launch.bench.learning import scores, suite
from hephaestus.launch.run import fork_server, metrics, supervisor

INTERRUPTED = 130  # exit code, as of a shell: 128 + SIGINT
ROWS = 'rows.jsonl'
ATTEMPTS = 'attempts.jsonl'  # CPU and wall time of each start of a run, in its folder
EVALUATIONS = ('random', 'greedy', 'sampled')
POLL_SECONDS = 0.1
PROGRESS_SECONDS = 60.0
PACKAGE = pathlib.Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, '-m', 'hephaestus.launch.main')
# Frequent reports of returns, and few evaluations, which take time from the core; none of these
# changes learning.
MEASURING = (
  'actor.log_period=1', 'evaluator.period=1000000', 'evaluator.num_episodes=1',
  'evaluator.final_episodes=1', 'tensorboard=false',
)  # fmt: skip


class Run(NamedTuple):
  """One run of the suite.

  Attributes:
    task: environment and budget.
    agent: as of `train --agent`.
    seed: of the run.
  """

  task: suite.Task
  agent: str
  seed: int

  @property
  def name(self) -> str:
    return f'{self.task.name} {self.agent} seed {self.seed}'


class Settings(NamedTuple):
  """The settings of all runs of a call.

  Attributes:
    out: folder of the results.
    label: of the rows; tells settings apart.
    preset: as of `train --preset`.
    overrides: as of `train --set`, for all environments.
    max_minutes: of training, after which a run ends early; None for no limit.
    fused: whether each run is one process, of an agent that can be fused; else as `train` decides.
  """

  out: pathlib.Path
  label: str = 'default'
  preset: str = 'laptop'
  overrides: Sequence[str] = ()
  max_minutes: float | None = None
  fused: bool = True

  def folder(self, run: Run) -> pathlib.Path:
    """The folder of a run."""
    return self.out / 'runs' / self.label / f'{run.task.name}-{run.agent}-{run.seed}'

  def log(self, run: Run) -> pathlib.Path:
    """The output of a run's commands."""
    folder = self.folder(run)
    return folder.with_name(f'{folder.name}.log')

  def recorded(self) -> dict[str, Any]:
    """The settings that decide what a run learns, as a row has them."""
    return {
      'preset': self.preset,
      'set': list(self.overrides),
      'max_minutes': self.max_minutes,
      **({'fused': True} if self.fused else {}),  # rows of distributed runs do not have it
    }


def train_command(run: Run, settings: Settings) -> list[str]:
  """The command that starts a run, or resumes it where its folder exists."""
  limit = [] if settings.max_minutes is None else [f'max_minutes={settings.max_minutes:g}']
  options = [f'environment.{key}={value}' for key, value in run.task.options.items()]
  measuring = (*MEASURING, *suite.SETTINGS.get(run.agent, ()))
  fused = settings.fused and records.find_record(run.agent).can_fuse
  return [
    'train', '--run', str(settings.folder(run)), '--agent', run.agent, '--preset', settings.preset,
    '--env', run.task.environment, '--steps', str(run.task.steps), '--seed', str(run.seed),
    *(['--fused'] if fused else []),
    '--set', *options, *measuring, *limit, *settings.overrides,
  ]  # fmt: skip


def evaluate_command(run: Run, settings: Settings) -> list[str]:
  """The command that scores the last checkpoint of a run."""
  return [
    'evaluate', str(settings.folder(run)), '--actions', *EVALUATIONS,
    '--episodes', str(run.task.episodes), '--seed', str(run.seed), '--json',
  ]  # fmt: skip


def read_rows(out: pathlib.Path) -> list[dict[str, Any]]:
  """The rows of a folder of results; of several for one run, the newest."""
  found = {_key(row): row for row in metrics.read(out / ROWS)}
  return list(found.values())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
  return row['environment'], row['agent'], row['seed'], row['label']


def missing(runs: Sequence[Run], settings: Settings) -> list[Run]:
  """The runs without a row.

  A row of another step budget does not count, because the suite has changed since.

  Raises:
    ValueError: a row of the same label has other settings.
  """
  present = set()
  for row in read_rows(settings.out):
    present.add((*_key(row), row['budget']))
    if row['label'] == settings.label and row['settings'] != settings.recorded():
      raise ValueError(
        f'--label {settings.label}: {settings.out / ROWS} has rows of other settings, '
        f'{json.dumps(row["settings"])}; give another label, or another --out'
      )
  key = lambda run: (run.task.name, run.agent, run.seed, settings.label, run.task.steps)
  return [run for run in runs if key(run) not in present]


class _Child:
  """A command of this project as a child process on one core, killed with this process.

  Attributes:
    code: its exit code; None while it runs.
    cpu_seconds: once it has ended, of it and of all processes that it waited for.
  """

  def __init__(self, command: Sequence[str], core: int, output: Any, log: Any):
    self.code: int | None = None
    self.cpu_seconds = 0.0
    self._begin = time.monotonic()
    self._end: float | None = None
    self._popen = subprocess.Popen(
      [*COMMAND, *command],
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=log,
      start_new_session=True,  # out of reach of the terminal's Ctrl-C, which is passed on in order
      preexec_fn=functools.partial(_begin_child, os.getpid(), core),
    )

  def poll(self) -> bool:
    """Whether it has ended."""
    if self.code is None:
      pid, status, usage = os.wait4(self._popen.pid, os.WNOHANG)
      if pid:
        self.code = self._popen.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        self._end = time.monotonic()
    return self.code is not None

  @property
  def wall_seconds(self) -> float:
    """Until its end, or until now."""
    return (time.monotonic() if self._end is None else self._end) - self._begin

  def send(self, number: int) -> None:
    """Sends a signal, if it runs."""
    if self.code is None:
      os.kill(self._popen.pid, number)  # Popen would also wait for it, without its usage


def _begin_child(parent_pid: int, core: int) -> None:
  fork_server.bind_to(parent_pid)
  if hasattr(os, 'sched_setaffinity'):  # else the system chooses
    os.sched_setaffinity(0, {core})


class _Job:
  """A run that is trained, then evaluated.

  Attributes:
    run: the run.
    number: of the run, from 1.
    core: of its processes.
    failure: the reason why it has no row; None if there is none.
    has_row: whether it is done.
  """

  def __init__(self, run: Run, settings: Settings, number: int, core: int):
    self.run, self.number, self.core = run, number, core
    self.failure: str | None = None
    self.has_row = False
    self._settings = settings
    self._folder = settings.folder(run)
    self._folder.parent.mkdir(parents=True, exist_ok=True)
    self._evaluation = self._folder.with_name(f'{self._folder.name}.evaluation')
    self._is_training = True
    self._child = self._start(train_command(run, settings), None)

  def _start(self, command: list[str], output: pathlib.Path | None) -> _Child:
    with open(self._settings.log(self.run), 'a') as log:
      if output is None:
        return _Child(command, self.core, log, log)
      with open(output, 'w') as file:
        return _Child(command, self.core, file, log)

  @property
  def phase(self) -> str:
    """Words for a line of progress, after training."""
    return '' if self._is_training else ', evaluating'

  def interrupt(self, *, again: bool) -> None:
    """Stops it in order, or `again` at once."""
    self._child.send(signal.SIGKILL if again else signal.SIGINT)

  def advance(self, rows: metrics.JsonLines, *, stopping: bool) -> bool:
    """Takes the next step where the last has ended; returns whether nothing is left to do.

    Args:
      rows: takes the row of the run.
      stopping: whether nothing more may begin.
    """
    if not self._child.poll():
      return False
    if self._is_training:
      self._note_attempt()
    if stopping and self._child.code:
      return True
    if self._child.code:
      words = 'training' if self._is_training else 'evaluation'
      self.failure = f'{words} ended with exit code {self._child.code}: {self._last_line()}'
      return True
    if not self._is_training:
      rows.write(self._row())
      self.has_row = True
      self._evaluation.unlink()
      return True
    if stopping:
      return True
    if not self._has_finished():
      self.failure = 'training was stopped before its end; the same command resumes it'
      return True
    self._is_training = False
    self._child = self._start(evaluate_command(self.run, self._settings), self._evaluation)
    return False

  def _note_attempt(self) -> None:
    if self._folder.exists():
      attempts = metrics.JsonLines(self._folder / ATTEMPTS)
      attempts.write(
        {
          'core': self.core,
          'exit_code': self._child.code,
          'cpu_seconds': self._child.cpu_seconds,
          'wall_seconds': self._child.wall_seconds,
        }
      )
      attempts.close()

  def _has_finished(self) -> bool:
    """Whether the run has reached its end, rather than being stopped by someone else."""
    last = metrics.last(self._folder / 'metrics' / 'evaluator.jsonl')
    return last is not None and last['final']

  def _last_line(self) -> str:
    lines = self._settings.log(self.run).read_text(errors='replace').strip().splitlines()
    return lines[-1] if lines else 'it printed nothing'

  def _row(self) -> dict[str, Any]:
    lines = self._evaluation.read_text().splitlines()
    results = [json.loads(line) for line in lines if line.startswith('{')]
    evaluations = {result['actions']: result['episode_return'] for result in results}
    attempts = metrics.read(self._folder / ATTEMPTS)
    total = lambda key: sum(attempt[key] for attempt in attempts) / 60
    return {
      'environment': self.run.task.name,
      'agent': self.run.agent,
      'seed': self.run.seed,
      'label': self._settings.label,
      'budget': self.run.task.steps,
      **scores.row(self.run.task, self._folder, evaluations),
      'cpu_minutes': total('cpu_seconds'),
      'wall_minutes': total('wall_seconds'),
      'settings': self._settings.recorded(),
      'commit': commit(),
      'versions': {
        'python': platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ('jax', 'hephaestus')},
      },
    }

  def line(self) -> str:
    """Score, steps and time so far."""
    spans, last_step = scores.read(self._folder)
    points = scores.curve(spans, self.run.task.steps, last_step)
    known = [point for point in points if point is not None]
    shown = f'{known[-1]:.2f}' if known else 'no episode yet'
    attempts = metrics.read(self._folder / ATTEMPTS)
    seconds = sum(attempt['wall_seconds'] for attempt in attempts)
    if self._is_training:
      seconds += self._child.wall_seconds
    return f'{self.run.name}: {shown} at {last_step:,} steps, {seconds / 60:.1f} min'


def commit() -> str | None:
  """The checked-out commit of this code, `-dirty` where files differ; None without Git."""
  if not (PACKAGE / '.git').exists():
    return None
  command = ['git', '-C', str(PACKAGE), 'describe', '--always', '--dirty', '--exclude', '*']
  try:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    return None


def run_all(
  runs: Sequence[Run], settings: Settings, cores: Sequence[int], say: Callable[[str], None]
) -> int:
  """Does runs, as many at a time as there are cores, and appends a row for each.

  A run that fails has no row, and the others continue. SIGINT stops all of them in order, a second
  one at once.

  Args:
    runs: to do.
    settings: of all of them.
    cores: for the runs, one for each that runs at a time.
    say: takes lines of progress.

  Returns:
    0, 1 where a run failed, or INTERRUPTED.
  """
  settings.out.mkdir(parents=True, exist_ok=True)
  rows = metrics.JsonLines(settings.out / ROWS)
  with supervisor.Interrupts() as interrupts:
    bench = _Bench(runs, settings, cores, rows, say)
    passed_on = 0
    while bench.advance(stopping=interrupts.count > 0):
      if interrupts.count > passed_on:
        passed_on = interrupts.count
        say('stopping the runs; a second Ctrl-C kills them')
        bench.interrupt(again=passed_on > 1)
      time.sleep(POLL_SECONDS)
  rows.close()
  if interrupts.count:
    say(f'stopped with {bench.left} runs left; run the same command again to continue')
    return INTERRUPTED
  return 1 if bench.failed else 0


class _Bench:
  """Jobs on cores.

  Attributes:
    failed: number of runs without a row, because of an error.
  """

  def __init__(
    self,
    runs: Sequence[Run],
    settings: Settings,
    cores: Sequence[int],
    rows: metrics.JsonLines,
    say: Callable[[str], None],
  ):
    self.failed = 0
    self._waiting = list(enumerate(runs, start=1))
    self._total = len(runs)
    self._settings, self._rows, self._say = settings, rows, say
    self._free = list(cores)
    self._jobs: list[_Job] = []
    self._done = 0
    self._reported = time.monotonic()

  @property
  def left(self) -> int:
    """Number of runs without a row."""
    return self._total - self._done

  def interrupt(self, *, again: bool) -> None:
    """Stops all jobs in order, or `again` at once."""
    for job in self._jobs:
      job.interrupt(again=again)

  def advance(self, *, stopping: bool) -> bool:
    """Starts and ends jobs; returns whether any is left."""
    while self._waiting and self._free and not stopping:
      number, run = self._waiting.pop(0)
      self._jobs.append(_Job(run, self._settings, number, self._free.pop(0)))
    is_due = time.monotonic() - self._reported > PROGRESS_SECONDS
    for job in list(self._jobs):
      if job.advance(self._rows, stopping=stopping):
        self._end(job)
      elif is_due:
        self._say(f'{self._number(job)} {job.line()} so far{job.phase}')
    if is_due:
      self._reported = time.monotonic()
    return bool(self._jobs or (self._waiting and not stopping))

  def _end(self, job: _Job) -> None:
    self._jobs.remove(job)
    self._free.append(job.core)
    if job.failure is not None:
      self.failed += 1
      log = self._settings.log(job.run)
      self._say(f'{self._number(job)} warning: {job.run.name}: {job.failure} (log: {log})')
    elif job.has_row:
      self._done += 1
      self._say(f'{self._number(job)} {job.line()}')

  def _number(self, job: _Job) -> str:
    return f'[{job.number}/{self._total}]'
