"""The dreamer's TrainState and one update, seen from one device.

One XLA program: world model, novelty, imagination, actor-critic, intrinsic state. Noise belongs to a
sequence and its place in the global batch, so the update does not depend on how many devices
share the batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import optax

from hephaestus.agents import experience, returns
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import dream, intrinsic
from hephaestus.learner import config as learner_config
from hephaestus.learner import devices as devices_lib

Tree = Any
Metrics = dict[str, jax.Array]
LAST = int(dm_env.StepType.LAST)


class TrainState(NamedTuple):
  """All that an update changes; equal on all replicas, so one of them is the whole checkpoint.

  Attributes:
    params: of 'world_model' and 'actor_critic', float32.
    slow_critic: a slow copy of the critic's parameters.
    model_opt_state: of the world model's optimizer.
    policy_opt_state: of the actor-critic's.
    intrinsic: novelty's averages and boredom.
    spread: what advantages are divided by.
    key: [2] uint32, data of a PRNG key: where a typed one is returned, pmap dispatches in Python.
    step: [] int32, updates done.
  """

  params: Tree
  slow_critic: Tree
  model_opt_state: Tree
  policy_opt_state: Tree
  intrinsic: intrinsic.IntrinsicState
  spread: returns.Spread
  key: jax.Array
  step: jax.Array


class Update(NamedTuple):
  """How a TrainState begins and changes.

  Attributes:
    init: key -> TrainState of one replica.
    update: (TrainState, Sequence [B, T, ...] of one device) -> (TrainState, metrics); to be run
      under an axis named DEVICES.
  """

  init: Callable[[chex.PRNGKey], TrainState]
  update: Callable[[TrainState, experience.Sequence], tuple[TrainState, Metrics]]


def make_optimizer(
  rate: float, max_gradient: float, config: learner_config.LearnerConfig
) -> optax.GradientTransformation:
  """Adam with a linear warm-up, its gradient clipped by global norm."""
  schedule = optax.linear_schedule(rate / config.rate_warm_up, rate, config.rate_warm_up)
  return optax.chain(
    optax.clip_by_global_norm(max_gradient), optax.adam(schedule, eps=config.adam_epsilon)
  )


def make_update(dreamer: dreamer_agent.Dreamer, config: learner_config.LearnerConfig) -> Update:
  """Builds the update of one agent."""
  learner = _Learner(
    dreamer,
    make_optimizer(config.model_learning_rate, learner_config.MODEL_MAX_GRADIENT, config),
    make_optimizer(config.policy_learning_rate, learner_config.POLICY_MAX_GRADIENT, config),
  )
  return Update(learner.init, learner.update)


class _Imagined(NamedTuple):
  """Experience of one update for the actor-critic: imagined, and replayed.

  Attributes:
    dream: imagined from steps of the batch.
    replayed: the batch.
    novelty_scale: [] float32, what novelty is divided by.
  """

  dream: dream.Dream
  replayed: ac.Replayed
  novelty_scale: jax.Array


@dataclasses.dataclass(frozen=True)
class _Learner:
  """An agent and its optimizers; each method is a phase of the update, seen from one device."""

  dreamer: dreamer_agent.Dreamer
  model_optimizer: optax.GradientTransformation
  policy_optimizer: optax.GradientTransformation

  def init(self, key: chex.PRNGKey) -> TrainState:
    """A TrainState at its beginning."""
    init_key, key = jax.random.split(key)
    params = self.dreamer.agent.init_params(init_key)
    return TrainState(
      params=params,
      # A copy: the state is donated, and no buffer may be donated twice.
      slow_critic=jax.tree.map(jnp.copy, params['actor_critic']['critic']),
      model_opt_state=self.model_optimizer.init(params['world_model']),
      policy_opt_state=self.policy_optimizer.init(params['actor_critic']),
      intrinsic=intrinsic.initial(),
      spread=returns.initial_spread(),
      key=jax.random.key_data(key),
      step=jnp.zeros((), jnp.int32),
    )

  def update(self, state: TrainState, sequence: experience.Sequence) -> tuple[TrainState, Metrics]:
    """One update, seen from one device; gradients are averaged over DEVICES."""
    config = self.dreamer.config
    sequence = experience.time_major(sequence)
    key, shared_key = jax.random.split(jax.random.wrap_key_data(state.key))
    model_keys, dream_keys = _sequence_keys(shared_key, sequence.identity.shape[0])
    state, posterior, model_metrics = self._improve_world_model(state, model_keys, sequence)

    novelty = intrinsic.NOVELTIES[config.novelty](*posterior.moments)
    # Until warm-up is over, the model is not worth imagining with; a dream of no steps costs nothing.
    warm = state.step >= config.warm_up_updates
    intrinsic_state, drives = intrinsic.update(
      state.intrinsic, devices_lib.over_devices(novelty.mean()), config, trained=warm
    )
    horizon = jnp.where(warm, drives.horizon, 0)
    imagined = self._imagine(state, posterior, novelty, dream_keys, sequence, horizon, drives)
    state, policy_metrics, dream_metrics = self._improve_actor_critic(state, imagined)

    metrics = {
      **{f'world_model/{name}': value for name, value in model_metrics.items()},
      **{f'actor_critic/{name}': value for name, value in policy_metrics.items()},
      **_intrinsic_metrics(posterior, novelty, drives),
      'dream/horizon': horizon.astype(jnp.float32),
      **{f'dream/{name}': value for name, value in dream_metrics.items()},
    }
    state = state._replace(
      key=jax.random.key_data(key), intrinsic=intrinsic_state, step=state.step + 1
    )
    return state, devices_lib.over_devices(metrics)

  def _improve_world_model(
    self, state: TrainState, keys: jax.Array, sequence: experience.Sequence
  ) -> tuple[TrainState, Any, Metrics]:
    """One step of the model's optimizer; also the posterior of the batch."""
    gradient = jax.value_and_grad(self.dreamer.model.loss, has_aux=True)
    (_, aux), grads = gradient(state.params['world_model'], keys, sequence)
    posterior, expected_reward, metrics = aux
    grads = devices_lib.over_devices(grads)
    updates, opt_state = self.model_optimizer.update(grads, state.model_opt_state)
    params = optax.apply_updates(state.params['world_model'], updates)
    counts = ~posterior.first
    metrics['gradient_norm'] = optax.global_norm(grads)
    metrics['kl_after_first'] /= devices_lib.over_devices(jnp.mean(counts))
    metrics['reward_correlation'] = returns.correlation(
      expected_reward, sequence.reward, counts, devices_lib.mean_total
    )
    state = state._replace(params=state.params | {'world_model': params}, model_opt_state=opt_state)
    return state, posterior, metrics

  def _imagine(self, state, posterior, novelty, keys, sequence, horizon, drives) -> _Imagined:
    """Imagination from steps of the batch, by the newest parameters."""
    config, policy = self.dreamer.config, self.dreamer.actor_critic
    last = sequence.step_type == LAST
    start, track = dream.starts(
      policy, posterior, last, novelty, keys, num_steps=config.starts_per_sequence
    )
    dreamt = dream.rollout(
      self.dreamer.model, policy, state.params, state.slow_critic, start, horizon
    )
    reward = sequence.reward + self._drive(novelty, drives.novelty_scale)
    replayed = ac.Replayed(posterior.latent.features, track, reward, sequence.discount, last)
    return _Imagined(dreamt, replayed, drives.novelty_scale)

  def _improve_actor_critic(
    self, state: TrainState, imagined: _Imagined
  ) -> tuple[TrainState, Metrics, Metrics]:
    """One step of the policy's optimizer; also metrics of the policy and of the dream."""
    dreamt = imagined.dream
    spread, scale, targets = self._targets(state.spread, imagined)
    params = state.params['actor_critic']
    grads, metrics = self._imagined_gradient(params, dreamt, targets)
    metrics['replayed_value_loss'], replayed_grads = self._replayed_gradient(state, imagined)
    grads = devices_lib.over_devices(jax.tree.map(jnp.add, grads, replayed_grads))
    updates, opt_state = self.policy_optimizer.update(grads, state.policy_opt_state)
    params = optax.apply_updates(params, updates)
    slow_critic = optax.incremental_update(
      params['critic'], state.slow_critic, dreamer_config.SLOW_CRITIC_RATE
    )
    metrics |= {'gradient_norm': optax.global_norm(grads), 'return_spread': scale}
    # Over steps as they are reached; steps imagined beyond a termination count for nothing.
    mean = lambda x: jnp.sum(targets.weight * x[1:].T)
    dream_metrics = {
      'reward': mean(dreamt.reward),
      'value': mean(dreamt.value),
      'novelty': mean(dreamt.novelty),
    }
    # During warm-up nothing of it changes: fed with zeros, Adam would begin with steps three times
    # as large as its rate.
    old = (state.params['actor_critic'], state.slow_critic, state.policy_opt_state, state.spread)
    params, slow_critic, opt_state, spread = jax.tree.map(
      lambda new, old: jnp.where(dreamt.horizon > 0, new, old),
      (params, slow_critic, opt_state, spread),
      old,
    )
    state = state._replace(
      params=state.params | {'actor_critic': params},
      slow_critic=slow_critic,
      policy_opt_state=opt_state,
      spread=spread,
    )
    return state, metrics, dream_metrics

  def _targets(
    self, spread: returns.Spread, imagined: _Imagined
  ) -> tuple[returns.Spread, jax.Array, ac.Targets]:
    """The new spread of returns, the advantages' scale, and targets [S, H] of imagined steps."""
    config, dreamt = self.dreamer.config, imagined.dream
    return_, weight = dream.returns_and_weights(
      dreamt,
      self._drive(dreamt.novelty, imagined.novelty_scale),
      gamma=config.gamma,
      lambda_=config.lambda_,
    )
    # Starts of weight 0 are left out: no data teaches the model what follows a termination, so
    # members disagree most there, and their novelty would set the scale of all others.
    first = jnp.where(dreamt.start.weight > 0, return_[0], jnp.nan)
    spread, scale = returns.update_spread(
      spread,
      jax.lax.all_gather(first, devices_lib.DEVICES),
      rate=dreamer_config.RETURN_RATE,
      floor=config.return_floor,
    )
    total = devices_lib.over_devices(weight.sum())
    targets = ac.Targets(
      return_=return_,
      advantage=(return_ - dreamt.value[:-1]) / scale,
      slow_value=dreamt.value[:-1],
      weight=weight / jnp.maximum(total, 1e-8),
    )
    return spread, scale, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), targets)

  def _imagined_gradient(
    self, params: Tree, dreamt: dream.Dream, targets: ac.Targets
  ) -> tuple[Tree, Metrics]:
    """Gradient and metrics of the actor-critic's loss, added up over chunks of imagined steps."""
    policy = self.dreamer.actor_critic
    track = dream.track(policy, dreamt)
    count = self.dreamer.config.steps_per_chunk

    def add_chunk(chunk: jax.Array, carry: tuple[Tree, Metrics]) -> tuple[Tree, Metrics]:
      first = chunk * count
      cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, count, axis=1)
      steps = dream.steps(policy, dreamt, track, first, count)
      (_, metrics), grads = jax.value_and_grad(policy.loss, has_aux=True)(
        params, steps, jax.tree.map(cut, targets)
      )
      return jax.tree.map(jnp.add, carry, (grads, metrics))

    steps = dream.steps(policy, dreamt, track, 0, count)
    first_targets = jax.tree.map(lambda x: x[:, :count], targets)
    empty = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(jax.grad(policy.loss, has_aux=True), params, steps, first_targets),
    )
    num_chunks = (dreamt.horizon + count - 1) // count  # those beyond the horizon cost nothing
    result: tuple[Tree, Metrics] = jax.lax.fori_loop(0, num_chunks, add_chunk, empty)
    return result

  def _replayed_gradient(self, state: TrainState, imagined: _Imagined) -> tuple[jax.Array, Tree]:
    """Loss and gradient of the critic on replayed steps."""
    scale = self.dreamer.config.replayed_value_scale

    def loss(params: Tree) -> jax.Array:
      return scale * self.dreamer.actor_critic.replayed_value_loss(
        params, state.slow_critic, imagined.replayed
      )

    result: tuple[jax.Array, Tree] = jax.value_and_grad(loss)(state.params['actor_critic'])
    return result

  def _drive(self, novelty: jax.Array, scale: jax.Array) -> jax.Array:
    """Intrinsic reward of novelty."""
    return self.dreamer.config.novelty_scale * novelty / (scale + 1e-8)


def _sequence_keys(key: chex.PRNGKey, batch: int) -> tuple[jax.Array, jax.Array]:
  """Two keys for each sequence of this device, which follow from its place in the global batch."""
  place = jax.lax.axis_index(devices_lib.DEVICES) * batch + jnp.arange(batch)
  sequence_keys = jax.vmap(lambda place: jax.random.fold_in(key, place))(place)
  keys = jax.vmap(jax.random.split)(sequence_keys)
  return keys[:, 0], keys[:, 1]


def _intrinsic_metrics(posterior: Any, novelty: jax.Array, drives: intrinsic.Drives) -> Metrics:
  clean = intrinsic.clean_novelty(*posterior.moments)
  return {
    'intrinsic/novelty': novelty.mean(),
    'intrinsic/novelty_fast': drives.novelty_fast,
    'intrinsic/novelty_slow': drives.novelty_mean,
    'intrinsic/clean_novelty': clean.mean(),
    'intrinsic/clean_novelty_positive': jnp.mean(clean > 0),
    'intrinsic/competence': drives.competence,
    'intrinsic/boredom': drives.boredom,
  }
