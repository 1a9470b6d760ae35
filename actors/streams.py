"""Collects steps of parallel environments, played by an agent or by the random policy."""

import contextlib
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
"""A sequence [N, LENGTH, ...] of N environments and the episodes that ended in it, host arrays."""


class Streams(NamedTuple):
  """T consecutive steps of N environments, and the E episodes that ended in them; host arrays."""

  # [T, N, F] float32, all numbers of the observation, without the action mask
  observation: np.ndarray
  action: np.ndarray  # [T, N, A] float32, chosen at the step; one-hot for discrete actions
  reward: np.ndarray  # [T, N] float32, reward that arrived at the step, earned by the action before
  discount: np.ndarray  # [T, N] float32, discount that arrived at the step
  first: np.ndarray  # [T, N] bool, whether the step is the first of its episode
  lengths: np.ndarray  # [E], steps of each episode
  returns: np.ndarray  # [E] float32, undiscounted return of each episode
  # [E] float32, discount at the last step of each episode: 0 if it terminated, 1 if a time limit
  # truncated it
  ends: np.ndarray


def play(
  environment: environment_lib.Environment,
  agent: agent_lib.Agent,
  params: Any,
  *,
  num_steps: int,
  seed: int,
) -> list[Played]:
  """Plays an agent with sampled actions in N parallel environments, for at least `num_steps` in all.

  N is NUM_ENVS, or a quarter of it for an environment that is stepped on the host.

  Returns:
    Consecutive sequences [N, LENGTH, ...] with their episodes; each begins with the last step of the
    one before.
  """
  num_envs = NUM_ENVS // 4 if isinstance(environment, host.HostEnvironment) else NUM_ENVS
  unroll = rollout.make_unroll(environment, agent, num_envs=num_envs, sequence_length=LENGTH)
  init_key, key = jax.random.split(jax.random.key(seed))
  zero, found = np.int32(0), []
  with contextlib.closing(unroll):
    state = unroll.init(init_key)
    for index in range(-(-num_steps // (num_envs * (LENGTH - 1)))):
      act_key = jax.random.fold_in(key, index)
      state, *played = unroll.unroll(params, act_key, state, zero, zero)
      found.append(tuple(jax.device_get(played)))
  return found


def join(played: Sequence[Played], action_spec: Any) -> Streams:
  """Joins consecutive sequences of `play` to one stream of steps for each environment."""
  sequences = [sequence for sequence, _ in played]
  # The last step of a sequence is the first of the next, which has its action.
  leaf = lambda *parts: np.concatenate([part[:, :-1] for part in parts], axis=1).swapaxes(0, 1)
  joined = lambda read: jax.tree.map(leaf, *map(read, sequences))
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
