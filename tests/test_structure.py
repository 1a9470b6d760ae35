"""Limits on the structure of the code; `python tests/structure.py` prints all of its figures."""

import pathlib
import subprocess

import pytest
import structure
import tomli

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Exceptions, each with its reason. One that no longer exceeds its limit fails the test, too.
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
WIDE_FUNCTIONS: dict[str, str] = {}
FULL_FOLDERS = {
  '.': 'also shows the files that tools read at the root of a repository',
  'actors/environments': 'one file for each environment and library of environments',
  'agents/dreamer': 'each part of the agent is a module, also those that are off by default',
  'launch': 'each group of commands has a folder, and so do the files and processes that they share',
  'learner': 'the measurements of an update stand beside it',
  'replay': 'the measurements of its servers stand beside it',
}
FOLDER_CIRCLES: dict[str, str] = {}


@pytest.fixture(scope='module')
def measured():
  return structure.measure(ROOT)


def test_modules_have_at_most_500_lines(measured):
  assert set(measured.long_modules()) == set(LONG_MODULES)


def test_functions_have_at_most_60_lines(measured):
  assert {f.name for f in measured.long_functions()} == set(LONG_FUNCTIONS)


def test_functions_have_at_most_8_parameters(measured):
  assert {f.name for f in measured.wide_functions()} == set(WIDE_FUNCTIONS)


def test_folders_have_at_most_12_entries(measured):
  assert set(measured.full_folders()) == set(FULL_FOLDERS)


def test_modules_import_in_no_circle(measured):
  assert measured.circles == []


def test_folders_import_in_no_circle(measured):
  assert {' <-> '.join(circle) for circle in measured.folder_circles} == set(FOLDER_CIRCLES)


def test_every_package_is_installed():
  project = tomli.loads((ROOT / 'pyproject.toml').read_text())
  assert set(project['tool']['setuptools']['packages']) == structure.packages(ROOT)


@pytest.fixture
def checkout(tmp_path):
  """Writes files into a Git checkout, by their text; `a__b` is the file `a/b.py`."""

  def write(**files):
    subprocess.run(['git', 'init', '-q', str(tmp_path)], check=True)
    (tmp_path / 'README.md').write_text('One line.\n')
    for name, text in files.items():
      path = tmp_path / 'room' / f'{name.replace("__", "/")}.py'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
    return structure.measure(tmp_path)

  return write


def test_deferred_imports_count_towards_a_circle(checkout):
  found = checkout(
    one='from hephaestus.room import two\n',
    two='def load():\n  import hephaestus.room.three\n',
    three='from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from room import one\n',
    four='from hephaestus.room import one\n',
  )
  assert found.circles == [[f'hephaestus.room.{name}' for name in ('one', 'three', 'two')]]


def test_folders_in_a_circle_need_no_modules_in_one(checkout):
  found = checkout(
    beside='from hephaestus.room.inner import one\n',
    inner__one='',
    inner__two='from hephaestus.room import beside\nfrom hephaestus.room.other import three\n',
    other__three='from hephaestus.room.inner import one\n',
  )
  assert found.circles == []
  assert found.folder_circles == [
    [f'hephaestus.room.{name}' for name in ('beside', 'inner', 'other')]
  ]


def test_modules_and_folders_have_the_limit_as_their_largest_size(checkout):
  lines = structure.MAX_MODULE_LINES
  found = checkout(full='a = 1\n' * lines, long='a = 1\n' * (lines + 1))
  assert found.long_modules() == {'room/long.py': lines + 1}
  assert found.full_folders() == {}


def test_methods_count_by_class_without_nested_functions(checkout):
  found = checkout(one='class A:\n  def f(self):\n    def g(): pass\n  class B:\n    x = 1\n')
  assert [(c.name, c.methods) for c in found.classes] == [
    ('room/one.py:A', 1),
    ('room/one.py:B', 0),
  ]


def test_parameters_count_without_self_and_with_keywords(checkout):
  found = checkout(one='class A:\n  def f(self, a, /, b, *c, d=1, **e):\n    pass\n')
  assert [(f.name, f.parameters) for f in found.functions] == [('room/one.py:A.f', 5)]


def test_length_of_a_function_includes_its_signature_and_docstring(checkout):
  found = checkout(one='def f(\n  a,\n):\n  """A."""\n  return a\n')
  assert [f.lines for f in found.functions] == [5]
