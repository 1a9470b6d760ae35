"""Updates of agents with options that are not the default: salience, a Gaussian latent, cognition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from small_dreamer import (
  RATES,
  make_batch,
  make_dreamer,
  random_features,
)
from trainer import Trainer

from hephaestus.agents import experience
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import dream
from hephaestus.agents.dreamer.rewards import novelty as novelty_lib
from hephaestus.learner import dreamer_update


@pytest.fixture(scope='module')
def dreamer():
  """It learns only from imagination, without entropy and replayed steps."""
  return make_dreamer(window=3, latent='gaussian', entropy_scale=0.0, replayed_value_scale=0.0)


@pytest.fixture(scope='module')
def one_device(dreamer):
  return Trainer(dreamer_update.make_update(dreamer, RATES))


def test_imagination_by_itself_trains_salience_actor_and_critic(dreamer, one_device):
  """The critic's last layer begins with zeros, which hide it from salience in the first update."""
  one_device.begin().step(make_batch(dreamer))
  before = one_device.arrays().params['actor_critic']
  one_device.step(make_batch(dreamer, seed=1))
  after = one_device.arrays().params['actor_critic']
  assert set(before) == {'salience', 'actor', 'explorer', 'critic', 'explorer_critic'}
  for name in before:
    same = jax.tree.map(np.array_equal, before[name], after[name])
    assert not all(jax.tree.leaves(same)), name


def test_wide_priors_hide_disagreement_only_from_the_clean_novelty(dreamer, one_device):
  """The metrics also report how often clean novelty is positive."""

  def step(bias):
    params = one_device.begin().state.params['world_model']
    prior, change = (params[name]['Dense_1'] for name in ('prior', 'average_change'))
    prior['bias'] = prior['bias'].at[..., dreamer.config.stochastic_size :].set(bias)
    change['kernel'] = jnp.zeros_like(change['kernel'])  # members agree on changes
    metrics = one_device.step(make_batch(dreamer))
    names = ('novelty', 'clean_novelty', 'clean_novelty_positive')
    return [metrics[f'intrinsic/{name}'] for name in names]

  novelty, clean, positive = step(3.0)  # variances of 13 and more
  assert novelty > 1e-3 and clean == positive == 0
  novelty, clean, positive = step(-10.0)  # of 0.01
  assert novelty > 1 and clean > 0 and 0.1 < positive <= 1


def test_value_loss_does_not_pool_over_the_end_of_an_episode():
  """Without a bootstrap, later steps could read a LAST step only through salience's context."""
  dreamer = make_dreamer(window=3)
  learner = dreamer_update.make_update(dreamer, RATES)
  state = jax.eval_shape(learner.init, jax.random.key(0))
  batch = make_batch(dreamer)
  batch = batch._replace(
    step_type=np.full_like(batch.step_type, 1), discount=np.ones_like(batch.discount)
  )
  batch.step_type[:, 2], batch.step_type[:, 3], batch.discount[:, 2] = 2, 0, 0.0
  batch = experience.time_major(batch)
  random = np.random.default_rng(0)
  features = random_features(dreamer, random, *batch.reward.shape)
  # The critic's last layer begins with zeros, which would hide its context.
  policy = jax.tree.map(lambda x: random.normal(size=x.shape), state.params['actor_critic'])
  state = state._replace(params={'actor_critic': policy}, slow_critic=policy, step=np.int32(0))
  loss = jax.jit(lambda features: learner._value_loss(state, batch, features))
  other = jax.tree.map(np.array, features)
  for part in other:
    part[2] += 10
  assert loss(features) == loss(other)


@pytest.fixture(scope='module')
def survivor():
  return make_dreamer(survival_scale=0.5, empowerment_scale=0.5)


def test_imagined_vitals_change_and_are_rewarded(survivor):
  batch = make_batch(survivor)
  model, policy = survivor.model, survivor.actor_critic
  params = survivor.agent.init_params(jax.random.key(0))
  slow = params['actor_critic']['critic']

  @jax.jit
  def imagine(key):
    keys = jax.random.split(key, len(batch.identity))
    sequence = experience.time_major(batch)
    posterior = model.rssm.infer(params['world_model'], keys, sequence)
    novelty = novelty_lib.novelty_of('information_gain', posterior.priors.moments())
    last = sequence.step_type == dreamer_update.LAST
    start, _ = dream.starts(policy, {}, posterior, last, novelty, keys, num_steps=None)
    dreamt = dream.rollout(model, policy, params, slow, start, jnp.int32(4))
    return dreamt.rewards['survival'], dreamt.choice

  reward, choice = imagine(jax.random.key(1))
  assert not reward[0].any()  # nothing arrives at the start
  assert np.abs(reward[1:]).max(axis=1).min() > 0  # at every step, of some rollouts
  others, other_choice = imagine(jax.random.key(2))
  differs = np.asarray(choice[0] != other_choice[0])
  assert differs.any() and np.abs(reward[1] - others[1])[differs].max() > 1e-4


def test_vitals_change_nothing_without_survival(survivor):
  """The same loss of the same parameters, and the same replay, as of an observation that names none."""
  plain = dreamer_agent.make_dreamer(
    make_dreamer().config,
    {
      'bounded': specs.BoundedArray((3,), np.float32, 0, 1),
      'real': specs.Array((2,), np.float32),
    },
    specs.DiscreteArray(3),
  )

  def traced(dreamer):
    params = jax.eval_shape(dreamer.agent.init_params, jax.random.key(0))['world_model']
    sequence = experience.time_major(make_batch(dreamer))
    keys = jax.random.split(jax.random.key(0), len(sequence.identity))
    return str(jax.make_jaxpr(dreamer.model.loss)(params, keys, sequence))

  assert traced(plain) == traced(make_dreamer())
  stored = lambda dreamer: jax.eval_shape(
    lambda: dreamer.agent.stored_state(dreamer.agent.initial_policy_state(2))
  )
  assert stored(plain) == stored(survivor)
  assert set(plain.model.rewards) == {'novelty'}
