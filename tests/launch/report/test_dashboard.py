"""The dashboard: access control, answers of its server, and the page in a browser."""

import contextlib
import functools
import json
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import numpy as np
import polling
import pytest
import served as served_lib

from hephaestus.launch import config, main
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history
from hephaestus.launch.report import dashboard, groups, panels, server

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'


def make_run(folder, *overrides, agent='dreamer'):
  made = config.override(config.of_preset(agent, 'laptop', 'catch'), list(overrides))
  folder_lib.open_run(folder, made)


def write(folder, node, *rows):
  with (folder / 'metrics' / f'{node}.jsonl').open('a') as file:
    file.writelines(json.dumps({'time': time.time(), **row}) + '\n' for row in rows)


@pytest.fixture
def serve():
  """Folders of runs -> the server of their page."""
  with contextlib.ExitStack() as stack:

    def serve(*folders):
      page = dashboard.Dashboard(folders)
      made = served_lib.Served(functools.partial(dashboard.make_app, page))
      stack.callback(made.close)
      return made

    yield serve


def test_connections_without_a_request_do_not_keep_others_out(serve, folder):
  served = serve(folder)
  with contextlib.ExitStack() as stack:
    silent = [
      stack.enter_context(socket.create_connection(('127.0.0.1', served.port), timeout=20))
      for _ in range(server.MOST_CONNECTIONS + 50)
    ]
    assert silent[0].recv(1) == b''  # closed by the server
    assert served.ask('')[0] == 200


@pytest.fixture
def folder(tmp_path):
  make_run(tmp_path / 'run')
  return tmp_path / 'run'


def run(*arguments):
  return main.run(main.parse(['hephaestus', 'dashboard', *map(str, arguments)]))


def test_requests_without_token_are_refused(folder, serve):
  served = serve(folder)
  for path in ('', 'page.js', 'api/runs', 'api/curves', 'video/0/7.gif'):
    for token in ('wrong', '', 'secre', 'secret2', '..'):
      status, content, _ = served.ask(path, token=token)
      assert status == 403 and b'open the address that hephaestus dashboard printed' in content
    assert served.ask(path)[0] == (404 if path.startswith('video') else 200)


def test_requests_of_other_hosts_and_origins_are_refused(folder, serve):
  served = serve(folder)
  own = f'127.0.0.1:{served.port}'
  assert served.socket.getsockname()[0] == '127.0.0.1'
  for host, status in (('localhost:99', 200), (own, 200), ('evil.example', 403),
                       (f'evil.example:{served.port}', 403), ('127.0.0.1.evil.example', 403)):  # fmt: skip
    assert served.ask('api/runs', Host=host)[0] == status, host
  assert served.ask('api/runs', Origin=f'http://{own}')[0] == 200
  for origin in ('http://evil.example', 'null', f'https://{own}', 'http://127.0.0.1:1'):
    assert served.ask('api/runs', Origin=origin)[0] == 403, origin


def test_only_get_is_served(folder, serve):
  served = serve(folder)
  for method in ('POST', 'PUT', 'DELETE', 'PATCH', 'OPTIONS'):
    assert served.ask('api/runs', method=method)[0] == 405
  before = {path: path.stat().st_mtime_ns for path in folder.rglob('*')}
  for path in ('', 'api/runs', 'api/curves'):
    served.ask(path)
  assert {path: path.stat().st_mtime_ns for path in folder.rglob('*')} == before


def test_content_policy_permits_only_own_server(folder, serve):
  served = serve(folder)
  for path, token in (('', 'secret'), ('api/runs', 'secret'), ('', 'wrong'), ('nothing', 'secret')):
    policy = served.ask(path, token=token)[2]['Content-Security-Policy']
    assert "default-src 'none'" in policy and 'unsafe' not in policy and '*' not in policy
    assert set(re.findall(r"src ('\w+')", policy)) == {"'none'", "'self'"}
  assert served.ask('')[2]['Referrer-Policy'] == 'no-referrer'
  html = served.ask('')[1].decode()
  assert '//' not in html and 'style=' not in html and '<script>' not in html
  for name in re.findall(r'(?:src|href)="([^"]+)"', html):
    assert served.ask(name)[0] == 200, name


def test_run_without_metrics_or_folder_is_shown(folder, serve):
  served = serve(folder)
  (shown,) = served.json('api/runs')['runs']
  assert shown['state'] == 'not started' and shown['videos'] == shown['nodes'] == []
  assert shown['messages'] == [f'no metrics; start the run with: hephaestus train --run {folder}']
  with folder_lib.only_one(folder):
    (shown,) = served.json('api/runs')['runs']
  assert shown['state'] == 'running' and 'no metrics yet' in shown['messages'][0]
  answer = served.json('api/curves')
  assert answer['charts'] == [] and answer['groups'] == [{}]
  write(folder, 'learner', {'learner_step': 1, 'environment_step': 10, 'world_model/loss': 2.0})
  assert served.json('api/runs')['runs'][0]['state'] == 'stopped'
  shutil.rmtree(folder)
  (shown,) = served.json('api/runs')['runs']
  assert shown['state'] == 'gone' and str(folder) in shown['messages'][0]
  assert served.json('api/curves')['groups'] == [{}]


def test_seeds_become_one_curve_that_is_sent_once(tmp_path, serve):
  folders = [tmp_path / str(seed) for seed in range(4)]
  for seed, folder in enumerate(folders):
    make_run(folder, f'seed={seed}', f'evaluator.video_period={60 + seed}')
    rows = [
      {'environment_step': step, 'normalised_score': step * seed / 100} for step in (0, 50, 100)
    ]
    write(folder, 'evaluator', *rows)
  make_run(tmp_path / 'other', 'agent.gamma=0.9')
  served = serve(*folders, tmp_path / 'other')
  runs = served.json('api/runs')
  assert [each['label'] for each in runs['groups']] == ['gamma=0.99', 'gamma=0.9']
  assert [each['group'] for each in runs['runs']] == [0, 0, 0, 0, 1]
  assert runs['differences'] == {
    'agent.gamma': [0.99] * 4 + [0.9],
    'evaluator.video_period': [60.0, 61.0, 62.0, 63.0, 300.0],  # does not change a curve
    'seed': [0, 1, 2, 3, 0],
  }
  answer = served.json('api/curves')
  curve = answer['groups'][0]['evaluator/normalised_score']
  assert curve['x'] == [0, 50, 100] and len(curve['seeds']) == 4
  assert curve['low'] == [0, 0, 0] and curve['high'] == [0, 1.5, 3]
  assert curve['mean'] == [0, 0.75, 1.5]  # without the lowest and the highest seed
  assert served.ask(f'api/curves?known={answer["version"]}')[0] == 204
  write(folders[0], 'evaluator', {'environment_step': 150, 'normalised_score': 0.5})
  assert served.json(f'api/curves?known={answer["version"]}')['version'] != answer['version']
  assert served.ask('api/curves?x=age')[0] == 404


def test_config_differences_of_two_agents_are_only_in_keys_that_both_have(tmp_path):
  made = (presets.laptop('catch'), presets.ppo_laptop('catch'))
  for index, each in enumerate(made):
    folder_lib.open_run(tmp_path / str(index), each)
  found = groups.differences([history.History(tmp_path / str(index)) for index in range(2)])
  assert found['agent_name'] == ['dreamer', 'ppo'] and found['actor.num_envs'] == [16, 256]
  assert not [key for key, values in found.items() if key.startswith('agent.') and None in values]
  assert 'agent.deterministic_size' not in found


def test_long_run_is_read_in_parts(folder, serve, monkeypatch):
  monkeypatch.setattr(dashboard, 'READ_SECONDS', 0.0)
  count = 5 * history.CHUNK // 1000
  write(folder, 'learner', *({'learner_step': i, 'environment_step': 5 * i, 'text': '-' * 950, 'loss': 0.123456789}
                             for i in range(count)))  # fmt: skip
  served = serve(folder)
  answers = [served.json('api/curves')]
  while answers[-1]['unread']:
    answers.append(served.json('api/curves'))
  assert answers[0]['groups'] is None and len(answers) > 3
  curve = answers[-1]['groups'][0]['learner/loss']
  assert curve['x'][-1] == 5 * (count - 1) and curve['mean'][5] == 0.12346


def test_videos_are_served_only_from_their_folder(folder, serve):
  for name in ('70.gif', '80-dream.mp4'):
    (folder / 'videos' / name).write_bytes(name.encode())
  served = serve(folder)
  videos = served.json('api/runs')['runs'][0]['videos']
  assert {
    (video['source'].partition('?')[0], video['update'], video['dream']) for video in videos
  } == {
    ('video/0/70.gif', 70, False),
    ('video/0/80-dream.mp4', 80, True),
  }
  status, content, response = served.ask('video/0/70.gif')
  assert (status, content, response['Content-Type']) == (200, b'70.gif', 'image/gif')
  status, part, _ = served.ask('video/0/80-dream.mp4', Range='bytes=1-3')
  assert (status, part) == (206, b'0-d')
  for name in ('71.gif', '..%2Fconfig.yaml', '..%2f..%2fconfig.yaml', '/etc/passwd'):
    assert served.ask(f'video/0/{name}')[0] == 404
  for index in ('1', 'x', '-1', '00', '%C2%B2', '9' * 5000):  # %C2%B2 is ², a digit to Python
    assert served.ask(f'video/{index}/70.gif')[0] == 404
  for number in range(dashboard.MOST_VIDEOS):
    (folder / 'videos' / f'9{number}.gif').write_bytes(b'')
  assert len(served.json('api/runs')['runs'][0]['videos']) == dashboard.MOST_VIDEOS
  assert served.ask('video/0/70.gif')[0] == 200  # an open page may still show it


def test_run_shows_states_and_events_of_its_nodes(folder, serve):
  event = lambda kind, name, code=None, restarts=0: {
    'kind': kind, 'name': name, 'pid': 7, 'exit_code': code, 'restarts': restarts
  }  # fmt: skip
  write(
    folder, 'events', event('started', 'learner'), event('started', 'actor-0'),
    event('exited', 'actor-0', -9), event('restarting', 'actor-0', -9),
    {'kind': 'warning', 'text': 'KL is large'}, event('started', 'actor-0', restarts=1),
  )  # fmt: skip
  write(folder, 'learner', {'learner_step': 1, 'starved_fraction': 0.25})
  write(folder, 'actor-0', {'throttled_fraction': 0.5, 'unrolled_fraction': 0.25})
  write(folder, 'evaluator', {'learner_step': 3})  # after the learner's newest metrics
  served = serve(folder)
  (shown,) = served.json('api/runs')['runs']
  assert shown['learner_step'] == 3
  killed = 'killed with its launcher'
  states = [(node['name'], node['state'], node['restarts']) for node in shown['nodes']]
  assert states == [('learner', killed, 0), ('actor-0', killed, 1)]
  assert [each['text'] for each in shown['events']] == [
    'actor-0 exited with code -9; restart 1', 'KL is large'
  ]  # fmt: skip
  with folder_lib.only_one(folder):
    (shown,) = served.json('api/runs')['runs']
  assert [node['state'] for node in shown['nodes']] == ['running', 'running']


def test_each_chart_has_a_title_of_its_own():
  keys = (
    'learner/intrinsic/novelty', 'learner/dream/novelty', 'actor/episode_length', 'learner/episode_length',
    'actor/environment/doors', 'learner/environment/doors', 'learner/world_model/kl',
  )  # fmt: skip
  assert {chart['key']: chart['title'] for chart in panels.charts(keys)} == {
    'actor/episode_length': 'episode length, acting, steps (actor)',
    'learner/episode_length': 'episode length, acting, steps (learner)',
    'actor/environment/doors': 'doors, acting (actor/environment)',
    'learner/environment/doors': 'doors, acting (environment)',
    'learner/intrinsic/novelty': 'novelty (intrinsic)',
    'learner/dream/novelty': 'novelty (dream)',
    'learner/world_model/kl': 'kl, nats',
  }


def test_numbers_are_rounded_to_five_digits():
  values = np.array([0.0, 1.23456789, -98765432.1, 1.23456789e-7])
  assert panels.rounded(values) == [0.0, 1.2346, -98765432.0, 1.2346e-07]


def test_dashboard_names_bad_input(folder, tmp_path, capsys):
  with server.listen(0) as taken:
    port = taken.getsockname()[1]
    for arguments, key in (
      ([tmp_path / 'gone'], f'{tmp_path / "gone"}: '), ([folder, '--port', port], f'--port {port}: '),
      ([folder, '--port', 70000], '--port 70000: '),
    ):  # fmt: skip
      assert run(*arguments) == 2
      error = capsys.readouterr().err
      assert key in error and error.count('\n') == 1


@pytest.fixture
def command(folder):
  """The process of `hephaestus dashboard`, and its address."""
  words = [HEPHAESTUS, 'dashboard', folder]
  process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
  address = re.match(r'(http://127.0.0.1:\d+/\S+/) ', process.stdout.readline()).group(1)
  yield process, address
  process.kill()
  process.communicate()


def test_command_serves_until_ctrl_c(command):
  process, address = command
  with urllib.request.urlopen(f'{address}api/runs') as answer:
    assert json.load(answer)['runs'][0]['world'] == 'catch'
  process.send_signal(signal.SIGINT)
  assert process.wait(timeout=polling.PATIENCE) == 0


@pytest.fixture
def page(browser):
  page = browser.new_page(viewport={'width': 1280, 'height': 900})
  page.set_default_timeout(1000 * polling.PATIENCE)
  yield page
  page.close()


def test_page_draws_new_rows_and_reports_a_stopped_dashboard(folder, command, page):
  process, address = command
  complaints = []
  page.on('console', lambda message: complaints.append(message.text))
  page.on('pageerror', lambda error: complaints.append(str(error)))
  row = lambda step: {'learner_step': step, 'environment_step': step, 'world_model/loss': step}
  write(folder, 'learner', *map(row, range(10)))
  page.goto(address)
  chart = '[data-key="learner/world_model/loss"]'
  page.wait_for_selector(f'{chart} canvas')
  assert page.get_attribute(chart, 'data-points') == '10' and 'catch' in page.inner_text('#runs')
  write(folder, 'learner', *map(row, range(10, 13)))
  polling.until(lambda: page.get_attribute(chart, 'data-points') == '13', 'the new rows')
  assert complaints == []
  process.send_signal(signal.SIGINT)
  page.wait_for_selector('#message:not([hidden])')
  assert 'is its command still running' in page.inner_text('#message')


def test_browser_without_token_or_from_another_site_is_refused(command, page):
  address = urllib.parse.urlsplit(command[1])
  assert page.goto(f'http://{address.netloc}/wrong/').status == 403
  assert page.goto(f'http://evil.example:{address.port}{address.path}').status == 403
  page.goto('about:blank')
  fetched = "address => fetch(address).then(() => 'read', () => 'refused')"
  assert page.evaluate(fetched, command[1]) == 'refused'
