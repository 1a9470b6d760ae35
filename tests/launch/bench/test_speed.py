"""`hephaestus bench speed`: its figures, counted operations, and the input that it refuses."""

import json
import multiprocessing

import jax
import jax.numpy as jnp
import pytest
import tiny as tiny_sizes

from hephaestus.actors import environments
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.launch import config as launch_config
from hephaestus.launch import main
from hephaestus.launch.agents import presets
from hephaestus.launch.bench import speed
from hephaestus.launch.processes import jobs


def run(*arguments):
  return main.run(main.parse(['hephaestus', 'bench', 'speed', *map(str, arguments)]))


def by_name(figures):
  return {figure.name: figure for figure in figures}


def test_matrix_products_are_counted_once_per_loop_iteration():
  def program(x, kernel, turns):
    x, _ = jax.lax.scan(lambda x, _: (x @ kernel, None), x, length=3)
    loop = lambda x: jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ kernel @ kernel), x)
    x, _ = jax.lax.scan(lambda x, _: (loop(x), None), loop(x), length=5)
    return x.sum() + jax.jit(jnp.matmul)(x, kernel).sum()

  jaxpr = jax.make_jaxpr(program)(jnp.ones((5, 4)), jnp.ones((4, 4)), 7).jaxpr
  once = 2 * 5 * 4 * 4
  assert speed.matmul_flops(jaxpr) == [3 * once + once, 2 * once, 5 * 2 * once]


def test_convolution_is_counted_by_the_inputs_of_each_output():
  image, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((4, 4, 3, 6))
  program = lambda image, kernel: jax.lax.conv_general_dilated(
    image, kernel, (2, 2), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  )
  jaxpr = jax.make_jaxpr(program)(image, kernel).jaxpr
  assert speed.matmul_flops(jaxpr) == [2 * (2 * 4 * 4 * 6) * (4 * 4 * 3)]


def test_model_that_is_measured_is_the_model_that_trains():
  assert speed.of_size('full').agent == presets.gpu('catch').agent
  assert speed.of_size('laptop') == presets.laptop('catch')
  one = speed.of_size('1m')
  assert vars(one.agent).items() >= vars(dreamer_config.SIZES['1m']).items()
  assert (one.batch_size, one.actor.sequence_length, one.agent.horizon_max) == (16, 64, 15)


def test_update_and_its_phases_are_measured():
  config = launch_config.override(
    presets.laptop('catch'),
    [*tiny_sizes.SHAPES, 'agent.starts_per_sequence=null', 'agent.ensemble_size=1'],
  )
  figures = by_name(speed.learner(config, 'tiny', seconds=1e-3, phases=True))
  value = lambda name: figures[f'learner/tiny{name}'].value
  seconds = value('')
  assert value('/horizon') == 4
  assert value('/replayed') == pytest.approx(8 * 5 / seconds)
  assert value('/imagined') == pytest.approx(8 * 6 * 4 / seconds)
  parts = [value(f'/phase/{part}') for part in ('world_model', 'dream', 'rest')]
  assert sum(parts) == pytest.approx(seconds)
  products = figures['learner/tiny/matmul']
  assert products.limit == figures['matmul/float32'].value
  assert products.ratio == pytest.approx(products.value / products.limit)


def test_environments_are_compared_with_copying(capsys, monkeypatch):
  monkeypatch.setattr(jobs, 'available_cores', lambda: [0, 1])
  options = ('--env', 'catch', '--set', 'environment.rows=5', '--seconds', 1e-3)
  assert run('environments', *options, '--num-envs', 5, '--json') == 0
  figures = {figure['name']: figure for figure in json.loads(capsys.readouterr().out)}
  assert list(figures) == ['env/catch/5_envs', 'env/catch/5_envs/compile', 'copy']
  steps = figures['env/catch/5_envs']
  (size,) = environments.make('catch', rows=5).observation_spec.shape
  assert steps['unit'] == 'steps/s' and steps['machine']
  assert steps['limit'] == pytest.approx(figures['copy']['value'] / size)
  assert steps['ratio'] == pytest.approx(steps['value'] / steps['limit'])
  assert not multiprocessing.active_children()


def test_replay_is_compared_with_copying(capsys, monkeypatch):
  pytest.importorskip('reverb')
  monkeypatch.setattr(speed, 'PARAMETERS', (0.1,))
  monkeypatch.setattr(speed, 'BATCH', 8)
  options = ('--set', *tiny_sizes.SHAPES, 'replay.num_shards=2')
  assert run('replay', '--stored', 32, '--seconds', 0.05, *options, '--json') == 0
  figures = {figure['name']: figure for figure in json.loads(capsys.readouterr().out)}
  size, copied = figures['replay/sequence']['value'], figures['copy']['value']
  for name in ('replay/insert', 'replay/sample'):
    rate, moved = figures[name], figures[f'{name}/bytes']
    assert rate['value'] > 0 and rate['limit'] == pytest.approx(copied / size)
    assert moved['value'] == pytest.approx(rate['value'] * size)
    assert all(figures[f'{name}/{side}']['value'] >= 0 for side in ('client', 'servers'))
  for way in ('push', 'fetch'):
    name = f'replay/parameters/0.1_MB/{way}'
    assert 1e5 / figures[name]['value'] <= figures[f'{name}/p99']['value']
  assert not multiprocessing.active_children()


def test_rates_are_of_the_second_half_without_the_pause_of_a_resume():
  times = (*range(9), *range(108, 113))
  rows = [
    {'time': at, 'learner_step': 10 * index, 'environment_step': 100 * index}
    for index, at in enumerate(times)
  ]
  rates = {'learner_steps_per_second': 10.0, 'environment_steps_per_second': 100.0}
  assert speed.rates(rows) == rates
  assert speed.rates(rows[:1]) == {}


@pytest.mark.slow
def test_run_is_compared_with_its_learner(capsys, monkeypatch, tiny):
  assert jax.devices()  # devices of this process, before XLA_FLAGS is removed
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  changes = (*tiny, 'learner.log_period=1', 'learner.fused=false')
  assert run('run', '--seconds', 20, '--json', '--set', *changes) == 0
  figures = {figure['name']: figure for figure in json.loads(capsys.readouterr().out)}
  value = lambda name: figures[f'run/catch/{name}']['value']
  updates = figures['run/catch/updates']
  assert updates['ratio'] == pytest.approx(updates['value'] / updates['limit'])
  assert value('steps') > 0 and 2 <= value('horizon') <= 4 and value('replay_ratio') > 0
  assert 0 <= value('learner_waits') <= 100 and 0 <= value('actors_wait') <= 100


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['learning'], 'learning: choose'),
    (['--seconds', '0'], '--seconds 0.0'),
    (['learner', '--preset', 'lap'], '--preset lap'),
    (['learner', '--size', '1m', '--env', 'catch'], '--size 1m'),
    (['environments', '--num-envs', '0'], '--num-envs 0'),
    (['replay', '--stored', '1'], '--stored 1'),
  ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
  assert run(*arguments) == 2
  message = capsys.readouterr().err
  assert words in message and message.count('\n') == 1
