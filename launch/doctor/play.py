"""Steps of an environment, played by an agent or at random."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import dm_env
import jax
import numpy as np

from hephaestus.actors import rollout
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib

NUM_ENVS, LENGTH = 16, 65
Played = tuple[experience.Sequence, rollout.Episodes]
"""A sequence [N, LENGTH, ...] and the episodes that ended in it, host arrays."""


class Streams(NamedTuple):
  """T steps of N environments, host arrays.

  Attributes:
    observation: [T, N, F] float32, all numbers, without the action mask.
    action: [T, N, A] float32, one-hot where it is a choice.
    reward: [T, N] float32, that arrived at the step.
    discount: [T, N] float32, likewise.
    first: [T, N] bool.
    lengths: [E] of the episodes that ended, in steps.
    returns: [E] float32 of the same, undiscounted.
    ends: [E] float32, the discount of the last step of each: 0 where it terminated, 1 where a time
      limit truncated it.
  """

  observation: np.ndarray
  action: np.ndarray
  reward: np.ndarray
  discount: np.ndarray
  first: np.ndarray
  lengths: np.ndarray
  returns: np.ndarray
  ends: np.ndarray


def play(
  environment: environment_lib.Environment,
  agent: agent_lib.Agent,
  params: Any,
  *,
  num_steps: int,
  seed: int,
) -> list[Played]:
  """Sequences [N, LENGTH, ...] of an agent; each begins with the last step of the one before.

  Args:
    environment: without auto-reset.
    agent: that acts.
    params: its acting parameters.
    num_steps: least number of steps of all environments together.
    seed: of environments and actions.
  """
  num_envs = NUM_ENVS // 4 if isinstance(environment, host.HostEnvironment) else NUM_ENVS
  unroll = rollout.make_unroll(environment, agent, num_envs=num_envs, sequence_length=LENGTH)
  init_key, key = jax.random.split(jax.random.key(seed))
  state, zero, found = unroll.init(init_key), np.int32(0), []
  for index in range(-(-num_steps // (num_envs * (LENGTH - 1)))):
    act_key = jax.random.fold_in(key, index)
    state, *played = unroll.unroll(params, act_key, state, zero, zero)
    found.append(tuple(jax.device_get(played)))
  return found


def streams(played: Sequence[Played], action_spec: Any) -> Streams:
  """Joins consecutive sequences of one set of environments."""
  sequences = [sequence for sequence, _ in played]
  # The last step of a sequence is the first of the next, which has its action.
  join = lambda *parts: np.concatenate([part[:, :-1] for part in parts], axis=1).swapaxes(0, 1)
  joined = lambda read: jax.tree.map(join, *map(read, sequences))
  step_type = joined(lambda sequence: sequence.step_type)
  first = step_type == int(dm_env.StepType.FIRST)
  leaves = jax.tree.leaves(
    observation_lib.without_mask(joined(lambda sequence: sequence.observation))
  )
  observation = np.concatenate(
    [np.asarray(leaf, np.float32).reshape(*first.shape, -1) for leaf in leaves], axis=-1
  )
  of_episodes = lambda read: np.concatenate(
    [read(sequence, each)[each.ended] for sequence, each in played]
  )
  return Streams(
    observation,
    _encoded(joined(lambda sequence: sequence.action), action_spec),
    joined(lambda sequence: sequence.reward),
    joined(lambda sequence: sequence.discount),
    first,
    of_episodes(lambda sequence, each: each.episode_length),
    of_episodes(lambda sequence, each: each.episode_return),
    of_episodes(lambda sequence, each: sequence.discount[:, 1:].T),
  )


def _encoded(action: np.ndarray, spec: Any) -> np.ndarray:
  if not np.issubdtype(spec.dtype, np.integer):
    return action.reshape(*action.shape[:2], -1).astype(np.float32)
  choices = action.reshape(*action.shape[:2], -1)
  sizes = np.broadcast_to(np.asarray(spec.maximum) + 1, spec.shape).reshape(-1)
  return np.concatenate(
    [np.eye(size, dtype=np.float32)[choices[..., at]] for at, size in enumerate(sizes)], axis=-1
  )
