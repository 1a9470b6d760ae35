import collections
import functools

import jax
import numpy as np
import pytest

from hephaestus.actors.environments.cognition import ice
from hephaestus.actors.environments.cognition.ice import DOWN, LEFT, RIGHT, STAY, UP

ENV = ice.Ice()
PITS = ((1, 1), (7, 7))  # on ice, on firm ground, where the ice is LEFT or UP
step = jax.jit(ENV.step)
scripted_action = jax.jit(ENV.scripted_action)


def state_of(agent, pits=PITS, side=LEFT, step_count=0):
  return ice.State(np.array([agent, *pits], np.int32), np.int32(side), np.int32(step_count))


observe = jax.jit(ENV.observe)
NUM_KEYS = 4096


def observation_of(*arguments, **options):
  return np.asarray(observe(state_of(*arguments, **options)))


@functools.partial(jax.jit, static_argnames='env')
def outcomes(state, action, env):
  keys = jax.random.split(jax.random.key(0), NUM_KEYS)
  return jax.vmap(env.step, (0, None, None))(keys, state, action)


def next_cells(state, action, env=ENV):
  """How often, of NUM_KEYS times, the agent is then in which cell."""
  states, _ = outcomes(state, np.int32(action), env)
  return collections.Counter(map(tuple, np.asarray(states.places[:, ice.AGENT]).tolist()))


@pytest.mark.parametrize(
  'agent, action, place',
  [((4, 6), UP, (3, 6)), ((4, 6), DOWN, (5, 6)), ((4, 6), LEFT, (4, 5)), ((4, 6), RIGHT, (4, 7)),
   ((4, 6), STAY, (4, 6)), ((0, 6), UP, (0, 6)), ((4, 8), RIGHT, (4, 8)), ((4, 4), LEFT, (4, 3))],
)  # fmt: skip
def test_actions_on_firm_ground_do_as_they_say(agent, action, place):
  assert next_cells(state_of(agent), action) == {place: NUM_KEYS}


def test_nine_of_ten_actions_on_ice_are_random():
  cells = next_cells(state_of((4, 2)), UP)
  assert cells.keys() == {(3, 2), (5, 2), (4, 1), (4, 3), (4, 2)}
  assert cells[3, 2] / NUM_KEYS == pytest.approx(0.1 + 0.9 / 5, abs=0.02)
  for cell in cells.keys() - {(3, 2)}:
    assert cells[cell] / NUM_KEYS == pytest.approx(0.9 / 5, abs=0.02)


@pytest.mark.parametrize('pit', PITS)
def test_a_pit_holds_the_agent(pit):
  for action in range(5):
    assert next_cells(state_of(pit), action) == {pit: NUM_KEYS}


def test_layouts_have_a_pit_on_each_ground_and_begin_on_both():
  reset = jax.jit(lambda key: jax.vmap(ENV.reset)(jax.random.split(key, 4096)))
  states, timesteps = jax.device_get(reset(jax.random.key(0)))
  places, side = np.asarray(states.places), np.asarray(states.side)
  assert set(side.tolist()) == {UP, DOWN, LEFT, RIGHT}
  row, column = np.moveaxis(places, -1, 0)
  by_side = np.stack([row <= 3, row >= 5, column <= 3, column >= 5], axis=-1)
  on_ice = by_side[np.arange(len(side)), :, side]
  assert on_ice[:, ice.ICE_PIT].all() and not on_ice[:, ice.FIRM_PIT].any()
  assert not np.asarray(jax.jit(ice.is_in_pit)(timesteps.observation)).any()
  assert on_ice[:, ice.AGENT].mean() == pytest.approx(35 / 79, abs=0.03)
  agents, ice_pits, firm_pits = (set(cells.tolist()) for cells in (places @ [9, 1]).T)
  everywhere = set(range(81))
  assert agents == firm_pits == everywhere
  assert ice_pits == everywhere - {40}  # the centre is always firm


ground_of = jax.jit(lambda observation: (ice.is_firm(observation), ice.is_in_pit(observation)))


@pytest.mark.parametrize(
  'agent, side, firm, in_pit',
  [((4, 3), LEFT, False, False), ((4, 4), LEFT, True, False), ((4, 4), RIGHT, True, False),
   ((4, 5), RIGHT, False, False), ((3, 4), UP, False, False), ((4, 8), UP, True, False),
   ((5, 0), DOWN, False, False), ((4, 0), DOWN, True, False),
   (PITS[0], LEFT, False, True), (PITS[1], LEFT, False, True)],
)  # fmt: skip
def test_observations_say_whether_the_ground_is_firm(agent, side, firm, in_pit):
  observation = observation_of(agent, side=side)
  for x in (observation, np.broadcast_to(observation, (3, 2, 10))):
    found_firm, found_in_pit = ground_of(x)
    assert (found_firm == firm).all() and (found_in_pit == in_pit).all()
    assert found_firm.shape == found_in_pit.shape == x.shape[:-1]


def entropy(*probabilities):
  assert sum(probabilities) == pytest.approx(1)
  return -sum(p * np.log(p) for p in probabilities)


empowerment = jax.jit(ENV.empowerment)


def test_empowerment_equals_values_by_hand():
  found = np.asarray(empowerment(state_of((0, 0))))
  assert found.shape == (9, 9)
  expect = lambda *cell, value: np.testing.assert_allclose(found[cell], value, atol=1e-6)
  expect(4, 6, value=np.log(5))
  expect(4, 4, value=np.log(5))  # next to the ice
  expect(6, 7, value=np.log(5))  # next to a pit
  for cell in PITS:
    expect(*cell, value=0.0)
  # In the corner up and right are as stay; at the edge one action is.
  expect(0, 8, value=entropy(3 / 5, 1 / 5, 1 / 5))
  expect(4, 8, value=entropy(2 / 5, 1 / 5, 1 / 5, 1 / 5))
  # On ice 0.9 / 5 = 0.18 are in each cell at random, and 0.1 more in the chosen one.
  expect(4, 2, value=np.log(5) - entropy(0.28, 0.18, 0.18, 0.18, 0.18))
  corner = entropy(3 / 5, 1 / 5, 1 / 5)
  conditional = 3 * entropy(0.64, 0.18, 0.18) + 2 * entropy(0.54, 0.28, 0.18)
  expect(0, 0, value=corner - conditional / 5)
  assert 0 < found[0, 0] < found[4, 2] < 0.02 < found[0, 8] < np.log(5)


def test_empowerment_depends_only_on_the_layout():
  here, there = state_of((0, 0)), state_of((8, 8), step_count=50)
  np.testing.assert_array_equal(empowerment(here), empowerment(there))
  turned = state_of((0, 0), side=UP)
  np.testing.assert_allclose(empowerment(turned), np.transpose(empowerment(here)), atol=1e-6)


transition_probabilities = jax.jit(ENV.transition_probabilities)


@pytest.mark.parametrize(
  'agent, action', [((4, 2), LEFT), ((0, 0), DOWN), ((1, 2), LEFT), ((4, 4), LEFT), (PITS[1], DOWN)]
)
def test_steps_follow_the_transition_probabilities(agent, action):
  state = state_of(agent)
  probabilities = np.asarray(transition_probabilities(state))
  np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-6)
  sampled = np.zeros((9, 9))
  for cell, count in next_cells(state, action).items():
    sampled[cell] = count / NUM_KEYS
  row, column = agent
  expected = probabilities[9 * row + column, action].reshape(9, 9)
  np.testing.assert_allclose(sampled, expected, atol=0.03)
  assert ((sampled > 0) == (expected > 0)).all()


def test_view_shows_offsets_of_pits_and_the_ground_at_hand():
  around = jax.jit(ice.around)
  view = np.asarray(around(observation_of((4, 4))))
  offsets, ground = view[:68].reshape(2, 2, 17), view[68:]
  np.testing.assert_allclose(offsets.sum(-1), 1, atol=1e-5)
  np.testing.assert_array_equal(offsets.argmax(-1) - 8, [[-3, -3], [3, 3]])
  np.testing.assert_array_equal(ground, [0, 0, 1, 0, 0])  # ice is to the left
  assert around(observation_of((4, 4), side=DOWN))[68:].tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize(
  'agent, action',
  [((4, 6), STAY), ((7, 6), STAY), ((5, 1), RIGHT), ((5, 3), RIGHT), ((1, 0), UP), ((8, 0), RIGHT)],
)
def test_script_goes_around_pits_to_firm_ground_and_stays(agent, action):
  assert scripted_action(state_of(agent)) == action
