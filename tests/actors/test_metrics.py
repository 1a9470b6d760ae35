"""Metrics that an environment names: of episodes of different lengths, and of evaluations."""

import contextlib

import climb
import jax
import numpy as np
import pytest

from hephaestus.actors import environments, episodes, rollout
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host


@pytest.fixture(scope='module', params=['jax', 'gymnasium'])
def made(request):
  if request.param == 'jax':
    return environments.make('climb:Climb')
  pytest.importorskip('gymnasium')
  name = environments.register(climb.make_gymnasium)
  return environments.make(name, max_steps=9, metrics={'top': 'last'})


def test_metrics_are_reduced_over_each_episode(made):
  agent = rollout.random_agent(made.action_spec)
  unroll = rollout.make_unroll(made, agent, num_envs=4, sequence_length=6)
  lengths = []
  with contextlib.closing(unroll):
    state = unroll.init(jax.random.key(0))
    for key in jax.random.split(jax.random.key(1), 4):
      state, _, played = unroll.unroll((), key, state, 0, 0)
      ended = np.asarray(played.ended)
      length = np.asarray(played.episode_length)[ended]
      lengths.extend(length)
      assert set(played.metrics) == set(unroll.metrics) == set(climb.expected(0))
      for name, value in climb.expected(length).items():
        np.testing.assert_allclose(np.asarray(played.metrics[name])[ended], value, rtol=1e-6)
  assert len(set(lengths)) == climb.LONGEST


def test_evaluation_averages_metrics_over_episodes(made):
  with contextlib.closing(episodes.Play(made, rollout.random_agent(made.action_spec), 4)) as play:
    result = play.evaluate((), jax.random.key(0), 8)
    *_, last = play.steps((), jax.random.key(1))
  row = result.row()
  for name, value in climb.expected(result.episode_length).items():
    assert row[name] == pytest.approx(value)
  assert {f'environment/{name}': value for name, value in last.metrics.items()} == pytest.approx(
    climb.expected(last.step)
  )


@pytest.mark.parametrize(
  ('metrics', 'words'),
  [
    ({'height': 'median'}, r"metrics\['height'\]='median': choose one of mean, sum, max, last"),
    ({'other': 'mean'}, r"timestep\.metrics\['other'\]: the specs say float32\[\]"),
  ],
)
def test_metrics_that_contradict_their_names_are_refused(metrics, words):
  class Wrong(climb.Climb):
    pass

  Wrong.metrics = metrics
  with pytest.raises(ValueError, match=words):
    environment_lib.check(Wrong())


def test_metric_that_gymnasium_never_gives_is_a_warning():
  pytest.importorskip('gymnasium')
  name = environments.register(climb.make_gymnasium)
  made = environments.make(name, max_steps=9, metrics={'heigth': 'mean'})
  assert host.check_values(made, 0, num_steps=8) == [
    'environment.metrics.heigth: none of 8 steps with random actions gave this number; a step '
    'without it counts as 0'
  ]
  with pytest.raises(ValueError, match=r"metrics\['height'\]='mode': choose one of mean, sum"):
    environments.make(name, max_steps=9, metrics={'height': 'mode'})
