"""The dreamer's TrainState and one update, seen from one device.

One XLA program: world model, novelty, imagination, actor-critic, intrinsic state. Random numbers
follow from a sequence's position in the global batch, so the update does not depend on how many
devices share the batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import optax

from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience, returns
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import dream, intrinsic, modules, rssm, sockets, world_model
from hephaestus.agents.dreamer import novelty as novelty_lib
from hephaestus.agents.dreamer import targets as targets_lib
from hephaestus.learner import config as learner_config
from hephaestus.learner import devices as devices_lib

Tree = Any
Metrics = dict[str, jax.Array]
LAST = int(dm_env.StepType.LAST)


class TrainState(NamedTuple):
  """All that an update changes; equal on all replicas, so one of them is the whole checkpoint.

  Attributes:
    params: float32 parameters of 'world_model' and 'actor_critic', all of which optimizers change.
    statistics: what no optimizer changes: of 'world_model', see `modules.NUMBERS`; with novelty 'exploring',
      see `intrinsic.exploring`; and with a memory 'memory', what it holds.
    slow_critic: moving average of the critic's parameters.
    model_opt_state: state of the world model's optimizer.
    policy_opt_state: state of the actor-critic's optimizer.
    intrinsic: running statistics of novelty, and boredom.
    earned: what the task's actor and the explorer earned lately.
    scales: running statistics of imagined returns, which scale the advantages.
    key: [2] uint32, `key_data` of a PRNG key: pmap dispatches in Python where it returns a typed key.
    step: [] int32, number of updates done.
  """

  params: Tree
  statistics: Tree
  slow_critic: Tree
  model_opt_state: Tree
  policy_opt_state: Tree
  intrinsic: intrinsic.IntrinsicState
  earned: intrinsic.Earned
  scales: ac.Scales
  key: jax.Array
  step: jax.Array


def make_optimizer(
  rate: float, max_gradient: float, config: learner_config.LearnerConfig
) -> optax.GradientTransformation:
  """Adam with a linear warm-up of its learning rate, and gradients clipped by global norm.

  It works on one vector of all parameters: the program of an update is smaller by a seventh than with
  the parameters of each layer by themselves, which shortens its compilation and its run.

  Args:
    rate: learning rate after warm-up.
    max_gradient: global norm to which gradients are clipped.
    config: gives the length of the warm-up, and Adam's epsilon.
  """
  schedule = optax.linear_schedule(rate / config.rate_warm_up, rate, config.rate_warm_up)
  return optax.flatten(
    optax.chain(
      optax.clip_by_global_norm(max_gradient),
      # With Adam's usual 0.999 the large first gradients would slow the learning of rare rewards, which come
      # late, for a thousand updates. DreamerV3 has 0.99, too, since 2024.
      optax.adam(schedule, b2=0.99, eps=config.adam_epsilon),
    )
  )


def make_update(
  dreamer: dreamer_agent.Dreamer, config: learner_config.LearnerConfig
) -> 'DreamerUpdate':
  """Builds the update of a dreamer, with the optimizers of `config`."""
  return DreamerUpdate(
    dreamer,
    make_optimizer(config.model_learning_rate, learner_config.MODEL_MAX_GRADIENT, config),
    make_optimizer(config.policy_learning_rate, learner_config.POLICY_MAX_GRADIENT, config),
  )


BATCH = sockets.Batch(
  mean=devices_lib.over_devices,
  largest=lambda x: devices_lib.over_devices(x, jax.lax.pmax),
  gather=lambda x: jax.lax.all_gather(x, devices_lib.DEVICES),
)
"""Reductions over the batch of all devices."""


@dataclasses.dataclass(frozen=True)
class DreamerUpdate:
  """A dreamer's `loop.Update`: the agent and its optimizers; each method is a phase, seen from one device.

  Attributes:
    dreamer: the agent.
    model_optimizer: optimizer of the world model.
    policy_optimizer: optimizer of actors, critics and context modules.
  """

  dreamer: dreamer_agent.Dreamer
  model_optimizer: optax.GradientTransformation
  policy_optimizer: optax.GradientTransformation

  def init(self, key: chex.PRNGKey) -> TrainState:
    """Makes a TrainState before its first update."""
    init_key, key = jax.random.split(key)
    params, statistics = agent_lib.apart(self.dreamer.agent.init_params(init_key))
    return TrainState(
      params=params,
      statistics=statistics,
      # A copy: the state is donated, and no buffer may be donated twice.
      slow_critic=jax.tree.map(jnp.copy, self.dreamer.actor_critic.critics(params['actor_critic'])),
      model_opt_state=self.model_optimizer.init(params['world_model']),
      policy_opt_state=self.policy_optimizer.init(params['actor_critic']),
      intrinsic=intrinsic.initial(),
      earned=intrinsic.nothing_earned(),
      scales=ac.initial_scales(self.dreamer.actor_critic.heads),
      key=jax.random.key_data(key),
      step=jnp.zeros((), jnp.int32),
    )

  def update(self, state: TrainState, sequence: experience.Sequence) -> tuple[TrainState, Metrics]:
    """One update, seen from one device; gradients and metrics are averaged over DEVICES."""
    config = self.dreamer.config
    sequence = experience.time_major(sequence)
    key, shared_key = jax.random.split(jax.random.wrap_key_data(state.key))
    model_keys, dream_keys = _sequence_keys(shared_key, sequence.identity.shape[0])
    version = jnp.broadcast_to(sequence.version, sequence.reward.shape)
    recalled, recall = self.dreamer.model.recall(
      agent_lib.all_params(state), sequence.observation, version
    )
    state, posterior, model_metrics = self._improve_world_model(
      state, model_keys, sequence, recalled
    )

    model = self.dreamer.model
    novelty = model.novelty(posterior)
    world = modules.world(agent_lib.all_params(state))
    rewards = model.replayed_rewards(world, posterior, novelty)
    # Until warm-up is over, the model is not worth imagining with; a dream of no steps costs nothing.
    warm = state.step >= config.warm_up_updates
    intrinsic_state, motivation = intrinsic.update(
      state.intrinsic,
      devices_lib.over_devices(novelty.mean()),
      config,
      trained=warm,
      evidence=state.scales.evidence if self.dreamer.actor_critic.explores else 1.0,
    )
    horizon = jnp.where(warm, motivation.horizon, 0)
    dreamt, replayed = self._imagine(
      state, posterior, novelty, rewards, dream_keys, sequence, horizon
    )
    context_metrics = self.dreamer.actor_critic.context.metrics(
      state.params['actor_critic'], replayed.read, BATCH.mean
    )
    state, policy_metrics, dream_metrics = self._improve_actor_critic(state, dreamt, replayed)
    state, memory_metrics = self._remember(state, sequence, replayed, recall, posterior)
    state, exploring_metrics = self._explore(state, sequence, ~posterior.first)
    # At the end, so that no reward of this update, real or imagined, holds its own novelty.
    followed = model.followed(state.statistics['world_model'], posterior, novelty, BATCH.mean)
    state = state._replace(statistics=state.statistics | {'world_model': followed})

    metrics = {
      **{name if '/' in name else f'world_model/{name}': x for name, x in model_metrics.items()},
      **{f'actor_critic/{name}': value for name, value in policy_metrics.items()},
      **_intrinsic_metrics(posterior, novelty, motivation),
      **{
        f'intrinsic/{metric}': x
        for name, reward in model.rewards.items()
        for metric, x in reward.metrics(world, posterior, rewards[name]).items()
      },
      'dream/horizon': horizon.astype(jnp.float32),
      **{f'dream/{name}': value for name, value in dream_metrics.items()},
      **exploring_metrics,
      **{f'memory/{name}': value for name, value in memory_metrics.items()},
      **context_metrics,
    }
    state = state._replace(
      key=jax.random.key_data(key), intrinsic=intrinsic_state, step=state.step + 1
    )
    return state, devices_lib.over_devices(metrics)

  def _improve_world_model(
    self,
    state: TrainState,
    keys: jax.Array,
    sequence: experience.Sequence,
    recalled: jax.Array | None,
  ) -> tuple[TrainState, Any, Metrics]:
    """One step of the model's optimizer; returns state, posterior of the batch, and metrics.

    Args:
      state: train state before the step.
      keys: [B] PRNG keys, one for each sequence.
      sequence: [T, B, ...].
      recalled: [T, B, ...], inputs of networks that `WorldModel.recall` read; None without a memory.
    """
    before, statistics = state.params['world_model'], state.statistics['world_model']
    model = self.dreamer.model
    value_loss = functools.partial(self._value_loss, state, sequence)
    loss = lambda params: model.loss(params | statistics, keys, sequence, value_loss, recalled)
    (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(before)
    posterior, expected_reward, moments, metrics = aux
    grads = devices_lib.over_devices(grads)
    updates, opt_state = self.model_optimizer.update(grads, state.model_opt_state)
    params = optax.apply_updates(before, updates)
    statistics = model.averages(params, statistics, moments, BATCH)
    counts = ~posterior.first
    metrics['gradient_norm'] = optax.global_norm(grads)
    metrics['kl_after_first'] /= devices_lib.over_devices(jnp.mean(counts))
    metrics['reward_correlation'] = returns.correlation(
      expected_reward, sequence.reward, counts, devices_lib.mean_total
    )
    state = state._replace(
      params=state.params | {'world_model': params},
      statistics=state.statistics | {'world_model': statistics},
      model_opt_state=opt_state,
    )
    return state, posterior, metrics

  def _value_loss(
    self, state: TrainState, sequence: experience.Sequence, replayed: rssm.Step
  ) -> jax.Array:
    """The critic's part of the world model's loss, [], a function of the steps; 0 during warm-up."""
    config, policy = self.dreamer.config, self.dreamer.actor_critic
    novelty = self.dreamer.model.novelty(replayed)  # which only a context module may read
    loss = policy.latent_loss(state.params['actor_critic'], replayed, novelty, sequence)
    return jnp.where(state.step >= config.warm_up_updates, config.replayed_value_scale * loss, 0.0)

  def _imagine(
    self,
    state: TrainState,
    replayed: rssm.Step,
    novelty: jax.Array,
    rewards: dict[str, jax.Array],
    keys: jax.Array,
    sequence: experience.Sequence,
    horizon: jax.Array,
  ) -> tuple[dream.Dream, ac.Replayed]:
    """Imagination rollouts from steps of the batch by the newest parameters, and the batch itself."""
    config, policy = self.dreamer.config, self.dreamer.actor_critic
    last = sequence.step_type == LAST
    read = policy.along(state.params['actor_critic'], replayed, novelty)
    start = dream.starts(
      read,
      replayed.latent,
      last,
      novelty,
      keys,
      observation_lib.action_mask(sequence.observation),
      num_steps=config.starts_per_sequence,
      even=policy.explores,
    )
    memory, params = self.dreamer.model.networks.memory, agent_lib.all_params(state)
    if memory and memory.can_begin:
      start = dream.remembered(self.dreamer.model, policy, params, start, state.step)
    dreamt = dream.rollout(
      self.dreamer.model, policy, params, state.slow_critic, start, horizon, explore=True
    )
    mean = lambda _, x: BATCH.mean(x.mean())
    action = self.dreamer.model.networks.actions.encode(sequence.action)
    rewards = targets_lib.head_rewards(self.dreamer.model.rewards, sequence.reward, rewards, mean)
    explores = policy.explored(sequence)
    return dreamt, ac.Replayed(read, rewards, sequence.discount, last, action, explores)

  def _improve_actor_critic(
    self, state: TrainState, dreamt: dream.Dream, replayed: ac.Replayed
  ) -> tuple[TrainState, Metrics, Metrics]:
    """Steps of the policy's optimizer; returns state, metrics of the policy, and of the dream."""
    policy, params = self.dreamer.actor_critic, state.params['actor_critic']
    errors = policy.replayed_squared_errors(params, replayed)
    scales, targets, target_metrics = targets_lib.imagined(
      policy, self.dreamer.model.rewards, state.scales, dreamt, errors, BATCH
    )
    params = params | policy.in_units(policy.critics(params), scales.units)
    slow_critic = policy.in_units(state.slow_critic, scales.units)
    replayed_metrics, replayed_grads = self._replayed_gradient(params, replayed)

    def gradient(
      params: Tree, steps: ac.ImaginedSteps, targets: ac.Targets
    ) -> tuple[Tree, Metrics]:
      grads, metrics = self._imagined_gradient(params, steps, targets, dreamt.horizon)
      return devices_lib.over_devices(jax.tree.map(jnp.add, grads, replayed_grads)), metrics

    starts = targets.weight.shape[1] // replayed.last.shape[1]  # of each sequence
    (params, opt_state), metrics = improved(
      policy, self.policy_optimizer, (params, state.policy_opt_state), gradient,
      dream.steps(dreamt), targets, starts,
    )  # fmt: skip
    metrics |= replayed_metrics | target_metrics
    slow_critic = optax.incremental_update(
      policy.critics(params), slow_critic, dreamer_config.SLOW_CRITIC_RATE
    )
    # Over steps as they are reached; steps imagined beyond a termination count for nothing.
    own = lambda name: policy.dreams(name, targets.weight.shape[1])
    mean = lambda x, name=ac.TASK: jnp.sum(targets.weight[:, own(name)] * x[1:, own(name)])
    dream_metrics = {
      'reward': mean(dreamt.reward),
      'value': mean(dreamt.values[ac.TASK]),
      'novelty': mean(dreamt.novelty, ac.NOVELTY),
    }
    if dreamt.start.remembered is not None:
      dream_metrics['remembered'] = jnp.mean(dreamt.start.remembered)
    # During warm-up nothing of it changes: fed with zeros, Adam would begin with steps three times
    # as large as its rate.
    old = (
      state.params['actor_critic'],
      state.slow_critic,
      state.policy_opt_state,
      state.scales,
    )
    params, slow_critic, opt_state, scales = jax.tree.map(
      lambda new, old: jnp.where(dreamt.horizon > 0, new, old),
      (params, slow_critic, opt_state, scales),
      old,
    )
    state = state._replace(
      params=state.params | {'actor_critic': params},
      slow_critic=slow_critic,
      policy_opt_state=opt_state,
      scales=scales,
    )
    return state, metrics, dream_metrics

  def _remember(
    self,
    state: TrainState,
    sequence: experience.Sequence,
    replayed: ac.Replayed,
    recall: Any,
    posterior: rssm.Step,
  ) -> tuple[TrainState, Metrics]:
    """Writes into the memory, of which `recall` was recalled at the steps; returns state and metrics.

    Without a memory nothing changes.
    """
    policy, memory = self.dreamer.actor_critic, self.dreamer.model.networks.memory
    if memory is None:
      return state, {}
    params, read = state.params['actor_critic'], replayed.read
    value = policy.values(params, read.features, policy.context.pool(params, read))[ac.TASK].mean()
    steps = sockets.Replayed(sequence, posterior, value)
    name = world_model.MEMORY
    held, metrics = memory.updated(state.statistics[name], recall, steps, state.step, BATCH)
    return state._replace(statistics=state.statistics | {name: held}), metrics

  def _explore(
    self, state: TrainState, sequence: experience.Sequence, follows: jax.Array
  ) -> tuple[TrainState, Metrics]:
    """Updates by the real rewards of a batch how much is explored, and what weight the task has.

    Without an explorer it changes nothing, and there are no metrics.

    Args:
      state: train state.
      sequence: [T, B, ...].
      follows: [T, B] bool, steps to which a transition leads.
    """
    config = self.dreamer.config
    if not self.dreamer.actor_critic.explores:
      return state, {}
    differences = intrinsic.return_differences(
      sequence.reward, sequence.discount, follows, BATCH.mean, gamma=config.gamma
    )
    largest = BATCH.largest(
      jnp.max(jnp.abs(intrinsic.discounted(differences, follows, config.gamma)))
    )
    evidence = intrinsic.evidence(state.scales.evidence, largest, config)
    explores = self.dreamer.actor_critic.explored(sequence)[0]
    is_new = sequence.version >= state.step - dreamer_config.NEW_UPDATES
    total = functools.partial(devices_lib.over_devices, reduce=jax.lax.psum)
    earned = intrinsic.earned(state.earned, differences, explores, is_new, total)
    share = intrinsic.exploring(state.statistics[intrinsic.EXPLORING], earned, evidence)
    state = state._replace(
      statistics=state.statistics | {intrinsic.EXPLORING: share},
      scales=state.scales._replace(evidence=evidence),
      earned=earned,
    )
    means = earned.total / jnp.maximum(earned.number, 1.0)
    return state, {
      'intrinsic/exploring': share,
      'intrinsic/evidence': evidence,
      'intrinsic/earned': means[0],
      'intrinsic/explorer_earned': means[1],
    }

  def _imagined_gradient(
    self, params: Tree, imagined: ac.ImaginedSteps, targets: ac.Targets, horizon: jax.Array
  ) -> tuple[Tree, Metrics]:
    """Gradient and metrics of the actor-critic's loss, added up over chunks of imagined steps [H, B, ...]."""
    policy = self.dreamer.actor_critic
    count = self.dreamer.config.steps_per_chunk

    def add_chunk(chunk: jax.Array, carry: tuple[Tree, Metrics]) -> tuple[Tree, Metrics]:
      cut = lambda x: jax.lax.dynamic_slice_in_dim(x, chunk * count, count)
      steps, own = jax.tree.map(cut, (imagined, targets))
      (_, metrics), grads = jax.value_and_grad(policy.loss, has_aux=True)(params, steps, own)
      return jax.tree.map(jnp.add, carry, (grads, metrics))

    steps, first_targets = jax.tree.map(lambda x: x[:count], (imagined, targets))
    empty = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(jax.grad(policy.loss, has_aux=True), params, steps, first_targets),
    )
    num_chunks = (horizon + count - 1) // count  # those beyond the horizon cost nothing
    result: tuple[Tree, Metrics] = jax.lax.fori_loop(0, num_chunks, add_chunk, empty)
    return result

  def _replayed_gradient(self, params: Tree, replayed: ac.Replayed) -> tuple[Metrics, Tree]:
    """Losses of critic and context module on replayed steps, and their gradient."""
    scale, policy = self.dreamer.config.replayed_value_scale, self.dreamer.actor_critic

    def loss(params: Tree) -> tuple[jax.Array, Metrics]:
      value = scale * policy.replayed_value_loss(params, replayed)
      own = policy.context_loss(params, replayed)
      if own is None:
        return value, {'replayed_value_loss': value}
      return value + own, {'replayed_value_loss': value, 'context_loss': own}

    grads, metrics = jax.grad(loss, has_aux=True)(params)
    return metrics, grads


def improved(
  policy: ac.ActorCritic,
  optimizer: optax.GradientTransformation,
  learned: tuple[Tree, Tree],
  gradient: Callable[[Tree, ac.ImaginedSteps, ac.Targets], tuple[Tree, Metrics]],
  steps: ac.ImaginedSteps,
  targets: ac.Targets,
  starts: int,
) -> tuple[tuple[Tree, Tree], Metrics]:
  """Gradient steps of actors and critics on a batch of dreams, POLICY_STEPS at most, each on an equal part.

  Args:
    policy: actors and critics.
    optimizer: of their parameters; critics learn CRITIC_RATE times as fast.
    learned: parameters, and state of the optimizer.
    gradient: function of parameters and a part of the steps and targets: the gradient, and metrics [] by name.
    steps: [H, B', ...], all imagined steps.
    targets: [H, B', ...], of all.
    starts: dreams of each sequence, so that parts, which have as many of each, do not depend on the batching.

  Returns:
    The next parameters and state, and the means of the metrics, with `gradient_norm`.
  """
  own = starts // (1 + policy.explores)  # of either actor
  count = max(n for n in range(1, dreamer_config.POLICY_STEPS + 1) if own % n == 0)

  def improve(learned: tuple[Tree, Tree], index: jax.Array) -> tuple[tuple[Tree, Tree], Metrics]:
    params, opt_state = learned
    part, aims = policy.part((steps, targets), index, count, own)
    grads, metrics = gradient(params, part, aims._replace(weight=count * aims.weight))
    updates, opt_state = optimizer.update(grads, opt_state)
    faster = jax.tree.map(lambda x: dreamer_config.CRITIC_RATE * x, policy.critics(updates))
    metrics |= {'gradient_norm': optax.global_norm(grads)}
    return (optax.apply_updates(params, updates | faster), opt_state), metrics

  learned, metrics = jax.lax.scan(improve, learned, jnp.arange(count))
  return learned, jax.tree.map(jnp.mean, metrics)


def _sequence_keys(key: chex.PRNGKey, batch: int) -> tuple[jax.Array, jax.Array]:
  """Two arrays [batch] of keys for this device's sequences, by their positions in the global batch."""
  place = jax.lax.axis_index(devices_lib.DEVICES) * batch + jnp.arange(batch)
  sequence_keys = jax.vmap(lambda place: jax.random.fold_in(key, place))(place)
  keys = jax.vmap(jax.random.split)(sequence_keys)
  return keys[:, 0], keys[:, 1]


def _intrinsic_metrics(
  posterior: Any, novelty: jax.Array, motivation: intrinsic.Motivation
) -> Metrics:
  clean = novelty_lib.novelty_of('clean', posterior.priors.moments())
  return {
    'intrinsic/novelty': novelty.mean(),
    'intrinsic/novelty_fast': motivation.novelty_fast,
    'intrinsic/novelty_slow': motivation.novelty_slow,
    'intrinsic/clean_novelty': clean.mean(),
    'intrinsic/clean_novelty_positive': jnp.mean(clean > 0),
    'intrinsic/improvement': motivation.improvement,
    'intrinsic/boredom': motivation.boredom,
  }
