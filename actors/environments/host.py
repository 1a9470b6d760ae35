"""Environments that are no JAX program: each instance is stepped on the host, one at a time.

A new family of them implements `World`, and hands a function that makes one to `HostEnvironment`.
"""

import abc
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
  num_choices,
)

ACTION_MASK = 'action_mask'
LONE = ''  # the name of an observation that is one array
REFUSAL = (
  'this environment is stepped outside the compiled program, and cannot be compiled together with the '
  'update; add --no-fused'
)


class World(abc.ABC):
  """One instance of an environment, in the words and the dtypes of its own library.

  Whoever uses it resets it before it is stepped and after LAST, from one thread at a time.
  """

  @property
  @abc.abstractmethod
  def observation_spec(self) -> specs.Array | Mapping[str, specs.Array]:
    """One spec, or a flat dict of them."""

  @property
  @abc.abstractmethod
  def action_spec(self) -> specs.BoundedArray:
    """`DiscreteArray`, or `BoundedArray` of floats, or of integers from 0 on and one axis."""

  @abc.abstractmethod
  def reset(self, seed: int | None) -> dm_env.TimeStep:
    """Begins an episode.

    Args:
      seed: begin anew as an instance of this seed, [0, 2**32); None goes on with chance as it is.
    """

  @abc.abstractmethod
  def step(self, action: np.ndarray) -> dm_env.TimeStep:
    """Plays one action, of the action spec's shape."""

  def render(self) -> np.ndarray | None:
    """One frame, [H, W, 3] uint8; None if this environment shows none."""
    return None

  def close(self) -> None:
    """Gives back what it holds; nothing is asked of it any more."""
    return


class HostEnvironment(Environment):
  """An environment of which `World`s are the instances: what they have in common, and how to make one.

  It is an `Environment` to all who ask for its specs, its length and its frames. But it has no pure
  `reset` and `step`, and refuses whoever would compile them.

  Its specs are those of what an `Instance` gives, in JAX's dtypes: 64 bits become 32, a
  `DiscreteArray` that is observed becomes a one-hot vector, and an 'action_mask' becomes [A] bool.
  """

  def __init__(self, make_world: Callable[[], World], max_steps: int):
    """Makes one instance, and asks it for its specs.

    Args:
      make_world: a new instance at every call.
      max_steps: at least 1; an episode that is longer is cut off.

    Raises:
      ValueError: naming the spec that no agent could make use of.
    """
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
      raise ValueError(f'max_steps={max_steps!r}: a whole number of at least 1 is needed')
    self.make_world = make_world
    self._max_steps = max_steps
    world = make_world()
    self._action_spec = _action_spec(world.action_spec)
    self.fields = _fields(world.observation_spec, self._action_spec)
    world.close()

  @property
  def observation_spec(self) -> Any:
    if LONE in self.fields:
      return self.fields[LONE].spec
    return {name: field.spec for name, field in self.fields.items()}

  @property
  def action_spec(self) -> specs.BoundedArray:
    return self._action_spec

  @property
  def max_steps(self) -> int:
    return self._max_steps

  def make(self) -> 'Instance':
    """A new instance, which goes on for ever."""
    return Instance(self.make_world(), self.fields, self.max_steps)

  def reset(self, key: Any) -> Any:
    raise ValueError(REFUSAL)

  def step(self, key: Any, state: Any, action: Any) -> Any:
    raise ValueError(REFUSAL)

  def render(self, state: 'Instance') -> np.ndarray | None:
    return state.render()


class Instance:
  """One environment that goes on for ever, as `wrappers.AutoReset` lets an environment in JAX go on.

  The step after LAST ignores the action and returns FIRST of a new episode. Numbers are numpy's.
  """

  def __init__(self, world: World, fields: dict[str, 'Field'], max_steps: int):
    """Args: the environment, how to read its observations, and where to cut its episodes off."""
    self._world = world
    self._fields = fields
    self._max_steps = max_steps
    self._num_steps = 0
    self._is_over = False

  def reset(self, seed: int | None) -> TimeStep:
    """Begins an episode; see `World.reset`."""
    self._num_steps = 0
    timestep = self._world.reset(seed)
    return self._read(timestep._replace(reward=None, discount=None))

  def step(self, action: np.ndarray) -> TimeStep:
    """Plays one action, or begins the next episode after LAST.

    Raises:
      ValueError: naming the field of an observation that has changed its shape.
    """
    if self._is_over:
      return self.reset(None)
    self._num_steps += 1
    timestep = self._read(self._world.step(action))
    if self._num_steps >= self._max_steps and not self._is_over:
      self._is_over = True
      last: Any = np.int32(dm_env.StepType.LAST)
      timestep = timestep._replace(step_type=last)
    return timestep

  def render(self) -> np.ndarray | None:
    """One frame, [H, W, 3] uint8; None if this environment shows none."""
    return self._world.render()

  def _read(self, timestep: dm_env.TimeStep) -> TimeStep:
    self._is_over = timestep.last()
    step_type: Any = np.int32(timestep.step_type)
    reward: Any = np.float32(0.0 if timestep.reward is None else timestep.reward)
    discount: Any = np.float32(1.0 if timestep.discount is None else timestep.discount)
    return TimeStep(step_type, reward, discount, self._observe(timestep.observation))

  def _observe(self, observation: Any) -> Observation:
    if LONE in self._fields:
      return self._fields[LONE].read(observation)
    return {name: field.read(observation[name]) for name, field in self._fields.items()}


class Field:
  """One array of an observation: what it is called, what it will be, and how it becomes that."""

  def __init__(self, path: str, given: specs.Array, spec: specs.Array):
    self.path = path
    self.spec = spec
    self._shape, self._dtype = given.shape, spec.dtype
    is_choice = isinstance(given, specs.DiscreteArray)
    self._one_hot = np.eye(given.num_values, dtype=spec.dtype) if is_choice else None

  def read(self, value: Any) -> np.ndarray:
    if np.shape(value) != self._shape:
      raise ValueError(
        f'timestep.observation{self.path}: the spec says {list(self._shape)}, '
        f'it is {list(np.shape(value))}'
      )
    if self._one_hot is not None:
      return self._one_hot[value]
    return np.asarray(value, self._dtype)

  def check(self, function: str, value: Any) -> None:
    """ValueError where a raw value is not what the spec says."""
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
  """The fields of an observation by name; the name of a lone array is empty."""
  if not isinstance(given, Mapping):
    return {LONE: _field('', given)}
  fields = {name: _field(f'[{name!r}]', spec) for name, spec in given.items()}
  if not set(fields) - {ACTION_MASK}:
    raise ValueError('observation_spec: is empty; an agent needs something to see')
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
  """The spec in JAX's dtype; bounds that go beyond it end where it ends."""
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
    num_choices(spec)  # refuses what is no vector of choices
    return spec
  if not (np.isfinite(spec.minimum).all() and np.isfinite(spec.maximum).all()):
    raise ValueError(f'action_spec={given!r}: finite bounds are needed, which an agent can keep to')
  return spec


def check(environment: HostEnvironment) -> None:
  """Refuses an environment that contradicts itself, by one reset and one step of an instance.

  Raises:
    ValueError: naming the field whose shape, dtype or value is not what the specs say.
  """
  world = environment.make_world()
  first = world.reset(0)
  _check_timestep(environment, 'reset', first)
  if not first.first():
    raise ValueError(f'timestep.step_type: reset gives {first.step_type!r}, FIRST is needed')
  following = world.step(_some_action(environment.action_spec, first.observation))
  _check_timestep(environment, 'step', following)
  if following.first():
    raise ValueError('timestep.step_type: step gives FIRST, MID or LAST is needed')
  world.close()
  for name in ('reward', 'discount'):
    value = np.asarray(getattr(following, name))
    if value.shape != () or value.dtype.kind not in 'biuf' or not np.isfinite(value):
      raise ValueError(f'timestep.{name}: step gives {value!r}, one finite number is needed')


def _check_timestep(environment: HostEnvironment, function: str, timestep: Any) -> None:
  if not isinstance(timestep, dm_env.TimeStep):
    raise ValueError(f'{function} must return a dm_env.TimeStep, not {timestep!r}')
  observation = timestep.observation
  for name, field in environment.fields.items():
    if name and (not isinstance(observation, Mapping) or name not in observation):
      raise ValueError(f'timestep.observation{field.path}: the spec has it, {function} does not')
    field.check(function, observation[name] if name else observation)


def _some_action(spec: specs.BoundedArray, observation: Any) -> np.ndarray:
  has_mask = isinstance(observation, Mapping) and ACTION_MASK in observation
  choices = num_choices(spec)
  if not (choices and has_mask):
    return np.clip(np.zeros(spec.shape, spec.dtype), spec.minimum, spec.maximum)
  masks = np.split(np.asarray(observation[ACTION_MASK]), np.cumsum(choices)[:-1])
  return np.asarray([np.argmax(mask) for mask in masks], spec.dtype).reshape(spec.shape)
