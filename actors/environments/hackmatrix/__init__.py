"""HackMatrix: `make` builds the environment, `HackMatrix` is the game without a time limit."""

import inspect
from typing import Any

from hephaestus.actors.environments import wrappers
from hephaestus.actors.environments.hackmatrix.environment import HackMatrix
from hephaestus.actors.environments.hackmatrix.state import State, initial

__all__ = ['HackMatrix', 'State', 'initial', 'make']


def make(max_steps: int = 1000, **options: Any) -> wrappers.TimeLimit:
  """Makes the game of these options with a time limit, which truncates; its rules have none."""
  return wrappers.TimeLimit(HackMatrix(**options), max_steps)


# The options by name, which are listed and checked by this signature.
_parameters = (
  inspect.signature(make).parameters['max_steps'],
  *inspect.signature(HackMatrix).parameters.values(),
)
make.__signature__ = inspect.Signature(_parameters)  # type: ignore[attr-defined]
