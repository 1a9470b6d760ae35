"""A fused run with replay: its ratio is exact, and it resumes bitwise."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny

from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.run import fused, metrics
from hephaestus.learner import checkpoint, loop
from hephaestus.learner.sources import staleness, unrolled

pytestmark = pytest.mark.usefixtures('little_optimization')

# 2.5 updates for each unroll of 4 sequences after the first two; the ring of 32 is full after eight.
STEPS_PER_UNROLL, UPDATES_PER_UNROLL, WARM_UP = 4 * 5, 2.5, 2
OPTIONS = (
  *tiny.SHAPES, 'learner.fused=true', 'agent.warm_up_updates=2', 'replay.replay_ratio=5',
  'replay.strata=[{name: frontier, max_size: 16, share: 0.5}, {name: episodic, max_size: 32, share: 0.5}]',
  'learner.log_period=4',
)  # fmt: skip
CONFIG = config.override(presets.laptop('catch'), [*OPTIONS])
SURVIVAL = config.override(
  presets.laptop('oasis'),
  [
    *(each for each in OPTIONS if not each.startswith('environment.')),
    'agent.survival_scale=1',
    'agent.empowerment_scale=1',
  ],
)
MEMORY = config.override(CONFIG, ['agent.memory_size=64'])
WORKSPACE = config.override(
  presets.laptop('errands'),
  [
    *(each for each in OPTIONS if not each.startswith('environment.')),
    'agent.workspace_size=2',
    'agent.memory_size=64',
  ],
)
IMAGES = config.override(CONFIG, ['environment.cell_pixels=9', 'agent.image_channels=4'])
