"""A server in another process is killed and restarted on the same port."""

import functools
import pathlib
import subprocess
import sys
import threading

import jax
import numpy as np
import polling
import portpicker
import pytest
import reverb

from hephaestus.replay import checkpoint, inspector, parameters, reader, tables, writer

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = tables.ReplayConfig(
  strata=(
    tables.Stratum(name='frontier', max_size=5000, share=0.5),
    tables.Stratum(name='episodic', max_size=5000, share=0.5),
  ),
  replay_ratio=4.0,
  warm_up=10,
  timeout_seconds=1.0,
)


@pytest.fixture
def start(spawn, tmp_path):
  """Starts and restarts the server as a process on one port."""
  port, folder = portpicker.pick_unused_port(), str(tmp_path)
  run = functools.partial(spawn, CONFIG, port, folder, batch_size=8, insert_size=4)
  return run, f'localhost:{port}', folder


def test_writer_reader_and_source_survive_a_server_restart(start):
  run, address, directory = start
  schema = {'identity': jax.ShapeDtypeStruct((), np.int32)}
  server = run()
  # All clients start before the server is up: the order does not matter.
  entry = writer.Writer(address, CONFIG.strata, schema, timeout_seconds=1.0)
  source = reader.Reader(address, CONFIG.strata, schema, batch_size=8, timeout_seconds=1.0)
  publisher = parameters.Publisher(address, schema, timeout_seconds=1.0)
  params = parameters.Subscription(address, schema)
  stop, reading = threading.Event(), threading.Event()
  reading.set()
  batches, identity = [], [0]

  def write():
    while not stop.is_set():
      entry.write(
        {'identity': np.arange(identity[0], identity[0] + 4, dtype=np.int32)}, stop.is_set
      )
      identity[0] += 4

  def read():
    while not stop.is_set():
      batch = source.get(0.2) if reading.wait(0.1) else None
      if batch is not None:
        batches.append(batch['identity'])

  threads = [threading.Thread(target=target, daemon=True) for target in (write, read)]
  for thread in threads:
    thread.start()
  try:
    polling.until(lambda: len(batches) > 50, seconds=40)
    assert publisher.publish(parameters.Snapshot(7, 70, False, {'identity': np.int32(1)}))
    assert [snapshot.version for snapshot in [params.newest()] if snapshot] == [7]
    before_save = entry.sequences_written
    checkpoint.save(reverb.Client(address), directory)
    after_save = entry.sequences_written
    polling.until(lambda: entry.sequences_written > after_save + 20, seconds=20)

    server.kill()
    links = entry._shards[0].connection, source._connections[0]
    polling.until(lambda: not any(link.alive for link in links), seconds=20)
    assert not publisher.publish(parameters.Snapshot(8, 80, False, {'identity': np.int32(2)}))
    assert params.newest(timeout_seconds=1.0) is None
    with pytest.raises(ConnectionError, match=address):
      inspector.Inspector(address, timeout_seconds=1).poll()
    written, throttled = entry.sequences_written, entry.throttled_seconds

    run()
    polling.until(lambda: all(link.alive for link in links), seconds=40)
    assert entry.throttled_seconds - throttled < 2.0  # a server that is down does not throttle
    before = len(batches)
    polling.until(
      lambda: len(batches) > before + 400 and entry.sequences_written > written + 100, seconds=40
    )
    assert publisher.publish(parameters.Snapshot(9, 90, False, {'identity': np.int32(3)}))
    assert [snapshot.version for snapshot in [params.newest()] if snapshot] == [9]

    reading.clear()  # the limiter, restored with its counters, now blocks the writer
    polling.until(lambda: entry.throttled_seconds > throttled + 1.0, seconds=20)
  finally:
    stop.set()
    for thread in threads:
      thread.join(10)
    source.close()
    entry.close()

  report = inspector.Inspector(address, CONFIG).poll()
  assert report['replay_ratio']['achieved'] == pytest.approx(4.0, rel=0.1)
  # The old data is restored, and no sequence is stored twice. The missing ones were written between
  # save and kill, or were the 4 being sent, which this stratum may have had and the other not yet.
  size = report['tables']['frontier']['size']
  sampler = reverb.Client(address)._client.NewSampler('frontier', 10**9, 64)  # not limited
  stored = {int(sampler.GetNextTrajectory()[5][0]) for _ in range(25 * size)}
  assert len(stored) == size < 5000
  missing = set(range(entry.sequences_written)) - stored
  assert missing and min(missing) >= before_save and max(missing) < written + 4


def test_process_exits_cleanly_with_open_readers(serve, unlimited):
  config = unlimited()
  schema = {'identity': jax.ShapeDtypeStruct((), np.int32)}
  addresses = [serve(config, schema=schema)[1] for _ in range(2)]
  entry = writer.Writer(addresses[0], config.strata, schema)
  entry.write({'identity': np.arange(40, dtype=np.int32)}, lambda: False)
  script = """
import sys, jax, numpy as np
from hephaestus.replay import reader, tables
schema = {'identity': jax.ShapeDtypeStruct((), np.int32)}
strata = tables.ReplayConfig().strata
# One reader gets a batch and one starves; neither is closed.
for address, seconds in zip(sys.argv[1:], (30.0, 0.2)):
  print(reader.Reader(address, strata, schema, batch_size=4).get(seconds) is not None)
"""
  process = subprocess.run(
    [sys.executable, '-c', script, *addresses],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=polling.PATIENCE,
  )
  assert process.stdout == 'True\nFalse\n', process.stderr
  assert process.returncode == 0, process.stderr
