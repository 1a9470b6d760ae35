"""One host's share of a run: what `hephaestus node` runs, and what `launch` tells it through stdin.

The first line is an Order; then empty lines follow, as a sign of life. When they end, so does the
host's share: whatever happens to a connection, nothing is left running behind it.
"""

import json
import os
import pathlib
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from launch import config as launch_config
from launch import hosts as hosts_lib
from launch import local, program

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
  """

  hosts: str
  config: str
  launch_id: int

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
    if not (isinstance(order.hosts, str) and isinstance(order.config, str)):
      raise TypeError
  except (TypeError, ValueError):
    raise ValueError(f'HOSTS -: {line[:40]!r} is no order of this version') from None
  return order


def default_launch_id(config: launch_config.ExperimentConfig) -> int:
  """A launch id that hosts agree on without being told: where a run ends, it can only go on further.

  Raises:
    ValueError: this run may end for another reason.
  """
  if config.max_minutes is not None:
    raise ValueError(
      '--launch-id: is needed for runs that end by max_minutes; give the same number on all hosts '
      'and another at each launch'
    )
  return config.max_environment_steps


def names(hosts: hosts_lib.Hosts, host: hosts_lib.Host) -> list[str]:
  """The nodes of a host, as `program.commands` calls them."""
  here = [program.REPLAY] if host.replay else []
  here += [program.LEARNER] if host.learner else []
  here += [f'{program.ACTOR}-{actor_id}' for actor_id in hosts.actor_ids(host.name)]
  here += [program.EVALUATOR] if host.evaluator else []
  return here if here != [program.REPLAY] else [program.REPLAY, program.ENDING]


def run(
  hosts: hosts_lib.Hosts,
  host: hosts_lib.Host,
  config: launch_config.ExperimentConfig,
  folder: pathlib.Path,
  launch_id: int,
  *,
  attached: bool,
) -> int:
  """Runs a host's share, supervised, until the run is over, interrupted or failed.

  Args:
    hosts: all of them.
    host: this one.
    config: of the run, the same on all hosts.
    folder: of this host's share, opened.
    launch_id: the same on all hosts.
    attached: whether stdin gives signs of life, and stdout takes the nodes' logs.

  Returns:
    The exit code, as of `local.train`.
  """
  here = names(hosts, host)
  address = hosts.replay_address(host.name)
  print(f'up: {", ".join(here)}; replay at {address}', flush=True)
  follower = _Follower([(name, folder / 'logs' / f'{name}.log') for name in here])
  leash = _Leash(sys.stdin.fileno()) if attached else None

  def on_tick() -> None:
    if leash is not None:
      leash.tick()
      follower.tick()

  share = local.Share(here, address, launch_id, on_tick)
  try:
    exit_code = local.train(config, folder, share)
    if attached:
      follower.tick()
    return exit_code
  except BrokenPipeError:  # the connection died, so did the nodes, and nobody hears of it
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


class _Leash:
  """Interrupts this program once the signs of life end."""

  def __init__(self, descriptor: int):
    self._descriptor = descriptor
    self._heard = time.monotonic()
    self._pulled = False

  def tick(self) -> None:
    is_closed = False
    if not self._pulled and select.select([self._descriptor], [], [], 0)[0]:
      is_closed = not os.read(self._descriptor, 4096)
      self._heard = time.monotonic()
    if not self._pulled and (is_closed or time.monotonic() - self._heard > SILENCE_SECONDS):
      self._pulled = True
      os.kill(os.getpid(), signal.SIGTERM)


class _Follower:
  """Prints what is added to logs, line by line, each after the name of its node."""

  def __init__(self, logs: Sequence[tuple[str, pathlib.Path]]):
    self._logs = logs
    self._read = {name: path.stat().st_size if path.exists() else 0 for name, path in logs}

  def tick(self) -> None:
    for name, path in self._logs:
      if not path.exists():
        continue
      with open(path, 'rb') as log:
        log.seek(self._read[name])
        content = log.read(1 << 16)
      whole = content[: content.rfind(b'\n') + 1]
      self._read[name] += len(whole) or (len(content) if len(content) == 1 << 16 else 0)
      for line in whole.decode(errors='replace').splitlines():
        print(f'{name}| {line}', flush=True)
