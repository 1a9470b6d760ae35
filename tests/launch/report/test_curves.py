"""Reports of runs: grouping by seed, positions of comparison, confidence intervals, and files."""

import base64
import json
import os
import re
import shutil
import sys

import imageio.v2 as imageio
import numpy as np
import polling
import pytest
from playwright import sync_api

from hephaestus.launch import config, main
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history, metrics
from hephaestus.launch.report import curves, pictures
from hephaestus.launch.report import page as report_page

HOUR = 3600.0


def write_run(
  folder, points, *, overrides=(), environment='catch', agent='ppo', node='evaluator', **more
):
  """Writes a run with a score and a return of ten times the score, one second per step.

  Args:
    folder: of the run.
    points: environment step and score of each row, in order.
    overrides: of the preset's config.
    environment: its name.
    agent: its name.
    node: that wrote the rows.
    more: further keys of each row.
  """
  made = config.override(config.of_preset(agent, 'laptop', environment), list(overrides))
  folder_lib.open_run(folder, made)
  write_rows(
    folder,
    node,
    [
      {
        'time': 1000.0 + step,
        'environment_step': step,
        'learner_step': step // 10,
        'episode_return': None if score is None else 10 * score,
        'normalised_score': score,
        **more,
      }
      for step, score in points
    ],
  )
  return folder


def write_rows(folder, node, rows):
  logger = metrics.JsonLines(folder / 'metrics' / f'{node}.jsonl')
  for row in rows:
    logger.write(row)
  logger.close()


def run(*arguments):
  return main.run(main.parse(['hephaestus', 'report', *map(str, arguments)]))


def remarks(stderr):
  """Lines of stderr other than progress."""
  progress = r'hephaestus report: (reads the runs|draws picture \d+: .*)'
  return [line for line in stderr.splitlines() if not re.fullmatch(progress, line)]


def stored(page):
  """The data inside of a report.html."""
  pattern = '<script id="stored" type="application/json">(.*?)</script>'
  return json.loads(re.search(pattern, page.read_text()).group(1))


def cells(markdown):
  """{label: [cell, ...]} of all tables."""
  rows = [line.strip('| ').split(' | ') for line in markdown.splitlines() if line.startswith('| ')]
  return {row[0]: row[1:] for row in rows if row[0] != 'curve'}


def test_runs_that_differ_in_indifferent_keys_are_seeds_of_one_curve(tmp_path):
  points = [(0, 0.0), (100, 1.0)]
  folders = [
    write_run(tmp_path / 'a', points, overrides=['seed=0']),
    write_run(tmp_path / 'b', points, overrides=['seed=1', 'wandb=true', 'replay.max_in_flight=3']),
    write_run(tmp_path / 'c', points, overrides=['seed=1', 'learner.learning_rate=3e-4']),
    write_run(tmp_path / 'd', points, agent='dreamer'),
    write_run(tmp_path / 'e', points, agent='dreamer', overrides=['max_environment_steps=7']),
  ]
  table = cells(curves.make([*folders, tmp_path / 'a' / '..' / 'a']).markdown)
  assert {label: row[0] for label, row in table.items()} == {
    'ppo learning_rate=0.001': '2',
    'ppo learning_rate=0.0003': '1',
    'dreamer': '2',
  }


def test_replay_keys_are_indifferent_to_fused_runs(tmp_path):
  folders = [
    write_run(tmp_path / 'a', [(0, 0.0)]),
    write_run(tmp_path / 'b', [(0, 0.0)], overrides=['learner.fused=false', 'seed=1']),
  ]
  assert list(cells(curves.make(folders).markdown)) == ['fused=true', 'fused=false']
  folders.append(
    write_run(
      tmp_path / 'c',
      [(0, 0.0)],
      overrides=['learner.fused=false', 'replay.max_in_flight=4'],
    )
  )
  assert len(cells(curves.make(folders).markdown)) == 3


def test_label_names_few_differences_and_note_names_all(tmp_path):
  many = ['learner.num_epochs=5', 'learner.max_gradient=1.0', 'agent.clip=0.3', 'agent.gamma=0.9']
  folders = [
    write_run(tmp_path / 'a', [(0, 0.0)]),
    write_run(tmp_path / 'b', [(0, 0.0)], overrides=many),
  ]
  markdown = curves.make(folders).markdown
  assert list(cells(markdown)) == ['gamma=0.99, …', 'gamma=0.9, …']
  assert 'agent.gamma=0.9, agent.clip=0.3, learner.num_epochs=5, learner.max_gradient=1' in markdown


def test_seeds_are_compared_by_their_last_values(tmp_path):
  folders = [
    write_run(tmp_path / 'a', [(0, 0.0), (100, 0.4), (200, 1.0)]),
    write_run(tmp_path / 'b', [(0, 0.2), (150, 0.6), (250, 0.8)], overrides=['seed=1']),
  ]
  markdown = curves.make(folders).markdown
  assert '| curve | seeds | 0 | 20 | 40 | 60 | 80 | 100 | 120 | 140 | 160 | 180 | 200 |' in markdown
  assert cells(markdown)['ppo'] == [
    '2', '0.10', *['–'] * 4, '0.30', '–', '–', '0.50', '–', '0.80',
    '0.80 (range 0.60 to 1.00) at 200', '0.80 (range 0.60 to 1.00)', '3.3 to 4.2',
  ]  # fmt: skip
  assert 'all seeds have values until 200 only, where' in markdown


def test_curve_begins_at_its_last_seed(tmp_path):
  folders = [
    write_run(tmp_path / 'a', [(0, 0.0), (100, 1.0)]),
    write_run(tmp_path / 'b', [(30, 0.0), (100, 1.0)], overrides=['seed=1']),
  ]
  row = cells(curves.make(folders).markdown)['ppo']
  assert row[1:7] == ['–', '–', '–', '0.00', '–', '–']


def test_table_shows_no_value_where_nothing_was_measured(tmp_path):
  write_run(tmp_path / 'a', [(0, -0.5), (106_496, 0.75)])
  row = cells(curves.make([tmp_path / 'a']).markdown)['ppo']
  assert row[1] == '-0.50' and set(row[2:-3]) == {'–'}
  assert row[-3].startswith('0.75')


def test_interquartile_mean_leaves_out_outer_quarters():
  values = np.array([[0.0, 7.0], [0.4, 7.0], [0.6, 7.0], [10.0, 7.0]])
  made = curves.estimate(values, 'iqm')
  np.testing.assert_allclose(made.point, [0.5, 7.0])
  assert 0.0 <= made.low[0] < 0.5 < made.high[0] <= 10.0
  assert (made.low[1], made.high[1]) == (7.0, 7.0)
  np.testing.assert_allclose(curves.estimate(values[:3], 'median').point, [0.4, 7.0])


def test_intervals_cover_the_truth_and_are_deterministic():
  values = np.random.default_rng(0).normal(0.5, 0.1, (10, 20))  # twenty curves of ten seeds
  state = np.random.get_state()[1].copy()
  made = curves.estimate(values, 'iqm')
  assert ((made.low < 0.5) & (made.high > 0.5)).sum() >= 16
  assert (made.high - made.low < 0.25).all() and (made.low < made.point).all()
  np.testing.assert_array_equal(made, curves.estimate(values, 'iqm'))
  np.testing.assert_array_equal(
    np.random.get_state()[1], state
  )  # the global generator is not changed


def test_repeated_steps_of_resumed_run_count_once(tmp_path):
  folder = write_run(tmp_path / 'a', [(0, 0.0), (100, 0.4), (200, 0.9), (150, 0.5), (250, 0.6)])
  numbers = history.read(folder).series('evaluator', 'normalised_score', 'environment_step')
  assert numbers.x.tolist() == [0, 100, 150, 250]
  assert numbers.value.tolist() == [0.0, 0.4, 0.5, 0.6]


def test_minutes_exclude_pauses_between_launches(tmp_path):
  folder = write_run(tmp_path / 'a', [(0, 0.0), (60, 0.4)])
  later = [1060.0 + HOUR, 1180.0 + HOUR]
  rows = [{'time': time, 'environment_step': 90, 'normalised_score': 0.5} for time in later]
  write_rows(folder, 'evaluator', rows)
  started = {'kind': 'started', 'name': 'learner'}
  write_rows(folder, 'events', [{'time': 990.0, **started}, {'time': 1030.0 + HOUR, **started}])
  numbers = history.read(folder).series('evaluator', 'normalised_score', 'minutes')
  np.testing.assert_allclose(numbers.x, [0, 1, 3])  # the second row repeats the step of the third
  assert numbers.value.tolist() == [0.0, 0.5, 0.5]


def test_actors_are_averaged_by_number_of_episodes(tmp_path):
  folder = write_run(tmp_path / 'a', [(0, 0.0)], agent='dreamer')
  row = lambda step, value, episodes: {
    'environment_step': step, 'episode_return': value, 'episodes': episodes,
    'throttled_fraction': value,
  }  # fmt: skip
  write_rows(folder, 'actor-0', [row(10, 1.0, 30), row(None, 9.0, 30), row(30, None, 0)])
  write_rows(folder, 'actor-1', [row(20, 2.0, 10), row(40, 3.0, 10)])
  known = history.read(folder)
  numbers = known.series('actor', 'episode_return', 'environment_step')
  assert numbers.x.tolist() == [10, 20, 40]
  assert numbers.value.tolist() == [1.0, 1.25, 1.5]
  numbers = known.series('actor', 'throttled_fraction', 'environment_step')
  assert numbers.value.tolist() == [1.0, 1.5, 2.0]  # not weighted by episodes


def test_return_is_shown_where_a_run_has_no_score(tmp_path):
  points = [(0, 0.5), (100, 0.5)]
  scored = [write_run(tmp_path / f'{seed}', points, overrides=[f'seed={seed}']) for seed in (0, 1)]
  assert cells(curves.make(scored).markdown)['ppo'][1] == '0.50'
  other = write_run(tmp_path / '2', points, overrides=['seed=2'], normalised_score=None)
  assert cells(curves.make([*scored, other]).markdown)['ppo'][:2] == ['3', '5.00']


def test_metric_of_another_node_is_found(tmp_path, capsys):
  folder = write_run(tmp_path / 'a', [(0, 0.5), (80, 0.5)], agent='dreamer')
  rows = [{'learner_step': step, 'dream/horizon': 1000.0 * step} for step in (2, 4)]
  write_rows(folder, 'learner', rows)
  assert run(folder, '--metric', 'dream/horizon', '--x', 'learner_step') == 0
  shown = capsys.readouterr().out
  assert '`dream/horizon`, of the learner, by updates of the learner' in shown
  assert cells(shown)['dreamer'][-3] == '4,000 at 4'
  assert run(folder, '--metric', 'learner_step', '--node', 'evaluator') == 0
  assert cells(capsys.readouterr().out)['dreamer'][-3] == '8.00 at 80'


def test_label_groups_runs_into_one_curve(tmp_path, capsys):
  points = [(0, 0.0), (100, 1.0)]
  for name, rate in (('a', 1e-3), ('b', 3e-4), ('c', 1e-4)):
    write_run(tmp_path / name, points, overrides=[f'learner.learning_rate={rate}'])
  all_runs = [tmp_path / name for name in 'abc']
  assert run('--label', 'fa|st', tmp_path / 'a', tmp_path / 'b', '--x', 'minutes') == 0
  shown = capsys.readouterr().out
  assert 'fa\\|st' in shown and 'its runs differ in learner.learning_rate' in shown
  assert 'seed 0 is in it more than once' in shown
  assert run(*all_runs, '--label', 'fast', tmp_path / 'a', tmp_path / 'b') == 0
  assert {name: row[0] for name, row in cells(capsys.readouterr().out).items()} == {
    'fast': '2',
    'ppo': '1',
  }
  for labels, words in (
    (['--label', 'fast'], '--label fast: give the runs as well'),
    (['--label', 'x', tmp_path / 'a', '--label', 'x', tmp_path / 'b'], '--label x: is given twice'),
    ([*all_runs, '--label', 'ppo', tmp_path / 'a', tmp_path / 'b'], '--label ppo: is the name of'),
  ):
    assert run(*labels) == 2
    assert words in capsys.readouterr().err


def test_truncated_last_line_is_not_read(tmp_path):
  folder = write_run(tmp_path / 'a', [(0, 0.0), (100, 1.0)])
  before = curves.make([folder]).markdown
  with open(folder / 'metrics' / 'evaluator.jsonl', 'ab') as file:
    file.write(b'{"time": 1200.0, "environment_st')
  assert curves.make([folder]).markdown == before


def test_damaged_line_is_left_out_and_reported(tmp_path, capsys):
  folder = write_run(tmp_path / 'a', [(0, 0.0), (100, 1.0)])
  before = curves.make([folder]).markdown
  with open(folder / 'metrics' / 'evaluator.jsonl', 'ab') as file:
    file.write(b'nothing\n')
  assert run(folder) == 0
  shown = capsys.readouterr()
  assert shown.out == before
  (line,) = remarks(shown.err)
  assert line.endswith('a: 1 line of its metrics is damaged and left out')


def test_unreadable_runs_are_left_out_by_name(tmp_path, capsys):
  good = write_run(tmp_path / 'good', [(0, 0.0), (100, 1.0)])
  young = tmp_path / 'young'
  folder_lib.open_run(young, presets.laptop('catch'))
  damaged = write_run(tmp_path / 'damaged', [(0, 0.0)])
  (damaged / 'metrics' / 'evaluator.jsonl').write_text('nothing\n')
  unscored = write_run(tmp_path / 'unscored', [(0, 0.0)], node='learner')
  assert run(good, tmp_path / 'gone', young, damaged, unscored) == 0
  shown = capsys.readouterr()
  assert list(cells(shown.out)) == ['ppo']
  lines = remarks(shown.err)
  assert len(lines) == 4
  for line, words in zip(
    lines,
    (
      'gone: is not the folder of a run, it has no config.yaml',
      'young: has no metrics yet',
      'damaged: has no metrics yet; 1 line of its metrics is damaged and left out',
      'unscored: has no normalised_score of the evaluator by environment steps',
    ),
    strict=True,
  ):
    assert words in line
    assert f'* {line.removeprefix("hephaestus report: ")}' in shown.out
  assert run(tmp_path / 'gone', young) == 2
  (message,) = remarks(capsys.readouterr().err)
  assert 'gone: is not' in message and 'young: has no metrics' in message
  assert run() == 2
  assert 'no runs are given; name their folders' in capsys.readouterr().err


def test_unknown_metric_is_refused_with_list_of_known_ones(tmp_path, capsys):
  folder = write_run(tmp_path / 'a', [(0, 0.0)], final=True)
  write_rows(folder, 'learner', [{'learner_step': 0, 'ppo/entropy': 1.0}])
  assert run(folder, '--metric', 'score') == 2
  (message,) = remarks(capsys.readouterr().err)
  assert (
    '--metric score: catch has no such numbers; it has, evaluator: environment_step, ' in message
  )
  assert (
    'episode_return, learner_step, normalised_score; learner: learner_step, ppo/entropy' in message
  )
  assert 'actor: none' in message and 'final' not in message


def test_each_environment_has_picture_and_table(tmp_path, capsys):
  scores = (0.0, 0.4, 1.0)
  folders = [
    write_run(tmp_path / f'{seed}', [(0, 0.0), (2000, score)], overrides=[f'seed={seed}'])
    for seed, score in enumerate(scores)
  ]
  other = write_run(tmp_path / 'other', [(0, 0.1)], environment='gymnax/CartPole-v1')
  out = tmp_path / 'new' / 'out'
  assert run(*folders, other, '--out', out) == 0
  shown, progress = capsys.readouterr()
  assert 'hephaestus report: reads the runs' in progress and 'draws picture 1: ' in progress
  assert (out / 'report.md').read_text() == shown
  assert '![Curves of gymnax/CartPole-v1](gymnax-CartPole-v1.png)' in shown
  assert '0.47 (0.00 to 1.00) at 2,000 | 0.40 (0.00 to 1.00)' in shown
  assert sorted(path.name for path in out.iterdir()) == [
    'catch-evaluator-episode_return.png', 'catch.png',
    'gymnax-CartPole-v1-evaluator-episode_return.png', 'gymnax-CartPole-v1.png', 'report.html',
    'report.md',
  ]  # fmt: skip
  picture = imageio.imread(out / 'catch.png')[..., :3]
  assert picture.shape[1] >= 1000
  edges = (picture[:5], picture[-5:], picture[:, :5], picture[:, -5:])
  assert all((edge == 255).all() for edge in edges)
  blue = (picture == (0x00, 0x72, 0xB2)).all(-1)
  assert blue.sum() > 1000 and (picture == 255).all(-1).mean() > 0.5
  (tmp_path / 'file').write_text('')
  assert run(*folders, '--out', tmp_path / 'file') == 2
  assert f'--out {tmp_path / "file"}: cannot be written to' in capsys.readouterr().err


def test_report_of_one_metric_has_only_its_picture(tmp_path):
  folders = [
    write_run(tmp_path / f'{seed}', [(0, 0.0), (2000, 0.5)], overrides=[f'seed={seed}'])
    for seed in range(2)
  ]
  out = tmp_path / 'out'
  metric = ['--metric', 'normalised_score']
  assert run('--label', 'a <script> b', *folders, '--out', out, *metric) == 0
  made = stored(out / 'report.html')
  assert 'a <script> b' not in (out / 'report.html').read_text()
  assert [chart['key'] for chart in made['curves']['charts']] == ['evaluator/normalised_score']
  assert made['runs'] == [] and made['tables'][0]['rows'][0][0] == 'a <script> b'
  assert '0.50 (range 0.50 to 0.50) at 2,000' in made['tables'][0]['rows'][0]
  (curve,) = made['curves']['groups'][0].values()
  assert curve['mean'] == [0, 0.5] and len(curve['seeds']) == 2
  assert sorted(path.name for path in out.iterdir()) == ['catch.png', 'report.html', 'report.md']


@pytest.fixture
def browser():
  if shutil.which('chromium') is None:
    pytest.skip('needs a browser: install the Debian package chromium')
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=shutil.which('chromium'), args=['--no-sandbox']
    )
    yield browser
    browser.close()


def test_html_report_has_all_panels_in_one_file(tmp_path, capsys, monkeypatch, browser):
  monkeypatch.setattr(pictures, 'DOTS_PER_INCH', 40)  # small pictures draw faster
  points = [(0, 0.0), (80, 0.5)]
  dreamer = write_run(tmp_path / 'dreamer', points, agent='dreamer')
  steps = {'learner_step': 8, 'environment_step': 80}
  losses = {'world_model/loss': 2.0, 'intrinsic/boredom': 0.0, 'replay_ratio': 32.0}
  ages = {'replay/frontier/age/median': 9.0, 'replay/frontier/age/high': 20.0}
  write_rows(dreamer, 'learner', [{**steps, **losses, **ages, 'starved_fraction': 0.25}])
  node = {'name': 'learner', 'pid': 7, 'exit_code': -9}
  kinds = {'restarting': 0, 'started': 1}  # the number of restarts so far
  write_rows(
    dreamer, 'events', [{'kind': kind, 'restarts': n, **node} for kind, n in kinds.items()]
  )
  videos = dreamer / 'videos'
  frames = [np.full((32, 48, 3), shade, np.uint8) for shade in (0, 200)]
  for name in ('7.gif', '8.gif', '8-dream.gif'):
    imageio.mimsave(videos / name, frames, duration=125)
  os.utime(videos / '7.gif', (0, 0))
  unscored = write_run(tmp_path / 'unscored', [(0, None)], node='learner', environment='grid_world')
  write_rows(unscored, 'learner', [{**steps, 'ppo/entropy': 1.0}])
  out = tmp_path / 'out'
  assert run(dreamer, unscored, '--out', out) == 0
  page, complaints = browser.new_page(), []
  page.on('console', lambda message: complaints.append(message.text))
  page.on('pageerror', lambda error: complaints.append(str(error)))
  page.on('request', lambda request: complaints.append(request.url))
  page.goto((out / 'report.html').as_uri())
  page.wait_for_selector('[data-key="learner/world_model/loss"] canvas')
  assert [each for each in complaints if not each.startswith(('file:', 'data:', 'blob:'))] == []
  for width in (400, 960):
    page.set_viewport_size({'width': width, 'height': 900})
    fits = lambda width=width: page.evaluate('document.documentElement.scrollWidth') <= width
    polling.until(fits, 'charts of the new width')
  assert [title.split('\n')[0] for title in page.locator('h2:visible').all_inner_texts()] == [
    'Runs', 'Comparison over seeds', 'Learning', 'Where time goes', 'Intrinsic rewards',
    'World model', 'Actor and critic', 'Replay over the run', 'Speed', 'Nodes',
    'Videos of evaluations', 'Config differences', 'Left out',
  ]  # fmt: skip
  for name in ('catch', 'catch-learner-world_model-loss', 'catch-learner-replay-frontier-age-median',
               'grid_world-learner-ppo-entropy'):  # fmt: skip
    assert imageio.imread(out / f'{name}.png').size, name
  shown = page.inner_text('main')
  assert (
    '0 throughout: boredom' in shown and not (out / 'catch-learner-intrinsic-boredom.png').exists()
  )
  sources = [
    video['source'] for run in stored(out / 'report.html')['runs'] for video in run['videos']
  ]
  videos_of = [base64.b64decode(each.removeprefix('data:video/mp4;base64,')) for each in sources]
  assert len(videos_of) == 2 and all(video[4:8] == b'ftyp' for video in videos_of)
  assert 'update 8\n' in shown and 'update 8, with its dream' in shown and 'update 7' not in shown
  assert 'learner exited with code -9; restart 1' in shown and 'waits for data 25 %' in shown
  monkeypatch.setattr(report_page, 'MOST_VIDEO_BYTES', 10)
  capsys.readouterr()
  assert run(dreamer, '--out', out) == 0
  reasons = [video['reason'] for video in stored(out / 'report.html')['runs'][0]['videos']]
  assert reasons and all('would make the page too large' in reason for reason in reasons)
  lines = remarks(capsys.readouterr().err)
  assert 'report.html: ' in lines[0] and lines[0].endswith('(as PNG), 0 videos')
  assert ' MB, 6 pictures ' in lines[0]
  assert [line.split(': ')[1] for line in lines[1:]] == [
    str(videos / name) for name in ('8.gif', '8-dream.gif')
  ]


@pytest.mark.parametrize('name', ['matplotlib', 'rliable', 'uplot'])
def test_missing_package_names_its_extra(tmp_path, capsys, monkeypatch, name):
  monkeypatch.setitem(sys.modules, name, None)
  assert run(write_run(tmp_path / 'a', [(0, 0.0)])) == 2
  (message,) = remarks(capsys.readouterr().err)
  assert f'the package {name} is not installed' in message
  assert 'uv sync --inexact --extra report' in message
