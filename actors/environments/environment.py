"""The interface `Environment`, its `TimeStep`, and `check` of an environment against its specs."""

import abc
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

EnvState = Any  # a tree of arrays of fixed shapes, different for each environment
Observation = Any  # an array, or a tree of arrays
Metrics = Mapping[str, chex.Numeric]
_NONE: Metrics = MappingProxyType({})

FINITE_BOUNDS = 'finite bounds are needed with a finite difference, such as -1 and 1'
MOST_NUMBERS = 1 << 24  # of an observation
TOO_LARGE = f'at most {MOST_NUMBERS:,} numbers fit an observation'
REDUCTIONS = ('mean', 'sum', 'max', 'last')
"""How the values of a metric at the steps of an episode become one number, see `Environment.metrics`."""


class TimeStep(NamedTuple):
  """Time step of an environment, with the semantics of dm_env.

  Attributes:
    step_type: [] int32, a value of `dm_env.StepType`.
    reward: [] float32, earned by the previous action; 0 at FIRST.
    discount: [] float32; at LAST, 0 means termination and 1 truncation; 1 elsewhere.
    observation: an array or a tree of arrays, as `Environment.observation_spec` describes it.
    metrics: name -> [] float32, of the names in `Environment.metrics`; not read at FIRST. Agents do not
      get them.
  """

  step_type: jax.Array
  reward: jax.Array
  discount: jax.Array
  observation: Observation
  metrics: Mapping[str, chex.Numeric] = {}

  def first(self) -> jax.Array:
    return self.step_type == dm_env.StepType.FIRST.value

  def last(self) -> jax.Array:
    return self.step_type == dm_env.StepType.LAST.value


def restart(observation: Observation, metrics: Metrics = _NONE) -> TimeStep:
  """The FIRST time step of an episode."""
  return _timestep(dm_env.StepType.FIRST, 0.0, 1.0, observation, metrics)


def transition(
  reward: chex.Numeric, observation: Observation, metrics: Metrics = _NONE
) -> TimeStep:
  """A MID time step."""
  return _timestep(dm_env.StepType.MID, reward, 1.0, observation, metrics)


def termination(
  reward: chex.Numeric, observation: Observation, metrics: Metrics = _NONE
) -> TimeStep:
  """A LAST time step with discount 0, at termination."""
  return _timestep(dm_env.StepType.LAST, reward, 0.0, observation, metrics)


def truncation(
  reward: chex.Numeric, observation: Observation, metrics: Metrics = _NONE
) -> TimeStep:
  """A LAST time step with discount 1, at truncation."""
  return _timestep(dm_env.StepType.LAST, reward, 1.0, observation, metrics)


def _timestep(
  step_type: dm_env.StepType,
  reward: chex.Numeric,
  discount: float,
  observation: Observation,
  metrics: Metrics,
) -> TimeStep:
  return TimeStep(
    step_type=jnp.asarray(step_type.value, jnp.int32),
    reward=jnp.asarray(reward, jnp.float32),
    discount=jnp.asarray(discount, jnp.float32),
    observation=observation,
    metrics={name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()},
  )


class Environment(abc.ABC):
  """Interface of an environment: its specs, and its rules as pure functions of its state.

  `reset` and `step` are traced: they may be jitted, vmapped over environments and scanned over time,
  and all their arrays keep shape and dtype. Randomness comes only from the key argument. The state
  holds no key, and the environment has no mutable attributes. There is no auto-reset: the result of
  a step after LAST is undefined, and `wrappers.AutoReset` adds the reset.

  If actions are one choice among A, a dict observation may have 'action_mask', [A] bool, True for legal
  actions; the effect of an illegal action is up to the environment. With several choices at once (see
  `action_spec`), their masks are concatenated, and A is the sum of their numbers of values.
  """

  @property
  @abc.abstractmethod
  def observation_spec(self) -> Any:
    """A tree of `dm_env.specs.Array` or `BoundedArray` with the structure of an observation."""

  @property
  @abc.abstractmethod
  def action_spec(self) -> specs.BoundedArray:
    """Spec of an action: a `dm_env.specs.DiscreteArray` or a `BoundedArray` with one axis.

    A `DiscreteArray` of int32 is one choice among A. A `BoundedArray` of floats is a continuous action;
    one of int32 is several choices at once, each from 0 to its maximum.
    """

  @property
  @abc.abstractmethod
  def max_steps(self) -> int:
    """Maximum number of steps of an episode."""

  @property
  def action_names(self) -> tuple[str, ...]:
    """Names of all discrete choices, in the order of the action mask, for display; empty for none."""
    return ()

  @property
  def has_costly_reset(self) -> bool:
    """Whether a reset takes longer than a step, and few steps end an episode.

    On CPUs, `wrappers.AutoReset` then skips the reset of environments that do not need one.
    """
    return False

  @property
  def scored_by(self) -> str:
    """Name of the quantity that scores compare.

    It is 'return'; 'length' where staying alive is the task; or a name in `metrics`, whose values are summed
    over an episode.
    """
    return 'return'

  @property
  def metrics(self) -> Mapping[str, str]:
    """Metrics of episodes: name -> how values of its steps are reduced; empty for none.

    `TimeStep.metrics` has the value of each step. The reduction is 'mean' over the steps of the episode,
    'sum', 'max', or 'last' for the value at LAST. A run averages the numbers over episodes, for training
    and for evaluations, as the metrics `environment/NAME`.
    """
    return {}

  @abc.abstractmethod
  def reset(self, key: chex.PRNGKey) -> tuple[EnvState, TimeStep]:
    """Begins an episode; returns its state and a FIRST time step."""

  @abc.abstractmethod
  def step(
    self, key: chex.PRNGKey, state: EnvState, action: jax.Array
  ) -> tuple[EnvState, TimeStep]:
    """Takes one action; returns the next state and time step."""

  def next_episode(self, key: chex.PRNGKey, state: EnvState) -> tuple[EnvState, TimeStep]:
    """Begins the next episode of a stream, for auto-reset; by default an ordinary reset.

    An environment overrides it to keep a part of its state from one episode to the next. The state given
    is that at LAST, or the state after one more step, as `wrappers.AutoReset` gives; so a step after LAST
    must keep that part.
    """
    del state
    return self.reset(key)

  def scripted_action(self, state: EnvState) -> jax.Array | None:
    """The action of a good policy that may read the state; None without a scripted policy.

    Whether it is None must not depend on the state, because it is called while tracing.
    """
    del state
    return None

  def render(self, state: EnvState) -> np.ndarray | None:
    """Renders a state as a frame, [H, W, 3] uint8, not traced; None if there are no frames."""
    del state
    return None

  def draw(self, observation: Observation) -> np.ndarray | None:
    """Renders an observation as a frame, [H, W, 3] uint8, not traced; None if it cannot be drawn.

    The observation has no 'action_mask'. It is observed, or predicted by a world model, whose values may lie
    between the values of the environment.
    """
    del observation
    return None


class DiscreteEnvironment(Environment):
  """An environment with one choice among named actions, whose frames show what is observed."""

  action_names: ClassVar[tuple[str, ...]]

  @property
  def action_spec(self) -> specs.DiscreteArray:
    return specs.DiscreteArray(len(self.action_names), np.int32, '_'.join(self.action_names))

  @abc.abstractmethod
  def observe(self, state: EnvState) -> Observation:
    """The observation of a state."""

  def render(self, state: EnvState) -> np.ndarray | None:
    return self.draw(self.observe(state))

  def _stepped(
    self, state: EnvState, reward: chex.Numeric, is_over: chex.Numeric = False
  ) -> tuple[EnvState, TimeStep]:
    """What `step` returns for the next state: LAST if the episode is over, or `state.step_count` at its limit."""
    time_is_up = jnp.asarray(state.step_count >= self.max_steps, jnp.int32)
    timestep = jax.lax.switch(
      jnp.where(is_over, 2, time_is_up),
      (transition, truncation, termination),
      reward,
      self.observe(state),
    )
    return state, timestep

  def _check_least(self, **least: int) -> None:
    """Raises ValueError for an option of this name that is less than that."""
    for name, lowest in least.items():
      if getattr(self, name) < lowest:
        raise ValueError(f'environment.{name}={getattr(self, name)}: at least {lowest} is needed')

  def _check_size(self, count: int, *options: str) -> None:
    """Raises ValueError if options make observations of so many numbers that even their spec takes minutes."""
    if count > MOST_NUMBERS:
      given = ', '.join(f'environment.{name}={getattr(self, name)}' for name in options)
      raise ValueError(f'{given}: {TOO_LARGE}, not {count:,}')


class _CopiedSpec:
  """Lets pickle and `replace` keep what a spec has beyond the specs of dm_env."""

  def __reduce__(self) -> Any:
    return functools.partial(type(self), **self._get_constructor_kwargs()), ()  # type: ignore[attr-defined]


class ChoiceSpec(_CopiedSpec, specs.DiscreteArray):
  """Spec of one choice, or of a category, that agents count from 0 and its library from `start`."""

  def __init__(self, num_values: int, start: int, dtype: Any = np.int32, name: str | None = None):
    super().__init__(num_values, dtype, name)
    self.start = start


class ChoicesSpec(_CopiedSpec, specs.BoundedArray):
  """Spec of several choices, each of which agents count from 0 and their library from its `start`."""

  def __init__(
    self,
    shape: tuple[int, ...],
    dtype: Any,
    minimum: Any,
    maximum: Any,
    start: tuple[int, ...],
    name: str | None = None,
  ):
    super().__init__(shape, dtype, minimum, maximum, name)
    self.start = start


def start_of(spec: specs.Array) -> Any:
  """The number from which the environment's library counts what agents count from 0, [] or [M] int; or 0."""
  start = getattr(spec, 'start', 0)
  return np.asarray(start) if start else 0


class ViewSpec(_CopiedSpec, specs.BoundedArray):
  """Spec of an observation vector with a view: a function of the vector that agents read with it.

  A view adds no information. It gives the same numbers in a form that a network learns from faster,
  such as a map around the agent's position. A world model predicts the vector, and the view is
  computed from the prediction: `view` is a pure function of the vector that returns [V] float32, with
  a fixed V. The other arguments are as of `specs.BoundedArray`; the shape is [F].
  """

  def __init__(
    self,
    shape: tuple[int],
    dtype: Any,
    minimum: Any,
    maximum: Any,
    view: Callable[[jax.Array], jax.Array],
    name: str | None = None,
  ):
    super().__init__(shape, dtype, minimum, maximum, name)
    self.view = view


class Vital(NamedTuple):
  """A number of an observation that the agent must keep up to survive, such as food."""

  name: str  # one word, for metrics
  position: int  # index in the observation vector
  set_point: float = 1.0  # the value at which nothing is lacking


class VitalsSpec(_CopiedSpec, specs.BoundedArray):
  """Spec of an observation vector in which some numbers are vitals, see `Vital`.

  A vital of 0 ends the episode, or leads to its end. With `agent.survival_scale` an agent gives itself
  an intrinsic reward for vitals near their set-points; where the environment's reward already depends
  on them (`are_paid`), that raises ValueError. The other arguments are as of `specs.BoundedArray`; the
  shape is [F].

  Raises:
    ValueError: there is no vital, one lies outside the vector, or two have the same name.
  """

  def __init__(
    self,
    shape: tuple[int],
    dtype: Any,
    minimum: Any,
    maximum: Any,
    vitals: Sequence[Vital],
    *,
    are_paid: bool = False,
    name: str | None = None,
  ):
    super().__init__(shape, dtype, minimum, maximum, name)
    names = [vital.name for vital in vitals]
    if len(shape) != 1 or len(set(names)) != len(names) or not names:
      raise ValueError(
        f'vitals={names}: a vector with at least one vital is needed, each name once'
      )
    for vital in vitals:
      if not 0 <= vital.position < shape[0]:
        raise ValueError(f'{vital}: is not in a vector of shape {shape}')
    self.vitals, self.are_paid = tuple(vitals), are_paid


class BoardSpec(_CopiedSpec, specs.Array):
  """Spec of an observation vector whose last numbers are the cells of a board, in row-major order.

  All cells have the same features. Agents may encode the cells with shared weights, or treat the whole as any
  other vector; a world model takes all numbers to lie in [0, 1], and predicts none beyond. `board_shape` has the
  numbers of rows, columns, and features of a cell; the shape is [F]. `player` are the positions in the vector
  of two numbers, which tell the player's row and column on the board, divided by the largest; or None.

  Raises:
    ValueError: the board is larger than the vector, or `player` no part of what precedes it.
  """

  def __init__(
    self,
    shape: tuple[int],
    dtype: Any,
    board_shape: tuple[int, int, int],
    name: str | None = None,
    *,
    player: tuple[int, int] | None = None,
  ):
    if len(shape) != 1 or math.prod(board_shape) > shape[0]:
      raise ValueError(f'board_shape={board_shape}: is no part of a vector of shape {shape}')
    if player and not all(0 <= x < shape[0] - math.prod(board_shape) for x in player):
      raise ValueError(f'player={player}: is no part of what precedes the board')
    if player and np.dtype(dtype) == bool:
      raise ValueError(f'player={player}: a row and a column are no bool')
    super().__init__(shape, dtype, name)
    self.board_shape, self.player = board_shape, player


def num_choices(action_spec: specs.BoundedArray) -> tuple[int, ...]:
  """Number of values of each choice of an action: (A,) for one choice; () for a continuous action.

  Raises:
    ValueError: integer actions are not a vector of int32, or a minimum is not 0.
  """
  if isinstance(action_spec, specs.DiscreteArray):
    return (int(action_spec.num_values),)
  if action_spec.dtype.kind not in 'iu':
    return ()
  if action_spec.dtype != np.int32:
    raise ValueError(f'action_spec has dtype {action_spec.dtype}: discrete actions are int32')
  low, high = (
    np.broadcast_to(x, action_spec.shape) for x in (action_spec.minimum, action_spec.maximum)
  )
  if len(action_spec.shape) != 1 or (low != 0).any():
    raise ValueError(
      f'action_spec={action_spec!r}: several choices need one axis, and each begins with 0'
    )
  return tuple(int(x) + 1 for x in high)


def has_finite_range(spec: specs.BoundedArray) -> bool:
  """Whether the bounds of real numbers, and the differences between them, are finite in the spec's dtype."""
  with np.errstate(over='ignore', invalid='ignore'):
    return spec.dtype.kind != 'f' or bool(np.isfinite(spec.maximum - spec.minimum).all())


def check_size(field: str, spec: specs.Array) -> None:
  """Raises ValueError, which names the field, for the spec of an observation of more numbers than `MOST_NUMBERS`."""
  count = math.prod(spec.shape)
  if count > MOST_NUMBERS:
    raise ValueError(f'{field}: has shape {list(spec.shape)}, and {TOO_LARGE}, not {count:,}')


def bounds_of(spec: specs.Array) -> tuple[np.ndarray, np.ndarray] | None:
  """Lower and upper bounds of values by a spec, in its dtype; None without bounds, and for bools.

  Bounds of floats are widened by 1e-4 (1 + |bound|), so that rounding does not exceed them.
  """
  if not isinstance(spec, specs.BoundedArray) or spec.dtype.kind == 'b':
    return None
  low, high = np.asarray(spec.minimum, spec.dtype), np.asarray(spec.maximum, spec.dtype)
  if spec.dtype.kind == 'f':
    low, high = low - 1e-4 * (1 + np.abs(low)), high + 1e-4 * (1 + np.abs(high))
  return low, high


def describe_bounds(spec: specs.BoundedArray) -> str:
  """Text such as '0 to 1': the least of the lower bounds and the greatest of the upper bounds."""
  return f'{np.min(spec.minimum):g} to {np.max(spec.maximum):g}'


def remarks(max_steps: int, num_steps: int, num_stuck: int, *, ended: bool) -> list[str]:
  """Warnings about `num_steps` with random actions, of which `num_stuck` had no legal action.

  `ended` says whether any episode ended.

  Raises:
    ValueError: more than half of the steps have no legal action.
  """
  share = num_stuck / max(1, num_steps)
  stuck = (
    f"timestep.observation['action_mask']: no action is legal at {share:.0%} of steps with random "
    'actions'
  )
  if share > 0.5:
    raise ValueError(f'{stuck}; True means legal')
  found = [] if share < 0.05 else [f'{stuck}, and agents then choose among all']
  if not ended:
    found.append(
      f'no episode with random actions ended within {num_steps:,} steps, and the limit is '
      f'max_steps={max_steps:,}: there is no return before an episode ends; give it a lower limit '
      'if episodes need not last so long'
    )
  return found


def check_metrics(metrics: Any) -> None:
  """Raises ValueError if `Environment.metrics` is no mapping of names to `REDUCTIONS`."""
  if not isinstance(metrics, Mapping):
    raise ValueError(f'metrics={metrics!r}: a dict is needed, name -> {", ".join(REDUCTIONS)}')
  for name, reduction in metrics.items():
    if reduction not in REDUCTIONS:
      raise ValueError(f'metrics[{name!r}]={reduction!r}: choose one of {", ".join(REDUCTIONS)}')


def check(environment: Environment) -> None:
  """Checks an environment against its specs by tracing `reset` and `step`; computes nothing.

  Raises:
    ValueError: it is no `Environment`, a spec is invalid, state or time step change shape or dtype
      between reset and step, or they contradict the specs; the message names the field.
  """
  if not isinstance(environment, Environment):
    raise ValueError(
      f'is a {type(environment).__name__}, and no actors.environments.environment.Environment'
    )
  if not isinstance(environment.max_steps, int) or environment.max_steps < 1:
    raise ValueError(f'max_steps={environment.max_steps!r}: a whole number of at least 1 is needed')
  action_spec = environment.action_spec
  if not isinstance(action_spec, specs.BoundedArray):
    raise ValueError(f'action_spec={action_spec!r}: a DiscreteArray or a BoundedArray is needed')
  if isinstance(action_spec, specs.DiscreteArray) and action_spec.dtype != np.int32:
    raise ValueError(f'action_spec has dtype {action_spec.dtype}: discrete actions are int32')
  if not has_finite_range(action_spec):
    raise ValueError(f'action_spec={action_spec!r}: {FINITE_BOUNDS}')
  choices = num_choices(action_spec)
  if environment.action_names and len(environment.action_names) != sum(choices):
    raise ValueError(f'action_names={environment.action_names!r}: there are {sum(choices)} choices')
  check_metrics(environment.metrics)
  for path, spec in jax.tree_util.tree_leaves_with_path(environment.observation_spec):
    field = f'observation_spec{jax.tree_util.keystr(path)}'
    if not isinstance(spec, specs.Array):
      raise ValueError(f'{field}={spec!r}: a dm_env.specs.Array is needed')
    check_size(field, spec)

  key = jax.eval_shape(functools.partial(jax.random.key, 0))
  action = _abstract(action_spec)
  state, timestep = _abstract_pair('reset', jax.eval_shape(environment.reset, key))
  next_state, next_timestep = _abstract_pair(
    'step', jax.eval_shape(environment.step, key, state, action)
  )
  scalar: Any = functools.partial(jax.ShapeDtypeStruct, ())
  expected = TimeStep(
    step_type=scalar(np.int32),
    reward=scalar(np.float32),
    discount=scalar(np.float32),
    observation=jax.tree.map(_abstract, environment.observation_spec),
    metrics={name: scalar(np.float32) for name in environment.metrics},
  )
  _check_equal('timestep', expected, timestep, 'the specs say', 'reset gives')
  _check_equal('timestep', expected, next_timestep, 'the specs say', 'step gives')
  _check_equal('state', state, next_state, 'reset gives', 'step gives')

  if choices and isinstance(expected.observation, dict):
    mask = expected.observation.get('action_mask')
    legal = jax.ShapeDtypeStruct((sum(choices),), bool)
    if mask is not None:
      _check_equal("observation_spec['action_mask']", legal, mask, 'needed is', 'the spec says')
  scripted = jax.eval_shape(environment.scripted_action, state)
  if scripted is not None:
    _check_equal('scripted_action', action, scripted, 'action_spec says', 'it gives')


def _abstract(spec: specs.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def _abstract_pair(function: str, result: Any) -> tuple[Any, TimeStep]:
  if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], TimeStep)):
    raise ValueError(f'{function} must return (state, TimeStep), not {result}')
  return result


def _check_equal(field: str, one: Any, other: Any, one_says: str, other_says: str) -> None:
  describe = lambda leaf: f'{leaf.dtype}{list(leaf.shape)}'
  ones, others = (
    {jax.tree_util.keystr(path): describe(leaf) for path, leaf in leaves}
    for leaves in map(jax.tree_util.tree_leaves_with_path, (one, other))
  )
  for path in ones | others:
    left, right = ones.get(path, 'nothing'), others.get(path, 'nothing')
    if left != right:
      raise ValueError(f'{field}{path}: {one_says} {left}, {other_says} {right}')
