import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.actors.environments.cognition import noisy_corridor

LEFT, STAY, RIGHT = range(3)
WORLD = noisy_corridor.NoisyCorridor(
  length=6, first_noisy=2, num_noisy=2, num_pixels=4, open_cells=5, max_steps=3
)
step = jax.jit(WORLD.step)


def state_of(place, step_count=0):
  pixels = np.zeros(4, np.float32)
  return noisy_corridor.State(np.int32(place), pixels, np.int32(step_count))


@jax.jit
def stay_64_times(state):
  keys = jax.random.split(jax.random.key(0), 64)
  return jax.vmap(WORLD.step, (0, None, None))(keys, state, jnp.int32(STAY))


@pytest.mark.parametrize(
  'place, action, next_place', [(0, LEFT, 0), (1, STAY, 1), (3, RIGHT, 4), (4, RIGHT, 4)]
)
def test_agent_walks_and_stops_at_walls(place, action, next_place):
  state, timestep = step(jax.random.key(0), state_of(place), action)
  assert state.place == next_place
  np.testing.assert_array_equal(timestep.observation[:6], np.eye(6)[next_place])
  assert timestep.reward == 0


@pytest.mark.parametrize('place, noisy', [(1, False), (2, True), (3, True), (4, False)])
def test_pixels_are_random_in_noisy_cells_and_zero_elsewhere(place, noisy):
  state, timestep = jax.device_get(stay_64_times(state_of(place)))
  np.testing.assert_array_equal(timestep.observation[:, 6:], state.pixels)
  assert set(np.unique(state.pixels)) == ({0, 1} if noisy else {0})
  assert len(np.unique(state.pixels, axis=0)) == (16 if noisy else 1)


def test_pixels_may_be_real_numbers():
  world = dataclasses.replace(WORLD, pixels='normal')
  keys = jax.random.split(jax.random.key(0), 256)
  pixels = jax.jit(jax.vmap(lambda key: world.step(key, state_of(2), STAY)[0].pixels))(keys)
  np.testing.assert_allclose([pixels.mean(), pixels.std()], [0, 1], atol=0.1)
  assert not hasattr(world.observation_spec, 'maximum')


def test_reset_is_uniform_over_open_cells():
  reset = jax.jit(jax.vmap(WORLD.reset))
  states, timesteps = jax.device_get(reset(jax.random.split(jax.random.key(0), 64)))
  assert set(states.place.tolist()) == {0, 1, 2, 3, 4}
  shows_pixels = timesteps.observation[:, 6:].any(axis=1)
  assert set(states.place[shows_pixels].tolist()) == {2, 3}
