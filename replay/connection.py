"""Connections to Reverb servers: requests with a deadline, and one log line when a server goes down."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from absl import logging

if TYPE_CHECKING:
  import reverb

NO_PROXY = 'no_grpc_proxy'
TableInfos = Mapping[str, 'reverb.reverb_types.TableInfo']


def errors() -> tuple[type[Exception], ...]:
  """The exceptions of Reverb's clients: its own, and RuntimeError for all other errors of gRPC."""
  import reverb  # here, because it imports TensorFlow, which takes seconds

  return RuntimeError, reverb.errors.ReverbError


def connect(
  address: str | Sequence[str], name: str, *, timeout_seconds: float = 5.0
) -> tuple[Connection, ...]:
  """Makes a connection to each shard, in order; sends no request yet.

  Args:
    address: HOST:PORT of the server, or of each shard; ValueError if there is none.
    name: name of the caller in log lines.
    timeout_seconds: time without an answer after which a server counts as down.
  """
  addresses = (address,) if isinstance(address, str) else tuple(address)
  if not addresses:
    raise ValueError('replay: no address was given; give HOST:PORT of at least one server')
  meanwhile = 'waiting' if len(addresses) == 1 else 'going on without it'
  return tuple(
    Connection(each, name, timeout_seconds=timeout_seconds, meanwhile=meanwhile)
    for each in addresses
  )


def without_proxy(addresses: Iterable[str]) -> dict[str, str]:
  """Environment variables by which gRPC reaches hosts directly, where `http_proxy` or `grpc_proxy` is set.

  gRPC would ask the proxy for this machine's own 127.0.0.1, too. It reads them when it makes a client.

  Args:
    addresses: HOST:PORT of each host; this machine is always among them.

  Returns:
    The variable that only gRPC reads, with the hosts that it or `no_proxy` names already.
  """
  known = os.environ.get(NO_PROXY) or os.environ.get('no_proxy') or os.environ.get('NO_PROXY') or ''
  hosts = [address.rpartition(':')[0].strip('[]') for address in addresses]
  here = ('localhost', '127.0.0.1', '::1')
  return {NO_PROXY: ','.join(dict.fromkeys(filter(None, [*known.split(','), *here, *hosts])))}


def answers(address: str, *, timeout_seconds: float) -> bool:
  """Whether the server at `address`, HOST:PORT, answers in time (whole seconds); closes the connection."""
  import reverb

  try:
    reverb.Client(address).server_info(timeout=max(1, round(timeout_seconds)))
  except errors():
    return False
  return True


class Connection:
  """A Reverb client that tracks whether its server answers.

  Attributes:
    address: HOST:PORT of the server.
    client: the `reverb.Client`.
  """

  def __init__(
    self, address: str, name: str, *, timeout_seconds: float = 5.0, meanwhile: str = 'waiting'
  ):
    """Makes the client; sends no request yet.

    Args:
      address: HOST:PORT of the server.
      name: name of the caller in log lines.
      timeout_seconds: time without an answer after which the server counts as down.
      meanwhile: the caller's action until the server is back, such as 'waiting', for log lines.
    """
    import reverb

    os.environ.update(without_proxy([address]))
    self.address = address
    self.client = reverb.Client(address)
    self._name = name
    self._timeout_seconds = timeout_seconds
    self._meanwhile = meanwhile
    self._background: threading.Thread | None = None
    self._closed = threading.Event()
    self._unanswered_since: float | None = None
    self._alive = True

  @property
  def alive(self) -> bool:
    """Whether the server counts as up: False from `timeout_seconds` without an answer to the next answer."""
    return self._alive

  def info(self, timeout_seconds: float | None = None) -> TableInfos | None:
    """Asks for the state of the server's tables.

    Args:
      timeout_seconds: longest wait, rounded to whole seconds, at least 1; None for the time given to `__init__`.

    Returns:
      Reverb's `TableInfo` of each table by name; None without an answer in time.
    """
    timeout_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
    asked = time.monotonic() if self._unanswered_since is None else self._unanswered_since
    try:
      infos = self.client.server_info(timeout=max(1, round(timeout_seconds)))  # whole seconds only
    except errors():
      self._unanswered_since = asked
      if self._alive and time.monotonic() - asked >= self._timeout_seconds:
        self._alive = False
        logging.warning(
          '%s: the replay server at %s does not answer; %s',
          self._name, self.address, self._meanwhile,
        )  # fmt: skip
      return None
    if not self._alive:
      logging.info('%s: the replay server at %s is back', self._name, self.address)
    self._alive = True
    self._unanswered_since = None
    return {name: each for name, each in infos.items() if name.isprintable()}  # in a terminal

  def probe(self, timeout_seconds: float = 1.0) -> TableInfos | None:
    """Asks as `info` does, but waits only once for a server that is down.

    After one time-out, a background thread asks until the server answers, and until then this returns
    None at once. Not thread-safe.
    """
    if self._background is not None:
      if self._background.is_alive():
        return None
      self._background = None
      atexit.unregister(self._join)
    infos = self.info(timeout_seconds)
    if infos is None:
      self._closed.clear()
      self._background = threading.Thread(
        target=self._wait_for_answer, name='replay-probe', daemon=True
      )
      self._background.start()
      atexit.register(self._join)  # a thread inside Reverb must not outlive the interpreter
    return infos

  def close(self) -> None:
    """Ends the background thread of `probe` within a second. Never blocks."""
    self._closed.set()

  def _wait_for_answer(self) -> None:
    while not self._closed.wait(0.05) and self.info(1.0) is None:
      pass

  def _join(self) -> None:
    self.close()
    if self._background is not None:
      self._background.join(timeout=2.0)
