"""Age of replayed sequences by stratum, estimated from the sampled batches."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hephaestus.replay import buffer as buffer_lib
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
    return report({name: ages[:, rows] for name, rows in self._rows.items()})


def stored(
  versions: buffer_lib.Buffer, strata: Mapping[str, int], learner_step: int, *, num_devices: int
) -> dict[str, float]:
  """As `report`, of what a replay in device memory holds: its strata are sampled uniformly.

  Args:
    versions: of the sequences of one device, host arrays; all have equal shares of each unroll.
    strata: name and size of each, on all devices together.
    learner_step: from which versions are counted back.
    num_devices: that share the replay.
  """
  slots = {
    name: buffer_lib.newest(int(versions.inserted), len(versions.storage), size // num_devices)
    for name, size in strata.items()
  }
  ages = learner_step - versions.storage
  return report({name: np.repeat(ages[each], num_devices) for name, each in slots.items()})


def report(ages: Mapping[str, np.ndarray]) -> dict[str, float]:
  """Metrics of the ages of sequences.

  Args:
    ages: in updates, arrays of any shape, by stratum.

  Returns:
    {'replay/STRATUM/age/QUANTILE': updates}, of `inspector.QUANTILES`.
  """
  return {
    f'replay/{name}/age/{quantile}': value
    for name, each in ages.items()
    for quantile, value in (inspector.quantiles(each) or {}).items()
  }
