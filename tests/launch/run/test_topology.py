"""The whole program as real processes: it survives kills, stops, resumes and ends."""

import json
import os
import re
import signal

import pytest
import runs

from hephaestus.launch import main
from hephaestus.launch.inspect import live


@pytest.fixture
def hephaestus(capsys):
  """Runs a command in this process, which has imported all already; returns its output."""

  def run(command, *arguments):
    # Its environment is of the tests.
    words = ['hephaestus', command, '--trust', *map(str, arguments)]
    assert main.run(main.parse(words)) == 0, capsys.readouterr()
    return capsys.readouterr().out

  return run


def inserted(folder):
  return live.inspect(str(folder)).tables['episodic']['inserted']


def newest_checkpoint(folder):
  steps = [path.name for path in (folder / 'checkpoints').iterdir() if path.name.isdigit()]
  return max(map(int, steps))


@pytest.fixture(scope='module')
def running(tmp_path_factory, tiny):
  """A run with two shards of replay that has evaluated and has checkpoints of both shards.

  Its tests kill its nodes in turn; `stopped` stops it, and `finished` resumes it.
  """
  folder = tmp_path_factory.mktemp('shared') / 'run'
  run = runs.Launch(folder, *tiny, 'replay.num_shards=2', 'max_environment_steps=100000000')
  run.stops = []  # updates at which the learner was asked to stop
  try:
    # Actors have a second version of the parameters: learner and actors exchange data.
    run.wait_for(lambda: run.step('actor-0', 'parameter_version') > 5, 'a second version')
    run.wait_for(lambda: run.step('evaluator') >= 0, 'an evaluation')
    kept = lambda shard: any((folder / 'replay' / f'shard-{shard}' / 'kept').glob('*'))
    run.wait_for(lambda: kept(0) and kept(1), 'a checkpoint of both shards')
    yield run
  finally:
    runs.kill_all(folder)


@pytest.fixture(scope='module')
def stopped(running):
  """The shared run after Ctrl-C."""
  os.kill(running.process.pid, signal.SIGINT)
  running.end()
  running.stopped_at, running.checkpointed = running.step(), newest_checkpoint(running.folder)
  return running


@pytest.fixture(scope='module')
def finished(stopped, tiny):
  """The shared run, resumed until its last environment step."""
  goal = stopped.rows('learner')[-1]['environment_step'] + 200
  run = runs.Launch(stopped.folder, *tiny, 'replay.num_shards=2', f'max_environment_steps={goal}')
  run.goal, run.exit_code = goal, run.end()
  return run


@pytest.mark.timeout(600)
def test_inspect_reports_running_run(running, hephaestus):
  assert 'reachable from this machine only' in running.words()
  assert not running.is_reached_from_outside()
  report = json.loads(hephaestus('inspect', running.folder, '--json'))
  assert report['tables']['episodic']['size'] >= 8
  assert report['tables']['params']['size'] == 2  # one in each shard
  assert report['parameter_version'] > 0
  assert report['replay_ratio']['configured'] == 16
  assert report['learner_starved_fraction'] is not None


@pytest.mark.timeout(600)
def test_killed_learner_actor_and_evaluator_resume(running):
  running.kill('learner', 'actor-0', 'evaluator')
  learned, acted = running.step(), running.step('actor-0', 'environment_step')
  running.wait_for(lambda: running.step() > learned + 20, 'learning again')
  running.wait_for(lambda: running.step('actor-0', 'environment_step') > acted + 50, 'acting again')
  assert runs.resumed_at(running.folder / 'logs' / 'learner.log')[-1] > 0


@pytest.mark.timeout(600)
def test_nodes_that_somebody_asks_to_stop_are_restarted(running):
  """As by `kill PID`, or a guard of the memory: it is not the run that ends."""
  running.kill('learner', 'actor-0', 'evaluator', 'replay-1', by=signal.SIGTERM)
  learned, acted = running.step(), running.step('actor-0', 'environment_step')
  running.wait_for(lambda: running.step() > learned + 20, 'learning again')
  running.wait_for(lambda: running.step('actor-0', 'environment_step') > acted + 50, 'acting again')
  running.stops.append(runs.resumed_at(running.folder / 'logs' / 'learner.log')[-1])


@pytest.mark.timeout(600)
def test_killed_shards_restore_their_checkpoints(running):
  """`tests/replay/test_shards.py` kills one of several."""
  before = inserted(running.folder)
  running.kill('replay-0', 'replay-1')
  learned = running.step()
  running.wait_for(lambda: running.step() > learned + 20, 'learning after the restart of replay')
  assert not running.is_reached_from_outside()
  # A shard has restored its last checkpoint, of some seconds ago.
  assert inserted(running.folder) > 0.5 * before


@pytest.mark.timeout(600)
def test_ctrl_c_stops_all_nodes_after_a_checkpoint(stopped):
  assert stopped.process.returncode == 130, stopped.words()
  assert '\nstopping: saving the last checkpoint' in stopped.words()
  assert 'stopped; resume with: hephaestus train --run' in stopped.words()
  assert runs.living(stopped.folder) == []
  assert stopped.checkpointed >= stopped.stopped_at


@pytest.mark.timeout(600)
def test_resumed_run_finishes_without_gap(stopped, finished):
  assert finished.exit_code == 0, finished.words()
  assert runs.living(finished.folder) == []
  runs.check_steps(
    finished.rows('learner'), log_period=10, stops=[stopped.stopped_at, *stopped.stops]
  )
  assert finished.step() > stopped.checkpointed
  for node in ('learner', 'actor-0', 'evaluator'):  # of which each was killed, as replay was
    steps = [row['environment_step'] for row in finished.rows(node)]
    assert steps == sorted(steps), node
  learned = finished.rows('learner')
  # None if replay was killed right after its checkpoint.
  announced = re.findall(
    r'restarted without (\d+) environment', (finished.folder / 'logs' / 'learner.log').read_text()
  )
  assert learned[-1]['lost_steps'] == sum(map(int, announced))
  assert max(row['replay_ratio'] for row in learned[10:]) < 2 * 16
  final = finished.rows('evaluator')[-1]
  assert final['final'] and final['environment_step'] >= finished.goal
  assert f'normalised_score={final["normalised_score"]:.3f}' in finished.words()
  assert len(list((finished.folder / 'videos').glob('*[0-9].gif'))) == 1
  assert len(list((finished.folder / 'videos').glob('*-dream.gif'))) == 1


@pytest.mark.timeout(600)
def test_finished_run_is_checked_and_evaluated(finished, hephaestus):
  assert 'nothing is wrong' in hephaestus('inspect', finished.folder, '--check')
  result = json.loads(hephaestus('evaluate', finished.folder, '--episodes', 8, '--json'))
  assert result['learner_step'] == finished.rows('evaluator')[-1]['learner_step']
