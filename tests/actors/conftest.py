"""Programs of environments run for a few steps, so compiling them takes most of the time."""

import pytest


@pytest.fixture(scope='module', autouse=True)
def compiled_quickly(little_optimization):
  """Compiles all programs of these tests with little optimization."""
