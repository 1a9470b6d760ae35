"""Numbers of running servers' tables, without touching what they count."""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from hephaestus.replay import connection as connection_lib
from hephaestus.replay import tables as tables_lib

if TYPE_CHECKING:
  import reverb

WORKER_STATES = (
  'sleeping', 'waiting_for_sampling', 'waiting_for_inserts', 'sampling', 'inserting', 'running',
)  # fmt: skip
"""What a table's thread may do: nothing is asked of it; inserts are held back until something is
sampled; samples until something is inserted; it works."""

QUANTILES = {'lowest': 0.0, 'low': 0.05, 'median': 0.5, 'high': 0.95, 'highest': 1.0}
"""By which a distribution is told."""
_MOST_POOLED = 1000  # distributions; of more, as many that lie evenly among them


class _Look(NamedTuple):
  """What a server said.

  Attributes:
    seconds: monotonic.
    infos: of its tables.
  """

  seconds: float
  infos: connection_lib.TableInfos


class _Server:
  """One server, and the last two looks at it.

  Attributes:
    connection: to it.
    now: the newest look; of a server that does not answer, the last there was.
    before: the one before it, None where it was of another server.
  """

  def __init__(self, connection: connection_lib.Connection):
    self.connection = connection
    self.now: _Look | None = None
    self.before: _Look | None = None
    self._process: psutil.Process | None = None

  def take(self, infos: connection_lib.TableInfos) -> None:
    self.before, self.now = self.now, _Look(time.monotonic(), infos)
    if self.before is not None and not _goes_on(self.before.infos, infos):
      self.before = None  # another server: its counters began anew

  @property
  def rows(self) -> dict[str, dict[str, Any]]:
    """Its tables, as they were last seen."""
    if self.now is None:
      return {}
    return {name: _row(info, self.now, self.before) for name, info in self.now.infos.items()}

  @property
  def nbytes(self) -> int | None:
    """Resident memory of the process that listens there, where it is one of this machine's."""
    try:
      if self._process is None:
        self._process = _listener(self.connection.address)
      return None if self._process is None else self._process.memory_info().rss
    except psutil.Error:  # it ended, or belongs to another user
      self._process = None
      return None


class Inspector:
  """Looks at a server, or at all shards, now and then; rates are those since the look before."""

  def __init__(
    self,
    address: str | Sequence[str],
    config: tables_lib.ReplayConfig | None = None,
    *,
    timeout_seconds: float = 5.0,
  ):
    """Makes no call yet.

    Args:
      address: HOST:PORT of the server, or of each shard.
      config: tells the configured ratio; without it, the limiter's samples per insert divided by
        the limited stratum's part of what was sampled, None before the first sample.
      timeout_seconds: whole seconds, at least 1.
    """
    self._config = config
    self._timeout_seconds = timeout_seconds
    # Without an end to its patience it logs nothing: `look` raises, and its caller says so.
    self._servers = [
      _Server(connection)
      for connection in connection_lib.connect(address, 'inspector', timeout_seconds=math.inf)
    ]

  def look(self) -> dict[str, Any]:
    """The tables, their replay ratio, the limiter's state and the memory they take.

      achieved = sequences sampled from all strata / max(1, inserted − warm-up)

    with `inserted` and the warm-up as the limited stratum has them; sequences that readers hold
    ahead count as sampled, so the figure runs ahead by their number, and settles with time. Of
    several shards, all numbers are sums over those that answer, and shares are those of the sums.

    Returns:
      'tables': {NAME: {
        'size', 'max_size', 'inserted', 'sampled', 'unique_sampled': sequences,
        'fill': share of the capacity,
        'unique_share': of the sequences ever inserted that were ever sampled, None without any,
        'bytes': of what it holds by its signature, uncompressed; None without one,
        'inserts_per_second', 'samples_per_second': sequences; None at the first look,
        'worker_time': {STATE: share of the time since the look before, or since the server began}
      }}
      'replay_ratio': {'configured', 'achieved', 'recent'}; 'recent' of what was inserted and sampled
        since the look before, None when nothing was inserted.
      'limiter': {'table', 'state', 'missing'} of the limited stratum; the state is one of
        'warming up', 'inserts wait', 'samples wait' and 'open', and `missing` how many sequences
        must be inserted (sampled, where inserts wait) until it is another; None without a stratum.
        Shards that are not all in one state are open: there is one for each who wants something.
      'memory': {'sequences', 'server'}: bytes of all sequences by the signature, each counted once,
        and of the server's process where it runs on this machine, else None.
      'shards': [{'address', 'alive', 'tables'}]: each server, with what it last said of its tables,
        {} if it never answered.
      'seconds': since the look before; None at the first.

    Raises:
      ConnectionError: nothing answered in time.
    """
    answered = []
    for server in self._servers:
      link = server.connection
      ask = link.info if len(self._servers) == 1 else link.look
      infos = ask(self._timeout_seconds)
      if infos is not None:
        server.take(infos)
        answered.append(server)
    if not answered:
      addresses = ' or '.join(server.connection.address for server in self._servers)
      raise ConnectionError(
        f'no replay server answered at {addresses} within {self._timeout_seconds:g} s'
      )
    seen = [(server.now, server.before) for server in answered if server.now is not None]
    each = [server.rows for server in answered]
    names = sorted(set().union(*each))
    rows = {name: _total([row[name] for row in each if name in row]) for name in names}
    strata = [name for name in names if name != tables_lib.PARAMS]
    strata = [name for now, _ in seen[:1] for name in now.infos if name in strata]
    infos = seen[0][0].infos
    limited = min(strata, key=lambda name: infos[name].rate_limiter_info.max_diff, default=None)
    sizes = [rows[name]['bytes'] for name in strata]
    return {
      'tables': rows,
      'replay_ratio': self._ratio(seen, strata, limited),
      'limiter': None
      if limited is None
      else _agreed([_limiter(now.infos[limited]) for now, _ in seen if limited in now.infos]),
      'memory': {
        # Strata share what they hold, and the largest holds what the others do.
        'sequences': max((size for size in sizes if size is not None), default=None),
        'server': _sum([server.nbytes for server in answered]),
      },
      'shards': [
        {
          'address': server.connection.address,
          'alive': server in answered,
          'tables': server.rows,
        }
        for server in self._servers
      ],
      'seconds': max(
        (now.seconds - before.seconds for now, before in seen if before is not None), default=None
      ),
    }

  def _ratio(
    self, seen: list[tuple[_Look, _Look | None]], strata: list[str], limited: str | None
  ) -> dict[str, float | None]:
    if limited is None:
      return {'configured': None, 'achieved': 0.0, 'recent': None}
    samples = lambda look: sum(_sampled(look.infos[name]) for name in strata)
    inserts = lambda look: _inserted(look.infos[limited])
    sampled = sum(samples(now) for now, _ in seen)
    from_limited = sum(_sampled(now.infos[limited]) for now, _ in seen)
    limiters = [now.infos[limited].rate_limiter_info for now, _ in seen]
    configured: float | None = None
    if self._config is not None:
      configured = self._config.replay_ratio
    elif from_limited:
      configured = limiters[0].samples_per_insert * sampled / from_limited
    pairs = [(now, before) for now, before in seen if before is not None]
    inserted_since = sum(inserts(now) - inserts(before) for now, before in pairs)
    sampled_since = sum(samples(now) - samples(before) for now, before in pairs)
    warm_up = sum(limiter.min_size_to_sample for limiter in limiters)
    after_warm_up = max(1, sum(inserts(now) for now, _ in seen) - warm_up)
    return {
      'configured': configured,
      'achieved': sampled / after_warm_up,
      'recent': sampled_since / inserted_since if inserted_since else None,
    }


def quantiles(values: np.ndarray) -> dict[str, float] | None:
  """QUANTILES of some numbers of any shape; None without any."""
  if not values.size:
    return None
  found = np.quantile(values, list(QUANTILES.values()))
  return dict(zip(QUANTILES, found.tolist(), strict=True))


def pooled(rows: np.ndarray, counts: np.ndarray) -> dict[str, float] | None:
  """QUANTILES of several distributions together, each of which is known by its own alone.

  Each is taken to hold its quantiles alone, every value at the one whose level is nearest. So the
  lowest and the highest are exact, so is what distributions that are alike have in common, and no
  value is told that none of them has.

  Args:
    rows: [N, Q] QUANTILES of each.
    counts: [N] of how many values.
  """
  if not len(rows):
    return None
  lowest, highest = float(rows[:, 0].min()), float(rows[:, -1].max())
  if len(rows) > _MOST_POOLED:
    some = np.linspace(0, len(rows) - 1, _MOST_POOLED).astype(int)
    rows, counts = rows[some], counts[some]
  levels = list(QUANTILES.values())
  edges = [0.0, *((low + high) / 2 for low, high in itertools.pairwise(levels)), 1.0]
  values = rows.ravel()
  order = np.argsort(values)
  below = np.cumsum(np.outer(counts, np.diff(edges)).ravel()[order])
  at = np.searchsorted(below, np.array(levels) * below[-1]).clip(0, len(order) - 1)
  found = values[order[at]].tolist()
  return dict(zip(QUANTILES, [lowest, *found[1:-1], highest], strict=True))


def _sum(values: list[Any]) -> Any:
  """Of those that are not None; None without any."""
  known = [value for value in values if value is not None]
  return sum(known) if known else None


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """One table's row of all shards together."""
  if len(rows) == 1:
    return rows[0]
  total = {key: _sum([row[key] for row in rows]) for key in rows[0] if key != 'worker_time'}
  total['fill'] = total['size'] / total['max_size']
  inserted = total['inserted']
  total['unique_share'] = total['unique_sampled'] / inserted if inserted else None
  total['worker_time'] = {
    state: sum(row['worker_time'][state] for row in rows) / len(rows) for state in WORKER_STATES
  }
  return total


def _agreed(limiters: list[dict[str, Any]]) -> dict[str, Any]:
  """The limiter of all shards together: whoever finds one open is not held back."""
  if len({limiter['state'] for limiter in limiters}) == 1:
    return min(limiters, key=lambda limiter: limiter['missing'])
  return limiters[0] | {'state': 'open', 'missing': 0}


def _inserted(info: reverb.reverb_types.TableInfo) -> int:
  return info.rate_limiter_info.insert_stats.completed


def _sampled(info: reverb.reverb_types.TableInfo) -> int:
  return info.rate_limiter_info.sample_stats.completed


def _goes_on(before: connection_lib.TableInfos, now: connection_lib.TableInfos) -> bool:
  """Whether it is the same server: a restarted one has lost its time, and maybe its counts."""
  total = lambda info: sum(_worker_milliseconds(info).values())
  return before.keys() == now.keys() and all(
    _inserted(now[name]) >= _inserted(before[name])
    and _sampled(now[name]) >= _sampled(before[name])
    and total(now[name]) >= total(before[name])
    for name in now
  )


def _worker_milliseconds(info: reverb.reverb_types.TableInfo) -> dict[str, int]:
  return {state: getattr(info.table_worker_time, f'{state}_ms') for state in WORKER_STATES}


def _row(info: reverb.reverb_types.TableInfo, now: _Look, before: _Look | None) -> dict[str, Any]:
  worked = _worker_milliseconds(info)
  inserts_per_second = samples_per_second = None
  if before is not None:
    old, elapsed = before.infos[info.name], now.seconds - before.seconds
    inserts_per_second = (_inserted(info) - _inserted(old)) / elapsed
    samples_per_second = (_sampled(info) - _sampled(old)) / elapsed
    worked = {state: worked[state] - ms for state, ms in _worker_milliseconds(old).items()}
  return {
    'size': info.current_size,
    'max_size': info.max_size,
    'inserted': _inserted(info),
    'sampled': _sampled(info),
    'unique_sampled': info.num_unique_samples,
    'fill': info.current_size / info.max_size,
    'unique_share': info.num_unique_samples / _inserted(info) if _inserted(info) else None,
    'bytes': _nbytes(info),
    'inserts_per_second': inserts_per_second,
    'samples_per_second': samples_per_second,
    'worker_time': {state: ms / max(1, sum(worked.values())) for state, ms in worked.items()},
  }


def _nbytes(info: reverb.reverb_types.TableInfo) -> int | None:
  if info.signature is None:
    return None
  each = sum(spec.dtype.size * math.prod(spec.shape) for spec in info.signature.values())
  return info.current_size * each


def _limiter(info: reverb.reverb_types.TableInfo) -> dict[str, Any]:
  """What the limiter would say to one more insert or sample.

  inserts · samples_per_insert − samples stays within [min_diff, max_diff]
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


def _listener(address: str) -> psutil.Process | None:
  """The process of this machine that listens at an address; None where it is another machine's."""
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
