"""Slots: they compete for the tokens, are reset with an episode, and paint an image together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hephaestus.actors.environments import sprites
from hephaestus.agents.dreamer import slots as slots_lib

SLOTS = slots_lib.Slots((16, 16, 3), num_slots=5, size=16, hidden_size=16)


FIRST = np.array([[True, True], [False, True], [False, False]])


@pytest.fixture(scope='module')
def images():
  """[3, 2, 16, 16, 3] images of the first steps of six episodes."""
  reset = jax.jit(jax.vmap(sprites.Sprites(num_objects=3).reset))
  _, timesteps = reset(jax.random.split(jax.random.key(1), 6))
  images = np.asarray(timesteps.observation).astype(np.float32) / 255 - 0.5
  return images.reshape(3, 2, 16, 16, 3)


@pytest.fixture(scope='module')
def judge():
  """(images) -> slots, shares of the attention, masks, and the gradient of the loss."""

  @jax.jit
  def judge(images):
    params = SLOTS.init(jax.random.key(0))
    (_, masks), grads = jax.value_and_grad(SLOTS.loss, has_aux=True)(params, images, FIRST)
    return *SLOTS.observe(params, images, FIRST), masks, grads

  return lambda images: jax.device_get(judge(images))


@pytest.fixture(scope='module')
def judged(judge, images):
  return judge(images)


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


def test_slots_compete_for_each_token(judged):
  slots, shares, *_ = judged
  assert slots.shape == (3, 2, 5, 16) and shares.shape == (3, 2, 5, 64)
  np.testing.assert_allclose(np.sum(shares, axis=2), 1, rtol=1e-5)
  assert np.std(shares, axis=2).min() > 1e-4  # no token is everyone's
  assert len(np.unique(np.round(slots[0, 0], 4), axis=0)) == 5


def test_masks_share_each_pixel(judged):
  _, _, masks, _ = judged
  assert masks.shape == (3, 2, 5, 16, 16)
  np.testing.assert_allclose(np.sum(masks, axis=2), 1, rtol=1e-5)


def test_slots_are_carried_and_cleared_where_an_episode_begins(judge, images, judged):
  slots, *_ = judged
  after_another_step, *_ = judge(np.concatenate([images[2:], images[1:]]))
  np.testing.assert_array_equal(slots[1:, 1], after_another_step[1:, 1])
  assert np.abs(slots[1, 0] - after_another_step[1, 0]).max() > 1e-3  # remembers the step before


def test_every_parameter_has_a_gradient(judged):
  *_, grads = judged
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


def test_rand_index_compares_partitions_of_the_foreground():
  ari = jax.jit(lambda truth, parts: foreground_ari(truth, parts, num_parts=6))
  truth = np.tile([0, 0, 1, 1, 2, 2, 3, 3], (3, 1))
  renamed = [5, 4, 2, 2, 0, 0, 1, 1]  # the background does not count
  found = ari(truth, np.array([renamed, [0] * 8, [0, 0, 2, 2, 0, 0, 1, 2]]))
  # 2 of 15 pairs are together in both, 3 in the truth and 4 in the parts.
  np.testing.assert_allclose(found, [1, 0, (2 - 12 / 15) / (7 / 2 - 12 / 15)], atol=1e-6)
  rng = np.random.default_rng(0)
  random = ari(*rng.integers(1, 6, (2, 100, 64)))
  assert abs(float(np.mean(random))) < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
@pytest.mark.timeout(1800)
def test_slots_by_themselves_separate_the_objects_of_sprites():
  """Prints the adjusted Rand index of gate A in docs/cognition.md."""
  slots = slots_lib.Slots((16, 16, 3))
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adam(optax.warmup_constant_schedule(0, 1e-3, 200))
  )

  @jax.jit
  def update(params, state, key):
    states, timesteps = jax.vmap(sprites.Sprites().reset)(jax.random.split(key, 32))
    images = timesteps.observation[None].astype(jnp.float32) / 255 - 0.5
    loss = lambda params: slots.loss(params, images, jnp.ones((1, 32), bool))
    (_, masks), grads = jax.value_and_grad(loss, has_aux=True)(params)
    changes, state = optimizer.update(grads, state, params)
    truth = jax.vmap(sprites.segments)(states).reshape(32, -1)
    parts = jnp.argmax(masks[0], axis=1).reshape(32, -1)
    ari = foreground_ari(truth, parts, num_parts=16).mean()
    return optax.apply_updates(params, changes), state, ari

  params = slots.init(jax.random.key(0))
  state, indices = optimizer.init(params), []
  for key in jax.random.split(jax.random.key(1), 2_000):
    params, state, index = update(params, state, key)
    indices.append(index)
  print(f'FG-ARI {np.mean(indices[-200:]):.2f}')
  assert np.mean(indices[-200:]) >= 0.6
