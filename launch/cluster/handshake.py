"""Protocol between `hephaestus launch` and the `hephaestus node` that it starts on a host.

`launch` writes to the stdin of `node`. The first line is a RunSpec. Empty lines follow, as
heartbeats. When they stop, so do the host's nodes, so that a lost connection leaves nothing running.
"""

import json
import os
import select
import signal
import time
from typing import IO, NamedTuple

HEARTBEAT_PERIOD = 5.0  # seconds
TIMEOUT_SECONDS = 300.0  # time without a heartbeat after which `launch` counts as gone
_SPEC_BYTES = 1 << 22


class RunSpec(NamedTuple):
  """The run that all hosts of a launch share."""

  hosts: str  # text of the hosts file
  config: str  # text of config.yaml
  launch_id: int  # positive, and another at every launch
  profile: str | None = None  # learner updates to trace, as START:STOP

  def to_line(self) -> bytes:
    """Encodes this RunSpec as one line of JSON, which `receive` reads."""
    return json.dumps(self._asdict()).encode() + b'\n'


def receive(stream: IO[bytes]) -> RunSpec:
  """Reads the line with a RunSpec; ValueError if it is none. Heartbeats after it may be read as well."""
  line = stream.readline(_SPEC_BYTES)
  try:
    spec = RunSpec(**json.loads(line))
  except (TypeError, ValueError, RecursionError):
    spec = RunSpec('', '', 0)
  given = (spec.hosts, spec.config, spec.launch_id, spec.profile or '')
  if tuple(map(type, given)) != (str, str, int, str) or spec.launch_id < 1:
    raise ValueError(
      f'HOSTS -: {line[:40]!r} on stdin is no run specification of this version; give the path of a '
      'hosts file'
    )
  return spec


class HeartbeatMonitor:
  """Sends SIGTERM to this process once the heartbeats stop that are read from a file descriptor.

  Attributes:
    is_lost: whether the heartbeats have stopped.
  """

  def __init__(self, descriptor: int):
    self._descriptor = descriptor
    self._last = time.monotonic()
    self.is_lost = False

  def tick(self) -> None:
    """Reads heartbeats without blocking, and checks the time of the last; to be called regularly."""
    if self.is_lost:
      return
    if select.select([self._descriptor], [], [], 0)[0]:
      self.is_lost = not os.read(self._descriptor, 4096)  # closed
      self._last = time.monotonic()
    if self.is_lost or time.monotonic() - self._last > TIMEOUT_SECONDS:
      self.is_lost = True
      os.kill(os.getpid(), signal.SIGTERM)
