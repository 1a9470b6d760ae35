"""Networks: what they compute in, which axes they take, and what they make of an observation."""

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from hypothesis import strategies as st

from hephaestus.actors.environments import environment
from hephaestus.agents import networks


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4))
def test_symexp_inverts_symlog(values):
  x = jnp.asarray(values, jnp.float32)
  np.testing.assert_allclose(networks.symexp(networks.symlog(x)), x, rtol=1e-5, atol=1e-30)
  np.testing.assert_array_equal(networks.symlog(-x), -networks.symlog(x))


def test_symlog_by_hand():
  np.testing.assert_allclose(networks.symlog(jnp.array([0.0, np.e - 1, 1 - np.e])), [0, 1, -1])


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_an_mlp_computes_in_its_dtype_on_float32_parameters(dtype):
  mlp = networks.MLP(8, 2, 3, dtype=dtype)
  x = jnp.ones((2, 5), jnp.float32)
  variables = jax.eval_shape(mlp.init, jax.random.key(0), x)
  assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype('float32')}
  assert jax.eval_shape(mlp.apply, variables, x).dtype == dtype


class Beside(nn.Module):
  """In place of an MLP: what it is given, joined."""

  activation: str = 'tanh'
  dtype: object = jnp.float32
  hidden_init: object = nn.initializers.normal()

  def __call__(self, *parts):
    return jnp.concatenate(parts, axis=-1)


def test_a_number_in_a_cell_moves_what_becomes_of_this_cell_alone():
  spec = {
    'board': environment.BoardSpec((2 + 2 * 3 * 4,), np.float32, (2, 3, 4)),
    'purse': specs.Array((1,), np.float32),
  }
  encoder = networks.BoardEncoder(Beside(), 5)
  read = lambda observation: (
    networks.flatten_observation(observation, networks.without_boards(spec)),
    *networks.boards(observation, spec),
  )
  empty = jax.tree.map(lambda leaf: np.zeros((7, *leaf.shape), np.float32), spec)
  params = encoder.init(jax.random.key(0), *read(empty))['params']

  def moved(**numbers):
    observation = jax.tree.map(np.copy, empty)
    for name, (place, value) in numbers.items():
      observation[name][..., place] = value
    out = networks.apply(encoder, params, *read(observation))
    return np.asarray(out - networks.apply(encoder, params, *read(empty)))[3]

  places = [np.flatnonzero(moved(board=(2 + 4 * cell + 1, 0.5))) for cell in range(6)]
  np.testing.assert_array_equal(places, np.arange(30).reshape(6, 5))
  one, other = moved(board=(2 + 1, 0.5)), moved(board=(2 + 4 * 5 + 1, 0.5))
  np.testing.assert_allclose(one[:5], other[25:30], rtol=1e-6)
  np.testing.assert_array_equal(np.flatnonzero(moved(board=(1, 0.5), purse=(0, 3.0))), [31, 32])


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('sizes', [(5,), (2, 0, 3)])
def test_parts_beside_each_other_are_read_as_if_joined(sizes, dtype):
  """Values and all gradients are those of one product of what is joined."""
  rng = np.random.default_rng(0)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  parts, weight = [array(3, 4, size).astype(dtype) for size in sizes], array(3, 4, 6)
  dense = networks.Dense(6, dtype=dtype)
  params = {'kernel': array(5, 6), 'bias': array(6)}

  def apart(params, parts):
    return jnp.sum(weight * networks.apply(dense, params, *parts).astype(jnp.float32))

  def joined(params, parts):
    x = jnp.concatenate(parts, axis=-1).astype(jnp.float32)
    return jnp.sum(weight * (x @ params['kernel'] + params['bias']))

  value, grads = jax.value_and_grad(apart, argnums=(0, 1))(params, parts)
  expected, expected_grads = jax.value_and_grad(joined, argnums=(0, 1))(params, parts)
  close = {'rtol': 1e-5, 'atol': 1e-5} if dtype == jnp.float32 else {'rtol': 0.05, 'atol': 0.1}
  np.testing.assert_allclose(value, expected, **close)
  compare = lambda x, y: np.testing.assert_allclose(*map(np.float32, (x, y)), **close)
  jax.tree.map(compare, grads, expected_grads)
  assert {leaf.dtype for leaf in jax.tree.leaves(grads[0])} == {jnp.dtype('float32')}


def test_an_mlp_takes_any_leading_axes():
  mlp = networks.MLP(8, 1, 3)
  x = jax.random.normal(jax.random.key(0), (2, 3, 5))
  variables = mlp.init(jax.random.key(1), x[0, 0])
  rows = mlp.apply(variables, x.reshape(6, 5))
  np.testing.assert_allclose(mlp.apply(variables, x), rows.reshape(2, 3, 3), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(mlp.apply(variables, x[0, 0]), rows[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('raw', [True, False])
def test_only_an_mlp_for_raw_numbers_tells_an_input_from_its_multiple(raw):
  mlp = networks.MLP(16, 1, raw=raw)
  x = jnp.array([[3.0, 0.0], [30.0, 0.0]])
  once, ten_times = mlp.init_with_output(jax.random.key(0), x)[0]
  assert bool(jnp.max(jnp.abs(once - ten_times)) > 0.1) == raw


def test_an_mlp_without_output_ends_at_its_last_hidden_layer():
  mlp = networks.MLP(8, 2)
  output, variables = jax.eval_shape(mlp.init_with_output, jax.random.key(0), jnp.ones((2, 5)))
  assert output.shape == (2, 8)
  assert sorted(variables['params']) == ['Dense_0', 'Dense_1', 'LayerNorm_0', 'LayerNorm_1']


def test_output_scale_zero_starts_at_zero_and_others_at_their_scale():
  x = jax.random.normal(jax.random.key(0), (50, 5))
  spread = []
  for scale in (0.0, 0.01, 1.0):
    mlp = networks.MLP(64, 1, 16, output_scale=scale)
    output, _ = jax.jit(mlp.init_with_output)(jax.random.key(1), x)
    spread.append(float(jnp.std(output)))
  assert spread[0] == 0
  # The scale is a variance.
  np.testing.assert_allclose(spread[1] / spread[2], 0.1, rtol=1e-3)


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


@pytest.mark.parametrize('axes', [(), (4,), (4, 5)])
def test_an_observation_is_joined_leaf_by_leaf_whatever_axes_lead(axes):
  flat = networks.flatten_observation(jax.tree.map(jnp.asarray, observe(*axes)), SPEC)
  assert flat.shape == (*axes, 7) and flat.dtype == jnp.float32
  # Leaves in the order of their names: map, self/alive, self/position; no mask.
  expected = networks.symlog(jnp.array([1, 2, 3, 4, 1, 5, -6.0]))
  np.testing.assert_allclose(flat, np.broadcast_to(expected, flat.shape))


def test_rows_of_an_observation_stay_apart():
  spec = {'a': specs.Array((2,), np.float32), 'b': specs.Array((), np.float32)}
  observation = {'a': jnp.arange(6.0).reshape(3, 2), 'b': 10 * jnp.arange(3.0)}
  expected = networks.symlog(jnp.array([[0, 1, 0], [2, 3, 10], [4, 5, 20.0]]))
  np.testing.assert_allclose(networks.flatten_observation(observation, spec), expected)


def test_an_observation_may_be_a_bare_array():
  spec = specs.Array((2, 3), np.uint8)
  observation = jnp.full((4, 2, 3), 255, jnp.uint8)
  flat = networks.flatten_observation(observation, spec)
  np.testing.assert_allclose(flat, np.full((4, 6), np.log(256.0)), rtol=1e-6)
  assert networks.action_mask(observation) is None


def test_the_mask_is_found_and_left_out():
  observation = observe(2)
  assert networks.action_mask(observation) is observation['action_mask']
  assert sorted(networks.without_mask(observation)) == ['map', 'self']
  assert 'action_mask' in observation


# Images.


@pytest.mark.parametrize(
  ('shape', 'num_stages'),
  [((8, 8, 1), 1), ((10, 10, 4), 1), ((9, 21, 3), 1), ((63, 63, 3), 4), ((210, 160, 3), 5)],
)
def test_an_image_comes_out_as_large_as_it_went_in(shape, num_stages):
  image = jnp.zeros((2, 5, *shape))
  encoder = networks.Encoder(networks.MLP(16, 1), 4)
  features, variables = jax.eval_shape(
    encoder.init_with_output, jax.random.key(0), jnp.zeros((2, 5, 0)), image
  )
  assert features.shape == (2, 5, 16)
  assert sum(name.startswith('Conv') for name in variables['params']) == num_stages
  decoder = networks.Decoder(networks.MLP(16, 1, 0), 4, (shape,))
  decoded, variables = jax.eval_shape(decoder.init_with_output, jax.random.key(0), features)
  assert decoded.shape == (2, 5, np.prod(shape))
  assert sum(name.startswith('Conv') for name in variables['params']) == num_stages


def test_numbers_and_images_are_joined_and_computed_in_bfloat16():
  encoder = networks.Encoder(networks.MLP(16, 1, dtype=jnp.bfloat16), 4)
  inputs = (jnp.zeros((3, 5)), jnp.zeros((3, 8, 8, 2)), jnp.zeros((3, 9, 8, 1)))
  features, variables = jax.eval_shape(encoder.init_with_output, jax.random.key(0), *inputs)
  assert features.shape == (3, 3 * 16) and features.dtype == jnp.bfloat16
  decoder = networks.Decoder(networks.MLP(16, 1, 5), 4, ((8, 8, 2), (9, 8, 1)))
  decoded, _ = jax.eval_shape(decoder.init_with_output, jax.random.key(0), features)
  assert decoded.shape == (3, 5 + 128 + 72)
  assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype('float32')}


PICTURES = {
  'action_mask': specs.BoundedArray((3,), bool, False, True),
  'grey': specs.BoundedArray((8, 9, 1), np.float32, 0, 1),
  'heights': specs.Array((8, 8, 1), np.float32),
  'pixels': specs.Array((9, 8, 3), np.uint8),
  'stamp': specs.BoundedArray((7, 8, 3), np.uint8, 0, 255),  # too small: flat
  'table': specs.Array((8, 8), np.float32),
}


def test_images_are_read_by_their_bounds_and_are_no_part_of_the_flat_observation():
  values = {'grey': 0.25, 'heights': -3.0, 'pixels': 51, 'stamp': 3, 'table': 7, 'action_mask': 1}
  observation = {
    name: jnp.full((2, *PICTURES[name].shape), value, PICTURES[name].dtype)
    for name, value in values.items()
  }
  grey, heights, pixels = networks.images(observation, PICTURES)
  np.testing.assert_allclose(grey, np.full((2, 8, 9, 1), 0.25))
  np.testing.assert_allclose(heights, np.full((2, 8, 8, 1), -np.log(4)), rtol=1e-6)
  np.testing.assert_allclose(pixels, np.full((2, 9, 8, 3), 0.2 - 0.5), rtol=1e-6)
  spec = networks.without_images(PICTURES)
  flat = networks.flatten_observation(observation, spec)
  expected = np.concatenate([np.full(7 * 8 * 3, np.log(4)), np.full(64, np.log(8))])
  np.testing.assert_allclose(flat, np.broadcast_to(expected, (2, expected.size)), rtol=1e-6)
  assert networks.unit_range(spec).shape == expected.shape
  assert networks.without_images(SPEC) == SPEC


@pytest.mark.parametrize('shape', [(), (6,), (3, 7), (2, 3, 4)])
def test_a_silu_and_its_gradient_are_those_of_flax(shape):
  pairs = jnp.asarray(np.random.default_rng(0).normal(scale=20, size=(*shape, 2)), jnp.float32)
  for x in (pairs, pairs[..., :1]):
    np.testing.assert_allclose(networks.silu(x), nn.silu(x), rtol=1e-6, atol=1e-6)
    slope = lambda activate, x=x: jax.grad(lambda x: jnp.sum(jnp.square(activate(x))))(x)
    np.testing.assert_allclose(slope(networks.silu), slope(nn.silu), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_layer_norm_and_its_gradient_are_those_of_flax(dtype):
  rng = np.random.default_rng(0)
  x = jnp.asarray(3 + rng.normal(size=(4, 3, 40)), dtype)
  params = {name: jnp.asarray(rng.normal(size=40), jnp.float32) for name in ('scale', 'bias')}

  def loss(norm):
    def of(x, params):
      y = norm.apply({'params': params}, x)
      assert y.dtype == dtype
      return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return jax.value_and_grad(of, argnums=(0, 1))(x, params)

  tolerance = 1e-4 if dtype == jnp.float32 else 5e-2
  jax.tree.map(
    lambda found, expected: np.testing.assert_allclose(
      found.astype(np.float32), expected.astype(np.float32), rtol=tolerance, atol=tolerance
    ),
    loss(networks.LayerNorm(dtype=dtype)),
    loss(nn.LayerNorm(dtype=dtype)),
  )


def test_behind_a_centred_kernel_a_layer_norm_needs_no_mean():
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((5, 7), (7, 40), 40, 40)]

  def plain(x, kernel, *norm):
    return jnp.sum(jnp.sin(networks.normalise(x @ kernel, *norm)))

  def centred(x, kernel, *norm):
    return jnp.sum(jnp.sin(networks.normalise(x @ networks.centre(kernel), *norm, centred=True)))

  of = lambda loss: jax.value_and_grad(loss, argnums=range(4))(*arrays)
  same = lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  jax.tree.map(same, of(centred), of(plain))


def test_an_observation_is_put_together_again(make_dreamer, make_observation):
  for world in ('masked', 'pictures', 'plain', 'map'):
    dreamer = make_dreamer(world)
    spec = dreamer.model.observation_spec
    observation = make_observation(dreamer, np.random.default_rng(0), 2, 3)
    flat = networks.symexp(networks.flatten_observation(observation, networks.without_images(spec)))
    again = networks.to_observation(flat, networks.images(observation, spec), spec)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, np.asarray(y, np.float32), rtol=1e-3, atol=1e-3),
      again,
      networks.without_mask(observation),
    )
