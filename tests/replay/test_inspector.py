import os
import time

import polling
import psutil
import pytest
import reverb

from hephaestus.replay import connection, inspector, reader, writer

SEQUENCE_BYTES = 4 * 4 + 4 * 8 * 4 + 4  # of the schema


def write(address, config, schema, sequences):
  entry = writer.Writer(address, config.strata, schema)
  entry.write(sequences, lambda: False)
  entry.close()


def test_statistics_match_the_server(serve, unlimited, schema, make_sequences):
  config = unlimited(frontier=5, warm_up=2)
  _, address = serve(config)
  entry = inspector.Inspector(address)
  first = entry.poll()
  assert first['replay_ratio'] == {'configured': None, 'achieved': 0.0, 'recent': None}
  assert first['seconds'] is None and first['tables']['frontier']['inserts_per_second'] is None
  assert first['tables']['frontier']['unique_share'] is None
  assert first['limiter'] == {'table': 'episodic', 'state': 'warming up', 'missing': 2}

  write(address, config, schema, make_sequences(0, 12))
  source = reader.Reader(address, config.strata, schema, batch_size=16, max_in_flight=1, prefetch=1)
  assert source.get(10.0) is not None
  source.close()
  report = inspector.Inspector(address, config).poll()
  frontier, episodic = report['tables']['frontier'], report['tables']['episodic']
  assert (frontier['size'], frontier['max_size'], frontier['inserted']) == (5, 5, 12)
  assert (episodic['size'], episodic['max_size'], episodic['inserted']) == (12, 1000, 12)
  assert (frontier['fill'], episodic['fill']) == (1.0, 0.012)
  assert 1 <= frontier['unique_sampled'] <= 12 and frontier['sampled'] >= 8
  assert frontier['unique_share'] == frontier['unique_sampled'] / 12
  assert (frontier['bytes'], episodic['bytes']) == (5 * SEQUENCE_BYTES, 12 * SEQUENCE_BYTES)
  assert report['memory']['sequences'] == 12 * SEQUENCE_BYTES  # stored once
  assert report['tables']['params']['bytes'] is None
  assert report['limiter'] == {'table': 'episodic', 'state': 'open', 'missing': 0}
  ratio = report['replay_ratio']
  assert ratio['configured'] == 1.0
  assert ratio['achieved'] == (frontier['sampled'] + episodic['sampled']) / 10
  configured = inspector.Inspector(address).poll()['replay_ratio']['configured']
  assert configured == pytest.approx(1.0, rel=0.2)

  later = entry.poll()
  for name in ('frontier', 'episodic'):
    table = later['tables'][name]
    assert table['inserts_per_second'] * later['seconds'] == pytest.approx(12)
    assert table['samples_per_second'] * later['seconds'] == pytest.approx(table['sampled'])
    assert sum(table['worker_time'].values()) == pytest.approx(1.0)
  assert later['replay_ratio']['recent'] == pytest.approx(ratio['achieved'] * 10 / 12, rel=0.2)


def test_limiter_reports_blocked_inserts_and_the_missing_samples(
  serve, schema, make_sequences, unlimited
):
  config = unlimited(warm_up=2, replay_ratio=2.0)
  _, address = serve(config, batch_size=2, insert_size=1)  # the limiter has 1 + 1 + 8 of slack
  entry = writer.Writer(address, config.strata, schema)
  watcher = inspector.Inspector(address, config)
  end = time.monotonic() + 30
  is_blocked = lambda: watcher.poll()['limiter']['state'] == 'inserts wait'
  entry.write(make_sequences(0, 64), lambda: is_blocked() or time.monotonic() > end)
  limiter = watcher.poll()['limiter']
  assert limiter['state'] == 'inserts wait'
  waiting = lambda table: watcher.poll()['tables'][table]['worker_time']['waiting_for_sampling']
  polling.until(lambda: waiting('episodic') > 0.9, seconds=10)
  assert waiting('frontier') < 0.1

  # One more insert needs as many samples as `missing` says, and no fewer.
  before = watcher.poll()['tables']['episodic']['inserted']
  server_side = reverb.Client(address)
  for _ in range(limiter['missing'] - 1):
    next(server_side.sample('episodic', 1, emit_timesteps=False))
  assert watcher.poll()['limiter'] == {'table': 'episodic', 'state': 'inserts wait', 'missing': 1}
  assert watcher.poll()['tables']['episodic']['inserted'] == before
  next(server_side.sample('episodic', 1, emit_timesteps=False))
  polling.until(lambda: watcher.poll()['tables']['episodic']['inserted'] == before + 1, seconds=10)
  entry.close()


def test_reset_counters_give_no_rates(serve, unlimited, schema, make_sequences):
  config = unlimited()
  server, address = serve(config)
  write(address, config, schema, make_sequences(0, 4))
  entry = inspector.Inspector(address, config)
  entry.poll()
  assert entry.poll()['seconds'] is not None
  server.localhost_client().reset('episodic')
  report = entry.poll()
  assert report['seconds'] is None and report['tables']['episodic']['inserts_per_second'] is None
  assert report['tables']['episodic']['inserted'] == 0


def test_memory_of_a_local_server_is_its_process_resident_set(serve, unlimited):
  _, address = serve(unlimited())
  here = psutil.Process(os.getpid()).memory_info().rss
  assert inspector.Inspector(address).poll()['memory']['server'] == pytest.approx(here, rel=0.2)
  assert inspector.listener('203.0.113.1:80') is None  # of another machine


def test_unreachable_address_raises_within_the_timeout():
  start = time.monotonic()
  with pytest.raises(ConnectionError, match='localhost:1 within 2 s'):
    inspector.Inspector('localhost:1', timeout_seconds=2).poll()
  assert time.monotonic() - start < 30  # on any machine, however busy


@pytest.mark.parametrize('variable', ['http_proxy', 'grpc_proxy'])
def test_proxy_is_not_asked_for_servers(serve, unlimited, monkeypatch, variable):
  for name in ('no_proxy', 'NO_PROXY', connection.NO_PROXY):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv(variable, 'http://127.0.0.1:9')  # where nobody listens
  monkeypatch.setenv('no_proxy', 'intranet')
  server, address = serve(unlimited())
  (link,) = connection.connect(address, 'test')
  assert link.info(2.0) is not None
  assert server.localhost_client().server_info(timeout=2)
  variables = connection.without_proxy(['10.0.0.7:22001', '[fd00::1]:22001', 'trainer:1'])
  hosts = variables[connection.NO_PROXY].split(',')
  assert {'intranet', '127.0.0.1', '10.0.0.7', 'fd00::1', 'trainer'} <= set(hosts)
