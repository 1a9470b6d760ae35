"""The parts of cognition by name, and an agent with those that its config switches on.

A reward or context module of one's own is an entry here, and fields of a config.
"""

from collections.abc import Callable
from typing import Any

from hephaestus.agents.cognition import (
  competence,
  empowerment,
  memory,
  salience,
  slots,
  survival,
  workspace,
)
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.dreamer import agent, sockets

REWARDS: dict[str, type[sockets.Reward]] = {
  survival.NAME: survival.Survival,
  empowerment.NAME: empowerment.Empowerment,
  competence.NAME: competence.Competence,
}
"""Intrinsic rewards by name, in the order of the critic's heads; `NAME_scale` in the config is the weight."""

CONTEXTS: dict[str, tuple[Callable[[Any], bool], type[sockets.Context]]] = {
  salience.NAME: (lambda config: config.window > 1, salience.Salience),
  workspace.NAME: (lambda config: config.workspace_size > 0, workspace.Workspace),
}
"""Context modules by name, each with whether a config switches it on."""


def guests(config: cognition_config.CognitionConfig) -> sockets.Guests:
  """What a config plugs into the dreamer.

  Raises:
    ValueError: several context modules are on.
  """
  contexts = {name: kind for name, (is_on, kind) in CONTEXTS.items() if is_on(config)}
  if len(contexts) > 1:
    raise ValueError(f'agent: {" and ".join(contexts)} are both on; switch all but one of them off')
  return sockets.Guests(
    rewards=REWARDS,
    context=next(iter(contexts.values()), None),
    memory=memory.make_memory if config.memory_size else None,
    perception=slots.make_slots if config.slots else None,
  )


def make_dreamer(
  config: cognition_config.CognitionConfig, observation_spec: Any, action_spec: Any
) -> agent.Dreamer:
  """Builds the dreamer with all that its config switches on, for one environment's specs.

  Raises:
    ValueError: `distributions.Actions` does not support the action spec, or the specs do not fit a part that is on.
  """
  return agent.make_dreamer(config, observation_spec, action_spec, guests(config))
