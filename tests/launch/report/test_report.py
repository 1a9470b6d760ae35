"""Reports of runs: groups of seeds, their scores, the page in one file, and pictures of curves."""

import base64
import json
import os
import re
import sys

import imageio.v2 as imageio
import numpy as np
import polling
import pytest

from hephaestus.actors.environments import packages
from hephaestus.launch import config, main
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history, metrics
from hephaestus.launch.report import groups, plot
from hephaestus.launch.report import page as report_page

POINTS = [(0, 0.0), (100, 1.0)]


def write_run(folder, points, *overrides, environment='catch', agent='ppo', node='evaluator'):
  """Writes a run with a score and a return of ten times the score, at (environment step, score)."""
  made = config.override(config.of_preset(agent, 'laptop', environment), list(overrides))
  folder_lib.open_run(folder, made)
  rows = [
    {'environment_step': step, 'learner_step': step // 10, 'episode_return': 10 * score}
    | ({'normalised_score': score} if node == 'evaluator' else {})
    for step, score in points
  ]
  write_rows(folder, node, *rows)
  return folder


def write_rows(folder, node, *rows):
  logger = metrics.JsonLines(folder / 'metrics' / f'{node}.jsonl')
  for row in rows:
    logger.write(row)
  logger.close()


def run(*arguments):
  return main.run(main.parse(['hephaestus', 'report', *map(str, arguments)]))


def sizes(folders):
  """{label: number of runs} of the groups of some runs."""
  found, _ = groups.read(folders)
  return {group.label: len(group.runs) for group in found}


def stored(page):
  """The data inside of a report.html."""
  pattern = '<script id="stored" type="application/json">(.*?)</script>'
  return json.loads(re.search(pattern, page.read_text()).group(1))


def test_runs_that_differ_in_indifferent_keys_are_seeds_of_one_curve(tmp_path):
  folders = [
    write_run(tmp_path / 'a', POINTS, 'seed=0'),
    write_run(tmp_path / 'b', POINTS, 'seed=1', 'wandb=true', 'replay.max_in_flight=3'),
    write_run(tmp_path / 'c', POINTS, 'seed=1', 'learner.learning_rate=3e-4'),
    write_run(tmp_path / 'd', POINTS, agent='dreamer'),
    write_run(tmp_path / 'e', POINTS, 'max_environment_steps=7', agent='dreamer'),
  ]
  assert sizes(folders) == {
    'ppo learning_rate=0.001': 2, 'ppo learning_rate=0.0003': 1, 'dreamer': 2
  }  # fmt: skip


def test_run_that_begins_with_another_is_no_seed_of_it(tmp_path):
  folders = [write_run(tmp_path / name, POINTS, 'seed=0') for name in ('a', 'b', 'c')]
  (folders[1] / folder_lib.ORIGIN).write_text(f'{folders[0]}@960\n')
  assert sizes(folders) == {'from=nothing': 2, 'from=a@960': 1}


def test_curve_of_a_node_that_a_resume_lacks_ends(tmp_path):
  folder = write_run(tmp_path / 'a', [(0, 1.0), (100, 1.0), (9_000, 1.0)], node='actor-0')
  write_rows(folder, 'actor-1', {'environment_step': 50, 'episode_return': 0.0})
  opened = history.History(folder)
  opened.read()
  curve = opened.curves('environment_step')['actor/episode_return']
  assert curve.x.tolist() == [0, 50, 100, 9_000] and curve.mean.tolist() == [10, 5, 10, 10]


def test_score_says_how_many_seeds_have_it(tmp_path, capsys):
  folders = [
    write_run(tmp_path / 'a', POINTS, 'seed=0'),
    write_run(tmp_path / 'b', POINTS, 'seed=1', node='learner'),
  ]
  assert run(*folders) == 0
  assert '(1 of 2 seeds)  evaluator/normalised_score 1' in capsys.readouterr().out


def test_replay_keys_are_indifferent_to_fused_runs(tmp_path):
  several = ('learner.fused=false', 'replay.max_in_flight=4')
  folders = [write_run(tmp_path / 'a', POINTS), write_run(tmp_path / 'b', POINTS, several[0])]
  assert sizes(folders) == {'fused=true': 1, 'fused=false': 1}
  assert len(sizes([*folders, write_run(tmp_path / 'c', POINTS, *several)])) == 3


def test_label_has_few_of_many_differences(tmp_path):
  many = ['learner.num_epochs=5', 'learner.max_gradient=1.0', 'agent.clip=0.3', 'agent.gamma=0.9']
  folders = [write_run(tmp_path / 'a', POINTS), write_run(tmp_path / 'b', POINTS, *many)]
  first, second = sizes(folders)
  assert first.count('=') == second.count('=') == groups.MAX_KEYS and first.endswith(', …')
  more = write_run(tmp_path / 'c', POINTS, *many[:2], 'agent.clip=0.3', 'agent.gamma=0.8')
  assert len(sizes([*folders, more])) == 3  # a number tells apart what the shown keys do not


def test_seeds_are_compared_by_their_last_common_values(tmp_path, capsys):
  folders = [
    write_run(tmp_path / 'a', [(0, 0.0), (100, 0.4), (200, 1.0)]),
    write_run(tmp_path / 'b', [(0, 0.2), (150, 0.6), (250, 0.8)], 'seed=1'),
  ]
  assert run(*folders, tmp_path / 'a' / '..' / 'a') == 0
  score = 'evaluator/normalised_score 0.8 (0.6 to 1) at 200 environment steps'
  assert capsys.readouterr().out == f'catch  ppo (2 seeds)  {score}\n'
  assert run(folders[0], '--x', 'learner_step') == 0
  assert 'evaluator/normalised_score 1 at 20 updates' in capsys.readouterr().out


def test_unreadable_runs_are_left_out_by_name(tmp_path, capsys):
  good = write_run(tmp_path / 'good', POINTS)
  with open(good / 'metrics' / 'evaluator.jsonl', 'ab') as file:
    file.write(b'nothing\n{"time": 1200.0, "environment_st')  # the last line is being written
  young = tmp_path / 'young'
  folder_lib.open_run(young, presets.laptop('catch'))
  assert run(good, tmp_path / 'gone', young) == 0
  shown = capsys.readouterr()
  assert shown.out.startswith('catch  ppo (1 seed)  evaluator/normalised_score 1 at 100')
  for words in ('left out: ', 'gone: is not', 'young: has no metrics yet', 'good: 1 line of its'):
    assert words in shown.err
  assert run(tmp_path / 'gone', young) == run() == 2
  assert 'no runs are given' in capsys.readouterr().err


def test_page_has_the_curves_of_its_runs_and_escapes_their_names(tmp_path, capsys):
  folders = [
    write_run(tmp_path / f'a <script> {seed}', POINTS, f'seed={seed}') for seed in range(2)
  ]
  out = tmp_path / 'new' / 'out'
  assert run(*folders, '--out', out) == 0
  made = stored(out / 'report.html')
  assert 'a <script> 0' not in (out / 'report.html').read_text()
  curve = made['curves']['groups'][0]['evaluator/normalised_score']
  assert curve['mean'] == [0, 1] and len(curve['seeds']) == 2
  (tmp_path / 'file').write_text('')
  assert run(*folders, '--out', tmp_path / 'file') == 2
  assert f'--out {tmp_path / "file"}: ' in capsys.readouterr().err


def test_page_has_all_panels_in_one_file(tmp_path, capsys, monkeypatch, browser):
  dreamer = write_run(tmp_path / 'dreamer', POINTS, agent='dreamer')
  steps = {'learner_step': 8, 'environment_step': 80}
  losses = {'world_model/loss': 2.0, 'intrinsic/boredom': 0.0, 'replay_ratio': 32.0}
  write_rows(dreamer, 'learner', {**steps, **losses, 'starved_fraction': 0.25})
  node = {'name': 'learner', 'pid': 7, 'exit_code': -9, 'restarts': 0}
  write_rows(dreamer, 'events', {'kind': 'restarting', **node})
  videos = dreamer / 'videos'
  frames = [np.full((32, 48, 3), shade, np.uint8) for shade in (0, 200)]
  for name in ('7.gif', '8.gif', '8-dream.gif'):
    imageio.mimsave(videos / name, frames, duration=125)
  os.utime(videos / '7.gif', (0, 0))
  unscored = write_run(tmp_path / 'unscored', [(0, 0.5)], node='learner', environment='grid_world')
  out = tmp_path / 'out'
  assert run(dreamer, unscored, '--out', out) == 0
  assert [path.name for path in out.iterdir()] == ['report.html']
  page, complaints = browser.new_page(), []
  page.on('console', lambda message: complaints.append(message.text))
  page.on('pageerror', lambda error: complaints.append(str(error)))
  page.on('request', lambda request: complaints.append(request.url))
  page.goto((out / 'report.html').as_uri())
  page.wait_for_selector('[data-key="learner/world_model/loss"] canvas')
  assert [each for each in complaints if not each.startswith(('file:', 'data:', 'blob:'))] == []
  page.set_viewport_size({'width': 400, 'height': 900})
  fits = lambda: page.evaluate('document.documentElement.scrollWidth') <= 400
  polling.until(fits, 'charts of the new width')
  titles = [
    'Runs', 'Learning', 'Intrinsic rewards', 'World model',
    'Replay over the run', 'Speed', 'Nodes', 'Videos of evaluations', 'Config differences',
  ]  # fmt: skip
  assert page.locator('h2:visible').all_inner_texts() == titles
  assert page.locator('#links a').all_inner_texts() == titles
  page.click('#links a:last-child')
  polling.until(lambda: 0 <= page.locator('#configs').bounding_box()['y'] < 900, 'the section')
  shown = page.inner_text('main')
  assert '0 throughout: boredom' in shown
  assert 'update 8\n' in shown and 'update 8, with its dream' in shown and 'update 7' not in shown
  assert 'learner exited with code -9; restart 1' in shown
  shown = [
    video['source'] for run in stored(out / 'report.html')['runs'] for video in run['videos']
  ]
  decoded = [base64.b64decode(each.removeprefix('data:image/gif;base64,')) for each in shown]
  assert decoded == [(videos / name).read_bytes() for name in ('8.gif', '8-dream.gif')]
  monkeypatch.setattr(report_page, 'MOST_VIDEO_BYTES', 10)
  capsys.readouterr()
  assert run(dreamer, '--out', out) == 0
  reasons = [video['reason'] for video in stored(out / 'report.html')['runs'][0]['videos']]
  assert len(reasons) == 2 and all('would make the page too large' in each for each in reasons)
  printed = capsys.readouterr().err
  assert '0 videos' in printed and str(videos / '8-dream.gif') in printed


def test_picture_shows_a_curve_for_each_group_of_runs(tmp_path):
  pytest.importorskip('matplotlib')
  seeds = [write_run(tmp_path / f'{seed}', POINTS, f'seed={seed}') for seed in range(2)]
  out = tmp_path / 'curves.png'
  plot.runs(out, {'two': seeds, 'one': seeds[:1]}, 'evaluator/normalised_score')
  picture = imageio.imread(out)[..., :3]
  assert picture.shape[1] >= 1000 and (picture[:5] == 255).all()
  for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
    assert (picture == colour).all(-1).sum() > 100
  with pytest.raises(ValueError, match='actor/none: no run of one has it; they have evaluator/ep'):
    plot.runs(out, {'one': seeds[:1]}, 'actor/none')


def test_picture_of_a_name_that_is_no_formula(tmp_path):
  folder = write_run(tmp_path / 'run', POINTS)
  write_rows(folder, 'learner', {'learner_step': 3, 'environment_step': 9, '$\\frac{$': 1.0})
  plot.runs(tmp_path / 'x.png', {'$\\frac{$': [folder]}, 'learner/$\\frac{$')
  assert (tmp_path / 'x.png').stat().st_size > 10_000


def test_missing_package_names_its_extra(tmp_path, capsys, monkeypatch):
  folder = write_run(tmp_path / 'a', POINTS)
  monkeypatch.setitem(sys.modules, 'uplot', None)
  assert run(folder, '--out', tmp_path) == 2
  assert packages.install('report') in capsys.readouterr().err
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ValueError, match='Install the extra `report`: '):
    plot.runs(tmp_path / 'x.png', {'a': [folder]})
