"""Probes that run in little time."""

import jax
import pytest

from hephaestus.learner import probe


@pytest.fixture(autouse=True)
def optimized_probes(monkeypatch):
  """Compiles probes, which take thousands of steps, with all optimizations."""
  fit = probe._fit

  def optimized(*arguments):
    before = jax.config.read('jax_disable_most_optimizations')
    jax.config.update('jax_disable_most_optimizations', False)
    try:
      return fit(*arguments)
    finally:
      jax.config.update('jax_disable_most_optimizations', before)

  monkeypatch.setattr(probe, '_fit', optimized)
