"""The report on the replay of a run, which every view prints: terminal, web page, JSON and Prometheus."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hephaestus.replay import inspector

Quantiles = dict[str, float]
"""A distribution, by the keys of `inspector.QUANTILES`."""
# Labels of the distributions over the sequences of a stratum, by their field of `Stratum`.
DISTRIBUTIONS = {
  'version': 'acting version',
  'age_updates': 'age, updates',
  'age_steps': 'age, steps',
  'episode_return': 'episode return',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stratum:
  """The sequences of one stratum. Unknown distributions are None."""

  sequences: int
  version: Quantiles | None = None  # of the parameters that acted
  age_updates: Quantiles | None = None  # updates before the newest version
  age_steps: Quantiles | None = None  # environment steps collected since
  episodes: int = 0  # that ended in them
  episode_return: Quantiles | None = None
  shared: float | None = None  # share that all other strata hold, too; None without any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """A report on the replay of a run, live or as last known. The first six fields: see `Inspector.poll`."""

  tables: dict[str, dict[str, Any]]
  replay_ratio: dict[str, float | None]
  limiter: dict[str, Any] | None
  memory: dict[str, float | None]
  shards: list[dict[str, Any]]
  seconds: float | None
  time: float  # unix seconds
  running: bool = True  # whether a server answered
  saved: float | None = None  # unix seconds of the oldest checkpoint that it is made from
  address: str = '-'  # HOST:PORT of all shards, separated by commas
  environment_step: int | None = None
  lost_steps: int | None = None  # how many of these a restart of replay has lost
  parameter_version: int | None = None  # the newest that an actor uses
  # Shares of time spent waiting, over the last minute, or by the newest metrics if those are older.
  learner_starved_fraction: float | None = None
  actors_throttled_fraction: float | None = None
  # Age of the actors' parameters in updates: 'newest_updates', 'oldest_updates'.
  staleness: dict[str, int] = dataclasses.field(default_factory=dict)
  warnings: list[str] = dataclasses.field(default_factory=list)  # see `advice.of_replay`
  strata: dict[str, Stratum] = dataclasses.field(default_factory=dict)
  bottleneck: str | None = None  # sentence that names it
  # The one that it is made from, of a fused run: 'learner_step', number of 'sequences' and 'duplicates'.
  checkpoint: dict[str, int] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    """The report as `--json` prints it: keys stay the same between versions.

    The report on a fused run has fewer: a stratum has 'size' and 'max_size' in sequences, its 'share' of each
    batch, 'steps' of the environment and 'age' in updates.
    """
    if not self.checkpoint:
      return dataclasses.asdict(self)
    keys = ('size', 'max_size', 'share', 'steps')
    return {
      'time': self.time,
      'environment_step': self.environment_step,
      'warnings': self.warnings,
      **self.checkpoint,
      'replay_ratio': self.replay_ratio['achieved'],
      'strata': {
        name: {key: self.tables[name][key] for key in keys} | {'age': stratum.age_updates}
        for name, stratum in self.strata.items()
      },
    }


def strata(
  sizes: Mapping[str, int],
  ages: Mapping[str, Quantiles | None],
  *,
  learner_step: int,
  num_steps: int | None,
) -> dict[str, Stratum]:
  """Statistics of strata that hold the newest sequences, without sampling any.

  Every stratum drops its oldest sequences first. So its size gives their ages in steps, and the share
  that other strata hold, too.

  Args:
    sizes: number of sequences of each stratum.
    ages: quantiles of their ages in updates; None if unknown.
    learner_step: number of updates so far.
    num_steps: environment steps of a sequence; None if unknown.
  """
  names = list(inspector.QUANTILES)
  found = {}
  for name, size in sizes.items():
    versions, steps, of_stratum = None, None, ages[name]
    if of_stratum is not None:  # the oldest sequence has the lowest version
      opposite = zip(names, reversed(names), strict=True)
      versions = {each: learner_step - of_stratum[other] for each, other in opposite}
    if size and num_steps is not None:
      steps = {each: at * (size - 1) * num_steps for each, at in inspector.QUANTILES.items()}
    shared = min(sizes.values()) / size if size and len(sizes) > 1 else None
    found[name] = Stratum(
      sequences=size, version=versions, age_updates=of_stratum, age_steps=steps, shared=shared
    )
  return found
