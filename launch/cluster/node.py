"""One host's share of a run, as `hephaestus node` runs it."""

import os
import pathlib
import sys
from collections.abc import Sequence

from hephaestus.launch import config as launch_config
from hephaestus.launch.cluster import handshake as order_lib
from hephaestus.launch.cluster import hosts as hosts_lib
from hephaestus.launch.run import fork_server, local, preflight
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import profile as profile_lib


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
  shards = parts_lib.replay_names(len(hosts.keepers))
  here = [shards[shard] for shard in hosts.shards(host.name)]
  if host.learner:
    learners = parts_lib.learners(len(hosts.learners))
    here.append(learners[hosts.learners.index(host.name)])
  here += [f'{parts_lib.ACTOR}-{actor_id}' for actor_id in hosts.actor_ids(host.name)]
  here += [parts_lib.EVALUATOR] if host.evaluator else []
  return here if not host.replay or len(here) > 1 else [*here, parts_lib.ENDING]


def check_stays(hosts: hosts_lib.Hosts, host: hosts_lib.Host) -> None:
  """Refuses to have a host stay that does more than to keep replay, and so ends; ValueError."""
  if parts_lib.ENDING not in names(hosts, host):
    raise ValueError(
      f'--stay: is for a host that has replay alone, {host.name} has not; leave it out'
    )


def prepare_profile(
  text: str, config: launch_config.ExperimentConfig, folder: pathlib.Path
) -> profile_lib.Span | None:
  """What is traced on a host, after room was made for it.

  A share that is started again is told the same as before, and may be behind these updates. Then
  nothing is traced, which is said, and the run goes on.

  Args:
    text: START:STOP.
    config: of the run.
    folder: of this host's share, which may be new.

  Raises:
    ValueError: the text is none.
  """
  span = profile_lib.parse(text)
  try:
    preflight.prepare_profile(span, config, folder)
  except ValueError as error:
    print(f'nothing is traced on this host: {error}', flush=True)
    return None
  return span


def run(
  hosts: hosts_lib.Hosts,
  host: hosts_lib.Host,
  config: launch_config.ExperimentConfig,
  folder: pathlib.Path,
  launch_id: int,
  forks: fork_server.ForkServer,
  *,
  attached: bool,
  stays: bool = False,
  profile: profile_lib.Span | None = None,
) -> int:
  """Runs a host's share, supervised, until the run is over, interrupted or failed.

  Args:
    hosts: all of them.
    host: this one.
    config: of the run, the same on all hosts.
    folder: of this host's share, opened.
    launch_id: the same on all hosts.
    forks: starts the nodes.
    attached: whether stdin gives signs of life, whose end stops the share.
    stays: whether replay, which is alone here, outlives the run until it is stopped.
    profile: updates that are traced, by the nodes that are here; None for none.

  Returns:
    The exit code, as of `local.train`; 0 also when it was stopped, unless signs of life went on, so
    that whoever gives them knows that the run is not over.
  """
  here = [name for name in names(hosts, host) if not (stays and name == parts_lib.ENDING)]
  addresses = hosts.replay_addresses(host.name)
  print(f'up: {", ".join(here)}; replay at {", ".join(addresses)}', flush=True)
  follower = _Follower([(name, folder / 'logs' / f'{name}.log') for name in here])
  follows = attached or not sys.stdout.isatty()  # where a terminal's live line does not stand
  leash = order_lib.Leash(sys.stdin.fileno()) if attached else None

  def on_tick() -> None:
    if leash is not None:
      leash.tick()
    if follows:
      follower.tick()

  if host.tunnel:
    for address in addresses:
      print(f'ssh listens at {address}, towards replay: reached from this host alone', flush=True)
  share = local.Share(here, addresses, launch_id, on_tick, hosts.coordinator)
  try:
    exit_code = local.train(config, folder, forks, share, exposed=hosts.exposed, profile=profile)
    if follows:
      follower.tick()
    is_asked_here = leash is not None and not leash.pulled
    return 0 if exit_code == local.STOPPED and not is_asked_here else exit_code
  except BrokenPipeError:  # the connection died, so did the nodes, and nobody hears of it
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


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
