"""Training from scratch reaches a score, by the command line."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('full_optimization')]


def score(folder, *words, **variables):
  """The normalised score that a run of `hephaestus train` prints at its end."""
  result = subprocess.run(
    [HEPHAESTUS, 'train', '--run', folder / 'run', *words],
    capture_output=True, text=True, env=os.environ | variables,
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  found = re.search(r'^done: .*normalised_score=(\S+)$', result.stdout, re.MULTILINE)
  return float(found[1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize('seed', ['0', '1', '2'])
def test_ppo_learns_catch(tmp_path, seed):
  assert score(tmp_path, '--agent', 'ppo', '--preset', 'laptop', '--seed', seed) >= 0.95


IMAGE = ('environment.rows=8', 'environment.columns=8', 'environment.cell_pixels=4')
GRID = ('environment.size=8', 'environment.num_resources=8')


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
  ('environment', 'options', 'least'),
  [
    ('catch', ['--steps', '10000', '--seed', '0'], 0.9),
    ('catch', ['--steps', '10000', '--seed', '1'], 0.9),
    ('catch', ['--steps', '10000', '--seed', '2'], 0.9),
    ('catch', ['--steps', '12000', '--set', *IMAGE], 0.7),  # 32 x 32 x 3 bytes, through the CNN
    ('grid_world', ['--steps', '25000', '--set', *GRID], 0.6),
  ],
)
def test_dreamer_learns_environment(tmp_path, environment, options, least):
  assert score(tmp_path, '--preset', 'laptop', '--env', environment, *options) >= least


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
  words = ['--fused', '--preset', 'gpu', '--env', 'catch', '--steps', '4500', '--set', *settings]
  assert score(tmp_path, *words, XLA_FLAGS='') >= 0.9
