"""The Learner node: next batch, pmapped update; publish, save and report now and then."""

import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from acme.utils.loggers import base as loggers

from hephaestus.learner import checkpoint as checkpoint_lib
from hephaestus.learner import config as learner_config
from hephaestus.learner import dreamer_update, on_policy, ppo_update
from hephaestus.learner import process_group as process_group_lib
from hephaestus.learner import profile as profile_lib
from hephaestus.learner import staleness as staleness_lib
from hephaestus.replay import parameters
from hephaestus.replay import reader as reader_lib

Tree = Any
Update = dreamer_update.Update | ppo_update.Update
Config = learner_config.LearnerConfig | learner_config.PPOLearnerConfig
REPUBLISH_PERIOD = 5.0  # seconds without a batch


class Learner:
  """Trains on what replay holds until enough has been collected, and can stop at any update.

  With an `intake` it learns on-policy: a batch is drawn once the update before it is published, so
  that nothing waits here and gets old, and what was read says how much has been collected.

  Args:
    update: how the train state begins and changes.
    acting_params: train state's params -> what actors need of them.
    config: of the loop.
    batch_size: sequences of a batch, over all devices of all processes.
    reader: gives this process's part of batches, host arrays [B, T, ...].
    publisher: takes snapshots of acting parameters.
    checkpointer: of the train state; None where another process saves.
    save_replay: has replay write its checkpoint; may raise RuntimeError when replay is down.
    environment_step: steps collected so far by all actors, None while replay does not answer; not
      asked with an `intake`.
    make_logger: learner step of the restored state -> where this node's numbers go.
    should_stop: whether the node was asked to stop.
    max_environment_steps: ends the run.
    max_seconds: ends it as well, counted from the first update of this process; None: never.
    steps_per_sequence: transitions that a replayed sequence counts for, T - 1.
    warm_up_steps: collected before the first batch, and so left out of the replay ratio.
    seed: of the first train state.
    launch_id: goes out with the final parameters, so that nobody takes an older end for this one.
    intake: of what the reader gives; None where experience is replayed.
    devices: local devices; None for all.
    process_group: of the processes that learn as one, each of which reads its part of every batch;
      None where this one is alone. Only the first publishes, saves and reports.
    profiler: traces some of the updates; None for none.
    staleness: looks at every batch; None where nobody asks.
  """

  def __init__(
    self,
    *,
    update: Update,
    acting_params: Callable[[Tree], Tree],
    config: Config,
    batch_size: int,
    reader: reader_lib.Reader,
    publisher: parameters.Publisher,
    checkpointer: checkpoint_lib.Checkpointer | None,
    save_replay: Callable[[], Any],
    environment_step: Callable[[], int | None],
    make_logger: Callable[[int], loggers.Logger],
    should_stop: Callable[[], bool],
    max_environment_steps: int,
    steps_per_sequence: int,
    warm_up_steps: int,
    seed: int,
    launch_id: int,
    max_seconds: float | None = None,
    intake: on_policy.Intake | None = None,
    devices: list[jax.Device] | None = None,
    process_group: process_group_lib.ProcessGroup | None = None,
    profiler: profile_lib.Profiler | None = None,
    staleness: staleness_lib.Staleness | None = None,
  ):
    self._config = config
    self._reader = reader
    self._publisher = publisher
    self._checkpointer = checkpointer
    self._save_replay = save_replay
    self._ask_environment_step = environment_step
    self._make_logger = make_logger
    self._should_stop = should_stop
    self._max_environment_steps = max_environment_steps
    self._max_seconds = max_seconds
    self._launch_id = launch_id
    self._warm_up_steps = warm_up_steps
    self._first_update: float | None = None
    self._intake = intake
    self._steps_per_sequence = steps_per_sequence
    self._steps_per_batch = batch_size * steps_per_sequence
    self._devices = devices or jax.local_devices()
    self._group = process_group
    self._profiler = profiler
    self._staleness = staleness
    self._speaks = process_group is None or process_group.is_first

    self._update = jax.pmap(
      _traced_once(update.update),
      axis_name=dreamer_update.DEVICES,
      donate_argnums=0,
      devices=self._devices if process_group is None else jax.devices(),
    )
    # A copy of one replica: the state itself is donated to the next update.
    self._snapshot = jax.jit(lambda state: jax.tree.map(lambda x: jnp.copy(x[0]), state))
    self._acting = jax.jit(
      lambda params: jax.tree.map(lambda x: jnp.copy(x[0]), acting_params(params))
    )
    shapes = saved_shapes(update, counted=intake is not None)
    restored = None if checkpointer is None else checkpointer.restore(shapes)
    if not self._speaks:
      state, self._step = shapes, 0  # until the first process says
    elif restored is None:
      state = dreamer_update.jit_once(update.init)(jax.random.key(seed))
      self._step = 0
      logging.info('Learner begins with seed %d.', seed)
    else:
      state, self._step = restored
      if intake is not None:
        intake.learner_step, intake.sequences = self._step, int(state.sequences)
        state = state.train
      logging.info('Learner resumes at step %d.', self._step)
    if process_group is not None:
      state, step = process_group.broadcast((state, np.int64(self._step)))
      self._step = int(step)
    self._state = dreamer_update.replicate(state, self._devices)
    self._environment_step = 0

  def run(self) -> None:
    """Trains until the run is over or the node is asked to stop; saves before it returns."""
    logger = self._make_logger(self._step) if self._speaks else loggers.NoOpLogger()
    batches = (_Prefetch if self._intake is None else _OnDemand)(self._reader, self._place)
    background = _Background()
    config = self._config
    pending: list[dict[str, jax.Array]] = []
    saved = polled = published = time.monotonic()
    self._poll()
    window = self._begin_window()
    self._publish_surely(final=False)
    try:
      while self._group is not None or not self._wishes_to_end():
        waited = time.monotonic()
        with jax.profiler.TraceAnnotation('wait for replay'):
          batch = batches.get(timeout_seconds=0.2)
        # Whoever waits while the device is still busy starves nobody.
        idle = not pending or _is_ready(pending[-1])
        window.starved += (time.monotonic() - waited) if idle else 0.0
        if time.monotonic() - polled > 0.5:
          self._poll()
          polled = time.monotonic()
        if batch is None:
          # Replay may have come back without parameters, and nobody acts without any.
          if time.monotonic() - published > REPUBLISH_PERIOD:
            published = time.monotonic()
            self._publish_in(background)
          if self._group is None or not self._is_asked_to_end():
            continue
        if self._group is not None and self._group.ends(
          now=batch is None or self._wishes_to_end(), wishes=self._comes_to_wish_to_end
        ):
          break
        if pending:
          jax.block_until_ready(pending[-1])  # one update in flight, so batches are drawn in time
        if self._intake is not None:
          self._poll()  # a run ends after the update for which enough was collected
        if self._profiler is not None:
          self._profiler.reach(self._step)
        if self._group is not None:
          self._group.begin_update(self._step)
        run_update = self._update if self._first_update is not None else self._compile_and_update
        with jax.profiler.StepTraceAnnotation('update', step_num=self._step):
          self._state, metrics = run_update(self._state, batch)
        if self._group is not None:
          self._group.dispatched_update(next(iter(metrics.values())))
        if self._first_update is None:
          self._first_update = time.monotonic()
          window = self._begin_window()  # what came before was starting up, not starving
        self._step += 1
        if self._intake is not None:
          self._intake.learner_step = self._step
        pending.append(metrics)
        if self._step % config.publish_period == 0:
          if self._intake is None:
            self._publish_in(background)
          else:  # before any room is made in the queue, for whose sequences others may wait
            self._publish(final=False)
        if self._step % config.log_period == 0:
          values = _mean(pending)
          pending.clear()
          logger.write(self._report(window) | values)
          _check_finite(values, self._step, config)
          window = self._begin_window()
        counted = config.checkpoint_updates and self._step % config.checkpoint_updates == 0
        if counted or time.monotonic() - saved > config.checkpoint_period:
          saved = time.monotonic()
          self._save_state(pending)
          background.submit(self._try_save_replay)
    except Exception as error:
      if self._group is not None:
        self._group.note_failure(error)
      raise
    finally:
      if self._profiler is not None:
        self._profiler.close(self._step)
      batches.close()
      background.close()
    finished = self._finished
    self._save_state(pending)
    self._publish_surely(final=finished)
    saving = process_group_lib.Call(self._try_save_replay)  # which takes as long as it is large
    while not saving.wait(0.2):
      self._should_stop()
    if self._checkpointer is not None:
      self._checkpointer.wait()
    logger.close()
    logging.info('Learner %s at step %d.', 'finished' if finished else 'stopped', self._step)
    if self._group is not None:
      self._group.leave(finished=finished, was_asked=self._should_stop)

  def _compile_and_update(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
    """The first update of this process. Who is asked to stop meanwhile ends here, with code 0.

    It compiles, which takes minutes for a large agent, hears no signal and cannot be interrupted.
    """
    update = process_group_lib.Call(lambda: self._update(state, batch))
    while not update.wait(0.2):
      if self._should_stop():
        self._try_save_replay()
        logging.info('Learner stopped at step %d, while it compiled.', self._step)
        process_group_lib.exit_at_once(0)
    return update.result

  def _wishes_to_end(self) -> bool:
    return self._should_stop() or (self._speaks and self._finished)

  def _is_asked_to_end(self) -> bool:
    assert self._group is not None
    return self._wishes_to_end() or self._group.is_asked_to_end()

  def _comes_to_wish_to_end(self) -> bool:
    """As above, of one who does nothing but wait for other processes."""
    if self._speaks:
      self._poll()
    return self._wishes_to_end()

  @property
  def _finished(self) -> bool:
    in_time = (
      self._max_seconds is None
      or self._first_update is None
      or time.monotonic() - self._first_update <= self._max_seconds
    )
    return not in_time or self._environment_step >= self._max_environment_steps

  def _poll(self) -> None:
    if self._intake is not None:
      self._environment_step = self._intake.sequences * self._steps_per_sequence
      return
    environment_step = self._ask_environment_step()
    if environment_step is not None:
      self._environment_step = environment_step

  def _begin_window(self) -> '_Window':
    if self._intake is not None:
      self._intake.report()
    return _Window(self._step, self._environment_step)

  def _report(self, window: '_Window') -> dict[str, float]:
    elapsed = time.monotonic() - window.start
    row = {
      'learner_step': self._step,
      'environment_step': self._environment_step,
      'starved_fraction': min(1.0, window.starved / elapsed),
      'rejected_sequences': self._reader.rejected,
    }
    if self._intake is not None:
      collected = self._environment_step - window.environment_step
      return row | {'steps_per_second': collected / elapsed} | self._intake.report()
    replayed = self._step * self._steps_per_batch
    if self._staleness is not None:
      row |= self._staleness.report(self._step)
    return row | {
      'replay_ratio': replayed / max(1, self._environment_step - self._warm_up_steps),
      'replayed_steps_per_second': (self._step - window.step) * self._steps_per_batch / elapsed,
    }

  def _place(self, batch: Tree) -> Tree:
    """Equal contiguous slices on the devices; each slice holds the mixture of strata."""
    if self._staleness is not None:
      self._staleness.note(batch)
    count = len(self._devices)
    batch = jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), batch)
    slices = [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(count)]
    return jax.device_put_sharded(slices, self._devices)

  def _make_snapshot(self, params: Tree, final: bool) -> parameters.Snapshot:
    return parameters.Snapshot(
      version=self._step,
      environment_step=self._environment_step,
      ended_launch=self._launch_id if final else 0,
      params=params,
    )

  def _publish(self, *, final: bool) -> bool:
    if not self._speaks:
      return True
    params = jax.device_get(self._acting(self._state.params))
    return self._publisher.publish(self._make_snapshot(params, final))

  def _publish_surely(self, *, final: bool) -> None:
    """Publishes what others wait for, as often as it takes."""
    while not self._publish(final=final) and not self._should_stop():
      time.sleep(0.5)

  def _publish_in(self, background: '_Background') -> None:
    """Publishes without the loop waiting for the device or the server."""
    if not self._speaks:
      return
    snapshot = self._make_snapshot(self._acting(self._state.params), final=False)
    send = lambda: self._publisher.publish(
      snapshot._replace(params=jax.device_get(snapshot.params))
    )
    background.submit(send)

  def _save_state(self, pending: list[dict[str, jax.Array]]) -> None:
    if pending:
      _check_finite(_mean(pending), self._step, self._config)  # before anything of it is saved
    if self._checkpointer is None:
      return
    state = self._snapshot(self._state)
    if self._intake is not None:
      state = on_policy.State(state, np.asarray(self._intake.sequences, np.int64))
    self._checkpointer.save(self._step, state)

  def _try_save_replay(self) -> None:
    if not self._speaks:
      return
    try:
      self._save_replay()
    except (RuntimeError, OSError) as error:
      logging.warning('Replay was not saved: %s', error)


class _Window:
  """What is measured between two reports.

  Attributes:
    step: learner step at its start.
    environment_step: at its start.
    start: seconds, monotonic.
    starved: seconds waited for a batch while the device had nothing to do.
  """

  def __init__(self, step: int, environment_step: int):
    self.step = step
    self.environment_step = environment_step
    self.start = time.monotonic()
    self.starved = 0.0


class _OnDemand:
  """Draws a batch when it is asked for, and puts it on the devices."""

  def __init__(self, reader: reader_lib.Reader, place: Callable[[Tree], Tree]):
    self._reader = reader
    self._place = place

  def get(self, timeout_seconds: float) -> Tree | None:
    """The next batch, [D, B, T, ...]; None when there is none in time."""
    batch = self._reader.get(timeout_seconds)
    return None if batch is None else self._place(batch)

  def close(self) -> None:
    pass


class _Prefetch:
  """Puts the next batch on the devices while they work on the last one."""

  def __init__(self, reader: reader_lib.Reader, place: Callable[[Tree], Tree]):
    self._reader = reader
    self._place = place
    self._queue: queue.Queue[Tree] = queue.Queue(maxsize=1)
    self._closed = threading.Event()
    self._failure: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name='prefetch', daemon=True)
    self._thread.start()

  def get(self, timeout_seconds: float) -> Tree | None:
    """The next batch, [D, B, T, ...]; None when there is none in time."""
    try:
      return self._queue.get(timeout=timeout_seconds)
    except queue.Empty:
      if self._failure is not None:
        raise self._failure from None
      return None

  def close(self) -> None:
    self._closed.set()
    self._thread.join(timeout=2.0)

  def _run(self) -> None:
    try:
      while not self._closed.is_set():
        batch = self._reader.get(timeout_seconds=0.2)
        if batch is None:
          continue
        placed = self._place(batch)
        while not self._closed.is_set():
          try:
            self._queue.put(placed, timeout=0.2)
            break
          except queue.Full:
            continue
    except BaseException as error:  # handed to whoever reads
      self._failure = error


class _Background:
  """Runs slow calls one after another in a thread; of waiting ones only the newest stays."""

  def __init__(self):
    self._waiting: dict[str, Callable[[], Any]] = {}
    self._changed = threading.Condition()
    self._closed = False
    self._thread = threading.Thread(target=self._run, name='background', daemon=True)
    self._thread.start()

  def submit(self, call: Callable[[], Any]) -> None:
    """Queues a call; one of the same name that has not begun is dropped."""
    with self._changed:
      self._waiting[getattr(call, '__qualname__', repr(call))] = call
      self._changed.notify()

  def close(self) -> None:
    """Waits for the running call, and drops the waiting ones."""
    with self._changed:
      self._closed = True
      self._waiting.clear()
      self._changed.notify()
    self._thread.join(timeout=60.0)

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting or self._closed)
        if self._closed:
          return
        call = self._waiting.pop(next(iter(self._waiting)))
      try:
        call()
      except Exception:
        logging.exception('In the background:')


def saved_shapes(update: Update, *, counted: bool) -> Tree:
  """Shapes and dtypes of what a learner's checkpoints hold; `counted`: of one with an intake."""
  state = jax.eval_shape(update.init, jax.eval_shape(lambda: jax.random.key(0)))
  return on_policy.State(state, jax.ShapeDtypeStruct((), np.int64)) if counted else state


def _is_ready(metrics: Any) -> bool:
  """Whether the update that gives these has ended."""
  return next(iter(metrics.values())).is_ready()


def _traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
  """The red line of static shapes: tracing a second time, and so compiling anew, raises.

  (chex.assert_max_traces counts by source line, over all learners of a process.)
  """
  traces = 0

  @functools.wraps(function)  # whose name is that of the program, in a profile
  def traced(*arguments):
    nonlocal traces
    traces += 1
    if traces > 1:
      raise RuntimeError('The update was traced twice: a batch or the state changed its shape.')
    return function(*arguments)

  return traced


def _mean(pending: list[dict[str, jax.Array]]) -> dict[str, float]:
  """Means over updates; every replica holds the same numbers, so the first is read."""
  rows = jax.device_get([jax.tree.map(lambda x: x.addressable_data(0), row) for row in pending])
  return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _check_finite(values: dict[str, float], step: int, config: Config) -> None:
  broken = [name for name, value in values.items() if not np.isfinite(value)]
  if broken:
    names = [field.name for field in dataclasses.fields(config)]
    rates = [f'learner.{name}' for name in names if name.endswith('learning_rate')]
    raise FloatingPointError(
      f'learner step {step}: {", ".join(broken)} not finite; the run goes back to its last '
      f'checkpoint. If it happens again, lower {" or ".join(rates)}'
    )
