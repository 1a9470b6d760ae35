"""Unroll: T rows of N environments and their policy, in one compiled program.

Environments that are no JAX program get the same rows: there only the policy is compiled, and threads
step the environments.
"""

import os
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host, wrappers
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience

Tree = Any


class UnrollState(NamedTuple):
  """N environments, and the policy that acts in them.

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
  """How N environments begin and go on.

  Attributes:
    init: key -> UnrollState, N fresh environments.
    unroll: (acting params, key, UnrollState, version, actor_id) -> (UnrollState,
      Sequence [N, T, ...], Episodes). The state it is given is used up.
    shapes: acting params, or their shapes -> shapes and dtypes of that Sequence.
  """

  init: Callable[[chex.PRNGKey], UnrollState]
  unroll: Callable[..., tuple[UnrollState, experience.Sequence, Episodes]]
  shapes: Callable[[Tree], experience.Sequence]


def make_unroll(
  environment: environment_lib.Environment,
  agent: agent_lib.Agent,
  *,
  num_envs: int,
  num_rows: int,
  greedy: bool = False,
) -> Unroll:
  """Builds the unroll of one environment and one agent.

  A sequence has `num_rows` rows and takes `num_rows - 1` steps of each environment: its last row is the
  first of the next one, so no transition is lost at the seam.

  Args:
    environment: one environment, without auto-reset.
    agent: whose `act` is compiled, together with the step of an environment in JAX.
    num_envs: N.
    num_rows: T, at least 2.
    greedy: act by the mode.
  """
  if isinstance(environment, host.HostEnvironment):
    on_host = _HostUnroll(environment, agent, num_envs, num_rows, greedy)
    return Unroll(on_host.init, on_host.unroll, on_host.shapes)
  environment = wrappers.AutoReset(environment)

  def init(key: chex.PRNGKey) -> UnrollState:
    env_state, timestep = jax.vmap(environment.reset)(jax.random.split(key, num_envs))
    return UnrollState(
      env_state=env_state,
      timestep=timestep,
      policy_state=agent.initial_policy_state(num_envs),
      episode_return=jnp.zeros(num_envs, jnp.float32),
      episode_length=jnp.zeros(num_envs, jnp.int32),
    )

  def unroll(params: Tree, key: chex.PRNGKey, state: UnrollState, version, actor_id):
    identity_key, steps_key = jax.random.split(key)

    def step(state: UnrollState, keys: chex.PRNGKey):
      act_key, env_keys = keys[0], keys[1:]
      timestep = state.timestep
      policy_state, decision = agent.act(
        params, act_key, state.policy_state, timestep, greedy=greedy
      )
      env_state, next_timestep = jax.vmap(environment.step)(
        env_keys, state.env_state, decision.action
      )
      begins, ends = next_timestep.first(), next_timestep.last()
      episode_return = jnp.where(begins, 0.0, state.episode_return + next_timestep.reward)
      episode_length = jnp.where(begins, 0, state.episode_length + 1)
      next_state = UnrollState(
        env_state, next_timestep, policy_state, episode_return, episode_length
      )
      return next_state, ((timestep, decision), Episodes(ends, episode_return, episode_length))

    # All keys at once: of a small environment, drawing them row by row would be much of the work.
    next_state, ((timesteps, decisions), episodes) = jax.lax.scan(
      step, state, jax.random.split(steps_key, (num_rows - 1, 1 + num_envs))
    )
    # The seam: the newest row, its action still to be chosen by the next unroll.
    close = lambda rows, row: jnp.swapaxes(jnp.concatenate([rows, row[None]]), 0, 1)
    unread = jax.tree.map(lambda rows: jnp.zeros_like(rows[0]), decisions)
    timesteps = jax.tree.map(close, timesteps, next_state.timestep)
    decisions = jax.tree.map(close, decisions, unread)
    each = lambda value, dtype: jnp.full(num_envs, value, dtype)
    sequence = _sequence(
      timesteps,
      decisions,
      initial_state=agent.stored_state(state.policy_state),
      identity=jax.random.bits(identity_key, (num_envs,), jnp.uint32),
      version=each(version, jnp.int32),
      actor_id=each(actor_id, jnp.int32),
    )
    return next_state, sequence, episodes

  compiled = jax.jit(unroll, donate_argnums=2)

  def shapes(params: Tree) -> experience.Sequence:
    key = jax.eval_shape(lambda: jax.random.key(0))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    _, sequence, _ = jax.eval_shape(compiled, params, key, jax.eval_shape(init, key), count, count)
    return sequence

  return Unroll(jax.jit(init), compiled, shapes)


def _sequence(
  timestep: environment_lib.TimeStep, decision: experience.Decision, **of_each: Any
) -> experience.Sequence:
  """Rows [N, T, ...] of what arrived and was decided, and what there is one of for each sequence."""
  return experience.Sequence(
    observation=timestep.observation,
    action=decision.action,
    reward=timestep.reward,
    discount=timestep.discount,
    step_type=timestep.step_type,
    extras=decision.extras,
    **of_each,
  )


class _HostUnroll:
  """The unroll of environments that threads step; rows, seams and resets are those of `make_unroll`.

  The N instances are made once, at the first `init`, and every `init` begins anew with them: the
  states of an earlier one are then over. As `env_state` they are [N] objects.
  """

  def __init__(
    self,
    environment: host.HostEnvironment,
    agent: agent_lib.Agent,
    num_envs: int,
    num_rows: int,
    greedy: bool,
  ):
    """Args: as of `make_unroll`."""
    self._environment = environment
    self._agent = agent
    self._num_worlds = num_envs
    self._num_rows = num_rows
    self._instances: list[host.Instance] = []
    self._env_state: Any = None  # of the newest state
    num_threads = min(num_envs, len(os.sched_getaffinity(0)))
    self._threads = futures.ThreadPoolExecutor(num_threads, thread_name_prefix='worlds')
    self._shares = np.array_split(np.arange(num_envs), num_threads)

    def start(key: chex.PRNGKey):
      identity_key, steps_key = jax.random.split(key)
      return jax.random.bits(identity_key, (num_envs,), jnp.uint32), steps_key

    def act(params: Tree, key: chex.PRNGKey, row: jax.Array, policy_state: Tree, timestep: Tree):
      return agent.act(params, jax.random.fold_in(key, row), policy_state, timestep, greedy=greedy)

    self._start = jax.jit(start)
    self._act = jax.jit(act)

  def init(self, key: chex.PRNGKey) -> UnrollState:
    if isinstance(key, jax.core.Tracer):
      raise ValueError(host.REFUSAL)
    if not self._instances:
      self._instances = [self._environment.make() for _ in range(self._num_worlds)]
      logging.info(
        '%d environments are stepped outside the compiled program (threads: %d).',
        self._num_worlds, len(self._shares),
      )  # fmt: skip
    seeds = np.asarray(jax.random.bits(key, (self._num_worlds,), jnp.uint32)).tolist()
    timestep = self._empty(self._num_worlds)
    self._each_world(lambda n: _write(timestep, n, self._instances[n].reset(seeds[n])))
    zeros: Any = np.zeros(self._num_worlds, np.float32)
    return UnrollState(
      env_state=self._hold(timestep),
      timestep=timestep,
      policy_state=self._agent.initial_policy_state(self._num_worlds),
      episode_return=zeros,
      episode_length=zeros.astype(np.int32),
    )

  def unroll(
    self, params: Tree, key: chex.PRNGKey, state: UnrollState, version: Any, actor_id: Any
  ) -> tuple[UnrollState, experience.Sequence, Episodes]:
    if state.env_state is not self._env_state:
      raise ValueError('state: its environments have gone on without it; take the newest state')
    num_envs, num_rows = self._num_worlds, self._num_rows
    identity, key = self._start(key)
    policy_state = state.policy_state
    rows = self._empty(num_envs, num_rows)
    _write(rows, np.s_[:, 0], state.timestep)
    decisions: Any = None
    for t in range(num_rows - 1):
      timestep = jax.tree.map(lambda x, t=t: x[:, t], rows)
      policy_state, decision = self._act(params, key, np.int32(t), policy_state, timestep)
      decision = jax.device_get(decision)
      if decisions is None:  # The last row's stays 0: its action is still to be chosen.
        blank = lambda x: np.zeros((num_envs, num_rows, *x.shape[1:]), x.dtype)
        decisions = jax.tree.map(blank, decision)
      _write(decisions, np.s_[:, t], decision)
      self._step(rows, t + 1, decision.action)
    newest = jax.tree.map(lambda x: x[:, -1].copy(), rows)
    episodes = self._episodes(state, rows)
    next_state = UnrollState(
      env_state=self._hold(newest),
      timestep=newest,
      policy_state=policy_state,
      episode_return=episodes.episode_return[-1],
      episode_length=episodes.episode_length[-1],
    )
    each: Any = lambda value: np.full(num_envs, value, np.int32)
    sequence = _sequence(
      rows,
      decisions,
      initial_state=self._agent.stored_state(state.policy_state),
      identity=identity,
      version=each(version),
      actor_id=each(actor_id),
    )
    return next_state, sequence, episodes

  def shapes(self, params: Tree) -> experience.Sequence:
    shape: Any = lambda shape, dtype: jax.ShapeDtypeStruct((self._num_worlds, *shape), dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    row = jax.ShapeDtypeStruct((), jnp.int32)
    timestep = self._tree(shape)
    policy_state = jax.eval_shape(lambda: self._agent.initial_policy_state(self._num_worlds))
    _, decision = jax.eval_shape(self._act, params, key, row, policy_state, timestep)
    in_time = lambda x: shape((self._num_rows, *x.shape[1:]), x.dtype)
    timestep, decision = jax.tree.map(in_time, (timestep, decision))
    return _sequence(
      timestep,
      decision,
      initial_state=jax.eval_shape(self._agent.stored_state, policy_state),
      identity=shape((), jnp.uint32),
      version=shape((), jnp.int32),
      actor_id=shape((), jnp.int32),
    )

  def _step(self, rows: environment_lib.TimeStep, t: int, action: np.ndarray) -> None:
    """Plays [N] actions, and puts what arrives into row t."""
    self._each_world(lambda n: _write(rows, (n, t), self._instances[n].step(action[n])))

  def _hold(self, timestep: environment_lib.TimeStep) -> wrappers.AutoResetState:
    """The instances, as the state that goes with what they gave last; any older one is over."""
    instances = np.empty(self._num_worlds, object)
    instances[:] = self._instances
    self._env_state = wrappers.AutoResetState(env_state=instances, is_over=timestep.last())
    return self._env_state

  def _each_world(self, function: Callable[[int], None]) -> None:
    """Calls it for every environment, by the threads, and waits; raises what it raised."""

    def run(share: np.ndarray) -> None:
      for n in share:
        function(n)

    for _ in self._threads.map(run, self._shares):
      pass

  def _tree(self, new: Callable[[tuple[int, ...], Any], Any]) -> environment_lib.TimeStep:
    """A timestep of leaves `new(shape, dtype)`."""
    return environment_lib.TimeStep(
      step_type=new((), np.int32),
      reward=new((), np.float32),
      discount=new((), np.float32),
      observation=jax.tree.map(
        lambda spec: new(spec.shape, spec.dtype), self._environment.observation_spec
      ),
    )

  def _empty(self, *leading: int) -> environment_lib.TimeStep:
    return self._tree(lambda shape, dtype: np.empty((*leading, *shape), dtype))

  def _episodes(self, state: UnrollState, rows: environment_lib.TimeStep) -> Episodes:
    shape = (self._num_rows - 1, self._num_worlds)
    returns: Any = np.empty(shape, np.float32)
    lengths: Any = np.empty(shape, np.int32)
    step_type = np.swapaxes(rows.step_type, 0, 1)[1:]
    reward = np.swapaxes(rows.reward, 0, 1)[1:]
    episode_return: Any = state.episode_return
    episode_length: Any = state.episode_length
    for t, begins in enumerate(step_type == dm_env.StepType.FIRST):
      returns[t] = episode_return = np.where(begins, 0, episode_return + reward[t])
      lengths[t] = episode_length = np.where(begins, 0, episode_length + 1)
    return Episodes(step_type == dm_env.StepType.LAST, returns, lengths)


def _write(rows: Tree, where: Any, tree: Tree) -> None:
  """Puts a tree of arrays into a place of larger ones."""
  for leaf, value in zip(jax.tree.leaves(rows), jax.tree.leaves(tree), strict=True):
    leaf[where] = value


def sequence_schema(unroll: Unroll, params: Tree) -> experience.Sequence:
  """Shapes and dtypes of one stored Sequence, computed and not written; no environment is stepped.

  Args:
    unroll: whose sequences are asked about.
    params: acting parameters, or their shapes.
  """
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), unroll.shapes(params))
