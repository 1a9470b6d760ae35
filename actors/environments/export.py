"""Exports environments to other trainers: with the interface of gymnax, gymnasium or dm_env.

Each function takes an `Environment` written in JAX, as `environments.make` makes it. The packages are
imported where they are used: gymnasium by `as_gymnasium`, gymnax only by the spaces of `Gymnax`.
"""

import functools
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import host
from hephaestus.actors.environments.environment import (
  Environment,
  EnvState,
  Observation,
  TimeStep,
  num_choices,
)

ACTION_MASK = host.ACTION_MASK


class GymnaxParams(NamedTuple):
  """Empty parameters of an exported environment, whose options are set when it is made."""


class Gymnax:
  """An environment with gymnax's functions, which are pure: jit, vmap and scan them.

  If there is an action mask, it is the field 'action_mask' of the observation, as in the environment
  itself, and also in `info`. This class needs gymnax only for its two spaces, and the classes of
  `gymnax.wrappers` can wrap it. `num_actions` is the number of values of an action that is one choice, and
  the length of any other. The functions ignore `params`: options are given when the environment is made.

  Raises:
    ValueError: the environment is stepped on the host.
  """

  def __init__(self, environment: Environment):
    self.environment = _pure(environment)
    self.name = type(environment).__name__
    choices = num_choices(environment.action_spec)
    self.num_actions = choices[0] if len(choices) == 1 else int(environment.action_spec.shape[0])
    self.default_params = GymnaxParams()

  def reset(
    self, key: chex.PRNGKey, params: GymnaxParams | None = None
  ) -> tuple[Observation, EnvState]:
    """Begins an episode; returns its first observation and its state."""
    del params
    state, timestep = self.environment.reset(key)
    return timestep.observation, state

  def step(
    self,
    key: chex.PRNGKey,
    state: EnvState,
    action: jax.Array,
    params: GymnaxParams | None = None,
  ) -> tuple[Observation, EnvState, jax.Array, jax.Array, dict[str, Any]]:
    """Takes one action, and resets in the same step if that ends the episode, as gymnax does.

    Returns:
      Observation and state, which begin a new episode if `done`; reward [] float32; done [] bool; and
      info: 'discount' [] float32, 0 at termination; 'truncated' [] bool; 'terminal_observation', the
      observation before the reset; and, if there is one, 'action_mask' of the returned observation.
    """
    step_key, reset_key = jax.random.split(key)
    last, stepped, reward, done, info = self.step_env(step_key, state, action, params)
    begun, first = self.environment.next_episode(reset_key, stepped)
    observation = first.observation
    choose = functools.partial(jax.tree.map, functools.partial(jnp.where, done))
    observation, state = choose(observation, last), choose(begun, stepped)
    return observation, state, reward, done, info | _mask(observation) | {
      'terminal_observation': last
    }  # fmt: skip

  def step_env(
    self,
    key: chex.PRNGKey,
    state: EnvState,
    action: jax.Array,
    params: GymnaxParams | None = None,
  ) -> tuple[Observation, EnvState, jax.Array, jax.Array, dict[str, Any]]:
    """As `step`, but without the reset, and without 'terminal_observation' in `info`."""
    del params
    action = jnp.asarray(action, self.environment.action_spec.dtype)
    state, timestep = self.environment.step(key, state, action)
    done = timestep.last()
    info = {'discount': timestep.discount, 'truncated': done & (timestep.discount > 0)}
    return timestep.observation, state, timestep.reward, done, info | _mask(timestep.observation)

  reset_env = reset

  def action_space(self, params: GymnaxParams | None = None) -> Any:
    """The actions as a gymnax `Discrete` or `Box`; gymnax must be installed."""
    from gymnax.environments import spaces

    del params
    spec = self.environment.action_spec
    choices = num_choices(spec)
    if len(choices) == 1 and not spec.shape:
      return spaces.Discrete(choices[0])
    return spaces.Box(spec.minimum, spec.maximum, spec.shape, spec.dtype)

  def observation_space(self, params: GymnaxParams | None = None) -> Any:
    """The observations as a gymnax `Box`, or a `Dict` of them; gymnax must be installed."""
    from gymnax.environments import spaces

    del params

    def space(spec: specs.Array) -> Any:
      low, high = _bounds(spec)
      return spaces.Box(low, high, spec.shape, spec.dtype)

    spec = self.environment.observation_spec
    return (
      spaces.Dict({name: space(each) for name, each in spec.items()})
      if isinstance(spec, dict)
      else space(spec)
    )


def as_gymnax(environment: Environment) -> tuple[Gymnax, GymnaxParams]:
  """Exports an environment to gymnax: returns (environment, parameters), as `gymnax.make` does.

  Raises:
    ValueError: the environment is stepped on the host.
  """
  made = Gymnax(environment)
  return made, made.default_params


class DmEnv(dm_env.Environment):
  """A `dm_env.Environment` that compiles and steps an environment; its time steps are NumPy arrays.

  Attributes:
    is_over: whether the next `step` begins an episode.

  Raises:
    ValueError: the environment is stepped on the host.
  """

  def __init__(self, environment: Environment, seed: int = 0):
    self._environment = _pure(environment)
    self._reset = jax.jit(environment.reset)
    self._next_episode = jax.jit(environment.next_episode)
    self._step = jax.jit(environment.step)
    self.restart(seed)

  def restart(self, seed: int) -> None:
    """Restarts with the episodes of a seed, and compiles nothing again."""
    self._key = jax.random.key(seed)
    self._state: EnvState = None
    self.is_over = True

  def reset(self) -> dm_env.TimeStep:
    key = self._next_key()
    if self._state is None:
      self._state, timestep = self._reset(key)
    else:
      self._state, timestep = self._next_episode(key, self._state)
    self.is_over = False
    observation = jax.tree.map(np.asarray, jax.device_get(timestep.observation))
    return dm_env.restart(observation)

  def step(self, action: Any) -> dm_env.TimeStep:
    if self.is_over:
      return self.reset()
    action = np.asarray(action, self._environment.action_spec.dtype)
    self._state, timestep = self._step(self._next_key(), self._state, action)
    return self._of_library(timestep)

  def observation_spec(self) -> Any:
    return self._environment.observation_spec

  def action_spec(self) -> specs.BoundedArray:
    return self._environment.action_spec

  def render(self) -> np.ndarray | None:
    """Renders the current state, [H, W, 3] uint8; None before the first reset or without frames."""
    return None if self._state is None else self._environment.render(self._state)

  def _next_key(self) -> chex.PRNGKey:
    self._key, key = jax.random.split(self._key)
    return key

  def _of_library(self, timestep: TimeStep) -> dm_env.TimeStep:
    plain = jax.tree.map(np.asarray, jax.device_get(timestep))
    self.is_over = bool(plain.last())
    return dm_env.TimeStep(
      dm_env.StepType(int(plain.step_type)),
      float(plain.reward),
      float(plain.discount),
      plain.observation,
    )


def as_dm_env(environment: Environment, *, seed: int = 0) -> DmEnv:
  """Exports an environment to dm_env; see `DmEnv`."""
  return DmEnv(environment, seed)


def as_gymnasium(environment: Environment, *, render_mode: str | None = None) -> Any:
  """Exports an environment as a `gymnasium.Env`; gymnasium must be installed.

  The action mask is the field 'action_mask' of the observation, int8 as `Discrete.sample` takes it, and
  also in `info`. `reset(seed=...)` seeds the episodes. `step` raises ValueError after the end of an
  episode, until the next reset. The render mode is 'rgb_array' or None.

  Raises:
    ValueError: the environment is stepped on the host, its observations are a nested tree, or there is
      no such render mode.
  """
  import gymnasium

  observation_spec, action_spec = _pure(environment).observation_spec, environment.action_spec
  if render_mode not in (None, 'rgb_array'):
    raise ValueError(f"render_mode={render_mode!r}: use 'rgb_array' or None")
  spec_of = observation_spec if isinstance(observation_spec, dict) else {'': observation_spec}
  if not all(isinstance(spec, specs.Array) for spec in spec_of.values()):
    raise ValueError('observation_spec: is a nested tree; one array or a flat dict is needed')
  spaces = {name: _gymnasium_space(name, spec) for name, spec in spec_of.items()}

  class Exported(gymnasium.Env):
    def __init__(self) -> None:
      self.metadata = {'render_modes': ['rgb_array'], 'render_fps': 8}
      self.render_mode = render_mode
      self.observation_space = (
        gymnasium.spaces.Dict(spaces) if isinstance(observation_spec, dict) else spaces['']
      )
      self.action_space = _gymnasium_actions(action_spec)
      self._stepper = DmEnv(environment)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
      super().reset(seed=seed)
      if seed is not None:
        self._stepper.restart(seed)
      elif self._stepper._state is None:
        self._stepper.restart(int(self.np_random.integers(2**31)))
      return _gymnasium_observation(self._stepper.reset().observation)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
      if self._stepper.is_over:
        raise ValueError('step: the episode is over; call reset')
      timestep = self._stepper.step(action)
      terminated = timestep.last() and timestep.discount == 0.0
      observation, info = _gymnasium_observation(timestep.observation)
      truncated = timestep.last() and not terminated
      return observation, timestep.reward, bool(terminated), bool(truncated), info

    def render(self) -> Any:
      return self._stepper.render() if render_mode else None

  return Exported()


def _pure(environment: Environment) -> Environment:
  if isinstance(environment, host.HostEnvironment):
    raise ValueError(
      'environment: is stepped on the host by a library of its own; make it with that library'
    )
  return environment


def _mask(observation: Observation) -> dict[str, jax.Array]:
  has_mask = isinstance(observation, dict) and ACTION_MASK in observation
  return {ACTION_MASK: observation[ACTION_MASK]} if has_mask else {}


def _bounds(spec: specs.Array) -> tuple[Any, Any]:
  """Lowest and highest value of a spec; the limits of its dtype where it has none."""
  if isinstance(spec, specs.BoundedArray):
    return spec.minimum, spec.maximum
  if spec.dtype == bool:
    return False, True
  if np.issubdtype(spec.dtype, np.integer):
    return np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max
  return -np.inf, np.inf


def _gymnasium_space(name: str, spec: specs.Array) -> Any:
  from gymnasium import spaces

  if spec.dtype == bool or name == ACTION_MASK:
    return spaces.MultiBinary(spec.shape if len(spec.shape) != 1 else spec.shape[0])
  low, high = (np.broadcast_to(np.asarray(x, spec.dtype), spec.shape) for x in _bounds(spec))
  return spaces.Box(low, high, spec.shape, spec.dtype.type)


def _gymnasium_actions(spec: specs.BoundedArray) -> Any:
  from gymnasium import spaces

  choices = num_choices(spec)
  if len(choices) == 1 and not spec.shape:
    return spaces.Discrete(choices[0])
  if choices:
    return spaces.MultiDiscrete(list(choices))
  low, high = (np.broadcast_to(x, spec.shape).astype(spec.dtype) for x in _bounds(spec))
  return spaces.Box(low, high, spec.shape, spec.dtype.type)


def _gymnasium_observation(observation: Observation) -> tuple[Any, dict[str, Any]]:
  """The observation as gymnasium has it, with bools as int8; and the info with the mask."""
  plain = jax.tree.map(lambda x: x.astype(np.int8) if x.dtype == bool else x, observation)
  return plain, dict(_mask(plain))
