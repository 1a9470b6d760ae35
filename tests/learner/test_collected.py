"""The count of environment steps, by real servers that stop and are restarted without a checkpoint."""

import jax
import numpy as np
import polling
import portpicker
import pytest

from hephaestus.learner.sources import collected
from hephaestus.replay import tables, writer

SCHEMA = {'x': jax.ShapeDtypeStruct((), np.float32)}
STEPS = 5  # of a sequence


class Shards:
  """Two replay servers at fixed ports, without checkpoints."""

  def __init__(self):
    self.config = tables.ReplayConfig(num_shards=2, warm_up=2)
    self.ports = [portpicker.pick_unused_port() for _ in range(2)]
    self.addresses = [f'127.0.0.1:{port}' for port in self.ports]
    self.servers = [None, None]

  def start(self, shard):
    made = tables.make_tables(self.config, SCHEMA, batch_size=8, insert_size=1000)
    self.servers[shard] = tables.make_server(made, port=self.ports[shard])

  def stop(self, shard):
    self.servers[shard].stop()
    self.servers[shard] = None

  def insert(self, shard, count):
    entry = writer.Writer(self.addresses[shard], self.config.strata, SCHEMA)
    entry.write({'x': np.zeros(count, np.float32)}, lambda: False)
    entry.close()

  def counter(self, file=None):
    return collected.Collected(
      self.addresses, 'test', stratum='episodic', steps_per_sequence=STEPS, file=file
    )


@pytest.fixture
def shards():
  made = Shards()
  made.start(0)
  made.start(1)
  yield made
  for shard, server in enumerate(made.servers):
    if server is not None:
      made.stop(shard)


def test_steps_are_the_sum_of_shards_and_stay_while_one_is_down(shards):
  ask = shards.counter()
  assert ask() == (0, 0)
  shards.insert(0, 3)
  shards.insert(1, 5)
  assert ask() == (8 * STEPS, 0)
  shards.stop(0)
  assert ask() == (8 * STEPS, 0)
  shards.stop(1)
  assert ask() is None
  assert ask.steps == (8 * STEPS, 0)


def test_steps_of_a_server_that_restarts_empty_count_as_lost(shards, tmp_path):
  file = tmp_path / 'collected.json'
  ask = shards.counter(file)
  shards.insert(0, 7)
  shards.insert(1, 2)
  assert ask() == (9 * STEPS, 0)
  shards.stop(0)
  shards.start(0)
  polling.until(lambda: ask() == (9 * STEPS, 7 * STEPS))  # its client connects anew
  shards.insert(0, 1)
  polling.until(lambda: ask() == (10 * STEPS, 7 * STEPS))
  assert ask() == (10 * STEPS, 7 * STEPS)

  # The process that counts is restarted, and replay with it.
  shards.stop(1)
  shards.start(1)
  ask = shards.counter(file)
  polling.until(lambda: ask() == (10 * STEPS, 9 * STEPS))


def test_steps_of_a_shard_that_is_down_at_the_start_are_known(shards, tmp_path):
  file = tmp_path / 'collected.json'
  shards.insert(0, 7)
  shards.insert(1, 2)
  assert shards.counter(file)() == (9 * STEPS, 0)
  shards.stop(0)
  assert shards.counter(file)() == (9 * STEPS, 0)


def test_broken_file_of_counts_is_refused_by_name(tmp_path):
  file = tmp_path / 'collected.json'
  file.write_text('{"inserted": 3}')
  with pytest.raises(ValueError, match=r'collected\.json: .*remove it'):
    collected.Collected('localhost:1', 'test', stratum='x', steps_per_sequence=1, file=file)
