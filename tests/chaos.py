"""Kills and freezes the nodes of a run for minutes, and checks its guarantees.

  python tests/chaos.py [--minutes 20] [--period 15] [--steps 20000] [--shards 1] [--seed 0] [--run DIR]

A run of tiny networks on a small `catch` is trained on this machine. Every PERIOD seconds a node
chosen at random is killed (-9), or frozen (SIGSTOP) for 30 s. After so many MINUTES the kills end, and
the run continues until it has collected its STEPS. A table and the exit code then report whether it
ended well; the updates lost by each kill of the learner; whether replay restarted with the content of
its last checkpoint; whether an environment step in the metrics of a node is below an earlier one,
dropped rows of a killed learner included; whether the run took hardly more than its STEPS; left-over
processes and ports; and the growth of each node's memory.

While replay, or a shard of it, is restarted after a kill, learner and actor are frozen, so that what
it holds can be compared with its checkpoint before anything is added.
"""

import argparse
import contextlib
import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import tiny  # noqa: E402

from hephaestus.launch.files import metrics  # noqa: E402
from hephaestus.launch.run import parts as parts_lib  # noqa: E402
from hephaestus.replay import connection, contents  # noqa: E402

OTHERS = ('learner', 'actor-0', 'evaluator')  # than replay
FREEZE_SECONDS = 30.0
WARM_UP_SECONDS = 120.0  # of a process, in which it compiles and fills its buffers
CALM_SECONDS = 1800.0  # longest time from the last kill to the end of the run
CHECKPOINT_UPDATES = 100
LOG_PERIOD = 10
MOST_SLOPE = 1.0  # MB per minute
MOST_OVER = 500  # environment steps that an actor may take before it hears that the run is over
LEAST_MINUTES = 5.0  # that a node was seen for, so that its slope says anything
SIZES = (
  *tiny.RUN, 'actor.log_period=1', f'learner.log_period={LOG_PERIOD}',
  'learner.checkpoint_period=3600', f'learner.checkpoint_updates={CHECKPOINT_UPDATES}',
  'evaluator.period=5', 'evaluator.video_period=30',
  'replay.strata[0].max_size=64', 'replay.strata[1].max_size=400',
)  # fmt: skip


class Run:
  """The run, seen from outside.

  Args:
    folder: of it.
    steps: after which it ends.
    shards: of replay.
    seed: of it.
  """

  def __init__(self, folder: pathlib.Path, steps: int, shards: int, seed: int):
    self.folder = folder
    self.replay = parts_lib.replay_names(shards)
    self.replay_folders = dict(
      zip(self.replay, parts_lib.replay_folders(folder, shards), strict=True)
    )
    self.nodes = (*self.replay, *OTHERS)
    self.output = folder.parent / f'{folder.name}.out'
    with self.output.open('w') as output:
      self.process = subprocess.Popen(
        [sys.executable, '-m', 'hephaestus.launch.main', 'train', '--run', folder, '--preset', 'laptop',
         '--steps', str(steps), '--seed', str(seed),
         '--set', *SIZES, f'replay.num_shards={shards}'],
        stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
      )  # fmt: skip
    self.seen: dict[int, psutil.Process] = {}  # every process of the run, also of the past
    self.ports: set[int] = set()
    self.curve: list[tuple[float, int]] = []  # time and environment step of rows of the learner
    # By node and start of its process: its age in seconds, and MB.
    self.memory: dict[tuple[str, float], list[tuple[float, float]]] = {}

  def look(self) -> None:
    """Notes processes, their memory, the port and the curve."""
    self.follow()
    with contextlib.suppress(psutil.Error):
      launcher = psutil.Process(self.process.pid)
      for process in (launcher, *launcher.children(recursive=True)):
        self.seen[process.pid] = process
    with contextlib.suppress(OSError):
      self.ports |= {int(address.rsplit(':', 1)[1]) for address in self._addresses()}
    for name in (*self.nodes, 'launcher'):
      pid = self.process.pid if name == 'launcher' else self.pid(name)
      with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        started = process.create_time()
        sample = (time.time() - started, process.memory_info().rss / 1e6)
        self.memory.setdefault((name, started), []).append(sample)

  def follow(self) -> None:
    """Notes new rows of the learner's metrics, before one that resumes drops those it lost."""
    newest = self.curve[-1][0] if self.curve else 0.0
    rows = metrics.read(self.folder / 'metrics' / 'learner.jsonl')
    self.curve += [(row['time'], row['environment_step']) for row in rows if row['time'] > newest]

  def pid(self, node: str) -> int:
    """PID of a node, 0 if it does not run."""
    rows = metrics.read(self.folder / 'metrics' / 'events.jsonl')
    mine = [row for row in rows if row['name'] == node]
    return mine[-1]['pid'] if mine and mine[-1]['kind'] == 'started' else 0

  def step(self, node: str = 'learner', key: str = 'learner_step') -> int:
    """The newest step that a node has written, 0 before."""
    row = metrics.last(self.folder / 'metrics' / f'{node}.jsonl')
    return 0 if row is None else row[key] or 0

  def resumed(self) -> list[int]:
    """The steps at which each learner so far has begun or resumed."""
    log = self.folder / 'logs' / 'learner.log'
    lines = log.read_text(errors='replace').splitlines() if log.exists() else []
    words = [
      line.split() for line in lines if 'Training begins' in line or 'Training resumes' in line
    ]
    return [int(line[-1].rstrip('.')) if 'resumes' in line else 0 for line in words]

  def _addresses(self) -> list[str]:
    return (self.folder / 'address').read_text().splitlines()

  def sizes(self, shard: str) -> dict[str, int] | None:
    """Sizes of the strata of a shard; None while it does not answer."""
    address = self._addresses()[self.replay.index(shard)]
    infos = connection.Connection(address, 'chaos', timeout_seconds=1e9).info(1.0)
    if infos is None:
      return None
    return {name: info.current_size for name, info in infos.items() if name != 'params'}


class Chaos:
  """Injects faults into a run, and records their outcome.

  Attributes:
    events: a line for each: minute, node, what was done, outcome.
    failures: guarantees that were not kept.
  """

  def __init__(self, run: Run, seed: int):
    self._run = run
    self._random = random.Random(seed)
    self._frozen: dict[int, float] = {}  # pid to the end of its freeze
    self._start = time.monotonic()
    self.events: list[list[str]] = []
    self.failures: list[str] = []
    # Kills of the learner whose cost is not known yet: place in events, learners so far, its step.
    self._pending: list[tuple[int, int, int]] = []
    self.lost: list[int] = []
    self.restored = 0

  def strike(self) -> None:
    """Kills or freezes a node that runs and is not frozen."""
    running = [
      name for name in self._run.nodes if (pid := self._run.pid(name)) and pid not in self._frozen
    ]
    if not running:
      self._note('-', 'no node runs', '')
      return
    name = self._random.choice(running)
    if self._random.random() < 0.5:
      pid = self._run.pid(name)
      self._signal(pid, signal.SIGSTOP)
      self._frozen[pid] = time.monotonic() + FREEZE_SECONDS
      self._note(name, f'frozen for {FREEZE_SECONDS:.0f} s', 'continues')
    elif name in self._run.replay:
      self._kill_replay(name)
    else:
      if name == 'learner':
        self._run.follow()
        self._pending.append((len(self.events), len(self._run.resumed()), self._run.step()))
      self._signal(self._run.pid(name), signal.SIGKILL)
      self._note(name, 'killed', 'restarted')

  def tick(self) -> None:
    """Continues processes that were frozen for long enough, and records what kills have cost."""
    for pid, until in list(self._frozen.items()):
      if time.monotonic() >= until:
        self._signal(pid, signal.SIGCONT)
        del self._frozen[pid]
    resumed = self._run.resumed()
    for place, learners, step in list(self._pending):
      if len(resumed) > learners:
        self._pending.remove((place, learners, step))
        # Updates since the last report are not known, and less than a period.
        began = resumed[learners - 1] if learners else 0
        lost = max(step, began) - resumed[learners]
        self.lost.append(lost)
        self.events[place][-1] = f'resumed at step {resumed[learners]:,}, {lost} updates lost'

  def wake(self) -> None:
    """Continues all frozen processes."""
    for pid in self._frozen:
      self._signal(pid, signal.SIGCONT)
    self._frozen.clear()

  def settle(self) -> None:
    """Adds what is still missing to the failures."""
    self.tick()
    for place, _, _ in self._pending:
      self.failures.append(f'the learner of event {place + 1} was not restarted')
    # A kill in the midst of a save costs what was done while it was written as well.
    for lost in self.lost:
      if lost > CHECKPOINT_UPDATES + 2 * LOG_PERIOD:
        self.failures.append(
          f'{lost} updates lost, a checkpoint is made every {CHECKPOINT_UPDATES}'
        )

  def _kill_replay(self, shard: str) -> None:
    run = self._run
    before = run.pid(shard)
    others = [pid for name in ('learner', 'actor-0') if (pid := run.pid(name))]
    for pid in others:
      self._signal(pid, signal.SIGSTOP)
    self._signal(before, signal.SIGKILL)
    place = len(self.events)
    self._note(shard, 'killed', 'restarted')
    try:
      saved = dict.fromkeys(('frontier', 'episodic'), 0)
      with contextlib.suppress(FileNotFoundError):
        held = contents.Contents(run.replay_folders[shard]).items
        saved = {name: len(items) for name, items in held.items() if name != 'params'}
      deadline = time.monotonic() + 120.0
      while run.pid(shard) in (0, before) or (sizes := run.sizes(shard)) is None:
        if time.monotonic() > deadline:
          self.failures.append(f'event {place + 1}: {shard} did not restart')
          return
        time.sleep(0.2)
    finally:
      for pid in others:
        if pid not in self._frozen:
          self._signal(pid, signal.SIGCONT)
    words = ', '.join(f'{name} {sizes[name]}' for name in sorted(sizes))
    self.events[place][-1] = f'restarted with {words}; its checkpoint has as many'
    self.restored += 1
    if sizes != saved:
      self.failures.append(f'event {place + 1}: restarted with {sizes}, saved were {saved}')
      self.events[place][-1] = self.failures[-1]

  def _note(self, node: str, what: str, outcome: str) -> None:
    minute = (time.monotonic() - self._start) / 60
    self.events.append([f'{minute:.1f}', node, what, outcome])
    print(f'{minute:5.1f}  {node}: {what}', flush=True)

  def _signal(self, pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)


def setbacks(run: Run) -> list[str]:
  """Rows of metrics whose environment step is below an earlier row's, dropped or not."""
  found = []
  curves = {'learner, as it was seen,': [step for _, step in run.curve]}
  for node in OTHERS:
    rows = metrics.read(run.folder / 'metrics' / f'{node}.jsonl')
    curves[node] = [row['environment_step'] for row in rows if row['environment_step'] is not None]
  for node, steps in curves.items():
    found += [
      f'{node} went from environment step {before} to {after}'
      for before, after in itertools.pairwise(steps) if after < before
    ]  # fmt: skip
  return found


def slopes(run: Run) -> dict[str, tuple[float, float]]:
  """Growth of each node's memory in MB per minute, and the minutes it was seen for.

  Pooled over its processes: each has a level of its own, and counts from its warm-up on.
  """
  found = {}
  for node in (*run.nodes, 'launcher'):
    products = squares = seconds = 0.0
    for (name, _), samples in run.memory.items():
      warm = np.array([sample for sample in samples if sample[0] > WARM_UP_SECONDS])
      if name == node and len(warm) > 2:
        age, megabytes = (warm - warm.mean(0)).T
        products += float(age @ megabytes)
        squares += float(age @ age)
        seconds += float(np.ptp(age))
    found[node] = (60 * products / squares if squares else float('nan'), seconds / 60)
  return found


def left_over(run: Run) -> list[str]:
  """Processes and ports of a run that has ended."""
  deadline = time.monotonic() + 10.0
  while time.monotonic() < deadline and any(map(_lives, run.seen.values())):
    time.sleep(0.2)
  left = [f'process {process.pid}' for process in run.seen.values() if _lives(process)]
  listening = {
    entry.laddr[1] for entry in psutil.net_connections('tcp') if entry.status == psutil.CONN_LISTEN
  }
  return left + [f'port {port}' for port in run.ports & listening]


def _lives(process: psutil.Process) -> bool:
  with contextlib.suppress(psutil.Error):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
  return False


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--minutes', type=float, default=20.0)
  parser.add_argument('--period', type=float, default=15.0, help='seconds between two events')
  parser.add_argument('--steps', type=int, default=20_000, help='of the environment, until the end')
  parser.add_argument('--shards', type=int, default=1, help='of replay')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--run', type=pathlib.Path, help='a new folder for the run')
  arguments = parser.parse_args()
  folder = (arguments.run or pathlib.Path(tempfile.mkdtemp()) / 'run').resolve()
  folder.parent.mkdir(parents=True, exist_ok=True)
  signal.signal(signal.SIGTERM, lambda *unused: sys.exit(1))  # by way of what ends the run
  run = Run(folder, arguments.steps, arguments.shards, arguments.seed)
  chaos = Chaos(run, arguments.seed)
  start = struck = looked = time.monotonic()
  end = start + 60 * arguments.minutes
  try:
    while run.process.poll() is None and time.monotonic() < end + CALM_SECONDS:
      time.sleep(0.25)
      now = time.monotonic()
      if now - looked > 2.0:
        looked = now
        run.look()
      if now < end and now - struck > arguments.period and run.pid('evaluator'):
        struck = now
        chaos.strike()
      if now >= end:
        chaos.wake()
      chaos.tick()
  finally:
    lasted = (time.monotonic() - start) / 60
    chaos.wake()
    if run.process.poll() is None:
      chaos.failures.append('the run did not end')
      run.process.send_signal(signal.SIGINT)
      run.process.wait()
  chaos.settle()
  chaos.failures += [f'left over: {thing}' for thing in left_over(run)]
  collected = run.step('evaluator', 'environment_step')
  if run.process.returncode or collected < arguments.steps:
    chaos.failures.append(f'ended with code {run.process.returncode} after {collected} steps')
  if lasted < arguments.minutes:
    chaos.failures.append(f'was over after {lasted:.1f} minutes; give more --steps')
  run.follow()
  taken = run.step('learner', 'environment_step')
  if taken > arguments.steps + MOST_OVER:
    chaos.failures.append(f'took {taken:,} steps of {arguments.steps:,}')
  chaos.failures += setbacks(run)
  grown = slopes(run)
  chaos.failures += [
    f'{node} grows by {slope:.2f} MB per minute'
    for node, (slope, minutes) in grown.items() if slope > MOST_SLOPE and minutes > LEAST_MINUTES
  ]  # fmt: skip
  print('\n| minute | node | event | outcome |', '|---|---|---|---|', sep='\n')
  for event in chaos.events:
    print(f'| {" | ".join(event)} |')
  print('\n| node | MB per minute | over minutes | processes |', '|---|---|---|---|', sep='\n')
  for node, (slope, minutes) in grown.items():
    processes = sum(name == node for name, _ in run.memory)
    print(f'| {node} | {slope:+.2f} | {minutes:.1f} | {processes} |')
  last = metrics.last(run.folder / 'metrics' / 'learner.jsonl') or {}
  print(
    f'\n{len(chaos.events)} events in {arguments.minutes:g} minutes; ended after {lasted:.1f} minutes '
    f'with code {run.process.returncode}: {taken:,} steps ({len(run.curve)} rows of the learner seen), '
    f'{run.step():,} updates; at most '
    f'{max(chaos.lost, default=0)} updates lost by a kill of the learner; {chaos.restored} restores of '
    f'replay, which lost {last.get("lost_steps", 0):,} steps; replay ratio {last.get("replay_ratio", 0):.1f}\n{run.output.read_text().splitlines()[-1]}'
  )
  print('\n'.join(chaos.failures) or 'all guarantees are kept')
  return 1 if chaos.failures else 0


if __name__ == '__main__':
  sys.exit(main())
