"""The suite of `bench learning`: environments with their step budgets and target scores."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

BASELINE = 'ppo'  # the agent that others are compared with
# Settings of an agent in all environments, as in docs/results.md. The preset of PPO unrolls 8,192 steps
# for each update, which leaves too few updates for the budgets of the suite.
SETTINGS: Mapping[str, Sequence[str]] = {
  'ppo': ('learner.log_period=1', 'actor.num_envs=32', 'learner.num_minibatches=4')
}
NUM_POINTS = 10  # points of a curve, each the mean over one tenth of the steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """An environment, the number of steps that an agent may train in it, and the score to reach.

  The score is the mean episode return while acting with sampled actions, over a tenth of the steps.

  Attributes:
    name: short name, unique in the suite.
    environment: name of the environment, as for `train --env`.
    options: options of the environment, as for `train --set environment.KEY=VALUE`.
    steps: environment steps of a run.
    target: required score; None for no target.
    target_step: last step of the tenth whose score must reach the target; None for the last tenth.
    is_evaluated: whether instead the evaluation with sampled actions after the last step must reach
      the target, since the few episodes of a tenth are too noisy.
    times_ppo: another agent's score must be greater than PPO's times this; None for no comparison.
    ppo_steps: last steps of the tenths that are compared; () for the last tenth only.
    episodes: least number of episodes of each evaluation after the last step.
  """

  name: str
  environment: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  steps: int
  target: float | None = None
  target_step: int | None = None
  is_evaluated: bool = False
  times_ppo: float | None = None
  ppo_steps: Sequence[int] = ()
  episodes: int = 128

  def point(self, step: int | None) -> int:
    """Index of the tenth of the steps to which a step belongs; None means the last tenth."""
    return NUM_POINTS - 1 if step is None else -(-step * NUM_POINTS // self.steps) - 1


def _gymnax(name: str, environment: str, steps: int, **fields: Any) -> Task:
  return Task(name=name, environment=f'gymnax/{environment}', steps=steps, **fields)


SUITE = (
  Task(name='catch', environment='catch', steps=8_000, target=0.95, target_step=4_000),
  Task(
    name='pixel_catch', environment='catch', options={'rows': 8, 'columns': 8, 'cell_pixels': 3},
    steps=8_000, target=0.9,
  ),
  # Larger than `observation.MAX_CELLS`, so a CNN reads it.
  Task(
    name='cnn_catch', environment='catch', options={'rows': 8, 'columns': 8, 'cell_pixels': 4},
    steps=20_000, target=0.9,
  ),
  _gymnax('cartpole', 'CartPole-v1', 15_000, target=450.0),
  _gymnax('acrobot', 'Acrobot-v1', 30_000, target=-120.0),
  _gymnax('mountain_car', 'MountainCar-v0', 30_000, target=-130.0),
  _gymnax('pendulum', 'Pendulum-v1', 20_000, target=-170.0),
  # Solved above 0.49 in bsuite's sense; the last tenth has 123 to 290 episodes.
  _gymnax('deep_sea_12', 'DeepSea-bsuite', 16_000, options={'size': 12}, target=0.49),
  _gymnax('deep_sea_20', 'DeepSea-bsuite', 44_000, options={'size': 20}, target=0.49),
  _gymnax('memory_chain_5', 'MemoryChain-bsuite', 20_000, options={'memory_length': 5}, target=0.95),
  _gymnax('memory_chain_20', 'MemoryChain-bsuite', 40_000, options={'memory_length': 20}, target=0.95),
  # The best action in 95 % of episodes: 2 * 0.95 - 1. The other 19 rewards are -1 or 1 at random,
  # so the standard error of a mean return is 4.4 / sqrt(episodes).
  _gymnax(
    'umbrella_chain_20', 'UmbrellaChain-bsuite', 30_000, options={'chain_length': 20},
    target=0.9, is_evaluated=True, episodes=16_384,
  ),
  # The best arm, 1.1 against 1.0, in 90 % of episodes.
  _gymnax('discounting_chain', 'DiscountingChain-bsuite', 20_000, target=1.09),
  # The better of two arms, 0.9 against 0.1, in 90 % of 100 steps; it changes with the episode.
  _gymnax('bernoulli_bandit', 'BernoulliBandit-misc', 20_000, target=82.0),
  Task(
    name='grid_world_8', environment='grid_world', options={'size': 8, 'num_resources': 8},
    steps=25_000, times_ppo=1.0, ppo_steps=(10_000, 15_000, 25_000),
  ),
  Task(
    name='grid_world_16', environment='grid_world', options={'size': 16, 'num_resources': 24},
    steps=30_000, times_ppo=1.0, ppo_steps=range(12_000, 30_001, 3_000),
  ),
  _gymnax('breakout', 'Breakout-MinAtar', 30_000, times_ppo=2.0),
  _gymnax('asterix', 'Asterix-MinAtar', 30_000, times_ppo=2.0),
  _gymnax('space_invaders', 'SpaceInvaders-MinAtar', 30_000, times_ppo=2.0),
  _gymnax('freeway', 'Freeway-MinAtar', 30_000, times_ppo=2.0),
  Task(
    name='craftax_classic', environment='craftax/Craftax-Classic-Symbolic-v1', steps=25_000,
    target=3.5, times_ppo=1.3,
  ),
  Task(name='snake', environment='jumanji/Snake-v1', steps=16_000, times_ppo=2.0),
  Task(name='hackmatrix', environment='hackmatrix', steps=16_000, times_ppo=1.0),
)  # fmt: skip


def chosen(names: Sequence[str] | None) -> list[Task]:
  """Returns the tasks with the given names, in the suite's order; all tasks for None.

  Raises:
    ValueError: a name is not in the suite.
  """
  known = [task.name for task in SUITE]
  for name in names or ():
    if name not in known:
      raise ValueError(f'--environments {name}: choose from {", ".join(known)}')
  return [task for task in SUITE if names is None or task.name in names]
