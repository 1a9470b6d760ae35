"""Environments of navix, which is MiniGrid in JAX, as `navix/NAME`; navix needs Python 3.12."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import navix
import numpy as np
from dm_env import specs
from navix import observations
from navix.environments import environment as navix_environment
from navix.rendering import cache as rendering

from hephaestus.actors.environments import adapter, wrappers

# Values of the three numbers of a cell: kind of entity, colour, and state (of a door, or the
# direction of the player).
NUM_VALUES = (navix_environment.MAX_CATEGORICAL_VALUE, 6, 4)
# Families whose task is a sentence in MiniGrid, which navix does not observe.
UNTOLD = ('Navix-Fetch-', 'Navix-GoTo', 'Navix-PutNear-')


def names() -> list[str]:
  """Names of all registered environments."""
  return sorted(navix.registry())


def options(name: str) -> dict[str, Any]:
  """Option -> default, of an environment: `max_steps` and `first_person`, see `make`."""
  return {'max_steps': navix.make(name).max_steps, 'first_person': False}


def make(name: str, max_steps: int | None = None, first_person: bool = False) -> wrappers.TimeLimit:
  """Makes an environment of navix, whose time limit truncates; None for navix's own.

  The observation is [H, W, C] bool: for each of H x W cells its kind, colour and state, each one-hot, by
  `NUM_VALUES`; C is the sum of these. In `first_person` it is an egocentric view of 7 x 7 cells.

  Raises:
    ValueError: the task changes with the episode, and navix does not observe it.
  """
  if name.startswith(UNTOLD):
    raise ValueError(
      f"environment.name='navix/{name}': its task changes with the episode and is not observed; choose "
      'another'
    )
  look = observations.symbolic_first_person if first_person else observations.symbolic
  limit = {} if max_steps is None else {'max_steps': max_steps}
  # Auto-reset is ours; a step after a time limit of navix would else begin an episode.
  env = navix.make(name, observation_fn=look, disable_autoreset=True, **limit)

  key = jax.eval_shape(functools.partial(jax.random.key, 0))
  like = jax.eval_shape(env.reset, key)

  def begin(key):
    timestep = env.reset(key)
    return _reduced(timestep), encode(timestep.observation)

  def advance(key, state, action):
    # `step` traces a reset, too, so it needs the shapes of what only a reset and frames read.
    blank = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), (like.observation, like.state.cache)
    )
    whole = state.replace(observation=blank[0], state=state.state.replace(key=key, cache=blank[1]))
    timestep = env.step(whole, action)
    is_terminated = timestep.step_type == navix_environment.StepType.TERMINATION
    return _reduced(timestep), encode(timestep.observation), timestep.reward, is_terminated

  def encode(observation):
    parts = [observation[..., i, None] == jnp.arange(n) for i, n in enumerate(NUM_VALUES)]
    return jnp.concatenate(parts, axis=-1)

  unlimited = adapter.Adapter(
    begin=begin,
    advance=advance,
    observation_spec=lambda cells: specs.BoundedArray(cells.shape, bool, False, True, 'cells'),
    action_spec=specs.DiscreteArray(len(env.action_set), np.int32),
    frame=_frame,
  )
  return wrappers.TimeLimit(unlimited, env.max_steps)


def _reduced(timestep: Any) -> Any:
  """A timestep without its key, its observation, and the cached pictures for rendering."""
  return timestep.replace(state=timestep.state.replace(key=None, cache=None), observation=None)


def _frame(timestep: Any) -> np.ndarray:
  """Renders a state, [H, W, 3] uint8."""
  state = timestep.state.replace(cache=rendering.RenderingCache.init(timestep.state.grid))
  return np.asarray(observations.rgb(state))
