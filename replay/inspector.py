"""Numbers of a running server's tables, without touching what they count."""

from __future__ import annotations

import math
import socket
import time
from typing import Any, NamedTuple

import psutil
import reverb

from replay import connection
from replay import tables as tables_lib

WORKER_STATES = (
  'sleeping', 'waiting_for_sampling', 'waiting_for_inserts', 'sampling', 'inserting', 'running',
)  # fmt: skip
"""What a table's thread may do: nothing is asked of it; inserts are held back until something is
sampled; samples until something is inserted; it works."""


class _Look(NamedTuple):
  """What a server said.

  Attributes:
    seconds: monotonic.
    infos: of its tables.
  """

  seconds: float
  infos: connection.TableInfos


class Inspector:
  """Looks at a server now and then; rates are those since the look before."""

  def __init__(
    self,
    address: str,
    config: tables_lib.ReplayConfig | None = None,
    *,
    timeout_seconds: float = 5.0,
  ):
    """Makes no call yet.

    Args:
      address: HOST:PORT of the server.
      config: tells the configured ratio; without it, the limiter's samples per insert divided by
        the limited stratum's part of what was sampled, None before the first sample.
      timeout_seconds: whole seconds, at least 1.
    """
    self._address = address
    self._config = config
    self._timeout_seconds = timeout_seconds
    # Without an end to its patience it logs nothing: `look` raises, and its caller says so.
    self._connection = connection.Connection(address, 'inspector', timeout_seconds=math.inf)
    self._before: _Look | None = None
    self._process: psutil.Process | None = None

  def look(self) -> dict[str, Any]:
    """The tables, their replay ratio, the limiter's state and the memory they take.

      achieved = sequences sampled from all strata / max(1, inserted − warm-up)

    with `inserted` and the warm-up as the limited stratum has them; sequences that readers hold
    ahead count as sampled, so the figure runs ahead by their number, and settles with time.

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
      'memory': {'sequences', 'server'}: bytes of all sequences by the signature, each counted once,
        and of the server's process where it runs on this machine, else None.
      'seconds': since the look before; None at the first.

    Raises:
      ConnectionError: nothing answered in time.
    """
    infos = self._connection.info(self._timeout_seconds)
    if infos is None:
      raise ConnectionError(
        f'no replay server answered at {self._address} within {self._timeout_seconds:g} s'
      )
    now, before = _Look(time.monotonic(), infos), self._before
    if before is not None and not _goes_on(before.infos, infos):
      before = None  # another server: its counters began anew
    self._before = now
    strata = [name for name in infos if name != tables_lib.PARAMS]
    rows = {name: _row(info, now, before) for name, info in infos.items()}
    limited = min(strata, key=lambda name: infos[name].rate_limiter_info.max_diff, default=None)
    sizes = [rows[name]['bytes'] for name in strata]
    return {
      'tables': rows,
      'replay_ratio': self._ratio(now, before, strata, limited),
      'limiter': None if limited is None else _limiter(infos[limited]),
      'memory': {
        # Strata share what they hold, and the largest holds what the others do.
        'sequences': max((size for size in sizes if size is not None), default=None),
        'server': self._server_bytes(),
      },
      'seconds': None if before is None else now.seconds - before.seconds,
    }

  def _ratio(
    self, now: _Look, before: _Look | None, strata: list[str], limited: str | None
  ) -> dict[str, float | None]:
    if limited is None:
      return {'configured': None, 'achieved': 0.0, 'recent': None}
    limiter = now.infos[limited].rate_limiter_info
    sampled = sum(_sampled(now.infos[name]) for name in strata)
    configured: float | None = None
    if self._config is not None:
      configured = self._config.replay_ratio
    elif _sampled(now.infos[limited]):
      configured = limiter.samples_per_insert * sampled / _sampled(now.infos[limited])
    recent = None
    if before is not None:
      inserts = _inserted(now.infos[limited]) - _inserted(before.infos[limited])
      samples = sampled - sum(_sampled(before.infos[name]) for name in strata)
      recent = samples / inserts if inserts else None
    after_warm_up = max(1, _inserted(now.infos[limited]) - limiter.min_size_to_sample)
    return {'configured': configured, 'achieved': sampled / after_warm_up, 'recent': recent}

  def _server_bytes(self) -> int | None:
    """Resident memory of the process that listens there, where it is one of this machine's."""
    try:
      if self._process is None:
        self._process = _listener(self._address)
      return None if self._process is None else self._process.memory_info().rss
    except psutil.Error:  # it ended, or belongs to another user
      self._process = None
      return None


def _inserted(info: reverb.reverb_types.TableInfo) -> int:
  return info.rate_limiter_info.insert_stats.completed


def _sampled(info: reverb.reverb_types.TableInfo) -> int:
  return info.rate_limiter_info.sample_stats.completed


def _goes_on(before: connection.TableInfos, now: connection.TableInfos) -> bool:
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
