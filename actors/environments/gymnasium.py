"""Environments of gymnasium's registry, such as `gymnasium/CartPole-v1`."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import dm_env
import gymnasium
import numpy as np
from absl import logging
from dm_env import specs
from gymnasium import error as gymnasium_error
from gymnasium import spaces

from hephaestus.actors.environments import environment, gymnasium_registry, host

check = gymnasium_registry.check
OBSERVATION = 'observation'
"""Key of an observation that is no dict, in the dict that holds it and its action mask."""
NO_FRAMES = 'This environment renders no frames: %s'
# Arguments of `gymnasium.make` that are set here, and why an option cannot set them.
_SET_HERE = {
  'max_episode_steps': 'use environment.max_steps, which truncates',
  'disable_env_checker': "gymnasium's checker is always off",
}
MASKS = 'action_masks'  # method of environments for masked PPO of sb3-contrib


def make(
  id: str,
  /,
  *,
  max_steps: int | None = None,
  metrics: Mapping[str, str] | None = None,
  **options: Any,
) -> host.HostEnvironment:
  """Makes an environment of gymnasium.

  Observations are a Box, a Discrete, or a flat Dict of these; actions are Discrete, MultiDiscrete of
  one axis, or a Box with finite bounds. If reset and step return `info['action_mask']`, or the environment
  has a method `action_masks()`, it is added to the observation; for MultiDiscrete it may be a tuple with
  one mask for each choice. The discount is 0 at `terminated` and 1 at `truncated`.

  Args:
    id: argument of `gymnasium.make`, such as 'CartPole-v1' or 'package:Name-v0', which takes the options.
    max_steps: time limit, which truncates; None for the limit of the registry, which then must have one.
    metrics: numbers of `info` that are metrics of episodes, see `Environment.metrics`, in addition to those
      that the environment names in `metadata['metrics']`.

  Raises:
    ValueError: gymnasium is older than 1.0, an argument is invalid, a space is not supported, a wrapper has
      statistics of its own, or a reset or a step fails or contradicts the spaces.
  """
  check(id)
  for option in _SET_HERE.keys() & options:
    raise ValueError(f'environment.{option}={options[option]!r}: {_SET_HERE[option]}')
  make_one = functools.partial(_of_registry, id, options)
  return host.HostEnvironment(
    functools.partial(make_one, is_rendered=False),
    max_steps,
    metrics,
    name=f'gymnasium/{id}',
    make_rendered=functools.partial(make_one, is_rendered=True),
  )


def _of_registry(id: str, options: dict[str, Any], *, is_rendered: bool) -> '_GymnasiumEnv':
  # `HostEnvironment` truncates, so the registry's limit is off.
  make_one = functools.partial(
    gymnasium.make, id, disable_env_checker=True, max_episode_steps=-1, **options
  )
  try:
    env = make_one()
  except (gymnasium_error.Error, ImportError, AssertionError, TypeError, ValueError) as error:
    raise ValueError(str(error).split('\n')[0]) from error
  has_frames = 'rgb_array' in env.metadata.get('render_modes', ())
  if is_rendered and has_frames and 'render_mode' not in options:
    try:
      rendered = make_one(render_mode='rgb_array')
    except Exception as error:  # of any library without a display or a driver
      logging.log_first_n(logging.WARNING, NO_FRAMES, 1, error)
    else:
      env.close()
      env = rendered
  spec = env.unwrapped.spec
  return _GymnasiumEnv(env, None if spec is None else gymnasium.spec(spec.id).max_episode_steps)


def make_again(env: gymnasium.Env) -> gymnasium.Env:
  """Makes another environment by the spec of one that `gymnasium.make` has made."""
  assert env.spec is not None
  return gymnasium.make(env.spec)


def adapt(
  env: gymnasium.Env, make_one: Callable[..., Any], options: dict[str, Any]
) -> host.LibraryEnv:
  """Adapts an environment that a user's class or function has made, with the limit of a `TimeLimit`."""
  del make_one, options
  limit = '_max_episode_steps'
  return _GymnasiumEnv(env, env.get_wrapper_attr(limit) if env.has_wrapper_attr(limit) else None)


class _GymnasiumEnv(host.LibraryEnv):
  """One environment of gymnasium."""

  def __init__(self, env: gymnasium.Env, max_steps: int | None):
    _check_layers(env)
    self._env = env
    self._action_space = copy.deepcopy(env.action_space)
    self._max_steps = max_steps
    space = self._env.observation_space
    self._spaces = space.spaces if isinstance(space, spaces.Dict) else None
    self._masks = env.get_wrapper_attr(MASKS) if env.has_wrapper_attr(MASKS) else None
    self._adds_mask: bool | None = None  # to each observation; the first reset tells
    self._info: Mapping[str, Any] = {}

  @property
  def max_steps(self) -> int | None:
    return self._max_steps

  @property
  def inner(self) -> Any:
    return self._env.unwrapped

  @property
  def metrics(self) -> Mapping[str, str]:
    found: Mapping[str, str] = self._env.metadata.get('metrics', {})
    return found

  @property
  def scalars(self) -> Mapping[str, Any]:
    return self._info

  @property
  def observation_spec(self) -> Any:
    if self._spaces is None:
      spec: Any = _spec('observation_space', self._env.observation_space)
      tree = {OBSERVATION: spec}
    else:
      tree = spec = {
        name: _spec(f'observation_space[{name!r}]', space) for name, space in self._spaces.items()
      }
    if not self._adds_mask:
      return spec
    action_space = self._env.action_space
    if isinstance(action_space, spaces.MultiDiscrete):
      size = int(action_space.nvec.sum())
    elif isinstance(action_space, spaces.Discrete):
      size = int(action_space.n)
    else:
      raise ValueError(
        f"info['{host.ACTION_MASK}']: needs Discrete or MultiDiscrete actions, not {action_space}"
      )
    return tree | {host.ACTION_MASK: specs.BoundedArray((size,), bool, False, True)}

  @property
  def action_spec(self) -> Any:
    space = self._env.action_space
    if isinstance(space, spaces.MultiDiscrete):
      starts = tuple(space.start.tolist())
      return environment.ChoicesSpec(space.shape, np.int32, 0, space.nvec - 1, starts)
    return _spec('action_space', space)

  def reset(self, seed: int | None) -> dm_env.TimeStep:
    observation, info = _parts(self._env.reset(seed=seed), 'reset', ('observation', 'info'))
    self._info = {}
    if self._env.action_space != self._action_space:
      raise ValueError(
        f'action_space: was {self._action_space} and is {self._env.action_space}, where all episodes need '
        f"the same; give those that are legal as info['{host.ACTION_MASK}']"
      )
    if self._adds_mask is None:
      self._adds_mask = self._mask(info) is not None
    return dm_env.restart(self._observe(observation, info))

  def step(self, action: np.ndarray) -> dm_env.TimeStep:
    space: Any = self._env.action_space
    choice: Any
    if isinstance(space, spaces.Discrete):
      choice = int(action)
    elif isinstance(space, spaces.MultiDiscrete):
      choice = action.astype(space.dtype)
    else:
      choice = np.clip(action, space.low, space.high).astype(space.dtype)
    observation, reward, terminated, truncated, info = _parts(
      self._env.step(choice), 'step', ('observation', 'reward', 'terminated', 'truncated', 'info')
    )
    observation, self._info = self._observe(observation, info), info
    if terminated:
      return dm_env.termination(reward, observation)
    if truncated:
      return dm_env.truncation(reward, observation)
    return dm_env.transition(reward, observation)

  def render(self) -> np.ndarray | None:
    if self._env.render_mode != 'rgb_array':
      return None
    try:
      frame: Any = self._env.render()
    except Exception as error:  # of any library without a display or a driver
      logging.log_first_n(logging.WARNING, NO_FRAMES, 1, error)
      return None
    return frame

  def close(self) -> None:
    self._env.close()

  def _observe(self, observation: Any, info: dict[str, Any]) -> Any:
    mask = self._mask(info)
    if (mask is not None) != self._adds_mask:
      raise ValueError(
        f"info['{host.ACTION_MASK}']: the first reset gave "
        + ('one, so every reset and step has to' if self._adds_mask else 'none, so no step may')
      )
    if mask is None:
      return observation
    if isinstance(self._env.action_space, spaces.MultiDiscrete):
      mask = np.hstack(mask)  # flat already, or a tuple with the mask of each choice
    tree = {OBSERVATION: observation} if self._spaces is None else observation
    return tree | {host.ACTION_MASK: mask}

  def _mask(self, info: Mapping[str, Any]) -> Any:
    """The mask to add to an observation; None for none, or where the observation has it already."""
    if host.ACTION_MASK in (self._spaces or {}):
      return None
    if callable(self._masks) and host.ACTION_MASK not in info:
      return self._masks()
    return info.get(host.ACTION_MASK)


def _check_layers(env: Any) -> None:
  """Raises ValueError for a wrapper whose statistics each instance would have for itself."""
  while isinstance(env, gymnasium.Env):
    has_statistics = any(type(value).__name__ == 'RunningMeanStd' for value in vars(env).values())
    if has_statistics and getattr(env, 'update_running_mean', True):
      raise ValueError(
        f'{type(env).__name__} keeps running statistics, which differ between training, evaluation and '
        'a loaded policy; leave it out, or fix its statistics and set update_running_mean=False (agents '
        'scale observations and returns themselves)'
      )
    env = vars(env).get('env')


def _parts(given: Any, function: str, names: tuple[str, ...]) -> tuple[Any, ...]:
  """Returns what reset or step gave; ValueError if it is not a tuple of these values, as in old gym."""
  if not isinstance(given, tuple) or len(given) != len(names):
    count = f'{len(given)} values' if isinstance(given, tuple) else type(given).__name__
    raise ValueError(
      f'{function} must return {len(names)} values ({", ".join(names)}), it returns {count}; '
      'the interface of old gym is not supported'
    )
  return given


def _spec(field: str, space: Any) -> specs.BoundedArray:
  if isinstance(space, spaces.Discrete):
    return environment.ChoiceSpec(int(space.n), int(space.start))
  if isinstance(space, spaces.Box):
    return specs.BoundedArray(space.shape, space.dtype, space.low, space.high)
  known = 'Discrete, MultiDiscrete and Box'
  if 'observation' in field:
    known = 'Discrete and Box, or a flat Dict of these'
  raise ValueError(f'{field}={space}: is of a kind that no agent takes; known are {known}')
