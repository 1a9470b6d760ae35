"""Small parts of the command line that several commands share."""

import os
import sys

IMPORTING = 'importing JAX and more, some seconds'  # first line of a command, on stderr


def say_import(who: str) -> None:
  """Prints to stderr that imports take seconds, unless the module that needs most of them is imported."""
  if 'hephaestus.launch.config' not in sys.modules:
    print(f'{who}: {IMPORTING}', file=sys.stderr, flush=True)


def leave_accelerators() -> None:
  """Makes JAX use the CPU unless told otherwise, since a run may use the accelerators; before its import."""
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')


def check_seed(seed: int) -> None:
  """Raises ValueError for a value of --seed that JAX does not take."""
  if not 0 <= seed < 2**32:  # JAX's keys would be those of the lower 32 bits
    raise ValueError(f'--seed {str(seed)[:24]}: must be at least 0, and below 2^32')
