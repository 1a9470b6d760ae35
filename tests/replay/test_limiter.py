import threading
import time

import polling
import pytest

from hephaestus.replay import inspector, reader, tables, writer


@pytest.fixture
def ratio_after(serve, schema, make_sequences):
  """Runs a writer and a reader in parallel; returns the inspector's report after some inserts."""

  def run(share, *, write_pause, read_pause, inserts=600, ratio=4.0, batch_size=16):
    config = tables.ReplayConfig(
      strata=(
        tables.Stratum(name='frontier', max_size=40, share=share),
        tables.Stratum(name='episodic', max_size=400, share=1 - share),
      ),
      replay_ratio=ratio,
      warm_up=20,
      max_in_flight=2,
    )
    _, address = serve(config, batch_size=batch_size, insert_size=4)
    stop = threading.Event()
    entry = writer.Writer(address, config.strata, schema)
    source = reader.Reader(
      address, config.strata, schema, batch_size=batch_size, max_in_flight=2, prefetch=1
    )

    def write():
      while not stop.is_set():
        entry.write(make_sequences(0, 4), stop.is_set)
        time.sleep(write_pause)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    try:
      while entry.sequences_written < inserts:
        assert time.monotonic() < deadline, f'deadlock at {entry.sequences_written} sequences'
        source.get(1.0)
        time.sleep(read_pause)
      report = inspector.Inspector(address, config).poll()
    finally:
      stop.set()
      thread.join(10)
      source.close()
      entry.close()
    return report, entry, source

  return run


@pytest.mark.parametrize('share', [0.25, 0.75])
def test_replay_ratio_holds_when_writer_is_faster(share, ratio_after):
  report, entry, _ = ratio_after(share, write_pause=0.0, read_pause=0.004)
  ratio = report['replay_ratio']
  # The limiter allows a constant slack in addition to the ratio.
  slack = (4.0 * 4 + 16 / (1 - share)) / 580
  assert ratio['achieved'] == pytest.approx(ratio['configured'], rel=0.05, abs=slack)
  assert entry.throttled_seconds > 0


def test_replay_ratio_holds_when_reader_is_faster(ratio_after):
  share = 0.5
  report, _, _ = ratio_after(share, write_pause=0.01, read_pause=0.0)
  ratio = report['replay_ratio']
  slack = (4.0 * 4 + 16 / (1 - share)) / 580
  assert ratio['achieved'] == pytest.approx(ratio['configured'], rel=0.05, abs=slack)


def test_first_batch_comes_after_warm_up_without_deadlock(serve, unlimited, schema, make_sequences):
  config = unlimited(frontier=32, warm_up=32)
  _, address = serve(config, batch_size=16, insert_size=8)
  entry = writer.Writer(address, config.strata, schema)
  source = reader.Reader(address, config.strata, schema, batch_size=16)
  entry.write(make_sequences(0, 31), lambda: False)
  assert source.get(0.3) is None
  entry.write(make_sequences(31, 32), lambda: False)
  assert source.get(10.0) is not None
  source.close()


def test_throttled_writer_stops_when_asked_and_resumes_later(
  serve, unlimited, schema, make_sequences
):
  config = unlimited(frontier=8, warm_up=4, replay_ratio=4.0, max_in_flight=1)
  _, address = serve(config, batch_size=2, insert_size=1)
  entry = writer.Writer(address, config.strata, schema)
  stop = threading.Event()
  thread = threading.Thread(target=entry.write, args=(make_sequences(0, 200), stop.is_set))
  thread.start()
  polling.until(lambda: entry.throttled_seconds > 0.4, seconds=10)
  written = entry.sequences_written
  assert written < 200
  stop.set()
  thread.join(30)
  assert not thread.is_alive()

  source = reader.Reader(address, config.strata, schema, batch_size=2, max_in_flight=1)
  done = []
  thread = threading.Thread(
    target=lambda: done.append(entry.write(make_sequences(200, 210), lambda: False)), daemon=True
  )
  thread.start()
  polling.until(lambda: source.get(0.1) is not None and bool(done), seconds=20)
  source.close()
  assert entry.sequences_written >= written + 10
