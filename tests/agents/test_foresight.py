"""A dream beside the real rollout: what it may know, and that it is an observation again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents import observation as observation_lib

NUM_ROWS, CONTEXT = 6, 3
ALL_WORLDS = ['plain', 'masked', 'continuous', 'pictures', 'map']


@pytest.fixture(scope='module')
def foresee(make_dreamer, make_params, make_sequence):
  """(environment, context, change of the (observation, action)) -> Foresight of the first stream."""
  compiled = {}

  def run(world, context=CONTEXT, change=lambda observation, action: (observation, action)):
    dreamer = make_dreamer(world)
    params = make_params(dreamer)
    sequence = jax.tree.map(np.array, make_sequence(dreamer))
    stream = jax.tree.map(lambda x: x[:, 0], (sequence.observation, sequence.action))
    function = compiled.setdefault(world, jax.jit(dreamer.agent.foresee))
    return function(params, jax.random.key(0), *change(*stream), jnp.int32(context))

  return run


def differs(one, other):
  """[T] bool."""
  rows = [
    (np.asarray(x) != np.asarray(y)).reshape(NUM_ROWS, -1).any(1)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  ]
  return np.any(rows, axis=0)


@pytest.mark.parametrize('world', ALL_WORLDS)
def test_a_dream_knows_what_was_seen_and_done_before_it_and_what_is_done(foresee, world):
  def see_another(row):
    def change(observation, action):
      change = lambda x: np.concatenate([x[:row], 1 - x[row : row + 1], x[row + 1 :]])
      return jax.tree.map(lambda x: change(x).astype(x.dtype), observation), action

    return change

  def do_another(row):
    def change(observation, action):
      action[row] = (action[row] + 1) % 3 if action.dtype == np.int32 else action[row] / 2
      return observation, action

    return change

  plain = foresee(world).observation
  row = np.arange(NUM_ROWS)
  seen = differs(plain, foresee(world, change=see_another(1)).observation)
  assert not seen[0]
  assert seen[1] and seen[CONTEXT:].any()
  assert not differs(plain, foresee(world, change=see_another(CONTEXT)).observation).any()
  done = differs(plain, foresee(world, change=do_another(CONTEXT)).observation)
  assert not done[row <= CONTEXT].any()
  assert done[row > CONTEXT].any()


def test_awake_it_sees_every_row(foresee):
  def change(observation, action):
    observation[-1] += 1
    return observation, action

  awake = foresee('plain', NUM_ROWS).observation
  assert differs(awake, foresee('plain', NUM_ROWS, change).observation).tolist() == [False] * 5 + [
    True
  ]


def test_salience_is_shared_among_the_rows_of_the_episode(foresee, make_dreamer):
  salience = np.asarray(foresee('plain').salience)
  window = make_dreamer('plain').config.window
  assert salience.shape == (NUM_ROWS, window)
  np.testing.assert_allclose(salience.sum(1), 1, rtol=1e-5)
  for row in range(window):
    assert (salience[row, : window - 1 - row] == 0).all()
    assert (salience[row, window - 1 - row :] > 0).all()
  assert np.ptp(salience[-1]) > 1e-3


@pytest.mark.parametrize('world', ALL_WORLDS)
def test_what_is_decoded_has_the_shapes_of_an_observation(foresee, make_dreamer, world):
  spec = observation_lib.without_mask(make_dreamer(world).model.observation_spec)
  decoded = foresee(world).observation
  shapes = jax.tree.map(lambda leaf: (NUM_ROWS, *leaf.shape), spec)
  assert jax.tree.map(lambda x: x.shape, decoded) == shapes
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(decoded))


@pytest.mark.parametrize('world', ['plain', 'masked', 'pictures'])
def test_what_is_expected_is_what_costs_the_least(make_dreamer, make_params, world):
  dreamer = make_dreamer(world)
  model = dreamer.model
  params = make_params(dreamer)['world_model']
  belief = jax.random.normal(jax.random.key(1), (NUM_ROWS, model.belief_size))
  decoded = model._apply(params, 'decoder', belief)

  def cost(observation):
    flat = observation_lib.flatten(observation, model.codec.flat_spec)
    return model.codec.loss(decoded, flat, model.codec.encode(observation)[1:])

  nothing = belief[..., :0]
  expected = model.decode(params, belief, nothing, nothing, jnp.zeros(NUM_ROWS, bool))
  np.testing.assert_allclose(cost(expected), 0, atol=2e-3)
  other = jax.tree.map(lambda x: x + 0.1, expected)
  assert (cost(other) > cost(expected) + 1e-3).all()
