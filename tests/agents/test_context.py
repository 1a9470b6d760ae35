"""Context modules: salience pools the window of an episode, and no context is empty.

Acting, imagination and losses of an agent with salience are tested here, too.
"""

import functools

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_dreamer import random_features

from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import dream, modules
from hephaestus.agents.dreamer.contexts import context, salience

WINDOW, HORIZON = 3, 4


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('masked', window=WINDOW)


@pytest.fixture(scope='module')
def policy(dreamer):
  return dreamer.actor_critic


@pytest.fixture(scope='module')
def all_params(dreamer, make_params):
  return make_params(dreamer)


@pytest.fixture(scope='module')
def params(all_params):
  return all_params['actor_critic']


class Scored(salience.Salience):
  """Salience whose scores are the novelties, in place of a network's."""

  def scores(self, params, history):
    return history.novelty


def window_of(features, scores, episode):
  return salience.Window(
    np.asarray(features, np.float32)[:, None],
    np.asarray(scores, np.float32)[:, None],
    np.asarray(episode, np.int32)[:, None],
  )


@pytest.fixture(scope='module')
def pool(dreamer):
  """(window) -> the context of its last step, and the gradient of its sum."""
  scored = Scored(dreamer.model.networks)

  @jax.jit
  def pool(window):
    pooled = lambda window: scored.pool({}, window, window.features[WINDOW - 1 :])[0]
    total = lambda window: (pooled(window).sum(), pooled(window))
    (_, context), grads = jax.value_and_grad(total, has_aux=True, allow_int=True)(window)
    return context, grads

  return pool


def test_context_is_the_mean_of_the_window_weighted_by_salience(pool):
  window = window_of([[8, 0], [0, 8], [8, 8]], np.log([1, 2, 5]), [4, 4, 4])
  np.testing.assert_allclose(pool(window)[0], [[1 + 5, 2 + 5]], rtol=1e-6)


def test_steps_of_another_episode_are_left_out(pool):
  pooled = lambda first: pool(
    window_of([[first, 0], [0, 3], [3, 3]], [50.0, np.log(1), np.log(2)], [6, 7, 7])
  )[0]
  np.testing.assert_allclose(pooled(1.0), [[2, 3]], rtol=1e-6)
  np.testing.assert_array_equal(pooled(1.0), pooled(1e6))


def test_steps_that_are_left_out_get_no_gradient(pool):
  window = window_of([[1, 0], [0, 3], [3, 3]], [5.0, 1.0, 2.0], [6, 7, 7])
  _, grads = pool(window)
  np.testing.assert_array_equal(grads.features[0], np.zeros((1, 2)))
  novelty = np.asarray(grads.novelty)
  assert novelty[0, 0] == 0
  assert np.isfinite(novelty).all() and np.abs(novelty[1:]).min() > 0


def test_context_depends_on_features_and_novelty_of_every_step(policy, params):
  rng = np.random.default_rng(0)
  features = rng.normal(size=(WINDOW, 1, policy.context.size)).astype(np.float32)
  novelty = np.abs(rng.normal(size=(WINDOW, 1))).astype(np.float32)
  history = salience.Window(features, novelty, np.zeros((WINDOW, 1), np.int32))
  pool = jax.jit(lambda history: policy.context.pool(params, history, history.features[-1:]))
  pooled = lambda history: np.asarray(pool(history))
  before = pooled(history)
  for step in range(WINDOW):
    later = (np.arange(WINDOW) == step)[:, None].astype(np.float32)
    by_features = pooled(history._replace(features=features + later[..., None]))
    by_novelty = pooled(history._replace(novelty=novelty + 10 * later))
    assert np.abs(by_features - before).max() > 1e-3
    assert np.abs(by_novelty - before).max() > 1e-3


def test_advancing_step_by_step_pools_as_a_whole_sequence(dreamer, policy, params):
  """This holds across the beginnings of episodes, and from a memory without any step."""
  rng = np.random.default_rng(0)
  features = random_features(dreamer, rng, 7, 4)
  novelty = rng.uniform(size=(7, 4)).astype(np.float32)
  begins = rng.uniform(size=(7, 4)) < 0.3
  begins[0] = True
  assert begins[1:].any()

  @jax.jit
  def along_history(features, novelty, begins):
    history = policy.context.replayed(features, novelty, begins)
    memory_at = lambda step: policy.context.memory_at(history, jnp.full(4, step), jnp.arange(4))
    return policy.context.pool(params, history, features), jax.vmap(memory_at)(jnp.arange(7))

  together, memories = jax.device_get(along_history(features, novelty, begins))
  assert together.shape == (7, 4, policy.context.size)
  memory, advance = policy.context.initial(4), jax.jit(policy.context.advance)
  for step in range(7):
    at = jax.tree.map(lambda x, step=step: x[step], memories)
    arguments = jax.tree.map(lambda x, step=step: x[step], (features, novelty, begins))
    _, again = advance(params, at, *arguments)
    memory, single = advance(params, memory, *arguments)
    np.testing.assert_allclose(together[step], single, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(again, single, rtol=1e-4, atol=1e-5)


def test_steps_before_a_sequence_are_not_read(dreamer, policy, params):
  """Zeros in their place would pull a context towards zero."""

  @jax.jit
  def pool(features, novelty, begins):
    history = policy.context.replayed(features, novelty, begins)
    return policy.context.pool(params, history, features)

  ones = jax.tree.map(np.ones_like, random_features(dreamer, np.random.default_rng(0), 2, 1))
  pooled = pool(ones, np.ones((2, 1), np.float32), np.zeros((2, 1), bool))
  np.testing.assert_allclose(pooled, np.ones((2, 1, policy.context.size)), rtol=1e-5)


# Replayed steps.


@pytest.mark.parametrize('count', [None, 5])
def test_start_remembers_the_steps_before_it(policy, numbered_posterior, count):
  posterior, number = numbered_posterior
  keys = jax.random.split(jax.random.key(6), 3)
  last = np.zeros(number.shape, bool)
  starts = jax.jit(functools.partial(dream.starts, policy, num_steps=count))
  start, _ = starts({}, posterior, last, number / 2, keys)
  start = jax.device_get(start._replace(keys=()))
  for i in range(3 * (count or 6)):
    stream, step = divmod(int(start.latent.deterministic[i, 0]), 100)
    step -= 1
    for w in range(WINDOW - 1):
      before = step - (WINDOW - 1) + w
      expected = number[before, stream] if before >= 0 else 0.0
      assert start.memory.novelty[w, i] == expected / 2
      np.testing.assert_array_equal(start.memory.features[w, i], [expected, -expected])
      same_episode = before >= 0 and not (stream == 1 and before < 3 <= step)
      own = start.memory.episode[-1, i] + start.begins[i]
      assert (start.memory.episode[w, i] == own) == same_episode


def test_history_of_a_sequence_leaves_out_the_steps_before_it(policy, numbered_posterior):
  posterior, number = numbered_posterior
  history = jax.jit(policy.context.replayed)(posterior.features, number, posterior.first)
  np.testing.assert_array_equal(
    history.episode[:, :2].T, [[-1, -1, 0, 0, 0, 0, 0, 0], [-1, -1, 0, 0, 0, 1, 1, 1]]
  )
  np.testing.assert_array_equal(history.features[WINDOW - 1 :, :, 0], number)
  np.testing.assert_array_equal(history.novelty[WINDOW - 1 :], number)


# An agent with salience.


def test_acting_and_training_pool_the_same_windows(dreamer, policy, all_params, make_sequence, act):
  """Both then compute the same likelihood, along the streams of conftest."""
  sequence = make_sequence(dreamer)
  first = sequence.step_type == 0
  first[0] = True
  acting, state = dreamer.agent.acting_params(all_params), dreamer.agent.initial_policy_state(3)
  memories, decisions = [], []
  for t in range(6):
    observation = jax.tree.map(lambda x, t=t: x[t], sequence.observation)
    arrival = dm_env.TimeStep(np.where(first[t], 0, 1).astype(np.int32), None, None, observation)
    state, decision = act(dreamer, acting, jax.random.key(t), state, arrival)
    memories.append(state.memory)
    decisions.append(decision)
  memories, decisions = (jax.tree.map(lambda *x: np.stack(x), *x) for x in (memories, decisions))

  @jax.jit
  def train(params, joined, novelty, first, action, mask):
    sizes = [x.shape[-1] for x in dreamer.model.networks.empty_features(1)]
    state, numbers, transition = jnp.split(joined, np.cumsum(sizes)[:2], axis=-1)
    features = modules.Features(state, numbers, transition, joined[..., :0])
    history = policy.context.replayed(features, novelty, first)
    read = lambda context: policy.policy(params, features, context, mask).log_prob(action)
    return read(policy.context.pool(params, history, features)), read(joined)

  log_prob, without_context = train(
    all_params['actor_critic'],
    memories.features[:, -1],
    memories.novelty[:, -1],
    first,
    decisions.action,
    sequence.observation['action_mask'],
  )
  np.testing.assert_allclose(decisions.extras['log_prob'], log_prob, rtol=1e-3, atol=1e-4)
  assert np.abs(without_context - log_prob).max() > 0.01


@pytest.fixture(scope='module')
def imagined(make_dreamer, dreamer, policy, all_params, make_sequence, judge):
  """Imagination from all steps of the streams of conftest."""
  keys = jax.random.split(jax.random.key(5), 3)
  sequence, model = make_sequence(dreamer), make_dreamer('masked').model
  posterior = judge(model, all_params['world_model'], keys, sequence).posterior

  @jax.jit
  def imagine(params, posterior, last):
    novelty = jnp.ones(last.shape)
    start, _ = dream.starts(policy, {}, posterior, last, novelty, keys, num_steps=None)
    critic = params['actor_critic']
    imagined = dream.rollout(dreamer.model, policy, params, critic, start, jnp.int32(HORIZON))
    return imagined._replace(start=start._replace(keys=()))

  return jax.device_get(imagine(all_params, posterior, sequence.step_type == 2))


def test_history_of_a_dream_is_its_memory_and_then_its_steps(policy, imagined):
  start = imagined.start
  history = jax.device_get(jax.jit(functools.partial(dream.history, policy))(imagined))
  before = jax.tree.map(lambda x: x[: WINDOW - 1], history)
  jax.tree.map(np.testing.assert_array_equal, before, start.memory)
  state = imagined.features.state
  np.testing.assert_array_equal(history.features[WINDOW - 1 :, :, : state.shape[-1]], state)
  np.testing.assert_array_equal(history.novelty[WINDOW - 1 :], imagined.novelty[:-1])
  own = start.memory.episode[-1] + start.begins
  assert (history.episode[WINDOW - 1 :] == own).all()


def test_imagined_values_read_the_context_of_their_step(policy, params, imagined):
  @jax.jit
  def values(params, imagined):
    history, features = dream.history(policy, imagined), imagined.features
    context = policy.context.pool(params, history, features)
    now = history.features[WINDOW - 1 :]
    return [policy.values(params, features, x)[ac.TASK].mean() for x in (context, now)]

  expected, without_context = jax.device_get(values(params, imagined))
  found = imagined.values[ac.TASK]
  np.testing.assert_allclose(found[1:HORIZON], expected[1:HORIZON], rtol=1e-3, atol=1e-4)
  assert np.abs(without_context - expected)[1:HORIZON].max() > 0.01


@pytest.fixture(scope='module')
def gradient(policy, imagined):
  """(params, advantage, first, count) -> gradient of the loss of some imagined steps."""

  @functools.partial(jax.jit, static_argnums=4)
  def compiled(params, imagined, advantage, first, count):
    steps = dream.steps(policy, imagined, dream.history(policy, imagined), first, count)
    fill = lambda x: jnp.full((count, 18), x)
    heads = dict.fromkeys(policy.heads, fill(1.0))
    weight = jax.lax.dynamic_slice_in_dim(dream.weights(imagined), first, count)
    targets = ac.Targets(heads, fill(1.0) * advantage, heads, weight)
    return jax.grad(policy.loss, has_aux=True)(params, steps, targets)[0]

  return lambda params, advantage, first, count: jax.device_get(
    compiled(params, imagined, advantage, first, count)
  )


def test_salience_learns_from_actor_and_critic(params, gradient):
  """Its gradient is not zero without the critic's part, nor without the actor's."""
  size = lambda grads: max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  both, critic = (gradient(params, advantage, 0, 6)['salience'] for advantage in (1.0, 0.0))
  assert size(critic) > 1e-3
  assert size(jax.tree.map(np.subtract, both, critic)) > 1e-3


def test_chunks_each_with_the_window_before_it_add_up_to_the_whole(params, gradient):
  parts = [gradient(params, 1.0, first, 2) for first in range(0, 6, 2)]
  summed = jax.tree.map(lambda *x: sum(x), *parts)
  whole = gradient(params, 1.0, 0, 6)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), summed, whole)


def test_replayed_loss_trains_salience(policy, params, make_sequence, dreamer):
  sequence = make_sequence(dreamer)
  features = random_features(dreamer, np.random.default_rng(0), 6, 3)

  @jax.jit
  def gradient(params, features, sequence):
    history = policy.context.replayed(features, jnp.ones((6, 3)), sequence.step_type == 0)
    rewards = {ac.TASK: sequence.reward}
    replayed = ac.Replayed(features, history, rewards, sequence.discount, sequence.step_type == 2)
    return jax.grad(policy.replayed_value_loss)(params, params, replayed)['salience']

  grads = jax.device_get(gradient(params, features, sequence))
  assert max(np.abs(x).max() for x in jax.tree.leaves(grads)) > 1e-4


def test_foreseen_salience_sums_to_one_over_the_steps_of_the_episode(
  dreamer, all_params, make_sequence
):
  sequence = make_sequence(dreamer)
  stream = jax.tree.map(lambda x: x[:, 0], (sequence.observation, sequence.action))
  foresee = jax.jit(lambda *arguments: dreamer.agent.foresee(*arguments).salience)
  salience = np.asarray(foresee(all_params, jax.random.key(0), *stream, np.int32(3)))
  assert salience.shape == (6, WINDOW)
  np.testing.assert_allclose(salience.sum(1), 1, rtol=1e-5)
  for step in range(WINDOW):
    assert (salience[step, : WINDOW - 1 - step] == 0).all()
    assert (salience[step, WINDOW - 1 - step :] > 0).all()
  assert np.ptp(salience[-1]) > 1e-3


# No context.


def test_without_context_there_are_no_parameters_and_no_memory(make_dreamer, param_shapes):
  dreamer = make_dreamer('masked')
  policy = dreamer.actor_critic
  assert type(policy.context) is context.Context
  params = param_shapes(dreamer)['actor_critic']
  assert set(params) == {'actor', 'explorer', 'critic', 'explorer_critic'}
  features = random_features(dreamer, np.random.default_rng(0), 2, 5)

  def read(params, features):
    history = policy.context.replayed(features, jnp.ones((2, 5)), jnp.zeros((2, 5), bool))
    assert history == policy.context.initial(5) == ()
    pooled = policy.context.pool(params, history, features)
    return pooled, policy.values(params, features, pooled)[ac.TASK].mean()

  pooled, value = jax.eval_shape(read, params, features)
  assert pooled.shape == (2, 5, 0) and value.shape == (2, 5)
