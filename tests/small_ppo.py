"""A small PPO, random batches for it, and its update with few minibatches."""

import dm_env
import jax
import numpy as np
from dm_env import specs

from hephaestus.agents import experience, masked_ppo
from hephaestus.learner import config as learner_config
from hephaestus.learner import ppo_update

NUM_STEPS, BATCH = 6, 16
LAST = int(dm_env.StepType.LAST)


def make_ppo(**changes):
  config = masked_ppo.PPOConfig(**{'hidden_size': 8, 'num_layers': 1} | changes)
  observation_spec = {
    'features': specs.BoundedArray((5,), np.float32, 0, 1),
    'action_mask': specs.BoundedArray((3,), bool, False, True),
  }
  return masked_ppo.make_ppo(config, observation_spec, specs.DiscreteArray(3))


def make_batch(ppo, seed=0, batch=BATCH):
  """[B, T, ...]: some episodes end at step 3."""
  random = np.random.default_rng(seed)
  shape = (batch, NUM_STEPS + 1)
  step_type = np.full(shape, dm_env.StepType.MID, np.int32)
  step_type[::2, 0] = dm_env.StepType.FIRST
  step_type[::3, 3] = LAST
  step_type[::3, 4] = dm_env.StepType.FIRST
  mask = random.uniform(size=(*shape, 3)) < 0.7
  mask[..., 1] = True
  return experience.Sequence(
    observation={
      'features': random.uniform(size=(*shape, 5)).astype(np.float32),
      'action_mask': mask,
    },
    action=np.ones(shape, np.int32),
    reward=random.normal(size=shape).astype(np.float32),
    discount=np.where(step_type == LAST, random.integers(0, 2, shape), 1).astype(np.float32),
    step_type=step_type,
    extras={
      'log_prob': -random.uniform(0.5, 1.5, size=shape).astype(np.float32),
      'value': random.normal(size=shape).astype(np.float32),
    },
    initial_state=jax.tree.map(
      lambda x: random.normal(size=x.shape).astype(np.float32),
      ppo.agent.initial_policy_state(batch),
    ),
    identity=random.integers(0, 2**32, batch, dtype=np.uint32),
    version=np.zeros(batch, np.int32),
    actor_id=np.zeros(batch, np.int32),
  )


def make_update(ppo, num_devices=1, max_environment_steps=None, **changes):
  options = {'num_minibatches': 2, 'num_epochs': 3, 'learning_rate': 1e-2} | changes
  config = learner_config.PPOLearnerConfig(**options)
  scale = ppo_update.auto_scale(
    config, num_envs=BATCH, num_steps=NUM_STEPS, num_devices=num_devices,
    recurrent=bool(ppo.config.recurrent_size),
  )  # fmt: skip
  return ppo_update.make_update(ppo, config, scale, max_environment_steps=max_environment_steps)
