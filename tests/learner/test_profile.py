"""Traces of updates: spans, restarts, and a full disk."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from hephaestus.learner import profile


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
  learner, actor, shown = text.split('\n')
  assert learner.startswith('learner, updates 3 to 5: ') and learner.endswith(' ms each')
  assert actor.startswith('actor-0, versions 7 to 8: ')  # what it did first is compiled
  assert str(folder) in shown
  with gzip.open(folder / 'learner' / 'perfetto.json.gz') as file:
    events = json.load(file)['traceEvents']
  names = [event.get('name', '') for event in events]
  assert sum(name.startswith('dot') for name in names) == 2
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


@pytest.mark.parametrize('text', ['5', '10:10', '0:1000'])
def test_invalid_span_is_refused_by_name(text):
  with pytest.raises(ValueError, match=f'--profile {text}: '):
    profile.parse(text)
