"""Config of replay and its strata (tables that batches are mixed from), and their Reverb server."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from typing import TYPE_CHECKING, Any

from absl import logging

from hephaestus.replay import checkpoint, connection, loopback
from hephaestus.replay import columns as columns_lib

if TYPE_CHECKING:
  import reverb

PARAMS = 'params'  # the table of acting parameters
LEAST_SAMPLES_PER_INSERT = 0.05  # below it, a limiter's slack is thousands of sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stratum:
  """One table of replay: the newest `max_size` sequences, sampled uniformly.

  Every sequence is inserted into all strata, which differ in size; a batch mixes them by share.

  Attributes:
    name: name of the Reverb table.
    max_size: sequences it holds at most; the oldest is removed first.
    share: fraction of a batch that is sampled from it, in (0, 1].
    read_once: whether it is a queue, for on-policy learning: each sequence is read once, in order.
  """

  name: str
  max_size: int
  share: float
  read_once: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig:
  """Settings of replay: strata, replay ratio, warm-up, and shards (servers).

  Raises:
    ValueError: a number is out of range, or numbers contradict each other.
  """

  strata: tuple[Stratum, ...] = (  # tables that batches are mixed from
    Stratum(name='frontier', max_size=512, share=0.5),
    Stratum(name='episodic', max_size=100_000, share=0.5),
  )
  replay_ratio: float = 32.0  # environment steps replayed per step collected, after warm-up
  warm_up: int = 32  # sequences stored before the first batch
  max_in_flight: int = 8  # sequences a reader prefetches per stratum; they count as sampled
  num_shards: int = 1  # servers, each of which holds its part of every stratum
  port: int | None = None  # port of the first shard, the next ports for the others; None: free ones
  timeout_seconds: float = 5.0  # time without an answer after which a server counts as down

  def __post_init__(self):
    names = [stratum.name for stratum in self.strata]
    if not names:
      _refuse('strata', self.strata, 'give at least one Stratum')
    if len(set(names)) < len(names):
      _refuse('strata', names, 'give each stratum a name of its own')
    if self.num_shards < 1:
      _refuse('num_shards', self.num_shards, 'use at least 1')
    for stratum in self.strata:
      if not re.fullmatch(r'[\w-]{1,64}', stratum.name) or stratum.name == PARAMS:
        _refuse('strata', names, f'name each by letters, digits, - and _, and none {PARAMS!r}')
      if stratum.max_size < 1:
        _refuse(f'strata.{stratum.name}.max_size', stratum.max_size, 'store at least 1 sequence')
      if stratum.max_size < self.num_shards:
        _refuse(
          'num_shards', self.num_shards,
          f'use at most {stratum.max_size}: {stratum.name!r} holds no more sequences',
        )  # fmt: skip
      if not 0.0 < stratum.share <= 1.0:
        _refuse(f'strata.{stratum.name}.share', stratum.share, 'use more than 0 and at most 1')
    shares = [stratum.share for stratum in self.strata]
    if not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
      _refuse('strata.share', shares, f'make the shares sum to 1, not {sum(shares):g}')
    if not self.replay_ratio > 0.0 or math.isinf(self.replay_ratio):
      _refuse('replay_ratio', self.replay_ratio, 'use a number above 0')
    smallest = min(stratum.max_size for stratum in self.strata)
    if self.warm_up < 1:
      _refuse('warm_up', self.warm_up, 'wait for at least 1 sequence')
    if self.warm_up > smallest:
      _refuse(
        'warm_up', self.warm_up, f'use at most {smallest}: the smallest stratum never holds more'
      )
    if self.warm_up < self.num_shards:
      _refuse('warm_up', self.warm_up, f'use at least num_shards={self.num_shards}, one for each')
    if any(stratum.read_once for stratum in self.strata):
      if self.num_shards > 1:
        _refuse('num_shards', self.num_shards, 'use 1 with a stratum that is read once')
      if len(self.strata) > 1:
        _refuse('strata', names, 'a stratum that is read once must be the only one')
      if self.replay_ratio != 1.0:
        _refuse('replay_ratio', self.replay_ratio, 'use 1 with a stratum that is read once')
    least = LEAST_SAMPLES_PER_INSERT / self.limiting_stratum.share
    if self.replay_ratio < least:
      _refuse(
        'replay_ratio', self.replay_ratio,
        f'use at least {least:g}: {self.limiting_stratum.name!r} gives '
        f'{self.limiting_stratum.share:g} of a batch',
      )  # fmt: skip
    if self.max_in_flight < 1:
      _refuse('max_in_flight', self.max_in_flight, 'use at least 1')
    if not self.timeout_seconds >= 1.0:
      _refuse('timeout_seconds', self.timeout_seconds, 'use at least 1 second')
    most = 65536 - self.num_shards
    if self.port is not None and not 1 <= self.port <= most:
      _refuse('port', self.port, f'use 1 to {most}, or None for a free one')

  @property
  def limiting_stratum(self) -> Stratum:
    """The stratum whose rate limiter enforces the replay ratio: the largest; the last among equals.

    Only one has such a limiter: two would deadlock as soon as their shares differ, because one waits
    for inserts and the other for samples.
    """
    return max(reversed(self.strata), key=lambda stratum: stratum.max_size)


def check(config: ReplayConfig, batch_size: int, insert_size: int) -> None:
  """Checks a config against the batch of the learner and the writes of the actors.

  Args:
    config: the config of replay.
    batch_size: number of sequences in a batch, over all devices.
    insert_size: number of sequences that an actor writes at once.

  Raises:
    ValueError: a size is not positive, or a stratum has no sequence in a batch.
  """
  if batch_size < 1:
    raise ValueError(f'batch_size={batch_size}: use at least 1 sequence')
  if insert_size < 1:
    raise ValueError(f'insert_size={insert_size}: write at least 1 sequence at once')
  for stratum in config.strata:
    if batch_counts(config.strata, batch_size)[stratum.name] == 0:
      _refuse(
        f'strata.{stratum.name}.share', stratum.share,
        f'it has no sequence in a batch of {batch_size}; use a larger share or a larger batch',
      )  # fmt: skip


def batch_counts(strata: tuple[Stratum, ...], batch_size: int) -> dict[str, int]:
  """Number of sequences of each stratum in a batch, by its name: share times batch size, rounded.

  Rounded by the largest-remainder method; the first stratum wins a tie.
  """
  quotas = [stratum.share * batch_size for stratum in strata]
  counts = [math.floor(quota + 1e-9) for quota in quotas]
  by_remainder = sorted(range(len(strata)), key=lambda i: round(counts[i] - quotas[i], 9))
  for i in by_remainder[: batch_size - sum(counts)]:
    counts[i] += 1
  return {stratum.name: count for stratum, count in zip(strata, counts, strict=True)}


def batch_strata(strata: tuple[Stratum, ...], batch_size: int) -> list[int]:
  """Index of the stratum of each sequence in a batch, a list of length B.

  Sequence j of the c sequences of a stratum lies at the fraction (j + 1/2) / c of the batch. So strata
  are interleaved evenly, and equal contiguous slices of the batch hold the same mixture.
  """
  places = [
    ((j + 0.5) / count, index)
    for index, count in enumerate(batch_counts(strata, batch_size).values())
    for j in range(count)
  ]
  return [index for _, index in sorted(places)]


def nbytes(config: ReplayConfig, schema: Any) -> int:
  """Bytes of all sequences (of a schema) of full strata, uncompressed and without Reverb's overhead.

  Strata share their sequences: the largest stratum contains the sequences of all others.
  """
  return columns_lib.Columns(schema).nbytes * max(stratum.max_size for stratum in config.strata)


def make_tables(
  config: ReplayConfig, schema: Any, *, batch_size: int, insert_size: int
) -> list[reverb.Table]:
  """Makes the tables of one server: one per stratum, and one for the acting parameters.

  With several shards, each gets its part of the strata's sizes, of the warm-up and of the slack of
  the rate limiter.

  Args:
    config: the config of replay.
    schema: tree of jax.ShapeDtypeStruct of one sequence, [T, ...] or any other shape.
    batch_size: number of sequences in a batch, over all devices.
    insert_size: number of sequences that an actor writes at once.

  Raises:
    ValueError: the sizes do not work together, see `check`; or the schema cannot be stored, see
      `Columns`.
  """
  import reverb

  check(config, batch_size, insert_size)
  signature = columns_lib.Columns(schema).signature()
  tables = []
  for stratum in config.strata:
    max_size = _part(config, stratum.max_size)
    if stratum.read_once:
      table = reverb.Table.queue(stratum.name, max_size=max_size, signature=signature)
    else:
      table = reverb.Table(
        name=stratum.name,
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=max_size,
        rate_limiter=_rate_limiter(config, stratum, batch_size, insert_size),
        signature=signature,
      )
    tables.append(table)
  params = reverb.Table(
    name=PARAMS,
    sampler=reverb.selectors.Lifo(),
    remover=reverb.selectors.Fifo(),
    max_size=1,
    rate_limiter=reverb.rate_limiters.MinSize(1),
  )
  return [*tables, params]


def _part(config: ReplayConfig, count: int) -> int:
  """One shard's part of a count, rounded up."""
  return -(-count // config.num_shards)


def _rate_limiter(
  config: ReplayConfig, stratum: Stratum, batch_size: int, insert_size: int
) -> reverb.rate_limiters.RateLimiter:
  """The limiter of a stratum on one shard; only the limiter of `limiting_stratum` enforces the ratio.

  It counts the samples of its own stratum, so

    samples_per_insert = replay_ratio · sequences of a batch from this stratum / batch_size

  The number of samples may differ from that by one insert of an actor, one batch, and the sequences
  in flight.
  """
  import reverb

  if stratum != config.limiting_stratum:
    return reverb.rate_limiters.MinSize(_part(config, min(config.warm_up, stratum.max_size)))
  count = batch_counts(config.strata, batch_size)[stratum.name]
  samples_per_insert = config.replay_ratio * count / batch_size
  slack = (
    samples_per_insert * _part(config, insert_size) + _part(config, count) + config.max_in_flight
  )
  return reverb.rate_limiters.SampleToInsertRatio(
    samples_per_insert=samples_per_insert,
    min_size_to_sample=_part(config, config.warm_up),
    error_buffer=max(1.0, slack),
  )


def make_server(
  tables: list[reverb.Table],
  *,
  port: int | None = None,
  directory: str | None = None,
  exposed: bool = True,
) -> reverb.Server:
  """Starts a server, and restores the newest whole checkpoint under `directory`.

  Args:
    tables: result of `make_tables`.
    port: port to listen at; None for a free one.
    directory: folder for the checkpoints of only this server; None for no checkpoints.
    exposed: whether other machines may reach the server, as is Reverb's default.

  Returns:
    The running server.

  Raises:
    OSError: the system cannot restrict the port to this machine; see `loopback.refusal`.
  """
  import reverb

  os.environ.update(connection.without_proxy([]))
  wanted = {table.name: table.info for table in tables}
  checkpointer = None if directory is None else checkpoint.checkpointer(directory)
  server = None
  try:
    with contextlib.nullcontext(port) if exposed else loopback.restricted(port or 0) as port:
      server = reverb.Server(tables, port=port, checkpointer=checkpointer)
  except BaseException:
    if server is not None:  # which every machine reaches
      server.stop()
    raise
  for name, line in changed_settings(wanted, server.localhost_client().server_info()):
    logging.warning(
      'replay: table %r was restored with %s; use an empty directory to change it', name, line
    )
  return server


def changed_settings(
  wanted: dict[str, reverb.reverb_types.TableInfo],
  running: dict[str, reverb.reverb_types.TableInfo],
) -> list[tuple[str, str]]:
  """Finds settings of tables that differ from the wanted ones: Reverb restores the settings of a checkpoint.

  Returns:
    A pair for each setting that differs: the table's name, and 'SETTING=RUNNING, not WANTED'.
  """
  limits = ('samples_per_insert', 'min_size_to_sample', 'min_diff', 'max_diff')
  settings = lambda info: {
    'max_size': info.max_size,
    **{name: getattr(info.rate_limiter_info, name) for name in limits},
  }
  return [
    (table, f'{name}={now:g}, not {asked:g}')
    for table, info in wanted.items()
    for (name, asked), now in zip(
      settings(info).items(), settings(running[table]).values(), strict=True
    )
    if asked != now
  ]


def _refuse(field: str, value: Any, remedy: str) -> None:
  raise ValueError(f'replay.{field}={value!r}: {remedy}')
