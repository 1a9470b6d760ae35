"""No circles among imports, one direction between the folders, and every package installed."""

import pathlib
import subprocess

import pytest
import structure
import tomli

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope='module')
def imports():
  return structure.measure(ROOT)


def test_modules_import_in_no_circle(imports):
  assert structure.module_circles(imports) == []


def test_folders_import_in_no_circle(imports):
  assert structure.folder_circles(imports) == []


def test_folders_import_in_one_direction(imports):
  assert structure.forbidden(imports) == []


def test_every_package_is_installed():
  project = tomli.loads((ROOT / 'pyproject.toml').read_text())
  assert set(project['tool']['setuptools']['packages']) == structure.packages(ROOT)


@pytest.fixture
def checkout(tmp_path):
  """Writes files into a Git checkout, by their text; `a__b` is the file `a/b.py`."""

  def write(**files):
    subprocess.run(['git', 'init', '-q', str(tmp_path)], check=True)
    for name, text in files.items():
      path = tmp_path / f'{name.replace("__", "/")}.py'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
    return structure.measure(tmp_path)

  return write


def test_deferred_imports_count_towards_a_circle(checkout):
  found = checkout(
    room__one='from hephaestus.room import two\n',
    room__two='def load():\n  import hephaestus.room.three\n',
    room__three='from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from room import one\n',
    room__four='from hephaestus.room import one\n',
  )
  names = [f'hephaestus.room.{name}' for name in ('one', 'three', 'two')]
  assert structure.module_circles(found) == [names]


def test_folders_in_a_circle_need_no_modules_in_one(checkout):
  found = checkout(
    room__outer='from hephaestus.room.inner import one\n',
    room__inner__one='',
    room__inner__two='from hephaestus.room import outer\nfrom hephaestus.room.other import three\n',
    room__other__three='from hephaestus.room.inner import one\n',
  )
  assert structure.module_circles(found) == []
  names = [f'hephaestus.room.{name}' for name in ('inner', 'other', 'outer')]
  assert structure.folder_circles(found) == [names]


def test_imports_against_the_direction_are_found(checkout):
  found = checkout(
    agents__one='',
    agents__two='def load():\n  from hephaestus.replay import tables\n',
    actors__actor='from hephaestus.actors.environments import catch\n',
    actors__environments__catch='from hephaestus.actors import actor\n',
    learner__loop='from hephaestus.agents import one\n',
    replay__tables='',
  )
  assert structure.forbidden(found) == [
    'hephaestus.actors.environments.catch -> hephaestus.actors.actor',
    'hephaestus.agents.two -> hephaestus.replay.tables',
  ]
