"""The list of environments, its families, and the specs and options of one."""

import json

import pytest

from hephaestus.actors import environments
from hephaestus.actors.environments import catalogue
from hephaestus.launch.inspect import environments as shown_by


@pytest.fixture
def only_gymnax(monkeypatch):
  """A family that may be installed, and one that is not."""
  families = {'gymnax': environments.FAMILIES['gymnax'], 'no_such': 'actors.environments.no_such'}
  monkeypatch.setattr(environments, 'FAMILIES', families)


def test_list_has_environments_and_families(only_gymnax, capsys):
  pytest.importorskip('gymnax', reason='of the extra envs')
  report = catalogue.look_up()
  assert set(report['worlds']) == set(environments.ENVIRONMENTS)
  assert report['worlds']['catch']['observation'] == {'': 'bool[50]'}
  assert report['worlds']['catch']['actions'] == '3 choices'
  assert not report['worlds']['catch']['mask'] and report['worlds']['hackmatrix']['mask']
  assert report['families']['no_such'] == {'installed': False, 'worlds': None}
  assert report['families']['gymnax']['installed']
  assert 'CartPole-v1' in report['families']['gymnax']['worlds']
  json.dumps(report)
  shown_by.show(report)
  shown = capsys.readouterr().out
  assert (
    'hackmatrix' in shown and 'CartPole-v1' in shown and 'uv sync --inexact --extra envs' in shown
  )


def test_environment_is_shown_with_its_options(capsys):
  report = catalogue.look_up('grid_world')
  assert report['worlds']['grid_world']['options']['num_resources'] == 24
  shown_by.show(report)
  assert 'num_resources' in capsys.readouterr().out


def test_unsupported_environment_of_a_family_names_its_reason(monkeypatch, capsys):
  pytest.importorskip('jumanji', reason='of the extra envs')
  module = environments.family('jumanji')
  monkeypatch.setattr(module, 'names', lambda: ['Cleaner-v0', 'Game2048-v1'])
  found = catalogue.look_up('jumanji')['worlds']
  assert found['jumanji/Game2048-v1']['mask']
  assert 'several agents' in found['jumanji/Cleaner-v0']['refused']
  shown_by.show({'worlds': found})
  assert 'not supported: ' in capsys.readouterr().out


def test_unknown_environment_is_refused():
  with pytest.raises(ValueError, match='no such environment'):
    catalogue.look_up('gymna')


def test_names_are_whole_where_stdout_is_no_terminal(capsys):
  each = catalogue.look_up('catch')['worlds']['catch']
  name = 'a_family/' + 'long_name_' * 20
  shown_by.show({'worlds': {name: each}, 'families': {'x': {'installed': True, 'worlds': [name]}}})
  rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith('│')]
  assert len(rows) == 2 and all(name in row for row in rows)
