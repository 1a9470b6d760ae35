"""Settings of a process that repeats the same update: of XLA's compiler, and of the C library's allocator."""

import ctypes
import os

AUTOTUNING = '--xla_gpu_autotune_level'
"""XLA's flag for how thoroughly it times alternatives of each product on a GPU while it compiles; 0: not at all."""

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of malloc.h
_NEVER = -1
_LIBC = ctypes.CDLL(None)


def prepare() -> None:
  """Sets up this process for repeated updates; call it before JAX does anything.

  On a GPU, programs are compiled without autotuning unless XLA_FLAGS says otherwise: an H100 compiles the
  dreamer's update in 44 s without it, and not within 280 s with it.

  Freed memory is kept in this process, for its next allocations: XLA's CPU backend allocates all memory of
  each update again. glibc maps large blocks from the operating system, which clears each page at the first
  touch: 75,000 pages in an update of size `1m`, a sixth of its time. Allocation arenas that JAX's threads
  have by then stay as they are. A C library other than glibc is left as it is.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  if AUTOTUNING not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} {AUTOTUNING}=0'.strip()
  if hasattr(_LIBC, 'mallopt'):
    for option, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER)):
      _LIBC.mallopt(option, value)
