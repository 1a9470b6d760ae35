"""What `launch` says to a host through its stdin, and what the host makes of it.

The first line is an Order; then empty lines follow, as a sign of life. When they end, so does the
host's share: whatever happens to a connection, nothing is left running behind it.
"""

import json
import os
import select
import signal
import time
from typing import NamedTuple

SIGN_OF_LIFE_PERIOD = 5.0  # seconds
SILENCE_SECONDS = 300.0  # after which whoever gave the order counts as gone
_ORDER_SECONDS = 60.0
_ORDER_BYTES = 1 << 22


class Order(NamedTuple):
  """What all hosts of a launch are told alike.

  Attributes:
    hosts: text of the hosts file.
    config: text of config.yaml.
    launch_id: positive and different at every launch.
    profile: updates to be traced, as START:STOP; None for none.
  """

  hosts: str
  config: str
  launch_id: int
  profile: str | None = None

  def to_line(self) -> bytes:
    """One line of JSON."""
    return json.dumps(self._asdict()).encode() + b'\n'


def receive(descriptor: int) -> Order:
  """Reads the order; ValueError when none comes, or something else."""
  line = b''
  deadline = time.monotonic() + _ORDER_SECONDS
  while not line.endswith(b'\n'):
    seconds = deadline - time.monotonic()
    readable = seconds > 0 and select.select([descriptor], [], [], seconds)[0]
    byte = os.read(descriptor, 1) if readable else b''  # nothing behind the line may be taken
    line += byte
    if not byte or len(line) > _ORDER_BYTES:
      raise ValueError('HOSTS -: no order came through stdin; give the path of a hosts file')
  try:
    content = json.loads(line)
    order = Order(**content)
    given = (order.hosts, order.config, order.launch_id, order.profile or '')
    if tuple(map(type, given)) != (str, str, int, str):
      raise TypeError
  except (TypeError, ValueError, RecursionError):
    raise ValueError(f'HOSTS -: {line[:40]!r} is no order of this version') from None
  return order


class Leash:
  """Interrupts this program once the signs of life end.

  Attributes:
    pulled: whether they have.
  """

  def __init__(self, descriptor: int):
    """Counts as a sign of life itself."""
    self._descriptor = descriptor
    self._heard = time.monotonic()
    self.pulled = False

  def tick(self) -> None:
    """To be called now and then."""
    is_closed = False
    if not self.pulled and select.select([self._descriptor], [], [], 0)[0]:
      is_closed = not os.read(self._descriptor, 4096)
      self._heard = time.monotonic()
    if not self.pulled and (is_closed or time.monotonic() - self._heard > SILENCE_SECONDS):
      self.pulled = True
      os.kill(os.getpid(), signal.SIGTERM)
