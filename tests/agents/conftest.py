"""Tiny environments, with agents, parameters and sequences for them."""

import functools

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors.environments import environment
from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import rssm

FIRST, MID, LAST = (int(step_type) for step_type in dm_env.StepType)

ENVIRONMENTS = {
  'plain': (specs.Array((5,), np.float32), specs.DiscreteArray(3)),
  'masked': (
    {
      'board': specs.BoundedArray((2, 2), np.float32, 0, 1),
      'purse': specs.Array((), np.int32),
      'action_mask': specs.BoundedArray((4,), bool, False, True),
    },
    specs.DiscreteArray(4),
  ),
  'continuous': (
    specs.Array((5,), np.float32),
    specs.BoundedArray((2,), np.float32, [-1, 0], [1, 4]),
  ),
  # Pixels of odd sizes, planes of bits, and numbers beside them.
  'pictures': (
    {
      'pixels': specs.BoundedArray((9, 11, 21), np.uint8, 0, 255),
      'planes': specs.BoundedArray((8, 8, 33), bool, False, True),  # enough for an image
      'purse': specs.Array((2,), np.float32),
    },
    specs.DiscreteArray(3),
  ),
  # Graded and binary numbers, none of them real.
  'grid': (
    {
      'alive': specs.Array((2,), bool),
      'cells': specs.BoundedArray((2, 3), np.float32, 0, 1),
    },
    specs.DiscreteArray(3),
  ),
  # A vector with a view of it.
  'view': (
    environment.ViewSpec((3,), np.float32, -4, 4, lambda x: jnp.square(x[1:])),
    specs.DiscreteArray(3),
  ),
  # As 'masked', beside an image, so that features have the stochastic state.
  'masked_frames': (
    {
      'board': specs.BoundedArray((2, 2), np.float32, 0, 1),
      'frame': specs.BoundedArray((8, 8, 33), np.uint8, 0, 255),
      'purse': specs.Array((), np.int32),
      'action_mask': specs.BoundedArray((4,), bool, False, True),
    },
    specs.DiscreteArray(4),
  ),
  # An image alone, without numbers.
  'frames': (specs.BoundedArray((9, 8, 29), np.uint8, 0, 255), specs.DiscreteArray(3)),
  # An image that is small enough to be numbers.
  'small_frames': (specs.BoundedArray((9, 8, 3), np.uint8, 0, 255), specs.DiscreteArray(3)),
}

# Three streams, [T, B]. The first terminates at step 3, the second is truncated at step 2, and the
# third begins and ends in the middle of an episode.
STEP_TYPE = np.array(
  [
    [FIRST, MID, MID],
    [MID, MID, MID],
    [MID, LAST, MID],
    [LAST, FIRST, MID],
    [FIRST, MID, MID],
    [MID, MID, MID],
  ],
  np.int32,
)
DISCOUNT = np.ones(STEP_TYPE.shape, np.float32)
DISCOUNT[3, 0] = 0.0


@pytest.fixture(scope='session')
def make_dreamer(tiny_dreamer):
  """(env, **changes of the config) -> Dreamer, cached; by default without context."""

  @functools.cache
  def make(env='masked', **changes):
    several = {'ensemble_size': 3, 'horizon_max': 6, 'image_channels': 4, 'free_nats': 0.0}
    config = dreamer_config.DreamerConfig(**tiny_dreamer | several | changes)
    return dreamer_agent.make_dreamer(config, *ENVIRONMENTS[env])

  return make


@pytest.fixture(scope='session')
def make_params():
  """Parameters as after some updates: no bias and no output layer is zero, no scale is 1."""

  def make(dreamer, seed=0):
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
      x = rng.normal(size=leaf.shape)
      if path[-1].key in (
        'square',
        'error',
        'between',
        'change',
        'count',
      ):  # statistics
        return jnp.asarray(1 + np.abs(x), jnp.float32)
      if path[-1].key in ('kernel', 'output'):
        fan_in = np.prod(
          leaf.shape[-4 if leaf.ndim == 4 else -2 : -1]
        )  # of a convolution or a dense layer
        return jnp.asarray(x / np.sqrt(fan_in), jnp.float32)
      return jnp.asarray(0.2 * x + (path[-1].key == 'scale'), jnp.float32)

    shapes = jax.eval_shape(dreamer.agent.init_params, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)

  return make


@pytest.fixture(scope='session')
def fresh_params():
  """(dreamer, seed) -> initial parameters; compiled once for each agent."""
  compiled = {}

  def make(dreamer, seed=0):
    if id(dreamer) not in compiled:
      compiled[id(dreamer)] = jax.jit(dreamer.agent.init_params)
    return compiled[id(dreamer)](jax.random.key(seed))

  return make


@pytest.fixture(scope='session')
def make_observation():
  """(dreamer, generator, leading axes) -> random observations; some action is always legal."""

  def make(dreamer, rng, *axes):
    spec = dreamer.model.observation_spec

    def draw(spec):
      x = rng.uniform(size=(*axes, *spec.shape)) * (255 if spec.dtype == np.uint8 else 1)
      return (x < 0.5) if spec.dtype == bool else (x if spec.shape else 9 * x).astype(spec.dtype)

    observation = jax.tree.map(draw, spec)
    if observation_lib.action_mask(spec) is not None:
      observation[observation_lib.ACTION_MASK][..., 1] = True
    return observation

  return make


@pytest.fixture(scope='session')
def make_sequence(make_observation):
  """(dreamer) -> a Sequence [T, B, ...] along the streams above, with a random initial state."""

  def make(dreamer, seed=0):
    rng = np.random.default_rng(seed)
    model = dreamer.model
    num_steps, batch = STEP_TYPE.shape
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    if dreamer.actor_critic.discrete:
      action = np.ones((num_steps, batch), np.int32)
      if not model.networks.has_mask:
        action = rng.integers(0, model.networks.actions.size, (num_steps, batch), np.int32)
    else:
      action = rng.uniform(
        model.action_spec.minimum, model.action_spec.maximum, (num_steps, batch, 2)
      ).astype(np.float32)
    initial = jax.tree.map(lambda x: normal(*x.shape).astype(x.dtype), model.rssm.initial(batch))
    numbers = model.networks.numbers.read(make_observation(dreamer, rng, batch))
    initial = initial._replace(latent=initial.latent._replace(numbers=numbers))
    sequence = experience.Sequence(
      observation=make_observation(dreamer, rng, num_steps, batch),
      action=action,
      reward=np.where(STEP_TYPE == FIRST, 0, rng.normal(size=STEP_TYPE.shape)).astype(np.float32),
      discount=DISCOUNT,
      step_type=STEP_TYPE,
      extras={},
      initial_state=initial,
      identity=np.array([1, 4, 3], np.uint32),  # every member learns from some
      version=np.zeros(batch, np.int32),
      actor_id=np.zeros(batch, np.int32),
    )
    return jax.tree.map(jnp.asarray, sequence)

  return make


@pytest.fixture(scope='session')
def infer():
  """(model, params, keys, sequence) -> Posterior; compiled once for each model."""
  compiled = {}

  def run(model, params, keys, sequence):
    if id(model) not in compiled:
      compiled[id(model)] = jax.jit(model.rssm.infer)
    return compiled[id(model)](params, keys, sequence)

  return run


@pytest.fixture(scope='session')
def numbered_posterior():
  """A posterior whose features are numbered by sequence and step, and these numbers, [T, B].

  The number is 100 b + t, for t from 1. Two episodes begin: stream 0 at step 0, stream 1 at step 3.
  """
  num_steps, batch = STEP_TYPE.shape
  number = 100.0 * jnp.arange(batch) + jnp.arange(1, num_steps + 1)[:, None]
  first = jnp.zeros((num_steps, batch), bool).at[0, 0].set(True).at[3, 1].set(True)
  latent = rssm.Latent(*(scale * number[..., None] for scale in (1, -1, 2)))
  features = jnp.stack([number, -number], axis=-1)
  return rssm.Posterior(latent, features, (), (), (), first), number
