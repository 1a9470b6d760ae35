"""Multi-layer perceptrons, convolutions for images, and what an observation tree is to them."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

ACTION_MASK = 'action_mask'
"""Where a discrete environment keeps its mask, in an observation that is a dictionary; True is legal."""

SMALLEST_IMAGE = 8
"""Rows and columns: one stage that halves them leaves 4. What is smaller is as good as flat."""

_NARROW = 64  # columns, the most with which a kernel's gradient is sooner made transposed


def symlog(x: jax.Array) -> jax.Array:
  """sign(x) log(1 + |x|); Hafner et al. (2023), equation 9. Of bits it is float32."""
  if x.dtype == bool:
    return jnp.where(x, np.float32(np.log(2)), np.float32(0))
  return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: jax.Array) -> jax.Array:
  """The inverse of `symlog`."""
  return jnp.sign(x) * jnp.expm1(jnp.abs(x))


def _on_cpu() -> bool:
  """Whether XLA compiles for a CPU, where it goes along a row number by number."""
  return jax.default_backend() == 'cpu'


def total(x: jax.Array) -> jax.Array:
  """[..., F] to [...], added up; on a CPU by a product with a vector, in a quarter of the time."""
  return x @ jnp.ones((x.shape[-1],), x.dtype) if _on_cpu() else jnp.sum(x, axis=-1)


def largest(x: jax.Array) -> jax.Array:
  """[..., F] to [...]; on a CPU of pieces beside each other first, in a fifth of the time."""
  size, width = x.shape[-1], 32
  if _on_cpu() and size > width:  # the last piece reaches back into the one before it
    begins = [*range(0, size - width, width), size - width]
    x = functools.reduce(jnp.maximum, [x[..., begin : begin + width] for begin in begins])
  return jnp.max(x, axis=-1)


def _mean(x: jax.Array) -> jax.Array:
  """Over the last axis, kept."""
  return total(x)[..., None] / x.shape[-1]


def centre(kernel: jax.Array) -> jax.Array:
  """[..., I, O], what a row is multiplied by for an output of mean 0: see `normalise`.

  A row's mean is its product with the mean of the columns, which is taken off here for all rows.
  """
  return kernel - _mean(kernel)


def turned(matrix: jax.Array) -> jax.Array:
  """[F, O] to [O, F], for products of a few rows each.

  On a CPU it is written once, in the new order: 16 rows times a matrix that is read across take
  three times as long. The barrier keeps XLA from reading it so all the same.
  """
  return jax.lax.optimization_barrier(matrix.T) if _on_cpu() else matrix.T


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def normalise(x: jax.Array, scale: jax.Array, bias: jax.Array, centred: bool = False) -> jax.Array:
  """[..., F] to mean 0 and variance 1 over the last axis, then scaled and shifted; float32.

  Ba et al. (2016), "Layer normalization", as flax computes it. Its gradient is written out, so that
  means over the last axis stay products: see `total`.

  Args:
    x: [..., F].
    scale: [F] float32.
    bias: [F] float32.
    centred: whether the mean is 0 already, as behind a kernel from `centre`. It is then taken off
      neither x nor its gradient, which loses it on the way through the kernel.
  """
  return _normalise(x, scale, bias, centred)[0]


def _normalise(x: jax.Array, scale: jax.Array, bias: jax.Array, centred: bool):
  x = x.astype(jnp.float32)
  mean = jnp.zeros((), jnp.float32) if centred else _mean(x)
  rate = jax.lax.rsqrt(jnp.maximum(_mean(x * x) - mean * mean, 0) + 1e-6)
  return (x - mean) * rate * scale + bias, (mean, rate)


def _normalise_forward(x: jax.Array, scale: jax.Array, bias: jax.Array, centred: bool):
  normalised, moments = _normalise(x, scale, bias, centred)
  return normalised, (x, *moments, scale)


def _normalise_backward(centred: bool, saved: tuple[jax.Array, ...], grad: jax.Array):
  x, mean, rate, scale = saved
  normal = (x.astype(jnp.float32) - mean) * rate
  scaled = grad * scale
  uncentred = scaled if centred else scaled - _mean(scaled)
  x_grad = (uncentred - normal * _mean(scaled * normal)) * rate
  # By one axis and not by several, which XLA's CPU would also do number by number.
  total = lambda x: jnp.sum(x.reshape(-1, x.shape[-1]), axis=0)
  return x_grad.astype(x.dtype), total(grad * normal), total(grad)


normalise.defvjp(_normalise_forward, _normalise_backward)


def sigmoid(x: jax.Array) -> jax.Array:
  """[...] in [0, 1], to 1e-7 of 1; by a tanh, which XLA's CPU makes in 0.5 to 0.7 of the time."""
  return 0.5 * jnp.tanh(0.5 * x) + 0.5


@jax.custom_vjp
def silu(x: jax.Array) -> jax.Array:
  """[..., F], x sigmoid(x).

  XLA's CPU would write it over x, and goes number by number where it does; of another shape it gets
  memory of its own, and is made in a quarter of the time.
  """
  if _on_cpu() and x.shape[-1] % 2 == 0:
    pieces = x.reshape(*x.shape[:-1], 2, -1)
    return (pieces * sigmoid(pieces)).reshape(x.shape)
  return x * sigmoid(x)


def _silu_forward(x: jax.Array):
  share = sigmoid(x)
  return x * share, (x, share)


def _silu_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array):
  x, share = saved
  return (grad * (share * (1 + x * (1 - share))),)


silu.defvjp(_silu_forward, _silu_backward)

ACTIVATIONS: dict[str, Any] = {'silu': silu, 'relu': nn.relu, 'tanh': nn.tanh}


class LayerNorm(nn.Module):
  """A layer norm whose parameters are those of flax's; see `normalise`.

  Attributes:
    dtype: of what it returns; it computes in float32.
  """

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
    bias = self.param('bias', nn.initializers.zeros, x.shape[-1:])
    return normalise(x, scale, bias).astype(self.dtype)


@jax.custom_vjp
def affine(
  parts: tuple[jax.Array, ...], kernel: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
  """x kernel + bias, where x is the parts side by side, which are never really joined.

  The kernel's gradient is written out, as one product of rows for each part: XLA's CPU would first
  turn the gradient of what is returned around, which took longer than the products. Parts whose
  gradient nobody wants cost none.

  Args:
    parts: [..., I_i] each, of one dtype.
    kernel: [sum of I_i, O], multiplied in the dtype of the parts.
    bias: [O] or None.

  Returns:
    [..., O] in the dtype of the parts; added up in float32.
  """
  dtype = parts[0].dtype
  exact = dtype if len(parts) == 1 else jnp.float32
  multiply = lambda x, kernel: jnp.matmul(x, kernel.astype(dtype), preferred_element_type=exact)
  products = map(multiply, parts, _kernels(parts, kernel))
  product = functools.reduce(jnp.add, products).astype(dtype)
  return product if bias is None else product + bias.astype(dtype)


def _kernels(parts: tuple[jax.Array, ...], kernel: jax.Array) -> list[jax.Array]:
  """The rows of a kernel that each part is multiplied by."""
  ends = np.cumsum([part.shape[-1] for part in parts])
  return jnp.split(kernel, ends[:-1])


def _affine_forward(parts: tuple[jax.Array, ...], kernel: jax.Array, bias: jax.Array | None):
  return affine(parts, kernel, bias), (parts, kernel, bias)


def _affine_backward(saved: tuple[Any, jax.Array, jax.Array | None], grad: jax.Array):
  parts, kernel, bias = saved
  flat = lambda x: x.reshape(-1, x.shape[-1])
  rows = flat(grad)
  if bias is not None and _on_cpu():
    # But for the barrier it would be added up over all axes that were made flat, number by number.
    rows = jax.lax.optimization_barrier(rows)
  kernel_grad = jnp.concatenate([_over_rows(flat(part), rows) for part in parts])
  bias_grad = None if bias is None else rows.sum(axis=0, dtype=jnp.float32).astype(bias.dtype)
  part_grads = tuple(grad @ kernel.astype(grad.dtype).T for kernel in _kernels(parts, kernel))
  return part_grads, kernel_grad.astype(kernel.dtype), bias_grad


def _over_rows(x: jax.Array, grad: jax.Array) -> jax.Array:
  """x^T grad, [I, O] float32, of [rows, I] and [rows, O].

  Of a narrow output XLA's CPU computes the transposed product in less time, half of it for 32; the
  barrier keeps it from being turned back.
  """
  product = functools.partial(
    jax.lax.dot_general, dimension_numbers=(((0,), (0,)), ((), ())),
    preferred_element_type=jnp.float32,
  )  # fmt: skip
  columns = grad.shape[-1]
  if _on_cpu() and columns < x.shape[-1] and columns <= _NARROW:
    return jax.lax.optimization_barrier(product(grad, x)).T
  return product(x, grad)


affine.defvjp(_affine_forward, _affine_backward)


class Dense(nn.Module):
  """A dense layer whose parameters are those of flax's; see `affine`.

  Attributes:
    features: O, of the output.
    use_bias: whether there is one.
    dtype: of the computation; parameters are float32.
    kernel_init: initialiser of the kernel.
  """

  features: int
  use_bias: bool = True
  dtype: Any = jnp.float32
  kernel_init: Any = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, *parts: jax.Array) -> jax.Array:
    size = sum(part.shape[-1] for part in parts)
    kernel = self.param('kernel', self.kernel_init, (size, self.features))
    bias = self.param('bias', nn.initializers.zeros, (self.features,)) if self.use_bias else None
    return affine(tuple(part.astype(self.dtype) for part in parts if part.size), kernel, bias)


class MLP(nn.Module):
  """Dense layers, each followed by a layer norm and an activation, and a linear output.

  Takes any leading axes, [..., F], and several parts as if they were joined along F: see `affine`.
  Matrices are multiplied in `dtype`; parameters are float32.

  Attributes:
    hidden_size: width of the hidden layers.
    num_layers: how many hidden layers.
    output_size: width of the output, or None to stop at the last hidden layer.
    output_scale: initial scale of the output's kernel; 0 starts it at zero.
    dtype: of the computation.
    activation: a key of ACTIVATIONS.
    layer_norm: whether hidden layers are normalised; they have a bias instead if not.
    hidden_init: initialiser of the hidden kernels; None for flax's, LeCun's.
    raw: whether the input is raw numbers: it then gets one more, always 1, without which the first
      layer norm would make x and 2 x look alike.
  """

  hidden_size: int
  num_layers: int
  output_size: int | None = None
  output_scale: float = 1.0
  dtype: Any = jnp.float32
  activation: str = 'silu'
  layer_norm: bool = True
  hidden_init: Any = None
  raw: bool = False

  @nn.compact
  def __call__(self, *parts: jax.Array) -> jax.Array:
    if self.raw:
      parts = (*parts, jnp.ones_like(parts[0][..., :1]))
    axes = parts[0].shape[:-1]
    # One axis of rows: sums over two, as gradients are, XLA's CPU makes number by number.
    parts = tuple(part.reshape(math.prod(axes), part.shape[-1]) for part in parts)
    activate = ACTIVATIONS[self.activation]
    hidden_init = self.hidden_init or nn.initializers.lecun_normal()
    for _ in range(self.num_layers):
      x = Dense(
        self.hidden_size, use_bias=not self.layer_norm, dtype=self.dtype, kernel_init=hidden_init
      )(*parts)
      parts = (activate(LayerNorm(dtype=self.dtype)(x) if self.layer_norm else x),)
    if self.output_size is None:
      (output,) = parts
      return output.reshape(*axes, self.hidden_size)
    kernel_init: Any = nn.initializers.zeros
    if self.output_scale:
      kernel_init = nn.initializers.variance_scaling(
        self.output_scale, 'fan_in', 'truncated_normal'
      )
    output = Dense(self.output_size, dtype=self.dtype, kernel_init=kernel_init)(*parts)
    return output.reshape(*axes, self.output_size)


def _halvings(height: int, width: int) -> list[tuple[int, int]]:
  """Rows and columns before each stage that halves them, and after the last, about 4 or more.

  Odd numbers are rounded up: (63, 63), (32, 32), (16, 16), (8, 8), (4, 4).
  """
  sizes = [(height, width)]
  for _ in range(round(math.log2(min(height, width) / 4))):
    height, width = -(-height // 2), -(-width // 2)
    sizes.append((height, width))
  return sizes


class BoardEncoder(nn.Module):
  """An MLP that reads boards by their cells, through a dense layer which all cells share.

  What becomes of a cell keeps its place, so the MLP still tells the cells apart; it only reads
  fewer numbers of each. Takes any leading axes.

  Attributes:
    mlp: an MLP for the numbers and for what becomes of the cells.
    cell_size: width of the layer.
  """

  mlp: Any
  cell_size: int

  @nn.compact
  def __call__(self, flat: jax.Array, *boards: jax.Array) -> jax.Array:
    """[..., F] numbers, of which there may be none, and [..., cells, features] boards."""
    activate = ACTIVATIONS[self.mlp.activation]
    cells = []
    for board in boards:
      x = board.reshape(-1, board.shape[-1])
      x = Dense(self.cell_size, dtype=self.mlp.dtype, kernel_init=self.mlp.hidden_init)(x)
      cells.append(activate(x).reshape(*board.shape[:-2], -1))
    return self.mlp(*cells, flat)


class Encoder(nn.Module):
  """An MLP for the numbers of an observation and a CNN for each of its images, side by side.

  A stage of a CNN is a convolution of stride 2 and twice the channels, a layer norm and a silu; a
  dense layer of the MLP's width follows the last. Takes any leading axes.

  Attributes:
    mlp: an MLP for the numbers, without an output of its own.
    channels: of the last stage, so that a small image, which has few stages, has no fewer.
  """

  mlp: Any
  channels: int

  @nn.compact
  def __call__(self, flat: jax.Array, *images: jax.Array) -> jax.Array:
    """[..., F] numbers, of which there may be none, and [..., H, W, C] images to [..., features].

    Of the MLP and of each image, joined: as many times the MLP's width.
    """
    dtype = self.mlp.dtype
    features = [self.mlp(flat)] if flat.shape[-1] else []
    for image in images:
      *axes, height, width, depth = image.shape
      x = image.reshape(-1, height, width, depth).astype(dtype)
      for stage in reversed(range(len(_halvings(height, width)) - 1)):
        channels = max(1, self.channels >> stage)
        convolution = nn.Conv(channels, (4, 4), strides=(2, 2), use_bias=False, dtype=dtype)
        x = silu(LayerNorm(dtype=dtype)(convolution(x)))
      x = Dense(self.mlp.hidden_size, use_bias=False, dtype=dtype)(x.reshape(*axes, -1))
      features.append(silu(LayerNorm(dtype=dtype)(x)))
    return jnp.concatenate(features, axis=-1)


class Decoder(nn.Module):
  """The other way round: an MLP for the numbers, and for each image the CNN transposed.

  Each number of an image has a bias of its own, as in an MLP: what is always there.

  Attributes:
    mlp: an MLP for the numbers; its output may be of size 0.
    channels: of the first stage's input; see `Encoder`.
    shapes: (H, W, C) of each image.
  """

  mlp: Any
  channels: int
  shapes: tuple[tuple[int, int, int], ...]

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., F] to [..., D]: the numbers, then those of each image row by row."""
    dtype = self.mlp.dtype
    decoded = [self.mlp(x)] if self.mlp.output_size else []
    for *size, depth in self.shapes:
      *sizes, (height, width) = _halvings(*size)
      image = Dense(height * width * self.channels, dtype=dtype)(x.astype(dtype))
      image = image.reshape(-1, height, width, self.channels)
      for stage, (height, width) in enumerate(reversed(sizes), 1):
        image = silu(LayerNorm(dtype=dtype)(image))
        channels = max(1, self.channels >> stage) if stage < len(sizes) else depth
        convolution = nn.ConvTranspose(
          channels, (4, 4), strides=(2, 2), use_bias=False, dtype=dtype
        )
        image = convolution(image)[:, :height, :width]
      image = image.reshape(*x.shape[:-1], -1)
      bias = self.param(f'bias_{len(decoded)}', nn.initializers.zeros, image.shape[-1:])
      decoded.append(image + bias.astype(dtype))
    return jnp.concatenate(decoded, axis=-1)


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
  """[..., A] bool, the actions that are legal; None in an environment where all always are."""
  return observation.get(ACTION_MASK) if isinstance(observation, dict) else None


def is_image(spec: specs.Array) -> bool:
  """Whether a leaf is [H, W, C] and large enough for a CNN: see SMALLEST_IMAGE."""
  return len(spec.shape) == 3 and min(spec.shape[:2]) >= SMALLEST_IMAGE and spec.shape[2] > 0


def image_specs(spec: Any) -> list[specs.Array]:
  """Of the images of an observation, in the order of its leaves."""
  return [leaf for leaf in jax.tree.leaves(without_mask(spec)) if is_image(leaf)]


def pick_images(observation: Any, spec: Any) -> list[jax.Array]:
  """The images of an observation, [..., H, W, C] in their own dtypes."""
  leaves, leaf_specs = (jax.tree.leaves(without_mask(tree)) for tree in (observation, spec))
  return [x for x, leaf in zip(leaves, leaf_specs, strict=True) if is_image(leaf)]


def images(observation: Any, spec: Any) -> list[jax.Array]:
  """The images of an observation as a CNN reads and decodes them, [..., H, W, C] float32.

  Pixels, whose spec bounds them to [0, 255], become [-0.5, 0.5]; what it bounds to [0, 1] stays as
  it is; all else is symlog, as in a flat observation.
  """

  def read(leaf, spec):
    leaf = leaf.astype(jnp.float32)
    if is_bounded(spec, 0, 255):
      return leaf / 255 - 0.5
    return leaf if is_bounded(spec, 0, 1) else symlog(leaf)

  return list(map(read, pick_images(observation, spec), image_specs(spec)))


def to_observation(flat: jax.Array, images: list[jax.Array], spec: Any) -> Any:
  """The way back: what an observation is whose numbers and images these are.

  Args:
    flat: [..., F] float32, in the observation's own units: no symlog.
    images: [..., H, W, C] float32 each, as `images` gives them; those of the spec that are missing
      here lie in `flat`.
    spec: of the observation.

  Returns:
    A tree like an observation without its mask, [..., *shape] float32 each.
  """
  rest = iter(images)

  def take(leaf: specs.Array) -> jax.Array:
    nonlocal flat
    if images and is_image(leaf):
      image = next(rest)
      if is_bounded(leaf, 0, 255):
        return 255 * (image + 0.5)
      return image if is_bounded(leaf, 0, 1) else symexp(image)
    size = math.prod(leaf.shape)
    part, flat = flat[..., :size], flat[..., size:]
    return part.reshape(*part.shape[:-1], *leaf.shape)

  return jax.tree.map(take, without_mask(spec))


def without_images(spec: Any) -> Any:
  """A spec whose images have no channels, so that a flat observation has none of their numbers."""

  def bare(leaf: specs.Array) -> specs.Array:
    return specs.Array((*leaf.shape[:2], 0), leaf.dtype, leaf.name) if is_image(leaf) else leaf

  return jax.tree.map(bare, spec)


def board_specs(spec: Any) -> list[Any]:
  """Of an observation's leaves that have a `board_shape`: rows, columns, features of a cell.

  They are vectors which end with the cells of a board, row by row.
  """
  return [leaf for leaf in jax.tree.leaves(without_mask(spec)) if hasattr(leaf, 'board_shape')]


def boards(observation: Any, spec: Any) -> list[jax.Array]:
  """The boards of an observation, [..., rows times columns, features] float32, as they are."""

  def read(leaf, spec):
    *_, features = spec.board_shape
    begin = spec.shape[0] - math.prod(spec.board_shape)
    return leaf[..., begin:].reshape(*leaf.shape[:-1], -1, features).astype(jnp.float32)

  leaves, leaf_specs = (jax.tree.leaves(without_mask(tree)) for tree in (observation, spec))
  pairs = zip(leaves, leaf_specs, strict=True)
  return [read(x, leaf) for x, leaf in pairs if hasattr(leaf, 'board_shape')]


def without_boards(spec: Any) -> Any:
  """A spec of what lies before the boards, so that a flat observation has none of their numbers."""

  def bare(leaf: Any) -> specs.Array:
    if not hasattr(leaf, 'board_shape'):
      return leaf
    return specs.Array((leaf.shape[0] - math.prod(leaf.board_shape),), leaf.dtype, leaf.name)

  return jax.tree.map(bare, spec)


def is_bounded(spec: specs.Array, low: float, high: float) -> bool:
  """Whether all numbers of a leaf lie between these bounds and no closer ones, by spec or dtype."""
  if not isinstance(spec, specs.BoundedArray):
    return spec.dtype == np.uint8 and (low, high) == (0, 255)
  return bool(np.all(spec.minimum == low) and np.all(spec.maximum == high))


def join_observation(observation: Any, spec: Any) -> jax.Array:
  """Joins the leaves of an observation (its mask left out) into one vector, as they are.

  Args:
    observation: tree of [..., *shape] arrays.
    spec: the same tree of specs, whose shapes tell the leading axes from the leaf's own. What its
      last axis has no room for is left out: see `without_images` and `without_boards`.

  Returns:
    [..., F] bool if all of it is, else float32.
  """
  leaves = jax.tree.leaves(without_mask(observation))
  shapes = [leaf.shape for leaf in jax.tree.leaves(without_mask(spec))]
  dtype = bool if all(leaf.dtype == bool for leaf in leaves) else jnp.float32
  flat = [
    (leaf[..., : shape[-1]] if shape else leaf)
    .reshape(*leaf.shape[: leaf.ndim - len(shape)], -1)
    .astype(dtype)
    for leaf, shape in zip(leaves, shapes, strict=True)
  ]
  return jnp.concatenate(flat, axis=-1)


def flatten_observation(observation: Any, spec: Any) -> jax.Array:
  """The same, [..., F] symlog float32: what a network reads."""
  return symlog(join_observation(observation, spec))


def unit_range(spec: Any) -> np.ndarray:
  """[F] bool, the numbers of a flattened observation that lie in [0, 1] by their spec."""
  leaves = jax.tree.leaves(without_mask(spec))
  return np.concatenate([np.full(math.prod(leaf.shape), is_bounded(leaf, 0, 1)) for leaf in leaves])


def by_level(number: jax.Array, num_levels: int) -> jax.Array:
  """[...] numbers in [0, 1] to [..., L], two-hot: between two levels, shared by distance."""
  levels = jnp.linspace(0.0, 1.0, num_levels)
  distance = jnp.abs(number[..., None] - levels)
  return jax.nn.relu(1.0 - distance * (num_levels - 1))


def with_levels(
  flat: jax.Array, spec: Any, num_levels: int, *, is_symlog: bool = True
) -> jax.Array:
  """A flattened observation, and beside it its numbers in [0, 1] by levels.

  A network then sees at once which of few values a number has, such as a coordinate of a small
  grid.

  Args:
    flat: [..., F] float32, as `flatten_observation` gives it.
    spec: of the observation.
    num_levels: L, at least 2; or 0 for none.
    is_symlog: whether `flat` is, or else the numbers themselves.

  Returns:
    [..., F + L times the numbers in [0, 1]] float32.
  """
  if not num_levels:
    return flat
  numbers = flat[..., unit_range(spec)]
  shares = by_level(symexp(numbers) if is_symlog else numbers, num_levels)
  return jnp.concatenate([flat, shares.reshape(*flat.shape[:-1], -1)], axis=-1)
