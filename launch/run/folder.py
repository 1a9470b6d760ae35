"""The folder of a run: its config, its lock, and the names of the files in it."""

import contextlib
import fcntl
import pathlib
import time
from collections.abc import Iterator

from hephaestus.launch import config as launch_config
from hephaestus.launch.run import metrics

ADDRESS, CONFIG, LOCK = 'address', 'config.yaml', 'lock'
INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell: 128 + SIGINT
STOPPING = 'stopping: saving the last checkpoint; a second Ctrl-C ends the run at once'
ORIGIN = 'origin'  # RUN@STEP whose parameters the run begins with
DIAGNOSIS = 'doctor.json'  # of `hephaestus doctor`, the newest
COLLECTED = 'collected.json'  # sequences that each shard of replay has inserted, and those lost


def new(config: launch_config.ExperimentConfig) -> pathlib.Path:
  """A name for a new folder, from the environment and the time."""
  name = config.environment['name'].replace('/', '-').replace(':', '-')
  return pathlib.Path('runs') / f'{name}-{time.strftime("%Y%m%d-%H%M%S")}'


def open_run(
  folder: pathlib.Path, config: launch_config.ExperimentConfig, origin: str | None = None
) -> launch_config.ExperimentConfig:
  """Makes or checks the folder of a run, and writes the config into it.

  Args:
    folder: of the run.
    config: of the run.
    origin: RUN@STEP whose parameters a new run begins with, which is written before the config, so
      that a run stopped before its first checkpoint knows it; None for none.

  Raises:
    ValueError: it is not writable, belongs to something else, or does not fit the config.
  """
  try:
    if (folder / CONFIG).exists():
      check(folder, config)
    elif folder.exists() and any(folder.iterdir()):
      raise ValueError(f'--run {folder}: is not empty and has no {CONFIG}; give another folder')
    if origin is None and unfinished_origin(folder) is not None:
      raise ValueError(
        f'--run {folder}: was stopped before its first checkpoint; `hephaestus train --run {folder}` '
        'makes it'
      )
    for name in ('metrics', 'logs', 'checkpoints', 'replay', 'videos', 'tensorboard'):
      (folder / name).mkdir(parents=True, exist_ok=True)
    if origin is not None:
      (folder / ORIGIN).write_text(f'{origin}\n')
    launch_config.save(config, folder / CONFIG)
  except OSError as error:
    raise ValueError(f'--run {folder}: cannot be written to ({error.strerror})') from None
  return config


def unfinished_origin(folder: pathlib.Path) -> str | None:
  """RUN@STEP of a run --from another that was stopped before its first checkpoint; else None."""
  file = folder / ORIGIN
  is_saved = any(path.name.isdigit() for path in (folder / 'checkpoints').glob('*'))
  return None if is_saved or not file.exists() else file.read_text().strip()


def check(folder: pathlib.Path, config: launch_config.ExperimentConfig) -> None:
  """Raises ValueError for a folder of a run that cannot resume with this config."""
  differences = launch_config.conflicts(launch_config.load(folder / CONFIG), config)
  if differences:
    raise ValueError(
      f'--run {folder}: was made with another configuration. ' + '; '.join(differences)
      + '. Give the old values or another folder'
    )  # fmt: skip


@contextlib.contextmanager
def only_one(folder: pathlib.Path) -> Iterator[None]:
  """Locks the folder against a second launcher; ValueError if another one has locked it."""
  with open(folder / LOCK, 'w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f'--run {folder}: is being trained already; stop that run or give another folder'
      ) from None
    yield


def is_running(folder: pathlib.Path) -> bool:
  """Whether a launcher of this machine has locked the folder; does not touch the lock."""
  try:
    # By the inode alone: some file systems show another device here than there.
    place = f':{(folder / LOCK).stat().st_ino} '
    return any(place in line for line in pathlib.Path('/proc/locks').read_text().splitlines())
  except OSError:
    return False


def has_finished(folder: pathlib.Path) -> bool:
  """Whether the run of a folder has reached its end, rather than being stopped."""
  last = metrics.last(folder / 'metrics' / 'evaluator.jsonl')
  return last is not None and last['final']


def load_config(folder: pathlib.Path) -> launch_config.ExperimentConfig:
  """Reads the config of a run.

  Raises:
    ValueError: it is not the folder of a run, or its config is broken.
  """
  if not (folder / CONFIG).exists():
    raise ValueError(f'{folder}: is not the folder of a run, it has no {CONFIG}')
  return launch_config.load(folder / CONFIG)
