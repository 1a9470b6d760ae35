"""Tiny environments, with agents, parameters and sequences for them.

Tracing and compiling takes almost all of the time here, so the large programs are fixtures of the
session, and their inputs and outputs are NumPy arrays: each operation on arrays of JAX outside of
`jax.jit` is compiled by itself.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import modules, rssm

FIRST, MID, LAST = (int(step_type) for step_type in dm_env.StepType)

ENVIRONMENTS = {
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
  # Pixels of odd sizes, planes of bits, and numbers next to them; features have the stochastic state.
  'pictures': (
    {
      'pixels': specs.BoundedArray((9, 11, 21), np.uint8, 0, 255),
      'planes': specs.BoundedArray((8, 8, 33), bool, False, True),  # enough for an image
      'purse': specs.Array((2,), np.float32),
      'action_mask': specs.BoundedArray((3,), bool, False, True),
    },
    specs.DiscreteArray(3),
  ),
  # A grid of bits, one of integers, and numbers next to them.
  'grids': (
    {
      'bits': specs.BoundedArray((3, 4, 2), bool, False, True),
      'colours': specs.BoundedArray((4, 3, 1), np.int32, 0, 3),
      'lamps': specs.BoundedArray((5,), bool, False, True),
      'purse': specs.Array((2,), np.float32),
      'action_mask': specs.BoundedArray((3,), bool, False, True),
    },
    specs.DiscreteArray(3),
  ),
  # What slots take: one image; with a grid, and a number beside it.
  'scene': (
    {
      'pixels': specs.BoundedArray((8, 8, 3), np.uint8, 0, 255),
      'bits': specs.BoundedArray((5, 5, 2), bool, False, True),
      'lamps': specs.BoundedArray((3,), bool, False, True),
    },
    specs.DiscreteArray(3),
  ),
  # Only an image, without numbers.
  'frames': (specs.BoundedArray((9, 8, 29), np.uint8, 0, 255), specs.DiscreteArray(3)),
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


def once(function: Callable) -> Callable:
  """Caches the results of a function of one argument, which need not be hashable."""
  made: dict[int, Any] = {}

  def cached(argument):
    if id(argument) not in made:
      made[id(argument)] = argument, function(argument)
    return made[id(argument)][1]

  return cached


@pytest.fixture(scope='session')
def make_dreamer(tiny_dreamer):
  """(env, **changes of the config) -> Dreamer, cached; by default without context."""

  @functools.cache
  def make(env='masked', **changes):
    several = {
      'ensemble_size': 3,
      'horizon_max': 6,
      'image_channels': 4,
      'free_nats': 0.0,
      'reward_scale': 3.0,
    }
    config = cognition_config.CognitionConfig(**tiny_dreamer | several | changes)
    return registry.make_dreamer(config, *ENVIRONMENTS[env])

  return make


@pytest.fixture(scope='session')
def make_params(param_shapes):
  """Parameters as after some updates: no bias and no output layer is zero, no scale is 1."""

  def make(dreamer, seed=0):
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
      x = rng.normal(size=leaf.shape)
      statistics = 'variance', 'square', 'error', 'between', 'off_level', 'change', 'count', 'units'
      if path[-1].key.startswith(statistics) and leaf.ndim < 2:
        return np.asarray(1 + np.abs(x), np.float32)
      if path[-1].key in ('kernel', 'output'):
        fan_in = np.prod(
          leaf.shape[-4 if leaf.ndim == 4 else -2 : -1]
        )  # of a convolution or a dense layer
        return np.asarray(x / np.sqrt(fan_in), np.float32)
      return np.asarray(0.2 * x + (path[-1].key == 'scale'), np.float32)

    return jax.tree_util.tree_map_with_path(draw, param_shapes(dreamer))

  return make


@pytest.fixture(scope='session')
def param_shapes():
  """(dreamer) -> shapes and dtypes of its parameters; traced once for each."""
  return once(lambda dreamer: jax.eval_shape(dreamer.agent.init_params, jax.random.key(0)))


@pytest.fixture(scope='session')
def fresh_params(make_dreamer):
  """(seed) -> initial parameters of the dreamer of 'masked'."""
  init = jax.jit(make_dreamer('masked').agent.init_params)
  return functools.cache(lambda seed=0: jax.device_get(init(jax.random.key(seed))))


@pytest.fixture(scope='session')
def make_observation():
  """(dreamer, generator, leading axes) -> random observations; some action is always legal."""

  def make(dreamer, rng, *axes):
    spec = dreamer.model.observation_spec

    def draw(spec):
      x = rng.uniform(size=(*axes, *spec.shape)) * (255 if spec.dtype == np.uint8 else 1)
      if spec.dtype == np.int32 and spec.shape:
        return np.asarray(4 * x, np.int32)
      return (x < 0.5) if spec.dtype == bool else (x if spec.shape else 9 * x).astype(spec.dtype)

    observation = jax.tree.map(draw, spec)
    if observation_lib.action_mask(spec) is not None:
      observation[observation_lib.ACTION_MASK][..., 1] = True
    return observation

  return make


@pytest.fixture(scope='session')
def make_sequence(make_observation):
  """(dreamer) -> a Sequence [T, B, ...] along the streams above, with a random initial state."""

  @once
  def make(dreamer):
    rng = np.random.default_rng(0)
    model = dreamer.model
    num_steps, batch = STEP_TYPE.shape
    if dreamer.actor_critic.discrete:
      action = np.ones((num_steps, batch), np.int32)
      if not model.networks.has_mask:
        action = rng.integers(0, model.networks.actions.size, (num_steps, batch), np.int32)
    else:
      action = rng.uniform(
        model.action_spec.minimum, model.action_spec.maximum, (num_steps, batch, 2)
      ).astype(np.float32)
    initial = jax.eval_shape(lambda: model.rssm.initial(batch))
    initial = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), initial)
    numbers = jax.jit(model.networks.numbers.read)(make_observation(dreamer, rng, batch))
    initial = initial._replace(latent=initial.latent._replace(numbers=np.asarray(numbers)))
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
    for leaf in jax.tree.leaves(sequence):
      leaf.setflags(write=False)
    return sequence

  return make


class Judged(NamedTuple):
  """The result of `judge`.

  Attributes:
    loss: the world model's loss.
    posterior: latents and beliefs of all steps.
    rewards: predicted rewards.
    moments: moments that statistics of numbers follow.
    metrics: metrics of the loss.
    grads: gradient of the loss by the parameters.
  """

  loss: Any
  posterior: rssm.Step
  rewards: Any
  moments: Any
  metrics: Any
  grads: Any


@pytest.fixture(scope='session')
def judge():
  """(model, params, keys, sequence, ...) -> Judged; compiled once for each model.

  With `value`, the loss of the critic is `value` times the sum of the state in the features. With
  `only_change`, it differentiates the metric 'change' in place of the loss.
  """

  @once
  def compiled(model):
    def objective(params, keys, sequence, value, only_change):
      value_loss = lambda replayed: value * jnp.sum(replayed.features.state)
      loss, aux = model.loss(params, keys, sequence, value_loss)
      return jnp.where(only_change, aux[-1]['change'], loss), (loss, *aux)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))

  def run(model, params, keys, sequence, *, value=0.0, only_change=False):
    (_, aux), grads = compiled(model)(params, keys, sequence, np.float32(value), only_change)
    return Judged(*jax.device_get((*aux, grads)))

  return run


@pytest.fixture(scope='session')
def act():
  """(dreamer, params, key, state, timestep, greedy) -> as `Agent.act`; compiled once for each."""

  @once
  def compiled(agent):
    return jax.jit(
      lambda *arguments: agent.act(*arguments[:-1], greedy=arguments[-1]), static_argnums=4
    )

  def run(dreamer, params, key, state, timestep, greedy=False):
    timestep = dm_env.TimeStep(timestep.step_type, None, None, timestep.observation)
    return jax.device_get(compiled(dreamer.agent)(params, key, state, timestep, greedy))

  return run


@pytest.fixture(scope='session')
def numbered_posterior():
  """A posterior whose features are numbered by sequence and step, and these numbers, [T, B].

  The number is 100 b + t, for t from 1. Two episodes begin: stream 0 at step 0, stream 1 at step 3.
  """
  num_steps, batch = STEP_TYPE.shape
  number = 100.0 * np.arange(batch, dtype=np.float32) + np.arange(1, num_steps + 1)[:, None]
  number = number.astype(np.float32)
  first = np.zeros((num_steps, batch), bool)
  first[[0, 3], [0, 1]] = True
  latent = rssm.Latent(*(np.float32(scale) * number[..., None] for scale in (1, -1, 2)))
  nothing = np.zeros((*number.shape, 0), np.float32)
  features = modules.Features(number[..., None], -number[..., None], *[nothing] * 6)
  return rssm.Step(latent, features, (), (), (), first), number
