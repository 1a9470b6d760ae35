"""Whether a Reverb server answers: asked with a deadline, said once when it changes."""

from __future__ import annotations

import time
from collections.abc import Mapping

import reverb
from absl import logging

# What Reverb's clients raise: DeadlineExceededError by itself, anything of gRPC's as RuntimeError.
ERRORS = (RuntimeError, reverb.errors.ReverbError)

TableInfos = Mapping[str, reverb.reverb_types.TableInfo]


class Connection:
  """A client, and what is known of the server behind it."""

  def __init__(self, address: str, name: str, *, timeout_seconds: float = 5.0):
    """Makes no call yet.

    Args:
      address: HOST:PORT of the server.
      name: who asks, for the logs.
      timeout_seconds: silence after which the server counts as down.
    """
    self.address = address
    self.client = reverb.Client(address)
    self._name = name
    self._timeout_seconds = timeout_seconds
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
    except ERRORS:
      self._silent_since = asked
      if self._alive and time.monotonic() - asked >= self._timeout_seconds:
        self._alive = False
        logging.warning(
          '%s: the replay server at %s does not answer; waiting', self._name, self.address
        )
      return None
    if not self._alive:
      logging.info('%s: the replay server at %s is back', self._name, self.address)
    self._alive = True
    self._silent_since = None
    return infos
