"""`tests/bench/tpu.py`: what is read in a compiled program, and one real topology."""

import importlib.util
import json
import subprocess
import sys

import jax
import pytest
import tpu

FIND_SPEC = importlib.util.find_spec


def test_losses_are_found_among_the_outputs_of_a_program():
  outputs = ({'kernel': 0, 'loss_scale': 0}, {'world_model/loss': 0, 'value_loss': 0, 'horizon': 0})
  text = (
    'HloModule pmap_update, entry_computation_layout={(f32[8]{0:T(8,128)}, s32[])->'
    '(f32[8,1]{1,0:T(8,128)(2,1)}, f32[1], /*index=2*/f32[1], bf16[1]{0}, f32[1])}, num_partitions=1\n'
  )
  order = jax.tree.structure(outputs)  # keys of a dict are sorted: horizon, value_loss, ...
  assert tpu.losses(text, order) == {'f32': 2, 'bf16': 1}


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
@pytest.mark.skipif(FIND_SPEC('libtpu') is None, reason='needs libtpu, of the extra `tpu`')
def test_all_programs_that_a_topology_refuses_are_named_in_one_line():
  command = ['v4:2x2x4', '--programs', 'dreamer-fused', 'ppo']
  done = subprocess.run([sys.executable, tpu.__file__, *command], stderr=subprocess.PIPE, text=True)
  assert done.returncode == 2
  assert done.stderr.count('one host, whose share of the slice is 4 of 16 devices') == 2
  (line,) = done.stderr.splitlines()
  assert 'tpu/v4:2x2x4/dreamer-fused: ' in line


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
@pytest.mark.skipif(FIND_SPEC('libtpu') is None, reason='needs libtpu, of the extra `tpu`')
@pytest.mark.timeout(600)
def test_dreamer_compiles_for_four_chips_in_bfloat16_with_losses_in_float32():
  command = ['v4:2x2x1', '--programs', 'dreamer', 'ppo', '--json']
  done = subprocess.run(
    [sys.executable, tpu.__file__, *command],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  figures = {
    figure['name'].removeprefix('tpu/v4:2x2x1/'): figure for figure in json.loads(done.stdout)
  }
  value = lambda name: figures[name]['value']
  assert value('dreamer/devices') == 4
  assert value('dreamer/products/bf16') > 100 and 'dreamer/products/f32' not in figures
  assert value('dreamer/losses/f32') == 4 and 'dreamer/losses/bf16' not in figures
  assert 'dreamer/logarithms/bf16' not in figures
  assert value('dreamer/other_collectives') == 0
  assert 0 < figures['dreamer/memory']['ratio'] < 0.5
  assert value('ppo/losses/f32') == 2 and 0 < figures['ppo/memory']['ratio'] < 0.5
