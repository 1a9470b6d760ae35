"""The list of environments, its families, and the specs and options of one."""

import json

import pytest

from hephaestus.actors import environments
from hephaestus.actors.environments import catalogue, packages
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
  shown_by.show(catalogue.look_up('grid_world'))
  shown = capsys.readouterr().out
  for words in ('hackmatrix', 'CartPole-v1', packages.install('envs'), 'num_resources'):
    assert words in shown
