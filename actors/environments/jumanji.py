"""Environments of jumanji with one agent and few discrete actions, as `jumanji/NAME`."""

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
from dm_env import specs

from hephaestus.actors.environments import adapter, wrappers

# Classes whose reset takes ten times as long as a step, or more.
COSTLY_RESETS = 'Maze', 'RubiksCube', 'SlidingTilePuzzle'
MAX_CHOICES = 4096
NO_LIMIT = int(np.iinfo(np.int32).max)


def names() -> list[str]:
  """Names of all registered environments; `make` raises ValueError for those with several agents."""
  return sorted(jumanji.registered_environments())


def options(name: str) -> dict[str, Any]:
  """Option -> default: the numbers that an environment's class takes, and `max_steps`.

  Raises:
    ValueError: its data could not be fetched.
  """
  env = _construct(name)
  parameters = inspect.signature(type(env)).parameters
  known = {key: p.default for key, p in parameters.items() if isinstance(p.default, (int, float))}
  known.pop('time_limit', None)
  return {'max_steps': getattr(env, 'time_limit', 1000), **known}


def make(name: str, max_steps: int | None = None, **options: Any) -> wrappers.TimeLimit:
  """Makes an environment of jumanji; an observation is a flat dict of the fields of jumanji's observation.

  Positions in the cells of the only matrix of bits, as in Maze, become planes of it, [H, W, C] bool, which
  agents read cell by cell. Several discrete choices become one choice among all combinations, and so does
  their mask. Jumanji does not distinguish its time limit from termination, so its limit is disabled and
  replaced by `wrappers.TimeLimit`, by default of as many steps, or 1000 where it has none.

  Raises:
    ValueError: its actions are not discrete, are of several agents, or have more than `MAX_CHOICES`
      combinations; or its data could not be fetched.
  """
  env = _construct(name, **options)
  if hasattr(env, 'time_limit'):
    max_steps = env.time_limit if max_steps is None else max_steps
    env = _construct(name, **options, time_limit=NO_LIMIT)
  num_values = _num_values(name, env)

  # Jumanji keeps a key in its state. Here the state has none, and each step takes a new one.
  def begin(key):
    state, timestep = env.reset(key)
    return _with_key(state, None), observe(timestep.observation)

  def advance(key, state, action):
    if env.action_spec.shape:
      action = jnp.stack(jnp.unravel_index(action, num_values))
    action = jnp.asarray(action, env.action_spec.dtype)
    state, timestep = env.step(_with_key(state, key), action)
    is_terminated = timestep.last() & (timestep.discount == 0)
    return _with_key(state, None), observe(timestep.observation), timestep.reward, is_terminated

  def observe(observation):
    leaves = jax.tree_util.tree_leaves_with_path(observation)
    fields = _with_planes({jax.tree_util.keystr(path).lstrip('.'): leaf for path, leaf in leaves})
    if 'action_mask' in fields:
      fields['action_mask'] = fields['action_mask'].reshape(-1)
    return fields

  unlimited = adapter.Adapter(
    begin=begin,
    advance=advance,
    observation_spec=lambda fields: {key: _spec(env, key, leaf) for key, leaf in fields.items()},
    action_spec=specs.DiscreteArray(math.prod(num_values), np.int32),
    has_costly_reset=type(env.unwrapped).__name__ in COSTLY_RESETS,
  )
  return wrappers.TimeLimit(unlimited, 1000 if max_steps is None else max_steps)


def _with_planes(fields: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """The fields with positions `NAME.row`, `NAME.col` as planes of the only [H, W] bool matrix, if there is one."""
  matrices = [key for key, x in fields.items() if np.ndim(x) == 2 and x.dtype == bool]
  places = [key.removesuffix('.row') for key in fields if key.endswith('.row')]
  if len(matrices) != 1 or not places:
    return fields
  height, width = (np.arange(n) for n in fields[matrices[0]].shape)
  planes = [fields[matrices[0]]]
  for place in places:
    row, column = fields.pop(f'{place}.row'), fields.pop(f'{place}.col')
    planes.append((height[:, None] == row) & (width == column))
  return fields | {matrices[0]: jnp.stack(planes, axis=-1)}


def _construct(name: str, **arguments: Any) -> Any:
  try:
    return jumanji.make(name, **arguments)
  except OSError as error:
    raise ValueError(
      f"environment.name='jumanji/{name}': its data could not be fetched ({error})"
    ) from error


def _num_values(name: str, env: Any) -> tuple[int, ...]:
  """Number of values of each choice of an action; raises ValueError if the actions are not supported."""
  spec = env.action_spec
  field = f"environment.name='jumanji/{name}'"
  if env.reward_spec.shape:
    raise ValueError(f'{field}: it is for several agents; choose an environment for one')
  if not hasattr(spec, 'num_values'):
    raise ValueError(f'{field}: its actions, {spec}, are not discrete choices')
  num_values = tuple(int(n) for n in np.ravel(spec.num_values))
  if math.prod(num_values) > MAX_CHOICES:
    raise ValueError(
      f'{field}: its actions are {math.prod(num_values):,} combinations; at most {MAX_CHOICES:,} '
      'can be played'
    )
  mask = getattr(env.observation_spec, 'action_mask', None)
  if mask is not None and math.prod(mask.shape) != math.prod(num_values):
    raise ValueError(
      f'{field}: it is for several agents, with a mask {list(mask.shape)} for actions '
      f'{list(num_values)}; choose an environment for one'
    )
  return num_values


def _with_key(state: Any, key: Any) -> Any:
  return state._replace(key=key) if hasattr(state, '_replace') else state.replace(key=key)


def _spec(env: Any, field: str, leaf: jax.ShapeDtypeStruct) -> specs.Array:
  """The spec of a field; real numbers are bounded only if they lie in [0, 1]."""
  given = functools.reduce(getattr, field.split('.'), env.observation_spec)
  # A mask is flattened, see `make`.
  shape = leaf.shape if field != 'action_mask' else (math.prod(leaf.shape),)
  if leaf.dtype == bool:
    return specs.BoundedArray(shape, bool, False, True, field)
  if not hasattr(given, 'minimum'):
    return specs.Array(shape, leaf.dtype, field)
  low, high = (np.broadcast_to(x, leaf.shape) for x in (given.minimum, given.maximum))
  if type(env.unwrapped).__name__ == 'TSP' and field == 'position':
    low = low - 1  # before the first city, which jumanji's own spec leaves out
  is_unit = np.all(low == 0) and np.all(high == 1)
  if leaf.dtype.kind not in 'iu' and not is_unit:
    return specs.Array(shape, leaf.dtype, field)
  return specs.BoundedArray(shape, leaf.dtype, low, high, field)
