"""The commands `launch` and `node`: a run on several hosts."""

import argparse
import contextlib
import pathlib
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

from hephaestus.launch import records
from hephaestus.launch.run import commands as run_commands
from hephaestus.launch.run import request as request_lib
from hephaestus.launch.run import validation
from hephaestus.learner import profile as profile_lib

if TYPE_CHECKING:
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.cluster import hosts as hosts_lib

ONE_PROCESS = 'train in one process with `hephaestus train --fused`'
GIVEN = ('preset', 'cognition', 'env', 'agent', 'steps', 'seed', 'set')  # which make a config


def add(commands: Any) -> None:
  """Adds the commands `launch` and `node` to the command line's sub-parsers."""
  launch = commands.add_parser(
    'launch', allow_abbrev=False, help='train on several hosts, over ssh or gcloud'
  )
  launch.add_argument('hosts', metavar='HOSTS', help='a hosts file; see docs/hosts.md')
  launch.add_argument(
    '--dry-run', action='store_true', help='print the commands that would start each host'
  )
  launch.set_defaults(call=_launch)
  node = commands.add_parser(
    'node', allow_abbrev=False, help="run one host's nodes of a run; `launch` starts this"
  )
  add = node.add_argument
  add('hosts', metavar='HOSTS', help='a hosts file; -: as `launch` sends on stdin')
  add('--host', required=True, metavar='NAME', help='the name of this host in it')
  add('--launch-id', type=int, metavar='N',
      help='above 0, the same on all hosts, another at each launch (default: the steps of the run)')  # fmt: skip
  add('--config', type=pathlib.Path, metavar='FILE',
      help='config.yaml of the run, in place of the flags that make one')  # fmt: skip
  node.set_defaults(call=_node)
  for parser in (launch, node):
    request_lib.add(parser, *request_lib.SHARED, 'profile')


def _make_shared_config(
  request: request_lib.TrainRequest, hosts: 'hosts_lib.Hosts'
) -> 'launch_config.ExperimentConfig':
  """Makes the config of a run on several hosts; ValueError if the hosts do not fit it."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.files import folder as folder_lib

  if request.config is not None:
    if words := request.words(*GIVEN):
      raise ValueError(
        f'{words[0]}: --config {request.config} says all of it; leave one of them out'
      )
    config = launch_config.load(request.config)
  elif request.preset is None and not folder_lib.resumes(request.run):
    raise ValueError(
      '--preset: give one; without it each host would choose one by its own accelerator'
    )
  else:
    config = request_lib.make_config(request)
  hosts_lib.check(hosts, config)
  return config


def _launch(arguments: argparse.Namespace) -> int:
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.cluster import handshake, remote
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.files import folder as folder_lib

  validation.check_distributed('several hosts', ONE_PROCESS)
  import portpicker

  path = pathlib.Path(arguments.hosts)
  hosts = hosts_lib.load(path)
  request = request_lib.of(arguments, fused=False)
  config = _make_shared_config(request, hosts)
  budget = validation.check_budget(config)
  folder = request.run or folder_lib.new(config)
  launch_id = time.time_ns()
  ports = [portpicker.pick_unused_port() for _ in hosts.keepers]
  commands = {host.name: remote.command(hosts, host, str(folder), ports) for host in hosts.hosts}
  for host in hosts.hosts:
    words, nodes = commands[host.name], ', '.join(hosts.nodes(host))
    if words is None:
      words = ['hephaestus', 'node', str(path), '--host', host.name, '--run', str(folder)]
      words += ['--launch-id', str(launch_id), *request.words('profile')]
      words += request.words(*GIVEN, 'trust')
      print(f'# {host.name}: {nodes}; start it there by:', shlex.join(words), sep='\n')
    elif arguments.dry_run:
      print(f'# {host.name}: {nodes}', shlex.join(words), sep='\n')
  if arguments.dry_run:
    print('# nothing was started; hosts file and config reach each command through its stdin')
    return 0
  print(f'run folder on each host: {folder}', budget, sep='\n', flush=True)
  spec = handshake.RunSpec(
    path.read_text(), launch_config.to_yaml(config), launch_id, request.profile
  )
  reached = {name: words for name, words in commands.items() if words is not None}
  if not reached:
    raise ValueError(
      f'{path}: no host has {", ".join(hosts_lib.WAYS)}; start `hephaestus node` on each'
    )
  return remote.Launch(hosts, reached, spec, _say).run()


def _say(line: str) -> None:
  """Prints a line; called from several threads, so by a single write."""
  # A closed terminal is no reason to stop, nor one that lacks a character.
  with contextlib.suppress(OSError, UnicodeEncodeError):
    print(f'{line}\n', end='', flush=True)


def _node(arguments: argparse.Namespace) -> int:
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.agents import machine
  from hephaestus.launch.run import preflight

  validation.check_distributed('several hosts', ONE_PROCESS)
  from hephaestus.launch.cluster import handshake, node
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.files import folder as folder_lib

  with run_commands.fork_server() as forks:
    request = request_lib.of(arguments, fused=False)
    attached, profile = arguments.hosts == '-', request.profile
    if attached:
      spec = handshake.receive(sys.stdin.buffer)
      launch_id, profile = spec.launch_id, profile or spec.profile
      hosts = hosts_lib.parse(spec.hosts, 'HOSTS')
      with records.trusting(True):  # `launch` has read it, and may run any command here by ssh
        config = launch_config.from_yaml(spec.config, folder_lib.CONFIG)
      hosts_lib.check(hosts, config)
    else:
      hosts = hosts_lib.load(pathlib.Path(arguments.hosts))
      config = _make_shared_config(request, hosts)
      launch_id = _launch_id(arguments.launch_id, config)
    host = hosts.find(arguments.host)
    if host.learner:
      machine.check(config, machine.find())
    budget = validation.check_budget(config)
    remarks = preflight.check_environment(config)
    folder = request.run or folder_lib.new(config)
    span = None if profile is None else profile_lib.parse(profile)
    folder_lib.open_run(folder, config)
    print(f'run folder: {folder}', budget, *remarks, sep='\n', flush=True)
    return node.run(
      hosts, host, config, folder, forks,
      launch_id=launch_id, attached=attached, profile=span,
    )  # fmt: skip


def _launch_id(given: int | None, config: 'launch_config.ExperimentConfig') -> int:
  """The launch ID of a host that `launch` does not start, the same on all hosts.

  The default, the environment steps of the run, differs from the ID of an earlier launch, because a
  resumed run must end at a later step. ValueError if it is below 1, or missing where the run may end
  by time.
  """
  if given is None and config.max_minutes is not None:
    raise ValueError(
      '--launch-id: is needed for runs that end by max_minutes; give the same number on all hosts '
      'and another at each launch'
    )
  if given is not None and given < 1:
    raise ValueError(f'--launch-id {given}: must be at least 1')
  return given or config.max_environment_steps
