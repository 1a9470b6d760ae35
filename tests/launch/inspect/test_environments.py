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


def test_unknown_environment_is_refused():
  with pytest.raises(ValueError, match='no such environment'):
    catalogue.look_up('gymna')
