"""Age of replayed sequences by stratum, estimated from the sampled batches."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from hephaestus.replay import inspector


class Staleness:
  """Collects the versions of the sequences of each batch.

  A stratum is sampled uniformly, so sampled versions are distributed as those of its table, which
  need not be sampled for this. `note` may be called by another thread.

  Args:
    strata: name of the stratum of each sequence of a batch.
  """

  def __init__(self, strata: Sequence[str]):
    self._rows = {name: np.flatnonzero(np.array(strata) == name) for name in dict.fromkeys(strata)}
    self._sampled: collections.deque[np.ndarray] = collections.deque()

  def note(self, batch: Any) -> None:
    """Remembers the versions of a batch.

    Args:
      batch: [B, ...] of host arrays, of which only `version` is kept.
    """
    self._sampled.append(batch.version)

  def report(self, learner_step: int) -> dict[str, float]:
    """Quantiles of the ages of sequences sampled since the last call.

    Args:
      learner_step: from which versions are counted back.

    Returns:
      {'replay/STRATUM/age/QUANTILE': updates}, of `inspector.QUANTILES`; {} without a batch.
    """
    sampled = [self._sampled.popleft() for _ in range(len(self._sampled))]
    if not sampled:
      return {}
    ages = learner_step - np.stack(sampled)
    return {
      f'replay/{name}/age/{quantile}': value
      for name, rows in self._rows.items()
      for quantile, value in (inspector.quantiles(ages[:, rows]) or {}).items()
    }
