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

A host has one of `ssh`, `gcloud` and `local: true` (this machine), or none where an orchestrator
starts `hephaestus node` on it. With `tunnel: true` it reaches replay through its ssh connection.
"""

import dataclasses
import difflib
import operator
import pathlib
import re
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf

if TYPE_CHECKING:  # its import takes seconds, which a machine that only launches need not spend
  from hephaestus.launch import config as launch_config

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
  """Address at which replay, or the first process of a learner on several hosts, listens.

  Attributes:
    address: name or IPv4 address of its host, by which the other hosts reach it.
    port: TCP port.
  """

  address: str
  port: int

  def __post_init__(self):
    if not _NAME.fullmatch(self.address):
      raise ValueError(f'address={self.address!r}: give a host name or an IPv4 address, no port')
    if not 1 <= self.port <= 65535:
      raise ValueError(f'port={self.port}: use 1 to 65535, above 1023 without being root')

  def __str__(self) -> str:
    return f'{self.address}:{self.port}'


WAYS = ('ssh', 'gcloud', 'local')  # to reach a host: fields of `Host`, see `remote.command`


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSH:
  """How to reach a host by ssh.

  Attributes:
    target: USER@HOST, or a name in ~/.ssh/config.
    options: command-line options of ssh, before the target.
  """

  target: str
  options: tuple[str, ...] = ()

  def __post_init__(self):
    if not re.fullmatch(r'[^\s-]\S*', self.target):
      raise ValueError(f'target={self.target!r}: write USER@HOST; options of ssh go into options')


@dataclasses.dataclass(frozen=True, kw_only=True)
class GCloud:
  """How to reach a TPU VM, one host of a TPU slice, or all hosts of a slice, by gcloud.

  Attributes:
    name, zone, project: of the TPU VM; the project None for gcloud's default.
    worker: index of the one host of a slice that is meant; None for 0.
    workers: number of hosts of a slice, to list all of them by one entry; each becomes a host of its
      own, NAME-0 and so on.
    options: command-line options of `gcloud compute tpus tpu-vm ssh`, such as --internal-ip.
  """

  name: str
  zone: str
  project: str | None = None
  worker: int | None = None
  workers: int | None = None
  options: tuple[str, ...] = ()

  def __post_init__(self):
    if self.worker is not None and self.workers is not None:
      raise ValueError('worker, workers: give the number of one host, or how many there are')
    for field, least in (('worker', 0), ('workers', 1)):
      value = getattr(self, field)
      if value is not None and value < least:
        raise ValueError(f'{field}={value}: must be at least {least}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
  """One host of a run: its nodes, and how it is reached.

  Attributes:
    name: name of the host in the hosts file, in logs and in commands.
    replay: address of its server of replay; None on a host without one.
    learner: whether it has a learner process; on the first of several such hosts, the address at
      which that process listens.
    evaluator: whether it has the evaluator.
    actors: number of its actor processes.
    ssh, gcloud, local: how it is reached, `local` being this machine; at most one of them.
    tunnel: whether it reaches replay through its ssh connection.
    directory: working directory of the command; None for the one after login, or here if `local`.
    command: shell command that runs hephaestus on the host.
  """

  name: str
  replay: Endpoint | None = None
  learner: bool | Endpoint = False
  evaluator: bool = False
  actors: int = 0
  ssh: SSH | None = None
  gcloud: GCloud | None = None
  local: bool = False
  tunnel: bool = False
  directory: str | None = None
  command: str = 'hephaestus'

  def __post_init__(self):
    if not _NAME.fullmatch(self.name):
      raise ValueError(f'{self.name!r}: a name of letters, digits, dots and dashes is needed')
    if self.actors < 0:
      raise ValueError(f'actors={self.actors}: must be at least 0')
    if not (self.replay or self.learner or self.evaluator or self.actors):
      raise ValueError('runs nothing; give it actors, or leave it out')
    ways = [way for way in WAYS if getattr(self, way)]
    if len(ways) > 1:
      raise ValueError(f'{", ".join(ways)}: there are several ways to reach it; keep one')
    if self.tunnel and self.replay:
      raise ValueError('tunnel=True: replay is on this host itself; leave it out')
    if self.tunnel and not (self.ssh or self.gcloud):
      raise ValueError('tunnel=True: needs ssh or gcloud')
    if not self.command.strip():
      raise ValueError(f'command={self.command!r}: is empty; leave it out for hephaestus')

  @property
  def is_reached(self) -> bool:
    """Whether it is reached from here; otherwise its nodes are started by hand or by an orchestrator."""
    return any(getattr(self, way) for way in WAYS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
  """All hosts of a run.

  Attributes:
    hosts: the hosts, in the order of the file; actor IDs and shards of replay have the same order.
  """

  hosts: tuple[Host, ...]

  def __post_init__(self):
    keepers = self.keepers
    if not keepers:
      raise ValueError('replay: is on no host; give one of them replay: {address: ..., port: ...}')
    if len({host.replay for host in keepers}) < len(keepers):
      names = ', '.join(host.name for host in keepers)
      raise ValueError(f'replay: {names} have the same address and port; give each its own')
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
    scorers = [host.name for host in self.hosts if host.evaluator]
    if len(scorers) != 1:
      where = ', '.join(scorers) or 'no host'
      raise ValueError(f'evaluator: is on {where}; give evaluator: true to one')
    if not self.num_actors:
      raise ValueError('actors: are on no host; give one of them actors: 1 or more')
    tunnelled = [host.name for host in self.hosts if host.tunnel]
    for keeper in keepers:
      if tunnelled and not keeper.is_reached:
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
    return str(first) if others and isinstance(first, Endpoint) else None

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

  def actor_ids(self, name: str) -> range:
    """IDs of the actors on the host with this name, unique among all hosts; ValueError for no host."""
    host = self.find(name)
    first = sum(before.actors for before in self.hosts[: self.hosts.index(host)])
    return range(first, first + host.actors)

  def replay_addresses(self, name: str) -> tuple[str, ...]:
    """HOST:PORT of each shard of replay, as the host with this name reaches it; ValueError for no host."""
    host = self.find(name)
    # Itself by loopback: not every machine reaches itself at its public address.
    return tuple(
      f'{"127.0.0.1" if keeper is host or host.tunnel else keeper.replay.address}:{keeper.replay.port}'
      for keeper in self.keepers
      if keeper.replay is not None
    )


def check(hosts: Hosts, config: 'launch_config.ExperimentConfig') -> None:
  """Checks that hosts and a config have the same numbers of nodes, and the same ports.

  Raises:
    ValueError: they do not fit; names the config's value and a remedy.
  """
  if config.fused:
    raise ValueError('learner.fused=True: is one process on one machine; add --no-fused')
  counts = {
    'actor.num_actors': (hosts.num_actors, 'the hosts have {} actors in all'),
    'learner.num_processes': (
      len(hosts.learners),
      f'the learner is on {", ".join(hosts.learners)}',
    ),
    'replay.num_shards': (len(hosts.keepers), 'the hosts keep {}, one on each that has replay'),
  }
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
  """Reads a hosts file; ValueError when it is unreadable or invalid."""
  try:
    text = path.read_text()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'{path}: cannot be read ({error})') from None
  return parse(text, str(path))


def parse(text: str, name: str) -> Hosts:
  """Parses the text of a hosts file; ValueError, with its name, the key and a remedy, for others."""
  try:
    content = OmegaConf.to_container(OmegaConf.create(text))
  except Exception as error:  # whatever a broken or foreign file makes a reader raise
    reason = ' '.join(str(error).split())
    raise ValueError(f'{name}: is no hosts file ({reason})') from None
  try:
    return _hosts(content)
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from None


def to_yaml(hosts: Hosts) -> str:
  """Converts hosts to the text of a hosts file."""
  defaults = {field.name: field.default for field in dataclasses.fields(Host)}
  entries = {}
  for host in hosts.hosts:
    values = dataclasses.asdict(host)
    name = values.pop('name')
    entries[name] = {key: value for key, value in values.items() if value != defaults[key]}
  return yaml.safe_dump({'hosts': entries}, sort_keys=False)


COMMON = ('directory', 'command')  # next to `hosts`, these hold for all of them


def _hosts(content: Any) -> Hosts:
  if not isinstance(content, dict):
    raise ValueError('must be a mapping with the key hosts')
  _check_keys(content, ('hosts', *COMMON), '')
  entries = content.get('hosts')
  if not isinstance(entries, dict) or not entries:
    raise ValueError('hosts: must map the name of each host to what it runs')
  common = {key: content[key] for key in COMMON if key in content}
  hosts: list[Host] = []
  for name, entry in entries.items():
    if not isinstance(name, str):
      raise ValueError(f'hosts.{name}: the name must be a word; put it in quotes')
    if isinstance(entry, dict):
      if 'name' in entry:
        raise ValueError(f'hosts.{name}.name: unknown key; the name stands before the colon')
      entry = common | entry
    hosts += _workers(_read(Host, entry, f'hosts.{name}', name=name))
  names = [host.name for host in hosts]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(f'hosts.{name}: is there twice (workers of a slice are NAME-0 and so on)')
  return Hosts(hosts=tuple(hosts))


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


def _read(kind: type, content: Any, path: str, **known: Any) -> Any:
  """Makes a dataclass from a mapping whose keys are fields; ValueError, which names `path`, for others."""
  fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in known}
  if not isinstance(content, dict):
    raise ValueError(f'{path}={content!r}: must be a mapping of {", ".join(fields)}')
  _check_keys(content, list(fields), f'{path}.')
  for name, field in fields.items():
    if field.default is dataclasses.MISSING and name not in content:
      raise ValueError(f'{path}.{name}: is missing')
  types = typing.get_type_hints(kind)
  values = {key: _convert(types[key], value, f'{path}.{key}') for key, value in content.items()}
  try:
    return kind(**known, **values)
  except ValueError as error:
    separator = ': ' if kind is Host else '.'
    raise ValueError(f'{path}{separator}{error}') from None


def _convert(kind: Any, value: Any, path: str) -> Any:
  """Checks a value of a hosts file for a field of a type, which may be a union."""
  if kind == tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
      return tuple(value)
    raise ValueError(f"{path}={value!r}: must be a list of words, such as [-p, '2222']")
  kinds = typing.get_args(kind) or (kind,)
  if type(value) in kinds:  # a bool is an int as well
    return value
  record: Any = next(filter(dataclasses.is_dataclass, kinds), None)
  if record and (isinstance(value, dict) or bool not in kinds):
    return _read(record, value, path)
  names = {bool: 'true or false', int: 'a whole number', str: 'a word, in quotes if need be'}
  raise ValueError(f'{path}={value!r}: must be {names[kinds[0]]}')


def _check_keys(content: dict[Any, Any], known: Sequence[str], prefix: str) -> None:
  for key in content:
    if key not in known:
      near = difflib.get_close_matches(str(key), known, n=1) or [', '.join(known)]
      raise ValueError(f'{prefix}{key}: unknown key; did you mean {near[0]}?')
