"""The wheel: its files, and running it next to other packages and modules of common names."""

import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata

import pytest

from hephaestus.actors.environments import packages
from hephaestus.launch import bootstrap, main

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ('actors', 'agents', 'launch', 'learner', 'replay')


def tracked_files():
  """The files of the checkout that Git does not ignore, relative to it."""
  command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
  paths = sorted({pathlib.Path(name) for name in listed.split('\0') if name})
  return [path for path in paths if (ROOT / path).is_file()]


def code():
  """Names of the tracked files of the package."""
  inside = (*FOLDERS, '__init__.py', 'py.typed')
  return {str(path) for path in tracked_files() if path.parts[0] in inside}


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """The folder of sdist and wheel of the tracked files, without anything that an earlier build left."""
  folder = tmp_path_factory.mktemp('source')
  for path in tracked_files():
    if path.parts[0] not in ('tests', 'docs'):
      (folder / path).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / path, folder / path)
  for kind in ('sdist', 'wheel'):
    build = f'from setuptools import build_meta; build_meta.build_{kind}("dist")'
    subprocess.run([sys.executable, '-c', build], cwd=folder, check=True, capture_output=True)
  return folder / 'dist'


@pytest.fixture(scope='module')
def wheel(built):
  """The wheel."""
  (made,) = built.glob('*.whl')
  return made


def test_sdist_holds_the_code(built):
  (sdist,) = built.glob('*.tar.gz')
  with tarfile.open(sdist) as archive:
    packed = {name.partition('/')[2] for name in archive.getnames()}
  assert code() | {'pyproject.toml', 'README.md', 'LICENSE'} <= packed


def test_version_is_the_packages(capsys):
  with pytest.raises(SystemExit):
    main.parse(['hephaestus', '--version'])
  assert capsys.readouterr().out == f'hephaestus {metadata.version("hephaestus-rl")}\n'


def test_download_of_uv_is_pinned_by_its_checksum(tmp_path, monkeypatch):
  """An index that gives another file with a checksum of its own is not believed."""
  name = (
    f'uv-{bootstrap.PINNED}-py3-none-manylinux_2_17_x86_64.musllinux_1_1_{platform.machine()}.whl'
  )
  digest = hashlib.sha256(b'another program').hexdigest()
  page = f'<a href="/{name}#sha256={digest}">uv</a>'.encode()
  monkeypatch.setenv('UV_DEFAULT_INDEX', 'https://index.example')
  monkeypatch.setattr(
    bootstrap, 'download', lambda address: b'another program' if address.endswith('whl') else page
  )
  with pytest.raises(ValueError, match='is not the wheel of uv'):
    bootstrap.install_by_urllib(tmp_path / 'uv')
  assert not (tmp_path / 'uv').exists()


def test_wheel_holds_the_package_and_nothing_else(wheel):
  with zipfile.ZipFile(wheel) as archive:
    packed = {name for name in archive.namelist() if '.dist-info/' not in name}
  assert packed == {f'hephaestus/{path}' for path in code()}


def test_users_own_modules_of_the_same_names_are_not_imported(wheel, tmp_path):
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(tmp_path / 'site')
  folder = tmp_path / 'work'
  (folder / 'agents').mkdir(parents=True)
  for name in ('agents/__init__.py', 'agents.py', 'replay.py', 'learner.py'):
    (folder / name).write_text('raise RuntimeError("the user\'s own module was imported")\n')
  # An environment of the user's own is found under such a name.
  (folder / 'launch.py').write_text(
    'from hephaestus.actors.environments import catch\nclass Mine(catch.Catch):\n  pass\n'
  )
  # A console script has its own folder in front of `sys.path`, and not the working directory.
  start = (
    'import sys; sys.path.pop(0); import hephaestus.launch.main as main; '
    'print(main.__file__); sys.exit(main.main())'
  )
  ran = subprocess.run(
    [sys.executable, '-c', start, 'environments', 'launch:Mine'],
    cwd=folder, env={**os.environ, 'PYTHONPATH': str(tmp_path / 'site')},
    capture_output=True, text=True,
  )  # fmt: skip
  assert ran.returncode == 0, ran.stderr
  assert ran.stdout.startswith(str(tmp_path / 'site'))
  assert 'hephaestus train --env launch:Mine' in ran.stdout


@pytest.mark.parametrize(
  ('source', 'installer', 'command'),
  [
    (None, 'pip', "pip install 'hephaestus-rl[envs]'"),
    ({'url': 'file:///a%20b', 'dir_info': {}}, 'pip', "pip install '/a b[envs]'"),
    ({'url': 'file:///a', 'dir_info': {'editable': True}}, 'uv', "uv pip install -e '/a[envs]'"),
    (
      {'url': 'file:///clone', 'dir_info': {'editable': True}},
      'uv',
      'make -C /clone train EXTRAS=envs ARGS=--help',
    ),
    (
      {'url': 'https://a.b/c.git', 'vcs_info': {'vcs': 'git', 'commit_id': '1'}},
      'pip',
      "pip install 'hephaestus-rl[envs] @ git+https://a.b/c.git'",
    ),
  ],
)
def test_command_that_installs_an_extra_suits_how_the_package_was_installed(
  tmp_path, monkeypatch, source, installer, command
):
  installed = tmp_path / 'hephaestus_rl-0.dist-info'
  installed.mkdir()
  (installed / 'METADATA').write_text('Metadata-Version: 2.1\nName: hephaestus-rl\nVersion: 0\n')
  (installed / 'INSTALLER').write_text(f'{installer}\n')
  if source is not None:
    (installed / 'direct_url.json').write_text(json.dumps(source))
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'prefix', '/clone/.venv')
  assert packages.install('envs') == command


def test_command_that_installs_an_extra_where_only_the_checkout_is_on_the_path(monkeypatch):
  monkeypatch.setattr(sys, 'path', [])
  assert packages.install('envs') == "pip install 'hephaestus-rl[envs]'"
