"""Checkpoints of one replica of a train state with Orbax, written in the background and checked."""

import errno
import hashlib
import logging as levels
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from hephaestus.learner import process

Tree = Any
STATE, REST, DIGEST = 'state', 'rest', 'digest'
_BYTES, _INDEX, _VERSION = 'bytes', 'arrays', 'version'
VERSION = 4  # of what a checkpoint holds: since 4, integers of few values are categories
WHOLE = 3  # newest checkpoints that a run can resume from; older ones lose what only that needs
_ONLY_TO_RESUME = ('.worlds', '.replay')  # fields of a fused run's state: environments and replay
BEST = 'best'
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Restored(NamedTuple):
  """The content of a checkpoint.

  Attributes:
    state: the train state, one replica, host arrays and typed keys.
    step: the learner step at which it was saved.
  """

  state: Tree
  step: int


def _is_ours(record: Any) -> bool:
  """Whether to log a record: not Orbax's dozens of lines about each save, except its errors."""
  return 'orbax' not in record.pathname or record.levelno >= levels.ERROR


def _is_key(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_arrays(state: Tree) -> dict[str, np.ndarray]:
  """The host arrays of a tree by their paths; a PRNG key as its `key_data`."""
  flat, _ = jax.tree_util.tree_flatten_with_path(state)
  return {
    jax.tree_util.keystr(path): np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    for path, leaf in flat
  }


def _pack(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, list[Any]]:
  """Packs all arrays into one of bytes; also returns name, dtype and shape of each.

  TensorStore 0.1.78 loses the memory of a few strings for each array that Orbax has it write
  (`KvStore.Spec.to_json`), a third of a kB; a train state has hundreds of arrays, one is soon written.
  """
  index = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
  flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
  return np.concatenate(flat), index


def _unpack(content: np.ndarray, index: list[Any]) -> dict[str, np.ndarray]:
  """The inverse of `_pack`; ValueError for content of another size."""
  shapes = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for _, dtype, shape in index]
  ends = np.cumsum([0, *(math.prod(each.shape) * each.dtype.itemsize for each in shapes)])
  if len(content) != ends[-1]:
    raise ValueError(f'it has {len(content)} bytes in place of {ends[-1]}')
  return {
    name: content[start:end].copy().view(each.dtype).reshape(each.shape)
    for (name, _, _), each, start, end in zip(index, shapes, ends[:-1], ends[1:], strict=True)
  }


def _is_rest(name: str) -> bool:
  return name.startswith(_ONLY_TO_RESUME)


def best(steps: Sequence[int], scores: Sequence[tuple[int, float]]) -> int | None:
  """The checkpoint nearest to the evaluation with the highest score; of equal ones, the later.

  A run may go on while it is evaluated, so the two need not be of the same step.

  Args:
    steps: learner steps of the checkpoints.
    scores: learner step and score of each evaluation.

  Returns:
    Learner step of that checkpoint; None without a checkpoint or a score.
  """
  if not steps or not scores:
    return None
  _, evaluated = max((score, step) for step, score in scores)
  return min(steps, key=lambda step: (abs(step - evaluated), -step))


def transplanted(arrays_of: Tree, like: Tree) -> Tree:
  """Puts the arrays of one tree into the structure of another.

  Args:
    arrays_of: tree of host arrays, matched by their paths.
    like: tree with the wanted structure, of arrays or of their shapes and dtypes.

  Returns:
    A tree like `like`, of the host arrays of `arrays_of`; PRNG keys are typed again.

  Raises:
    ValueError: an array is missing, has another shape, or is left over; the message names it.
  """
  arrays = _to_arrays(arrays_of)
  for name, (needed, found) in _misfits(arrays, like).items():
    raise ValueError(f'{name} should be {needed} and is {found}')
  flat, _ = jax.tree_util.tree_flatten_with_path(like)
  for name in sorted(arrays.keys() - {jax.tree_util.keystr(path) for path, _ in flat}):
    raise ValueError(f'{name} should not be there')
  return _rebuild(arrays, like)


def _misfits(
  arrays: dict[str, np.ndarray], like: Tree, any_length: tuple[str, ...] = ()
) -> dict[str, tuple[Any, Any]]:
  """Leaves of `like` that `arrays` lacks or has in another shape: by path, shape needed and found."""
  flat, _ = jax.tree_util.tree_flatten_with_path(like)
  misfits = {}
  for path, leaf in flat:
    name = jax.tree_util.keystr(path)
    shape = jax.eval_shape(jax.random.key_data, leaf).shape if _is_key(leaf) else leaf.shape
    found = arrays[name].shape if name in arrays else 'nothing'
    if name in arrays and name.startswith(tuple(f'.{field}' for field in any_length)):
      shape = (*found[:1], *shape[1:])
    if shape != found:
      misfits[name] = (shape, found)
  return misfits


def _is_for_want_of_room(error: OSError | ValueError) -> bool:
  """Whether an error reports a full disk; Orbax's storage quotes the system's message in its own."""
  if isinstance(error, OSError):
    return error.errno in NO_ROOM
  return any(os.strerror(number) in str(error) for number in NO_ROOM)


def _rebuild(arrays: dict[str, np.ndarray], like: Tree) -> Tree:
  flat, treedef = jax.tree_util.tree_flatten_with_path(like)
  leaves = []
  for path, leaf in flat:
    array = arrays[jax.tree_util.keystr(path)]
    leaves.append(jax.random.wrap_key_data(jnp.asarray(array)) if _is_key(leaf) else array)
  return jax.tree_util.tree_unflatten(treedef, leaves)


def _digest(arrays: dict[str, np.ndarray]) -> str:
  """A hash of names, shapes, dtypes and bytes: a flipped bit anywhere shows."""
  digest = hashlib.sha256()
  for name in sorted(arrays):
    array = np.ascontiguousarray(arrays[name])
    digest.update(f'{name} {array.shape} {array.dtype};'.encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def _checked(content: Any, record: dict[str, Any]) -> dict[str, np.ndarray]:
  """The arrays of one part of a checkpoint; ValueError if they do not match their digest."""
  arrays = {name: np.asarray(array) for name, array in content.items()}
  if _INDEX in record:  # otherwise of an older version, which saved every array by itself
    arrays = _unpack(arrays[_BYTES], record[_INDEX])
  if _digest(arrays) != record['sha256']:
    raise ValueError('its content does not match its digest')
  return arrays


class _Thinned(Exception):  # noqa: N818  it is no error
  """A checkpoint lacks the fields that only a run that resumes needs."""


class Checkpointer:
  """The checkpoints of one run, newest last; each is complete or not there at all.

  Orbax writes in the background and renames when done, so a killed process leaves the previous
  checkpoint as the newest. A digest of the content is stored next to it, since a file system may
  also damage a complete file.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    *,
    read_only: bool = False,
    keep: int = WHOLE,
    scores: Callable[[], Sequence[tuple[int, float]]] = lambda: (),
  ):
    """Opens `directory`, and makes it unless `read_only`.

    Args:
      directory: folder of the checkpoints.
      read_only: whether to read only, because a run may be writing to the folder.
      keep: number of newest checkpoints that stay, in addition to the best one.
      scores: returns learner step and score of each evaluation so far, see `best`.
    """
    logging.get_absl_logger().addFilter(_is_ours)
    self._read_only = read_only
    options = ocp.CheckpointManagerOptions(read_only=True)
    if not read_only:
      directory.mkdir(parents=True, exist_ok=True)
      options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
        create=False,
        # In a learner of several processes only the first saves, and waits for none of them.
        multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes={0}),
      )
    self._manager = ocp.CheckpointManager(
      directory.resolve(),
      options=options,
      item_names=(STATE, REST, DIGEST),
    )
    self._directory = directory.resolve()
    self._keep = keep
    self._scores = scores

  def save(self, step: int, state: Tree) -> None:
    """Begins to save one replica; returns once its arrays are copied.

    A save for which the disk has no space leaves nothing behind and is logged, here or by the next
    call; earlier checkpoints stay.

    Args:
      step: the learner step; does nothing if its checkpoint is the newest already.
      state: the train state of one replica.

    Raises:
      OSError, ValueError: this save or the one before failed for another reason.
    """
    if step == self._manager.latest_step():
      return
    process.trim()  # each save runs in threads of its own, whose memory is kept otherwise
    arrays = _to_arrays(state)
    rest = {name: array for name, array in arrays.items() if _is_rest(name)}
    arrays = {name: array for name, array in arrays.items() if not _is_rest(name)}
    content, index = _pack(arrays)
    record: dict[str, Any] = {'sha256': _digest(arrays), _INDEX: index, _VERSION: VERSION}
    items = {STATE: ocp.args.StandardSave({_BYTES: content})}
    if rest:
      rest_content, rest_index = _pack(rest)
      record[REST] = {'sha256': _digest(rest), _INDEX: rest_index}
      items[REST] = ocp.args.StandardSave({_BYTES: rest_content})
    items[DIGEST] = ocp.args.JsonSave(record)
    for _ in range(2):  # the first may only hear of the save before
      try:
        self._manager.save(step, args=ocp.args.Composite(**items))
        self._prune()
        return
      except (OSError, ValueError) as error:
        if not _is_for_want_of_room(error):
          raise
        reason = str(error).split('\n')[0][:200]
        logging.warning('A checkpoint was not saved: %s; training continues.', reason)
        for partial in self._directory.glob('*.orbax-checkpoint-tmp'):
          shutil.rmtree(partial, ignore_errors=True)

  def wait(self) -> None:
    """Waits until the checkpoints that were begun are on disk.

    Raises:
      OSError, ValueError: a save failed, such as for lack of disk space.
    """
    self._manager.wait_until_finished()
    if not self._read_only:
      self._prune()

  def steps(self) -> list[int]:
    """Learner steps of the complete checkpoints, the newest last."""
    return saved_steps(self._directory)

  def find(self, which: str) -> int:
    """Finds a checkpoint by its name: BEST, or the digits of a learner step; returns its learner step.

    Raises:
      ValueError: there is no such checkpoint; the message lists the existing ones.
    """
    steps = self.steps()
    there = f'there are {", ".join(map(str, steps))}' if steps else 'nothing has been saved yet'
    if which == BEST:
      found = best(steps, self._scores())
      if found is None:
        raise ValueError(f'best: no evaluation says which; {there}')
      return found
    if which not in map(str, steps):
      raise ValueError(f'{which}: is not the update of a checkpoint, nor best; {there}')
    return int(which)

  def _prune(self) -> None:
    """Deletes all but the newest checkpoints and the best, and what older ones need to resume."""
    steps = self.steps()
    kept = {*steps[-self._keep :], best(steps, self._scores())}
    for step in steps:
      if step not in kept:
        self._manager.delete(step)
      elif step not in steps[-WHOLE:]:
        shutil.rmtree(self._directory / str(step) / REST, ignore_errors=True)

  def restore(
    self,
    like: Tree,
    *,
    step: int | None = None,
    may_differ: tuple[str, ...] = (),
    any_length: tuple[str, ...] = (),
  ) -> Restored | None:
    """Reads the newest intact checkpoint; broken ones are logged, and moved aside unless `read_only`.

    Args:
      like: a train state, or its shapes and dtypes.
      step: learner step of the only checkpoint to try; None for the newest intact one.
      may_differ: fields whose shapes may differ from the checkpoint's, and then are None in the result.
      any_length: paths of fields whose leading axis may have any length.

    Returns:
      The train state and its learner step; None without an intact checkpoint.

    Raises:
      ValueError: an intact checkpoint lacks an array of `like`, or holds it in another shape; the message
        names one.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(like)
    with_rest = any(_is_rest(jax.tree_util.keystr(path)) for path, _ in flat)
    steps = sorted(self._manager.all_steps(), reverse=True) if step is None else [step]
    for step in steps:
      try:
        arrays, version = self._read(step, with_rest)
      except _Thinned:
        continue
      except Exception as error:  # a broken file may raise any error
        logging.warning(
          'Checkpoint %s is broken (%s: %s); falling back to the one before.',
          self._directory / str(step), type(error).__name__, str(error).split('\n')[0][:200],
        )  # fmt: skip
        if not self._read_only:
          self._set_aside(step)
        continue
      for field in may_differ:
        if any(name.startswith(f'.{field}') for name in _misfits(arrays, like)):
          like = like._replace(**{field: None})
      misfits = _misfits(arrays, like, any_length)
      if misfits:
        name, (needed, found) = next(iter(misfits.items()))
        why = 'with another configuration, or by a version whose network differs'
        if version < VERSION:
          why = f'by an older version of hephaestus (format {version}; now {VERSION}), or otherwise {why}'
        raise ValueError(
          f'checkpoint {self._directory / str(step)}: {name} should be {needed} and is {found}; '
          f'it was saved {why}; choose another run folder'
        )
      return Restored(_rebuild(arrays, like), step)
    return None

  def _read(self, step: int, with_rest: bool) -> tuple[dict[str, np.ndarray], int]:
    """The arrays of a checkpoint, and the version of its content."""
    restore = lambda **items: self._manager.restore(step, args=ocp.args.Composite(**items))
    record = restore(digest=ocp.args.JsonRestore())[DIGEST]
    arrays = _checked(restore(state=ocp.args.StandardRestore())[STATE], record)
    if with_rest and REST in record:
      if not (self._directory / str(step) / REST).exists():
        raise _Thinned
      arrays |= _checked(restore(rest=ocp.args.StandardRestore())[REST], record[REST])
    return arrays, record.get(_VERSION, 1)

  def _set_aside(self, step: int) -> None:
    place = self._directory / str(step)
    broken = self._directory.parent / 'broken_checkpoints'
    broken.mkdir(exist_ok=True)
    target = broken / str(step)
    for attempt in range(1, 1000):
      if not target.exists():
        break
      target = broken / f'{step}-{attempt}'
    place.rename(target)
    self._manager.reload()

  def close(self) -> None:
    """Waits as `wait` does, with the same errors, and closes Orbax's manager."""
    if not self._read_only:
      self._manager.wait_until_finished()
      self._prune()
    self._manager.close()


def saved_steps(directory: pathlib.Path) -> list[int]:
  """Learner steps of the complete checkpoints in a folder, by their names, the newest last."""
  names = [path.name for path in directory.glob('*')]
  return sorted(int(name) for name in names if re.fullmatch('0|[1-9][0-9]{0,17}', name))


def replica(state: Tree) -> Tree:
  """The first of the D replicas of a state, [D, ...], as host arrays and typed keys [...]."""
  first = jax.tree.map(lambda x: x[0], state)
  return jax.tree.map(lambda x: x if _is_key(x) else np.asarray(x), first)
