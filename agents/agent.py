"""Agent: the pure functions that every agent offers to actors and evaluators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax

Tree = Any


class Foresight(NamedTuple):
  """An episode as a model decodes it: first reconstructed, then imagined.

  Attributes:
    observation: [T, ...] float32 leaves, without a mask. Reconstructions of the first steps; then
      observations predicted from the actions alone.
    salience: [T, W] float32, weights of the last W steps, oldest first, in the context of the
      action at step t; 0 for steps before the episode.
  """

  observation: Tree
  salience: jax.Array


class Agent(NamedTuple):
  """An agent, as callers outside of `agents` use it.

  Attributes:
    init_params: key -> params, float32.
    acting_params: params -> the part of them that `act` reads; actors fetch only this part.
    initial_policy_state: number of environments N -> policy state, the memory of N fresh policies.
    stored_state: policy state -> the part of it that a Sequence stores as `initial_state`.
    act: (acting params, key, policy state, timestep, *, greedy) -> (policy state, Decision), for
      N environments at once. A FIRST step clears the policy state. `greedy` takes the most
      likely action.
    explain: as `act`, with `log_probs` in `extras`: [N, A] float32, log-probabilities of all
      choices, those of an action's parts one after another; with an episodic memory also
      `recalled_value` and `recalled_evidence`, [N, A] float32, and `nearest_` with the fields of
      `memory.Nearest`, and with empowerment `empowerment`, [N] float32 nats. None for continuous
      actions, or for an agent that does not offer it.
    foresee: (params, key, observation [T, ...], action [T, ...], context [] int32) ->
      Foresight of one episode that begins at step 0, of which the model observes `context` steps;
      None for an agent without a model.
  """

  init_params: Callable[[chex.PRNGKey], Tree]
  acting_params: Callable[[Tree], Tree]
  initial_policy_state: Callable[[int], Tree]
  stored_state: Callable[[Tree], Tree]
  act: Callable[..., tuple[Tree, Any]]
  explain: Callable[..., tuple[Tree, Any]] | None = None
  foresee: Callable[..., Foresight] | None = None
