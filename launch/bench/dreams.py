"""Compares imagination rollouts (dreams) with the environment, for `hephaestus bench dreams`."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hephaestus.actors import rollout
from hephaestus.agents import experience
from hephaestus.agents.dreamer import fidelity
from hephaestus.launch.agents import dreamer as dreamer_record
from hephaestus.launch.interface import policy as policy_lib
from hephaestus.launch.run import folder as folder_lib

MOST_STEPS = 16  # longest dream
NUM_ENVS = 64


class Row(NamedTuple):
  """Means over dreams after a number of steps, see `fidelity.Fidelity`; None where nothing was counted.

  Attributes:
    steps: number of imagined steps.
    imagined: mean sum of the imagined rewards until then.
    real: mean sum of the environment's rewards, of the same policy from the same states.
    wrong: share of dreams in which a binary or discrete number of the observation is wrong.
    error: mean absolute error of real-valued numbers, in standard deviations.
    continues: predicted probability that the episode continues, at real terminations; 0 is right.
    lasts: the same probability at other steps; 1 is right.
    reward: predicted reward as a share of the real one, at steps with a reward; 1 is right.
    missed: absolute predicted reward at steps without a reward; 0 is right.
  """

  steps: int
  imagined: float | None
  real: float | None
  wrong: float | None
  error: float | None
  continues: float | None
  lasts: float | None
  reward: float | None
  missed: float | None


class Result(NamedTuple):
  """The comparison for one checkpoint.

  Attributes:
    learner_step: learner step of the checkpoint.
    value: mean value, by the critic, of the states where dreams begin; None if unknown.
    end: as `Row.continues`, but read from the posterior of the step, without imagination.
    paid: as `Row.reward`, but read from the posterior of the step, without imagination.
    rows: results after 1, 2, 4, ... imagined steps.
  """

  learner_step: int
  value: float | None
  end: float | None
  paid: float | None
  rows: Sequence[Row]


def dreams(
  folder: pathlib.Path, *, checkpoint: str | None = None, num_steps: int = 8_192, seed: int = 0
) -> Result:
  """Compares dreams with the environment, from states that the policy visits.

  Args:
    folder: folder of a run of the dreamer.
    checkpoint: learner step of a checkpoint, or 'best'; None for the newest.
    num_steps: least number of environment steps to compare with.
    seed: seed of environments, actions and dreams.

  Returns:
    The comparison.

  Raises:
    ValueError: it is not a run of the dreamer, has no such checkpoint, or its environment cannot be made.
  """
  dreamer_record.settings(folder_lib.load_config(folder))  # refuses other agents
  return of_policy(policy_lib.load(folder, checkpoint), num_steps=num_steps, seed=seed)


def of_policy(policy: policy_lib.Policy, *, num_steps: int, seed: int) -> Result:
  """As `dreams`, for the policy of a run of the dreamer that is already loaded."""
  config, environment = policy.config.agent, policy.environment
  dreamer = policy.config.record.make(config, environment.observation_spec, environment.action_spec)
  length = min(MOST_STEPS, config.horizon_max)
  unroll = rollout.make_unroll(
    environment, policy.agent, num_envs=NUM_ENVS, sequence_length=2 * length + 1
  )

  @jax.jit
  def measure(params: Any, key: jax.Array, sequence: experience.Sequence) -> fidelity.Fidelity:
    return fidelity.measure(dreamer, params, key, experience.time_major(sequence), length)

  init_key, key = jax.random.split(jax.random.key(seed))
  state = unroll.init(init_key)
  zero = np.int32(0)
  total: Any = None
  for index in range(-(-num_steps // (NUM_ENVS * 2 * length))):
    act_key, dream_key = jax.random.split(jax.random.fold_in(key, index))
    state, sequence, _ = unroll.unroll(policy.params, act_key, state, zero, zero)
    found = jax.device_get(measure(policy.all_params, dream_key, sequence))
    total = found if total is None else jax.tree.map(np.add, total, found)
  return _result(policy.learner_step, total, length)


def _result(learner_step: int, total: fidelity.Fidelity, length: int) -> Result:
  means = {name: _mean(tally) for name, tally in total._asdict().items()}
  steps = [2**power for power in range(length.bit_length())]
  names = [name for name in Row._fields if name != 'steps']
  rows = [Row(step, **{name: _number(means[name][step - 1]) for name in names}) for step in steps]
  ends = {name: _number(means[name]) for name in ('value', 'end', 'paid')}
  return Result(learner_step, rows=rows, **ends)


def _mean(tally: fidelity.Tally) -> np.ndarray:
  number = np.asarray(tally.number)
  return np.where(number > 0, tally.total / np.where(number > 0, number, 1.0), np.nan)


def _number(value: Any) -> float | None:
  return None if np.isnan(value) else float(value)


def table(result: Result) -> str:
  """Formats a result for a terminal: a sentence, and a table with a line for each row."""
  shown = lambda value: '-' if value is None else f'{value:,.3g}'
  lines = [
    f'update {result.learner_step}: value {shown(result.value)}; from the observation, probability to '
    f'continue at ends {shown(result.end)}, share of a reward predicted {shown(result.paid)}',
    '  '.join(f'{name:>9}' for name in Row._fields),
  ]
  for row in result.rows:
    lines.append('  '.join(f'{shown(value):>9}' for value in row))
  return '\n'.join(lines)
