"""PPO's TrainState and one update, seen from one device: epochs over shuffled minibatches.

Also how many minibatches and epochs suit how many environments. The shuffle belongs to an environment and its
place in the global batch, so the update does not depend on how many devices share the batch.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from hephaestus.agents import experience, masked_ppo
from hephaestus.learner import config as learner_config
from hephaestus.learner import dreamer_update

Tree = Any
Metrics = dict[str, jax.Array]
DEVICES = dreamer_update.DEVICES

# Where the published numbers of PPO were found: 256 environments, 128 steps.
REFERENCE_STEPS = 256 * 128
REFERENCE_MINIBATCHES, REFERENCE_EPOCHS = 4, 4
REFERENCE_RATE = 2.5e-4
MINIBATCH_STEPS = REFERENCE_STEPS // REFERENCE_MINIBATCHES
LEAST_EPOCHS = 2


class Scale(NamedTuple):
  """How often an unroll is learned from, and how fast.

  Attributes:
    num_minibatches: of each epoch, M.
    num_epochs: E.
    learning_rate: of Adam, before annealing.
  """

  num_minibatches: int
  num_epochs: int
  learning_rate: float


def auto_scale(
  config: learner_config.PPOLearnerConfig,
  *,
  num_envs: int,
  num_steps: int,
  num_devices: int = 1,
  recurrent: bool = False,
) -> Scale:
  """Minibatches, epochs and learning rate for a number of environments, unless they are set by hand.

  With more environments a minibatch keeps to about 8,192 steps: more of them make an epoch, and fewer
  epochs follow, down to 2, so that the number of gradient steps stays while it can. The rate is
  inverse to that number.

    | environments x steps | minibatches | epochs | gradient steps | rate    |
    | 256 x 128      | 4           | 4      | 16             | 2.5e-4  |
    | 512 x 128      | 8           | 2      | 16             | 2.5e-4  |
    | 2,048 x 128    | 32          | 2      | 64             | 6.25e-5 |

  Args:
    config: whose numbers go first, where it has any.
    num_envs: N, over all devices.
    num_steps: of each environment in an unroll.
    num_devices: that share the environments.
    recurrent: whether minibatches are of whole streams and not of single rows.

  Raises:
    ValueError: environments or rows do not divide; names the field and the nearest that would.
  """
  if num_envs % num_devices:
    near = max(1, round(num_envs / num_devices)) * num_devices
    raise ValueError(
      f'actor.num_envs={num_envs}: does not divide over {num_devices} devices; {near} would'
    )
  local = num_envs // num_devices
  fits = lambda count: local % worlds_per_block(count, num_steps, recurrent) == 0
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


def worlds_per_block(num_minibatches: int, num_steps: int, recurrent: bool) -> int:
  """How many neighbouring environments are shuffled among each other.

  Each block gives equally much to each minibatch. Rows of one environment are shuffled by themselves
  where they divide among the minibatches; else those of as few environments together as do.
  """
  if recurrent:
    return num_minibatches
  return math.lcm(num_minibatches, num_steps) // num_steps


class TrainState(NamedTuple):
  """All that an update changes; equal on all replicas.

  Attributes:
    params: of the network, float32.
    opt_state: of its optimizer.
    key: [2] uint32, data of a PRNG key: where a typed one is returned, pmap dispatches in Python.
    step: [] int32, updates done, each of one unroll.
    environment_step: [2] uint32, steps learned from by all devices, the low and the high half.
  """

  params: Tree
  opt_state: Tree
  key: jax.Array
  step: jax.Array
  environment_step: jax.Array


def environment_step(state: TrainState) -> int:
  """Steps that one replica has learned from."""
  low, high = (int(half) for half in jax.device_get(state.environment_step))
  return (high << 32) + low


def _advance(halves: jax.Array, count: int) -> jax.Array:
  """[2] uint32 and a number below 2**32; 32 bits alone are full within an hour on a fast machine."""
  low = halves[0] + jnp.uint32(count)
  return jnp.stack([low, halves[1] + (low < halves[0])])


class Footprint(NamedTuple):
  """Bytes of what an update holds on one device besides its state.

  Attributes:
    rows: of one batch.
    minibatch: of those, at a time.
    residuals: that the gradient of a minibatch would keep if no operation were fused with another.
    forward: of a pass over all rows, that only a memory needs; 0 without.
  """

  rows: int
  minibatch: int
  residuals: int
  forward: int


def num_bytes(tree: Tree) -> int:
  """Of all arrays of a tree, or of their shapes; keys are small, and not counted."""
  is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if not is_key(x))


class Update(NamedTuple):
  """How a TrainState begins and changes.

  Attributes:
    init: key -> TrainState of one replica.
    update: (TrainState, Sequence [B, T, ...] of one device) -> (TrainState, metrics); to be run
      under an axis named DEVICES.
    footprint: (params, Sequence [B, T, ...]) -> Footprint, of their shapes.
    scale: minibatches, epochs and learning rate.
  """

  init: Callable[[chex.PRNGKey], TrainState]
  update: Callable[[TrainState, experience.Sequence], tuple[TrainState, Metrics]]
  footprint: Callable[[Tree, experience.Sequence], Footprint]
  scale: Scale


def make_update(
  ppo: masked_ppo.PPO,
  config: learner_config.PPOLearnerConfig,
  scale: Scale,
  *,
  max_environment_steps: int | None = None,
  delayed: bool = False,
) -> Update:
  """Builds the update of one agent.

  Args:
    ppo: the agent.
    config: of the optimizer.
    scale: minibatches, epochs and rate.
    max_environment_steps: at which an annealed rate is 0; None to keep it.
    delayed: whether those who acted may have had parameters of some updates ago.
  """
  network = ppo.network
  recurrent = bool(ppo.config.recurrent_size)
  num_minibatches, num_epochs, full_rate = scale
  optimizer = optax.chain(
    optax.clip_by_global_norm(config.max_gradient), optax.scale_by_adam(eps=config.adam_epsilon)
  )

  def learning_rate(state: TrainState) -> jax.Array:
    """By environment steps and not by updates, of which other numbers of environments make others.

    All gradient steps of one unroll have the same.
    """
    rate = jnp.float32(full_rate)
    if not config.anneal or max_environment_steps is None:
      return rate
    low, high = state.environment_step.astype(jnp.float32)
    return rate * jnp.maximum(0.0, 1.0 - (low + 2.0**32 * high) / max_environment_steps)

  def init(key: chex.PRNGKey) -> TrainState:
    init_key, key = jax.random.split(key)
    params = ppo.agent.init_params(init_key)
    return TrainState(
      params=params,
      opt_state=optimizer.init(params),
      key=jax.random.key_data(key),
      step=jnp.zeros((), jnp.int32),
      environment_step=jnp.zeros(2, jnp.uint32),
    )

  def shuffle(key: chex.PRNGKey, num_envs: int, num_steps: int) -> jax.Array:
    """[E M, R] int32, places in a batch of this device: of streams, or of environment-major rows."""
    block = worlds_per_block(num_minibatches, num_steps, recurrent)
    count = num_envs // block
    size = block if recurrent else block * num_steps
    places = jax.lax.axis_index(DEVICES) * count + jnp.arange(count)
    keys = jax.vmap(lambda place: jax.random.fold_in(key, place))(places)
    bits = jax.vmap(lambda key: jax.random.bits(key, (num_epochs, size)))(keys)
    order = jnp.argsort(bits, axis=-1) + size * jnp.arange(count)[:, None, None]
    order = order.reshape(count, num_epochs * num_minibatches, size // num_minibatches)
    return jnp.swapaxes(order, 0, 1).reshape(num_epochs * num_minibatches, -1)

  def pick(rows: masked_ppo.Rows, memory: Tree, places: jax.Array):
    """One minibatch: whole streams, or rows of a batch that is flat already."""
    axis = 1 if recurrent else 0
    rows = jax.tree.map(lambda x: jnp.take(x, places, axis=axis, mode='clip'), rows)
    return rows, jax.tree.map(lambda x: jnp.take(x, places, axis=0, mode='clip'), memory)

  def normalise(rows: masked_ppo.Rows) -> masked_ppo.Rows:
    """Advantages to mean 0 and deviation 1, weights to sum 1, over a minibatch of all devices.

    Weights sum to 1 on average over the devices, so the mean of their gradients is the gradient.
    """
    total = lambda x: dreamer_update.over_devices(jnp.sum(x))
    weight = rows.weight / jnp.maximum(total(rows.weight), 1e-8)
    centred = rows.advantage - total(weight * rows.advantage)
    deviation = jnp.sqrt(total(weight * jnp.square(centred)))
    return rows._replace(advantage=centred / (deviation + 1e-8), weight=weight)

  def update(state: TrainState, sequence: experience.Sequence) -> tuple[TrainState, Metrics]:
    """One update, seen from one device; gradients are averaged over DEVICES."""
    sequence = experience.time_major(sequence)
    key, shuffle_key = jax.random.split(jax.random.wrap_key_data(state.key))
    rate = learning_rate(state)
    batch = network.rows(state.params, sequence, delayed=delayed)
    num_steps, num_envs = batch.weight.shape
    order = shuffle(shuffle_key, num_envs, num_steps)
    rows = batch
    if not recurrent:
      # Time-major is how they lie already; so places are turned, and not the rows.
      rows = _flat(batch)
      order = order % num_steps * num_envs + order // num_steps

    def step(carry, places):
      params, opt_state = carry
      minibatch, memory = pick(rows, sequence.initial_state, places)
      (_, metrics), grads = jax.value_and_grad(network.loss, has_aux=True)(
        params, normalise(minibatch), memory
      )
      grads = dreamer_update.over_devices(grads)
      updates, opt_state = optimizer.update(grads, opt_state, params)
      updates = jax.tree.map(lambda x: -rate * x, updates)
      metrics['gradient_norm'] = optax.global_norm(grads)
      return (optax.apply_updates(params, updates), opt_state), metrics

    (params, opt_state), metrics = jax.lax.scan(step, (state.params, state.opt_state), order)
    metrics = {f'ppo/{name}': value.mean() for name, value in metrics.items()}
    metrics |= {
      'ppo/explained_variance': explained_variance(batch),
      'ppo/value': jnp.mean(batch.value),
      'ppo/return': jnp.mean(batch.return_),
      'ppo/learning_rate': rate,
    }
    if batch.mask is not None:
      nothing_legal = ~batch.mask.any(-1) & (batch.weight > 0)
      metrics['ppo/nothing_legal'] = jnp.mean(nothing_legal.astype(jnp.float32))
    state = TrainState(
      params=params,
      opt_state=opt_state,
      key=jax.random.key_data(key),
      step=state.step + 1,
      environment_step=_advance(
        state.environment_step, num_steps * num_envs * jax.lax.axis_size(DEVICES)
      ),
    )
    return state, dreamer_update.over_devices(metrics)

  def footprint(params: Tree, sequence: experience.Sequence) -> Footprint:
    def split(params: Tree, sequence: experience.Sequence):
      sequence = experience.time_major(sequence)
      rows, memory = network.rows(params, sequence), sequence.initial_state
      if recurrent:
        part = lambda x: x[:, : x.shape[1] // num_minibatches]
        return rows, (jax.tree.map(part, rows), jax.tree.map(lambda x: part(x[None])[0], memory))
      part = lambda x: x[: x.shape[0] // num_minibatches]
      return rows, (jax.tree.map(part, _flat(rows)), memory)

    def residuals(params: Tree, minibatch: tuple[masked_ppo.Rows, Tree]):
      return jax.vjp(lambda params: network.loss(params, *minibatch)[0], params)[1]

    rows, minibatch = jax.eval_shape(split, params, sequence)
    kept = num_bytes(jax.eval_shape(residuals, params, minibatch))
    return Footprint(
      rows=num_bytes(rows),
      minibatch=num_bytes(minibatch),
      residuals=kept,
      forward=num_minibatches * kept // 6 if recurrent else 0,  # measured: see docs/design.md
    )

  return Update(init, update, footprint, scale)


def _flat(rows: masked_ppo.Rows) -> masked_ppo.Rows:
  """[T, B, ...] rows, some of which may have no numbers, as [T B, ...]."""
  return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), rows)


def explained_variance(rows: masked_ppo.Rows) -> jax.Array:
  """1 - Var[G - v] / Var[G] over the rows of all devices: 1 for a critic that knows, 0 for a mean."""
  total = lambda x: dreamer_update.over_devices(jnp.sum(x))
  weight = rows.weight / jnp.maximum(total(rows.weight), 1e-8)

  def variance(x: jax.Array) -> jax.Array:
    return total(weight * jnp.square(x - total(weight * x)))

  return 1.0 - variance(rows.return_ - rows.value) / jnp.maximum(variance(rows.return_), 1e-8)
