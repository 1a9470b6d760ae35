import functools

import jax
import numpy as np
import pytest

from hephaestus.actors.environments.cognition import sprites

ENV = sprites.Sprites()
UP, DOWN, LEFT, RIGHT = range(4)


def state_of(cells, pairs=(0, 1, 2), offsets=0, step_count=0):
  """The agent's cell and the objects', the wanted one first."""
  return sprites.State(
    pairs=np.array(pairs, np.int32),
    cells=np.array(cells, np.int32),
    offsets=np.full((len(pairs), 2), offsets, np.int32),
    step_count=np.int32(step_count),
  )


@jax.jit
def step(state, action):
  return ENV.step(jax.random.key(0), state, action)


@functools.partial(jax.jit, static_argnames=('num_objects', 'held_out'))
def begun(num_objects=3, held_out=False):
  env = sprites.Sprites(num_objects=num_objects, held_out=held_out)
  return jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2048))


@pytest.mark.parametrize('action, reward', [(RIGHT, 1.0), (DOWN, -1.0), (LEFT, -1.0)])
def test_wanted_object_is_rewarded_and_any_other_is_penalised(action, reward):
  _, timestep = step(state_of((5, 6, 9, 4)), action)
  assert timestep.last() and timestep.discount == 0 and timestep.reward == reward


@pytest.mark.parametrize(
  'cell, action, moved', [(5, UP, 1), (1, UP, 1), (1, LEFT, 1), (4, UP, 4), (15, RIGHT, 15)]
)
def test_agent_moves_by_a_cell_and_not_onto_the_sign(cell, action, moved):
  state, timestep = step(state_of((cell, 10, 11, 12)), action)
  assert state.cells[0] == moved and not timestep.last() and timestep.reward == 0


@pytest.mark.parametrize('num_objects', [3, 5])
@pytest.mark.parametrize('held_out', [False, True])
def test_objects_differ_and_held_out_pairs_are_shown_only_when_asked_for(num_objects, held_out):
  states, _ = begun(num_objects, held_out)
  pairs, cells = np.asarray(states.pairs), np.asarray(states.cells)
  assert all(len(set(row)) == num_objects for row in pairs.tolist())
  assert all(len(set(row)) == 1 + num_objects and 0 not in row for row in cells.tolist())
  is_held_out = sprites.IS_HELD_OUT[pairs]
  assert (is_held_out[:, 0] == held_out).all()
  assert is_held_out[:, 1:].any() == held_out
  wanted = np.bincount(pairs[:, 0], minlength=16) / len(pairs)
  shown = sprites.IS_HELD_OUT if held_out else ~sprites.IS_HELD_OUT
  np.testing.assert_allclose(wanted[shown], 1 / shown.sum(), atol=0.06)


def test_sign_shows_the_wanted_object():
  state = state_of((5, 6, 9, 4), pairs=(1, 8, 15), offsets=1)  # a red plus is wanted
  _, timestep = step(state, UP)
  image = np.asarray(timestep.observation)
  assert image.shape == (16, 16, 3) and image.dtype == np.uint8
  red = (image == sprites.COLOURS[0]).all(-1)
  np.testing.assert_array_equal(red[:3, :3], sprites.SHAPES[1])
  np.testing.assert_array_equal(red[5:8, 9:12], sprites.SHAPES[1])
  assert red.sum() == 2 * sprites.SHAPES[1].sum()


def test_segments_say_what_each_pixel_shows():
  states, timesteps = begun(5)
  kinds = np.asarray(jax.jit(jax.vmap(sprites.segments))(states))
  images = np.asarray(timesteps.observation)
  assert set(np.unique(kinds)) == set(range(8))
  np.testing.assert_array_equal((images == 0).all(-1), kinds == 0)
  np.testing.assert_array_equal((images == 255).all(-1), kinds == 2)
  assert (kinds[:, :4, :4] == 1).all()
  for index in range(5):
    colours = sprites.COLOURS[sprites.PAIRS[np.asarray(states.pairs)[:, index], 0]]
    pixels, where = images[kinds == 3 + index], np.nonzero(kinds == 3 + index)[0]
    np.testing.assert_array_equal(pixels, colours[where])


def test_agent_is_in_front_of_the_object_that_it_touches():
  state, timestep = step(state_of((5, 6, 9, 4)), RIGHT)
  front = np.asarray(jax.jit(sprites.segments)(state)) == 2
  assert front[5:7, 9:11].all() and front.sum() == 4
  assert (np.asarray(timestep.observation)[front] == 255).all()


def test_script_touches_the_wanted_object_and_goes_around_the_others():
  #  sign   .   .  .
  #  agent  x  want .      x: another object
  #    .    .   .  .
  state = state_of((4, 6, 5, 15))
  way, scripted_action = [], jax.jit(ENV.scripted_action)
  for _ in range(4):
    way.append(int(scripted_action(state)))
    state, timestep = step(state, way[-1])
  assert way == [DOWN, RIGHT, RIGHT, UP] and timestep.reward == 1
