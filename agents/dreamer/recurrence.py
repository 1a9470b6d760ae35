"""A scan over rows whose matrices get their gradients after the loop, by one product each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hephaestus.agents import kernels

Tree = Any
Multiply = Callable[[str, jax.Array], jax.Array]
Step = Callable[[Multiply, Tree, Tree, Tree], tuple[Tree, Tree]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan(
  step: Step, unroll: int, matrices: dict[str, jax.Array], params: Tree, carry: Tree, rows: Tree
) -> tuple[Tree, Tree]:
  """`jax.lax.scan` of a step that multiplies by matrices.

  Where a loop reads a matrix, its gradient adds a matrix up at every row, each made of a batch's few
  rows. Here the loop backwards only keeps the gradient of what each product gave; multiplied by what
  all rows gave to it, in one product after the loop, it is the matrix's gradient.

  Args:
    step: (multiply, params, carry, row) -> (carry, output), of no traced values but these.
      multiply(name, x) is x [B, F] times a matrix in the dtype of x, and may be called once for each.
    unroll: rows compiled in a line.
    matrices: name -> [F, O] float32.
    params: what else the step reads, whose gradient is added up row by row.
    carry: into the first row.
    rows: [T, ...] each.

  Returns:
    The last carry, and the outputs, [T, ...] each.
  """
  product = lambda name, x: x @ matrices[name].astype(x.dtype)
  return jax.lax.scan(functools.partial(step, product, params), carry, rows, unroll=unroll)


@jax.custom_vjp
def _product(x: jax.Array, shift: jax.Array, matrix: jax.Array, turned: jax.Array) -> jax.Array:
  """x times the matrix, whose gradient is the shift's, too; x gets its own by the matrix turned."""
  return x @ matrix


_product.defvjp(
  lambda x, shift, matrix, turned: (x @ matrix, turned),
  lambda turned, grad: (grad @ turned, grad, None, None),
)


def _forward(step: Step, unroll: int, matrices: dict[str, jax.Array], *arguments: Tree):
  params, carry, rows = arguments

  def products(params, carry, row):
    given = {}

    def multiply(name, x):
      given[name] = x @ matrices[name].astype(x.dtype)
      return given[name]

    step(multiply, params, carry, row)
    return given

  shapes = jax.eval_shape(products, params, carry, jax.tree.map(lambda x: x[0], rows))
  num_rows = len(jax.tree.leaves(rows)[0])
  shifts = {name: jnp.zeros((num_rows, *x.shape), x.dtype) for name, x in shapes.items()}
  turned = {name: kernels.turned(matrix) for name, matrix in matrices.items()}

  def run(shifts, params, carry, rows):
    def tapped(carry, row):
      row, shift = row
      inputs = {}

      def multiply(name, x):
        inputs[name] = x
        both = (matrices[name].astype(x.dtype), turned[name].astype(x.dtype))
        return _product(x, shift[name], *both)

      carry, output = step(multiply, params, carry, row)
      return carry, (output, inputs)

    carry, (outputs, inputs) = jax.lax.scan(tapped, carry, (rows, shifts), unroll=unroll)
    return (carry, outputs), inputs

  result, pull_back, inputs = jax.vjp(run, shifts, params, carry, rows, has_aux=True)
  return result, (pull_back, inputs)


def _backward(step: Step, unroll: int, saved: Any, grads: Tree):
  pull_back, inputs = saved
  shifts, *others = pull_back(grads)
  product = functools.partial(jnp.einsum, 'tbi,tbo->io', preferred_element_type=jnp.float32)
  return {name: product(inputs[name], shift) for name, shift in shifts.items()}, *others


scan.defvjp(_forward, _backward)
