"""`tests/bench/scaling.py`: what is read in a compiled program; `test_dreamer_cognition.py` compiles one."""

import pytest
import scaling


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
