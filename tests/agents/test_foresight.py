"""Foresight: which inputs it depends on, and the shapes of its outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import modules, rssm

NUM_STEPS, CONTEXT = 6, 3
KEY = jax.random.key(0)
ENVS = ['masked', 'continuous', 'pictures']


@pytest.fixture(scope='module')
def foresee(make_dreamer, make_params, make_sequence):
  """(env, context, change of (observation, action), seed of params) -> Foresight of a stream."""
  compiled = {}

  def run(env, context=CONTEXT, change=lambda *stream: stream, seed=0):
    dreamer = make_dreamer(env)
    params = make_params(dreamer, seed)
    sequence = jax.tree.map(np.array, make_sequence(dreamer))
    stream = jax.tree.map(lambda x: x[:, 0], (sequence.observation, sequence.action))
    function = compiled.setdefault(env, jax.jit(dreamer.agent.foresee))
    return jax.device_get(function(params, KEY, *change(*stream), np.int32(context)))

  return run


def differs(one, other):
  """[T] bool, steps at which two trees differ."""
  by_leaf = [
    (np.asarray(x) != np.asarray(y)).reshape(NUM_STEPS, -1).any(1)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  ]
  return np.any(by_leaf, axis=0)


@pytest.mark.parametrize('env', ENVS)
def test_prediction_depends_on_observed_steps_and_earlier_actions_only(foresee, env):
  def change_observation(step):
    def change(observation, action):
      change = lambda x: np.concatenate([x[:step], 1 - x[step : step + 1], x[step + 1 :]])
      return jax.tree.map(lambda x: change(x).astype(x.dtype), observation), action

    return change

  def change_action(step):
    def change(observation, action):
      action[step] = (action[step] + 1) % 3 if action.dtype == np.int32 else action[step] / 2
      return observation, action

    return change

  plain = foresee(env).observation
  step = np.arange(NUM_STEPS)
  change = change_observation(1)
  by_observation = [  # the most likely class of a latent may stay with some parameters
    differs(foresee(env, seed=seed).observation, foresee(env, change=change, seed=seed).observation)
    for seed in range(5)
  ]
  first, second, *rest = np.transpose(by_observation)
  assert not first.any() and second.any() and np.any(rest[CONTEXT - 2 :])
  assert not differs(plain, foresee(env, change=change_observation(CONTEXT)).observation).any()
  by_action = differs(plain, foresee(env, change=change_action(CONTEXT)).observation)
  assert not by_action[step <= CONTEXT].any()
  assert by_action[step > CONTEXT].any()


def test_prediction_of_an_observed_episode_reads_every_step(foresee):
  def change(observation, action):
    observation[-1] -= 100  # enough for another class of a latent
    return observation, action

  plain = foresee('continuous', NUM_STEPS).observation
  changed = foresee('continuous', NUM_STEPS, change).observation
  assert differs(plain, changed).tolist() == [False] * 5 + [True]


@pytest.mark.parametrize('env', [*ENVS, 'frames'])
def test_predictions_have_the_shapes_of_an_observation(
  make_dreamer, make_sequence, param_shapes, foresee, env
):
  dreamer = make_dreamer(env)
  if env in ENVS:
    decoded = foresee(env).observation
  else:  # not compiled
    sequence = make_sequence(dreamer)
    stream = sequence.observation[:, 0], sequence.action[:, 0]
    params = param_shapes(dreamer)
    decoded = jax.eval_shape(dreamer.agent.foresee, params, KEY, *stream, CONTEXT).observation
  spec = observation_lib.without_mask(dreamer.model.observation_spec)
  shapes = jax.tree.map(lambda leaf: (NUM_STEPS, *leaf.shape), spec)
  assert jax.tree.map(lambda x: x.shape, decoded) == shapes
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(decoded))


@pytest.mark.parametrize('env', ['masked', 'pictures'])
def test_decoded_observation_has_the_least_loss(make_dreamer, make_params, make_sequence, env):
  dreamer = make_dreamer(env)
  model, sizes = dreamer.model, dreamer.model.networks
  numbers = sizes.numbers
  rng = np.random.default_rng(1)
  normal = lambda size: rng.normal(size=(NUM_STEPS, size)).astype(np.float32)
  states = normal(sizes.config.deterministic_size), normal(sizes.latent_size)
  previous = normal(sizes.previous_size)

  @jax.jit
  def losses(params, observation):
    before, first = numbers.read(observation), jnp.arange(NUM_STEPS) == 0
    latent = rssm.Latent(*states, before)
    statistics = params[modules.STATISTICS]

    def loss(observation):
      outputs, decoded = model.rssm.decoder(params, latent, previous)
      predicted = numbers.predict(outputs, before, ~first, statistics)
      loss, _ = numbers.loss(predicted, numbers.read(observation), statistics)
      return loss + sizes.codec.image_loss(decoded, sizes.codec.encode(observation)[1:])

    likeliest = model.decode(params, latent, previous, before, first)
    other = jax.tree.map(lambda x: x + 0.2, likeliest)
    return loss(likeliest), loss(other)

  observation = jax.tree.map(lambda x: x[:, 0], make_sequence(dreamer).observation)
  least, other = jax.device_get(losses(make_params(dreamer)['world_model'], observation))
  assert (other > least + 1e-3).all()


def test_imagination_carries_numbers_sampled_from_what_is_decoded(make_dreamer, make_params):
  dreamer = make_dreamer('masked')
  model, params = dreamer.model, make_params(dreamer)['world_model']
  sizes, statistics = model.networks.numbers, params[modules.STATISTICS]

  @jax.jit
  def imagine(params, numbers):
    before = model.rssm.initial(NUM_STEPS)
    before = before._replace(latent=before.latent._replace(numbers=numbers))
    noise = jax.vmap(model.rssm.imagined_noise)(jax.random.split(jax.random.key(1), NUM_STEPS))
    member, matrices = jnp.zeros(NUM_STEPS, jnp.int32), model.rssm.matrices(params)
    imagined = model.rssm.imagine(params, matrices, before, member, noise)
    outputs, _ = model.rssm.decoder(params, imagined.latent, imagined.previous)
    follows = jnp.ones(NUM_STEPS, bool)
    predicted = sizes.predict(outputs, numbers, follows, statistics, max_copy=1.0)
    sampled = sizes.sample(predicted, numbers, statistics, noise.numbers)
    return imagined.latent.numbers, sampled, sizes.expected(predicted, numbers, statistics)

  numbers = np.random.default_rng(2).uniform(size=(NUM_STEPS, sizes.size)).astype(np.float32)
  imagined, sampled, expected = jax.device_get(imagine(params, numbers))
  np.testing.assert_allclose(sampled, imagined, rtol=1e-5, atol=1e-6)
  assert np.abs(sampled - expected).max() > 0.05
