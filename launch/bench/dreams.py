"""Compares imagination rollouts (dreams) with the environment, for `hephaestus bench dreams`."""

import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from hephaestus.actors import rollout
from hephaestus.agents import experience
from hephaestus.agents.dreamer import comparison
from hephaestus.launch.agents import dreamer as dreamer_record
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.interface import policy as policy_lib

MOST_STEPS = 16  # longest dream
NUM_ENVS = 64


class Result(NamedTuple):
  """The comparison for one checkpoint: its learner step, and its errors."""

  learner_step: int
  summary: comparison.Summary


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
  """Does the same as `dreams`, for a policy that is already loaded."""
  config, environment = policy.config.agent, policy.environment
  dreamer = policy.config.record.make(config, environment.observation_spec, environment.action_spec)
  length = min(MOST_STEPS, config.horizon_max)
  unroll = rollout.make_unroll(
    environment, policy.agent, num_envs=NUM_ENVS, sequence_length=2 * length + 1
  )

  @jax.jit
  def measure(params: Any, key: jax.Array, sequence: experience.Sequence) -> comparison.Fidelity:
    return comparison.measure(dreamer, params, key, experience.time_major(sequence), length)

  init_key, key = jax.random.split(jax.random.key(seed))
  state = unroll.init(init_key)
  zero = np.int32(0)
  total: Any = None
  try:
    for index in range(-(-num_steps // (NUM_ENVS * 2 * length))):
      act_key, dream_key = jax.random.split(jax.random.fold_in(key, index))
      state, sequence, _ = unroll.unroll(policy.params, act_key, state, zero, zero)
      found = jax.device_get(measure(policy.all_params, dream_key, sequence))
      total = found if total is None else jax.tree.map(np.add, total, found)
  finally:
    unroll.close()
  return Result(policy.learner_step, comparison.summary(total, length))


def trust(found: comparison.Summary) -> str:
  """Says for how many steps dreams can be trusted, and what they get wrong: see `comparison.trusted`."""
  row, next_row = comparison.trusted(found)
  shown = [each for each in (row, next_row) if each is not None]
  if not shown:
    return 'Episodes are too short to say how long dreams can be trusted.'
  if row is None:
    text = 'Dreams can be wrong from the first step on'
  elif next_row is None:
    text = f'Dreams can be trusted for {_steps(row)} or longer'
  else:
    text = f'Dreams can be trusted for about {_steps(row)}'
  has_error = any(each.error for each in shown)
  has_wrong = any(each.wrong for each in shown) or not has_error
  errors = [
    f'after {_steps(each)}, '
    + ' and '.join(
      has_wrong * [f'{each.wrong:.0%} of them have a wrong number']
      + has_error * [f'numbers are off by {each.error:.2f} standard deviations']
    )
    for each in shown
  ]
  last = shown[-1]
  text += f': {"; ".join(errors)}.'
  if last.imagined is None or last.real is None:
    return text
  return (
    f'{text} In {_steps(last)} from the same states the policy gets a reward of {last.imagined:.2f} in dreams '
    f'and {last.real:.2f} in the environment.'
  )


def _steps(row: comparison.Row) -> str:
  return f'{row.steps} step{"s" if row.steps > 1 else ""}'


def table(result: Result) -> str:
  """Formats a result for a terminal: a sentence, and a table with a line for each row."""
  found, shown = result.summary, lambda value: '-' if value is None else f'{value:,.3g}'
  lines = [
    trust(found),
    f'update {result.learner_step}: value {shown(found.value)}; from the observation, probability to '
    f'continue at ends {shown(found.end)}, share of a reward predicted {shown(found.paid)}',
    '  '.join(f'{name:>9}' for name in comparison.Row._fields),
  ]
  for row in found.rows:
    lines.append('  '.join(f'{shown(value):>9}' for value in row))
  return '\n'.join(lines)
