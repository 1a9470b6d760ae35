"""Records of the dreamer and of its baseline `plain`; see `records.AgentRecord`. Imports no JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hephaestus.agents.cognition import config as cognition_config
from hephaestus.launch import config as launch_config
from hephaestus.launch import records
from hephaestus.launch.agents import presets
from hephaestus.learner import advice
from hephaestus.learner import config as learner_config

if TYPE_CHECKING:
  from hephaestus.agents.dreamer import agent as dreamer_agent
  from hephaestus.learner import dreamer_update

BASIC = (
  'agent.gamma', 'agent.entropy_scale', 'agent.novelty_scale', 'agent.ensemble_size',
  'agent.horizon_max', 'replay.replay_ratio', 'learner.batch_size', 'learner.model_learning_rate',
  'actor.num_envs', 'actor.num_actors', 'actor.sequence_length', 'evaluator.period',
  'max_environment_steps',
)  # fmt: skip
"""Paths of the config keys that most users change; `hephaestus train --help` prints them."""


class Dreamer(records.AgentRecord):
  """A world model, and an actor-critic that learns from its imagination rollouts."""

  name = records.DREAMER
  config_class = cognition_config.CognitionConfig
  learner_class = learner_config.LearnerConfig
  cognition = presets.COGNITION
  presets: ClassVar = {'laptop': presets.laptop, 'gpu': presets.gpu, 'tpu-v4-8': presets.tpu_v4_8}
  can_fuse = True
  indifferent_keys = ('max_environment_steps',)  # no rate is annealed

  def make(self, config: Any, observation_spec: Any, action_spec: Any) -> dreamer_agent.Dreamer:
    from hephaestus.agents.cognition import registry

    return registry.make_dreamer(config, observation_spec, action_spec)

  def make_update(
    self, config: launch_config.ExperimentConfig, trained: Any, *, num_devices: int
  ) -> dreamer_update.DreamerUpdate:
    from hephaestus.learner import dreamer_update

    config.learner.batch_per_device(num_devices)
    return dreamer_update.make_update(trained, config.learner)

  def advise(
    self, config: launch_config.ExperimentConfig, rows: advice.Rows, score: float | None
  ) -> dict[str, str]:
    return advice.of_replay(rows)

  def check(self, config: launch_config.ExperimentConfig) -> None:
    starts = config.agent.starts_per_sequence
    if starts is not None and starts > config.actor.sequence_length:
      raise ValueError(
        f'agent.starts_per_sequence={starts}: must be at most actor.sequence_length='
        f'{config.actor.sequence_length}'
      )

  def warnings(self, trained: dreamer_agent.Dreamer) -> list[str]:
    return trained.model.networks.warnings()


class Plain(Dreamer):
  """The dreamer without ensemble, intrinsic rewards and adaptive horizon: their baseline.

  Only its presets differ, so the config of its runs names the agent 'dreamer'.
  """

  presets: ClassVar = {
    machine: presets.plain(preset) for machine, preset in Dreamer.presets.items()
  }


def settings(
  config: launch_config.ExperimentConfig,
) -> tuple[cognition_config.CognitionConfig, learner_config.LearnerConfig]:
  """Returns the agent's and the learner's config of a run of the dreamer; ValueError if it has another agent."""
  if not isinstance(config.record, Dreamer):
    raise ValueError(f'agent: this needs the dreamer, but the run has {config.agent_name}')
  return config.agent, config.learner
