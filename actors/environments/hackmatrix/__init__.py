"""HackMatrix: `make` is what the list of environments names, `HackMatrix` the game as its rules have it."""

from hephaestus.actors.environments import wrappers
from hephaestus.actors.environments.hackmatrix.environment import HackMatrix
from hephaestus.actors.environments.hackmatrix.state import State, initial

__all__ = ['HackMatrix', 'State', 'initial', 'make']


def make(max_steps: int = 1000) -> wrappers.TimeLimit:
  """The game, cut off after `max_steps`, since its rules know no limit."""
  return wrappers.TimeLimit(HackMatrix(), max_steps)
