"""Presets: sizes and budgets for each machine, the same for every environment."""

import dataclasses
from collections.abc import Callable
from typing import Any

from hephaestus.actors import config as actors_config
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import machine
from hephaestus.learner import config as learner_config
from hephaestus.replay import tables

Preset = Callable[[str], launch_config.ExperimentConfig]
"""Function of an environment's name that returns the config of a run."""


def laptop(environment: str) -> launch_config.ExperimentConfig:
  """The dreamer on two CPU cores: a small model, short imagination, a high replay ratio."""
  return launch_config.ExperimentConfig(
    environment={'name': environment},
    agent=cognition_config.CognitionConfig(**vars(dreamer_config.SIZES['laptop'])),
    replay=tables.ReplayConfig(
      strata=(
        tables.Stratum(name='frontier', max_size=512, share=0.5),
        tables.Stratum(name='episodic', max_size=50_000, share=0.5),
      ),
      replay_ratio=64.0,
      warm_up=32,
    ),
    learner=learner_config.LearnerConfig(
      batch_size=16, model_learning_rate=1e-3, policy_learning_rate=3e-4, publish_period=8
    ),
    actor=actors_config.ActorConfig(num_actors=1, num_envs=16, sequence_length=32),
    evaluator=actors_config.EvaluatorConfig(),
    max_environment_steps=45_000,
    accelerator=False,
  )


def gpu(environment: str) -> launch_config.ExperimentConfig:
  """The dreamer on one GPU and its host's CPU cores: the full model, two actors."""
  agent = cognition_config.CognitionConfig(**vars(dreamer_config.SIZES['full']))
  return _at_large(environment, agent, scale=1, num_actors=2, num_steps=10_000_000)


def tpu_v4_8(environment: str) -> launch_config.ExperimentConfig:
  """The dreamer on the four chips of a TPU v4-8: the full model, imagination from every step."""
  return _at_large(
    environment, cognition_config.CognitionConfig(), scale=2, num_actors=8, num_steps=100_000_000
  )


def _at_large(
  environment: str,
  agent: cognition_config.CognitionConfig,
  *,
  scale: int,
  num_actors: int,
  num_steps: int,
) -> launch_config.ExperimentConfig:
  return launch_config.ExperimentConfig(
    environment={'name': environment},
    agent=agent,
    replay=tables.ReplayConfig(
      strata=(
        tables.Stratum(name='frontier', max_size=2048 * scale, share=0.5),
        tables.Stratum(name='episodic', max_size=100_000 * scale, share=0.5),
      ),
      warm_up=256 * scale,
      max_in_flight=64 * scale,
    ),
    learner=learner_config.LearnerConfig(batch_size=256),
    actor=actors_config.ActorConfig(num_actors=num_actors, num_envs=64, sequence_length=50),
    evaluator=actors_config.EvaluatorConfig(),
    max_environment_steps=num_steps,
  )


def plain(preset: Preset) -> Preset:
  """Makes a preset of the dreamer have one transition model, no intrinsic reward, 15 imagined steps.

  This is the baseline for the ensemble, the intrinsic rewards and the adaptive horizon.
  """

  def make(environment: str) -> launch_config.ExperimentConfig:
    config = preset(environment)
    return dataclasses.replace(
      config,
      agent=dataclasses.replace(
        config.agent,
        ensemble_size=1,
        novelty_scale=0.0,
        horizon_max=15,
        horizon_min=15,
      ),
    )

  return make


COGNITION: dict[str, dict[str, Any]] = {
  'memory': {'agent.memory_size': 4096},
  'dreams from memory': {'agent.memory_dream_share': 0.5},
  'slots': {'agent.slots': 8},
  'survival': {'agent.survival_scale': 1.0},
  'empowerment': {'agent.empowerment_scale': 1.0},
  'competence': {'agent.competence_scale': 1.0},
  'workspace': {'agent.workspace_size': 4, 'agent.workspace_score': 'gain'},
}
"""Values that switch on the dreamer's parts of cognition, see `AgentRecord.cognition`."""


def on_policy_queue(num_envs: int) -> tables.ReplayConfig:
  """Replay config of PPO: a queue of `num_envs` / 2 sequences, from which each is read once.

  That is half of what one actor with `num_envs` writes after an unroll. A fused run has no queue.
  """
  queue = tables.Stratum(name='on_policy', max_size=num_envs // 2, share=1.0, read_once=True)
  return tables.ReplayConfig(strata=(queue,), replay_ratio=1.0, warm_up=1)


def ppo_laptop(environment: str) -> launch_config.ExperimentConfig:
  """PPO on two CPU cores: short unrolls, many small optimizer steps."""
  from hephaestus.agents import masked_ppo  # which imports JAX

  num_envs = 256
  return launch_config.ExperimentConfig(
    agent_name='ppo',
    environment={'name': environment},
    agent=masked_ppo.PPOConfig(hidden_size=192, levels=9, entropy_scale=0.01),
    replay=on_policy_queue(num_envs),
    learner=learner_config.PPOLearnerConfig(num_minibatches=8, num_epochs=3, learning_rate=1e-3),
    actor=actors_config.ActorConfig(num_envs=num_envs, sequence_length=33),
    evaluator=actors_config.EvaluatorConfig(),
    max_environment_steps=2_000_000,
    accelerator=False,
  )


def ppo_gpu(environment: str) -> launch_config.ExperimentConfig:
  """PPO on one GPU: 2,048 environments of `hackmatrix` need about 5 GiB of its memory."""
  return _ppo_at_large(environment, 2048)


def _ppo_at_large(environment: str, num_envs: int) -> launch_config.ExperimentConfig:
  from hephaestus.agents import masked_ppo  # which imports JAX

  return launch_config.ExperimentConfig(
    agent_name='ppo',
    environment={'name': environment},
    agent=masked_ppo.PPOConfig(image_channels=64, entropy_scale=0.01),
    replay=on_policy_queue(num_envs),
    learner=learner_config.PPOLearnerConfig(),
    actor=actors_config.ActorConfig(num_envs=num_envs, sequence_length=129),
    evaluator=actors_config.EvaluatorConfig(),
    max_environment_steps=100_000_000,
  )


def ppo_tpu_v4_8(environment: str) -> launch_config.ExperimentConfig:
  """PPO on the four chips of a TPU v4-8, each of which has 32 GiB and a quarter of the environments."""
  return _ppo_at_large(environment, 4096)


def default_preset() -> str:
  """Name of the preset for this machine, found without starting the accelerator."""
  return machine.find().preset
