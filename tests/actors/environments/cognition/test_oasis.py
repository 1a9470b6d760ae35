import functools

import jax
import numpy as np
import pytest

from hephaestus.actors.environments.cognition import oasis
from hephaestus.actors.environments.cognition.oasis import DOWN, LEFT, RIGHT, STAY, UP

ENV = oasis.Oasis()
FAR = ((8, 8), (0, 8), (8, 0), (0, 0))  # predator, food, water, den
step = jax.jit(ENV.step)


def state_of(agent, others=FAR, left=(30, 20, 50), step_count=0):
  places = np.array([agent, *others], np.int32)
  return oasis.State(places, np.array(left, np.int32), np.int32(step_count))


@functools.partial(jax.jit, static_argnums=2)
def compiled_outcomes(state, action, env):
  keys = jax.random.split(jax.random.key(0), 2048)
  return jax.vmap(env.step, (0, None, None))(keys, state, action)


def outcomes(state, action, env=ENV):
  """2,048 random outcomes of a step."""
  return jax.device_get(compiled_outcomes(state, np.int32(action), env))


@pytest.mark.parametrize(
  'agent, action, place',
  [((4, 4), UP, (3, 4)), ((4, 4), DOWN, (5, 4)), ((4, 4), LEFT, (4, 3)), ((4, 4), RIGHT, (4, 5)),
   ((4, 4), STAY, (4, 4)), ((0, 4), UP, (0, 4)), ((4, 8), RIGHT, (4, 8))],
)  # fmt: skip
def test_agent_walks_and_stops_at_walls(agent, action, place):
  state, timestep = step(jax.random.key(0), state_of(agent), action)
  assert tuple(state.places[oasis.AGENT]) == place
  assert not timestep.last() and timestep.reward == 0


def test_episode_begins_in_the_den_with_full_vitals():
  reset = jax.jit(lambda key: jax.vmap(ENV.reset)(jax.random.split(key, 256)))
  states, timesteps = reset(jax.random.key(0))
  places = np.asarray(states.places) @ [9, 1]
  np.testing.assert_array_equal(places[:, oasis.AGENT], places[:, oasis.DEN])
  assert all(len(set(cells)) == 4 for cells in places.tolist())
  for others in places[:, 1:].T:  # each may be in any cell
    assert len(set(others.tolist())) > 70
  np.testing.assert_array_equal(timesteps.observation['vitals'], 1.0)


@pytest.mark.parametrize(
  'agent, action, left',
  [((4, 4), STAY, (29, 19, 49)), ((0, 7), RIGHT, (60, 19, 49)), ((8, 0), STAY, (29, 40, 49)),
   ((1, 0), UP, (29, 19, 90))],
)  # fmt: skip
def test_vitals_fall_and_are_restored_on_arrival(agent, action, left):
  state, timestep = step(jax.random.key(0), state_of(agent), action)
  assert tuple(state.left) == left
  np.testing.assert_allclose(timestep.observation['vitals'], np.divide(left, (60, 40, 90)))


def test_food_grows_in_another_free_cell_and_water_stays():
  states, _ = outcomes(state_of((0, 7)), RIGHT)
  food, water = np.asarray(states.places)[:, [oasis.FOOD, oasis.WATER]].swapaxes(0, 1)
  cells = set((food @ [9, 1]).tolist())
  assert cells == set(range(81)) - {8, 72, 0}  # where it was, water, den
  np.testing.assert_array_equal(water, np.broadcast_to((8, 0), water.shape))


@pytest.mark.parametrize('index', range(3))
def test_a_vital_at_zero_terminates(index):
  left = np.full(3, 9)
  left[index] = 1
  _, timestep = step(jax.random.key(0), state_of((4, 4), left=left), STAY)
  assert timestep.last() and timestep.discount == 0
  assert timestep.observation['vitals'][index] == 0


def test_predator_hunts_on_sight_half_the_time_and_catches():
  states, timesteps = outcomes(state_of((4, 4), ((4, 6), *FAR[1:])), STAY)
  moved = np.asarray(states.places[:, oasis.PREDATOR])
  share = lambda place: np.mean((moved == place).all(-1))
  assert share((4, 6)) == pytest.approx(0.5, abs=0.05)
  assert share((4, 5)) == pytest.approx(0.25 + 0.25 / 4, abs=0.05)  # hunts, or roams that way
  assert not timesteps.last().any()
  _, timesteps = outcomes(state_of((4, 4), ((4, 5), *FAR[1:])), STAY)
  assert timesteps.last().mean() == pytest.approx(0.25 + 0.25 / 4, abs=0.05)
  assert (timesteps.discount == 1.0 - timesteps.last()).all()


def test_den_is_safe():
  states, timesteps = outcomes(state_of((0, 0), ((0, 1), *FAR[1:])), STAY)
  assert not timesteps.last().any()
  assert not (states.places[:, oasis.PREDATOR] == 0).all(-1).any()


def test_time_limit_truncates_unless_a_vital_is_zero():
  _, timestep = step(jax.random.key(0), state_of((4, 4), step_count=499), STAY)
  assert timestep.last() and timestep.discount == 1
  dying = state_of((4, 4), left=(1, 9, 9), step_count=499)
  _, timestep = step(jax.random.key(0), dying, STAY)
  assert timestep.last() and timestep.discount == 0


def test_baselines_reward_survived_steps():
  env = oasis.Oasis(alive_reward=1.0, level_bonus=0.5)
  reward = lambda *left: float(outcomes(state_of((4, 4), left=left), STAY, env)[1].reward[0])
  assert reward(60, 40, 90) == 1 + 0.5 * 3
  assert reward(30, 14, 20) == 1 + 0.5 * (0 + 0 - 1)  # 29 / 60, 13 / 40, 19 / 90
  assert reward(1, 40, 90) == 0


def test_view_shows_offsets_from_the_agent():
  observation = jax.jit(ENV.observe)(state_of((4, 5), ((3, 5), (0, 8), (8, 0), (4, 5))))
  shown = np.asarray(jax.jit(oasis.offsets)(observation['places'])).reshape(4, 2, 17)
  np.testing.assert_allclose(shown.sum(-1), 1, atol=1e-5)
  np.testing.assert_array_equal(shown.argmax(-1) - 8, [[-1, 0], [-4, 3], [4, -5], [0, 0]])


def test_frame_shows_places_and_bars_of_the_vitals():
  frame = ENV.render(state_of((4, 5), left=(60, 20, 0)))
  assert frame.shape == (9 * 16 + 3 * 8, 9 * 16, 3) and frame.dtype == np.uint8
  centre = lambda row, column: tuple(frame[16 * row + 8, 16 * column + 8])
  for (row, column), thing in zip(((4, 5), *FAR), range(5), strict=True):
    assert centre(row, column) == oasis.COLOURS[thing]
  bars = frame[9 * 16 + 4 :: 8]
  lengths = [
    int((bar == oasis.COLOURS[source]).all(-1).sum())
    for bar, source in zip(bars, oasis.SOURCES, strict=True)
  ]
  assert lengths == [144, 72, 0]


def test_image_shows_what_is_in_each_cell():
  """Also where agent or predator is on a tile, or both are in one cell: nothing hides another thing."""
  env = oasis.Oasis(image=True)
  state = state_of((8, 0), ((8, 0), (0, 8), (8, 0), (2, 3)))  # with the predator at the water
  image = np.asarray(jax.jit(env.observe)(state)['image'])
  assert image.shape == (18, 18, 3) and image.dtype == np.uint8
  shown = {
    (8, 0): [[oasis.AGENT, oasis.PREDATOR], [oasis.PREDATOR, oasis.AGENT]],
    (0, 8): [[oasis.FOOD] * 2] * 2,
    (2, 3): [[oasis.DEN] * 2] * 2,
  }
  cells = image.reshape(9, 2, 9, 2, 3).swapaxes(1, 2)
  for cell, things in shown.items():
    np.testing.assert_array_equal(cells[cell], [[oasis.COLOURS[x] for x in row] for row in things])
  assert (image == oasis.SAND).all(-1).sum() == 4 * (81 - len(shown))
  image = np.asarray(env.observe(state_of((0, 0)))['image'])
  assert tuple(image[0, 0]) == oasis.COLOURS[oasis.AGENT]
  assert tuple(image[0, 1]) == oasis.COLOURS[oasis.DEN]
