"""HackMatrix: `make` builds the environment, `HackMatrix` is the game without a time limit."""

from hephaestus.actors.environments import wrappers
from hephaestus.actors.environments.hackmatrix.environment import HackMatrix
from hephaestus.actors.environments.hackmatrix.state import State, initial

__all__ = ['HackMatrix', 'State', 'initial', 'make']


def make(max_steps: int = 1000) -> wrappers.TimeLimit:
  """Makes the game with a time limit of `max_steps`, which truncates; its rules have none."""
  return wrappers.TimeLimit(HackMatrix(), max_steps)
