"""Episodic memory: keys, reads, writes, expiry, and the ring on several devices."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.agents import distributions
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import memory as memory_lib
from hephaestus.agents.dreamer import numbers as numbers_lib
from hephaestus.agents.dreamer import rssm, sockets

SIZE, TTL = 16, memory_lib.TTL
BITS = specs.BoundedArray((24,), bool, False, True)


def make_memory(spec=BITS, action_spec=None, size=SIZE):
  codec = observation_lib.Codec(spec, cnn=True)
  actions = distributions.Actions(action_spec or specs.DiscreteArray(3))
  numbers = numbers_lib.Numbers(codec.flat_spec)
  return memory_lib.EpisodicMemory(
    size, actions, numbers, codec, cognition_config.CognitionConfig()
  )


MEMORY = make_memory()


MANY = 32
"""Rows of the arrays with which functions are compiled; smaller arrays are padded with zeros."""


def filled_up(x, rows=MANY):
  x = np.asarray(x)
  return np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)])


compiled = types.SimpleNamespace(
  key=jax.jit(MEMORY.key),
  read=jax.jit(MEMORY.read),
  write=jax.jit(MEMORY.write),
  recalled=jax.jit(MEMORY.recalled),
)


def key_of(seen):
  return np.asarray(compiled.key(filled_up(seen)))[: len(seen)]


def read(ring, key, version=None):
  """`EpisodicMemory.read` of N keys; without a version, of parameters newer than all entries."""
  version = np.full(len(key), 10**6) if version is None else version
  found = compiled.read(ring, filled_up(key), filled_up(version).astype(np.int32))
  return jax.tree.map(lambda x: np.asarray(x)[: len(key)], found)


def recalled(recall):
  found = compiled.recalled(jax.tree.map(filled_up, recall))
  return np.asarray(found)[: len(recall.similarity)]


def write(ring, offer, renewed, update):
  return compiled.write(ring, offer, renewed, np.int32(update))


def observations(count, seed=0):
  return np.random.default_rng(seed).integers(0, 2, (count, 24)).astype(bool)


def offer(keys, actions, returns, surprise=1.0, size=16):
  """An offer of some steps, and of others without surprise."""
  action = np.eye(3, dtype=np.float32)[np.asarray(actions, int)].reshape(-1, 3)
  surprise = np.broadcast_to(np.float32(surprise), len(keys))
  each = (np.asarray(keys), action, np.float32(returns), surprise)
  return memory_lib.Offer(*(filled_up(x, size) for x in each), start={})


def no_reads(memory=MEMORY):
  return np.zeros(memory.size, bool)


def empty():
  return jax.device_get(MEMORY.init())


def filled(seen, actions, returns):
  """A ring with steps written one update after another, from update 0 on."""
  ring, keys = empty(), key_of(seen)
  for update, (key, action, return_) in enumerate(zip(keys, actions, returns, strict=True)):
    ring = write(ring, offer(key[None], [action], [return_]), no_reads(), update)
  return jax.device_get(ring)


def test_keys_have_length_one_and_tell_names_apart():
  keys = np.asarray(compiled.key(observations(1024)))
  np.testing.assert_allclose(np.linalg.norm(keys, axis=-1), 1.0, rtol=1e-5)
  similarity = keys @ keys.T
  np.fill_diagonal(similarity, 0)
  assert np.exp(memory_lib.SHARPNESS * (similarity.max() - 1)) < 0.1


@pytest.mark.parametrize(
  'spec', [specs.BoundedArray((9, 12, 20), np.uint8, 0, 255), specs.Array((16, 8, 2), np.float32)]
)
def test_images_are_pooled_to_eight_by_eight(spec):
  memory = make_memory({'image': spec})
  image = np.random.default_rng(0).uniform(0, 255, (2, *spec.shape)).astype(spec.dtype)
  keys = np.asarray(jax.jit(memory.key)({'image': image}))
  assert keys.shape == (2, memory_lib.KEY_SIZE)
  assert memory._projection.shape[0] == 64 * spec.shape[-1]
  assert keys[0] @ keys[1] < 0.999


def test_recall_weighs_returns_of_each_action_by_similarity():
  x = observations(2)
  ring = filled(x[[0, 0, 0, 1]], [0, 0, 2, 1], [1.0, 3.0, -5.0, 7.0])
  recall = read(ring, key_of(x[:1]))
  np.testing.assert_allclose(recall.value[0, [0, 2]], [2.0, -5.0], rtol=1e-4)
  np.testing.assert_allclose(recall.evidence[0, [0, 2]], 1.0, rtol=1e-4)
  assert recall.evidence[0, 1] < 0.1  # the other observation's
  np.testing.assert_allclose(recall.similarity, 1.0, rtol=1e-5)
  expected = np.concatenate([[np.log(3.0)], [-np.log(6.0)]])
  np.testing.assert_allclose(recalled(recall)[0, [0, 2]], expected, rtol=1e-3)


def test_nearest_entries_are_in_order_with_what_was_done_and_returned():
  seen = observations(5)
  keys = key_of(seen)
  explain = jax.jit(MEMORY.explain)
  ring = filled(seen, [0, 1, 2, 1, 0], [0.0, 1.0, 2.0, 3.0, 4.0])
  found = jax.device_get(explain(ring, read(ring, keys[2:3])))
  names = 'weight', 'similarity', 'action', 'return'
  weight, similarity, action, return_ = (found[f'nearest_{name}'][0] for name in names)
  assert weight.shape == (3,) and return_[0] == 2.0 and action[0, 2] == 1
  np.testing.assert_allclose(similarity[0], 1.0, atol=1e-5)
  every = np.sort(keys @ keys[2])[::-1]
  near = weight > 1e-20
  np.testing.assert_allclose(similarity[near], every[:3][near], atol=0.02)
  assert not np.any(explain(empty(), read(empty(), keys[2:3]))['nearest_weight'])


def test_continuous_actions_are_recalled_as_their_mean():
  memory = make_memory(action_spec=specs.BoundedArray((2,), np.float32, -1, 1))
  key = key_of(observations(1))
  each = memory_lib.Offer(
    *(
      filled_up(np.float32(x), 8)
      for x in (np.repeat(key, 2, 0), [[0.5, -1.0], [0.1, 1.0]], [1.0, 2.0], np.ones(2))
    ),
    start={},
  )

  @jax.jit
  def recall(key, each):
    empty = memory.init()
    ring = memory.write(empty, each, no_reads(memory), jnp.int32(0))
    return [memory.recalled(memory.read(ring, key)) for ring in (ring, empty)]

  found, of_nothing = recall(key, each)
  assert found.shape == (1, memory.width) == (1, 5)
  np.testing.assert_allclose(found[0], [np.log(2.5), 1.0, 1.0, 0.3, 0.0], atol=1e-5)
  assert not np.any(of_nothing)


def test_empty_memory_is_read_as_finite_zeros():
  recall = read(empty(), key_of(observations(3)))
  np.testing.assert_array_equal(recalled(recall), np.zeros((3, MEMORY.width)))
  assert not np.any(jax.jit(MEMORY.renewed)(recall))


def test_step_recalls_nothing_that_its_policy_could_not_know():
  key = key_of(observations(1))
  ring = write(empty(), offer(key, [1], [2.0]), no_reads(), 6)
  evidence = [read(ring, key, np.array([v])).evidence[0, 1] for v in (6, 7)]
  np.testing.assert_allclose(evidence, [0.0, 1.0], rtol=1e-5)
  of_all = jax.jit(lambda ring, key: MEMORY.read(ring, key).evidence)(ring, filled_up(key))
  np.testing.assert_allclose(of_all[0, 1], 1.0, rtol=1e-5)


def test_ring_keeps_each_value_with_its_key_beyond_its_size():
  count = SIZE + 3
  x = observations(count)
  returns = np.arange(1.0, count + 1)
  ring = filled(x, np.arange(count) % 3, returns)
  recall = read(ring, key_of(x))
  own = recall.value[np.arange(count), np.arange(count) % 3]
  np.testing.assert_allclose(own[3:], returns[3:], rtol=0.02)
  assert recall.similarity[:3].max() < 0.95  # the oldest are gone


def test_least_recently_read_entries_are_replaced():
  x = observations(SIZE + 1)
  keys = key_of(x)
  ring = filled(x[:SIZE], np.zeros(SIZE, int), np.ones(SIZE))
  recall = read(ring, keys[:1])
  renewed = np.asarray(jax.jit(MEMORY.renewed)(recall))
  assert renewed.sum() == 1
  ring = write(ring, offer(keys[SIZE:], [0], [1.0]), renewed, SIZE)
  kept = read(ring, keys).similarity > 0.999
  assert kept[0] and not kept[1] and kept[2:].all()


def test_entries_expire_unless_they_are_read():
  key = key_of(observations(2))
  ring = write(empty(), offer(key, [0, 1], [1.0, 2.0]), no_reads(), 0)
  nothing = offer(key[:0], [], [])
  renewed = jax.jit(MEMORY.renewed)(read(ring, key[:1]))
  ring = write(ring, nothing, renewed, TTL)
  evidence = read(ring, key).evidence
  assert evidence[0, 0] > 0.99 and evidence[1, 1] > 0.99  # just in time
  ring = write(ring, nothing, no_reads(), TTL + 1)
  recall = read(ring, key)
  np.testing.assert_allclose(recall.evidence[0, 0], 1.0, rtol=1e-5)
  assert recall.evidence[1, 1] < 0.1
  ring = write(ring, nothing, no_reads(), 2 * TTL + 1)
  np.testing.assert_array_equal(recalled(read(ring, key)), 0.0)


def test_most_surprising_steps_are_written_and_dull_ones_are_not():
  key = key_of(observations(10))
  surprise = np.array([0.05, 0.5, 0.4, 0.1, 0.9, 0.0, 0.3, 0.2, 0.09, 0.8])
  each = offer(key, np.zeros(10, int), np.arange(10.0), surprise)
  ring = write(empty(), each, no_reads(), 0)
  assert int((np.asarray(ring['written']) == 1).sum()) == 6
  found = read(ring, key).similarity > 0.999
  np.testing.assert_array_equal(found, surprise > memory_lib.LEAST_SURPRISE)


def test_known_returns_are_no_surprise():
  x = observations(2)
  ring = filled(x[:1], [1], [3.0])
  recall = read(ring, key_of(x[[0, 0, 1]]))
  action = np.eye(3, dtype=np.float32)[[1, 0, 1]]
  expected = jax.jit(MEMORY.expected)(recall, action, np.full(3, 0.5, np.float32))
  np.testing.assert_allclose(expected, [3.0, 0.5, 0.5], rtol=1e-4)


def test_eight_devices_write_the_ring_of_one():
  """Each offers its most surprising steps; some are equally surprising."""
  rng = np.random.default_rng(0)
  count, num_devices = 128, 8
  keys = np.asarray(compiled.key(observations(1024)))[:count]
  surprise = rng.integers(0, 40, count) / 20
  steps = offer(keys, rng.integers(0, 3, count), rng.normal(size=count), surprise, size=count)
  ring = empty()

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
  found = jax.device_get(mapped(ring, split))

  @jax.jit
  def one_device(ring, steps):
    return MEMORY.write(ring, memory_lib.most_surprising(steps), no_reads(), jnp.int32(0))

  local = jax.device_get(one_device(ring, steps))
  assert int((local['written'] == 1).sum()) == memory_lib.MOST_WRITTEN
  for device in range(num_devices):
    jax.tree.map(lambda one, all_: np.testing.assert_array_equal(all_[device], one), local, found)  # noqa: B023


# Latents at which dreams begin.

WITH_STARTS = dataclasses.replace(MEMORY, starts={'numbers': 1})


def ring_with_starts(written, stored):
  """A ring whose first entries were written and stored in some updates; others are empty."""
  ring = jax.device_get(WITH_STARTS.init())
  pad = lambda x: filled_up(np.int32(x), SIZE)
  return ring | {'written': pad(written), 'used': pad(written), 'stored': pad(stored)}


def test_stale_latents_and_empty_entries_seed_no_dream():
  """An entry that is read again stays for ever, but its latent is of the model of long ago."""
  now = 3 * TTL
  ring = ring_with_starts([1, 1, now - 9, now], [now - TTL + 1, now - TTL, now - 9, now])
  random = np.linspace(0, 1, 300, endpoint=False).astype(np.float32)
  seeds = jax.jit(WITH_STARTS.seeds)
  entry, is_any = jax.device_get(seeds(ring, random, np.int32(now)))
  assert is_any
  np.testing.assert_array_equal(np.bincount(entry, minlength=4), [100, 0, 100, 100])
  _, is_any = seeds(ring, random, np.int32(now + 2 * TTL))
  assert not is_any


def test_replayed_observation_renews_the_latent_of_its_entry():
  """The first such step that does not end an episode, on however many parts of a batch."""
  now, (num_steps, batch) = 99, (3, 4)
  ring = ring_with_starts([1] * 4, [10, 20, 30, 40])
  weight = np.zeros((num_steps, batch, SIZE), np.float32)
  last = np.zeros((num_steps, batch), bool)
  weight[2, 1, 0] = weight[0, 2, 0] = 1.0  # of two sequences
  weight[1, 3, 1], weight[1, 3, 2] = 1.0, 0.9  # another observation that is similar
  weight[2, 3, 3], last[2, 3] = 1.0, True
  numbers = np.arange(1.0, 13.0, dtype=np.float32).reshape(num_steps, batch, 1)
  parts = lambda x, count: np.stack(np.split(x, count, axis=1))

  def renewed(count):
    def one(ring, weight, numbers, last):
      recall = memory_lib.Recall(*[None] * 4, weight=weight)
      gather = lambda x: jax.lax.all_gather(x, 'parts')
      start = {'numbers': numbers}
      return WITH_STARTS.renew_starts(ring, recall, start, last, jnp.int32(now), gather)

    split = [parts(x, count) for x in (weight, numbers, last)]
    mapped = jax.vmap(one, in_axes=(None, 0, 0, 0), axis_name='parts')
    found = jax.device_get(jax.jit(mapped)(ring, *split))
    for part in range(1, count):
      jax.tree.map(lambda x: np.testing.assert_array_equal(x[part], x[0]), found)  # noqa: B023
    return jax.tree.map(lambda x: x[0], found)

  for count in (1, 4):
    found = renewed(count)
    np.testing.assert_array_equal(found['stored'][:4], [now + 1, now + 1, 30, 40])
    np.testing.assert_array_equal(found['start']['numbers'][:4, 0], [10, 8, 0, 0])


def test_update_renews_the_latent_of_an_entry_by_the_step_at_which_it_was_seen():
  """Also where a sequence ends with that step, from which no entry is written."""
  num_steps, batch, now = 3, 4, 99
  seen = observations(num_steps * batch).reshape(num_steps, batch, 24)
  numbers = np.arange(1.0, 13.0, dtype=np.float32).reshape(num_steps, batch, 1)
  zeros = np.zeros((num_steps, batch), np.float32)
  sequence = types.SimpleNamespace(
    observation=seen, action=zeros.astype(np.int32), reward=zeros, discount=zeros + 1,
    step_type=zeros + 1,
  )  # fmt: skip
  keys = key_of(seen.reshape(-1, 24)).reshape(num_steps, batch, -1)
  ring = ring_with_starts([1, 1], [10, 20]) | {'key': filled_up([keys[2, 1], keys[1, 3]], SIZE)}
  mean = lambda x: x
  parts = sockets.Batch(mean=mean, largest=mean, gather=lambda x: x[None])

  @jax.jit
  def updated(ring):
    latent = rssm.Latent(None, None, numbers)
    step = types.SimpleNamespace(latent=latent, previous=None)
    recall = WITH_STARTS.read(ring, keys)
    replayed = sockets.Replayed(sequence, step, zeros)
    return WITH_STARTS.updated(ring, recall, replayed, jnp.int32(now), parts)[0]

  found = jax.device_get(updated(ring))
  at = [np.flatnonzero((found['key'] == key).all(axis=1))[0] for key in (keys[2, 1], keys[1, 3])]
  np.testing.assert_array_equal(
    found['start']['numbers'][at, 0], [numbers[2, 1, 0], numbers[1, 3, 0]]
  )
  assert (found['stored'][at] == now + 1).all()
