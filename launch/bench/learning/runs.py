"""Trains and evaluates the runs of the suite in child processes, each on a core of its own."""

import importlib.metadata
import json
import pathlib
import platform
import subprocess
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import hephaestus
from hephaestus.actors import environments
from hephaestus.launch import records
from hephaestus.launch.bench.learning import scores, suite
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import jobs

ROWS = 'rows.jsonl'
ATTEMPTS = 'attempts.jsonl'  # in a run's folder: CPU and wall time of each start of its training
EVALUATIONS = ('random', 'greedy', 'sampled')
PACKAGE = pathlib.Path(__file__).resolve().parents[3]
# Frequent reports of returns, and few evaluations, which take time from the core; none of these
# changes learning.
MEASURING = (
  'actor.log_period=1', 'evaluator.period=1000000', 'evaluator.num_episodes=1',
  'evaluator.final_episodes=1', 'tensorboard=false',
)  # fmt: skip


class SuiteRun(NamedTuple):
  """One run of the suite: its environment and budget, and agent and seed as for `train`."""

  task: suite.Task
  agent: str
  seed: int

  @property
  def name(self) -> str:
    return f'{self.task.name} {self.agent} seed {self.seed}'


class Settings(NamedTuple):
  """The settings that all runs of one call of `bench learning` share."""

  out: pathlib.Path  # folder of the results
  label: str = 'default'  # of these settings in the rows; other settings need another label
  preset: str = 'laptop'
  overrides: Sequence[str] = ()  # as for `train --set`, for all environments

  def folder(self, run: SuiteRun) -> pathlib.Path:
    """The folder of a run."""
    return self.out / 'runs' / self.label / f'{run.task.name}-{run.agent}-{run.seed}'

  def recorded(self) -> dict[str, Any]:
    """The settings that affect what a run learns, as its row stores them."""
    return {'preset': self.preset, 'set': list(self.overrides)}


def train_command(run: SuiteRun, settings: Settings) -> list[str]:
  """Command line, after `hephaestus`, that starts a run, or resumes it if its folder exists."""
  options = [f'environment.{key}={value}' for key, value in run.task.options.items()]
  measuring = (*MEASURING, *suite.SETTINGS.get(run.agent, ()))
  return [
    'train', '--run', str(settings.folder(run)), '--agent', run.agent, '--preset', settings.preset,
    '--env', run.task.environment, '--steps', str(run.task.steps), '--seed', str(run.seed),
    *(['--fused'] if records.find_record(run.agent).can_fuse else []),
    '--set', *options, *measuring, *settings.overrides,
  ]  # fmt: skip


def read_rows(out: pathlib.Path) -> list[dict[str, Any]]:
  """Reads the rows of a folder of results; of several rows of one run and label, only the newest."""
  found = {_key(row): row for row in metrics.read(out / ROWS)}
  return list(found.values())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
  return row['environment'], row['agent'], row['seed'], row['label']


def missing(runs: Sequence[SuiteRun], settings: Settings) -> list[SuiteRun]:
  """Returns the runs that have no row of results yet.

  A row with another step budget does not count, because the suite has changed since.

  Raises:
    ValueError: a row with the same label has other settings.
  """
  present = set()
  for row in read_rows(settings.out):
    present.add((*_key(row), row['budget']))
    known = row['settings']  # of which older rows have more
    if row['label'] == settings.label and known | settings.recorded() != known:
      raise ValueError(
        f'--label {settings.label}: {settings.out / ROWS} has rows of other settings, '
        f'{json.dumps(known)}; give another label, or another --out'
      )
  key = lambda run: (run.task.name, run.agent, run.seed, settings.label, run.task.steps)
  return [run for run in runs if key(run) not in present]


class _Job(jobs.Job):
  """Trains a run, then evaluates it, and appends its row to the results."""

  def __init__(self, run: SuiteRun, settings: Settings, rows: metrics.JsonLines):
    self.run, self.name, self._settings, self._rows = run, run.name, settings, rows
    self._folder = settings.folder(run)
    self.log = self._folder.with_name(f'{self._folder.name}.log')
    self._evaluation = self.log.with_suffix('.evaluation')

  def commands(self) -> Generator[jobs.Command, jobs.Ended, None]:
    self._folder.parent.mkdir(parents=True, exist_ok=True)
    ended = yield jobs.Command('training', train_command(self.run, self._settings))
    self._note_attempt(ended)
    self.check(ended)
    if not folder_lib.has_finished(self._folder, folder_lib.load_config(self._folder)):
      raise jobs.Failed('training was stopped before its end; the same command resumes it')
    evaluate = [
      'evaluate', str(self._folder), '--actions', *EVALUATIONS,
      '--episodes', str(self.run.task.episodes), '--seed', str(self.run.seed), '--json',
    ]  # fmt: skip
    self.check((yield jobs.Command('evaluation', evaluate, self._evaluation)))
    self._rows.write(self._row())
    self._evaluation.unlink()

  def _note_attempt(self, ended: jobs.Ended) -> None:
    if self._folder.exists():
      attempts = metrics.JsonLines(self._folder / ATTEMPTS)
      (core,) = ended.cores
      times = {'cpu_seconds': ended.cpu_seconds, 'wall_seconds': ended.wall_seconds}
      attempts.write({'core': core, 'exit_code': ended.code, **times})
      attempts.close()

  def _row(self) -> dict[str, Any]:
    lines = self._evaluation.read_text().splitlines()
    results = [json.loads(line) for line in lines if line.startswith('{')]
    evaluations = {result['actions']: result['episode_return'] for result in results}
    attempts = metrics.read(self._folder / ATTEMPTS)
    total = lambda key: sum(attempt[key] for attempt in attempts) / 60
    package = environments.package(self.run.task.environment)
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
        'jax': importlib.metadata.version('jax'),
        'hephaestus': hephaestus.__version__,
        **dict([package.split()] if package else []),
      },
    }

  def line(self, seconds: float) -> str:
    """Score, steps and time so far."""
    spans, last_step = scores.read(self._folder)
    points = scores.curve(spans, self.run.task.steps, last_step)
    known = [point for point in points if point is not None]
    shown = f'{known[-1]:.2f}' if known else 'no episode yet'
    attempts = metrics.read(self._folder / ATTEMPTS)
    seconds += sum(attempt['wall_seconds'] for attempt in attempts)
    return f'{self.run.name}: {shown} at {last_step:,} steps, {seconds / 60:.1f} min'


def commit() -> str | None:
  """Short hash of the checked-out commit, with `-dirty` if files differ; None without Git."""
  if not (PACKAGE / '.git').exists():
    return None
  command = ['git', '-C', str(PACKAGE), 'describe', '--always', '--dirty', '--exclude', '*']
  try:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    return None


def run_all(
  runs: Sequence[SuiteRun], settings: Settings, cores: Sequence[int], say: Callable[[str], None]
) -> int:
  """Trains and evaluates runs, one at a time on each core (by its index), and appends a row for each.

  A run that fails gets no row. Returns the exit code of `jobs.run_all`.
  """
  settings.out.mkdir(parents=True, exist_ok=True)
  rows = metrics.JsonLines(settings.out / ROWS)
  made = [_Job(run, settings, rows) for run in runs]
  code, left = jobs.run_all(made, [{core} for core in cores], say)
  rows.close()
  if code == jobs.INTERRUPTED:
    say(f'stopped with {left} runs left; run the same command again to continue')
  return code
