"""Sight: the map seen from the agent, real while awake and decoded while dreaming."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.agents import observation as observation_lib
from hephaestus.agents import sight
from hephaestus.agents.dreamer import dream, intrinsic, world_model

KEYS = jax.random.split(jax.random.key(5), 3)


def random_map(rng, rows, columns, levels):
  """Cells of whole levels, half of them empty, and a place."""
  cells = (
    rng.integers(1, levels, (rows, columns)) / (levels - 1) * (rng.random((rows, columns)) < 0.5)
  )
  place = rng.integers(0, [rows, columns])
  seen = np.concatenate([cells.reshape(-1), place / (np.array([rows, columns]) - 1)])
  return cells, place, jnp.asarray(seen, jnp.float32)


@pytest.mark.parametrize('shape', [(2, 3), (8, 8), (5, 2)])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_the_view_shows_each_cell_where_it_lies_from_the_agent(shape, dtype):
  rng = np.random.default_rng(0)
  rows, columns = shape
  eyes = sight.Sight(shape, levels=9)
  maps = [random_map(rng, rows, columns, 9) for _ in range(20)]
  views = eyes.view(jnp.stack([seen for *_, seen in maps]).astype(dtype))
  assert views.shape == (20, eyes.view_size) and views.dtype == dtype
  views = views.reshape(20, 2 * rows - 1, 2 * columns - 1, 2).astype(jnp.float32)
  for (cells, (row, column), _), view in zip(maps, views, strict=True):
    expected = np.zeros((2 * rows - 1, 2 * columns - 1))
    top, left = rows - 1 - row, columns - 1 - column
    expected[top : top + rows, left : left + columns] = cells
    np.testing.assert_allclose(view[..., 0], expected, atol=2e-3)
    np.testing.assert_array_equal(view[..., 1], expected > 0)


def test_a_glance_tells_the_place_and_whether_something_is_there():
  rng = np.random.default_rng(1)
  eyes = sight.Sight((4, 3), levels=5)
  maps = [random_map(rng, 4, 3, 5) for _ in range(20)]
  glances = eyes.glance(jnp.stack([seen for *_, seen in maps])[:, None])
  assert glances.shape == (20, 1, eyes.glance_size)
  filled = set()
  for (cells, (row, column), _), glance in zip(maps, glances[:, 0], strict=True):
    here = cells[row, column] > 0
    np.testing.assert_array_equal(glance, [*np.eye(4)[row], *np.eye(3)[column], here])
    filled.add(bool(here))
  assert filled == {True, False}


def test_a_cell_is_told_by_its_level_and_by_the_agent_on_it():
  rng = np.random.default_rng(2)
  eyes = sight.Sight((4, 3), levels=5)
  maps = [random_map(rng, 4, 3, 5) for _ in range(20)]
  told = eyes.cells(jnp.stack([seen for *_, seen in maps])[:, None])
  assert told.shape == (20, 1, 12, 6)
  for (cells, (row, column), _), shown in zip(maps, told[:, 0], strict=True):
    levels = np.rint(cells.reshape(-1) * 4).astype(int)
    np.testing.assert_allclose(shown[:, :5], np.eye(5)[levels], atol=1e-6)
    np.testing.assert_array_equal(shown[:, 5], np.eye(12)[3 * row + column])


def test_without_a_map_or_levels_nothing_is_seen(make_dreamer):
  mapped = make_dreamer('map').model.observation_spec
  for spec, levels in ((specs.BoundedArray((9,), np.float32, 0, 1), 5), (mapped, 0)):
    eyes = sight.Sight.of(spec, levels)
    observation = jnp.ones((2, 9))
    seen = eyes.pick(observation)
    assert seen.shape == eyes.view(seen).shape == eyes.glance(seen).shape == (2, 0)
    assert eyes.size == eyes.view_size == eyes.glance_size == 0


@hypothesis.settings(max_examples=20, deadline=None)  # each number of levels is compiled
@hypothesis.given(number=st.floats(0, 1), levels=st.sampled_from([2, 5, 9, 16]))
def test_a_number_read_by_levels_is_found_again(number, levels):
  distance = np.abs(number * (levels - 1) - np.arange(levels))
  two_hot = np.maximum(0, 1 - distance)
  logits = jnp.log(jnp.asarray(two_hot, jnp.float32) + 1e-9)
  np.testing.assert_allclose(observation_lib.most_likely(logits), number, atol=1e-5)


def test_between_two_far_levels_the_likelier_is_meant():
  shares = jnp.array([0.0, 0.55, 0.0, 0.0, 0.0, 0.45]) + 1e-9
  np.testing.assert_allclose(observation_lib.most_likely(jnp.log(shares)), 0.2, atol=1e-6)


# In the agent.


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('map')


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)


@pytest.fixture(scope='module')
def sequence(dreamer, make_sequence):
  return make_sequence(dreamer)


@pytest.fixture(scope='module')
def posterior(dreamer, params, sequence, infer):
  return infer(dreamer.model, params['world_model'], KEYS, sequence)


def test_awake_the_map_is_the_observations(sequence, posterior):
  observation = np.asarray(sequence.observation)
  expected = np.concatenate([observation[..., :6], observation[..., -2:]], axis=-1)
  np.testing.assert_allclose(posterior.latent.seen, expected, atol=1e-6)
  np.testing.assert_array_equal(posterior.latent.features[..., -8:], posterior.latent.seen)


def test_in_a_dream_the_map_is_decoded_and_rewards_come_from_the_map_before(
  dreamer, params, sequence, posterior, make_params
):
  model, world, policy = dreamer.model, params['world_model'], dreamer.actor_critic
  novelty = intrinsic.information_gain(*posterior.moments)
  last = sequence.step_type == 2
  start, _ = dream.starts(policy, posterior, last, novelty, KEYS, num_steps=2)
  slow_critic = make_params(dreamer, seed=1)['actor_critic']['critic']
  dreamt = jax.jit(
    lambda start: dream.rollout(model, policy, params, slow_critic, start, jnp.int32(5))
  )(start)
  features = dreamt.features[:, :5].swapaxes(0, 1)
  belief, seen = features[..., : model.belief_size], features[..., model.belief_size :]
  np.testing.assert_array_equal(seen[0], start.latent.seen)
  action = model.encode_action(dreamt.choice[:4])
  before = world_model.Recurrent(world_model.Latent(belief[:-1], belief[:-1], seen[:-1]), action)
  imagined = jax.jit(model.imagine)(world, belief[1:], before)
  np.testing.assert_allclose(seen[1:], imagined, atol=1e-4)
  assert np.abs(seen[1:] - seen[:-1]).max() > 0.1
  reward = jax.jit(lambda *rows: model.reward(world, *rows).mean())
  np.testing.assert_allclose(
    dreamt.reward[1:5], reward(belief[1:], seen[:-1], action), rtol=1e-3, atol=1e-4
  )
  assert np.abs(dreamt.reward[1:5] - reward(belief[1:], seen[1:], action)).max() > 1e-2


def test_a_reward_is_learned_from_the_map_that_was_acted_on(dreamer, params, sequence):
  """The first row's is the one that is carried into the sequence."""
  model = dreamer.model
  carried = sequence.initial_state

  @jax.jit
  def reward_loss(seen, rest):
    state = carried._replace(latent=carried.latent._replace(seen=seen))
    _, (_, _, metrics) = model.loss(
      params['world_model'], KEYS, sequence._replace(initial_state=state, step_type=rest)
    )
    return metrics['reward']

  seen = carried.latent.seen
  goes_on = jnp.ones_like(sequence.step_type)
  assert abs(reward_loss(seen + 1, goes_on) - reward_loss(seen, goes_on)) > 1e-5
  begins = goes_on.at[0].set(0)
  np.testing.assert_array_equal(reward_loss(seen + 1, begins), reward_loss(seen, begins))


def test_steps_depend_on_the_place_and_what_is_there(dreamer, params, posterior):
  """Two rows that differ in what is seen alone are followed by different states."""
  model, world = dreamer.model, params['world_model']
  latent = jax.tree.map(lambda x: x[0], posterior.latent)
  step = jax.jit(
    lambda seen: model.members(
      world,
      world_model.Recurrent(
        latent._replace(seen=seen), model.encode_action(jnp.zeros(3, jnp.int32))
      ),
    )
  )
  empty = jnp.zeros_like(latent.seen)
  here = empty.at[:, 0].set(1.0)  # the cell of the place, which is row 0 and column 0
  elsewhere = empty.at[:, 1].set(1.0)
  moved = empty.at[:, -1].set(1.0)
  assert np.abs(step(here) - step(empty)).max() > 1e-3
  assert np.abs(step(moved) - step(empty)).max() > 1e-3
  np.testing.assert_array_equal(step(elsewhere), step(empty))


def test_policy_value_and_salience_read_the_view(dreamer, params):
  """Moving the view's rows of each first matrix changes what the network says."""
  policy = dreamer.actor_critic
  size, view_size = policy.feature_size, policy.sight.view_size
  features = jnp.zeros((1, size)).at[0, -8:].set(1.0)
  context = jnp.zeros((1, size))
  track = policy.context.replayed(features[None], jnp.zeros((1, 1)), jnp.ones((1, 1), bool))

  @jax.jit
  def outputs(params):
    return {
      'actor': policy.policy(params, features, context, None).log_prob(jnp.zeros(1, int)),
      'critic': policy.value(params, features, context).mean(),
      'salience': policy.context.scores(params, track),
    }

  before = outputs(params['actor_critic'])
  for name in before:
    changed = jax.tree.map(jnp.array, params['actor_critic'])
    kernel = changed[name]['Dense_0']['kernel']
    rows = slice(size, size + view_size)
    changed[name]['Dense_0']['kernel'] = kernel.at[rows].multiply(-3.0)
    after = outputs(changed)
    assert {other for other in before if (after[other] != before[other]).any()} == {name}


def test_by_levels_a_place_one_off_costs_as_much_as_one_far_off(dreamer):
  """As a probability 3/7 would be told from 4/7 by 0.04 nat, and the place would not be learned."""
  model = dreamer.model
  flat = jnp.zeros((9,))
  logits = lambda level: (
    jnp.zeros((9, 5)).at[:, 0].set(20.0).at[8].set(20.0 * jax.nn.one_hot(level, 5))
  )
  cost = lambda level: float(model.codec.loss(logits(level).reshape(-1), flat))
  np.testing.assert_allclose(cost(0), 0.0, atol=1e-5)
  np.testing.assert_allclose([cost(1), cost(4)], 20.0, rtol=1e-5)


def test_a_map_never_seen_before_is_kept_once_it_is_known_what_becomes_of_cells(make_dreamer):
  """What a few maps teach holds for all, while an observation's first row is decoded without one."""
  model = make_dreamer('map').model
  params = model.init(jax.random.key(0))
  rng = np.random.default_rng(3)
  levels, num_cells = model.config.levels, 6

  def draw(count):
    seen = jnp.stack([random_map(rng, 2, 3, levels)[2] for _ in range(count)])
    level = jnp.rint(seen[:, :num_cells] * (levels - 1)).astype(int)
    belief = jnp.asarray(rng.normal(size=(count, model.belief_size)), jnp.float32)
    return belief, seen, level

  def logits(params, belief, seen, first=False):
    action = jnp.zeros((len(belief), model.action_size))
    decoded = model._decoded(params, belief, seen, action, jnp.full(len(belief), first))
    return decoded[:, : num_cells * levels].reshape(-1, num_cells, levels)

  @jax.jit
  def learn(params, belief, seen, level):
    def loss(change):
      log_probs = jax.nn.log_softmax(logits(params | {'change': change}, belief, seen))
      return -jnp.take_along_axis(log_probs, level[..., None], axis=-1).mean()

    step = lambda x, g: x - g
    return params | {
      'change': jax.tree.map(step, params['change'], jax.grad(loss)(params['change']))
    }

  few = draw(20)
  for _ in range(300):
    params = learn(params, *few)
  belief, seen, level = draw(50)
  kept = lambda **options: (logits(params, belief, seen, **options).argmax(-1) == level).mean()
  assert kept() > 0.98
  assert kept(first=True) < 0.8
