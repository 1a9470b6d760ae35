"""Observations: leaves are joined, encoded by their bounds, restored, and predicted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors.environments import environment
from hephaestus.agents import networks
from hephaestus.agents import observation as observation_lib

SPEC = {
  'action_mask': specs.BoundedArray((3,), bool, False, True),
  'self': {'position': specs.Array((2,), np.int32), 'alive': specs.Array((), bool)},
  'map': specs.Array((2, 2), np.float32),
}


def observe(*axes):
  position = np.broadcast_to(np.array([5, -6], np.int32), (*axes, 2))
  grid = np.broadcast_to(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), (*axes, 2, 2))
  return {
    'self': {'position': position, 'alive': np.ones(axes, bool)},
    'map': grid,
    'action_mask': np.ones((*axes, 3), bool),
  }


@pytest.mark.parametrize('axes', [(), (4, 5)])
def test_join_concatenates_leaves_under_any_leading_axes(axes):
  flat = jax.jit(lambda observation: observation_lib.join(observation, SPEC))(observe(*axes))
  assert flat.shape == (*axes, 7) and flat.dtype == jnp.float32
  # Leaves in the order of their names: map, self/alive, self/position; no mask.
  expected = np.array([1, 2, 3, 4, 1, 5, -6])
  np.testing.assert_allclose(flat, np.broadcast_to(expected, flat.shape), rtol=1e-6)


PICTURES = {
  'action_mask': specs.BoundedArray((3,), bool, False, True),
  'cells': specs.BoundedArray((8, 8, 2), bool, False, True),  # few numbers in [0, 1]: flat
  'grey': specs.BoundedArray((32, 65, 1), np.float32, 0, 1),
  'heights': specs.Array((8, 8, 1), np.float32),
  'icon': specs.Array((8, 9, 3), np.uint8),  # few bytes: flat
  'pixels': specs.Array((9, 8, 29), np.uint8),
  'stamp': specs.BoundedArray((7, 8, 3), np.uint8, 0, 255),  # too small: flat
  'table': specs.Array((8, 8), np.float32),
}


def test_images_are_encoded_by_their_bounds_and_left_out_of_the_numbers():
  values = {
    'cells': True,
    'grey': 0.25,
    'heights': -3.0,
    'icon': 102,
    'pixels': 51,
    'stamp': 3,
    'table': 7,
    'action_mask': 1,
  }
  observation = {
    name: np.full((2, *PICTURES[name].shape), value, PICTURES[name].dtype)
    for name, value in values.items()
  }
  spec = observation_lib.without_images(PICTURES)

  @jax.jit
  def encode(observation):
    flat = networks.symlog(observation_lib.join(observation, spec))
    return observation_lib.images(observation, PICTURES), flat

  (grey, heights, pixels), flat = encode(observation)
  np.testing.assert_allclose(grey, np.full((2, 32, 65, 1), 0.25))
  np.testing.assert_allclose(heights, np.full((2, 8, 8, 1), -np.log(4)), rtol=1e-6)
  np.testing.assert_allclose(pixels, np.full((2, 9, 8, 29), 0.2 - 0.5), rtol=1e-6)
  expected = np.concatenate(
    [
      np.full(8 * 8 * 2, np.log(2)),
      np.full(8 * 9 * 3, np.log(1.4)),
      np.full(7 * 8 * 3, np.log(4)),
      np.full(64, np.log(8)),
    ]
  )
  np.testing.assert_allclose(flat, np.broadcast_to(expected, (2, expected.size)), rtol=1e-6)
  assert observation_lib.unit_range(spec).shape == expected.shape
  assert observation_lib.without_images(SPEC) == SPEC


def test_to_observation_inverts_join_and_images(make_dreamer, make_observation):
  for name in ('masked', 'pictures'):
    dreamer = make_dreamer(name)
    spec = dreamer.model.observation_spec
    observation = make_observation(dreamer, np.random.default_rng(0), 2, 3)

    @jax.jit
    def through(observation, spec=spec):
      numbers = observation_lib.without_images(spec)
      flat = observation_lib.join(observation, numbers)
      return observation_lib.to_observation(flat, observation_lib.images(observation, spec), spec)

    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, np.asarray(y, np.float32), rtol=1e-3, atol=1e-3),
      through(observation),
      observation_lib.without_mask(observation),
    )


@pytest.mark.parametrize('symlog', [True, False])
def test_categories_are_also_encoded_one_hot_and_unit_numbers_by_level(symlog):
  spec = {
    'dial': specs.BoundedArray((2,), np.int32, -1, 2),
    'real': specs.Array((1,), np.float32),
    'room': specs.DiscreteArray(5),
    'unit': specs.BoundedArray((1,), np.float32, 0, 1),
  }
  codec = observation_lib.Codec(spec, levels=5, symlog=symlog)
  seen = {
    'dial': np.array([[-1, 2]]), 'real': np.float32([[9.5]]), 'room': np.array([3]),
    'unit': np.float32([[0.875]]),
  }  # fmt: skip
  (found,) = jax.jit(codec.encode)(seen)
  numbers = np.array([-1, 2, 9.5, 3, 0.875])
  expected = np.sign(numbers) * np.log1p(abs(numbers)) if symlog else numbers
  np.testing.assert_allclose(found[0, :5], expected, rtol=1e-5)
  np.testing.assert_allclose(found[0, 5:10], [0, 0, 0, 0.5, 0.5], atol=1e-5)
  np.testing.assert_allclose(found[0, 10:18], [1, 0, 0, 0, 0, 0, 0, 1], atol=1e-5)
  np.testing.assert_allclose(found[0, 18:], np.eye(5)[3], atol=1e-5)


NUMBERS = functools.partial(specs.BoundedArray, dtype=np.float32, minimum=0, maximum=1)


@pytest.mark.parametrize(
  ('spec', 'sizes'),
  [
    ({'hand': {'left': NUMBERS((2,))}, 'purse': NUMBERS(())}, {'hand_left': 2, 'purse': 1}),
    ({'only': NUMBERS((3,)), 'action_mask': NUMBERS((4,))}, {f'chunk_{i}': 1 for i in range(3)}),
    ({'image': NUMBERS((9, 9, 0)), 'purse': NUMBERS((2,))}, {'purse': 2}),
    (NUMBERS((20,)), {f'chunk_{i}': 3 if i < 4 else 2 for i in range(8)}),
    (NUMBERS((2, 3, 5)), {f'patch_{i}_{j}': 5 for i in range(2) for j in range(3)}),
    (NUMBERS((9, 9, 2)), {f'patch_{i}_{j}': 18 for i in range(3) for j in range(3)}),
    (
      environment.VitalsSpec((4,), np.float32, 0, 1, (environment.Vital('food', 2),)),
      {'chunk_0': 1, 'chunk_1': 1, 'vitals': 1, 'chunk_3': 1},
    ),
  ],
)
def test_parts_are_leaves_or_groups_of_a_single_array(spec, sizes):
  parts = observation_lib.parts(spec)
  assert dict(zip(parts.names, np.bincount(parts.owner), strict=True)) == sizes


def test_patches_of_a_board_after_other_numbers_are_of_its_cells():
  spec = environment.BoardSpec((2 + 6 * 3 * 2,), np.float32, (6, 3, 2))
  parts = observation_lib.parts(spec)
  assert parts.names[:3] == ('chunk_0', 'chunk_1', 'patch_0_0')
  board = parts.owner[2:].reshape(6, 3, 2)
  for row in range(3):
    for column in range(3):
      name = parts.names.index(f'patch_{row}_{column}')
      assert (board[2 * row : 2 * row + 2, column] == name).all()
