import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.actors import environments
from hephaestus.actors.environments.cognition import ice
from hephaestus.actors.environments.cognition.ice import DOWN, LEFT, RIGHT, STAY, UP

ENV = ice.Ice()
PITS = ((1, 1), (7, 7))  # on ice, on firm ground, where the ice is LEFT or UP
step = jax.jit(ENV.step)
scripted_action = jax.jit(ENV.scripted_action)


def state_of(agent, pits=PITS, side=LEFT, step_count=0):
  return ice.State(np.array([agent, *pits], np.int32), np.int32(side), np.int32(step_count))


observe = jax.jit(ENV._observe)
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


def test_slip_sets_the_probability():
  state = state_of((4, 2))
  assert next_cells(state, UP, ice.Ice(slip=0.0)) == {(3, 2): NUM_KEYS}
  always = next_cells(state, UP, ice.Ice(slip=1.0))
  assert always[3, 2] / NUM_KEYS == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize('pit', PITS)
@pytest.mark.parametrize('action', range(5))
def test_a_pit_holds_the_agent(pit, action):
  assert next_cells(state_of(pit), action) == {pit: NUM_KEYS}


def test_time_limit_truncates_without_reward():
  _, timestep = step(jax.random.key(0), state_of((4, 6), step_count=98), STAY)
  assert not timestep.last()
  for agent in ((4, 6), PITS[0]):
    _, timestep = step(jax.random.key(0), state_of(agent, step_count=99), STAY)
    assert timestep.last() and timestep.discount == 1 and timestep.reward == 0


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


@pytest.mark.parametrize('slip, inner', [(0.0, np.log(5)), (1.0, 0.0)])
def test_empowerment_on_ice_depends_on_slip(slip, inner):
  found = np.asarray(jax.jit(ice.Ice(slip=slip).empowerment)(state_of((0, 0))))
  assert found[4, 2] == pytest.approx(inner, abs=1e-6)
  assert found[4, 6] == pytest.approx(np.log(5), abs=1e-6)


transition_probabilities = jax.jit(ENV.transition_probabilities)


@pytest.mark.parametrize('agent', [(4, 2), (0, 0), (1, 2), (4, 4), (8, 8), PITS[1]])
@pytest.mark.parametrize('action', [LEFT, DOWN])
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


def test_script_leaves_a_wall_where_a_pit_is_ahead():
  assert scripted_action(state_of((0, 1), ((0, 2), PITS[1]))) == DOWN


@jax.jit
def step_on_rough_ice(state, action):
  return ice.Ice(slip=0.0).step(jax.random.key(0), state, action)


@pytest.mark.parametrize('side', [UP, DOWN, LEFT, RIGHT])
def test_script_avoids_a_pit_across_the_edge_of_the_ice(side):
  ice_cell = {UP: (3, 4), DOWN: (5, 4), LEFT: (4, 3), RIGHT: (4, 5)}[side]
  state = state_of(ice_cell, ((0, 0), (4, 4)), side)
  for _ in range(2):
    state, timestep = step_on_rough_ice(state, scripted_action(state))
  assert ground_of(timestep.observation)[0]


def shares(choose, num_episodes=512):
  """Share of steps on firm ground, and of episodes with a pit entered, by a policy."""

  def play(key):
    reset_key, *keys = jax.random.split(key, ENV.max_steps + 1)

    def advance(state, key):
      action_key, step_key = jax.random.split(key)
      state, timestep = ENV.step(step_key, state, choose(action_key, state))
      return state, (ice.is_firm(timestep.observation), ice.is_in_pit(timestep.observation))

    return jax.lax.scan(advance, ENV.reset(reset_key)[0], jnp.stack(keys))[1]

  firm, in_pit = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), num_episodes))
  return firm.mean(), in_pit[:, -1].mean()


def test_script_is_on_firm_ground_more_and_in_pits_less_than_random():
  firm, in_pit = shares(lambda key, state: jax.random.randint(key, (), 0, 5))
  assert 0.32 < firm < 0.40 and 0.55 < in_pit < 0.66
  firm, in_pit = shares(lambda key, state: ENV.scripted_action(state))
  assert 0.84 < firm < 0.90 and 0.04 < in_pit < 0.12


def test_frame_shows_ground_pits_and_agent():
  frame = ENV.render(state_of((4, 5)))
  assert frame.shape == (144, 144, 3) and frame.dtype == np.uint8
  centre = lambda row, column: tuple(frame[16 * row + 8, 16 * column + 8])
  assert centre(4, 5) == ice.DISC
  assert {centre(*pit) for pit in PITS} == {ice.PIT}
  assert centre(0, 3) == ice.GROUND[True] and centre(0, 4) == ice.GROUND[False]


def test_a_prediction_beyond_the_bounds_is_drawn():
  assert ENV.draw(np.full(10, 1.2, np.float32)).shape == (144, 144, 3)


@pytest.mark.parametrize(
  'option, value, remedy',
  [('slip', 1.5, 'a probability from 0 to 1'), ('slip', -0.1, 'a probability from 0 to 1'),
   ('max_steps', 0, 'at least 1 is needed')],
)  # fmt: skip
def test_invalid_options_are_rejected(option, value, remedy):
  with pytest.raises(ValueError, match=rf'environment\.{option}={value}: {remedy}'):
    environments.make('ice', **{option: value})
