"""The report on the replay of a run, which every view prints: terminal, web page, JSON and Prometheus."""

import dataclasses
import datetime
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
  """The sequences of one stratum. Unknown distributions are None.

  Attributes:
    sequences: how many there are.
    version: version of the parameters that acted.
    age_updates: updates before the newest version.
    age_steps: environment steps collected since.
    episodes: number of episodes that ended in them.
    episode_return: returns of those.
    shared: share of the sequences that all other strata hold, too; None without sequences or others.
  """

  sequences: int
  version: Quantiles | None = None
  age_updates: Quantiles | None = None
  age_steps: Quantiles | None = None
  episodes: int = 0
  episode_return: Quantiles | None = None
  shared: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """A report on the replay of a run, live or as last known.

  Attributes:
    tables, replay_ratio, limiter, memory, shards, seconds: see `inspector.Inspector.poll`.
    time: unix seconds.
    running: whether a server answered.
    saved: unix seconds of the oldest checkpoint that the report is made from; None if a server
      answered, or without a checkpoint.
    address: HOST:PORT of the server, or of all its shards, separated by commas.
    environment_step: environment steps so far.
    lost_steps: how many of those a restart of replay has lost, by the newest metrics.
    parameter_version: the newest version of the parameters that an actor uses.
    learner_starved_fraction, actors_throttled_fraction: shares of time spent waiting, over the last
      minute, or by the newest metrics if those are older.
    staleness: {'newest_updates', 'oldest_updates'}, age of the actors' parameters in updates; {} if
      unknown.
    warnings: sentences on parts of the agent that do nothing; see `advice.warnings`.
    strata: the strata by name.
    bottleneck: sentence that names it; None if unknown.
    checkpoint: of a fused run, which the report is then made from, see `device_replay.load`; else {}.
  """

  tables: dict[str, dict[str, Any]]
  replay_ratio: dict[str, float | None]
  limiter: dict[str, Any] | None
  memory: dict[str, float | None]
  shards: list[dict[str, Any]]
  seconds: float | None
  time: float
  running: bool = True
  saved: float | None = None
  address: str = '-'
  environment_step: int | None = None
  lost_steps: int | None = None
  parameter_version: int | None = None
  learner_starved_fraction: float | None = None
  actors_throttled_fraction: float | None = None
  staleness: dict[str, int] = dataclasses.field(default_factory=dict)
  warnings: list[str] = dataclasses.field(default_factory=list)
  strata: dict[str, Stratum] = dataclasses.field(default_factory=dict)
  bottleneck: str | None = None
  checkpoint: dict[str, int] = dataclasses.field(default_factory=dict)

  @property
  def state(self) -> str | None:
    """Sentence that says from when the numbers are; None if a server answered."""
    if self.running:
      return None
    if self.checkpoint:
      step, count = self.checkpoint['learner_step'], self.checkpoint['sequences']
      return f'a fused run; shown is its checkpoint of update {step:,}, with {count:,} sequences'
    if self.saved is None:
      return (
        'the run is not running; shown is the end of its metrics, replay has no checkpoint here'
      )
    moment = datetime.datetime.fromtimestamp(self.saved)
    return f'the run is not running; shown is its checkpoint of {moment:%Y-%m-%d %H:%M:%S}'

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
    ages: their ages in updates; None if unknown.
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
