"""Agents that were trained, and are broken on purpose; each is diagnosed, and a healthy one is not."""

import jax
import jax.numpy as jnp
import pytest

from hephaestus.launch import main
from hephaestus.launch.doctor import agent as agent_checks
from hephaestus.launch.doctor import check as check_lib
from hephaestus.launch.doctor import diagnosis
from hephaestus.launch.interface import policy as policy_lib
from hephaestus.launch.run import fused

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def train(tmp_path_factory):
  """Trains an agent by the laptop's preset and some changes, and gives the folder of the run."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(fused, '_prepare_process', lambda: None)

    def train(environment, steps, *changes, agent='dreamer'):
      folder = tmp_path_factory.mktemp('broken') / 'run'
      words = ['hephaestus', 'train', '--fused', '--preset', 'laptop', '--run', str(folder)]
      words += ['--env', environment, '--steps', str(steps)]
      words += ['--agent', agent, '--set', 'tensorboard=false', *changes]
      assert main.run(main.parse(words)) == 0
      return folder

    yield train


@pytest.fixture(scope='module')
def healthy(train):
  return train('catch', 8_000)


def found(checks):
  return {check.name: check.cause for check in check_lib.findings(checks)}


def test_healthy_agent_has_no_finding(healthy):
  assert found(diagnosis.of_run(healthy, num_steps=8_192, seed=0)) == {}


def test_frozen_continue_head(healthy):
  policy = policy_lib.load(healthy)
  world = policy.all_params['world_model']
  frozen = world | {'continue': jax.tree.map(jnp.zeros_like, world['continue'])}
  policy.all_params = policy.all_params | {'world_model': frozen}
  checks = agent_checks.of_predictions(agent_checks.predict(policy, num_steps=2_048, seed=0), None)
  assert {'P(continue) at ends', 'P(continue) elsewhere'} <= set(found(checks))


def test_memory_task_without_memory(train):
  changes = ('agent.memory_steps=2', 'environment.rows=12', 'environment.columns=3')
  folder = train('broken_catch:Forgetful', 5_000, *changes)
  causes = found(diagnosis.of_run(folder, num_steps=8_192, seed=0))
  assert 'early observation' in causes['rewarded steps told apart (area)']


@pytest.mark.parametrize('rate', [0.001, 0.1])
def test_learning_rate_too_high(train, rate):
  folder = train('catch', 400_000, f'learner.learning_rate={rate}', agent='ppo')
  checks = check_lib.findings(diagnosis.of_run(folder, num_steps=8_192, seed=0))
  remedies = [check.remedy for check in checks if 'policy moves too far' in check.cause]
  if rate == 0.001:
    assert not checks
  else:
    assert any('lower learner.learning_rate' in remedy for remedy in remedies)
