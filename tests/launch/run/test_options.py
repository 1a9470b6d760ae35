"""A real run with options of the agent that are off by default: salience and a Gaussian latent."""

import os
import pathlib
import subprocess
import sys

import imageio.v2 as imageio
import numpy as np
import pytest
import tiny as tiny_sizes

from hephaestus.actors import videos
from hephaestus.actors.environments import catch
from hephaestus.launch.run import metrics

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'
OPTIONS = ('agent.window=2', 'agent.latent=gaussian')


@pytest.fixture(scope='module')
def folder(tmp_path_factory, little_optimization, tiny):
  """The folder of a finished run."""
  folder = tmp_path_factory.mktemp('options') / 'run'
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  ended = subprocess.run(
    [HEPHAESTUS, 'train', '--run', folder, '--preset', 'laptop', '--steps', '400',
     '--set', *tiny, *OPTIONS],
    capture_output=True, text=True, env=environment, timeout=240,
  )  # fmt: skip
  assert ended.returncode == 0, ended.stdout + ended.stderr
  return folder


def test_run_learns_and_is_evaluated(folder):
  row = metrics.last(folder / 'metrics' / 'learner.jsonl')
  assert row['environment_step'] >= 400 and np.isfinite(row['world_model/loss'])
  assert metrics.last(folder / 'metrics' / 'evaluator.jsonl')['final']


def test_dream_video_shows_attention_weights(folder):
  (video,) = (folder / 'videos').glob('*-dream.gif')
  board = np.zeros((1, tiny_sizes.CATCH['rows'] * tiny_sizes.CATCH['columns']), bool)
  draw = catch.Catch(**tiny_sizes.CATCH).draw
  frames = lambda window: videos.beside(draw, board, board, np.ones((1, window)), context=1)
  heights = [frames(window)[0].shape[0] for window in (1, 2)]
  assert imageio.mimread(video)[0].shape[0] == heights[1] > heights[0]
