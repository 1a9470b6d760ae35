"""The folder of a run: its config, its lock, and the names of the files in it."""

import contextlib
import errno
import fcntl
import itertools
import os
import pathlib
import shlex
import stat
import time
from collections.abc import Callable, Iterator

from hephaestus.actors.environments import names
from hephaestus.launch import config as launch_config
from hephaestus.launch.files import metrics

ADDRESS, CONFIG, LOCK = 'address', 'config.yaml', 'lock'
INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell: 128 + SIGINT
STOPPING = 'stopping: saving the last checkpoint; a second Ctrl-C ends the run at once'
COLLECTED = 'collected.json'  # sequences that each shard of replay has inserted, and those lost
COUNTS = 'counts.jsonl'  # one row of the learner's newest counts, for the progress line
ORIGIN = 'origin'  # RUN@STEP with which a run began
WANDB = 'wandb'  # the library's own folder, in which it makes links; we read its *.id only


def new(config: launch_config.ExperimentConfig) -> pathlib.Path:
  """Returns the path of a new run folder, runs/ENVIRONMENT-TIME with a suffix if taken; does not make it."""
  name = config.environment['name'].replace('/', '-').replace(':', '-')
  stem = f'{name}-{time.strftime("%Y%m%d-%H%M%S")}'
  free = itertools.chain([stem], (f'{stem}-{number}' for number in itertools.count(2)))
  return next(path for each in free if not (path := pathlib.Path('runs') / each).exists())


def resumes(folder: pathlib.Path | None) -> bool:
  """Whether a folder given by --run has a run, to be resumed; ValueError if there can be no such folder."""
  try:
    return folder is not None and (folder / CONFIG).exists()
  except OSError as error:  # such as of a name that is too long
    raise ValueError(f'--run {folder}: cannot be used ({error.strerror})') from None


def resume_command(folder: pathlib.Path, config: launch_config.ExperimentConfig) -> str:
  """The command that resumes a run, with --trust if its config names something to import."""
  given = (config.agent_name, config.environment['name'], config.logger or '')
  quoted = shlex.quote(str(folder))
  return f'hephaestus train --run {quoted}' + ' --trust' * any(map(names.needs_trust, given))


@contextlib.contextmanager
def claimed(
  config: launch_config.ExperimentConfig, given: pathlib.Path | None = None
) -> Iterator[pathlib.Path]:
  """Makes a run folder, and at the end of the context removes what it has made, where that is empty.

  So a folder that cannot be made is refused at once, and no other run of the same second takes its name.

  Args:
    config: config of the run.
    given: folder of the run, which may exist; None for a new one, see `new`.

  Raises:
    ValueError: the folder cannot be made or written to, or has other files but no config.
  """
  while True:
    folder = new(config) if given is None else given
    missing = [each for each in (folder, *folder.absolute().parents) if not os.path.exists(each)]
    try:
      _make(folder, exist_ok=given is not None)
      break
    except FileExistsError:
      continue
  try:
    yield folder
  finally:
    with contextlib.suppress(OSError):  # it is not empty, once the run has begun
      for each in missing:
        each.rmdir()


def _make(folder: pathlib.Path, *, exist_ok: bool = True) -> None:
  """Makes the folder of a run; FileExistsError only if it may not exist, ValueError if it cannot be used."""
  try:
    folder.mkdir(parents=True, exist_ok=exist_ok)
    if not os.access(folder, os.W_OK):
      raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if not (folder / CONFIG).exists() and any(folder.iterdir()):
      raise ValueError(f'--run {folder}: is not empty and has no {CONFIG}; give another folder')
  except OSError as error:
    if isinstance(error, FileExistsError) and not exist_ok:
      raise
    raise ValueError(f'--run {folder}: cannot be written to ({error.strerror})') from None


def check_entries(folder: pathlib.Path) -> None:
  """Refuses a folder with entries that are neither regular files nor folders, since it may be of somebody else.

  A link may lead outside the folder, where commands then would read, write or delete; a FIFO would
  never end. The folder itself may be a link.

  Raises:
    ValueError: an entry, at any depth, is a link or another kind of file, or its name has a character that a
      terminal obeys; names it.
  """
  for root, folders, files in os.walk(folder):
    in_wandb = pathlib.Path(root) == folder / WANDB
    for name in [*folders, *files]:
      if in_wandb and not name.endswith('.id'):
        continue
      path = pathlib.Path(root, name)
      if not name.isprintable():
        raise ValueError(f'{folder}: its entry {name!r} has a control character; delete it')
      with contextlib.suppress(FileNotFoundError):  # a run may delete a checkpoint meanwhile
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
          kind = 'a symbolic link' if stat.S_ISLNK(mode) else 'no regular file'
          raise ValueError(
            f'{folder}: its entry {path.relative_to(folder)} is {kind}, which is not followed; put the '
            'files themselves there, or delete it'
          )
    if in_wandb:
      folders.clear()


def open_run(
  folder: pathlib.Path,
  config: launch_config.ExperimentConfig,
  begin: Callable[[], None] = lambda: None,
  *,
  keep: bool = False,
) -> None:
  """Makes the folder of a run, or checks an existing one, and writes the config into it.

  The config comes last, after `begin` has written what the run begins with: a folder without it is no run.

  Args:
    begin: writes what the run begins with.
    keep: whether an existing run keeps its config, until the caller knows that it can resume with the new one.

  Raises:
    ValueError: the folder is not writable, is being trained, has other files but no config, or its run
      cannot resume with this config.
  """
  _make(folder)
  try:
    with only_one(folder):
      is_known = (folder / CONFIG).exists()
      if is_known:
        check(folder, config)
      for name in ('metrics', 'logs', 'checkpoints', 'replay', 'videos', 'tensorboard'):
        (folder / name).mkdir(exist_ok=True)
      begin()
      if not (keep and is_known):
        launch_config.save(config, folder / CONFIG)
  except OSError as error:
    raise ValueError(
      f'--run {folder}: cannot be written to ({error.strerror}: {error.filename})'
    ) from None


def check(folder: pathlib.Path, config: launch_config.ExperimentConfig) -> None:
  """Raises ValueError if the run in a folder cannot resume with this config; names the keys."""
  differences = launch_config.conflicts(load_config(folder), config)
  if differences:
    raise ValueError(
      f'--run {folder}: was made with another configuration. ' + '; '.join(differences)
      + '. Give the old values or another folder'
    )  # fmt: skip


@contextlib.contextmanager
def only_one(folder: pathlib.Path) -> Iterator[None]:
  """Locks a run folder within the context; ValueError if another launcher has locked it."""
  descriptor = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
  with os.fdopen(descriptor, 'w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f'--run {folder}: is being trained already; stop that run or give another folder'
      ) from None
    yield


def is_running(folder: pathlib.Path) -> bool:
  """Whether a launcher on this machine has locked the folder, i.e. trains the run; takes no lock."""
  try:
    # Only inodes are compared, because some file systems report another device here than there.
    place = f':{(folder / LOCK).stat().st_ino} '
    return any(place in line for line in pathlib.Path('/proc/locks').read_text().splitlines())
  except OSError:
    return False


def origin(folder: pathlib.Path) -> str | None:
  """RUN@STEP with whose parameters a run began, see `train --from`; None if with new ones."""
  try:
    with metrics.open_regular(folder / ORIGIN) as file:
      text = file.read(4096).decode(errors='replace').strip()
  except OSError:
    return None
  return text if text.isprintable() and text else None


def is_node(name: str, config: launch_config.ExperimentConfig) -> bool:
  """Whether a run with this config has the node `name`: metrics of actors stay where it is resumed with fewer."""
  kind, _, index = name.rpartition('-')
  return kind != 'actor' or not index.isdecimal() or int(index) < config.actor.num_actors


def has_finished(folder: pathlib.Path, config: launch_config.ExperimentConfig) -> bool:
  """Whether the run in a folder has reached the end that its config has now.

  The evaluator's newest row of metrics is `final` then, and of the last step unless a time limit ends the run.
  """
  last = metrics.last(folder / 'metrics' / 'evaluator.jsonl') or {}
  return bool(last.get('final')) and reaches_end(config, last.get('environment_step'))


def reaches_end(config: launch_config.ExperimentConfig, step: float | None) -> bool:
  """Whether an evaluation that was the last of a run is of the end that its config has now, by its environment step."""
  return config.max_minutes is not None or (step or 0) >= config.max_environment_steps


def load_config(folder: pathlib.Path) -> launch_config.ExperimentConfig:
  """Reads the config of the run in a folder.

  Raises:
    ValueError: it is not the folder of a run, an entry is refused (see `check_entries`), or its config
      is not one of this version, or not trusted (see `records.trusting`).
  """
  check_entries(folder)
  if not (folder / CONFIG).exists():
    raise ValueError(f'{folder}: is not the folder of a run, it has no {CONFIG}')
  return launch_config.load(folder / CONFIG)
