import collections
import os

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import reverb

from hephaestus.replay import checkpoint, columns, reader, tables, writer


def never():
  return False


def read(address, config, schema, batches, **options):
  source = reader.Reader(address, config.strata, schema, **{'batch_size': 16, **options})
  try:
    got = [source.get(20.0) for _ in range(batches)]
  finally:
    source.close()
  assert all(batch is not None for batch in got)
  return got


def test_batches_have_the_shares_and_frontier_holds_the_newest(
  serve, unlimited, schema, make_sequences
):
  share = 0.25
  # The frontier holds the last 20 of 200 sequences, and the other stratum the first ones, because an
  # earlier writer, with only that stratum, has filled it.
  config = unlimited(frontier=20, episodic=1000, share=share)
  frontier, episodic = config.strata
  _, address = serve(config)
  for strata, start, stop in (((episodic,), 0, 100), ((frontier,), 100, 200)):
    entry = writer.Writer(address, strata, schema)
    entry.write(make_sequences(start, stop), never)
    assert entry.sequences_written == 100
    entry.close()
  seen: collections.Counter[int] = collections.Counter()
  for batch in read(address, config, schema, 30):
    from_frontier = batch['identity'] >= 100
    assert from_frontier.sum() == 16 * share
    np.testing.assert_array_equal(from_frontier.reshape(4, 4).sum(1), np.full(4, 4 * share))
    assert (batch['identity'][from_frontier] >= 180).all()
    seen.update(batch['identity'].tolist())
  assert len([identity for identity in seen if identity < 100]) > 60


def test_sequences_round_trip_unchanged(serve, unlimited):
  dtypes = [bool, np.uint8, np.int8, np.uint16, np.int64, np.uint32, np.float16, np.float64]
  values = {
    'plain': {
      np.dtype(dtype).name: np.arange(24).reshape(2, 3, 4).astype(dtype) for dtype in dtypes
    },
    'half': np.random.default_rng(0).normal(size=(2, 5)).astype(ml_dtypes.bfloat16),
    'scalar': np.array([7, 9], np.int32),
    'empty': np.zeros((2, 0, 3), np.float32),
    'odd': (np.array([[3.4e38, 3.4e38], [-0.0, 1e-45]], np.float32),),
  }
  schema = jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), values)
  config = unlimited()
  _, address = serve(config, schema=schema)
  entry = writer.Writer(address, config.strata, schema)
  entry.write(values, never)
  seen = set()
  for batch in read(address, config, schema, 2):
    chex.assert_trees_all_equal_structs(batch, values)
    for row, scalar in enumerate(batch['scalar'].tolist()):
      index = [7, 9].index(scalar)
      seen.add(index)
      for out, into in zip(
        jax.tree_util.tree_leaves(batch), jax.tree_util.tree_leaves(values), strict=True
      ):
        assert out.dtype == into.dtype
        assert out[row].shape == into[index].shape and out[row].tobytes() == into[index].tobytes()
  assert seen == {0, 1}


def test_two_strata_store_the_data_once(serve, tmp_path, unlimited, make_sequences):
  schema = {'noise': jax.ShapeDtypeStruct((2000,), np.float32)}
  noise = {'noise': np.random.default_rng(0).normal(size=(50, 2000)).astype(np.float32)}
  both = unlimited()
  one = tables.ReplayConfig(strata=(tables.Stratum(name='episodic', max_size=1000, share=1.0),))
  sizes = []
  for config in (one, both):
    directory = str(tmp_path / str(len(config.strata)))
    server, address = serve(config, schema=schema, directory=directory)
    writer.Writer(address, config.strata, schema).write(noise, never)
    path = checkpoint.save(reverb.Client(address), directory)
    sizes.append(os.path.getsize(os.path.join(path, 'chunks.tfrecord')))
    server.stop()
  assert sizes[0] == pytest.approx(noise['noise'].nbytes, rel=0.2)
  assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_batch_is_not_overwritten_by_later_ones(serve, unlimited, schema, make_sequences):
  config = unlimited()
  _, address = serve(config)
  writer.Writer(address, config.strata, schema).write(make_sequences(0, 40), never)
  batches = read(address, config, schema, 20)
  for batch in batches:
    np.testing.assert_array_equal(
      batch['steps'].identity, np.repeat(batch['identity'][:, None], 4, 1)
    )
  addresses = {batch['steps'].noise.__array_interface__['data'][0] for batch in batches}
  assert len(addresses) == len(batches)


def test_empty_table_starves_reader_and_close_does_not_hang(serve, unlimited, schema):
  config = unlimited()
  _, address = serve(config)
  source = reader.Reader(address, config.strata, schema, batch_size=4)
  assert source.get(0.2) is None
  source.close()


def test_other_schema_is_rejected_by_writer_and_reader(serve, unlimited, schema):
  config = unlimited()
  _, address = serve(config)
  other = {'identity': jax.ShapeDtypeStruct((2,), np.int32)}
  with pytest.raises(ValueError, match='empty replay directory'):
    writer.Writer(address, config.strata, other).write(
      {'identity': np.zeros((1, 2), np.int32)}, never
    )
  source = reader.Reader(address, config.strata, other, batch_size=4)
  for _ in range(2):
    with pytest.raises(ValueError, match='empty replay directory'):
      source.get(10.0)
  source.close()


def test_malformed_sequences_are_rejected_and_reading_continues(
  serve, unlimited, schema, make_sequences, caplog
):
  config = unlimited()
  _, address = serve(config)
  writer.Writer(address, config.strata, schema).write(make_sequences(0, 16), never)
  names = columns.Columns(schema).names
  sound = [np.asarray(leaf)[0] for leaf in jax.tree_util.tree_leaves(make_sequences(0, 1))]
  for step in (
    {'anything': np.zeros(3)},
    dict(zip(names, [np.asarray(['__reduce__'])] * len(names), strict=True)),
    dict(zip(names, [np.zeros((2, *leaf.shape), leaf.dtype) for leaf in sound], strict=True)),
    dict(zip(names, [leaf.astype(np.float64) for leaf in sound], strict=True)),
  ):
    forger = reverb.Client(address).trajectory_writer(1, validate_items=False)
    forger.append(step)
    for name in ('frontier', 'episodic'):
      item = {column: forger.history[column][-1:] for column in step}
      forger.create_item(name, 1.0, item)
    forger.flush()
  source = reader.Reader(address, config.strata, schema, batch_size=16)
  # With 20 items of each stratum, the probability that 160 samples have none of 8 is 1e-15.
  batches = [source.get(20.0) for _ in range(10)]
  source.close()
  for batch in batches:
    np.testing.assert_array_equal(
      batch['steps'].identity, np.repeat(batch['identity'][:, None], 4, 1)
    )
    assert (batch['identity'] < 16).all()
  assert source.rejected > 0
  (record,) = [record for record in caplog.records if 'rejecting' in record.message]
  assert 'the schema' in record.message


def test_sequences_out_of_range_are_rejected_and_reading_continues(
  serve, unlimited, schema, make_sequences, caplog
):
  config, schema = unlimited(), schema | {'version': schema['identity']}
  _, address = serve(config, schema=schema)
  sequences = make_sequences(0, 20)
  sequences['version'] = np.zeros(20, np.int32)
  sequences['steps'].noise[16, 3, 7] = np.nan
  sequences['steps'].noise[17, 0, 0] = -np.inf
  sequences['steps'].noise[18, 0] = np.finfo(np.float32).max  # each is finite, but not their sum
  sequences['version'][14:16] = np.iinfo(np.int32).max, -1
  writer.Writer(address, config.strata, schema).write(sequences, never)
  source = reader.Reader(address, config.strata, schema, batch_size=16)
  identities = np.concatenate([source.get(20.0)['identity'] for _ in range(10)])
  source.close()
  assert 18 in identities and not {14, 15, 16, 17} & set(identities.tolist())
  assert source.rejected > 0
  (record,) = [record for record in caplog.records if 'rejecting' in record.message]
  assert 'steps/noise is not finite' in record.message or 'out of the range of a' in record.message


def queue(max_size):
  stratum = tables.Stratum(name='on_policy', max_size=max_size, share=1.0, read_once=True)
  return tables.ReplayConfig(strata=(stratum,), replay_ratio=1.0, warm_up=1)


def test_queue_returns_each_sequence_once_and_in_order(serve, schema, make_sequences):
  config = queue(64)
  _, address = serve(config)
  writer.Writer(address, config.strata, schema).write(make_sequences(0, 64), never)
  identities = np.concatenate([b['identity'] for b in read(address, config, schema, 4)])
  np.testing.assert_array_equal(identities, np.arange(64))


def test_unread_sequences_stay_in_the_server_without_prefetch(serve, schema, make_sequences):
  config = queue(16)
  _, address = serve(config)
  entry = writer.Writer(address, config.strata, schema)
  source = reader.Reader(address, config.strata, schema, batch_size=16, max_in_flight=1, prefetch=0)
  assert source.get(0.05) is None  # a time-out begins no second batch
  entry.write(make_sequences(0, 16), never)
  batches = [source.get(20.0)]
  entry.write(make_sequences(16, 32), never)
  entry.write(make_sequences(32, 48), lambda: True)  # gives up once the limiter blocks it
  assert entry.sequences_written == 32
  batches += [source.get(20.0), source.get(20.0)]
  source.close()
  identities = np.concatenate([batch['identity'] for batch in batches])
  np.testing.assert_array_equal(identities, np.arange(48))


def test_batches_hold_only_sequences_for_which_keep_is_true(serve, schema, make_sequences):
  config = queue(64)
  _, address = serve(config)
  writer.Writer(address, config.strata, schema).write(make_sequences(0, 64), never)
  asked = []

  def keep(sequence):
    asked.append(int(sequence['identity'][0]))
    return asked[-1] % 3 == 0

  batches = read(address, config, schema, 2, batch_size=8, prefetch=0, keep=keep)
  identities = np.concatenate([batch['identity'] for batch in batches])
  np.testing.assert_array_equal(identities, np.arange(0, 48, 3))
  assert asked == list(range(46))
