"""The real side of a steered dream: an environment that can be stepped from any earlier step of an episode."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host


class Moment(NamedTuple):
  """One time step of an episode, from which the episode may be continued again and again."""

  state: Any  # of the environment; of one that is stepped on the host, its `_History`
  timestep: environment_lib.TimeStep  # host arrays
  # Renders the state as the environment does, [H, W, 3] uint8; None if it does not.
  render: Callable[[], np.ndarray | None]


class Traced:
  """The real side of an environment in JAX, whose states are values.

  Attributes:
    repeats: False once an environment has given another observation after the same seed and actions; then
      what follows a rewind belongs to another episode.
  """

  repeats = True

  def __init__(self, environment: environment_lib.Environment):
    self._environment = environment
    self._reset, self._step = jax.jit(environment.reset), jax.jit(environment.step)

  def begin(self, key: jax.Array) -> Moment:
    """Begins an episode; the same key begins the same one."""
    return self._moment(self._reset(key))

  def step(self, key: jax.Array, before: Moment, action: np.ndarray) -> Moment:
    """Takes an action at a time step other than LAST."""
    return self._moment(self._step(key, before.state, action))

  def close(self) -> None:
    """Frees its resources."""

  def _moment(self, result: tuple[Any, environment_lib.TimeStep]) -> Moment:
    state, timestep = jax.device_get(result)
    return Moment(state, timestep, functools.partial(self._environment.render, state))


class _History(NamedTuple):
  """A state of an environment on the host: the seed of its episode and all actions since."""

  seed: int
  actions: tuple[tuple[float, ...], ...]


class OnHost:
  """The real side of an environment that is stepped on the host, and cannot go back; as `Traced`.

  A step from an earlier time step resets it by the seed of the episode and repeats the actions.
  """

  repeats = True

  def __init__(self, environment: host.HostEnvironment):
    self._spec = environment.action_spec
    (self._instance,) = environment.make(1, is_rendered=True)
    self._at: _History | None = None

  def begin(self, key: jax.Array) -> Moment:
    seed = int(jax.random.bits(key))
    self._at = _History(seed, ())
    return self._moment(self._instance.reset(seed))

  def step(self, key: jax.Array, before: Moment, action: np.ndarray) -> Moment:
    del key  # its own generator decides
    history: _History = before.state
    if self._at != history:
      self._return_to(before)
    self._at = _History(history.seed, (*history.actions, tuple(np.ravel(action).tolist())))
    return self._moment(self._instance.step(action))

  def close(self) -> None:
    self._instance.close()

  def _return_to(self, moment: Moment) -> None:
    timestep = self._instance.reset(moment.state.seed)
    for action in moment.state.actions:
      again: Any = np.asarray(action, self._spec.dtype).reshape(self._spec.shape)
      timestep = self._instance.step(again)
    pairs = zip(*map(jax.tree.leaves, (timestep, moment.timestep)), strict=True)
    self.repeats &= all(np.array_equal(now, then) for now, then in pairs)

  def _moment(self, timestep: environment_lib.TimeStep) -> Moment:
    # Its arrays may be the environment's own, which the next step changes.
    frame = self._instance.render()
    return Moment(self._at, jax.tree.map(np.array, timestep), lambda: frame)


def make(environment: environment_lib.Environment) -> Traced | OnHost:
  """The real side of an environment without auto-reset."""
  if isinstance(environment, host.HostEnvironment):
    return OnHost(environment)
  return Traced(environment)
