"""Checks before a run starts."""

import pwd
import tempfile

from hephaestus.launch.run import variables


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
