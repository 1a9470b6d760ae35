"""A scan over steps whose matrices get their gradients after the loop, by one product each."""

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
  step: Step, unroll: int, matrices: dict[str, jax.Array], params: Tree, carry: Tree, inputs: Tree
) -> tuple[Tree, Tree]:
  """`jax.lax.scan` of a step that multiplies by matrices.

  Differentiating a plain scan adds up a gradient of each matrix at every step, each a product over
  one small batch. Here the backward loop only keeps the gradients of the products' outputs. One
  product after the loop multiplies them by the inputs of all steps, which gives the gradient of the
  matrix.

  Args:
    step: (multiply, params, carry, inputs) -> (carry, output), of no other traced values.
      multiply(name, x) is x [B, F] times a matrix in the dtype of x; once for each matrix.
    unroll: steps unrolled in the loop.
    matrices: name -> [F, O] float32.
    params: other parameters of the step, whose gradients are added up step by step.
    carry: into the first step.
    inputs: [T, ...] each.

  Returns:
    The last carry, and the outputs, [T, ...] each.
  """
  product = lambda name, x: x @ matrices[name].astype(x.dtype)
  return jax.lax.scan(functools.partial(step, product, params), carry, inputs, unroll=unroll)


@jax.custom_vjp
def _product(x: jax.Array, shift: jax.Array, matrix: jax.Array, transposed: jax.Array) -> jax.Array:
  """x times the matrix; the gradient goes to the shift, and to x by the transposed matrix."""
  return x @ matrix


_product.defvjp(
  lambda x, shift, matrix, transposed: (x @ matrix, transposed),
  lambda transposed, grad: (grad @ transposed, grad, None, None),
)


def _forward(step: Step, unroll: int, matrices: dict[str, jax.Array], *arguments: Tree):
  params, carry, inputs = arguments

  def products(params, carry, inputs):
    given = {}

    def multiply(name, x):
      given[name] = x @ matrices[name].astype(x.dtype)
      return given[name]

    step(multiply, params, carry, inputs)
    return given

  shapes = jax.eval_shape(products, params, carry, jax.tree.map(lambda x: x[0], inputs))
  num_steps = len(jax.tree.leaves(inputs)[0])
  shifts = {name: jnp.zeros((num_steps, *x.shape), x.dtype) for name, x in shapes.items()}
  transposed = {name: kernels.transposed(matrix) for name, matrix in matrices.items()}

  def run(shifts, params, carry, inputs):
    def tapped(carry, inputs_and_shift):
      inputs, shift = inputs_and_shift
      factors = {}

      def multiply(name, x):
        factors[name] = x
        both = (matrices[name].astype(x.dtype), transposed[name].astype(x.dtype))
        return _product(x, shift[name], *both)

      carry, output = step(multiply, params, carry, inputs)
      return carry, (output, factors)

    carry, (outputs, factors) = jax.lax.scan(tapped, carry, (inputs, shifts), unroll=unroll)
    return (carry, outputs), factors

  result, pull_back, factors = jax.vjp(run, shifts, params, carry, inputs, has_aux=True)
  return result, (pull_back, factors)


def _backward(step: Step, unroll: int, saved: Any, grads: Tree):
  pull_back, factors = saved
  shifts, *others = pull_back(grads)
  product = functools.partial(jnp.einsum, 'tbi,tbo->io', preferred_element_type=jnp.float32)
  return {name: product(factors[name], shift) for name, shift in shifts.items()}, *others


scan.defvjp(_forward, _backward)
