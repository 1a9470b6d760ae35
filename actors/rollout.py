"""Unroll: T time steps of N environments and their policy, in one compiled program.

For environments that are not written in JAX, only the policy is compiled, and threads step the
environments; the sequences have the same layout.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host, wrappers
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience

Tree = Any
METRICS = 'environment/'  # prefix of the environment's own metrics, see `Environment.metrics`


class UnrollState(NamedTuple):
  """State of N environments and of the policy in each, between two unrolls."""

  env_state: Tree  # [N, ...] states of the environments with auto-reset
  # [N, ...] newest time steps, for which no action is chosen yet
  timestep: environment_lib.TimeStep
  policy_state: Tree  # policy state of the N environments, before the policy reads `timestep`
  episode_return: jax.Array  # [N] float32, undiscounted return of each episode so far
  episode_length: jax.Array  # [N] int32, steps of each episode so far
  # name -> [N] float32, the environment's metrics of each episode so far
  metrics: Mapping[str, jax.Array] = {}
  # [N] bool, whether the agent's explorer acted in each episode so far; () in JAX without an explorer
  explored: Tree = ()


class Episodes(NamedTuple):
  """Ends, returns and lengths of episodes at the time steps 1 to T - 1 of an unroll of N environments."""

  ended: jax.Array  # [T - 1, N] bool, whether the time step is LAST
  # [T - 1, N] float32, undiscounted return of the episode up to the time step
  episode_return: jax.Array
  # [T - 1, N] int32, steps of the episode up to the time step; 0 at FIRST
  episode_length: jax.Array
  # [T - 1, N] bool, whether the agent's explorer acted in the episode up to the time step; each unroll
  # chooses anew in which environments it acts, see `Agent.exploring`
  explored: jax.Array
  everywhere: jax.Array  # [] bool, whether the explorer acted in all environments of this unroll
  # name -> [T - 1, N] float32, the environment's metrics of the episode up to the time step
  metrics: Mapping[str, jax.Array] = {}

  @property
  def reported(self) -> jax.Array:
    """[T - 1, N] bool, ended episodes in which only the task's policy acted.

    Where the explorer acts in all environments, as in a single one, its episodes are all that there is to
    report.
    """
    return self.ended & (~self.explored | self.everywhere)


class Unroll(NamedTuple):
  """Functions that reset and unroll N environments."""

  init: Callable[[chex.PRNGKey], UnrollState]  # key -> UnrollState of N environments after a reset
  # (acting params, key, UnrollState, version, actor_id) -> (next UnrollState, Sequence [N, T,
  # ...], Episodes). The sequences store the version of the params and the actor's number. The
  # state passed in is donated: do not use it again.
  unroll: Callable[..., tuple[UnrollState, experience.Sequence, Episodes]]
  # acting params, or their shapes -> the Sequence of `unroll` as jax.ShapeDtypeStruct
  shapes: Callable[[Tree], experience.Sequence]
  # closes the instances of an environment that is stepped on the host
  close: Callable[[], None] = lambda: None
  metrics: tuple[str, ...] = ()  # names of `Episodes.metrics`
  explores: bool = False  # whether the agent has an explorer that acts in some environments


class StoppedError(Exception):
  """An unroll on the host has ended within a sequence, because its node was asked to stop."""


def make_unroll(
  environment: environment_lib.Environment,
  agent: agent_lib.Agent,
  *,
  num_envs: int,
  sequence_length: int,
  greedy: bool = False,
  explore: bool = False,
  should_stop: Callable[[], bool] = lambda: False,
  is_rendered: bool = False,
) -> Unroll:
  """Builds the unroll of one environment, without auto-reset, and one agent; compiles and calls nothing.

  A sequence of T time steps takes T - 1 steps of each environment: its last time step is the first
  of the next sequence, so no transition is lost at the seam.

  Args:
    environment: the environment, whose step in JAX is compiled together with the agent's `act`.
    agent: the agent.
    num_envs: N, number of parallel environments.
    sequence_length: T, at least 2.
    greedy: take greedy actions; else sample actions.
    explore: collect experience to learn from: in some environments the agent's explorer acts, if it has
      one, see `Agent.exploring`. An evaluation does without.
    should_stop: called after each step of an environment on the host, and so the heartbeat of a node
      whose environments wait; True ends the unroll by `StoppedError`.
    is_rendered: whether frames of the environments are wanted, see `HostEnvironment.make`.
  """
  exploring = agent.exploring if explore else None
  roles = lambda params, key: (
    jnp.zeros(num_envs, bool) if exploring is None else exploring(params, key, num_envs)
  )

  def act(params: Tree, key: chex.PRNGKey, policy_state: Tree, timestep: Tree, explores: jax.Array):
    options = {} if exploring is None else {'explores': explores}
    return agent.act(params, key, policy_state, timestep, greedy=greedy, **options)

  policy = _Policy(agent, roles, act, exploring is not None)
  metrics = tuple(METRICS + name for name in environment.metrics)
  if isinstance(environment, host.HostEnvironment):
    on_host = _HostUnroll(environment, policy, num_envs, sequence_length, should_stop, is_rendered)
    return Unroll(
      on_host.init, on_host.unroll, on_host.shapes, on_host.close, metrics, policy.explores
    )
  traced = _TracedUnroll(environment, policy, num_envs, sequence_length)
  return Unroll(
    jax.jit(traced.init), traced.compiled, traced.shapes, metrics=metrics, explores=policy.explores
  )


class _Policy(NamedTuple):
  """An agent that acts in N environments."""

  agent: agent_lib.Agent  # the agent
  # (acting params, key) -> [N] bool, environments in which its explorer acts
  roles: Callable[[Tree, chex.PRNGKey], jax.Array]
  # (acting params, key, policy state, time step, roles) -> as `Agent.act`
  act: Callable[..., tuple[Tree, experience.Decision]]
  explores: bool  # whether it has an explorer


def _sequence(
  timestep: environment_lib.TimeStep, decision: experience.Decision, **per_sequence: Any
) -> experience.Sequence:
  """A Sequence of time steps and decisions, [N, T, ...], and of fields without a time axis, [N, ...]."""
  return experience.Sequence(
    observation=timestep.observation,
    action=decision.action,
    reward=timestep.reward,
    discount=timestep.discount,
    step_type=timestep.step_type,
    extras=decision.extras,
    **per_sequence,
  )


def _reduced(
  reductions: Mapping[str, str],
  before: Mapping[str, Any],
  values: Mapping[str, Any],
  length: Any,
  numpy: Any,
) -> dict[str, Any]:
  """Metrics of episodes up to a time step of the given length, which is 0 at FIRST, as metrics are.

  They follow from those of the time step before, and from its `TimeStep.metrics`. `numpy` is the module
  `jnp` for arrays that are traced, or `np` for others.
  """

  def reduced(name: str, reduction: str) -> Any:
    old, value = before[METRICS + name], values[name]
    if reduction == 'sum':
      value = old + value
    elif reduction == 'mean':
      value = old + (value - old) / numpy.maximum(length, 1)
    elif reduction == 'max':
      value = numpy.where(length > 1, numpy.maximum(old, value), value)
    return numpy.where(length > 0, value, 0.0).astype(np.float32)

  return {METRICS + name: reduced(name, reduction) for name, reduction in reductions.items()}


class _TracedUnroll:
  """The unroll of environments in JAX, whose step and policy are scanned together; `compiled` serves all."""

  def __init__(
    self,
    environment: environment_lib.Environment,
    policy: _Policy,
    num_envs: int,
    sequence_length: int,
  ):
    self._environment = wrappers.AutoReset(environment)
    self._policy = policy
    self._num_envs = num_envs
    self._sequence_length = sequence_length
    self.compiled = jax.jit(self.unroll, donate_argnums=2)

  def init(self, key: chex.PRNGKey) -> UnrollState:
    keys = jax.random.split(key, self._num_envs)
    env_state, timestep = jax.vmap(self._environment.reset)(keys)
    zeros = jnp.zeros(self._num_envs, jnp.float32)
    return UnrollState(
      env_state=env_state,
      timestep=timestep._replace(metrics={}),
      policy_state=self._policy.agent.initial_policy_state(self._num_envs),
      episode_return=zeros,
      episode_length=jnp.zeros(self._num_envs, jnp.int32),
      metrics={METRICS + name: zeros for name in self._environment.metrics},
      explored=zeros.astype(bool) if self._policy.explores else (),
    )

  def unroll(self, params: Tree, key: chex.PRNGKey, state: UnrollState, version, actor_id):
    num_envs = self._num_envs
    identity_key, steps_key, roles_key = jax.random.split(key, 3)
    explores = self._policy.roles(params, roles_key)
    # All keys at once: for a small environment, splitting keys at each step is much of the work.
    next_state, ((timesteps, decisions), episodes) = jax.lax.scan(
      lambda state, keys: self._step(params, explores, state, keys),
      state,
      jax.random.split(steps_key, (self._sequence_length - 1, 1 + num_envs)),
    )
    # The seam: the newest time step, its action still to be chosen by the next unroll.
    close = lambda steps, step: jnp.swapaxes(jnp.concatenate([steps, step[None]]), 0, 1)
    unread = jax.tree.map(lambda steps: jnp.zeros_like(steps[0]), decisions)
    timesteps = jax.tree.map(close, timesteps, next_state.timestep)
    decisions = jax.tree.map(close, decisions, unread)
    each = lambda value, dtype: jnp.full(num_envs, value, dtype)
    sequence = _sequence(
      timesteps,
      decisions,
      initial_state=self._policy.agent.stored_state(state.policy_state),
      identity=jax.random.bits(identity_key, (num_envs,), jnp.uint32),
      version=each(version, jnp.int32),
      actor_id=each(actor_id, jnp.int32),
    )
    ended, episode_return, episode_length, explored, metrics = episodes
    explored = explored if self._policy.explores else jnp.zeros_like(ended)
    return (
      next_state,
      sequence,
      Episodes(ended, episode_return, episode_length, explored, explores.all(), metrics),
    )

  def shapes(self, params: Tree) -> experience.Sequence:
    key = jax.eval_shape(lambda: jax.random.key(0))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(self.init, key)
    _, sequence, _ = jax.eval_shape(self.compiled, params, key, state, count, count)
    return sequence

  def _step(self, params: Tree, explores: jax.Array, state: UnrollState, keys: chex.PRNGKey):
    """Acts once in each environment, by keys, [1 + N], of the policy and of each environment.

    Returns:
      The next state; and ((time step acted upon, decision), the fields of Episodes, without
      `everywhere`, of the next time step), [N, ...].
    """
    act_key, env_keys = keys[0], keys[1:]
    timestep = state.timestep
    policy_state, decision = self._policy.act(
      params, act_key, state.policy_state, timestep, explores
    )
    env_state, next_timestep = jax.vmap(self._environment.step)(
      env_keys, state.env_state, decision.action
    )
    begins, ends = next_timestep.first(), next_timestep.last()
    episode_return = jnp.where(begins, 0.0, state.episode_return + next_timestep.reward)
    episode_length = jnp.where(begins, 0, state.episode_length + 1)
    metrics = _reduced(
      self._environment.metrics, state.metrics, next_timestep.metrics, episode_length, jnp
    )
    explored = jax.tree.map(lambda before: ~begins & (before | explores), state.explored)
    next_state = UnrollState(
      env_state,
      next_timestep._replace(metrics={}),
      policy_state,
      episode_return,
      episode_length,
      metrics,
      explored,
    )
    episodes = ends, episode_return, episode_length, explored, metrics
    return next_state, ((timestep, decision), episodes)


class _HostUnroll:
  """The unroll of environments that threads step, with the layout and resets of `_TracedUnroll`.

  The N instances are made once, at the first `init`, or at the first after `close`. Every `init` resets
  the same instances, an array of which is `env_state`, and makes older states invalid.
  """

  def __init__(
    self,
    environment: host.HostEnvironment,
    policy: _Policy,
    num_envs: int,
    sequence_length: int,
    should_stop: Callable[[], bool],
    is_rendered: bool,
  ):
    self._should_stop = should_stop
    self._is_rendered = is_rendered
    self._environment = environment
    self._agent = policy.agent
    self._num_envs = num_envs
    self._sequence_length = sequence_length
    self._instances: list[host.Instance] = []
    self._env_state: Any = None  # of the newest state

    def start(key: chex.PRNGKey):
      identity_key, steps_key, roles_key = jax.random.split(key, 3)
      return jax.random.bits(identity_key, (num_envs,), jnp.uint32), steps_key, roles_key

    def act(
      params: Tree, key: chex.PRNGKey, t: Any, policy_state: Tree, timestep: Tree, explores: Any
    ):
      return policy.act(params, jax.random.fold_in(key, t), policy_state, timestep, explores)

    self._roles = jax.jit(policy.roles)
    self._start = jax.jit(start)
    self._act = jax.jit(act)

  def init(self, key: chex.PRNGKey) -> UnrollState:
    """Resets all instances and returns their state.

    Raises:
      ValueError: it is called while tracing; or, as `host.Failure`, an environment fails.
    """
    if isinstance(key, jax.core.Tracer):
      raise ValueError(host.REFUSAL)
    if not self._instances:
      self._instances = self._environment.make(self._num_envs, is_rendered=self._is_rendered)
    seeds = np.asarray(jax.random.bits(key, (self._num_envs,), jnp.uint32)).tolist()
    timestep = self._empty(self._num_envs)
    reset = lambda n: _write(timestep, n, self._instances[n].reset(seeds[n]))
    host.for_each(self._instances, reset, self._beat)
    zeros: Any = np.zeros(self._num_envs, np.float32)
    return UnrollState(
      env_state=self._as_env_state(timestep),
      timestep=timestep._replace(metrics={}),
      policy_state=self._agent.initial_policy_state(self._num_envs),
      episode_return=zeros,
      episode_length=zeros.astype(np.int32),
      metrics={METRICS + name: zeros for name in self._environment.metrics},
      explored=zeros.astype(bool),
    )

  def unroll(
    self, params: Tree, key: chex.PRNGKey, state: UnrollState, version: Any, actor_id: Any
  ) -> tuple[UnrollState, experience.Sequence, Episodes]:
    """As `Unroll.unroll`.

    Raises:
      ValueError: `state` is not what the last call returned (an instance cannot go back), or, as
        `host.Failure`, an environment fails.
    """
    if state.env_state is not self._env_state:
      raise ValueError('state: its environments were stepped or reset since; pass the newest state')
    num_envs, sequence_length = self._num_envs, self._sequence_length
    identity, key, roles_key = self._start(key)
    explores = self._roles(params, roles_key)
    policy_state = state.policy_state
    timesteps = self._empty(num_envs, sequence_length)
    observed = timesteps._replace(metrics={})
    _write(observed, np.s_[:, 0], state.timestep)
    decisions: Any = None
    for t in range(sequence_length - 1):
      timestep = jax.tree.map(lambda x, t=t: x[:, t], observed)
      policy_state, decision = self._act(params, key, np.int32(t), policy_state, timestep, explores)
      decision = jax.device_get(decision)
      if decisions is None:  # the last one stays 0: its action is still to be chosen
        blank = lambda x: np.zeros((num_envs, sequence_length, *x.shape[1:]), x.dtype)
        decisions = jax.tree.map(blank, decision)
      _write(decisions, np.s_[:, t], decision)
      action = decision.action
      step = lambda n, t=t, action=action: _write(
        timesteps, (n, t + 1), self._instances[n].step(action[n])
      )
      host.for_each(self._instances, step, self._beat)
    newest = jax.tree.map(lambda x: x[:, -1].copy(), observed)
    episodes = self._episodes(state, timesteps, explores)
    next_state = UnrollState(
      env_state=self._as_env_state(newest),
      timestep=newest,
      policy_state=policy_state,
      episode_return=episodes.episode_return[-1],
      episode_length=episodes.episode_length[-1],
      metrics={name: values[-1] for name, values in episodes.metrics.items()},
      explored=episodes.explored[-1],
    )
    each: Any = lambda value: np.full(num_envs, value, np.int32)
    sequence = _sequence(
      timesteps,
      decisions,
      initial_state=self._agent.stored_state(state.policy_state),
      identity=identity,
      version=each(version),
      actor_id=each(actor_id),
    )
    return next_state, sequence, episodes

  def shapes(self, params: Tree) -> experience.Sequence:
    shape: Any = lambda shape, dtype: jax.ShapeDtypeStruct((self._num_envs, *shape), dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    t = jax.ShapeDtypeStruct((), jnp.int32)
    timestep = self._timestep(shape)._replace(metrics={})
    policy_state = jax.eval_shape(lambda: self._agent.initial_policy_state(self._num_envs))
    _, decision = jax.eval_shape(self._act, params, key, t, policy_state, timestep, shape((), bool))
    in_time = lambda x: shape((self._sequence_length, *x.shape[1:]), x.dtype)
    timestep, decision = jax.tree.map(in_time, (timestep, decision))
    return _sequence(
      timestep,
      decision,
      initial_state=jax.eval_shape(self._agent.stored_state, policy_state),
      identity=shape((), jnp.uint32),
      version=shape((), jnp.int32),
      actor_id=shape((), jnp.int32),
    )

  def close(self) -> None:
    """Closes the instances."""
    host.close(self._instances)
    self._instances = []

  def _as_env_state(self, timestep: environment_lib.TimeStep) -> wrappers.AutoResetState:
    """The instances as the `env_state` after their newest time step; makes older ones invalid."""
    instances = np.empty(self._num_envs, object)
    instances[:] = self._instances
    self._env_state = wrappers.AutoResetState(env_state=instances, is_over=timestep.last())
    return self._env_state

  def _beat(self) -> None:
    if self._should_stop():
      raise StoppedError

  def _timestep(self, make: Callable[[tuple[int, ...], Any], Any]) -> environment_lib.TimeStep:
    """A TimeStep with the leaves `make(shape, dtype)`."""
    return environment_lib.TimeStep(
      step_type=make((), np.int32),
      reward=make((), np.float32),
      discount=make((), np.float32),
      observation=jax.tree.map(
        lambda spec: make(spec.shape, spec.dtype), self._environment.observation_spec
      ),
      metrics={name: make((), np.float32) for name in self._environment.metrics},
    )

  def _empty(self, *leading: int) -> environment_lib.TimeStep:
    return self._timestep(lambda shape, dtype: np.empty((*leading, *shape), dtype))

  def _episodes(
    self, state: UnrollState, timesteps: environment_lib.TimeStep, explores: jax.Array
  ) -> Episodes:
    shape = (self._sequence_length - 1, self._num_envs)
    returns: Any = np.empty(shape, np.float32)
    lengths: Any = np.empty(shape, np.int32)
    explored: Any = np.empty(shape, bool)
    acted: Any = np.asarray(explores)
    step_type = np.swapaxes(timesteps.step_type, 0, 1)[1:]
    reward = np.swapaxes(timesteps.reward, 0, 1)[1:]
    episode_return: Any = state.episode_return
    episode_length: Any = state.episode_length
    episode_explored: Any = state.explored
    reduced: list[Mapping[str, Any]] = [state.metrics]
    for t, begins in enumerate(step_type == dm_env.StepType.FIRST):
      returns[t] = episode_return = np.where(begins, 0, episode_return + reward[t])
      lengths[t] = episode_length = np.where(begins, 0, episode_length + 1)
      explored[t] = episode_explored = ~begins & (episode_explored | acted)
      values: Any = jax.tree.map(lambda x, t=t: x[:, t + 1], timesteps.metrics)
      reduced.append(_reduced(self._environment.metrics, reduced[-1], values, episode_length, np))
    metrics: Any = {name: np.stack([each[name] for each in reduced[1:]]) for name in state.metrics}
    ended = step_type == dm_env.StepType.LAST
    return Episodes(ended, returns, lengths, explored, acted.all(), metrics)


def _write(arrays: Tree, index: Any, values: Tree) -> None:
  """Writes a tree of values into a tree of arrays, in place, at an index."""
  for array, value in zip(jax.tree.leaves(arrays), jax.tree.leaves(values), strict=True):
    array[index] = value


def sequence_schema(unroll: Unroll, params: Tree) -> experience.Sequence:
  """Shapes and dtypes of one stored Sequence, computed from params, or their shapes, without a step.

  It has jax.ShapeDtypeStruct: [T, ...], or [...] for a field without a time axis.
  """
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), unroll.shapes(params))


def random_agent(action_spec: specs.BoundedArray) -> agent_lib.Agent:
  """An agent that is the random policy, see `wrappers.random_action`; its parameters are ()."""

  def act(params, key, policy_state, timestep, *, greedy=False):
    del params, greedy
    keys = jax.random.split(key, timestep.reward.shape[0])
    draw = lambda key, observation: wrappers.random_action(key, action_spec, observation)
    action = jax.vmap(draw)(keys, timestep.observation)
    return policy_state, experience.Decision(action, extras={})

  return agent_lib.Agent(
    init_params=lambda key: (),
    acting_params=lambda params: params,
    initial_policy_state=lambda num_envs: (),
    stored_state=lambda policy_state: (),
    act=act,
  )
