"""One update of an agent with options that are not the default: salience and a Gaussian latent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_dreamer import RATES, make_batch, make_dreamer
from trainer import Trainer

from hephaestus.agents.dreamer import modules
from hephaestus.learner import dreamer_update

pytestmark = pytest.mark.usefixtures('little_optimization')


@pytest.fixture(scope='module')
def dreamer():
  """It learns from imagination alone: without entropy and replayed steps."""
  return make_dreamer(window=3, latent='gaussian', entropy_scale=0.0, replayed_value_scale=0.0)


@pytest.fixture(scope='module')
def one_device(dreamer):
  return Trainer(dreamer_update.make_update(dreamer, RATES))


def test_imagination_alone_trains_salience_actor_and_critic(dreamer, one_device):
  """The critic's last layer begins with zeros, which hide it from salience in the first update."""
  one_device.begin().step(make_batch(dreamer))
  before = one_device.arrays().params['actor_critic']
  one_device.step(make_batch(dreamer, seed=1))
  after = one_device.arrays().params['actor_critic']
  assert set(before) == {'salience', 'actor', 'critic'}
  for name in before:
    same = jax.tree.map(np.array_equal, before[name], after[name])
    assert not all(jax.tree.leaves(same)), name


def test_wide_priors_hide_disagreement_from_the_clean_novelty_alone(dreamer, one_device):
  """And the metrics report how often it is positive."""

  def step(bias):
    params = one_device.begin().state.params['world_model']
    prior, change = (params[name]['Dense_1'] for name in modules.MEMBERS)
    prior['bias'] = prior['bias'].at[..., dreamer.config.stochastic_size :].set(bias)
    change['kernel'] = jnp.zeros_like(change['kernel'])  # members agree on changes
    metrics = one_device.step(make_batch(dreamer))
    names = ('novelty', 'clean_novelty', 'clean_novelty_positive')
    return [metrics[f'intrinsic/{name}'] for name in names]

  novelty, clean, positive = step(3.0)  # variances of 13 and more
  assert novelty > 1e-3 and clean == positive == 0
  novelty, clean, positive = step(-10.0)  # of 0.01
  assert novelty > 1 and clean > 0 and 0.1 < positive <= 1
