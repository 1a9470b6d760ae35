"""How old what is drawn is: each stratum's rows are told apart, and counted once."""

import types

import numpy as np

from hephaestus.learner import staleness


def test_ages_are_told_by_stratum_and_each_batch_once():
  looks = staleness.Staleness(['frontier', 'episodic'] * 2)
  assert looks.report(10) == {}
  for version in (4, 8):
    looks.note(types.SimpleNamespace(version=np.array([version, 0, version, 2], np.int32)))
  told = looks.report(10)
  ages = {name: told[f'replay/{name}/age/median'] for name in ('frontier', 'episodic')}
  assert ages == {'frontier': 4.0, 'episodic': 9.0}
  assert (told['replay/frontier/age/lowest'], told['replay/frontier/age/highest']) == (2.0, 6.0)
  assert len(told) == 10 and looks.report(11) == {}
