"""What an agent learns from, a Sequence, and what it decides, a Decision."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any
"""Any nest of arrays."""


class Decision(NamedTuple):
  """What an agent chooses at one row.

  Attributes:
    action: [N] or [N, M] int32, or [N, A] float32.
    extras: what learning must know of the choice, such as the behaviour's `log_prob` [N].
  """

  action: jax.Array
  extras: dict[str, jax.Array]


class Sequence(NamedTuple):
  """T rows of one world's stream; the unit of experience, stored as it was made.

  Row t holds what arrived at t and the action chosen from it. The last row only lends its value:
  its action is unread, and the next sequence of the same world begins with the same row.
  Leading axes: [T] as stored, [B, T] as sampled, [T, B] inside a loss (see `time_major`).

  Attributes:
    observation: [T, ...] tree of arrays.
    action: [T] or [T, M] int32, or [T, A] float32.
    reward: [T] float32, earned by the action of the row before; 0 at FIRST.
    discount: [T] float32; at LAST, 0 means terminated and 1 cut off; 1 elsewhere.
    step_type: [T] int32, of `dm_env.StepType`.
    extras: [T, ...] what the decision says of itself.
    initial_state: what the agent's recurrent state was before the first row; no time axis.
    identity: [] uint32, random; what must be decided once per sequence is decided by it.
    version: [] int32, the learner step of the parameters that acted.
    actor_id: [] int32.
  """

  observation: Tree
  action: jax.Array
  reward: jax.Array
  discount: jax.Array
  step_type: jax.Array
  extras: dict[str, jax.Array]
  initial_state: Tree
  identity: jax.Array
  version: jax.Array
  actor_id: jax.Array


def time_major(sequence: Sequence) -> Sequence:
  """[B, T, ...] rows to [T, B, ...]; what has no time axis stays [B, ...]."""
  swap = lambda tree: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
  return sequence._replace(
    observation=swap(sequence.observation),
    action=swap(sequence.action),
    reward=swap(sequence.reward),
    discount=swap(sequence.discount),
    step_type=swap(sequence.step_type),
    extras=swap(sequence.extras),
  )
