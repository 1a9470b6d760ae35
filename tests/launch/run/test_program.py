"""Parts that all nodes share, in a process that has loaded the libraries of a node."""

import jax
import jax.numpy as jnp
import tensorflow  # noqa: F401  it gives the name bfloat16 to a type of its own
import tiny
import trainer

from hephaestus.agents.dreamer import rssm
from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.run import parts as parts_lib


def test_update_in_bfloat16_has_stable_shapes():
  made = config.override(presets.laptop('catch'), [*tiny.RUN, 'agent.compute_dtype=bfloat16'])
  parts = parts_lib.make_parts(made)
  update = made.record.make_update(made, parts.trained, num_devices=1)
  batched = lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
  state = jax.eval_shape(update.init, jax.random.key(0))
  batch = jax.tree.map(batched, parts.sequence_schema)
  after, metrics = trainer.shapes_after(update, state, batch)
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(after) == shapes(state)
  assert all(value.dtype == jnp.float32 for value in metrics.values())
  latent = parts.sequence_schema.initial_state.latent
  assert isinstance(latent, rssm.Latent)
  assert latent.deterministic.dtype == made.agent.dtype
