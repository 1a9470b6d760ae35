"""Environments that are not written in JAX, such as those of gymnasium: stepped on the host, by threads.

To support another library, implement `LibraryEnv`, and pass a function that makes one to
`HostEnvironment`.
"""

import abc
import time
from collections.abc import Callable, Mapping
from typing import Any

import dm_env
import jax
import numpy as np
from dm_env import specs

from hephaestus.actors.environments.environment import (
  Environment,
  Observation,
  TimeStep,
  bounds_of,
  describe_bounds,
  num_choices,
  remarks,
)

ACTION_MASK = 'action_mask'
SINGLE = ''  # the field name of an observation that is one array
REFUSAL = (
  'this environment is stepped outside the compiled program, and cannot be compiled together with the '
  'update; add --no-fused'
)


class LibraryEnv(abc.ABC):
  """Interface of one environment instance of another library, with that library's dtypes.

  The caller resets it before the first step and after LAST, and uses it from one thread at a time.
  """

  @property
  @abc.abstractmethod
  def observation_spec(self) -> specs.Array | Mapping[str, specs.Array]:
    """Spec of an observation: one spec, or a flat dict of them."""

  @property
  @abc.abstractmethod
  def action_spec(self) -> specs.BoundedArray:
    """Spec of an action: one of three kinds.

    A `DiscreteArray`; a `BoundedArray` of floats with finite bounds; or a `BoundedArray` of integers with
    one axis and minimum 0, for several choices at once.
    """

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

  The specs describe the time steps of an `Instance`, in JAX's dtypes: 64 bits become 32, an observed
  `DiscreteArray` becomes a one-hot vector, and an 'action_mask' becomes [A] bool.

  Attributes:
    make_env: function that makes a new instance of the library's environment.
    fields: name -> field of an observation; the name is SINGLE if an observation is one array.
  """

  def __init__(self, make_env: Callable[[], LibraryEnv], max_steps: int):
    """Makes one instance, reads its specs and closes it.

    Args:
      make_env: function that makes a new instance at every call.
      max_steps: time limit of at least 1, which truncates.

    Raises:
      ValueError: a spec is not supported, or the time limit is invalid; the message names it.
    """
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
      raise ValueError(f'max_steps={max_steps!r}: a whole number of at least 1 is needed')
    self.make_env = make_env
    self._max_steps = max_steps
    env = make_env()
    self._action_spec = _action_spec(env.action_spec)
    self.fields = _fields(env.observation_spec, self._action_spec)
    env.close()

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

  def make(self) -> 'Instance':
    """Makes a new instance, with auto-reset and the time limit; reset it before the first step."""
    return Instance(self.make_env(), self.fields, self.max_steps)

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
  arrays with the specs of `HostEnvironment`.
  """

  def __init__(self, env: LibraryEnv, fields: dict[str, 'Field'], max_steps: int):
    """Args: `env` to step, `fields` of its observations by name, and the time limit `max_steps`."""
    self._env = env
    self._fields = fields
    self._max_steps = max_steps
    self._num_steps = 0
    self._is_over = False

  def reset(self, seed: int | None) -> TimeStep:
    """Begins an episode and returns its FIRST time step; see `LibraryEnv.reset`.

    Raises:
      ValueError: see `step`.
    """
    self._num_steps = 0
    timestep = self._env.reset(seed)
    return self._read(timestep._replace(reward=None, discount=None))

  def step(self, action: np.ndarray) -> TimeStep:
    """Takes one action, or begins the next episode after LAST; returns the new time step.

    Raises:
      ValueError: the shape of an observation differs from its spec; the message names the field.
    """
    if self._is_over:
      return self.reset(None)
    self._num_steps += 1
    timestep = self._read(self._env.step(action))
    if self._num_steps >= self._max_steps and not self._is_over:
      self._is_over = True
      last: Any = np.int32(dm_env.StepType.LAST)
      timestep = timestep._replace(step_type=last)
    return timestep

  def render(self) -> np.ndarray | None:
    """Renders the current state, [H, W, 3] uint8; None if there are no frames."""
    return self._env.render()

  def close(self) -> None:
    """Frees its resources; no other call follows."""
    self._env.close()

  def _read(self, timestep: dm_env.TimeStep) -> TimeStep:
    self._is_over = timestep.last()
    step_type: Any = np.int32(timestep.step_type)
    reward: Any = np.float32(0.0 if timestep.reward is None else timestep.reward)
    discount: Any = np.float32(1.0 if timestep.discount is None else timestep.discount)
    return TimeStep(step_type, reward, discount, self._observe(timestep.observation))

  def _observe(self, observation: Any) -> Observation:
    if SINGLE in self._fields:
      return self._fields[SINGLE].read(observation)
    return {name: field.read(observation[name]) for name, field in self._fields.items()}


class Field:
  """One array of an observation, and its conversion from the library's dtype.

  Attributes:
    path: the field in error messages, such as "['name']".
    spec: spec of the converted array; the argument `given` is the library's own spec.
  """

  def __init__(self, path: str, given: specs.Array, spec: specs.Array):
    self.path = path
    self.spec = spec
    self._shape, self._dtype = given.shape, spec.dtype
    is_choice = isinstance(given, specs.DiscreteArray)
    self._one_hot = np.eye(given.num_values, dtype=spec.dtype) if is_choice else None

  def read(self, value: Any) -> np.ndarray:
    """Converts a value that the library returned to the dtype and, if it is one-hot, shape of `spec`.

    Raises:
      ValueError: its shape is not that of `given`, the spec that the library declares.
    """
    if np.shape(value) != self._shape:
      raise ValueError(
        f'timestep.observation{self.path}: the spec says {list(self._shape)}, '
        f'it is {list(np.shape(value))}'
      )
    if self._one_hot is not None:
      return self._one_hot[value]
    return np.asarray(value, self._dtype)

  def check(self, function: str, value: Any) -> None:
    """Raises ValueError if a value of the library contradicts the library's spec, or is not finite.

    Args:
      function: function that gave the value, for the message: 'reset' or 'step'.
      value: value before conversion.
    """
    array = np.asarray(value)
    name = f'timestep.observation{self.path}'
    wanted = np.dtype(np.int32) if self._one_hot is not None else self._dtype
    is_mask = self._dtype.kind == 'b' and array.dtype.kind in 'iu'  # Gymnasium's masks are int8.
    if array.shape != self._shape or not (is_mask or np.can_cast(array, wanted, 'same_kind')):
      raise ValueError(
        f'{name}: the spec says {wanted}{list(self._shape)}, '
        f'{function} gives {array.dtype}{list(array.shape)}'
      )
    if array.dtype.kind == 'f' and not np.isfinite(array.astype(self._dtype)).all():
      raise ValueError(f'{name}: {function} gives a number that is not finite')
    if self._one_hot is not None and not 0 <= array < len(self._one_hot):
      raise ValueError(
        f'{name}: the spec has {len(self._one_hot)} values, {function} gives {array}'
      )


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
  if isinstance(given, specs.DiscreteArray):
    spec = specs.BoundedArray((given.num_values,), np.float32, 0.0, 1.0, given.name)
  else:
    bounds = (given.minimum, given.maximum) if isinstance(given, specs.BoundedArray) else None
    spec = _bounded(given, bounds)
  return Field(path, given, spec)


def _bounded(given: specs.Array, bounds: Any) -> specs.Array:
  """The spec in JAX's dtype, with its bounds clipped to the range of that dtype."""
  dtype = jax.dtypes.canonicalize_dtype(given.dtype)
  if bounds is None:
    return specs.Array(given.shape, dtype, given.name)
  if dtype.kind in 'iu':
    bounds = np.clip(np.broadcast_arrays(*bounds), np.iinfo(dtype).min, np.iinfo(dtype).max)
  with np.errstate(over='ignore'):
    low, high = (np.asarray(bound).astype(dtype) for bound in bounds)
  return specs.BoundedArray(given.shape, dtype, low, high, given.name)


def _action_spec(given: Any) -> specs.BoundedArray:
  if isinstance(given, specs.DiscreteArray):
    return specs.DiscreteArray(given.num_values, np.int32, given.name)
  if not isinstance(given, specs.BoundedArray) or given.dtype.kind not in 'iuf':
    raise ValueError(
      f'action_spec={given!r}: a DiscreteArray, or a BoundedArray of numbers is needed'
    )
  spec = _bounded(given, (given.minimum, given.maximum))
  if given.dtype.kind in 'iu':
    spec = specs.BoundedArray(spec.shape, np.int32, spec.minimum, spec.maximum, spec.name)
    num_choices(spec)  # raises ValueError for other ranks
    return spec
  if not (np.isfinite(spec.minimum).all() and np.isfinite(spec.maximum).all()):
    raise ValueError(f'action_spec={given!r}: finite bounds are needed')
  return spec


def check(environment: HostEnvironment) -> None:
  """Checks an environment against its specs, by one reset and one step of an instance.

  Raises:
    ValueError: a step type, shape, dtype or value contradicts the specs or `LibraryEnv`; the message
      names the field.
  """
  env = environment.make_env()
  first = env.reset(0)
  _check_timestep(environment, 'reset', first)
  if not first.first():
    raise ValueError(f'timestep.step_type: reset gives {first.step_type!r}, FIRST is needed')
  following = env.step(_some_action(environment.action_spec, first.observation))
  _check_timestep(environment, 'step', following)
  if following.first():
    raise ValueError('timestep.step_type: step gives FIRST, MID or LAST is needed')
  env.close()
  for name in ('reward', 'discount'):
    value = np.asarray(getattr(following, name))
    if value.shape != () or value.dtype.kind not in 'biuf' or not np.isfinite(value):
      raise ValueError(f'timestep.{name}: step gives {value!r}, one finite number is needed')


def check_values(
  environment: HostEnvironment, seed: int, *, num_steps: int = 1024, patience_seconds: float = 3.0
) -> list[str]:
  """Checks the values that an environment returns, by some steps with random actions.

  Args:
    environment: environment to check.
    seed: seed of the reset and the actions.
    num_steps: most steps of one instance, with auto-reset.
    patience_seconds: time after which no more steps are taken.

  Returns:
    Warnings; see `environment.remarks`.

  Raises:
    ValueError: a value is not finite or outside the bounds of its spec, an observation has another
      shape, a discount is outside [0, 1], or more than half of the steps have no legal action; the
      message names the field.
  """
  generator = np.random.default_rng(seed)
  instance = environment.make()
  timestep = instance.reset(seed)
  _check_played(environment, timestep)
  began, played, stuck, ended = time.monotonic(), 0, 0, False
  while played < num_steps and time.monotonic() - began < patience_seconds:
    timestep = instance.step(_random_action(generator, environment.action_spec, timestep))
    _check_played(environment, timestep)
    ended |= bool(timestep.last())
    masks = _masks(environment.action_spec, timestep.observation)
    stuck += not (timestep.last() or all(mask.any() for mask in masks))
    played += 1
  instance.close()
  return remarks(environment.max_steps, played, stuck, ended=ended)


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
