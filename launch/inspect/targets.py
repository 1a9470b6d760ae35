"""Parses the target of `hephaestus inspect`: a run or a replay server. Imports no JAX."""

import pathlib
from typing import NamedTuple

from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.run import packages


class Target(NamedTuple):
  """A run, or a replay server without its run.

  Attributes:
    folder: folder of the run; None for a server.
    config: config of the run; None for a server.
    address: HOST:PORT of a server; None for a run, whose address may change at each start.
  """

  folder: pathlib.Path | None
  config: launch_config.ExperimentConfig | None
  address: str | None


def find(target: str) -> Target:
  """Parses a target: the folder of a run, or HOST:PORT of a replay server.

  Raises:
    ValueError: it is neither, it is a fused run, or Reverb is not installed.
  """
  folder = pathlib.Path(target)
  if folder.is_dir():
    config = folder_lib.load_config(folder)
    if config.fused:
      raise ValueError(f'{target}: a fused run is one compiled program, without a replay server')
    _check_packages(target)
    return Target(folder, config, None)
  if ':' in target and target.rsplit(':', 1)[1].isdigit():
    _check_packages(target)
    return Target(None, None, target)
  raise ValueError(f'{target}: is neither the folder of a run nor HOST:PORT')


def _check_packages(target: str) -> None:
  remedy = '`hephaestus dashboard` and `report` show its metrics without'
  packages.check_distributed(f'{target}: its replay', remedy)


def is_kept_on_a_device(target: str) -> bool:
  """Whether the target is the folder of a fused run with replay."""
  folder = pathlib.Path(target)
  if not (folder / folder_lib.CONFIG).exists():
    return False
  config = folder_lib.load_config(folder)
  return config.fused and not config.record.on_policy
