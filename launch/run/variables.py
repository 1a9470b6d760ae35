"""Environment variables of each node, which JAX, TensorFlow and the allocator read at their start."""

import contextlib
import os
import pathlib
import tempfile

from hephaestus.launch import config as launch_config
from hephaestus.launch.run import parts as parts_lib


def _cache() -> pathlib.Path | None:
  """Own folder of JAX's compiled programs; None where there is no place that other users cannot write to.

  A container may run as a user without a home, or whose home is read-only; then it is below TMPDIR.
  """
  with contextlib.suppress(RuntimeError):  # there is no such user
    home = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser()
    parent = next(each for each in (home, *home.absolute().parents) if each.exists())
    if os.access(parent, os.W_OK):
      return home / 'hephaestus' / 'jax'
  place = pathlib.Path(tempfile.gettempdir()) / f'hephaestus-{os.getuid()}'
  with contextlib.suppress(OSError):
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()  # it holds machine code, and somebody else may have made it
    if status.st_uid == os.getuid() and not status.st_mode & 0o077 and not place.is_symlink():
      return place / 'jax'
  return None


CACHE = _cache()
LEAST_SECONDS = 0.5  # of compiling a program that is kept
COMMON = {
  'TF_CPP_MIN_LOG_LEVEL': '3',
  'GRPC_VERBOSITY': 'ERROR',
  'PYTHONUNBUFFERED': '1',
  **({} if CACHE is None else {'JAX_COMPILATION_CACHE_DIR': str(CACHE)}),
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': str(LEAST_SECONDS),
}
# As the user has exported them.
COMMON |= {name: os.environ[name] for name in COMMON if name in os.environ}
# Without these, Reverb keeps the memory that it frees; docs/design.md has the figures.
FRUGAL = {
  'MALLOC_ARENA_MAX': '2',
  'MALLOC_TRIM_THRESHOLD_': '131072',
  'MALLOC_MMAP_THRESHOLD_': '131072',
}
# Acting is many small steps, where threads only compete with the learner for its cores. The flag does
# not stop XLA from dividing a program over all cores that it sees, so it is shown one.
ONE_THREAD = {
  'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false',
  'PJRT_NPROC': '1',
  'OMP_NUM_THREADS': '1',
}
CPU_ONLY = {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': ''}


def keep_compiled(least_seconds: float = LEAST_SECONDS) -> None:
  """Keeps programs that took this process `least_seconds` to compile in their cache, as nodes do by their environment."""
  import jax  # not by launchers of programs that do not need it

  jax.config.update('jax_compilation_cache_dir', COMMON.get('JAX_COMPILATION_CACHE_DIR'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', least_seconds)


def of_node(name: str, config: launch_config.ExperimentConfig) -> dict[str, str]:
  """Returns the environment variables of a node, such as 'actor-0', in addition to the launcher's own."""
  variables = dict(COMMON)
  if name in parts_lib.learners(config.learner.num_processes):
    return variables | ({} if config.accelerator else CPU_ONLY)
  variables |= CPU_ONLY | ONE_THREAD
  return variables | FRUGAL if name.startswith(parts_lib.REPLAY) else variables
