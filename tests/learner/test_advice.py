"""Warnings of runs that will not learn: each names the setting to change."""

import numpy as np
import pytest

from hephaestus.learner import advice


def make_row(**changes):
  return {
    'learner_step': 1, 'episode_return': 0.0, 'episode_length': 10.0, 'ppo/approx_kl': 0.02,
    'ppo/clip_fraction': 0.1, 'ppo/entropy': 1.0, 'ppo/learning_rate': 1e-3,
  } | changes  # fmt: skip


def advise(rows, score=None):
  return advice.of_ppo(rows, score, entropy_scale=0.01)


@pytest.mark.parametrize(
  ('changes', 'kind', 'key'),
  [
    ({'ppo/approx_kl': 0.09}, 'kl', 'learner.learning_rate (now 0.001)'),
    ({'ppo/clip_fraction': 0.4}, 'clip', 'learner.num_epochs'),
    ({'ppo/entropy': 0.04}, 'entropy', 'agent.entropy_scale (now 0.01)'),
    ({'rejected_sequences': 3}, 'rejected', 'hephaestus doctor ENVIRONMENT'),
  ],
)
def test_warning_names_its_remedy(changes, kind, key):
  ((found, text),) = advise([make_row(), make_row(), make_row(**changes)]).items()
  assert found == kind and key in text


def test_good_run_gets_no_warning():
  rows = [make_row(episode_return=0.1 * i, episode_length=10.0 + i) for i in range(64)]
  assert advise(rows) == {}
  assert advise([make_row(), make_row(**{'ppo/entropy': 0.01})], score=0.95) == {}
  assert advise([make_row(**{'ppo/clip_fraction': 0.4})]) == {}  # while a new policy moves fast
  # The learner writes a row that is not finite, with null for each such number, and ends.
  assert advise([make_row(), make_row(**{'ppo/approx_kl': None, 'ppo/entropy': None})]) == {}


def test_longer_episodes_without_higher_returns_are_oscillation():
  noise = np.random.default_rng(0).normal(size=64)
  rows = [make_row(episode_return=0.1 * noise[i], episode_length=10.0 + i) for i in range(64)]
  assert advise(rows).keys() == {'oscillation'}
  assert not advise([row | {'episode_return': None} for row in rows])
  silent = make_row(episode_return=None, episode_length=None)  # a report without an ended episode
  assert advise([row for one in rows for row in (one, silent)]).keys() == {'oscillation'}


def test_memory_that_is_never_read_is_warned_about():
  rows = lambda filled, evidence, count: (
    [{'memory/filled': filled, 'memory/evidence': evidence}] * count
  )
  assert not advice.of_replay(rows(0.0, 0.0, 40))  # nothing to read yet
  assert advice.of_replay([{'rejected_sequences': 3}]).keys() == {'rejected'}
  assert not advice.of_replay([*rows(0.5, 0.2, 1), *rows(0.5, 0.0, advice.WINDOW - 1)])
  assert 'agent.memory_size=0' in advice.of_replay(rows(0.5, 0.0, 40))['memory']


def test_a_vital_that_stays_the_same_is_warned_about():
  rows = [
    {'intrinsic/vital_food': 0.5 + 0.01 * (i % 2), 'intrinsic/vital_water': water}
    for i, water in enumerate([0.26] + [0.25] * advice.WINDOW)
  ]
  assert not advice.of_replay(rows[:-1])
  assert advice.of_replay(rows).keys() == {'intrinsic/vital_water'}
