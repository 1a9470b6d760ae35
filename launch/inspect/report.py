"""The report on the replay of a run, which every view reads: terminal, web page, JSON and Prometheus."""

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
    tables, replay_ratio, limiter, memory, shards, seconds: see `inspector.Inspector.poll`. Without an
      answer of a server, rates, the limiter's state and memory are None.
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
    warnings: sentences on parts of the agent that do nothing; see `advice.of_replay`.
    strata: the strata by name.
    bottleneck: sentence that names it; None if unknown.
  """

  tables: dict[str, dict[str, Any]]
  replay_ratio: dict[str, float | None]
  limiter: dict[str, Any] | None = None
  memory: dict[str, float | None] = dataclasses.field(
    default_factory=lambda: {'sequences': None, 'server': None}
  )
  shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  seconds: float | None = None
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

  @property
  def state(self) -> str | None:
    """Sentence that says from when the numbers are; None if a server answered."""
    if self.running:
      return None
    if self.saved is None:
      return (
        'the run is not running; shown is the end of its metrics, replay has no checkpoint here'
      )
    moment = datetime.datetime.fromtimestamp(self.saved)
    return f'the run is not running; shown is its checkpoint of {moment:%Y-%m-%d %H:%M:%S}'

  def to_json(self) -> dict[str, Any]:
    """The report as `--json` prints it: keys stay the same between versions."""
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
  """Takes the place of a report while no server answers.

  Attributes:
    time: unix seconds.
    address: as of the last report.
    error: why there is none.
  """

  time: float
  address: str
  error: str

  def to_json(self) -> dict[str, Any]:
    """As `--json` prints it."""
    return dataclasses.asdict(self)


def stopped_table(size: int, max_size: int, **known: Any) -> dict[str, Any]:
  """An entry of `Report.tables` without an answer of a server: what is not known is None.

  Args:
    size: number of sequences.
    max_size: the largest number.
    known: further entries.
  """
  unknown = ('inserted', 'sampled', 'bytes', 'inserts_per_second', 'samples_per_second')
  inserted, unique = known.get('inserted'), known.get('unique_sampled')
  return {
    **dict.fromkeys(unknown),
    'size': size,
    'max_size': max_size,
    'fill': size / max_size,
    'unique_share': unique / inserted if inserted and unique is not None else None,
    'worker_time': dict.fromkeys(inspector.WORKER_STATES, 0.0),
    **known,
  }


def newest(
  size: int,
  sizes: Mapping[str, int],
  *,
  num_steps: int | None,
  ages: Quantiles | None,
  learner_step: int,
) -> Stratum:
  """The stratum of the newest sequences, whose distributions follow from its size and its ages.

  Args:
    size: number of its sequences.
    sizes: sizes of all strata.
    num_steps: environment steps of a sequence; None if unknown.
    ages: ages in updates; None if unknown.
    learner_step: number of updates so far.
  """
  names = list(inspector.QUANTILES)
  versions = ages and {  # the oldest sequence has the lowest version
    name: learner_step - ages[other] for name, other in zip(names, reversed(names), strict=True)
  }
  steps = None
  if size and num_steps is not None:
    steps = {name: at * (size - 1) * num_steps for name, at in inspector.QUANTILES.items()}
  return Stratum(
    sequences=size,
    version=versions,
    age_updates=ages,
    age_steps=steps,
    shared=min(sizes.values()) / size if size and len(sizes) > 1 else None,
  )
