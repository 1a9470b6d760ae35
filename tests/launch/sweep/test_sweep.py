"""Several runs by one command: their settings and folders, and real runs that end in a table."""

import contextlib
import io
import re

import pytest

from hephaestus.launch import config, main
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.run import request
from hephaestus.launch.sweep import grid, jobs

TINY = [
  'agent.hidden_size=16', 'agent.num_layers=1', 'actor.num_envs=32', 'actor.sequence_length=33',
  'learner.num_minibatches=2', 'evaluator.num_episodes=8', 'evaluator.final_episodes=8',
  'evaluator.period_steps=1024', 'tensorboard=false', 'environment.rows=4', 'environment.columns=3',
]  # fmt: skip


def words(parent, *more):
  """The words of `train` for several runs of a tiny PPO on `catch`."""
  sizes = ['--agent', 'ppo', '--preset', 'laptop', '--steps', '2048', '--set', *TINY]
  return ['train', *sizes, '--run', str(parent), *map(str, more)]


def call(*arguments):
  """Runs a command in this process; returns its exit code."""
  return main.run(main.parse(['hephaestus', *map(str, arguments)]))


def plan(parent, *more):
  return planned(words(parent, *more))


def planned(command):
  arguments = main.parse(['hephaestus', *command])
  return grid.plan(request.of(arguments), arguments.seeds, arguments.grid)


def finish(run, **last):
  """Writes the folder of a run that has reached its end."""
  folder_lib.open_run(run.folder, run.config)
  logger = metrics.JsonLines(run.folder / 'metrics' / 'evaluator.jsonl')
  logger.write({'final': True, 'environment_step': 2048, 'episode_return': 0.5, **last})
  logger.close()


def test_seeds_without_a_grid_are_runs_of_one_setting(tmp_path):
  found = plan(tmp_path, '--seeds', 3, 1, 3)
  assert [(run.folder, run.setting, run.config.seed) for run in found] == [
    (tmp_path / 'seed=3', '', 3),
    (tmp_path / 'seed=1', '', 1),
  ]


def test_grid_is_all_combinations_of_its_values_with_each_seed(tmp_path):
  keys = ['agent.entropy_scale=3e-4,1e-3', 'agent.gamma=0.9,0.99']
  found = plan(tmp_path, '--seeds', 0, 1, '--grid', *keys)
  settings = [(run.config.agent.entropy_scale, run.config.agent.gamma) for run in found]
  assert settings == 2 * [(3e-4, 0.9), (3e-4, 0.99), (1e-3, 0.9), (1e-3, 0.99)]
  assert [run.config.seed for run in found] == [0] * 4 + [1] * 4
  assert found[1].folder.name == 'entropy_scale=3e-4,gamma=0.99,seed=0'
  assert found[1].setting == 'entropy_scale=3e-4,gamma=0.99'


def test_keys_of_the_same_name_are_shown_by_their_path(tmp_path):
  (found,) = plan(tmp_path, '--grid', 'actor.log_period=3', 'learner.log_period=7')
  assert found.setting == 'actor.log_period=3,learner.log_period=7'


def test_value_of_a_grid_may_be_a_list(tmp_path):
  queue = '[{name: on_policy, max_size: %d, share: 1.0, read_once: true}]'
  found = plan(tmp_path, '--grid', f'replay.strata={queue % 8},{queue % 9}')
  assert [run.config.replay.strata[0].max_size for run in found] == [8, 9]
  assert len({run.folder for run in found}) == 2
  assert all('/' not in run.folder.name and ' ' not in run.folder.name for run in found)


def test_related_values_of_a_grid_are_checked_with_the_overrides(tmp_path):
  sizes = [
    '--set',
    'agent.horizon_min=15',
    '--grid',
    'agent.horizon_max=15,16',
  ]
  arguments = ['train', '--preset', 'laptop', '--run', str(tmp_path), *sizes]
  found = planned(arguments)
  assert [run.config.agent.horizon_max for run in found] == [15, 16]


def test_run_is_done_at_the_end_that_its_config_asks_for(tmp_path):
  (first, second) = plan(tmp_path, '--seeds', 0, 1)
  assert not grid.is_done(first)
  finish(first)
  finish(second, final=False)
  assert [grid.is_done(run) for run in (first, second)] == [True, False]
  (longer,) = plan(tmp_path, '--seeds', 0, '--steps', 4096)
  assert not grid.is_done(longer)


def test_runs_are_one_group_in_wandb_unless_named(tmp_path):
  (found,) = plan(tmp_path / 'sizes', '--grid', 'agent.gamma=0.9')
  assert (found.config.wandb.group, found.config.wandb.name) == ('sizes', 'gamma=0.9,seed=0')
  (found,) = plan(tmp_path / 'sizes', '--seeds', 0, '--set', 'wandb.group=mine')
  assert (found.config.wandb.group, found.config.wandb.name) == ('mine', 'seed=0')


def test_folder_with_another_config_is_refused(tmp_path):
  (run,) = plan(tmp_path, '--seeds', 0)
  finish(run)
  with pytest.raises(
    ValueError, match=r'seed=0: was made with .* agent.gamma: the folder has 0.99'
  ):
    plan(tmp_path, '--seeds', 0, '--set', 'agent.gamma=0.9')


def test_cores_are_shared_by_the_processes_of_a_run(tmp_path, monkeypatch):
  monkeypatch.setattr(jobs.os, 'sched_getaffinity', lambda pid: set(range(8)))
  monkeypatch.setattr(grid.presets, 'default_preset', lambda: 'laptop')
  fused = plan(tmp_path, '--seeds', *range(3))
  assert [len(part) for part in grid.shares(fused, None)] == [3, 3, 2]
  assert grid.shares(fused, 1) == grid.shares(fused[:1], None) == [list(range(8))]
  distributed = ['learner.fused=false', 'replay.strata[0].max_size=16']
  apart = [run._replace(config=config.override(run.config, distributed)) for run in fused]
  assert [len(part) for part in grid.shares(apart, None)] == [4, 4]
  monkeypatch.setattr(grid.presets, 'default_preset', lambda: 'gpu')
  on_gpu = [run._replace(config=config.override(run.config, ['accelerator=true'])) for run in fused]
  assert grid.shares(on_gpu, None) == [list(range(8))]
  with pytest.raises(ValueError, match=r'--jobs 9: from 1 to 8'):
    grid.shares(fused, 9)


@pytest.mark.parametrize(
  ('more', 'expected'),
  [
    (['--grid', 'agent.gamma'], '--grid agent.gamma: write it as key=value,value'),
    (['--grid', 'agent.gamma='], '--grid agent.gamma=: give its values'),
    (['--grid', 'agent.gamma=[1'], '--grid agent.gamma=[1: give its values'),
    (['--grid', 'agent.gamma=0.9', 'agent.gamma=0.8'], 'the key is given twice'),
    (['--grid', 'agent.gamma=0.9,0.9'], 'two settings are named gamma=0.9,seed=0'),
    (['--grid', 'agent.gama=0.9'], 'agent.gama=0.9: unknown key; did you mean agent.gamma'),
    (['--grid', 'agent.gamma=0.9,2'], 'agent.gamma=2.0: must lie in (0, 1]'),
    (['--grid', 'seed=0,1'], '--grid seed=0,1: is given by --seeds'),
    (['--seeds', '0', '-1'], 'seed=-1: must be at least 0'),
    (['--seeds', '0', '--seed', '0'], '--seed 0: is one of --seeds'),
    (['--seeds', '0', '--profile', '1:2'], '--profile: is of a single run'),
    (['--jobs', '1'], '--jobs 1: is of several runs'),
    (['--seeds', '0', '--jobs', '0'], '--jobs 0: from 1 to '),
    (['--seeds', '0', '--set', 'environment.rows=0'], 'environment.rows=0'),
  ],
)  # fmt: skip
def test_bad_input_is_named_before_anything_starts(capsys, tmp_path, more, expected):
  assert call(*words(tmp_path, *more)) == 2
  message = capsys.readouterr().err
  assert expected in message and message.count('\n') == 1
  assert not list(tmp_path.iterdir())


def test_folder_of_a_single_run_is_refused(capsys, tmp_path):
  (run,) = plan(tmp_path, '--seeds', 0)
  finish(run)
  assert call(*words(run.folder, '--seeds', 0)) == 2
  assert 'is the folder of a single run' in capsys.readouterr().err


def test_run_whose_folder_cannot_be_used_is_named(capsys, tmp_path):
  (tmp_path / 'seed=0' / 'another').mkdir(parents=True)
  assert call(*words(tmp_path, '--seeds', 0)) == 1
  stdout, stderr = capsys.readouterr()
  assert '[1/1] warning: seed=0: --run ' in stdout and 'has no config.yaml' in stdout
  assert 'no table' in stderr


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
  """Runs of three seeds, of which one had finished before: their folder, and the command's output."""
  parent = tmp_path_factory.mktemp('sweep') / 'runs'
  (before,) = plan(parent, '--seeds', 2, '--grid', 'agent.entropy_scale=0.02')
  finish(before)
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as stdout:
    patch.delenv('XLA_FLAGS', raising=False)
    code = call(*words(parent, '--seeds', 0, 1, 2, '--grid', 'agent.entropy_scale=0.02'))
    assert code == 0, stdout.getvalue()
    yield parent, stdout.getvalue()


def test_seeds_of_a_setting_become_one_curve(sweep):
  parent, stdout = sweep
  assert '2 runs of 3 to do, ' in stdout
  assert '[2/2] entropy_scale=0.02,seed=1: return ' in stdout
  (row,) = [line for line in stdout.splitlines() if line.startswith('| entropy_scale=0.02 |')]
  assert row.startswith('| entropy_scale=0.02 | 3 | ')
  assert re.search(r'\(-?\d\.\d\d to -?\d\.\d\d\)', row)  # the interval of several seeds
  log = (parent / 'entropy_scale=0.02,seed=0' / 'logs' / 'train.log').read_text()
  assert 'done: environment_step=2048' in log


def test_only_the_runs_that_are_missing_are_trained(sweep, capsys):
  parent, stdout = sweep
  assert 'seed=2: return ' not in stdout
  metrics_of = lambda seed: parent / f'entropy_scale=0.02,seed={seed}' / 'metrics'
  assert not (metrics_of(2) / 'learner.jsonl').exists()
  before = [(metrics_of(seed) / 'learner.jsonl').read_text() for seed in (0, 1)]
  assert call(*words(parent, '--seeds', 0, 1, 2, '--grid', 'agent.entropy_scale=0.02')) == 0
  stdout = capsys.readouterr().out
  assert 'to do' not in stdout and '| entropy_scale=0.02 | 3 | ' in stdout
  assert [(metrics_of(seed) / 'learner.jsonl').read_text() for seed in (0, 1)] == before


def test_runs_of_a_sweep_are_ordinary_run_folders(sweep, capsys):
  parent, _ = sweep
  assert call('evaluate', parent / 'entropy_scale=0.02,seed=1', '--episodes', 4) == 0
  assert 'episode_return' in capsys.readouterr().out
  assert call('report', *sorted(parent.iterdir())) == 0
  stdout, stderr = capsys.readouterr()
  assert '| ppo | ' in stdout and 'left out' not in stderr
