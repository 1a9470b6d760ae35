"""Several processes of one learner, which join, do every update together, and end together.

Only gradients cross between them in an update (`devices.DEVICES` runs over all devices). All other
agreements go through the coordinator of `jax.distributed`, which runs in the first process.
"""

import atexit
import functools
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

Tree = Any
JOIN_SECONDS = 300  # for all processes to join; then the node fails, and is restarted
# Missing heartbeats that count as a crash, after which all others end; JAX's default is 100 s.
HEARTBEAT_SECONDS, MISSING_HEARTBEATS = 3, 6
_PEER_GONE = 75  # EX_TEMPFAIL of sysexits.h
PEER_GONE = frozenset({_PEER_GONE, -signal.SIGABRT})
"""Exit codes of a process that ends because another one did: by an exception, or by JAX's abort."""
_STATUS_OF_PEERS = ('UNAVAILABLE', 'ABORTED', 'ALREADY_EXISTS', 'DEADLINE_EXCEEDED')
# gloo reports peers by all of its errors, NCCL only by errors of its connections, not of the device.
_WORDS_OF_PEERS = ('gloo', 'remote process exited', 'unhandled system error')
ASKED = 128 + signal.SIGTERM
"""Exit code of a process that was asked to stop before the run was over; so its supervisor restarts it."""
_ENDLESS_MS = 2**31 - 1
_POLL_SECONDS = 0.2


class ProcessGroup:
  """The processes of one learner, seen from this one; make it before any array of JAX.

  When a process crashes, the others end with an error within half a minute, by an abort of JAX or by
  an exception. A process that ends before `leave` exits at once, without waiting: with one of the
  codes `PEER_GONE` if another process is the reason, otherwise with 1. Make it in the main thread,
  which handles signals.

  Args:
    coordinator: HOST:PORT, the only address at which the first process listens.
    rank: 0 for the first process, the only one that publishes, saves and reports.
    size: number of processes.
    should_stop: returns whether this process was asked to stop. If so while it waits for others to
      join or to begin, it exits with code `ASKED`.

  Attributes:
    is_first: whether this process publishes, saves and reports.
    size: number of processes.

  Raises:
    RuntimeError: joining failed, as when not all processes join in time.
  """

  def __init__(self, coordinator: str, rank: int, size: int, *, should_stop: Callable[[], bool]):
    self._rank, self.size, self.is_first = rank, size, rank == 0
    self._should_stop = should_stop
    self._left = False
    self._exit_code = 1
    atexit.register(self._end_at_once)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
      wait_for(lambda: _join(coordinator, rank, size), self._end_if_asked)
    except RuntimeError as error:
      self.note_failure(error)
      raise
    signal.signal(signal.SIGTERM, on_sigterm)  # JAX has put its own in place
    self._client: Any = _global_state().client
    self._rounds = self._sums = 0
    logging.info('Process %d of %d has joined at %s.', rank, size, coordinator)

  def broadcast(self, tree: Tree) -> Tree:
    """Copies a tree of the first process to all processes, bitwise; others give its shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data
    plain = [jax.eval_shape(data, leaf) if is_key(leaf) else leaf for leaf in leaves]
    ends = np.cumsum([math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in plain])
    # As bytes: one program for any tree, and a sum with zeros that changes no bit.
    content = np.zeros(ends[-1], np.uint8)
    if self.is_first:
      host = [np.asarray(data(leaf) if is_key(leaf) else leaf) for leaf in leaves]
      content = np.frombuffer(b''.join(array.tobytes() for array in host), np.uint8)
    # The first may compile and restore for long, and gloo waits only half a minute for a process.
    self._meet('broadcast', self._end_if_asked)
    pieces = np.split(np.asarray(multihost_utils.broadcast_one_to_all(content)), ends[:-1])
    received = []
    for piece, leaf, like in zip(pieces, leaves, plain, strict=True):
      array = np.frombuffer(piece.tobytes(), like.dtype).reshape(like.shape)
      received.append(jax.random.wrap_key_data(jnp.asarray(array)) if is_key(leaf) else array)
    return jax.tree.unflatten(treedef, received)

  def is_asked_to_end(self) -> bool:
    """Whether a process has asked all of them to end, and may be waiting for this one."""
    return bool(self._client.key_value_dir_get('wish/'))

  def ends(self, *, now: bool, wishes: Callable[[], bool]) -> bool:
    """Whether all processes end before their next update; otherwise all of them begin it.

    Each process calls it before each update, with its batch at hand; it returns once all have called
    it. So no process waits inside an update for another that has no batch.

    Args:
      now: whether this process ends before this update, and so must the others.
      wishes: called repeatedly while this process waits; returns whether it now wishes to end. Then
        all end one update later, and a process without a batch must not wait for one (see
        `is_asked_to_end`).
    """
    # A vote belongs to its round: written before the barrier, all processes read it after.
    round_, self._rounds = f'end/{self._rounds}/', self._rounds + 1
    wish = lambda: self._client.key_value_set(f'wish/{self._rank}', '', allow_overwrite=True)
    if now:
      wish()
      self._client.key_value_set(f'{round_}{self._rank}', '')
    wished = now

    def listen() -> None:
      nonlocal wished
      if wishes() and not wished:  # also tells a watchdog that this node waits
        wished = True
        wish()

    self._meet('update', listen)
    return bool(self._client.key_value_dir_get(round_))

  def sum(self, count: int, meanwhile: Callable[[], object]) -> int:
    """Returns the sum of `count` over all processes, once all have called it; calls `meanwhile` while it waits."""
    # While one still reads its sum, others may have begun the next one, but not the one after it.
    round_, self._sums = f'sum/{self._sums % 2}/', self._sums + 1
    self._client.key_value_set(f'{round_}{self._rank}', str(count), allow_overwrite=True)
    self.meet(meanwhile)
    return sum(int(value) for _, value in self._client.key_value_dir_get(round_))

  def meet(self, meanwhile: Callable[[], object]) -> None:
    """Waits until all processes have called it; calls `meanwhile` repeatedly while it waits."""
    self._meet('meeting', meanwhile)

  def _end_if_asked(self) -> None:
    if self._should_stop():
      exit_at_once(ASKED)

  def _meet(self, place: str, meanwhile: Callable[[], object]) -> None:
    """Returns when all processes have called it with the same `place`."""
    wait_for(functools.partial(self._client.wait_at_barrier, place, _ENDLESS_MS), meanwhile)

  def note_failure(self, error: Exception) -> None:
    """Notes for the exit code whether the error that ends this process is about another process."""
    if is_of_peers(error):
      self._exit_code = _PEER_GONE

  def leave(self, *, finished: bool, was_asked: Callable[[], bool]) -> None:
    """Leaves the group in order: returns when all processes have saved and called it.

    `was_asked` says whether this process was asked to stop; it is called repeatedly, as a signal may arrive
    later than at other processes. Whether the run is over, `finished`, is the first process's to say.
    RuntimeError if another process was asked to stop, so this one should be restarted, or ended before.
    """
    if finished and self.is_first:
      self._client.key_value_set('finished/0', '')
    try:
      self._meet('leave', was_asked)
    except RuntimeError as error:
      self.note_failure(error)
      raise
    finished = bool(self._client.key_value_dir_get('finished/'))
    jax.distributed.shutdown()
    if finished or was_asked():
      self._left = True
    else:
      self._exit_code = _PEER_GONE
      raise RuntimeError(
        'another process of this learner was asked to stop; what was learned is saved'
      )

  def _end_at_once(self) -> None:
    if not self._left:  # JAX would wait minutes for the others, which may wait for this one
      exit_at_once(self._exit_code)


class OneProcess:
  """As `ProcessGroup`, for a learner of one process: it neither waits for others nor tells them anything."""

  is_first, size = True, 1

  def broadcast(self, tree: Tree) -> Tree:
    return tree

  def sum(self, count: int, unused_meanwhile: Callable[[], object]) -> int:
    return count

  def meet(self, unused_meanwhile: Callable[[], object]) -> None:
    pass

  def is_asked_to_end(self) -> bool:
    return False

  def ends(self, **unused: object) -> bool:
    return False

  def note_failure(self, unused_error: Exception) -> None:
    pass

  def leave(self, **unused: object) -> None:
    pass


Group = ProcessGroup | OneProcess
ONE_PROCESS = OneProcess()


def wait_for(call: Callable[[], Any], meanwhile: Callable[[], object]) -> Any:
  """Runs a function in a thread, so that the main thread handles signals; returns its result or raises its error.

  `meanwhile` is called repeatedly until the function has returned.
  """
  outcome: list[Any] = []
  failures: list[BaseException] = []

  def run() -> None:
    try:
      outcome.append(call())
    except BaseException as error:
      failures.append(error)

  thread = threading.Thread(target=run, name='coordination', daemon=True)
  thread.start()
  while thread.is_alive():
    thread.join(_POLL_SECONDS)
    if thread.is_alive():
      meanwhile()
  if failures:
    raise failures[0]
  return outcome[0]


def is_of_peers(error: Exception) -> bool:
  """Whether an error of JAX reports that another process ended, or cannot be reached."""
  text = str(error)
  says_so = any(words in text.lower() for words in _WORDS_OF_PEERS)
  return isinstance(error, jax.errors.JaxRuntimeError) and (
    says_so or text.startswith(_STATUS_OF_PEERS)
  )


def _global_state() -> Any:
  """JAX's state of several processes, private to JAX 0.6; a learner of one process must not need it."""
  from jax._src import distributed

  return distributed.global_state


def _join(coordinator: str, rank: int, size: int) -> None:
  from jax._src import xla_bridge

  # The public function has no argument for heartbeats.
  _global_state().initialize(
    coordinator,
    size,
    rank,
    cluster_detection_method='deactivate',
    initialization_timeout=JOIN_SECONDS,
    coordinator_bind_address=coordinator,
    service_heartbeat_interval_seconds=HEARTBEAT_SECONDS,
    service_max_missing_heartbeats=MISSING_HEARTBEATS,
    client_heartbeat_interval_seconds=HEARTBEAT_SECONDS,
    client_max_missing_heartbeats=MISSING_HEARTBEATS,
  )
  # JAX would take the address of the machine's name, which others may not reach.
  collectives = xla_bridge.xla_client._xla.make_gloo_tcp_collectives(
    distributed_client=_global_state().client, hostname=_own_address(coordinator)
  )
  xla_bridge.register_backend_factory(
    'cpu',
    functools.partial(xla_bridge.make_cpu_client, collectives),
    priority=0,
    fail_quietly=False,
  )


def _own_address(coordinator: str) -> str:
  """The address of this host from which it reaches the coordinator."""
  host, port = coordinator.rsplit(':', 1)
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
    probe.connect((host, int(port)))
    return str(probe.getsockname()[0])


def exit_at_once(code: int) -> None:
  """Exits without waiting for threads or for other processes."""
  logging.flush()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
