"""Updates of an agent with cognition on eight devices, by one compiled program.

It has memory, survival, empowerment, competence and a workspace, in addition to what all agents have.
`test_dreamer_update` compares eight devices with one, `test_fused_replay` has slots, too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaling
from small_dreamer import BATCH, COGNITION, NUM_STEPS, RATES, make_batch, make_dreamer, read_of
from trainer import Trainer

from hephaestus.agents import agent as agent_lib
from hephaestus.agents.cognition import competence
from hephaestus.agents.cognition import memory as memory_lib
from hephaestus.agents.dreamer import dream, modules, rssm
from hephaestus.learner import dreamer_update

SIZE = COGNITION['memory_size']


@pytest.fixture(scope='module')
def dreamer():
  return make_dreamer(**COGNITION, competence_scale=0.5, memory_dream_share=0.5)


@pytest.fixture(scope='module')
def eight_devices(dreamer):
  return Trainer(dreamer_update.make_update(dreamer, RATES), 8)


def batch_of(dreamer, version, seed=0):
  return make_batch(dreamer, seed)._replace(version=np.full(BATCH, version, np.int32))


# Several devices.


def test_devices_stay_bitwise_equal_and_follow_all_batches(dreamer, eight_devices):
  """The running statistics of real numbers follow the batches on all devices."""
  eight_devices.begin()
  batches = [batch_of(dreamer, version, seed=version) for version in range(3)]
  for batch in batches:
    eight_devices.step(batch)
  first = eight_devices.arrays(0)
  for device in range(1, 8):
    jax.tree.map(np.testing.assert_array_equal, first, eight_devices.arrays(device))
  real = np.concatenate([batch.observation['real'].reshape(-1, 2) for batch in batches])
  symlog = np.sign(real) * np.log1p(np.abs(real))
  found = first.statistics['world_model'][modules.NUMBERS]
  assert found['count'] == 3
  np.testing.assert_allclose(found['mean'], symlog.mean(0), rtol=1e-4)
  np.testing.assert_allclose(found['variance'], symlog.var(0), rtol=1e-4)


def test_devices_exchange_gradients_returns_and_written_entries(dreamer, eight_devices):
  """The bytes do not depend on the number of devices."""
  eight_devices.begin().step(make_batch(dreamer))
  program = scaling.read_program(eight_devices.text(), 8)
  params = eight_devices.arrays().params
  num_bytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  trained = num_bytes(params)
  # Moments of numbers, numbers that metrics and scales are means of, which entries of the memory are renewed, and
  # steps and novelty of each region.
  assert 0 < program.reduced - trained <= 4 * 190 + 4 * SIZE + 8 * 2**competence.BITS
  assert program.other_collectives == 0
  num_starts = BATCH * dreamer.config.starts_per_sequence
  returns = 4 * num_starts * len(dreamer.actor_critic.heads)
  latents = memory_lib.MOST_WRITTEN + memory_lib.MOST_RENEWED
  assert 0 < program.gathered - returns < 8 * latents * 4 * 80 + 8 * SIZE


# Competence.


def test_reward_of_competence_is_read_before_its_own_visit(dreamer, eight_devices):
  """There may be progress since the second visit, which the third update is the first to read."""
  eight_devices.begin()
  progress = [eight_devices.step(make_batch(dreamer))['intrinsic/progress'] for _ in range(6)]
  assert progress[0] == progress[1] == 0
  assert max(progress[2:]) > 0


def test_imagined_steps_have_the_progress_of_their_region(dreamer, eight_devices):
  state = eight_devices.begin().state
  table = state.statistics['world_model'][modules.OF_REWARDS][competence.NAME]
  assert eight_devices.step(make_batch(dreamer))['actor_critic/competence_advantage'] == 0
  eight_devices.begin()
  random = np.random.default_rng(0).uniform(size=table['slow'].shape[1:]).astype(np.float32)
  table = eight_devices.state.statistics['world_model'][modules.OF_REWARDS][competence.NAME]
  random = np.broadcast_to(random, table['slow'].shape)  # the same on each device
  table['slow'] = jax.device_put(random, table['slow'].sharding)
  assert eight_devices.step(make_batch(dreamer))['actor_critic/competence_advantage'] > 0


# The episodic memory.


def test_update_writes_what_later_versions_recall(dreamer, eight_devices):
  first = eight_devices.begin().step(batch_of(dreamer, 0))
  assert first['memory/written'] == memory_lib.MOST_WRITTEN
  assert first['memory/filled'] == memory_lib.MOST_WRITTEN / SIZE
  assert first['memory/evidence'] == first['memory/similarity'] == 0
  older = eight_devices.step(batch_of(dreamer, 0))  # acted before the first update
  assert older['memory/evidence'] == 0
  newer = eight_devices.step(batch_of(dreamer, 1))
  # 8 of its 48 steps are remembered, and no step of a sequence that knows it by now is written again.
  assert newer['memory/evidence'] >= 0.9 * 8 / 48
  assert newer['memory/age'] > 0
  ring = eight_devices.arrays().statistics['memory']
  keys = ring['key'][ring['written'] > 0]
  similar = keys @ keys.T > 1 - 1e-5
  assert len(keys) == 24 and similar.sum() == len(keys)


def test_share_of_the_dreams_begins_at_fresh_entries(dreamer, eight_devices):
  """In the first update there is no entry; later half of them begin at some, which are not published."""
  eight_devices.begin()
  found = [eight_devices.step(batch_of(dreamer, 0)) for _ in range(8)]
  assert found[0]['dream/remembered'] == 0
  assert 0.2 < np.mean([metrics['dream/remembered'] for metrics in found[1:]]) < 0.8
  assert 0 <= found[-1]['memory/latent_age'] <= found[-1]['memory/age'] <= 7


def test_dream_begins_as_its_entry_was_stored():
  """With what memory recalls there by now, as acting would, and without the context of another step."""
  made, count = make_dreamer(memory_size=SIZE, memory_dream_share=1.0), 5
  model, random = made.model, np.random.default_rng(0)
  params = jax.device_get(jax.jit(made.agent.init_params)(jax.random.key(0)))
  normal = lambda x: random.normal(size=x.shape).astype(x.dtype)
  ring = jax.tree.map(normal, params['statistics']['memory'])
  ring['key'] /= np.linalg.norm(ring['key'], axis=-1, keepdims=True)
  ring['written'], ring['stored'] = np.full((2, SIZE), 1, np.int32)
  params['statistics']['memory'] = ring

  @jax.jit
  def remembered(params, key):
    latent = model.rssm.initial(count).latent
    latent = latent._replace(recalled=jnp.zeros((count, model.networks.recalled_size)))
    zeros, read = jnp.zeros(count), read_of(model.networks.empty_features(count))
    keys = jax.random.split(key, count)
    start = dream.Start(latent, read, zeros, zeros, keys)
    found = dream.remembered(model, made.actor_critic, params, start, jnp.int32(1))
    return found._replace(keys=())

  found = jax.device_get(remembered(params, jax.random.key(0)))
  assert found.remembered.all() and found.weight.all()
  same = (found.latent.deterministic[:, None] == ring['start']['deterministic']).all(-1)
  np.testing.assert_array_equal(same.sum(-1), 1)
  entry = same.argmax(-1)
  assert len(set(entry)) > 1
  np.testing.assert_array_equal(found.latent.numbers, ring['start']['numbers'][entry])
  np.testing.assert_array_equal(found.read.features.state, found.latent.deterministic)
  assert found.novelty.min() > 0
  nearest = found.latent.recalled[:, -1]  # the entry itself
  np.testing.assert_allclose(nearest, 1, atol=1e-5)


def test_optimizer_has_no_part_of_the_memory(dreamer, eight_devices):
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  state = eight_devices.begin().arrays()
  moments = count(state.model_opt_state) + count(state.policy_opt_state)
  trained = count(state.params)
  assert 2 * trained <= moments < 2 * trained + 20


def explained(dreamer, params, observation):
  """Results of `explain` as if each step of a batch were FIRST, [B T, ...], and predicted rewards [T, B]."""
  batch = batch_of(dreamer, 10**6)
  count = BATCH * NUM_STEPS
  timestep = batch._replace(
    observation=jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), observation),
    step_type=np.zeros(count, np.int32),
  )
  state = dreamer.agent.initial_policy_state(count)
  _, decision = dreamer.agent.explain(
    dreamer.agent.acting_params(params), jax.random.key(0), state, timestep, greedy=True
  )
  sequence = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, batch)
  sequence = sequence._replace(initial_state=batch.initial_state)
  recalled, _ = dreamer.model.recall(
    params, sequence.observation, jnp.broadcast_to(batch.version, sequence.reward.shape)
  )
  keys = jax.random.split(jax.random.key(1), BATCH)
  posterior = dreamer.model.rssm.infer(modules.world(params), keys, sequence, recalled)
  reward = dreamer.model.reward(modules.world(params), posterior.features).mean()
  return decision.extras, reward


def test_zeroing_the_memory_changes_trained_rewards(dreamer, eight_devices):
  """Rewards are predicted by the model: if only the policy read the memory, it would earn nothing."""
  eight_devices.begin()
  for update in range(12):
    eight_devices.step(batch_of(dreamer, update))
  state = eight_devices.arrays()
  params = agent_lib.all_params(state)
  empty = {'memory': jax.tree.map(np.zeros_like, state.statistics['memory'])}
  without = params | {'statistics': state.statistics | empty}
  observation = batch_of(dreamer, 0).observation
  explain = jax.jit(lambda params, observation: explained(dreamer, params, observation))
  (extras, reward), (empty, reward_without) = jax.device_get(
    [explain(each, observation) for each in (params, without)]
  )
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


def test_imagination_carries_what_the_start_recalled(dreamer, eight_devices):
  """An imagined step has the reward of the previous action, whose step recalled it."""
  params = modules.world(agent_lib.all_params(eight_devices.begin().arrays()))
  model = dreamer.model.rssm
  size = model.networks.recalled_size
  recalled = np.arange(4.0 * size, dtype=np.float32).reshape(4, -1)

  @jax.jit
  def imagine(params):
    initial = model.initial(4)
    before = initial.latent._replace(recalled=jnp.asarray(recalled))
    noise = jax.vmap(model.imagined_noise)(jax.random.split(jax.random.key(0), 4))
    recurrent = rssm.Recurrent(before, initial.action)
    imagined = model.imagine(
      params, model.matrices(params), recurrent, jnp.zeros(4, jnp.int32), noise
    )
    features = imagined.features
    now = features._replace(recalled=features.recalled + 1.0)
    moved = features.transition.at[:, -size:].add(jax.random.normal(jax.random.key(1), (4, size)))
    then = features._replace(transition=moved)
    continues = [dreamer.model.discount(params, each) for each in (features, now, then)]
    return imagined.latent.recalled, features, continues

  carried, features, (continues, after_now, after_then) = jax.device_get(imagine(params))
  np.testing.assert_array_equal(carried, recalled)
  np.testing.assert_array_equal(features.recalled, recalled)
  np.testing.assert_array_equal(features.transition[:, -size:], recalled)
  # The model's heads read the last, actor and critic the first of the two.
  np.testing.assert_array_equal(after_now, continues)
  assert np.abs(after_then - continues).max() > 1e-4


def test_nothing_of_it_is_there_without_a_memory(dreamer):
  without = make_dreamer()
  shapes = lambda made: jax.eval_shape(made.agent.init_params, jax.random.key(0))
  assert set(shapes(without)) == {'world_model', 'actor_critic', 'statistics'}
  assert set(shapes(without)['statistics']) == {'world_model', 'exploring'}
  assert set(shapes(dreamer)['statistics']) == {'world_model', 'exploring', 'memory'}
  published = dreamer.agent.acting_params(shapes(dreamer))['statistics']['memory']
  assert set(published) == set(memory_lib.ACTED)
  stored = [
    jax.tree.map(lambda x: (x.shape, x.dtype), made.agent.stored_state(state))
    for made in (without, dreamer)
    for state in [made.agent.initial_policy_state(2)]
  ]
  assert stored[0] == stored[1]
  assert stored[0].latent.recalled is None


# Survival, empowerment and the workspace.


def test_metrics_of_survival_are_computed_from_the_batch(dreamer, eight_devices):
  """Steps at which an episode begins have no reward; at a death the lack of everything counts."""
  batch = make_batch(dreamer)
  metrics = eight_devices.begin().step(batch)
  vitals = batch.observation['bounded'][..., [0, 2]]
  lack = np.cbrt(np.sum((1 - vitals) ** 4, axis=-1))
  reached = np.where(batch.discount == 0, np.cbrt(2), lack)
  reward = np.zeros_like(lack)
  reward[:, 1:] = lack[:, :-1] - reached[:, 1:]
  reward[batch.step_type == 0] = 0
  assert metrics['intrinsic/survival'] == pytest.approx(reward.mean(), rel=1e-4)
  assert metrics['intrinsic/vital_food'] == pytest.approx(vitals[..., 0].mean(), rel=1e-5)
  assert metrics['intrinsic/vital_heat'] == pytest.approx(vitals[..., 1].mean(), rel=1e-5)
  assert 0.05 < metrics['intrinsic/vital_error'] < 0.6  # of a model that has learned nothing
  assert metrics['actor_critic/survival_advantage'] > 0


def test_reward_of_empowerment_is_a_share_and_scaled(dreamer, eight_devices):
  """Its head has had one update by random inputs, so the share is small."""
  metrics = eight_devices.begin().step(make_batch(dreamer))
  assert 0 < abs(metrics['intrinsic/empowerment']) < 0.2
  assert metrics['actor_critic/empowerment_advantage'] > 0
  assert 0.5 * np.log(3) < metrics['world_model/inverse'] < 2 * np.log(3)


def test_update_trains_the_gates_and_reports_them(dreamer, eight_devices):
  """The actor's last layer begins with small weights, not with zeros."""
  before = eight_devices.begin().arrays().params['actor_critic']
  metrics = eight_devices.step(make_batch(dreamer))
  after = eight_devices.arrays().params['actor_critic']
  assert set(before) == {'query', 'key', 'actor', 'explorer', 'critic', 'explorer_critic'}
  for name in before:
    same = jax.tree.map(np.array_equal, before[name], after[name])
    assert not all(jax.tree.leaves(same)), name
  names = ('bounded', 'real', 'recall')
  shares = [metrics[f'workspace/share_{name}'] for name in names]
  assert sum(shares) == pytest.approx(metrics['workspace/open'], rel=1e-5)
  assert 0 < metrics['workspace/open'] <= COGNITION['workspace_size'] + 1e-5  # a mean of floats
  assert 0 <= metrics['workspace/entropy'] <= np.log(len(names))
