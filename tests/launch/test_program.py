"""What all nodes agree on, computed beside the libraries that a node has loaded."""

import jax
import jax.numpy as jnp
import pytest
import tensorflow  # noqa: F401  it gives the name bfloat16 to a type of its own

from agents.dreamer import world_model
from launch import config, experiments, program
from learner import dreamer_update


@pytest.mark.parametrize('world', ['catch', 'grid_world'])
@pytest.mark.parametrize('preset', experiments.PRESETS)
def test_the_update_of_every_preset_can_be_built(preset, world):
  made = config.override(experiments.PRESETS[preset](world), ['agent.horizon_min=8'])
  parts = program.make_parts(made)
  update = program.make_update(made, parts, num_devices=1)
  batched = lambda x: jax.ShapeDtypeStruct((1, 2, *x.shape), x.dtype)
  state = jax.eval_shape(update.init, jax.random.key(0))
  replica = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), state)
  step = jax.vmap(update.update, axis_name=dreamer_update.DEVICES)
  after, metrics = jax.eval_shape(step, replica, jax.tree.map(batched, parts.sequence_schema))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
    lambda x: (x.shape, x.dtype), replica
  )
  assert all(value.dtype == jnp.float32 for value in metrics.values())
  latent = parts.sequence_schema.initial_state.latent
  assert isinstance(latent, world_model.Latent)
  assert latent.deterministic.dtype == made.agent.dtype
