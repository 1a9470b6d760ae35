"""Compares imagination rollouts (dreams) with the environment, for `hephaestus bench dreams`."""

from typing import Any

import jax
import numpy as np

from hephaestus.actors import rollout
from hephaestus.agents import experience
from hephaestus.agents.dreamer import comparison
from hephaestus.launch.interface import policy as policy_lib

MOST_STEPS = 16  # longest dream
NUM_ENVS = 64
MOST_WRONG = 0.1  # share of dreams with a wrong number, up to which they are trusted
MOST_ERROR = 0.5  # standard deviations of real-valued numbers, up to which dreams are trusted


def compare(policy: policy_lib.Policy, *, num_steps: int, seed: int) -> comparison.Summary:
  """Compares a dreamer's dreams with its environment, from states that the policy visits.

  Args:
    policy: policy of a run of the dreamer, with all parameters.
    num_steps: least number of environment steps to compare with.
    seed: seed of environments, actions and dreams.

  Raises:
    ValueError: so many environments cannot be made.
  """
  config, environment = policy.config.agent, policy.environment
  dreamer = policy.config.record.make(config, environment.observation_spec, environment.action_spec)
  length = min(MOST_STEPS, config.horizon_max)
  unroll = rollout.make_unroll(
    environment, policy.agent, num_envs=NUM_ENVS, sequence_length=2 * length + 1
  )

  @jax.jit
  def measure(params: Any, key: jax.Array, sequence: experience.Sequence) -> Any:
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
  return comparison.summary(total, length)


def trust(found: comparison.Summary) -> str:
  """Says for how many steps dreams can be trusted, and what they get wrong there and a step later."""
  known = [row for row in found.rows if row.wrong is not None and row.error is not None]
  if not known:
    return 'Episodes are too short to say how long dreams can be trusted.'
  wrong = [(row.wrong or 0) > MOST_WRONG or (row.error or 0) > MOST_ERROR for row in known]
  count = wrong.index(True) if any(wrong) else len(known)
  shown = known[max(0, count - 1) : count + 1]
  if count == 0:
    text = 'Dreams can be wrong from the first step on'
  elif count == len(known):
    text = f'Dreams can be trusted for {_steps(shown[0])} or longer'
  else:
    text = f'Dreams can be trusted for about {_steps(shown[0])}'
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


def table(found: comparison.Summary, learner_step: int) -> str:
  """Formats a comparison for a terminal: a sentence, and a table with a line for each row."""
  shown = lambda value: '-' if value is None else f'{value:,.3g}'
  lines = [
    trust(found),
    f'update {learner_step}: value {shown(found.value)}; from the observation, probability to '
    f'continue at ends {shown(found.end)}, share of rewards predicted {shown(found.paid)}, and '
    f'predicted where there is none {shown(found.unpaid)}',
    *('  '.join(f'{cell:>9}' for cell in cells)
      for cells in [comparison.Row._fields, *(map(shown, row) for row in found.rows)]),
  ]  # fmt: skip
  return '\n'.join(lines)
