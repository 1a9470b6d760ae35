"""A checkpoint of a run, with the environment and the agent that it belongs to."""

import pathlib
from typing import Any, NamedTuple

from hephaestus.actors import rollout
from hephaestus.agents import agent as agent_lib
from hephaestus.launch import config as launch_config
from hephaestus.launch.run import folder as folder_lib
from hephaestus.launch.run import fused as fused_run
from hephaestus.launch.run import parts as parts_lib


class Saved(NamedTuple):
  """A checkpoint of a run, restored.

  Attributes:
    folder: of the run.
    config: of the run.
    environment: its environment.
    agent: the agent of these parameters.
    params: the acting parameters.
    train: the train state, whose params are those of world model and critic, too.
    step: the learner step at which they were saved.
  """

  folder: pathlib.Path
  config: launch_config.ExperimentConfig
  environment: Any
  agent: agent_lib.Agent
  params: Any
  train: Any
  step: int


def load(folder: pathlib.Path, which: str | None = None) -> Saved:
  """Restores a checkpoint of a run, which may be running.

  Args:
    folder: of the run.
    which: a learner step, or 'best'; None for the newest.

  Raises:
    ValueError: it is not a run, or has no such checkpoint.
  """
  config = folder_lib.load_config(folder)
  agent: agent_lib.Agent
  if config.fused:
    environment, agent, like = fused_run.saved(config)
  else:
    parts = parts_lib.make_parts(config)
    environment, agent, like = parts.environment, parts.agent, parts_lib.saved_shapes(config, parts)
  step, train = parts_lib.find_train(folder, like, which)
  return Saved(folder, config, environment, agent, agent.acting_params(train.params), train, step)


def untrained(folder: pathlib.Path) -> Saved:
  """A random policy in the environment of a run, in place of a checkpoint."""
  config = folder_lib.load_config(folder, to_inspect=True)
  environment = config.make_environment()
  agent = rollout.random_agent(environment.action_spec)
  return Saved(folder, config, environment, agent, params=(), train=(), step=0)
