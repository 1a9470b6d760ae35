"""Statistics of the tables of running replay servers, computed without sampling.

A sample would count as one of the learner's, and move the rate limiter.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil

from hephaestus.replay import connection as connection_lib
from hephaestus.replay import tables as tables_lib

if TYPE_CHECKING:
  import reverb

WORKER_STATES = (
  'sleeping', 'waiting_for_sampling', 'waiting_for_inserts', 'sampling', 'inserting', 'running',
)  # fmt: skip
"""States of a table's worker thread: idle; inserts are blocked until sequences are sampled; samples
are blocked until sequences are inserted; and three in which the thread works."""

QUANTILES = {'lowest': 0.0, 'low': 0.05, 'median': 0.5, 'high': 0.95, 'highest': 1.0}
"""Levels of the quantiles that describe a distribution, by name."""


class Source(Protocol):
  """How a replay samples, as it is inspected: what it holds, and how often that was sampled.

  `Inspector` asks the servers of Reverb's tables, `buffer.Saved` a replay in device memory.
  """

  def poll(self) -> dict[str, Any]:
    """Returns the statistics of now, see `Inspector.poll`; ConnectionError if nothing answers."""
    ...


class _Server:
  """One server and its last two answers, between which rates are computed.

  Attributes:
    connection: the connection to the server.
    infos, seconds: the newest answer and its time, monotonic; {} before the first.
    before, elapsed: the answer before it, and the time between both; None after a restart, too.
  """

  def __init__(self, connection: connection_lib.Connection):
    self.connection = connection
    self.infos: connection_lib.TableInfos = {}
    self.seconds = 0.0
    self.before: connection_lib.TableInfos | None = None
    self.elapsed: float | None = None
    self._process: psutil.Process | None = None

  def update(self, infos: connection_lib.TableInfos) -> None:
    """Stores an answer."""
    now, is_same = time.monotonic(), bool(self.infos) and _is_same_server(self.infos, infos)
    self.before, self.elapsed = (self.infos, now - self.seconds) if is_same else (None, None)
    self.infos, self.seconds = infos, now

  @property
  def tables(self) -> dict[str, dict[str, Any]]:
    """Statistics by table in the newest answer, as 'tables' of `Inspector.poll`; {} without one."""
    return {name: self._statistics(info) for name, info in self.infos.items()}

  def _statistics(self, info: reverb.reverb_types.TableInfo) -> dict[str, Any]:
    worked = _worker_milliseconds(info)
    rates: list[float | None] = [None, None]
    if self.before is not None and self.elapsed is not None:
      old = self.before[info.name]
      rates = [(count(info) - count(old)) / self.elapsed for count in (_inserted, _sampled)]
      worked = {state: worked[state] - ms for state, ms in _worker_milliseconds(old).items()}
    return entry(
      info.current_size,
      info.max_size,
      inserted=_inserted(info),
      sampled=_sampled(info),
      unique_sampled=info.num_unique_samples,
      bytes=_nbytes(info),
      inserts_per_second=rates[0],
      samples_per_second=rates[1],
      worker_time={state: ms / max(1, sum(worked.values())) for state, ms in worked.items()},
    )

  @property
  def nbytes(self) -> int | None:
    """Resident bytes of the server's process; None if it is on another machine, or not found."""
    try:
      if self._process is None:
        self._process = listener(self.connection.address)
      return None if self._process is None else self._process.memory_info().rss
    except psutil.Error:  # it ended, or belongs to another user
      self._process = None
      return None


class Inspector:
  """Polls statistics of a replay server, or of all shards; rates are over the time since the last poll."""

  def __init__(
    self,
    address: str | Sequence[str],
    config: tables_lib.ReplayConfig | None = None,
    *,
    timeout_seconds: float = 5.0,
  ):
    """Sets up the connections; sends no request yet.

    Args:
      address: HOST:PORT of the server, or of each shard.
      config: replay's config, which gives the configured replay ratio. Without a config, that ratio
        is the limited stratum's samples per insert, divided by that stratum's share of all samples;
        None before its first sample. For the limited stratum see `poll`.
      timeout_seconds: longest wait for a server, in whole seconds, at least 1.
    """
    self._config = config
    self._timeout_seconds = timeout_seconds
    # With an infinite time-out the connection logs nothing: `poll` raises, and its caller reports.
    self._servers = [
      _Server(connection)
      for connection in connection_lib.connect(address, 'inspector', timeout_seconds=math.inf)
    ]

  def poll(self) -> dict[str, Any]:
    """Reads the tables, their replay ratio, the limiter's state and the memory in use.

      achieved = sequences sampled from all strata / max(1, inserted − warm-up)

    with `inserted` and the warm-up of the limited stratum, whose rate limiter enforces the ratio.
    Sequences that readers prefetch count as sampled, so the ratio is too high by their number at
    first, and settles with time. With several shards, counts and rates are sums over those that
    answer, fractions are computed from the sums, and worker times are averaged.

    Returns:
      'tables': {NAME: {
        'size', 'max_size', 'inserted', 'sampled', 'unique_sampled': sequences,
        'fill': size / max_size,
        'unique_share': fraction of the inserted sequences ever sampled; None without an insert,
        'bytes': bytes of its sequences, uncompressed, by its signature; None without a signature,
        'inserts_per_second', 'samples_per_second': sequences; None at the first poll,
        'worker_time': {STATE: fraction of the time since the poll before, or since the start}
      }}
      'replay_ratio': {'configured', 'achieved', 'recent'}; 'recent' is of the inserts and samples
        since the poll before, None without inserts.
      'limiter': {'table', 'state', 'missing'} of the limited stratum; None without a stratum. The
        state is 'warming up', 'inserts wait', 'samples wait' or 'open', and `missing` is the number
        of inserts (of samples, where inserts wait) that changes it. Shards in different states
        count as open, because writers and readers choose among them.
      'memory': {'sequences', 'server'}: bytes of all sequences by the signature, each counted once;
        resident bytes of the server's process if it runs on this machine, else None.
      'shards': [{'address', 'alive', 'tables'}]: each server with the tables of its newest answer,
        {} if it never answered.
      'seconds': time since the poll before; None at the first.

    Raises:
      ConnectionError: no server answered in time.
    """
    answered = self._ask_servers()
    tables = summed([server.tables for server in answered])
    infos = answered[0].infos
    strata = [name for name in infos if name != tables_lib.PARAMS]
    limited = min(strata, key=lambda name: infos[name].rate_limiter_info.max_diff, default=None)
    limiters = [server.infos[limited] for server in answered] if limited else []
    configured = None if self._config is None else self._config.replay_ratio
    if configured is None and limited is not None and tables[limited]['sampled']:
      sampled = sum(tables[name]['sampled'] for name in strata)
      samples_per_insert = limiters[0].rate_limiter_info.samples_per_insert
      configured = samples_per_insert * sampled / tables[limited]['sampled']
    return {
      'tables': tables,
      'replay_ratio': _ratio(
        tables,
        limited,
        configured=configured,
        warm_up=sum(info.rate_limiter_info.min_size_to_sample for info in limiters),
      ),
      'limiter': _agreed(list(map(_limiter, limiters))),
      'memory': {
        # Strata share their sequences, and the largest stratum holds the sequences of all others.
        'sequences': max(_known([tables[name]['bytes'] for name in strata]), default=None),
        'server': _sum([server.nbytes for server in answered]),
      },
      'shards': [
        {
          'address': server.connection.address,
          'alive': server in answered,
          'tables': server.tables,
        }
        for server in self._servers
      ],
      'seconds': max(_known([server.elapsed for server in answered]), default=None),
    }

  def _ask_servers(self) -> list[_Server]:
    """Asks all servers; returns those that answered, or raises ConnectionError."""
    answered = []
    for server in self._servers:
      link = server.connection
      ask = link.info if len(self._servers) == 1 else link.probe
      infos = ask(self._timeout_seconds)
      if infos is not None:
        server.update(infos)
        answered.append(server)
    if not answered:
      addresses = ' or '.join(server.connection.address for server in self._servers)
      raise ConnectionError(
        f'no replay server answered at {addresses} within {self._timeout_seconds:g} s'
      )
    return answered


def of_counts(
  shards: Sequence[dict[str, dict[str, Any]]], config: tables_lib.ReplayConfig
) -> dict[str, Any]:
  """The result of `Inspector.poll` for a replay of which only counts are known, from a checkpoint.

  Args:
    shards: for each shard, the arguments of `entry` by table; {} if unknown.
    config: replay's config.

  Returns:
    As `Inspector.poll`; rates, the limiter's state and memory are None.
  """
  each = [{name: entry(**counts) for name, counts in shard.items()} for shard in shards]
  tables = summed([shard for shard in each if shard])
  limited = config.limiting_stratum.name
  return {
    'tables': tables,
    'replay_ratio': _ratio(
      tables,
      limited if tables else None,
      configured=config.replay_ratio,
      warm_up=config.warm_up,
    ),
    'limiter': None,
    'memory': {'sequences': None, 'server': None},
    'shards': [{'address': '-', 'alive': False, 'tables': shard} for shard in each],
    'seconds': None,
  }


def entry(size: int, max_size: int, inserted: int, sampled: int, **known: Any) -> dict[str, Any]:
  """An entry of 'tables' of `Inspector.poll`; what is not `known` is None."""
  unique = known.get('unique_sampled')
  return {
    **dict.fromkeys(('bytes', 'inserts_per_second', 'samples_per_second')),
    'size': size,
    'max_size': max_size,
    'inserted': inserted,
    'sampled': sampled,
    'fill': size / max_size,
    'unique_share': unique / inserted if inserted and unique is not None else None,
    'worker_time': dict.fromkeys(WORKER_STATES, 0.0),
    **known,
  }


def _ratio(
  tables: dict[str, dict[str, Any]],
  limited: str | None,
  *,
  configured: float | None,
  warm_up: int,
) -> dict[str, float | None]:
  """Entry 'replay_ratio' of `Inspector.poll`, from the tables of all shards together."""
  if limited is None:
    return {'configured': configured, 'achieved': 0.0, 'recent': None}
  strata = [row for name, row in tables.items() if name != tables_lib.PARAMS]
  inserts = tables[limited]['inserts_per_second']
  return {
    'configured': configured,
    'achieved': sum(row['sampled'] for row in strata)
    / max(1, tables[limited]['inserted'] - warm_up),
    'recent': sum(row['samples_per_second'] for row in strata) / inserts if inserts else None,
  }


def quantiles(values: np.ndarray) -> dict[str, float] | None:
  """The `QUANTILES` of an array of any shape, by name; None if it is empty."""
  if not values.size:
    return None
  found = np.quantile(values, list(QUANTILES.values()))
  return dict(zip(QUANTILES, found.tolist(), strict=True))


def _known(values: list[Any]) -> list[Any]:
  return [value for value in values if value is not None]


def _sum(values: list[Any]) -> Any:
  """Sum of the values that are not None; None without any."""
  known = _known(values)
  return sum(known) if known else None


def summed(shards: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
  """Sums the statistics of each table, as 'tables' of `Inspector.poll`, over all shards.

  Fractions are computed from the sums, and worker times are averaged.
  """
  names = sorted(set().union(*shards))
  return {name: _total([each[name] for each in shards if name in each]) for name in names}


def _total(each: list[dict[str, Any]]) -> dict[str, Any]:
  """Statistics of one table over all shards."""
  if len(each) == 1:
    return each[0]
  total = {key: _sum([shard[key] for shard in each]) for key in each[0] if key != 'worker_time'}
  total['fill'] = total['size'] / total['max_size']
  inserted = total['inserted']
  total['unique_share'] = total['unique_sampled'] / inserted if inserted else None
  total['worker_time'] = {
    state: sum(shard['worker_time'][state] for shard in each) / len(each) for state in WORKER_STATES
  }
  return total


def _agreed(limiters: list[dict[str, Any]]) -> dict[str, Any] | None:
  """Limiter state of all shards: the common state, else open; None without a limiter."""
  if not limiters:
    return None
  if len({limiter['state'] for limiter in limiters}) == 1:
    return min(limiters, key=lambda limiter: limiter['missing'])
  return limiters[0] | {'state': 'open', 'missing': 0}


def _inserted(info: reverb.reverb_types.TableInfo) -> int:
  return info.rate_limiter_info.insert_stats.completed


def _sampled(info: reverb.reverb_types.TableInfo) -> int:
  return info.rate_limiter_info.sample_stats.completed


def _is_same_server(before: connection_lib.TableInfos, now: connection_lib.TableInfos) -> bool:
  """Whether a server was not restarted: a restart resets its times, and maybe its counts."""
  total = lambda info: sum(_worker_milliseconds(info).values())
  return before.keys() == now.keys() and all(
    _inserted(now[name]) >= _inserted(before[name])
    and _sampled(now[name]) >= _sampled(before[name])
    and total(now[name]) >= total(before[name])
    for name in now
  )


def _worker_milliseconds(info: reverb.reverb_types.TableInfo) -> dict[str, int]:
  return {state: getattr(info.table_worker_time, f'{state}_ms') for state in WORKER_STATES}


def _nbytes(info: reverb.reverb_types.TableInfo) -> int | None:
  if info.signature is None:
    return None
  each = sum(spec.dtype.size * math.prod(spec.shape) for spec in info.signature.values())
  return info.current_size * each


def _limiter(info: reverb.reverb_types.TableInfo) -> dict[str, Any]:
  """Entry 'limiter' of `Inspector.poll` for one shard.

  A rate limiter keeps inserts · samples_per_insert − samples within [min_diff, max_diff].
  """
  limiter = info.rate_limiter_info
  short = limiter.min_size_to_sample - info.current_size
  ahead = _inserted(info) * limiter.samples_per_insert - _sampled(info)
  state, missing = 'open', 0.0
  if short > 0:
    state, missing = 'warming up', short
  elif ahead + limiter.samples_per_insert > limiter.max_diff:
    state, missing = 'inserts wait', ahead + limiter.samples_per_insert - limiter.max_diff
  elif ahead - 1 < limiter.min_diff:
    state, missing = 'samples wait', (limiter.min_diff + 1 - ahead) / limiter.samples_per_insert
  return {'table': info.name, 'state': state, 'missing': math.ceil(missing)}


def listener(address: str) -> psutil.Process | None:
  """The process that listens at HOST:PORT; None if HOST is another machine, or no process is found.

  Raises:
    psutil.NoSuchProcess: the process ended meanwhile.
  """
  host, _, port = address.rpartition(':')
  try:
    wanted = socket.gethostbyname(host.strip('[]') or 'localhost')
  except OSError:
    return None
  ours = {each.address for found in psutil.net_if_addrs().values() for each in found}
  if not wanted.startswith('127.') and wanted not in ours:
    return None
  for entry in psutil.net_connections('tcp'):
    listens = entry.status == psutil.CONN_LISTEN and entry.laddr[1:2] == (int(port),)
    if listens and entry.pid:
      return psutil.Process(entry.pid)
  return None
