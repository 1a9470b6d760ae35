"""Unroll: T rows of N worlds and their policy, in one compiled program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from actors.environments import environment as environment_lib
from actors.environments import wrappers
from agents import agent as agent_lib
from agents import experience

Tree = Any


class UnrollState(NamedTuple):
  """N worlds, and the policy that acts in them.

  Attributes:
    env_state: [N, ...].
    timestep: [N, ...], arrived and not yet acted upon.
    policy_state: of N policies, before this timestep.
    episode_return: [N] float32, undiscounted, so far.
    episode_length: [N] int32, steps so far.
  """

  env_state: Tree
  timestep: environment_lib.TimeStep
  policy_state: Tree
  episode_return: jax.Array
  episode_length: jax.Array


class Episodes(NamedTuple):
  """What ended at each row.

  Attributes:
    ended: [T - 1, N] bool.
    episode_return: [T - 1, N] float32, read where `ended`.
    episode_length: [T - 1, N] int32, steps, read where `ended`.
  """

  ended: jax.Array
  episode_return: jax.Array
  episode_length: jax.Array


class Unroll(NamedTuple):
  """Two compiled functions.

  Attributes:
    init: key -> UnrollState, N fresh worlds.
    unroll: (acting params, key, UnrollState, version, actor_id) -> (UnrollState,
      Sequence [N, T, ...], Episodes).
  """

  init: Callable[[chex.PRNGKey], UnrollState]
  unroll: Callable[..., tuple[UnrollState, experience.Sequence, Episodes]]


def make_unroll(
  environment: environment_lib.Environment,
  agent: agent_lib.Agent,
  *,
  num_worlds: int,
  num_rows: int,
  greedy: bool = False,
) -> Unroll:
  """Builds the unroll of one world and one agent.

  A sequence has `num_rows` rows and takes `num_rows - 1` steps of each world: its last row is the
  first of the next one, so no transition is lost at the seam.

  Args:
    environment: one world, without auto-reset.
    agent: whose `act` is compiled together with the world's `step`.
    num_worlds: N.
    num_rows: T, at least 2.
    greedy: act by the mode.
  """
  environment = wrappers.AutoReset(environment)

  def init(key: chex.PRNGKey) -> UnrollState:
    env_state, timestep = jax.vmap(environment.reset)(jax.random.split(key, num_worlds))
    return UnrollState(
      env_state=env_state,
      timestep=timestep,
      policy_state=agent.initial_policy_state(num_worlds),
      episode_return=jnp.zeros(num_worlds, jnp.float32),
      episode_length=jnp.zeros(num_worlds, jnp.int32),
    )

  def unroll(params: Tree, key: chex.PRNGKey, state: UnrollState, version, actor_id):
    identity_key, steps_key = jax.random.split(key)

    def step(state: UnrollState, key: chex.PRNGKey):
      act_key, env_key = jax.random.split(key)
      timestep = state.timestep
      policy_state, decision = agent.act(
        params, act_key, state.policy_state, timestep, greedy=greedy
      )
      env_state, next_timestep = jax.vmap(environment.step)(
        jax.random.split(env_key, num_worlds), state.env_state, decision.action
      )
      begins, ends = next_timestep.first(), next_timestep.last()
      episode_return = jnp.where(begins, 0.0, state.episode_return + next_timestep.reward)
      episode_length = jnp.where(begins, 0, state.episode_length + 1)
      next_state = UnrollState(
        env_state, next_timestep, policy_state, episode_return, episode_length
      )
      return next_state, ((timestep, decision), Episodes(ends, episode_return, episode_length))

    next_state, ((timesteps, decisions), episodes) = jax.lax.scan(
      step, state, jax.random.split(steps_key, num_rows - 1)
    )
    # The seam: the newest row, its action still to be chosen by the next unroll.
    close = lambda rows, row: jnp.swapaxes(jnp.concatenate([rows, row[None]]), 0, 1)
    unread = jax.tree.map(lambda rows: jnp.zeros_like(rows[0]), decisions)
    timesteps = jax.tree.map(close, timesteps, next_state.timestep)
    decisions = jax.tree.map(close, decisions, unread)
    each = lambda value, dtype: jnp.full(num_worlds, value, dtype)
    sequence = experience.Sequence(
      observation=timesteps.observation,
      action=decisions.action,
      reward=timesteps.reward,
      discount=timesteps.discount,
      step_type=timesteps.step_type,
      extras=decisions.extras,
      initial_state=agent.stored_state(state.policy_state),
      identity=jax.random.bits(identity_key, (num_worlds,), jnp.uint32),
      version=each(version, jnp.int32),
      actor_id=each(actor_id, jnp.int32),
    )
    return next_state, sequence, episodes

  return Unroll(jax.jit(init), jax.jit(unroll, donate_argnums=2))


def sequence_schema(unroll: Unroll, params: Tree) -> experience.Sequence:
  """Shapes and dtypes of one stored Sequence, computed and not written.

  Args:
    unroll: whose sequences are asked about.
    params: acting parameters, or their shapes.
  """
  key = jax.eval_shape(lambda: jax.random.key(0))
  state = jax.eval_shape(unroll.init, key)
  count = jax.ShapeDtypeStruct((), jnp.int32)
  _, sequence, _ = jax.eval_shape(unroll.unroll, params, key, state, count, count)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), sequence)
