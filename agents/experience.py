"""`Sequence`, the unit of experience, and `Decision`, the output of a policy at one step."""

from typing import Any, NamedTuple

import dm_env
import jax
import jax.numpy as jnp
import numpy as np

Tree = Any
"""Any pytree of arrays."""


class Decision(NamedTuple):
  """An agent's output at one step of N environments.

  Attributes:
    action: [N] int32 for one discrete choice, [N, M] int32 for M choices at once, or [N, A] float32
      for a continuous action.
    extras: arrays [N, ...] by name that learning needs with the action, such as `log_prob`, its
      log-likelihood under the policy that acted.
  """

  action: jax.Array
  extras: dict[str, jax.Array]


class Sequence(NamedTuple):
  """T steps of one environment's stream; the unit of experience, stored as it was made.

  Step t holds the observation and reward that arrived at t and the action chosen from them. The
  last step only lends its value for bootstrapping: its action is unread, and the next sequence of
  the same environment begins with the same step.
  Leading axes: [T] as stored, [B, T] as sampled, [T, B] inside a loss (see `time_major`).

  Attributes:
    observation: tree of [T, ...] arrays.
    action: [T] or [T, M] int32, or [T, A] float32; see `Decision`.
    reward: [T] float32, earned by the action of the step before; 0 at FIRST.
    discount: [T] float32; at LAST, 0 means terminated and 1 truncated; 1 elsewhere.
    step_type: [T] int32, of `dm_env.StepType`.
    extras: arrays [T, ...] by name, see `Decision`.
    initial_state: the agent's recurrent state before the first step, see `Agent.stored_state`; no
      time axis.
    identity: [] uint32, random ID, stable across replays; seeds random choices made once for each
      sequence.
    version: [] int32, the learner step of the parameters that acted.
    actor_id: [] int32, number of the actor that made the sequence.
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


TIMED = ('observation', 'action', 'reward', 'discount', 'step_type', 'extras')
"""The fields of a Sequence that have a time axis."""


def time_major(sequence: Sequence) -> Sequence:
  """Swaps batch and time, [B, T, ...] to [T, B, ...]; fields without a time axis stay [B, ...]."""
  swapped = jax.tree.map(
    lambda x: jnp.swapaxes(x, 0, 1), {name: getattr(sequence, name) for name in TIMED}
  )
  return sequence._replace(**swapped)


def faults(sequence: Sequence) -> list[tuple[int | None, str]]:
  """Finds violations of the rules that every valid Sequence keeps.

  Every number is finite. An episode begins with FIRST, whose reward is 0 and whose discount is 1.
  It ends with LAST, and only the step after LAST is FIRST. The discount lies in [0, 1], and is not
  0 before LAST (outside environments may have discounts other than 1 there).

  Args:
    sequence: one sequence, [T, ...] NumPy arrays.

  Returns:
    (step, message) of each violation, of a field with several NaN or infinite numbers only for the
    first; empty if the sequence is valid. The step is None for a field without a time axis.
  """
  found: list[tuple[int | None, str]] = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(sequence):
    if not jnp.issubdtype(leaf.dtype, jnp.inexact) or np.isfinite(leaf).all():
      continue
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    has_time = name.split('/')[0] in TIMED
    step = int(np.argwhere(~np.isfinite(leaf))[0][0]) if has_time else None
    found.append((step, f'{name} is not finite'))
  first, mid, last = (
    np.asarray(sequence.step_type) == kind
    for kind in (dm_env.StepType.FIRST, dm_env.StepType.MID, dm_env.StepType.LAST)
  )
  reward, discount = np.asarray(sequence.reward), np.asarray(sequence.discount)
  follows_last = np.append(False, last[:-1])
  is_reset = np.append(False, first[1:])
  for violates, text in (
    (~(first | mid | last), 'the step type is none of FIRST, MID and LAST'),
    (follows_last & ~first, 'follows LAST and is not FIRST: a reset that is not marked'),
    (is_reset & ~follows_last, 'FIRST follows a step that is not LAST: an end that is not marked'),
    (first & (reward != 0), 'FIRST has a reward'),
    (first & (discount != 1), 'FIRST has a discount other than 1'),
    ((discount < 0) | (discount > 1), 'the discount lies outside [0, 1]'),
    (mid & (discount == 0), 'MID has a discount of 0: an end that is not marked'),
  ):
    found += [(int(step), text) for step in np.flatnonzero(violates)]
  return found
