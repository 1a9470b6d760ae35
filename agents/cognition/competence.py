"""Competence: learning progress, the fall of novelty in the region of states that a step reaches.

    region        i = sign(P x - mean[P x])                        P fixed and random, BITS rows
    averages      slow_i <- slow_i + max(SLOW, 1 / (n_i - 1)) (fast_i - slow_i)
                  fast_i <- fast_i + max(FAST, 1 / n_i) (novelty_i - fast_i)
    reward        max(0, slow_i - fast_i)

with x what a step shows: the inputs of the observation's numbers, its slots, and the stochastic state where
there are images for CNNs. An update counts as one visit of each region i that its batch reaches, n_i are its
visits, and novelty_i is the mean over these steps. Slow follows fast as it was before the visit, so no visit
is in both averages at once; two averages that follow the same novelty would both hold a part of it.

Noise that stays noise is novel and does not become less novel, so it has no progress: Schmidhuber
(1991), "Curious model-building control systems"; by regions as in Oudeyer, Kaplan and Hafner (2007),
"Intrinsic motivation systems for autonomous mental development". Regions by the signs of a random
projection are as in Tang et al. (2017), "#Exploration". Regions that no batch has reached have no progress.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents.dreamer import modules, sockets
from hephaestus.agents.dreamer import rssm as rssm_lib

Tree = Any
NAME = 'competence'

BITS = 10
"""Signs that name a region, of which there are 2^BITS."""
FAST, SLOW = 0.1, 0.02
"""Rates of both averages, by visit; `intrinsic.update` has others, by update."""
MARGIN = 1e-3
"""How far a projection is above its mean; where all observations are equal, rounding decides nothing."""


@dataclasses.dataclass(frozen=True)
class Competence(sockets.Reward):
  """The reward of competence, which an explorer maximises; see the equations of this module.

  Its running statistics are `mean` [BITS], the mean of P x over updates, their number `updates` [], and by
  region `visits`, `fast` and `slow` [2^BITS].
  """

  name = NAME
  explores = True
  is_centred = True

  def statistics(self) -> dict[str, jax.Array]:
    averages = {name: jnp.zeros(2**BITS) for name in ('visits', 'fast', 'slow')}
    return {'mean': jnp.zeros(BITS), 'updates': jnp.zeros(())} | averages

  def reward(self, params: Tree, before: rssm_lib.Step, after: rssm_lib.Step) -> jax.Array:
    known = params[modules.OF_REWARDS][NAME]
    progress = jax.nn.relu(known['slow'] - known['fast'])
    return progress[self.region(known, self._projected(after))]

  def metrics(self, params: Tree, replayed: rssm_lib.Step, rewards: jax.Array) -> sockets.Metrics:
    """The mean reward of replayed steps, and the number of regions that were reached so far."""
    visits = params[modules.OF_REWARDS][NAME]['visits']
    return {'progress': rewards.mean(), 'regions': jnp.sum(visits > 0).astype(jnp.float32)}

  def updated(
    self,
    statistics: dict[str, jax.Array],
    replayed: rssm_lib.Step,
    novelty: jax.Array,
    mean: sockets.Mean,
  ) -> dict[str, jax.Array]:
    """See `Reward.updated`; steps to which no transition leads are of no region."""
    projected = self._projected(replayed)
    region = self.region(statistics, projected)
    counts = (~replayed.first.at[0].set(True)).astype(jnp.float32)
    # Means over devices of the sums, whose ratio is the mean over all steps however they are split.
    summed = jnp.zeros((2**BITS, 2)).at[region].add(jnp.stack([counts, counts * novelty], axis=-1))
    count, total = jnp.moveaxis(mean(summed), -1, 0)
    updates = statistics['updates'] + 1
    average = (
      statistics['mean'] + (mean(projected.mean(axis=(0, 1))) - statistics['mean']) / updates
    )
    return visited(statistics, count > 0, total / jnp.maximum(count, 1e-8)) | {
      'mean': average,
      'updates': updates,
    }

  def region(self, statistics: dict[str, jax.Array], projected: jax.Array) -> jax.Array:
    """The regions, [...] int32 below 2^BITS, of [..., BITS] projections."""
    above = projected > statistics['mean'] + MARGIN
    return jnp.sum(jnp.where(above, 2 ** np.arange(BITS), 0), axis=-1)

  def _projected(self, step: rssm_lib.Step) -> jax.Array:
    """P x, [..., BITS] float32, of what a step shows, real or imagined."""
    inferred = step.features.state[..., self.rssm.networks.config.deterministic_size :]
    inputs = jnp.concatenate([step.features.numbers, inferred], axis=-1).astype(jnp.float32)
    projected = jnp.matmul(inputs, self._directions, precision=jax.lax.Precision.HIGHEST)
    return jax.lax.stop_gradient(projected)

  @functools.cached_property
  def _directions(self) -> np.ndarray:
    """P, [inputs, BITS] float32."""
    networks = self.rssm.networks
    inputs = networks.numbers.input_size + networks.percept_width
    shape = inputs + networks.inferred_size, BITS
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def visited(
  statistics: dict[str, jax.Array], reached: jax.Array, novelty: jax.Array
) -> dict[str, jax.Array]:
  """Counts one visit of some regions, see the equations of this module.

  Args:
    statistics: `visits`, `fast` and `slow`, [N] float32 each.
    reached: [N] bool, the regions that are visited.
    novelty: [N] float32, their novelty at this visit.

  Returns:
    The next `visits`, `fast` and `slow`.
  """
  visits, fast, slow = (statistics[name] for name in ('visits', 'fast', 'slow'))
  number = visits + 1
  rate = lambda least, count: jnp.maximum(least, 1 / jnp.maximum(count, 1))
  after = {
    'visits': number,
    'fast': fast + rate(FAST, number) * (novelty - fast),
    # At the first visit there is nothing before, and no progress.
    'slow': jnp.where(visits > 0, slow + rate(SLOW, visits) * (fast - slow), novelty),
  }
  return {name: jnp.where(reached, x, statistics[name]) for name, x in after.items()}
