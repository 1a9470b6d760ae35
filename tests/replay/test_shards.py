"""Several shards as one replay: sampled evenly, skipped when down, each sequence stored once."""

import itertools
import threading

import jax
import numpy as np
import polling
import portpicker
import pytest
import reverb

from hephaestus.replay import checkpoint, contents, parameters, reader, tables, writer

SCHEMA = {'identity': jax.ShapeDtypeStruct((), np.int32)}
CONFIG = tables.ReplayConfig(
  strata=(
    tables.Stratum(name='frontier', max_size=200, share=0.25),
    tables.Stratum(name='episodic', max_size=100_000, share=0.75),
  ),
  replay_ratio=8.0,
  warm_up=4,
)


def identities(start, stop):
  return {'identity': np.arange(start, stop, dtype=np.int32)}


def sampled(address):
  info = reverb.Client(address).server_info(timeout=10)['episodic']
  return info.rate_limiter_info.sample_stats.completed


def never():
  return False


def count_in(address, table='episodic'):
  return reverb.Client(address).server_info(timeout=10)[table].current_size


@pytest.fixture
def addresses(serve):
  return [serve(CONFIG, schema=SCHEMA, batch_size=16)[1] for _ in range(2)]


def test_writer_alternates_between_shards_and_stores_each_sequence_once(addresses):
  entry = writer.Writer(addresses, CONFIG.strata, SCHEMA)
  for start in range(0, 160, 16):
    entry.write(identities(start, start + 16), never)
  polling.until(lambda: [count_in(address) for address in addresses] == [80, 80], seconds=10)
  entry.write(identities(160, 160), never)
  entry.close()


def test_batches_sample_shards_evenly_and_hold_the_mixture(addresses):
  for index, address in enumerate(addresses):
    frontier, episodic = CONFIG.strata
    for stratum, first in ((frontier, 0), (episodic, 100)):
      entry = writer.Writer(address, (stratum,), SCHEMA)
      entry.write(identities(1000 * index + first, 1000 * index + first + 50), never)
      entry.close()
  source = reader.Reader(addresses, CONFIG.strata, SCHEMA, batch_size=16)
  num_even = 0  # in a row: on a busy machine a late shard may be missing from some batches
  for _ in range(2000):
    shard, place = np.divmod(source.get(20.0)['identity'], 1000)
    is_frontier = place < 100
    np.testing.assert_array_equal(is_frontier.reshape(4, 4).sum(1), np.ones(4))  # of 4 devices
    is_even = [(shard[part] == 0).sum() for part in (is_frontier, ~is_frontier)] == [2, 6]
    num_even = num_even + 1 if is_even else 0
    if num_even == 20:
      break
  else:
    pytest.fail('the shards never share 20 batches in a row evenly')
  source.close()


def test_reader_skips_an_empty_shard_until_it_has_sequences(addresses):
  entry = writer.Writer(addresses[0], CONFIG.strata, SCHEMA)
  entry.write(identities(0, 40), never)
  entry.close()
  source = reader.Reader(addresses, CONFIG.strata, SCHEMA, batch_size=16)
  assert all((source.get(20.0)['identity'] < 40).all() for _ in range(20))
  entry = writer.Writer(addresses[1], CONFIG.strata, SCHEMA)
  entry.write(identities(1000, 1040), never)
  entry.close()
  polling.until(lambda: 0 < (source.get(20.0)['identity'] >= 1000).sum() < 16, seconds=30)
  source.close()


def test_writer_skips_a_shard_with_blocked_inserts(serve):
  tight = serve(CONFIG, schema=SCHEMA, batch_size=2, insert_size=1)[1]
  wide = serve(CONFIG, schema=SCHEMA, batch_size=2)[1]
  entry = writer.Writer([tight, wide], CONFIG.strata, SCHEMA)
  for start in range(0, 800, 16):
    entry.write(identities(start, start + 16), never)
  assert count_in(tight) < 40
  assert count_in(wide) > 700
  entry.close()


def snapshot(version, ended_launch=0):
  return parameters.Snapshot(version, 10 * version, ended_launch, {'identity': np.int32(version)})


def version_of(newest):
  return None if newest is None else newest.version


def test_parameters_are_published_to_all_shards_and_read_from_any(addresses, serve, monkeypatch):
  monkeypatch.setattr(parameters, '_NEWS_SECONDS', 0.0)
  publisher = parameters.Publisher(['localhost:1', *addresses], SCHEMA, timeout_seconds=1.0)
  assert publisher.publish(snapshot(3))
  for address in addresses:
    assert version_of(parameters.Subscription(address, SCHEMA).newest()) == 3

  source = parameters.Subscription(['localhost:1', *addresses], SCHEMA)
  assert [version_of(source.newest(1.0)) for _ in range(3)] == [None, 3, None]
  # The older version of a restored shard is not returned; final parameters are, from any shard.
  stale = parameters.Publisher(addresses[1], SCHEMA)
  stale.publish(snapshot(2))
  assert [version_of(source.newest(1.0)) for _ in range(5)] == [None] * 5
  stale.publish(snapshot(3, ended_launch=7))
  found = [each for _ in range(8) if (each := source.newest(1.0)) is not None]
  assert [each.ended_launch for each in found] == [7]
  for each in (publisher, stale):
    each.close()


def test_killed_shard_is_skipped_and_used_again_after_restart(spawn, serve, tmp_path):
  port, folder, other = portpicker.pick_unused_port(), f'{tmp_path}/killed', f'{tmp_path}/other'
  server = spawn(CONFIG, port, folder, batch_size=16, insert_size=16)
  addresses = [
    f'localhost:{port}', serve(CONFIG, schema=SCHEMA, insert_size=16, directory=other)[1]
  ]  # fmt: skip
  entry = writer.Writer(addresses, CONFIG.strata, SCHEMA, timeout_seconds=1.0)
  source = reader.Reader(addresses, CONFIG.strata, SCHEMA, batch_size=16, timeout_seconds=1.0)
  first, link = entry._shards[0], source._connections[0]
  stop, batches = threading.Event(), []

  def write():
    for start in itertools.takewhile(lambda _: not stop.is_set(), itertools.count(step=8)):
      entry.write(identities(start, start + 8), stop.is_set)

  def read():
    while not stop.is_set():
      if (batch := source.get(0.2)) is not None:
        batches.append(batch)

  def wait_for_progress(shard):
    read_before, written = len(batches), shard.sequences_written
    polling.until(
      lambda: len(batches) > read_before + 50 and shard.sequences_written > written + 20,
      seconds=60,
    )

  polling.until(lambda: link.info(1.0) is not None, seconds=120)
  threads = [threading.Thread(target=target, daemon=True) for target in (write, read)]
  for thread in threads:
    thread.start()
  try:
    wait_for_progress(first)
    checkpoint.save(reverb.Client(addresses[0]), folder)
    server.kill()
    polling.until(lambda: not link.alive, seconds=20)
    wait_for_progress(entry._shards[1])
    serve(CONFIG, schema=SCHEMA, insert_size=16, directory=folder, port=port)
    wait_for_progress(first)
  finally:
    stop.set()
    for thread in threads:
      thread.join(10)
    source.close()
    entry.close()
  stored = []
  for address, directory in zip(addresses, (folder, other), strict=True):
    checkpoint.save(reverb.Client(address), directory)
    stored += [int(columns[0][0]) for _, columns in contents.Contents(directory).read('episodic')]
  assert len(stored) == len(set(stored))  # nothing twice
