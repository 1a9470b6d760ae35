"""What makes an environment of ours from another package's, which families of environments are written with."""

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
  """An environment told by two pure functions, without limit of time; `wrappers.TimeLimit` gives it one.

  Packages let a state change dtype or weak type between reset and step, which would trace a program
  twice. Here every leaf has the one dtype that holds both.
  """

  def __init__(
    self,
    *,
    begin: Callable[[chex.PRNGKey], tuple[Any, Any]],
    advance: Callable[[chex.PRNGKey, Any, jax.Array], tuple[Any, Any, jax.Array, jax.Array]],
    observation_spec: Any,
    action_spec: specs.BoundedArray,
    frame: Callable[[Any], np.ndarray] | None = None,
  ):
    """Traces both functions once.

    Args:
      begin: of a key, a state and what is observed of it.
      advance: of a key, a state and an action, the next state, what is observed of it, the reward,
        [] of any dtype, and [] bool, whether the environment came to an end (not: whether time ran out).
      observation_spec: of what is observed, which is given the dtypes it says.
      action_spec: of the actions.
      frame: of a state, [H, W, 3] uint8; not traced.

    Raises:
      ValueError: the two states are trees of different keys.
    """
    self._begin, self._advance, self._frame = jax.jit(begin), jax.jit(advance), frame
    self._observation_spec, self._action_spec = observation_spec, action_spec
    key = jax.eval_shape(functools.partial(jax.random.key, 0))
    action = jax.ShapeDtypeStruct(action_spec.shape, action_spec.dtype)
    strong = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    state = jax.tree.map(strong, jax.eval_shape(self._begin, key)[0])
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
  def max_steps(self) -> int:
    """As good as none."""
    return int(np.iinfo(np.int32).max)

  def reset(self, key: chex.PRNGKey) -> tuple[Any, environment.TimeStep]:
    state, observation = self._begin(key)
    return self._settled(state), environment.restart(self._observed(observation))

  def step(
    self, key: chex.PRNGKey, state: Any, action: jax.Array
  ) -> tuple[Any, environment.TimeStep]:
    state, observation, reward, is_over = self._advance(key, state, action)
    timestep = jax.lax.cond(
      is_over,
      environment.termination,
      environment.transition,
      jnp.asarray(reward, jnp.float32),
      self._observed(observation),
    )
    return self._settled(state), timestep

  def render(self, state: Any) -> np.ndarray | None:
    return None if self._frame is None else self._frame(state)

  def _settled(self, state: Any) -> Any:
    return jax.tree.map(jnp.asarray, state, self._dtypes)

  def _observed(self, observation: Any) -> Any:
    return jax.tree.map(
      lambda spec, leaf: jnp.asarray(leaf, spec.dtype), self._observation_spec, observation
    )
