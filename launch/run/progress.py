"""Progress of a run as one line, warnings by the agent's advice, and the line at the end of the run."""

import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

from hephaestus.launch import config as launch_config
from hephaestus.launch.files import metrics
from hephaestus.launch.run import parts as parts_lib

QUIET_PERIOD = 15.0  # seconds between progress lines where no terminal shows them live


class Progress:
  """One line with the progress of a run, on stdout; subclasses show other numbers.

  In a terminal the line is rewritten. Elsewhere a new one is printed every `QUIET_PERIOD` seconds;
  until the learner's first update the time so far is appended to one line, "starting", instead.
  """

  def __init__(
    self,
    config: launch_config.ExperimentConfig,
    folder: pathlib.Path,
    *,
    starting: str = 'nodes import and compile, about half a minute',
    grows: bool = True,
  ):
    """Initializes the line.

    Args:
      config: config of the run.
      folder: folder of the run, whose metrics are read.
      starting: text shown until the learner's first report.
      grows: whether the line "starting" may grow, because nothing but this object prints.
    """
    self._config = config
    self._folder = folder
    self._starting = starting
    self._live = sys.stdout.isatty()
    self._start, self._started_at = time.monotonic(), time.time()
    self._first: tuple[float, int] | None = None
    self._shown = 0.0
    self._grows = grows
    self._unfinished = False

  def tick(self) -> None:
    """Shows the line if it is due; to be called about twice a second."""
    now = time.monotonic()
    if self._live:
      width = shutil.get_terminal_size().columns
      sys.stdout.write('\r' + self.line()[: width - 1].ljust(width - 1))
      sys.stdout.flush()
    elif now - self._shown > QUIET_PERIOD:
      self._shown = now
      self._print(self.line())

  def _print(self, line: str) -> None:
    is_starting = self._grows and line.endswith(f'starting: {self._starting}')
    if is_starting and self._unfinished:
      print(f' {_clock(time.monotonic() - self._start)}', end='', flush=True)
      return
    self.end()
    print(line, end='' if is_starting else '\n', flush=True)
    self._unfinished = is_starting

  def say(self, text: str) -> None:
    """Prints a text on lines of its own, which are not overwritten."""
    self.end()
    print(text, flush=True)

  def end(self) -> None:
    """Clears the live line, or ends one that grows; the next text begins a line."""
    if self._unfinished:
      self._unfinished = False
      print(flush=True)
    if self._live:
      sys.stdout.write('\r' + ' ' * (shutil.get_terminal_size().columns - 1) + '\r')
      sys.stdout.flush()

  def line(self) -> str:
    """Returns the line: steps, score, episode return, throughput, replay ratio, staleness and time left."""
    learner = metrics.last(self._folder / 'metrics' / 'learner.jsonl')
    evaluator = metrics.last(self._folder / 'metrics' / 'evaluator.jsonl') or {}
    actor = metrics.last(self._folder / 'metrics' / 'actor-0.jsonl') or {}
    elapsed = time.monotonic() - self._start
    name = self._config.environment['name']
    if learner is None or learner['time'] < self._started_at:
      return f'{name}  {_clock(elapsed)}  starting: {self._starting}'
    # The count of an actor may be newer than that of the learner.
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
      f'{name}  {_clock(elapsed)}  {step:,}/{total:,} steps{_lost(learner)}',
      _labelled('score', evaluator.get('normalised_score')),
      _labelled('return', evaluator.get('episode_return')),
      *self._details(learner, actor),
      'ETA ' + (_clock(max(0.0, remaining)) if remaining is not None else '?'),
    ]
    return '  '.join(part for part in parts if part)

  def _details(self, learner: dict[str, Any], actor: dict[str, Any]) -> list[str]:
    """Throughput, the agent's `shown` metrics, replay ratio, and staleness in updates."""
    record = self._config.record
    shown = [f'{label} {learner[name]:.3f}' for label, name in record.shown.items()]
    if record.on_policy:
      if 'staleness' in learner:  # a fused run has none
        shown.append(f'staleness {learner["staleness"]:.1f}')
      return [f'{learner["steps_per_second"]:,.0f} steps/s', *shown]
    per_update = self._config.batch_size * self._config.steps_per_sequence
    details = [
      f'{learner["replayed_steps_per_second"] / per_update:.1f} updates/s',
      *shown,
      f'ratio {learner["replay_ratio"]:.1f}',
    ]
    if actor:
      details.append(f'staleness {max(0, learner["learner_step"] - actor["parameter_version"])}')
    return details


class ActorsProgress(Progress):
  """The line of a host with actors and without the learner."""

  def line(self) -> str:
    """Returns the line: steps of the run; number, throughput, throttling, params version of actors here."""
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
  """The line of a host without actors and without the learner's first process."""

  def line(self) -> str:
    """Returns the line: environment and time since the start."""
    elapsed = _clock(time.monotonic() - self._start)
    return f'{self._config.environment["name"]}  {elapsed}  learner and actors are on other hosts'


def make(
  config: launch_config.ExperimentConfig,
  folder: pathlib.Path,
  nodes: Collection[str],
  *,
  grows: bool = True,
) -> Progress:
  """Makes the progress line that suits the nodes of a host.

  Args:
    config: config of the run.
    folder: folder of the run.
    nodes: names of the nodes on this host.
    grows: see `Progress`.
  """
  if parts_lib.learners(config.learner.num_processes)[0] in nodes:
    return Progress(config, folder, grows=grows)
  acts = any(name.startswith(parts_lib.ACTOR) for name in nodes)
  kind = ActorsProgress if acts else NoProgress
  return kind(config, folder, grows=grows)


def _labelled(label: str, value: float | None) -> str:
  return '' if value is None else f'{label} {value:.2f}'


def _lost(learner: dict[str, Any]) -> str:
  lost = learner.get('lost_steps')
  return f' ({lost:,} lost)' if lost else ''


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


class Warnings:
  """Prints and records the warnings of the agent's advice (`make_advice`), if it has any."""

  def __init__(
    self,
    config: launch_config.ExperimentConfig,
    folder: pathlib.Path,
    events: metrics.JsonLines,
    say: Callable[[str], None],
  ):
    """Initializes the warnings; metrics from before this call are ignored.

    Args:
      config: config of the run.
      folder: folder of the run, whose metrics are read.
      events: log to which each warning is written.
      say: prints a line.
    """

    def warn(text: str) -> None:
      events.write({'kind': 'warning', 'name': parts_lib.LEARNER, 'text': text})
      say(f'warning: {text}')

    self._advice = config.record.make_advice(config, warn)
    self._metrics = folder / 'metrics'
    self._newest = time.time()

  def tick(self) -> None:
    """Hands the learner's newest row of metrics to the advice, if it is a new one."""
    row = None if self._advice is None else metrics.last(self._metrics / 'learner.jsonl')
    if self._advice is None or row is None or row['time'] <= self._newest:
      return
    self._newest = row['time']
    acting = metrics.last(self._metrics / 'actor-0.jsonl') or {}
    scored = metrics.last(self._metrics / 'evaluator.jsonl') or {}
    self._advice.score = scored.get('normalised_score')
    names = ('episode_return', 'episode_length')
    self._advice.look(row | {name: acting.get(name) for name in names})
