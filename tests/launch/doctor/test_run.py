"""`hephaestus doctor` on runs: rules by their numbers, and the command on a real run."""

import json

import numpy as np
import pytest

from hephaestus.launch import config, main
from hephaestus.launch.agents import presets
from hephaestus.launch.doctor import agent as agent_checks
from hephaestus.launch.doctor import check as check_lib
from hephaestus.launch.doctor import diagnosis
from hephaestus.launch.doctor import environment as environment_checks

EXPLAINED = environment_checks.Explained(
  np.array([0.9]), np.array([0.5]), np.array([0.5]), 0.9, 0.9, 0.2
)
HEALTHY = {
  'world_model/reward_correlation': 0.98,
  'world_model/kl': 0.5,
  'world_model/loss': -30.0,
}


def predictions(**changed):
  """Predictions of a healthy agent for 400 steps, a tenth of them rewarded, with some changed."""
  reward = np.tile([1.0] + [0.0] * 9, 40)
  steps = np.ones(400)
  healthy = {
    'reward': reward, 'expected': 0.95 * reward, 'surprise': 0.1 * steps, 'of_other': 4.0 * steps,
    'novelty': 0.5 * steps, 'scrambled': 9.0 * steps, 'end': np.full(40, 0.01),
    'lasts': 0.99 * steps, 'value': 0.9 * steps, 'return_': 0.8 * steps + 0.2 * reward,
  }  # fmt: skip
  return agent_checks.Predictions(**healthy | changed)


def reports(**changed):
  """Rows of a run's metrics, of which the newest are changed."""
  return [HEALTHY] * 6 + [HEALTHY | changed] * 2


def found(checks):
  return {check.name: check for check in check_lib.findings(checks)}


def test_healthy_predictions_and_reports_have_no_finding():
  assert found(agent_checks.of_predictions(predictions(), EXPLAINED)) == {}
  assert found(agent_checks.of_rows(reports())) == {}


@pytest.mark.parametrize(
  ('changed', 'name'),
  [
    ({'end': np.full(40, 0.9)}, 'P(continue) at ends'),
    ({'lasts': np.full(400, 0.7)}, 'P(continue) elsewhere'),
    ({'of_other': np.full(400, 0.1)}, 'nats lost by a wrong action'),
    ({'scrambled': np.full(400, 0.4)}, 'novelty of scrambled over real steps'),
    ({'value': np.full(400, 9.0)}, 'error of values, relative'),
    ({'expected': np.tile([0.0, 1.0], 200)}, 'rewarded steps told apart (area)'),
  ],
)
def test_each_part_that_has_not_learned_is_named(changed, name):
  checks = found(agent_checks.of_predictions(predictions(**changed), EXPLAINED))
  assert list(checks) == [name] and checks[name].cause and checks[name].remedy


@pytest.mark.parametrize(
  ('now', 'early', 'cause'),
  [(0.9, 0.9, 'has not learned'), (0.0, 0.5, 'early observation'), (0.0, 0.0, 'not determine')],
)
def test_cause_of_unpredicted_rewards_is_found_by_the_probes(now, early, cause):
  explained = EXPLAINED._replace(reward=now, reward_early=early)
  blind = predictions(expected=np.zeros(400))
  checks = found(agent_checks.of_predictions(blind, explained))
  assert cause in checks['rewarded steps told apart (area)'].cause


@pytest.mark.parametrize(
  ('changed', 'name'),
  [
    ({'world_model/loss': None}, 'losses that are finite'),
    ({'world_model/kl': 50.0}, 'KL of posterior and prior, nats'),
    ({'starved_fraction': 0.9}, 'starved fraction'),
  ],
)
def test_reports_of_a_run_that_goes_wrong_are_named(changed, name):
  assert list(found(agent_checks.of_rows(reports(**changed)))) == [name]


def call(*words):
  return main.run(main.parse(['hephaestus', *map(str, words)]))


@pytest.mark.timeout(600)
def test_diagnosis_of_a_run_has_all_parts(dreamer, capsys, monkeypatch):
  # What probes find is tested with environments.
  perfect = lambda inputs, targets: np.ones(targets.shape[1], np.float32)
  monkeypatch.setattr(environment_checks.probe, 'explained', perfect)
  code = call('doctor', dreamer.folder, '--steps', 2048, '--json')
  checks = [check_lib.Check(**each) for each in json.loads(capsys.readouterr().out)]
  parts = {check.part for check in checks}
  memory = {check.name: check.value for check in checks}['numbers kept from step to step']
  assert memory > 0  # the deterministic state; 0 of a policy without memory
  assert parts == {
    'run', 'environment', 'preset', 'world model', 'actor and critic', 'dreams', 'replay'
  }  # fmt: skip
  assert code == 1 and check_lib.findings(checks)  # 300 steps teach nothing


@pytest.mark.parametrize(
  ('words', 'error'),
  [
    (['catch', '--steps', 7], '--steps 7'),
    (['catch', '--seed', -1], '--seed -1'),
    (['catch', '--checkpoint', 'best'], 'catch is no folder of a run'),
    (['nowhere'], "environment.name='nowhere'"),
  ],
)
def test_bad_input_is_named(capsys, words, error):
  assert call('doctor', *words) == 2
  assert error in capsys.readouterr().err


def test_run_that_was_copied_without_its_replay_has_no_checks_of_it(tmp_path):
  made = config.override(presets.laptop('catch'), ['learner.fused=false'])
  assert diagnosis.of_replay(tmp_path, made) == []
