"""Updates on batches sampled from a replay server, and publishing of acting parameters to it."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from hephaestus.agents import agent as agent_lib
from hephaestus.learner import devices as devices_lib
from hephaestus.learner import loop
from hephaestus.learner import process_group as process_group_lib
from hephaestus.replay import parameters
from hephaestus.replay import reader as reader_lib

Tree = Any
REPUBLISH_PERIOD = 5.0  # seconds between two publications while no batch arrives
SAVE = 'save'  # name of the call in the background in which replay writes its checkpoint


class Trained(NamedTuple):
  """The update of an agent, and the part of its parameters that actors need."""

  update: loop.Update
  acting_params: Callable[[Tree], Tree]  # params of the train state -> acting parameters


class Link(NamedTuple):
  """The learner's connections to the other nodes of a run."""

  reader: reader_lib.Reader  # gives this process's part of each batch, host arrays [B, T, ...]
  publisher: (
    parameters.Publisher | None
  )  # of acting parameters; None in all processes but the first
  # Published with the final parameters, so that those of an older launch do not end its nodes.
  launch_id: int
  should_stop: Callable[[], bool]  # whether this node was asked to stop


class Prefetched:
  """Places the next batch of a reader on the devices in a thread, while they work on the last one."""

  def __init__(self, reader: reader_lib.Reader, place: Callable[[Tree], Tree]):
    self._reader = reader
    self._place = place
    self._queue: queue.Queue[Tree] = queue.Queue(maxsize=1)
    self._closed = threading.Event()
    self._failure: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name='prefetch', daemon=True)
    self._thread.start()

  def get(self, timeout_seconds: float) -> Tree | None:
    """Waits for the next batch, at most `timeout_seconds`; None if there is none in time. Errors as `Reader.get`."""
    try:
      return self._queue.get(timeout=timeout_seconds)
    except queue.Empty:
      if self._failure is not None:
        raise self._failure from None
      return None

  def close(self) -> None:
    """Stops sampling."""
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
    except BaseException as error:  # raised again by `get`
      self._failure = error


class Sampled(loop.Source):
  """Source of batches from replay; sub-classes decide when to sample and to publish parameters.

  By default a batch is sampled when the loop asks for it. `devices` are local ones; None for all.
  """

  def __init__(
    self,
    trained: Trained,
    link: Link,
    *,
    devices: list[jax.Device] | None = None,
    num_processes: int = 1,
  ):
    self._init_state = trained.update.init
    self._link = link
    self._devices = devices or jax.local_devices()
    self._update = devices_lib.mapped(
      devices_lib.traced_once(trained.update.update),
      self._devices if num_processes == 1 else jax.devices(),
    )
    self._acting = jax.jit(
      lambda params: jax.tree.map(lambda x: jnp.copy(x[0]), trained.acting_params(params))
    )
    self._batch: Tree = None
    self._last: Any = None  # metrics of the update in flight
    self._starved = 0.0
    self._published = time.monotonic()
    self._background: _Background | None = None
    self._is_saved = False  # whether replay has written its last checkpoint

  def _next_batch(self, timeout_seconds: float) -> Tree | None:
    """Waits for the next batch, on the devices [D, B, T, ...]; None if there is none in time."""
    batch = self._link.reader.get(timeout_seconds)
    return None if batch is None else self._place_batch(batch)

  def init(self, key: jax.Array) -> Tree:
    return devices_lib.jit_once(self._init_state)(key)

  def shapes(self) -> Tree:
    return jax.eval_shape(self._init_state, jax.eval_shape(lambda: jax.random.key(0)))

  def place(self, whole: Tree, step: int) -> Tree:
    del step
    return devices_lib.replicate(whole, self._devices)

  def gather(self, state: Tree) -> Tree:
    return devices_lib.first_replica(state)

  def acting_params(self, state: Tree) -> Tree:
    return self._acting(agent_lib.all_params(state))

  def ready(self, timeout_seconds: float) -> bool:
    if self._batch is None:
      waited = time.monotonic()
      with jax.profiler.TraceAnnotation('wait for replay'):
        self._batch = self._next_batch(timeout_seconds)
      # A wait while the device is still busy starves nothing.
      if self._last is None or next(iter(self._last.values())).is_ready():
        self._starved += time.monotonic() - waited
    return self._batch is not None

  def update(self, state: Tree, step: int, most: int) -> tuple[Tree, loop.Done]:
    del most
    batch, self._batch = self._batch, None
    compiles = self._last is None
    run = self._compile_and_update if compiles else self._update
    state, self._last = run(state, batch)
    if compiles:
      self._starved = 0.0
    return state, loop.Done(1, self._last, compiled=compiles)

  def _compile_and_update(self, state: Tree, batch: Tree) -> tuple[Tree, loop.Metrics]:
    """The first update of this process; a process that is asked to stop meanwhile exits with code 0.

    It compiles, which takes minutes for a large agent, and cannot be interrupted by a signal.
    """

    def end_if_asked() -> None:
      if self._link.should_stop():
        self.save_experience()
        logging.info('Learner stopped before its first update, while it compiled.')
        process_group_lib.exit_at_once(process_group_lib.ASKED)

    result: tuple[Tree, loop.Metrics] = process_group_lib.wait_for(
      lambda: self._update(state, batch), end_if_asked
    )
    return result

  def save_experience(self) -> None:
    """Makes replay write its checkpoint; does nothing unless a sub-class overrides it."""

  def _waiting_report(self, span: loop.Interval) -> dict[str, float]:
    """Fraction of a span spent waiting for batches, and number of sequences rejected so far."""
    report = {
      'starved_fraction': min(1.0, self._starved / span.seconds),
      'rejected_sequences': self._link.reader.rejected,
    }
    self._starved = 0.0
    return report

  def _place_batch(self, batch: Tree) -> Tree:
    """Puts equal contiguous slices of a batch on the devices; each has the same mixture of strata."""
    return devices_lib.split(batch, self._devices)

  def on_start(self, status: loop.Status) -> None:
    self._background = _Background()
    self._publish_surely(status)

  def on_idle(self, status: loop.Status) -> None:
    """Publishes again, at most every 5 seconds: replay may have restarted without acting parameters."""
    if time.monotonic() - self._published > REPUBLISH_PERIOD:
      self._published = time.monotonic()
      self._publish_in_background(status)

  def on_end(self, status: loop.Status) -> None:
    self._publish_surely(status)
    if not self._is_saved:  # takes as long as replay is large
      process_group_lib.wait_for(self.save_experience, self._link.should_stop)

  def close(self) -> None:
    if self._background is not None:
      # A save that runs is the last one: actors have stopped, so hardly a sequence came since it began.
      self._is_saved = self._background.close(self._link.should_stop) == SAVE

  def _publish_in_background(self, status: loop.Status) -> None:
    """Publishes in a thread, so that the loop waits neither for the device nor for the server.

    Raises:
      FloatingPointError: parameters of an earlier call were not finite.
    """
    if self._link.publisher is not None and self._background is not None:
      self._background.check()
      snapshot = self._snapshot(status)
      self._background.submit('publish', lambda: self._publish(snapshot))

  def _snapshot(self, status: loop.Status) -> parameters.Snapshot:
    """A snapshot of the acting parameters, still on the device."""
    return parameters.Snapshot(
      version=status.step,
      environment_step=status.environment_step,
      ended_launch=self._link.launch_id if status.finished else 0,
      params=status.acting_params(),
    )

  def _publish(self, snapshot: parameters.Snapshot) -> bool:
    """Publishes a snapshot; returns whether replay confirmed it, or there is no publisher.

    Raises:
      FloatingPointError: a parameter is not finite. Actors would ignore it and keep older ones, whose
        sequences an on-policy learner discards: the run would go on without an update.
    """
    if self._link.publisher is None:
      return True
    params = jax.device_get(snapshot.params)
    loop.check_params(params, snapshot.version)
    return self._link.publisher.publish(snapshot._replace(params=params))

  def _publish_surely(self, status: loop.Status) -> None:
    """Publishes until replay confirms the snapshot, or this node is asked to stop."""
    snapshot = self._snapshot(status)
    while not self._publish(snapshot) and not self._link.should_stop():
      time.sleep(0.5)


class _Background:
  """Runs slow calls one after another in a thread; of those waiting, the newest of each name stays."""

  def __init__(self):
    self._waiting: dict[str, Callable[[], Any]] = {}
    self._running: str | None = None
    self._changed = threading.Condition()
    self._closed = False
    self._failure: FloatingPointError | None = None
    self._thread = threading.Thread(target=self._run, name='background', daemon=True)
    self._thread.start()

  def submit(self, name: str, call: Callable[[], Any]) -> None:
    """Queues a call; one of the same name that has not begun is dropped."""
    with self._changed:
      self._waiting[name] = call
      self._changed.notify()

  def check(self) -> None:
    """Raises the FloatingPointError of a call, if there was one; other errors are logged."""
    if self._failure is not None:
      raise self._failure

  def close(self, meanwhile: Callable[[], object]) -> str | None:
    """Drops the waiting calls, and waits for the running one, whose name it returns; None without one.

    `meanwhile` is called repeatedly until it has ended.
    """
    with self._changed:
      self._closed = True
      self._waiting.clear()
      self._changed.notify()
      running = self._running
    process_group_lib.wait_for(self._thread.join, meanwhile)
    return running

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting or self._closed)
        if self._closed:
          return
        self._running = next(iter(self._waiting))
        call = self._waiting.pop(self._running)
      try:
        call()
      except FloatingPointError as error:
        self._failure = error
      except Exception:
        logging.exception('In the background:')
      with self._changed:
        self._running = None
