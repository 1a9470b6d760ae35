"""The flag of XLA that a process gets before JAX starts, and the memory that it keeps."""

import os

import pytest

from hephaestus.learner import process


@pytest.mark.parametrize(
  ('given', 'expected'),
  [
    (None, '--xla_gpu_autotune_level=0'),
    ('--xla_dump_to=there', '--xla_dump_to=there --xla_gpu_autotune_level=0'),
    ('--xla_gpu_autotune_level=4', '--xla_gpu_autotune_level=4'),
  ],
)
def test_autotuning_of_gpus_is_off_unless_the_user_sets_it(given, expected, monkeypatch):
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  if given:
    monkeypatch.setenv('XLA_FLAGS', given)
  process.prepare()
  process.prepare()
  assert os.environ['XLA_FLAGS'] == expected
