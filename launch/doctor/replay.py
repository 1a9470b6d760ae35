"""Checks of the replay in the newest checkpoint of a run."""

import pathlib
from typing import Any

from hephaestus.launch import config as launch_config
from hephaestus.launch.doctor import check as check_lib
from hephaestus.launch.inspect import device_replay
from hephaestus.launch.run import preflight

PART = 'replay'


def check(folder: pathlib.Path, config: launch_config.ExperimentConfig) -> list[check_lib.Check]:
  """Ratio, duplicates and strata; nothing where no replay was saved, or Reverb is not installed.

  Args:
    folder: of the run.
    config: of the run, of an agent with replay.
  """
  if config.fused:
    report = device_replay.read(str(folder))
    return _of_ratio(report, config) + _of_strata(report['strata'], 'age')
  if not preflight.has_distributed() or not any((folder / 'replay').iterdir()):
    return []
  from hephaestus.launch.inspect import stored  # which imports Reverb

  found = stored.read(str(folder), 0)
  faults = [
    check_lib.Check(PART, 'stored sequences', None, 'whole', False, text, 'see docs/inspecting.md')
    for text in found.violations
  ]
  return faults + _of_strata(found.summary['strata'], 'age_updates')


def _of_ratio(
  report: dict[str, Any], config: launch_config.ExperimentConfig
) -> list[check_lib.Check]:
  return [
    check_lib.judge(
      PART, 'replay ratio over the configured one',
      report['replay_ratio'] / config.replay.replay_ratio,
      above=0.7, below=1.3,
      cause='the learner does not update as often as it should for what is collected',
      remedy='see whether replay.replay_ratio was changed on a resume; else begin again',
    ),
    check_lib.judge(
      PART, 'sequences that are stored twice', report['duplicates'],
      below=0,
      cause='the same experience counts twice',
      remedy='begin again with an empty folder, and report it',
    ),
  ]  # fmt: skip


def _of_strata(strata: dict[str, Any], age: str) -> list[check_lib.Check]:
  """Sizes, and ages in updates."""
  checks = []
  for name, row in strata.items():
    size = row['size'] if 'size' in row else row['sequences']
    ages = row[age]
    checks.append(check_lib.note(PART, f'sequences of stratum {name}', size))
    checks.append(
      check_lib.note(PART, f'median age of {name}, updates', ages['median'] if ages else None)
    )
  return checks
