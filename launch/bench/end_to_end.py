"""Throughput of a whole run, compared with its parts; waiting and CPU times by process."""

import contextlib
import itertools
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil

from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import dreamer
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import jobs
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import bench

_PATIENCE = 600.0  # seconds to warm up, and to stop
_PART_SECONDS = 10.0  # longest measurement of one part
_ENDLESS = 10**12  # environment steps
_OUTPUT = 'output.txt'  # file with the launcher's output


def end_to_end(config: launch_config.ExperimentConfig, seconds: float) -> list[bench.Figure]:
  """Starts a distributed run on this machine, measures it after its warm-up, and stops it.

  Waiting times, replay ratio and staleness are from the metrics of the learner and the actors. The
  limits are measured afterwards: updates per second without acting, as by `bench learner` at the
  run's mean boredom (which sets the imagination horizon), and environment steps per second of an
  unroll without learning.

  Args:
    config: config of the run; its number of environment steps is ignored.
    seconds: length of the measurement, which continues until the learner and each actor have written
      two rows of metrics.

  Returns:
    Figures: updates and environment steps per second with their limits; waiting times of learner and
    actors in %; the replay ratio; staleness in updates; and the CPU cores that each process uses.

  Raises:
    ValueError: `seconds` is not positive, the agent is not the dreamer, or the run did not start, ended
      early or wrote no metrics.
  """
  if not 0 < seconds < float('inf'):
    raise ValueError(f'--seconds {seconds}: must be positive')
  with _started(config) as run:
    began, ended, cores = _observe(run, seconds)
  rows = [
    [row for row in metrics.since(path, began) if row['time'] <= ended] for path in run.files()
  ]
  shutil.rmtree(run.folder)
  return _figures(config, seconds, cores, rows[0], rows[1:])


class _Started(NamedTuple):
  """A running run of the dreamer: its folder, its launcher, and its processes by name, as 'actor-0'."""

  folder: pathlib.Path
  launcher: subprocess.Popen[bytes]
  nodes: dict[str, psutil.Process]

  def wait(self, is_done: Callable[[], bool], seconds: float, failure: str) -> None:
    """Waits for a condition; ValueError if the run has ended, or with `failure` after some seconds."""
    deadline = time.monotonic() + seconds
    while not is_done():
      if self.launcher.poll() is not None:
        output, code = self.folder / _OUTPUT, self.launcher.returncode
        raise ValueError(f'{output}: the run ended with code {code}; see that file')
      if time.monotonic() > deadline:
        raise ValueError(f'{self.folder}: {failure}')
      time.sleep(0.1)

  def files(self) -> list[pathlib.Path]:
    """Paths of the learner's file of metrics, then of each actor's."""
    folder = self.folder / 'metrics'
    return [folder / 'learner.jsonl', *sorted(folder.glob('actor-*.jsonl'))]


@contextlib.contextmanager
def _started(config: launch_config.ExperimentConfig) -> Iterator[_Started]:
  """Starts an endless run in a new folder, yields it after its warm-up, and stops it; the folder stays.

  Raises:
    ValueError: the agent is not the dreamer, or the run did not start or lost a process.
  """
  warm_up = dreamer.settings(config)[0].warm_up_updates
  config = launch_config.override(config, [f'max_environment_steps={_ENDLESS}'])
  folder = pathlib.Path(tempfile.mkdtemp(prefix='hephaestus-bench-'))
  folder_lib.open_run(folder, config)
  with (folder / _OUTPUT).open('w') as file:
    command = [*jobs.COMMAND, 'train', '--trust', '--run', str(folder)]
    launcher = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
  run = _Started(folder, launcher, {})
  learned = lambda: (metrics.last(run.files()[0]) or {}).get('learner_step', -1)
  try:
    slow = f'the learner did not warm up within {_PATIENCE:g} s'
    run.wait(lambda: learned() >= warm_up, _PATIENCE, slow)
    events = metrics.read(folder / 'metrics' / 'events.jsonl')
    pids = {row['name']: row['pid'] for row in events if row['kind'] == 'started'}
    run.nodes.update((name, psutil.Process(pid)) for name, pid in pids.items())
    yield run
  except psutil.NoSuchProcess as error:
    raise ValueError(f'{folder}: process {error.pid} of the run exited; see its logs') from None
  finally:
    launcher.send_signal(signal.SIGINT)
    try:
      launcher.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
      launcher.kill()  # which kills its nodes, too
      launcher.wait()


def _observe(run: _Started, seconds: float) -> tuple[float, float, dict[str, float]]:
  """Measures a run; returns begin and end (unix seconds), and the mean number of cores by process.

  Raises:
    ValueError: the run ended, or a process wrote no metrics.
  """
  cpu_seconds = lambda: {name: sum(node.cpu_times()[:2]) for name, node in run.nodes.items()}
  used, began, clock = cpu_seconds(), time.time(), time.monotonic()

  def is_done() -> bool:
    return time.monotonic() - clock >= seconds and all(
      len(metrics.since(path, began)) >= 2 for path in run.files()
    )

  run.wait(is_done, seconds + _PATIENCE, 'learner or actors write no metrics')
  elapsed, ended = time.monotonic() - clock, time.time()
  return began, ended, {name: (x - used[name]) / elapsed for name, x in cpu_seconds().items()}


def _figures(
  config: launch_config.ExperimentConfig,
  seconds: float,
  cores: dict[str, float],
  learner: list[dict[str, Any]],
  actors: list[list[dict[str, Any]]],
) -> list[bench.Figure]:
  """Figures of the rows that were written during the measurement."""
  times = np.array([row['time'] for row in learner])
  steps = np.array([row['learner_step'] for row in learner])
  rate = lambda key: (learner[-1][key] - learner[0][key]) / (times[-1] - times[0])
  ages = [
    max(0.0, float(np.interp(row['time'], times, steps)) - row['parameter_version'])
    for rows in actors
    for row in rows
  ]
  waits = [_mean(rows, 'throttled_fraction') for rows in actors]
  updates, unrolled = _limits(config, _mean(learner, 'intrinsic/boredom'), seconds)
  name = f'run/{config.environment["name"]}'
  return [
    bench.Figure(f'{name}/updates', rate('learner_step'), 'updates/s', updates),
    bench.Figure(f'{name}/steps', rate('environment_step'), 'steps/s', unrolled),
    bench.Figure(f'{name}/learner_waits', 100 * _mean(learner, 'starved_fraction'), '%'),
    bench.Figure(f'{name}/actors_wait', 100 * sum(waits) / len(waits), '%'),
    bench.Figure(f'{name}/replay_ratio', learner[-1]['replay_ratio'], 'replayed/step'),
    bench.Figure(f'{name}/staleness', sum(ages) / len(ages), 'updates'),
    *(bench.Figure(f'{name}/{node}/cpu', value, 'cores') for node, value in sorted(cores.items())),
  ]


def _mean(rows: list[dict[str, Any]], key: str) -> float:
  """Mean over time between the rows; a row covers the time since the one before it."""
  spans = [later['time'] - earlier['time'] for earlier, later in itertools.pairwise(rows)]
  return sum(row[key] * span for row, span in zip(rows[1:], spans, strict=True)) / sum(spans)


def _limits(
  config: launch_config.ExperimentConfig, boredom: float, seconds: float
) -> tuple[float, float]:
  """Updates per second without acting, and environment steps per second without learning."""
  parts, work = parts_lib.make_parts(config), make_work(config, 'update')
  seconds = min(seconds, _PART_SECONDS)
  boredom = min(max(boredom, 0.0), 1.0)
  figures = {figure.name: figure.value for figure in bench.update(work, [boredom], seconds=seconds)}
  init_key, reset_key, key = jax.random.split(jax.random.key(0), 3)
  params = parts.agent.acting_params(parts.agent.init_params(init_key))
  duration = bench.median_duration(
    lambda state: parts.unroll.unroll(params, key, state, np.int32(0), np.int32(0))[0],
    parts.unroll.init(reset_key),
    seconds,
  )
  steps = config.actor.num_envs * config.steps_per_sequence
  return figures[f'learner/update/boredom_{boredom:g}/updates'], steps / duration


def make_work(config: launch_config.ExperimentConfig, name: str) -> bench.Work:
  """Makes the update of a run of the dreamer, to be measured; ValueError for another agent."""
  agent_config, learner_config = dreamer.settings(config)
  environment = config.make_environment()
  return bench.Work(
    name=name,
    agent=agent_config,
    learner=learner_config,
    observation_spec=environment.observation_spec,
    action_spec=environment.action_spec,
    sequence_length=config.actor.sequence_length,
  )
