"""Compares imagination rollouts (dreams) with the environment, for `hephaestus bench dreams`."""

from typing import Any

import jax

from hephaestus.actors import streams
from hephaestus.agents import experience
from hephaestus.agents.dreamer import comparison
from hephaestus.launch.interface import policy as policy_lib

MOST_STEPS = 16  # longest dream
MOST_WRONG = 0.1  # share of dreams with a wrong number, up to which they are trusted
MOST_ERROR = 0.5  # standard deviations of real-valued numbers, up to which dreams are trusted


def compare(policy: policy_lib.Policy, *, num_steps: int, seed: int) -> comparison.Summary:
  """Compares a dreamer's dreams with its environment, from states that the policy visits.

  Args:
    policy: policy of a run of the dreamer, with all parameters.
    num_steps: least number of environment steps to compare with.
    seed: seed of environments, actions and dreams.
  """
  config, environment = policy.config.agent, policy.environment
  dreamer = policy.config.record.make(config, environment.observation_spec, environment.action_spec)
  length = min(MOST_STEPS, config.horizon_max)

  @jax.jit
  def measure(params: Any, key: jax.Array, sequence: experience.Sequence) -> Any:
    return comparison.measure(dreamer, params, key, experience.time_major(sequence), length)

  played = streams.play(environment, policy.agent, policy.params, num_steps=num_steps, seed=seed)
  keys = jax.random.split(jax.random.key(seed + 1), len(played))
  found = [
    jax.device_get(measure(policy.all_params, key, sequence))
    for key, (sequence, _) in zip(keys, played, strict=True)
  ]
  return comparison.summary(jax.tree.map(lambda *each: sum(each), *found), length)


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
