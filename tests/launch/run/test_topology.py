"""The whole program as real processes: it survives kills, stops, resumes and ends."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import polling
import psutil
import pytest

from hephaestus.launch import main
from hephaestus.launch.inspect import live
from hephaestus.launch.run import metrics
from hephaestus.replay import loopback

pytestmark = pytest.mark.usefixtures('little_optimization')

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'
TESTS = pathlib.Path(__file__).parents[2]
ENVIRONMENT = 'slow_catch:SlowCatch'
PPO = (
  'environment.rows=4', 'environment.columns=3', 'agent.hidden_size=16', 'agent.num_layers=1',
  'actor.num_envs=8', 'actor.sequence_length=9', 'replay.strata[0].max_size=4',
  'learner.num_minibatches=2', 'learner.log_period=2', 'learner.checkpoint_period=0.5',
  'actor.log_period=0.5', 'evaluator.period=5', 'evaluator.num_episodes=8',
  'evaluator.final_episodes=8', 'tensorboard=false',
)  # fmt: skip


class Launch:
  """`hephaestus train` on one folder."""

  def __init__(self, folder, *overrides, agent='dreamer', flags=()):
    self.folder = folder
    environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    environment['PYTHONPATH'] = str(TESTS)
    self.output = (folder.parent / 'output.txt').open('a+')
    self.process = subprocess.Popen(
      [HEPHAESTUS, 'train', '--run', folder, '--preset', 'laptop', '--env', ENVIRONMENT,
       '--agent', agent, '--no-fused', *flags, '--set', *overrides],
      stdout=self.output, stderr=subprocess.STDOUT, env=environment, cwd=folder.parent,
    )  # fmt: skip

  def wait_for(self, predicate, what):
    """Polls until `predicate` holds; fails with the output of the run when it does not."""
    polling.until(
      predicate, lambda: f'{what}: {self.words()}', alive=lambda: self.process.poll() is None
    )

  def end(self):
    """The exit code, once it has ended by itself."""
    try:
      return self.process.wait(timeout=polling.PATIENCE)
    except subprocess.TimeoutExpired:
      pytest.fail(f'does not end: {self.words()}')

  def words(self):
    logs = [f'{log.name}:\n{log.read_text()[-2000:]}' for log in (self.folder / 'logs').glob('*')]
    return '\n'.join([(self.folder.parent / 'output.txt').read_text(), *logs])

  def rows(self, node):
    return metrics.read(self.folder / 'metrics' / f'{node}.jsonl')

  def step(self, node='learner', key='learner_step'):
    row = metrics.last(self.folder / 'metrics' / f'{node}.jsonl')
    return -1 if row is None or row[key] is None else row[key]

  def pid(self, node):
    started = [row for row in self.rows('events')
               if row['name'] == node and row['kind'] == 'started']  # fmt: skip
    return started[-1]['pid'] if started else None

  def is_reached_from_outside(self):
    """Whether replay answers at an address that is visible to other machines."""
    port = int((self.folder / 'address').read_text().rsplit(':', 1)[1])
    for entries in psutil.net_if_addrs().values():
      for entry in entries:
        if entry.family == socket.AF_INET and not entry.address.startswith('127.'):
          with contextlib.suppress(OSError):
            socket.create_connection((entry.address, port), timeout=5.0).close()
            return True
    return False

  def kill(self, *nodes):
    """Kills nodes at once, and waits until they are restarted."""
    before = {node: self.pid(node) for node in nodes}
    for pid in before.values():
      os.kill(pid, signal.SIGKILL)
    for node, pid in before.items():
      self.wait_for(lambda node=node, pid=pid: self.pid(node) != pid, f'another {node}')


def living(folder):
  """Running processes whose command names the folder of a run."""
  found = []
  for process in psutil.process_iter(['cmdline', 'status']):
    command = ' '.join(process.info['cmdline'] or [])
    if str(folder) in command and process.info['status'] != psutil.STATUS_ZOMBIE:
      found.append(command)
  return found


def kill_all(folder):
  """Kills all processes whose command names the folder of a run."""
  for process in psutil.process_iter(['cmdline']):
    if str(folder) in ' '.join(process.info['cmdline'] or []):
      process.kill()


@pytest.fixture
def folder(tmp_path):
  yield tmp_path / 'run'
  kill_all(tmp_path / 'run')


@pytest.fixture
def hephaestus(capsys):
  """Runs a command in this process, which has imported all already; returns its output."""

  def run(*arguments):
    assert main._run(main._parse(['hephaestus', *map(str, arguments)])) == 0, capsys.readouterr()
    return capsys.readouterr().out

  return run


def resumed_at(log):
  """The update of each resume in a log of the learner."""
  return [
    int(update) for update in re.findall(r'Training resumes at update (\d+)', log.read_text())
  ]


def check_steps(rows, log_period):
  """The learner's rows are at multiples of the period, each once, and the last is the run's end."""
  steps = [row['learner_step'] for row in rows]
  expected = [*range(log_period, steps[-1], log_period), steps[-1]]
  assert steps == expected, 'a step is missing or there twice'


def inserted(folder):
  return live.inspect(str(folder))['tables']['episodic']['inserted']


def newest_checkpoint(folder):
  steps = [path.name for path in (folder / 'checkpoints').iterdir() if path.name.isdigit()]
  return max(map(int, steps))


@pytest.fixture(scope='module')
def running(tmp_path_factory, little_optimization, tiny):
  """A run with two shards of replay that has evaluated and has checkpoints of both shards.

  Its tests kill its nodes in turn; `stopped` stops it, and `finished` resumes it.
  """
  folder = tmp_path_factory.mktemp('shared') / 'run'
  run = Launch(folder, *tiny, 'replay.num_shards=2', 'max_environment_steps=100000000')
  try:
    # Actors have a second version of the parameters: learner and actors exchange data.
    run.wait_for(lambda: run.step('actor-0', 'parameter_version') > 5, 'a second version')
    run.wait_for(lambda: run.step('evaluator') >= 0, 'an evaluation')
    kept = lambda shard: any((folder / 'replay' / f'shard-{shard}' / 'kept').glob('*'))
    run.wait_for(lambda: kept(0) and kept(1), 'a checkpoint of both shards')
    yield run
  finally:
    kill_all(folder)


@pytest.fixture(scope='module')
def stopped(running):
  """The shared run after Ctrl-C."""
  os.kill(running.process.pid, signal.SIGINT)
  running.end()
  running.stopped_at, running.checkpointed = running.step(), newest_checkpoint(running.folder)
  return running


@pytest.fixture(scope='module')
def finished(stopped, tiny):
  """The shared run, resumed until its last environment step, with a trace of some updates."""
  goal = stopped.rows('learner')[-1]['environment_step'] + 200
  start = stopped.checkpointed + 20
  run = Launch(
    stopped.folder, *tiny, 'replay.num_shards=2', f'max_environment_steps={goal}',
    flags=('--profile', f'{start}:{start + 4}'),
  )  # fmt: skip
  run.goal, run.traced = goal, start
  run.exit_code = run.end()
  return run


@pytest.mark.timeout(600)
def test_inspect_reports_running_run(running, hephaestus):
  assert 'reachable from this machine only' in running.words() or loopback.refusal()
  assert not running.is_reached_from_outside() or loopback.refusal()
  report = json.loads(hephaestus('inspect', running.folder, '--json'))
  assert report['tables']['episodic']['size'] >= 8
  assert report['tables']['params']['size'] == 2  # one in each shard
  assert report['parameter_version'] > 0
  assert report['replay_ratio']['configured'] == 16
  assert report['learner_starved_fraction'] is not None


@pytest.mark.timeout(600)
def test_killed_actor_and_evaluator_restart(running):
  running.kill('evaluator')
  running.kill('actor-0')
  acted = running.step('actor-0', 'environment_step')
  running.wait_for(lambda: running.step('actor-0', 'environment_step') > acted + 50, 'acting again')


@pytest.mark.timeout(600)
def test_killed_learner_resumes_from_its_checkpoint(running):
  running.kill('learner')
  learned = running.step()
  running.wait_for(lambda: running.step() > learned + 20, 'learning again')
  assert resumed_at(running.folder / 'logs' / 'learner.log')[-1] > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize('shards', [(1,), (0, 1)])
def test_killed_shards_restore_their_checkpoints(running, shards):
  before = inserted(running.folder)
  running.kill(*(f'replay-{shard}' for shard in shards))
  learned = running.step()
  running.wait_for(lambda: running.step() > learned + 20, 'learning after the restart of replay')
  assert not running.is_reached_from_outside() or loopback.refusal()
  # A shard has restored its last checkpoint, of some seconds ago.
  assert inserted(running.folder) > 0.5 * before


@pytest.mark.timeout(600)
def test_ctrl_c_stops_all_nodes_after_a_checkpoint(stopped):
  assert stopped.process.returncode == 0, stopped.words()
  assert 'stopped; resume with: hephaestus train --run' in stopped.words()
  assert living(stopped.folder) == []
  assert stopped.checkpointed >= stopped.stopped_at


@pytest.mark.timeout(600)
def test_resumed_run_finishes_without_gap(stopped, finished):
  assert finished.exit_code == 0, finished.words()
  assert living(finished.folder) == []
  check_steps(finished.rows('learner'), log_period=10)
  assert finished.step() > stopped.checkpointed
  final = finished.rows('evaluator')[-1]
  assert final['final'] and final['environment_step'] >= finished.goal
  assert f'normalised_score={final["normalised_score"]:.3f}' in finished.words()
  assert len(list((finished.folder / 'videos').glob('*[0-9].gif'))) == 1
  assert len(list((finished.folder / 'videos').glob('*-dream.gif'))) == 1


@pytest.mark.timeout(600)
def test_profile_reports_traces_of_learner_and_actor(finished):
  heading = f'\nlearner, updates {finished.traced} to {finished.traced + 4}: '
  learner, actor = finished.words().split(heading)[1].split('\nactor-0, versions ')
  assert 'it waited for replay' in learner and 'pmap_update' in learner
  assert 'it wrote to replay' in actor and 'jit_unroll' in actor
  assert 'perfetto.json.gz' in actor and actor.index('perfetto') < actor.index('done: ')


@pytest.mark.timeout(600)
def test_finished_run_is_checked_and_evaluated(finished, hephaestus):
  assert 'nothing is wrong' in hephaestus('inspect', finished.folder, '--check')
  video = finished.folder / 'video.gif'
  options = ('--episodes', 8, '--json', '--video', video)
  result = json.loads(hephaestus('evaluate', finished.folder, *options))
  assert result['learner_step'] == finished.rows('evaluator')[-1]['learner_step']
  assert video.stat().st_size > 0


@pytest.mark.xdist_group('several learners')
@pytest.mark.timeout(600)
def test_learner_processes_restart_together_and_are_killed_with_their_launcher(folder, tiny):
  run = Launch(folder, *tiny, 'learner.num_processes=2', 'max_environment_steps=100000000')
  saved = lambda: any(path.name.isdigit() for path in (folder / 'checkpoints').glob('*'))
  run.wait_for(lambda: saved() and run.step() > 0, 'a checkpoint and a row')
  first = run.pid('learner-0')
  run.kill('learner-1')
  run.wait_for(lambda: run.pid('learner-0') != first, 'another first process of the learner')
  killed = time.time()
  run.wait_for(lambda: run.rows('learner') and run.rows('learner')[-1]['time'] > killed, 'a row')
  assert resumed_at(folder / 'logs' / 'learner-0.log')[-1] > 0
  restarts = [row['name'] for row in run.rows('events') if row['kind'] == 'restarting']
  assert restarts == ['learner-1']
  assert 'learner-0 listens at 127.0.0.1:' in run.words()

  assert len(living(folder)) >= 6  # the launcher, and all nodes
  os.kill(run.process.pid, signal.SIGKILL)
  run.process.wait()
  polling.until(lambda: not living(folder), lambda: f'the end of {living(folder)}')


@pytest.mark.xdist_group('runs of ppo')
@pytest.mark.timeout(600)
def test_node_that_keeps_failing_ends_the_run(folder):
  # The learner of PPO compiles fastest.
  run = Launch(folder, *PPO, 'max_environment_steps=100000000', agent='ppo')
  run.wait_for(lambda: run.pid('learner') is not None, 'the learner')
  # A file in place of a folder: the learner cannot write a checkpoint.
  run.wait_for(lambda: (folder / 'checkpoints').exists(), 'the folder')
  (folder / 'checkpoints').rmdir()
  (folder / 'checkpoints').write_text('')
  assert run.end() == 1, run.words()
  assert 'learner failed again and again' in run.words()
  assert 'checkpoints' in (folder.parent / 'output.txt').read_text()
  assert living(folder) == []


@pytest.mark.xdist_group('runs of ppo')
@pytest.mark.timeout(300)
def test_ppo_with_actors_resumes_after_its_learner_was_killed(folder):
  # max_minutes restarts with the learner, so the run cannot end before the kill unnoticed.
  options = ('max_environment_steps=100000000', 'max_minutes=0.2')
  run = Launch(folder, *PPO, *options, agent='ppo')
  saved = lambda: any(path.name.isdigit() for path in (folder / 'checkpoints').glob('*'))
  run.wait_for(lambda: saved() and run.step() > 0, 'a checkpoint and a row')
  run.kill('learner')
  log = folder / 'logs' / 'learner.log'
  run.wait_for(lambda: resumed_at(log), 'another learner')
  resumed = time.time()  # rows beyond its checkpoint are dropped before it writes one
  run.wait_for(lambda: run.rows('learner') and run.rows('learner')[-1]['time'] > resumed, 'a row')
  rows = run.rows('learner')
  report = live.inspect(str(folder))
  rows += run.rows('learner')  # it continues to write
  assert report['tables']['on_policy']['max_size'] == 4
  assert report['environment_step'] in {row['environment_step'] for row in rows}
  assert run.end() == 0, run.words()
  assert living(folder) == []
  (update,) = resumed_at(log)
  assert update > 0
  rows = run.rows('learner')
  check_steps(rows, log_period=2)
  # The learner used all it read: eight sequences of eight steps in each update.
  assert all(row['environment_step'] >= 64 * row['learner_step'] for row in rows)
  assert max(row['staleness'] for row in rows) <= 2
  final = run.rows('evaluator')[-1]
  assert final['final'] and f'learner_step={final["learner_step"]}' in run.words()
  assert {row['kind'] for row in run.rows('events')} >= {'restarting', 'finished'}
