"""Traces a few updates with JAX's profiler, for Perfetto and TensorBoard.

JAX is imported when a trace begins, so that a wrong span is refused soon.
"""

import contextlib
import gzip
import json
import pathlib
import time
from typing import NamedTuple

from absl import logging

MOST_UPDATES = 100  # of a span: one update of the laptop preset is some 20,000 events
MOST_UNROLLS = 32  # that an actor traces
_DONE, _PERFETTO = 'done.json', 'perfetto.json.gz'


class Span(NamedTuple):
  """Learner steps at which a trace begins and ends."""

  start: int
  stop: int

  def folder(self, run: pathlib.Path) -> pathlib.Path:
    """The folder of a run's traces of this span, with a sub-folder for each node."""
    return run / 'profile' / f'{self.start}-{self.stop}'


def parse(text: str) -> Span:
  """Parses START:STOP, two learner steps; ValueError for another form, or more than MOST_UPDATES."""
  start, separator, stop = text.partition(':')
  if not (separator and start.isdecimal() and stop.isdecimal()):
    raise ValueError(f'--profile {text}: write it as START:STOP, two updates such as 100:110')
  span = Span(int(start), int(stop))
  if not 0 < span.stop - span.start <= MOST_UPDATES:
    raise ValueError(
      f'--profile {text}: from 1 to {MOST_UPDATES} updates, as in {span.start}:{span.start + 10}; no '
      'viewer opens a trace of more'
    )
  return span


class Profiler:
  """Traces a span of one node's work; failures are logged and never end the node.

  The first call of a process compiles, and is left out. A span is traced once, so a restarted node
  does not trace it again; a node that was killed while it traced traces the rest.

  Args:
    span: the learner steps to trace; None for none.
    folder: folder for this node's trace.
    most: the trace ends at this number of calls of `reach` after it began.
    late: whether the trace may begin after the span, as for an actor that the rate limiter blocks.
  """

  def __init__(
    self,
    span: Span | None,
    folder: pathlib.Path,
    *,
    most: int = MOST_UPDATES,
    late: bool = False,
  ):
    self._span = span or Span(0, 0)
    self._folder = folder
    self._most = most
    self._late = late
    self._over = span is None or (folder / _DONE).exists()
    self._is_warm = False
    self._first: int | None = None  # step at which the trace began
    self._calls = 0
    self._began = 0.0

  def next(self, step: int) -> int | None:
    """The next step at which the trace may begin or end, by a call of `reach`; None without one."""
    if self._over or step >= self._span.stop:
      return None
    if step < self._span.start:
      return self._span.start
    return step + 1 if self._first is None else self._span.stop

  def reach(self, step: int) -> None:
    """Begins the trace at the first step of the span, and ends it after the last; else does nothing.

    To be called before the work of each step, while the device is idle.

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
    import jax

    self._over = True
    seconds = time.monotonic() - self._began
    try:
      jax.profiler.stop_trace()
      done = {'first': self._first, 'last': step, 'seconds': seconds}
      (self._folder / _DONE).write_text(json.dumps(done))
    except Exception as error:  # such as of a full disk, which XLA words in its own way
      logging.warning('The trace was not written: %s', error)

  def _begin(self, step: int) -> None:
    import jax

    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      options = jax.profiler.ProfileOptions()
      options.host_tracer_level = 3  # operations on a CPU
      options.python_tracer_level = 0  # and not Python's calls
      jax.profiler.start_trace(str(self._folder), profiler_options=options)
    except Exception as error:  # as above, or another trace is being made
      logging.warning('Nothing is traced: %s', error)
      self._over = True
      return
    self._first, self._began = step, time.monotonic()


def report(span: Span, run: pathlib.Path) -> str:
  """Describes the traces of a span in a run's folder: a line for each node, and where to open them.

  Each trace is written once more for Perfetto, under a fixed name.
  """
  folder = span.folder(run)
  nodes = sorted(folder.glob(f'*/{_DONE}'), key=lambda path: path.parent.name != 'learner')
  if not nodes:
    return f'profile of updates {span.start} to {span.stop}: none, the run did not get there'
  texts = []
  for done in nodes:
    node = done.parent.name
    try:
      _for_perfetto(done.parent)
      found = json.loads(done.read_text())
      first, last, seconds = found['first'], found['last'], found['seconds']
      what, each = 'versions', ''
      if node == 'learner':
        what, each = 'updates', f', {1000 * seconds / max(1, last - first):.1f} ms each'
      texts.append(f'{node}, {what} {first} to {last}: {seconds:.2f} s{each}')
    except (OSError, EOFError, ValueError, KeyError) as error:  # incomplete
      texts.append(f'{node}: its trace cannot be read ({error})')
  shown = f'for https://ui.perfetto.dev: {folder}/*/{_PERFETTO}; for TensorBoard: {folder}'
  return '\n'.join([*texts, shown])


def _for_perfetto(folder: pathlib.Path) -> None:
  """Writes one node's trace again, without the metadata that Perfetto cannot read."""
  path = max(folder.glob('plugins/profile/*/*.trace.json.gz'), default=None)
  if path is None:
    raise FileNotFoundError('there is none')
  with gzip.open(path) as file:
    trace = json.load(file)
  trace.pop('metadata', None)
  with contextlib.suppress(OSError), gzip.open(folder / _PERFETTO, 'wt') as file:
    file.write(json.dumps(trace))  # `json.dump` encodes in Python, ten times as slowly
