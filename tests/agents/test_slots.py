"""Slots: they compete for the tokens, paint an image together, and are imagined each by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hephaestus.agents.cognition import slots as slots_lib
from hephaestus.agents.dreamer import comparison, modules

S, D = 3, 4
ON = {'slots': S, 'slot_size': D}
SLOTS = slots_lib.Slots((8, 8, 3), num_slots=4, size=16, context_size=2, cell_size=32)
SIDE, NUM_STEPS, BATCH = 8, 4, 16


def foreground_ari(truth: jax.Array, parts: jax.Array, num_parts: int) -> jax.Array:
  """Adjusted Rand index of two partitions of the foreground (Hubert and Arabie, 1985).

  Args:
    truth: [..., P] int32, of each pixel; 0 is the background, which does not count.
    parts: [..., P] int32, the predicted part of each pixel.
    num_parts: more than any of `truth` and `parts`.

  Returns:
    [...] float32, 1 for equal partitions, about 0 for random ones.
  """
  one_hot = lambda x: jax.nn.one_hot(x, num_parts)
  table = jnp.einsum('...pi,...pj->...ij', one_hot(truth) * (truth > 0)[..., None], one_hot(parts))
  pairs = lambda n: n * (n - 1) / 2
  both = jnp.sum(pairs(table), axis=(-2, -1))
  true, predicted = (jnp.sum(pairs(jnp.sum(table, axis=axis)), axis=-1) for axis in (-1, -2))
  total = jnp.maximum(pairs(jnp.sum(table, axis=(-2, -1))), 1.0)
  expected = true * predicted / total
  most = (true + predicted) / 2
  return jnp.where(
    most == expected, 1.0, (both - expected) / jnp.where(most == expected, 1.0, most - expected)
  )


def squares(key):
  """Two squares, of different colours, in quarters of an image; each step turns them to the next quarter.

  Returns:
    [T, B, 8, 8, 3] float32 images, and [T, B, 8, 8] int32 parts: 0 is the background.
  """
  start, apart = jax.random.randint(key, (2, BATCH), 0, 12)
  quarter = (start + jnp.arange(NUM_STEPS)[:, None]) % 4
  place = lambda at: jnp.array([[0, 0], [0, 4], [4, 4], [4, 0]])[at % 4]
  inside = lambda x: (jnp.arange(SIDE) >= x[..., None]) & (jnp.arange(SIDE) < x[..., None] + 3)
  at = lambda q: inside(place(q)[..., 0])[..., :, None] & inside(place(q)[..., 1])[..., None, :]
  parts = jnp.where(at(quarter), 1, jnp.where(at(quarter + 1 + apart % 3), 2, 0))
  colours = jnp.array([[0, 0, 0], [1, 0.2, 0.2], [0.2, 0.2, 1]]) - 0.5
  return colours[parts], parts


def trained(key):
  """Slots after some updates on `squares`.

  Returns:
    Parts [T, B, 8, 8], masks [T, B, S, 8, 8]; and [T - 1, B, S, ...] slots and masks, imagined from the
    first step.
  """
  first = (jnp.arange(NUM_STEPS) == 0)[:, None] & jnp.ones((1, BATCH), bool)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
  imagine = lambda params, slots: SLOTS.imagine(params, slots, jnp.zeros((*slots.shape[:-1], 2)))

  def loss(params, images):
    slots, _ = SLOTS.observe(params, images, jnp.zeros((BATCH, SLOTS.width)), first)
    painted, masks = SLOTS.paint(params, slots)
    before, after = jax.lax.stop_gradient((slots[:-1], slots[1:]))
    error = jnp.sum(jnp.square(painted - images))
    error += jnp.sum(jnp.square(imagine(params, before) - after))
    return error / BATCH, (slots, masks)

  def update(carry, key):
    params, state = carry
    grads, _ = jax.grad(loss, has_aux=True)(params, squares(key)[0])
    changes, state = optimizer.update(grads, state, params)
    return (optax.apply_updates(params, changes), state), None

  params = SLOTS.init(key)
  carry = params, optimizer.init(params)
  (params, _), _ = jax.lax.scan(update, carry, jax.random.split(key, 500))
  images, parts = squares(jax.random.fold_in(key, 500))
  _, (slots, masks) = loss(params, images)
  _, imagined = jax.lax.scan(lambda x, _: 2 * (imagine(params, x),), slots[0], None, NUM_STEPS - 1)
  _, imagined_masks = SLOTS.paint(params, imagined)
  return parts, masks, imagined.reshape(*imagined.shape[:-1], 4, 16), imagined_masks


def score(masks, parts):
  """Mean `foreground_ari` of [..., S, H, W] masks."""
  flat = lambda x: x.reshape(*x.shape[:-2], -1)
  found = foreground_ari(flat(parts), flat(jnp.argmax(masks, axis=-3)), num_parts=6)
  return float(jnp.mean(found))


def least_distance(slots):
  """Least distance of two of [..., S, D] slots of one state."""
  distance = np.linalg.norm(slots[..., :, None, :] - slots[..., None, :, :], axis=-1)
  return distance[..., ~np.eye(slots.shape[-2], dtype=bool)].min()


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('frames', **ON)


@pytest.fixture(scope='module')
def replayed(dreamer, make_params, make_sequence):
  """Slots [T, B, S, D], observed and imagined from the step before, and gradients of losses by the slots."""
  model, params, sequence = dreamer.model, make_params(dreamer), make_sequence(dreamer)
  keys = jax.random.split(jax.random.key(5), sequence.reward.shape[1])

  def replay(world, sequence):
    return model.replay(params | {'world_model': world}, keys, sequence)

  def reward(world, sequence):  # at step 0, where only the head itself reads the step's slots
    features = replay(world, sequence).features
    predicted = model.reward(jax.lax.stop_gradient(world), features)
    return jnp.sum(predicted.log_prob(sequence.reward)[0])

  def whole(world, sequence):
    return model.loss(world, keys, sequence)[0]

  @jax.jit
  def run(world, sequence):
    steps = replay(world, sequence)
    slots = steps.latent.percept
    imagined = slots
    for _ in range(5):
      imagined = model.rssm.follow(world, imagined, steps.latent, steps.previous)
    split = lambda x: x.reshape(*x.shape[:-1], S, D)
    grads = [jax.grad(loss)(world, sequence)['slots'] for loss in (reward, whole)]
    return split(slots), split(imagined), grads, steps.features.numbers

  return lambda changed=sequence: jax.device_get(run(modules.world(params), changed))


def test_slots_share_tokens_and_average_over_them():
  logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
  shares, weights = jax.device_get(jax.jit(slots_lib.weights_of)(logits))
  powers = np.exp(logits)
  np.testing.assert_allclose(shares, powers / powers.sum(1, keepdims=True), rtol=1e-5)
  np.testing.assert_allclose(weights, shares / shares.sum(2, keepdims=True), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
def test_slots_separate_squares_and_imagine_each_by_itself():
  parts, masks, imagined, imagined_masks = jax.device_get(jax.jit(trained)(jax.random.key(0)))
  np.testing.assert_allclose(masks.sum(axis=-3), 1, rtol=1e-5)
  assert score(masks, parts) >= 0.5
  assert least_distance(imagined) > 0.5
  assert score(imagined_masks, parts[1:]) >= 0.4


def test_slots_stay_apart_in_a_still_scene():
  """And hardly change: without their start, carried slots become equal within ten steps."""

  @jax.jit
  def still(key):
    image = jnp.broadcast_to(squares(key)[0][0], (25, BATCH, SIDE, SIDE, 3))
    first = jnp.broadcast_to(jnp.arange(25)[:, None] == 0, (25, BATCH))
    slots, _ = SLOTS.observe(SLOTS.init(key), image, jnp.zeros((BATCH, SLOTS.width)), first)
    return slots.reshape(25, BATCH, 4, 16)

  slots = jax.device_get(still(jax.random.key(0)))
  assert least_distance(slots[-1]) > 0.5
  change = np.linalg.norm(slots[-1] - slots[-2], axis=-1)
  assert change.mean() < 0.1 * least_distance(slots[-1])


def test_slots_are_carried_and_cleared_where_an_episode_begins(replayed, dreamer, make_sequence):
  sequence = make_sequence(dreamer)
  image = np.array(sequence.observation)
  image[1] = 255 - image[1]
  slots, others = (replayed(x)[0] for x in (sequence, sequence._replace(observation=image)))
  np.testing.assert_array_equal(slots[0], others[0])
  assert np.abs(slots[2] - others[2]).max(axis=(1, 2)).min() > 1e-4  # remember the step before
  assert sequence.step_type[3, 1] == 0
  np.testing.assert_array_equal(slots[3, 1], others[3, 1])


def test_features_hold_slots_and_imagined_ones_differ(replayed):
  slots, imagined, _, numbers = replayed()
  np.testing.assert_array_equal(numbers, slots.reshape(*numbers.shape))
  assert least_distance(imagined) > 1e-2


def test_reward_reaches_the_perception_of_slots_and_the_loss_all_of_it(replayed):
  *_, (by_reward, by_all), _ = replayed()
  for name in ('tokens', 'attention', 'start'):
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(by_reward[name])), name
  for path, leaf in jax.tree_util.tree_leaves_with_path(by_all):
    assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


def test_each_member_imagines_an_image_of_its_own(dreamer, make_params, make_observation):
  steer = comparison.Steering(dreamer, greedy=True)
  params = make_params(dreamer)
  observation = make_observation(dreamer, np.random.default_rng(0))

  @jax.jit
  def steps(params, observation):
    key, action = jax.random.key(0), jnp.int32(1)
    belief, seen = steer.observe(params, key, steer.initial(), action, observation, True)
    belief, dreamt = steer.imagine(params, key, belief, action, jnp.int32(0), True)
    return seen, dreamt, model.rssm.paint(modules.world(params), belief.latent)[1]

  model = dreamer.model
  seen, dreamt, masks = jax.device_get(steps(params, observation))
  assert dreamt.observation.shape == model.observation_spec.shape
  assert np.abs(dreamt.members[0] - dreamt.members[1]).max() > 0.1
  np.testing.assert_array_equal(seen.members[0], seen.members[1])  # at FIRST nothing is predicted
  assert masks.shape == (1, S, *model.observation_spec.shape[:2])
  np.testing.assert_allclose(dreamt.masks, masks[0], atol=1e-5)
  assert np.abs(dreamt.masks - seen.masks).max() > 1e-2


@pytest.mark.parametrize(
  ('env', 'slots', 'words'),
  [
    ('masked', 3, r'agent.slots=3: .* this observation has none; set agent.slots=0'),
    ('pictures', 3, r'agent.slots=3: .* this observation has 2; set agent.slots=0'),
    ('frames', 1, r'agent.slots=1: must be 0 for none, or from 2 to 64'),
  ],
)
def test_what_slots_do_not_fit_is_refused(make_dreamer, env, slots, words):
  with pytest.raises(ValueError, match=words):
    make_dreamer(env, slots=slots)
