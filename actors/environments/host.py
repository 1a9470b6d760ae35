"""Environments that are not written in JAX, such as environments of gymnasium: stepped on the host, by threads.

To support another library, implement `LibraryEnv`, and pass a function that makes one to
`HostEnvironment`.
"""

import abc
import atexit
import contextlib
import functools
import inspect
import itertools
import math
import os
import pathlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import dm_env
import jax
import numpy as np
from absl import logging
from dm_env import specs

from hephaestus.actors.environments.environment import (
  FINITE_BOUNDS,
  Environment,
  Observation,
  TimeStep,
  bounds_of,
  check_metrics,
  check_size,
  describe_bounds,
  has_finite_range,
  num_choices,
  remarks,
  start_of,
)

MAX_THREADS = 64  # of instances that are made together; more instances share these
CLOSE_SECONDS = 10.0  # longest wait until instances have closed

# Smaller leaves are no images for agents; see agents/observation.py.
SMALLEST_IMAGE, MAX_CELLS = 8, 2048

ACTION_MASK = 'action_mask'
SINGLE = ''  # the field name of an observation that is one array
ON_HOST = 'this environment is stepped outside the compiled program, by threads'
SLOW = f'{ON_HOST}: far slower than one in JAX'
REFUSAL = f'{ON_HOST}, and cannot be compiled; unroll it by `rollout.make_unroll`'


class Failure(ValueError):  # noqa: N818
  """An environment has failed, or contradicts its specs; names the environment, the file and the line."""

  names_place = True


class LibraryEnv(abc.ABC):
  """Interface of one environment instance of another library, with that library's dtypes.

  One thread makes, resets, steps and closes it. It is reset before the first step and after LAST, and
  its specs are read after a reset.
  """

  @property
  def max_steps(self) -> int | None:
    """The library's own time limit, of at least 1; None without one."""
    return None

  @property
  def inner(self) -> Any:
    """The library's own object, whose file and line are named where it fails."""
    return self

  @property
  @abc.abstractmethod
  def observation_spec(self) -> specs.Array | Mapping[str, specs.Array]:
    """Spec of an observation: one spec, or a flat dict of them."""

  @property
  @abc.abstractmethod
  def action_spec(self) -> specs.BoundedArray:
    """Spec of an action: one of three kinds.

    A `DiscreteArray`; a `BoundedArray` of floats with finite bounds; or a `BoundedArray` of integers with
    one axis and minimum 0, for several choices at once. A `ChoiceSpec` or `ChoicesSpec` has choices that
    `step` takes, and a `ChoiceSpec` an observation that `reset` and `step` give, counted from its `start`.
    """

  @property
  def metrics(self) -> Mapping[str, str]:
    """Metrics of episodes: name -> reduction, see `Environment.metrics`; empty for none."""
    return {}

  @property
  def scalars(self) -> Mapping[str, Any]:
    """Numbers of the newest step by name, of which `metrics` names some."""
    return {}

  @abc.abstractmethod
  def reset(self, seed: int | None) -> dm_env.TimeStep:
    """Begins an episode; returns its FIRST time step.

    Args:
      seed: reseeds the instance, in [0, 2**32); None keeps its random state.
    """

  @abc.abstractmethod
  def step(self, action: np.ndarray) -> dm_env.TimeStep:
    """Takes one action, with the shape of the action spec; returns a MID or LAST time step."""

  def render(self) -> np.ndarray | None:
    """Renders the current state, [H, W, 3] uint8; None if there are no frames."""
    return None

  def close(self) -> None:
    """Frees its resources; no other call follows."""
    return


class HostEnvironment(Environment):
  """An environment that is stepped on the host: its specs, and a factory of instances to step.

  It has specs, a time limit and frames like any `Environment`, but no pure functions: `reset` and `step`
  raise ValueError.

  The specs describe the time steps of an `Instance`, in JAX's dtypes: 64 bits become 32, and float32 for
  integers beyond int32; an 'action_mask' becomes [A] bool; images with channels first, stacks of frames
  and images without channels become [H, W, C]. `fields` has the parts of an observation by name; the
  name is SINGLE if it is one array.
  """

  def __init__(
    self,
    make_env: Callable[[], LibraryEnv],
    max_steps: int | None,
    metrics: Mapping[str, str] | None = None,
    *,
    name: str = 'environment',
    make_rendered: Callable[[], LibraryEnv] | None = None,
  ):
    """Makes one instance, checks one reset and one step of it against its specs, and closes it.

    Args:
      make_env: function that makes a new instance of the library's environment at every call.
      max_steps: time limit of at least 1, which truncates; None for the library's own.
      metrics: metrics in addition to `LibraryEnv.metrics`, whose reductions they may replace.
      name: its name in error messages, such as 'gymnasium/CartPole-v1'.
      make_rendered: as `make_env`, for instances whose frames are wanted; None for `make_env` itself.

    Raises:
      Failure: a reset or a step of the instance fails; a ValueError, as are all others.
      ValueError: a spec or metric is not supported; a step type, shape, dtype or value contradicts the specs
        or `LibraryEnv`; or the time limit is invalid, or missing. The message names it.
    """
    if max_steps is not None:
      _check_limit(max_steps)
    self.name, self.make_env, self.make_rendered = name, make_env, make_rendered or make_env
    self._metrics: Mapping[str, str] = {} if metrics is None else metrics
    check_metrics(self._metrics)
    instance = Instance(self, _Thread(), make_env)
    try:
      instance.call(lambda: self._ask(instance, max_steps))
    except Failure:
      raise
    except ValueError as error:
      raise ValueError(f'environment.name={name!r}: {error}') from error
    finally:
      instance.close()

  def _ask(self, instance: 'Instance', max_steps: int | None) -> None:
    """Reads the specs and the time limit of an instance, and checks a reset and a step; see `__init__`."""
    env = instance.env
    limit = env.max_steps if max_steps is None else max_steps
    if limit is None:
      raise ValueError('has no limit of its own; give environment.max_steps, such as 1000')
    _check_limit(limit)
    self._max_steps: int = limit
    check_metrics(env.metrics)
    self._metrics = {**env.metrics, **self._metrics}
    with instance.naming('reset'):
      first = env.reset(0)
    self._action_spec = _action_spec(env.action_spec)
    self.fields = _fields(env.observation_spec, self._action_spec)
    with instance.naming('reset'):
      _check_timestep(self, 'reset', first)
      if not first.first():
        raise ValueError(f'timestep.step_type: reset gives {first.step_type!r}, FIRST is needed')
    some_action = _some_action(self._action_spec, first.observation)
    with instance.naming('step'):
      following = env.step(some_action + start_of(self._action_spec))
      _check_timestep(self, 'step', following)
      if following.first():
        raise ValueError('timestep.step_type: step gives FIRST, MID or LAST is needed')
      for name in ('reward', 'discount'):
        value = np.asarray(getattr(following, name))
        if value.shape != () or value.dtype.kind not in 'biuf' or not np.isfinite(value):
          raise ValueError(f'timestep.{name}: step gives {value!r}, one finite number is needed')

  @property
  def observation_spec(self) -> Any:
    if SINGLE in self.fields:
      return self.fields[SINGLE].spec
    return {name: field.spec for name, field in self.fields.items()}

  @property
  def action_spec(self) -> specs.BoundedArray:
    return self._action_spec

  @property
  def max_steps(self) -> int:
    return self._max_steps

  @property
  def metrics(self) -> Mapping[str, str]:
    return self._metrics

  def make(self, count: int, *, is_rendered: bool = False) -> list['Instance']:
    """Returns new instances, with a thread each or `MAX_THREADS` together; reset each before its first step.

    Without `is_rendered` they may have no frames.
    """
    threads = [_Thread() for _ in range(min(count, MAX_THREADS))]
    make_env = self.make_rendered if is_rendered else self.make_env
    return [Instance(self, threads[n % len(threads)], make_env) for n in range(count)]

  def reset(self, key: Any) -> Any:
    """Raises ValueError; see `Instance.reset`."""
    raise ValueError(REFUSAL)

  def step(self, key: Any, state: Any, action: Any) -> Any:
    """Raises ValueError; see `Instance.step`."""
    raise ValueError(REFUSAL)

  def render(self, state: 'Instance') -> np.ndarray | None:
    return state.render()


class Instance:
  """One environment with auto-reset as in `wrappers.AutoReset`, and a time limit.

  The step after LAST ignores the action and returns FIRST of a new episode. Time steps are NumPy
  arrays with the specs of `HostEnvironment`. `given` are the metrics of which a step has given a number.

  One fixed thread makes the library's environment, at the first use, and resets, steps, renders and
  closes it, since SQLite, asyncio and other libraries work in the thread that began with them only.
  Instances that are open when the process ends are closed then.
  """

  def __init__(
    self,
    environment: HostEnvironment,
    thread: '_Thread',
    make_env: Callable[[], LibraryEnv],
  ):
    self._environment = environment
    self._thread = thread
    self._make_env = make_env
    self._env: LibraryEnv | None = None
    self._num_steps = 0
    self._is_over = False
    self.given: set[str] = set()

  @property
  def env(self) -> LibraryEnv:
    """The library's environment; read it in this instance's thread only, see `call`."""
    if self._env is None:
      self._env = self._make_env()
      _open.add(self)
    return self._env

  @property
  def fields(self) -> Iterable['Field']:
    """The fields of its observations; none before the specs are known."""
    return vars(self._environment).get('fields', {}).values()

  def call(self, function: Callable[[], Any]) -> Any:
    """Calls a function in this instance's thread; returns its result, or raises its error."""
    if threading.current_thread() is self._thread.thread:
      return function()
    results: _Results = queue.SimpleQueue()
    self.send(function, results)
    return _result(results)

  def send(self, function: Callable[[], Any], results: '_Results') -> None:
    """Has this instance's thread call a function later, and put its result or error into `results`."""
    self._thread.calls.put((function, results))

  def reset(self, seed: int | None) -> TimeStep:
    """Begins an episode and returns its FIRST time step; see `LibraryEnv.reset` and `step`.

    Raises:
      Failure: it raises an error, or its observation contradicts the specs, see `Field.read`.
    """
    return self.call(lambda: self._reset(seed))

  def step(self, action: np.ndarray) -> TimeStep:
    """Takes one action, or begins the next episode after LAST; raises Failure as `reset`."""
    return self.call(lambda: self._step(action))

  def render(self) -> np.ndarray | None:
    """Renders the current state, [H, W, 3] uint8, a copy; None if there are no frames."""
    frame = self.call(lambda: self.env.render())
    if frame is None:
      return None
    return np.array(frame)  # a library may draw into the same array again

  def close(self) -> None:
    """Frees its resources, see `close`; a later use makes a new environment."""
    close([self])

  def end(self) -> None:
    """Closes the library's environment; in this instance's thread only."""
    env, self._env = self._env, None
    _open.discard(self)
    if env is not None:
      env.close()

  @contextlib.contextmanager
  def naming(self, function: str) -> Iterator[None]:
    """Within the context, any error becomes a `Failure` of the library's `function`, 'reset' or 'step'."""
    try:
      yield
    except BaseException as error:  # a process whose environment calls sys.exit(0) has not finished
      said = (
        str(error) if isinstance(error, ValueError) else f'the environment raised {error!r:.300}'
      )
      inner = None if self._env is None else self._env.inner
      raise Failure(
        f'environment.name={self._environment.name!r}: {said}{_place(error, inner, function)}'
      ) from error

  def _reset(self, seed: int | None) -> TimeStep:
    self._num_steps = 0
    with self.naming('reset'):
      timestep = self.env.reset(seed)
      return self._read(timestep._replace(reward=None, discount=None))

  def _step(self, action: np.ndarray) -> TimeStep:
    if self._is_over:
      return self._reset(None)
    self._num_steps += 1
    with self.naming('step'):
      timestep = self._read(self.env.step(action + start_of(self._environment.action_spec)))
    if self._num_steps >= self._environment.max_steps and not self._is_over:
      self._is_over = True
      last: Any = np.int32(dm_env.StepType.LAST)
      timestep = timestep._replace(step_type=last)
    return timestep

  def _read(self, timestep: dm_env.TimeStep) -> TimeStep:
    self._is_over = timestep.last()
    step_type: Any = np.int32(timestep.step_type)
    reward: Any = np.float32(0.0 if timestep.reward is None else timestep.reward)
    if not np.isfinite(reward):
      raise ValueError(f'timestep.reward: is {reward} after {self._num_steps} steps of an episode')
    discount: Any = np.float32(1.0 if timestep.discount is None else timestep.discount)
    if not 0 <= discount <= 1:
      raise ValueError(f'timestep.discount: is {discount}, and must be within [0, 1]')
    observation = self._observe(timestep.observation)
    return TimeStep(step_type, reward, discount, observation, self._measure())

  def _measure(self) -> dict[str, Any]:
    """Values of the metrics at the newest step, [] float32; 0 where the step gives none."""
    names = self._environment.metrics
    scalars = self.env.scalars if names else {}
    self.given.update(names.keys() & scalars)
    return {name: _scalar(name, scalars.get(name, 0.0)) for name in names}

  def _observe(self, observation: Any) -> Observation:
    fields = self._environment.fields
    if SINGLE in fields:
      return fields[SINGLE].read(observation)
    for name, field in fields.items():
      if not isinstance(observation, Mapping) or name not in observation:
        raise ValueError(
          f'timestep.observation{field.path}: the spec has it, this observation does not'
        )
    return {name: field.read(observation[name]) for name, field in fields.items()}


def _place(error: BaseException, inner: Any, function: str) -> str:
  """' (FILE:LINE, in FUNCTION)': where the environment `inner` raised an error, or defines the function."""
  ours = str(pathlib.Path(__file__).parents[1])
  frames: list[traceback.FrameSummary] = []
  each: BaseException | None = error
  while each is not None:
    found = traceback.extract_tb(each.__traceback__)
    frames = [frame for frame in found if not frame.filename.startswith(ours)] or frames
    each = each.__cause__
  method: Any = getattr(inner, function, None)
  code = getattr(inspect.unwrap(method), '__code__', None)
  if not frames and code is not None:  # it has raised nothing, but returned what it must not
    return f' ({code.co_filename}:{code.co_firstlineno}, {function})'
  of_environment = [frame for frame in frames if code and frame.filename == code.co_filename]
  for frame in reversed(of_environment or frames):
    return f' ({frame.filename}:{frame.lineno}, in {frame.name})'
  return ''


_Results = queue.SimpleQueue[tuple[Any, Exception | None]]  # of calls: result and error
_open: set[Instance] = set()  # instances with an environment that is not closed yet


class _Thread:
  """A daemon that calls the functions in `calls` in turn; it ends with the last reference to this object."""

  def __init__(self):
    self.calls: queue.SimpleQueue = queue.SimpleQueue()
    # A daemon, so that a step that hangs does not keep the process from ending.
    self.thread = threading.Thread(
      target=_serve, args=(self.calls,), name='environment', daemon=True
    )
    self.thread.start()

  def __del__(self):
    self.calls.put(None)


def _serve(calls: queue.SimpleQueue) -> None:
  while (call := calls.get()) is not None:
    function, results = call
    try:
      results.put((function(), None))
    except Exception as error:
      results.put((None, error))
    except BaseException as error:  # a process whose environment calls sys.exit(0) has not finished
      crash = RuntimeError(f'the environment raised {error!r}')
      crash.__cause__ = error
      results.put((None, crash))
    del call, function, results  # which refer to the instance, while this thread waits


def _result(results: _Results) -> Any:
  value, error = results.get()
  if error is not None:
    raise error
  return value


def for_each(
  instances: Sequence[Instance], function: Callable[[int], Any], heartbeat: Callable[[], Any]
) -> None:
  """Calls a function with the index of each instance, in the instance's thread.

  Those that wait do so concurrently. The heartbeat is called in the caller's thread after each call.

  Raises:
    Exception: what the first call that failed raised, or the heartbeat.
  """
  results: _Results = queue.SimpleQueue()
  for n, instance in enumerate(instances):
    instance.send(functools.partial(function, n), results)
  for _ in instances:
    _result(results)
    heartbeat()


def close(instances: Iterable[Instance]) -> None:
  """Closes instances, each in its thread, and waits for all; logs errors, and what takes too long."""
  results: _Results = queue.SimpleQueue()
  instances = list(instances)
  for instance in instances:
    instance.send(instance.end, results)
  deadline = time.monotonic() + CLOSE_SECONDS
  for _ in instances:
    try:
      _, error = results.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
      logging.warning('Some environments have not closed within %g s.', CLOSE_SECONDS)
      return
    if error is not None:
      logging.warning('An environment has not closed: %s', error)
  fields = {field for instance in instances for field in instance.fields}
  for field in fields:
    if field.num_outside > 1:
      logging.warning(
        'timestep.observation%s: %d observations had values outside the spec.',
        field.path, field.num_outside,
      )  # fmt: skip


atexit.register(lambda: close(_open))
os.register_at_fork(after_in_child=_open.clear)  # they belong to the parent, as their threads do


class Field:
  """One array of an observation, and its conversion from the library's own spec `given` to `spec`.

  The `path`, such as "['name']", names it in error messages, and `axis` is that of the height of an image
  whose axes are rearranged to [H, W, C]. `num_outside` counts the arrays read that had values outside the
  bounds of `given`.
  """

  def __init__(self, path: str, given: specs.Array, spec: specs.Array, axis: int | None = None):
    self.path = path
    self._axis = axis  # of the height, where images are rearranged
    self.spec = spec
    self.num_outside = 0
    self._shape, self._dtype = given.shape, spec.dtype
    self._num_choices = given.num_values if isinstance(given, specs.DiscreteArray) else 0
    self._start = start_of(given)
    limits: Any = bounds_of(spec)
    self._safe: tuple[Any, ...] = ()  # dtypes whose values cannot be outside
    if spec.dtype.kind in 'iu':
      ends = np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max
      limits = ends if limits is None else limits
      never = all(np.all(limit == end) for limit, end in zip(limits, ends, strict=True))
      self._safe = (spec.dtype,) if never else ()
    self._limits = None if limits is None or np.isinf(limits).all() else limits

  def read(self, value: Any) -> np.ndarray:
    """Converts a value that the library returned to the dtype of `spec`.

    Values outside the bounds are counted, and the first is logged. Integers beyond the dtype of `spec`
    become its nearest number.

    Raises:
      ValueError: its shape differs from `given`, it is none of the choices, or not finite.
    """
    array = np.asarray(value)
    if array.shape != self._shape:
      raise ValueError(
        f'timestep.observation{self.path}: the spec says {list(self._shape)}, '
        f'it is {list(array.shape)}'
      )
    array = self._chosen(array, 'it is')
    if self._axis is not None:
      array = _image(array, self._axis)
    if self._limits is not None and array.dtype not in self._safe:
      array = self._within(array, *self._limits)
    with np.errstate(over='ignore'):
      array = array.astype(self._dtype, copy=False)
    if self._dtype.kind == 'f' and not np.isfinite(array).all():
      raise ValueError(f'timestep.observation{self.path}: has a number that is not finite')
    return array

  def _within(self, array: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """Counts values outside the bounds, and moves integers into the range of the dtype."""
    is_integer = self._dtype.kind in 'iu'
    if not is_integer:
      array = array.astype(self._dtype)
    is_outside = ~((array >= low) & (array <= high))  # also true for NaN
    if not is_outside.any():
      return array
    self.num_outside += 1
    if self.num_outside == 1:
      logging.warning(
        'timestep.observation%s: the spec says %g to %g, it is %g; further ones are counted.',
        self.path, np.min(low), np.max(high), array[is_outside][0],
      )  # fmt: skip
    if not is_integer:
      return array
    limits = np.iinfo(self._dtype)
    return np.clip(array.astype(np.float64), limits.min, limits.max)

  def check(self, function: str, value: Any) -> None:
    """Raises ValueError if a value that reset or step gave contradicts the library's spec, or is not finite."""
    array = np.asarray(value)
    name = f'timestep.observation{self.path}'
    wanted = self._dtype
    is_mask = self._dtype.kind == 'b' and array.dtype.kind in 'iu'  # Gymnasium's masks are int8.
    if array.shape != self._shape or not (is_mask or np.can_cast(array, wanted, 'same_kind')):
      raise ValueError(
        f'{name}: the spec says {wanted}{list(self._shape)}, '
        f'{function} gives {array.dtype}{list(array.shape)}'
      )
    with np.errstate(over='ignore'):
      is_finite = array.dtype.kind != 'f' or np.isfinite(array.astype(self._dtype)).all()
    if not is_finite:
      raise ValueError(f'{name}: {function} gives a number that is not finite')
    self._chosen(array, f'{function} gives')

  def _chosen(self, array: np.ndarray, given: str) -> np.ndarray:
    """Counts a choice from 0; ValueError if there is no such choice. Other arrays stay as they are."""
    if not self._num_choices:
      return array
    from_zero = array - self._start
    if not (0 <= from_zero < self._num_choices and from_zero == int(from_zero)):
      begin = f' from {self._start} on' if self._start else ''
      raise ValueError(
        f'timestep.observation{self.path}: the spec has {self._num_choices} values{begin}, {given} {array}'
      )
    return from_zero


def _fields(given: Any, action_spec: specs.BoundedArray) -> dict[str, Field]:
  """The fields of an observation by name; SINGLE for one that is no dict."""
  if not isinstance(given, Mapping):
    return {SINGLE: _field('', given)}
  fields = {name: _field(f'[{name!r}]', spec) for name, spec in given.items()}
  if not set(fields) - {ACTION_MASK}:
    raise ValueError('observation_spec: is empty; at least one array is needed')
  mask = given.get(ACTION_MASK)
  num_values = sum(num_choices(action_spec))
  if mask is not None and num_values:
    if mask.shape != (num_values,):
      raise ValueError(
        f"observation_spec['{ACTION_MASK}']: has shape {list(mask.shape)}, "
        f'needed is [{num_values}], the number of actions, or of all choices of each'
      )
    legal = specs.BoundedArray(mask.shape, bool, False, True, ACTION_MASK)
    fields[ACTION_MASK] = Field(f'[{ACTION_MASK!r}]', mask, legal)
  return fields


def _field(path: str, given: Any) -> Field:
  if not isinstance(given, specs.Array) or given.dtype.kind not in 'biuf':
    raise ValueError(
      f'observation_spec{path}={given!r}: an array of numbers is needed, or a flat dict of arrays'
    )
  check_size(f'observation_spec{path}', given)
  if isinstance(given, specs.DiscreteArray):
    spec: specs.Array = given.replace(dtype=np.int32)
  else:
    spec = _converted(given)
  axis = _image_axis(spec)
  if axis is not None and isinstance(spec, specs.BoundedArray):
    low, high = (
      _image(np.broadcast_to(bound, spec.shape), axis) for bound in (spec.minimum, spec.maximum)
    )
    spec = specs.BoundedArray(low.shape, spec.dtype, low, high, spec.name)
  elif axis is not None:
    spec = specs.Array(_image(np.empty(spec.shape, bool), axis).shape, spec.dtype, spec.name)
  return Field(path, given, spec, axis)


def _image_axis(spec: specs.Array) -> int | None:
  """The axis of the height, next to the width, of an image that is not [H, W, C]; None for other arrays.

  The two adjacent axes with the largest product are height and width. All others are channels: colours,
  or the frames of a stack. An image without channels and a stack of coloured frames are known by bytes.
  Of three axes, the first is of channels only if it is the shortest: planes of features, such as
  [10, 10, 27], have many channels, and they are last.
  """
  ranks = (2, 3, 4) if spec.dtype == np.uint8 else (3,) if spec.dtype.kind == 'f' else ()
  if len(spec.shape) not in ranks or math.prod(spec.shape) <= MAX_CELLS:
    return None
  sizes = [
    height * width if min(height, width) >= SMALLEST_IMAGE else 0
    for height, width in itertools.pairwise(spec.shape)
  ]
  axis = sizes.index(max(sizes))
  are_last = len(spec.shape) == 3 and spec.shape[0] >= min(spec.shape[1:])
  return None if not sizes[axis] or are_last else axis


def _image(array: np.ndarray, axis: int) -> np.ndarray:
  """[H, W, C] of an image whose height and width are the given axis and the next one."""
  moved = np.moveaxis(array, (axis, axis + 1), (0, 1))
  return moved.reshape(*moved.shape[:2], -1)


def _converted(given: specs.Array) -> specs.Array:
  """The spec in JAX's dtype; float32 for integers that may be beyond the range in JAX."""
  dtype = jax.dtypes.canonicalize_dtype(given.dtype)
  is_bounded = isinstance(given, specs.BoundedArray)
  if given.dtype.kind in 'iu':
    ends, limits = np.iinfo(given.dtype), np.iinfo(dtype)
    low, high = (given.minimum, given.maximum) if is_bounded else (ends.min, ends.max)
    if int(np.min(low)) < limits.min or int(np.max(high)) > limits.max:
      dtype = np.dtype(np.float32)
  if not is_bounded:
    return specs.Array(given.shape, dtype, given.name)
  with np.errstate(over='ignore'):
    low, high = (np.asarray(bound).astype(dtype) for bound in (given.minimum, given.maximum))
  return specs.BoundedArray(given.shape, dtype, low, high, given.name)


def _action_spec(given: Any) -> specs.BoundedArray:
  if isinstance(given, specs.DiscreteArray):
    return given.replace(dtype=np.int32)
  if not isinstance(given, specs.BoundedArray) or given.dtype.kind not in 'iuf':
    raise ValueError(
      f'action_spec={given!r}: a DiscreteArray, or a BoundedArray of numbers is needed'
    )
  if given.dtype.kind in 'iu':
    limits = np.iinfo(np.int32)
    bounds = np.broadcast_arrays(given.minimum, given.maximum)
    low, high = (np.clip(bound, limits.min, limits.max) for bound in bounds)
    spec = given.replace(dtype=np.int32, minimum=low, maximum=high)
    num_choices(spec)  # raises ValueError for other ranks
    return spec
  spec = _converted(given)
  if not has_finite_range(spec):
    raise ValueError(f'action_spec={given!r}: {FINITE_BOUNDS}')
  return spec


def check_values(
  environment: HostEnvironment, seed: int, *, num_steps: int = 1024, patience_seconds: float = 3.0
) -> list[str]:
  """Checks the values that an environment returns, by some steps with random actions.

  There are at most `num_steps`, with auto-reset, and none begins after the patience.

  Returns:
    Warnings; see `environment.remarks`.

  Raises:
    ValueError: a value is not finite or outside the bounds of its spec, an observation has another
      shape, a discount is outside [0, 1], or more than half of the steps have no legal action; the
      message names the field.
  """
  (instance,) = environment.make(1)
  generator = np.random.default_rng(seed)
  began, played, stuck, ended = time.monotonic(), 0, 0, False
  with contextlib.closing(instance):
    timestep = instance.reset(seed)
    _check_played(environment, timestep)
    while played < num_steps and time.monotonic() - began < patience_seconds:
      timestep = instance.step(_random_action(generator, environment.action_spec, timestep))
      _check_played(environment, timestep)
      ended |= bool(timestep.last())
      masks = _masks(environment.action_spec, timestep.observation)
      stuck += not (timestep.last() or all(mask.any() for mask in masks))
      played += 1
  lacking = [
    f'environment.metrics.{name}: none of {played:,} steps with random actions gave this number; a step '
    'without it counts as 0'
    for name in environment.metrics.keys() - instance.given
  ]
  return remarks(environment.max_steps, played, stuck, ended=ended) + sorted(lacking)


def _scalar(name: str, value: Any) -> np.float32:
  array = np.asarray(value)
  if array.shape != () or array.dtype.kind not in 'biuf' or not np.isfinite(array):
    raise ValueError(
      f'environment.metrics.{name}: a step gives {value!r}, a finite number is needed'
    )
  return np.float32(array)


def _check_played(environment: HostEnvironment, timestep: TimeStep) -> None:
  while_played = 'when the environment is played'
  for name, field in environment.fields.items():
    value = timestep.observation[name] if name else timestep.observation
    if not np.isfinite(value).all():
      raise ValueError(f'timestep.observation{field.path}: is not always finite {while_played}')
    bounds = bounds_of(field.spec)
    is_outside = False if bounds is None else (value < bounds[0]) | (value > bounds[1])
    if np.any(is_outside):
      raise ValueError(
        f'timestep.observation{field.path}: the spec says {describe_bounds(field.spec)}, it is '
        f'{value[is_outside][0]:g} {while_played}'
      )
  for name in ('reward', 'discount'):
    value = getattr(timestep, name)
    if not np.isfinite(value) or (name == 'discount' and not 0 <= value <= 1):
      needed = 'within [0, 1]' if name == 'discount' else 'finite'
      raise ValueError(f'timestep.{name}: is not always {needed} {while_played}')


def _masks(spec: specs.BoundedArray, observation: Any) -> list[np.ndarray]:
  """One mask for each choice, bool; no masks for a continuous action, or without 'action_mask'."""
  choices = num_choices(spec)
  if not (choices and isinstance(observation, Mapping) and ACTION_MASK in observation):
    return []
  return np.split(np.asarray(observation[ACTION_MASK]), np.cumsum(choices)[:-1])


def _random_action(
  generator: np.random.Generator, spec: specs.BoundedArray, timestep: TimeStep
) -> np.ndarray:
  choices = num_choices(spec)
  if not choices:
    return generator.uniform(spec.minimum, spec.maximum, spec.shape).astype(spec.dtype)
  masks = _masks(spec, timestep.observation) or [np.ones(count, bool) for count in choices]
  # At LAST, where the action is not read, there may be no legal one.
  legal = [np.flatnonzero(mask if mask.any() else ~mask) for mask in masks]
  drawn = [generator.choice(each) for each in legal]
  return np.asarray(drawn, spec.dtype).reshape(spec.shape)


def _check_limit(max_steps: Any) -> None:
  if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
    raise ValueError(f'max_steps={max_steps!r}: a whole number of at least 1 is needed')


def _check_timestep(environment: HostEnvironment, function: str, timestep: Any) -> None:
  if not isinstance(timestep, dm_env.TimeStep):
    raise ValueError(f'{function} must return a dm_env.TimeStep, not {timestep!r}')
  observation = timestep.observation
  for name, field in environment.fields.items():
    if name and (not isinstance(observation, Mapping) or name not in observation):
      raise ValueError(f'timestep.observation{field.path}: the spec has it, {function} does not')
    field.check(function, observation[name] if name else observation)


def _some_action(spec: specs.BoundedArray, observation: Any) -> np.ndarray:
  masks = _masks(spec, observation)
  if not masks:
    return np.clip(np.zeros(spec.shape, spec.dtype), spec.minimum, spec.maximum)
  return np.asarray([np.argmax(mask) for mask in masks], spec.dtype).reshape(spec.shape)
