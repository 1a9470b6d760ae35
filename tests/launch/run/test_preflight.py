"""Checks before a run starts."""

import pwd
import tempfile

import pytest
import tiny

from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.run import preflight, variables


def test_a_host_is_checked_for_what_runs_on_it(monkeypatch):
  monkeypatch.setattr(preflight, '_memory', lambda: 2**30)
  made = config.override(presets.laptop('catch'), [*tiny.RUN, 'agent.memory_size=16777216'])
  with pytest.raises(ValueError, match=r'agent\.memory_size=16777216: .* use at most'):
    preflight.check_memory(made, shards=0)
  assert preflight.check_memory(made, shards=0, learns=False) == ''
  assert preflight.check_memory(made, shards=1, learns=False).startswith('replay takes up to')


def test_cache_of_a_user_without_a_home(tmp_path, monkeypatch):
  def unknown(user):
    raise KeyError(user)

  monkeypatch.delenv('HOME')
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  monkeypatch.setattr(pwd, 'getpwuid', unknown)
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  made = variables._cache()
  assert made is not None and made.parent.parent == tmp_path
  assert made.parent.stat().st_mode & 0o777 == 0o700
  made.parent.chmod(0o777)  # others may put machine code there
  assert variables._cache() is None
