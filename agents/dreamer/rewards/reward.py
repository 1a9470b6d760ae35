"""Interface of intrinsic rewards."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax

from hephaestus.agents import experience
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import modules as modules_lib
from hephaestus.agents.dreamer import rssm as rssm_lib

Tree = Any
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Reward:
  """An intrinsic reward r(before, after) of a step and the step after it; holds no arrays.

  Values of its returns have a head of the critic, by its name. Its advantages are divided by the range of
  its returns, and weighted by the field `NAME_scale` of the config; 0 switches it off. A reward is a
  subclass that implements `reward`, and an entry of `registry.REWARDS`; other methods have defaults.

  Attributes:
    rssm: the world model's RSSM.
    name: of the reward, its head of the critic, and its metrics.
    explores: whether it trains the explorer, not the task's actor; see `actor_critic`.
    is_centred: whether the mean reward of the steps is subtracted. Then ending an episode forgoes nothing on
      average: an agent that is rewarded at every step learns not to finish. A reward that is a cost at
      every step has to keep its mean.
    shown: names of the networks that `explain` reads, so that actors fetch them.
  """

  rssm: rssm_lib.RSSM

  name: ClassVar[str]
  explores: ClassVar[bool] = False
  is_centred: ClassVar[bool] = False
  shown: ClassVar[tuple[str, ...]] = ()

  @classmethod
  def weight(cls, config: dreamer_config.DreamerConfig) -> float:
    """Weight of its scaled advantage, relative to the task's, which is 1; 0 where it is off."""
    return getattr(config, f'{cls.name}_scale')

  def modules(self) -> Mapping[str, tuple[nn.Module, Any]]:
    """Networks by name, each with its example inputs, a batch of one; trained by `loss`."""
    return {}

  def statistics(self) -> dict[str, jax.Array]:
    """Initial running statistics by name, float32, which no optimizer changes; empty if it has none.

    `reward` reads them in `params[modules_lib.OF_REWARDS][name]`.
    """
    return {}

  def updated(
    self,
    params: Tree,
    replayed: rssm_lib.Step,
    novelty: jax.Array,
    mean: Callable[[jax.Array], jax.Array],
  ) -> dict[str, jax.Array]:
    """The running statistics after an update, whose own rewards have been read before.

    Args:
      params: parameters of the world model, with the statistics before.
      replayed: [T, B] steps.
      novelty: [T, B] float32, novelty of the transitions to the steps.
      mean: array of one part of the batch -> its mean over all parts.
    """
    del replayed, novelty, mean
    found: dict[str, jax.Array] = params[modules_lib.OF_REWARDS][self.name]
    return found

  def loss(
    self,
    params: Tree,
    keys: jax.Array,
    replayed: rssm_lib.Step,
    sequence: experience.Sequence,
    expected: jax.Array,
  ) -> tuple[jax.Array | float, Metrics]:
    """Loss of its networks on replayed steps, a part of the world model's loss.

    Args:
      params: parameters of the world model, with its own networks.
      keys: [B] PRNG keys, one for each sequence.
      replayed: [T, B] steps.
      sequence: [T, B, ...], the same steps.
      expected: [T, B, F] float32, the numbers of the observation that the model decodes at each step.

    Returns:
      The loss [], and metrics by their full names, such as `intrinsic/...`.
    """
    del params, keys, replayed, sequence, expected
    return 0.0, {}

  def reward(self, params: Tree, before: rssm_lib.Step, after: rssm_lib.Step) -> jax.Array:
    """The reward that arrives at a step, [...] float32.

    Args:
      params: parameters of the world model, with its own networks.
      before: the step before, [...], replayed or imagined; only its latent and features are known.
      after: the step, [...].
    """
    raise NotImplementedError

  def metrics(self, params: Tree, replayed: rssm_lib.Step, rewards: jax.Array) -> Metrics:
    """Metrics [] of [T, B] replayed steps and their rewards, by name after the prefix `intrinsic/`."""
    del params, replayed
    return {self.name: rewards.mean()}

  def explain(self, params: Tree, step: rssm_lib.Step) -> dict[str, jax.Array]:
    """Numbers [N] float32 by name that `hephaestus watch` shows at a step of N environments."""
    del params, step
    return {}
