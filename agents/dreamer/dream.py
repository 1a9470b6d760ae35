"""A rollout of imagined rows from posterior states, whose length is data and whose shape is not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hephaestus.agents import returns
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import intrinsic, world_model

Tree = Any


class Start(NamedTuple):
  """Where dreams begin.

  Attributes:
    latent: [B', ...] posterior states.
    features: [B', W - 1, F] of the rows before them.
    novelty: [B', W] float32, of the rows before them and their own.
    episode: [B', W] int32, likewise.
    weight: [B'] float32, 0 where an episode has ended and nothing can follow.
    keys: [B'] one for each dream, so that a dream does not depend on its neighbours.
  """

  latent: world_model.Latent
  features: jax.Array
  novelty: jax.Array
  episode: jax.Array
  weight: jax.Array
  keys: jax.Array


class Dream(NamedTuple):
  """H imagined rows behind each start; what lies beyond the horizon is zero and weighs nothing.

  Attributes:
    features: [B', W - 1 + H + 1, F]: the rows before, the start, and the imagined ones; a dream's
      beside each other, as pooling reads them. With W = 1 nobody reads the last: [B', H, F], which
      is all that is learned from, read as it lies.
    novelty: [B', W - 1 + H + 1] float32.
    episode: [B', W - 1 + H + 1] int32.
    choice: [H, B'] or [H, B', M] int32 actions, or [H, B', A] float32 actions before tanh.
    mask: [H, B', A] bool.
    reward: [H + 1, B'] float32, predicted, arriving at the row.
    discount: [H + 1, B'] float32, predicted probability that the episode goes on.
    value: [H + 1, B'] float32, of the slow critic.
    weight: [B'] float32, of the start.
    horizon: [] int32.
  """

  features: jax.Array
  novelty: jax.Array
  episode: jax.Array
  choice: jax.Array
  mask: jax.Array
  reward: jax.Array
  discount: jax.Array
  value: jax.Array
  weight: jax.Array
  horizon: jax.Array


def imagine(
  model: world_model.WorldModel,
  params: Tree,
  recurrent: world_model.Recurrent,
  member: jax.Array,
  noise: jax.Array,
) -> tuple[world_model.Latent, Any]:
  """One imagined row.

  Args:
    model: the world model.
    params: of it.
    recurrent: [B', ...] of the row before.
    member: [B'] int32, whose prior each dream follows.
    noise: [B', ...] of `WorldModel.noise`.

  Returns:
    The latent [B', ...], and all members' beliefs about it, [K, B', Z].
  """
  members = model.members(params, recurrent)
  deterministic = jnp.mean(members, axis=0, dtype=jnp.float32).astype(model.dtype)
  priors = model.prior_outputs(params, members)
  belief = model.belief(priors[member, jnp.arange(len(member))])
  stochastic = belief.sample(noise).astype(model.dtype)
  latent = world_model.Latent(deterministic, stochastic, recurrent.latent.seen)
  latent = latent._replace(seen=model.imagine(params, latent.belief, recurrent))
  return latent, model.belief(priors)


def rollout(
  model: world_model.WorldModel,
  actor_critic: ac.ActorCritic,
  params: Tree,
  slow_critic: Tree,
  start: Start,
  horizon: jax.Array,
) -> Dream:
  """Imagines `horizon` rows, each dream along the prior of one member of its own.

  The loop's trip count is `horizon`, so a short horizon really costs less, and nothing is
  retraced. No gradient is meant to pass: the actor learns by score function from what is stored.

  Args:
    model: the world model.
    actor_critic: the policy that dreams, and the critic that judges.
    params: of 'world_model' and 'actor_critic'.
    slow_critic: parameters of the slow critic.
    start: B' states.
    horizon: [] int32, at most `config.horizon_max`; equal on all replicas.
  """
  config = model.config
  window, num_rows = config.window, config.horizon_max
  batch = start.weight.shape[0]
  model_params, policy_params = model.fuse(params['world_model']), params['actor_critic']
  novelty_of = intrinsic.NOVELTIES[config.novelty]
  keys = jax.vmap(jax.random.split)(start.keys)
  choose = lambda key: jax.random.randint(key, (), 0, config.ensemble_size)
  member, step_keys = jax.vmap(choose)(keys[:, 0]), keys[:, 1]

  latent = start.latent
  features = latent.features
  prefix = jnp.concatenate([start.features, features[:, None]], axis=1)
  after = lambda x, rows: jnp.pad(x, ((0, 0), (0, rows), *[(0, 0)] * (x.ndim - 2)))
  row = lambda x: jnp.zeros((num_rows + 1, *x.shape), x.dtype).at[0].set(x)
  looks_back = actor_critic.looks_back
  buffers = {
    'features': after(prefix, num_rows if looks_back else num_rows - 1),
    'novelty': after(start.novelty, num_rows),
    'scores': after(actor_critic.scores(policy_params, prefix, start.novelty), num_rows),
    'episode': jnp.pad(start.episode, ((0, 0), (0, num_rows)), mode='edge'),
  }

  def context_at(buffers, t):
    last = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t, window, axis=1), buffers)
    return actor_critic.pool(ac.Window(last['features'], last['scores'], last['episode']))

  context = context_at(buffers, 0)
  mask = model.action_mask(model_params, latent.belief)
  judge = lambda features, context: actor_critic.value(
    {'critic': slow_critic}, features, context
  ).mean()
  choice_dtype = jnp.int32 if actor_critic.discrete else jnp.float32
  outputs = {
    'choice': jnp.zeros((num_rows, batch, *model.action_spec.shape), choice_dtype),
    'mask': jnp.ones((num_rows, *mask.shape), bool),
    'reward': jnp.zeros((num_rows + 1, batch), jnp.float32),
    'discount': jnp.zeros((num_rows + 1, batch), jnp.float32),
    'value': row(judge(features, context)),
  }

  def step(t, carry):
    before, context, mask, buffers, outputs = carry
    noise_keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, t)))(step_keys)
    policy = actor_critic.policy(policy_params, before.features, context, mask)
    action, choice = actor_critic.sample(policy, jax.vmap(actor_critic.noise)(noise_keys[:, 0]))

    recurrent = world_model.Recurrent(before, model.encode_action(action))
    noise = jax.vmap(model.noise)(noise_keys[:, 1])
    latent, priors = imagine(model, model_params, recurrent, member, noise)
    novelty = novelty_of(*priors.moments())

    put = jax.lax.dynamic_update_index_in_dim
    features = latent.features
    new = {'novelty': novelty, 'scores': actor_critic.scores(policy_params, features, novelty)}
    if looks_back:  # on its own row, too
      new['features'] = features
    else:
      buffers = buffers | {'features': put(buffers['features'], before.features, t, 1)}
    buffers = buffers | {name: put(buffers[name], x, window + t, 1) for name, x in new.items()}
    context = context_at(buffers, t + 1)
    arrived = {
      'reward': model.reward(model_params, latent.belief, before.seen, recurrent.action).mean(),
      'discount': model.discount(model_params, latent.belief),
      'value': judge(features, context),
    }
    decided = {'choice': choice, 'mask': mask}
    outputs = {name: put(outputs[name], x, t, 0) for name, x in decided.items()} | {
      name: put(outputs[name], x, t + 1, 0) for name, x in arrived.items()
    }
    mask = model.action_mask(model_params, latent.belief)
    return latent, context, mask, buffers, outputs

  carry = (latent, context, mask, buffers, outputs)
  *_, buffers, outputs = jax.lax.fori_loop(0, horizon, step, carry)
  return Dream(
    features=buffers['features'],
    novelty=buffers['novelty'],
    episode=buffers['episode'],
    weight=start.weight,
    horizon=horizon,
    **outputs,
  )


def returns_and_weights(
  dream: Dream, drive: jax.Array, *, gamma: float, lambda_: float
) -> tuple[jax.Array, jax.Array]:
  """What each dreamt row is worth, and how much it counts.

  Args:
    dream: of [H + 1, B'] rows.
    drive: [H + 1, B'] float32, intrinsic reward arriving at each row.
    gamma: discount factor.
    lambda_: of the returns.

  Returns:
    Returns [H, B'], bootstrapped with the value at the horizon, and weights [H, B']: the start's
    weight times the probability that the episode still runs, 0 from the horizon on.
  """
  num_rows = dream.choice.shape[0]
  beyond = jnp.arange(num_rows + 1) >= dream.horizon
  return_ = returns.lambda_returns(
    dream.reward + drive,
    dream.discount,
    dream.value,
    gamma=gamma,
    lambda_=lambda_,
    bootstrap_t=jnp.broadcast_to(beyond[:, None], dream.value.shape),
  )
  alive = jnp.cumprod(dream.discount.at[0].set(1.0)[:-1], axis=0)
  weight = jnp.where(beyond[:-1, None], 0.0, alive * dream.weight)
  return return_, weight


def rows(dream: Dream, first: jax.Array | int, count: int, window: int) -> ac.Rows:
  """`count` rows of a dream from row `first` on, with the `window` - 1 rows before them."""
  cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, window - 1 + count, axis=1)
  by_dream = lambda x: jnp.swapaxes(jax.lax.dynamic_slice_in_dim(x, first, count), 0, 1)
  return ac.Rows(
    features=cut(dream.features),
    novelty=cut(dream.novelty),
    episode=cut(dream.episode),
    choice=by_dream(dream.choice),
    mask=by_dream(dream.mask),
  )


class Past(NamedTuple):
  """Replayed rows as salience pooling wants them, W - 1 rows of no episode before the first.

  Attributes:
    features: [B, W - 1 + T, F] in the compute dtype.
    novelty: [B, W - 1 + T] float32.
    episode: [B, W - 1 + T] int32; -1 before the sequence.
  """

  features: jax.Array
  novelty: jax.Array
  episode: jax.Array


def past(posterior: world_model.Posterior, novelty: jax.Array, window: int) -> Past:
  """From [T, B] rows; what came before the sequence is not known, so it is left out."""

  def before(x: jax.Array, fill: int) -> jax.Array:
    x = jnp.swapaxes(x, 0, 1)
    return jnp.pad(x, ((0, 0), (window - 1, 0), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)

  return Past(
    features=before(posterior.latent.features, 0),
    novelty=before(novelty, 0),
    episode=before(jnp.cumsum(posterior.first, axis=0, dtype=jnp.int32), -1),
  )


def starts(
  posterior: world_model.Posterior,
  last: jax.Array,
  novelty: jax.Array,
  keys: jax.Array,
  *,
  num_rows: int | None,
  window: int,
) -> Start:
  """Begins dreams at rows of real sequences.

  Args:
    posterior: of [T, B] rows.
    last: [T, B] bool, rows that end an episode.
    novelty: [T, B] float32.
    keys: [B] one for each sequence.
    num_rows: how many rows of each sequence, drawn without replacement; None for all.
    window: W.

  Returns:
    B' = B x num_rows starts.
  """
  total, batch = last.shape
  count = total if num_rows is None else min(num_rows, total)
  keys = jax.vmap(jax.random.split)(keys)
  if count == total:
    row = jnp.broadcast_to(jnp.arange(total), (batch, total))
  else:
    row = jax.vmap(lambda key: jax.random.permutation(key, total)[:count])(keys[:, 0])
  row = row.T  # [count, B]
  column = jnp.arange(batch)

  rows = past(posterior, novelty, window)
  index = row[..., None] + jnp.arange(window)  # [count, B, W], into the rows shifted by W - 1
  merge = lambda x: x.reshape(count * batch, *x.shape[2:])
  dream_keys = jax.vmap(jax.random.fold_in)(
    jnp.tile(keys[:, 1], count), jnp.repeat(jnp.arange(count), batch)
  )
  return Start(
    latent=jax.tree.map(lambda x: merge(x[row, column]), posterior.latent),
    features=merge(rows.features[column[:, None], index[..., :-1]]),
    novelty=merge(rows.novelty[column[:, None], index]),
    episode=merge(rows.episode[column[:, None], index]),
    weight=merge(1.0 - last[row, column].astype(jnp.float32)),
    keys=dream_keys,
  )
