"""All checks of an environment or of a run."""

import math
import pathlib

import numpy as np

from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import dreamer as dreamer_record
from hephaestus.launch.agents import presets
from hephaestus.launch.bench import dreams
from hephaestus.launch.doctor import agent as agent_checks
from hephaestus.launch.doctor import check as check_lib
from hephaestus.launch.doctor import environment as environment_checks
from hephaestus.launch.doctor import replay as replay_checks
from hephaestus.launch.interface import policy as policy_lib
from hephaestus.launch.run import folder as folder_lib
from hephaestus.launch.run import metrics


def of_environment(name: str, *, num_steps: int, seed: int) -> list[check_lib.Check]:
  """Checks an environment, and what the default preset of this machine implies for it.

  Args:
    name: as of `environments.make`.
    num_steps: least number of environment steps to play.
    seed: of everything random.

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
  """Checks a run, which may be running, and its environment; leaves the result in its folder.

  Args:
    folder: of the run.
    num_steps: least number of environment steps to play at random, and by the agent.
    seed: of everything random.
    checkpoint: a learner step, or 'best'; None for the newest.

  Raises:
    ValueError: it has no such checkpoint.
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
  checks = [*agent_checks.of_metrics(folder, config, at_random), *checks]
  if isinstance(config.record, dreamer_record.Dreamer):
    found = agent_checks.predict(policy, num_steps=num_steps, seed=seed)
    checks += agent_checks.of_predictions(found, explained)
    checks += agent_checks.of_dreams(dreams.of_policy(policy, num_steps=num_steps, seed=seed))
    checks += replay_checks.of_states(policy, folder, seed=seed)
  if not config.record.on_policy:
    checks += replay_checks.check(folder, config)
  rows = {
    'learner_step': policy.learner_step,
    'findings': [check_lib.text(each) for each in check_lib.findings(checks)],
    'checks': [each._asdict() for each in checks],
  }
  written = folder / f'{folder_lib.DIAGNOSIS}.part'  # the page may read the other meanwhile
  written.write_text(metrics.to_json(rows) + '\n')
  written.replace(folder / folder_lib.DIAGNOSIS)
  return checks
