"""Agent: the few pure functions that every agent offers to those who act with it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax

Tree = Any


class Foresight(NamedTuple):
  """An episode as a model knew it.

  Attributes:
    observation: [T, ...] float32 leaves, without a mask: what it made of what it saw; from some row
      on what it dreamt instead, told nothing but the actions.
    salience: [T, W] float32, how much each of the last W rows, oldest first, counted for the action
      at row t; 0 for those before the episode.
  """

  observation: Tree
  salience: jax.Array


class Agent(NamedTuple):
  """An agent, seen from the outside.

  Attributes:
    init_params: key -> params, float32.
    acting_params: params -> the part of them that `act` reads; this is what travels to actors.
    initial_policy_state: number of environments N -> policy state, the memory of N fresh policies.
    stored_state: policy state -> the part of it that a Sequence stores as `initial_state`.
    act: (acting params, key, policy state, timestep, *, greedy) -> (policy state, Decision), for
      N environments at once. A FIRST row clears the policy state. `greedy` asks for the mode.
    explain: as `act`, with `extras` that say what it chose among as well: `log_probs` [N, A]
      float32, those of all choices, in sum over an action's parts; None for an agent that acts
      continuously or does not say.
    foresee: (params, key, observation [T, ...], action [T, ...], context [] int32) ->
      Foresight of one episode that begins at row 0 and of which it sees `context` rows; None for an
      agent without a model.
  """

  init_params: Callable[[chex.PRNGKey], Tree]
  acting_params: Callable[[Tree], Tree]
  initial_policy_state: Callable[[int], Tree]
  stored_state: Callable[[Tree], Tree]
  act: Callable[..., tuple[Tree, Any]]
  explain: Callable[..., tuple[Tree, Any]] | None = None
  foresee: Callable[..., Foresight] | None = None
