"""Networks: dtypes, axes, and shapes of images."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors.environments import environment
from hephaestus.agents import networks
from hephaestus.agents import observation as observation_lib


@jax.jit
def there_and_back(x):
  return networks.symexp(networks.symlog(x)), networks.symlog(x)


def test_symlog_by_hand_and_its_inverse():
  x = np.float32([0.0, np.e - 1, 1 - np.e, 1e6, -1e-6])
  back, found = jax.device_get(there_and_back(x))
  np.testing.assert_allclose(found[:3], [0, 1, -1], rtol=1e-6)
  np.testing.assert_allclose(back, x, rtol=1e-5)


def normal(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_towers_normalise_their_inputs_separately():
  """Features 1000 times as large do not drown the numbers: the output stays about the same."""
  towers = networks.Towers(8, 1, 3, 1.0)

  @jax.jit
  def differences(features, numbers, changed):
    params = towers.init(jax.random.key(0), (features,), (numbers,))
    return [
      towers.apply(params, (x,), (numbers,)) - towers.apply(params, (x,), (changed,))
      for x in (features, 1000 * features)
    ]

  small, large = jax.device_get(differences(*normal(3, 4, 5)))
  assert np.abs(small).max() > 0.1
  np.testing.assert_allclose(large, small, rtol=1e-3, atol=1e-4)


def test_input_of_no_width_has_no_tower():
  towers = networks.Towers(8, 2, 3, 1.0)
  inputs = (np.ones((2, 4)), np.ones((2, 3))), (np.ones((2, 0)),)
  output, variables = jax.eval_shape(towers.init_with_output, jax.random.key(0), *inputs)
  params = variables['params']
  assert output.shape == (2, 3) and set(params) == {'features', 'rest'}
  assert params['features']['Dense_0']['kernel'].shape == (4 + 3, 8)
  assert params['rest']['Dense_0']['kernel'].shape == (8, 8)


class Concatenate(nn.Module):
  """Concatenates its inputs, in place of an MLP."""

  activation: str = 'tanh'
  dtype: object = jnp.float32
  hidden_init: object = nn.initializers.normal()

  def __call__(self, *parts):
    return jnp.concatenate(parts, axis=-1)


def test_number_in_a_cell_changes_the_features_of_that_cell_only():
  spec = {
    'board': environment.BoardSpec((2 + 2 * 3 * 4,), np.float32, (2, 3, 4)),
    'purse': specs.Array((1,), np.float32),
  }
  encoder = networks.BoardEncoder(Concatenate(), 5)
  read = lambda observation: (
    networks.symlog(observation_lib.join(observation, observation_lib.without_boards(spec))),
    *observation_lib.boards(observation, spec),
  )
  empty = jax.tree.map(lambda leaf: np.zeros((7, *leaf.shape), np.float32), spec)

  @jax.jit
  def encode(observation):
    params = encoder.init(jax.random.key(0), *read(empty))['params']
    return networks.apply(encoder, params, *read(observation))

  before = np.asarray(encode(empty))

  def moved(**numbers):
    observation = jax.tree.map(np.copy, empty)
    for name, (place, value) in numbers.items():
      observation[name][..., place] = value
    return (np.asarray(encode(observation)) - before)[3]

  places = [np.flatnonzero(moved(board=(2 + 4 * cell + 1, 0.5))) for cell in range(6)]
  np.testing.assert_array_equal(places, np.arange(30).reshape(6, 5))
  one, other = moved(board=(2 + 1, 0.5)), moved(board=(2 + 4 * 5 + 1, 0.5))
  np.testing.assert_allclose(one[:5], other[25:30], rtol=1e-6)
  np.testing.assert_array_equal(np.flatnonzero(moved(board=(1, 0.5), purse=(0, 3.0))), [31, 32])


@pytest.mark.parametrize('sizes, dtype', [((5,), np.float32), ((2, 0, 3), jnp.bfloat16)])
def test_dense_layer_of_parts_equals_one_of_their_concatenation(sizes, dtype):
  """Compares values and all gradients."""
  rng = np.random.default_rng(0)
  array = lambda *shape: rng.normal(size=shape).astype(np.float32)
  parts, weight = [array(3, 4, size).astype(dtype) for size in sizes], array(3, 4, 6)
  dense = networks.Dense(6, dtype=dtype)
  params = {'kernel': array(5, 6), 'bias': array(6)}

  def apart(params, parts):
    return jnp.sum(weight * networks.apply(dense, params, *parts).astype(jnp.float32))

  def joined(params, parts):
    x = jnp.concatenate(parts, axis=-1).astype(jnp.float32)
    return jnp.sum(weight * (x @ params['kernel'] + params['bias']))

  (value, grads), (expected, expected_grads) = jax.jit(
    lambda *arguments: [
      jax.value_and_grad(loss, argnums=(0, 1))(*arguments) for loss in (apart, joined)
    ]
  )(params, parts)
  close = {'rtol': 1e-5, 'atol': 1e-5} if dtype == jnp.float32 else {'rtol': 0.05, 'atol': 0.1}
  np.testing.assert_allclose(value, expected, **close)
  compare = lambda x, y: np.testing.assert_allclose(*map(np.float32, (x, y)), **close)
  jax.tree.map(compare, grads, expected_grads)
  assert {leaf.dtype for leaf in jax.tree.leaves(grads[0])} == {jnp.dtype('float32')}


def test_initial_output_has_its_output_scale():
  @jax.jit
  def spreads(x):
    mlps = [networks.MLP(64, 1, 16, output_scale=scale) for scale in (0.0, 0.01, 1.0)]
    return [jnp.std(mlp.init_with_output(jax.random.key(1), x)[0]) for mlp in mlps]

  spread = spreads(normal(50, 5))
  assert spread[0] == 0
  # The scale is a variance.
  np.testing.assert_allclose(spread[1] / spread[2], 0.1, rtol=1e-3)


@pytest.mark.parametrize(
  ('shape', 'num_stages'),
  [((8, 8, 1), 1), ((9, 21, 3), 1), ((63, 63, 3), 4)],
)
def test_decoder_restores_the_size_of_an_image(shape, num_stages):
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


def test_encoder_and_decoder_of_numbers_and_images_in_bfloat16():
  encoder = networks.Encoder(networks.MLP(16, 1, dtype=jnp.bfloat16), 4)
  inputs = (jnp.zeros((3, 5)), jnp.zeros((3, 8, 8, 2)), jnp.zeros((3, 9, 8, 1)))
  features, variables = jax.eval_shape(encoder.init_with_output, jax.random.key(0), *inputs)
  assert features.shape == (3, 3 * 16) and features.dtype == jnp.bfloat16
  decoder = networks.Decoder(networks.MLP(16, 1, 5), 4, ((8, 8, 2), (9, 8, 1)))
  decoded, _ = jax.eval_shape(decoder.init_with_output, jax.random.key(0), features)
  assert decoded.shape == (3, 5 + 128 + 72)
  assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype('float32')}
