"""The record of masked PPO; see `records.AgentRecord`."""

from typing import Any, ClassVar

from hephaestus.agents import masked_ppo
from hephaestus.launch import config as launch_config
from hephaestus.launch import records
from hephaestus.launch.agents import presets
from hephaestus.learner import advice, ppo_update
from hephaestus.learner import config as learner_config


class MaskedPPO(records.AgentRecord):
  """PPO with illegal actions masked, as one fused program or with separate actor processes."""

  name = 'ppo'
  config_class = masked_ppo.PPOConfig
  learner_class = learner_config.PPOLearnerConfig
  presets: ClassVar = {
    'laptop': presets.ppo_laptop,
    'gpu': presets.ppo_gpu,
    'tpu-v4-8': presets.ppo_tpu_v4_8,
  }
  can_fuse = True
  free_keys = ('actor.num_envs',)  # a resumed run resets its environments if their number differs
  shown: ClassVar = {
    'entropy': 'ppo/entropy',
    'KL': 'ppo/approx_kl',
    'clipped': 'ppo/clip_fraction',
  }

  def make(self, config: Any, observation_spec: Any, action_spec: Any) -> masked_ppo.PPO:
    return masked_ppo.make_ppo(config, observation_spec, action_spec)

  def make_update(
    self, config: launch_config.ExperimentConfig, trained: Any, *, num_devices: int
  ) -> ppo_update.PPOUpdate:
    return ppo_update.make_update(
      trained,
      config.learner,
      _scale(config, num_devices),
      max_environment_steps=config.max_environment_steps,
      delayed=not config.fused,
    )

  def check(self, config: launch_config.ExperimentConfig) -> None:
    _scale(config, num_devices=config.learner.num_processes)  # each has at least one device

  def describe_update(
    self, config: launch_config.ExperimentConfig, update: ppo_update.PPOUpdate
  ) -> str:
    scale = update.scale
    minibatch = config.batch_size * config.steps_per_sequence // scale.num_minibatches
    return (
      f'{scale.num_minibatches} minibatches of {minibatch:,}, {scale.num_epochs} epochs, learning rate '
      f'{scale.learning_rate:.3g}'
    )

  def advise(
    self, config: launch_config.ExperimentConfig, rows: advice.Rows, score: float | None
  ) -> dict[str, str]:
    return advice.of_ppo(rows, score, config.agent.entropy_scale)


def _scale(config: launch_config.ExperimentConfig, num_devices: int) -> ppo_update.Scale:
  return ppo_update.auto_scale(
    config.learner,
    num_envs=config.batch_size,
    num_steps=config.steps_per_sequence,
    num_devices=num_devices,
    recurrent=bool(config.agent.recurrent_size),
  )
