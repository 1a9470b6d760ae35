"""The scan with matrix gradients after the loop equals a plain scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.dreamer import recurrence

STEPS, BATCH, STATE, INPUT = 5, 3, 4, 2


def step(multiply, params, carry, inputs):
  x, kept = inputs
  carry = jnp.where(kept[:, None], carry, 0)
  inner = jnp.tanh(multiply('into', jnp.concatenate([x, carry], axis=-1)) + params)
  carry = jnp.tanh(multiply('out_of', inner))
  return carry, (carry, inner)


def plain(matrices, params, carry, inputs):
  multiply = lambda name, x: x @ matrices[name]
  return jax.lax.scan(lambda carry, x: step(multiply, params, carry, x), carry, inputs)


@pytest.fixture
def arguments():
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  matrices = {'into': normal(INPUT + STATE, 6), 'out_of': normal(6, STATE)}
  kept = jnp.asarray(rng.uniform(size=(STEPS, BATCH)) < 0.7)
  return matrices, normal(6), normal(BATCH, STATE), (normal(STEPS, BATCH, INPUT), kept)


@pytest.mark.parametrize('unroll', [1, 2])
def test_outputs_and_gradients_equal_those_of_a_plain_scan(arguments, unroll):
  matrices, params, carry, (x, kept) = arguments

  def loss(scan):
    def of(matrices, params, carry, x):
      last, (states, inner) = scan(matrices, params, carry, (x, kept))
      return jnp.sum(last**3) + jnp.sum(states[1] * 2) + jnp.sum(jnp.sin(inner))

    return jax.value_and_grad(of, argnums=(0, 1, 2, 3))(matrices, params, carry, x)

  hoisted = lambda *given: recurrence.scan(step, unroll, *given)
  jax.tree.map(
    lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5),
    loss(hoisted),
    loss(plain),
  )


def test_matrices_are_multiplied_in_the_dtype_of_inputs_and_get_float32_gradients(arguments):
  matrices, params, carry, inputs = arguments
  low = lambda tree: jax.tree.map(
    lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree
  )

  def loss(matrices):
    last, _ = recurrence.scan(step, 1, matrices, low(params), low(carry), low(inputs))
    assert last.dtype == jnp.bfloat16
    return jnp.sum(last.astype(jnp.float32))

  grads = jax.grad(loss)(matrices)
  assert {grad.dtype for grad in jax.tree.leaves(grads)} == {jnp.dtype('float32')}
