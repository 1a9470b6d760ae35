"""Traces of updates: sums by hand, restarts, and a full disk."""

import json

import jax
import jax.numpy as jnp
import pytest

from hephaestus.learner import profile

HOST, GPU = 1, 2


def event(name, begin, duration, *, operation=True, pid=HOST, tid=1):
  arguments = {'args': {'hlo_op': name, 'hlo_module': 'jit_f'}} if operation else {}
  return {'ph': 'X', 'name': name, 'pid': pid, 'tid': tid, 'ts': begin, 'dur': duration} | arguments


def test_nested_operations_count_once_and_gaps_are_idle():
  made = profile.summarise(
    [
      event(profile.PROFILED, 1000.0, 1000.0, operation=False),
      event('ThunkExecutor::Execute', 1000.0, 900.0, operation=False),
      # A loop with two products in it, the second with a part of its own.
      event('while.7', 1000.0, 400.0),
      event('dot.83', 1050.0, 100.0),
      event('dot.2', 1200.0, 150.0),
      event('fusion.3.clone', 1250.0, 50.0),
      # At the same time another thread.
      event('dot.2', 1300.0, 200.0, tid=2),
      # It waits for 300, of which the device was busy for 100.
      event('wait for replay', 1400.0, 300.0, operation=False, tid=3),
    ]
  )
  assert made.complete
  assert made.seconds == pytest.approx(1e-3)
  assert made.idle == pytest.approx(500e-6)  # 1000 to 1500 is busy
  assert made.waited == pytest.approx(200e-6)
  found = {each.name: (each.seconds, each.calls) for each in made.operations}
  assert found == {
    'dot': (pytest.approx(400e-6), 3),
    'while': (pytest.approx(150e-6), 1),
    'fusion': (pytest.approx(50e-6), 1),
  }
  assert [each.name for each in made.operations] == ['dot', 'while', 'fusion']


def test_only_the_operations_line_of_an_accelerator_counts():
  name = lambda pid, text: {'ph': 'M', 'name': 'process_name', 'pid': pid, 'args': {'name': text}}
  line = {'ph': 'M', 'name': 'thread_name', 'pid': GPU, 'tid': 9, 'args': {'name': 'XLA Ops'}}
  events = [
    name(HOST, '/host:CPU'),
    name(GPU, '/device:GPU:0'),
    event('fusion.1', 0.0, 80.0),
    event('fusion.1', 20.0, 30.0, pid=GPU, tid=1),
  ]
  of_stream = profile.summarise(events)
  assert [(each.seconds, each.calls) for each in of_stream.operations] == [
    (pytest.approx(30e-6), 1)
  ]
  both = profile.summarise([*events, line, event('fusion.1', 20.0, 30.0, pid=GPU, tid=9)])
  assert both.operations == of_stream.operations


def test_trace_with_dropped_events_is_reported_incomplete(monkeypatch):
  monkeypatch.setattr(profile, '_MOST_EVENTS', 3)
  made = profile.summarise(
    [
      event(profile.PROFILED, 0.0, 1000.0, operation=False),
      event('dot.1', 0.0, 50.0),
      event('dot.1', 100.0, 50.0),
    ]
  )
  assert not made.complete
  assert made.seconds == pytest.approx(100e-6)
  assert made.idle == pytest.approx(50e-6)


@pytest.fixture
def work():
  """A compiled program, run at every step."""

  @jax.jit
  def product(x):
    return x @ x

  ones = product(jnp.ones((8, 8)))
  return lambda: product(ones).block_until_ready()


def go(profiler, work, steps):
  for step in steps:
    profiler.reach(step)
    work()
  profiler.close(steps[-1] + 1)


def test_span_is_traced_once_and_reported(tmp_path, work):
  span = profile.Span(3, 5)
  folder = span.folder(tmp_path)
  go(profile.Profiler(span, folder / 'learner'), work, range(8))
  go(profile.Profiler(span, folder / 'actor-0', late=True, most=2), work, range(6, 11))
  text = profile.report(span, tmp_path)
  assert text == profile.report(span, tmp_path)
  assert (folder / 'summary.txt').read_text().splitlines() == text.splitlines()[:-2]
  learner, actor = text.split('\n\n')[:2]
  assert learner.startswith('learner, updates 3 to 5: ') and ' ms each; no operation' in learner
  assert actor.startswith('actor-0, versions 7 to 8: ')  # what it did first is compiled
  product = next(line.split() for line in learner.splitlines() if line.startswith('dot'))
  assert product[4:] == ['2', 'jit_product']
  # Another learner takes its place: what is done is done.
  before = (folder / 'learner' / 'done.json').stat().st_mtime_ns
  go(profile.Profiler(span, folder / 'learner'), work, range(2, 8))
  assert (folder / 'learner' / 'done.json').stat().st_mtime_ns == before


def test_learner_resumed_within_the_span_traces_the_rest(tmp_path, work):
  span = profile.Span(3, 9)
  profiler = profile.Profiler(span, tmp_path)
  assert [profiler.next(step) for step in (0, 3, 9)] == [3, 4, None]
  go(profiler, work, range(6, 8))  # the run ends before the span does
  assert json.loads((tmp_path / 'done.json').read_text()).items() >= {'first': 7, 'last': 8}.items()
  assert profiler.next(7) is None


def test_full_disk_drops_the_trace_and_not_the_node(tmp_path, work, no_room):
  span = profile.Span(1, 2)
  with no_room(100):
    go(profile.Profiler(span, span.folder(tmp_path) / 'learner'), work, range(4))
  jax.profiler.stop_trace()  # which others of this process would take for theirs
  assert 'none, the run did not get there' in profile.report(span, tmp_path)


def test_incomplete_trace_file_is_reported(tmp_path):
  span = profile.Span(1, 2)
  place = span.folder(tmp_path) / 'learner' / 'plugins' / 'profile' / 'now'
  place.mkdir(parents=True)
  (span.folder(tmp_path) / 'learner' / 'done.json').write_text('{"first": 1, "last": 2}')
  (place / 'vm.trace.json.gz').write_bytes(b'\x1f\x8b\x08\x00')
  assert 'learner: its trace cannot be read' in profile.report(span, tmp_path)


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('5', '--profile 5: write it as START:STOP, two updates such as 100:110'),
    ('-1:3', '--profile -1:3: write it as START:STOP'),
    ('10:10', '--profile 10:10: STOP must be above START, as in 10:20'),
    ('0:1000', '--profile 0:1000: at most 100 updates, as in 0:10'),
  ],
)
def test_invalid_span_is_refused_by_name(text, words):
  with pytest.raises(ValueError) as refused:
    profile.parse(text)
  assert words in str(refused.value)
