"""The training loop: updates on batches of a source, reports of metrics, checkpoints, and the end."""

# ruff: noqa: B027 -- hooks that a source may leave out

import abc
import collections
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from absl import logging

from hephaestus.learner import checkpoint as checkpoint_lib
from hephaestus.learner import config as learner_config
from hephaestus.learner import process_group as process_group_lib
from hephaestus.learner import profile as profile_lib

Tree = Any
Metrics = dict[str, jax.Array]
POLL_SECONDS = 0.2  # for a batch, before the loop checks whether it should end


class Done(NamedTuple):
  """Result of one call of `Source.update`."""

  updates: int  # number of updates done
  metrics: (
    Metrics  # sums over these updates, [D, ...] and equal on all devices; perhaps not computed yet
  )
  compiled: bool = False  # whether the call compiled the program first; its time is then start-up


class Interval(NamedTuple):
  """Training between two reports."""

  step: int  # learner step at its end
  updates: int
  environment_steps: int
  seconds: float  # without evaluation


class Status(NamedTuple):
  """The state of a run between two updates."""

  step: int  # number of updates done
  environment_step: int  # number of environment steps collected
  acting_params: Callable[[], Tree]  # copies the acting parameters of one replica, on one device
  finished: bool  # whether the run is over; False also if it was stopped before


class Update(Protocol):
  """An agent's functions that make its train state, and update it by one batch."""

  @property
  def init(self) -> Callable[[jax.Array], Any]:
    """key -> train state of one replica, a tree of arrays with a field `params`.

    A run in one process also reads its field `step`, [] int32, the number of updates done.
    """

  @property
  def update(self) -> Callable[..., tuple[Any, Metrics]]:
    """(train state, Sequence [B, T, ...] of one device) -> (train state, metrics [] float32).

    Runs under an axis named `devices.DEVICES`; the result must be equal on all devices.
    """


class FusedUpdate(Update, Protocol):
  """The update of an on-policy agent that can train in one process, where no queue counts its steps."""

  @property
  def environment_step(self) -> Callable[[Any], int]:
    """Train state of one replica -> number of environment steps learned from, on all devices together."""


class Source(abc.ABC):
  """Supplies batches, does the updates of one agent with them, and hands acting parameters to actors.

  The whole state of a run is the content of a checkpoint: arrays of one replica, and whatever else
  a source needs to resume. On the D devices its leaves are [D, ...]: replicated, or a part for each.

  Attributes:
    phase: what `update` does, as shown to the user.
  """

  phase = 'updating'

  @abc.abstractmethod
  def init(self, key: jax.Array) -> Tree:
    """Makes the whole state of a run at its beginning, from a PRNG key."""

  @abc.abstractmethod
  def shapes(self) -> Tree:
    """Shapes and dtypes of the whole state."""

  def restore(
    self, checkpointer: checkpoint_lib.Checkpointer, key: jax.Array
  ) -> tuple[Tree, int] | None:
    """Reads the whole state of the newest checkpoint and its learner step; None without a checkpoint.

    `key` is for `init`, which makes the parts that the checkpoint lacks.
    """
    del key
    return checkpointer.restore(self.shapes())

  @abc.abstractmethod
  def place(self, whole: Tree, step: int) -> Tree:
    """Puts the whole state of learner step `step` on the devices; the next update donates it."""

  @abc.abstractmethod
  def gather(self, state: Tree) -> Tree:
    """Copies a state on the devices to a whole state: the inverse of `place`."""

  @abc.abstractmethod
  def acting_params(self, state: Tree) -> Tree:
    """Acting parameters, copied from one replica."""

  @property
  @abc.abstractmethod
  def environment_step(self) -> int:
    """Number of environment steps collected in the whole run, as far as known."""

  def is_over(self, step: int, max_environment_steps: int) -> bool:
    """Whether `max_environment_steps` were collected, after `step` updates; a fused source counts these."""
    del step
    return self.environment_step >= max_environment_steps

  @property
  def experience(self) -> int:
    """Number of environment steps of whose experience the state has a part; 0 where it is elsewhere."""
    return 0

  def collect(self, state: Tree) -> Tree:
    """Adds experience to the state, which is donated, if the source makes its own and needs more for an update."""
    return state

  @abc.abstractmethod
  def ready(self, timeout_seconds: float) -> bool:
    """Waits for a batch; returns whether one is there in time."""

  @abc.abstractmethod
  def update(self, state: Tree, step: int, most: int) -> tuple[Tree, Done]:
    """Does 1 to `most` updates, once `ready`; returns the next state, and their number and metrics.

    Before them, `step` updates were done. The state is donated.
    """

  @abc.abstractmethod
  def report(self, span: Interval, totals: Mapping[str, float]) -> dict[str, Any]:
    """Metrics of a span, the time since the last report, by name; `totals` are sums of the updates' metrics in it."""

  def on_start(self, status: Status) -> None:
    """Called before the first update of this process."""

  def on_idle(self, status: Status) -> None:
    """Called repeatedly while no batch arrives."""

  def on_update(self, status: Status) -> None:
    """Called after each call of `update`."""

  def on_save(self) -> None:
    """Called when the write of a checkpoint of the state has begun, except of the last one."""

  def on_end(self, status: Status) -> None:
    """Called when the write of the last checkpoint of the state has begun, after `close`."""

  def close(self) -> None:
    """Stops reading batches; called once, after the last update, when the last write has begun."""


class Logger(Protocol):
  """Writes metrics, by name."""

  def write(self, values: Mapping[str, Any]) -> None: ...
  def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
  """Callbacks to the process that runs a loop."""

  should_stop: Callable[[], bool]  # whether the process was asked to stop
  make_logger: Callable[[int], Logger]  # learner step at which training begins or resumes -> logger
  # Called before each update, and once when the run has finished; its time counts neither for the
  # loop's `max_seconds` nor for throughput.
  between: Callable[[Status], None] = lambda status: None
  # Called with what the loop does next: 'collecting', the source's `phase`, or 'saving'.
  phase: Callable[[str], None] = lambda phase: None


class Loop:
  """Trains until a limit is reached, and can stop at any update.

  Args:
    max_environment_steps: number of environment steps collected, after which the run is over.
    max_seconds: time since the first update of this process, without evaluation, after which it is over,
      too; None for no limit.
    checkpointer: saves and restores the whole state; None where another process does.
    seed: seed of the first state.
    environment: name of the environment, for errors.
    group: the processes that learn as one, each of which reads its part of every batch. Only the first
      publishes, saves and reports.
    profiler: traces some of the updates; None for none.

  Attributes:
    step: number of updates done.
    state: the source's state, on the devices.

  Raises:
    ValueError: the newest checkpoint was saved with another configuration.
  """

  def __init__(
    self,
    source: Source,
    config: learner_config.LoopConfig,
    hooks: Hooks,
    *,
    max_environment_steps: int,
    max_seconds: float | None = None,
    checkpointer: checkpoint_lib.Checkpointer | None,
    seed: int,
    environment: str = '',
    group: process_group_lib.Group = process_group_lib.ONE_PROCESS,
    profiler: profile_lib.Profiler | None = None,
  ):
    self._source = source
    self._config = config
    self._max_environment_steps, self._max_seconds = max_environment_steps, max_seconds
    self._hooks = hooks
    self._checkpointer = checkpointer
    self._environment = environment
    self._group = group
    self._profiler = profiler or profile_lib.Profiler(None, pathlib.Path())
    self._logger: Logger | None = None  # only one process of several reports
    self._pending: list[Done] = []
    self._first_update: float | None = None
    self._saved = time.monotonic()
    whole, self.step = self._begin(seed)
    self.state = source.place(whole, self.step)
    self._saved_experience = source.experience
    self._begin_span()

  def _begin(self, seed: int) -> tuple[Tree, int]:
    """The whole state of the newest checkpoint, or a new one; equal in all processes."""
    key = jax.random.key(seed)
    whole, step = self._source.shapes(), 0
    if self._group.is_first:
      restored = None
      if self._checkpointer is not None:
        restored = self._source.restore(self._checkpointer, key)
      if restored is None:
        whole = self._source.init(key)
        logging.info('Training begins with seed %d.', seed)
      else:
        whole, step = restored
        logging.info('Training resumes at update %d.', step)
    whole, step = self._group.broadcast((whole, np.int64(step)))
    return whole, int(step)

  def run(self) -> bool:
    """Trains and saves; returns whether the run is over, not stopped.

    In all processes but the first it returns False.

    Raises:
      FloatingPointError: a metric is not finite; the updates concerned were not saved.
      OSError, ValueError: a checkpoint was not written, see `Checkpointer.save` and `wait`.
      RuntimeError: another process of the group stopped or ended, see `ProcessGroup.leave`.
    """
    if self._group.is_first:
      self._logger = self._hooks.make_logger(self.step)
    try:
      return self._run()
    except FloatingPointError as error:
      raise FloatingPointError(f'environment {self._environment}: {error}') from error
    finally:
      if self._logger is not None:
        self._logger.close()

  def _run(self) -> bool:
    self._source.on_start(self._status())
    try:
      try:
        self._train()
      finally:
        self._profiler.close(self.step)
      finished = self._group.is_first and self._is_over()
      # Also if stopped: a run that resumes does not have the metrics of updates before it.
      if self._group.is_first and self._pending:
        self._report()
      self._save()  # before the source closes, which may wait for what it has begun
    except Exception as error:
      self._group.note_failure(error)
      raise
    finally:
      self._source.close()
    status = self._status(finished)
    self._source.on_end(status)
    if self._checkpointer is not None:
      self._checkpointer.wait()
    if finished:  # the hook may read the last checkpoint
      self._hooks.between(status)
    logging.info('Training %s at update %d.', 'finished' if finished else 'stopped', self.step)
    self._group.leave(finished=finished, was_asked=self._hooks.should_stop)
    return finished

  def _train(self) -> None:
    """Updates until this process, or another of its group, wishes to end."""
    is_one = self._group.size == 1  # else all end together
    while not (is_one and self._wishes_to_end()):
      self._interlude()
      self._hooks.phase('collecting')
      self.state = self._source.collect(self.state)
      ready = self._source.ready(POLL_SECONDS)
      if not ready:
        self._source.on_idle(self._status())
        if time.monotonic() - self._saved > self._config.checkpoint_period:
          self._save()
          self._source.on_save()
        if is_one or not (self._wishes_to_end() or self._group.is_asked_to_end()):
          continue
      if self._ends_together(now=not ready):
        return
      self._update()
      if self.step % self._config.log_period == 0:
        self._report()
      counted = self._config.checkpoint_updates
      late = time.monotonic() - self._saved > self._config.checkpoint_period
      if late or (counted and self.step % counted == 0):
        self._save()
        self._source.on_save()

  def _ends_together(self, *, now: bool) -> bool:
    """Whether all processes of the group end before their next update, as one of them wishes to."""

    def wishes() -> bool:
      self._source.on_idle(self._status())  # others may wait for a batch
      return self._wishes_to_end()

    return self._group.ends(now=now or self._wishes_to_end(), wishes=wishes)

  def _update(self) -> None:
    """One call of the source's `update`."""
    most = self._most_updates()
    if self._pending:  # one call in flight, so batches are sampled in time
      jax.block_until_ready(self._pending[-1].metrics)
    self._profiler.reach(self.step)
    self._hooks.phase(self._source.phase)
    began = time.monotonic()
    with jax.profiler.StepTraceAnnotation('update', step_num=self.step):
      self.state, done = self._source.update(self.state, self.step, most)
    if self._first_update is None:
      self._first_update = time.monotonic() if done.compiled else began
    if done.compiled:
      self._begin_span()
    self.step += done.updates
    self._pending.append(done)
    self._source.on_update(self._status())

  def _most_updates(self) -> int:
    """Number of updates until the next report, checkpoint by count, or edge of a profile.

    Reports end at multiples of their period, or where a run stops, so the later reports of a run that
    resumes are the same.
    """
    counts = [self._config.log_period - self.step % self._config.log_period]
    if self._config.checkpoint_updates:
      counts.append(self._config.checkpoint_updates - self.step % self._config.checkpoint_updates)
    edge = self._profiler.next(self.step)
    if edge:
      counts.append(edge - self.step)
    return min(counts)

  def _interlude(self) -> None:
    """Runs the hook between updates, and leaves its time out of all measurements."""
    began = time.monotonic()
    self._hooks.between(self._status())
    lost = time.monotonic() - began
    self._span_start += lost
    if self._first_update is not None:
      self._first_update += lost

  def _wishes_to_end(self) -> bool:
    return self._hooks.should_stop() or (self._group.is_first and self._is_over())

  def _is_over(self) -> bool:
    """Whether a limit is reached."""
    limit, begun = self._max_seconds, self._first_update
    late = limit is not None and begun is not None and time.monotonic() - begun > limit
    return late or self._source.is_over(self.step, self._max_environment_steps)

  def _status(self, finished: bool = False) -> Status:
    state = self.state
    return Status(
      step=self.step,
      environment_step=self._source.environment_step,
      acting_params=lambda: self._source.acting_params(state),
      finished=finished,
    )

  def _begin_span(self) -> None:
    self._span_start = time.monotonic()
    self._span_step = self.step
    self._span_environment_step = self._source.environment_step

  def _report(self) -> None:
    """Writes the metrics of the span that ends here; FloatingPointError if one is not finite."""
    environment_step = self._source.environment_step
    totals = _totals(self._pending)
    span = Interval(
      step=self.step,
      updates=self.step - self._span_step,
      environment_steps=environment_step - self._span_environment_step,
      seconds=max(time.monotonic() - self._span_start, 1e-9),
    )
    steps = {'learner_step': self.step, 'environment_step': environment_step}
    report = self._source.report(span, totals)
    if self._logger is not None:
      self._logger.write(steps | report)
    self._pending.clear()
    check_finite(totals, self.step, self._config)
    self._begin_span()

  def _save(self) -> None:
    self._hooks.phase('saving')
    self._saved = time.monotonic()
    check_finite(_totals(self._pending), self.step, self._config)  # before anything of it is saved
    if self._checkpointer is not None:
      again = self._source.experience > self._saved_experience  # of a warm-up, which has no updates
      self._saved_experience = self._source.experience
      self._checkpointer.save(self.step, self._source.gather(self.state), again=again)


def means(totals: Mapping[str, float], span: Interval) -> dict[str, float]:
  """Means of metrics over the updates of a span, from their sums."""
  return {name: total / span.updates for name, total in totals.items()}


def _totals(pending: Sequence[Done]) -> dict[str, float]:
  """Sums of each metric over updates; every replica holds the same numbers, so the first is read."""
  totals: collections.defaultdict[str, float] = collections.defaultdict(float)
  first = [jax.tree.map(lambda x: x.addressable_data(0), done.metrics) for done in pending]
  for metrics in jax.device_get(first):
    for name, value in metrics.items():
      totals[name] += float(np.sum(value))
  return dict(totals)


def check_finite(values: Mapping[str, float], step: int, config: learner_config.LoopConfig) -> None:
  """Raises FloatingPointError, which names them and the learning rates to lower, if metrics are not finite."""
  broken = [name for name, value in values.items() if not np.isfinite(value)]
  if broken:
    names = [field.name for field in dataclasses.fields(config)]
    rates = [f'learner.{name}' for name in names if name.endswith('learning_rate')]
    _refuse(broken, step, ' or '.join(rates))


def check_params(params: Tree, step: int) -> None:
  """Raises FloatingPointError, which names some, if parameters of learner step `step` are not finite."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  broken = [jax.tree_util.keystr(path) for path, leaf in leaves if not np.isfinite(leaf).all()]
  if broken:
    _refuse([f'parameters {broken[0]} and {len(broken) - 1} more'], step, 'the learning rate')


def _refuse(broken: Sequence[str], step: int, rates: str) -> None:
  raise FloatingPointError(
    f'learner step {step}: {", ".join(broken)} not finite; the run resumes from its last checkpoint. '
    f'If it happens again, the environment may give numbers that are not finite (`hephaestus doctor '
    f'ENVIRONMENT` plays it); else lower {rates}'
  )
