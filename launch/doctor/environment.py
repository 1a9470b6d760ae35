"""Checks of an environment from steps of the random policy, without a world model."""

from typing import Any, NamedTuple

import numpy as np

from hephaestus.actors import rollout
from hephaestus.actors import streams as streams_lib
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import numbers as numbers_lib
from hephaestus.launch import config as launch_config
from hephaestus.launch.doctor import check as check_lib
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import preflight
from hephaestus.learner import probe

PART = 'environment'
FEW = 20  # least number of steps with a reward that permits a statement about rewards
FEW_TO_LEARN = 200  # least number of steps with a reward to train a probe on
MOST_LATE = 0.05  # share of variance that the previous action may explain beyond the action
MOST_TARGETS = 64  # numbers whose changes are probed: those that vary most


class Explained(NamedTuple):
  """Shares of variance that a small network (a probe) explains, on steps it was not trained on.

  Changes of D numbers of the observation in one step, those that vary most, are predicted from the
  observation before, and rewards from the observations before and after, None with too few rewards.

  Attributes:
    change: [D] shares with the action taken as an input, too.
    change_late: [D] shares with the action of the step before instead.
    change_without: [D] shares without an action.
    reward: share with the action taken.
    reward_early: share with the action and the first observation of the episode.
    reward_without: share with that first observation, without an action.
  """

  change: np.ndarray
  change_late: np.ndarray
  change_without: np.ndarray
  reward: float | None
  reward_early: float | None
  reward_without: float | None


def check(
  environment: environment_lib.Environment,
  config: launch_config.ExperimentConfig | None,
  *,
  num_steps: int,
  seed: int,
) -> tuple[list[check_lib.Check], streams_lib.Streams | None, Explained | None]:
  """Checks an environment with steps of the random policy.

  Args:
    config: config of a run in it, whose consequences are reported too; None to leave them out.
    num_steps: least number of steps, summed over parallel environments.

  Returns:
    The checks, the steps that were played, and the results of the probes. Steps and results are None
    if the environment violates its specs, which is then the only check.
  """
  contract = check_lib.Check(PART, 'contract', None, 'kept')
  fault = lambda cause, remedy: contract._replace(is_fine=False, cause=cause, remedy=remedy)
  try:
    warnings = preflight.check_values(environment, seed)
  except ValueError as error:
    return [fault(str(error), 'mend the environment or its specs')], None, None
  checks = [contract, *of_leaves(environment.observation_spec)]
  checks += [fault(warning, 'see docs/environments.md') for warning in warnings]
  agent = rollout.random_agent(environment.action_spec)
  played = streams_lib.play(environment, agent, (), num_steps=num_steps, seed=seed)
  streams = streams_lib.join(played, environment.action_spec)
  explained = explain(streams)
  checks += of_streams(streams, environment.max_steps) + of_probes(explained)
  if config is not None:
    checks += of_config(config)
  return checks, streams, explained


def of_leaves(spec: Any) -> list[check_lib.Check]:
  """Counts the numbers of each leaf of an observation that the dreamer reads in each way."""
  codec = observation_lib.Codec(spec, cnn=True)
  read = {
    f'observation{path}: numbers, each {description}': count
    for path, counts in numbers_lib.Numbers(codec.flat_spec).descriptions().items()
    for description, count in counts.items()
  }
  read |= {
    f'observation, image {leaf.shape[0]} x {leaf.shape[1]}: channels read by a CNN': leaf.shape[2]
    for leaf in codec.image_specs
  }
  return [check_lib.judge(PART, name, count) for name, count in read.items()]


def of_streams(streams: streams_lib.Streams, max_steps: int) -> list[check_lib.Check]:
  """Checks rewards and ends under the random policy; an end before `max_steps` should have a discount of 0."""
  follows = ~streams.first
  rewarded = follows & (streams.reward != 0)
  early = (streams.lengths < max_steps) & (streams.ends > 0)
  flat = streams.observation.reshape(-1, streams.observation.shape[-1])
  return [
    check_lib.judge(
      PART, 'rewarded steps per thousand', 1000 * rewarded.sum() / max(1, follows.sum()),
      above=1e-3,
      cause='the random policy finds no reward at all',
      remedy='keep agent.novelty_scale above 0, raise --steps, or reward a part of the task',
    ),
    check_lib.judge(PART, 'return of a random episode', check_lib.mean(streams.returns)),
    check_lib.judge(PART, 'length of a random episode', check_lib.mean(streams.lengths)),
    check_lib.judge(
      PART, 'early ends marked as truncated',
      check_lib.mean(early), below=0.0,
      cause='episodes end early with a discount of 1, so that values go on beyond their end',
      remedy='return a discount of 0 (gymnasium: terminated) where an episode really ends',
    ),
    check_lib.judge(PART, 'numbers that never vary, share', np.mean(np.ptp(flat, axis=0) == 0)),
    check_lib.judge(PART, 'numbers of an observation', flat.shape[1]),
  ]  # fmt: skip


def explain(streams: streams_lib.Streams) -> Explained:
  """Trains the probes on steps of the random policy; see `Explained`."""
  steps = np.argwhere(~streams.first[1:])
  steps = steps[np.argsort(steps[:, 1], kind='stable')]  # other environments in the other half
  at, env = steps[:, 0] + 1, steps[:, 1]
  x, action = streams.observation, streams.action
  before, after, taken = x[at - 1, env], x[at, env], action[at - 1, env]
  # An episode's first action has none before it; the stream begins with one.
  late = np.where(streams.first[at - 1, env][:, None], 0, action[at - 2, env])
  change = after - before
  varied = np.argsort(-change.std(0))[:MOST_TARGETS]
  share = lambda target, *inputs: probe.explained(np.concatenate(inputs, axis=-1), target)
  by_action, by_late, by_none = (
    share(change[:, varied], before, *other) for other in ((taken,), (late,), ())
  )
  reward = streams.reward[at, env][:, None]
  # Counts the rewards that cause the variance; a constant cost of each step does not.
  if np.sum(np.abs(reward - reward.mean()) > reward.std()) < FEW_TO_LEARN:
    return Explained(by_action, by_late, by_none, None, None, None)
  # The step at which the episode of each step began, as far as it is there.
  begin = np.maximum.accumulate(streams.first * np.arange(len(x))[:, None])
  early = x[begin[at, env], env]
  of_reward = (
    float(share(reward, before, after, *other)[0]) for other in ((taken,), (taken, early), (early,))
  )
  return Explained(by_action, by_late, by_none, *of_reward)


def of_probes(explained: Explained) -> list[check_lib.Check]:
  """Checks that actions have an effect, at their own step, and that observations predict rewards."""
  # The best number of the observation counts, since most do not depend on the action.
  gains = [float(np.max(explained.change - explained.change_without))]
  best = None
  if explained.reward is not None:
    assert explained.reward_early is not None and explained.reward_without is not None
    best = max(explained.reward, explained.reward_early)
    gains.append(best - explained.reward_without)
  late = float(np.max(explained.change_late - explained.change))
  return [
    check_lib.judge(
      PART, 'variance explained by the action', max(gains), above=0.02,
      cause='actions change neither the next observation nor the reward'
      + ('; the actions of the step before do' if late > MOST_LATE else ''),
      remedy='check that step() uses the action that it is given',
    ),
    check_lib.judge(
      PART, 'more by the action before it', late, below=MOST_LATE,
      cause='the environment acts one step late',
      remedy='use the action in the step that it is given to, or show the pending one',
    ),
    check_lib.judge(
      PART, 'variance of rewards explained', best, above=0.05,
      cause='the observation does not determine the reward',
      remedy='add to the observation the quantities that the reward depends on',
    ),
    check_lib.judge(
      PART, 'more by the first observation',
      None if best is None else max(0.0, best - (explained.reward or 0.0)),
    ),
  ]  # fmt: skip


def of_config(config: launch_config.ExperimentConfig) -> list[check_lib.Check]:
  """Reports the memory of replay and the warnings of a config for an environment."""
  warnings = config.record.warnings(parts_lib.make_parts(config).trained)
  replay = check_lib.judge('preset', 'memory of replay, MB', preflight.replay_bytes(config) / 1e6)
  return [*(check_lib.judge('preset', line, None) for line in warnings), replay]
