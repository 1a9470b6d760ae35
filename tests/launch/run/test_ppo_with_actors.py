"""PPO with actors of its own, in real runs: it resumes after a kill, and learns in two processes."""

import time

import pytest
import runs

from hephaestus.launch.inspect import live

pytestmark = pytest.mark.faults

PPO = (
  'environment.rows=4', 'environment.columns=3', 'agent.hidden_size=16', 'agent.num_layers=1',
  'actor.num_envs=8', 'actor.sequence_length=9', 'replay.strata[0].max_size=4',
  'learner.num_minibatches=2', 'learner.log_period=2', 'learner.checkpoint_period=0.5',
  'actor.log_period=0.5', 'evaluator.period=5', 'evaluator.num_episodes=8',
  'evaluator.final_episodes=8', 'tensorboard=false',
)  # fmt: skip


@pytest.mark.timeout(600)
def test_ppo_with_actors_resumes_after_its_learner_was_killed(folder):
  # max_minutes restarts with the learner, so the run cannot end before the kill unnoticed.
  options = ('max_environment_steps=100000000', 'max_minutes=0.2')
  run = runs.Launch(folder, *PPO, *options, agent='ppo')
  saved = lambda: any(path.name.isdigit() for path in (folder / 'checkpoints').glob('*'))
  run.wait_for(lambda: saved() and run.step() > 0, 'a checkpoint and a row')
  run.kill('learner')
  log = folder / 'logs' / 'learner.log'
  run.wait_for(lambda: runs.resumed_at(log), 'another learner')
  resumed = time.time()  # rows beyond its checkpoint are dropped before it writes one
  run.wait_for(lambda: any(row['time'] > resumed for row in run.rows('learner')), 'a row')
  rows = run.rows('learner')
  report = live.inspect(str(folder))
  rows += run.rows('learner')  # it continues to write
  assert report.tables['on_policy']['max_size'] == 4
  assert report.environment_step in {row['environment_step'] for row in rows}
  assert run.end() == 0, run.words()
  assert runs.living(folder) == []
  (update,) = runs.resumed_at(log)
  assert update > 0
  rows = run.rows('learner')
  runs.check_steps(rows, log_period=2)
  # The learner used all it read: eight sequences of eight steps in each update.
  assert all(row['environment_step'] >= 64 * row['learner_step'] for row in rows)
  assert max(row['staleness'] for row in rows) <= 2
  final = run.rows('evaluator')[-1]
  assert final['final'] and f'learner_step={final["learner_step"]}' in run.words()
  assert {row['kind'] for row in run.rows('events')} >= {'restarting', 'finished'}


@pytest.mark.timeout(600)
def test_two_processes_of_ppo_end_with_the_first_batch_that_reaches_the_steps(folder):
  options = ('learner.num_processes=2', 'max_environment_steps=3000', 'learner.max_staleness=1000')
  run = runs.Launch(folder, *PPO, *options, agent='ppo')
  assert run.end() == 0, run.words()
  # Each process read four sequences of eight steps for each update, and none was too old.
  assert 'done: environment_step=3008 learner_step=47 ' in run.words()
  for rank in (0, 1):
    log = (folder / 'logs' / f'learner-{rank}.log').read_text()
    assert f'Process {rank} of 2 has joined' in log
    assert 'at update 47.' in log
  assert not (folder / 'metrics' / 'learner-1.jsonl').exists()
  assert runs.living(folder) == []
