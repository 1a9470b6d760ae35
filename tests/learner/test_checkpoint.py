"""Checkpoints: they are restored as saved, and broken ones give way to the one before."""

import gc
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.learner import checkpoint


def make_state(value):
  return {
    'params': {'kernel': jnp.full((4, 3), value, jnp.float32), 'count': jnp.int32(value)},
    'key': jax.random.fold_in(jax.random.key(0), int(value)),
  }


def like():
  return jax.eval_shape(lambda: make_state(0))


def assert_equal(state, expected):
  plain = lambda tree: {**tree, 'key': jax.random.key_data(tree['key'])}
  jax.tree.map(np.testing.assert_array_equal, plain(state), plain(expected))


def save(folder, *steps):
  saver = checkpoint.Checkpointer(folder)
  for step in steps:
    saver.save(step, make_state(step))
  saver.wait()
  saver.close()


def files_of(folder, step):
  return [path for path in (folder / str(step)).iterdir() if path.is_file()]


def test_restore_from_an_empty_folder_returns_none(tmp_path):
  assert checkpoint.Checkpointer(tmp_path).restore(like()) is None


def test_newest_checkpoint_is_restored_with_its_key(tmp_path):
  save(tmp_path, 3, 8)
  restored = checkpoint.Checkpointer(tmp_path).restore(like())
  assert restored.step == 8
  assert_equal(restored.state, make_state(8))
  jax.random.bits(restored.state['key'])
  (file,) = files_of(tmp_path, 8)
  assert file.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o666  # others may read it


def test_a_checkpoint_is_saved_again_at_its_step_only_with_more_experience(tmp_path):
  save(tmp_path, 0)
  saver = checkpoint.Checkpointer(tmp_path)
  for value, again, expected in ((1, False, 0), (2, True, 2)):
    saver.save(0, make_state(value), again=again)
    saver.wait()
    assert_equal(checkpoint.Checkpointer(tmp_path).restore(like()).state, make_state(expected))
  assert [path.name for path in tmp_path.iterdir()] == ['0']
  saver.close()


def test_checkpoint_in_files_of_an_older_version_is_refused_and_stays(tmp_path):
  (tmp_path / '5' / 'digest').mkdir(parents=True)
  with pytest.raises(ValueError, match=r'older version of hephaestus \(format below 5; now 7\)'):
    checkpoint.Checkpointer(tmp_path).restore(like())
  assert (tmp_path / '5' / 'digest').exists()


def test_saving_leaks_no_memory(tmp_path):
  state = {f'layer {index}': np.zeros(2, np.float32) for index in range(500)}
  saver = checkpoint.Checkpointer(tmp_path)
  blocks = []
  for step in range(6):
    saver.save(step, state)
    saver.wait()
    gc.collect()
    blocks.append(sys.getallocatedblocks())
  saver.close()
  assert blocks[-1] - blocks[2] < 500  # a block for each array and save would be three times that


def test_only_the_newest_checkpoints_are_kept(tmp_path):
  save(tmp_path, *range(1, 8))
  kept = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
  assert kept == [5, 6, 7]


def test_save_on_a_full_disk_is_logged_and_keeps_the_one_before(tmp_path, no_room, caplog):
  large = lambda step: {'noise': np.random.default_rng(step).normal(size=200_000)}
  saver = checkpoint.Checkpointer(tmp_path)
  saver.save(1, large(1))
  saver.wait()
  with no_room(1 << 16):
    saver.save(2, large(2))
    with pytest.raises(OSError, match='File too large') as error:
      saver.wait()
    assert error.value.filename.startswith(str(tmp_path))  # so a command shows one line
    assert checkpoint.Checkpointer(tmp_path, read_only=True).restore(large(0)).step == 1
    saver.save(3, large(3))
    saver.save(4, large(4))
  saver.save(5, large(5))
  saver.wait()
  saver.close()
  assert 'was not saved' in caplog.text
  names = {path.name for path in tmp_path.iterdir()}
  assert names >= {'1', '5'} and all(map(str.isdigit, names))  # 4 may have found room in the end
  restored = checkpoint.Checkpointer(tmp_path).restore(large(0))
  assert restored.step == 5
  np.testing.assert_array_equal(restored.state['noise'], large(5)['noise'])


@pytest.mark.parametrize('damage', ['truncate', 'flip', 'remove'])
def test_broken_checkpoint_falls_back_to_the_one_before(tmp_path, damage, caplog):
  folder = tmp_path / 'checkpoints'
  save(folder, 3, 8)
  for path in files_of(folder, 8):
    content = bytearray(path.read_bytes())
    if damage == 'remove':
      path.unlink()
    elif damage == 'truncate':
      path.write_bytes(content[: len(content) // 2])
    elif len(content) > 64:
      content[len(content) // 2] ^= 0xFF
      path.write_bytes(content)
  restored = checkpoint.Checkpointer(folder).restore(like())
  assert restored.step == 3
  assert_equal(restored.state, make_state(3))
  assert 'falling back' in caplog.text
  assert (tmp_path / 'broken_checkpoints' / '8').exists()
  save(folder, 9)
  assert checkpoint.Checkpointer(folder).restore(like()).step == 9


def test_run_whose_checkpoints_are_all_broken_does_not_begin_anew(tmp_path):
  folder = tmp_path / 'checkpoints'
  save(folder, 3, 8)
  for step in (3, 8):
    (folder / str(step) / checkpoint.STATE).write_bytes(b'')
  for _ in range(2):  # the second start finds them, too
    with pytest.raises(ValueError, match='no checkpoint is intact of 8, 3'):
      checkpoint.Checkpointer(folder).restore(like())
  assert checkpoint.Checkpointer(folder, read_only=True).restore(like()) is None


def test_file_of_an_earlier_checkpoint_under_a_later_name_is_broken(tmp_path):
  folder = tmp_path / 'checkpoints'
  save(folder, 3, 8)
  older = (folder / '3' / checkpoint.STATE).read_bytes()
  (folder / '8' / checkpoint.STATE).write_bytes(older)
  assert checkpoint.Checkpointer(folder).restore(like()).step == 3


def test_incomplete_save_is_no_checkpoint(tmp_path):
  save(tmp_path, 3)
  unfinished = tmp_path / '8.partial'
  unfinished.mkdir()
  (unfinished / checkpoint.STATE).write_bytes(b'half')
  assert checkpoint.Checkpointer(tmp_path).restore(like()).step == 3
  save(tmp_path, 4)
  assert not unfinished.exists()


def test_checkpoint_of_another_configuration_is_refused_by_name(tmp_path):
  save(tmp_path, 3)
  other = jax.eval_shape(lambda: make_state(0) | {'params': {'kernel': jnp.zeros((5, 3))}})
  with pytest.raises(ValueError, match=r'kernel.*should be \(5, 3\) and is \(4, 3\)'):
    checkpoint.Checkpointer(tmp_path).restore(other)
  other = jax.eval_shape(lambda: make_state(0) | {'params': {'kernel': jnp.zeros((4, 3), int)}})
  with pytest.raises(ValueError, match=r'kernel.*should be int32 and is float32'):
    checkpoint.Checkpointer(tmp_path).restore(other)


def test_other_arrays_of_an_older_version_are_refused_by_its_number(tmp_path, monkeypatch):
  save(tmp_path, 1)
  monkeypatch.setattr(checkpoint, 'VERSION', checkpoint.VERSION + 1)
  wider = {**like(), 'params': {'kernel': jnp.zeros((5, 3)), 'count': jnp.int32(0)}}
  with pytest.raises(ValueError, match=r'an older version of hephaestus \(format 7; now 8\)'):
    checkpoint.Checkpointer(tmp_path).restore(wider)


def test_reading_a_running_run_changes_nothing(tmp_path):
  save(tmp_path, 3, 8)
  for path in files_of(tmp_path, 8):
    path.write_bytes(b'')
  before = sorted(str(path) for path in tmp_path.rglob('*'))
  assert checkpoint.Checkpointer(tmp_path, read_only=True).restore(like()).step == 3
  assert sorted(str(path) for path in tmp_path.rglob('*')) == before


@pytest.mark.parametrize(
  ('steps', 'scores', 'expected'),
  [
    ([10, 20, 30], [(8, 1.0), (19, 5.0), (28, 2.0)], 20),
    ([10, 20], [(12, 3.0), (19, 3.0)], 20),  # of equal scores, the later
    ([10, 20], [(15, 3.0)], 20),  # of equally near ones, the later
    ([10], [], None),
    ([], [(10, 1.0)], None),
  ],
)
def test_best_checkpoint_is_nearest_to_the_best_evaluation(steps, scores, expected):
  assert checkpoint.best(steps, scores) == expected


class Run(NamedTuple):
  """A state with what only a run that resumes needs."""

  train: dict
  worlds: np.ndarray
  replay: np.ndarray


def test_newest_and_best_stay_and_older_ones_lose_replay(tmp_path):
  scores = [(2, 9.0), (8, 1.0)]
  make = lambda step: Run({'kernel': np.full(3, step, np.float32)}, np.ones(2), np.ones(5))
  saver = checkpoint.Checkpointer(tmp_path, keep=4, scores=lambda: scores)
  for step in range(1, 9):
    saver.save(step, make(step))
  saver.close()
  reader = checkpoint.Checkpointer(tmp_path, read_only=True, scores=lambda: scores)
  assert reader.steps() == [2, 5, 6, 7, 8]
  whole = [step for step in reader.steps() if (tmp_path / str(step) / checkpoint.REST).exists()]
  assert whole == [6, 7, 8]
  assert reader.find('best') == 2 and reader.find('7') == 7
  to_act = make(0)._replace(worlds=None, replay=())
  for step in (2, 5, 8):
    assert reader.restore(to_act, step=step).state.train['kernel'][0] == step
  assert reader.restore(make(0)).step == 8
  assert reader.restore(make(0), step=5) is None  # no run resumes from it
  for which in ('3', 'newest'):
    with pytest.raises(
      ValueError, match=f'{which}: is not the update of a checkpoint.*2, 5, 6, 7, 8'
    ):
      reader.find(which)


def test_resuming_skips_broken_checkpoints(tmp_path):
  make = lambda step: Run({'kernel': np.full(3, step, np.float32)}, np.ones(2), np.ones(5))
  saver = checkpoint.Checkpointer(tmp_path, keep=5)
  for step in range(1, 6):
    saver.save(step, make(step))
  saver.close()
  for step in (4, 5):
    (tmp_path / str(step) / checkpoint.REST).write_bytes(b'broken')
  assert checkpoint.Checkpointer(tmp_path).restore(make(0)).step == 3
  assert checkpoint.Checkpointer(tmp_path, read_only=True).steps() == [1, 2, 3]


def test_array_of_another_shape_is_not_transplanted():
  old = {'kernel': np.ones((2, 3)), 'bias': np.zeros(3)}
  moved = checkpoint.transplanted(old, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, old)))
  np.testing.assert_array_equal(moved['kernel'], old['kernel'])
  with pytest.raises(ValueError, match=r"\['kernel'\] should be \(2, 4\) and is \(2, 3\)"):
    checkpoint.transplanted(old, old | {'kernel': np.ones((2, 4))})
  with pytest.raises(ValueError, match=r"\['bias'\] should not be there"):
    checkpoint.transplanted(old, {'kernel': old['kernel']})
