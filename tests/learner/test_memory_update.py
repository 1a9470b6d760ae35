"""Updates with an episodic memory: it is written, read by what is trained, and equal on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_dreamer import BATCH, RATES, make_batch, make_dreamer
from trainer import Trainer

from hephaestus.agents.dreamer import memory as memory_lib
from hephaestus.agents.dreamer import rssm
from hephaestus.learner import dreamer_update

pytestmark = pytest.mark.usefixtures('little_optimization')

SIZE = 64


@pytest.fixture(scope='module')
def dreamer():
  return make_dreamer(memory_size=SIZE)


@pytest.fixture(scope='module')
def one_device(dreamer):
  return Trainer(dreamer_update.make_update(dreamer, RATES))


def batch_of(dreamer, version, seed=0):
  return make_batch(dreamer, seed)._replace(version=np.full(BATCH, version, np.int32))


def test_update_writes_what_later_versions_recall(dreamer, one_device):
  first = one_device.begin().step(batch_of(dreamer, 0))
  assert first['memory/written'] == memory_lib.MOST_WRITTEN
  assert first['memory/filled'] == memory_lib.MOST_WRITTEN / SIZE
  assert first['memory/evidence'] == first['memory/similarity'] == 0
  older = one_device.step(batch_of(dreamer, 0))  # acted before the first update
  assert older['memory/evidence'] == 0
  newer = one_device.step(batch_of(dreamer, 1))
  # 8 of its 48 steps are remembered, and no step of a sequence that knows it by now is written again.
  assert newer['memory/evidence'] >= 0.9 * 8 / 48
  assert newer['memory/age'] > 0
  ring = one_device.arrays().params['memory']
  keys = ring['key'][ring['written'] > 0]
  similar = keys @ keys.T > 1 - 1e-5
  assert len(keys) == 24 and similar.sum() == len(keys)


def test_optimizer_has_no_part_of_the_memory(dreamer, one_device):
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  state = one_device.begin().arrays()
  moments = count(state.model_opt_state) + count(state.policy_opt_state)
  trained = count(state.params) - count(state.params['memory'])
  assert 2 * trained <= moments < 2 * trained + 20


def explained(dreamer, params, observation):
  """Log-probabilities [B, A] at FIRST steps, and predicted rewards [T, B] of a batch."""
  batch = batch_of(dreamer, 10**6)
  timestep = batch._replace(
    observation=jax.tree.map(lambda x: x[:, 0], observation), step_type=np.zeros(BATCH, np.int32)
  )
  state = dreamer.agent.initial_policy_state(BATCH)
  _, decision = dreamer.agent.explain(
    dreamer.agent.acting_params(params), jax.random.key(0), state, timestep, greedy=True
  )
  sequence = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, batch)
  sequence = sequence._replace(initial_state=batch.initial_state)
  recalled, _ = dreamer.model.recall(
    params, sequence.observation, jnp.broadcast_to(batch.version, sequence.reward.shape)
  )
  keys = jax.random.split(jax.random.key(1), BATCH)
  posterior = dreamer.model.rssm.infer(params['world_model'], keys, sequence, recalled)
  reward = dreamer.model.reward(params['world_model'], posterior.features).mean()
  return decision.extras, reward


def test_zeroing_the_memory_changes_trained_rewards_and_policy(dreamer, one_device):
  """Rewards are predicted by the model: if only the policy read the memory, it would earn nothing."""
  one_device.begin()
  for update in range(12):
    one_device.step(batch_of(dreamer, update))
  params = one_device.arrays().params
  without = params | {'memory': jax.tree.map(np.zeros_like, params['memory'])}
  observation = batch_of(dreamer, 0).observation
  (extras, reward), (empty, reward_without) = (
    explained(dreamer, each, observation) for each in (params, without)
  )
  assert np.abs(extras['log_probs'] - empty['log_probs']).max() > 1e-4
  changed = np.abs(reward - reward_without)
  assert changed[1:].max() > 1e-3  # of the step after a recall
  assert extras['recalled_evidence'].max() > 0.9
  assert not empty['recalled_value'].any()
  weight, similarity = extras['nearest_weight'], extras['nearest_similarity']
  assert (np.diff(weight, axis=-1) <= 0).all() and weight[:, 0].max() > 0.9
  np.testing.assert_allclose(
    np.exp(50 * (similarity - 1))[weight > 1e-6], weight[weight > 1e-6], rtol=1e-3
  )
  assert not empty['nearest_weight'].any()


def test_imagination_carries_what_the_start_recalled(dreamer, one_device):
  """The reward of an imagined step is that of the action before, whose step recalled it."""
  params = one_device.begin().arrays().params['world_model']
  model = dreamer.model.rssm
  recalled = jnp.arange(4.0 * model.networks.recalled_size).reshape(4, -1)
  initial = model.initial(4)
  before = initial.latent._replace(recalled=recalled)
  latent, previous, _ = model.imagine(
    params,
    model.matrices(params),
    rssm.Recurrent(before, initial.action),
    jnp.zeros(4, jnp.int32),
    jax.vmap(model.imagined_noise)(jax.random.split(jax.random.key(0), 4)),
  )
  np.testing.assert_array_equal(latent.recalled, recalled)
  features = model.features(params, latent, previous, before.recalled)
  assert features.shape[-1] == model.networks.feature_size
  size, end = model.networks.recalled_size, model.networks.memory_size
  np.testing.assert_array_equal(features[:, end - size : end], recalled)
  np.testing.assert_array_equal(features[:, -size:], recalled)
  # The model's heads read the last, actor and critic the first of the two.
  continues = dreamer.model.discount(params, features)
  changed = features.at[:, end - size : end].add(1.0)
  np.testing.assert_array_equal(dreamer.model.discount(params, changed), continues)
  changed = features.at[:, -size:].add(jax.random.normal(jax.random.key(1), (4, size)))
  assert np.abs(dreamer.model.discount(params, changed) - continues).max() > 1e-4


def test_eight_devices_write_the_ring_of_one(dreamer, one_device):
  eight = Trainer(dreamer_update.make_update(dreamer, RATES), 8)
  one_device.begin().step(batch_of(dreamer, 0))
  eight.step(batch_of(dreamer, 0))
  one, found = one_device.arrays().params['memory'], eight.arrays().params['memory']
  for name in ('key', 'action', 'written', 'used'):
    np.testing.assert_array_equal(found[name], one[name], err_msg=name)
  np.testing.assert_allclose(found['return_'], one['return_'], rtol=1e-4, atol=1e-5)
  for update in (1, 2):
    eight.step(batch_of(dreamer, update, seed=update))
  first = eight.arrays(0)
  for device in range(1, 8):
    jax.tree.map(np.testing.assert_array_equal, first, eight.arrays(device))


def test_nothing_of_it_is_there_without_a_memory(dreamer):
  without = make_dreamer()
  shapes = lambda made: jax.eval_shape(made.agent.init_params, jax.random.key(0))
  assert set(shapes(without)) == {'world_model', 'actor_critic'}
  assert set(shapes(dreamer)) == {'world_model', 'actor_critic', 'memory'}
  published = dreamer.agent.acting_params(shapes(dreamer))['memory']
  assert set(published) == set(memory_lib.ACTED)
  stored = [
    jax.tree.map(lambda x: (x.shape, x.dtype), made.agent.stored_state(state))
    for made in (without, dreamer)
    for state in [made.agent.initial_policy_state(2)]
  ]
  assert stored[0] == stored[1]
  assert stored[0].latent.recalled is None
