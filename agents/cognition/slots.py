"""Slots: an image as a set of vectors, ideally one for each object, which the world model's state holds.

    observed     s_t = norm(attention(image_t, norm(s_{t-1} + start))),  with s_{t-1} = 0 at FIRST
    imagined     s_t = norm(s_{t-1} + cell(s_{t-1}, mean of the other slots, start, c_t)),  one cell for all
    image        sum over slots( mask colour ),  masks and colours = painter(s_t)

with c_t the inputs of the decoder: h_t, z_t and the inputs of the transition. The painter is the image's
likelihood, so slots are perceived for the image, and not for their own prediction: no gradient of the cell's
error reaches them, and what the cell cannot predict, z_t learns to tell it.

Each slot has a learned start, which also keeps slots apart that would else become equal from step to step.
A slot is a vector of D numbers of mean 0 and variance 1 over D. States hold S slots in their fixed order,
flattened, [..., S D]; zeros are a cleared state.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import kernels, networks
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import modules, sockets

Tree = Any
NAME = 'slots'  # of their parameters in the world model's
LARGEST_GRID = 16  # tokens along a side of an image
PAINTED = 4
"""Steps of a sequence whose images are painted in a loss: a painter takes most of the time of slots."""


def unit(slots: jax.Array, dtype: Any) -> jax.Array:
  """Slots [..., D] of mean 0 and variance 1 over D, so that their scale tells nothing and does not drift."""
  size = slots.shape[-1]
  return kernels.normalise(slots, jnp.ones(size), jnp.zeros(size)).astype(dtype)


def weights_of(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Shares of slots in tokens, and weights of tokens in slots, float32.

    a = softmax over slots( logits )      w = (a + 1e-8) / sum over tokens( a + 1e-8 )

  Args:
    logits: [..., S, N] of slots and tokens.

  Returns:
    a [..., S, N], which sums to 1 over S, and w [..., S, N], which sums to 1 over N.
  """
  shares = jax.nn.softmax(logits.astype(jnp.float32), axis=-2)
  return shares, (shares + 1e-8) / jnp.sum(shares + 1e-8, axis=-1, keepdims=True)


class Tokens(nn.Module):
  """A CNN with embedded positions: image [..., H, W, C] to tokens [..., N, D], a grid row by row.

  Each convolution of stride 2 halves the sides, of which odd ones are rounded up, until they are at most
  LARGEST_GRID; there is at least one.

  Attributes:
    size: D, width of the tokens.
    dtype: dtype of the computation.
  """

  size: int
  dtype: Any

  @nn.compact
  def __call__(self, image: jax.Array) -> jax.Array:
    *axes, height, width, depth = image.shape
    x = image.reshape(-1, height, width, depth).astype(self.dtype)
    while x.shape[1:3] == (height, width) or max(x.shape[1:3]) > LARGEST_GRID:
      x = nn.relu(networks.Conv(self.size, dtype=self.dtype)(x))
    # A convolution of 3 x 3, as a product of patches for the reason in `kernels.halve`.
    patches = kernels.windows(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), 3)
    x = nn.relu(networks.Dense(self.size, dtype=self.dtype)(patches))
    x = x + networks.Dense(self.size, dtype=self.dtype)(places(*x.shape[1:3]))
    x = networks.LayerNorm(dtype=self.dtype)(x.reshape(*axes, -1, self.size))
    mlp = networks.MLP(
      self.size, 1, self.size, activation='relu', layer_norm=False, dtype=self.dtype
    )
    return networks.LayerNorm(dtype=self.dtype)(mlp(x))


class Attention(nn.Module):
  """A round of slot attention, in which slots compete for the tokens of an image.

    a, w = `weights_of`( k q / sqrt(D) )
    s <- GRU( sum over tokens( w v ), s )        s <- s + MLP( s )

  Locatello et al. (2020), "Object-centric learning with slot attention", algorithm 1.

  Attributes:
    hidden_size: width of the MLP's hidden layer.
    dtype: dtype of the computation; softmax and sums over tokens are in float32.
  """

  hidden_size: int
  dtype: Any

  @nn.compact
  def __call__(self, tokens: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slots [..., S, D] after a round of attention to tokens [..., N, D]; and a, [..., S, N] float32."""
    size = slots.shape[-1]
    dense = lambda name: networks.Dense(size, use_bias=False, dtype=self.dtype, name=name)
    keys, values = dense('key')(tokens), dense('value')(tokens)
    queries = dense('query')(networks.LayerNorm(dtype=self.dtype, name='ask')(slots))
    product = lambda form, *x: jnp.einsum(form, *x, preferred_element_type=jnp.float32)
    shares, weights = weights_of(product('...sd,...nd->...sn', queries, keys) * size**-0.5)
    update = product('...sn,...nd->...sd', weights.astype(self.dtype), values)
    slots, _ = nn.GRUCell(size, dtype=self.dtype, name='cell')(slots, update.astype(self.dtype))
    mlp = networks.MLP(
      self.hidden_size, 1, size, activation='relu', layer_norm=False, dtype=self.dtype, name='mlp'
    )
    before = networks.LayerNorm(dtype=self.dtype, name='refine')
    return slots + mlp(before(slots)), shares


class Painter(nn.Module):
  """Decodes each slot by itself: slots [..., S, D] to colours and a mask logit, [..., S, H, W, C + 1].

  A small MLP of slot and position, at all positions: Watters et al. (2019), "Spatial broadcast decoder".

  Attributes:
    shape: (H, W, C) of the image.
    hidden_size: width of the MLP's hidden layers.
    dtype: dtype of the computation.
  """

  shape: tuple[int, int, int]
  hidden_size: int
  dtype: Any

  @nn.compact
  def __call__(self, slots: jax.Array) -> jax.Array:
    height, width, depth = self.shape
    dense = lambda name, size, **how: networks.Dense(size, dtype=self.dtype, name=name, **how)
    at = dense('place', self.hidden_size)(places(height, width))
    x = dense('slot', self.hidden_size, use_bias=False)(slots)
    x = nn.relu(x[..., None, None, :] + at)
    x = nn.relu(dense('hidden', self.hidden_size)(x))
    return dense('paint', depth + 1)(x)


class Cell(nn.Module):
  """Slots one step later, by one MLP of a slot, its start, the mean of the others, and the model's state.

  Attributes:
    hidden_size: width of the MLP's hidden layer.
    dtype: dtype of the computation.
  """

  hidden_size: int
  dtype: Any

  @nn.compact
  def __call__(self, slots: jax.Array, start: jax.Array, context: jax.Array) -> jax.Array:
    """Slots [..., S, D] after slots [..., S, D] that started as [S, D], in a context [..., F]."""
    dense = lambda name, size, **how: networks.Dense(size, dtype=self.dtype, name=name, **how)
    others = (slots.sum(axis=-2, keepdims=True) - slots) / max(1, slots.shape[-2] - 1)
    x = dense('slot', self.hidden_size, use_bias=False)(
      slots, others, jnp.broadcast_to(start, slots.shape)
    )
    x = x + dense('context', self.hidden_size)(context)[..., None, :]
    x = kernels.silu(networks.LayerNorm(dtype=self.dtype, name='norm')(x))
    return unit(slots + dense('change', slots.shape[-1])(x), self.dtype)


def places(height: int, width: int) -> jax.Array:
  """Embedding of the positions in an image, [H, W, 18] float32: coordinates, their sines and cosines."""
  row, column = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing='ij')
  waves = [f(np.pi * k * x) for x in (row, column) for k in (1, 2, 4, 8) for f in (np.sin, np.cos)]
  return jnp.asarray(np.stack([row, column, *waves], axis=-1), jnp.float32)


def make_slots(networks: modules.Networks) -> 'Slots':
  """The slots of the observation's image.

  Raises:
    ValueError: the observation does not have just one image.
  """
  config, images = networks.config, networks.codec.image_specs
  if len(images) != 1:
    least = observation_lib.SMALLEST_IMAGE
    raise ValueError(
      f'agent.slots={config.slots}: slots are of one image, [height, width, channels] of at least {least} '
      f'x {least}, and this observation has {len(images) or "none"}; set agent.slots=0'
    )
  context = config.deterministic_size + networks.latent_size + networks.previous_size
  return Slots(
    images[0].shape, config.slots, config.slot_size, context, config.hidden_size, config.dtype
  )


@dataclasses.dataclass(frozen=True)
class Slots:
  """Slots of an image, observed or imagined, a perception of the dreamer: see `sockets.Perception`.

  Attributes:
    shape: (H, W, C) of the image.
    num_slots: S, number of slots.
    size: D, width of a slot.
    context_size: F, width of the model's state that the cell reads.
    cell_size: width of the cell's hidden layer.
    dtype: compute dtype, also of slots.
    num_rounds: rounds of attention at each step.
  """

  shape: tuple[int, int, int]
  num_slots: int
  size: int
  context_size: int
  cell_size: int
  dtype: Any = jnp.float32
  num_rounds: int = 2
  name: ClassVar[str] = NAME

  @property
  def width(self) -> int:
    """S D, width of all slots of a state."""
    return self.num_slots * self.size

  @property
  def _modules(self) -> dict[str, nn.Module]:
    return {
      'tokens': Tokens(self.size, self.dtype),
      'attention': Attention(self.size, self.dtype),
      'painter': Painter(self.shape, self.size, self.dtype),
      'cell': Cell(self.cell_size, self.dtype),
    }

  def init(self, key: jax.Array) -> Tree:
    """Initial parameters, float32, by network; and `start`, [S, D], the start of each slot."""
    keys = dict(zip((*self._modules, 'start'), jax.random.split(key, 5), strict=True))
    slots, token = jnp.zeros((1, self.num_slots, self.size)), jnp.zeros((1, 1, self.size))
    inputs = {
      'tokens': (jnp.zeros((1, *self.shape)),),
      'attention': (token, slots),
      'painter': (slots,),
      'cell': (slots, slots, jnp.zeros((1, self.context_size))),
    }
    params = {
      name: module.init(keys[name], *inputs[name])['params']
      for name, module in self._modules.items()
    }
    return params | {'start': jax.random.normal(keys['start'], (self.num_slots, self.size))}

  def _apply(self, params: Tree, name: str, *inputs: jax.Array) -> Any:
    return networks.apply(self._modules[name], params[name], *inputs)

  def _split(self, slots: jax.Array) -> jax.Array:
    return slots.reshape(*slots.shape[:-1], self.num_slots, self.size)

  def _join(self, slots: jax.Array) -> jax.Array:
    return slots.reshape(*slots.shape[:-2], self.width)

  def observe(
    self, params: Tree, images: jax.Array, before: jax.Array, first: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Slots of sequences of images, carried from step to step.

    Gradients pass only the last round of a step, as at a fixed point of the rounds, and neither earlier
    rounds nor the steps before: Jia et al. (2023), "Improving object-centric learning with query
    optimization". With gradients through all rounds, slots hardly separated sprites. So the loop over
    steps has no gradient, and the last round is computed once more, at all steps at once.

    Args:
      params: parameters as from `init`.
      images: [T, B, H, W, C] float32, as a codec encodes them.
      before: [B, S D], slots of the step before, or zeros.
      first: [T, B] bool, steps that begin an episode.

    Returns:
      The slots, [T, B, S D], and their attention, the share of each slot in each token, [T, B, S, N]
      float32.
    """
    tokens = self._apply(params, 'tokens', images)
    frozen = jax.lax.stop_gradient(params)

    def step(slots, inputs):
      tokens, first = inputs
      carried = jnp.where(first[:, None, None], 0, slots)
      slots = last = unit(carried + frozen['start'], self.dtype)
      for _ in range(self.num_rounds):
        last, (slots, _) = slots, self._apply(frozen, 'attention', tokens, slots)
      return unit(slots, self.dtype), last

    before = self._split(before).astype(self.dtype)
    before, inputs = jax.lax.stop_gradient((before, (tokens, first)))
    _, slots = jax.lax.scan(step, before, inputs)
    start = params['start'].astype(self.dtype)
    slots += start - jax.lax.stop_gradient(
      start
    )  # where slots start is learned as if by the last round
    slots, shares = self._apply(params, 'attention', tokens, slots)
    return self._join(unit(slots, self.dtype)), shares

  def imagine(self, params: Tree, before: jax.Array, context: jax.Array) -> jax.Array:
    """Slots [..., S D] one step after slots [..., S D], in a context [..., F]."""
    start = jax.lax.stop_gradient(params['start'])
    return self._join(self._apply(params, 'cell', self._split(before), start, context))

  def paint(self, params: Tree, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decodes slots [..., S D] to an image and masks, float32.

    Returns:
      The image, [..., H, W, C], outputs of a decoder as a codec reads them; and the masks, the share of
      each slot in each pixel, [..., S, H, W].
    """
    painted = self._apply(params, 'painter', self._split(slots)).astype(jnp.float32)
    masks = jax.nn.softmax(painted[..., -1], axis=-3)
    return jnp.sum(masks[..., None] * painted[..., :-1], axis=-4), masks

  def loss(
    self, params: Tree, keys: jax.Array, steps: sockets.Percepts
  ) -> tuple[jax.Array, sockets.Metrics]:
    """Loss [] of the slots' image and of their prediction, and metrics [] by name.

    The image of PAINTED random steps of each sequence counts; the error of predicted slots is the squared
    one, 0 at FIRST, to which no transition leads.
    """
    slots = steps.percept
    num_steps, batch = slots.shape[:2]
    count = min(PAINTED, num_steps)
    # Numbers of steps are folded in elsewhere, `num_steps` by empowerment, and + 2 by the world model.
    keys = jax.vmap(lambda key: jax.random.fold_in(key, num_steps + 1))(keys)
    choose = lambda key: jax.random.permutation(key, num_steps)[:count]
    step = jax.vmap(choose, out_axes=1)(keys)  # [count, B]
    pick = lambda x: x[step, jnp.arange(batch)]
    painted, masks = self.paint(params, pick(slots))
    image_loss = jnp.mean(steps.image_loss(painted, pick(steps.images)))

    stop = jax.lax.stop_gradient
    before = stop(steps.before)
    difference = lambda x: jnp.square(x.astype(jnp.float32) - stop(slots).astype(jnp.float32))
    error = lambda x: jnp.mean(jnp.where(steps.follows, jnp.sum(difference(x), axis=-1), 0.0))
    change_error = error(self.imagine(params, before, steps.context))
    return image_loss + change_error, {
      'used': jnp.mean(jnp.sum(jnp.max(masks, axis=(-2, -1)) > 0.5, axis=-1).astype(jnp.float32)),
      'image': image_loss,
      'change': error(before) / slots.shape[-1],
      'change_error': change_error / slots.shape[-1],
    }
