"""A trace of a few updates, for Perfetto and TensorBoard, and the operations that took its time."""

import collections
import contextlib
import gzip
import itertools
import json
import pathlib
import re
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from absl import logging

MOST_UPDATES = 100  # of a span: one update of the laptop preset is some 20,000 events
MOST_UNROLLS = 32  # that an actor traces
TOP = 12  # operations that are listed
PROFILED = 'profiled'  # an event that spans the trace
WAITS = ('wait for replay', 'write to replay')
"""Events in a trace during which learner and actors wait for replay."""
_DONE, _SUMMARY, _PERFETTO = 'done.json', 'summary.txt', 'perfetto.json.gz'
_MOST_EVENTS = 1_000_000  # that XLA writes as JSON, the earliest

Intervals = list[tuple[float, float]]


class Span(NamedTuple):
  """Updates that are traced.

  Attributes:
    start: learner step at which it begins.
    stop: at which it ends.
  """

  start: int
  stop: int

  def folder(self, run: pathlib.Path) -> pathlib.Path:
    """The folder of a run's traces of this span, with a sub-folder for each node."""
    return run / 'profile' / f'{self.start}-{self.stop}'


def parse(text: str) -> Span:
  """Reads START:STOP; ValueError where it is none."""
  start, separator, stop = text.partition(':')
  if not (separator and start.isdecimal() and stop.isdecimal()):
    raise ValueError(f'--profile {text}: write it as START:STOP, two updates such as 100:110')
  span = Span(int(start), int(stop))
  if span.stop <= span.start:
    raise ValueError(
      f'--profile {text}: STOP must be above START, as in {span.start}:{span.start + 10}'
    )
  if span.stop - span.start > MOST_UPDATES:
    raise ValueError(
      f'--profile {text}: at most {MOST_UPDATES} updates, as in {span.start}:{span.start + 10}; no '
      'viewer opens a trace of more'
    )
  return span


class Profiler:
  """Traces a span of one node's work; failures are logged and never end the node.

  The first call of a process compiles, and is left out. A span is traced once, so a restarted node
  does not trace it again; a node that was killed while it traced traces the rest.

  Args:
    span: of learner steps.
    folder: of this node's trace.
    most: calls of `reach` after which the trace ends.
    late: whether it may begin after the span, as for an actor that the rate limiter blocks.
  """

  def __init__(
    self,
    span: Span,
    folder: pathlib.Path,
    *,
    most: int = MOST_UPDATES,
    late: bool = False,
  ):
    self._span = span
    self._folder = folder
    self._most = most
    self._late = late
    self._over = (folder / _DONE).exists()
    self._is_warm = False
    self._first: int | None = None  # step at which the trace began
    self._calls = 0
    self._began = 0.0
    self._annotation = contextlib.ExitStack()

  def next(self, step: int) -> int | None:
    """The step at which `reach` is due again; None for any."""
    if self._over or step >= self._span.stop:
      return None
    if step < self._span.start:
      return self._span.start
    return step + 1 if self._first is None else self._span.stop

  def reach(self, step: int) -> None:
    """Begins or ends the trace; call it while the device is idle, before the work of this step.

    Args:
      step: learner step, or the version of the parameters that will act.
    """
    if self._over:
      return
    if self._first is not None:
      self._calls += 1
      if step >= self._span.stop or self._calls >= self._most:
        self.close(step)
    elif self._is_warm and step >= self._span.start and (self._late or step < self._span.stop):
      self._begin(step)
    self._is_warm = True

  def close(self, step: int) -> None:
    """Ends the trace if it has begun; takes some seconds."""
    if self._first is None or self._over:
      return
    self._over = True
    seconds = time.monotonic() - self._began
    try:
      self._annotation.close()
      jax.profiler.stop_trace()
      done = {'first': self._first, 'last': step, 'seconds': seconds}
      (self._folder / _DONE).write_text(json.dumps(done))
    except Exception as error:  # such as of a full disk, which XLA words in its own way
      logging.warning('The trace was not written: %s', error)

  def _begin(self, step: int) -> None:
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      jax.profiler.start_trace(str(self._folder), **_options())
      self._annotation.enter_context(jax.profiler.TraceAnnotation(PROFILED))
    except Exception as error:  # as above, or another trace is being made
      logging.warning('Nothing is traced: %s', error)
      self._over = True
      return
    self._first, self._began = step, time.monotonic()


def _options() -> dict[str, Any]:
  """Options with events for operations on a CPU, and none for Python's calls."""
  make = getattr(jax.profiler, 'ProfileOptions', None)
  if make is None:
    return {}
  options = make()
  options.host_tracer_level = 3
  options.python_tracer_level = 0
  return {'profiler_options': options}


class Operation(NamedTuple):
  """Operations of one kind in one program.

  Attributes:
    name: XLA's, without its number.
    program: that it belongs to.
    seconds: without those of operations within it, as a loop has them; over all threads.
    calls: how many there were.
  """

  name: str
  program: str
  seconds: float
  calls: int


class Summary(NamedTuple):
  """The time of a trace.

  Attributes:
    seconds: from its first event to its last.
    complete: whether no event was dropped.
    idle: seconds in which no operation ran.
    waited: those of `idle` in which the node waited for replay.
    operations: the longest first.
  """

  seconds: float
  complete: bool
  idle: float
  waited: float
  operations: list[Operation]


def summarise(events: list[dict[str, Any]]) -> Summary:
  """Adds up a trace.

  Args:
    events: its `traceEvents`.
  """
  complete = len(events) < _MOST_EVENTS
  spans = [event for event in events if event.get('ph') == 'X']
  operations = _operations(events)
  end = lambda event: event['ts'] + event.get('dur', 0.0)
  whole = next((event for event in spans if event['name'] == PROFILED), None)
  if whole is None:  # it was not closed
    begin, last = min(map(_begin, spans), default=0.0), max(map(end, spans), default=0.0)
  else:
    begin, last = whole['ts'], end(whole)
  if not complete:
    last = min(last, max(map(_begin, spans)))
  within = [(begin, last)]
  busy = _merge((event['ts'], end(event)) for event in operations)
  waits = _merge((event['ts'], end(event)) for event in spans if event['name'] in WAITS)
  idle = _length(within) - _shared(busy, within)
  waited = _shared(waits, within) - _shared(_intersect(waits, busy), within)
  return Summary(
    seconds=_length(within) / 1e6,
    complete=complete,
    idle=idle / 1e6,
    waited=waited / 1e6,
    operations=_add_up(operations),
  )


def _begin(event: dict[str, Any]) -> float:
  return event['ts']


def _operations(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """The events of XLA's operations, each once: those of accelerators, or else of the CPU."""
  names: dict[tuple[str, int, int | None], str] = {
    (event['name'], event['pid'], event.get('tid')): event['args']['name']
    for event in events
    if event.get('name') in ('process_name', 'thread_name')
  }
  found = [
    event for event in events if event.get('ph') == 'X' and 'hlo_op' in (event.get('args') or {})
  ]
  process = lambda event: names.get(('process_name', event['pid'], None), '')
  thread = lambda event: names.get(('thread_name', event['pid'], event['tid']), '')
  # The host may report operations of an accelerator as well, and lines of their own once more.
  of_devices = [event for event in found if process(event).startswith('/device:')]
  on_lines = [event for event in of_devices if thread(event) == 'XLA Ops']
  return on_lines or of_devices or found


def _add_up(operations: list[dict[str, Any]]) -> list[Operation]:
  microseconds: collections.Counter[tuple[str, str]] = collections.Counter()
  calls: collections.Counter[tuple[str, str]] = collections.Counter()
  line = lambda event: (event['pid'], event['tid'])
  order = lambda event: (*line(event), event['ts'], -event.get('dur', 0.0))
  for _, group in itertools.groupby(sorted(operations, key=order), key=line):
    open_ones: list[tuple[float, tuple[str, str]]] = []
    for event in group:
      # XLA numbers them, as in dot.83, and its copies of them, as in fusion.3.clone.
      name = re.sub(r'(\.(\d+|clone))+$', '', event['name'])
      kind = (name, event['args'].get('hlo_module', ''))
      duration = event.get('dur', 0.0)
      while open_ones and open_ones[-1][0] <= event['ts']:
        open_ones.pop()
      if open_ones:
        microseconds[open_ones[-1][1]] -= duration
      microseconds[kind] += duration
      calls[kind] += 1
      open_ones.append((event['ts'] + duration, kind))
  return [
    Operation(name, program, duration / 1e6, calls[name, program])
    for (name, program), duration in microseconds.most_common()
  ]


def _merge(intervals: Iterable[tuple[float, float]]) -> Intervals:
  merged: Intervals = []
  for begin, end in sorted(intervals):
    if merged and begin <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
    else:
      merged.append((begin, end))
  return merged


def _intersect(one: Intervals, other: Intervals) -> Intervals:
  """The intersection of two lists of merged intervals."""
  shared: Intervals = []
  i = j = 0
  while i < len(one) and j < len(other):
    begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
    if begin < end:
      shared.append((begin, end))
    if one[i][1] < other[j][1]:
      i += 1
    else:
      j += 1
  return shared


def _length(intervals: Intervals) -> float:
  return sum(end - begin for begin, end in intervals)


def _shared(one: Intervals, other: Intervals) -> float:
  return _length(_intersect(one, other))


def report(span: Span, run: pathlib.Path) -> str:
  """A summary of the traces of a span as text, which is also written beside them.

  Each trace is written once more for Perfetto, under a fixed name.

  Args:
    span: of updates.
    run: its folder.
  """
  folder = span.folder(run)
  nodes = sorted(folder.glob(f'*/{_DONE}'), key=lambda path: path.parent.name != 'learner')
  texts = []
  for done in nodes:
    try:
      texts.append(_describe(done.parent, json.loads(done.read_text())))
    except (OSError, EOFError, ValueError, KeyError) as error:  # incomplete
      texts.append(f'{done.parent.name}: its trace cannot be read ({error})')
  if not nodes:
    return f'profile of updates {span.start} to {span.stop}: none, the run did not get there'
  text = '\n\n'.join(texts)
  with contextlib.suppress(OSError):  # a full disk
    (folder / _SUMMARY).write_text(text + '\n')
  return f'{text}\n\nfor https://ui.perfetto.dev: {folder}/*/{_PERFETTO}; for TensorBoard: {folder}'


def _describe(folder: pathlib.Path, done: dict[str, Any]) -> str:
  """One node's trace."""
  path = max(folder.glob('plugins/profile/*/*.trace.json.gz'), default=None)
  if path is None:
    raise FileNotFoundError('there is none')
  with gzip.open(path) as file:
    trace = json.load(file)
  trace.pop('metadata', None)  # which Perfetto cannot read
  with contextlib.suppress(OSError), gzip.open(folder / _PERFETTO, 'wt') as file:
    json.dump(trace, file)
  made = summarise(trace['traceEvents'])
  learns = folder.name == 'learner'
  share = lambda seconds, whole: f'{100 * seconds / whole:.1f} %' if whole else '-'
  count = done['last'] - done['first']
  each = f', {1000 * done["seconds"] / count:.1f} ms each' if learns and count else ''
  lines = [
    f'{folder.name}, {"updates" if learns else "versions"} {done["first"]} to {done["last"]}: '
    f'{done["seconds"]:.2f} s{each}; no operation ran in {share(made.idle, made.seconds)} of the '
    f'time, in {share(made.waited, made.seconds)} it {"waited for" if learns else "wrote to"} replay'
  ]
  if not made.complete:
    lines.append(f'(only the first {made.seconds:.2f} s are in the trace; give fewer updates)')
  total = sum(operation.seconds for operation in made.operations)
  width = max((len(operation.name) for operation in made.operations[:TOP]), default=0)
  width = max(width, len('all others'))
  lines.append(f'{"operation":<{width}}  {"ms":>9}  {"share":>7}  {"calls":>8}  program')
  for name, program, seconds, calls in made.operations[:TOP]:
    lines.append(
      f'{name:<{width}}  {1000 * seconds:>9,.1f}  {share(seconds, total):>7}  {calls:>8,}  {program}'
    )
  rest = made.operations[TOP:]
  if rest:
    seconds, calls = (sum(values) for values in zip(*[o[2:] for o in rest], strict=True))
    lines.append(
      f'{"all others":<{width}}  {1000 * seconds:>9,.1f}  {share(seconds, total):>7}  {calls:>8,}'
    )
  return '\n'.join(lines)
