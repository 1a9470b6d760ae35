"""One machine and an environment in JAX: unrolls and updates in one compiled program, and its run."""

import collections
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from hephaestus.learner import checkpoint as checkpoint_lib
from hephaestus.learner import config as learner_config
from hephaestus.learner import dreamer_update, ppo_update
from hephaestus.learner import profile as profile_lib

Tree = Any
DEVICES = ppo_update.DEVICES
SECONDS_PER_CALL = 1.0  # at most so long the run does not answer, unless one update takes longer
WINDOW = 16  # rows of metrics over which a trend is judged


class Worlds(NamedTuple):
  """How experience is made on one device; handed over by `launch/`, since acting is not our room.

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
  """All of a run; with all its environments, so that it goes on as if it had never stopped.

  Attributes:
    train: equal on all devices.
    key: [2] uint32, data of the PRNG key of the unrolls, equal on all devices.
    environments: of this device.
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


class Fused:
  """Unroll and update, several times over, as one program on some devices.

  `compile` comes before `iterate`: what is compiled cannot be traced again, so other shapes are an
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
    worlds: Worlds,
    devices: list[jax.Device],
  ):
    self._update = update
    self._acting_params = acting_params
    self._worlds = worlds
    self.devices = devices
    self.scale = update.scale
    self.steps_per_update = worlds.num_envs * worlds.num_steps

    def iterate(state: FusedState) -> tuple[FusedState, dict[str, jax.Array]]:
      """One unroll and one update, seen from one device."""
      key, shared_key = jax.random.split(jax.random.wrap_key_data(state.key))
      unroll_key = jax.random.fold_in(shared_key, jax.lax.axis_index(DEVICES))
      world_state, sequence, episodes = worlds.unroll(
        acting_params(state.train.params), unroll_key, state.worlds, state.train.step, 0
      )
      train, metrics = update.update(state.train, sequence)
      ended = episodes.ended.astype(jnp.float32)
      played = {
        'episodes': ended.sum(),
        'episode_return': jnp.sum(ended * episodes.episode_return),
        'episode_length': jnp.sum(ended * episodes.episode_length),
      }
      metrics |= dreamer_update.over_devices(played, jax.lax.psum)
      return FusedState(train, jax.random.key_data(key), world_state), metrics

    def call(state: FusedState, count: jax.Array) -> tuple[FusedState, dict[str, jax.Array]]:
      """`count` iterations, which is data and no shape; metrics are sums over them."""

      def body(_, carry):
        state, sums = carry
        state, metrics = iterate(state)
        return state, jax.tree.map(jnp.add, sums, metrics)

      _, shapes = jax.eval_shape(iterate, state)
      sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
      return jax.lax.fori_loop(0, count, body, (state, sums))

    self._mapped = jax.pmap(
      call, axis_name=DEVICES, in_axes=(0, None), donate_argnums=0, devices=devices
    )
    self._call: Any = None
    # A copy: the state itself is donated to the next call.
    self._gather = jax.jit(self._gathered)
    self._acting = jax.jit(
      lambda params: jax.tree.map(lambda x: jnp.copy(x[0]), acting_params(params))
    )

  def memory(self) -> Memory:
    """An estimate by shapes alone, before anything is compiled.

    An update holds the most where rows are made from sequences, of which there are two copies for a
    moment; or else at a gradient, with rows, a minibatch, and half of the residuals, for the rest
    is fused away. `compile` knows better: docs/design.md compares the two.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    train = jax.eval_shape(self._update.init, key)
    worlds = jax.eval_shape(self._worlds.init, key)
    acting = jax.eval_shape(self._acting_params, train.params)
    _, sequence, _ = jax.eval_shape(self._worlds.unroll, acting, key, worlds, train.step, 0)
    used = self._update.footprint(train.params, sequence)
    return Memory(
      state=ppo_update.num_bytes((train, worlds)),
      batch=max(
        ppo_update.num_bytes(sequence) + 2 * used.rows + used.forward,
        used.rows + used.minibatch + used.residuals // 2,
      ),
    )

  def compile(self) -> int:
    """Compiles what `iterate` runs; says how many bytes it takes on each device."""
    state = jax.eval_shape(self._spread, self.shapes())
    self._call = self._mapped.lower(state, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    used = self._call.memory_analysis()
    return 0 if used is None else used.argument_size_in_bytes + used.temp_size_in_bytes

  def init(self, key: chex.PRNGKey) -> FusedState:
    """A whole run's state at its beginning: one replica of what is equal, and all the environments."""
    train_key, unroll_key, worlds_key = jax.random.split(key, 3)
    worlds = jax.vmap(self._worlds.init)(jax.random.split(worlds_key, len(self.devices)))
    worlds = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), worlds)
    return FusedState(self._update.init(train_key), jax.random.key_data(unroll_key), worlds)

  def shapes(self) -> FusedState:
    """Shapes and dtypes of what `init` gives."""
    return jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))

  def _spread(self, state: FusedState) -> FusedState:
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

  def place(self, state: FusedState) -> FusedState:
    """A whole run's state, put on the devices."""
    state = jax.jit(self._spread)(state)
    slices = [jax.tree.map(lambda x, i=i: x[i], state) for i in range(len(self.devices))]
    return jax.device_put_sharded(slices, self.devices)

  def gather(self, state: FusedState) -> FusedState:
    """What `place` was given, as it has become: what a checkpoint holds."""
    return self._gather(state)

  def acting_params(self, state: FusedState) -> Tree:
    """Of one replica, on one device."""
    return self._acting(state.train.params)

  def iterate(self, state: FusedState, count: int) -> tuple[FusedState, dict[str, jax.Array]]:
    """`count` updates; metrics are sums over them, [D] and equal on all devices."""
    return self._call(state, np.int32(count))


_OTHER_WORLDS = (
  'the saved environments do not fit actor.num_envs: all begin new episodes, with the parameters that '
  'were learned'
)
_OLD_MOMENTS = "; Adam's moments are calibrated for the batches of before: add --reset-moments to begin them anew"


class Run:
  """Trains until enough steps are taken, and can stop after any call.

  Args:
    fused: the compiled program.
    config: of the loop.
    checkpointer: of the whole state.
    score: (acting params, learner step, environment step, whether final) -> normalised score or
      None; called every `score_period` seconds, and at the end.
    score_period: seconds between the starts of two.
    make_logger: learner step to begin with -> where rows go.
    warn: where warnings go.
    tick: called now and then.
    should_stop: whether the run was asked to stop.
    max_environment_steps: ends the run, at the first update that reaches it.
    max_seconds: ends it as well, counted from the first call of this process; None: never.
    seed: of the first state.
    entropy_scale: of the agent, to name in a warning.
    reset_moments: whether the optimizer begins anew where the run goes on.
    profiler: traces some of the updates; None for none.
  """

  def __init__(
    self,
    *,
    fused: Fused,
    config: learner_config.PPOLearnerConfig,
    checkpointer: checkpoint_lib.Checkpointer,
    score: Callable[[Tree, int, int, bool], float | None],
    score_period: float,
    make_logger: Callable[[int], Any],
    warn: Callable[[str], None],
    tick: Callable[[], None],
    should_stop: Callable[[], bool],
    max_environment_steps: int,
    max_seconds: float | None,
    seed: int,
    entropy_scale: float,
    reset_moments: bool = False,
    profiler: profile_lib.Profiler | None = None,
  ):
    self._fused = fused
    self._config = config
    self._checkpointer = checkpointer
    self._score = score
    self._score_period = score_period
    self._profiler = profiler
    self._make_logger = make_logger
    self._tick = tick
    self._should_stop = should_stop
    self._max_seconds = max_seconds
    self._advice = Advice(warn, entropy_scale)
    key, init = jax.random.key(seed), dreamer_update.jit_once(fused.init)
    restored = checkpointer.restore(fused.shapes(), may_differ=('worlds',))
    if restored is None:
      state, self._step = init(key), 0
    else:
      state, self._step = restored
      logging.info('The run goes on at update %d.', self._step)
      if state.worlds is None or reset_moments:
        anew = init(jax.random.fold_in(key, self._step))
        if state.worlds is None:
          state = state._replace(worlds=anew.worlds)
          warn(_OTHER_WORLDS + ('' if reset_moments else _OLD_MOMENTS))
        if reset_moments:
          state = state._replace(train=state.train._replace(opt_state=anew.train.opt_state))
    self._first_step = self._step
    self._first_environment_step = ppo_update.environment_step(state.train)
    missing = max(0, max_environment_steps - self._first_environment_step)
    self._last_step = self._step + -(-missing // fused.steps_per_update)
    self._state = fused.place(state)

  @property
  def environment_step(self) -> int:
    """As the state has it, without asking the device."""
    done = self._step - self._first_step
    return self._first_environment_step + done * self._fused.steps_per_update

  def run(self) -> bool:
    """Trains; saves before it returns whether it finished, and was not asked to stop."""
    logger = self._make_logger(self._step)
    sums: collections.defaultdict[str, float] = collections.defaultdict(float)
    pending = 0
    start = began = saved = scored = time.monotonic()
    scored -= self._score_period  # the first is due at once
    seconds_per_update = SECONDS_PER_CALL
    due = lambda: self._max_seconds is not None and time.monotonic() - start > self._max_seconds
    try:
      while self._step < self._last_step and not due() and not self._should_stop():
        if time.monotonic() - scored >= self._score_period:
          scored = time.monotonic()
          self._advice.score = self._evaluate(final=False)
          lost = time.monotonic() - scored  # neither learning nor stepping
          start, began = start + lost, began + lost
        called = time.monotonic()
        count = max(1, int(SECONDS_PER_CALL / seconds_per_update))
        # Rows end at multiples of the period, so those of a run that goes on are the same.
        period, save_period = self._config.log_period, self._config.checkpoint_updates
        count = min(count, period - self._step % period, self._last_step - self._step)
        if save_period is not None:
          count = min(count, save_period - self._step % save_period)
        if self._profiler is not None:
          self._profiler.reach(self._step)
          count = min(count, (self._profiler.next(self._step) or self._last_step) - self._step)
        with jax.profiler.StepTraceAnnotation('update', step_num=self._step):
          self._state, metrics = self._fused.iterate(self._state, count)
        values = jax.device_get(jax.tree.map(lambda x: x[0], metrics))
        _check_finite(values, self._step)  # before anything of it is saved
        for name, value in values.items():
          sums[name] += float(value)
        seconds_per_update = (time.monotonic() - called) / count
        self._step += count
        pending += count
        if self._step % period == 0 or self._step == self._last_step:
          row = self._row(sums, pending, time.monotonic() - began)
          logger.write(row)
          self._advice.look(row)
          sums.clear()
          pending, began = 0, time.monotonic()
        counted = save_period is not None and self._step % save_period == 0
        if counted or time.monotonic() - saved > self._config.checkpoint_period:
          saved = time.monotonic()
          self._save()
        self._tick()
    finally:
      if self._profiler is not None:
        self._profiler.close(self._step)
      logger.close()
    self._save()
    finished = not self._should_stop()
    if finished:
      self._evaluate(final=True)
    self._checkpointer.wait()
    return finished

  def _save(self) -> None:
    self._checkpointer.save(self._step, self._fused.gather(self._state))

  def _evaluate(self, *, final: bool) -> float | None:
    params = self._fused.acting_params(self._state)
    return self._score(params, self._step, self.environment_step, final)

  def _row(self, sums: Mapping[str, float], count: int, seconds: float) -> dict[str, Any]:
    episodes = sums['episodes']
    mean = lambda name: sums[name] / episodes if episodes else None
    return {
      'learner_step': self._step,
      'environment_step': self.environment_step,
      'steps_per_second': count * self._fused.steps_per_update / max(seconds, 1e-9),
      'episodes': int(episodes),
      'episode_return': mean('episode_return'),
      'episode_length': mean('episode_length'),
      **{name: value / count for name, value in sums.items() if name.startswith('ppo/')},
    }


class Advice:
  """Notices runs that will not learn, and says what to change; each thing once.

  Args:
    say: where a warning goes.
    entropy_scale: of the agent.

  Attributes:
    score: the newest normalised score, None where the environment gives none.
  """

  MOST_KL, MOST_CLIPPED = 0.08, 0.35
  LEAST_ENTROPY = 0.05  # share of that of the first row
  GOOD_SCORE = 0.9  # above it, a policy may well be sure of itself

  def __init__(self, say: Callable[[str], None], entropy_scale: float):
    self._say = say
    self._entropy_scale = entropy_scale
    self._said: set[str] = set()
    self._rows: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=2 * WINDOW)
    self._first_entropy: float | None = None
    self.score: float | None = None

  def look(self, row: Mapping[str, Any]) -> None:
    """Judges one more row of metrics."""
    if row['episode_return'] is not None:  # else no episode ended
      self._rows.append(row)
    rate = f'learner.learning_rate (now {row["ppo/learning_rate"]:.2g})'
    if row['ppo/approx_kl'] > self.MOST_KL:
      self._once(
        'kl',
        f'KL {row["ppo/approx_kl"]:.3f} is above {self.MOST_KL}: the policy moves too far on one '
        f'unroll; lower {rate} or learner.num_epochs',
      )
    if row['ppo/clip_fraction'] > self.MOST_CLIPPED:
      self._once(
        'clip',
        f'clip fraction {row["ppo/clip_fraction"]:.2f} is above {self.MOST_CLIPPED}: much of what '
        f'is collected teaches nothing; lower {rate} or learner.num_epochs, or use fewer '
        'learner.num_minibatches',
      )
    # An entropy of densities may be negative from the start, and says nothing by its share.
    self._first_entropy = self._first_entropy or row['ppo/entropy']
    good = self.score is not None and self.score >= self.GOOD_SCORE
    collapsed = row['ppo/entropy'] < self.LEAST_ENTROPY * self._first_entropy
    if self._first_entropy > 0 and collapsed and not good:
      self._once(
        'entropy',
        f'entropy collapsed from {self._first_entropy:.2f} to {row["ppo/entropy"]:.3f}: nothing '
        f'new is tried; begin again with a larger agent.entropy_scale (now {self._entropy_scale})',
      )
    if not good and self._oscillates():
      self._once(
        'oscillation',
        'episodes get longer while their return is flat: the agent may be going to and fro; raise '
        f'agent.entropy_scale (now {self._entropy_scale}), or have the environment charge for each step',
      )

  def _oscillates(self) -> bool:
    """Whether the last WINDOW rows with episodes have longer ones than those before, for no more."""
    rows = list(self._rows)
    if len(rows) < 2 * WINDOW:
      return False
    old, new = rows[:WINDOW], rows[WINDOW:]
    lengths, returns = (
      [[row[name] for row in part] for part in (old, new)]
      for name in ('episode_length', 'episode_return')
    )
    longer = statistics.mean(lengths[1]) > 1.2 * statistics.mean(lengths[0])
    gain = statistics.mean(returns[1]) - statistics.mean(returns[0])
    noise = statistics.stdev(returns[0] + returns[1])
    return longer and gain < 0.5 * noise

  def _once(self, kind: str, text: str) -> None:
    if kind not in self._said:
      self._said.add(kind)
      self._say(text)


def _check_finite(values: Mapping[str, Any], step: int) -> None:
  broken = [name for name, value in values.items() if not np.isfinite(value)]
  if broken:
    raise FloatingPointError(
      f'after update {step}: {", ".join(broken)} not finite, and nothing of it was saved; begin '
      'again in another folder with a lower learner.learning_rate'
    )
