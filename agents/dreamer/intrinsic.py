"""Intrinsic motivation: improvement on two timescales, boredom, the horizon, and when to explore.

All arithmetic is float32: in bfloat16, rounding would dominate slow averages.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hephaestus.agents import returns
from hephaestus.agents.dreamer import config as dreamer_config

EXPLORING = 'exploring'
"""Name of the share of environments that explore, among the statistics of the agent; see `exploring`."""


class IntrinsicState(NamedTuple):
  """Running statistics of novelty; equal on all replicas.

  Attributes:
    fast: [] float32, fast moving average of novelty over updates, biased towards 0.
    slow: [] float32, slow moving average, biased towards 0.
    largest: [] float32, running maximum of the bias-corrected slow average since the end of warm-up.
    boredom: [] float32 in [0, 1], which shortens the imagination horizon.
    num_updates: [] int32, updates so far.
  """

  fast: jax.Array
  slow: jax.Array
  largest: jax.Array
  boredom: jax.Array
  num_updates: jax.Array


class Motivation(NamedTuple):
  """Averages of novelty, and the imagination horizon that follows from them.

  Attributes:
    horizon: [] int32, imagination horizon in steps.
    novelty_fast: [] float32, fast moving average of novelty, bias-corrected.
    novelty_slow: [] float32, slow moving average of novelty, bias-corrected.
    improvement: [] float32 in [0, 1], relative fall of novelty, see `update`.
    boredom: [] float32 in [0, 1].
  """

  horizon: jax.Array
  novelty_fast: jax.Array
  novelty_slow: jax.Array
  improvement: jax.Array
  boredom: jax.Array


def initial() -> IntrinsicState:
  """The state before any update."""
  zero = lambda dtype=jnp.float32: jnp.zeros((), dtype)
  return IntrinsicState(zero(), zero(), zero(), zero(), zero(jnp.int32))


def update(
  state: IntrinsicState,
  novelty: jax.Array,
  config: dreamer_config.DreamerConfig,
  *,
  trained: jax.Array | bool = True,
  evidence: jax.Array | float = 0.0,
) -> tuple[IntrinsicState, Motivation]:
  """Updates improvement, boredom and horizon with the novelty of one batch.

    C <- (1 - alpha) C + alpha novelty, corrected by 1 - (1 - alpha)^num_updates  (as in Adam)
    improvement = clip( max(C_slow - C_fast, C_fast - max C_slow) / C_slow, 0, 1)
    boredom <- clip( boredom + BOREDOM_RISE if improvement < LEAST_IMPROVEMENT else boredom - BOREDOM_FALL, 0, 1)
    horizon = round( H_max - boredom (1 - evidence) (H_max - H_min) )

  C_fast and C_slow both follow the first line, with alpha = IMPROVEMENT_FAST and IMPROVEMENT_SLOW.
  Without the correction the fast average would lead during the first updates. Novelty that falls
  shows that the model learns, and so does novelty above its maximum: it rises at first, while the
  members learn how far they err, and later where observations of a new kind are found. Where real returns differ
  there is more to learn than what is new: a task's actor that improves while novelty stays as it is needs as many
  imagined steps as before.

  Args:
    state: the state before the batch.
    novelty: [] float32, mean over the batch, equal on all replicas.
    config: config of the agent, with the horizons.
    trained: [] bool, whether warm-up is over. Before, the maximum stays 0, since the novelty of an
      untrained model is large everywhere; so boredom does not rise either.
    evidence: [] float32 in [0, 1], that real returns differ, see `evidence`.

  Returns:
    The next state, and the averages with the horizon that follows from them.
  """
  novelty = novelty.astype(jnp.float32)
  num_updates = state.num_updates + 1
  fast = state.fast + dreamer_config.IMPROVEMENT_FAST * (novelty - state.fast)
  slow = state.slow + dreamer_config.IMPROVEMENT_SLOW * (novelty - state.slow)
  # expm1 and log1p: 1 - (1 - 0.005)^1 loses digits in float32.
  correct = lambda value, rate: value / -jnp.expm1(num_updates * jnp.log1p(-jnp.float32(rate)))
  corrected_fast = correct(fast, dreamer_config.IMPROVEMENT_FAST)
  corrected_slow = correct(slow, dreamer_config.IMPROVEMENT_SLOW)
  largest = jnp.where(trained, jnp.maximum(state.largest, corrected_slow), 0.0)
  difference = jnp.maximum(corrected_slow - corrected_fast, corrected_fast - largest)
  improvement = jnp.clip(difference / (corrected_slow + 1e-8), 0.0, 1.0)
  # The novelty of a single member is 0, which is no reason to dream less far.
  is_bored = (improvement < dreamer_config.LEAST_IMPROVEMENT) & (config.ensemble_size > 1)
  change = jnp.where(is_bored, dreamer_config.BOREDOM_RISE, -dreamer_config.BOREDOM_FALL)
  boredom = jnp.clip(state.boredom + change, 0.0, 1.0)
  shortened = boredom * (1 - evidence) * (config.horizon_max - config.horizon_min)
  horizon = jnp.round(config.horizon_max - shortened)
  return IntrinsicState(fast, slow, largest, boredom, num_updates), Motivation(
    horizon.astype(jnp.int32), corrected_fast, corrected_slow, improvement, boredom
  )


class Earned(NamedTuple):
  """What the task's actor and the explorer (axis of 2) earned lately; equal on all replicas.

  Attributes:
    number: [2] float32, number of sequences, of which older ones count less.
    total: [2] float32, sum over them of what they earned: see `earned`.
    square: [2] float32, sum of its squares.
  """

  number: jax.Array
  total: jax.Array
  square: jax.Array


def nothing_earned() -> Earned:
  """The state before any sequence."""
  return Earned(*jnp.zeros((3, 2), jnp.float32))


def return_differences(
  reward: jax.Array,
  discount: jax.Array,
  follows: jax.Array,
  mean: Callable[[jax.Array], jax.Array],
  *,
  gamma: float,
) -> jax.Array:
  """How far the return after each real step differs from the return after an average step, [T, B] float32.

    r - E[r] + gamma (d - E[d]) v,    v = E[r] / (1 - gamma E[d])

  This is the temporal-difference error of the best constant critic. It is 0 where every step is rewarded
  alike and none terminates, also before training, when the agent's critic errs.

  Args:
    reward: [T, B] float32, r, rewards that arrived at the steps.
    discount: [T, B] float32, d, discounts that arrived with them.
    follows: [T, B] bool, steps to which a transition leads; only these count, others are 0.
    mean: mean of a number [] over all parts of the batch.
    gamma: the agent's discount factor.
  """
  over = lambda x: mean(jnp.mean(jnp.where(follows, x, 0.0)))
  count = jnp.maximum(over(jnp.ones_like(reward)), 1e-8)
  mean_reward, mean_discount = over(reward) / count, over(discount) / count
  value = mean_reward / jnp.maximum(1.0 - gamma * mean_discount, 1e-3)
  difference = reward - mean_reward + gamma * (discount - mean_discount) * value
  return jnp.where(follows, difference, 0.0)


def discounted(differences: jax.Array, follows: jax.Array, gamma: float) -> jax.Array:
  """Discounted sums of later `return_differences` of the same episode, [T - 1, B] float32, up to the last step.

  Many small rewards make as large a return as a single large one.
  """
  nothing = jnp.zeros_like(differences)
  return returns.lambda_returns(
    differences, follows.astype(jnp.float32), nothing, gamma=gamma, lambda_=1.0
  )


def evidence(
  evidence: jax.Array, largest: jax.Array, config: dreamer_config.DreamerConfig
) -> jax.Array:
  """The next evidence that real returns differ, [] float32 in [0, 1]: weight of the task's advantage.

    evidence <- evidence + RETURN_RATE max(0, min(1, largest / (LEAST_DIFFERENCE return_floor)) - evidence)

  Where all steps are rewarded alike, values of a critic differ only by its errors, and a task's actor that
  learned from them would soon be certain of what no reward has taught.

  Args:
    evidence: [] float32, the evidence so far, 0 at first.
    largest: [] float32, largest absolute value of `discounted` differences in a batch.
    config: config of the agent, with the floor, below which differences are noise.
  """
  found = jnp.minimum(1.0, largest / (dreamer_config.LEAST_DIFFERENCE * config.return_floor))
  return evidence + dreamer_config.RETURN_RATE * jax.nn.relu(found - evidence)


def earned(
  earned: Earned,
  differences: jax.Array,
  explores: jax.Array,
  is_new: jax.Array,
  total: Callable[[jax.Array], jax.Array],
) -> Earned:
  """Adds the new sequences of a batch to what both actors earned.

  Args:
    earned: what they earned so far.
    differences: [T, B] float32 of `return_differences`; a sequence earned their sum over T.
    explores: [B] bool, whether the explorer acted.
    is_new: [B] bool, sequences that count.
    total: sum of a number [] over all parts of the batch.
  """
  found = jnp.sum(differences, axis=0)
  of_actor = jnp.stack([is_new & ~explores, is_new & explores]).astype(jnp.float32)  # [2, B]
  sums = (total(jnp.sum(of_actor * x, axis=-1)) for x in (1.0, found, jnp.square(found)))
  count, *others = sums
  kept = (1.0 - 1.0 / dreamer_config.SAMPLES_COMPARED) ** count
  return Earned(*(kept * old + new for old, new in zip(earned, (count, *others), strict=True)))


def exploring(share: jax.Array, earned: Earned, evidence: jax.Array) -> jax.Array:
  """The next share of the environments in which the explorer acts, [] float32.

    z     = (mean of the explorer - mean of the task's actor) / standard error of the difference
    known = clip( EXPLORERS + z / 8, LEAST_ACTING, 1 - LEAST_ACTING ),    z = 0 before LEAST_COMPARED samples
    share <- share + RETURN_RATE ( 1 - evidence (1 - known) - share )

  All while real returns are alike. Once they are known to differ, a quarter, so that the task's actor learns
  from its own steps; and more where the explorer earns more of the task's reward, since a reward that it
  has found is soon lost without it, until the task's actor has learned to find it.

  Args:
    share: [] float32, the share so far, 1 at first.
    earned: what both actors earned lately.
    evidence: [] float32 in [0, 1], that returns differ.
  """
  number = jnp.maximum(earned.number, 1.0)
  task, explorer = earned.total / number
  variance = jnp.sum(earned.square) / jnp.maximum(jnp.sum(earned.number), 1.0)
  # A new sequence is sampled some three times, so there are fewer of them, of weights that vary.
  error = jnp.sqrt(4 * variance * jnp.sum(1.0 / number))
  is_known = jnp.min(earned.number) >= dreamer_config.LEAST_COMPARED
  z = jnp.where(is_known, (explorer - task) / jnp.maximum(error, 1e-8), 0.0)
  least = dreamer_config.LEAST_ACTING
  known = jnp.clip(dreamer_config.EXPLORERS + z / 8, least, 1 - least)
  return share + dreamer_config.RETURN_RATE * (1.0 - evidence * (1.0 - known) - share)
