"""Parts that all nodes share, in a process that has loaded the libraries of a node."""

import json
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow  # noqa: F401  it gives the name bfloat16 to a type of its own
import tiny
import trainer

from hephaestus.agents.dreamer import rssm
from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import progress


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


def test_nodes_of_a_run_draw_by_generators_of_their_own_which_its_seed_repeats():
  def draw(seed, node):
    parts_lib.seed_generators(seed, node)
    return np.random.randint(1 << 30), random.random()

  state, words = random.getstate(), np.random.get_state()
  drawn = [draw(seed, node) for seed in (0, 7) for node in (0, 1, 2)]
  again = [draw(seed, node) for seed in (0, 7) for node in (0, 1, 2)]
  random.setstate(state)
  np.random.set_state(words)
  assert drawn == again
  assert all(len(set(numbers)) == 6 for numbers in zip(*drawn, strict=True))


@pytest.mark.parametrize(
  ('lacks', 'shown'),
  [('ppo/entropy', 'entropy -'), ('steps_per_second', 'no progress to show: TypeError')],
)
def test_number_that_cannot_be_shown_ends_no_run(tmp_path, capsys, lacks, shown):
  made = config.of_preset('ppo', 'laptop', 'catch')
  line = progress.Progress(made, tmp_path, starting='starting')
  row = {'time': time.time() + 1, 'learner_step': 1, 'environment_step': 8, 'steps_per_second': 2.0}
  row |= dict.fromkeys(made.record.shown.values(), 0.5) | {lacks: None}
  (tmp_path / 'metrics').mkdir()
  (tmp_path / 'metrics' / 'learner.jsonl').write_text(json.dumps(row) + '\n')
  line.tick()
  assert shown in capsys.readouterr().out
