"""Competence: averages of novelty by region, and the regions."""

import types

import jax
import numpy as np
import pytest
from small_dreamer import make_dreamer, random_features

from hephaestus.agents.cognition import competence
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.dreamer import modules, rssm


@pytest.fixture(scope='module')
def reward():
  return make_dreamer(competence_scale=1.0).model.rewards[competence.NAME]


def follow(*visits):
  """Statistics of N regions after visits, [N] novelties each; NaN where a region is not reached."""
  names = ('visits', 'fast', 'slow')
  statistics = {name: np.zeros(len(visits[0]), np.float32) for name in names}
  visited = jax.jit(competence.visited)
  for novelty in np.asarray(visits, np.float32):
    reached = np.isfinite(novelty)
    statistics = visited(statistics, reached, np.where(reached, novelty, 0.0))
  return jax.device_get(statistics)


def test_averages_by_hand():
  found = follow([4.0, 8.0, np.nan], [2.0, np.nan, np.nan], [3.0, np.nan, np.nan])
  np.testing.assert_array_equal(found['visits'], [3, 1, 0])
  np.testing.assert_allclose(found['fast'], [(4 + 2 + 3) / 3, 8, 0], rtol=1e-6)
  np.testing.assert_allclose(found['slow'], [(4 + 3) / 2, 8, 0], rtol=1e-6)  # means of fast before


@pytest.mark.parametrize('before', [1, 3, 200])
def test_visit_is_counted_in_one_average_at_a_time(before):
  """Counted in both at once, novelty that has just fallen would lower the progress that it makes."""
  visits = [[5.0 - i / 100] * 2 for i in range(before)]
  found = follow(*visits, [1.0, 4.0])
  assert found['fast'][0] < found['fast'][1]
  assert found['slow'][0] == found['slow'][1]
  later = follow(*visits, [1.0, 4.0], [1.0, 1.0])
  assert later['slow'][0] < later['slow'][1]


def test_only_novelty_that_falls_is_progress():
  """Noise keeps its novelty, also where it was high at first."""
  random = np.random.default_rng(0)
  falls, noise = 5 * 0.99 ** np.arange(300), random.normal(5, 0.2, 300)
  noise[0] = 6
  found = follow(*np.stack([falls, noise, falls[::-1], np.full(300, 9.0)], axis=-1))
  progress = np.maximum(found['slow'] - found['fast'], 0)
  # Half of the novelty of 70 visits ago is left, and slow is some 50 visits behind.
  assert progress[0] > 0.1
  assert progress[1] < 0.05 * 5 and progress[1] < progress[0]
  np.testing.assert_allclose(progress[2:], 0, atol=1e-5)


def step_of(features):
  return types.SimpleNamespace(features=features)


def test_regions_tell_observations_apart_and_ignore_the_belief(reward):
  """A real and an imagined step that show the same are of one region."""
  dreamer, random = make_dreamer(competence_scale=1.0), np.random.default_rng(0)
  features = random_features(dreamer, random, 64)
  statistics = reward.statistics()
  region = lambda features: np.asarray(
    reward.region(statistics, reward._projected(step_of(features)))
  )
  first = region(features)
  assert len(set(first)) > 40 and first.min() >= 0 and first.max() < 2**competence.BITS
  other = random_features(dreamer, random, 64)._replace(numbers=features.numbers)
  np.testing.assert_array_equal(region(other), first)


def test_batch_is_one_visit_of_a_region_in_however_many_parts(reward):
  """Parts that visited one after another would count a region once for each."""
  dreamer, random, (num_steps, batch) = make_dreamer(), np.random.default_rng(0), (3, 4)
  features = random_features(dreamer, random, num_steps, 1)
  features = jax.tree.map(lambda x: np.repeat(x, batch, axis=1), features)  # in the same regions
  novelty = random.uniform(1, 2, (num_steps, batch)).astype(np.float32)
  first = np.zeros((num_steps, batch), bool)
  first[1, 0] = True  # to which no transition leads, as to step 0

  def tables(count):
    def updated(features, novelty, first):
      replayed = rssm.Step(None, features, None, None, None, first)
      return reward.updated(
        reward.statistics(), replayed, novelty, lambda x: jax.lax.pmean(x, 'parts')
      )

    parts = lambda x: np.stack(np.split(x, count, axis=1))
    split = jax.tree.map(parts, (features, novelty, first))
    found = jax.device_get(jax.jit(jax.vmap(updated, axis_name='parts'))(*split))
    return jax.tree.map(lambda x: x[0], found)

  one, four = tables(1), tables(4)
  assert one['visits'].max() == 1 and one['visits'].sum() == 2
  np.testing.assert_array_equal(four['visits'], one['visits'])
  expected = sorted([novelty[1, 1:].mean(), novelty[2].mean()])
  for found in (one, four):
    np.testing.assert_allclose(sorted(found['fast'][found['visits'] > 0]), expected, rtol=1e-5)
  np.testing.assert_allclose(four['mean'], one['mean'], rtol=1e-4, atol=1e-5)


def test_reward_is_the_progress_of_the_region_that_is_reached(reward):
  dreamer, random = make_dreamer(competence_scale=1.0), np.random.default_rng(1)
  after = step_of(random_features(dreamer, random, 5))
  table = random.normal(size=(2, 2**competence.BITS)).astype(np.float32)
  statistics = reward.statistics() | {'slow': table[0], 'fast': table[1]}
  found = reward.reward({modules.OF_REWARDS: {competence.NAME: statistics}}, None, after)
  region = reward.region(statistics, reward._projected(after))
  np.testing.assert_array_equal(found, np.maximum(table[0] - table[1], 0)[np.asarray(region)])


def test_competence_trains_the_explorer(reward):
  dreamer = make_dreamer(competence_scale=1.0, novelty_scale=0.0)
  policy = dreamer.actor_critic
  assert policy.explores and policy.heads == ('task', competence.NAME)
  assert policy._critics == {'critic': ('task',), 'explorer_critic': (competence.NAME,)}
  # The explorer's dreams are those of novelty, also while that is off.
  assert policy.dreams('novelty', 8) == policy.dreams(competence.NAME, 8) == slice(4, 8)
  both = make_dreamer(competence_scale=1.0, survival_scale=1.0).actor_critic
  assert both._critics['explorer_critic'] == ('novelty', competence.NAME)
  assert both._critics['critic'] == ('task', 'survival')
  assert both.dreams(competence.NAME, 8) == both.dreams('novelty', 8) == slice(4, 8)
  with pytest.raises(ValueError, match=r'agent\.competence_scale=1\.0: is of novelty, which one'):
    cognition_config.CognitionConfig(competence_scale=1.0, ensemble_size=1)
  with pytest.raises(ValueError, match=r'agent\.competence_scale=-1'):
    cognition_config.CognitionConfig(competence_scale=-1.0)
