"""Throughput of replay: inserting, sampling and publishing parameters, compared with the machine's limit."""

import contextlib
import multiprocessing
import os
import time
import timeit
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import Any

import jax
import numpy as np
import psutil

from hephaestus.replay import buffer, parameters, reader, tables, writer
from hephaestus.replay import columns as columns_lib

_GROUP = 16  # sequences of one write, as by an actor of 16 environments
_LEAVES = 100  # arrays of the parameters
_COPIED_BYTES = 1 << 27  # more than caches hold
_COPIES = 50
_PATIENCE = 120.0  # seconds for a process to start, or a batch to arrive
_UNLIMITED = 10**9  # sequences that may be inserted or sampled ahead, so the limiter blocks nothing
_LEAST_ROUNDS = 5
_SMALL = {
  'numbers': jax.ShapeDtypeStruct((16, 4), np.float32),
  'number': jax.ShapeDtypeStruct((), np.uint32),
}  # 260 bytes, so that many fit into memory
_LOOP = 100  # samples or inserts of one call, as a fused program makes many updates in one

Row = tuple[str, float, str, float | None]
"""Name, value, unit, and largest value that the machine allows (None: unknown) of a measurement."""


def measure(
  schema: Any,
  *,
  shards: Sequence[int],
  writers: Sequence[int],
  megabytes: Sequence[float],
  batch_size: int,
  stored: int,
  seconds: float,
) -> list[Row]:
  """Measures Reverb servers in child processes, with the same clients as actors and learner use.

  The limit is the bandwidth of one thread that copies memory, measured here, too. Sequences are
  random, so they hardly compress. The rate limiter blocks nothing.

  Args:
    schema: tree of jax.ShapeDtypeStruct of one sequence.
    shards: numbers of servers to sample from, each of which is measured.
    writers: numbers of processes that insert into one server, each of which is measured.
    megabytes: sizes of parameters to publish, in 1e6 bytes.
    batch_size: sequences of a batch, half of each of two strata.
    stored: sequences in all servers together during sampling.
    seconds: length of each measurement, except of copying.

  Returns:
    Rows: sequences and bytes per second of sampling and inserting, with the CPU time per sequence on
    each side; bytes per second of publishing and fetching parameters, with the median and the 99th
    percentile of their latencies; and the bandwidth of copying.

  Raises:
    ValueError: a value cannot be measured; the message names its flag.
    RuntimeError: a server did not answer in time.
  """
  _check(shards, writers, stored, seconds)
  # Processes fork from one that has imported everything, including what replay imports late, and
  # has run nothing.
  processes = multiprocessing.get_context('forkserver')
  processes.set_forkserver_preload([__name__, 'reverb'])
  bandwidth = _copy_bandwidth()
  nbytes = columns_lib.Columns(schema).nbytes
  rows: list[Row] = [('replay/sequence', nbytes, 'bytes', None)]
  for count in shards:
    per_second, used = _sampled(processes, schema, count, batch_size, stored, seconds)
    name = f'replay/sample/{count}_shards'
    rows += _throughput_rows(name, per_second, used, nbytes, bandwidth)
  for count in writers:
    per_second, used = _inserted(processes, schema, count, stored, seconds)
    name = f'replay/insert/{count}_writers'
    rows += _throughput_rows(name, per_second, used, nbytes, bandwidth)
  for size in megabytes:
    for way, latencies in _parameter_latencies(processes, size, seconds).items():
      name = f'replay/parameters/{size:g}_MB/{way}'
      rows += _latency_rows(name, size, latencies, bandwidth)
  return [*rows, ('copy', bandwidth, 'bytes/s', None)]


def by_size(sizes: Sequence[int], *, batch_size: int, seconds: float) -> list[Row]:
  """Measures sampling and inserting small sequences while many are stored, in two kinds of replay.

  These are a Reverb server in a child process, and the ring buffer of a fused run, updated in place
  by a compiled loop. Both are full, so each sequence that is inserted replaces the oldest.

  Args:
    sizes: numbers of stored sequences, each of which is measured.
    batch_size: sequences of a batch, half of each of two strata.
    seconds: length of each measurement, after filling.

  Returns:
    For each size, kind of replay and operation: sequences per second, and the CPU time per sequence
    of client and server together.

  Raises:
    ValueError: a value cannot be measured; the message names its flag.
    RuntimeError: a server did not answer in time.
  """
  if min(sizes) < _GROUP:
    raise ValueError(f'--sizes {" ".join(map(str, sizes))}: each must be at least {_GROUP}')
  _check([1], [1], stored=2, seconds=seconds)
  processes = multiprocessing.get_context('forkserver')
  processes.set_forkserver_preload([__name__, 'reverb'])
  nbytes = columns_lib.Columns(_SMALL).nbytes
  rows: list[Row] = [('replay/sequence', nbytes, 'bytes', None)]
  for size in sizes:
    measured = {
      'fused': _fused_while_stored(size, batch_size, seconds),
      'reverb': _reverb_while_stored(processes, size, batch_size, seconds),
    }
    for way, rates in measured.items():
      for what, (per_second, used) in rates.items():
        name = f'replay/{size}_stored/{way}/{what}'
        rows.append((name, per_second, 'sequences/s', None))
        rows.append((f'{name}/cpu', 1e9 * used, 'ns of CPU/sequence', None))
  return rows


def _fused_while_stored(
  size: int, batch_size: int, seconds: float
) -> dict[str, tuple[float, float]]:
  """Sequences per second, and CPU seconds per sequence, of a full ring buffer, by operation."""
  new = jax.tree.map(jax.numpy.asarray, _random(_SMALL, _GROUP))
  sizes = jax.numpy.full(batch_size, size)

  def insert(ring: buffer.Buffer) -> buffer.Buffer:
    return jax.lax.fori_loop(0, _LOOP, lambda _, ring: buffer.add(ring, new), ring)

  def sample(state: tuple[buffer.Buffer, jax.Array]) -> tuple[buffer.Buffer, jax.Array]:
    ring, total = state

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
      batch = buffer.sample(ring, jax.random.fold_in(jax.random.key(0), index), sizes)
      return total + batch['numbers'].sum() + batch['number'].sum()

    return ring, jax.lax.fori_loop(0, _LOOP, add, total)

  def rate(run: Any, state: Any, count: int) -> tuple[Any, tuple[float, float]]:
    run = jax.jit(run, donate_argnums=0)
    state = jax.block_until_ready(run(state))  # compiles
    clock, rounds = _Clock([os.getpid()]), 0
    while rounds < _LEAST_ROUNDS or clock.seconds < seconds:
      state = jax.block_until_ready(run(state))
      rounds += 1
    done = rounds * _LOOP * count
    return state, (done / clock.seconds, clock.used / done)

  ring = buffer.Buffer(
    jax.tree.map(jax.numpy.asarray, _random(_SMALL, size)), jax.numpy.int32(size)
  )
  ring, inserted = rate(insert, ring, _GROUP)
  _, sampled = rate(sample, (ring, jax.numpy.float32(0)), batch_size)
  return {'sample': sampled, 'insert': inserted}


def _reverb_while_stored(
  processes: Any, size: int, batch_size: int, seconds: float
) -> dict[str, tuple[float, float]]:
  """As `_fused_while_stored`, for a Reverb server with one reader or one writer."""
  config = _config(size, 1)
  with _servers(processes, config, _SMALL, batch_size) as (addresses, pids):
    entry = writer.Writer(addresses, config.strata, _SMALL)
    sequences = _random(_SMALL, _GROUP)
    _fill(entry, sequences, size + _GROUP)
    clock = _Clock([os.getpid(), *pids])
    before = entry.sequences_written
    while clock.seconds < seconds:
      entry.write(sequences, lambda: False)
    count = entry.sequences_written - before
    inserted = count / clock.seconds, clock.used / count
    entry.close()
    per_second, used = _read(addresses, config, _SMALL, batch_size, pids, seconds)
    return {'sample': (per_second, sum(used.values())), 'insert': inserted}


def _check(shards: Sequence[int], writers: Sequence[int], stored: int, seconds: float) -> None:
  """Raises ValueError if a value cannot be measured; names its flag."""
  for name, values in (('--shards', shards), ('--writers', writers)):
    if not values or min(values) < 1:
      raise ValueError(f'{name} {" ".join(map(str, values))}: each must be at least 1')
  if stored < 2 * max(shards):
    raise ValueError(f'--stored {stored}: use at least {2 * max(shards)}, two for each shard')
  if not 0 < seconds < float('inf'):
    raise ValueError(f'--seconds {seconds}: must be positive')


def _throughput_rows(
  name: str, per_second: float, used: dict[str, float], nbytes: int, bandwidth: float
) -> list[Row]:
  """Sequences and bytes per second with their limit, and CPU time per sequence on each side.

  Args:
    name: name of the rows.
    per_second: sequences per second.
    used: seconds of CPU time per sequence, by side: 'reader' or 'writers', and 'servers'.
    nbytes: bytes of a sequence.
    bandwidth: bytes per second of copying, the limit.
  """
  return [
    (name, per_second, 'sequences/s', bandwidth / nbytes),
    (f'{name}/bytes', per_second * nbytes, 'bytes/s', bandwidth),
    *((f'{name}/{side}', 1e6 * each, 'us of CPU/sequence', None) for side, each in used.items()),
  ]


def _latency_rows(
  name: str, megabytes: float, seconds: Sequence[float], bandwidth: float
) -> list[Row]:
  """Median and 99th percentile of the latency of parameters, and the bytes per second at the median."""
  median = float(np.median(seconds))
  return [
    (name, 1e6 * megabytes / median, 'bytes/s', bandwidth),
    (f'{name}/median', median, 's', None),
    (f'{name}/p99', float(np.quantile(seconds, 0.99)), 's', None),
  ]


def _sampled(
  processes: Any, schema: Any, shards: int, batch_size: int, stored: int, seconds: float
) -> tuple[float, dict[str, float]]:
  """Sequences per second of a reader, and seconds of CPU time per sequence on each side."""
  config = _config(stored, shards)
  with _servers(processes, config, schema, batch_size) as (addresses, pids):
    entry = writer.Writer(addresses, config.strata, schema)
    _fill(entry, _random(schema, _GROUP), stored + _GROUP * shards)
    entry.close()
    return _read(addresses, config, schema, batch_size, pids, seconds)


def _fill(entry: writer.Writer, sequences: Any, count: int) -> None:
  """Writes the same sequences repeatedly, until `count` sequences were written."""
  while entry.sequences_written < count:
    entry.write(sequences, lambda: False)


def _read(
  addresses: Sequence[str],
  config: tables.ReplayConfig,
  schema: Any,
  batch_size: int,
  pids: Sequence[int],
  seconds: float,
) -> tuple[float, dict[str, float]]:
  """As `_sampled`, for filled servers that run as the processes `pids`."""
  source = reader.Reader(addresses, config.strata, schema, batch_size=batch_size)
  try:
    for _ in range(4):  # batches that were prefetched before the measurement
      _next(source)
    reading, serving = _Clock([os.getpid()]), _Clock(pids)
    batches = 0
    while batches < _LEAST_ROUNDS or reading.seconds < seconds:
      _next(source)
      batches += 1
    count = batches * batch_size
    per_second = count / reading.seconds
    return per_second, {'reader': reading.used / count, 'servers': serving.used / count}
  finally:
    source.close()


def _inserted(
  processes: Any, schema: Any, count: int, stored: int, seconds: float
) -> tuple[float, dict[str, float]]:
  """Sequences per second into one server from `count` writers, and CPU seconds per sequence."""
  config = _config(stored, 1)
  with contextlib.ExitStack() as stack:
    addresses, pids = stack.enter_context(_servers(processes, config, schema, batch_size=2))
    links = [
      stack.enter_context(_process(processes, _write, addresses, config.strata, schema))
      for _ in range(count)
    ]
    for _, link in links:
      _receive(link)  # it has written its first sequences
    serving, writing = _Clock(pids), _Clock([pid for pid, _ in links])
    for _, link in links:
      link.send(seconds)
    counts, times = zip(*(_receive(link) for _, link in links), strict=True)
    used = {'writers': writing.used / sum(counts), 'servers': serving.used / sum(counts)}
    return sum(counts) / max(times), used


def _parameter_latencies(
  processes: Any, megabytes: float, seconds: float
) -> dict[str, list[float]]:
  """Latencies, in seconds, of publishing parameters ('push') and of fetching them ('fetch')."""
  leaf = max(1, round(1e6 * megabytes / 4 / _LEAVES))
  params = dict.fromkeys(
    [f'leaf_{i:03d}' for i in range(_LEAVES)],
    np.random.default_rng(0).normal(size=leaf).astype(np.float32),
  )
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  taken: dict[str, list[float]] = {'push': [], 'fetch': []}
  schema = jax.ShapeDtypeStruct((), np.float32)  # of sequences; none are written
  with _servers(processes, _config(2, 1), schema, batch_size=2) as (addresses, _):
    publisher = parameters.Publisher(addresses, shapes, timeout_seconds=_PATIENCE)
    source = parameters.Subscription(addresses, shapes)
    end = time.perf_counter() + seconds
    version = 0
    while version <= _LEAST_ROUNDS or time.perf_counter() < end:
      version += 1
      began = time.perf_counter()
      if not publisher.publish(parameters.Snapshot(version, 0, 0, params)):
        raise RuntimeError(f'{megabytes:g} MB of parameters were not published')
      pushed = time.perf_counter()
      if source.newest(_PATIENCE) is None:
        raise RuntimeError(f'{megabytes:g} MB of parameters did not arrive')
      if version > 1:  # the first call opens connections
        taken['push'].append(pushed - began)
        taken['fetch'].append(time.perf_counter() - pushed)
    publisher.close()
  return taken


def _config(stored: int, shards: int) -> tables.ReplayConfig:
  """A replay of two strata of equal size."""
  strata = tuple(
    tables.Stratum(name=name, max_size=stored, share=0.5) for name in ('frontier', 'episodic')
  )
  return tables.ReplayConfig(strata=strata, warm_up=shards, num_shards=shards)


def _random(schema: Any, count: int) -> Any:
  """[count, ...] random sequences: 0 or 1 for integers and bools, normal numbers for floats."""
  rng = np.random.default_rng(0)

  def draw(leaf: Any) -> np.ndarray:
    shape, dtype = (count, *leaf.shape), np.dtype(leaf.dtype)
    if dtype.kind in 'biu':
      return rng.integers(0, 2, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)

  return jax.tree.map(draw, schema)


def _next(source: reader.Reader) -> Any:
  batch = source.get(_PATIENCE)
  if batch is None:
    raise RuntimeError(f'no batch within {_PATIENCE:g} s')
  return batch


class _Clock:
  """Measures wall time, and the CPU time of some processes, in seconds since its construction."""

  def __init__(self, pids: Sequence[int]):
    self._processes = [psutil.Process(pid) for pid in pids]
    self._before = self._used()
    self._began = time.perf_counter()

  @property
  def seconds(self) -> float:
    return time.perf_counter() - self._began

  @property
  def used(self) -> float:
    return self._used() - self._before

  def _used(self) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in self._processes)


@contextlib.contextmanager
def _process(processes: Any, target: Any, *arguments: Any) -> Iterator[tuple[int, Any]]:
  """Context of a child process that gets one end of a pipe; yields its PID and the other end."""
  here, there = processes.Pipe()
  process = processes.Process(target=target, args=(there, *arguments), daemon=True)
  process.start()
  there.close()
  try:
    yield process.pid, here
  finally:
    here.close()
    process.join(10.0)
    process.kill()
    process.join()


def _receive(link: connection.Connection) -> Any:
  if not link.poll(_PATIENCE):
    raise RuntimeError(f'a process of the benchmark did not answer within {_PATIENCE:g} s')
  return link.recv()


@contextlib.contextmanager
def _servers(
  processes: Any, config: tables.ReplayConfig, schema: Any, batch_size: int
) -> Iterator[tuple[list[str], list[int]]]:
  """Context of replay servers in child processes; yields the addresses and PIDs of the shards."""
  with contextlib.ExitStack() as stack:
    started = [
      stack.enter_context(_process(processes, _serve, config, schema, batch_size))
      for _ in range(config.num_shards)
    ]
    yield [f'localhost:{_receive(link)}' for _, link in started], [pid for pid, _ in started]


def _serve(
  link: connection.Connection, config: tables.ReplayConfig, schema: Any, batch_size: int
) -> None:
  """Runs a server in its own process, and sends its port."""
  made = tables.make_tables(config, schema, batch_size=batch_size, insert_size=_UNLIMITED)
  server = tables.make_server(made)
  link.send(server.port)
  with contextlib.suppress(EOFError):
    link.recv()
  server.stop()


def _write(
  link: connection.Connection,
  addresses: Sequence[str],
  strata: Sequence[tables.Stratum],
  schema: Any,
) -> None:
  """Runs a writer in its own process: receives a duration, sends the number of its sequences and seconds."""
  entry = writer.Writer(addresses, strata, schema)
  sequences = _random(schema, _GROUP)
  entry.write(sequences, lambda: False)
  link.send(None)
  seconds = link.recv()
  before, began = entry.sequences_written, time.perf_counter()
  while time.perf_counter() - began < seconds:
    entry.write(sequences, lambda: False)
  link.send((entry.sequences_written - before, time.perf_counter() - began))
  with contextlib.suppress(EOFError):
    link.recv()
  entry.close()


def _copy_bandwidth() -> float:
  """Bytes per second that one thread copies within memory."""
  source, target = (np.full(_COPIED_BYTES // 8, value) for value in (1.0, 2.0))
  durations = timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=_COPIES)
  return _COPIED_BYTES / float(np.median(durations))
