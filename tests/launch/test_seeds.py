"""`train --seeds`: the folders of several runs, and real runs that end as one curve."""

import sys

import pytest

from hephaestus.launch import config, main, seeds
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import jobs
from hephaestus.launch.run import request

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
  arguments = main.parse(['hephaestus', *words(parent, *more)])
  return seeds.plan(request.of(arguments), arguments.seeds)


def finish(run, **last):
  """Writes the folder of a run that has reached its end."""
  folder_lib.open_run(run.folder, run.config)
  logger = metrics.JsonLines(run.folder / 'metrics' / 'evaluator.jsonl')
  logger.write({'final': True, 'environment_step': 2048, 'normalised_score': 0.5, **last})
  logger.close()


def test_each_seed_has_a_folder_of_its_own_and_one_group_in_wandb(tmp_path):
  found = plan(tmp_path / 'mine', '--seeds', 3, 1)
  assert [(run.folder.name, run.config.seed) for run in found] == [('seed=3', 3), ('seed=1', 1)]
  assert found[0].folder.parent == tmp_path / 'mine'
  assert (found[0].config.wandb.group, found[0].config.wandb.name) == ('mine', 'seed=3')
  (named,) = plan(tmp_path, '--seeds', 0, '--set', 'wandb.group=other')
  assert (named.config.wandb.group, named.config.wandb.name) == ('other', 'seed=0')


def test_run_is_done_at_the_end_that_its_config_asks_for(tmp_path):
  first, second = plan(tmp_path, '--seeds', 0, 1)
  assert not seeds.is_done(first)
  finish(first)
  finish(second, final=False)
  assert [seeds.is_done(run) for run in (first, second)] == [True, False]
  (longer,) = plan(tmp_path, '--seeds', 0, '--steps', 4096)
  assert not seeds.is_done(longer)
  folder_lib.open_run(longer.folder, longer.config)  # and it is killed before it evaluates
  assert not seeds.is_done(longer)


def test_cores_are_shared_by_the_processes_of_a_run(tmp_path, monkeypatch):
  monkeypatch.setattr(jobs.os, 'sched_getaffinity', lambda pid: set(range(8)))
  monkeypatch.setattr(seeds.presets, 'default_preset', lambda: 'laptop')
  fused = plan(tmp_path, '--seeds', *range(3))
  parts = seeds.shares(fused, None)
  assert sorted(map(len, parts)) == [2, 3, 3] and parts[2][-1] == 7
  assert seeds.shares(fused, 1) == seeds.shares(fused[:1], None) == [list(range(8))]
  distributed = ['learner.fused=false', 'replay.strata[0].max_size=16']
  apart = [run._replace(config=config.override(run.config, distributed)) for run in fused]
  assert [len(part) for part in seeds.shares(apart, None)] == [4, 4]
  monkeypatch.setattr(seeds.presets, 'default_preset', lambda: 'gpu')
  on_gpu = [run._replace(config=config.override(run.config, ['accelerator=true'])) for run in fused]
  assert seeds.shares(on_gpu, None) == [list(range(8))]
  with pytest.raises(ValueError, match=r'--jobs 9: '):
    seeds.shares(fused, 9)


@pytest.mark.parametrize(
  ('more', 'key'),
  [
    (['--seeds', '0', '-1'], 'seed=-1: '),
    (['--seeds', '0', '1', '0'], '--seeds 0 1 0: '),
    (['--seeds', '0', '--seed', '0'], '--seed 0: '),
    (['--seeds', '0', '--profile', '1:2'], '--profile: '),
    (['--jobs', '1'], '--jobs 1: '),
    (['--seeds', '0', '--jobs', '0'], '--jobs 0: '),
    (['--seeds', '0', '--set', 'environment.rows=0'], 'environment.rows=0'),
  ],
)
def test_bad_input_is_named_before_anything_starts(capsys, tmp_path, more, key):
  assert call(*words(tmp_path, *more)) == 2
  message = capsys.readouterr().err
  assert key in message and message.count('\n') == 1
  assert not list(tmp_path.iterdir())


def test_folder_of_other_runs_is_refused(capsys, tmp_path):
  (run,) = plan(tmp_path, '--seeds', 0)
  finish(run)
  assert call(*words(run.folder, '--seeds', 0)) == 2
  assert f'--run {run.folder}: ' in capsys.readouterr().err
  with pytest.raises(ValueError, match=r'seed=0: .* agent.gamma: the folder has 0.99'):
    plan(tmp_path, '--seeds', 0, '--set', 'agent.gamma=0.9')


def test_run_whose_folder_cannot_be_used_fails_alone(capsys, tmp_path):
  (tmp_path / 'seed=0' / 'another').mkdir(parents=True)
  assert call(*words(tmp_path, '--seeds', 0)) == 1
  assert '[1/1] warning: seed=0: --run ' in capsys.readouterr().out


# Stands in for `hephaestus train`.
TRAIN = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index('--run') + 1])
row = {'time': 1.0, 'final': True, 'environment_step': 2048, 'episode_return': 1, 'normalised_score': 1}
(folder / 'metrics' / 'evaluator.jsonl').write_text(json.dumps(row) + '\\n')
print('trained')
"""


def test_missing_seeds_are_trained_and_shown_as_one_curve(tmp_path, monkeypatch, capsys):
  """One of two seeds had finished before; the same command again trains none."""
  (tmp_path / 'train.py').write_text(TRAIN)
  monkeypatch.setattr(jobs, 'COMMAND', (sys.executable, str(tmp_path / 'train.py')))
  parent = tmp_path / 'runs'
  finish(plan(parent, '--seeds', 1)[0])
  assert call(*words(parent, '--seeds', 0, 1)) == 0
  printed = capsys.readouterr().out
  assert '1 runs of 2 to do, ' in printed and '[1/1] seed=0: return 1.00' in printed
  score = 'catch  ppo (2 seeds)  evaluator/normalised_score 0.75 (0.5 to 1) at 2,048 '
  assert printed.splitlines()[-1].startswith(score)
  assert (parent / 'seed=0' / 'logs' / 'train.log').read_text() == 'trained\n'
  assert not (parent / 'seed=1' / 'logs' / 'train.log').exists()
  assert call(*words(parent, '--seeds', 0, 1)) == 0
  assert 'to do' not in capsys.readouterr().out
