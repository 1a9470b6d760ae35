"""Programs of environments are played for some rows; their time is the compiler's."""

import pytest


@pytest.fixture(scope='module', autouse=True)
def compiled_quickly(little_optimization):
  """Of all tests of actors."""
