"""Agent: the pure functions that every agent offers to actors and evaluators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax

Tree = Any

STATISTICS = 'statistics'
"""Name of what no optimizer changes, in a train state and among all that the functions of an agent read."""


class Foresight(NamedTuple):
  """An episode as a model decodes it: first reconstructed, then imagined.

  Attributes:
    observation: tree of [T, ...] float32 arrays, without the action mask: reconstructions of the
      first steps, then observations predicted only from the actions.
    salience: [T, W] float32, attention weights of the last W steps, oldest first, in the context that
      the actor reads at step t; 0 for steps before the episode.
    masks: [T, S, H, W] float32, share of each slot in each pixel of an image, of sum 1 over slots; None
      without slots.
  """

  observation: Tree
  salience: jax.Array
  masks: jax.Array | None = None


class Agent(NamedTuple):
  """An agent as a record of pure functions, the interface for actors and evaluators.

  Attributes:
    init_params: PRNG key -> initial params, a tree of arrays; STATISTICS, if there are any, at the top.
    acting_params: params -> the part of them that `act` reads, statistics too; actors fetch only this part.
    initial_policy_state: number of environments N -> policy state: the recurrent state of the policy
      in N environments before any step.
    stored_state: policy state -> the part of it that a Sequence stores as `initial_state`.
    act: (acting params, key, policy state, time step [N, ...], *, greedy) -> (policy state,
      Decision), one step in N environments. A FIRST step clears the policy state. `greedy` takes the
      most likely action instead of a sampled one. An agent with `exploring` also takes `explores`, [N]
      bool, the environments in which an explorer acts; by default none.
    explain: as `act`, with more `extras`: `log_probs`, [N, A] float32, log-probabilities of all
      choices, concatenated over the parts of an action; with an episodic memory `recalled_value` and
      `recalled_evidence`, [N, A] float32, two fields of `memory.Recall`, and the nearest entries, see
      `EpisodicMemory.explain`; for a dreamer `intrinsic`, a dict of [N] float32
      numbers that its intrinsic rewards show, by name; with a workspace `open`, a dict of the [N]
      float32 gates of its candidates by name. None for continuous actions, or for an agent that does
      not offer it.
    foresee: (params, key, observation [T, ...], action [T, ...], context [] int32) ->
      Foresight of one episode that begins at step 0, of which the model observes `context` steps;
      None for an agent without a model.
    exploring: (acting params, PRNG key, number of parallel environments N) -> [N] bool, environments in
      which an explorer should act while experience is collected; None for an agent that has one policy.
  """

  init_params: Callable[[chex.PRNGKey], Tree]
  acting_params: Callable[[Tree], Tree]
  initial_policy_state: Callable[[int], Tree]
  stored_state: Callable[[Tree], Tree]
  act: Callable[..., tuple[Tree, Any]]
  explain: Callable[..., tuple[Tree, Any]] | None = None
  foresee: Callable[..., Foresight] | None = None
  exploring: Callable[[Tree, chex.PRNGKey, int], jax.Array] | None = None


def all_params(train: Any) -> Tree:
  """What an agent's functions read of a train state: `params`, and at the top of the tree any `statistics`."""
  statistics = getattr(train, STATISTICS, None)
  return train.params if statistics is None else {**train.params, STATISTICS: statistics}


def apart(params: Tree) -> tuple[Tree, Tree]:
  """The inverse of `all_params`: parameters, and statistics; None for an agent without them."""
  if not isinstance(params, dict) or STATISTICS not in params:
    return params, None
  return {name: x for name, x in params.items() if name != STATISTICS}, params[STATISTICS]
