"""Small parts of the command line that several commands share."""

import argparse
import os
import sys
from typing import Any

from hephaestus.launch import records
from hephaestus.launch.run import request as request_lib

IMPORTING = 'importing JAX and more, some seconds'  # first line of a command, on stderr


def add_trust_flag(parser: argparse.ArgumentParser) -> None:
  """Adds --trust, with which `main` lets a file name agents and environments to import."""
  request_lib.add(parser, 'trust')


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


def preset_config(arguments: argparse.Namespace) -> Any:
  """Makes a config of the dreamer from --preset (default: laptop), --env (default: catch) and --set.

  Raises:
    ValueError: a flag is invalid; names it.
  """
  from hephaestus.launch import config as launch_config

  config = launch_config.of_preset(
    records.DREAMER, arguments.preset or 'laptop', arguments.env or 'catch'
  )
  return launch_config.override(config, arguments.set)
