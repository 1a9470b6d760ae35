"""Agents that come with the package: loaded by name, what they reach, and where names are looked up."""

import pathlib
import re
import shutil
import sys

import jax
import numpy as np
import pytest

import hephaestus
from hephaestus.actors import environments
from hephaestus.actors.environments import export, packages, wrappers
from hephaestus.launch import main
from hephaestus.launch.interface import exported, places, shipping, training
from hephaestus.launch.report import play

# Below what the policies reach: 1.0, 500, 8.4 and -0.8; a random policy has -0.6, 23, 1.0 and -2.6.
LEAST_RETURN = {'catch': 0.9, 'gymnax/CartPole-v1': 400.0, 'grid_world': 6.0, 'hackmatrix': -1.4}
EPISODES = 16


@pytest.fixture
def empty(tmp_path, monkeypatch):
  """A working directory without a folder of any name."""
  monkeypatch.chdir(tmp_path)
  return tmp_path


def run(*arguments):
  return main.run(main.parse(['hephaestus', *map(str, arguments)]))


def test_each_recipe_is_shipped():
  assert places.shipped() == sorted(shipping.AGENTS) == sorted(LEAST_RETURN)
  assert sum(path.stat().st_size for path in places.SHIPPED.rglob('*')) < 10e6


@pytest.mark.parametrize('name', LEAST_RETURN)
def test_shipped_agent_plays_well(empty, name, monkeypatch):
  if name.startswith('gymnax'):
    pytest.importorskip('gymnax')
  # Episodes of other policies, which scores compare with, take longer than its own.
  monkeypatch.setattr(wrappers, 'reference_returns', lambda environment: None)
  result = play.evaluate(name, EPISODES, seed=0)
  assert result['episode_return'] >= LEAST_RETURN[name]


def test_shipped_agent_is_watched_and_dreamt(empty, capsys):
  assert run('watch', 'catch') == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith('catch: catch, update ') and lines[1].startswith('step 0  action -')
  assert run('watch', 'catch', '--dream', '--output', 'dream.gif') == 0
  assert (empty / 'dream.gif').stat().st_size > 0


def test_environment_loop_of_acme_plays_a_shipped_policy(empty):
  acme = pytest.importorskip('acme')
  from acme.utils import loggers

  environment = export.as_dm_env(environments.make('catch'), seed=0)
  spec = acme.make_environment_spec(environment)
  assert (spec.actions.num_values, spec.observations.shape) == (3, (50,))
  actor, logger = hephaestus.load('catch').as_acme_actor(greedy=True), loggers.InMemoryLogger()
  acme.EnvironmentLoop(environment, actor, logger=logger).run(num_episodes=8)
  assert [row['episode_return'] for row in logger.data] == [1.0] * 8  # a random policy: -0.6


def test_policy_becomes_stablehlo_by_the_code_of_the_guide(empty):
  page = (pathlib.Path(__file__).parents[3] / 'docs' / 'python.md').read_text()
  blocks = re.findall(r'```python\n(.*?)```', page, re.DOTALL)
  (code,) = (each for each in blocks if 'jax.export' in each)
  names = {'hephaestus': hephaestus, 'key': jax.random.key(0)}
  exec(code, names)
  assert len(names['module']) > 100_000


def test_exported_agent_is_smaller_and_not_dreamt(dreamer, empty, capsys):
  hephaestus.export(dreamer.folder, 'exported')
  assert run('watch', 'exported', '--dream', '--output', 'dream.gif') == 2
  assert run('dream', 'exported') == 2
  refused = 'is exported, without the decoder of its model; give the folder of a run'
  assert capsys.readouterr().err.count(refused) == 2 and not (empty / 'dream.gif').exists()


def test_unknown_name_is_refused_with_the_shipped_ones(empty, capsys):
  for command in (
    ['watch', 'cach'],
    ['evaluate', 'cach'],
    ['evaluate', 'cach', '--actions', 'random'],
  ):
    assert run(*command) == 2
    printed = capsys.readouterr().err
    assert 'cach: is not the folder of a run or of an exported policy' in printed
    assert printed.endswith('those are catch, grid_world, gymnax/CartPole-v1, hackmatrix\n')
  (empty / 'catch').mkdir()  # a folder goes before a shipped agent of its name
  assert run('watch', 'catch') == 2


def test_agent_whose_environment_is_not_installed_is_refused(empty, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'gymnax', None)
  monkeypatch.delitem(sys.modules, 'hephaestus.actors.environments.gymnax', raising=False)
  assert run('watch', 'gymnax/CartPole-v1') == 2
  printed = capsys.readouterr()
  assert "environment.name='gymnax/CartPole-v1': " in printed.err and not printed.out
  assert "the package 'gymnax', which is not installed; `" in printed.err
  assert packages.install('envs', 'gymnax') in printed.err


def test_maintainers_command_trains_and_writes_an_agent(dreamer, empty, monkeypatch, capsys):
  begun = []

  def begin(arguments, config):
    """Stands in for a training of some minutes."""
    begun.append(config)
    shutil.copytree(dreamer.folder, arguments.run)
    return 0

  monkeypatch.setattr(training.run_commands, 'begin', begin)
  monkeypatch.setattr(places, 'SHIPPED', empty / 'shipped')
  monkeypatch.setattr(sys, 'argv', ['shipping', '--runs', 'runs', 'catch'])
  assert shipping.main() == 0
  (config,) = begun
  assert config.fused and config.agent_name == 'dreamer' and config.environment['name'] == 'catch'
  assert config.max_environment_steps == shipping.AGENTS['catch'][0]
  assert config.evaluator.period_steps == 992
  printed = capsys.readouterr().out.splitlines()[-1]
  assert printed.startswith(f'{empty}/shipped/catch: Policy(dreamer for catch, update ')
  best = hephaestus.load('runs/catch', 'best').learner_step
  assert hephaestus.load('catch').learner_step == best > 0


def test_large_arrays_are_stored_at_half_precision_where_it_can_hold_them():
  generator = np.random.default_rng(0)
  arrays = {
    'large': generator.normal(size=(64, 64)).astype(np.float32),
    'huge': np.full((64, 64), 1e6, np.float32),
    'small': np.ones(3, np.float32),
    'counts': np.zeros(4096, np.int32),
  }
  dtypes = {key: array.dtype.name for key, array in exported.halved(arrays).items()}
  assert dtypes == {'large': 'float16', 'huge': 'float32', 'small': 'float32', 'counts': 'int32'}
