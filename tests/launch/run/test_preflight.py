"""Checks before a run starts."""

import pytest
import tiny

from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.run import preflight


def test_a_host_is_checked_for_what_runs_on_it(monkeypatch):
  monkeypatch.setattr(preflight, '_memory', lambda: 2**30)
  made = config.override(presets.laptop('catch'), [*tiny.RUN, 'agent.memory_size=16777216'])
  with pytest.raises(ValueError, match=r'agent\.memory_size=16777216: .* use at most'):
    preflight.check_memory(made, shards=0)
  assert preflight.check_memory(made, shards=0, learns=False) == ''
  assert preflight.check_memory(made, shards=1, learns=False).startswith('replay takes up to')
