"""`tests/bench/gpu.py`: the count of programs in a compiled program."""

import gpu

PROGRAM = """
%inner (x: f32[]) -> f32[] {
  ROOT %c = f32[] fusion(%x), kind=kLoop, calls=%f
}

%body (x: f32[]) -> f32[] {
  %a = f32[] fusion(%x), kind=kLoop, calls=%f
  %b = (f32[], s8[8]) custom-call(%a), custom_call_target="matmul"
  %t = f32[] get-tuple-element(%b), index=0
  ROOT %w = f32[] while(%t), condition=%go, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

%last (x: f32[]) -> f32[] {
  ROOT %d = f32[] fusion(%x), kind=kInput, calls=%f
}

ENTRY %main (x: f32[]) -> f32[] {
  %a.1 = f32[] fusion(%x), kind=kLoop, calls=%f
  %w.1 = f32[] while(%a.1), condition=%go, body=%body
  ROOT %w.2 = f32[] while(%w.1), condition=%go, body=%last
}
"""


def test_programs_of_nested_loops_count_in_each_of_their_turns():
  assert gpu.started(PROGRAM, [10, 4]) == {'main': 1, 'body': 10 * (2 + 3), 'last': 4}
