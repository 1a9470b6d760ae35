"""Multi-layer perceptrons, and what flattens an observation tree for them."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

ACTION_MASK = 'action_mask'
"""Where a discrete world keeps its mask, in an observation that is a dictionary; True is legal."""

ACTIVATIONS = {'silu': nn.silu, 'relu': nn.relu, 'tanh': nn.tanh}


def symlog(x: jax.Array) -> jax.Array:
  """sign(x) log(1 + |x|); Hafner et al. (2023), equation 9."""
  return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: jax.Array) -> jax.Array:
  """The inverse of `symlog`."""
  return jnp.sign(x) * jnp.expm1(jnp.abs(x))


class MLP(nn.Module):
  """Dense layers, each followed by a layer norm and an activation, and a linear output.

  Takes any leading axes, [..., F]. Matrices are multiplied in `dtype`; parameters are float32.

  Attributes:
    hidden_size: width of the hidden layers.
    num_layers: how many hidden layers.
    output_size: width of the output, or None to stop at the last hidden layer.
    output_scale: initial scale of the output's kernel; 0 starts it at zero.
    dtype: of the computation.
    activation: a key of ACTIVATIONS.
    layer_norm: whether hidden layers are normalised; they have a bias instead if not.
    hidden_init: initialiser of the hidden kernels; None for flax's, LeCun's.
  """

  hidden_size: int
  num_layers: int
  output_size: int | None = None
  output_scale: float = 1.0
  dtype: Any = jnp.float32
  activation: str = 'silu'
  layer_norm: bool = True
  hidden_init: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = x.astype(self.dtype)
    activate = ACTIVATIONS[self.activation]
    hidden_init = self.hidden_init or nn.initializers.lecun_normal()
    for _ in range(self.num_layers):
      x = nn.Dense(
        self.hidden_size, use_bias=not self.layer_norm, dtype=self.dtype, kernel_init=hidden_init
      )(x)
      x = activate(nn.LayerNorm(dtype=self.dtype)(x) if self.layer_norm else x)
    if self.output_size is None:
      return x
    kernel_init: Any = nn.initializers.zeros
    if self.output_scale:
      kernel_init = nn.initializers.variance_scaling(
        self.output_scale, 'fan_in', 'truncated_normal'
      )
    return nn.Dense(self.output_size, dtype=self.dtype, kernel_init=kernel_init)(x)


def apply(module: nn.Module, params: Any, *inputs: jax.Array) -> jax.Array:
  """A module that keeps nothing, applied."""
  outputs: Any = module.apply({'params': params}, *inputs)
  return outputs


def without_mask(observation: Any) -> Any:
  """The observation but for its action mask."""
  if isinstance(observation, dict):
    return {name: value for name, value in observation.items() if name != ACTION_MASK}
  return observation


def action_mask(observation: Any) -> jax.Array | None:
  """[..., A] bool, the actions that are legal; None in a world where all always are."""
  return observation.get(ACTION_MASK) if isinstance(observation, dict) else None


def flatten_observation(observation: Any, spec: Any) -> jax.Array:
  """Joins the leaves of an observation (its mask left out) into one symlog vector.

  Args:
    observation: tree of [..., *shape] arrays.
    spec: the same tree of specs, whose shapes tell the leading axes from the leaf's own.

  Returns:
    [..., F] float32.
  """
  leaves = jax.tree.leaves(without_mask(observation))
  shapes = [leaf.shape for leaf in jax.tree.leaves(without_mask(spec))]
  flat = [
    leaf.reshape(*leaf.shape[: leaf.ndim - len(shape)], -1).astype(jnp.float32)
    for leaf, shape in zip(leaves, shapes, strict=True)
  ]
  return symlog(jnp.concatenate(flat, axis=-1))


def unit_range(spec: Any) -> np.ndarray:
  """[F] bool, the numbers of a flattened observation that lie in [0, 1] by their spec."""
  leaves = jax.tree.leaves(without_mask(spec))
  bounded = lambda leaf: (
    isinstance(leaf, specs.BoundedArray) and np.all(leaf.minimum == 0) and np.all(leaf.maximum == 1)
  )
  return np.concatenate([np.full(math.prod(leaf.shape), bounded(leaf)) for leaf in leaves])


def by_level(number: jax.Array, num_levels: int) -> jax.Array:
  """[...] numbers in [0, 1] to [..., L], two-hot: between two levels, shared by distance."""
  levels = jnp.linspace(0.0, 1.0, num_levels)
  distance = jnp.abs(number[..., None] - levels)
  return jax.nn.relu(1.0 - distance * (num_levels - 1))


def with_levels(flat: jax.Array, spec: Any, num_levels: int) -> jax.Array:
  """A flattened observation, and beside it its numbers in [0, 1] by levels.

  A network then sees at once which of few values a number has, such as a coordinate of a small
  grid.

  Args:
    flat: [..., F] float32, as `flatten_observation` gives it.
    spec: of the observation.
    num_levels: L, at least 2; or 0 for none.

  Returns:
    [..., F + L times the numbers in [0, 1]] float32.
  """
  if not num_levels:
    return flat
  shares = by_level(symexp(flat[..., unit_range(spec)]), num_levels)
  return jnp.concatenate([flat, shares.reshape(*flat.shape[:-1], -1)], axis=-1)
