"""Checkpoints of one replica of a train state, in safetensors, written in the background and checked."""

import concurrent.futures
import errno
import hashlib
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from absl import logging
from safetensors import numpy as arrays_lib

Tree = Any
STATE, REST = 'state.safetensors', 'rest.safetensors'
_VERSION, _STEP, _DIGEST, _HAS_REST = 'version', 'step', 'sha256', 'has_rest'  # in the headers
_PARTIAL = '.partial'  # ends the name of a folder that is being written
VERSION = 7  # of what a checkpoint holds: since 7, statistics apart from parameters
_OLDER = 'digest'  # a folder in checkpoints of older versions
WHOLE = 3  # newest checkpoints that a run can resume from; older ones lose what only that needs
_ONLY_TO_RESUME = ('.worlds', '.replay')  # fields of a fused run's state: environments and replay
BEST = 'best'
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Restored(NamedTuple):
  """The train state of a checkpoint, one replica of host arrays and typed keys, and its learner step."""

  state: Tree
  step: int


def _is_key(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_arrays(state: Tree) -> dict[str, np.ndarray]:
  """Copies the arrays of a tree, by their paths; a PRNG key as its `key_data`."""
  flat, _ = jax.tree_util.tree_flatten_with_path(state)
  return {
    jax.tree_util.keystr(path): np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    for path, leaf in flat
  }


def best(steps: Sequence[int], scores: Sequence[tuple[int, float]]) -> int | None:
  """Learner step of the checkpoint nearest to the evaluation with the highest score; of equal ones, the later.

  A run may go on while it is evaluated, so the two need not be of the same step. None without a
  checkpoint or score; `scores` are learner step and score of each evaluation.
  """
  if not steps or not scores:
    return None
  _, evaluated = max((score, step) for step, score in scores)
  return min(steps, key=lambda step: (abs(step - evaluated), -step))


def transplanted(arrays_of: Tree, like: Tree) -> Tree:
  """Puts the arrays of one tree, matched by their paths, into the structure of `like`; types PRNG keys again.

  ValueError, which names the array, if one is missing, has another shape or dtype, or is left over.
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
  """Leaves of `like` that `arrays` lacks or has in another shape or dtype: by path, what is needed and found."""
  flat, _ = jax.tree_util.tree_flatten_with_path(like)
  misfits: dict[str, tuple[Any, Any]] = {}
  for path, leaf in flat:
    name = jax.tree_util.keystr(path)
    leaf = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    if name not in arrays:
      misfits[name] = leaf.shape, 'nothing'
      continue
    shape, array = leaf.shape, arrays[name]
    if name.startswith(tuple(f'.{field}' for field in any_length)):
      shape = (*array.shape[:1], *shape[1:])
    needed, found = map(jax.dtypes.canonicalize_dtype, (leaf.dtype, array.dtype))
    if shape != array.shape:
      misfits[name] = shape, array.shape
    elif needed != found:
      misfits[name] = needed, found
  return misfits


def _rebuild(arrays: dict[str, np.ndarray], like: Tree) -> Tree:
  flat, treedef = jax.tree_util.tree_flatten_with_path(like)
  leaves = []
  for path, leaf in flat:
    array = arrays[jax.tree_util.keystr(path)]
    leaves.append(jax.random.wrap_key_data(jnp.asarray(array)) if _is_key(leaf) else array)
  return jax.tree_util.tree_unflatten(treedef, leaves)


def _digest(arrays: dict[str, np.ndarray], step: str) -> str:
  """A hash of step, names, shapes, dtypes and bytes: a flipped bit anywhere shows."""
  digest = hashlib.sha256(step.encode())
  for name in sorted(arrays):
    array = arrays[name]
    digest.update(f'{name} {array.shape} {array.dtype};'.encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
  return digest.hexdigest()


def _write(path: pathlib.Path, step: int, arrays: dict[str, np.ndarray], **header: str) -> None:
  header |= {_VERSION: str(VERSION), _STEP: str(step), _DIGEST: _digest(arrays, str(step))}
  try:
    arrays_lib.save_file(arrays, path, header)
  except safetensors.SafetensorError as error:  # it quotes the system's message
    number = next((each for each in NO_ROOM if os.strerror(each) in str(error)), errno.EIO)
    reason = str(error) if number == errno.EIO else os.strerror(number)
    raise OSError(number, reason, str(path)) from None
  path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets only its owner read the file
  _sync(path)


def _sync(path: pathlib.Path) -> None:
  """Waits until a file, or the names in a folder, are on the disk, so that a power cut does not empty them."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _read(path: pathlib.Path, step: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """The arrays and the header of a file of a learner step; ValueError if they do not match their digest."""
  if not path.is_file():  # a pipe would be waited for
    raise ValueError(f'{path.name} is no file')
  with safetensors.safe_open(path, 'numpy') as file:
    header = file.metadata()
  arrays = arrays_lib.load_file(path)
  saved = header.get(_STEP, '')  # which older files do not have
  if saved not in ('', str(step)):
    raise ValueError(f'it is of update {saved}')
  if _digest(arrays, saved) != header[_DIGEST]:
    raise ValueError('its content does not match its digest')
  return arrays, header


def _by_older(version: object) -> str:
  return f'by an older version of hephaestus (format {version}; now {VERSION})'


class Checkpointer:
  """The checkpoints of one run, newest last; each is complete or not there at all.

  A checkpoint is a folder, named by its learner step, that is renamed when all is written, so a killed
  process leaves the previous checkpoint as the newest. A file's header has a digest of its arrays, since
  a file system may also damage a complete file.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    *,
    read_only: bool = False,
    keep: int = WHOLE,
    scores: Callable[[], Sequence[tuple[int, float]]] = lambda: (),
  ):
    """Opens `directory`, the folder of the checkpoints, and makes it unless `read_only`.

    Args:
      read_only: whether to read only, because a run may be writing to the folder.
      keep: number of newest checkpoints that stay, in addition to the best one.
      scores: returns learner step and score of each evaluation so far, see `best`.
    """
    self._directory = directory.resolve()
    self._read_only = read_only
    self._keep = keep
    self._scores = scores
    self._writer = concurrent.futures.ThreadPoolExecutor(1, 'checkpoint')
    self._writing: concurrent.futures.Future[None] | None = None
    if not read_only:
      directory.mkdir(parents=True, exist_ok=True)

  def save(self, step: int, state: Tree, *, again: bool = False) -> None:
    """Begins to save one replica; returns once its arrays are copied, and the save before is complete.

    Does nothing unless `step`, the learner step, is later than the newest checkpoint's, or equal and to be
    saved `again`, with more experience. A save for which the disk has no space leaves nothing behind and is
    logged by the next call; earlier checkpoints stay. OSError if the save before failed for another reason.
    """
    try:
      self.wait()
    except OSError as error:
      if error.errno not in NO_ROOM:
        raise
      logging.warning('A checkpoint was not saved: %s; training continues.', error)
    if any(saved >= step + again for saved in self.steps()):
      return
    arrays = _to_arrays(state)
    self._writing = self._writer.submit(self._save, step, arrays)

  def _save(self, step: int, arrays: dict[str, np.ndarray]) -> None:
    """Writes the files of a checkpoint, in a thread of its own, and deletes what is no longer kept."""
    for left in self._directory.glob(f'*{_PARTIAL}'):  # of a process that was killed
      shutil.rmtree(left)
    rest = {name: arrays.pop(name) for name in list(arrays) if name.startswith(_ONLY_TO_RESUME)}
    place = self._directory / f'{step}{_PARTIAL}'
    place.mkdir()
    try:
      _write(place / STATE, step, arrays, **({_HAS_REST: 'yes'} if rest else {}))
      if rest:
        _write(place / REST, step, rest)
      _sync(place)
      there = self._directory / str(step)
      if there.exists():  # of the same step, so each new file also fits the other's older one
        for file in sorted(place.iterdir()):
          file.replace(there / file.name)
        _sync(there)
        place.rmdir()
      else:
        place.rename(there)
      _sync(self._directory)
    except BaseException:
      shutil.rmtree(place, ignore_errors=True)
      raise
    self._prune()

  def wait(self) -> None:
    """Waits until the checkpoint that was begun is on disk; OSError if its save failed, such as for lack of space."""
    writing, self._writing = self._writing, None
    if writing is not None:
      writing.result()

  def steps(self) -> list[int]:
    """Learner steps of the complete checkpoints, the newest last."""
    return saved_steps(self._directory)

  def find(self, which: str) -> int:
    """Finds a checkpoint by its name: BEST, or the digits of a learner step; returns its learner step.

    ValueError, which lists the existing ones, if there is none.
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
        shutil.rmtree(self._directory / str(step), ignore_errors=True)
      elif step not in steps[-WHOLE:]:
        (self._directory / str(step) / REST).unlink(missing_ok=True)

  def restore(
    self,
    like: Tree,
    *,
    step: int | None = None,
    may_differ: tuple[str, ...] = (),
    any_length: tuple[str, ...] = (),
  ) -> Restored | None:
    """Reads the newest intact checkpoint; broken ones after it are logged, and moved aside unless `read_only`.

    Args:
      like: a train state, or its shapes and dtypes.
      step: learner step of the only checkpoint to try; None for the newest intact one.
      may_differ: fields whose shapes may differ from the checkpoint's, and then are None in the result.
      any_length: paths of fields whose leading axis may have any length.

    Returns:
      The train state and its learner step; None without a checkpoint, and if `read_only` also without an
      intact one.

    Raises:
      ValueError: there are checkpoints, of which a run cannot resume from one: it would begin anew, and
        overwrite its metrics. Or an intact checkpoint lacks an array of `like`, or holds it in another shape
        or dtype; the message names one. Or it was saved by a version that wrote other files.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(like)
    with_rest = any(jax.tree_util.keystr(path).startswith(_ONLY_TO_RESUME) for path, _ in flat)
    steps = self.steps()[::-1] if step is None else [step]
    broken = []
    for step in steps:
      place = self._directory / str(step)
      if (place / _OLDER).is_dir():
        raise ValueError(
          f'checkpoint {place}: it was saved {_by_older("below 5")}; choose another run folder'
        )
      try:
        arrays, header = _read(place / STATE, step)
        version = int(header[_VERSION])
        if with_rest and _HAS_REST in header:
          if not (place / REST).exists():  # only for acting
            continue
          arrays |= _read(place / REST, step)[0]
      except Exception as error:  # a broken file may raise any error
        logging.warning(
          'Checkpoint %s is broken (%s: %s); falling back to the one before.',
          place, type(error).__name__, repr(str(error))[1:-1][:200],
        )  # fmt: skip
        broken.append(step)
        continue
      if not self._read_only:
        for each in broken:
          self._set_aside(each)
      for field in may_differ:
        if any(name.startswith(f'.{field}') for name in _misfits(arrays, like)):
          like = like._replace(**{field: None})
      misfits = _misfits(arrays, like, any_length)
      if misfits:
        name, (needed, found) = next(iter(misfits.items()))
        why = 'with another configuration, or by a version whose network differs'
        if version < VERSION:
          why = f'{_by_older(version)}, or otherwise {why}'
        raise ValueError(
          f'checkpoint {place}: {name} should be {needed} and is {found}; '
          f'it was saved {why}; choose another run folder'
        )
      return Restored(_rebuild(arrays, like), step)
    if steps and not self._read_only:
      raise ValueError(
        f'{self._directory}: no checkpoint is intact of {", ".join(map(str, steps))}, so the run cannot '
        'resume; restore one from a backup, or choose another run folder'
      )
    return None

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

  def close(self) -> None:
    """Waits as `wait` does, with the same errors, and ends the thread."""
    self._writer.shutdown()
    self.wait()


def saved_steps(directory: pathlib.Path) -> list[int]:
  """Learner steps of the complete checkpoints in a folder, by their names, the newest last."""
  names = [path.name for path in directory.glob('*')]
  return sorted(int(name) for name in names if re.fullmatch('0|[1-9][0-9]{0,17}', name))
