"""The `bench` command: its figures, and the input that it refuses."""

import json
import multiprocessing

import jax
import psutil
import pytest

from hephaestus.actors import environments
from hephaestus.launch import main
from hephaestus.launch.bench import commands
from hephaestus.learner import bench as learner_bench


def run(*arguments):
  return main.run(main.parse(['hephaestus', 'bench', *map(str, arguments)]))


# The first of this file: what its processes import is imported once, by the fork server of this
# process, if nobody has started that before.
def test_replay_figures_have_limit_and_ratio(capsys, monkeypatch):
  for name, value in (('PARAMETERS', (0.1,)), ('BATCH', 8), ('LENGTH', 8)):
    monkeypatch.setattr(commands, name, value)
  arguments = ('--shards', 2, '--writers', 2, '--stored', 32, '--seconds', 0.05)
  assert run('replay', *arguments, '--json') == 0
  figures = {figure['name']: figure for figure in json.loads(capsys.readouterr().out)}
  moved = ['replay/sample/2_shards', 'replay/insert/2_writers']
  size, copied = figures['replay/sequence']['value'], figures['copy']['value']
  for name in moved:
    rate, moved_bytes = figures[name], figures[f'{name}/bytes']
    assert rate['value'] > 0 and rate['limit'] == pytest.approx(copied / size)
    assert moved_bytes['value'] == pytest.approx(rate['value'] * size)
    assert moved_bytes['ratio'] == pytest.approx(moved_bytes['value'] / copied)
  for way in ('push', 'fetch'):
    name = f'replay/parameters/0.1_MB/{way}'
    assert 0 < figures[f'{name}/median']['value'] <= figures[f'{name}/p99']['value']
    assert figures[name]['value'] == pytest.approx(1e5 / figures[f'{name}/median']['value'])
  assert not multiprocessing.active_children()


def test_replay_is_measured_by_its_size(capsys):
  arguments = ('--sizes', 16, 64, '--seconds', 0.05)
  assert run('replay', *arguments, '--json') == 0
  figures = {figure['name']: figure for figure in json.loads(capsys.readouterr().out)}
  names = [
    f'replay/{size}_stored/{way}/{what}'
    for size in (16, 64)
    for way in ('fused', 'reverb')
    for what in ('sample', 'insert')
  ]
  assert set(figures) == {'replay/sequence', *names, *(f'{name}/cpu' for name in names)}
  assert all(figures[name]['value'] > 0 for name in names)
  assert not multiprocessing.active_children()


def test_env_figures_have_limit_and_ratio(capsys, monkeypatch):
  monkeypatch.setattr(learner_bench, 'num_cores', lambda: 2)
  arguments = ('env', '--env', 'catch', '--set', 'environment.rows=5', '--seconds', 1e-3)
  assert run(*arguments, '--num-envs', 1, 4, '--json') == 0
  figures = json.loads(capsys.readouterr().out)
  for figure in figures:
    assert list(figure) == ['name', 'value', 'unit', 'limit', 'ratio', 'machine']
    assert figure['value'] > 0
    assert figure['machine'] == figures[0]['machine'] != ''
  by_name = {figure['name']: figure for figure in figures}
  assert list(by_name) == [
    'env/catch/1_envs',
    'env/catch/1_envs/processes',
    'env/catch/1_envs/compile',
    'env/catch/4_envs',
    'env/catch/4_envs/processes',
    'env/catch/4_envs/compile',
    'copy',
  ]
  assert by_name['env/catch/1_envs/processes']['value'] == 1
  assert by_name['env/catch/4_envs/processes']['value'] == 2
  steps = by_name['env/catch/4_envs']
  assert steps['unit'] == 'steps/s'
  (size,) = environments.make('catch', rows=5).observation_spec.shape
  assert steps['limit'] == pytest.approx(by_name['copy']['value'] / size)
  assert steps['ratio'] == pytest.approx(steps['value'] / steps['limit'])
  assert by_name['copy']['limit'] is None


def test_each_figure_is_printed_as_a_line(capsys):
  assert run('env', '--env', 'catch', 'noisy_corridor', '--num-envs', 1, '--seconds', 1e-3) == 0
  machine, *lines = capsys.readouterr().out.splitlines()
  assert machine.startswith('on ')
  assert [line.split()[0] for line in lines] == [
    'env/catch/1_envs',
    'env/catch/1_envs/processes',
    'env/catch/1_envs/compile',
    'env/noisy_corridor/1_envs',
    'env/noisy_corridor/1_envs/processes',
    'env/noisy_corridor/1_envs/compile',
    'copy',
    'limit:',  # what it is
  ]
  assert '% of ' in lines[0]


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--env', 'cach'], "environment.name='cach': no such environment"),
    (['--num-envs', '0'], '--num-envs 0: each must be at least 1'),
    (['--seconds', 'nan'], '--seconds nan: must be positive'),
    (
      ['--env', 'catch', 'grid_world', '--set', 'environment.rows=5'],
      '--set environment.rows=5: needs a single',
    ),
    (['--set', 'agent.window=3'], '--set agent.window=3: bench env takes environment'),
    (['--env', 'grid_world', '--set', 'environment.size=1'], 'environment.size=1'),
  ],
)
def test_bad_input_is_named(capsys, arguments, words):
  assert run('env', *arguments) == 2
  message = capsys.readouterr().err
  assert words in message
  assert message.count('\n') == 1


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--boredom', '0', '1.5'], '--boredom 0.0 1.5: each must lie in [0, 1]'),
    (['--preset', 'lap'], '--preset lap: choose one of laptop'),
    (['--set', 'agent.window=0'], 'agent.window=0: must be at least 1'),
    (['--size', '1m', '--env', 'catch'], '--size 1m: takes neither --preset, --env nor --set'),
    (['--size', '2m'], '--size 2m: choose one of laptop'),
    (['--size', '1m', '--ensemble', '0'], 'agent.ensemble_size=0: must be at least 1'),
    (['--size', '1m', '--horizon', '0'], '--horizon 0: must be at least 1'),
    (['--size', '1m', '--length', '1'], '--length 1: must be at least 2'),
    (['--size', '1m', '--batch', '0'], 'learner.batch_size=0: must be positive'),
    (['--size', '1m', '--seconds', '0'], '--seconds 0.0: must be positive'),
  ],
)
def test_bad_input_for_learner_is_named(capsys, arguments, words):
  assert run('learner', *arguments) == 2
  assert words in capsys.readouterr().err


def test_update_of_a_config_is_measured_by_boredom(capsys, monkeypatch):
  """tests/learner/test_bench.py measures a real update."""
  asked = {}

  def update(work, boredom, **options):
    asked.update(options, work=work, boredom=boredom)
    return [learner_bench.Figure(f'learner/{work.name}', 2.0, 's')]

  monkeypatch.setattr(learner_bench, 'update', update)
  arguments = ('--boredom', 0, 0.5, 1, '--seconds', 1e-3, '--json', '--env', 'catch')
  overrides = ('agent.horizon_max=24', 'learner.batch_size=2', 'environment.columns=7')
  assert run('learner', *arguments, '--length', 4, '--set', *overrides) == 0
  (figure,) = json.loads(capsys.readouterr().out)
  assert (figure['name'], figure['value'], figure['unit']) == ('learner/catch', 2.0, 's')
  work = asked.pop('work')
  assert asked == {'boredom': [0.0, 0.5, 1.0], 'seconds': 1e-3, 'phases': False}
  assert (work.agent.horizon_max, work.learner.batch_size, work.sequence_length) == (24, 2, 4)
  assert work.observation_spec.shape == (10 * 7,) and work.action_spec.num_values == 3


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--shards', '0'], '--shards 0: each must be at least 1'),
    (['--writers', '2', '-1'], '--writers 2 -1: each must be at least 1'),
    (['--stored', '7'], '--stored 7: use at least 8'),
    (['--seconds', '0'], '--seconds 0.0: must be positive'),
    (['--sizes', '100', '8'], '--sizes 100 8: each must be at least 16'),
  ],
)
def test_bad_input_for_replay_is_named(capsys, arguments, words):
  assert run('replay', *arguments) == 2
  message = capsys.readouterr().err
  assert words in message
  assert message.count('\n') == 1


@pytest.mark.slow
def test_run_is_compared_with_its_parts(capsys, monkeypatch, tiny):
  assert jax.devices()  # devices of this process, before XLA_FLAGS is removed
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  assert run('end-to-end', '--seconds', 0.5, '--json', '--set', *tiny) == 0
  figures = {figure['name']: figure for figure in json.loads(capsys.readouterr().out)}
  value = lambda name: figures[f'run/catch/{name}']['value']
  for name in ('updates', 'steps'):
    rate = figures[f'run/catch/{name}']
    assert rate['value'] > 0 and rate['ratio'] == pytest.approx(rate['value'] / rate['limit'])
  assert 0 <= value('learner_waits') <= 100 and 0 <= value('actors_wait') <= 100
  assert 0 < value('replay_ratio') < 2 * 16 and value('staleness') >= 0
  nodes = [name.split('/')[2] for name in figures if name.endswith('/cpu')]
  assert nodes == ['actor-0', 'evaluator', 'learner', 'replay']
  assert value('learner/cpu') > 0
  left = psutil.Process().children(recursive=True)
  assert not [child for child in left if 'train' in child.cmdline()]


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--seconds', '0'], '--seconds 0.0: must be positive'),
    (['--preset', 'lap'], '--preset lap: choose one of laptop'),
    (['--set', 'agent.window=0'], 'agent.window=0: must be at least 1'),
  ],
)
def test_bad_input_for_end_to_end_is_named(capsys, arguments, words):
  assert run('end-to-end', *arguments) == 2
  assert words in capsys.readouterr().err


@pytest.mark.parametrize('arguments', [[], ['hens'], ['env', '--num-envs', 'many']])
def test_unknown_arguments_end_with_code_two(arguments, capsys):
  with pytest.raises(SystemExit) as ended:
    run(*arguments)
  assert ended.value.code == 2


def test_bench_prints_what_its_limit_is(monkeypatch, capsys):
  made = lambda limit: learner_bench.Figure('env/catch', 1.0, 'steps/s', limit)
  measured = [made(None)]
  target = commands.TARGETS['env']._replace(call=lambda arguments: measured)
  monkeypatch.setitem(commands.TARGETS, 'env', target)
  assert run('env') == 0
  assert 'limit' not in capsys.readouterr().out
  measured.append(made(2.0))
  assert run('env') == 0
  assert 'limit: the rate at which observations could be copied' in capsys.readouterr().out
