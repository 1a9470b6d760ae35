"""Context modules: salience pools the window of an episode, and no context is empty.

Acting, imagination and losses of an agent with salience are tested here, too.
"""

import functools

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_dreamer import read_of, starts_of

from hephaestus.agents.cognition import salience
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import dream, modules, rssm

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

  def scores(self, params, window):
    return window.novelty


def read_with(features, novelty, is_there):
  """What is read at one step, by the features, novelties and validity of the last steps."""
  *before, now = np.asarray(features, np.float32)
  *novelties, own = np.asarray(novelty, np.float32)
  memory = salience.Window(np.array([before]), np.array([novelties]), np.array([is_there]))
  nothing = np.zeros((1, 0), np.float32)
  features = modules.Features(now[None], *[nothing] * (len(modules.Features._fields) - 1))
  return read_of(features, memory, own[None])


@pytest.fixture(scope='module')
def pool(dreamer):
  """(what is read at a step) -> its context, and the gradient of its sum."""
  scored = Scored(dreamer.model.networks)

  @jax.jit
  def pool(read):
    total = lambda read: (scored.pool({}, read).sum(), scored.pool({}, read))
    (_, context), grads = jax.value_and_grad(total, has_aux=True, allow_int=True)(read)
    return context, grads

  return pool


def test_context_is_the_mean_of_the_window_weighted_by_salience(pool):
  read = read_with([[8, 0], [0, 8], [8, 8]], np.log([1, 2, 5]), [True, True])
  np.testing.assert_allclose(pool(read)[0], [[1 + 5, 2 + 5]], rtol=1e-6)


def test_steps_of_another_episode_are_left_out(pool):
  pooled = lambda first: pool(
    read_with([[first, 0], [0, 3], [3, 3]], [50.0, np.log(1), np.log(2)], [False, True])
  )
  context, grads = pooled(1.0)
  np.testing.assert_allclose(context, [[2, 3]], rtol=1e-6)
  np.testing.assert_array_equal(context, pooled(1e6)[0])
  np.testing.assert_array_equal(grads.memory.features[:, 0], np.zeros((1, 2)))
  assert grads.memory.novelty[0, 0] == 0 and abs(grads.memory.novelty[0, 1]) > 0
  assert np.isfinite(grads.own).all()


def test_context_depends_on_features_and_novelty_of_every_step(policy, params):
  rng = np.random.default_rng(0)
  size = policy.context.size
  features = rng.normal(size=(WINDOW, size)).astype(np.float32)
  novelty = np.abs(rng.normal(size=WINDOW)).astype(np.float32)
  pool = jax.jit(functools.partial(policy.context.pool, params))
  pooled = lambda *given: np.asarray(pool(read_with(*given, [True] * (WINDOW - 1))))
  before = pooled(features, novelty)
  for step in range(WINDOW):
    later = (np.arange(WINDOW) == step).astype(np.float32)
    assert np.abs(pooled(features + later[:, None], novelty) - before).max() > 1e-3
    assert np.abs(pooled(features, novelty + 10 * later) - before).max() > 1e-3


def test_replayed_steps_remember_the_steps_before_them(dreamer, policy, numbered_posterior):
  """Only those of their own episode; steps before the sequence are not there."""
  posterior, number = numbered_posterior
  empty = dreamer.model.networks.empty_features(*number.shape)
  features = jax.tree.map(lambda x: np.zeros_like(x) + number[..., None], empty)
  posterior = posterior._replace(features=features)
  read = jax.device_get(jax.jit(functools.partial(policy.along, {}))(posterior, number / 2))
  for stream, step in np.ndindex(3, 6):
    begin = 3 if stream == 1 and step >= 3 else 0
    window = jax.tree.map(lambda x, at=(step, stream): x[at], read.memory)
    for w, before in enumerate(range(step - WINDOW + 1, step)):
      assert window.is_there[w] == (before >= begin)
      expected = number[before, stream] if before >= begin else 0.0
      assert (window.features[w] == expected).all()
      assert window.novelty[w] == expected / 2


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
    others = [joined[..., :0]] * (len(sizes) - 3)
    features = modules.Features(state, numbers, transition, *others)
    context = policy.context.pool(
      params, policy.along(params, rssm.Step(None, features, None, None, None, first), novelty)
    )
    read = lambda context: policy.policy(params, features, context, mask).log_prob(action)
    return read(context), read(joined)

  log_prob, without_context = train(
    all_params['actor_critic'],
    memories.features[:, :, -1],
    memories.novelty[:, :, -1],
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
  posterior = judge(model, modules.world(all_params), keys, sequence).posterior

  @jax.jit
  def imagine(params, posterior, last):
    novelty = jnp.ones(last.shape)
    start = starts_of(policy, {}, posterior, last, novelty, keys, num_steps=None)
    critic = params['actor_critic']
    imagined = dream.rollout(dreamer.model, policy, params, critic, start, jnp.int32(HORIZON))
    return imagined._replace(start=start._replace(keys=()))

  return jax.device_get(imagine(all_params, posterior, sequence.step_type == 2))


def test_imagined_steps_remember_those_before_them(imagined):
  start, memory = imagined.start, imagined.read.memory
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), memory, start.read.memory)
  state = imagined.read.features.state
  size = state.shape[-1]
  np.testing.assert_array_equal(memory.features[1:HORIZON, :, -1, :size], state[: HORIZON - 1])
  np.testing.assert_array_equal(memory.novelty[1:HORIZON, :, -1], imagined.novelty[: HORIZON - 1])
  assert memory.is_there[1:HORIZON, :, -1].all()


def test_imagined_values_read_the_context_of_their_step(policy, params, imagined):
  @jax.jit
  def values(params, imagined):
    features = imagined.read.features
    context = policy.context.pool(params, imagined.read)
    return [policy.values(params, features, x)[ac.TASK].mean() for x in (context, 0 * context)]

  expected, without_context = jax.device_get(values(params, imagined))
  found = imagined.values[ac.TASK]
  np.testing.assert_allclose(found[1:HORIZON], expected[1:HORIZON], rtol=1e-3, atol=1e-4)
  assert np.abs(without_context - expected)[1:HORIZON].max() > 0.01


@pytest.fixture(scope='module')
def gradient(policy, imagined):
  """(params, advantage, first, count) -> gradient of the loss of some imagined steps."""

  @functools.partial(jax.jit, static_argnums=4)
  def compiled(params, imagined, advantage, first, count):
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, count)
    steps = jax.tree.map(cut, dream.steps(imagined))
    fill = lambda x: jnp.full((count, 18), x)
    heads = dict.fromkeys(policy.heads, fill(1.0))
    weight = cut(dream.weights(imagined))
    targets = ac.Targets(heads, fill(1.0) * advantage, weight)
    return jax.grad(policy.loss, has_aux=True)(params, steps, targets)[0]

  return lambda params, advantage, first, count: jax.device_get(
    compiled(params, imagined, advantage, first, count)
  )


def test_chunks_of_imagined_steps_add_up_and_train_salience(params, gradient):
  """Its gradient is not zero without the critic's part, nor without the actor's."""
  whole = gradient(params, 1.0, 0, 6)
  size = lambda grads: max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  critic = gradient(params, 0.0, 0, 6)['salience']
  assert size(critic) > 1e-3
  assert size(jax.tree.map(np.subtract, whole['salience'], critic)) > 1e-3
  parts = [gradient(params, 1.0, first, 2) for first in range(0, 6, 2)]
  summed = jax.tree.map(lambda *x: sum(x), *parts)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), summed, whole)
