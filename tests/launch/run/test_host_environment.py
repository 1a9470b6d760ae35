"""A real run over several processes in an environment on the host, whose instances are programs."""

import collections

import pytest
import runs

PPO = (
  'agent.hidden_size=16', 'agent.num_layers=1', 'actor.num_envs=8', 'actor.sequence_length=9',
  'replay.strata[0].max_size=4', 'learner.num_minibatches=2', 'evaluator.num_episodes=4',
  'evaluator.final_episodes=4', 'tensorboard=false', 'environment.max_steps=9',
)  # fmt: skip


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_run_makes_two_instances_more_than_its_nodes_need_and_closes_all(folder):
  options = (*PPO, 'max_environment_steps=1000')
  run = runs.Launch(folder, *options, agent='ppo', environment='dm_env/slow_program:SlowProgram')
  assert run.end() == 0, run.words()
  notes = [line.split() for line in (folder.parent / 'instances.txt').read_text().splitlines()]
  made = collections.Counter(pid for event, pid in notes if event == 'make')
  closed = collections.Counter(pid for event, pid in notes if event == 'close')
  assert made == closed
  assert made.pop(str(run.pid('actor-0'))) == 8
  assert made.pop(str(run.pid('evaluator'))) in (4, 5)  # one for a video
  assert list(made.values()) == [2]  # the launcher: one for the specs, one for the values
  assert not any(row['kind'] == 'restarting' for row in run.rows('events'))
