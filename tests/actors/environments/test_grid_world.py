import functools

import jax
import numpy as np
import pytest

from hephaestus.actors.environments import grid_world
from hephaestus.actors.environments.grid_world import COLLECT, DOWN, EMPTY, LEFT, RIGHT, UP
from hephaestus.agents import observation as observation_lib


@functools.cache
def any_state(size):
  """The first state of some episode."""
  reset = jax.jit(grid_world.GridWorld(size=size, num_resources=1).reset)
  return jax.device_get(reset(jax.random.key(0))[0])


def env_with(resources, position, *, size=3, max_steps=256):
  """An environment, and its state with resources as {(row, column): type}."""
  env = grid_world.GridWorld(size=size, num_resources=len(resources), max_steps=max_steps)
  state = any_state(size)
  grid = np.full((size, size), EMPTY, np.uint8)
  for cell, type_ in resources.items():
    grid[cell] = type_
  visited = np.zeros((size, size), bool)
  visited[position] = True
  return env, state.replace(position=np.array(position, np.int32), grid=grid, visited=visited)


@functools.partial(jax.jit, static_argnums=0)
def jitted_step(env, state, action):
  return env.step(jax.random.key(0), state, action)


def play(env, state, actions):
  """The state after the actions, and the time step of each."""
  timesteps = []
  for action in actions:
    state, timestep = jax.device_get(jitted_step(env, state, np.int32(action)))
    timesteps.append(timestep)
  return state, timesteps


def rewards_of(timesteps):
  return [round(float(timestep.reward), 6) for timestep in timesteps]


def test_resource_is_discovered_once():
  env, state = env_with({(0, 1): 3}, (0, 0))
  state, timesteps = play(env, state, [RIGHT, LEFT, RIGHT, LEFT, RIGHT, RIGHT, LEFT])
  assert rewards_of(timesteps) == [0.09, -0.01, -0.01, -0.01, -0.01, -0.01, -0.01]
  assert state.cumulative_reward == pytest.approx(0.03, abs=1e-6)


def test_start_cell_counts_as_visited():
  env, state = env_with({(0, 0): 3, (2, 2): 1}, (0, 0))
  _, timesteps = play(env, state, [UP, RIGHT, LEFT])
  assert rewards_of(timesteps) == [-0.01, -0.01, -0.01]
  fresh, _ = jax.jit(env.reset)(jax.random.key(5))
  assert np.argwhere(fresh.visited).tolist() == [fresh.position.tolist()]


def test_collecting_empties_the_cell_and_fills_the_inventory():
  env, state = env_with({(0, 0): 3, (0, 1): 3, (2, 2): 1}, (0, 0))
  state, timesteps = play(env, state, [COLLECT, COLLECT, RIGHT, COLLECT])
  assert rewards_of(timesteps) == [0.99, -0.01, 0.09, 0.99]
  assert state.inventory.tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
  assert np.argwhere(state.grid != EMPTY).tolist() == [[2, 2]]
  assert not timesteps[-1].last()


@pytest.mark.parametrize(
  'action, inside, at_the_wall',
  [(UP, (0, 1), (0, 0)), (DOWN, (2, 1), (2, 2)), (LEFT, (1, 0), (0, 0)), (RIGHT, (1, 2), (2, 2))],
)
def test_moves_go_one_cell_and_stop_at_walls(action, inside, at_the_wall):
  env, state = env_with({(0, 2): 0}, (1, 1))
  assert tuple(play(env, state, [action])[0].position.tolist()) == inside
  corner = state.replace(position=np.array(at_the_wall, np.int32))
  assert tuple(play(env, corner, [action])[0].position.tolist()) == at_the_wall


def test_last_resource_terminates():
  env, state = env_with({(0, 0): 0, (0, 1): 7}, (0, 0))
  _, timesteps = play(env, state, [COLLECT, RIGHT, COLLECT])
  assert [bool(timestep.last()) for timestep in timesteps] == [False, False, True]
  assert [float(timestep.discount) for timestep in timesteps] == [1.0, 1.0, 0.0]


def test_termination_in_the_last_step_is_no_truncation():
  env, state = env_with({(0, 1): 0}, (0, 0), max_steps=2)
  _, timesteps = play(env, state, [RIGHT, COLLECT])
  assert timesteps[-1].last()
  assert timesteps[-1].discount == 0.0


def test_observation_is_inventory_position_and_cells():
  env, state = env_with({(0, 1): 0, (1, 0): 7, (1, 1): 2}, (1, 1))
  _, (timestep, _) = play(env, state, [COLLECT, RIGHT])
  inventory = [0, 0, 1 / 3, 0, 0, 0, 0, 0]
  cells = [0, 1 / 8, 0, 1, 0, 0, 0, 0, 0]
  np.testing.assert_allclose(timestep.observation, [*inventory, 1 / 2, 1 / 2, *cells], rtol=1e-6)
  assert grid_world.GridWorld().observation_spec.shape == (266,)


@pytest.mark.parametrize('cells', [True, False])
def test_agents_read_cells_alike_unless_told_otherwise(cells):
  spec = grid_world.GridWorld(size=5, num_resources=3, cells=cells).observation_spec
  board = observation_lib.Grid(begin=10, shape=(5, 5, 1), player=(8, 9))
  assert observation_lib.grid(spec) == (board if cells else None)


@pytest.mark.parametrize('size, num_resources', [(2, 1), (3, 5), (4, 15)])
def test_reset_places_the_configured_number_of_resources(size, num_resources):
  env = grid_world.GridWorld(size=size, num_resources=num_resources)
  states, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(size), 64))
  grid = np.asarray(states.grid)
  np.testing.assert_array_equal((grid != EMPTY).sum((1, 2)), num_resources)
  assert (grid[grid != EMPTY] < grid_world.NUM_TYPES).all()


def test_layouts_are_equally_likely():
  """C(4, 2) = 6 sets of cells, 8 types and 4 starts, each counted in 6,000 resets."""
  env = grid_world.GridWorld(size=2, num_resources=2)
  keys = jax.random.split(jax.random.key(0), 6000)
  states, _ = jax.jit(jax.vmap(env.reset))(keys)
  layouts = np.packbits(np.asarray(states.grid).reshape(-1, 4) != EMPTY, axis=1)
  starts = np.asarray(states.position) @ [2, 1]
  types = np.asarray(states.grid)[np.asarray(states.grid) != EMPTY]
  for draws, num_values in ((layouts, 6), (starts, 4), (types, 8)):
    _, counts = np.unique(draws, return_counts=True)
    assert len(counts) == num_values
    expected = draws.size / num_values
    np.testing.assert_allclose(counts, expected, atol=5 * np.sqrt(expected))


def test_scripted_policy_collects_the_nearest_resource():
  env, state = env_with({(0, 2): 0, (2, 0): 1, (2, 2): 2}, (1, 0))
  actions, scripted_action = [], jax.jit(env.scripted_action)
  for _ in range(8):
    action = scripted_action(state)
    state, timestep = jitted_step(env, state, action)
    actions.append(int(action))
  # (2, 0) is one cell away; from there (2, 2) is two; and (0, 2) is two more.
  assert actions == [DOWN, COLLECT, RIGHT, RIGHT, COLLECT, UP, UP, COLLECT]
  assert timestep.last()
