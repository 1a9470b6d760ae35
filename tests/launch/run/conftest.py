"""A folder for a run."""

import pytest
import runs


@pytest.fixture
def folder(tmp_path):
  yield tmp_path / 'run'
  runs.kill_all(tmp_path / 'run')
