"""The dreamer's TrainState and one update, seen from one device.

One XLA program: world model, novelty, dream, actor-critic, intrinsic state. Noise belongs to a
sequence and its place in the global batch, so the update does not depend on how many devices
share the batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import optax

from hephaestus.agents import experience
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import dream, intrinsic
from hephaestus.learner import config as learner_config

Tree = Any
Metrics = dict[str, jax.Array]
DEVICES = 'devices'
"""The name of the axis over devices, within and between hosts."""

LAST = int(dm_env.StepType.LAST)


def over_devices(tree: Tree, reduce: Callable[..., Tree] = jax.lax.pmean) -> Tree:
  """Means over DEVICES, or sums by `jax.lax.psum`.

  Of one device they are what is given: XLA's CPU would still have it meet with itself, 258 times in
  an update of PPO.
  """
  return tree if jax.lax.axis_size(DEVICES) == 1 else reduce(tree, DEVICES)


def correlation(expected: jax.Array, real: jax.Array, counts: jax.Array) -> jax.Array:
  """Pearson's correlation over the rows of all devices.

  Args:
    expected: [...] float32.
    real: [...] float32.
    counts: [...] bool, which rows count.

  Returns:
    [] float32. Where all that came is alike there is nothing to know: 1. Where only what was expected
    is, nothing is known: 0.
  """
  total = lambda x: over_devices(jnp.sum(x))
  weight = counts / jnp.maximum(total(counts.astype(jnp.float32)), 1e-8)

  def centred(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is left of x without its mean, its variance, and whether that is more than rounding."""
    left = x - total(weight * x)
    variance = total(weight * jnp.square(left))
    return left, variance, variance > 1e-10 * total(weight * jnp.square(x))

  expected, expected_variance, differs = centred(expected)
  real, real_variance, varies = centred(real)
  scale = jnp.where(differs & varies, jnp.sqrt(expected_variance) * jnp.sqrt(real_variance), 1.0)
  known = jnp.where(differs, total(weight * expected * real) / scale, 0.0)
  return jnp.where(varies, known, 1.0)


def replicate(tree: Tree, devices: list[jax.Device]) -> Tree:
  """A copy for each device, [D, ...], as `pmap` over them takes it."""
  copies: Tree = jax.pmap(lambda _, tree: tree, in_axes=(0, None), devices=devices)(
    jnp.arange(len(devices)), tree
  )
  return copies


def jit_once(function: Callable[..., Tree]) -> Callable[..., Tree]:
  """`jax.jit` of what runs once: a CPU's compiler would optimise it for longer than it takes."""
  options = {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None
  return jax.jit(function, compiler_options=options)


class Spread(NamedTuple):
  """A slow average of the 5 to 95 % range of returns.

  Attributes:
    value: [] float32, biased.
    num_updates: [] int32.
  """

  value: jax.Array
  num_updates: jax.Array


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
  spread: Spread
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
  """Builds the update of one agent; choices of config are made here, not inside the trace."""
  agent_config, model, policy = dreamer.config, dreamer.model, dreamer.actor_critic
  novelty_of = intrinsic.NOVELTIES[agent_config.novelty]
  window = agent_config.window
  model_optimizer = make_optimizer(config.model_learning_rate, config.model_max_gradient, config)
  policy_optimizer = make_optimizer(config.policy_learning_rate, config.policy_max_gradient, config)

  def init(key: chex.PRNGKey) -> TrainState:
    init_key, key = jax.random.split(key)
    params = dreamer.agent.init_params(init_key)
    return TrainState(
      params=params,
      # A copy: the state is donated, and no buffer may be donated twice.
      slow_critic=jax.tree.map(jnp.copy, params['actor_critic']['critic']),
      model_opt_state=model_optimizer.init(params['world_model']),
      policy_opt_state=policy_optimizer.init(params['actor_critic']),
      intrinsic=intrinsic.initial(),
      spread=Spread(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)),
      key=jax.random.key_data(key),
      step=jnp.zeros((), jnp.int32),
    )

  def improve_world_model(state: TrainState, keys: jax.Array, sequence: experience.Sequence):
    gradient = jax.value_and_grad(model.loss, has_aux=True)
    (_, aux), grads = gradient(state.params['world_model'], keys, sequence)
    posterior, expected_reward, metrics = aux
    grads = over_devices(grads)
    updates, opt_state = model_optimizer.update(grads, state.model_opt_state)
    params = optax.apply_updates(state.params['world_model'], updates)
    metrics['gradient_norm'] = optax.global_norm(grads)
    metrics['kl_after_first'] /= over_devices(jnp.mean(~posterior.first))
    metrics['reward_correlation'] = correlation(expected_reward, sequence.reward, ~posterior.first)
    state = state._replace(params=state.params | {'world_model': params}, model_opt_state=opt_state)
    return state, posterior, metrics

  def measure_spread(spread: Spread, return_: jax.Array, weight: jax.Array):
    """The spread of the returns of all devices' starts, and what to divide advantages by.

    Starts of weight 0 are left out: nothing ever taught the model what follows the end of an episode,
    so members disagree most there, and what novelty pays for it would set the scale of all others.
    """
    everyone = jax.lax.all_gather(jnp.where(weight > 0, return_, jnp.nan), DEVICES)
    low, high = jnp.nanpercentile(everyone, jnp.array([5.0, 95.0]))
    change = jnp.where(jnp.isnan(high), 0.0, high - low - spread.value)  # NaN: none is left
    value = spread.value + agent_config.return_rate * change
    spread = Spread(value, spread.num_updates + 1)
    correction = 1 - (1 - agent_config.return_rate) ** spread.num_updates
    return spread, jnp.maximum(agent_config.return_floor, spread.value / correction)

  def improve_actor_critic(
    state: TrainState,
    dreamt: dream.Dream,
    replayed: dream.Past,
    sequence: experience.Sequence,
    novelty_scale: jax.Array,
  ):
    drive = lambda novelty: agent_config.novelty_scale * novelty / (novelty_scale + 1e-8)
    since_start = lambda x: jnp.swapaxes(x[:, window - 1 :], 0, 1)
    return_, weight = dream.returns_and_weights(
      dreamt,
      drive(since_start(dreamt.novelty)),
      gamma=agent_config.gamma,
      lambda_=agent_config.lambda_,
    )
    awake = dreamt.horizon > 0
    spread, scale = measure_spread(state.spread, return_[0], dreamt.weight)
    total = over_devices(weight.sum())
    targets = ac.Targets(
      return_=return_,
      advantage=(return_ - dreamt.value[:-1]) / scale,
      slow_value=dreamt.value[:-1],
      weight=weight / jnp.maximum(total, 1e-8),
    )
    targets = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), targets)
    params = state.params['actor_critic']
    count = agent_config.steps_per_chunk

    def add_chunk(chunk, carry):
      """Adds the gradient of one chunk of rows; chunks beyond the horizon are never visited."""
      first = chunk * count
      cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, count, axis=1)
      rows = dream.rows(dreamt, first, count, window)
      (_, metrics), grads = jax.value_and_grad(policy.loss, has_aux=True)(
        params, rows, jax.tree.map(cut, targets)
      )
      return jax.tree.map(jnp.add, carry, (grads, metrics))

    rows = dream.rows(dreamt, 0, count, window)
    first_targets = jax.tree.map(lambda x: x[:, :count], targets)
    empty = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(jax.grad(policy.loss, has_aux=True), params, rows, first_targets),
    )
    num_chunks = (dreamt.horizon + count - 1) // count
    grads, metrics = jax.lax.fori_loop(0, num_chunks, add_chunk, empty)

    last = sequence.step_type == LAST
    reward = sequence.reward + drive(since_start(replayed.novelty))
    replayed_window = ac.Window(replayed.features, replayed.novelty, replayed.episode)

    def replayed_loss(params):
      return agent_config.replayed_value_scale * policy.replayed_value_loss(
        params, state.slow_critic, replayed_window, replayed.novelty, reward,
        sequence.discount, last,
      )  # fmt: skip

    metrics['replayed_value_loss'], replayed_grads = jax.value_and_grad(replayed_loss)(params)
    grads = over_devices(jax.tree.map(jnp.add, grads, replayed_grads))
    updates, opt_state = policy_optimizer.update(grads, state.policy_opt_state)
    params = optax.apply_updates(params, updates)
    slow_critic = optax.incremental_update(
      params['critic'], state.slow_critic, agent_config.slow_critic_rate
    )
    metrics |= {'gradient_norm': optax.global_norm(grads), 'return_spread': scale}
    # Of rows as they arrive; what is dreamt behind the end of an episode is no dream of anything.
    dreamt_mean = lambda x: jnp.sum(targets.weight * x[1:].T)
    dream_metrics = {
      'reward': dreamt_mean(dreamt.reward),
      'value': dreamt_mean(dreamt.value),
      'novelty': dreamt_mean(since_start(dreamt.novelty)),
    }
    # Asleep, nothing of it changes: fed with zeros, Adam would wake the actor by steps three times
    # as large as its rate.
    improved = (params, slow_critic, opt_state, spread)
    asleep = (
      state.params['actor_critic'], state.slow_critic, state.policy_opt_state, state.spread
    )  # fmt: skip
    params, slow_critic, opt_state, spread = jax.tree.map(
      lambda new, old: jnp.where(awake, new, old), improved, asleep
    )
    state = state._replace(
      params=state.params | {'actor_critic': params},
      slow_critic=slow_critic,
      policy_opt_state=opt_state,
      spread=spread,
    )
    return state, metrics, dream_metrics

  def update(state: TrainState, sequence: experience.Sequence) -> tuple[TrainState, Metrics]:
    """One update, seen from one device; gradients are averaged over DEVICES."""
    sequence = experience.time_major(sequence)
    batch = sequence.identity.shape[0]
    key, shared_key = jax.random.split(jax.random.wrap_key_data(state.key))
    place = jax.lax.axis_index(DEVICES) * batch + jnp.arange(batch)
    sequence_keys = jax.vmap(lambda place: jax.random.fold_in(shared_key, place))(place)
    keys = jax.vmap(jax.random.split)(sequence_keys)
    state, posterior, model_metrics = improve_world_model(state, keys[:, 0], sequence)

    novelty = novelty_of(*posterior.moments)
    # The actor sleeps until the model is worth dreaming in: a dream of no rows costs nothing.
    awake = state.step >= agent_config.warm_up_updates
    intrinsic_state, drives = intrinsic.update(
      state.intrinsic, over_devices(novelty.mean()), agent_config, awake=awake
    )
    horizon = jnp.where(awake, drives.horizon, 0)
    last = sequence.step_type == LAST
    start = dream.starts(
      posterior, last, novelty, keys[:, 1], num_rows=agent_config.starts_per_sequence, window=window
    )
    dreamt = dream.rollout(model, policy, state.params, state.slow_critic, start, horizon)
    replayed = dream.past(posterior, novelty, window)
    state, policy_metrics, dream_metrics = improve_actor_critic(
      state, dreamt, replayed, sequence, drives.novelty_scale
    )

    clean = intrinsic.clean_novelty(*posterior.moments)
    metrics = {
      **{f'world_model/{name}': value for name, value in model_metrics.items()},
      **{f'actor_critic/{name}': value for name, value in policy_metrics.items()},
      'intrinsic/novelty': novelty.mean(),
      'intrinsic/novelty_fast': drives.novelty_fast,
      'intrinsic/novelty_slow': drives.novelty_mean,
      'intrinsic/clean_novelty': clean.mean(),
      'intrinsic/clean_novelty_positive': jnp.mean(clean > 0),
      'intrinsic/competence': drives.competence,
      'intrinsic/boredom': drives.boredom,
      'dream/horizon': horizon.astype(jnp.float32),
      **{f'dream/{name}': value for name, value in dream_metrics.items()},
    }
    state = state._replace(
      key=jax.random.key_data(key), intrinsic=intrinsic_state, step=state.step + 1
    )
    return state, over_devices(metrics)

  return Update(init, update)
