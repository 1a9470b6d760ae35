"""Whether a Reverb server answers: asked with a deadline, said once when it changes."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from absl import logging

if TYPE_CHECKING:
  import reverb

TableInfos = Mapping[str, 'reverb.reverb_types.TableInfo']


def errors() -> tuple[type[Exception], ...]:
  """What Reverb's clients raise: DeadlineExceededError by itself, all of gRPC's as RuntimeError."""
  import reverb  # here, since it brings TensorFlow: seconds, for those who need neither

  return RuntimeError, reverb.errors.ReverbError


def connect(
  address: str | Sequence[str], name: str, *, timeout_seconds: float = 5.0
) -> tuple[Connection, ...]:
  """A connection to each shard; makes no call yet.

  Args:
    address: HOST:PORT of the server, or of each shard.
    name: who asks, for the logs.
    timeout_seconds: silence after which a server counts as down.
  """
  addresses = (address,) if isinstance(address, str) else tuple(address)
  if not addresses:
    raise ValueError('replay: no address was given; give HOST:PORT of at least one server')
  meanwhile = 'waiting' if len(addresses) == 1 else 'going on without it'
  return tuple(
    Connection(each, name, timeout_seconds=timeout_seconds, meanwhile=meanwhile)
    for each in addresses
  )


def answers(address: str, *, timeout_seconds: float) -> bool:
  """Whether the server at HOST:PORT does; no connection to it remains."""
  import reverb

  try:
    reverb.Client(address).server_info(timeout=max(1, round(timeout_seconds)))
  except errors():
    return False
  return True


class Connection:
  """A client, and what is known of the server behind it."""

  def __init__(
    self, address: str, name: str, *, timeout_seconds: float = 5.0, meanwhile: str = 'waiting'
  ):
    """Makes no call yet.

    Args:
      address: HOST:PORT of the server.
      name: who asks, for the logs.
      timeout_seconds: silence after which the server counts as down.
      meanwhile: what is done until it is back, for the logs.
    """
    import reverb

    self.address = address
    self.client = reverb.Client(address)
    self._name = name
    self._timeout_seconds = timeout_seconds
    self._meanwhile = meanwhile
    self._search: threading.Thread | None = None
    self._closed = threading.Event()
    self._silent_since: float | None = None
    self._alive = True

  @property
  def alive(self) -> bool:
    """False from `timeout_seconds` of silence until the next answer."""
    return self._alive

  def info(self, timeout_seconds: float | None = None) -> TableInfos | None:
    """The server's tables, or None when it does not answer in time."""
    timeout_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
    asked = time.monotonic() if self._silent_since is None else self._silent_since
    try:
      infos = self.client.server_info(timeout=max(1, round(timeout_seconds)))  # whole seconds only
    except errors():
      self._silent_since = asked
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
    self._silent_since = None
    return infos

  def look(self, timeout_seconds: float = 1.0) -> TableInfos | None:
    """`info` for those who cannot wait: once silent, a server is asked in the background.

    Not for several threads at once.
    """
    if self._search is not None:
      if self._search.is_alive():
        return None
      self._search = None
      atexit.unregister(self._leave)
    infos = self.info(timeout_seconds)
    if infos is None:
      self._closed.clear()
      self._search = threading.Thread(target=self._find, name='replay-search', daemon=True)
      self._search.start()
      atexit.register(self._leave)  # a thread inside Reverb must not outlive the interpreter
    return infos

  def close(self) -> None:
    """Ends the search for a silent server, within a second. Never blocks."""
    self._closed.set()

  def _find(self) -> None:
    while not self._closed.wait(0.05) and self.info(1.0) is None:
      pass

  def _leave(self) -> None:
    self.close()
    if self._search is not None:
      self._search.join(timeout=2.0)
