"""Replay in device memory: a ring that all strata share."""

import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.replay import buffer as buffer_lib
from hephaestus.replay import tables

CAPACITY, COUNT = 10, 4


def sequences(first, count=COUNT):
  """`count` sequences with the identities from `first` on."""
  identity = np.arange(first, first + count, dtype=np.int32)
  noise = np.repeat(identity, 32).reshape(count, 4, 8).astype(np.float32)
  steps = np.repeat(identity, 4).reshape(count, 4)
  return {
    'steps': (steps, noise), 'identity': identity, 'empty': np.zeros((count, 0), np.float32)
  }  # fmt: skip


@pytest.fixture
def filled_with(schema):
  """A buffer to which so many sequences were added, four at a time."""
  schema = schema | {'steps': tuple(schema['steps'])}

  def fill(count, capacity=CAPACITY):
    buffer = buffer_lib.init(schema, capacity)
    for first in range(0, count, COUNT):
      buffer = jax.jit(buffer_lib.add)(buffer, sequences(first))
    return buffer

  return fill


@pytest.mark.parametrize(
  ('count', 'identities'),
  [(4, [0, 1, 2, 3, 0, 0, 0, 0, 0, 0]), (12, [10, 11, 2, 3, 4, 5, 6, 7, 8, 9])],
)
def test_newest_sequences_replace_the_oldest(filled_with, count, identities):
  buffer = filled_with(count)
  assert buffer.inserted == count
  np.testing.assert_array_equal(buffer.storage['identity'], identities)
  np.testing.assert_array_equal(buffer.storage['steps'][0][:, 1], identities)


@pytest.mark.parametrize(
  ('inserted', 'size', 'slots'), [(0, 3, []), (4, 8, [0, 1, 2, 3]), (12, 3, [9, 0, 1]), (12, 99, [2, 3, 4, 5, 6, 7, 8, 9, 0, 1])]
)  # fmt: skip
def test_slots_of_the_newest_sequences_begin_with_the_oldest(inserted, size, slots):
  assert buffer_lib.newest(inserted, CAPACITY, size).tolist() == slots


def test_stratum_is_a_uniform_sample_of_its_newest_sequences(filled_with):
  sizes = jnp.tile(jnp.array([3, 8]), 2000)
  batch = jax.jit(buffer_lib.sample)(filled_with(12), jax.random.key(0), sizes)
  assert batch['steps'][1].shape == (4000, 4, 8)
  np.testing.assert_array_equal(batch['identity'], batch['steps'][1][:, 0, 0])
  for stratum, newest in enumerate([range(9, 12), range(4, 12)]):
    found, counts = np.unique(batch['identity'][stratum::2], return_counts=True)
    assert list(found) == list(newest)
    expected = 2000 / len(newest)
    assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_sample_of_a_part_full_buffer_is_of_what_was_added(filled_with):
  batch = buffer_lib.sample(filled_with(4), jax.random.key(1), jnp.full(500, 8))
  assert set(np.asarray(batch['identity'])) == {0, 1, 2, 3}


@pytest.mark.parametrize(('count', 'capacity'), [(0, 8), (12, 8), (4, 16)])
@pytest.mark.parametrize('num_devices', [1, 2])
def test_gathered_buffer_can_be_scattered(filled_with, count, capacity, num_devices):
  saved = buffer_lib.gather([filled_with(count, capacity=8)])
  assert len(saved.storage['identity']) == min(count, 8)
  parts = buffer_lib.scatter(saved, capacity, num_devices)
  each = [
    jax.jit(buffer_lib.pad, static_argnums=1)(part, capacity // num_devices)
    for part in (jax.tree.map(lambda x, d=d: x[d], parts) for d in range(num_devices))
  ]
  assert all(part.storage['identity'].shape == (capacity // num_devices,) for part in each)
  jax.tree.map(np.testing.assert_array_equal, buffer_lib.gather(each), saved)
  if count:
    newest = [buffer_lib.sample(part, jax.random.key(0), jnp.array([1])) for part in each]
    oldest_of_newest = count - num_devices
    assert sorted(int(x['identity'][0]) for x in newest) == list(range(oldest_of_newest, count))


def test_smaller_buffer_keeps_the_newest(filled_with):
  saved = buffer_lib.gather([filled_with(12)])
  parts = buffer_lib.scatter(saved, 4, 1)
  np.testing.assert_array_equal(parts.storage['identity'], [[8, 9, 10, 11]])


def test_buffer_that_grows_after_dropping_sequences_has_no_empty_ones(filled_with):
  saved = buffer_lib.gather([filled_with(12, capacity=8)])
  part = jax.tree.map(lambda x: x[0], buffer_lib.scatter(saved, 16, 1))
  part = buffer_lib.pad(part, 16)
  sample = lambda size: buffer_lib.sample(part, jax.random.key(0), jnp.full(500, size))['identity']
  assert set(np.asarray(sample(1))) == {11}
  assert set(np.asarray(sample(16))) == set(range(4, 12))


def test_batch_mixes_strata_in_the_order_of_the_tables():
  config = tables.ReplayConfig(
    strata=(
      tables.Stratum(name='frontier', max_size=32, share=0.25),
      tables.Stratum(name='episodic', max_size=64, share=0.75),
    ),
    replay_ratio=1.5,
  )
  np.testing.assert_array_equal(buffer_lib.batch_sizes(config, 8), [64, 32, 64, 64, 64, 32, 64, 64])
  assert buffer_lib.updates_per_sequence(config, 8) == fractions.Fraction(3, 16)


def test_saved_buffer_is_inspected_like_tables():
  config = tables.ReplayConfig(
    strata=(
      tables.Stratum(name='frontier', max_size=2, share=0.25),
      tables.Stratum(name='episodic', max_size=64, share=0.75),
    ),
    warm_up=2,
  )
  versions = np.array([4, 5, 2, 3])  # six were added to four slots
  saved = buffer_lib.Saved(config, 6, versions, learner_step=10, batch_size=8)
  report = saved.poll()
  frontier, episodic = report['tables']['frontier'], report['tables']['episodic']
  assert (frontier['size'], frontier['sampled'], episodic['size']) == (2, 20, 4)
  assert report['ages']['frontier']['highest'] == 6 and report['ages']['episodic']['highest'] == 8
  assert report['replay_ratio'] == {'configured': 32.0, 'achieved': 80 / (6 - 2), 'recent': None}
