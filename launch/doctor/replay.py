"""Checks of the replay in the newest checkpoint of a run."""

import pathlib
from typing import Any

import jax
import numpy as np

from hephaestus.agents import experience
from hephaestus.agents.dreamer import examination
from hephaestus.launch import config as launch_config
from hephaestus.launch.doctor import check as check_lib
from hephaestus.launch.inspect import device_replay
from hephaestus.launch.inspect import report as report_lib
from hephaestus.launch.interface import policy as policy_lib
from hephaestus.launch.run import packages
from hephaestus.launch.run import parts as parts_lib

PART = 'replay'
PAIRS = 64  # pairs of consecutive sequences whose states are compared


def check(folder: pathlib.Path, config: launch_config.ExperimentConfig) -> list[check_lib.Check]:
  """Checks stored sequences, or ratio and duplicates of a fused run, and describes the strata.

  Args:
    config: config of the run, whose agent must be off-policy.

  Returns:
    The checks. There are none for a distributed run without a saved replay, or without Reverb.

  Raises:
    ValueError: the run has no checkpoint of replay yet.
  """
  if config.fused:
    report = device_replay.read(str(folder))
    return _of_ratio(report, config) + _of_strata(report.strata)
  if not packages.has_distributed() or not any((folder / 'replay').iterdir()):
    return []
  from hephaestus.launch.inspect import stored  # which imports Reverb

  found = stored.read(str(folder), 0)
  faults = [
    check_lib.Check(PART, 'stored sequences', None, 'whole', False, text, 'see docs/inspecting.md')
    for text in found.violations
  ]
  return faults + _of_strata(found.strata)


def of_states(
  policy: policy_lib.Policy, folder: pathlib.Path, *, seed: int
) -> list[check_lib.Check]:
  """Checks whether the recurrent states stored with sequences still fit today's parameters.

  Values from stored states are compared with values from states that are inferred along the sequence
  before; see `examination.restart`.

  Args:
    policy: policy of a run of the dreamer, with all parameters.
    seed: seed of latents and of the choice of sequences.

  Returns:
    One check; none for a run that is not fused, gives the model a context of several steps, or has too
    few sequences.
  """
  config = policy.config
  # The stored state includes the steps before a sequence only if the context is of one step.
  if not (config.fused and config.agent.window == 1):
    return []
  stored, order = device_replay.sequences(str(folder), parts_lib.make_parts(config).sequence_schema)
  num_envs = config.actor.num_envs
  pairs = len(order) - num_envs
  if pairs < 1:
    return []
  first = np.random.default_rng(seed).choice(pairs, min(PAIRS, pairs), replace=False)
  dreamer = config.record.make(config.agent, policy.observation_spec, policy.action_spec)
  take = lambda index: experience.time_major(jax.tree.map(lambda x: x[order[index]], stored))

  @jax.jit
  def restart(params: Any, before: experience.Sequence, after: experience.Sequence) -> Any:
    return examination.restart(dreamer, params, jax.random.key(seed), before, after)

  found = jax.device_get(restart(policy.all_params, take(first), take(first + num_envs)))
  return [_of_restart(found)]


def _of_restart(found: examination.Restart) -> check_lib.Check:
  """Checks the error of values from stored states, beyond the noise of sampled latents."""
  spread = float(np.std(found.inferred))
  error = np.mean(np.abs(found.stored - found.inferred))
  chance = np.mean(np.abs(found.again - found.inferred))
  return check_lib.judge(
    PART, 'error of values by stale states, relative',
    max(0.0, error - chance) / spread if spread > 1e-3 else None,
    below=0.5,
    cause='states stored with sequences are of older parameters and no longer fit',
    remedy='use longer sequences (actor.sequence_length)',
  )  # fmt: skip


def _of_ratio(
  report: device_replay.DeviceReport, config: launch_config.ExperimentConfig
) -> list[check_lib.Check]:
  return [
    check_lib.judge(
      PART, 'replay ratio over the configured one',
      (report.replay_ratio['achieved'] or 0.0) / config.replay.replay_ratio, above=0.7, below=1.3,
      cause='the learner does not update as often as it should for what is collected',
      remedy='see whether replay.replay_ratio was changed on a resume; else begin again',
    ),
    check_lib.judge(
      PART, 'sequences that are stored twice', report.duplicates, below=0,
      cause='the same experience counts twice',
      remedy='begin again with an empty folder, and report it',
    ),
  ]  # fmt: skip


def _of_strata(strata: dict[str, report_lib.Stratum]) -> list[check_lib.Check]:
  """Reports the size and the median age of each stratum."""
  checks = []
  for name, stratum in strata.items():
    ages = stratum.age_updates
    checks.append(check_lib.note(PART, f'sequences of stratum {name}', stratum.sequences))
    checks.append(
      check_lib.note(PART, f'median age of {name}, updates', ages['median'] if ages else None)
    )
  return checks
