"""The wheel: its files, and running it next to other packages and modules of common names."""

import hashlib
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
import structure

from hephaestus.launch import bootstrap, main

ROOT = pathlib.Path(__file__).resolve().parents[1]
UV = ROOT / '.tools' / 'uv' / 'bin' / 'uv'
FOLDERS = ('actors', 'agents', 'launch', 'learner', 'replay')


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """The folder of sdist and wheel of the tracked files, without anything that an earlier build left."""
  folder = tmp_path_factory.mktemp('source')
  for path in structure.tracked_files(ROOT):
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


def test_twine_accepts_sdist_and_wheel(built):
  pytest.importorskip('twine')
  packages = sorted(built.iterdir())
  assert [path.name.endswith(('.tar.gz', '.whl')) for path in packages] == [True, True]
  check = [sys.executable, '-m', 'twine', 'check', '--strict', *map(str, packages)]
  checked = subprocess.run(check, capture_output=True, text=True)
  assert checked.returncode == 0, checked.stdout + checked.stderr
  assert checked.stdout.count('PASSED') == 2


def test_sdist_holds_the_code(built):
  (sdist,) = built.glob('*.tar.gz')
  with tarfile.open(sdist) as archive:
    packed = {name.partition('/')[2] for name in archive.getnames()}
  tracked = structure.tracked_files(ROOT)
  code = {str(path) for path in tracked if path.parts[0] in (*FOLDERS, '__init__.py', 'py.typed')}
  assert code <= packed and {'pyproject.toml', 'README.md', 'LICENSE'} <= packed


def test_version_is_the_packages(capsys):
  with pytest.raises(SystemExit) as ended:
    main.parse(['hephaestus', '--version'])
  assert ended.value.code == 0
  assert capsys.readouterr().out == f'hephaestus {metadata.version("hephaestus")}\n'


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


@pytest.fixture
def workplace(tmp_path):
  """A working directory with modules of the user's own, which fail when they are imported."""
  folder = tmp_path / 'work'
  (folder / 'agents').mkdir(parents=True)
  for name in ('agents/__init__.py', 'agents.py', 'replay.py', 'learner.py', 'launch.py'):
    (folder / name).write_text('raise RuntimeError("the user\'s own module was imported")\n')
  return folder


def environment(**variables):
  """The variables of a process of its own, on one device."""
  kept = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  return {**kept, **variables}


def test_wheel_holds_the_package_and_nothing_else(wheel):
  with zipfile.ZipFile(wheel) as archive:
    packed = {name for name in archive.namelist() if '.dist-info/' not in name}
  code = {
    str(pathlib.Path('hephaestus', path))
    for path in structure.tracked_files(ROOT)
    if path.parts[0] in (*FOLDERS, '__init__.py', 'py.typed')
  }
  assert packed == code
  assert 'hephaestus/launch/report/assets/page.js' in packed
  shipped = [name for name in packed if '/interface/shipped/' in name]
  assert sum(name.endswith('/params.safetensors') for name in shipped) == 4


def test_users_own_modules_of_the_same_names_are_not_imported(wheel, workplace, tmp_path):
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(tmp_path / 'site')
  # A console script has its own folder in front of `sys.path`, and not the working directory.
  start = (
    'import sys; sys.path.pop(0); import hephaestus.launch.main as main; '
    'print(main.__file__); sys.exit(main.main())'
  )

  def run(*arguments):
    ran = subprocess.run(
      [sys.executable, '-c', start, 'environments', *arguments],
      cwd=workplace,
      env=environment(PYTHONPATH=str(tmp_path / 'site')),
      capture_output=True,
      text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout

  printed = run()
  assert printed.startswith(str(tmp_path / 'site'))
  assert 'catch' in printed
  # An environment of the user's own is found under such a name.
  (workplace / 'launch.py').write_text(
    'from hephaestus.actors.environments import catch\nclass Mine(catch.Catch):\n  pass\n'
  )
  assert 'hephaestus train --env launch:Mine' in run('launch:Mine')


@pytest.fixture
def fresh(wheel, tmp_path):
  """The programs of a new virtual environment with the wheel, its lock's versions and openai-agents."""

  def uv(*arguments):
    subprocess.run([str(UV), *map(str, arguments)], check=True, cwd=tmp_path)

  if not UV.exists():
    pytest.skip('uv is installed by `make`')
  lock, overrides = tmp_path / 'lock.txt', tmp_path / 'overrides.txt'
  overrides.write_text("keras; sys_platform == 'never'\n")
  export = [
    'export',
    '-q',
    '--frozen',
    '--no-emit-project',
    '--no-hashes',
    '--extra',
    'distributed',
  ]
  uv(*export, '--project', ROOT, '-o', lock)
  uv('venv', '-q', '--python', sys.executable, 'env')
  programs = tmp_path / 'env' / 'bin'
  install = ['pip', 'install', '-q', '--python', programs / 'python']
  uv(*install, '-r', lock, wheel, '--overrides', overrides)
  uv(*install, 'openai-agents', '-c', lock)
  return programs


@pytest.mark.slow
def test_installed_wheel_trains_next_to_openai_agents(fresh, workplace):
  def run(*command, folder):
    arguments = [str(fresh / command[0]), *command[1:]]
    ran = subprocess.run(arguments, cwd=folder, env=environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout

  small = (
    '--steps',
    '1500',
    '--run',
    'run',
    '--set',
    'agent.hidden_size=16',
    'learner.log_period=1',
  )
  run('hephaestus', 'train', *small, folder=workplace)
  assert (workplace / 'run' / 'metrics' / 'learner.jsonl').read_text()
  owner = 'import agents, hephaestus; print(agents.Agent.__module__, agents.__file__)'
  assert 'site-packages/agents' in run('python', '-c', owner, folder=fresh)
