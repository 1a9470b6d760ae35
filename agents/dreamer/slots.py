"""Slots: an image encoded as a set of vectors, ideally one for each object.

The world model does not read them yet: docs/cognition.md has the results of slots without an agent.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import networks


class SlotAttention(nn.Module):
  """Slot attention: slots compete for the tokens of an image in rounds of attention.

    a = softmax over slots( k q / sqrt(D) )      w = (a + 1e-8) / sum over tokens( a + 1e-8 )
    s <- GRU( sum over tokens( w v ), s )        s <- s + MLP( s )

  Locatello et al. (2020), "Object-centric learning with slot attention", algorithm 1. Gradients pass
  only the last round, as at a fixed point of the rounds: Jia et al. (2023), "Improving object-centric
  learning with query optimization". With gradients through all rounds, slots hardly separate sprites.

  Attributes:
    num_rounds: rounds of attention for each image.
    hidden_size: width of the MLP's hidden layer.
  """

  num_rounds: int
  hidden_size: int

  @nn.compact
  def __call__(self, tokens: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Updates slots with the tokens of an image.

    Args:
      tokens: [..., T, D].
      slots: [..., S, D].

    Returns:
      The slots [..., S, D] after all rounds, and the attention a of the last round, [..., S, T].
    """
    size, start = slots.shape[-1], slots
    dense = lambda name: networks.Dense(size, use_bias=False, name=name)
    tokens = networks.LayerNorm(name='read')(tokens)
    keys, values = dense('key')(tokens), dense('value')(tokens)
    query, norm, cell = (
      dense('query'),
      networks.LayerNorm(name='ask'),
      nn.GRUCell(size, name='cell'),
    )
    refine = networks.MLP(
      self.hidden_size, 1, size, activation='relu', layer_norm=False, name='mlp'
    )
    before = networks.LayerNorm(name='refine')
    shares = jnp.zeros(())
    for left in reversed(range(self.num_rounds)):
      if not left:  # where slots start is still learned
        slots = jax.lax.stop_gradient(slots) + (start - jax.lax.stop_gradient(start))
      logits = jnp.einsum('...sd,...td->...st', query(norm(slots)), keys) * size**-0.5
      shares = jax.nn.softmax(logits, axis=-2)
      weights = (shares + 1e-8) / jnp.sum(shares + 1e-8, axis=-1, keepdims=True)
      slots, _ = cell(slots, jnp.einsum('...st,...td->...sd', weights, values))
      slots = slots + refine(before(slots))
    return slots, shares


class Tokens(nn.Module):
  """A CNN of stride 2 with embedded positions: image [..., H, W, C] to tokens [..., H W / 4, D].

  Attributes:
    size: D, width of the tokens.
    num_layers: number of convolutions.
  """

  size: int
  num_layers: int = 2

  @nn.compact
  def __call__(self, image: jax.Array) -> jax.Array:
    *axes, height, width, depth = image.shape
    x = image.reshape(-1, height, width, depth)
    x = nn.relu(nn.Conv(self.size, (4, 4), strides=(2, 2))(x))
    height, width = height // 2, width // 2
    for _ in range(self.num_layers - 1):
      x = nn.relu(nn.Conv(self.size, (3, 3))(x))
    x = x + networks.Dense(self.size)(places(height, width))
    x = networks.LayerNorm()(x.reshape(*axes, height * width, self.size))
    return networks.MLP(self.size, 1, self.size, activation='relu', layer_norm=False)(x)


class Painter(nn.Module):
  """Decodes each slot by itself: slots [..., S, D] to colours and a mask logit, [..., S, H, W, C + 1].

  A small MLP of slot and position, at all positions: Watters et al. (2019), "Spatial broadcast decoder".

  Attributes:
    shape: (H, W, C) of the image.
    hidden_size: width of the MLP's hidden layers.
  """

  shape: tuple[int, int, int]
  hidden_size: int

  @nn.compact
  def __call__(self, slots: jax.Array) -> jax.Array:
    height, width, depth = self.shape
    at = networks.Dense(self.hidden_size, name='place')(places(height, width))
    x = networks.Dense(self.hidden_size, use_bias=False, name='slot')(slots)
    x = nn.relu(x[..., None, None, :] + at)
    x = nn.relu(networks.Dense(self.hidden_size, name='hidden')(x))
    return networks.Dense(depth + 1, name='paint')(x)


def places(height: int, width: int) -> jax.Array:
  """Embedding of the positions in an image, [H, W, 18] float32: coordinates, their sines and cosines."""
  row, column = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing='ij')
  waves = [f(np.pi * k * x) for x in (row, column) for k in (1, 2, 4, 8) for f in (np.sin, np.cos)]
  return jnp.asarray(np.stack([row, column, *waves], axis=-1), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Slots:
  """Slots of an image, carried over time.

  Attributes:
    shape: (H, W, C) of the image; H and W are even.
    num_slots: S, number of slots.
    size: D, width of a slot.
    hidden_size: width of the hidden layers of attention and decoder.
    num_rounds: rounds of attention at each step.
  """

  shape: tuple[int, int, int]
  num_slots: int = 8
  size: int = 32
  hidden_size: int = 32
  num_rounds: int = 3

  @property
  def _modules(self) -> dict[str, nn.Module]:
    return {
      'tokens': Tokens(self.size),
      'attention': SlotAttention(self.num_rounds, self.hidden_size),
      'painter': Painter(self.shape, self.hidden_size),
    }

  def init(self, key: jax.Array) -> Any:
    """Initial parameters, float32, by network; and `start`, the slots at the beginning, [S, D]."""
    keys = dict(zip((*self._modules, 'start'), jax.random.split(key, 4), strict=True))
    slots, image = jnp.zeros((1, self.num_slots, self.size)), jnp.zeros((1, *self.shape))
    tokens = jnp.zeros((1, self.shape[0] // 2 * (self.shape[1] // 2), self.size))
    inputs = {'tokens': (image,), 'attention': (tokens, slots), 'painter': (slots,)}
    params = {
      name: module.init(keys[name], *inputs[name])['params']
      for name, module in self._modules.items()
    }
    return params | {'start': jax.random.normal(keys['start'], (self.num_slots, self.size))}

  def observe(
    self, params: Any, images: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Encodes sequences of images as slots, which are carried from step to step.

    Args:
      params: parameters as from `init`.
      images: [T, B, H, W, C] float32 in [-0.5, 0.5].
      first: [T, B] bool, steps that begin an episode, at which slots are reset to `start`.

    Returns:
      The slots, [T, B, S, D], and their attention, the share of each slot in each token,
      [T, B, S, H W / 4].
    """
    tokens = networks.apply(self._modules['tokens'], params['tokens'], images)
    start = jnp.broadcast_to(params['start'], (*images.shape[1:2], self.num_slots, self.size))

    def step(slots, inputs):
      tokens, first = inputs
      slots = jnp.where(first[:, None, None], start, slots)
      outputs: Any = networks.apply(self._modules['attention'], params['attention'], tokens, slots)
      return outputs[0], outputs

    _, (slots, shares) = jax.lax.scan(step, start, (tokens, first))
    return slots, shares

  def paint(self, params: Any, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decodes [..., S, D] slots to an image [..., H, W, C] and masks [..., S, H, W] of sum 1 over slots."""
    painted = networks.apply(self._modules['painter'], params['painter'], slots)
    masks = jax.nn.softmax(painted[..., -1], axis=-3)
    return jnp.sum(masks[..., None] * painted[..., :-1], axis=-4), masks

  def loss(self, params: Any, images: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squared error of images reconstructed from their slots.

    Args:
      params: parameters as from `init`.
      images: [T, B, H, W, C] float32 in [-0.5, 0.5].
      first: [T, B] bool, where an episode begins.

    Returns:
      The loss, [] float32, summed over H, W and C and averaged over T and B; and the masks,
      [T, B, S, H, W].
    """
    slots, _ = self.observe(params, images, first)
    painted, masks = self.paint(params, slots)
    return jnp.mean(jnp.sum(jnp.square(painted - images), axis=(-3, -2, -1))), masks
