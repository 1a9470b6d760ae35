"""A learner of several processes, in a real run."""

import os
import signal
import time

import polling
import pytest
import runs


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_learner_processes_restart_together_and_are_killed_with_their_launcher(folder, tiny):
  run = runs.Launch(folder, *tiny, 'learner.num_processes=2', 'max_environment_steps=100000000')
  saved = lambda: any(path.name.isdigit() for path in (folder / 'checkpoints').glob('*'))
  run.wait_for(lambda: saved() and run.step() > 0, 'a checkpoint and a row')
  first = run.pid('learner-0')
  run.kill('learner-1')
  run.wait_for(lambda: run.pid('learner-0') != first, 'another first process of the learner')
  killed = time.time()
  run.wait_for(lambda: any(row['time'] > killed for row in run.rows('learner')), 'a row')
  assert runs.resumed_at(folder / 'logs' / 'learner-0.log')[-1] > 0
  restarts = [row['name'] for row in run.rows('events') if row['kind'] == 'restarting']
  assert restarts == ['learner-1']
  assert 'learner-0 listens at 127.0.0.1:' in run.words()

  assert len(runs.living(folder)) >= 6  # the launcher, and all nodes
  os.kill(run.process.pid, signal.SIGKILL)
  run.process.wait()
  polling.until(lambda: not runs.living(folder), lambda: f'the end of {runs.living(folder)}')
