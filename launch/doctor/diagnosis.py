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
from hephaestus.launch.doctor import replay as replay_checks
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.interface import policy as policy_lib


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

  Also writes the checks to doctor.json in the run's folder, from where the dashboard shows them.

  Args:
    num_steps: least number of environment steps to play, once with the random policy and once with
      the agent.
    checkpoint: learner step of the checkpoint to check, or 'best'; None for the newest.

  Returns:
    All checks, also those that are fine.

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
  memory = check_lib.note('actor and critic', name, count)
  checks = [*agent_checks.of_metrics(folder, config, at_random), memory, *checks]
  if isinstance(config.record, dreamer_record.Dreamer):
    found = agent_checks.predict(policy, num_steps=num_steps, seed=seed)
    checks += agent_checks.of_predictions(found, explained)
    checks += agent_checks.of_dreams(
      dreams.of_policy(policy, num_steps=num_steps, seed=seed).summary
    )
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
