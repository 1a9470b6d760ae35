"""Fused runs in environments of gymnasium and dm_env, which threads of the same process step."""

import collections
import json
import os
import sys

import numpy as np
import pytest
import runs

import hephaestus
from hephaestus.actors import environments
from hephaestus.launch import main

COMMON = (
  'environment.max_steps=9', 'learner.anneal=false', 'evaluator.num_episodes=8',
  'evaluator.final_episodes=8', 'learner.log_period=2', 'tensorboard=false',
)  # fmt: skip
PPO = (
  *COMMON, 'agent.hidden_size=16', 'agent.num_layers=1', 'actor.num_envs=8',
  'actor.sequence_length=9', 'learner.num_minibatches=2',
)  # fmt: skip
PROGRAM = 'dm_env/slow_program:SlowProgram'


@pytest.fixture
def train(in_process, tmp_path, monkeypatch):
  """Trains in this process, on one folder, as if the packages of several processes were not installed."""
  monkeypatch.chdir(tmp_path)
  for name in runs.DISTRIBUTED:
    monkeypatch.setitem(sys.modules, name, None)

  def train(*arguments):
    words = ['hephaestus', 'train', '--run', tmp_path / 'run', *arguments]
    return main.run(main.parse(list(map(str, words))))

  return train


def rows(folder, name):
  return [json.loads(line) for line in (folder / 'metrics' / f'{name}.jsonl').open()]


def instances(folder):
  return collections.Counter(
    line.split()[0] for line in (folder / 'instances.txt').read_text().splitlines()
  )


@pytest.mark.timeout(600)
def test_run_trains_is_evaluated_and_resumes(train, tmp_path, capsys):
  """`tests/learner/test_stepped.py` tests the parts of the dreamer's runs."""
  pytest.importorskip('gymnasium')
  begin = ['--agent', 'ppo', '--env', 'gymnasium/CartPole-v1', '--preset', 'laptop']
  assert train(*begin, '--steps', 300, '--set', *PPO) == 0
  printed = capsys.readouterr().out
  assert 'outside the compiled program, by threads' in printed
  assert 'environment_step=320 learner_step=5 ' in printed.splitlines()[-1]  # whole unrolls

  assert train('--steps', 400) == 0
  learned, scored = rows(tmp_path / 'run', 'learner'), rows(tmp_path / 'run', 'evaluator')
  for key in ('learner_step', 'environment_step'):
    assert (np.diff([row[key] for row in learned]) >= 0).all()
  assert [row['environment_step'] for row in scored if row['final']] == [
    320,
    learned[-1]['environment_step'],
  ]
  assert learned[-1]['environment_step'] >= 400 and sum(row['episodes'] for row in learned) > 8
  policy = hephaestus.load(tmp_path / 'run')
  action, _ = policy.act(np.zeros(policy.observation_spec.shape, np.float32),
                         policy.initial_state(), greedy=True)  # fmt: skip
  assert action in (0, 1)


@pytest.mark.timeout(600)
def test_interrupt_ends_an_unroll_and_the_run_resumes(train, tmp_path, capsys):
  # In the middle of the second of five unrolls, each of eight steps.
  slow = (*PPO, 'environment.seconds=0.01', 'environment.interrupt_after=12')
  begin = ['--agent', 'ppo', '--env', PROGRAM, '--preset', 'laptop', '--steps', 300]
  assert train(*begin, '--set', *slow) == 130
  assert 'stopped; resume with' in capsys.readouterr().out.splitlines()[-1]
  assert os.listdir(tmp_path / 'run' / 'checkpoints') == ['1']
  noted = instances(tmp_path)
  assert noted['make'] == noted['close'] > 8
  assert train() == 0
  assert 'environment_step=320 learner_step=5 ' in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.timeout(600)
def test_interrupt_ends_the_first_resets(train, tmp_path, capsys):
  slow = (*PPO, 'environment.seconds=0.01', 'environment.interrupt_reset=true')
  begin = ['--agent', 'ppo', '--env', PROGRAM, '--preset', 'laptop', '--steps', 300]
  assert train(*begin, '--set', *slow) == 130
  assert 'stopped; resume with' in capsys.readouterr().out.splitlines()[-1]
  assert train() == 0  # where the file of notes counts more than three instances


def corridor_of_gymnasium():
  """A class of gymnasium that has an option, as in docs/python.md."""
  gymnasium = pytest.importorskip('gymnasium')

  class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=5):
      self.length = length

    def reset(self, seed=None, options=None):
      super().reset(seed=seed)
      self.place = 0
      return np.zeros(1, np.float32), {}

    def step(self, action):
      self.place = max(0, self.place + (1 if action else -1))
      over = self.place == self.length
      return np.full(1, self.place / self.length, np.float32), float(over), over, False, {}

  return Corridor


@pytest.mark.timeout(600)
def test_class_is_trained_in_resumed_and_loaded_from_python(in_process, tmp_path, monkeypatch):
  given, options = corridor_of_gymnasium(), ['environment.max_steps=9', 'environment.length=3']
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(environments, '_instances', {})
  train = lambda steps: hephaestus.train(
    given, steps=steps, agent='ppo', preset='laptop', run='run', set=[*PPO[1:], *options]
  )
  run = train(64)
  environments._instances.clear()  # as in another process
  with pytest.raises(ValueError, match="'instance:Corridor-0': was given as an instance"):
    hephaestus.load(run)
  policy = hephaestus.load(run, environment=given)
  assert policy.learner_step == 1
  assert train(128).policy().learner_step == 2


def test_class_that_makes_no_environment_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(environments, '_instances', {})
  with pytest.raises(ValueError, match=r'gives {}; an environment of gymnasium or dm_env is'):
    hephaestus.train(dict, preset='laptop', run=tmp_path / 'run')
