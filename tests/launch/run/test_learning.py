"""Training from scratch reaches a score, by the command line."""

import pathlib
import re
import subprocess
import sys

import pytest

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'


@pytest.mark.slow
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
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
  ('environment', 'options', 'seed', 'least'),
  [
    ('catch', ('--steps', '10000'), 0, 0.9),
    ('catch', ('--steps', '10000'), 1, 0.9),
    ('catch', ('--steps', '10000'), 2, 0.9),
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
