"""Measures how much a dashboard with an open page and `inspect --watch` slow a run down."""

import contextlib
import functools
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

from hephaestus.launch import config as launch_config
from hephaestus.launch.bench import end_to_end
from hephaestus.launch.report import dashboard
from hephaestus.launch.run import metrics
from hephaestus.learner import bench

PERIOD = 5.0  # seconds between two requests, as in page.js and in `inspect --watch`
LEFT_OUT = 0.2  # share of each window that is not measured, at its beginning
LOG_PERIOD = 10  # most updates between two rows of metrics, so that a window has many rows
_PATIENCE = 120.0  # seconds for a watcher to start, and to end
_TERMINAL = {'COLUMNS': '160', 'LINES': '50', 'TERM': 'xterm-256color'}
_RESAMPLES = 10_000
_CONFIDENCE = 0.95


class Window(NamedTuple):
  """A window of time during a run.

  Attributes:
    watched: whether the watchers were running, else frozen.
    begin: unix seconds at its begin.
    end: unix seconds at its end.
  """

  watched: bool
  begin: float
  end: float


def watching(
  config: launch_config.ExperimentConfig, pairs: int, seconds: float, period: float = PERIOD
) -> list[bench.Figure]:
  """Watches a run in every other window of time, and compares its speed in neighbouring windows.

  The watchers are a dashboard, a page that sends the requests of a browser's page at the same rate,
  and `inspect --watch` in a terminal. Their processes are frozen in unwatched windows; their start
  is a figure of its own. Pairs alternate in their order, so that a run that becomes slower by itself
  does not change the result.

  Args:
    config: config of the run; its number of environment steps is ignored, and its
      `learner.log_period` is reduced to LOG_PERIOD at most.
    pairs: number of pairs of windows, one window of each watched.
    seconds: length of each window, whose first fifth is left out.
    period: seconds between two requests. Periods below PERIOD raise the overhead above the noise; a
      dashboard calls replay at most once in `dashboard.POLL_SECONDS`.

  Returns:
    Updates per second without and with watchers, medians over windows. The median over pairs of the
    ratio with / without, and its 95 % confidence interval by bootstrap over pairs. CPU time of each
    watcher for its start, and per minute.

  Raises:
    ValueError: there are less than two pairs, a time is not positive, the agent is not the dreamer, a
      package that the dashboard needs is missing, or the run or a watcher ended early.
  """
  _check(pairs, seconds, period)
  dashboard.check_packages()
  log_period = min(LOG_PERIOD, config.learner.log_period)
  config = launch_config.override(config, [f'learner.log_period={log_period}'])
  with end_to_end.started(config) as run, contextlib.ExitStack() as stack:
    watchers = _attach(run.folder, period, stack)
    startup = {each.name: each.cpu_seconds() for each in watchers}
    windows, used = _alternate(run, watchers, pairs, seconds)
  speeds = rates(metrics.read(run.folder / 'metrics' / 'learner.jsonl'), windows)
  shutil.rmtree(run.folder)
  ratios = speeds[:, 1] / speeds[:, 0]
  low, high = interval(ratios)
  minutes = sum(window.end - window.begin for window in windows if window.watched) / 60
  figure = functools.partial(bench.Figure, limit=None, ratio=None, machine=bench.machine())
  name = f'watching/{config.environment["name"]}'
  return [
    figure(f'{name}/without', float(np.median(speeds[:, 0])), 'updates/s'),
    figure(f'{name}/with', float(np.median(speeds[:, 1])), 'updates/s'),
    figure(f'{name}/ratio', float(np.median(ratios)), 'with/without'),
    figure(f'{name}/ratio/low', low, 'with/without'),
    figure(f'{name}/ratio/high', high, 'with/without'),
    *(figure(f'{name}/{each}/start', value, 's of CPU') for each, value in startup.items()),
    *(figure(f'{name}/{each}', value / minutes, 's of CPU/min') for each, value in used.items()),
  ]


def _check(pairs: int, seconds: float, period: float) -> None:
  """Raises ValueError if a value cannot be measured; names its flag."""
  if pairs < 2:
    raise ValueError(f'--pairs {pairs}: must be at least 2')
  if not 0 < seconds < float('inf'):
    raise ValueError(f'--window {seconds}: must be positive seconds')
  if not 0 < period < float('inf'):
    raise ValueError(f'--period {period}: must be positive seconds')


def _alternate(
  run: end_to_end.Started, watchers: 'Sequence[_Process | Page]', pairs: int, seconds: float
) -> tuple[list[Window], dict[str, float]]:
  """Watches a run in every other window of time.

  Args:
    run: the run that is measured.
    watchers: the watchers, which are resumed in watched windows and frozen in the others.
    pairs: number of pairs of windows; the watched one is alternately second and first.
    seconds: length of each window.

  Returns:
    The windows without their beginnings, and the seconds of CPU time that each watcher used in them.
  """
  windows: list[Window] = []
  used = dict.fromkeys((each.name for each in watchers), 0.0)
  for pair in range(pairs):
    for watched in (pair % 2 == 1, pair % 2 == 0):
      for each in watchers:
        each.resume() if watched else each.freeze()
      _rest(run, watchers, LEFT_OUT * seconds)
      begin, before = time.time(), [each.cpu_seconds() for each in watchers]
      _rest(run, watchers, (1 - LEFT_OUT) * seconds)
      windows.append(Window(watched, begin, time.time()))
      for each, start in zip(watchers, before, strict=True):
        used[each.name] += each.cpu_seconds() - start
  return windows, used


def rates(rows: Sequence[dict[str, Any]], windows: Sequence[Window]) -> np.ndarray:
  """Updates per second of a run in each window.

  Args:
    rows: rows of the learner's metrics, the oldest first.
    windows: P pairs of neighbouring windows, one of each pair watched.

  Returns:
    [P, 2] f64, updates per second of each pair without and with watchers, between the oldest and
    the newest row in a window.

  Raises:
    ValueError: a window has fewer than two rows.
  """
  times = np.array([row['time'] for row in rows])
  steps = np.array([row['learner_step'] for row in rows])
  found: list[list[float]] = [[], []]
  for watched, begin, end in windows:
    within = np.flatnonzero((times >= begin) & (times <= end))
    if len(within) < 2 or times[within[-1]] == times[within[0]]:
      raise ValueError(
        f'--window: the learner wrote {len(within)} rows in a window; give it more seconds, or '
        '--set learner.log_period=1'
      )
    first, last = within[0], within[-1]
    found[watched].append((steps[last] - steps[first]) / (times[last] - times[first]))
  return np.array(found, float).T


def interval(ratios: np.ndarray) -> tuple[float, float]:
  """95 % confidence interval of the median, by the percentile bootstrap; deterministic.

  Args:
    ratios: [P] f64, one ratio for each pair.

  Returns:
    Lower and upper end.
  """
  resampled = np.random.default_rng(0).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
  outside = (1 - _CONFIDENCE) / 2
  low, high = np.quantile(np.median(ratios[resampled], axis=1), [outside, 1 - outside])
  return float(low), float(high)


def _attach(
  folder: pathlib.Path, period: float, stack: contextlib.ExitStack
) -> 'list[_Process | Page]':
  """Starts the watchers of a run, and waits for the first report of each; the page comes first."""
  shows = _Process('dashboard', ['dashboard', str(folder)], stack)
  looks = _Process('inspect', ['inspect', str(folder), '--watch', str(period)], stack)
  address = shows.wait_for(rb'(http://127\.0\.0\.1:\d+/\S+/) ').group(1).decode()
  page = stack.enter_context(Page(address, period))
  looks.wait_for(rb'inserts/s')
  _until(lambda: page.answers >= 3, page, 'the page has no answers')
  return [page, shows, looks]


def _rest(run: end_to_end.Started, watchers: 'Sequence[_Process | Page]', seconds: float) -> None:
  """Waits for some seconds; raises ValueError if the run or a watcher ends."""
  deadline = time.monotonic() + seconds
  while (left := deadline - time.monotonic()) > 0:
    run.check()
    for each in watchers:
      each.check()
    time.sleep(min(left, 0.5))


def _until(predicate: Callable[[], Any], watcher: '_Process | Page', what: str) -> Any:
  deadline = time.monotonic() + _PATIENCE
  while not (found := predicate()):
    watcher.check()
    if time.monotonic() > deadline:
      raise ValueError(f'{what} after {_PATIENCE:g} s')
    time.sleep(0.05)
  return found


class _Process:
  """A command of this project that watches a run, in a pseudo-terminal of its own.

  Attributes:
    name: name of the command.
  """

  def __init__(self, name: str, words: Sequence[str], stack: contextlib.ExitStack):
    self.name = name
    self._output = b''
    ours, its = os.openpty()
    stack.callback(os.close, ours)
    self._popen = subprocess.Popen(
      [sys.executable, '-m', 'hephaestus.launch.main', *words],
      stdin=subprocess.DEVNULL,
      stdout=its,
      stderr=its,
      env=os.environ | _TERMINAL,
      start_new_session=True,
    )
    os.close(its)
    self._process = psutil.Process(self._popen.pid)
    stack.callback(self._end)
    threading.Thread(target=self._read, args=(ours,), daemon=True).start()

  def wait_for(self, pattern: bytes) -> 're.Match[bytes]':
    """Waits until the output matches a regular expression; returns the match."""
    words = f'hephaestus {self.name} printed nothing'
    return _until(lambda: re.search(pattern, self._output), self, words)

  def check(self) -> None:
    """Raises ValueError if the command has ended."""
    if self._popen.poll() is not None:
      lines = self._output.decode(errors='replace').strip().splitlines()
      raise ValueError(
        f'hephaestus {self.name} ended: {lines[-1] if lines else "it printed nothing"}'
      )

  def freeze(self) -> None:
    self._process.suspend()

  def resume(self) -> None:
    self._process.resume()

  def cpu_seconds(self) -> float:
    """Seconds of CPU time since its start."""
    return end_to_end.cpu_seconds(self._process)

  def _read(self, terminal: int) -> None:
    """Reads its output at once, as a terminal does, and keeps the end of it."""
    with contextlib.suppress(OSError):  # the process has exited
      while content := os.read(terminal, 1 << 16):
        self._output = (self._output + content)[-(1 << 16) :]

  def _end(self) -> None:
    """Stops it as Ctrl-C does."""
    self._popen.send_signal(signal.SIGINT)
    self._popen.send_signal(signal.SIGCONT)
    try:
      self._popen.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
      self._popen.kill()
      self._popen.wait()


class Page:
  """Sends the requests of a dashboard's page at the page's rate, without a browser.

  Attributes:
    name: name of this watcher.
    answers: number of answers so far, not counting the static files of the page.
  """

  name = 'page'

  def __init__(self, address: str, period: float = PERIOD):
    """Starts to send requests in a thread, until the context exits.

    Args:
      address: URL that a dashboard printed.
      period: seconds between two requests of a kind.
    """
    self.answers = 0
    self._period = period
    self._address = urllib.parse.urlsplit(address)
    self._is_open, self._ended = threading.Event(), threading.Event()
    self._is_open.set()
    self._used = 0.0
    self._error: Exception | None = None
    threading.Thread(target=self._run, name='page', daemon=True).start()

  def __enter__(self) -> 'Page':
    return self

  def __exit__(self, *unused: Any) -> None:
    self._ended.set()
    self._is_open.set()

  def check(self) -> None:
    """Raises ValueError if a request has failed."""
    if self._error is not None:
      raise ValueError(f'the dashboard does not answer ({self._error})')

  def freeze(self) -> None:
    self._is_open.clear()

  def resume(self) -> None:
    self._is_open.set()

  def cpu_seconds(self) -> float:
    """Seconds of CPU time of the thread that sends the requests."""
    return self._used

  def _run(self) -> None:
    try:
      for _ in self._ask_on():
        self._used = time.thread_time()
        self._is_open.wait()
        if self._ended.is_set():
          return
    except (OSError, ValueError, http.client.HTTPException) as error:
      self._error = None if self._ended.is_set() else error

  def _ask_on(self) -> Iterator[None]:
    """Sends the requests of a page one after the other."""
    for name in ('', 'uPlot.min.css', 'page.css', 'uPlot.iife.js', 'page.js', 'icon.svg'):
      self._get(name)
      yield
    known = ''
    while True:
      begin = time.monotonic()
      for request in ('api/runs', f'api/curves?x=environment_step&known={known}', 'api/replay/0'):
        answer = self._get(request)
        self.answers += 1
        if answer and 'version' in (content := json.loads(answer)):
          known = content['version']
        yield
      self._ended.wait(max(0.0, begin + self._period - time.monotonic()))

  def _get(self, name: str) -> bytes:
    with contextlib.closing(http.client.HTTPConnection(self._address.netloc)) as link:
      link.request('GET', self._address.path + name)
      response = link.getresponse()
      content = response.read()
    if response.status not in (200, 204):
      raise ValueError(f'{name}: {response.status}')
    return content
