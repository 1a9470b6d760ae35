"""Parts that all nodes share, in a process that has loaded the libraries of a node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow  # noqa: F401  it gives the name bfloat16 to a type of its own

from hephaestus.agents.dreamer import rssm
from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import program
from hephaestus.learner import devices
from hephaestus.replay import tables, writer


@pytest.mark.parametrize(
  ('agent', 'preset', 'environment'),
  [
    ('dreamer', 'tpu-v4-8', 'catch'),  # in bfloat16
    ('plain', 'laptop', 'grid_world'),
  ],
)
def test_update_of_preset_has_stable_shapes(agent, preset, environment):
  made = config.of_preset(agent, preset, environment)
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


def test_environment_steps_sum_shards_and_survive_a_stopped_one():
  made = config.override(presets.laptop('catch'), ['replay.num_shards=2', 'replay.warm_up=4'])
  schema = {'x': jax.ShapeDtypeStruct((), np.float32)}
  made_tables = lambda: tables.make_tables(made.replay, schema, batch_size=8, insert_size=1000)
  servers = [tables.make_server(made_tables()) for _ in range(2)]
  addresses = [f'localhost:{server.port}' for server in servers]
  ask = program.environment_steps(made, addresses, 'test')
  assert ask() == 0
  for count, address in zip((3, 5), addresses, strict=True):
    entry = writer.Writer(address, made.replay.strata, schema)
    entry.write({'x': np.zeros(count, np.float32)}, lambda: False)
    entry.close()
  assert ask() == 8 * made.steps_per_sequence
  servers[0].stop()
  assert ask() == ask() == 8 * made.steps_per_sequence
  servers[1].stop()
  assert ask() is None
