"""Unrolls and updates in one compiled program: one machine, and an environment in JAX.

`stepped` has the sub-classes for environments that are stepped on the host.

An on-policy update learns from the unroll before it. An off-policy update learns from a batch of a
replay in device memory, to which unrolls are added while the replay ratio allows no update.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import agent as agent_lib
from hephaestus.learner import checkpoint as checkpoint_lib
from hephaestus.learner import devices as devices_lib
from hephaestus.learner import loop
from hephaestus.learner.sources import staleness
from hephaestus.replay import buffer as buffer_lib

Tree = Any
DEVICES = devices_lib.DEVICES
SECONDS_PER_CALL = 1.0  # the run does not react for so long, unless one update takes longer
EPISODES = (
  'episodes', 'episode_return', 'episode_length', 'explorer_episodes', 'explorer_return',
  'ended_episodes', 'broken_rewards',
)  # fmt: skip

_OTHER_ENVIRONMENTS = (
  'the saved environments do not fit actor.num_envs, or this version: all begin new episodes, with the '
  'parameters that were learned'
)


def counted(episodes: Any) -> dict[str, jax.Array]:
  """Sums over the episodes that ended in an unroll, [] float32 by name; `episodes` are its Episodes.

  Episodes in which the explorer acted count by themselves, too.
  """
  own = episodes.reported
  explored = episodes.ended & episodes.explored
  total = lambda ended, x: jnp.sum(jnp.where(ended, x, 0.0), dtype=jnp.float32)
  return {
    'episodes': total(own, 1.0),
    'episode_return': total(own, episodes.episode_return),
    'episode_length': total(own, episodes.episode_length),
    'explorer_episodes': total(explored, 1.0),
    'explorer_return': total(explored, episodes.episode_return),
    'ended_episodes': total(episodes.ended, 1.0),
    **{name: total(own, values) for name, values in episodes.metrics.items()},
  }


class ReplayState(NamedTuple):
  """The replay of one device."""

  buffer: buffer_lib.Buffer  # this device's sequences
  # [] int32, grows by `ReplaySizes.rate.numerator` for each sequence after warm-up; each update needs and
  # takes `ReplaySizes.rate.denominator`. Exact, and equal on all devices.
  credit: jax.Array


class FusedState(NamedTuple):
  """The whole state of a run, environments included, so that it resumes bitwise."""

  train: Any  # the agent's train state, equal on all devices
  key: jax.Array  # [2] uint32, `key_data` of the key of unrolls and samples, equal on all devices
  worlds: Tree  # states of this device's environments; () if they are stepped on the host
  # A ReplayState; () for an on-policy agent. In a copy on the host, as in checkpoints, its buffer has only
  # the slots that hold sequences. On the devices, sequences [n, T, ...] of the last unroll if the agent is
  # on-policy and its environments are stepped on the host.
  replay: Tree = ()


class FusedProgram:
  """A loop of unrolls and updates, as one compiled program on some devices; `compile` comes before `iterate`.

  Args:
    update: the agent's `loop.Update`; of an on-policy agent, its `loop.FusedUpdate`.
    acting_params: params -> acting params.
    unroll: functions that reset and unroll the environments of one device, a `rollout.Unroll` of actors/.
    devices: devices that share environments, replay and batches.
    replay: sizes of the replay; None for an on-policy agent, which learns from each unroll once.
    num_envs: number of environments on all devices together.
    num_steps: environment steps that an unroll takes in each of them, T - 1.

  Raises:
    ValueError: the update lacks what a run in one process reads.

  Attributes:
    sums: names of the metrics that are sums over episodes, not over updates.
  """

  def __init__(
    self,
    update: Any,
    acting_params: Callable[[Tree], Tree],
    unroll: Any,
    devices: list[jax.Device],
    replay: buffer_lib.ReplaySizes | None = None,
    *,
    num_envs: int,
    num_steps: int,
  ):
    self.update = update
    self._acting_params = acting_params
    self.unroll = unroll
    self.devices = devices
    self.replay = replay
    self.num_envs, self.num_steps = num_envs, num_steps
    self.sums = (*EPISODES, *unroll.metrics)
    train = self._check_update()
    acting = jax.eval_shape(acting_params, agent_lib.all_params(train))
    # Of one sequence, from those of an unroll.
    self._schema = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), unroll.shapes(acting)
    )
    self._mapped = devices_lib.mapped(self.unroll_and_update, devices, in_axes=(0, None))
    self._call: Any = None
    self._shapes: FusedState | None = None
    self._gather = jax.jit(self._gathered)
    self._acting = jax.jit(
      lambda params: jax.tree.map(lambda x: jnp.copy(x[0]), acting_params(params))
    )

  def _iterate(self, state: FusedState) -> tuple[FusedState, loop.Metrics]:
    """One update and the unrolls before it, on one device; returns the next state, and metrics."""
    if self.replay is None:
      state, sequence, episodes = self._unroll(state)
    else:
      state, sequence, episodes = self._sample(state)
    train, metrics = self.update.update(state.train, sequence)
    metrics |= devices_lib.over_devices(episodes, jax.lax.psum)
    return state._replace(train=train), metrics

  def _unroll(self, state: FusedState) -> tuple[FusedState, Any, loop.Metrics]:
    """One unroll; returns the next state, sequences [n, T, ...], and sums over episodes that ended."""
    key, shared_key = jax.random.split(jax.random.wrap_key_data(state.key))
    unroll_key = jax.random.fold_in(shared_key, jax.lax.axis_index(DEVICES))
    acting = self._acting_params(agent_lib.all_params(state.train))
    env_state, sequence, episodes = self.unroll.unroll(
      acting, unroll_key, state.worlds, state.train.step, 0
    )
    if self.unroll.explores:  # everywhere means on all devices
      everywhere = jax.lax.pmin(episodes.everywhere.astype(jnp.int32), DEVICES) > 0
      episodes = episodes._replace(everywhere=everywhere)
    played = counted(episodes) | {
      'broken_rewards': jnp.sum(~jnp.isfinite(sequence.reward[:, 1:]), dtype=jnp.float32)
    }
    return state._replace(key=jax.random.key_data(key), worlds=env_state), sequence, played

  def _store(self, stored: ReplayState, sequence: Any) -> ReplayState:
    """Adds sequences [n, T, ...] to the replay of one device, with the updates that they allow."""
    before, replay = stored.buffer, self.replay
    assert replay is not None
    after = buffer_lib.add(before, sequence)
    beyond = lambda buffer: jnp.maximum(0, len(self.devices) * buffer.inserted - replay.warm_up)
    earned = replay.rate.numerator * (beyond(after) - beyond(before))
    return ReplayState(after, stored.credit + earned)

  def _sample(self, state: FusedState) -> tuple[FusedState, Any, loop.Metrics]:
    """Unrolls until an update is allowed, then samples; as `_unroll`, but returns a batch [b, T, ...]."""
    train, replay = state.train, self.replay
    assert replay is not None

    def collect(carry: tuple[FusedState, loop.Metrics]) -> tuple[FusedState, loop.Metrics]:
      state, totals = carry
      state, sequence, played = self._unroll(state._replace(train=train))
      stored = self._store(state.replay, sequence)
      # Without the train state: it does not change, and the loop would carry it.
      state = state._replace(train=(), replay=stored)
      return state, jax.tree.map(jnp.add, totals, played)

    state, played = jax.lax.while_loop(
      lambda carry: carry[0].replay.credit < replay.rate.denominator,
      collect,
      (state._replace(train=()), {name: jnp.zeros((), jnp.float32) for name in self.sums}),
    )
    state, batch = self._draw(state)
    return state._replace(train=train), batch, played

  def _draw(self, state: FusedState) -> tuple[FusedState, Any]:
    """Samples a batch [b, T, ...] on one device, which takes the credit of one update."""
    count, replay = len(self.devices), self.replay
    assert replay is not None
    key, shared_key = jax.random.split(jax.random.wrap_key_data(state.key))
    device = jax.lax.axis_index(DEVICES)
    sizes = jnp.asarray(np.minimum(replay.sizes, replay.capacity) // count).reshape(count, -1)
    batch = buffer_lib.sample(
      state.replay.buffer, jax.random.fold_in(shared_key, device), sizes[device]
    )
    paid = state.replay._replace(credit=state.replay.credit - replay.rate.denominator)
    return state._replace(key=jax.random.key_data(key), replay=paid), batch

  def unroll_and_update(
    self, state: FusedState, count: jax.Array
  ) -> tuple[FusedState, loop.Metrics]:
    """Does `count` updates, a traced number; returns the next state, and sums of their metrics."""
    iterate = jax.jit(self._iterate, inline=True)  # traced once for both uses

    def body(_: jax.Array, carry: tuple[FusedState, loop.Metrics]):
      state, sums = carry
      state, metrics = iterate(state)
      return state, jax.tree.map(jnp.add, sums, metrics)

    _, shapes = jax.eval_shape(iterate, state)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    result: tuple[FusedState, loop.Metrics] = jax.lax.fori_loop(0, count, body, (state, sums))
    return result

  def _check_update(self) -> Any:
    """Shapes of the train state; ValueError if the update lacks what a run in one process reads."""
    fields, functions = ['params', 'step'], []
    if self.replay is None:
      fields, functions = [*fields, 'opt_state'], ['environment_step']
    train = jax.eval_shape(self.update.init, jax.eval_shape(lambda: jax.random.key(0)))
    lacking = [
      *(f'the function {name}' for name in functions if not hasattr(self.update, name)),
      *(f'the field {name} of its train state' for name in fields if not hasattr(train, name)),
    ]
    if lacking:
      raise ValueError(
        f"learner.fused=True: the agent's update lacks {', '.join(lacking)}; see docs/agents.md, or use "
        '--no-fused'
      )
    return train

  def _replay_shapes(self) -> Any:
    """Shapes of the replay on the devices, [D, ...]."""
    if self.replay is None:
      return ()
    count, capacity = len(self.devices), self.replay.capacity
    empty = lambda: buffer_lib.init(self._schema, capacity // count)
    each = jax.eval_shape(lambda: ReplayState(empty(), jnp.zeros((), jnp.int32)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), each)

  def lower(self) -> Any:
    """Lowers the program of `iterate` for the platform of the devices; returns a `jax.stages.Lowered`."""
    whole, count = self.shapes(), len(self.devices)
    train, key = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), (whole.train, whole.key)
    )
    envs = jax.eval_shape(self._shared, whole.worlds)
    state = FusedState(train, key, envs, self._replay_shapes())
    return self._mapped.lower(state, jax.ShapeDtypeStruct((), jnp.int32))

  def compile(self) -> int:
    """Compiles the program of `iterate`; returns its bytes on each device, 0 if unknown."""
    self._call = self.lower().compile()
    used = self._call.memory_analysis()
    return 0 if used is None else used.argument_size_in_bytes + used.temp_size_in_bytes

  def init(self, key: jax.Array) -> FusedState:
    """A whole run's first state: one replica of train state and key, and the environments of all devices."""
    state: FusedState = devices_lib.jit_once(self._init)(key)
    return state

  def _init(self, key: jax.Array) -> FusedState:
    train_key, unroll_key, envs_key = jax.random.split(key, 3)
    envs = self._init_envs(envs_key)
    state = FusedState(self.update.init(train_key), jax.random.key_data(unroll_key), envs)
    if self.replay is None:
      return state
    empty = ReplayState(buffer_lib.init(self._schema, 0), jnp.zeros((), jnp.int32))
    return state._replace(replay=empty)

  def _init_envs(self, key: jax.Array) -> Tree:
    envs = jax.vmap(self.unroll.init)(jax.random.split(key, len(self.devices)))
    return jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), envs)

  def shapes(self) -> FusedState:
    """Shapes and dtypes of a whole run's state; its replay is an empty one."""
    if self._shapes is None:
      self._shapes = jax.eval_shape(self._init, jax.eval_shape(lambda: jax.random.key(0)))
    return self._shapes

  def _shared(self, worlds: Tree) -> Tree:
    count = len(self.devices)
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), worlds)

  def _scatter_replay(self, replay: ReplayState, capacity: int) -> ReplayState:
    count = len(self.devices)
    parts = buffer_lib.scatter(jax.device_get(replay.buffer), capacity, count)
    pad = jax.pmap(lambda part: buffer_lib.pad(part, capacity // count), devices=self.devices)
    credit = np.full(count, replay.credit, np.int32)
    return ReplayState(
      pad(devices_lib.put(parts, self.devices)), devices_lib.put(credit, self.devices)
    )

  def _gathered(self, state: FusedState) -> FusedState:
    join = lambda x: jnp.copy(jax.lax.collapse(x, 0, 2))
    first = lambda x: jnp.copy(x[0])
    return FusedState(
      jax.tree.map(first, state.train), first(state.key), jax.tree.map(join, state.worlds)
    )

  def place(self, whole: FusedState) -> FusedState:
    """Puts the state of a whole run on the devices: train state and key on each, all else divided."""
    train, key = devices_lib.replicate((whole.train, whole.key), self.devices)
    worlds = jax.jit(self._shared)(whole.worlds)
    state = FusedState(train, key, devices_lib.put(worlds, self.devices))
    if self.replay is None:
      return state
    return state._replace(replay=self._scatter_replay(whole.replay, self.replay.capacity))

  def gather(self, state: FusedState) -> FusedState:
    """Copies a state on the devices to a whole run's state: the inverse of `place`."""
    whole: FusedState = self._gather(state._replace(replay=()))
    if self.replay is None:
      return whole
    parts = [part_of(state.replay, index) for index in range(len(self.devices))]
    buffer = buffer_lib.gather([part.buffer for part in parts])
    return whole._replace(replay=ReplayState(buffer, parts[0].credit))

  def acting(self, state: FusedState) -> Tree:
    """Acting parameters, copied from one replica."""
    return self._acting(agent_lib.all_params(state.train))

  def environment_step(self, state: FusedState) -> int:
    """Environment steps collected in the whole run, read from a state on the devices."""
    if self.replay is None:
      return int(self.update.environment_step(part_of(state.train, 0)))
    inserted = int(part_of(state.replay.buffer.inserted, 0))
    return inserted * len(self.devices) * self.num_steps

  def updates_left(self, environment_step: int, step: int, max_environment_steps: int) -> int:
    """Number of updates until the end of a run, whose last unroll is the first to reach the run's steps.

    So far `environment_step` steps were collected, and `step` updates were done.
    """
    steps_per_unroll = self.num_envs * self.num_steps
    unrolls = max(0, -(-(max_environment_steps - environment_step) // steps_per_unroll))
    if self.replay is None:
      return unrolls
    steps = environment_step + unrolls * steps_per_unroll
    return max(0, self.replay.updates(steps // self.num_steps) - step)

  def iterate(self, state: FusedState, count: int) -> tuple[FusedState, loop.Metrics]:
    """Does `count` updates; returns the next state, and sums of metrics, [D] and equal on all devices."""
    result: tuple[FusedState, loop.Metrics] = self._call(state, np.int32(count))
    return result


def part_of(tree: Tree, index: int) -> Any:
  """Host arrays of one device's part of [D, ...]; views of its memory on a CPU."""
  return jax.tree.map(lambda x: np.asarray(x.addressable_data(index)).reshape(x.shape[1:]), tree)


class Unrolled(loop.Source):
  """Source that makes its own batches by unrolls on the devices, in calls of about a second.

  Args:
    program: the compiled program of unrolls and updates.
    max_environment_steps: environment steps of the run; the last update is the first to reach them.
    warn: called with a text if the saved environments do not fit, and are therefore reset.
  """

  phase = 'collecting and updating'

  def __init__(
    self,
    program: FusedProgram,
    *,
    max_environment_steps: int,
    warn: Callable[[str], None] = lambda text: None,
  ):
    self._program = program
    self._max_environment_steps = max_environment_steps
    self._warn = warn
    self._environment_step = 0
    self._versions: Any = ()  # of the replay's sequences, in the newest state
    self._seconds_per_update = SECONDS_PER_CALL

  def init(self, key: jax.Array) -> FusedState:
    return self._program.init(key)

  def shapes(self) -> FusedState:
    return self._program.shapes()

  def restore(
    self, checkpointer: checkpoint_lib.Checkpointer, key: jax.Array
  ) -> tuple[FusedState, int] | None:
    """As `Source.restore`; resets environments that do not fit."""
    restored = checkpointer.restore(
      self.shapes(), may_differ=('worlds',), any_length=('replay.buffer.storage',)
    )
    if restored is None:
      return None
    state, step = restored
    if state.worlds is None:
      state = state._replace(worlds=self.init(jax.random.fold_in(key, step)).worlds)
      self._warn(_OTHER_ENVIRONMENTS)
    return state, step

  def place(self, whole: FusedState, step: int) -> FusedState:
    del step
    state = self._program.place(whole)
    self._environment_step = self._program.environment_step(state)
    return state

  def gather(self, state: FusedState) -> FusedState:
    return self._program.gather(state)

  def acting_params(self, state: FusedState) -> Tree:
    return self._program.acting(state)

  @property
  def environment_step(self) -> int:
    """Environment steps collected until the last call of `update`, without asking the device."""
    return self._environment_step

  def ready(self, timeout_seconds: float) -> bool:
    del timeout_seconds
    return True

  @property
  def experience(self) -> int:
    """As `Source.experience`: replay is in the state."""
    return self._environment_step

  def is_over(self, step: int, max_environment_steps: int) -> bool:
    """Whether no update is left, so that the end of a run does not depend on the lengths of calls."""
    return not self._program.updates_left(self._environment_step, step, max_environment_steps)

  def update(self, state: FusedState, step: int, most: int) -> tuple[FusedState, loop.Done]:
    began = time.monotonic()
    left = self._program.updates_left(self._environment_step, step, self._max_environment_steps)
    count = max(1, min(most, left, int(SECONDS_PER_CALL / self._seconds_per_update)))
    state, metrics = jax.block_until_ready(self._program.iterate(state, count))
    self._seconds_per_update = (time.monotonic() - began) / count
    before, self._environment_step = (
      self._environment_step, self._program.environment_step(state),
    )  # fmt: skip
    if broken := int(part_of(metrics['broken_rewards'], 0)):
      raise FloatingPointError(
        f'environment steps {before + 1:,} to {self._environment_step:,}: {broken:,} rewards of the '
        'environment are not finite; mend its reward, then the run resumes from its last checkpoint'
      )
    if self._program.replay is not None:
      self._keep_versions(state)
    return state, loop.Done(count, metrics)

  def _keep_versions(self, state: FusedState) -> None:
    """Keeps what a report reads of the replay, until the state is donated."""
    self._versions = state.replay.buffer._replace(storage=state.replay.buffer.storage.version)

  def report(self, span: loop.Interval, totals: Mapping[str, float]) -> dict[str, Any]:
    """Throughput, replay ratio and ages of sequences, means over episodes, and means over updates.

    Episodes are those in which only the policy of the task acted, or all while the explorer acts in all
    environments; `explorer_return` is the mean of all episodes in which the explorer acted, and
    `episodes_per_minute` counts both.
    """
    episodes, explored = totals['episodes'], totals['explorer_episodes']
    mean = lambda name: totals[name] / episodes if episodes else None
    rest = {name: total for name, total in totals.items() if name not in self._program.sums}
    return {
      'steps_per_second': span.environment_steps / span.seconds,
      'episodes_per_minute': 60 * totals['ended_episodes'] / span.seconds,
      **self._replay_report(span),
      'episodes': int(episodes),
      'episode_return': mean('episode_return'),
      'episode_length': mean('episode_length'),
      **{name: mean(name) for name in self._program.unroll.metrics},
      **({'explorer_return': totals['explorer_return'] / explored} if explored else {}),
      **loop.means(rest, span),
    }

  def _replay_report(self, span: loop.Interval) -> dict[str, float]:
    replay = self._program.replay
    if replay is None:
      return {}
    num_steps = self._program.num_steps
    collected = self._environment_step - replay.warm_up * num_steps
    return {
      'replay_ratio': span.step * len(replay.sizes) * num_steps / max(1, collected),
      'replayed_steps_per_second': span.updates * len(replay.sizes) * num_steps / span.seconds,
      **staleness.stored(
        part_of(self._versions, 0), replay.strata, span.step, num_devices=len(self._program.devices)
      ),
    }
