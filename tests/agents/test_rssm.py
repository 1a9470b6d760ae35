"""The RSSM's equations, step by step, equal their fast form along a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import flatten_util

from hephaestus.agents.dreamer import modules, rssm

TOLERANCE = 2e-5
"""A share of the largest number of an array; float32 sums in another order."""


@pytest.mark.parametrize(
  ('env', 'changes'),
  [('pictures', {}), ('grids', {}), ('frames', {'slots': 3, 'slot_size': 4})],
)
def test_observed_steps_are_those_that_are_inferred(
  env, changes, make_dreamer, make_params, make_sequence
):
  """And so are the gradients of all parameters, through all steps."""
  dreamer = make_dreamer(env, **changes)
  model, sequence, params = dreamer.model.rssm, make_sequence(dreamer), make_params(dreamer)
  keys = jax.random.split(jax.random.key(5), sequence.reward.shape[1])

  def observe(params, sequence):
    noise = lambda key: jax.vmap(model.noise)(jax.random.split(key, len(sequence.reward)))
    inputs = (
      sequence.observation,
      model.networks.actions.encode(sequence.action),
      sequence.step_type == rssm.FIRST,
      jax.vmap(noise, out_axes=1)(keys),
    )

    def step(recurrent, inputs):
      observation, action, first, noise = inputs
      observed = model.observe(params, recurrent, observation, first, noise)
      return rssm.Recurrent(observed.latent, action), observed

    _, steps = jax.lax.scan(step, sequence.initial_state, inputs)
    axes = lambda x: jnp.swapaxes(x, 0, 1)  # members before steps
    return steps._replace(priors=jax.tree.map(axes, steps.priors))

  def infer(params, sequence):
    steps = model.infer(params, keys, sequence)._replace(discount=None)
    return steps._replace(latent=steps.latent._replace(inputs=None), earlier=None)

  def judge(steps_of):
    def loss(params, sequence):
      steps = steps_of(params, sequence)
      flat, _ = flatten_util.ravel_pytree(steps._replace(first=()))
      return jnp.cos(jnp.arange(len(flat))) @ flat, steps

    return jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(modules.world(params), sequence))

  def compare(found, expected):
    assert found.shape == expected.shape
    largest = max(1.0, np.abs(np.asarray(expected, np.float32)).max(initial=0.0))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * largest)

  jax.tree.map(compare, judge(infer), judge(observe))
