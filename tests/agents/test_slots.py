"""Slots: they compete for the tokens, are reset with an episode, and paint an image together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hephaestus.actors.environments import sprites
from hephaestus.agents.dreamer import slots as slots_lib

SLOTS = slots_lib.Slots((16, 16, 3), num_slots=5, size=16, hidden_size=16)


@pytest.fixture(scope='module')
def params():
  return SLOTS.init(jax.random.key(0))


def images_of(num_steps, batch, num_objects=3):
  """[T, B, 16, 16, 3] images of so many episodes' first steps, and their segments [T, B, 256]."""
  keys = jax.random.split(jax.random.key(1), num_steps * batch)
  states, timesteps = jax.vmap(sprites.Sprites(num_objects=num_objects).reset)(keys)
  images = timesteps.observation.astype(jnp.float32) / 255 - 0.5
  segments = jax.vmap(sprites.segments)(states)
  return images.reshape(num_steps, batch, 16, 16, 3), segments.reshape(num_steps, batch, -1)


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


def test_slots_compete_for_each_token(params):
  images, _ = images_of(2, 3)
  slots, shares = SLOTS.observe(params, images, jnp.zeros((2, 3), bool))
  assert slots.shape == (2, 3, 5, 16) and shares.shape == (2, 3, 5, 64)
  np.testing.assert_allclose(jnp.sum(shares, axis=2), 1, rtol=1e-5)
  assert jnp.std(shares, axis=2).min() > 1e-4  # no token is everyone's
  assert len(np.unique(np.round(slots[0, 0], 4), axis=0)) == 5


def test_masks_share_each_pixel(params):
  painted, masks = SLOTS.paint(params, jax.random.normal(jax.random.key(0), (3, 5, 16)))
  assert painted.shape == (3, 16, 16, 3) and masks.shape == (3, 5, 16, 16)
  np.testing.assert_allclose(jnp.sum(masks, axis=1), 1, rtol=1e-5)


def test_slots_are_carried_and_cleared_where_an_episode_begins(params):
  images, _ = images_of(3, 2)
  first = jnp.array([[True, True], [False, True], [False, False]])
  slots, _ = SLOTS.observe(params, images, first)
  alone, _ = SLOTS.observe(params, images[1:], first[1:])
  np.testing.assert_allclose(slots[1:, 1], alone[:, 1], rtol=1e-4, atol=1e-5)
  assert jnp.abs(slots[1, 0] - alone[0, 0]).max() > 1e-3  # which remembers no step before


def test_every_parameter_has_a_gradient(params):
  images, _ = images_of(2, 3)
  grads = jax.grad(lambda params: SLOTS.loss(params, images, jnp.zeros((2, 3), bool))[0])(params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert float(jnp.abs(leaf).max()) > 0, jax.tree_util.keystr(path)


def test_rand_index_compares_partitions_of_the_foreground():
  ari = lambda truth, parts: float(foreground_ari(jnp.array(truth), jnp.array(parts), num_parts=6))
  truth = [0, 0, 1, 1, 2, 2, 3, 3]
  assert ari(truth, [5, 4, 2, 2, 0, 0, 1, 1]) == 1  # other names; the background does not count
  assert ari(truth, [0] * 8) == 0  # all together
  # Of 15 pairs 2 are together in both, 3 in the truth and 4 in the parts.
  assert ari(truth, [0, 0, 2, 2, 0, 0, 1, 2]) == pytest.approx((2 - 12 / 15) / (7 / 2 - 12 / 15))
  rng = np.random.default_rng(0)
  truth, parts = rng.integers(1, 6, (2, 100, 64))
  random = foreground_ari(jnp.asarray(truth), jnp.asarray(parts), num_parts=6)
  assert abs(float(random.mean())) < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
@pytest.mark.timeout(1800)
def test_slots_alone_part_the_objects_of_sprites():
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
