"""Ages of the sequences in replay by stratum: updates since the parameters that collected them."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hephaestus.replay import buffer as buffer_lib
from hephaestus.replay import inspector


class Staleness:
  """Estimates ages of stored sequences by the versions of those in the learner's batches.

  A sequence's version is the learner step of the parameters that collected it. A stratum is sampled
  uniformly, so versions in batches are distributed like those in its table, and this need not sample
  the table. `note` may be called by another thread.

  Args:
    strata: name of the stratum of each sequence of a batch.
  """

  def __init__(self, strata: Sequence[str]):
    self._rows = {name: np.flatnonzero(np.array(strata) == name) for name in dict.fromkeys(strata)}
    self._sampled: collections.deque[np.ndarray] = collections.deque()

  def note(self, batch: Any) -> None:
    """Records the versions of a batch, a Sequence of host arrays [B, ...]."""
    self._sampled.append(batch.version)

  def report(self, learner_step: int) -> dict[str, float]:
    """Quantiles of the ages of sequences sampled since the last call, as the function `report`; {} without any.

    A sequence's age is `learner_step`, the current one, minus its version.
    """
    sampled = [self._sampled.popleft() for _ in range(len(self._sampled))]
    if not sampled:
      return {}
    ages = learner_step - np.stack(sampled)
    return report({name: ages[:, rows] for name, rows in self._rows.items()})


def stored(
  versions: buffer_lib.Buffer, strata: Mapping[str, int], learner_step: int, *, num_devices: int
) -> dict[str, float]:
  """Quantiles of the ages of all sequences stored in a replay in device memory.

  Args:
    versions: the buffer of one device, of host arrays, whose `storage` is only `version`. One is
      enough, as all devices have equal shares of each unroll.
    strata: size of each stratum on all devices together, by name.
  """
  slots = {
    name: buffer_lib.newest(int(versions.inserted), len(versions.storage), size // num_devices)
    for name, size in strata.items()
  }
  ages = learner_step - versions.storage
  return report({name: np.repeat(ages[each], num_devices) for name, each in slots.items()})


def report(ages: Mapping[str, np.ndarray]) -> dict[str, float]:
  """Quantiles of ages in updates by stratum, arrays of any shape: {'replay/STRATUM/age/QUANTILE': age in updates}.

  They are `inspector.QUANTILES`, without strata whose array is empty.
  """
  return {
    f'replay/{name}/age/{quantile}': value
    for name, each in ages.items()
    for quantile, value in (inspector.quantiles(each) or {}).items()
  }
