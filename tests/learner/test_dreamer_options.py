"""Losses and dreams of agents with options that are not the default: salience and vitals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from small_dreamer import RATES, make_batch, make_dreamer, random_features, starts_of

from hephaestus.agents import experience
from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import dream, modules, rssm
from hephaestus.agents.dreamer import novelty as novelty_lib
from hephaestus.learner import dreamer_update


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
  step = lambda features: rssm.Step(None, features, None, None, None, batch.step_type == 0)
  loss = jax.jit(lambda features: learner._value_loss(state, batch, step(features)))
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
    posterior = model.rssm.infer(modules.world(params), keys, sequence)
    novelty = novelty_lib.novelty_of('information_gain', posterior.priors.moments())
    last = sequence.step_type == dreamer_update.LAST
    start = starts_of(policy, {}, posterior, last, novelty, keys, num_steps=None)
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
  plain = registry.make_dreamer(
    make_dreamer().config,
    {
      'bounded': specs.BoundedArray((3,), np.float32, 0, 1),
      'real': specs.Array((2,), np.float32),
    },
    specs.DiscreteArray(3),
  )

  def traced(dreamer):
    params = modules.world(jax.eval_shape(dreamer.agent.init_params, jax.random.key(0)))
    sequence = experience.time_major(make_batch(dreamer))
    keys = jax.random.split(jax.random.key(0), len(sequence.identity))
    return str(jax.make_jaxpr(dreamer.model.loss)(params, keys, sequence))

  assert traced(plain) == traced(make_dreamer())
  stored = lambda dreamer: jax.eval_shape(
    lambda: dreamer.agent.stored_state(dreamer.agent.initial_policy_state(2))
  )
  assert stored(plain) == stored(survivor)
  assert set(plain.model.rewards) == {'novelty'}
