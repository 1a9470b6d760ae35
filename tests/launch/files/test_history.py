"""Metrics of growing files: each row is read once, also after damage, and thinning keeps the means."""

import json
import shlex
import time
import tracemalloc

import numpy as np
import pytest

from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history, metrics
from hephaestus.launch.report import panels

LOSS = 'learner/loss'


@pytest.fixture
def folder(tmp_path):
  folder_lib.open_run(tmp_path / 'run', config.override(presets.laptop('catch'), []))
  return tmp_path / 'run'


def write(folder, node, rows, start=100.0):
  with (folder / 'metrics' / f'{node}.jsonl').open('a') as file:
    file.writelines(
      json.dumps({'time': start + index, **row}) + '\n' for index, row in enumerate(rows)
    )


def rows(start, end, **more):
  return [{'learner_step': step, 'loss': 10.0 * step, **more} for step in range(start, end)]


def read(run):
  run.read(time.monotonic() + 60)
  return run


def curves(folder, x='learner_step'):
  return read(history.History(folder)).curves(x)


def test_new_rows_are_read_once(folder):
  run = read(history.History(folder))
  assert run.curves('learner_step') == {}
  write(folder, 'learner', rows(0, 3))
  assert read(run).curves('learner_step')[LOSS].mean.tolist() == [0, 10, 20]
  version = run.version
  assert read(run).version == version
  write(folder, 'learner', rows(3, 5))
  assert read(run).curves('learner_step')[LOSS].x.tolist() == [0, 1, 2, 3, 4]
  assert run.version != version and run.last('learner', 'loss') == 40.0


def test_new_keys_in_each_row_take_memory_of_the_file_only(folder):
  """A full column for each of these keys would take 800 MB."""
  write(folder, 'learner', [{f'new-{index}': 1.0} for index in range(metrics.MOST_KEYS + 100)])
  write(folder, 'learner', [{'new-0': 1.0} for _ in range(50_000)])
  write(folder, 'learner', [{f'new-{index}': 1.0 for index in range(0, 900)}])
  tracemalloc.start()
  run = read(history.History(folder))
  _, most = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert most < 30e6
  assert len(run._nodes['learner'].keys) == metrics.MOST_KEYS
  assert run.damage.startswith('101 lines')
  assert run.last('learner', 'new-899') == 1.0 and run.last('learner', 'new-950') is None
  known = {name for row in metrics.read(folder / 'metrics' / 'learner.jsonl') for name in row}
  assert len(known) == metrics.MOST_KEYS


@pytest.mark.parametrize('name', ['a' * 300, 'a\x00b', 'a\x1b]0;b\x07', 'a\x9b2J', '\ud800'])
def test_metric_of_a_hostile_name_is_left_out(folder, name):
  write(folder, 'learner', rows(0, 2, **{name: 1.0, '$\\frac{$': 2.0}))
  (folder / 'metrics' / 'events.jsonl').write_text(
    json.dumps({'time': 1, 'kind': 'warning', 'text': f'of {name[:9]}'}) + '\n'
  )
  run = read(history.History(folder))
  assert set(run.curves('learner_step')) == {LOSS, 'learner/$\\frac{$'}
  assert run.events[0]['text'].isprintable()


def test_truncated_line_is_read_later_and_damaged_line_skipped(folder):
  write(folder, 'learner', rows(0, 2))
  path = folder / 'metrics' / 'learner.jsonl'
  path.write_text(path.read_text() + 'no row\n[1]\n{"time": 1, "learner_st')
  run = read(history.History(folder))
  assert run.curves('learner_step')[LOSS].x.tolist() == [0, 1] and run.damage.startswith('2 lines')
  with path.open('a') as file:
    file.write('ep": 2, "loss": 7}\n')
  assert read(run).curves('learner_step')[LOSS].mean.tolist() == [0, 10, 7]


def test_shortened_file_is_read_again(folder):
  write(folder, 'learner', rows(0, 8))
  run = read(history.History(folder))
  version = run.version
  metrics.JsonLines(folder / 'metrics' / 'learner.jsonl', resume=('learner_step', 3)).close()
  assert read(run).curves('learner_step')[LOSS].x.tolist() == [0, 1, 2, 3]
  assert run.version > version
  (folder / 'metrics' / 'learner.jsonl').unlink()
  assert read(run).curves('learner_step') == {}
  (folder / 'config.yaml').unlink()
  assert read(run).is_gone


def test_read_continues_after_its_deadline(folder):
  count = 40 * history.CHUNK // 1000
  write(folder, 'learner', rows(0, count, text='-' * 900))
  run = history.History(folder)
  run.read(time.monotonic())
  assert 0 < run.unread < (folder / 'metrics' / 'learner.jsonl').stat().st_size
  while run.unread:
    run.read(time.monotonic())
  assert run.last('learner', 'learner_step') == count - 1


def test_thinned_curve_keeps_means_and_extremes():
  places = np.arange(100_000.0)
  values = np.random.default_rng(0).normal(size=100_000)
  values[77_777] = 99.0
  thin = history.thin(history.Curve(places, values, values, values, np.ones(100_000)))
  assert len(thin.x) == history.POINTS and thin.x[-1] == 99_999
  assert thin.high.max() == 99.0 and thin.low.min() == values.min()
  np.testing.assert_allclose(np.average(thin.mean, weights=thin.weight), values.mean())
  few = history.thin(history.Curve(*([values[:5]] * 4), np.ones(5))._replace(x=places[:5]))
  assert few.x.tolist() == [0, 1, 2, 3, 4] and few.mean.tolist() == values[:5].tolist()


def test_repeated_steps_of_resumed_run_count_once(folder):
  write(folder, 'evaluator', [
    {'environment_step': step, 'score': score}
    for step, score in ((0, 0.0), (100, 0.4), (200, 0.9), (150, 0.5), (250, 0.6))
  ])  # fmt: skip
  found = curves(folder, 'environment_step')['evaluator/score']
  assert found.x.tolist() == [0, 100, 150, 250] and found.mean.tolist() == [0.0, 0.4, 0.5, 0.6]


def test_row_without_the_metric_repeats_no_step_of_it(folder):
  """An actor reports twice under the same parameters, the second time without an episode."""
  places, values = (10, 10, 20, 20, 15, 30), (0.5, None, 0.7, 0.8, 0.6, None)
  write(folder, 'actor-0', [
    {'parameter_version': place, 'episodes': 1, 'episode_return': value}
    for place, value in zip(places, values, strict=True)
  ])  # fmt: skip
  found = curves(folder)['actor/episode_return']
  assert found.x.tolist() == [10, 15] and found.mean.tolist() == [0.5, 0.6]


def test_minutes_exclude_pauses_between_launches(folder):
  later = 3700.0
  write(folder, 'evaluator', [{'score': 0.0}])
  write(folder, 'evaluator', [{'score': 0.4}], start=160.0)
  write(folder, 'evaluator', [{'score': 0.5}], start=later)
  write(folder, 'evaluator', [{'score': 0.6}], start=later + 120)
  started = {'kind': 'started', 'name': 'learner'}
  write(folder, 'events', [started], start=90.0)
  write(folder, 'events', [started], start=later - 30)
  found = curves(folder, 'minutes')['evaluator/score']
  np.testing.assert_allclose(
    found.x, [0, 1, 3]
  )  # the first row after a launch has no time before it
  assert found.mean.tolist() == [0.0, 0.5, 0.6]


def test_actors_are_averaged_by_number_of_episodes(folder):
  row = lambda step, value, episodes: {
    'environment_step': step, 'episode_return': value, 'episodes': episodes,
    'throttled_fraction': value,
  }  # fmt: skip
  write(folder, 'actor-0', [row(10, 1.0, 30), row(None, 9.0, 30), row(30, None, 0)])
  write(folder, 'actor-1', [row(20, 2.0, 10), row(40, 3.0, 10)])
  found = curves(folder, 'environment_step')
  assert found['actor/episode_return'].x.tolist() == [10, 20, 40]
  assert found['actor/episode_return'].mean.tolist() == [1.0, 1.25, 1.5]
  assert found['actor/throttled_fraction'].mean.tolist() == [1.0, 1.5, 2.0]  # not weighted


def test_last_value_is_none_once_metric_is_missing(folder):
  write(folder, 'learner', rows(0, 3))
  run = read(history.History(folder))
  write(folder, 'learner', [{'learner_step': step, 'loss': None} for step in range(3, 200)])
  assert read(run).last('learner', 'loss') is None and run.last('learner', 'learner_step') == 199
  assert run.curves('learner_step')[LOSS].x.tolist() == [0, 1, 2]


def test_distribution_is_curve_of_median_with_band(folder):
  ends = {'lowest': 0.0, 'low': 1.0, 'median': 5.0, 'high': 8.0, 'highest': 9.0}
  write(folder, 'learner', rows(0, 3, **{f'age/{name}': value for name, value in ends.items()}))
  found = curves(folder)
  assert set(found) == {LOSS, 'learner/age/median'}
  _, mean, low, high, _ = found['learner/age/median']
  assert (mean.tolist(), low.tolist(), high.tolist()) == ([5] * 3, [1] * 3, [8] * 3)


def test_run_that_is_resumed_with_more_steps_is_shown_with_them(tmp_path):
  made = config.of_preset('ppo', 'laptop', 'catch')
  folder = tmp_path / 'my run'
  folder_lib.open_run(folder, config.override(made, ['max_environment_steps=10000']))
  logger = metrics.JsonLines(folder / 'metrics' / 'evaluator.jsonl')
  logger.write({'final': True, 'environment_step': 10_000, 'learner_step': 1})
  logger.close()
  opened = history.History(folder)
  opened.read()
  assert panels.state(opened)['state'] == 'finished'
  folder_lib.open_run(folder, config.override(made, ['max_environment_steps=20000']))
  opened.read()
  shown = panels.state(opened)
  assert (shown['state'], shown['max_environment_steps']) == ('stopped', 20_000)
  command = folder_lib.resume_command(folder, made)
  assert shlex.split(command) == ['hephaestus', 'train', '--run', str(folder)]
