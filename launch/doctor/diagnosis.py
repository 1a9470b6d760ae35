"""Runs all checks of an environment or of a run."""

import math
import pathlib

import jax
import numpy as np

from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import dreamer as dreamer_record
from hephaestus.launch.agents import presets
from hephaestus.launch.bench import dreams
from hephaestus.launch.doctor import agent as agent_checks
from hephaestus.launch.doctor import check as check_lib
from hephaestus.launch.doctor import environment as environment_checks
from hephaestus.launch.inspect import live
from hephaestus.launch.interface import policy as policy_lib
from hephaestus.launch.run import validation

REPLAY = 'replay'


def of_environment(name: str, *, num_steps: int, seed: int) -> list[check_lib.Check]:
  """Checks an environment, and the consequences of this machine's default preset for it; see `of_run`.

  Raises:
    ValueError: the name is unknown, or its package is not installed.
  """
  config = launch_config.of_preset('dreamer', presets.default_preset(), name)
  checks, _, _ = environment_checks.check(
    config.make_environment(), config, num_steps=num_steps, seed=seed
  )
  return checks


def of_run(
  folder: pathlib.Path, *, num_steps: int, seed: int, checkpoint: str | None = None
) -> list[check_lib.Check]:
  """Checks a run, which may still be training, and its environment.

  Plays at least `num_steps` environment steps with the random policy and as many with the agent.

  Raises:
    ValueError: it is not a run, has no such checkpoint or none of its replay, has damaged metrics, or
      its environment cannot be made.
  """
  policy = policy_lib.load(folder, checkpoint)
  config = policy.config
  checks, streams, explained = environment_checks.check(
    policy.environment, config, num_steps=num_steps, seed=seed
  )
  at_random = None
  if streams is not None and len(streams.returns) > 1:
    error = np.std(streams.returns) / math.sqrt(len(streams.returns))
    at_random = float(np.mean(streams.returns)), float(error)
  remembered = jax.eval_shape(lambda: policy.agent.initial_policy_state(1))
  count = sum(leaf.size for leaf in jax.tree.leaves(remembered))
  name = 'numbers kept from step to step' if count else 'numbers kept from step to step: no memory'
  memory = check_lib.judge('actor and critic', name, count)
  checks = [*agent_checks.of_metrics(folder, config, at_random), memory, *checks]
  if isinstance(config.record, dreamer_record.Dreamer):
    found = agent_checks.predict(policy, num_steps=num_steps, seed=seed)
    checks += agent_checks.of_predictions(found, explained)
    checks += agent_checks.of_dreams(dreams.compare(policy, num_steps=num_steps, seed=seed))
  if not config.record.on_policy:
    checks += of_replay(folder, config)
  return checks


def of_replay(
  folder: pathlib.Path, config: launch_config.ExperimentConfig
) -> list[check_lib.Check]:
  """Checks stored sequences, or ratio and duplicates of a fused run, and describes the strata.

  There are no checks for a distributed run without a saved replay, or without Reverb.
  """
  if config.fused:
    report = live.inspect(str(folder))
    checks = [
      check_lib.judge(
        REPLAY, 'replay ratio over the configured one',
        (report.replay_ratio['achieved'] or 0.0) / config.replay.replay_ratio, above=0.7, below=1.3,
        cause='the learner does not update as often as it should for what is collected',
        remedy='see whether replay.replay_ratio was changed on a resume; else begin again',
      ),
      check_lib.judge(
        REPLAY, 'sequences that are stored twice', report.checkpoint['duplicates'], below=0,
        cause='the same experience counts twice',
        remedy='begin again with an empty folder, and report it',
      ),
    ]  # fmt: skip
  elif not validation.has_distributed() or not any((folder / 'replay').glob('*')):
    return []
  else:
    from hephaestus.launch.inspect import stored  # which imports Reverb

    checks = [
      check_lib.Check(
        REPLAY, 'stored sequences', None, 'whole', False, text, 'see docs/inspecting.md'
      )
      for text in stored.read(str(folder)).violations
    ]
    try:
      report = live.inspect(str(folder))
    except ConnectionError:  # its server is busy, or just starting
      return checks
  for name in (each.name for each in config.replay.strata if each.name in report.tables):
    median = report.ages.get(name, {}).get('median')
    checks += [
      check_lib.judge(REPLAY, f'sequences of stratum {name}', report.tables[name]['size']),
      check_lib.judge(REPLAY, f'median age of {name}, updates', median),
    ]
  return checks
