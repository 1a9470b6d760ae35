"""Hosts files: which nodes of a run are on each host, where replay listens, how to reach each host.

For example, a slice of four TPU hosts and two CPU hosts, one of which keeps replay:

    directory: hephaestus                  # on every host, relative to the home directory
    command: .venv/bin/hephaestus          # on every host
    hosts:
      store:
        replay: {address: 10.128.0.2, port: 22001}   # as the other hosts reach it
        evaluator: true
        ssh: {target: me@10.128.0.2}
      tpu:                                 # stands for tpu-0, tpu-1, tpu-2 and tpu-3
        learner: {address: 10.128.0.8, port: 22100}  # of tpu-0, as the other three reach it
        gcloud: {name: my-tpu, zone: us-central2-b, project: my-project, workers: 4}
      cpu:
        actors: 8                          # processes
        ssh: {target: me@10.128.0.3, options: [-p, '2222']}

If several hosts have `replay`, each keeps one shard.

A host has one of `ssh`, `gcloud` and `local: true` (this machine), or none where something else
starts `hephaestus node` on it. With `tunnel: true` it reaches replay through its ssh connection.
"""

import collections
import dataclasses
import operator
import pathlib
import re
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from hephaestus.launch import safe_yaml

if TYPE_CHECKING:  # its import takes seconds
  from hephaestus.launch import config as launch_config

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')
WAYS = ('ssh', 'gcloud', 'local')  # to reach a host: fields of `Host`, see `remote.command`
COMMON = ('directory', 'command')  # next to `hosts`, these hold for all of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
  """Address at which replay, or the first process of a learner on several hosts, listens."""

  address: str  # name or IPv4 address of its host, by which the other hosts reach it
  port: int

  def __post_init__(self):
    if not _NAME.fullmatch(self.address):
      raise ValueError(f'address={self.address!r}: give a host name or an IPv4 address, no port')
    if not 1 <= self.port <= 65535:
      raise ValueError(f'port={self.port}: use 1 to 65535, above 1023 without being root')

  def __str__(self) -> str:
    return f'{self.address}:{self.port}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSH:
  """How to reach a host by ssh."""

  target: str  # USER@HOST, or a name in ~/.ssh/config
  options: tuple[str, ...] = ()  # of ssh, before the target

  def __post_init__(self):
    if not re.fullmatch(r'[^\s-]\S*', self.target):
      raise ValueError(f'target={self.target!r}: write USER@HOST; options of ssh go into options')


@dataclasses.dataclass(frozen=True, kw_only=True)
class GCloud:
  """How to reach a TPU VM, one host of a TPU slice, or all hosts of a slice, by gcloud."""

  name: str
  zone: str
  project: str | None = None  # None: gcloud's default
  worker: int | None = None  # index of one host of a slice; None: 0
  workers: int | None = None  # number of hosts of a slice; each becomes a host, NAME-0 and so on
  options: tuple[str, ...] = ()  # of `gcloud compute tpus tpu-vm ssh`, such as --internal-ip

  def __post_init__(self):
    if self.workers is not None and (self.worker is not None or self.workers < 1):
      raise ValueError('workers: give the number of hosts, and no worker; or the index of one host')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
  """One host of a run: its nodes, and how it is reached, by at most one of `WAYS`.

  The nodes of a host that is reached in no way are started by hand or by a scheduler.
  """

  name: str
  replay: Endpoint | None = None  # address of its server of replay, if it has one
  learner: Any = False  # bool; an Endpoint on the first of several hosts with a learner process
  evaluator: bool = False
  actors: int = 0
  ssh: SSH | None = None
  gcloud: GCloud | None = None
  local: bool = False  # whether it is this machine
  tunnel: bool = False  # whether it reaches replay through its ssh connection
  directory: str | None = None  # of the command; None: the one after login, or here if `local`
  command: str = 'hephaestus'  # of a shell

  def __post_init__(self):
    if isinstance(self.learner, dict):
      object.__setattr__(self, 'learner', Endpoint(**self.learner))
    if not isinstance(self.learner, bool | Endpoint):
      raise ValueError(f'learner={self.learner!r}: give true or {{address: ..., port: ...}}')
    if not _NAME.fullmatch(self.name):
      raise ValueError('the name must have letters, digits, dots and dashes only')
    if self.actors < 0 or not (self.replay or self.learner or self.evaluator or self.actors):
      raise ValueError(f'actors={self.actors}: it runs nothing; give it actors, or leave it out')
    ways = [way for way in WAYS if getattr(self, way)]
    if len(ways) > 1:
      raise ValueError(f'{", ".join(ways)}: there are several ways to reach it; keep one')
    if self.tunnel and (self.replay or not (self.ssh or self.gcloud)):
      raise ValueError('tunnel=True: is for a host without replay that is reached by ssh or gcloud')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
  """All hosts of a run, in the order of the file, as are actor IDs and shards of replay."""

  hosts: tuple[Host, ...]

  def __post_init__(self):
    names = collections.Counter(host.name for host in self.hosts)
    if twice := [name for name, count in names.items() if count > 1]:
      raise ValueError(
        f'hosts.{twice[0]}: is there twice (workers of a slice are NAME-0 and so on)'
      )
    keepers = self.keepers
    if not keepers:
      raise ValueError('replay: is on no host; give one of them replay: {address: ..., port: ...}')
    if len({host.replay for host in keepers}) < len(keepers):
      raise ValueError('replay: several hosts have the same address and port; give each its own')
    if not self.learners:
      raise ValueError('learner: is on no host; give one of them learner: true')
    first, *others = [host for host in self.hosts if host.learner]
    if others and not isinstance(first.learner, Endpoint):
      raise ValueError(
        f'hosts.{first.name}.learner=True: is the first of {len(others) + 1} hosts that learn, and the '
        'others have to reach it; use learner: {address: ..., port: ...}'
      )
    for host in others:
      if isinstance(host.learner, Endpoint):
        raise ValueError(
          f'hosts.{host.name}.learner: {first.name} is the first and listens; use learner: true here'
        )
    if sum(host.evaluator for host in self.hosts) != 1:
      raise ValueError('evaluator: give evaluator: true to one host')
    if not self.num_actors:
      raise ValueError('actors: are on no host; give one of them actors: 1 or more')
    tunnelled = [host.name for host in self.hosts if host.tunnel]
    for keeper in keepers:
      if tunnelled and not any(getattr(keeper, way) for way in WAYS):
        raise ValueError(
          f'hosts.{tunnelled[0]}.tunnel=True: leads to replay on {keeper.name}, which needs {", ".join(WAYS)}'
        )
    if tunnelled and len(set(self.ports)) < len(keepers):
      raise ValueError(
        f'hosts.{tunnelled[0]}.tunnel=True: reaches all of replay at 127.0.0.1; give each host with '
        'replay another port'
      )

  @property
  def keepers(self) -> list[Host]:
    """The hosts with a server of replay; if there are several, each has a shard."""
    return [host for host in self.hosts if host.replay]

  @property
  def ports(self) -> list[int]:
    """Port of each shard of replay."""
    return [host.replay.port for host in self.hosts if host.replay]

  @property
  def exposed(self) -> bool:
    """Whether any host reaches replay over the network rather than through ssh."""
    return any(not host.tunnel for host in self.hosts if [host] != self.keepers)

  @property
  def learners(self) -> list[str]:
    """Names of the hosts with a learner process, the first process first."""
    return [host.name for host in self.hosts if host.learner]

  @property
  def coordinator(self) -> str | None:
    """HOST:PORT at which the first of several learner processes listens; None for one process."""
    first, *others = [host.learner for host in self.hosts if host.learner]
    return str(first) if others else None

  @property
  def num_actors(self) -> int:
    """Number of actor processes of all hosts."""
    return sum(host.actors for host in self.hosts)

  def find(self, name: str) -> Host:
    """Returns the host with a name; ValueError where there is none."""
    for host in self.hosts:
      if host.name == name:
        return host
    raise ValueError(f'--host {name}: there is {", ".join(host.name for host in self.hosts)}')

  def nodes(self, host: Host) -> list[str]:
    """Names of the nodes of a host, as in `program.commands`; IDs of actors differ between hosts."""
    from hephaestus.launch.run import parts as parts_lib  # which imports JAX

    shards = zip(self.keepers, parts_lib.replay_names(len(self.keepers)), strict=True)
    here = [name for keeper, name in shards if keeper is host]
    if host.learner:
      here.append(parts_lib.learners(len(self.learners))[self.learners.index(host.name)])
    first = sum(before.actors for before in self.hosts[: self.hosts.index(host)])
    here += [f'{parts_lib.ACTOR}-{first + actor}' for actor in range(host.actors)]
    here += [parts_lib.EVALUATOR] if host.evaluator else []
    return here if not host.replay or len(here) > 1 else [*here, parts_lib.ENDING]

  def replay_addresses(self, host: Host) -> list[str]:
    """HOST:PORT of each shard of replay, as a host reaches it."""
    # Itself by loopback: not every machine reaches itself at its public address.
    return [
      f'127.0.0.1:{keeper.replay.port}' if keeper is host or host.tunnel else str(keeper.replay)
      for keeper in self.keepers
      if keeper.replay is not None
    ]


def check(hosts: Hosts, config: 'launch_config.ExperimentConfig') -> None:
  """Raises ValueError unless hosts and a config have the same numbers of nodes, and the same ports."""
  if config.fused:
    raise ValueError('learner.fused=True: is one process on one machine; add --no-fused')
  counts = {
    'actor.num_actors': (hosts.num_actors, 'the hosts have {} actors in all'),
    'learner.num_processes': (
      len(hosts.learners), f'the learner is on {", ".join(hosts.learners)}'
    ),
    'replay.num_shards': (len(hosts.keepers), 'the hosts keep {}, one on each that has replay'),
  }  # fmt: skip
  for key, (count, said) in counts.items():
    value = operator.attrgetter(key)(config)
    if value != count:
      raise ValueError(
        f'{key}={value}: {said.format(count)}; add --set {key}={count}, or change the hosts'
      )
  first = config.replay.port
  if first is not None and list(range(first, first + len(hosts.ports))) != hosts.ports:
    raise ValueError(
      f'replay.port={first}: the hosts say {", ".join(map(str, hosts.ports))}; leave one out'
    )


def load(path: pathlib.Path) -> Hosts:
  """Reads a hosts file, see `parse`."""
  return _hosts(safe_yaml.read(path, str(path)), str(path))


def parse(text: str, name: str) -> Hosts:
  """Parses the text of a hosts file; ValueError, with its name, the key and a remedy, for others."""
  return _hosts(safe_yaml.parse(text, name), name)


def _hosts(content: Any, name: str) -> Hosts:
  entries = content.get('hosts') if isinstance(content, dict) else None
  if not isinstance(entries, dict):
    raise ValueError(f'{name}: hosts: must map the name of each host to what it runs')
  if unknown := content.keys() - {'hosts', *COMMON}:
    raise ValueError(f'{name}: {unknown.pop()}: unknown key; next to hosts are {", ".join(COMMON)}')
  common = {key: content[key] for key in COMMON if key in content}
  try:
    found = [
      host for each, entry in entries.items() for host in _workers(_host(each, entry, common))
    ]
    return Hosts(hosts=tuple(found))
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from None


def _host(name: Any, entry: Any, common: dict[str, Any]) -> Host:
  """Makes a host from its entry in a hosts file; ValueError, which names the host and the key."""
  if not isinstance(entry, dict):
    raise ValueError(f'hosts.{name}={entry!r}: must be a mapping, such as {{actors: 8}}')
  try:
    tree = OmegaConf.merge(
      OmegaConf.structured(Host), safe_yaml.literal(common | entry | {'name': name})
    )
    host: Any = OmegaConf.to_object(tree)
  except Exception as error:  # of OmegaConf, with the key, or of the classes above
    path = '.'.join(filter(None, ['hosts', str(name), getattr(error, 'full_key', None)]))
    first_line = str(error).split('\n')[0]
    raise ValueError(f'{path}: {first_line}') from None
  return host


def _workers(host: Host) -> list[Host]:
  """Expands a host that stands for a slice into all hosts of the slice."""
  if host.gcloud is None or host.gcloud.workers is None:
    return [host]
  return [
    dataclasses.replace(
      host,
      name=f'{host.name}-{worker}',
      learner=host.learner if worker == 0 else bool(host.learner),
      gcloud=dataclasses.replace(host.gcloud, worker=worker, workers=None),
    )
    for worker in range(host.gcloud.workers)
  ]
