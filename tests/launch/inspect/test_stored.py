"""Checkpoints of replay, read from a copy: faults are located, and the server is not disturbed."""

import json
import os
import time
import types

import dm_env
import jax
import numpy as np
import pytest
import reverb
import tensorflow as tf
import tiny

from hephaestus.launch import config, main
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.inspect import stored
from hephaestus.launch.run import parts as parts_lib
from hephaestus.replay import checkpoint, columns, contents, tables, writer

FIRST, MID, LAST = (int(kind) for kind in dm_env.StepType)
STEPS, ENVIRONMENTS, UNROLLS, FRONTIER = 6, 4, 6, 8


@pytest.fixture(scope='module')
def made():
  """The config of a run."""
  return config.override(
    presets.laptop('catch'), [*tiny.SHAPES, f'replay.strata[0].max_size={FRONTIER}']
  )


@pytest.fixture(scope='module')
def schema(made):
  return parts_lib.make_parts(made).sequence_schema


@pytest.fixture
def sequences(schema):
  """[UNROLLS * ENVIRONMENTS, ...] in an actor's order: episodes of three steps with a return of 1.

  Environment e is e steps ahead of the first.
  """
  count = UNROLLS * ENVIRONMENTS
  unroll, environment = np.divmod(np.arange(count), ENVIRONMENTS)
  time = (STEPS - 1) * unroll[:, None] + np.arange(STEPS) + environment[:, None]
  kind = np.array([FIRST, MID, MID, LAST], np.int32)[time % 4]
  zeros = jax.tree.map(lambda leaf: np.zeros((count, *leaf.shape), leaf.dtype), schema)
  return zeros._replace(
    step_type=kind,
    reward=(kind == LAST).astype(np.float32),
    discount=(kind != LAST).astype(np.float32),
    identity=np.arange(count, dtype=np.uint32),
    version=(10 * unroll).astype(np.int32),
  )


class Run:
  """A run's folder, and a server whose rate limiter blocks nothing."""

  def __init__(self, folder, made, schema):
    folder_lib.open_run(folder, made)
    self.folder, self.strata, self.schema = folder, made.replay.strata, schema
    self.replay = str(folder / 'replay')
    self.server = tables.make_server(
      tables.make_tables(made.replay, schema, batch_size=8, insert_size=10_000),
      directory=self.replay,
    )
    self.address = f'localhost:{self.server.port}'
    (folder / 'address').write_text(self.address)
    self.client = reverb.Client(self.address)

  def write(self, sequences, strata=None):
    entry = writer.Writer(self.address, strata or self.strata, self.schema)
    entry.write(sequences, lambda: False)
    entry.close()

  def drop_from_frontier(self, identity):
    keys = {}
    while identity not in keys:
      (sample,) = self.client.sample('frontier', 1, emit_timesteps=False)
      keys[int(next(x for x in sample.data if x.dtype == np.uint32)[0])] = sample.info.key
    self.client.mutate_priorities('frontier', deletes=[keys[identity]])

  def save(self):
    return checkpoint.save(self.client, self.replay)


@pytest.fixture
def run(tmp_path, made, schema):
  started = Run(tmp_path / 'run', made, schema)
  yield started
  started.server.stop()


def inspect(*arguments):
  return main.run(main.parse(['hephaestus', 'inspect', *map(str, arguments)]))


def with_step(sequences, index, step, **values):
  """Copies the sequences with other values at one step of one of them."""
  changed = {name: getattr(sequences, name).copy() for name in values}
  for name, value in values.items():
    changed[name][index, step] = value
  return sequences._replace(**changed)


def test_sound_checkpoint_has_no_fault(run, sequences, capsys):
  run.write(sequences)
  run.save()
  assert inspect(run.folder, '--check') == 0
  assert 'nothing is wrong with 24 sequences' in capsys.readouterr().out
  assert stored.read(str(run.folder)).sequences == UNROLLS * ENVIRONMENTS


def test_check_finds_faults_of_steps(run, sequences, capsys):
  planted = with_step(sequences, 13, 2, reward=np.nan)
  planted = with_step(planted, 8, 2, step_type=MID)  # it follows LAST
  planted = with_step(planted, 5, 2, discount=0.0)
  run.write(planted)
  run.save()
  assert inspect(run.folder, '--check') == 1
  lines = capsys.readouterr().out.splitlines()
  assert all(line.startswith('table episodic') for line in lines)
  for words in (
    'step 2: reward is not finite',
    'step 2: follows LAST and is not FIRST: a reset that is not marked',
    'step 2: FIRST has a discount other than 1',
  ):
    assert 1 <= sum(words in line for line in lines) <= 2, words


def test_first_sequences_of_a_writer_may_be_in_one_table_if_the_server_was_restarted():
  item = lambda key, chunk: contents.Item(key, (chunk,), float(chunk), writer=1, position=chunk)
  items = {
    'frontier': [item(chunk, chunk) for chunk in range(6)],
    'episodic': [item(10 + chunk, chunk) for chunk in range(2, 6)],
  }
  saved = types.SimpleNamespace(items=items, max_sizes={'frontier': 8, 'episodic': 100})
  digests = {name: [bytes(item.chunks) for item in own] for name, own in items.items()}
  found = contents.faults(saved, digests)
  assert [(fault.key, fault.text) for fault in found] == [
    (0, 'is not in episodic'),
    (1, 'is not in episodic'),
  ]
  assert contents.faults(saved, digests, restarts=[2.5]) == []


def test_table_of_another_name_is_a_fault(run, sequences, capsys):
  run.write(sequences)
  run.save()
  path = run.folder / 'config.yaml'
  path.write_text(path.read_text().replace('name: frontier', 'name: newest'))
  assert inspect(run.folder, '--check') == 1
  printed = capsys.readouterr().out
  assert "table 'frontier': is no stratum of the run" in printed
  assert "table 'newest': is missing" in printed


def test_check_finds_gap_and_copy(run, sequences):
  run.write(sequences)
  run.drop_from_frontier(20)  # neither its oldest nor its newest
  newest = jax.tree.map(lambda x: x[-1:], sequences)
  run.write(newest, [stratum for stratum in run.strata if stratum.name == 'frontier'])
  run.save()
  found = stored.read(str(run.folder)).violations
  assert any('is stored twice: key ' in line for line in found)
  assert any('lacks 1 of episodic that are newer than its oldest' in line for line in found)


def test_check_accepts_gap_of_a_restart(run, sequences):
  first, second = (jax.tree.map(lambda x, half=half: x[half], sequences)
                   for half in (slice(20), slice(20, None)))  # fmt: skip
  entry = writer.Writer(run.address, run.strata, run.schema)
  entry.write(first, lambda: False)
  between = time.time()
  entry.write(second, lambda: False)
  entry.close()
  run.drop_from_frontier(19)
  run.save()
  assert len(stored.read(str(run.folder)).violations) == 1
  started = {'time': between, 'kind': 'started', 'name': 'replay', 'pid': 1}
  (run.folder / 'metrics' / 'events.jsonl').write_text(json.dumps(started) + '\n')
  assert stored.read(str(run.folder)).violations == []


def test_check_reports_broken_checkpoint_and_reads_the_one_before(run, sequences):
  run.write(sequences)
  run.save()
  newest = run.save()
  with open(os.path.join(newest, 'chunks.tfrecord'), 'r+b') as stream:
    stream.truncate(100)
  found = stored.read(str(run.folder))
  (line,) = found.violations
  assert line.startswith(f'checkpoint {os.path.basename(newest)} is broken (chunks.tfrecord')
  assert found.sequences == 24
  assert os.path.exists(newest)  # nothing is moved while the run continues


def test_check_does_not_change_a_live_server(run, sequences, capsys):
  run.write(sequences)
  next(run.client.sample('episodic', 1, emit_timesteps=False))
  path = run.save()

  def state():
    infos = run.client.server_info()
    files = {name: os.stat(os.path.join(path, name)).st_mtime_ns for name in os.listdir(path)}
    return {name: vars(info) | {'table_worker_time': None} for name, info in infos.items()}, files

  before = state()
  assert inspect(run.folder, '--check', '--json') == 0
  assert state() == before
  assert sorted(os.listdir(run.replay)) == ['kept', 'newest']
  found = json.loads(capsys.readouterr().out)
  assert found['violations'] == [] and found['sequences'] == UNROLLS * ENVIRONMENTS


def test_contents_are_arrays_that_were_written(run, sequences):
  noise = np.random.default_rng(0).random(sequences.observation.shape) < 0.5
  written = sequences._replace(observation=noise)
  run.write(written)
  run.save()
  schema = columns.Columns(run.schema)
  found = [schema.unflatten(arrays) for _, arrays in contents.Contents(run.replay).read('episodic')]
  jax.tree.map(
    np.testing.assert_array_equal, jax.tree.map(lambda *x: np.concatenate(x), *found), written
  )


@pytest.mark.parametrize('name', ['tables', 'items', 'chunks'])
def test_hostile_checkpoint_is_refused_by_name(run, sequences, capsys, name):
  """Its checksums hold, and its records are of somebody else."""
  run.write(sequences)
  path = run.save()
  file = os.path.join(path, f'{name}.tfrecord')
  records = [each.numpy() for each in tf.data.TFRecordDataset(file, 'ZLIB')]
  random = np.random.default_rng(0)
  hostile = [[], records[1:], [b'\xff' * 9, *records], [records[0][:20], *records[1:]]]
  for _ in range(4):
    one = bytearray(records[0])
    one[random.integers(min(len(one), 60))] ^= 1 << random.integers(8)
    hostile.append([bytes(one), *records[1:]])
  for each in hostile:
    os.unlink(file)  # which `kept` has, too
    with tf.io.TFRecordWriter(file, 'ZLIB') as stream:
      for record in each:
        stream.write(record)
    code = inspect(run.folder, '--check')
    printed = capsys.readouterr()
    assert code in (0, 1, 2) and (printed.err.count('\n') == 1 or code != 2)
    contents.counts(run.replay)


def test_damaged_block_is_refused():
  for block in (b'', b'\x05', b'\x05\x10abc', b'\xff' * 9):  # shorter than they say
    with pytest.raises(ValueError, match='cannot be decompressed'):
      contents._decompress(block)


def test_sequences_of_another_schema_are_named_by_their_column(run, sequences, capsys):
  run.write(sequences)
  run.save()
  path = run.folder / 'config.yaml'
  path.write_text(path.read_text().replace('deterministic_size: 8', 'deterministic_size: 16'))
  assert inspect(run.folder, '--check') == 1  # for each table, its initial states
  found = capsys.readouterr().out.splitlines()
  assert len(found) == 2 and all('initial_state' in line for line in found)


def test_check_names_missing_checkpoint_and_bad_options(tmp_path, run, capsys):
  assert inspect(run.folder, '--check') == 2
  message = capsys.readouterr().err
  assert 'no whole checkpoint in' in message and 'learner.checkpoint_period=' in message
  assert message.count('\n') == 1
  assert inspect('localhost:1', '--check') == 2
  assert "give the run's folder" in capsys.readouterr().err
  ppo = config.override(presets.ppo_laptop('catch'), ['learner.fused=false'])
  folder_lib.open_run(tmp_path / 'ppo', ppo)
  assert inspect(tmp_path / 'ppo', '--check') == 2
  assert 'keeps no checkpoint of its queue' in capsys.readouterr().err
