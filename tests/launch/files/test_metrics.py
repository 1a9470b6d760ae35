"""Metrics files: rows can be read back, also after a kill and a restore."""

import collections
import json
import math
import os
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import presets
from hephaestus.launch.files import metrics
from hephaestus.launch.run import request as request_lib
from hephaestus.launch.run import validation


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'metrics' / 'rows.jsonl'


def write_steps(path, steps, **options):
  logger = metrics.JsonLines(path, **options)
  for step in steps:
    logger.write({'learner_step': step})
  logger.close()


def steps_of(path):
  return [row['learner_step'] for row in metrics.read(path)]


def test_rows_are_read_back_with_time_first(path):
  before = time.time()
  assert metrics.read(path) == [] and metrics.last(path) is None
  logger = metrics.JsonLines(path)
  assert metrics.read(path) == [] and metrics.last(path) is None
  logger.write({'learner_step': 1, 'world_model/kl': 2.5})
  logger.write({'learner_step': 2, 'world': 'catch', 'done': True, 'score': None})
  logger.close()
  first, second = metrics.read(path)
  assert list(first) == ['time', 'learner_step', 'world_model/kl']
  assert before <= first['time'] <= second['time'] <= time.time()
  assert first['world_model/kl'] == 2.5
  assert (second['world'], second['done'], second['score']) == ('catch', True, None)


def test_newest_rows_are_read_from_the_end(path, monkeypatch):
  monkeypatch.setattr(metrics, 'TAIL_BYTES', 64)  # of which a row takes half
  path.parent.mkdir()
  rows = [{'time': float(time), 'step': time} for time in range(20)]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows) + '{"time": 20.0, "st')
  assert metrics.last(path) == rows[-1]
  assert metrics.newest(path, 7) == rows[-7:]
  assert metrics.newest(path, 30) == rows


def test_arrays_become_plain_numbers_and_non_finite_ones_null(path):
  logger = metrics.JsonLines(path)
  logger.write({
    'float32': np.float32(0.5), 'int64': np.int64(3), 'bool': np.bool_(True),
    'scalar': jnp.asarray(1.5), 'bfloat16': jnp.asarray(2.0, jnp.bfloat16),
    'vector': np.array([1, 2]), 'nested': {'tuple': (np.float32(1.0), 2)},
    'broken': [math.nan, np.float64('inf'), jnp.asarray(-jnp.inf), 1.0],
  })  # fmt: skip
  logger.close()
  row = json.loads(path.read_text(), parse_constant=pytest.fail)
  del row['time']
  assert row == {
    'float32': 0.5, 'int64': 3, 'bool': True, 'scalar': 1.5, 'bfloat16': 2.0, 'vector': [1, 2],
    'nested': {'tuple': [1.0, 2]}, 'broken': [None, None, None, 1.0],
  }  # fmt: skip


def test_reopening_drops_truncated_line_and_appends(path):
  write_steps(path, [1, 2])
  with open(path, 'a') as file:
    file.write('{"time": 3.0, "learner_st')
  assert steps_of(path) == [1, 2]
  assert metrics.last(path)['learner_step'] == 2
  write_steps(path, [3])
  assert steps_of(path) == [1, 2, 3]


def test_full_disk_drops_rows_with_one_warning(path, no_room, caplog):
  logger = metrics.JsonLines(path)
  logger.write({'learner_step': 1})
  room = path.stat().st_size + 10  # for a part of a row
  with no_room(room):
    for step in (2, 3):
      logger.write({'learner_step': step})
    assert path.stat().st_size == room - 10
  logger.write({'learner_step': 4})
  logger.close()
  assert steps_of(path) == [1, 4]
  assert [record.message.split(': ', 1)[1] for record in caplog.records] == [
    'the disk is full; rows are dropped until there is room',
    'there is room again; 2 rows were dropped',
  ]


def test_default_logger_of_acme_can_be_handed_in(tmp_path, monkeypatch):
  pytest.importorskip('acme')
  monkeypatch.setenv('HOME', str(tmp_path))
  own = 'acme.utils.loggers:make_default_logger'
  logger = metrics.make_logger(tmp_path, 'learner', steps_key='learner_step', own=own)
  logger.write({'learner_step': 1, 'loss': jnp.asarray(2.5)})
  logger.close()
  (file,) = tmp_path.glob('acme/*/logs/learner/logs.csv')
  assert file.read_text().splitlines() == ['learner_step,loss', '1,2.5']


def test_full_disk_ends_tensorboard_but_not_the_node(tmp_path, no_room, caplog):
  logger = metrics.make_logger(tmp_path, 'learner', steps_key='learner_step', tensorboard=True)
  logger.write({'learner_step': 1, 'loss': 1.0})
  with no_room(2000):
    for step in range(200):
      logger.write({'learner_step': step, 'loss': 1.0})
    logger.close()
  assert 'no more curves are written' in caplog.text


def test_full_disk_still_drops_truncated_line(path, no_room):
  write_steps(path, range(40))
  with open(path, 'a') as file:
    file.write('{"time": 3.0, "learner_st')
  with no_room(100):
    metrics.JsonLines(path, resume=('learner_step', 1)).close()
  assert steps_of(path) == [0, 1]
  assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_resumed_run_has_every_step_once(path):
  write_steps(path, range(1, 8))
  whole = path.read_bytes()
  write_steps(path, range(5, 10), resume=('learner_step', 4))
  assert steps_of(path) == list(range(1, 10))
  kept = whole.splitlines(keepends=True)[:4]
  assert path.read_bytes().startswith(b''.join(kept))
  assert os.listdir(path.parent) == [path.name]


def test_logger_writes_curves_for_tensorboard(tmp_path):
  logger = metrics.make_logger(tmp_path, 'learner', steps_key='learner_step', tensorboard=True)
  logger.write(
    {
      'learner_step': np.int64(7),
      'world_model/kl': jnp.asarray(1.5),
      'broken': np.float32('nan'),
      'world': 'catch',
    }
  )
  logger.close()
  (row,) = metrics.read(tmp_path / 'metrics' / 'learner.jsonl')
  assert (row['learner_step'], row['world_model/kl'], row['broken']) == (7, 1.5, None)

  event_accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')

  curves = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard' / 'learner'))
  curves.Reload()
  assert curves.Tags()['scalars'] == ['world_model/kl']
  (point,) = curves.Scalars('world_model/kl')
  assert (point.step, point.value) == (7, 1.5)


def test_missing_wandb_names_the_extra(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)  # as if it were not installed
  wandb = launch_config.WandbConfig(enabled=True)
  with pytest.raises(ValueError, match=r'extra `wandb`: .*wandb'):
    metrics.make_logger(tmp_path, 'learner', steps_key='learner_step', wandb=wandb)


def test_wandb_without_a_key_is_refused_unless_offline(tmp_path, monkeypatch, request):
  request.addfinalizer(pytest.importorskip('wandb').teardown)  # it keeps the variables below
  monkeypatch.setenv('HOME', str(tmp_path))  # which has no netrc
  monkeypatch.setenv('NETRC', str(tmp_path / 'netrc'))
  for name in ('WANDB_API_KEY', 'WANDB_MODE'):
    monkeypatch.delenv(name, raising=False)
  made = launch_config.override(presets.laptop('catch'), ['wandb=true'])
  with pytest.raises(ValueError, match=r'wandb\.enabled=True: there is no key.*WANDB_MODE=offline'):
    validation.validate_here(request_lib.TrainRequest(), made)
  monkeypatch.setenv('WANDB_MODE', 'offline')
  validation.validate_here(request_lib.TrainRequest(), made)
  monkeypatch.setenv('WANDB_MODE', 'online')
  monkeypatch.setenv('WANDB_API_KEY', '0' * 40)
  validation.validate_here(request_lib.TrainRequest(), made)


def sent_to_wandb(folder):
  """The records of each offline run of W&B in a folder by their type, in the order of names."""
  import wandb
  from wandb.proto import wandb_internal_pb2
  from wandb.sdk.internal import datastore

  wandb.teardown()  # its process has then written the files
  found = []
  for path in folder.glob('wandb/offline-run-*/*.wandb'):
    reader = datastore.DataStore()
    reader.open_for_scan(str(path))
    records = collections.defaultdict(list)
    while (data := reader.scan_data()) is not None:
      record = wandb_internal_pb2.Record()
      record.ParseFromString(data)
      kind = record.WhichOneof('record_type')
      records[kind].append(getattr(record, kind))
    found.append(records)
  return sorted(found, key=lambda records: records['run'][0].display_name)


def values_of(row):
  """The values of a row that was sent to W&B, as JSON."""
  return {'/'.join(item.nested_key) or item.key: item.value_json for item in row.item}


@pytest.fixture
def offline(monkeypatch):
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')


def test_nodes_of_one_process_are_runs_of_their_own_that_upload_files_once(tmp_path, offline):
  folder = tmp_path / 'run=1'
  for name in ('checkpoints/5/digest', 'checkpoints/7.partial/digest', 'videos/5.gif'):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(name)
  wandb = launch_config.WandbConfig(
    enabled=True, project='mine', entity='team', name='small', group='sizes', tags=('a', 'b'), artifacts=True
  )  # fmt: skip
  actor, evaluator, learner = (
    metrics.make_logger(folder, node, steps_key='step', wandb=wandb)
    for node in ('actor-0', 'evaluator', 'learner')
  )
  learner.write({'step': 7, 'loss': 0.5})
  evaluator.close()
  actor.close()
  learner.write({'step': 8})
  (folder / 'checkpoints' / '10').mkdir()
  (folder / 'checkpoints' / '10' / 'digest').write_text('ten')
  learner.close()
  sent = sent_to_wandb(folder)
  run, history = sent[2]['run'][0], sent[2]['history']
  assert (run.project, run.entity, run.display_name) == ('mine', 'team', 'small learner')
  assert (run.run_group, list(run.tags)) == ('sizes', ['a', 'b'])
  rows = [values_of(row) for row in history]
  assert [row['step'] for row in rows] == ['7', '8'] and rows[0]['loss'] == '0.5'
  assert not sent[1]['history']
  # Aliases have no order.
  found = [
    [(each.name, *(set(each.aliases) - {'latest'})) for each in records['artifact']]
    for records in sent
  ]
  checkpoint, video = 'sizes-small-checkpoint', 'sizes-small-video'
  assert found == [[], [(video, '5')], [(checkpoint, '5'), (checkpoint, '10')]]
