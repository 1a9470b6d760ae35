"""How old what is learned from is, told of each stratum by what was drawn from it anyway."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from hephaestus.replay import inspector


class Staleness:
  """Looks at the versions of the sequences of each batch.

  A stratum is sampled uniformly, so the versions of what is drawn are distributed as those of what
  it holds, and nobody need sample its table to know them. `note` may be called by another thread.

  Args:
    strata: of each row of a batch the name of its stratum.
  """

  def __init__(self, strata: Sequence[str]):
    self._rows = {name: np.flatnonzero(np.array(strata) == name) for name in dict.fromkeys(strata)}
    self._drawn: collections.deque[np.ndarray] = collections.deque()

  def note(self, batch: Any) -> None:
    """Remembers how old a batch is.

    Args:
      batch: [B, ...] of host arrays, of which only `version` is kept.
    """
    self._drawn.append(batch.version)

  def report(self, learner_step: int) -> dict[str, float]:
    """The ages of what was drawn since the last call, as quantiles.

    Args:
      learner_step: from which versions are counted back.

    Returns:
      {'replay/STRATUM/age/QUANTILE': updates}, of `inspector.QUANTILES`; {} without a batch.
    """
    drawn = [self._drawn.popleft() for _ in range(len(self._drawn))]
    if not drawn:
      return {}
    ages = learner_step - np.stack(drawn)
    return {
      f'replay/{name}/age/{quantile}': value
      for name, rows in self._rows.items()
      for quantile, value in (inspector.quantiles(ages[:, rows]) or {}).items()
    }
