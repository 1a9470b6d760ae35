import time

import pytest

from replay import inspector, reader, writer


def test_the_numbers_are_those_of_the_server(serve, unlimited, schema, make_sequences, capsys):
  config = unlimited(frontier=5, warm_up=2)
  _, address = serve(config)
  assert inspector.tables(address)['replay_ratio'] == {'configured': None, 'achieved': 0.0}
  writer.Writer(address, config.strata, schema).write(make_sequences(0, 12), lambda: False)
  source = reader.Reader(address, config.strata, schema, batch_size=16, max_in_flight=1, prefetch=1)
  assert source.get(10.0) is not None
  source.close()
  report = inspector.tables(address, config)
  frontier, episodic = report['tables']['frontier'], report['tables']['episodic']
  assert (frontier['size'], frontier['max_size'], frontier['inserted']) == (5, 5, 12)
  assert (episodic['size'], episodic['max_size'], episodic['inserted']) == (12, 1000, 12)
  assert 1 <= frontier['unique_sampled'] <= 12 and frontier['sampled'] >= 8
  ratio = report['replay_ratio']
  assert ratio['configured'] == 1.0
  assert ratio['achieved'] == (frontier['sampled'] + episodic['sampled']) / 10
  assert inspector.tables(address)['replay_ratio']['configured'] == pytest.approx(1.0, rel=0.2)
  assert inspector.main([address]) == 0
  printed = capsys.readouterr().out
  assert 'episodic' in printed and 'replay ratio' in printed


def test_a_dead_address_is_said_in_time(capsys):
  start = time.monotonic()
  with pytest.raises(ConnectionError, match='localhost:1 within 2 s'):
    inspector.tables('localhost:1', timeout_seconds=2)
  assert time.monotonic() - start < 3.5
  assert inspector.main([]) == 2
