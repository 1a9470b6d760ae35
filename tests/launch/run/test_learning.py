"""Training from scratch reaches a score, by the command line."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
@pytest.mark.timeout(300)
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_ppo_learns_catch(tmp_path, seed):
  result = subprocess.run(
    [HEPHAESTUS, 'train', '--agent', 'ppo', '--preset', 'laptop', '--seed', str(seed),
     '--run', tmp_path / 'run'],
    capture_output=True, text=True, timeout=280,
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  score = re.search(r'^done: .*normalised_score=(\S+)$', result.stdout, re.MULTILINE)
  assert float(score[1]) >= 0.95


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
  ('environment', 'options', 'seed', 'least'),
  [
    ('catch', ('--steps', '10000'), 0, 0.9),
    ('catch', ('--steps', '10000'), 1, 0.9),
    ('catch', ('--steps', '10000'), 2, 0.9),
    # An image of 32 x 32 x 3 bytes, through the CNN.
    (
      'catch',
      (
        '--steps',
        '12000',
        '--set',
        'environment.rows=8',
        'environment.columns=8',
        'environment.cell_pixels=4',
      ),
      0,
      0.7,
    ),
    (
      'grid_world',
      ('--steps', '25000', '--set', 'environment.size=8', 'environment.num_resources=8'),
      0,
      0.6,
    ),
  ],
)
def test_dreamer_learns_environment(tmp_path, environment, options, seed, least):
  result = subprocess.run(
    [HEPHAESTUS, 'train', '--preset', 'laptop', '--env', environment, '--seed', str(seed),
     '--run', tmp_path / 'run', *options],
    capture_output=True, text=True, timeout=1100,
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  score = re.search(r'^done: .*normalised_score=(\S+)$', result.stdout, re.MULTILINE)
  assert float(score[1]) >= least


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
@pytest.mark.timeout(2400)
def test_full_model_learns_catch(tmp_path):
  """All sizes of the networks of preset `gpu`, on one device; its batch and rollouts suit a CPU."""
  settings = (
    'accelerator=false', 'agent.compute_dtype=float32', 'actor.num_actors=1', 'actor.num_envs=16',
    'actor.sequence_length=11', 'learner.batch_size=16', 'replay.replay_ratio=20', 'replay.warm_up=32',
    'replay.strata[0].max_size=128', 'replay.strata[1].max_size=4096', 'agent.starts_per_sequence=4',
    'agent.horizon_max=8', 'agent.warm_up_updates=50', 'learner.rate_warm_up=50',
    'learner.policy_learning_rate=0.0003',
  )  # fmt: skip
  result = subprocess.run(
    [HEPHAESTUS, 'train', '--fused', '--preset', 'gpu', '--env', 'catch', '--steps', '4500',
     '--run', tmp_path / 'run', '--set', *settings],
    capture_output=True, text=True, timeout=2300, env=os.environ | {'XLA_FLAGS': ''},
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  score = re.search(r'^done: .*normalised_score=(\S+)$', result.stdout, re.MULTILINE)
  assert float(score[1]) >= 0.9
