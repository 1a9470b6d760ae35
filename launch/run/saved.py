"""A run's newest checkpoint, with the environment and the agent that it belongs to."""

import pathlib
from typing import Any, NamedTuple

from hephaestus.actors import evaluator
from hephaestus.agents import agent as agent_lib
from hephaestus.launch import config as launch_config
from hephaestus.launch.run import folder as folder_lib
from hephaestus.launch.run import fused as fused_run
from hephaestus.launch.run import parts as parts_lib


class Saved(NamedTuple):
  """The newest checkpoint of a run, restored.

  Attributes:
    config: of the run.
    environment: its environment.
    agent: the agent of these parameters.
    params: the acting parameters.
    all_params: those, and those of world model and critic.
    step: the learner step at which they were saved.
  """

  config: launch_config.ExperimentConfig
  environment: Any
  agent: agent_lib.Agent
  params: Any
  all_params: Any
  step: int


def newest(folder: pathlib.Path) -> Saved:
  """Restores the newest checkpoint of a run, which may be running.

  Args:
    folder: of the run.

  Raises:
    ValueError: it is not a run, or has no checkpoint yet.
  """
  config = folder_lib.load_config(folder)
  agent: agent_lib.Agent
  if config.fused:
    environment, agent, like = fused_run.saved(config)
  else:
    parts = parts_lib.make_parts(config)
    environment, agent, like = parts.environment, parts.agent, parts_lib.saved_shapes(config, parts)
  found = parts_lib.newest_params(folder, like)
  if found is None:
    raise ValueError(f'{folder}: nothing has been saved yet; wait for the first checkpoint')
  step, params = found
  return Saved(config, environment, agent, agent.acting_params(params), params, step)


def untrained(folder: pathlib.Path) -> Saved:
  """A random policy in the environment of a run, in place of a checkpoint."""
  config = folder_lib.load_config(folder, to_inspect=True)
  environment = config.make_environment()
  agent = evaluator.random_agent(environment.action_spec)
  return Saved(config, environment, agent, params=(), all_params=(), step=0)
