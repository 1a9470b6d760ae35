"""`hephaestus launch`, `node` and `manifests`: one run over several hosts."""

import argparse
import contextlib
import pathlib
import shlex
import sys
import time
from typing import Any

from hephaestus.launch import flags
from hephaestus.launch.run import commands as run_commands


def add(commands: Any) -> None:
  """Declares the commands of runs over several hosts."""
  for add_one in (_add_launch, _add_node, _add_manifests):
    parser = add_one(commands)
    flags.add_config_flags(parser)
    parser.set_defaults(fused=False, reset_moments=False)


def _add_launch(commands: Any) -> argparse.ArgumentParser:
  launch = commands.add_parser(
    'launch', allow_abbrev=False, help='train on several hosts, over ssh or gcloud'
  )
  launch.add_argument('hosts', metavar='HOSTS', help='a hosts file; see docs/launch.md')
  launch.add_argument(
    '--dry-run', action='store_true', help='print the commands that would start each host'
  )
  flags.add_profile_flag(launch)
  launch.set_defaults(call=_launch)
  return launch


def _add_node(commands: Any) -> argparse.ArgumentParser:
  node = commands.add_parser(
    'node', allow_abbrev=False, help="run one host's share of a run; what launch starts"
  )
  node.add_argument('hosts', metavar='HOSTS', help='a hosts file; -: what launch says on stdin')
  node.add_argument('--host', required=True, metavar='NAME', help='which of its hosts this is')
  node.add_argument(
    '--launch-id',
    type=int,
    metavar='N',
    help='above 0, the same on all hosts, another at each launch (default: the steps of the run)',
  )
  node.add_argument(
    '--config',
    type=pathlib.Path,
    metavar='FILE',
    help='config.yaml of the run, in place of the flags that make one',
  )
  node.add_argument(
    '--stay',
    action='store_true',
    help='where only replay is: stay when the run is over, until stopped',
  )
  flags.add_profile_flag(node)
  node.set_defaults(call=_node)
  return node


def _add_manifests(commands: Any) -> argparse.ArgumentParser:
  manifests = commands.add_parser(
    'manifests',
    allow_abbrev=False,
    help='write a run over several hosts for an engine that has them',
  )
  manifests.add_argument('hosts', metavar='HOSTS', help='a hosts file; see docs/launch.md')
  manifests.add_argument(
    '--kubernetes', action='store_true', help='the engine; there is no other yet'
  )
  manifests.add_argument('--out', type=pathlib.Path, metavar='FILE', help='default: stdout')
  manifests.add_argument(
    '--name', default='hephaestus', help='of the run there; every object begins with it'
  )
  manifests.add_argument('--namespace', help='default: what kubectl is told')
  manifests.add_argument('--image', help='made by the Dockerfile (default: hephaestus:VERSION)')
  manifests.add_argument(
    '--gpus', type=int, default=0, metavar='N', help='nvidia.com/gpu of each learner pod'
  )
  manifests.add_argument(
    '--tpu', metavar='TYPE', help='of the learner slice on GKE, such as tpu-v4-podslice'
  )
  manifests.add_argument('--topology', metavar='AxBxC', help='of that slice, such as 2x2x4')
  manifests.add_argument('--storage-class', metavar='NAME', help="default: the cluster's own")
  manifests.add_argument(
    '--resources',
    nargs='+',
    action='extend',
    default=[],
    metavar='ROLE.KIND=QUANTITY',
    help='of each pod, such as learner.cpu=8 actors.memory=4Gi replay.storage=200Gi',
  )
  manifests.add_argument('--launch-id', type=int, metavar='N', help='as of node')
  manifests.set_defaults(call=_manifests)
  return manifests


def _launch(arguments: argparse.Namespace) -> int:
  import portpicker

  from hephaestus.launch import config as launch_config
  from hephaestus.launch.cluster import handshake, node, remote
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.run import folder as folder_lib
  from hephaestus.launch.run import preflight
  from hephaestus.learner import profile as profile_lib

  path = pathlib.Path(arguments.hosts)
  hosts = hosts_lib.load(path)
  config = _make_shared_config(arguments, hosts)
  folder = arguments.run or folder_lib.new(config)
  if arguments.profile is not None:  # of what hosts know, each speaks itself
    preflight.check_profile(profile_lib.parse(arguments.profile), config, folder)
  launch_id = time.time_ns()
  ports = [portpicker.pick_unused_port() for _ in hosts.keepers]
  commands = {host.name: remote.command(hosts, host, str(folder), ports) for host in hosts.hosts}
  for name, words in commands.items():
    nodes = ', '.join(node.names(hosts, hosts.find(name)))
    if words is None:
      words = ['hephaestus', 'node', str(path), '--host', name, '--run', str(folder)]
      words += ['--launch-id', str(launch_id)]
      words += [] if arguments.profile is None else ['--profile', arguments.profile]
      words += flags.given_config_flags(arguments)
      print(f'# {name}: {nodes}; is started by somebody else:', shlex.join(words), sep='\n')
    elif arguments.dry_run:
      print(f'# {name}: {nodes}', shlex.join(words), sep='\n')
  if arguments.dry_run:
    print('# nothing was started; hosts file and config reach each command through its stdin')
    return 0
  print(f'run folder on each host: {folder}', flush=True)
  order = handshake.Order(
    path.read_text(), launch_config.to_yaml(config), launch_id, arguments.profile
  )
  reached = {name: words for name, words in commands.items() if words is not None}
  if not reached:
    raise ValueError(f'{path}: no host has ssh, gcloud or local; start `hephaestus node` on each')
  return remote.Launch(hosts, reached, order, _say).run()


def _say(line: str) -> None:
  with contextlib.suppress(OSError):  # a closed terminal is no reason to stop
    print(line, flush=True)


def _node(arguments: argparse.Namespace) -> int:
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.cluster import handshake, node
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.run import folder as folder_lib
  from hephaestus.launch.run import preflight

  with run_commands.fork_server() as forks:
    attached = arguments.hosts == '-'
    profile = arguments.profile
    if attached:
      order = handshake.receive(sys.stdin.fileno())
      profile = profile or order.profile
      hosts = hosts_lib.parse(order.hosts, 'HOSTS')
      config, launch_id = launch_config.from_yaml(order.config, folder_lib.CONFIG), order.launch_id
      hosts_lib.check(hosts, config)
    else:
      hosts = hosts_lib.load(pathlib.Path(arguments.hosts))
      config = _make_shared_config(arguments, hosts)
      launch_id = _launch_id(arguments, config)
    host = hosts.find(arguments.host)
    if arguments.stay:
      node.check_stays(hosts, host)
    preflight.check_environment(config)
    memory = preflight.check_memory(config, shards=1) if host.replay else ''
    folder = arguments.run or folder_lib.new(config)
    span = None if profile is None else node.prepare_profile(profile, config, folder)
    folder_lib.open_run(folder, config)
    print(f'run folder: {folder}', flush=True)
    if memory:
      print(memory, flush=True)
    return node.run(
      hosts, host, config, folder, launch_id, forks,
      attached=attached, stays=arguments.stay, profile=span,
    )  # fmt: skip


def _make_shared_config(arguments: argparse.Namespace, hosts: Any) -> Any:
  """Makes the config of a run that has several hosts."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.run import folder as folder_lib

  given = getattr(arguments, 'config', None)
  known = arguments.run is not None and (arguments.run / folder_lib.CONFIG).exists()
  if given is not None:
    if given_flags := flags.given_config_flags(arguments):
      raise ValueError(f'{given_flags[0]}: --config {given} says all of it; leave one of them out')
    config = launch_config.load(given)
  elif arguments.preset is None and not known:
    raise ValueError('--preset: give one; without it each host would choose by what it has itself')
  else:
    config = flags.make_config(arguments)
  hosts_lib.check(hosts, config)
  return config


def _launch_id(arguments: argparse.Namespace, config: Any) -> int:
  """That of a launch which nobody conducts; ValueError where it must be given."""
  from hephaestus.launch.cluster import node

  if arguments.launch_id is None:
    return node.default_launch_id(config)
  if arguments.launch_id < 1:
    raise ValueError(f'--launch-id {arguments.launch_id}: must be at least 1')
  return arguments.launch_id


def _manifests(arguments: argparse.Namespace) -> int:
  if not arguments.kubernetes:
    raise ValueError('--kubernetes: is missing; it is the only engine there is')
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.cluster import kubernetes
  from hephaestus.launch.run import preflight

  options = kubernetes.Options(
    name=arguments.name,
    namespace=arguments.namespace,
    **({} if arguments.image is None else {'image': arguments.image}),
    gpus=arguments.gpus,
    tpu=arguments.tpu,
    topology=arguments.topology,
    storage_class=arguments.storage_class,
    resources=kubernetes.parse_resources(arguments.resources),
    launch_id=arguments.launch_id,
  )
  hosts = hosts_lib.load(pathlib.Path(arguments.hosts))
  config = _make_shared_config(arguments, hosts)
  _launch_id(arguments, config)  # refuses what the pods would refuse
  preflight.check_environment(config)
  text = kubernetes.to_yaml(kubernetes.make(hosts, config, options))
  if arguments.out is None:
    print(text, end='')
    return 0
  try:
    arguments.out.write_text(text)
  except OSError as error:
    raise ValueError(f'--out {arguments.out}: cannot be written ({error.strerror})') from None
  return 0
