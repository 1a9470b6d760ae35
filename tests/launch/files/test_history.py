"""Metrics of growing files: each row is read once, also after damage, and thinning keeps the means."""

import json
import time

import numpy as np
import pytest

from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history, metrics


@pytest.fixture
def folder(tmp_path):
  folder_lib.open_run(tmp_path / 'run', config.override(presets.laptop('catch'), []))
  return tmp_path / 'run'


def write(folder, node, rows, mode='a'):
  with (folder / 'metrics' / f'{node}.jsonl').open(mode) as file:
    file.writelines(
      json.dumps({'time': 100.0 + index, **row}) + '\n' for index, row in enumerate(rows)
    )


def rows(start, end, **more):
  return [{'learner_step': step, 'loss': 10.0 * step, **more} for step in range(start, end)]


def read(run):
  run.read(time.monotonic() + 60)
  return run


def test_new_rows_are_read_once(folder):
  run = read(history.History(folder))
  assert run.metrics() == [] and run.thinned('learner', 'loss', 'learner_step') is None
  write(folder, 'learner', rows(0, 3))
  assert read(run).thinned('learner', 'loss', 'learner_step').mean.tolist() == [0, 10, 20]
  version = run.version
  assert read(run).version == version
  write(folder, 'learner', rows(3, 5))
  assert read(run).thinned('learner', 'loss', 'learner_step').x.tolist() == [0, 1, 2, 3, 4]
  assert run.version != version and run.last('learner', 'loss') == 40.0


def test_truncated_line_is_read_later_and_damaged_line_skipped(folder):
  write(folder, 'learner', rows(0, 2))
  path = folder / 'metrics' / 'learner.jsonl'
  path.write_text(path.read_text() + 'no row\n[1]\n{"time": 1, "learner_st')
  run = read(history.History(folder))
  assert run.thinned('learner', 'loss', 'learner_step').x.tolist() == [0, 1] and run.broken == 2
  with path.open('a') as file:
    file.write('ep": 2, "loss": 7}\n')
  assert read(run).thinned('learner', 'loss', 'learner_step').mean.tolist() == [0, 10, 7]


def test_shortened_file_is_read_again(folder):
  write(folder, 'learner', rows(0, 8))
  run = read(history.History(folder))
  metrics.JsonLines(folder / 'metrics' / 'learner.jsonl', resume=('learner_step', 3)).close()
  assert read(run).thinned('learner', 'loss', 'learner_step').x.tolist() == [0, 1, 2, 3]
  (folder / 'metrics' / 'learner.jsonl').unlink()
  assert read(run).thinned('learner', 'loss', 'learner_step') is None
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


@pytest.mark.parametrize('x', ['environment_step', 'learner_step', 'minutes'])
def test_thinned_curve_equals_curve_of_report(folder, x):
  for actor, episodes in ((0, 3), (1, 1)):
    write(folder, f'actor-{actor}', [
      {'environment_step': 5 * step + actor, 'parameter_version': step, 'episodes': episodes,
       'episode_return': step * (actor + 1) if step % 3 else None}
      for step in (0, 1, 2, 3, 4, 2, 3, 4, 5)
    ])  # fmt: skip
  write(folder, 'events', [{'kind': 'started', 'name': 'learner', 'pid': 1, 'restarts': 0}])
  expected = history.read(folder).series('actor', 'episode_return', x)
  thin = read(history.History(folder)).thinned('actor', 'episode_return', x)
  np.testing.assert_allclose(thin.x, expected.x)
  np.testing.assert_allclose(thin.mean, expected.value)


def test_row_without_the_metric_repeats_no_step_of_it(folder):
  """An actor reports twice under the same parameters, the second time without an episode."""
  places, values = (10, 10, 20, 20, 15, 30), (0.5, None, 0.7, 0.8, 0.6, None)
  write(folder, 'actor-0', [
    {'parameter_version': place, 'environment_step': at, 'episodes': 1, 'episode_return': value}
    for at, (place, value) in enumerate(zip(places, values, strict=True))
  ])  # fmt: skip
  for found in (
    history.read(folder).series('actor', 'episode_return', 'learner_step'),
    read(history.History(folder)).thinned('actor', 'episode_return', 'learner_step'),
  ):
    assert found.x.tolist() == [10, 15] and found[1].tolist() == [0.5, 0.6]
  assert history.read(folder).series('actor', 'other', 'learner_step') is None


def test_last_value_is_none_once_metric_is_missing(folder):
  write(folder, 'learner', rows(0, 3))
  run = read(history.History(folder))
  write(folder, 'learner', [{'learner_step': step, 'loss': None} for step in range(3, 200)])
  assert read(run).last('learner', 'loss') is None and run.last('learner', 'learner_step') == 199
  assert run.thinned('learner', 'loss', 'learner_step').x.tolist() == [0, 1, 2]
  assert run.mean('learner', 'loss') == 10.0 and run.mean('learner', 'other') is None


def test_distribution_is_curve_of_median_with_band(folder):
  quantiles = {
    'age/lowest': 0.0,
    'age/low': 1.0,
    'age/median': 5.0,
    'age/high': 8.0,
    'age/highest': 9.0,
  }
  write(folder, 'learner', rows(0, 3, **quantiles))
  run = read(history.History(folder))
  assert run.metrics() == [('learner', 'loss'), ('learner', 'age/median')]
  thin = run.thinned('learner', 'age/median', 'learner_step')
  assert (thin.mean.tolist(), thin.low.tolist(), thin.high.tolist()) == ([5] * 3, [1] * 3, [8] * 3)
