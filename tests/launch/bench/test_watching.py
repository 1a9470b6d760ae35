"""`bench watching`: comparison of windows, requests of the page, and a watched run."""

import json
import re
import threading

import jax
import numpy as np
import psutil
import pytest

from hephaestus.launch import main
from hephaestus.launch.agents import presets
from hephaestus.launch.bench import watching
from hephaestus.launch.report import dashboard, panels
from hephaestus.launch.run import folder as folder_lib


def run(*arguments):
  return main.run(main.parse(['hephaestus', 'bench', 'watching', *map(str, arguments)]))


def rows_at(speed, seconds):
  """Metrics of a learner, a row each second, with updates per second as a function of time."""
  steps = np.concatenate([[0], np.cumsum([speed(second) for second in range(seconds)])])
  return [{'time': float(at), 'learner_step': int(step)} for at, step in enumerate(steps)]


def windows(pairs, seconds=10):
  order = [pair % 2 == at for pair in range(pairs) for at in (1, 0)]
  return [
    watching.Window(watched, seconds * at + 2, seconds * (at + 1))
    for at, watched in enumerate(order)
  ]


def test_drift_of_speed_does_not_change_ratio():
  found = windows(20)
  speeds = watching.rates(rows_at(lambda second: 10_000 - 5 * second, 400), found)
  ratios = speeds[:, 1] / speeds[:, 0]
  assert np.all(np.abs(ratios - 1) > 1e-3)  # each pair contains the drift between its windows
  assert np.median(ratios) == pytest.approx(1, abs=1e-3)
  low, high = watching.interval(ratios)
  assert low < 1 < high


def test_ratio_is_overhead_of_watched_windows():
  found = windows(6)
  watched = [(window.begin - 2, window.end) for window in found if window.watched]
  speed = lambda second: 98 if any(begin <= second < end for begin, end in watched) else 100
  speeds = watching.rates(rows_at(speed, 120), found)
  np.testing.assert_allclose(speeds, [[100, 98]] * 6)
  assert watching.interval(speeds[:, 1] / speeds[:, 0]) == pytest.approx((0.98, 0.98))


def test_window_without_metrics_is_refused():
  rows = rows_at(lambda second: 100, 40)
  with pytest.raises(
    ValueError, match='--window: the learner wrote 1 rows in a window; give it more s'
  ):
    watching.rates([row for row in rows if row['time'] % 10 == 5], windows(2))


def test_page_sends_the_requests_of_a_browser(tmp_path):
  folder = tmp_path / 'run'
  folder_lib.open_run(folder, presets.laptop('catch'))
  asked, enough = [], threading.Event()
  app = dashboard.make_app(dashboard.Dashboard([folder], tmp_path), 'secret')

  async def listening_app(scope, receive, send):
    asked.append((scope['path'].removeprefix('/secret/'), scope['query_string'].decode()))
    await app(scope, receive, send)
    if len(asked) == 12:
      enough.set()

  socket = dashboard.listen(0)
  server = dashboard.make_server(listening_app)
  thread = threading.Thread(target=server.run, kwargs={'sockets': [socket]})
  thread.start()
  try:
    with watching.Page(f'http://127.0.0.1:{socket.getsockname()[1]}/secret/') as page:
      assert enough.wait(60)
      page.check()
  finally:
    server.should_exit = True
    thread.join()
    socket.close()
  script = (panels.PAGE / 'page.js').read_text()
  assert f'PERIOD = {1000 * watching.PERIOD:g};' in script
  given = lambda *words: main.parse(['hephaestus', *words])
  assert given('inspect', 'run', '--watch').watch == watching.PERIOD
  assert given('bench', 'watching').period == watching.PERIOD
  html = (panels.PAGE / 'index.html').read_text()
  static = re.findall(r'(?:src|href)="([^"]+)"', html)
  questions = set(re.findall(r'ask\([`\'](api/\w+)', script))
  paths, queries = zip(*asked[:12], strict=True)
  assert sorted(paths[:6]) == sorted(['', *static])
  assert {re.match(r'api/\w+', path).group() for path in paths[6:9]} == questions
  assert paths[9:12] == paths[6:9]
  first, second = (queries[at] for at in (7, 10))
  assert first == 'x=environment_step&known=' and len(second) > len(
    first
  )  # later answers have new curves alone


@pytest.mark.slow
def test_watched_run_is_measured(capsys, monkeypatch, tiny):
  assert jax.devices()  # devices of this process, before XLA_FLAGS is removed
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
  assert run('--pairs', 2, '--window', 3, '--json', '--set', *tiny) == 0
  figures = {figure['name']: figure for figure in json.loads(capsys.readouterr().out)}
  value = lambda name: figures[f'watching/catch/{name}']['value']
  assert value('with') > 0 and value('without') > 0
  assert value('ratio/low') <= value('ratio') <= value('ratio/high')
  for name in ('page', 'dashboard', 'inspect'):
    assert value(name) > 0 and value(f'{name}/start') > 0
  left = psutil.Process().children(recursive=True)
  assert not [child for child in left if 'hephaestus.launch.main' in child.cmdline()]


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--pairs', '1'], '--pairs 1: must be at least 2'),
    (['--window', '0'], '--window 0.0: must be positive seconds'),
    (['--period', 'nan'], '--period nan: must be positive seconds'),
    (['--preset', 'lap'], '--preset lap: choose one of laptop'),
    (['--set', 'agent.window=0'], 'agent.window=0: must be at least 1'),
  ],
)
def test_bad_input_is_named(capsys, arguments, words):
  assert run(*arguments) == 2
  message = capsys.readouterr().err
  assert words in message and message.count('\n') == 1
