"""The C library's allocator, for a process that does the same again, update after update."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of malloc.h
_NEVER = -1
_LIBC = ctypes.CDLL(None)


def keep() -> None:
  """From now on, memory that is freed stays with this process, for the next who asks.

  XLA's CPU asks for all that an update needs anew each time. What is large glibc fetches from the
  system, which clears each page when it is first touched: 75,000 of them in an update of size `1m`,
  a sixth of its time. To be called before JAX does anything, since what its threads have got by then
  stays as it was. Does nothing where the C library is another.
  """
  if hasattr(_LIBC, 'mallopt'):
    for option, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER)):
      _LIBC.mallopt(option, value)


def trim() -> None:
  """Gives what is free now back to the system, once."""
  if hasattr(_LIBC, 'malloc_trim'):
    _LIBC.malloc_trim(0)
