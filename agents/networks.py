"""Multi-layer perceptrons and convolutions; see `kernels` for their arithmetic."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import kernels


def symlog(x: jax.Array) -> jax.Array:
  """sign(x) log(1 + |x|), float32 for bool; Hafner et al. (2023), equation 9."""
  if x.dtype == bool:
    return jnp.where(x, np.float32(np.log(2)), np.float32(0))
  return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: jax.Array) -> jax.Array:
  """The inverse of `symlog`."""
  return jnp.sign(x) * jnp.expm1(jnp.abs(x))


ACTIVATIONS: dict[str, Any] = {'silu': kernels.silu, 'relu': nn.relu, 'tanh': nn.tanh}


class LayerNorm(nn.Module):
  """`flax.linen.LayerNorm` with the same parameters, but computed by `kernels.normalise`, in float32."""

  dtype: Any = jnp.float32  # of the output

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
    bias = self.param('bias', nn.initializers.zeros, x.shape[-1:])
    return kernels.normalise(x, scale, bias).astype(self.dtype)


class Dense(nn.Module):
  """`flax.linen.Dense` with the same parameters, but computed by `kernels.affine`.

  Takes one input [..., F], or several parts of it that count as concatenated along F.
  """

  features: int  # O, width of the output
  use_bias: bool = True
  dtype: Any = jnp.float32  # of the computation and the output; parameters are float32
  kernel_init: Any = nn.initializers.lecun_normal()
  bias_init: Any = nn.initializers.zeros

  @nn.compact
  def __call__(self, *parts: jax.Array) -> jax.Array:
    size = sum(part.shape[-1] for part in parts)
    kernel = self.param('kernel', self.kernel_init, (size, self.features))
    bias = self.param('bias', self.bias_init, (self.features,)) if self.use_bias else None
    return kernels.affine(
      tuple(part.astype(self.dtype) for part in parts if part.size), kernel, bias
    )


class Conv(nn.Module):
  """`flax.linen.Conv` of 4 x 4 pixels and stride 2 without bias, but computed by `kernels.halve`."""

  features: int  # O, channels of the output
  dtype: Any = jnp.float32  # of the computation and the output; the kernel is float32

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """[N, H / 2, W / 2, O] from images [N, H, W, C]; odd sizes are rounded up."""
    shape = (4, 4, images.shape[-1], self.features)
    kernel = self.param('kernel', nn.initializers.lecun_normal(), shape)
    return self.convolve(images.astype(self.dtype), kernel.astype(self.dtype))

  convolve = staticmethod(kernels.halve)


class ConvTranspose(Conv):
  """`flax.linen.ConvTranspose` like `Conv`, but computed by `kernels.double`: [N, 2 H, 2 W, O]."""

  convolve = staticmethod(kernels.double)


class MLP(nn.Module):
  """Dense layers, each followed by a layer norm and an activation, and a linear output.

  Takes one input [..., F], or several parts of it that count as concatenated along F, and returns
  [..., output_size], or [..., hidden_size] without an output. Matrices are multiplied in `dtype`;
  parameters are float32. If the input is `raw`, numbers of an observation rather than features, a
  constant 1 is appended, without which the first layer norm would map x and 2 x to the same features.
  """

  hidden_size: int
  num_layers: int  # hidden layers
  output_size: int | None = None  # None to stop at the last hidden layer
  output_scale: float = 1.0  # initial scale of the output's kernel; 0 starts it at zero
  dtype: Any = jnp.float32  # of the computation and the output
  output_dtype: Any = None  # of the output layer, if another
  activation: str = 'silu'  # of the hidden layers, a key of ACTIVATIONS
  layer_norm: bool = True  # whether hidden layers have a layer norm; without it they have a bias
  hidden_init: Any = None  # initialiser of the hidden kernels; None for LeCun normal
  raw: bool = False

  @nn.compact
  def __call__(self, *parts: jax.Array) -> jax.Array:
    if self.raw:
      parts = (*parts, jnp.ones_like(parts[0][..., :1]))
    axes = parts[0].shape[:-1]
    # One batch axis: XLA's CPU computes sums over two, as in gradients, number by number.
    parts = tuple(part.reshape(math.prod(axes), part.shape[-1]) for part in parts)
    activate = ACTIVATIONS[self.activation]
    hidden_init = self.hidden_init or nn.initializers.lecun_normal()
    for _ in range(self.num_layers):
      x = Dense(self.hidden_size, not self.layer_norm, self.dtype, hidden_init)(*parts)
      parts = (activate(LayerNorm(dtype=self.dtype)(x) if self.layer_norm else x),)
    if self.output_size is None:
      (output,) = parts
      return output.reshape(*axes, self.hidden_size)
    scaled = nn.initializers.variance_scaling
    kernel_init: Any = nn.initializers.zeros
    if self.output_scale:
      kernel_init = scaled(self.output_scale, 'fan_in', 'truncated_normal')
    dtype = self.output_dtype or self.dtype
    output = Dense(self.output_size, dtype=dtype, kernel_init=kernel_init)(*parts)
    return output.reshape(*axes, self.output_size)


def _halvings(height: int, width: int) -> list[tuple[int, int]]:
  """(Height, width) before each stage of a CNN, which halves them to about 4, and after the last.

  Odd numbers are rounded up: (63, 63), (32, 32), (16, 16), (8, 8), (4, 4).
  """
  sizes = [(height, width)]
  for _ in range(round(math.log2(min(height, width) / 4))):
    height, width = -(-height // 2), -(-width // 2)
    sizes.append((height, width))
  return sizes


class BoardEncoder(nn.Module):
  """An MLP that reads boards (grids of cells) through a dense layer shared by all cells.

  The outputs of the cells are concatenated in order, so the MLP still distinguishes cells; it only
  reads fewer numbers of each. Takes any leading axes.
  """

  mlp: Any  # reads the outputs of the shared layer, and the numbers outside of the boards
  cell_size: int  # width of the shared layer

  @nn.compact
  def __call__(self, flat: jax.Array, *boards: jax.Array) -> jax.Array:
    """The MLP's output for numbers [..., F], F possibly 0, and boards [..., cells, features]."""
    activate = ACTIVATIONS[self.mlp.activation]
    cells = []
    for board in boards:
      x = board.reshape(-1, board.shape[-1])
      x = Dense(self.cell_size, dtype=self.mlp.dtype, kernel_init=self.mlp.hidden_init)(x)
      cells.append(activate(x).reshape(*board.shape[:-2], -1))
    return self.mlp(*cells, flat)


class Towers(nn.Module):
  """An MLP over features, numbers, cells and places of an observation, each with its own first layer and layer norm.

  In a joint first layer the input of the larger norm would drown the others. Fields are those of `MLP`.
  """

  hidden_size: int  # also of each of the first layers
  num_layers: int  # at least 1, the first layers counting as one
  output_size: int
  output_scale: float
  dtype: Any = jnp.float32
  output_dtype: Any = None

  @nn.compact
  def __call__(
    self,
    features: tuple[jax.Array, ...],
    numbers: tuple[jax.Array, ...],
    cells: tuple[jax.Array, ...] = (),
    places: tuple[jax.Array, ...] = (),
  ) -> jax.Array:
    """[..., output_size] from four inputs, each in parts [..., F]; one of width 0 has no first layer."""
    inputs = {'features': features, 'numbers': numbers, 'cells': cells, 'places': places}
    raw = 'numbers', 'places'
    towers = [
      MLP(self.hidden_size, 1, dtype=self.dtype, raw=name in raw, name=name)(*parts)
      for name, parts in inputs.items()
      if sum(part.shape[-1] for part in parts)
    ]
    shape = self.hidden_size, self.num_layers - 1, self.output_size, self.output_scale
    return MLP(*shape, self.dtype, self.output_dtype, name='rest')(*towers)


AROUND = tuple((row, column) for row in (-1, 0, 1) for column in (-1, 0, 1))
DIAGONAL = ((-1, -1), (-1, 1), (0, 0), (1, -1), (1, 1))
"""Offsets from a cell of what a layer of `Cells` reads: all that touch it, and those at its corners, and itself."""
BESIDE = ((-1, 0), (0, -1), (0, 1), (1, 0))
"""Offsets of the four cells beside a cell."""


def neighbours(grid: jax.Array, offsets: tuple[tuple[int, int], ...]) -> jax.Array:
  """What is in the cells at `offsets`, of at most 1, from each cell of a grid [..., H, W, I], 0 outside: [..., H, W, N I]."""
  *axes, height, width, _ = grid.shape
  padded = jnp.pad(grid, [(0, 0)] * len(axes) + [(1, 1), (1, 1), (0, 0)])
  parts = [padded[..., 1 + i : 1 + i + height, 1 + j : 1 + j + width, :] for i, j in offsets]
  return jnp.concatenate(parts, axis=-1)


class Cells(nn.Module):
  """Features of the cells of a grid, by two layers that all cells share, so what is learned in one is known in all.

  The first layer reads a cell and its eight neighbours, the second a cell and its four diagonal ones: 5 x 5
  cells are seen. Neither reads row or column, by which each cell would be learned by itself; a constant 1
  tells cells from what is outside.
  """

  features: int  # D, of a cell
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, grid: jax.Array) -> jax.Array:
    """[..., H W, D + I] features, and what is in the cell itself, from a grid [..., H, W, I]."""
    *axes, height, width, _ = grid.shape
    x = jnp.concatenate([grid, jnp.ones_like(grid[..., :1])], axis=-1)
    for offsets in (AROUND, DIAGONAL):
      x = neighbours(x.reshape(-1, height, width, x.shape[-1]).astype(self.dtype), offsets)
      x = x.reshape(math.prod(axes) * height * width, -1)
      x = Dense(self.features, use_bias=False, dtype=self.dtype)(x)
      x = kernels.silu(LayerNorm(dtype=self.dtype)(x))
    contents = grid.astype(self.dtype).reshape(len(x), -1)
    return kernels.concatenate([x, contents]).reshape(*axes, height * width, -1)


SAME = 0.005
"""Largest difference of numbers that are the same but for rounding to bfloat16."""


class Pool(nn.Module):
  """A vector for all cells of a grid: mean and maximum over them of one layer, without norms.

  Of a transition only the cells whose contents it changed count, few in most environments. Among all others the
  one that tells of a rare reward, such as that of a fruit where a head is now, would have no weight in the mean,
  and of the maximum no gradient until it is the largest; of 17 fruits the reward is learned with this only.
  Of one step only cells that hold something count: where most are empty, as in Asterix, the mean over all hardly
  says more than `places`.

  With a `shape` the layer also reads where a cell lies from where each of the contents is: what is how far from
  what, such as which way the nearest fruit is from a head, whatever the row and the column of both.
  """

  size: int  # V, of the vector; even
  contents: int  # I, of a cell
  shape: tuple[int, int] | None = (
    None  # rows and columns of the grid, if the last of the inputs is places
  )
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, *inputs: jax.Array) -> jax.Array:
    """[..., V] from `Cells` [..., M, D + I] of M cells, at one step, or before and after a transition.

    Places are [..., 3 I]: rows and columns, in [-1, 1], of what the grid holds, and whether there is any.
    """
    cells = inputs[:-1] if self.shape else inputs
    *axes, number, _ = cells[0].shape
    parts = [part.reshape(-1, part.shape[-1]) for part in cells]
    x = Dense(self.size // 2, dtype=self.dtype)(*parts).reshape(*axes, number, -1)
    if self.shape:
      x += self._offsets(inputs[-1].reshape(*axes, 3, -1), self.shape)
    x = kernels.silu(x)
    contents = [part[..., -self.contents :] for part in cells]
    counted = contents[-1] - contents[0] if len(contents) > 1 else contents[0]
    counts = jnp.any(jnp.abs(counted) > SAME, axis=-1, keepdims=True)
    mean = jnp.sum(x, axis=-2, where=counts) / jnp.maximum(jnp.sum(counts, axis=-2), 1)
    most = jnp.max(x, axis=-2, where=counts, initial=-0.28)  # less than any silu
    return jnp.concatenate([mean, most], axis=-1)

  def _offsets(self, places: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """[..., M, V / 2], linear in the offset of each of M cells from `places` [..., 3, I]; 0 for what is nowhere."""
    init = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal', in_axis=(0, 1))
    kernel = self.param('offsets', init, (2, self.contents, self.size // 2)).astype(self.dtype)
    is_any = places[..., 2, :]
    from_origin = jnp.einsum('...i,civ->...cv', is_any, kernel)
    of_places = jnp.einsum('...ci,civ->...v', is_any[..., None, :] * places[..., :2, :], kernel)
    axes = (np.linspace(-1.0, 1.0, size) for size in shape)
    cells = np.stack(np.meshgrid(*axes, indexing='ij'), axis=-1).reshape(-1, 2)
    return jnp.asarray(cells, self.dtype) @ from_origin - of_places[..., None, :]


LOGIT_RATE = 4
"""How much faster a decoder's logits for cells change than by Adam's rate for each weight.

Whether a cell changes has logits from -7 to 7, which a sum over few hidden units (32 on the laptop) else reaches in
a thousand updates.
"""


class CellDecoder(nn.Module):
  """Predicts the cells of a grid from their features at the step before, what is beside it, belief and action.

  Of the four cells beside a cell it reads the contents, too: a view that scrolls puts one of them in its place, and
  which of many contents that is, the features alone say only after many updates. The action, with what is beside
  the grid, also scales what is read: what moves where is a product of both, which a sum has to learn for each pair.
  """

  features: int  # hidden units of a cell
  shape: tuple[int, int]  # rows and columns of the grid
  contents: int  # I, of a cell
  output_size: int  # of a cell
  num_gates: int  # the first of its outputs: logits that contents stay, as nearly all do at first
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, cells: jax.Array, belief: jax.Array, action: jax.Array, others: jax.Array
  ) -> jax.Array:
    """[..., M, output_size] from cells [..., M, D + I], belief [..., F], encoded action [..., A] and numbers [..., S].

    The numbers are those of the step before that are of no grid, such as an inventory: what can be placed depends
    on them. Of several beliefs [N, ..., F] it is [N, ..., M, output_size].
    """
    *axes, number, _ = cells.shape
    grid = cells[..., -self.contents :].reshape(*axes, *self.shape, self.contents)
    beside = neighbours(grid, BESIDE).reshape(*axes, number, -1)
    cells = jnp.concatenate([cells, beside], axis=-1)
    size = cells.shape[-1]
    dense = lambda features, **options: Dense(features, dtype=self.dtype, **options)
    scale = dense(size, name='scale')(jnp.concatenate([action, others], axis=-1))[..., None, :]
    of_cells = dense(self.features, use_bias=False, name='cells')(
      cells.reshape(-1, size), (cells * scale).reshape(-1, size)
    )
    others = jnp.broadcast_to(others, (*belief.shape[:-1], others.shape[-1]))
    shared = dense(self.features, name='belief')(jnp.concatenate([belief, others], axis=-1))
    shared = shared[..., None, :]
    x = of_cells.reshape(*axes, number, -1) + shared
    lead = x.shape[:-1]
    x = kernels.silu(LayerNorm(dtype=self.dtype)(x.reshape(-1, self.features)))
    small = nn.initializers.variance_scaling(LOGIT_RATE**-2, 'fan_in', 'truncated_normal')
    stays = lambda _, shape: (jnp.arange(*shape) < self.num_gates).astype(jnp.float32)
    outputs = dense(self.output_size, name='outputs', kernel_init=small, bias_init=stays)
    return (LOGIT_RATE * outputs(x)).reshape(*lead, -1)


class Encoder(nn.Module):
  """Encodes an observation as one vector: an MLP for its numbers, and a CNN for each of its images.

  The outputs are concatenated; each has the MLP's width; without numbers the MLP has none. A stage of a CNN is a convolution of stride 2
  that doubles the channels, a layer norm and a silu; the size of an image sets the number of stages. A
  dense layer follows the last. Takes any leading axes.
  """

  mlp: Any  # for the numbers, without an output layer
  channels: int  # of the last stage; each stage before it has half as many as the next

  @nn.compact
  def __call__(self, flat: jax.Array, *images: jax.Array) -> jax.Array:
    """Encodes [..., F] numbers, F possibly 0, and [..., H, W, C] images as [..., features]."""
    dtype = self.mlp.dtype
    features = [self.mlp(flat)] if flat.shape[-1] else []
    for image in images:
      *axes, height, width, depth = image.shape
      x = image.reshape(-1, height, width, depth).astype(dtype)
      for stage in reversed(range(len(_halvings(height, width)) - 1)):
        x = Conv(max(1, self.channels >> stage), dtype=dtype)(x)
        x = kernels.silu(LayerNorm(dtype=dtype)(x))
      x = Dense(self.mlp.hidden_size, use_bias=False, dtype=dtype)(x.reshape(*axes, -1))
      features.append(kernels.silu(LayerNorm(dtype=dtype)(x)))
    return jnp.concatenate(features, axis=-1)


class Decoder(nn.Module):
  """An MLP for the numbers, and a transposed CNN for each image.

  Each pixel of each channel has its own bias, which learns the constant parts of images.
  """

  mlp: Any  # for the numbers; its output may be of size 0
  channels: int  # of the first stage's input; each stage but the last halves them
  shapes: tuple[tuple[int, int, int], ...]  # (H, W, C) of each image

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Decodes [..., F] features to [..., D]: the numbers, then each image, flattened row by row."""
    dtype = self.mlp.dtype
    decoded = [self.mlp(x)] if self.mlp.output_size else []
    for *size, depth in self.shapes:
      *sizes, (height, width) = _halvings(*size)
      image = Dense(height * width * self.channels, dtype=dtype)(x.astype(dtype))
      image = image.reshape(-1, height, width, self.channels)
      for stage, (height, width) in enumerate(reversed(sizes), 1):
        image = kernels.silu(LayerNorm(dtype=dtype)(image))
        channels = max(1, self.channels >> stage) if stage < len(sizes) else depth
        image = ConvTranspose(channels, dtype=dtype)(image)[:, :height, :width]
      image = image.reshape(*x.shape[:-1], -1)
      bias = self.param(f'bias_{len(decoded)}', nn.initializers.zeros, image.shape[-1:])
      decoded.append(image + bias.astype(dtype))
    return jnp.concatenate(decoded, axis=-1)


def apply(module: nn.Module, params: Any, *inputs: Any) -> jax.Array:
  """The output of a flax module of which all variables are parameters; `params` is their tree."""
  outputs: Any = module.apply({'params': params}, *inputs)
  return outputs


def cast_kernels(params: Any, dtype: Any) -> Any:
  """Casts the kernels of layers to the dtype in which they are multiplied, as each layer does by itself.

  It is for loops without gradients, which would cast them in each of their steps: 13 of the 230 programs
  that a GPU started for an imagined step of `catch`. A leaf is a kernel if its name is `kernel`.
  """
  is_kernel = lambda path: getattr(path[-1], 'key', None) == 'kernel'
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x.astype(dtype) if is_kernel(path) else x, params
  )


def gru(gates: jax.Array, state: jax.Array, memory_steps: int) -> jax.Array:
  """One step of a GRU, from the pre-activations of its gates.

    candidate = tanh(sigmoid(reset) candidate)      h <- h + sigmoid(update - b) (candidate - h)

  Units forget at different rates: with gates of 0 the time constants form a geometric sequence from
  2 steps to `memory_steps`, by the constants b. Initial gradients then reach observations of long
  ago. Tallec and Ollivier (2018), "Can recurrent neural networks warp time?".

  Args:
    gates: [..., 3 H], reset, candidate and update before their activations, after a layer norm.
    state: [..., H], h, in the dtype of the gates.
    memory_steps: longest time constant, in steps; at least 2.

  Returns:
    [..., H], the next state, in the same dtype.
  """
  reset, candidate, update = jnp.split(gates, 3, axis=-1)
  candidate = jnp.tanh(kernels.sigmoid(reset) * candidate)
  steps = np.geomspace(2, memory_steps, state.shape[-1])
  update = kernels.sigmoid(update - jnp.asarray(np.log(steps - 1), update.dtype))
  return update * candidate + (1 - update) * state
