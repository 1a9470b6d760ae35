"""The default dreamer in the sizes of `tiny`, and random batches for its update."""

import dm_env
import jax
import numpy as np
import tiny
from dm_env import specs

from hephaestus.actors.environments import environment
from hephaestus.agents import experience
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import dream, sockets
from hephaestus.learner import config as learner_config

ALONE = sockets.Batch(mean=lambda x: x, largest=lambda x: x, gather=lambda x: x[None])
"""Reductions over a batch that is not spread."""

NUM_STEPS, BATCH = 6, 8
PIXELS = (9, 8, 29)
VITALS = (environment.Vital('food', 0), environment.Vital('heat', 2))
RATES = learner_config.LearnerConfig(
  batch_size=BATCH, rate_warm_up=1, model_learning_rate=3e-3, policy_learning_rate=1e-3
)


COGNITION = {
  'memory_size': 64, 'workspace_size': 2, 'survival_scale': 0.5, 'empowerment_scale': 0.5
}  # fmt: skip
"""Changes that switch on all parts of cognition."""


def make_dreamer(**changes):
  """A Dreamer of numbers between 0 and 1, real numbers and three actions; without warm-up.

  With `slots` it also has an image.
  """
  config = cognition_config.CognitionConfig(**tiny.DREAMER | {'warm_up_updates': 0} | changes)
  observation_spec = {
    'bounded': environment.VitalsSpec((3,), np.float32, 0, 1, VITALS),
    'real': specs.Array((2,), np.float32),
  }
  if config.slots:
    observation_spec['pixels'] = specs.BoundedArray(PIXELS, np.uint8, 0, 255)
  return registry.make_dreamer(config, observation_spec, specs.DiscreteArray(3))


def starts_of(policy, params, posterior, last, novelty, keys, mask=None, **options):
  """Starts of imagination at replayed steps; see `dream.starts`."""
  read = policy.along(params, posterior, novelty)
  return dream.starts(read, posterior.latent, last, novelty, keys, mask, **options)


def read_of(features, memory=(), own=()):
  """Inputs of actors and critics, by default without context."""
  return sockets.PolicyInputs(features, memory, own)


def random_features(dreamer, random, *axes):
  """Features of normally distributed numbers, with the given leading axes; `random` is a generator."""
  like = dreamer.model.networks.empty_features(*axes)
  return jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), like)


def make_batch(dreamer, seed=0):
  """A Sequence [B, T, ...] of random steps, some of which begin or terminate an episode."""
  random = np.random.default_rng(seed)
  step_type = np.full((BATCH, NUM_STEPS), dm_env.StepType.MID, np.int32)
  step_type[::2, 0] = dm_env.StepType.FIRST
  step_type[::3, 3] = dm_env.StepType.LAST
  step_type[::3, 4] = dm_env.StepType.FIRST
  observation = {
    'bounded': random.uniform(size=(BATCH, NUM_STEPS, 3)).astype(np.float32),
    'real': random.normal(2.0, 3.0, (BATCH, NUM_STEPS, 2)).astype(np.float32),
  }
  if 'pixels' in dreamer.model.observation_spec:
    pixels = np.random.default_rng(seed).integers(0, 256, (BATCH, NUM_STEPS, *PIXELS))
    observation['pixels'] = pixels.astype(np.uint8)
  return experience.Sequence(
    observation=observation,
    action=random.integers(0, 3, (BATCH, NUM_STEPS)).astype(np.int32),
    reward=random.normal(size=(BATCH, NUM_STEPS)).astype(np.float32),
    discount=np.where(step_type == dm_env.StepType.LAST, 0.0, 1.0).astype(np.float32),
    step_type=step_type,
    extras={'log_prob': np.zeros((BATCH, NUM_STEPS), np.float32)},
    initial_state=jax.device_get(dreamer.model.rssm.initial(BATCH)),
    identity=random.integers(0, 2**32, BATCH, dtype=np.uint32),
    version=np.zeros(BATCH, np.int32),
    actor_id=np.zeros(BATCH, np.int32),
  )
