"""Finds the folder of an agent: of a run, of an exported policy, or of an agent of the package. Imports no JAX.

Some trained agents come with the package, in the folder SHIPPED; `shipping.py` makes them.
"""

import os
import pathlib

from hephaestus.launch.files import folder as folder_lib

POLICY = 'policy.json'
SHIPPED = pathlib.Path(__file__).parent / 'shipped'  # one folder for each agent, by its name


def shipped() -> list[str]:
  """Sorted names of the agents that come with the package, such as 'catch'."""
  return sorted(file.parent.relative_to(SHIPPED).as_posix() for file in SHIPPED.rglob(POLICY))


def find(path: str | os.PathLike[str]) -> pathlib.Path:
  """Finds the folder of a run or of an exported policy by its path, or else of a shipped agent by its name.

  ValueError, which lists the shipped agents, if there is none.
  """
  folder = pathlib.Path(path)
  if folder.exists():
    return folder
  if folder.as_posix() not in shipped():
    raise ValueError(
      f'{folder}: is not the folder of a run or of an exported policy, nor an agent that comes with '
      f'the package; those are {", ".join(shipped())}'
    )
  return SHIPPED / folder


def check(path: str | os.PathLike[str]) -> None:
  """Raises ValueError, soon, where there is no agent, or the config of its run is not usable."""
  folder = find(path)
  if not (folder / POLICY).exists():
    folder_lib.load_config(folder)
