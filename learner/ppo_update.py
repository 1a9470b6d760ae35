"""PPO's TrainState and one update, seen from one device: epochs over shuffled minibatches.

Also the numbers of minibatches and epochs that suit a number of environments. The shuffle of an
environment's steps follows from its position in the global batch, so the update does not depend on
how many devices share the batch.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import optax

from hephaestus.agents import experience, masked_ppo, returns
from hephaestus.learner import config as learner_config
from hephaestus.learner import devices as devices_lib

Tree = Any
Metrics = dict[str, jax.Array]

# PPO's published settings: 256 environments, 128 steps.
REFERENCE_STEPS = 256 * 128
REFERENCE_MINIBATCHES, REFERENCE_EPOCHS = 4, 4
REFERENCE_RATE = 2.5e-4
MINIBATCH_STEPS = REFERENCE_STEPS // REFERENCE_MINIBATCHES
LEAST_EPOCHS = 2
RETURN_RATE = 0.01  # of the running mean square of returns


class Scale(NamedTuple):
  """Minibatches, epochs and learning rate of one unroll."""

  num_minibatches: int  # M, of each epoch
  num_epochs: int  # E, over each unroll
  learning_rate: float  # of Adam, before annealing


def auto_scale(
  config: learner_config.PPOLearnerConfig,
  *,
  num_envs: int,
  num_steps: int,
  num_devices: int = 1,
  recurrent: bool = False,
) -> Scale:
  """Chooses minibatches, epochs and learning rate for a number of environments.

  A minibatch keeps about 8,192 steps. With more environments an epoch has more minibatches, and there
  are fewer epochs, down to 2, so that the number of gradient steps stays at 16 while it can. Beyond
  16, the learning rate is inverse to that number.

    | environments x steps | minibatches | epochs | gradient steps | rate    |
    | 256 x 128      | 4           | 4      | 16             | 2.5e-4  |
    | 512 x 128      | 8           | 2      | 16             | 2.5e-4  |
    | 2,048 x 128    | 32          | 2      | 64             | 6.25e-5 |

  Args:
    config: its numbers that are not None take precedence.
    num_envs: N, number of environments on all devices.
    num_steps: number of steps of each environment in an unroll.
    num_devices: number of devices that share the environments.
    recurrent: whether minibatches consist of whole streams (environments), not of single steps.

  Raises:
    ValueError: environments or steps do not divide; the message names the nearest that would.
  """
  if num_envs % num_devices:
    near = max(1, round(num_envs / num_devices)) * num_devices
    raise ValueError(
      f'actor.num_envs={num_envs}: does not divide over {num_devices} devices; {near} would'
    )
  local = num_envs // num_devices
  fits = lambda count: local % envs_per_block(count, num_steps, recurrent) == 0
  # A minibatch is shared by all devices and has something of each.
  largest = local if recurrent else local * num_steps
  feasible = [count for count in range(1, min(largest, 4096) + 1) if fits(count)]
  nearest = lambda count: min(feasible, key=lambda other: (abs(math.log(other / count)), -other))

  steps = num_envs * num_steps
  minibatches = config.num_minibatches
  if minibatches is None:
    minibatches = nearest(max(REFERENCE_MINIBATCHES, round(steps / MINIBATCH_STEPS)))
  elif minibatches not in feasible:
    raise ValueError(
      f'learner.num_minibatches={minibatches}: does not divide {local} environments of {num_steps} steps '
      f'on each device{" into whole streams" if recurrent else ""}; {nearest(minibatches)} would'
    )
  epochs = config.num_epochs
  if epochs is None:
    fewer = round(REFERENCE_EPOCHS * REFERENCE_STEPS / steps)
    epochs = min(REFERENCE_EPOCHS, max(LEAST_EPOCHS, fewer))
  rate = config.learning_rate
  if rate is None:
    reference = REFERENCE_MINIBATCHES * REFERENCE_EPOCHS
    rate = REFERENCE_RATE * reference / max(reference, minibatches * epochs)
  return Scale(minibatches, epochs, rate)


def envs_per_block(num_minibatches: int, num_steps: int, recurrent: bool) -> int:
  """Number of neighbouring environments, a block, whose steps are shuffled together.

  A block is the smallest number of environments whose steps divide among the minibatches. If whole
  streams are shuffled (`recurrent`), it has one for each minibatch.
  """
  if recurrent:
    return num_minibatches
  return math.lcm(num_minibatches, num_steps) // num_steps


class TrainState(NamedTuple):
  """All that an update changes; equal on all replicas.

  Attributes:
    params: float32 parameters of the network.
    opt_state: state of its optimizer.
    key: [2] uint32, `key_data` of a PRNG key: pmap dispatches in Python where it returns a typed key.
    step: [] int32, number of updates done, each of one unroll.
    environment_step: [2] uint32, number of environment steps learned from by all devices: the low and
      the high 32 bits.
    return_square: running mean square of returns; the critic predicts returns divided by its root.
  """

  params: Tree
  opt_state: Tree
  key: jax.Array
  step: jax.Array
  environment_step: jax.Array
  return_square: returns.Average


def environment_step(state: TrainState) -> int:
  """Number of environment steps learned from, on all devices together; `state` is one replica."""
  low, high = (int(half) for half in jax.device_get(state.environment_step))
  return (high << 32) + low


def _advance(halves: jax.Array, count: int) -> jax.Array:
  """Adds a number below 2**32 to [2] uint32; 32 bits overflow within an hour on a fast machine."""
  low = halves[0] + jnp.uint32(count)
  return jnp.stack([low, halves[1] + (low < halves[0])])


def make_update(
  ppo: masked_ppo.PPO,
  config: learner_config.PPOLearnerConfig,
  scale: Scale,
  *,
  max_environment_steps: int | None = None,
  delayed: bool = False,
) -> 'PPOUpdate':
  """Builds the update of a PPO agent.

  Args:
    ppo: the agent.
    config: settings of the optimizer.
    scale: see `auto_scale`.
    max_environment_steps: number of environment steps at which an annealed learning rate reaches 0;
      None keeps the rate constant.
    delayed: whether actors may have had parameters of some updates ago, see `masked_ppo`.
  """
  optimizer = optax.chain(
    optax.clip_by_global_norm(config.max_gradient), optax.scale_by_adam(eps=config.adam_epsilon)
  )
  anneal_until = max_environment_steps if config.anneal else None
  return PPOUpdate(ppo, optimizer, scale, anneal_until, delayed)


@dataclasses.dataclass(frozen=True)
class PPOUpdate:
  """PPO's `loop.FusedUpdate`: an agent, its optimizer and the scale of its updates."""

  ppo: masked_ppo.PPO
  optimizer: optax.GradientTransformation  # clipping and Adam, without the learning rate
  scale: Scale
  anneal_until: int | None  # environment steps, see `make_update`
  delayed: bool

  environment_step = staticmethod(environment_step)

  @property
  def _recurrent(self) -> bool:
    return bool(self.ppo.config.recurrent_size)

  def init(self, key: chex.PRNGKey) -> TrainState:
    """Makes a TrainState before its first update."""
    init_key, key = jax.random.split(key)
    params = self.ppo.agent.init_params(init_key)
    return TrainState(
      params=params,
      opt_state=self.optimizer.init(params),
      key=jax.random.key_data(key),
      step=jnp.zeros((), jnp.int32),
      environment_step=jnp.zeros(2, jnp.uint32),
      return_square=returns.no_average(),
    )

  def update(self, state: TrainState, sequence: experience.Sequence) -> tuple[TrainState, Metrics]:
    """One update, seen from one device; gradients and metrics are averaged over DEVICES."""
    sequence = experience.time_major(sequence)
    key, shuffle_key = jax.random.split(jax.random.wrap_key_data(state.key))
    rate = self._learning_rate(state)
    average, unit = self._return_unit(state.return_square, sequence)
    sequence = sequence._replace(reward=sequence.reward / unit)
    batch = self.ppo.network.steps(state.params, sequence, delayed=self.delayed)
    num_steps, num_envs = batch.weight.shape
    order = self._shuffle(shuffle_key, num_envs, num_steps)
    steps = batch
    if not self._recurrent:
      # The steps are time-major already; so the indices are converted, and not the steps.
      steps = _flat(batch)
      order = order % num_steps * num_envs + order // num_steps
    params, opt_state, metrics = self._epochs(state, steps, sequence.initial_state, rate, order)
    state = TrainState(
      params=params,
      opt_state=opt_state,
      key=jax.random.key_data(key),
      step=state.step + 1,
      environment_step=_advance(
        state.environment_step, num_steps * num_envs * jax.lax.axis_size(devices_lib.DEVICES)
      ),
      return_square=average,
    )
    metrics = {f'ppo/{name}': value.mean() for name, value in metrics.items()}
    metrics |= _batch_metrics(batch, unit) | {'ppo/learning_rate': rate}
    return state, devices_lib.over_devices(metrics)

  def _return_unit(
    self, average: returns.Average, sequence: experience.Sequence
  ) -> tuple[returns.Average, jax.Array]:
    """The next running mean square of returns, and its root, by which rewards are divided.

    The returns are of the rewards of a sequence alone, without the critic. Engstrom et al. (2020),
    "Implementation matters in deep policy gradients", section 3: without it the value loss of small
    rewards is nothing beside the critic's initial outputs, and that of large ones exceeds what it can learn.
    """
    last, zero = sequence.step_type == dm_env.StepType.LAST, jnp.zeros_like(sequence.reward)
    return_ = returns.lambda_returns(
      sequence.reward, sequence.discount, zero,
      gamma=self.ppo.config.gamma, lambda_=1.0, bootstrap_t=last,
    )  # fmt: skip
    square = devices_lib.over_devices(jnp.mean(jnp.square(return_)))
    average, square = returns.update_average(average, square, rate=RETURN_RATE)
    return average, jnp.sqrt(jnp.where(square > 0, square, 1.0))

  def _learning_rate(self, state: TrainState) -> jax.Array:
    """Learning rate of an unroll, annealed by environment steps: updates depend on `num_envs`."""
    rate = jnp.float32(self.scale.learning_rate)
    if self.anneal_until is None:
      return rate
    low, high = state.environment_step.astype(jnp.float32)
    return rate * jnp.maximum(0.0, 1.0 - (low + 2.0**32 * high) / self.anneal_until)

  def _shuffle(self, key: chex.PRNGKey, num_envs: int, num_steps: int) -> jax.Array:
    """[E M, R] int32: indices of the R streams, or environment-major steps, of E x M minibatches."""
    num_minibatches, num_epochs, _ = self.scale
    block = envs_per_block(num_minibatches, num_steps, self._recurrent)
    count = num_envs // block
    size = block if self._recurrent else block * num_steps
    places = jax.lax.axis_index(devices_lib.DEVICES) * count + jnp.arange(count)
    keys = jax.vmap(lambda place: jax.random.fold_in(key, place))(places)
    bits = jax.vmap(lambda key: jax.random.bits(key, (num_epochs, size)))(keys)
    order = jnp.argsort(bits, axis=-1) + size * jnp.arange(count)[:, None, None]
    order = order.reshape(count, num_epochs * num_minibatches, size // num_minibatches)
    return jnp.swapaxes(order, 0, 1).reshape(num_epochs * num_minibatches, -1)

  def _epochs(
    self,
    state: TrainState,
    steps: masked_ppo.Steps,
    memory: Tree,
    rate: jax.Array,
    order: jax.Array,
  ) -> tuple[Tree, Tree, Metrics]:
    """A gradient step for each minibatch; returns parameters, optimizer state, and metrics [E M].

    `memory` holds the GRU's states before the first step, and `order` is the result of `_shuffle`.
    """

    def gradient_step(carry: tuple[Tree, Tree], places: jax.Array):
      params, opt_state = carry
      minibatch, states = self._pick(steps, memory, places)
      (_, metrics), grads = jax.value_and_grad(self.ppo.network.loss, has_aux=True)(
        params, _normalise(minibatch), states
      )
      grads = devices_lib.over_devices(grads)
      updates, opt_state = self.optimizer.update(grads, opt_state, params)
      updates = jax.tree.map(lambda x: -rate * x, updates)
      metrics['gradient_norm'] = optax.global_norm(grads)
      return (optax.apply_updates(params, updates), opt_state), metrics

    carry, metrics = jax.lax.scan(gradient_step, (state.params, state.opt_state), order)
    return *carry, metrics

  def _pick(self, steps: masked_ppo.Steps, memory: Tree, places: jax.Array):
    """One minibatch, of whole streams or of steps of a flat batch, and the GRU states before its streams."""
    axis = 1 if self._recurrent else 0
    steps = jax.tree.map(lambda x: jnp.take(x, places, axis=axis, mode='clip'), steps)
    return steps, jax.tree.map(lambda x: jnp.take(x, places, axis=0, mode='clip'), memory)


def _normalise(steps: masked_ppo.Steps) -> masked_ppo.Steps:
  """Scales a minibatch's advantages to mean 0 and deviation 1 over all devices, and its weights.

  A device's weights sum to 1 on average over the devices, so the mean of the devices' gradients is
  the gradient of the whole minibatch.
  """
  total = devices_lib.mean_total
  weight = steps.weight / jnp.maximum(total(steps.weight), 1e-8)
  advantage = returns.standardise(steps.advantage, weight, total)
  return steps._replace(advantage=advantage, weight=weight)


def _batch_metrics(batch: masked_ppo.Steps, unit: jax.Array) -> Metrics:
  """Metrics of a batch before it is learned from; `unit` [] is that of its returns and values."""
  total, weight = devices_lib.mean_total, batch.weight
  # LAST steps, at which there is neither return nor value, have no weight.
  mean = lambda x: jnp.sum(weight * x) / jnp.maximum(total(weight), 1e-8)
  metrics = {
    'ppo/explained_variance': returns.explained_variance(batch.return_, batch.value, weight, total),
    'ppo/value': unit * mean(batch.value),
    'ppo/return': unit * mean(batch.return_),
  }
  if batch.mask is not None:
    nothing_legal = ~batch.mask.any(-1) & (batch.weight > 0)
    metrics['ppo/nothing_legal'] = jnp.mean(nothing_legal.astype(jnp.float32))
  return metrics


def _flat(steps: masked_ppo.Steps) -> masked_ppo.Steps:
  """Flattens steps [T, B, ...] to [T B, ...]; also leaves of size 0."""
  return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), steps)
