"""Wrappers of environments (auto-reset, time limit); random actions, reference returns, and checks."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from dm_env import specs

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host
from hephaestus.actors.environments.environment import (
  Environment,
  EnvState,
  Observation,
  TimeStep,
  num_choices,
)

# Longest episode of which a reference return is computed: an environment may have no time limit.
_MOST_STEPS = 32_768
_GROUP = 4  # number of environments that are reset together where a reset is costly


@dataclasses.dataclass(frozen=True)
class Wrapper(Environment):
  """Another environment, of which sub-classes change some; their states have its state as `env_state`."""

  environment: Environment

  @property
  def observation_spec(self) -> Any:
    return self.environment.observation_spec

  @property
  def action_spec(self) -> specs.BoundedArray:
    return self.environment.action_spec

  @property
  def max_steps(self) -> int:
    return self.environment.max_steps

  @property
  def action_names(self) -> tuple[str, ...]:
    return self.environment.action_names

  @property
  def scored_by(self) -> str:
    return self.environment.scored_by

  @property
  def has_costly_reset(self) -> bool:
    return self.environment.has_costly_reset

  @property
  def metrics(self) -> Mapping[str, str]:
    return self.environment.metrics

  def scripted_action(self, state: Any) -> jax.Array | None:
    return self.environment.scripted_action(state.env_state)

  def render(self, state: Any) -> np.ndarray | None:
    return self.environment.render(state.env_state)

  def draw(self, observation: Observation) -> np.ndarray | None:
    return self.environment.draw(observation)


class AutoResetState(NamedTuple):
  """State of `AutoReset`."""

  env_state: EnvState  # state of the wrapped environment
  is_over: jax.Array  # [] bool, whether the newest time step is LAST


@dataclasses.dataclass(frozen=True)
class AutoReset(Wrapper):
  """Auto-reset: the step after LAST ignores the action and returns FIRST of a new episode.

  So the last observation of an episode is part of an ordinary time step and needs no extra field. Under
  vmap every step computes a reset too, so a reset should be as cheap as a step. If it is not (see
  `Environment.has_costly_reset`), CPUs instead loop over groups of environments that need a reset.
  """

  def reset(self, key: chex.PRNGKey) -> tuple[AutoResetState, TimeStep]:
    env_state, timestep = self.environment.reset(key)
    return AutoResetState(env_state=env_state, is_over=timestep.last()), timestep

  def step(
    self, key: chex.PRNGKey, state: AutoResetState, action: jax.Array
  ) -> tuple[AutoResetState, TimeStep]:
    reset_key, step_key = jax.random.split(key)
    stepped = self.environment.step(step_key, state.env_state, action)
    begin = _in_groups(self._begin) if self.environment.has_costly_reset else self._begin
    env_state, timestep = begin(reset_key, state.is_over, stepped)
    return AutoResetState(env_state=env_state, is_over=timestep.last()), timestep

  def _begin(
    self, key: chex.PRNGKey, is_over: jax.Array, stepped: tuple[EnvState, TimeStep]
  ) -> tuple[EnvState, TimeStep]:
    """The result of a reset where the episode is over, else the result of the step."""
    new = self.environment.next_episode(key, stepped[0])
    return jax.tree.map(functools.partial(jnp.where, is_over), new, stepped)


def _in_groups(begin: Callable[..., Any]) -> Callable[..., Any]:
  """Transforms `begin(key, is_over, stepped)` so that, under vmap on a CPU, it skips running episodes.

  A loop calls it for groups of environments, and skips groups without a finished episode. The result
  is the same on every platform; an accelerator would wait for each turn of the loop.
  """
  mapped = jax.vmap(begin)
  one = jax.custom_batching.custom_vmap(begin)

  @one.def_vmap
  def each(num_envs, is_batched, *arguments):
    keys, are_over, stepped = jax.tree.map(
      lambda batched, x: x if batched else jnp.broadcast_to(x, (num_envs, *x.shape)),
      tuple(is_batched),
      arguments,
    )
    begun = jax.lax.platform_dependent(keys, are_over, stepped, cpu=loop, default=mapped)
    return begun, jax.tree.map(lambda _: True, begun)

  def loop(keys, are_over, stepped):
    num_envs, bits = are_over.size, jax.random.key_data(keys)
    size = min(num_envs, _GROUP)
    # The last group may overlap the one before it; equal keys and states give equal results.
    starts = np.minimum(np.arange(0, num_envs, size), num_envs - size)
    is_needed = are_over[starts[:, None] + np.arange(size)].any(axis=1)
    needed_first = jnp.asarray(starts)[jnp.argsort(~is_needed)]

    def renew(i, begun):
      take = lambda x: jax.lax.dynamic_slice_in_dim(x, needed_first[i], size)
      put = lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, needed_first[i], 0)
      # As bits, because the check for key reuse takes the slices of all turns for the same keys.
      key = jax.random.wrap_key_data(take(bits), impl=jax.random.key_impl(keys))
      return jax.tree.map(put, begun, mapped(key, take(are_over), jax.tree.map(take, stepped)))

    return jax.lax.fori_loop(0, is_needed.sum(), renew, stepped)

  return one


class TimeLimitState(NamedTuple):
  """State of `TimeLimit`."""

  env_state: EnvState  # state of the wrapped environment
  step_count: jax.Array  # [] int32, steps since the reset


@dataclasses.dataclass(frozen=True)
class TimeLimit(Wrapper):
  """Time limit: makes step `max_steps` of an episode LAST, and leaves its discount unchanged."""

  max_steps: int = 1000

  def __post_init__(self):
    if self.max_steps < 1:
      raise ValueError(f'environment.max_steps={self.max_steps}: at least 1 is needed')

  def reset(self, key: chex.PRNGKey) -> tuple[TimeLimitState, TimeStep]:
    env_state, timestep = self.environment.reset(key)
    return TimeLimitState(env_state, jnp.zeros((), jnp.int32)), timestep

  def next_episode(
    self, key: chex.PRNGKey, state: TimeLimitState
  ) -> tuple[TimeLimitState, TimeStep]:
    env_state, timestep = self.environment.next_episode(key, state.env_state)
    return TimeLimitState(env_state, jnp.zeros((), jnp.int32)), timestep

  def step(
    self, key: chex.PRNGKey, state: TimeLimitState, action: jax.Array
  ) -> tuple[TimeLimitState, TimeStep]:
    env_state, timestep = self.environment.step(key, state.env_state, action)
    step_count = state.step_count + 1
    is_last = timestep.last() | (step_count >= self.max_steps)
    step_type = jnp.where(is_last, dm_env.StepType.LAST.value, timestep.step_type)
    timestep = timestep._replace(step_type=step_type)
    return TimeLimitState(env_state=env_state, step_count=step_count), timestep


def random_action(
  key: chex.PRNGKey, action_spec: specs.BoundedArray, observation: Observation
) -> jax.Array:
  """Samples uniformly among the legal actions, or between the bounds of continuous ones.

  Several choices at once are independent. If no action is legal, all are equally likely. The observation
  is of one environment, and its 'action_mask' is used if it has one.

  Raises:
    ValueError: a continuous action has an infinite bound.
  """
  choices = num_choices(action_spec)
  if not choices:
    if not environment_lib.has_finite_range(action_spec):
      raise ValueError(f'action_spec={action_spec}: no action is uniform between infinite bounds')
    low, high = action_spec.minimum, action_spec.maximum
    return jax.random.uniform(key, action_spec.shape, action_spec.dtype, low, high)
  mask = observation.get('action_mask') if isinstance(observation, dict) else None
  if not action_spec.shape:
    return _random_choice(key, choices[0], mask, action_spec.dtype)
  masks = [None] * len(choices) if mask is None else jnp.split(mask, np.cumsum(choices)[:-1])
  parts = zip(jax.random.split(key, len(choices)), choices, masks, strict=True)
  return jnp.stack([_random_choice(*part, action_spec.dtype) for part in parts])


def _random_choice(
  key: chex.PRNGKey, num_values: int, mask: jax.Array | None, dtype: Any
) -> jax.Array:
  if mask is None:
    return jax.random.randint(key, (), 0, num_values, dtype)
  is_legal = mask | ~mask.any()
  # The chosen one counts from 0 among the legal actions. Its index is the number of actions up to
  # which there are at most so many legal ones.
  up_to = jnp.cumsum(is_legal, dtype=np.uint32)
  chosen = jax.random.bits(key, (), np.uint32) % is_legal.sum(dtype=np.uint32)
  return jnp.sum(up_to <= chosen, dtype=dtype)


def check_values(
  environment: Environment,
  key: chex.PRNGKey,
  *,
  num_envs: int = 4,
  num_steps: int = 1024,
  patience_seconds: float = 1.0,
) -> list[str]:
  """Checks the values that an environment in JAX, without auto-reset, returns, by the random policy.

  It plays parallel environments in one compiled program: 1/16, then 1/4, then all of `num_steps`, but no
  longer ones after a run that took more than the patience.

  Returns:
    Warnings; see `environment.remarks`.

  Raises:
    ValueError: an observation, reward or metric is not finite, an observation is outside the bounds of its
      spec, a discount is outside [0, 1], an episode is longer than `max_steps`, more than half of the
      steps have no legal action, or a continuous action has an infinite bound; the message names the
      field.
  """
  play = _random_play(environment)
  # A CPU's compiler would take much longer to optimise the program than the program runs.
  options: Any = {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None
  program = jax.jit(jax.vmap(play, in_axes=(0, None)))
  keys = jax.random.split(key, num_envs)
  compiled = program.lower(keys, np.int32(0)).compile(compiler_options=options)
  ended, stuck, played = np.zeros(num_envs, bool), np.zeros(num_envs, int), 0
  for played in sorted({-(-num_steps // 16), -(-num_steps // 4), num_steps}):
    began = time.monotonic()
    faults, ended, stuck = jax.device_get(compiled(keys, np.int32(played)))
    for text, (is_wrong, value) in faults.items():
      if is_wrong.any():
        found = text.replace('VALUE', f'{value[is_wrong][0]:g}')
        raise ValueError(f'{found} when the environment is played')
    if time.monotonic() - began > patience_seconds:
      break
  # Each environment has played so many steps, and the limit holds for each.
  return environment_lib.remarks(
    environment.max_steps, played, round(stuck.mean()), ended=bool(ended.any())
  )


def _random_play(environment: Environment) -> Callable[[jax.Array, Any], Any]:
  """Makes a function (key, number of steps) that plays one environment with the random policy.

  It returns a dict, message -> ([] bool, whether that fault occurred; [] float32, its first wrong value);
  whether an episode has ended, [] bool; and the number of steps without a legal action, [] int32.
  """
  env = AutoReset(environment)

  def step(index, carry, key):
    state, observation, length, ended, stuck, before = carry
    action_key, step_key = jax.random.split(jax.random.fold_in(key, index))
    action = random_action(action_key, env.action_spec, observation)
    state, timestep = env.step(step_key, state, action)
    length = jnp.where(timestep.first(), 0, length + 1)
    found = _faults(environment, timestep, length)
    first = lambda old, new: (old[0] | new[0], jnp.where(old[0], old[1], new[1]))
    faults = {text: first(before[text], found[text]) for text in found}
    ended, stuck = ended | timestep.last(), stuck + _is_stuck(environment, timestep)
    return state, timestep.observation, length, ended, stuck, faults

  def play(key, num_steps):
    reset_key, steps_key = jax.random.split(key)
    state, first = env.reset(reset_key)
    none = jnp.zeros((), jnp.int32)
    faults = _faults(environment, first, none)
    carry = (state, first.observation, none, first.last(), none, faults)
    body = functools.partial(step, key=steps_key)
    *_, ended, stuck, faults = jax.lax.fori_loop(0, num_steps, body, carry)
    return faults, ended, stuck

  return play


def _faults(
  environment: Environment, timestep: TimeStep, length: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Judges a time step: message -> ([] bool, whether it has that fault; [] float32, for VALUE in it)."""
  nothing = jnp.zeros((), jnp.float32)
  result = {}
  observation_specs = jax.tree.leaves(environment.observation_spec)
  leaves = jax.tree_util.tree_leaves_with_path(timestep.observation)
  for (path, leaf), spec in zip(leaves, observation_specs, strict=True):
    field = f'timestep.observation{jax.tree_util.keystr(path)}'
    result[f'{field}: is not always finite'] = ~jnp.isfinite(leaf).all(), nothing
    bounds = environment_lib.bounds_of(spec)
    if bounds is not None:
      is_outside = (leaf < bounds[0]) | (leaf > bounds[1])
      value = jnp.where(is_outside, leaf.astype(jnp.float32), -jnp.inf).max(initial=-jnp.inf)
      text = f'{field}: the spec says {environment_lib.describe_bounds(spec)}, it is VALUE'
      result[text] = is_outside.any(), value
  numbers = {'reward': timestep.reward} | {
    f'metrics[{name!r}]': value for name, value in timestep.metrics.items()
  }
  for name, value in numbers.items():
    result[f'timestep.{name}: is not always finite'] = ~jnp.isfinite(value), nothing
  discount = timestep.discount
  in_range = (discount >= 0.0) & (discount <= 1.0)
  result['timestep.discount: is not always within [0, 1]'] = ~in_range, nothing
  too_long = (length >= environment.max_steps) & ~timestep.last()
  text = (
    f'max_steps={environment.max_steps}: an episode is longer, and nothing truncates it, as '
    'wrappers.TimeLimit would; it has not ended at step VALUE'
  )
  result[text] = too_long, length.astype(jnp.float32)
  return result


def _is_stuck(environment: Environment, timestep: TimeStep) -> jax.Array:
  """[] bool, whether a choice has no legal action, before LAST."""
  choices, observation = num_choices(environment.action_spec), timestep.observation
  if not (choices and isinstance(observation, dict) and 'action_mask' in observation):
    return jnp.zeros((), bool)
  masks = jnp.split(observation['action_mask'], np.cumsum(choices)[:-1])
  return ~jnp.stack([mask.any() for mask in masks]).all() & ~timestep.last()


class ReferenceReturns(NamedTuple):
  """Mean undiscounted episode returns of two policies, by which scores are normalised.

  They are means of whatever else the environment is `scored_by`.
  """

  random: float  # mean of the random policy
  scripted: float  # mean of the environment's scripted policy


def normalised_score(return_: chex.Numeric, reference: ReferenceReturns) -> chex.Numeric:
  """Normalised return: 0 is the mean of the random policy, 1 the mean of the scripted policy.

  score = (return − random) / (scripted − random)
  """
  return (return_ - reference.random) / (reference.scripted - reference.random)


def reference_returns(
  environment: Environment, *, num_episodes: int = 512, seed: int = 0
) -> ReferenceReturns | None:
  """Mean returns, see `ReferenceReturns`, of full episodes of the random and of the scripted policy.

  The episodes of both are played in parallel in one compiled program, with or without auto-reset.

  Returns:
    The means; None if the environment is stepped on the host, has no scripted policy, has one no
    better than the random policy, or has episodes of more than 32,768 steps (`_MOST_STEPS`).

  Raises:
    ValueError: an episode has more than `max_steps` steps, a continuous action an infinite bound, or
      `scored_by` names nothing that scores compare.
  """
  if isinstance(environment, host.HostEnvironment):
    return None
  summed = [name for name, how in environment.metrics.items() if how == 'sum']
  if environment.scored_by not in ('return', 'length', *summed):
    raise ValueError(
      f"scored_by={environment.scored_by!r}: name 'return', 'length' or a metric of the reduction 'sum'"
    )
  key = jax.random.key(seed)
  env_state, _ = jax.eval_shape(environment.reset, key)
  if jax.eval_shape(environment.scripted_action, env_state) is None:
    return None

  # Both policies in one program, because compiling takes longer than running it. A closure, because
  # an environment may have no hash, as a plain dataclass.
  returns, are_over = jax.jit(lambda key: _episode_returns(key, environment, num_episodes))(key)
  if not are_over.all():
    if environment.max_steps > _MOST_STEPS:
      logging.warning('Some episodes last more than %d steps: no score is given.', _MOST_STEPS)
      return None
    raise ValueError(f'environment.max_steps={environment.max_steps}: an episode is longer')
  random, scripted = returns
  reference = ReferenceReturns(random=float(random.mean()), scripted=float(scripted.mean()))
  if reference.scripted <= reference.random:
    logging.warning('The scripted policy is no better than random: %s gives no scale.', reference)
    return None
  return reference


def _episode_returns(
  key: chex.PRNGKey, environment: Environment, num_episodes: int
) -> tuple[jax.Array, jax.Array]:
  """Plays N episodes of the random policy and N of the scripted policy.

  Returns:
    [2, N] float32 returns, see `ReferenceReturns`; and [2, N] bool, whether each episode has ended.
  """
  size = 2 * num_episodes
  is_scripted = jnp.arange(size) >= num_episodes
  key, reset_key = jax.random.split(key)
  env_state, timestep = jax.vmap(environment.reset)(jax.random.split(reset_key, size))

  def choose(key, is_scripted, env_state, observation):
    random = random_action(key, environment.action_spec, observation)
    return jnp.where(is_scripted, environment.scripted_action(env_state), random)

  def is_playing(carry):
    _, num_steps, _, _, _, is_over = carry
    return (num_steps < min(environment.max_steps, _MOST_STEPS)) & ~is_over.all()

  def play(carry):
    key, num_steps, env_state, observation, returns, is_over = carry
    key, action_key, step_key = jax.random.split(key, 3)
    action_keys = jax.random.split(action_key, size)
    action = jax.vmap(choose)(action_keys, is_scripted, env_state, observation)
    step_keys = jax.random.split(step_key, size)
    env_state, timestep = jax.vmap(environment.step)(step_keys, env_state, action)
    compared = {**timestep.metrics, 'return': timestep.reward, 'length': jnp.ones(size)}
    gained = compared[environment.scored_by]
    returns = returns + jnp.where(is_over, 0.0, gained)
    is_over = is_over | timestep.last()
    return key, num_steps + 1, env_state, timestep.observation, returns, is_over

  carry = (key, 0, env_state, timestep.observation, jnp.zeros(size), timestep.last())
  *_, returns, is_over = jax.lax.while_loop(is_playing, play, carry)
  return returns.reshape(2, num_episodes), is_over.reshape(2, num_episodes)
