"""Faster forms of common operations on XLA's CPU backend, each equal to its plain form, in PLAIN or its test.

Each is a plain formula on accelerators. On a CPU, XLA reduces the last axis of an array number by
number, and transposes arrays where a transposed product would do. Docstrings name measured gains.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

Tree = Any
Step = Callable[[Tree, Tree, Tree, Tree, Tree], tuple[Tree, Tree]]  # see `scan`
_NARROW = 64
"""Columns up to which a kernel's gradient is a transposed product, and rows are not cut in halves."""
_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar('platform', default=None)


@contextlib.contextmanager
def compiled_for(platform: str) -> Iterator[None]:
  """Context in which functions are traced for `platform`; elsewhere for JAX's default backend.

  Platforms have names as in `jax.Device.platform`. A function that `jax.jit` has traced is not traced
  again, so each platform needs a function object of its own.
  """
  token = _PLATFORM.set(platform)
  try:
    yield
  finally:
    _PLATFORM.reset(token)


def on_cpu() -> bool:
  """Whether the function that is being traced will run on a CPU; see `compiled_for`."""
  return (_PLATFORM.get() or jax.default_backend()) == 'cpu'


def on_gpu() -> bool:
  """As `on_cpu`, for GPUs."""
  return (_PLATFORM.get() or jax.default_backend()) in ('gpu', 'cuda', 'rocm')


def total(x: jax.Array) -> jax.Array:
  """Sum over the last axis, [..., F] to [...]; on a CPU a product with ones, in a quarter of the time."""
  return x @ jnp.ones((x.shape[-1],), x.dtype) if on_cpu() else jnp.sum(x, axis=-1)


def largest(x: jax.Array) -> jax.Array:
  """Maximum over the last axis, [..., F] to [...]; on a CPU piece by piece, in a fifth of the time."""
  size, width = x.shape[-1], 32
  if on_cpu() and size > width:  # the last piece reaches back into the one before it
    begins = [*range(0, size - width, width), size - width]
    x = functools.reduce(jnp.maximum, [x[..., begin : begin + width] for begin in begins])
  return jnp.max(x, axis=-1)


def _mean(x: jax.Array) -> jax.Array:
  """[..., F] to [..., 1], the mean."""
  return total(x)[..., None] / x.shape[-1]


def centre(kernel: jax.Array) -> jax.Array:
  """Centres a kernel [..., I, O], so that x @ kernel has mean 0 over O: see `centred` of `normalise`.

  The mean of a product over O is the product with the mean column, which is subtracted here once.
  """
  return kernel - _mean(kernel)


def transposed(matrix: jax.Array) -> jax.Array:
  """Transposes a matrix, [F, O] to [O, F], for products with small batches.

  On a CPU the transposed matrix is written to memory once, since the product of a batch of 16 with
  a strided matrix takes three times as long. The barrier keeps XLA from fusing the transposition.
  """
  return jax.lax.optimization_barrier(matrix.T) if on_cpu() else matrix.T


def concatenate(parts: list[jax.Array]) -> jax.Array:
  """Concatenates arrays along their last axis, [..., I_i] each to [..., sum of I_i].

  On a CPU without the barrier, XLA would compute functions of a slice of the result in place, over one
  of the parts, and number by number: the gates of a GRU took five times as long.
  """
  if len(parts) == 1:
    return parts[0]
  joined = jnp.concatenate(parts, axis=-1)
  return jax.lax.optimization_barrier(joined) if on_cpu() else joined


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def normalise(x: jax.Array, scale: jax.Array, bias: jax.Array, centred: bool = False) -> jax.Array:
  """Layer norm: [..., F] to mean 0 and variance 1 over F, then scaled and shifted; [..., F] float32.

  Ba et al. (2016), "Layer normalization", as flax computes it. The gradient is written out, so that
  means over the last axis are products: see `total`. If x is `centred`, as after a kernel from `centre`,
  no mean is subtracted from it, nor from its gradient: the gradient of `centre` subtracts the latter.
  """
  if on_gpu():
    # XLA makes one program of this form where no gradient is taken, and three of the other one.
    x = x.astype(jnp.float32)
    x = x if centred else x - _mean(x)
    return x * jax.lax.rsqrt(_mean(x * x) + 1e-6) * scale + bias
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
  # On one flat axis, since XLA's CPU computes sums over several axes number by number.
  total = lambda x: jnp.sum(x.reshape(-1, x.shape[-1]), axis=0)
  return x_grad.astype(x.dtype), total(grad * normal), total(grad)


normalise.defvjp(_normalise_forward, _normalise_backward)


def sigmoid(x: jax.Array) -> jax.Array:
  """Logistic sigmoid by tanh, [...]: within 1e-7 of JAX's, in 0.5 to 0.7 of its time on XLA's CPU."""
  return 0.5 * jnp.tanh(0.5 * x) + 0.5


@jax.custom_vjp
def silu(x: jax.Array) -> jax.Array:
  """SiLU activation, x sigmoid(x), [..., F] in the dtype of x.

  XLA's CPU would compute it in place, number by number. A different shape forces a separate buffer,
  which takes a quarter of the time: halves of rows, or half of the rows where these are narrow.
  """
  is_narrow = x.shape[-1] <= _NARROW
  if on_cpu() and x.shape[0 if is_narrow else -1] % 2 == 0:
    halves = x.reshape((2, -1, *x.shape[1:]) if is_narrow else (*x.shape[:-1], 2, -1))
    return (halves * sigmoid(halves)).reshape(x.shape)
  return x * sigmoid(x)


def _silu_forward(x: jax.Array):
  share = sigmoid(x)
  return x * share, (x, share)


def _silu_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array):
  x, share = saved
  return (grad * (share * (1 + x * (1 - share))),)


silu.defvjp(_silu_forward, _silu_backward)


@jax.custom_vjp
def affine(
  parts: tuple[jax.Array, ...], kernel: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
  """x kernel + bias, where x is the concatenation of the parts, without concatenating them.

  The kernel's gradient is written out, as one product for each part: XLA's CPU would first
  transpose the gradient of the output, which took longer than the products. Unused gradients of
  parts are not computed.

  Args:
    parts: [..., I_i] each, of one dtype.
    kernel: [sum of I_i, O], multiplied in the dtype of the parts.
    bias: [O] or None.

  Returns:
    [..., O] in the dtype of the parts; the products of several parts are summed in float32.
  """
  dtype = parts[0].dtype
  exact = dtype if len(parts) == 1 else jnp.float32
  multiply = lambda x, kernel: jnp.matmul(x, kernel.astype(dtype), preferred_element_type=exact)
  products = map(multiply, parts, _kernels(parts, kernel))
  product = functools.reduce(jnp.add, products).astype(dtype)
  return product if bias is None else product + bias.astype(dtype)


def _kernels(parts: tuple[jax.Array, ...], kernel: jax.Array) -> list[jax.Array]:
  """Splits a kernel [sum of I_i, O] into kernels [I_i, O], one for each part."""
  ends = np.cumsum([part.shape[-1] for part in parts])
  return jnp.split(kernel, ends[:-1])


def _affine_forward(parts: tuple[jax.Array, ...], kernel: jax.Array, bias: jax.Array | None):
  return affine(parts, kernel, bias), (parts, kernel, bias)


def _affine_backward(saved: tuple[Any, jax.Array, jax.Array | None], grad: jax.Array):
  parts, kernel, bias = saved
  flat = lambda x: x.reshape(-1, x.shape[-1])
  flat_grad = flat(grad)
  if bias is not None and on_cpu():
    # Without the barrier XLA would sum over the original axes, number by number.
    flat_grad = jax.lax.optimization_barrier(flat_grad)
  kernel_grad = jnp.concatenate([_over_batch(flat(part), flat_grad) for part in parts])
  bias_grad = None if bias is None else flat_grad.sum(axis=0, dtype=jnp.float32).astype(bias.dtype)
  part_grads = tuple(grad @ kernel.astype(grad.dtype).T for kernel in _kernels(parts, kernel))
  return part_grads, kernel_grad.astype(kernel.dtype), bias_grad


def _over_batch(x: jax.Array, grad: jax.Array) -> jax.Array:
  """x^T grad, [I, O] float32, of x [N, I] and grad [N, O].

  For a narrow output XLA's CPU computes the transposed product in less time, half for 32 columns.
  The barrier keeps XLA from transposing it back.
  """
  product = functools.partial(
    jax.lax.dot_general, dimension_numbers=(((0,), (0,)), ((), ())),
    preferred_element_type=jnp.float32,
  )  # fmt: skip
  columns = grad.shape[-1]
  if on_cpu() and columns < x.shape[-1] and columns <= _NARROW:
    return jax.lax.optimization_barrier(product(grad, x)).T
  return product(x, grad)


affine.defvjp(_affine_forward, _affine_backward)


class _Recording:
  """A matrix in `scan` that records its factor x; the gradient of x @ matrix becomes the gradient of `shift`."""

  def __init__(self, matrix: jax.Array, transposed: jax.Array, shift: jax.Array):
    self._matrix, self._transposed, self._shift = matrix, transposed, shift
    self.factor: Any = None

  def __rmatmul__(self, x: jax.Array) -> jax.Array:
    if self.factor is not None:
      raise ValueError('a matrix of `scan` is multiplied twice in one step; give it twice')
    self.factor = x
    return _recorded(x, self._shift, self._matrix, self._transposed)


@jax.custom_vjp
def _recorded(
  x: jax.Array, shift: jax.Array, matrix: jax.Array, transposed: jax.Array
) -> jax.Array:
  """x @ matrix; its gradient g becomes the gradient of `shift`, and g @ transposed the gradient of x."""
  return x @ matrix


_recorded.defvjp(
  lambda x, shift, matrix, transposed: (x @ matrix, transposed),
  lambda transposed, grad: (grad @ transposed, grad, None, None),
)


class Term(NamedTuple):
  """The last part of a `product`, multiplied by its rows of the matrix already."""

  product: jax.Array  # [..., O]


def hoist(matrix: jax.Array, x: jax.Array) -> tuple[jax.Array, Term]:
  """Multiplies x [..., I] by the I rows at the end of a matrix [F, O]; returns the others, and the `Term`."""
  matrix, rows = jnp.split(matrix, [len(matrix) - x.shape[-1]])
  return matrix, Term(x @ rows.astype(x.dtype))


def product(parts: list[Any], matrix: jax.Array) -> jax.Array:
  """x @ matrix, [..., O], where x is the concatenation of the parts, [..., I_i] each, of one dtype.

  The last of several parts is multiplied apart. It may be a `Term`, whose rows the matrix then lacks.
  """
  *others, last = parts
  if not others:
    return last @ matrix
  if not isinstance(last, Term):
    matrix, last = hoist(matrix, last)
  return concatenate(others) @ matrix + last.product


def scan(
  step: Step, unroll: int, dtype: Any, matrices: Tree, known: dict[str, jax.Array], params: Tree,
  carry: Tree, inputs: Tree,
) -> tuple[Tree, Tree]:  # fmt: skip
  """`jax.lax.scan` over a step with products of matrices, of which few are in the loop.

  Rows of a matrix whose inputs at all steps are known before the loop are multiplied there, in one
  product. Matrices get their gradients in one product after the backward loop: differentiating a plain
  scan adds up a gradient of each matrix at every step, each a product over one small batch. Here the
  backward loop only keeps the gradients of the products' outputs.

  Args:
    step: (matrices, known, params, carry, inputs) -> (carry, output), which closes over no traced
      values. It computes `product(parts, matrix)` exactly once for each matrix, with the `known` of
      the matrix, if any, as the last part.
    unroll: number of steps unrolled in the loop.
    dtype: dtype in which matrices are multiplied; their gradients are float32.
    matrices: [F, O] float32 by name.
    known: [T, B, F'] in `dtype` by the names of some matrices, their last inputs.
    params: other parameters of the step, whose gradients are added up step by step.
    carry: carry into the first step, a tree of [B, ...] arrays.
    inputs: tree of [T, ...] arrays.

  Returns:
    The last carry, and the outputs of all steps, a tree of [T, ...] arrays.

  Raises:
    ValueError: under differentiation, a step that multiplies by one matrix twice.
  """
  terms = {}
  for name, x in known.items():
    matrix, terms[name] = hoist(matrices[name], x)
    matrices = matrices | {name: matrix}
  return _scan(step, unroll, dtype, matrices, params, carry, (terms, inputs))


def _plain_scan(step, unroll, dtype, matrices, known, params, carry, inputs):
  matrices = jax.tree.map(lambda matrix: matrix.astype(dtype), matrices)
  plain = lambda carry, both: step(matrices, both[0], params, carry, both[1])
  return jax.lax.scan(plain, carry, (known, inputs), unroll=unroll)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scan(
  step: Step, unroll: int, dtype: Any, matrices: Tree, params: Tree, carry: Tree, inputs: Tree
) -> tuple[Tree, Tree]:
  return _plain_scan(step, unroll, dtype, matrices, inputs[0], params, carry, inputs[1])


def _scan_forward(step: Step, unroll: int, dtype: Any, matrices: Tree, *arguments: Tree):
  matrices = jax.tree.map(lambda matrix: matrix.astype(dtype), matrices)
  num_steps, batch = (len(jax.tree.leaves(tree)[0]) for tree in (arguments[2], arguments[1]))
  shifts = jax.tree.map(
    lambda matrix: jnp.zeros((num_steps, batch, matrix.shape[1]), dtype), matrices
  )
  transposes = jax.tree.map(transposed, matrices)

  def run(shifts, params, carry, inputs):
    def recorded(carry, inputs_and_shifts):
      (terms, inputs), shifts = inputs_and_shifts
      recording = jax.tree.map(_Recording, matrices, transposes, shifts)
      carry, output = step(recording, terms, params, carry, inputs)
      return carry, (output, jax.tree.map(lambda matrix: matrix.factor, recording))

    carry, (outputs, factors) = jax.lax.scan(recorded, carry, (inputs, shifts), unroll=unroll)
    return (carry, outputs), factors

  result, pull_back, factors = jax.vjp(run, shifts, *arguments, has_aux=True)
  return result, (pull_back, factors)


def _scan_backward(step: Step, unroll: int, dtype: Any, saved: Any, grads: Tree):
  pull_back, factors = saved
  shifts, *others = pull_back(grads)
  over_steps = functools.partial(jnp.einsum, 'tbi,tbo->io', preferred_element_type=jnp.float32)
  return jax.tree.map(over_steps, factors, shifts), *others


_scan.defvjp(_scan_forward, _scan_backward)


def halve(images: jax.Array, kernel: jax.Array) -> jax.Array:
  """Convolution of stride 2, as `flax.linen.Conv` with padding SAME: [N, H, W, C] to [N, H / 2, W / 2, O].

  Kernels are [4, 4, C, O]; odd H and W are rounded up. XLA's CPU backend runs convolutions in a loop, such
  as that over the updates of a fused run, on one number at a time. There it is a product of patches: with
  its gradient in a tenth of the time.
  """
  if not on_cpu():
    return _plain_halve(images, kernel)
  batch, height, width, depth = images.shape
  rows, columns = -(-height // 2), -(-width // 2)
  edges = ((0, 0), (1, 2 * rows + 1 - height), (1, 2 * columns + 1 - width), (0, 0))
  padded = jnp.pad(images, edges)
  # Blocks of 2 x 2 pixels, of which each patch of 4 x 4 has 2 x 2.
  blocks = padded.reshape(batch, rows + 1, 2, columns + 1, 2, depth).transpose(0, 1, 3, 2, 4, 5)
  patches = windows(blocks.reshape(batch, rows + 1, columns + 1, 4 * depth), 2)
  kernel = kernel.reshape(2, 2, 2, 2, *kernel.shape[2:]).transpose(0, 2, 1, 3, 4, 5)
  return patches @ kernel.reshape(16 * depth, -1)


def double(images: jax.Array, kernel: jax.Array) -> jax.Array:
  """Transposed convolution of stride 2, as `flax.linen.ConvTranspose`: [N, H, W, C] to [N, 2 H, 2 W, O].

  Kernels are [4, 4, C, O]. On a CPU a product of patches, for the reason in `halve`.
  """
  if not on_cpu():
    return _plain_double(images, kernel)
  batch, height, width, depth = images.shape
  patches = windows(jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0))), 2)
  # Row 2 t + p reads patch t + p by kernel rows p and 2 + p; columns likewise.
  kernel = kernel.reshape(2, 2, 2, 2, *kernel.shape[2:]).transpose(0, 2, 4, 1, 3, 5)
  products = patches @ kernel.reshape(4 * depth, -1)
  products = products.reshape(batch, height + 1, width + 1, 2, 2, -1)
  rows = [
    jnp.stack([products[:, p : p + height, q : q + width, p, q] for q in (0, 1)], axis=3)
    for p in (0, 1)
  ]
  return jnp.stack(rows, axis=2).reshape(batch, 2 * height, 2 * width, -1)


def windows(x: jax.Array, size: int) -> jax.Array:
  """All windows of size x size of [N, H, W, C]: [N, H - size + 1, W - size + 1, size * size * C]."""
  height, width = (side - size + 1 for side in x.shape[1:3])
  parts = [x[:, i : i + height, j : j + width] for i in range(size) for j in range(size)]
  return jnp.concatenate(parts, axis=-1)


def _plain_halve(images: jax.Array, kernel: jax.Array) -> jax.Array:
  dimensions = ('NHWC', 'HWIO', 'NHWC')
  return jax.lax.conv_general_dilated(images, kernel, (2, 2), 'SAME', dimension_numbers=dimensions)


def _plain_double(images: jax.Array, kernel: jax.Array) -> jax.Array:
  return jax.lax.conv_transpose(images, kernel, (2, 2), 'SAME')


PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {
  total: lambda x: jnp.sum(x, axis=-1),
  largest: lambda x: jnp.max(x, axis=-1),
  transposed: lambda x: x.T,
  concatenate: lambda parts: jnp.concatenate(parts, axis=-1),
  sigmoid: nn.sigmoid,
  silu: nn.silu,
  normalise: lambda x, scale, bias: jax.nn.standardize(x, epsilon=1e-6) * scale + bias,
  affine: lambda parts, kernel, bias=0.0: jnp.concatenate(parts, axis=-1) @ kernel + bias,
  scan: _plain_scan,
  halve: _plain_halve,
  double: _plain_double,
}
"""Plain form of each kernel, which takes the same arguments; the tests compare the two."""
