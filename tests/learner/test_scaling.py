"""Bytes between devices in an update: gradients and little more, for any number of devices."""

import dataclasses

import jax
import pytest
import scaling
import tiny

from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import modules
from hephaestus.learner import bench


@pytest.fixture(scope='module')
def work():
  laptop = bench.Work.of_size('laptop').changed(batch=2, length=4)
  agent = cognition_config.CognitionConfig(**tiny.DREAMER)
  return dataclasses.replace(laptop, agent=agent, name='tiny')


def test_devices_exchange_their_gradients_and_metrics(work):
  """`test_dreamer_cognition.py` tests eight devices."""
  program = scaling.compile_for(work, 2)
  dreamer = registry.make_dreamer(work.agent, work.observation_spec, work.action_spec)
  params = jax.eval_shape(dreamer.agent.init_params, jax.random.key(0))
  num_bytes = lambda tree: sum(4 * leaf.size for leaf in jax.tree.leaves(tree))
  moments = dict(params['world_model'][modules.STATISTICS])
  del moments['count']
  world = {name: x for name, x in params['world_model'].items() if name not in modules.AVERAGES}
  rest = program.reduced - num_bytes((world, params['actor_critic'], moments))
  assert 0 < rest <= 4 * 96  # numbers that metrics are means of
  starts = work.learner.batch_size * min(
    work.agent.starts_per_sequence or work.sequence_length, work.sequence_length
  )
  # Devices gather one return of each start, whose percentiles scale the advantages on all of them.
  assert program.gathered == 4 * starts


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


def test_missing_devices_are_refused(work):
  with pytest.raises(ValueError, match='--devices 2 99: each must lie in 1 to 8'):
    scaling.scaling(work, [2, 99])


def test_unknown_size_is_named_in_one_line(capsys):
  assert scaling.main(['--size', '2m']) == 2
  assert capsys.readouterr().err.startswith('scaling: --size 2m: choose one of laptop')
