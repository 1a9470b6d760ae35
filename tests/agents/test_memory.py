"""Episodic memory: keys, reads, writes, expiry, and the ring on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.agents import distributions
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import memory as memory_lib
from hephaestus.agents.dreamer import numbers as numbers_lib

SIZE, TTL = 16, 50
BITS = specs.BoundedArray((24,), bool, False, True)


def make_memory(spec=BITS, action_spec=None, size=SIZE):
  codec = observation_lib.Codec(spec, cnn=True)
  actions = distributions.Actions(action_spec or specs.DiscreteArray(3))
  return memory_lib.Memory(size, TTL, actions, numbers_lib.Numbers(codec.flat_spec), codec)


MEMORY = make_memory()


def observations(count, seed=0):
  return np.random.default_rng(seed).integers(0, 2, (count, 24)).astype(bool)


def offer(keys, actions, returns, surprise=1.0, size=memory_lib.MOST_WRITTEN):
  """An offer of some steps, and of others without surprise."""
  pad = lambda x: jnp.concatenate([x, jnp.zeros((size - len(x), *x.shape[1:]))])
  surprise = jnp.broadcast_to(jnp.asarray(surprise, jnp.float32), len(keys))
  action = jax.nn.one_hot(jnp.asarray(actions), 3)
  return memory_lib.Offer(
    pad(keys), pad(action), pad(jnp.asarray(returns, jnp.float32)), pad(surprise)
  )


def no_reads(memory=MEMORY):
  return jnp.zeros(memory.size, bool)


def filled(seen, actions, returns):
  """A ring with steps written one update after another, from update 0 on."""
  ring = MEMORY.init()
  for update, (x, action, return_) in enumerate(zip(seen, actions, returns, strict=True)):
    each = offer(MEMORY.key(x[None]), [action], [return_])
    ring = MEMORY.write(ring, each, no_reads(), jnp.int32(update))
  return ring


def test_keys_have_length_one_and_tell_names_apart():
  keys = MEMORY.key(observations(1024))
  np.testing.assert_allclose(jnp.linalg.norm(keys, axis=-1), 1.0, rtol=1e-5)
  similarity = np.array(keys @ keys.T)
  np.fill_diagonal(similarity, 0)
  assert np.exp(memory_lib.SHARPNESS * (similarity.max() - 1)) < 0.1


def test_zeros_count_as_much_as_ones_in_a_key():
  x = np.zeros((2, 24), bool)
  x[1, 0] = True
  one, other = MEMORY.key(x), MEMORY.key(~x)
  np.testing.assert_allclose(one, -other, atol=1e-6)


@pytest.mark.parametrize(
  'spec', [specs.BoundedArray((9, 12, 20), np.uint8, 0, 255), specs.Array((16, 8, 2), np.float32)]
)
def test_images_are_pooled_to_eight_by_eight(spec):
  memory = make_memory({'image': spec})
  image = np.random.default_rng(0).uniform(0, 255, (2, *spec.shape)).astype(spec.dtype)
  keys = memory.key({'image': image})
  assert keys.shape == (2, memory_lib.KEY_SIZE)
  assert memory._projection.shape[0] == 64 * spec.shape[-1]
  assert keys[0] @ keys[1] < 0.999


def test_recall_weighs_returns_of_each_action_by_similarity():
  x = observations(2)
  ring = filled(x[[0, 0, 0, 1]], [0, 0, 2, 1], [1.0, 3.0, -5.0, 7.0])
  recall = MEMORY.read(ring, MEMORY.key(x[:1]))
  np.testing.assert_allclose(recall.value[0, [0, 2]], [2.0, -5.0], rtol=1e-4)
  np.testing.assert_allclose(recall.evidence[0, [0, 2]], 1.0, rtol=1e-4)
  assert recall.evidence[0, 1] < 0.1  # the other observation's
  np.testing.assert_allclose(recall.similarity, 1.0, rtol=1e-5)
  expected = np.concatenate([[np.log(3.0)], [-np.log(6.0)]])
  np.testing.assert_allclose(MEMORY.recalled(recall)[0, [0, 2]], expected, rtol=1e-3)


def test_nearest_entries_are_in_order_with_what_was_done_and_returned():
  seen = observations(5)
  ring = filled(seen, [0, 1, 2, 1, 0], [0.0, 1.0, 2.0, 3.0, 4.0])
  recall = MEMORY.read(ring, MEMORY.key(seen[2]))
  found = MEMORY.nearest(ring, recall)
  assert found.weight.shape == (3,) and found.return_[0] == 2.0 and found.action[0, 2] == 1
  np.testing.assert_allclose(found.similarity[0], 1.0, atol=1e-5)
  every = np.sort(np.asarray(MEMORY.key(seen) @ MEMORY.key(seen[2])))[::-1]
  near = found.weight > 1e-20
  np.testing.assert_allclose(found.similarity[near], every[:3][near], atol=0.02)
  assert not MEMORY.nearest(
    MEMORY.init(), MEMORY.read(MEMORY.init(), MEMORY.key(seen[2]))
  ).weight.any()


def test_continuous_actions_are_recalled_as_their_mean():
  memory = make_memory(action_spec=specs.BoundedArray((2,), np.float32, -1, 1))
  key = memory.key(observations(1))
  action = jnp.array([[0.5, -1.0], [0.1, 1.0]])
  pad = lambda x: jnp.pad(x, [(0, 6)] + [(0, 0)] * (x.ndim - 1))
  each = memory_lib.Offer(
    pad(jnp.repeat(key, 2, 0)), pad(action), pad(jnp.array([1.0, 2.0])), pad(jnp.ones(2))
  )
  ring = memory.write(memory.init(), each, no_reads(), jnp.int32(0))
  recalled = memory.recalled(memory.read(ring, key))
  assert recalled.shape == (1, memory.recalled_size) == (1, 5)
  np.testing.assert_allclose(recalled[0], [np.log(2.5), 1.0, 1.0, 0.3, 0.0], atol=1e-5)
  ring = memory.init()
  assert not memory.recalled(memory.read(ring, key)).any()


def test_empty_memory_is_read_as_finite_zeros():
  recall = jax.jit(MEMORY.read)(MEMORY.init(), MEMORY.key(observations(3)))
  np.testing.assert_array_equal(MEMORY.recalled(recall), np.zeros((3, MEMORY.recalled_size)))
  assert not MEMORY.renewed(recall).any()


def test_step_recalls_nothing_that_its_policy_could_not_know():
  x = observations(1)
  key = MEMORY.key(x)
  ring = MEMORY.write(MEMORY.init(), offer(key, [1], [2.0]), no_reads(), jnp.int32(6))
  evidence = [MEMORY.read(ring, key, jnp.array([v])).evidence[0, 1] for v in (6, 7)]
  np.testing.assert_allclose(evidence, [0.0, 1.0], rtol=1e-5)
  np.testing.assert_allclose(MEMORY.read(ring, key).evidence[0, 1], 1.0, rtol=1e-5)


def test_ring_keeps_each_value_with_its_key_beyond_its_size():
  count = SIZE + 3
  x = observations(count)
  returns = np.arange(1.0, count + 1)
  ring = filled(x, np.arange(count) % 3, returns)
  recall = MEMORY.read(ring, MEMORY.key(x))
  own = np.asarray(recall.value)[np.arange(count), np.arange(count) % 3]
  np.testing.assert_allclose(own[3:], returns[3:], rtol=0.02)
  assert np.asarray(recall.similarity)[:3].max() < 0.95  # the oldest are gone


def test_least_recently_read_entries_are_replaced():
  x = observations(SIZE + 1)
  ring = filled(x[:SIZE], np.zeros(SIZE, int), np.ones(SIZE))
  renewed = MEMORY.renewed(MEMORY.read(ring, MEMORY.key(x[:1])))
  assert renewed.sum() == 1
  ring = MEMORY.write(ring, offer(MEMORY.key(x[SIZE:]), [0], [1.0]), renewed, jnp.int32(SIZE))
  similarity = MEMORY.read(ring, MEMORY.key(x)).similarity
  kept = np.asarray(similarity) > 0.999
  assert kept[0] and not kept[1] and kept[2:].all()


def test_entries_expire_unless_they_are_read():
  x = observations(2)
  key = MEMORY.key(x)
  ring = MEMORY.write(MEMORY.init(), offer(key, [0, 1], [1.0, 2.0]), no_reads(), jnp.int32(0))
  nothing = offer(key[:0], [], [])
  read = MEMORY.renewed(MEMORY.read(ring, key[:1]))
  ring = MEMORY.write(ring, nothing, read, jnp.int32(TTL))
  evidence = MEMORY.read(ring, key).evidence
  assert evidence[0, 0] > 0.99 and evidence[1, 1] > 0.99  # just in time
  ring = MEMORY.write(ring, nothing, no_reads(), jnp.int32(TTL + 1))
  recall = MEMORY.read(ring, key)
  np.testing.assert_allclose(recall.evidence[0, 0], 1.0, rtol=1e-5)
  assert recall.evidence[1, 1] < 0.1
  ring = MEMORY.write(ring, nothing, no_reads(), jnp.int32(2 * TTL + 1))
  np.testing.assert_array_equal(MEMORY.recalled(MEMORY.read(ring, key)), 0.0)


def test_most_surprising_steps_are_written_and_dull_ones_are_not():
  key = MEMORY.key(observations(10))
  surprise = np.array([0.05, 0.5, 0.4, 0.1, 0.9, 0.0, 0.3, 0.2, 0.09, 0.8])
  each = offer(key, np.zeros(10, int), np.arange(10.0), surprise, size=10)
  ring = MEMORY.write(MEMORY.init(), each, no_reads(), jnp.int32(0))
  assert int((ring['written'] == 1).sum()) == 6
  found = np.asarray(MEMORY.read(ring, key).similarity) > 0.999
  np.testing.assert_array_equal(found, surprise > memory_lib.LEAST_SURPRISE)


def test_known_returns_are_no_surprise():
  x = observations(2)
  ring = filled(x[:1], [1], [3.0])
  recall = MEMORY.read(ring, MEMORY.key(x[[0, 0, 1]]))
  action = jax.nn.one_hot(jnp.array([1, 0, 1]), 3)
  expected = MEMORY.expected(recall, action, jnp.array([0.5, 0.5, 0.5]))
  np.testing.assert_allclose(expected, [3.0, 0.5, 0.5], rtol=1e-4)


@pytest.mark.parametrize('num_devices', [1, 8])
def test_eight_devices_write_the_ring_of_one(num_devices):
  """Each offers its most surprising steps; some are equally surprising."""
  rng = np.random.default_rng(0)
  count = 128
  keys = MEMORY.key(observations(count))
  surprise = rng.integers(0, 40, count) / 20
  steps = offer(keys, rng.integers(0, 3, count), rng.normal(size=count), surprise, size=count)
  ring = MEMORY.init()

  def write(ring, steps):
    best = memory_lib.most_surprising(steps)
    everyone = jax.tree.map(
      lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.all_gather(best, 'devices')
    )
    return MEMORY.write(ring, everyone, no_reads(), jnp.int32(0))

  mapped = jax.pmap(
    write, axis_name='devices', in_axes=(None, 0), devices=jax.local_devices()[:num_devices]
  )
  split = jax.tree.map(lambda x: x.reshape(num_devices, -1, *x.shape[1:]), steps)
  found = mapped(ring, split)
  alone = jax.jit(functools.partial(MEMORY.write, update=jnp.int32(0)))(
    ring, memory_lib.most_surprising(steps), no_reads()
  )
  assert int((alone['written'] == 1).sum()) == memory_lib.MOST_WRITTEN
  for device in range(num_devices):
    jax.tree.map(lambda one, all_: np.testing.assert_array_equal(all_[device], one), alone, found)  # noqa: B023
