"""Parts that all nodes share, in a process that has loaded the libraries of a node."""

import jax
import jax.numpy as jnp
import tensorflow  # noqa: F401  it gives the name bfloat16 to a type of its own
import tiny

from hephaestus.agents.dreamer import rssm
from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import devices


def test_update_in_bfloat16_has_stable_shapes():
  made = config.override(presets.laptop('catch'), [*tiny.RUN, 'agent.compute_dtype=bfloat16'])
  parts = parts_lib.make_parts(made)
  update = made.record.make_update(made, parts.trained, num_devices=1)
  batched = lambda x: jax.ShapeDtypeStruct((1, 2, *x.shape), x.dtype)
  state = jax.eval_shape(update.init, jax.random.key(0))
  replica = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), state)
  step = jax.vmap(update.update, axis_name=devices.DEVICES)
  after, metrics = jax.eval_shape(step, replica, jax.tree.map(batched, parts.sequence_schema))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
    lambda x: (x.shape, x.dtype), replica
  )
  assert all(value.dtype == jnp.float32 for value in metrics.values())
  latent = parts.sequence_schema.initial_state.latent
  assert isinstance(latent, rssm.Latent)
  assert latent.deterministic.dtype == made.agent.dtype
