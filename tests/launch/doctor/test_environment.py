"""Diagnoses of environments that are broken on purpose, and of one that is not."""

import broken_catch as broken
import numpy as np
import pytest

from hephaestus.actors.environments import catch
from hephaestus.launch.doctor import check as check_lib
from hephaestus.launch.doctor import environment as environment_checks

# Boards of twelve numbers, and about as many steps within episodes: probes of the same shapes.
SIZE, STEPS = {'rows': 4, 'columns': 3}, 2048


def diagnose(environment, num_steps=STEPS):
  checks, *_ = environment_checks.check(environment, None, num_steps=num_steps, seed=0)
  return {check.name: check.cause for check in check_lib.findings(checks)}


# Episodes of two rows take one step, so that no action comes before another.
@pytest.mark.parametrize(
  ('size', 'num_steps'), [(SIZE, STEPS), ({'rows': 2, 'columns': 6}, STEPS * 3 // 2)]
)
def test_healthy_environment_has_no_finding(size, num_steps):
  assert diagnose(catch.Catch(**size), num_steps) == {}


def test_environment_that_acts_one_step_late_is_diagnosed():
  found = diagnose(broken.Late(**SIZE))
  assert 'one step late' in found['more by the action before it']


@pytest.mark.parametrize(
  ('changed', 'name'),
  [
    ({'change_without': 0.9, 'reward_without': 0.9}, 'variance explained by the action'),
    ({'change_late': 1.0}, 'more by the action before it'),
    ({'reward': 0.01, 'reward_early': 0.01}, 'variance of rewards explained'),
  ],
)
def test_each_fault_that_probes_show_is_named(changed, name):
  healthy = environment_checks.Explained(
    np.array([0.9]), np.array([0.5]), np.array([0.5]), 0.9, 0.9, 0.2
  )
  assert not check_lib.findings(environment_checks.of_probes(healthy))
  found = environment_checks.of_probes(healthy._replace(**changed))
  assert [check.name for check in check_lib.findings(found)] == [name]


@pytest.fixture
def without_probes(monkeypatch):
  """Replaces the probes by a result that explains everything."""
  perfect = lambda inputs, targets: np.ones(targets.shape[1], np.float32)
  monkeypatch.setattr(environment_checks.probe, 'explained', perfect)


class Poor(catch.Catch):
  """All rewards are 0."""

  def step(self, key, state, action):
    state, timestep = super().step(key, state, action)
    return state, timestep._replace(reward=0 * timestep.reward)


@pytest.mark.parametrize(
  ('kind', 'name', 'cause'),
  [
    (broken.Endless, 'early ends marked as truncated', 'with a discount of 1'),
    (broken.Beyond, 'contract', 'the spec says 0 to 1, it is 7'),
    (Poor, 'rewarded steps per thousand', 'the random policy finds no reward at all'),
  ],
)
def test_fault_that_steps_show_is_found_without_probes(without_probes, kind, name, cause):
  assert cause in diagnose(kind(**SIZE))[name]


def test_reward_that_depends_on_the_first_observation_is_found():
  _, _, explained = environment_checks.check(
    broken.Forgetful(**SIZE), None, num_steps=STEPS, seed=0
  )
  assert explained.reward_early > explained.reward + 0.2


def test_findings_and_limits_are_words():
  bad = check_lib.judge('part', 'number', 2.0, above=0.5, below=1.0, cause='why', remedy='what')
  assert check_lib.text(bad) == 'part, number 2 (at least 0.5, at most 1 is fine): why; what'
  assert check_lib.judge('part', 'number', np.nan, below=1.0, cause='', remedy='').is_fine
