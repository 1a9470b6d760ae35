"""Progress of a run as one line, warnings by the agent's advice, and the line at the end of the run."""

import contextlib
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import validation
from hephaestus.learner import loop

COUNTS_PERIOD = 0.5  # seconds between two writes of the learner's counts
QUIET_PERIOD = 15.0  # seconds between progress lines where no terminal shows them live
STALE_SECONDS = 60.0  # age from which a number on the line is marked with it
MOST_ROWS = 64  # newest reports that warnings may be about


class _Pace:
  """Tells how long a count takes to its end, by its pace until it changed last.

  So the time left falls while the count waits for its next change.

  Attributes:
    began, changed: seconds at which the count was first noted, and at which it changed last; 0 before.
  """

  def __init__(self) -> None:
    self.began = self.changed = 0.0
    self._first: int | None = None
    self._count = -1

  def note(self, now: float, count: int) -> None:
    """Notes the count at a time, in seconds."""
    if self._first is None:
      self.began, self._first = now, count
    if count > self._count:
      self.changed, self._count = now, count

  def left(self, now: float, total: int) -> float | None:
    """Seconds until the count is `total`; None if there is no pace yet, or the next change is overdue."""
    if self._first is None or self._count == self._first:
      return None
    pace = (self.changed - self.began) / (self._count - self._first)
    left = (total - self._count) * pace - (now - self.changed)
    return None if left < 0 and self._count < total else max(0.0, left)


def count_writer(run: pathlib.Path) -> Callable[[loop.Status], None]:
  """Makes the learner's hook that writes `folder.COUNTS` for the line, at most twice a second.

  It writes nothing before the first change: until then programs are compiled.
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


class Progress:
  """One line with the progress of a run, on stdout.

  In a terminal the line is rewritten. Elsewhere a new one is printed every `QUIET_PERIOD` seconds.

  Args:
    folder: folder of the run, whose metrics are read.
    starting: text shown until environment steps or updates of this launch are known, or a `phase`.

  Attributes:
    phase: what the process does now; empty where several processes do different things at once.
  """

  def __init__(
    self, config: launch_config.ExperimentConfig, folder: pathlib.Path, *, starting: str
  ):
    self._config, self._folder, self._starting = config, folder, starting
    self._live = sys.stdout.isatty()
    self._start, self._started_at = time.monotonic(), time.time()
    self.phase = ''
    self._reached: tuple[int, int] | None = None
    self._steps, self._updates = _Pace(), _Pace()
    # One process ends with its last update, after its last step; several end with their last step.
    self._num_updates = validation.num_updates(config) if config.fused else None
    self._shown = 0.0
    self._lock = threading.RLock()  # a fused run shows the line from a thread

  def tick(self) -> None:
    """Shows the line if it is due; to be called about twice a second."""
    now = time.monotonic()
    with self._lock:
      if self._live:
        width = shutil.get_terminal_size().columns
        sys.stdout.write('\r' + self._shown_line()[: width - 1].ljust(width - 1))
        sys.stdout.flush()
      elif now - self._shown > QUIET_PERIOD:
        self._shown = now
        print(self._shown_line(), flush=True)

  def _shown_line(self) -> str:
    """The line, or the error in it: a number that cannot be shown ends no run."""
    try:
      return self.line()
    except Exception as error:
      return f'{self._name()}  no progress to show: {type(error).__name__}: {error}'

  def say(self, text: str) -> None:
    """Prints a text on lines of its own, which are not overwritten."""
    with self._lock:
      self.end()
      print(text, flush=True)

  def end(self) -> None:
    """Clears the live line; the next text begins a line."""
    if self._live:
      with self._lock:
        sys.stdout.write('\r' + ' ' * (shutil.get_terminal_size().columns - 1) + '\r')
        sys.stdout.flush()

  def line(self) -> str:
    """Returns the line: phase, steps, score, episode return, throughput, replay ratio, staleness and time left.

    Numbers that are older than `STALE_SECONDS` are followed by their age.
    """
    config, now = self._config, time.monotonic()
    files = ('metrics/learner.jsonl', 'metrics/actor-0.jsonl', folder_lib.COUNTS)
    learner, actor, counts = (self._newest(self._folder / file) for file in files)
    evaluator = metrics.last(self._folder / 'metrics' / 'evaluator.jsonl') or {}
    if counts is not None:
      self._reached = counts.get('learner_step') or 0, counts.get('environment_step') or 0
    update, reached = self._reached or (None, None)
    # Counts are mostly newer than the reports of learner and actor.
    reported = (row.get('environment_step') for row in (learner, actor) if row is not None)
    known = [count for count in (reached, *reported) if count is not None]
    if not known:
      return f'{self._name()}  {self.phase or self._starting}'
    step, total = max(known), config.max_environment_steps
    self._steps.note(now, step)
    remaining = self._steps.left(now, total)
    if self._num_updates is not None and update is not None:
      self._updates.note(now, update)
      remaining = self._updates.left(now, self._num_updates)
    if config.max_minutes is not None:
      by_time = 60 * config.max_minutes - (now - self._steps.began)
      remaining = by_time if remaining is None else min(remaining, by_time)
    lost = (learner or {}).get('lost_steps')
    scored = '  '.join(
      f'{label} {evaluator[name]:.2f}'
      for label, name in (('score', 'normalised_score'), ('return', 'episode_return'))
      if evaluator.get(name) is not None
    )
    parts = [
      self._name(),
      self.phase,
      f'{step:,}/{total:,} steps{f" ({lost:,} lost)" if lost else ""}'
      f'{_age(now - self._steps.changed)}',
      f'update {update:,}' if update is not None else '' if learner else 'before the first update',
      scored and scored + _age_of(evaluator),
      '' if learner is None else self._details(learner, actor or {}) + _age_of(learner),
      'ETA ' + (_clock(max(0.0, remaining)) if remaining is not None else '?'),
    ]
    return '  '.join(part for part in parts if part)

  def _name(self) -> str:
    """The environment and the time since the start, with which each line begins."""
    return f'{self._config.environment["name"]}  {_clock(time.monotonic() - self._start)}'

  def _newest(self, file: pathlib.Path) -> dict[str, Any] | None:
    """The newest row of a file, if it is of this launch."""
    row = metrics.last(file)
    return row if row is not None and row['time'] >= self._started_at else None

  def _details(self, learner: dict[str, Any], actor: dict[str, Any]) -> str:
    """Throughput, the agent's `shown` metrics, replay ratio, and staleness in updates."""
    record = self._config.record
    known = {label: learner.get(name) for label, name in record.shown.items()}
    shown = [f'{label} {"-" if x is None else format(x, ".3f")}' for label, x in known.items()]
    if record.on_policy:
      shown = [f'{learner["steps_per_second"]:,.0f} steps/s', *shown]
      if 'staleness' in learner:  # a fused run has none
        shown.append(f'staleness {learner["staleness"]:.1f}')
      return '  '.join(shown)
    per_update = self._config.batch_size * self._config.steps_per_sequence
    rate = learner['replayed_steps_per_second'] / per_update
    shown = [f'{rate:.1f} updates/s', *shown, f'ratio {learner["replay_ratio"]:.1f}']
    if actor:
      shown.append(f'staleness {max(0, learner["learner_step"] - actor["parameter_version"])}')
    return '  '.join(shown)


class ActorsProgress(Progress):
  """The line of a host with actors and without the learner."""

  def line(self) -> str:
    """Returns the line: steps of the run, and sums and means over the actors of this host."""
    newest = map(self._newest, self._folder.glob('metrics/actor-*.jsonl'))
    rows = [row for row in newest if row is not None]
    if not rows:
      return f'{self._name()}  {self._starting}'
    steps = max(row['environment_step'] or 0 for row in rows)
    throttled = sum(row['throttled_fraction'] for row in rows) / len(rows)
    parts = [
      f'{self._name()}  {steps:,}/{self._config.max_environment_steps:,} steps'
      f'{_age_of(max(rows, key=lambda row: row["time"]))}',
      f'actors {len(rows)}',
      f'{sum(row["steps_per_second"] for row in rows):,.0f} steps/s',
      f'throttled {throttled:.0%}',
      f'version {max(row["parameter_version"] for row in rows):,}',
    ]
    return '  '.join(parts)


def make(
  config: launch_config.ExperimentConfig, folder: pathlib.Path, nodes: Collection[str]
) -> Progress:
  """Makes the progress line that suits the nodes of a host, given by their names."""
  starting = 'starting: nodes import and compile'
  if parts_lib.learners(config.learner.num_processes)[0] in nodes:
    return Progress(config, folder, starting=starting)
  if any(name.startswith(parts_lib.ACTOR) for name in nodes):
    return ActorsProgress(config, folder, starting=starting)
  return Progress(config, folder, starting='learner and actors are on other hosts')


def _age(seconds: float) -> str:
  """The age of a number as a text that follows it; empty if it is fresh."""
  return f' ({_clock(seconds)} ago)' if seconds > STALE_SECONDS else ''


def _age_of(row: dict[str, Any]) -> str:
  return _age(time.time() - row['time']) if row else ''


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes}:{seconds:02d}'


def summary(folder: pathlib.Path) -> str:
  """Returns the final line of a finished run: 'done:', steps, episode return and score."""
  final = metrics.last(folder / 'metrics' / 'evaluator.jsonl') or {}
  show = lambda value: f'{value:.3f}' if isinstance(value, float) else str(value)
  names = ('environment_step', 'learner_step', 'episode_return', 'normalised_score')
  lost = (metrics.last(folder / 'metrics' / 'learner.jsonl') or {}).get('lost_steps')
  shown = [f'{name}={show(final[name])}' for name in names if final.get(name) is not None]
  return ' '.join(['done:', *shown, *([f'lost_steps={lost}'] if lost else [])])


def farewell(folder: pathlib.Path, config: launch_config.ExperimentConfig, interrupted: int) -> int:
  """Prints the last line of a run that has ended in order, and returns its exit code.

  Args:
    interrupted: number of the signal that has stopped the run; 0 if it has finished. SIGINT gives 130.
  """
  resume = f'stopped; resume with: {folder_lib.resume_command(folder, config)}'
  print(resume if interrupted else summary(folder), flush=True)
  return folder_lib.INTERRUPTED if interrupted == signal.SIGINT else 0


class Warnings:
  """Prints and records each kind of warning once, also those of the agent (`AgentRecord.advise`).

  The agent judges rows of the learner's metrics from now on: the newest one at each `tick`.
  """

  def __init__(
    self,
    config: launch_config.ExperimentConfig,
    folder: pathlib.Path,
    events: metrics.JsonLines,
    say: Callable[[str], None],
  ):
    self._config, self._events, self._say = config, events, say
    self._metrics = folder / 'metrics'
    self._rows: list[Mapping[str, Any]] = []  # the first one, and the newest
    self._said: set[str] = set()
    self._newest = time.time()

  def warn(self, text: str) -> None:
    """Prints a warning and writes it to the run's events."""
    self._events.write({'kind': 'warning', 'name': parts_lib.LEARNER, 'text': text})
    self._say(f'warning: {text}')

  def tick(self) -> None:
    """Judges the learner's newest row of metrics, if it is a new one."""
    row = metrics.last(self._metrics / 'learner.jsonl')
    if row is None or row['time'] <= self._newest:
      return
    self._newest = row['time']
    acting = metrics.last(self._metrics / 'actor-0.jsonl') or {}
    returns = (
      'episode_return',
      'episode_length',
    )  # which the learner of a fused run reports itself
    self._rows.append({name: acting.get(name) for name in returns} | row)
    del self._rows[1:-MOST_ROWS]
    scored = metrics.last(self._metrics / 'evaluator.jsonl') or {}
    advice = self._config.record.advise(self._config, self._rows, scored.get('normalised_score'))
    for kind, text in advice.items():
      if kind not in self._said:
        self._said.add(kind)
        self.warn(text)
