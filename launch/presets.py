"""The presets: which sizes for which machine, and how long for which environment."""

import dataclasses
import pathlib
import subprocess
from collections.abc import Callable

import psutil

from hephaestus.actors import actor, evaluator
from hephaestus.agents import masked_ppo
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.launch import config as launch_config
from hephaestus.learner import config as learner_config
from hephaestus.replay import tables

Preset = Callable[[str], launch_config.ExperimentConfig]


def laptop(environment: str) -> launch_config.ExperimentConfig:
  """Two CPU cores: a small model, its dreams short, its experience replayed often."""
  config = launch_config.ExperimentConfig(
    environment={'name': environment},
    agent=dreamer_config.SIZES['laptop'],
    replay=tables.ReplayConfig(
      strata=(
        tables.Stratum(name='frontier', max_size=512, share=0.5),
        tables.Stratum(name='episodic', max_size=50_000, share=0.5),
      ),
      replay_ratio=32.0,
      warm_up=32,
    ),
    learner=learner_config.LearnerConfig(
      batch_size=16, model_learning_rate=1e-3, policy_learning_rate=1e-3, publish_period=8
    ),
    actor=actor.ActorConfig(num_actors=1, num_envs=16, sequence_length=32),
    evaluator=evaluator.EvaluatorConfig(),
    max_environment_steps=25_000 if environment == 'catch' else 45_000,
    accelerator=False,
  )
  tuned = {'grid_world': _laptop_grid_world, 'gymnax/DeepSea-bsuite': _laptop_deep_sea}
  return tuned.get(environment, lambda config: config)(config)


def _laptop_deep_sea(config: launch_config.ExperimentConfig) -> launch_config.ExperimentConfig:
  """One reward, in a corner that chance does not find: curiosity weighs more, and acts at once."""
  agent, learner = config.dreamer()
  return dataclasses.replace(
    config,
    agent=dataclasses.replace(
      agent, starts_per_sequence=2, entropy_scale=0.03, novelty_scale=0.1, warm_up_updates=200
    ),
    replay=dataclasses.replace(config.replay, warm_up=64),
    learner=dataclasses.replace(learner, batch_size=64, model_learning_rate=2e-3, publish_period=4),
    actor=actor.ActorConfig(num_actors=1, num_envs=8, sequence_length=8),
    max_environment_steps=63_000,  # 3,000 episodes of size 20, each with a row to begin with
  )


def _laptop_grid_world(config: launch_config.ExperimentConfig) -> launch_config.ExperimentConfig:
  """Layouts are drawn anew in every episode: many must be seen, so each is replayed less often."""
  agent, learner = config.dreamer()
  return dataclasses.replace(
    config,
    agent=dataclasses.replace(
      agent,
      deterministic_size=128,
      hidden_size=192,
      latent='gaussian',
      stochastic_size=32,
      levels=9,
      dynamics_scale=0.1,  # at 1, no code for the layout is ever found: see docs/design.md
      starts_per_sequence=2,
      return_floor=0.3,
      entropy_scale=0.004,  # at 0.02 it wins over what pays, once returns spread as states differ
      warm_up_updates=500,
      novelty_scale=0.002,
    ),
    replay=tables.ReplayConfig(
      strata=(
        tables.Stratum(name='frontier', max_size=4096, share=0.5),
        tables.Stratum(name='episodic', max_size=40_000, share=0.5),
      ),
      replay_ratio=4.0,
      warm_up=256,
      max_in_flight=16,
    ),
    # Short sequences of many environments: a batch then shows twice as many layouts.
    learner=dataclasses.replace(
      learner,
      batch_size=64,
      model_learning_rate=2e-3,
      policy_learning_rate=3e-4,
      publish_period=25,
    ),
    actor=actor.ActorConfig(num_actors=1, num_envs=64, sequence_length=8),
    max_environment_steps=10_000_000,
    max_minutes=60.0,
  )


def _large(*, starts_per_sequence: int | None = None) -> dreamer_config.DreamerConfig:
  """The full model, with a latent that tells the known from the new: see docs/design.md."""
  return dreamer_config.DreamerConfig(
    latent='categorical', stochastic_size=16, classes=16, starts_per_sequence=starts_per_sequence
  )


def gpu(environment: str) -> launch_config.ExperimentConfig:
  """One GPU and its host's CPU cores: the full model, two actors."""
  return launch_config.ExperimentConfig(
    environment={'name': environment},
    agent=_large(starts_per_sequence=16),
    replay=tables.ReplayConfig(
      strata=(
        tables.Stratum(name='frontier', max_size=2048, share=0.5),
        tables.Stratum(name='episodic', max_size=100_000, share=0.5),
      ),
      warm_up=256,
      max_in_flight=64,
    ),
    learner=learner_config.LearnerConfig(batch_size=256),
    actor=actor.ActorConfig(num_actors=2, num_envs=64, sequence_length=50),
    evaluator=evaluator.EvaluatorConfig(),
    max_environment_steps=10_000_000,
  )


def tpu_v4_8(environment: str) -> launch_config.ExperimentConfig:
  """The four chips of a v4-8 and CPU hosts: the full model, dreaming from every row."""
  return launch_config.ExperimentConfig(
    environment={'name': environment},
    agent=_large(),
    replay=tables.ReplayConfig(
      strata=(
        tables.Stratum(name='frontier', max_size=4096, share=0.5),
        tables.Stratum(name='episodic', max_size=200_000, share=0.5),
      ),
      warm_up=512,
      max_in_flight=128,
    ),
    learner=learner_config.LearnerConfig(batch_size=256),
    actor=actor.ActorConfig(num_actors=8, num_envs=64, sequence_length=50),
    evaluator=evaluator.EvaluatorConfig(),
    max_environment_steps=100_000_000,
  )


def _plain(preset: Preset) -> Preset:
  """DreamerV3's shape of a preset: one transition, nothing but the task's reward, dreams of 15 rows.

  What an ensemble, curiosity and a horizon that adapts are worth is measured against it.
  """

  def make(environment: str) -> launch_config.ExperimentConfig:
    config = preset(environment)
    agent, _ = config.dreamer()
    return dataclasses.replace(
      config,
      agent=dataclasses.replace(
        agent,
        ensemble_size=1,
        bootstrap_share=1.0,
        novelty_scale=0.0,
        horizon_max=15,
        horizon_min=15,
        steps_per_chunk=5,
      ),
    )

  return make


# Prints the MiB of each, one a line.
GPU_MEMORY = ('nvidia-smi', '--query-gpu=memory.total', '--format=csv,noheader,nounits')


def gpu_gibibytes() -> float | None:
  """Memory of the smallest GPU, asked of the driver so that none is woken; None if it is silent."""
  try:
    said = subprocess.run(
      GPU_MEMORY, capture_output=True, text=True, timeout=10.0, check=True
    ).stdout
    return min(float(line) for line in said.split('\n') if line.strip()) / 1024
  except (OSError, subprocess.SubprocessError, ValueError):
    return None


def _worlds_for(gibibytes: float | None, *, usual: int, needed: float) -> int:
  """As many environments as usual, or half of them for each halving of the memory that those need.

  Args:
    gibibytes: that there are; None where unknown.
    usual: number of environments.
    needed: GiB, for the usual number to have room in the largest environment.
  """
  while gibibytes is not None and gibibytes < needed and usual > 32:
    usual, needed = usual // 2, needed / 2
  return usual


def _on_policy(num_envs: int) -> tables.ReplayConfig:
  """A queue of half a batch, each sequence read once; a fused run, which needs none, opens none."""
  queue = tables.Stratum(name='on_policy', max_size=num_envs // 2, share=1.0, read_once=True)
  return tables.ReplayConfig(strata=(queue,), replay_ratio=1.0, warm_up=1)


def ppo_laptop(environment: str) -> launch_config.ExperimentConfig:
  """PPO on two CPU cores: short unrolls, many small steps of the optimizer."""
  memory = psutil.virtual_memory().total / 2**30
  num_envs = _worlds_for(memory, usual=256, needed=2.0)
  config = launch_config.ExperimentConfig(
    environment={'name': environment},
    agent=masked_ppo.PPOConfig(hidden_size=192, cell_size=8, levels=9, entropy_scale=5e-3),
    replay=_on_policy(num_envs),
    learner=learner_config.PPOLearnerConfig(num_minibatches=8, num_epochs=3, learning_rate=1e-3),
    actor=actor.ActorConfig(num_envs=num_envs, sequence_length=33),
    evaluator=evaluator.EvaluatorConfig(greedy=False),
    max_environment_steps=500_000 if environment == 'catch' else 2_000_000,
    accelerator=False,
  )
  return _ppo_laptop_hackmatrix(config) if environment == 'hackmatrix' else config


def _ppo_laptop_hackmatrix(
  config: launch_config.ExperimentConfig,
) -> launch_config.ExperimentConfig:
  """Long unrolls, a high rate, and more chance than elsewhere (docs/results.md has what was tried)."""
  return dataclasses.replace(
    config,
    agent=masked_ppo.PPOConfig(cell_size=8, entropy_scale=0.05),
    learner=learner_config.PPOLearnerConfig(num_minibatches=8, learning_rate=5e-3),
    actor=dataclasses.replace(config.actor, sequence_length=129),
    max_environment_steps=5_000_000,
  )


def ppo_gpu(environment: str) -> launch_config.ExperimentConfig:
  """PPO on one GPU: minibatches, epochs and rate follow the number of environments, and these its memory.

  2,048 environments of `hackmatrix` need about 5 GiB as `Fused.memory` estimates; others may need more.
  """
  return _ppo_at_large(environment, _worlds_for(gpu_gibibytes(), usual=2048, needed=12.0))


def _ppo_at_large(environment: str, num_envs: int) -> launch_config.ExperimentConfig:
  return launch_config.ExperimentConfig(
    environment={'name': environment},
    # With 0.01 an agent goes to and fro in hackmatrix.
    agent=masked_ppo.PPOConfig(
      cell_size=8,
      image_channels=64,
      entropy_scale=0.1 if environment == 'hackmatrix' else 0.01,
    ),
    replay=_on_policy(num_envs),
    learner=learner_config.PPOLearnerConfig(),
    actor=actor.ActorConfig(num_envs=num_envs, sequence_length=129),
    evaluator=evaluator.EvaluatorConfig(greedy=False),
    max_environment_steps=100_000_000,
  )


def ppo_tpu_v4_8(environment: str) -> launch_config.ExperimentConfig:
  """PPO on the four chips of a v4-8, each of which has 32 GiB and a quarter of the environments."""
  return _ppo_at_large(environment, 4096)


PRESETS: dict[str, Preset] = {'laptop': laptop, 'gpu': gpu, 'tpu-v4-8': tpu_v4_8}
AGENTS: dict[str, dict[str, Preset]] = {
  'dreamer': PRESETS,
  'plain': {machine: _plain(preset) for machine, preset in PRESETS.items()},
  'ppo': {'laptop': ppo_laptop, 'gpu': ppo_gpu, 'tpu-v4-8': ppo_tpu_v4_8},
}
"""The presets of each agent, by machine."""


def default_preset() -> str:
  """The preset of what this machine shows: found without waking the accelerator."""
  if pathlib.Path('/dev/accel0').exists():
    return 'tpu-v4-8'
  return 'gpu' if pathlib.Path('/dev/nvidiactl').exists() else 'laptop'
