"""Cores as devices: how many share a batch, and that a process asks for them in time."""

import os
import subprocess
import sys

import pytest

from learner import cores


@pytest.mark.parametrize(
  ('num_sequences', 'num_cores', 'count'),
  [(16, 2, 2), (16, 1, 1), (16, 16, 2), (24, 4, 3), (8, 2, 1), (18, 4, 2), (256, 12, 8), (4, 8, 1)],
)
def test_cores_share_a_batch_evenly_with_enough_for_each(num_sequences, num_cores, count):
  assert cores.fitting(num_sequences, num_cores) == count


@pytest.mark.parametrize(
  ('flags', 'counts'), [('', [2, 2]), ('--xla_force_host_platform_device_count=3', [3, 3])]
)
def test_jax_has_a_device_for_each_core_unless_told_otherwise_or_too_late(flags, counts):
  script = (
    'import jax; from learner import cores\n'
    'cores.available = lambda: 2\n'
    'for num_sequences in (16, 8): cores.share(num_sequences); print(jax.local_device_count())'
  )
  done = subprocess.run(
    [sys.executable, '-c', script], capture_output=True, text=True, check=True, timeout=60,
    env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
  )  # fmt: skip
  assert [int(line) for line in done.stdout.split()] == counts
