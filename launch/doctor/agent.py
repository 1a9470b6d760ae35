"""Checks of a run: its metrics, and its agent's predictions for episodes that it plays now."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dm_env
import jax
import numpy as np

from hephaestus.actors import streams
from hephaestus.agents import experience
from hephaestus.agents.dreamer import comparison
from hephaestus.launch import config as launch_config
from hephaestus.launch.doctor import check as check_lib
from hephaestus.launch.doctor import environment as environment_checks
from hephaestus.launch.files import metrics
from hephaestus.launch.interface import policy as policy_lib
from hephaestus.learner import advice

MODEL, POLICY, DREAMS, RUN = 'world model', 'actor and critic', 'dreams', 'run'


class Predictions(NamedTuple):
  """An agent's predictions for steps of its own policy, and what came, flat float32 arrays.

  `reward` to `scrambled` have an entry for each step that is not the first of its episode, `value` and
  `return_` one for each step that is not the last; for those not described see `comparison.Examination`.

  Attributes:
    expected: rewards that the model predicts from the observations of the same steps as `reward`.
    of_other: surprise with the action of another sequence.
    end: predicted probability that the episode continues, at terminations.
    lasts: the same probability at all other steps that are not the first of an episode.
    return_: actual discounted returns after the steps of `value`, bootstrapped with it where a sequence
      ends or a time limit truncates the episode.
  """

  reward: np.ndarray
  expected: np.ndarray
  surprise: np.ndarray
  of_other: np.ndarray
  novelty: np.ndarray
  scrambled: np.ndarray
  end: np.ndarray
  lasts: np.ndarray
  value: np.ndarray
  return_: np.ndarray


def predict(policy: policy_lib.Policy, *, num_steps: int, seed: int) -> Predictions:
  """Plays a dreamer with all parameters, and collects its predictions and the actual outcomes."""
  config, environment = policy.config, policy.environment
  specs = environment.observation_spec, environment.action_spec
  dreamer = config.record.make(config.agent, *specs)

  @jax.jit
  def examine(params: Any, key: jax.Array, sequence: experience.Sequence) -> Any:
    return comparison.examine(dreamer, params, key, experience.time_major(sequence))

  parts = []
  played = streams.play(environment, policy.agent, policy.params, num_steps=num_steps, seed=seed)
  for index, (sequence, _) in enumerate(played):
    key = jax.random.fold_in(jax.random.key(seed + 1), index)
    found = jax.device_get(examine(policy.all_params, key, sequence))
    step_type, discount, reward = (
      np.asarray(x).T for x in (sequence.step_type, sequence.discount, sequence.reward)
    )
    came, known = step_type != dm_env.StepType.FIRST, step_type != dm_env.StepType.LAST
    returns = _returns(reward, discount, ~known, found.value, config.agent.gamma)
    came[0] = known[-1] = False  # without a step before, or after
    parts.append(
      Predictions(
        reward=reward[came],
        expected=found.reward[came],
        surprise=found.surprise[came],
        of_other=found.surprise_of_other[came],
        novelty=found.novelty[came],
        scrambled=found.scrambled[came],
        end=found.discount[discount == 0],
        lasts=found.discount[came & (discount > 0)],
        value=found.value[known],
        return_=returns[known],
      )
    )
  return Predictions(*map(np.concatenate, zip(*parts, strict=True)))


def _returns(
  reward: np.ndarray, discount: np.ndarray, last: np.ndarray, value: np.ndarray, gamma: float
) -> np.ndarray:
  """[T, B] discounted returns after each step, bootstrapped where a sequence or a time limit ends it."""
  returns = np.array(value, np.float32)
  for step in range(len(reward) - 2, -1, -1):
    after = np.where(last[step + 1], value[step + 1], returns[step + 1])
    returns[step] = reward[step + 1] + gamma * discount[step + 1] * after
  return returns


def of_predictions(
  found: Predictions, explained: environment_checks.Explained | None
) -> list[check_lib.Check]:
  """Checks the dynamics, the reward head, the continue head, novelty and the critic.

  The results of the probes on random steps, `explained`, help to find the likely cause.
  """
  size = float(np.std(found.return_) + abs(np.mean(found.return_)))
  error = abs(float(np.mean(found.value) - np.mean(found.return_)))
  return [
    check_lib.judge(
      MODEL, 'nats lost by a wrong action',
      np.mean(found.of_other) - np.mean(found.surprise), above=0.02,
      cause='the model predicts as well with wrong actions: the environment ignores them or acts a '
      'step late, or the model has hardly learned',
      remedy='run hephaestus doctor on the environment, or train for longer',
    ),
    *_of_rewards(found, explained),
    check_lib.judge(
      MODEL, 'P(continue) at ends', check_lib.mean(found.end), below=0.3,
      cause='the continue head does not see ends: values go on beyond them',
      remedy='show in the observation what ends an episode, or train for longer',
    ),
    check_lib.judge(
      MODEL, 'P(continue) elsewhere', check_lib.mean(found.lasts), above=0.9,
      cause='the continue head sees ends where there are none, which shortens the future',
      remedy='train for longer, or show in the observation what ends an episode',
    ),
    check_lib.judge(
      MODEL, 'novelty of scrambled over real steps',
      np.mean(found.scrambled) / max(1e-6, np.mean(found.novelty)) if found.novelty.any() else None,
      above=1.0,
      cause='members disagree no more about scrambled steps than about real ones: novelty is noise',
      remedy='train for longer, or use agent.novelty=information_gain and agent.ensemble_size=5',
    ),
    check_lib.judge(
      POLICY, 'error of values, relative',
      error / size if size > 1e-3 else None, below=0.5,
      cause='values differ from the returns of the policy',
      remedy='see dreams below; lower learner.policy_learning_rate, or train for longer',
    ),
    check_lib.judge(POLICY, 'mean value', check_lib.mean(found.value)),
    check_lib.judge(POLICY, 'mean return that follows', check_lib.mean(found.return_)),
  ]  # fmt: skip


def _of_rewards(
  found: Predictions, explained: environment_checks.Explained | None
) -> list[check_lib.Check]:
  """Checks that rewards are predicted; if not, the probes decide which cause is likely."""
  usual = np.median(found.reward)
  higher, lower = found.reward > usual, found.reward < usual
  areas = [
    _area(sign * found.expected, group)
    for sign, group in ((1, higher), (-1, lower))
    if min(np.sum(group), np.sum(~group)) >= environment_checks.FEW
  ]
  cause = 'the reward head has not learned the rewards'
  remedy = 'train for longer, raise agent.reward_scale, or lower learner.model_learning_rate'
  if explained is not None and explained.reward is not None:
    assert explained.reward_early is not None
    if explained.reward_early > 0.05 + 2 * explained.reward:
      cause = 'the reward depends on an early observation, which the model has lost'
      remedy = (
        'use longer sequences (actor.sequence_length) and agent.memory_steps, or agent.memory_size'
      )
    elif max(explained.reward, explained.reward_early) < 0.05:
      cause = 'the observation does not determine the reward'
      remedy = 'add to the observation the quantities that the reward depends on'
  return [
    check_lib.judge(
      MODEL, 'rewarded steps told apart (area)', min(areas, default=None),
      above=0.8, cause=cause, remedy=remedy,
    ),
    check_lib.judge(
      MODEL, 'correlation of predicted rewards',
      np.corrcoef(found.reward, found.expected)[0, 1]
      if found.reward.std() > 0 and found.expected.std() > 0 else None,
    ),
  ]  # fmt: skip


def _area(score: np.ndarray, positive: np.ndarray) -> float:
  """Area under the ROC curve of a score [S] for a class [S] bool; ties count by half."""
  _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
  ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
  number = positive.sum()
  return float((ranks[positive].mean() - (number + 1) / 2) / (len(score) - number))


def of_dreams(found: comparison.Summary) -> list[check_lib.Check]:
  """Checks imagination rollouts against the environment, by the result of `bench dreams`."""
  first, last = found.rows[0], found.rows[-1]
  ratio = None
  if last.imagined is not None and last.real is not None and abs(last.real) > 0.02:
    ratio = last.imagined / last.real
  return [
    check_lib.judge(
      DREAMS, 'P(continue) at ends, 1 step imagined', first.continues, below=0.5,
      cause='imagination continues where episodes end',
      remedy='train for longer, or show earlier in the observation what ends an episode',
    ),
    check_lib.judge(
      DREAMS, 'wrong number, 1 step imagined', first.wrong, below=0.5,
      cause='the model cannot predict the next observation: it is noise, or too much for its size',
      remedy='leave noise out of the observation, train for longer, or use a larger model',
    ),
    check_lib.judge(
      DREAMS, f'imagined over real reward of {last.steps} steps', ratio, above=0.5, below=2.0,
      cause='the policy learns from rewards that the environment does not give',
      remedy='train for longer, or shorten agent.horizon_max',
    ),
  ]  # fmt: skip


def of_metrics(
  folder: pathlib.Path,
  config: launch_config.ExperimentConfig,
  random_return: tuple[float, float] | None,
) -> list[check_lib.Check]:
  """Checks the metrics that the learner and the evaluator of a run have written; see `of_rows`.

  The newest return is compared with `random_return`, the random policy's mean and its standard error, if
  both are known, and each warning of `AgentRecord.advise` is a finding.
  """
  rows = metrics.read(folder / 'metrics' / 'learner.jsonl')
  newest = (metrics.read(folder / 'metrics' / 'evaluator.jsonl') or [{}])[-1]
  checks = []
  if newest.get('episode_return') is not None and random_return is not None:
    mean, error = random_return
    checks.append(
      check_lib.judge(
        RUN, 'newest return less random return', newest['episode_return'] - mean, above=2 * error,
        cause='the agent is no better than the random policy',
        remedy='see the other findings; without any, train for longer',
      )
    )  # fmt: skip
  checks += of_rows(rows)
  score = newest.get('normalised_score')
  is_good = config.record.on_policy and score is not None and score >= advice.GOOD_SCORE
  for warning in () if is_good else config.record.advise(config, rows, score).values():
    cause, _, remedy = warning.partition('; ')
    checks.append(check_lib.Check(RUN, 'warning', None, 'none', False, cause, remedy))
  return checks


def of_rows(rows: Sequence[Mapping[str, Any]]) -> list[check_lib.Check]:
  """Checks the metrics of a learner, of which the oldest row comes first; no checks without a row."""
  if not rows:
    return []
  broken = [name for name, value in rows[-1].items() if value is None and name.endswith('loss')]
  found = check_lib.Check(RUN, 'losses that are finite', None, 'all')
  if broken:
    cause = f'{", ".join(broken)} is not a number'
    found = found._replace(is_fine=False, cause=cause, remedy='lower the learning rates (learner)')
  newest = rows[-max(1, len(rows) // 4) :]
  return [found] + [
    check_lib.judge(
      part, shown, check_lib.mean([row[name] for row in newest if row.get(name) is not None]),
      below=limit, cause=cause, remedy=remedy,
    )
    for name, part, shown, limit, cause, remedy in (
      (
        'world_model/kl', MODEL, 'KL of posterior and prior, nats', 30.0,
        'latents carry what the model cannot predict',
        'lower learner.model_learning_rate, or leave noise out of the observation',
      ),
      (
        'starved_fraction', RUN, 'starved fraction', 0.5,
        'the learner waits for data', 'raise actor.num_actors or actor.num_envs',
      ),
      (
        'discarded_fraction', RUN, 'discarded fraction', 0.5,
        'most sequences are too old when they are sampled', 'publish more often (learner.publish_period)',
      ),
    )
    if name in rows[-1]
  ]  # fmt: skip
