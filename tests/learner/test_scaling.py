"""Bytes between devices in an update: gradients and little more, for any number of devices."""

import jax
import pytest
import scaling
import tiny as tiny_sizes

from hephaestus.agents.dreamer import modules
from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import presets
from hephaestus.launch.run import parts as parts_lib


@pytest.fixture
def config():
  return launch_config.override(presets.laptop('catch'), tiny_sizes.SHAPES)


def test_devices_exchange_their_gradients_and_metrics(config):
  """`test_dreamer_cognition.py` tests eight devices."""
  of_both = launch_config.override(config, [f'learner.batch_size={2 * config.batch_size}'])
  lowered = scaling.lower(of_both, jax.local_devices()[:2])
  program = scaling.read_program(lowered.as_text(dialect='hlo'), 2)  # compiling takes long
  params = jax.eval_shape(parts_lib.make_parts(config).agent.init_params, jax.random.key(0))
  num_bytes = lambda tree: sum(4 * leaf.size for leaf in jax.tree.leaves(tree))
  moments = dict(params['statistics']['world_model'][modules.NUMBERS])
  del moments['count']
  rest = program.reduced - num_bytes((params['world_model'], params['actor_critic'], moments))
  assert 0 < rest <= 4 * 96  # numbers that metrics are means of
  # Devices gather one return of each start, whose percentiles scale the advantages on all of them.
  assert program.gathered == 4 * config.batch_size * config.agent.starts_per_sequence


def test_collectives_are_read_in_the_text_of_a_program():
  text = """
  %sum = f32[3,4]{1,0:T(8,128)} all-reduce(%x), channel_id=1, to_apply=%add
  %both = (f32[5]{0:T(128)(2,1)}, /*index=1*/bf16[2,2]{1,0}, pred[]) all-reduce-start(%y, %z, %w)
  %all = u8[4,10]{1,0} all-gather(%v), dimensions={0}
  %later = (f32[10]{0}, f32[4,10]{1,0}) all-gather-start(%u), dimensions={0}
  %done = f32[4,10]{1,0} all-gather-done(%later)
  %next = f32[2]{0} collective-permute(%t), source_target_pairs={{0,1}}
  ROOT %other = f32[9]{0} fusion(%all-reduce.1), calls=%add
  """
  program = scaling.read_program(text, 4)
  assert (program.reduced, program.gathered) == (48 + 20 + 8 + 1, 10 + 40)
  assert (program.other_collectives, program.instructions) == (1, 7)


def test_precision_is_read_in_the_text_of_a_program():
  text = """
%fused (p.0: bf16[512,256], p.1: f32[256,512]) -> f32[512,512] {
  %p.0 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = f32[256,512]{1,0} parameter(1)
  %few = bf16[256,3]{1,0} parameter(2)
  %cast = bf16[256,512]{1,0} convert(%p.1)
  %a = f32[512,512]{1,0:T(8,128)} convolution(%p.0, %cast), dim_labels=bf_io->bf
  %b = bf16[512,512]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}
  %head = bf16[512,3]{1,0} dot(%p.0, %few), lhs_contracting_dims={1}
  %c = f32[512]{0} log(%x)
  %d = f32[512]{0:T(512)} exponential(%x)
  ROOT %e = bf16[512]{0} log-plus-one(%x)
}
"""
  program = scaling.read_program(text, 1)
  assert program.products == {'bf16': 1, 'bf16*f32': 1}
  assert program.logarithms == {'f32': 2, 'bf16': 1}
  assert (program.reduced, program.gathered, program.other_collectives) == (0, 0, 0)


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--devices', '2', '99'], '--devices 2 99'),
    (['--size', '2m'], '--size 2m'),
  ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
  assert scaling.main(arguments) == 2
  assert capsys.readouterr().err.startswith(f'scaling: {words}')
