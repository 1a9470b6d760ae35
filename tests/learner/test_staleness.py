"""Ages of sampled sequences by stratum, each batch counted once."""

import types

import numpy as np

from hephaestus.learner.sources import staleness


def test_report_separates_strata_and_counts_each_batch_once():
  sampled = staleness.Staleness(['frontier', 'episodic'] * 2)
  assert sampled.report(10) == {}
  for version in (4, 8):
    sampled.note(types.SimpleNamespace(version=np.array([version, 0, version, 2], np.int32)))
  report = sampled.report(10)
  ages = {name: report[f'replay/{name}/age/median'] for name in ('frontier', 'episodic')}
  assert ages == {'frontier': 4.0, 'episodic': 9.0}
  assert (report['replay/frontier/age/lowest'], report['replay/frontier/age/highest']) == (2.0, 6.0)
  assert len(report) == 10 and sampled.report(11) == {}
