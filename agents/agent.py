"""Agent: the few pure functions that every agent offers to those who act with it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex

Tree = Any


class Agent(NamedTuple):
  """An agent, seen from the outside.

  Attributes:
    init_params: key -> params, float32.
    acting_params: params -> the part of them that `act` reads; this is what travels to actors.
    initial_policy_state: number of worlds N -> policy state, the memory of N fresh policies.
    stored_state: policy state -> the part of it that a Sequence stores as `initial_state`.
    act: (acting params, key, policy state, timestep, *, greedy) -> (policy state, Decision), for
      N worlds at once. A FIRST row clears the policy state. `greedy` asks for the mode.
  """

  init_params: Callable[[chex.PRNGKey], Tree]
  acting_params: Callable[[Tree], Tree]
  initial_policy_state: Callable[[int], Tree]
  stored_state: Callable[[Tree], Tree]
  act: Callable[..., tuple[Tree, Any]]
