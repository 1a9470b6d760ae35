"""Imagination rollouts ("dreams") from posterior states.

The number of imagined steps is data, and no shape depends on it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hephaestus.agents import agent as agent_lib
from hephaestus.agents import networks, returns
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import modules, rssm, sockets, world_model

Tree = Any


class Start(NamedTuple):
  """The B' steps of real sequences at which imagination begins; see `starts` for their order.

  Attributes:
    latent: posterior latents, [B', ...].
    read: [B', ...], what actors and critics read at the steps.
    novelty: [B'] float32, novelty of the transitions to the steps.
    weight: [B'] float32, 0 at LAST, after which no step follows, else 1.
    keys: [B'] PRNG keys, one for each dream, so that its noise is the same in any batch.
    mask: [B', A] bool, legal actions; None where an environment has no mask.
    remembered: [B'] bool, those that begin at a remembered step; None if no dream does.
  """

  latent: rssm.Latent
  read: sockets.PolicyInputs
  novelty: jax.Array
  weight: jax.Array
  keys: jax.Array
  mask: jax.Array | None = None
  remembered: jax.Array | None = None


class Dream(NamedTuple):
  """Imagination rollouts, `horizon_max` = H imagined steps after each start.

  Index 0 of the time axis is the start. Steps beyond `horizon` are not computed; their arrays are 0
  (`mask` is True), and `weights` gives them weight 0.

  Attributes:
    start: B' steps, the first of each dream.
    read: [H, B', ...], what actors and critics read at the start and at all imagined steps but the last.
    novelty: [H + 1, B'] float32, novelty of the transition to the step; 0 at imagined steps of dreams of
      which nothing reads it, see `rollout`.
    choice: [H, B'] or [H, B', M] int32 actions, or [H, B', A] float32 actions before tanh.
    log_prob: [H, B'] float32, log of their probability.
    mask: [H, B', A] bool, legal actions, of imagined steps as predicted.
    reward: [H + 1, B'] float32, predicted reward that arrives at the step; 0 at the start.
    discount: [H + 1, B'] float32, predicted probability that the episode continues; 0 at the start,
      where it is unread.
    values: [H + 1, B'] float32, the value of each head, by its name: of the explorer's rewards the critic's, else
      the lower one of critic and slow critic, since an actor follows the errors of a critic, which would be
      bootstrapped; so values fall at once and rise slowly. Where each dream is of its own actor, 0 in dreams of
      the other one.
    horizon: [] int32, number of steps that were imagined, at most H.
    rewards: [H + 1, B'] float32, intrinsic rewards that arrive at the step, by name; 0 at the start.
  """

  start: Start
  read: sockets.PolicyInputs
  novelty: jax.Array
  choice: jax.Array
  log_prob: jax.Array
  mask: jax.Array
  reward: jax.Array
  discount: jax.Array
  values: dict[str, jax.Array]
  horizon: jax.Array
  rewards: dict[str, jax.Array]


def rollout(
  model: world_model.WorldModel,
  actor_critic: ac.ActorCritic,
  params: Tree,
  slow_critic: Tree,
  start: Start,
  horizon: jax.Array,
  *,
  explore: bool = False,
) -> Dream:
  """Imagines `horizon` steps from each start, each dream by the prior of one random ensemble member.

  The loop's trip count is `horizon`, so a shorter horizon costs less and is not traced again. No
  gradient passes through the loop: the actor learns by ratios of probabilities from the stored steps.

  Args:
    model: the world model.
    actor_critic: the policies that act, and the critic.
    params: all parameters of the agent; a memory is not read.
    slow_critic: parameters of the slow critic.
    start: the B' steps at which the dreams begin.
    horizon: [] int32, at most `config.horizon_max`; equal on all replicas.
    explore: whether each dream is of its own actor, see `ActorCritic.dreams`; else of the task's. Then
      only the explorer's dreams have novelty, unless a context module reads it.
  """
  reads_all = not explore or actor_critic.context.size > 0
  novel = slice(None) if reads_all else actor_critic.dreams(ac.NOVELTY, len(start.weight))
  keys = jax.vmap(jax.random.split)(start.keys)
  choose = lambda key: jax.random.randint(key, (), 0, model.config.ensemble_size)
  member, step_keys = jax.vmap(choose)(keys[:, 0]), keys[:, 1]
  world = modules.world(params)
  cast = lambda tree: networks.cast_kernels(tree, model.config.dtype)
  imagination = _Imagination(
    model,
    actor_critic,
    cast(world),
    model.rssm.cast(model.rssm.matrices(world)),
    actor_critic.cast(params['actor_critic']),
    slow_critic,
    member,
    step_keys,
    explore,
    novel,
  )
  end = jax.lax.fori_loop(0, horizon, imagination.step, imagination.begin(start))
  return Dream(start=start, horizon=horizon, **imagination.complete(horizon, end))


@dataclasses.dataclass(frozen=True)
class _Imagination:
  """The loop of one rollout.

  Attributes:
    model: the world model.
    actor_critic: the policies that act, and the critic.
    model_params: parameters of the world model, with kernels in the compute dtype.
    matrices: its matrices in the compute dtype, see `RSSM.matrices`.
    policy_params: parameters of the actor-critic, with kernels in the compute dtype but for critics.
    slow_critic: parameters of the slow critic.
    member: [B'] int32, the member whose prior each dream samples.
    keys: [B'] PRNG keys, one for each dream.
    explore: whether each dream is of its own actor.
    novel: dreams whose novelty is computed.
  """

  model: world_model.WorldModel
  actor_critic: ac.ActorCritic
  model_params: Tree
  matrices: Tree
  policy_params: Tree
  slow_critic: Tree
  member: jax.Array
  keys: jax.Array
  explore: bool
  novel: slice

  def begin(self, start: Start) -> tuple[Any, ...]:
    """The loop's carry at the starts: latent, what is read, mask, and arrays by name.

    The arrays are a Dream's, without the ones that `complete` adds.
    """
    num_steps, batch = self.model.config.horizon_max, len(start.weight)
    mask = start.mask
    if mask is None:
      mask = self.model.action_mask(self.model_params, start.read.features)
    arrived = lambda x: jnp.zeros((num_steps + 1, batch), jnp.float32).at[0].set(x)
    decided = lambda x: jnp.zeros((num_steps, *x.shape), x.dtype)
    choice_dtype = jnp.int32 if self.actor_critic.discrete else jnp.float32
    outputs = {
      'read': jax.tree.map(decided, start.read),
      'choice': jnp.zeros((num_steps, batch, *self.model.action_spec.shape), choice_dtype),
      'log_prob': jnp.zeros((num_steps, batch), jnp.float32),
      'mask': jnp.ones((num_steps, *mask.shape), bool),
      'novelty': arrived(start.novelty),
      'rewards': {name: arrived(0.0) for name in self.model.rewards},
    }
    return start.latent, start.read, mask, outputs

  def step(self, t: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Samples actions at imagined step t, and imagines step t + 1; returns the next carry."""
    before, read, mask, outputs = carry
    module = self.actor_critic.context
    noise_keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, t)))(self.keys)
    act = self.actor_critic.dreamt_policy if self.explore else self.actor_critic.policy
    context = module.pool(self.policy_params, read)
    policy = act(self.policy_params, read.features, context, mask)
    action, choice = self.actor_critic.sample(
      policy, jax.vmap(self.actor_critic.noise)(noise_keys[:, 0])
    )
    model = self.model.rssm
    recurrent = rssm.Recurrent(before, self.model.networks.actions.encode(action))
    noise = jax.vmap(model.imagined_noise)(noise_keys[:, 1])
    after = self.model.imagine(
      self.model_params, self.matrices, recurrent, self.member, noise, self.novel
    )
    here = after._replace(latent=before, features=read.features)
    found = self.model.novelty(after)
    novelty = jnp.zeros(len(self.member), jnp.float32).at[self.novel].set(found)
    arrived = {
      'novelty': novelty,
      'rewards': self.model.intrinsic_rewards(self.model_params, here, after, novelty),
    }
    log_prob = policy.log_prob(choice)
    decided = {'read': read, 'choice': choice, 'log_prob': log_prob, 'mask': mask}
    put = lambda at: lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, at, 0)
    outputs = {
      name: jax.tree.map(put(t if name in decided else t + 1), outputs[name], x)
      for name, x in (decided | arrived).items()
    }
    own = module.inputs(self.policy_params, after, novelty)
    mask = self.model.action_mask(self.model_params, after.features)
    read = sockets.PolicyInputs(after.features, module.advance(read), own)
    return after.latent, read, mask, outputs

  def complete(self, horizon: jax.Array, end: tuple[Any, ...]) -> dict[str, Any]:
    """The arrays of a Dream, from the carry at the end of the loop.

    Rewards, discounts and values are computed here, for `steps_per_chunk` steps at a time, since no later
    step depends on them: in the loop a GPU would start some hundred small programs more for each step.
    """
    _, last_read, _, outputs = end
    num_steps, count = self.model.config.horizon_max, self.model.config.steps_per_chunk

    def judge_chunk(chunk: jax.Array, judged: Tree) -> Tree:
      cut = lambda x: jax.lax.dynamic_slice_in_dim(x, chunk * count, count)
      put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, chunk * count, 0)
      return jax.tree.map(put, judged, self._judge(jax.tree.map(cut, outputs['read'])))

    last = self._judge(last_read)
    judged = jax.tree.map(lambda x: jnp.zeros((num_steps + 1, *x.shape), x.dtype), last)
    judged = jax.lax.fori_loop(0, (horizon + count - 1) // count, judge_chunk, judged)
    judged = jax.tree.map(lambda all_, x: all_.at[horizon].set(x), judged, last)
    step = jnp.arange(num_steps + 1)[:, None]
    imagined = lambda x: jnp.where((step > 0) & (step <= horizon), x, 0.0)
    reached = lambda x: jnp.where(step <= horizon, x, 0.0)
    arrived = {name: imagined(judged[name]) for name in ('reward', 'discount')}
    return outputs | arrived | {'values': jax.tree.map(reached, judged['values'])}

  def _judge(self, read: sockets.PolicyInputs) -> dict[str, Any]:
    """Reward and discount that arrived at steps, and their values, [..., B'] float32; see `Dream`."""
    features, context = read.features, self.actor_critic.context.pool(self.policy_params, read)
    lead = features.state.shape[:-1]

    def values_of(params: Tree) -> dict[str, jax.Array]:
      if not self.explore:
        values = self.actor_critic.values(params, features, context)
        return {name: value.mean() for name, value in values.items()}
      values = self.actor_critic.dreamt_values(params, features, context)
      return {
        name: jnp.zeros(lead).at[..., self.actor_critic.dreams(name, lead[-1])].set(value.mean())
        for name, value in values.items()
      }

    return {
      'reward': self.model.reward(self.model_params, features).mean(),
      'discount': self.model.discount(self.model_params, features),
      'values': self._lower(values_of(self.policy_params), values_of(self.slow_critic)),
    }

  def _lower(
    self, values: dict[str, jax.Array], slow: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """The lower of the values of a critic and of its slow average; of the explorer's rewards the critic's.

    What is new is so for a short time only: a slow average of its value rises when it no longer is.
    """
    lower = lambda name, own: (
      own if self.actor_critic.is_explorers(name) else jnp.minimum(own, slow[name])
    )
    return {name: lower(name, value) for name, value in values.items()}


def returns_of(
  dream: Dream, reward: jax.Array, value: jax.Array, *, gamma: float, lambda_: float
) -> jax.Array:
  """Lambda-returns of imagined steps, [H, B'] float32, bootstrapped with the value at the horizon.

  Reward and value, [H + 1, B'] float32, are of one head of the critic. From the horizon on, returns are to be
  given weight 0.
  """
  beyond = jnp.arange(len(value)) >= dream.horizon
  return returns.lambda_returns(
    reward,
    dream.discount,
    value,
    gamma=gamma,
    lambda_=lambda_,
    bootstrap_t=jnp.broadcast_to(beyond[:, None], value.shape),
  )


def weights(dream: Dream) -> jax.Array:
  """Weights of imagined steps in the losses, [H, B'] float32; 0 from the horizon on.

  The start's weight times the probability that the episode reaches the step.
  """
  beyond = jnp.arange(len(dream.choice)) >= dream.horizon
  alive = jnp.cumprod(dream.discount.at[0].set(1.0)[:-1], axis=0)
  return jnp.where(beyond[:, None], 0.0, alive * dream.start.weight)


def steps(dream: Dream) -> ac.ImaginedSteps:
  """The imagined steps of dreams, [H, B', ...]."""
  return ac.ImaginedSteps(dream.read, dream.choice, dream.log_prob, dream.mask)


def starts(
  read: sockets.PolicyInputs,
  latent: rssm.Latent,
  last: jax.Array,
  novelty: jax.Array,
  keys: jax.Array,
  mask: jax.Array | None,
  *,
  num_steps: int | None,
  even: bool = False,
) -> Start:
  """Picks steps of real sequences at which imagination begins.

  Args:
    read: [T, B, ...], what actors and critics read at the steps, from `ActorCritic.along`.
    latent: [T, B, ...], their latents.
    last: [T, B] bool, steps that end an episode.
    novelty: [T, B] float32, novelty of the transitions to the steps.
    keys: [B] PRNG keys, one for each sequence.
    mask: [T, B, A] bool, legal actions; None where an environment has no mask.
    num_steps: number of steps to pick in each sequence, without replacement, at most T, of those that do not
      end an episode as far as there are enough; None for all.
    even: whether to pick an even number of steps in each sequence, at most `num_steps`, so that each half
      of the starts has as many of each sequence.

  Returns:
    B' = B x num_steps starts (B x T for None), ordered by their number within a sequence first, so that
    halves do not depend on the batching.
  """
  total, batch = last.shape
  count = total if num_steps is None else min(num_steps, total)
  whole = count == total
  count -= count % 2 if even else 0
  keys = jax.vmap(jax.random.split)(keys)
  if whole:
    order = jnp.arange(count)
    if even:  # steps in turn, so that either half is of the whole sequence
      order = jnp.concatenate([order[::2], order[1::2]])
    step = jnp.broadcast_to(order, (batch, count))
  else:
    chance = jax.vmap(lambda key: jax.random.uniform(key, (total,)))(keys[:, 0])
    order = jnp.argsort(chance + last.T, axis=-1)  # steps that end an episode come last
    step = order[:, :count]
  step = step.T  # [count, B]
  stream = jnp.broadcast_to(jnp.arange(batch), step.shape)
  pick = lambda x: x[step, stream].reshape(count * batch, *x.shape[2:])
  dream_keys = jax.vmap(jax.random.fold_in)(
    jnp.tile(keys[:, 1], count), jnp.repeat(jnp.arange(count), batch)
  )
  return Start(
    latent=jax.tree.map(pick, latent),
    read=jax.tree.map(pick, read),
    novelty=pick(novelty),
    weight=1.0 - pick(last).astype(jnp.float32),
    keys=dream_keys,
    mask=None if mask is None else pick(mask),
  )


def remembered(
  model: world_model.WorldModel,
  actor_critic: ac.ActorCritic,
  params: Tree,
  start: Start,
  update: jax.Array,
) -> Start:
  """Lets some of the dreams begin at steps of a memory, see `Memory.begin`; others begin as they did.

  The context module knows no steps before such a step.

  Args:
    model: the world model, which has a memory.
    actor_critic: the actor-critic, for its context module.
    params: all parameters of the agent, with what the memory holds.
    start: the starts of the batch.
    update: [] int32, number of the update.
  """
  memory, rssm_, world = model.networks.memory, model.rssm, modules.world(params)
  assert memory is not None
  # The rollout splits these keys in two, which are what folding in 0 and 1 gives.
  keys = jax.vmap(lambda key: jax.random.fold_in(key, 2))(start.keys)
  takes, latent, previous = memory.begin(
    params[agent_lib.STATISTICS][world_model.MEMORY], keys, update
  )
  if start.latent.inputs is not None:
    latent = latent._replace(inputs=rssm_.inputs(world, latent))
  # As if nothing had changed: the steps before are not remembered.
  features = rssm_.features(world, latent, previous, earlier=latent.inputs)
  first = jnp.zeros(takes.shape, bool)
  priors = rssm_.prior(world, latent.deterministic, previous, first)
  step = rssm.Step(latent, features, previous, None, priors, first)
  novelty = model.novelty(step)
  found = {
    'latent': latent,
    'read': actor_critic.read(
      params['actor_critic'], start.read.memory, step, novelty, begins=~first
    ),
    'novelty': novelty,
    'weight': jnp.ones(takes.shape),
  }
  if start.mask is not None:
    found['mask'] = model.action_mask(world, features)
  mix = lambda new, old: jnp.where(takes.reshape(-1, *[1] * (old.ndim - 1)), new, old)
  mixed = {name: jax.tree.map(mix, new, getattr(start, name)) for name, new in found.items()}
  return start._replace(**mixed, remembered=takes)
