"""Sight: layouts of a map, observed along real sequences and decoded in imagination."""

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
  """Cells of whole levels, half of them empty, and a position."""
  cells = (
    rng.integers(1, levels, (rows, columns)) / (levels - 1) * (rng.random((rows, columns)) < 0.5)
  )
  position = rng.integers(0, [rows, columns])
  seen = np.concatenate([cells.reshape(-1), position / (np.array([rows, columns]) - 1)])
  return cells, position, jnp.asarray(seen, jnp.float32)


@pytest.mark.parametrize('shape', [(2, 3), (8, 8), (5, 2)])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_view_is_centred_on_the_agent(shape, dtype):
  rng = np.random.default_rng(0)
  rows, columns = shape
  layout = sight.Sight(shape, levels=9)
  maps = [random_map(rng, rows, columns, 9) for _ in range(20)]
  views = layout.view(jnp.stack([seen for *_, seen in maps]).astype(dtype))
  assert views.shape == (20, layout.view_size) and views.dtype == dtype
  views = views.reshape(20, 2 * rows - 1, 2 * columns - 1, 2).astype(jnp.float32)
  for (cells, (row, column), _), view in zip(maps, views, strict=True):
    expected = np.zeros((2 * rows - 1, 2 * columns - 1))
    top, left = rows - 1 - row, columns - 1 - column
    expected[top : top + rows, left : left + columns] = cells
    np.testing.assert_allclose(view[..., 0], expected, atol=2e-3)
    np.testing.assert_array_equal(view[..., 1], expected > 0)


def test_location_holds_the_position_and_whether_its_cell_is_filled():
  rng = np.random.default_rng(1)
  layout = sight.Sight((4, 3), levels=5)
  maps = [random_map(rng, 4, 3, 5) for _ in range(20)]
  locations = layout.location(jnp.stack([seen for *_, seen in maps])[:, None])
  assert locations.shape == (20, 1, layout.location_size)
  filled = set()
  for (cells, (row, column), _), location in zip(maps, locations[:, 0], strict=True):
    here = cells[row, column] > 0
    np.testing.assert_array_equal(location, [*np.eye(4)[row], *np.eye(3)[column], here])
    filled.add(bool(here))
  assert filled == {True, False}


def test_cells_hold_their_level_and_whether_the_agent_is_there():
  rng = np.random.default_rng(2)
  layout = sight.Sight((4, 3), levels=5)
  maps = [random_map(rng, 4, 3, 5) for _ in range(20)]
  found = layout.cells(jnp.stack([seen for *_, seen in maps])[:, None])
  assert found.shape == (20, 1, 12, 6)
  for (cells, (row, column), _), shown in zip(maps, found[:, 0], strict=True):
    levels = np.rint(cells.reshape(-1) * 4).astype(int)
    np.testing.assert_allclose(shown[:, :5], np.eye(5)[levels], atol=1e-6)
    np.testing.assert_array_equal(shown[:, 5], np.eye(12)[3 * row + column])


def test_layouts_are_empty_without_a_map_or_levels(make_dreamer):
  mapped = make_dreamer('map').model.observation_spec
  for spec, levels in ((specs.BoundedArray((9,), np.float32, 0, 1), 5), (mapped, 0)):
    layout = sight.Sight.of(spec, levels)
    observation = jnp.ones((2, 9))
    seen = layout.pick(observation)
    assert seen.shape == layout.view(seen).shape == layout.location(seen).shape == (2, 0)
    assert layout.size == layout.view_size == layout.location_size == 0


@hypothesis.settings(max_examples=20, deadline=None)  # each number of levels is compiled
@hypothesis.given(number=st.floats(0, 1), levels=st.sampled_from([2, 5, 9, 16]))
def test_most_likely_inverts_levels(number, levels):
  distance = np.abs(number * (levels - 1) - np.arange(levels))
  two_hot = np.maximum(0, 1 - distance)
  logits = jnp.log(jnp.asarray(two_hot, jnp.float32) + 1e-9)
  np.testing.assert_allclose(observation_lib.most_likely(logits), number, atol=1e-5)


def test_most_likely_ignores_distant_levels():
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


def test_posterior_map_equals_the_observed_map(sequence, posterior):
  observation = np.asarray(sequence.observation)
  expected = np.concatenate([observation[..., :6], observation[..., -2:]], axis=-1)
  np.testing.assert_allclose(posterior.latent.seen, expected, atol=1e-6)
  np.testing.assert_array_equal(posterior.latent.features[..., -8:], posterior.latent.seen)


def test_imagined_map_is_decoded_and_rewards_read_the_previous_map(
  dreamer, params, sequence, posterior, make_params
):
  model, policy = dreamer.model, dreamer.actor_critic
  model_params = params['world_model']
  novelty = intrinsic.information_gain(*posterior.moments)
  last = sequence.step_type == 2
  start, _ = dream.starts(policy, posterior, last, novelty, KEYS, num_steps=2)
  slow_critic = make_params(dreamer, seed=1)['actor_critic']['critic']
  rollout = jax.jit(
    lambda start: dream.rollout(model, policy, params, slow_critic, start, jnp.int32(5))
  )(start)
  features = rollout.features[:, :5].swapaxes(0, 1)
  belief, seen = features[..., : model.belief_size], features[..., model.belief_size :]
  np.testing.assert_array_equal(seen[0], start.latent.seen)
  action = model.encode_action(rollout.choice[:4])
  before = world_model.Recurrent(world_model.Latent(belief[:-1], belief[:-1], seen[:-1]), action)
  imagined = jax.jit(model.imagine)(model_params, belief[1:], before)
  np.testing.assert_allclose(seen[1:], imagined, atol=1e-4)
  assert np.abs(seen[1:] - seen[:-1]).max() > 0.1
  reward = jax.jit(lambda *inputs: model.reward(model_params, *inputs).mean())
  np.testing.assert_allclose(
    rollout.reward[1:5], reward(belief[1:], seen[:-1], action), rtol=1e-3, atol=1e-4
  )
  assert np.abs(rollout.reward[1:5] - reward(belief[1:], seen[1:], action)).max() > 1e-2


def test_reward_reads_the_previous_map(dreamer, params, sequence):
  """The first step reads the map of the initial state."""
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
  continues = jnp.ones_like(sequence.step_type)
  assert abs(reward_loss(seen + 1, continues) - reward_loss(seen, continues)) > 1e-5
  begins = continues.at[0].set(0)
  np.testing.assert_array_equal(reward_loss(seen + 1, begins), reward_loss(seen, begins))


def test_transition_depends_on_the_position_and_its_cell(dreamer, params, posterior):
  """Two latents that differ in the map alone have different next states."""
  model = dreamer.model
  latent = jax.tree.map(lambda x: x[0], posterior.latent)
  step = jax.jit(
    lambda seen: model.members(
      params['world_model'],
      world_model.Recurrent(
        latent._replace(seen=seen), model.encode_action(jnp.zeros(3, jnp.int32))
      ),
    )
  )
  empty = jnp.zeros_like(latent.seen)
  here = empty.at[:, 0].set(1.0)  # the cell of the agent, at row 0 and column 0
  elsewhere = empty.at[:, 1].set(1.0)
  moved = empty.at[:, -1].set(1.0)
  assert np.abs(step(here) - step(empty)).max() > 1e-3
  assert np.abs(step(moved) - step(empty)).max() > 1e-3
  np.testing.assert_array_equal(step(elsewhere), step(empty))


def test_policy_value_and_salience_read_the_egocentric_view(dreamer, params):
  """Changing the view's rows of each first matrix changes the output of its network."""
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


def test_by_levels_loss_does_not_depend_on_the_distance(dreamer):
  """As probabilities 3/7 and 4/7 differ by 0.04 nat, too little to learn a position from."""
  model = dreamer.model
  flat = jnp.zeros((9,))
  logits = lambda level: (
    jnp.zeros((9, 5)).at[:, 0].set(20.0).at[8].set(20.0 * jax.nn.one_hot(level, 5))
  )
  loss = lambda level: float(model.codec.loss(logits(level).reshape(-1), flat))
  np.testing.assert_allclose(loss(0), 0.0, atol=1e-5)
  np.testing.assert_allclose([loss(1), loss(4)], 20.0, rtol=1e-5)


def test_cell_decoder_generalises_to_unfamiliar_maps(make_dreamer):
  """Trained on few maps, it keeps others. A FIRST step is decoded without the previous map."""
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
