"""Runs one host's share of the nodes of a run: `hephaestus node`."""

import os
import pathlib
import sys
from collections.abc import Sequence

from hephaestus.launch import config as launch_config
from hephaestus.launch.cluster import handshake
from hephaestus.launch.cluster import hosts as hosts_lib
from hephaestus.launch.processes import fork_server
from hephaestus.launch.run import local
from hephaestus.learner import profile as profile_lib


def run(
  hosts: hosts_lib.Hosts,
  host: hosts_lib.Host,
  config: launch_config.ExperimentConfig,
  folder: pathlib.Path,
  forks: fork_server.ForkServer,
  *,
  launch_id: int,
  attached: bool,
  profile: profile_lib.Span | None,
) -> int:
  """Runs a host's nodes under the supervisor until the run is over, interrupted or failed.

  Args:
    folder: run folder on this host, made by `folder.open_run`.
    launch_id: number of this launch, the same on all hosts, as is the config.
    attached: whether heartbeats arrive through stdin; the nodes stop when the heartbeats do.

  Returns:
    The exit code of `local.train`, with two exceptions. It is 1 if the reader of stdout is gone. It is
    0 in place of `local.STOPPED`, unless a signal on this host stopped the nodes while heartbeats
    arrived: then `launch` must see that the run is not over.
  """
  nodes = hosts.nodes(host)
  addresses = hosts.replay_addresses(host)
  where = ', '.join(addresses)
  print(f'up: {", ".join(nodes)}; replay at {where}', flush=True)
  follower = _Follower([(name, folder / 'logs' / f'{name}.log') for name in nodes])
  follows = attached or not sys.stdout.isatty()  # else the live line is in the terminal
  heartbeats = handshake.HeartbeatMonitor(sys.stdin.fileno()) if attached else None

  def on_tick() -> None:
    if heartbeats is not None:
      heartbeats.tick()
    if follows:
      follower.tick()

  if host.tunnel:
    print(
      f'ssh listens at {where} and forwards to replay: reachable from this host only', flush=True
    )
  share = local.Share(nodes, addresses, launch_id, on_tick, hosts.coordinator)
  try:
    exit_code = local.train(config, folder, forks, share, exposed=hosts.exposed, profile=profile)
    if follows:
      follower.tick()
    is_stopped_here = heartbeats is not None and not heartbeats.is_lost
    return 0 if exit_code == local.STOPPED and not is_stopped_here else exit_code
  except BrokenPipeError:  # the connection was lost, the nodes ended, and no reader is left
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


class _Follower:
  """Prints new lines of the logs of nodes, each after the name of its node."""

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
