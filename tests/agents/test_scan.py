"""The scan with products before the loop and matrix gradients after it equals a plain scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents import kernels

STEPS, BATCH, STATE, INPUT, KNOWN = 5, 3, 4, 2, 3


def step(matrices, known, params, carry, inputs):
  x, kept = inputs
  carry = jnp.where(kept[:, None], carry, 0)
  inner = jnp.tanh(kernels.product([x, carry, known['into']], matrices['into']) + params)
  carry = jnp.tanh(inner @ matrices['out_of'])
  return carry, (carry, inner)


@pytest.fixture
def arguments():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  matrices = {'into': normal(INPUT + STATE + KNOWN, 6), 'out_of': normal(6, STATE)}
  known = {'into': normal(STEPS, BATCH, KNOWN)}
  kept = rng.uniform(size=(STEPS, BATCH)) < 0.7
  return matrices, known, normal(6), normal(BATCH, STATE), (normal(STEPS, BATCH, INPUT), kept)


def test_outputs_and_gradients_equal_a_plain_scan(arguments, unroll=2):
  *given, (x, kept) = arguments

  def loss(scan):
    def of(*given):
      last, (states, inner) = scan(*given[:-1], (given[-1], kept))
      return jnp.sum(last**3) + jnp.sum(states[1] * 2) + jnp.sum(jnp.sin(inner))

    return jax.jit(jax.value_and_grad(of, argnums=range(5)))(*given, x)

  fast, plain = (
    lambda *given, scan=scan: scan(step, unroll, jnp.float32, *given)
    for scan in (kernels.scan, kernels.PLAIN[kernels.scan])
  )
  jax.tree.map(
    lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5),
    loss(fast),
    loss(plain),
  )


def test_matrix_that_is_multiplied_twice_in_a_step_is_refused(arguments):
  def twice(*arguments):
    carry, output = step(*arguments)
    return step(*arguments[:-2], carry, arguments[-1])[0], output

  loss = lambda matrices: kernels.scan(twice, 1, jnp.float32, matrices, *arguments[1:])[0].sum()
  with pytest.raises(ValueError, match='multiplied twice'):
    jax.eval_shape(jax.grad(loss), arguments[0])


def test_matrices_are_multiplied_in_the_given_dtype_and_get_float32_gradients(arguments):
  matrices, *others = arguments
  low = lambda tree: jax.tree.map(
    lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, tree
  )

  def loss(matrices):
    last, _ = kernels.scan(step, 1, jnp.bfloat16, matrices, *map(low, others))
    assert last.dtype == jnp.bfloat16
    return jnp.sum(last.astype(jnp.float32))

  grads = jax.eval_shape(jax.grad(loss), matrices)
  assert {grad.dtype for grad in jax.tree.leaves(grads)} == {jnp.dtype('float32')}
