"""Targets of actors and critics: rewards of the critic's heads, returns, and scaled advantages."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from hephaestus.agents import returns
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import dream as dream_lib
from hephaestus.agents.dreamer import sockets

Metrics = dict[str, jax.Array]


def head_rewards(
  kinds: Mapping[str, sockets.Reward],
  task: jax.Array,
  rewards: Mapping[str, jax.Array],
  mean: Callable[[str, jax.Array], jax.Array],
) -> dict[str, jax.Array]:
  """The reward of each head of the critic, [T, B] float32 by its name.

  Imagined steps look newer than replayed ones, so each of the two has a mean of its own. Less the
  replayed one, every imagined step would be rewarded.

  Args:
    kinds: the intrinsic rewards by name.
    task: [T, B] float32, the environment's reward.
    rewards: [T, B] float32, intrinsic rewards by name.
    mean: (name, rewards) -> [] float32, their mean over the batch, subtracted where
      `Reward.is_centred`.
  """
  centred = {
    name: x - mean(name, x) if kinds[name].is_centred else x for name, x in rewards.items()
  }
  return {ac.TASK: task, **centred}


def weights(
  actor_critic: ac.ActorCritic, dreamt: dream_lib.Dream, batch: sockets.Batch
) -> jax.Array:
  """Weights of imagined steps, [H, B'], which sum to 1 over the dreams of each actor.

  Where the batch has several parts, the mean over parts of the sums is 1.
  """
  weight = dream_lib.weights(dreamt)
  heads = (ac.TASK, ac.NOVELTY) if actor_critic.explores else (ac.TASK,)
  parts = [weight[:, actor_critic.dreams(name, weight.shape[1])] for name in heads]
  total = lambda part: jnp.maximum(batch.mean(part.sum()), 1e-8)
  return jnp.concatenate([part / total(part) for part in parts], axis=1)


def imagined(
  actor_critic: ac.ActorCritic,
  kinds: Mapping[str, sockets.Reward],
  scales: ac.Scales,
  dreamt: dream_lib.Dream,
  replayed: Mapping[str, jax.Array],
  batch: sockets.Batch,
) -> tuple[ac.Scales, ac.Targets, Metrics]:
  """Targets of H steps imagined from B' starts.

    G_h = lambda-return of the reward of head h          error_h = G_h - V_h
    advantage = sum_h w_h ( error_h - Mean_B'[error_h] ) / divisor_h

  over the heads h of the dream's actor, with the divisors of `actor_critic.update_scales`; w is
  `Reward.weight`, and `Scales.evidence` for the task. The mean is over all starts at an imagined step: a
  value that lags behind shifts all advantages at a step alike, by more the more steps are left to the
  horizon, which is noise to the policy.

  Args:
    actor_critic: actors and critics.
    kinds: the intrinsic rewards by name.
    scales: running statistics of returns so far.
    dreamt: the dreams, each of its own actor.
    replayed: mean square of the errors at the replayed steps of a part of the batch, [] float32 by head.
    batch: reductions over the whole batch.

  Returns:
    The next scales, the targets, and metrics of the advantages [] by name.
  """
  config = actor_critic.config
  weight = weights(actor_critic, dreamt, batch)
  own = {name: actor_critic.dreams(name, weight.shape[1]) for name in actor_critic.heads}
  mean = lambda name, x: batch.mean(jnp.sum((weight * x[1:])[:, own[name]]))
  rewards = head_rewards(kinds, dreamt.reward, dreamt.rewards, mean)
  at_each_step = lambda x: batch.mean(jnp.sum(x, axis=1, keepdims=True))
  all_returns, advantages, observed = {}, {}, {}
  for name in actor_critic.heads:
    value = dreamt.values[name]
    return_ = dream_lib.returns_of(
      dreamt, rewards[name], value, gamma=config.gamma, lambda_=config.lambda_
    )
    share = weight[:, own[name]]
    error = (return_ - value[:-1])[:, own[name]]
    centre = at_each_step(share * error) / jnp.maximum(at_each_step(share), 1e-8)
    all_returns[name], advantages[name] = return_, error - centre
    # Starts of weight 0 are left out: no data teaches the model what follows a termination, so
    # members disagree most there, and their novelty would set the scale of all others.
    counted = jnp.where(dreamt.start.weight > 0, return_[0], jnp.nan)[own[name]]
    begins = batch.mean(share.sum()) > 0
    of_dreams = lambda x, share=share: batch.mean(jnp.sum(share * jnp.square(x)))
    squared_error = jnp.maximum(of_dreams(error), batch.mean(replayed[name]))
    range_ = returns.percentile_range(batch.gather(counted))
    spread = ac.Spread(range_, of_dreams(error - centre), squared_error)
    observed[name] = jax.tree.map(lambda x, begins=begins: jnp.where(begins, x, jnp.nan), spread)
  scales = ac.update_scales(scales, observed, config)
  evidence = scales.evidence if actor_critic.explores else 1.0
  joint, magnitudes = jnp.zeros_like(weight), {}
  for name, advantage in advantages.items():
    head_weight = evidence if name == ac.TASK else kinds[name].weight(config)
    term = head_weight * (advantage / scales.divisors[name])
    joint = joint.at[:, own[name]].add(term)
    magnitudes[f'{name}_advantage'] = jnp.sum(weight[:, own[name]] * jnp.abs(term))
  targets = ac.Targets(
    returns=all_returns,
    advantage=joint,
    weight=weight,
  )
  return scales, targets, magnitudes | {'return_divisor': scales.divisors[ac.TASK]}
