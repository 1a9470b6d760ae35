"""Loggers of metrics (JSON lines always, TensorBoard and Weights & Biases on request), and readers."""

import contextlib
import errno
import json
import math
import os
import pathlib
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from absl import logging
from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2

from hephaestus.actors.environments import names, packages

if TYPE_CHECKING:
  from hephaestus.launch import config as launch_config

TAIL_BYTES = 1 << 16
LARGEST = 1e100  # absolute value of a number of a row; float32 ends at 3.4e38
LATEST = 1e11  # unix seconds, in the year 5138
MOST_KEYS = 1000  # names of metrics in a file
LONGEST_KEY = 200  # characters
# Characters that a terminal obeys, or cannot show, in texts of others.
CONTROL = re.compile(r'[\x00-\x1f\x7f-\x9f\ud800-\udfff]')
# Kinds of the fields of an event.
EVENT_KINDS: dict[str, Callable[[], Any]] = {
  'kind': str, 'name': str, 'text': str, 'pid': int, 'restarts': int, 'exit_code': int,
}  # fmt: skip
LARGEST_PID = 1 << 22  # of Linux
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Folder of a run, type of artifact, and names of complete files, by the node that uploads them.
UPLOADED = {
  'learner': ('checkpoints', 'checkpoint', r'\d+'),
  'evaluator': ('videos', 'video', r'.+\.(gif|mp4)'),
}


class JsonLines:
  """Logger that appends a row of metrics as one JSON object per line, `time` (unix seconds) first.

  A line is one write to the file, so a kill leaves at most one truncated line, which the next
  opening drops. NaN and the infinities, which JSON lacks, become null. If the disk is full, rows
  are dropped, with one warning until there is room again.
  """

  def __init__(self, path: str | os.PathLike[str], *, resume: tuple[str, int] | None = None):
    """Opens the file, or makes it and its folder.

    Args:
      path: path of the file.
      resume: (key of the step in a row, step from which the run resumes). Rows beyond that step are
        dropped, since the run will write them again; rows without the key stay. None keeps all.

    Raises:
      OSError: the file cannot be read or written.
    """
    self._path = pathlib.Path(path)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    if self._path.exists():
      _mend(self._path, resume)
    self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    self._dropped = 0

  def write(self, data: Mapping[str, Any]) -> None:
    """Appends a row: name -> scalar or array, of Python, NumPy or JAX."""
    row = {'time': time.time(), **plain(data)}
    line = json.dumps(row, allow_nan=False).encode() + b'\n'
    try:
      written = os.write(self._file, line)
    except OSError as error:
      if error.errno not in NO_ROOM:
        raise
      written = 0
    if written == len(line):
      if self._dropped:
        logging.warning('%s: there is room again; %d rows were dropped', self._path, self._dropped)
      self._dropped = 0
      return
    if written:  # nothing may follow half a row
      os.ftruncate(self._file, os.fstat(self._file).st_size - written)
    if not self._dropped:
      logging.warning('%s: the disk is full; rows are dropped until there is room', self._path)
    self._dropped += 1

  def close(self) -> None:
    os.close(self._file)


class TensorBoardLogger:
  """Logger that writes every number of a row as a TensorBoard scalar, at the step that `steps_key` names.

  The folder is made by the first write. After an error, such as a full disk, it writes no more until
  the node restarts.
  """

  def __init__(self, directory: pathlib.Path, steps_key: str):
    self._directory = directory
    self._steps_key = steps_key
    self._file: event_file_writer.EventsWriter | None = None
    self._has_given_up = False

  def write(self, data: Mapping[str, Any]) -> None:
    if self._has_given_up:
      return
    scalars = [
      summary_pb2.Summary.Value(tag=key, simple_value=value)
      for key, value in data.items()
      if isinstance(value, int | float) and key != self._steps_key
    ]
    event = event_pb2.Event(
      wall_time=time.time(),
      step=data[self._steps_key],
      summary=summary_pb2.Summary(value=scalars),
    )
    try:
      if self._file is None:
        self._directory.mkdir(parents=True, exist_ok=True)
        # The files of two starts within a second have the same name but for this.
        self._file = event_file_writer.EventsWriter(
          str(self._directory / 'events'), f'.{os.getpid()}'
        )
      self._file.write_event(event)
      self._file.flush()
    except OSError as error:
      logging.warning('%s: no more curves are written: %s', self._directory, error)
      self._has_given_up = True

  def close(self) -> None:
    if self._file is not None and not self._has_given_up:
      self._file.close()


def check_wandb() -> None:
  """Raises ValueError if a run could not report to Weights & Biases: without the package, or a key unless offline."""
  try:
    import wandb
  except ImportError as error:
    raise ValueError(
      'Weights & Biases was asked for, but the package is not installed. '
      f'Install the extra `wandb`: {packages.install("wandb")}'
    ) from error
  mode = os.environ.get('WANDB_MODE') or wandb.api.settings().get('mode', 'online')
  if mode in ('online', 'shared') and not wandb.api.api_key:
    raise ValueError(
      'wandb.enabled=True: there is no key of Weights & Biases; run `wandb login`, or set WANDB_MODE=offline'
    )


class WandbLogger:
  """Logger that sends rows to Weights & Biases: one group per run, one W&B run in it per node.

  With `options.artifacts`, the learner also uploads each checkpoint, and the evaluator each video.

  Raises:
    ValueError: the package `wandb` is not installed, or has no key; see `check_wandb`.
  """

  def __init__(
    self,
    run_directory: pathlib.Path,
    node_name: str,
    steps_key: str,
    options: 'launch_config.WandbConfig',
  ):
    check_wandb()
    import wandb

    id_file = run_directory / 'wandb' / f'{node_name}.id'
    if not id_file.exists():
      id_file.parent.mkdir(parents=True, exist_ok=True)
      id_file.write_text(wandb.util.generate_id())
    group = options.group or run_directory.resolve().name
    self._run = wandb.init(
      entity=options.entity,
      project=options.project,
      group=group,
      name=node_name if options.name is None else f'{options.name} {node_name}',
      tags=options.tags,
      id=id_file.read_text(),
      resume='allow',
      reinit='create_new',  # a fused run has several nodes in one process
      dir=str(run_directory),
    )
    # The step of wandb may not decrease, but the step of a run does after a restore.
    self._run.define_metric('*', step_metric=steps_key)
    name = re.sub(r'[^\w.-]+', '-', f'{group}-{options.name or run_directory.resolve().name}')
    self._artifact = lambda kind: wandb.Artifact(f'{name}-{kind}', type=kind)
    self._watched = UPLOADED.get(node_name) if options.artifacts else None
    self._directory = run_directory
    self._sent: set[str] = set()

  def write(self, data: Mapping[str, Any]) -> None:
    self._run.log(dict(data))
    self._upload()

  def _upload(self) -> None:
    """Uploads files that are new since the last call; W&B does not store known content twice."""
    if self._watched is None:
      return
    folder, kind, pattern = self._watched
    for path in sorted((self._directory / folder).glob('*')):
      if path.name in self._sent or not re.fullmatch(pattern, path.name):
        continue
      self._sent.add(path.name)
      artifact = self._artifact(kind)
      try:
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
      except OSError as error:  # a checkpoint that was deleted meanwhile
        logging.warning('%s: is not uploaded: %s', path, error)
        continue
      self._run.log_artifact(artifact, aliases=['latest', path.stem])

  def close(self) -> None:
    self._upload()
    self._run.finish()


class Loggers:
  """Logger that converts each row by `plain` and writes it to several loggers."""

  def __init__(self, to: Sequence[Any]):
    self._to = to

  def write(self, data: Mapping[str, Any]) -> None:
    row = plain(data)
    for logger in self._to:
      logger.write(row)

  def close(self) -> None:
    for logger in self._to:
      logger.close()


def make_logger(
  run_directory: str | os.PathLike[str],
  node_name: str,
  *,
  steps_key: str,
  tensorboard: bool = False,
  wandb: 'launch_config.WandbConfig | None' = None,
  own: str | None = None,
  resume: tuple[str, int] | None = None,
) -> Loggers:
  """Makes the logger of one node's metrics.

  Args:
    run_directory: folder of the run. Rows go to metrics/NODE.jsonl in it, TensorBoard files to
      tensorboard/NODE/.
    node_name: name of the node, such as `learner` or `actor-0`.
    steps_key: key, present in every row, whose value is the x-axis of its curves.
    tensorboard: whether to write TensorBoard files.
    wandb: settings of reports to Weights & Biases; None for no reports.
    own: import path of a function that makes a further logger, of the interface of Acme's loggers, from
      `node_name` and `steps_key`; None for none.
    resume: see `JsonLines`.

  Raises:
    ValueError: the package of Weights & Biases is needed and not installed, or `own` cannot be imported.
  """
  folder = pathlib.Path(run_directory)
  to: list[Any] = [JsonLines(folder / 'metrics' / f'{node_name}.jsonl', resume=resume)]
  if tensorboard:
    to.append(TensorBoardLogger(folder / 'tensorboard' / node_name, steps_key))
  if wandb is not None and wandb.enabled:
    to.append(WandbLogger(folder, node_name, steps_key, wandb))
  if own is not None:
    make = names.resolve(own, {}, field='logger', kind='logger')
    to.append(make(node_name, steps_key=steps_key))
  return Loggers(to)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads all rows of a file of metrics, oldest first; [] where there is no file.

  Lines that are no rows are left out, and a last line that is still being written, here and in
  `last` and `newest`.

  Raises:
    OSError: the file cannot be read, see `open_regular`; also raised by `last` and `newest`.
  """
  try:
    with open_regular(path) as file:
      content = file.read()
  except FileNotFoundError:
    return []
  return _rows(_whole_lines(content), path)


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
  """Opens a file of a run's folder to read; OSError if it is missing, a link, or no regular file."""
  descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise OSError(errno.EINVAL, 'is no regular file', os.fspath(path))
  return os.fdopen(descriptor, 'rb')


def last(path: str | os.PathLike[str]) -> dict[str, Any] | None:
  """Reads the newest row of a file of metrics; None where there is no row, or no file."""
  rows = newest(path, 1)
  return rows[0] if rows else None


def newest(path: str | os.PathLike[str], count: int) -> list[dict[str, Any]]:
  """Reads the newest rows of a file of metrics, at most `count`, oldest first; [] without a file.

  They are read from the last 64 KiB, then from twice as much, and so on, until there are enough.
  """
  path = pathlib.Path(path)
  start = size = path.stat().st_size if path.exists() else 0
  rows: list[dict[str, Any]] = []
  tail_bytes = TAIL_BYTES
  while start and len(rows) < count:
    start = max(size - tail_bytes, 0)
    with open_regular(path) as file:
      file.seek(start)
      lines = _whole_lines(file.read(size - start))
    rows = _rows(lines[1:] if start else lines, path)  # the first may be incomplete
    tail_bytes *= 2
  return rows[-count:]


def row(line: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
  """Parses a line of a file of metrics.

  Values of a node's row that are neither numbers nor None are left out, and those with hostile names.
  Texts of an event have no control characters.

  Args:
    line: the line, a JSON object with a number `time`.
    path: path of the file, whose name tells of which kind its rows are.

  Raises:
    ValueError: the line is no JSON object, has no `time`, a number is infinite or too large, or an event
      lacks its `kind` or has a field of another kind.
  """
  kind = pathlib.Path(path).stem.partition('-')[0]
  decimal, integer = lambda text: _small(float(text)), lambda text: _small(int(text))
  try:
    found = json.loads(line, parse_float=decimal, parse_int=integer, parse_constant=decimal)
    if kind in ('learner', 'actor', 'evaluator', 'counts'):
      found = {
        key: each for key, each in found.items()
        if (each is None or _is_number(each)) and len(key) <= LONGEST_KEY and not CONTROL.search(key)
      }  # fmt: skip
    elif kind == 'events':
      found = {
        key: CONTROL.sub('?', each) if isinstance(each, str) else each
        for key, each in found.items()
      }
    is_event = kind != 'events' or _is_event(found)
    if is_event and _is_number(found.get('time')) and 0 <= found['time'] <= LATEST:
      return found
  except (ValueError, TypeError, AttributeError, RecursionError):  # also of what is no object
    pass
  raise ValueError(f'{path}: {line[:40]!r} is not a row of metrics; remove that line')


def _small(number: float) -> float:
  if not -LARGEST <= number <= LARGEST:
    raise ValueError
  return number


def _is_event(row: Mapping[str, Any]) -> bool:
  given = {key: value for key, value in row.items() if value is not None}
  are_kinds = all(type(given.get(key, kind())) is kind for key, kind in EVENT_KINDS.items())
  return are_kinds and 'kind' in given and 0 < given.get('pid', 1) <= LARGEST_PID


def _rows(lines: Sequence[bytes], path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Parses lines, without those that are no rows or exceed MOST_KEYS; `history.File` counts them."""
  found = []
  known: set[str] = set()
  for line in lines:
    with contextlib.suppress(ValueError):
      each = row(line, path)
      if len(known) + len(each.keys() - known) <= MOST_KEYS:
        known |= each.keys()
        found.append(each)
  return found


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float)


def plain(value: Any) -> Any:
  """Converts a tree of NumPy or JAX scalars and arrays to types of JSON; NaN and infinities to None."""
  if isinstance(value, Mapping):
    return {key: plain(entry) for key, entry in value.items()}
  if isinstance(value, list | tuple):
    return [plain(entry) for entry in value]
  if isinstance(value, float):  # np.float64 is one, too
    return float(value) if math.isfinite(value) else None
  if value is None or isinstance(value, str | bool | int):
    return value
  array = np.asarray(value)
  if array.dtype.kind not in 'biufSU':  # such as bfloat16, which NumPy lacks
    array = array.astype(np.float64)
  return plain(array.tolist())


def to_json(report: dict[str, Any] | list[dict[str, Any]]) -> str:
  """Converts trees of scalars and arrays, of NumPy or JAX, to one line of JSON."""
  return json.dumps(plain(report))


def _mend(path: pathlib.Path, resume: tuple[str, int] | None) -> None:
  """Drops a truncated last line, and rows that a resumed run will write again."""
  with open_regular(path) as file:
    content = file.read()
  lines = _whole_lines(content)
  if resume is not None:
    key, step = resume
    # A line without the step, or that is no row, stays.
    lines = [
      each for each in lines if all((row.get(key) or 0) <= step for row in _rows([each], path))
    ]
  mended = b''.join(lines)
  if mended != content:
    temporary = path.with_name(f'.{path.name}.tmp')
    try:
      temporary.write_bytes(mended)
      os.replace(temporary, path)
    except OSError as error:
      if error.errno not in NO_ROOM:
        raise
      temporary.unlink(missing_ok=True)
      with open(path, 'r+b') as written:  # it only gets shorter
        written.write(mended)
        written.truncate()


def _whole_lines(content: bytes) -> list[bytes]:
  """Splits into lines, without a last one that has no newline, since it may still be being written."""
  return [line for line in content.splitlines(keepends=True) if line.endswith(b'\n')]
