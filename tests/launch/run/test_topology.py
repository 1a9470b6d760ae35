"""The whole program as real processes: it survives kills, stops, resumes and ends."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from hephaestus.launch import main
from hephaestus.launch.inspect import live
from hephaestus.launch.run import metrics
from hephaestus.replay import loopback

pytestmark = pytest.mark.usefixtures('little_optimization')

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'
PPO = (
  'environment.rows=4', 'environment.columns=3', 'agent.hidden_size=16', 'agent.num_layers=1',
  'actor.num_envs=8', 'actor.sequence_length=9', 'replay.strata[0].max_size=4',
  'learner.num_minibatches=2', 'learner.log_period=2', 'learner.checkpoint_period=0.5',
  'actor.log_period=0.5', 'evaluator.period=5', 'evaluator.num_episodes=8',
  'evaluator.final_episodes=8', 'tensorboard=false',
)  # fmt: skip
PATIENCE = 240  # seconds; more than a busy machine needs to import and compile


class Launch:
  """`hephaestus train` on one folder."""

  def __init__(self, folder, *overrides, agent='dreamer', flags=()):
    self.folder = folder
    environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    self.output = (folder.parent / 'output.txt').open('a+')
    self.process = subprocess.Popen(
      [HEPHAESTUS, 'train', '--run', folder, '--preset', 'laptop', '--agent', agent, '--no-fused',
       *flags, '--set', *overrides],
      stdout=self.output, stderr=subprocess.STDOUT, env=environment, cwd=folder.parent,
    )  # fmt: skip

  def wait_for(self, predicate, what):
    """Polls until `predicate` holds; fails with the output of the run when it does not."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
      if predicate():
        return
      assert self.process.poll() is None, f'ended while waiting for {what}: {self.words()}'
      time.sleep(0.2)
    pytest.fail(f'timed out waiting for {what}: {self.words()}')

  def end(self):
    """The exit code, once it has ended by itself."""
    try:
      return self.process.wait(timeout=PATIENCE)
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

  def kill(self, node):
    """Kills a node and waits until it is restarted."""
    before = self.pid(node)
    os.kill(before, signal.SIGKILL)
    self.wait_for(lambda: self.pid(node) != before, f'another {node}')


def living(folder):
  """Running processes whose command names the folder of a run."""
  found = []
  for process in psutil.process_iter(['cmdline', 'status']):
    command = ' '.join(process.info['cmdline'] or [])
    if str(folder) in command and process.info['status'] != psutil.STATUS_ZOMBIE:
      found.append(command)
  return found


def wait_until(predicate):
  deadline = time.monotonic() + PATIENCE
  while not predicate() and time.monotonic() < deadline:
    time.sleep(0.1)
  return predicate()


@pytest.fixture
def folder(tmp_path):
  yield tmp_path / 'run'
  for process in psutil.process_iter(['cmdline']):
    if str(tmp_path / 'run') in ' '.join(process.info['cmdline'] or []):
      process.kill()


@pytest.fixture
def hephaestus(capsys):
  """Runs a command in this process, which has imported all already; returns its output."""

  def run(*arguments):
    assert main._run(main._parse(['hephaestus', *map(str, arguments)])) == 0, capsys.readouterr()
    return capsys.readouterr().out

  return run


def resumed_at(log):
  """The learner step of the last resume in a log."""
  said = [line for line in log.read_text().splitlines() if 'Learner resumes at step' in line]
  return int(said[-1].rsplit(' ', 1)[1].rstrip('.'))


@pytest.mark.timeout(900)
def test_run_survives_kills_stops_resumes_and_ends(folder, tiny, hephaestus):
  run = Launch(folder, *tiny, 'max_environment_steps=100000000')

  # Actors have a second version of the parameters: learner and actors exchange data.
  run.wait_for(lambda: run.step('actor-0', 'parameter_version') > 5, 'a second version')
  run.wait_for(lambda: run.step('evaluator') >= 0, 'an evaluation')
  run.wait_for(lambda: any((folder / 'replay' / 'kept').glob('*')), 'a checkpoint of replay')

  assert 'reachable from this machine only' in run.words() or loopback.refusal()
  assert not run.is_reached_from_outside() or loopback.refusal()
  report = json.loads(hephaestus('inspect', folder, '--json'))
  assert report['tables']['episodic']['size'] >= 8
  assert report['tables']['params']['size'] == 1
  assert report['parameter_version'] > 0
  assert report['replay_ratio']['configured'] == 16
  assert report['learner_starved_fraction'] is not None

  run.kill('evaluator')
  run.kill('actor-0')
  acted = run.step('actor-0', 'environment_step')
  run.wait_for(lambda: run.step('actor-0', 'environment_step') > acted + 50, 'acting again')

  run.kill('learner')
  learned = run.step()
  run.wait_for(lambda: run.step() > learned + 20, 'learning again')
  assert resumed_at(folder / 'logs' / 'learner.log') > 0

  saved = live.inspect(str(folder))['tables']['episodic']['inserted']
  run.kill('replay')
  learned = run.step()
  run.wait_for(lambda: run.step() > learned + 20, 'learning after the restart of replay')
  assert not run.is_reached_from_outside() or loopback.refusal()
  # Replay has restored its last checkpoint, of some seconds ago.
  assert live.inspect(str(folder))['tables']['episodic']['inserted'] > 0.5 * saved

  os.kill(run.process.pid, signal.SIGINT)
  assert run.end() == 0, run.words()
  assert 'stopped; resume with: hephaestus train --run' in run.words()
  assert living(folder) == []
  stopped_at = run.step()
  checkpointed = max(
    int(path.name) for path in (folder / 'checkpoints').iterdir() if path.name.isdigit()
  )
  assert checkpointed >= stopped_at

  collected = run.rows('learner')[-1]['environment_step']
  goal = collected + 400
  again = Launch(folder, *tiny, f'max_environment_steps={goal}')
  assert again.end() == 0, again.words()
  assert living(folder) == []
  steps = [row['learner_step'] for row in again.rows('learner')]
  assert steps == list(range(10, steps[-1] + 1, 10)), 'a step is missing or there twice'
  assert steps[-1] > checkpointed
  final = again.rows('evaluator')[-1]
  assert final['final'] and final['environment_step'] >= goal
  assert f'normalised_score={final["normalised_score"]:.3f}' in again.words()
  assert len(list((folder / 'videos').glob('*[0-9].gif'))) == 1
  assert len(list((folder / 'videos').glob('*-dream.gif'))) == 1

  video = folder / 'video.gif'
  result = json.loads(hephaestus('evaluate', folder, '--episodes', 8, '--json', '--video', video))
  assert result['learner_step'] == final['learner_step']
  assert video.stat().st_size > 0


@pytest.mark.timeout(600)
def test_run_with_two_shards_survives_a_killed_shard(folder, tiny, hephaestus):
  options = ('replay.num_shards=2', 'max_environment_steps=600')
  run = Launch(folder, *tiny, *options, flags=('--profile', '20:24'))
  kept = lambda shard: any((folder / 'replay' / f'shard-{shard}' / 'kept').glob('*'))
  run.wait_for(lambda: run.step() > 0 and kept(0) and kept(1), 'a checkpoint of both shards')
  run.kill('replay-1')
  assert run.end() == 0, run.words()
  assert living(folder) == []
  final = run.rows('evaluator')[-1]
  assert final['final'] and final['environment_step'] >= 600
  # Learner and actor were traced for a while, and continued.
  learner, actor = (
    run.words().split('\nlearner, updates 20 to 24: ')[1].split('\nactor-0, versions ')
  )
  assert 'it waited for replay' in learner and 'pmap_update' in learner
  assert 'it wrote to replay' in actor and 'jit_unroll' in actor
  assert 'perfetto.json.gz' in actor and actor.index('perfetto') < actor.index('done: ')
  assert 'nothing is wrong' in hephaestus('inspect', folder, '--check')


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
  assert resumed_at(folder / 'logs' / 'learner-0.log') > 0
  restarts = [row['name'] for row in run.rows('events') if row['kind'] == 'restarting']
  assert restarts == ['learner-1']
  assert 'learner-0 listens at 127.0.0.1:' in run.words()

  assert len(living(folder)) >= 6  # the launcher, and all nodes
  os.kill(run.process.pid, signal.SIGKILL)
  run.process.wait()
  assert wait_until(lambda: living(folder) == []), living(folder)


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


@pytest.mark.timeout(300)
def test_ppo_with_actors_resumes_after_its_learner_was_killed(folder):
  # max_minutes restarts with the learner, so the run cannot end before the kill unnoticed.
  options = ('max_environment_steps=100000000', 'max_minutes=0.2')
  run = Launch(folder, *PPO, *options, agent='ppo')
  saved = lambda: any(path.name.isdigit() for path in (folder / 'checkpoints').glob('*'))
  run.wait_for(lambda: saved() and run.step() > 0, 'a checkpoint and a row')
  run.kill('learner')
  log = folder / 'logs' / 'learner.log'
  run.wait_for(lambda: 'resumes at step' in log.read_text(), 'another learner')
  resumed = time.time()  # rows beyond its checkpoint are dropped before it writes one
  run.wait_for(lambda: run.rows('learner') and run.rows('learner')[-1]['time'] > resumed, 'a row')
  rows = run.rows('learner')
  report = live.inspect(str(folder))
  rows += run.rows('learner')  # it continues to write
  assert report['tables']['on_policy']['max_size'] == 4
  assert report['environment_step'] in {row['environment_step'] for row in rows}
  assert run.end() == 0, run.words()
  assert living(folder) == []
  resumed = [line for line in log.read_text().splitlines() if 'Learner resumes at step' in line]
  assert len(resumed) == 1 and int(resumed[0].rsplit(' ', 1)[1].rstrip('.')) > 0
  rows = run.rows('learner')
  steps = [row['learner_step'] for row in rows]
  assert steps == list(range(2, steps[-1] + 1, 2)), 'a step is missing or there twice'
  # The learner used all it read: eight sequences of eight steps in each update.
  assert all(row['environment_step'] >= 64 * row['learner_step'] for row in rows)
  assert max(row['staleness'] for row in rows) <= 2
  final = run.rows('evaluator')[-1]
  assert final['final'] and f'learner_step={final["learner_step"]}' in run.words()
  assert {row['kind'] for row in run.rows('events')} >= {'restarting', 'finished'}
