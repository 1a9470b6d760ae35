"""Limits on the structure of the code; `python tests/structure.py` prints all of its figures."""

import pathlib
import subprocess

import pytest
import structure
import tomli

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_every_package_is_installed():
  project = tomli.loads((ROOT / 'pyproject.toml').read_text())
  assert set(project['tool']['setuptools']['packages']) == structure.packages(ROOT)


@pytest.fixture
def checkout(tmp_path):
  """Writes files into a Git checkout, by their text."""

  def write(**files):
    subprocess.run(['git', 'init', '-q', str(tmp_path)], check=True)
    (tmp_path / 'README.md').write_text('One line.\n')
    (tmp_path / 'room').mkdir()
    for name, text in files.items():
      (tmp_path / 'room' / f'{name}.py').write_text(text)
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


def test_parameters_count_without_self_and_with_keywords(checkout):
  found = checkout(one='class A:\n  def f(self, a, /, b, *c, d=1, **e):\n    pass\n')
  assert [(f.name, f.parameters) for f in found.functions] == [('room/one.py:A.f', 5)]


def test_length_of_a_function_includes_its_signature_and_docstring(checkout):
  found = checkout(one='def f(\n  a,\n):\n  """A."""\n  return a\n')
  assert [f.lines for f in found.functions] == [5]
