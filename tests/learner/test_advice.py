"""Warnings of runs that will not learn: each names the setting to change, once."""

import numpy as np
import pytest

from hephaestus.learner import advice as advice_lib


def make_row(**changes):
  return {
    'learner_step': 1, 'episode_return': 0.0, 'episode_length': 10.0, 'ppo/approx_kl': 0.02,
    'ppo/clip_fraction': 0.1, 'ppo/entropy': 1.0, 'ppo/learning_rate': 1e-3,
  } | changes  # fmt: skip


def advise(rows, score=None):
  warnings = []
  advice = advice_lib.Advice(warnings.append, entropy_scale=0.01)
  advice.score = score
  for row in rows:
    advice.look(row)
  return warnings


def test_row_that_is_not_finite_is_left_to_the_learner():
  """The learner writes it, with null for each such number, and ends."""
  broken = make_row(**{'ppo/approx_kl': None, 'ppo/clip_fraction': None, 'ppo/entropy': None})
  assert advise([make_row(), broken]) == []


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    (
      {'ppo/approx_kl': 0.09},
      ('KL 0.090 is above 0.08', 'lower learner.learning_rate (now 0.001)'),
    ),
    ({'ppo/clip_fraction': 0.4}, ('clip fraction 0.40 is above 0.35', 'learner.num_epochs')),
    (
      {'ppo/entropy': 0.04},
      ('entropy collapsed from 1.00', 'larger agent.entropy_scale (now 0.01)'),
    ),
  ],
)
def test_warning_names_its_remedy_once(changes, words):
  warnings = advise([make_row(), *[make_row(**changes)] * 3])
  assert len(warnings) == 1
  assert all(word in warnings[0] for word in words)


def test_good_run_gets_no_warning():
  rows = [make_row(**{'episode_return': 0.1 * i, 'episode_length': 10.0 + i}) for i in range(64)]
  assert advise(rows) == []
  assert advise([make_row(), make_row(**{'ppo/entropy': 0.01})], score=0.95) == []


def test_longer_episodes_without_higher_returns_are_oscillation():
  noise = np.random.default_rng(0).normal(size=64)
  rows = [make_row(episode_return=0.1 * noise[i], episode_length=10.0 + i) for i in range(64)]
  (warning,) = advise(rows)
  assert 'episodes get longer while their return is flat' in warning
  assert 'raise agent.entropy_scale' in warning
  assert advise([row | {'episode_return': None} for row in rows]) == []
  # Reports without an ended episode are passed over.
  silent = [make_row(episode_return=None, episode_length=None)]
  assert len(advise([row for one in rows for row in (one, *silent)])) == 1


def test_memory_that_is_never_read_is_warned_about_once():
  warnings = []
  advice = advice_lib.CognitionAdvice(warnings.append)
  look = lambda filled, evidence, count: [
    advice.look({'memory/filled': filled, 'memory/evidence': evidence}) for _ in range(count)
  ]
  look(0.0, 0.0, 40)  # nothing to read yet
  look(0.5, 0.0, advice_lib.WINDOW - 1)
  look(0.5, 0.2, 1)
  look(0.5, 0.0, advice_lib.WINDOW - 1)
  assert not warnings
  look(0.5, 0.0, 40)
  assert len(warnings) == 1
  assert 'agent.memory_size=0' in warnings[0]


def test_a_vital_that_stays_the_same_is_warned_about_once():
  warnings = []
  advice = advice_lib.CognitionAdvice(warnings.append)

  def look(water, count):
    for i in range(count):
      rows = {'intrinsic/vital_food': 0.5 + 0.01 * (i % 2), 'intrinsic/vital_water': water}
      advice.look(rows | {'intrinsic/vital_error': 0.0})

  look(0.25, advice_lib.WINDOW - 1)
  look(0.26, 1)
  assert not warnings
  look(0.75, 40)
  (warning,) = warnings
  assert 'vital water stays at 0.75' in warning and 'VitalsSpec' in warning
