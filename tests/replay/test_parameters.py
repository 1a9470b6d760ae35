import time

import jax
import ml_dtypes
import numpy as np
import pytest
import reverb

from replay import parameters

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


def test_a_snapshot_comes_back_once(address):
  publisher = parameters.Publisher(address, SCHEMA)
  source = parameters.Source(address, SCHEMA)
  assert source.newest() is None
  for version in (3, 5):
    assert publisher.publish(make_snapshot(version))
    got = fetch(source)
    assert got[:3] == (version, 10 * version, False)
    jax.tree_util.tree_map(np.testing.assert_array_equal, got.params, make_snapshot(version).params)
    dtypes = jax.tree_util.tree_map(lambda leaf: leaf.dtype, got.params)
    assert dtypes == jax.tree_util.tree_map(lambda leaf: leaf.dtype, SCHEMA)
    assert source.newest() is None


def test_only_the_last_snapshot_is_kept(address):
  publisher = parameters.Publisher(address, SCHEMA)
  for version in range(1, 6):
    publisher.publish(make_snapshot(version))
  assert fetch(parameters.Source(address, SCHEMA)).version == 5


def test_the_final_word_and_a_step_back_are_news(address):
  publisher = parameters.Publisher(address, SCHEMA)
  source = parameters.Source(address, SCHEMA)
  publisher.publish(make_snapshot(5))
  assert fetch(source).ended_launch == 0
  publisher.publish(make_snapshot(5, ended_launch=7))
  assert fetch(source).ended_launch == 7
  publisher.publish(make_snapshot(5, ended_launch=7))
  assert source.newest() is None
  publisher.publish(make_snapshot(2))
  assert fetch(source).version == 2


def test_forged_parameters_are_ignored_with_a_reason(address, caplog):
  source = parameters.Source(address, SCHEMA)
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

  for numbers in ((1 << 31, 0, 0), (-1, 0, 0), (1, -1, 0)):
    publisher.publish(make_snapshot(2)._replace(version=numbers[0], environment_step=numbers[1]))
    assert source.newest() is None and f'launch are {[*numbers]}' in caplog.text

  publisher.publish(make_snapshot(3))
  assert fetch(source).version == 3


def test_a_dead_server_costs_bounded_time():
  publisher = parameters.Publisher('localhost:1', SCHEMA, timeout_seconds=1.0)
  source = parameters.Source('localhost:1', SCHEMA)
  start = time.monotonic()
  assert not publisher.publish(make_snapshot(1))
  assert source.newest(timeout_seconds=1.0) is None
  assert time.monotonic() - start < 4.0
  assert not publisher.server_alive
