"""The cores of a CPU as JAX's devices, which share a batch as accelerators do."""

import contextlib
import os

import jax

LEAST_SEQUENCES = 8
"""For each device: matrices of the recurrence are read once for all of them."""

_COUNT = 'xla_force_host_platform_device_count'


def available() -> int:
  """Cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def fitting(num_sequences: int, num_cores: int) -> int:
  """How many cores share a batch evenly, with enough for each; at least 1."""
  fits = lambda count: num_sequences % count == 0 and num_sequences // count >= LEAST_SEQUENCES
  return max(filter(fits, range(1, num_cores + 1)), default=1)


def share(num_sequences: int) -> None:
  """From now on, JAX's CPU has a device for each core that can share a batch.

  As one device, XLA spreads single operations over the cores, and only the large ones: an update of
  size `1m` took 1.2 times as long on two cores. To be called before JAX makes any array; does nothing
  after that, or where XLA_FLAGS say how many devices there are. Accelerators are as they were.

  Args:
    num_sequences: of a batch.
  """
  if _COUNT in os.environ.get('XLA_FLAGS', ''):
    return
  with contextlib.suppress(RuntimeError):  # JAX has its devices already
    jax.config.update('jax_num_cpu_devices', fitting(num_sequences, available()))
