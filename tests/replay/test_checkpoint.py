import os
import resource

import jax
import numpy as np
import pytest
import reverb

from hephaestus.replay import checkpoint, writer


@pytest.fixture
def saved(serve, tmp_path, unlimited, schema, make_sequences):
  """A directory with two checkpoints, of 10 and of 20 sequences."""
  directory, config = str(tmp_path / 'replay'), unlimited()
  server, address = serve(config, directory=directory)
  entry = writer.Writer(address, config.strata, schema)
  paths = []
  for start in (0, 10):
    entry.write(make_sequences(start, start + 10), lambda: False)
    paths.append(checkpoint.save(reverb.Client(address), directory))
  entry.close()
  server.stop()
  return directory, paths


@pytest.fixture
def size_after_restart(serve, unlimited):
  def restart(directory):
    server, _ = serve(unlimited(), directory=directory)
    return server.localhost_client().server_info()['episodic'].current_size

  return restart


def test_newest_checkpoint_is_restored(saved, size_after_restart):
  directory, paths = saved
  assert checkpoint.prepare(directory) == paths[1]
  assert size_after_restart(directory) == 20


def test_checkpoint_requested_by_another_machine_is_kept_once(
  serve, tmp_path, unlimited, schema, make_sequences
):
  directory, config = str(tmp_path / 'replay'), unlimited()
  _, address = serve(config, directory=directory)
  entry = writer.Writer(address, config.strata, schema)
  checkpoint.keep(directory)  # without a checkpoint
  for start in (0, 10, 20):
    entry.write(make_sequences(start, start + 10), lambda: False)
    reverb.Client(address).checkpoint()
    checkpoint.keep(directory)
    checkpoint.keep(directory)
  entry.close()
  assert sorted(os.listdir(os.path.join(directory, 'kept'))) == ['000000000002', '000000000003']


def test_full_disk_leaves_previous_checkpoint(
  serve, tmp_path, unlimited, no_room, size_after_restart
):
  directory, config = str(tmp_path / 'replay'), unlimited()
  schema = {'noise': jax.ShapeDtypeStruct((20_000,), np.float32)}
  server, address = serve(config, directory=directory, schema=schema)
  entry, client = writer.Writer(address, config.strata, schema), reverb.Client(address)
  noise = np.random.default_rng(0).normal(size=(12, 20_000)).astype(np.float32)
  paths = []
  for start, room in ((0, resource.RLIM_INFINITY), (4, 1 << 16), (8, resource.RLIM_INFINITY)):
    entry.write({'noise': noise[start : start + 4]}, lambda: False)
    if room < 0:
      paths.append(checkpoint.save(client, directory))
      continue
    with no_room(room), pytest.raises(RuntimeError):
      checkpoint.save(client, directory)
    assert os.listdir(os.path.join(directory, 'newest')) == [os.path.basename(paths[0])]
  entry.close()
  server.stop()
  assert checkpoint.prepare(directory) == paths[1]
  assert size_after_restart(directory) == 12


@pytest.mark.parametrize(
  ('file', 'harm'),
  [('chunks', 'truncate'), ('items', 'flip'), ('tables', 'remove'), ('chunks', 'append')],
)
def test_broken_checkpoint_falls_back_to_previous_one(
  saved, file, harm, size_after_restart, caplog
):
  (directory, paths), file = saved, f'{file}.tfrecord'
  path = os.path.join(paths[1], file)
  size = os.path.getsize(path)
  if harm == 'remove':
    for place in ('newest', 'kept'):
      os.remove(os.path.join(directory, place, os.path.basename(paths[1]), file))
  else:
    with open(path, 'r+b') as stream:
      if harm == 'truncate':
        stream.truncate(size - 1)
      elif harm == 'append':
        stream.seek(size)
        stream.write(b'rest')
      else:
        stream.seek(size // 2)
        byte = stream.read(1)[0]
        stream.seek(size // 2)
        stream.write(bytes([byte ^ 0x10]))
  assert checkpoint.prepare(directory) == os.path.join(
    directory, 'newest', os.path.basename(paths[0])
  )
  assert file in caplog.text and 'set aside' in caplog.text and 'going back' in caplog.text
  corrupt = os.listdir(os.path.join(directory, 'corrupt'))
  assert corrupt == [f'{os.path.basename(paths[1])}.corrupt']
  assert harm != 'truncate' or size_after_restart(directory) == 10


def test_missing_reverb_folder_is_replaced_by_kept_checkpoint(saved):
  directory, paths = saved
  os.remove(os.path.join(paths[1], 'chunks.tfrecord'))  # the kept link stays
  assert checkpoint.prepare(directory) == paths[1]
  assert checkpoint.prepare(directory) == paths[1]


def test_server_without_whole_checkpoint_starts_empty_and_logs_it(
  saved, size_after_restart, caplog
):
  directory, paths = saved
  for path in paths:
    kept = os.path.join(directory, 'kept', os.path.basename(path), 'items.tfrecord')
    with open(kept, 'r+b') as stream:
      stream.truncate(5)
  assert checkpoint.prepare(directory) is None
  assert 'starting empty' in caplog.text
  assert size_after_restart(directory) == 0


def test_checkpoints_are_kept_in_order_after_the_clock_was_set_back(saved, serve, unlimited):
  directory, paths = saved
  ahead = os.path.join(directory, 'newest', '2999-01-01T00:00:00.123456789+00:00')
  os.rename(paths[1], ahead)  # as a machine whose clock is ahead names it
  server, _ = serve(unlimited(), directory=directory)
  client = server.localhost_client()
  made = [checkpoint.save(client, directory) for _ in range(3)]
  assert made == sorted(set(made)) and os.listdir(os.path.dirname(ahead)) == [
    os.path.basename(made[-1])
  ]
  server.stop()
  assert checkpoint.prepare(directory) == made[-1]
  kept = [os.path.basename(path) for path in made[-2:]]
  assert sorted(os.listdir(os.path.join(directory, 'kept'))) == kept


def test_only_incomplete_checkpoints_are_removed(saved, caplog):
  directory, paths = saved
  unfinished = os.path.join(directory, 'newest', '2999-01-01T00:00:00+00:00')
  os.makedirs(unfinished)
  others = [
    os.path.join(directory, place, name)
    for place in ('newest', 'kept')
    for name in ('thesis', 'thesis.partial')
  ]
  for path in others:
    os.makedirs(path)
  assert checkpoint.prepare(directory) == paths[1]
  assert all(map(os.path.isdir, others))
  assert not os.path.exists(unfinished) and 'broken' not in caplog.text
