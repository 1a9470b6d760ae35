"""Unrolls and updates in one compiled program: one machine, and an environment in JAX."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.learner import checkpoint as checkpoint_lib
from hephaestus.learner import devices as devices_lib
from hephaestus.learner import loop, ppo_update

Tree = Any
DEVICES = devices_lib.DEVICES
SECONDS_PER_CALL = 1.0  # the run does not react for so long, unless one update takes longer
_EPISODES = ('episodes', 'episode_return', 'episode_length')

_OTHER_ENVIRONMENTS = (
  'the saved environments do not fit actor.num_envs: all begin new episodes, with the parameters that '
  'were learned'
)
_OLD_MOMENTS = (
  "; Adam's moments are calibrated for the batches of before: add --reset-moments to reset them"
)


class Environments(NamedTuple):
  """The unroll of one device; handed over by `launch/`, since acting belongs to `actors/`.

  Attributes:
    init: key -> state of this device's environments, leaves [n, ...].
    unroll: (params, key, state, version, actor id) -> (state, Sequence [n, T, ...], Episodes).
    num_envs: N, on all devices together.
    num_steps: that an unroll takes in each of them, T - 1.
  """

  init: Callable[[chex.PRNGKey], Tree]
  unroll: Callable[..., tuple[Tree, Any, Any]]
  num_envs: int
  num_steps: int


class FusedState(NamedTuple):
  """The whole state of a run, environments included, so that it resumes bitwise.

  Attributes:
    train: equal on all devices.
    key: [2] uint32, data of the PRNG key of the unrolls, equal on all devices.
    `worlds`: states of this device's environments, under their name in checkpoints.
  """

  train: ppo_update.TrainState
  key: jax.Array
  worlds: Tree


class Memory(NamedTuple):
  """Bytes that a run needs on each device, estimated.

  Attributes:
    state: parameters, the optimizer's moments, and the environments.
    batch: the most that one update holds besides.
  """

  state: int
  batch: int


class Resume(NamedTuple):
  """How a run may differ from the one that saved its checkpoint.

  Attributes:
    reset_moments: whether the optimizer is reset.
    warn: takes a warning when the environments do.
  """

  reset_moments: bool = False
  warn: Callable[[str], None] = lambda text: None


class Program:
  """Unroll and update, several times over, as one program on some devices.

  `compile` comes before `iterate`: a compiled program cannot be traced again, so other shapes are an
  error.

  Args:
    update: of the agent.
    acting_params: params -> what acts.
    environments: of each device.
    devices: that share the environments.

  Attributes:
    steps_per_update: of all environments.
    devices: as given.
    scale: of the update.
  """

  def __init__(
    self,
    update: ppo_update.Update,
    acting_params: Callable[[Tree], Tree],
    environments: Environments,
    devices: list[jax.Device],
  ):
    self._update = update
    self._acting_params = acting_params
    self._environments = environments
    self.devices = devices
    self.scale = update.scale
    self.steps_per_update = environments.num_envs * environments.num_steps
    self._mapped = jax.pmap(
      self.unroll_and_update,
      axis_name=DEVICES,
      in_axes=(0, None),
      donate_argnums=0,
      devices=devices,
    )
    self._call: Any = None
    self._gather = jax.jit(self._gathered)
    self._acting = jax.jit(
      lambda params: jax.tree.map(lambda x: jnp.copy(x[0]), acting_params(params))
    )

  def _iterate(self, state: FusedState) -> tuple[FusedState, loop.Metrics]:
    """One unroll and one update, seen from one device."""
    key, shared_key = jax.random.split(jax.random.wrap_key_data(state.key))
    unroll_key = jax.random.fold_in(shared_key, jax.lax.axis_index(DEVICES))
    acting = self._acting_params(state.train.params)
    env_state, sequence, episodes = self._environments.unroll(
      acting, unroll_key, state.worlds, state.train.step, 0
    )
    train, metrics = self._update.update(state.train, sequence)
    ended = episodes.ended.astype(jnp.float32)
    played = {
      'episodes': ended.sum(),
      'episode_return': jnp.sum(ended * episodes.episode_return),
      'episode_length': jnp.sum(ended * episodes.episode_length),
    }
    metrics |= devices_lib.over_devices(played, jax.lax.psum)
    return FusedState(train, jax.random.key_data(key), env_state), metrics

  def unroll_and_update(
    self, state: FusedState, count: jax.Array
  ) -> tuple[FusedState, loop.Metrics]:
    """`count` iterations, which is data and no shape; metrics are sums over them."""

    def body(_: jax.Array, carry: tuple[FusedState, loop.Metrics]):
      state, sums = carry
      state, metrics = self._iterate(state)
      return state, jax.tree.map(jnp.add, sums, metrics)

    _, shapes = jax.eval_shape(self._iterate, state)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    result: tuple[FusedState, loop.Metrics] = jax.lax.fori_loop(0, count, body, (state, sums))
    return result

  def memory(self) -> Memory:
    """An estimate by shapes alone, before anything is compiled.

    An update holds the most where steps are flattened from sequences, of which there are two copies
    for a moment; or else at a gradient, with all steps, a minibatch, and half of the residuals, for
    the rest is fused away. `compile` returns the compiler's figure.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    train = jax.eval_shape(self._update.init, key)
    envs = jax.eval_shape(self._environments.init, key)
    acting = jax.eval_shape(self._acting_params, train.params)
    _, sequence, _ = jax.eval_shape(self._environments.unroll, acting, key, envs, train.step, 0)
    used = self._update.footprint(train.params, sequence)
    return Memory(
      state=ppo_update.num_bytes((train, envs)),
      batch=max(
        ppo_update.num_bytes(sequence) + 2 * used.steps + used.forward,
        used.steps + used.minibatch + used.residuals // 2,
      ),
    )

  def compile(self) -> int:
    """Compiles what `iterate` runs; returns the bytes that it takes on each device."""
    state = jax.eval_shape(self._scatter, self.shapes())
    self._call = self._mapped.lower(state, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    used = self._call.memory_analysis()
    return 0 if used is None else used.argument_size_in_bytes + used.temp_size_in_bytes

  def init(self, key: jax.Array) -> FusedState:
    """A whole run's state: one replica of what is equal on all devices, and the environments of all of them."""
    state: FusedState = devices_lib.jit_once(self._init)(key)
    return state

  def _init(self, key: jax.Array) -> FusedState:
    train_key, unroll_key, envs_key = jax.random.split(key, 3)
    envs = jax.vmap(self._environments.init)(jax.random.split(envs_key, len(self.devices)))
    envs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), envs)
    return FusedState(self._update.init(train_key), jax.random.key_data(unroll_key), envs)

  def shapes(self) -> FusedState:
    """Shapes and dtypes of a whole run's state."""
    return jax.eval_shape(self._init, jax.eval_shape(lambda: jax.random.key(0)))

  def _scatter(self, state: FusedState) -> FusedState:
    count = len(self.devices)
    copy = lambda x: jnp.broadcast_to(x, (count, *x.shape))
    share = lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:])
    return FusedState(
      jax.tree.map(copy, state.train), copy(state.key), jax.tree.map(share, state.worlds)
    )

  def _gathered(self, state: FusedState) -> FusedState:
    join = lambda x: jnp.copy(x.reshape(-1, *x.shape[2:]))
    first = lambda x: jnp.copy(x[0])
    return FusedState(
      jax.tree.map(first, state.train), first(state.key), jax.tree.map(join, state.worlds)
    )

  def place(self, whole: FusedState) -> FusedState:
    """A whole run's state, on the devices."""
    state: FusedState = devices_lib.put(jax.jit(self._scatter)(whole), self.devices)
    return state

  def gather(self, state: FusedState) -> FusedState:
    """The inverse of `place`, as a copy."""
    whole: FusedState = self._gather(state)
    return whole

  def acting(self, state: FusedState) -> Tree:
    """Acting parameters, copied from one replica."""
    return self._acting(state.train.params)

  def iterate(self, state: FusedState, count: int) -> tuple[FusedState, loop.Metrics]:
    """`count` updates; metrics are sums over them, [D] and equal on all devices."""
    result: tuple[FusedState, loop.Metrics] = self._call(state, np.int32(count))
    return result


class Unrolled(loop.Source):
  """Makes its own batches, in calls of about a second.

  Args:
    program: compiled.
    max_environment_steps: the last update is the first that reaches it.
    resume: how the run may differ from its checkpoint; None: as by default.
  """

  def __init__(self, program: Program, *, max_environment_steps: int, resume: Resume | None = None):
    self._program = program
    self._max_environment_steps = max_environment_steps
    self._resume = resume or Resume()
    self._environment_step = 0
    self._seconds_per_update = SECONDS_PER_CALL

  def init(self, key: jax.Array) -> FusedState:
    return self._program.init(key)

  def shapes(self) -> FusedState:
    return self._program.shapes()

  def restore(
    self, checkpointer: checkpoint_lib.Checkpointer, key: jax.Array
  ) -> tuple[FusedState, int] | None:
    """As `Source.restore`; environments are reset where there are others, moments on request."""
    restored = checkpointer.restore(self.shapes(), may_differ=('worlds',))
    if restored is None:
      return None
    state, step = restored
    if state.worlds is None or self._resume.reset_moments:
      fresh = self.init(jax.random.fold_in(key, step))
      if state.worlds is None:
        state = state._replace(worlds=fresh.worlds)
        warning = '' if self._resume.reset_moments else _OLD_MOMENTS
        self._resume.warn(_OTHER_ENVIRONMENTS + warning)
      if self._resume.reset_moments:
        state = state._replace(train=state.train._replace(opt_state=fresh.train.opt_state))
    return state, step

  def place(self, whole: FusedState, step: int) -> FusedState:
    del step
    self._environment_step = ppo_update.environment_step(whole.train)
    return self._program.place(whole)

  def gather(self, state: FusedState) -> FusedState:
    return self._program.gather(state)

  def acting_params(self, state: FusedState) -> Tree:
    return self._program.acting(state)

  @property
  def environment_step(self) -> int:
    """As the train state has it, without asking the device."""
    return self._environment_step

  def ready(self, timeout_seconds: float) -> bool:
    del timeout_seconds
    return True

  def update(self, state: FusedState, step: int, most: int) -> tuple[FusedState, loop.Done]:
    del step
    began = time.monotonic()
    missing = self._max_environment_steps - self._environment_step
    most = max(1, min(most, -(-missing // self._program.steps_per_update)))
    count = min(most, max(1, int(SECONDS_PER_CALL / self._seconds_per_update)))
    state, metrics = self._program.iterate(state, count)
    jax.block_until_ready(metrics)
    self._seconds_per_update = (time.monotonic() - began) / count
    self._environment_step += count * self._program.steps_per_update
    return state, loop.Done(count, metrics)

  def report(self, span: loop.Span, totals: Mapping[str, float]) -> dict[str, Any]:
    """Throughput, the episodes that ended and their means, and metrics of an average update."""
    episodes = totals['episodes']
    mean = lambda name: totals[name] / episodes if episodes else None
    rest = {name: total for name, total in totals.items() if name not in _EPISODES}
    return {
      'steps_per_second': span.updates * self._program.steps_per_update / span.seconds,
      'episodes': int(episodes),
      'episode_return': mean('episode_return'),
      'episode_length': mean('episode_length'),
      **loop.means(rest, span),
    }

  def close(self) -> None:
    """Does nothing: no other node is involved."""
