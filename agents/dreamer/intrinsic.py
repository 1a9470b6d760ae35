"""Intrinsic motivation: its rewards, competence on two timescales, boredom and the horizon.

All arithmetic is float32: in bfloat16, rounding would dominate variances and slow averages.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents.dreamer import config as dreamer_config

Moments = tuple[tuple[jax.Array, jax.Array, float], ...]
"""Predictions of K members in groups (latents, changes of numbers).

Each group has means and variances, [K, ..., F] float32, and the square of a usual difference: see
`information_gain`.
"""


NOVELTY, SURVIVAL, EMPOWERMENT = 'novelty', 'survival', 'empowerment'
"""Names of the intrinsic rewards, and of their heads of the critic."""

EXPLORING = 'exploring'
"""Name of the share of environments that explore, among the parameters: see `exploring`; not trained."""


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
    competence: [] float32 in [0, 1], learning progress: relative fall of novelty, see `update`.
    boredom: [] float32 in [0, 1].
  """

  horizon: jax.Array
  novelty_fast: jax.Array
  novelty_slow: jax.Array
  competence: jax.Array
  boredom: jax.Array


def initial() -> IntrinsicState:
  """The state before any update."""
  return IntrinsicState(
    fast=jnp.zeros((), jnp.float32),
    slow=jnp.zeros((), jnp.float32),
    largest=jnp.zeros((), jnp.float32),
    boredom=jnp.zeros((), jnp.float32),
    num_updates=jnp.zeros((), jnp.int32),
  )


def clean_novelty(means: jax.Array, variances: jax.Array) -> jax.Array:
  """Disagreement of the ensemble beyond the predicted noise.

    novelty = sum_F relu( Var_K[means] - Mean_K[variances] )

  Args:
    means: [K, ..., F] predicted means, of the next latent or of changes of numbers.
    variances: [K, ..., F] predicted variances, in units of means^2.

  Returns:
    [...] float32 novelty; zero where the members agree.
  """
  chex.assert_equal_shape([means, variances])
  means, variances = means.astype(jnp.float32), variances.astype(jnp.float32)
  disagreement = jnp.var(means, axis=0)
  noise = jnp.mean(variances, axis=0)
  return jnp.sum(jax.nn.relu(disagreement - noise), axis=-1)


def information_gain(means: jax.Array, variances: jax.Array, usual: float = 0.0) -> jax.Array:
  """Expected information gain about the members from observing the next latent.

    novelty = 1/2 sum_F log( 1 + Var_K[means] / ( Mean_K[variances] + usual ) )

  Positive whenever members disagree; noise that all members predict divides out.

  Args:
    means: [K, ..., F] predicted means, of the next latent or of changes of numbers.
    variances: [K, ..., F] predicted variances, in units of means^2.
    usual: in the same units, the square of differences that count as noise.

  Returns:
    [...] float32 novelty, nats.
  """
  chex.assert_equal_shape([means, variances])
  if len(means) == 1:  # no disagreement; saves the logarithms of 1
    return jnp.zeros(means.shape[1:-1], jnp.float32)
  means, variances = means.astype(jnp.float32), variances.astype(jnp.float32)
  noise = jnp.mean(variances, axis=0) + (usual + 1e-6)
  return 0.5 * jnp.sum(jnp.log1p(jnp.var(means, axis=0) / noise), axis=-1)


def prediction_error(means: jax.Array, variances: jax.Array) -> jax.Array:
  """Expected squared error of the ensemble's prediction; a baseline.

    novelty = sum_F ( Mean_K[variances] + Var_K[means] )

  It is the variance of the members' mixture. Noise keeps it high even under a perfect model, so it
  attracts an agent to noise: Burda et al. (2018), "Large-scale study of curiosity-driven learning",
  section 4.2.

  Args:
    means: [K, ..., F] predicted means, of the next latent or of changes of numbers.
    variances: [K, ..., F] predicted variances, in units of means^2.

  Returns:
    [...] float32 novelty, in units of means^2.
  """
  chex.assert_equal_shape([means, variances])
  means, variances = means.astype(jnp.float32), variances.astype(jnp.float32)
  return jnp.sum(jnp.mean(variances, axis=0) + jnp.var(means, axis=0), axis=-1)


NOVELTIES = {
  'clean': lambda means, variances, _=0.0: clean_novelty(means, variances),
  'information_gain': information_gain,
  'prediction_error': lambda means, variances, _=0.0: prediction_error(means, variances),
}


def novelty_of(kind: str, moments: Moments) -> jax.Array:
  """Novelty, [...] float32, by the measure `kind` of NOVELTIES, summed over groups of predictions."""
  first, *others = (NOVELTIES[kind](*group) for group in moments)
  return sum(others, first)


def update(
  state: IntrinsicState,
  novelty: jax.Array,
  config: dreamer_config.DreamerConfig,
  *,
  trained: jax.Array | bool = True,
) -> tuple[IntrinsicState, Motivation]:
  """Updates competence, boredom and horizon with the novelty of one batch.

    C <- (1 - alpha) C + alpha novelty, corrected by 1 - (1 - alpha)^num_updates  (as in Adam)
    competence = clip( max(C_slow - C_fast, C_fast - max C_slow) / C_slow, 0, 1)
    boredom <- clip( boredom + rise if competence < threshold else boredom - fall, 0, 1)
    horizon = round( H_max - boredom (H_max - H_min) )

  C_fast and C_slow both follow the first line, with alpha = COMPETENCE_FAST and COMPETENCE_SLOW.
  Without the correction the fast average would lead during the first updates. Novelty that falls
  shows that the model learns, and so does novelty above its maximum: it rises at first, while the
  members learn how far they err, and later where observations of a new kind are found.

  Args:
    state: the state before the batch.
    novelty: [] float32, mean over the batch, equal on all replicas.
    config: config of the agent, with threshold, rise, fall and horizons.
    trained: [] bool, whether warm-up is over. Before, the maximum stays 0, since the novelty of an
      untrained model is large everywhere; so boredom does not rise either.

  Returns:
    The next state, and the averages with the horizon that follows from them.
  """
  novelty = novelty.astype(jnp.float32)
  num_updates = state.num_updates + 1
  fast = state.fast + dreamer_config.COMPETENCE_FAST * (novelty - state.fast)
  slow = state.slow + dreamer_config.COMPETENCE_SLOW * (novelty - state.slow)
  # expm1 and log1p: 1 - (1 - 0.005)^1 loses digits in float32.
  correct = lambda value, rate: value / -jnp.expm1(num_updates * jnp.log1p(-jnp.float32(rate)))
  corrected_fast = correct(fast, dreamer_config.COMPETENCE_FAST)
  corrected_slow = correct(slow, dreamer_config.COMPETENCE_SLOW)
  largest = jnp.where(trained, jnp.maximum(state.largest, corrected_slow), 0.0)
  progress = jnp.maximum(corrected_slow - corrected_fast, corrected_fast - largest)
  competence = jnp.clip(progress / (corrected_slow + 1e-8), 0.0, 1.0)
  change = jnp.where(
    competence < config.boredom_threshold, config.boredom_rise, -config.boredom_fall
  )
  boredom = jnp.clip(state.boredom + change, 0.0, 1.0)
  horizon = jnp.round(config.horizon_max - boredom * (config.horizon_max - config.horizon_min))
  return IntrinsicState(fast, slow, largest, boredom, num_updates), Motivation(
    horizon.astype(jnp.int32), corrected_fast, corrected_slow, competence, boredom
  )


def return_difference(
  reward: jax.Array, discount: jax.Array, means: tuple[jax.Array, jax.Array], *, gamma: float
) -> jax.Array:
  """How far the return after each step differs from that of an average step.

    |r - E[r] + gamma (d - E[d]) v|,    v = E[r] / (1 - gamma E[d])

  This is the temporal-difference error of the best constant critic. It is 0 where every step is rewarded
  alike and none terminates, also before training, when the agent's critic errs.

  Args:
    reward: [...] float32, r, rewards that arrived at real steps.
    discount: [...] float32, d, discounts that arrived with them.
    means: [] float32 each, E[r] and E[d] over these steps.
    gamma: the agent's discount factor.
  """
  mean_reward, mean_discount = means
  value = mean_reward / jnp.maximum(1.0 - gamma * mean_discount, 1e-3)
  return jnp.abs(reward - mean_reward + gamma * (discount - mean_discount) * value)


def evidence(
  evidence: jax.Array, largest: jax.Array, config: dreamer_config.DreamerConfig
) -> jax.Array:
  """The next evidence that real returns differ, [] float32 in [0, 1]: weight of the task's advantage.

    evidence <- evidence + RETURN_RATE max(0, min(1, largest / (RELATIVE_FLOOR return_floor)) - evidence)

  Where all steps are rewarded alike, values of a critic differ only by its errors, and a task's actor that
  learned from them would soon be certain of what no reward has taught.

  Args:
    evidence: [] float32, the evidence so far, 0 at first.
    largest: [] float32, largest `return_difference` in a batch.
    config: config of the agent, with the floor, below which differences are noise.
  """
  found = jnp.minimum(1.0, largest / (dreamer_config.RELATIVE_FLOOR * config.return_floor))
  return evidence + dreamer_config.RETURN_RATE * jax.nn.relu(found - evidence)


def exploring(
  share: jax.Array, deviation: jax.Array, config: dreamer_config.DreamerConfig
) -> jax.Array:
  """The next share of the environments in which the explorer acts, [] float32.

    rest  = max(0, 1 - GAUSSIAN_RANGE deviation / return_floor)
    share <- share - RETURN_RATE max(0, share - rest)

  All while real returns are alike, and fewer as rewards are found again and again: one that was found once
  is soon lost without the explorer. The share never rises, because returns of a solved task are alike
  again.

  Args:
    share: [] float32, the share so far, 1 at first.
    deviation: [] float32, root mean square of `return_difference` over a batch.
    config: config of the agent, with the floor, below which differences are noise.
  """
  rest = jax.nn.relu(1.0 - dreamer_config.GAUSSIAN_RANGE * deviation / config.return_floor)
  return share - dreamer_config.RETURN_RATE * jax.nn.relu(share - rest)


def lack(vitals: jax.Array, set_points: chex.Array) -> jax.Array:
  """The lack of vitals (in the paper, the drive D): how far they lie below their set-points.

    D = ( sum_V max(0, h* - h)^4 )^(1/3)

  Keramati and Gutkin (2014), "Homeostatic reinforcement learning for integrating reward collection and
  physiological stability", equation 1. A lack twice as large counts two and a half times.

  Args:
    vitals: [..., V] float32, h.
    set_points: [V] float32, h*, values at which nothing is lacking.

  Returns:
    [...] float32, D; 0 where no vital lies below its set-point.
  """
  return jnp.cbrt(jnp.sum(jnp.maximum(set_points - vitals, 0.0) ** 4, axis=-1))


def survival(vitals: jax.Array, discount: jax.Array, set_points: chex.Array) -> jax.Array:
  """The reward of survival that arrives at each step: the reduction of the lack of vitals D.

    r_t+1 = D_t - ( d_t+1 D_t+1 + (1 - d_t+1) D(0) )

  So a step that restores vitals is rewarded, a step that loses some is a cost, and a termination costs
  as much as if all vitals fell to 0. D is `lack`.

  Args:
    vitals: [T, ..., V] float32, observed or imagined.
    discount: [T, ...] float32, d, which arrived at the step: 0 at termination; in imagination the
      probability that the episode continues.
    set_points: [V] float32, values at which nothing is lacking.

  Returns:
    [T, ...] float32; 0 at step 0, whose previous step is not known.
  """
  now, worst = lack(vitals, set_points), lack(jnp.zeros_like(set_points), set_points)
  chex.assert_equal_shape([now, discount])
  reached = discount * now + (1.0 - discount) * worst
  return jnp.concatenate([jnp.zeros_like(now[:1]), now[:-1] - reached[1:]])


class Felt(NamedTuple):
  """Quantities along replayed or imagined steps, of which intrinsic rewards are made.

  Attributes:
    novelty: [T, ...] float32, novelty of the transition to the step.
    survival: [T, ...] float32, see the function `survival`; None without it.
    empowerment: [T, ...] float32, as a share of its maximum; None without it.
  """

  novelty: jax.Array
  survival: jax.Array | None = None
  empowerment: jax.Array | None = None


class Intrinsic(NamedTuple):
  """Definition of an intrinsic reward: a new one is an entry of INTRINSIC, and a field of `Felt`.

  Attributes:
    is_on: config -> whether the agent has this reward, with a head of the critic.
    reward: (Felt, mean novelty) -> the reward that arrives at the steps, [T, ...] float32; see `rewards`.
    weight: config -> weight of its scaled advantage, relative to the task's, which is 1.
  """

  is_on: Callable[[dreamer_config.DreamerConfig], bool]
  reward: Callable[[Felt, jax.Array], Any]
  weight: Callable[[dreamer_config.DreamerConfig], float]


def _novelty_reward(felt: Felt, mean: jax.Array) -> jax.Array:
  """Novelty less its mean, so that ending an episode forgoes nothing on average.

  Otherwise an agent that is rewarded at every step learns not to finish.
  """
  return felt.novelty - mean


INTRINSIC = {
  NOVELTY: Intrinsic(
    # One member has no novelty.
    is_on=lambda config: config.ensemble_size > 1 and config.novelty_scale > 0,
    reward=_novelty_reward,
    weight=lambda config: config.novelty_scale,
  ),
  # Its mean is not subtracted: a cost at every step would be none.
  SURVIVAL: Intrinsic(
    is_on=lambda config: config.survival_scale > 0,
    reward=lambda felt, *_: felt.survival,
    weight=lambda config: config.survival_scale,
  ),
  # Nor is its mean subtracted here: where an action decides nothing, ending costs nothing.
  EMPOWERMENT: Intrinsic(
    is_on=lambda config: config.empowerment_scale > 0,
    reward=lambda felt, *_: felt.empowerment,
    weight=lambda config: config.empowerment_scale,
  ),
}
"""All intrinsic rewards by name, in the order of the critic's heads."""


def heads(config: dreamer_config.DreamerConfig) -> tuple[str, ...]:
  """Names of the intrinsic rewards that are on in a config."""
  return tuple(name for name, entry in INTRINSIC.items() if entry.is_on(config))


def rewards(names: tuple[str, ...], felt: Felt, mean: jax.Array) -> dict[str, jax.Array]:
  """The intrinsic rewards of these names, [T, ...] float32 each, by name.

  Args:
    names: names of intrinsic rewards.
    felt: quantities along the steps.
    mean: [] float32, mean novelty of these steps. Imagined steps look newer than replayed ones, so each
      has a mean of its own; less the replayed one, every imagined step would be rewarded.
  """
  return {name: INTRINSIC[name].reward(felt, mean) for name in names}
