"""Adapter: makes an `Environment` from the functions of another package's environment in JAX."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment


class Adapter(environment.Environment):
  """An environment made of two pure functions, without a time limit; `wrappers.TimeLimit` adds one.

  In some packages the state changes dtype or weak type between reset and step, so a program would be
  traced twice. Here every leaf of the state is converted to the dtype to which both promote.
  """

  def __init__(
    self,
    *,
    begin: Callable[[chex.PRNGKey], tuple[Any, Any]],
    advance: Callable[[chex.PRNGKey, Any, jax.Array], tuple[Any, Any, jax.Array, jax.Array]],
    observation_spec: Callable[[Any], Any],
    action_spec: specs.BoundedArray,
    frame: Callable[[Any], np.ndarray] | None = None,
    has_costly_reset: bool = False,
  ):
    """Traces both functions once.

    Args:
      begin: key -> (state, observation).
      advance: (key, state, action) -> (state, observation, reward, is_terminated). The reward is []
        of any dtype; `is_terminated` is [] bool, and False at a time limit.
      observation_spec: shapes and dtypes of an observation -> its spec, to whose dtypes it is converted.
      action_spec: spec of the actions.
      frame: state -> [H, W, 3] uint8, not traced; None for an environment without frames.
      has_costly_reset: see `Environment.has_costly_reset`.
    """
    self._begin, self._advance, self._frame = jax.jit(begin), jax.jit(advance), frame
    self._has_costly_reset = has_costly_reset
    key = jax.eval_shape(functools.partial(jax.random.key, 0))
    action = jax.ShapeDtypeStruct(action_spec.shape, action_spec.dtype)
    strong = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    state, observation = jax.eval_shape(self._begin, key)
    self._observation_spec, self._action_spec = observation_spec(observation), action_spec
    state = jax.tree.map(strong, state)
    next_state = jax.eval_shape(self._advance, key, state, action)[0]
    self._dtypes = jax.tree.map(
      lambda one, other: jnp.promote_types(one.dtype, other.dtype), state, next_state
    )

  @property
  def observation_spec(self) -> Any:
    return self._observation_spec

  @property
  def action_spec(self) -> specs.BoundedArray:
    return self._action_spec

  @property
  def has_costly_reset(self) -> bool:
    return self._has_costly_reset

  @property
  def max_steps(self) -> int:
    """The largest int32, because there is no time limit."""
    return int(np.iinfo(np.int32).max)

  def reset(self, key: chex.PRNGKey) -> tuple[Any, environment.TimeStep]:
    state, observation = self._begin(key)
    return self._with_dtypes(state), environment.restart(self._as_spec(observation))

  def step(
    self, key: chex.PRNGKey, state: Any, action: jax.Array
  ) -> tuple[Any, environment.TimeStep]:
    state, observation, reward, is_terminated = self._advance(key, state, action)
    timestep = jax.lax.cond(
      is_terminated,
      environment.termination,
      environment.transition,
      jnp.asarray(reward, jnp.float32),
      self._as_spec(observation),
    )
    return self._with_dtypes(state), timestep

  def render(self, state: Any) -> np.ndarray | None:
    return None if self._frame is None else self._frame(state)

  def _with_dtypes(self, state: Any) -> Any:
    return jax.tree.map(jnp.asarray, state, self._dtypes)

  def _as_spec(self, observation: Any) -> Any:
    return jax.tree.map(
      lambda spec, leaf: jnp.asarray(leaf, spec.dtype), self._observation_spec, observation
    )
