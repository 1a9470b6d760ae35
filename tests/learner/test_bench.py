"""The bench of the update: counted operations, refused input, and libraries left out."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import tiny

from hephaestus.agents.cognition import config as cognition_config
from hephaestus.learner import bench


def test_matrix_products_are_counted_once_per_loop_iteration():
  def program(x, kernel, turns):
    x, _ = jax.lax.scan(lambda x, _: (x @ kernel, None), x, length=3)
    x = jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ kernel @ kernel), x)
    return x.sum() + jax.jit(jnp.matmul)(x, kernel).sum()

  jaxpr = jax.make_jaxpr(program)(jnp.ones((5, 4)), jnp.ones((4, 4)), 7).jaxpr
  once = 2 * 5 * 4 * 4
  assert bench.matmul_flops(jaxpr) == [3 * once + once, 2 * once]


def test_convolution_is_counted_by_the_inputs_of_each_output():
  image, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((4, 4, 3, 6))
  program = lambda image, kernel: jax.lax.conv_general_dilated(
    image, kernel, (2, 2), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  )
  jaxpr = jax.make_jaxpr(program)(image, kernel).jaxpr
  assert bench.matmul_flops(jaxpr) == [2 * (2 * 4 * 4 * 6) * (4 * 4 * 3)]


def test_named_sizes_have_their_documented_numbers():
  one = bench.Work.of_size('1m')
  assert (one.learner.batch_size, one.sequence_length, one.agent.horizon_max) == (16, 64, 15)
  assert one.agent.horizon_min == 15 and one.agent.starts_per_sequence is None
  changed = one.changed(ensemble=1, horizon=8, batch=4, length=5)
  assert (changed.learner.batch_size, changed.sequence_length) == (4, 5)
  agent = changed.agent
  assert (agent.ensemble_size, agent.horizon_max, agent.horizon_min) == (1, 8, 8)
  assert agent.steps_per_chunk == 8
  assert bench.Work.of_size('full').changed(horizon=13).agent.steps_per_chunk == 1


def test_bench_measures_an_update_and_its_phases():
  laptop = bench.Work.of_size('laptop').changed(batch=2, length=4)
  sizes = tiny.DREAMER | {'starts_per_sequence': None}
  agent = cognition_config.CognitionConfig(**sizes)
  work = dataclasses.replace(laptop, agent=agent, name='tiny')
  figures = {
    figure.name: figure for figure in bench.update(work, [0.0, 1.0], seconds=1e-3, phases=True)
  }
  value = lambda name: figures[f'learner/tiny/{name}'].value
  assert [value(f'boredom_{b}/horizon') for b in (0, 1)] == [4, 2]
  seconds = value('boredom_0')
  assert value('boredom_0/replayed') == pytest.approx(2 * 3 / seconds)
  assert value('boredom_0/imagined') == pytest.approx(2 * 4 * 4 / seconds)
  parts = [value(f'boredom_0/phase/{part}') for part in ('world_model', 'dream', 'rest')]
  assert sum(parts) == pytest.approx(seconds)
  products = figures['learner/tiny/boredom_0/matmul']
  assert products.limit == figures['matmul/float32'].value
  assert products.ratio == pytest.approx(products.value / products.limit)
  assert products.value * seconds > figures['learner/tiny/boredom_1/matmul'].value * value(
    'boredom_1'
  )


def test_bench_imports_neither_environments_nor_replay():
  program = (
    'import json, sys; import hephaestus.learner.bench; print(json.dumps(sorted(sys.modules)))'
  )
  found = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=True, timeout=120
  )
  loaded = json.loads(found.stdout)
  modules = {
    '.'.join(name.split('.')[: 2 if name.startswith('hephaestus') else 1]) for name in loaded
  }
  assert 'hephaestus.learner' in modules
  assert not modules & {
    'hephaestus.actors',
    'hephaestus.launch',
    'hephaestus.replay',
    'reverb',
    'launchpad',
    'acme',
    'tensorflow',
  }
