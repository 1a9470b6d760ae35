import contextlib

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
import reverb
from hypothesis import strategies

from hephaestus.replay import columns, parameters

SCHEMA = {
  'dense': {
    'kernel': jax.ShapeDtypeStruct((3, 2), np.float32),
    'bias': jax.ShapeDtypeStruct((2,), ml_dtypes.bfloat16),
  },
  'scale': jax.ShapeDtypeStruct((), np.float32),
}


def make_snapshot(version, *, ended_launch=0, bias=0.5):
  params = {
    'dense': {
      'kernel': np.full((3, 2), version, np.float32),
      'bias': np.full((2,), bias, ml_dtypes.bfloat16),
    },
    'scale': np.float32(version / 3),
  }
  return parameters.Snapshot(
    version=version, environment_step=10 * version, ended_launch=ended_launch, params=params
  )


def fetch(source) -> parameters.Snapshot:
  snapshot = source.newest()
  assert snapshot is not None
  return snapshot


@pytest.fixture
def address(serve, unlimited):
  return serve(unlimited())[1]


def test_snapshot_is_returned_once(address):
  publisher = parameters.Publisher(address, SCHEMA)
  source = parameters.Subscription(address, SCHEMA)
  assert source.newest() is None
  for version in (3, 5):
    assert publisher.publish(make_snapshot(version))
    got = fetch(source)
    assert got[:3] == (version, 10 * version, False)
    jax.tree_util.tree_map(np.testing.assert_array_equal, got.params, make_snapshot(version).params)
    dtypes = jax.tree_util.tree_map(lambda leaf: leaf.dtype, got.params)
    assert dtypes == jax.tree_util.tree_map(lambda leaf: leaf.dtype, SCHEMA)
    assert source.newest() is None


def test_environment_step_never_decreases(address):
  publisher = parameters.Publisher(address, SCHEMA)
  source = parameters.Subscription(address, SCHEMA, least_step=60)
  assert source.environment_step == 60
  steps = []
  for version in (8, 3, 9):  # the second is what a restored server holds
    publisher.publish(make_snapshot(version))
    steps.append((version, fetch(source).environment_step))
  assert steps == [(8, 80), (3, 80), (9, 90)]


def test_final_and_older_snapshots_count_as_new(address):
  publisher = parameters.Publisher(address, SCHEMA)
  source = parameters.Subscription(address, SCHEMA)
  publisher.publish(make_snapshot(5))
  assert fetch(source).ended_launch == 0
  publisher.publish(make_snapshot(5, ended_launch=7))
  assert fetch(source).ended_launch == 7
  publisher.publish(make_snapshot(5, ended_launch=7))
  assert source.newest() is None
  publisher.publish(make_snapshot(2))
  assert fetch(source).version == 2


def test_invalid_parameters_are_ignored_and_logged(address, caplog):
  source = parameters.Subscription(address, SCHEMA)
  other = {**SCHEMA, 'scale': jax.ShapeDtypeStruct((1,), np.float32)}
  snapshot = make_snapshot(1)
  snapshot = snapshot._replace(params={**snapshot.params, 'scale': np.ones(1, np.float32)})
  parameters.Publisher(address, other).publish(snapshot)
  assert source.newest() is None and 'another schema' in caplog.text

  publisher = parameters.Publisher(address, SCHEMA)
  publisher.publish(make_snapshot(2, bias=np.nan))
  assert source.newest() is None and 'dense/bias is not finite' in caplog.text

  reverb.Client(address).insert({'anything': np.zeros(3)}, {'params': 1.0})
  assert source.newest() is None and '1 columns' in caplog.text

  forged = parameters.Publisher(address, other)
  forged._columns.digest = publisher._columns.digest
  forged.publish(snapshot)
  assert source.newest() is None and 'scale is float32[1, 1]' in caplog.text

  for numbers in ((1 << 30, 0, 0), (-1, 0, 0), (1, -1, 0), (1, 1 << 62, 0), (1, (1 << 40) + 1, 0)):
    publisher.publish(make_snapshot(2)._replace(version=numbers[0], environment_step=numbers[1]))
    assert source.newest() is None and f'launch are {[*numbers]}' in caplog.text

  publisher.publish(make_snapshot(3))
  assert fetch(source).version == 3


DTYPES = [np.int64, np.uint8, np.uint16, np.float32, np.float64, bool, object, 'S4', 'U2']


def arrays():
  """Small arrays of any kind that a server may return."""
  return strategies.tuples(
    strategies.sampled_from(DTYPES),
    strategies.lists(strategies.integers(0, 4), max_size=4),
    strategies.sampled_from([0, 1, -1, 1 << 62, 0.5, np.nan, np.inf, b'\x80\x04cos']),
  ).map(lambda drawn: forged(*drawn))


def forged(dtype, shape, value):
  array = np.zeros(shape, dtype)
  with contextlib.suppress(OverflowError, ValueError, TypeError):
    array[...] = value
  return array


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(data=strategies.data())
def test_fetched_columns_are_valid_or_have_a_fault(data):
  schema = columns.Columns(SCHEMA)
  sound = [
    np.array([[3, 30, 0]], np.int64),
    schema.digest[None],
    *(leaf[None] for leaf in schema.flatten(make_snapshot(3).params, batched=False)),
  ]
  assert parameters.fault(schema, sound) == ''
  given = list(sound)
  for _ in range(data.draw(strategies.integers(1, 3))):
    place = data.draw(strategies.integers(0, len(given)))
    if place == len(given) or data.draw(strategies.booleans()):
      given[place : place + 1] = [data.draw(arrays())]
    else:
      del given[place]
    if not given:
      break
  if parameters.fault(schema, given) == '':
    assert [(array.shape, array.dtype) for array in given] == [
      (array.shape, array.dtype) for array in sound
    ]
    assert all(np.isfinite(array.view(np.float32)).all() for array in (given[3], given[4]))
