"""Kernels equal their plain forms, in values and gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents import kernels, networks


def random(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


ARGUMENTS = {
  kernels.total: [(random(3, 4, 70),)],
  kernels.largest: [(random(3, 4, 70),), (random(3, 9),)],
  kernels.transposed: [(random(5, 7),)],
  kernels.concatenate: [([random(3, 4), random(3, 2)],)],
  kernels.sigmoid: [(np.float32(20) * random(4, 6),)],
  kernels.silu: [(np.float32(20) * random(4, 6),), (np.float32(20) * random(4, 5),), (random(2),)],
  kernels.normalise: [(np.float32(3) + random(4, 3, 40), random(40), random(40))],
  kernels.affine: [
    ((random(3, 4, 5),), random(5, 6), random(6)),
    ((random(3, 2), random(3, 4)), random(6, 100)),
    ((random(50, 80),), random(80, 32), random(32)),
  ],
  kernels.halve: [
    (random(2, 8, 6, 3), random(4, 4, 3, 5)),
    (random(2, 7, 9, 2), random(4, 4, 2, 3)),  # odd sizes
  ],
  kernels.double: [(random(2, 4, 5, 3), random(4, 4, 3, 2))],
}


# Elsewhere the other kernels are their plain forms.
@pytest.mark.parametrize(
  ('kernel', 'platform'),
  [*((kernel, 'cpu') for kernel in ARGUMENTS), (kernels.normalise, 'gpu')],
  ids=lambda given: getattr(given, '__name__', given),
)
def test_kernel_and_its_gradient_equal_the_plain_form(kernel, platform):
  def judge(arguments):
    loss = lambda function, arguments: jnp.sum(jnp.sin(function(*arguments)))
    found = lambda function: (
      function(*arguments),  # without a gradient, which may have a form of its own
      jax.value_and_grad(loss, 1)(function, arguments),
    )
    return found(kernel), found(kernels.PLAIN[kernel])

  with kernels.compiled_for(platform):
    for arguments in ARGUMENTS[kernel]:
      jax.tree.map(
        lambda found, plain: np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4),
        *jax.jit(judge)(arguments),
      )


def test_barriers_are_for_the_platform_that_is_compiled_for():
  programs = {}
  for platform in ('cpu', 'tpu'):
    with kernels.compiled_for(platform):
      grad = jax.grad(lambda parts, kernel, bias: kernels.affine(parts, kernel, bias).sum(), (1, 2))
      programs[platform] = str(jax.make_jaxpr(grad)((random(5, 70),), random(70, 6), random(6)))
  assert 'optimization_barrier' in programs['cpu']
  assert 'optimization_barrier' not in programs['tpu']


def test_layer_norm_in_bfloat16_and_its_gradient_equal_flax():
  dtype, rng = jnp.bfloat16, np.random.default_rng(0)
  x = (3 + rng.normal(size=(4, 3, 40))).astype(dtype)
  params = {name: rng.normal(size=40).astype(np.float32) for name in ('scale', 'bias')}

  def loss(norm):
    def of(x, params):
      y = norm.apply({'params': params}, x)
      assert y.dtype == dtype
      return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return jax.device_get(jax.jit(jax.value_and_grad(of, argnums=(0, 1)))(x, params))

  jax.tree.map(
    lambda found, expected: np.testing.assert_allclose(
      found.astype(np.float32), expected.astype(np.float32), rtol=5e-2, atol=5e-2
    ),
    loss(networks.LayerNorm(dtype=dtype)),
    loss(nn.LayerNorm(dtype=dtype)),
  )


def test_layer_norm_behind_a_centred_kernel_needs_no_mean():
  rng = np.random.default_rng(0)
  arrays = [rng.normal(size=size).astype(np.float32) for size in ((5, 7), (7, 40), 40, 40)]

  def plain(x, kernel, *norm):
    return jnp.sum(jnp.sin(kernels.normalise(x @ kernel, *norm)))

  def centred(x, kernel, *norm):
    return jnp.sum(jnp.sin(kernels.normalise(x @ kernels.centre(kernel), *norm, centred=True)))

  of = lambda loss: jax.jit(jax.value_and_grad(loss, argnums=range(4)))(*arrays)
  same = lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  jax.tree.map(same, of(centred), of(plain))
