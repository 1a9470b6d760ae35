"""The `hephaestus` command and its subcommands."""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from absl import app
from absl import logging as absl_logging
from absl.flags import argparse_flags


def _parse(arguments: list[str]) -> argparse.Namespace:
  parser = argparse_flags.ArgumentParser(
    prog='hephaestus',
    description='World-model agents that train on more than one process.',
    allow_abbrev=False,  # absl's own flags would make --run ambiguous
  )
  commands = parser.add_subparsers(dest='command', required=True)

  train = commands.add_parser(
    'train', allow_abbrev=False, help='train an agent; on an old folder, go on'
  )
  _add_config_flags(train)
  train.add_argument(
    '--fused',
    action=argparse.BooleanOptionalAction,
    help="environment and update in one program on the learner's devices (ppo's default)",
  )
  train.add_argument(
    '--expose',
    action='store_true',
    help="let other machines reach replay's port, which asks for no password",
  )
  train.add_argument(
    '--reset-moments',
    action='store_true',
    help='where a run of ppo goes on, begin its optimizer anew: after another number of environments',
  )

  launch = commands.add_parser(
    'launch', allow_abbrev=False, help='train on several hosts, over ssh or gcloud'
  )
  launch.add_argument('hosts', metavar='HOSTS', help='a hosts file; see docs/launch.md')
  launch.add_argument(
    '--dry-run', action='store_true', help='print the commands that would start each host'
  )
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
  for profiled in (train, launch, node):
    profiled.add_argument(
      '--profile',
      metavar='START:STOP',
      help='trace these updates of the learner, and an actor meanwhile; such as 100:110',
    )
  for several in (launch, node, manifests):
    _add_config_flags(several)
    several.set_defaults(fused=False, reset_moments=False)

  evaluate = commands.add_parser(
    'evaluate', allow_abbrev=False, help='score the newest checkpoint of a run'
  )
  evaluate.add_argument('run', type=pathlib.Path)
  evaluate.add_argument('--episodes', type=int, default=256)
  evaluate.add_argument('--video', type=pathlib.Path, help='video of one episode, .gif or .mp4')
  evaluate.add_argument('--seed', type=int, default=0)
  evaluate.add_argument(
    '--random', action='store_true', help='play at random instead: what to compare a score with'
  )
  evaluate.add_argument('--json', action='store_true')

  watch = commands.add_parser(
    'watch', allow_abbrev=False, help='see the newest checkpoint of a run play'
  )
  watch.add_argument('run', type=pathlib.Path)
  watch.add_argument('--seed', type=int, default=0)
  watch.add_argument('--fps', type=float, default=8.0, help='frames in a second')
  watch.add_argument('--episodes', type=int, default=1)
  watch.add_argument('--output', type=pathlib.Path, help='a video instead, .gif or .mp4')
  watch.add_argument(
    '--dream', action='store_true', help='the video shows beside it what its world model dreams'
  )
  watch.add_argument(
    '--greedy',
    action=argparse.BooleanOptionalAction,
    help='by the mode of the policy, or by chance (default: as the run is evaluated)',
  )

  environments = commands.add_parser(
    'environments', allow_abbrev=False, help='list the environments there are, or tell of one'
  )
  environments.add_argument(
    'name', nargs='?', metavar='FAMILY|WORLD', help='such as gymnax or gymnax/CartPole-v1'
  )
  environments.add_argument('--json', action='store_true')

  inspect = commands.add_parser(
    'inspect', allow_abbrev=False, help='what the replay of a run holds, and who waits for whom'
  )
  inspect.add_argument('target', metavar='RUN|HOST:PORT')
  inspect.add_argument('--json', action='store_true')
  inspect.add_argument(
    '--watch',
    type=float,
    nargs='?',
    const=5.0,
    metavar='SECONDS',
    help='look again and again, every 5 seconds if not told otherwise, until Ctrl-C',
  )
  inspect.add_argument(
    '--check',
    action='store_true',
    help='whether what the newest checkpoint of replay holds is sound; exit code 1 when not',
  )
  inspect.add_argument(
    '--sample', type=int, metavar='N', help='show N sequences of each stratum, from that checkpoint'
  )
  inspect.add_argument(
    '--gif', type=pathlib.Path, metavar='DIR', help='videos of what was observed'
  )
  inspect.add_argument(
    '--prometheus',
    type=int,
    metavar='PORT',
    help='serve the numbers to Prometheus, on this machine alone; 0 for a free port',
  )

  dashboard = commands.add_parser(
    'dashboard', allow_abbrev=False, help='a web page that shows runs, on this machine alone'
  )
  dashboard.add_argument(
    'runs', type=pathlib.Path, nargs='+', metavar='RUN', help='folder of a run'
  )
  dashboard.add_argument('--port', type=int, default=0, help='of 127.0.0.1 (default: a free one)')

  report = commands.add_parser(
    'report',
    allow_abbrev=False,
    help='learning curves of runs, with their spread over seeds',
    description='Runs that differ in nothing but their seed become one curve. Prints a table for each '
    'environment; with --out writes what the page of `dashboard` shows, as pictures and as one file. Needs '
    'the extra `report`.',
  )
  report.add_argument('runs', type=pathlib.Path, nargs='*', metavar='RUN', help='folder of a run')
  report.add_argument(
    '--out',
    type=pathlib.Path,
    help='folder for report.md, a PNG of each curve, and report.html, which has all in one file: '
    'curves, losses, drives, speed, nodes, videos, differences',
  )
  report.add_argument(
    '--metric',
    help='a key of metrics/*.jsonl, which is then shown alone (default: score, or return where there '
    'is none)',
  )
  report.add_argument(
    '--node',
    choices=['evaluator', 'learner', 'actor'],
    help='default: the first that has the metric',
  )
  report.add_argument(
    '--x',
    choices=['environment_step', 'learner_step', 'minutes'],
    default='environment_step',
    help='default: environment_step; minutes count from the first row on, while the run was running',
  )
  report.add_argument(
    '--label',
    nargs='+',
    action='append',
    default=[],
    metavar=('NAME', 'RUN'),
    help='name a curve and the runs that it is made of, whatever they differ in; may be repeated, as '
    'in --label small runs/small-* --label large runs/large-*',
  )

  bench = commands.add_parser(
    'bench', allow_abbrev=False, help='measure the speed of a part, and what limits it'
  )
  targets = bench.add_subparsers(dest='target', required=True)
  bench_env = targets.add_parser('env', allow_abbrev=False, help='steps of environments per second')
  bench_env.add_argument(
    '--env', nargs='+', default=['catch'], help='environments, each as of train (default: catch)'
  )
  bench_env.add_argument('--worlds', type=int, nargs='+', default=[256, 2048], metavar='N')
  bench_env.add_argument('--seconds', type=float, default=5.0, help='of each measurement')
  bench_env.add_argument(
    '--set', nargs='+', action='extend', default=[], metavar='environment.KEY=VALUE'
  )
  bench_env.add_argument('--json', action='store_true')
  bench_replay = targets.add_parser(
    'replay', allow_abbrev=False, help='sequences and parameters through replay servers'
  )
  bench_replay.add_argument('--env', default='catch', help='whose sequences (default: catch)')
  bench_replay.add_argument('--shards', type=int, nargs='+', default=[1, 2, 4], metavar='S')
  bench_replay.add_argument('--writers', type=int, nargs='+', default=[1, 4, 16], metavar='N')
  bench_replay.add_argument(
    '--parameters', type=float, nargs='+', default=[5.0, 40.0, 140.0], metavar='MB'
  )
  bench_replay.add_argument('--batch', type=int, default=256, metavar='B', help='sequences')
  bench_replay.add_argument(
    '--length', type=int, default=50, metavar='T', help='rows of a sequence'
  )
  bench_replay.add_argument('--stored', type=int, default=2048, metavar='N', help='sequences')
  bench_replay.add_argument('--seconds', type=float, default=5.0, help='of each measurement')
  bench_replay.add_argument('--json', action='store_true')
  bench_learner = targets.add_parser(
    'learner', allow_abbrev=False, help="the dreamer's update alone, and what limits it"
  )
  bench_learner.add_argument(
    '--size', help='laptop, 1m or full: with no environment, and of no preset'
  )
  bench_learner.add_argument('--preset', help='as of train (default: laptop)')
  bench_learner.add_argument('--env', help='as of train (default: catch)')
  bench_learner.add_argument('--ensemble', type=int, metavar='K', help='transition members')
  bench_learner.add_argument('--horizon', type=int, metavar='H', help='rows of the longest dream')
  bench_learner.add_argument('--batch', type=int, metavar='B', help='sequences')
  bench_learner.add_argument('--length', type=int, metavar='T', help='rows of a sequence')
  bench_learner.add_argument('--dtype', help='float32 or bfloat16')
  bench_learner.add_argument('--boredom', type=float, nargs='+', default=[0.0, 1.0], metavar='B')
  bench_learner.add_argument('--seconds', type=float, default=5.0, help='of each measurement')
  bench_learner.add_argument('--phases', action='store_true', help='also its parts alone')
  bench_learner.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
  bench_learner.add_argument('--json', action='store_true')
  end_to_end = targets.add_parser(
    'end-to-end', allow_abbrev=False, help='a whole run of the dreamer, beside its parts alone'
  )
  end_to_end.add_argument('--preset', help='as of train (default: laptop)')
  end_to_end.add_argument('--env', help='as of train (default: catch)')
  end_to_end.add_argument('--seconds', type=float, default=180.0, help='once it has warmed up')
  end_to_end.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
  end_to_end.add_argument('--json', action='store_true')
  watching = targets.add_parser(
    'watching', allow_abbrev=False, help='what a dashboard and inspect --watch cost a run'
  )
  watching.add_argument('--preset', help='as of train (default: laptop)')
  watching.add_argument('--env', help='as of train (default: catch)')
  watching.add_argument(
    '--pairs', type=int, default=30, metavar='N', help='of windows, one of them watched'
  )
  watching.add_argument(
    '--window',
    type=float,
    default=20.0,
    metavar='SECONDS',
    help='of which the first fifth is left out',
  )
  watching.add_argument(
    '--period',
    type=float,
    default=5.0,
    metavar='SECONDS',
    help='between two looks; with fewer, what they cost is easier to see',
  )
  watching.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
  watching.add_argument('--json', action='store_true')
  scaling = targets.add_parser(
    'scaling',
    allow_abbrev=False,
    help='what an update exchanges between simulated devices, and predicts for TPU v4',
  )
  scaling.add_argument('--size', default='laptop', help='laptop, 1m or full (default: laptop)')
  scaling.add_argument('--devices', type=int, nargs='+', default=[1, 2, 4, 8], metavar='D')
  scaling.add_argument('--ensemble', type=int, metavar='K', help='transition members')
  scaling.add_argument('--horizon', type=int, metavar='H', help='rows of the longest dream')
  scaling.add_argument('--batch', type=int, metavar='B', help='sequences of each device')
  scaling.add_argument('--length', type=int, metavar='T', help='rows of a sequence')
  scaling.add_argument('--dtype', help='float32 or bfloat16')
  scaling.add_argument('--json', action='store_true')
  compare = targets.add_parser(
    'compare',
    allow_abbrev=False,
    help='what two --json files of one target say; exit code 1 if something is worse',
  )
  compare.add_argument('old', type=pathlib.Path, metavar='OLD.json')
  compare.add_argument('new', type=pathlib.Path, metavar='NEW.json')
  compare.add_argument(
    '--threshold',
    type=float,
    default=0.1,
    help='the part of the old value by which a figure may be worse (default: 0.1)',
  )
  return parser.parse_args(arguments[1:])


def _add_config_flags(parser: argparse.ArgumentParser) -> None:
  """What makes the config of a run, for `make_config`."""
  parser.add_argument('--preset', help='sizes: laptop, gpu or tpu-v4-8 (default: what is found)')
  parser.add_argument(
    '--env',
    help='an environment of `hephaestus environments`, or package.module:Class (default: catch)',
  )
  parser.add_argument(
    '--agent',
    choices=['dreamer', 'plain', 'ppo'],
    help="default: dreamer; plain is one of DreamerV3's shape, to compare with",
  )
  parser.add_argument('--run', type=pathlib.Path, help='folder of the run (default: a new one)')
  parser.add_argument('--steps', type=int, help='environment steps to collect in all')
  parser.add_argument('--seed', type=int, help='of everything random (default: 0)')
  parser.add_argument(
    '--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE', help='override the config'
  )


def _config_flags(arguments: argparse.Namespace) -> list[str]:
  """Those that were given, but for the folder."""
  names = ('preset', 'env', 'agent', 'steps', 'seed')
  given = [(name, getattr(arguments, name)) for name in names]
  flags = [word for name, value in given if value is not None for word in (f'--{name}', str(value))]
  return flags + (['--set', *arguments.set] if arguments.set else [])


def make_config(arguments: argparse.Namespace) -> Any:
  """The config that `train`'s arguments ask for: a preset's, or that of the folder to go on with.

  Raises:
    ValueError: naming what cannot be.
  """
  from hephaestus.launch import config as launch_config
  from hephaestus.launch import presets
  from hephaestus.launch.run import local

  folder = arguments.run
  config: launch_config.ExperimentConfig | None = None
  if folder is not None and (folder / local.CONFIG).exists():
    config = launch_config.load(folder / local.CONFIG)
    other_agent = arguments.agent not in (None, config.agent_name)
    if arguments.preset is not None or arguments.env is not None or other_agent:
      config = None  # what is asked for is compared with what is there
  if config is None:
    preset = arguments.preset or presets.default_preset()
    if preset not in presets.PRESETS:
      raise ValueError(f'--preset {preset}: choose one of {", ".join(presets.PRESETS)}')
    config = presets.AGENTS[arguments.agent or 'dreamer'][preset](arguments.env or 'catch')
  overrides = list(arguments.set)
  if config.agent_name == 'ppo':
    # Last: what a run with actors cannot do is said of all values together.
    overrides += [] if arguments.fused is None else [f'learner.fused={arguments.fused}']
  elif arguments.fused:
    raise ValueError('--fused: the dreamer learns from replay; leave it out, or add --agent ppo')
  if arguments.steps is not None:
    overrides.append(f'max_environment_steps={arguments.steps}')
  if arguments.seed is not None:
    overrides.append(f'seed={arguments.seed}')
  config = launch_config.override(config, overrides)
  if arguments.reset_moments and not config.fused:
    raise ValueError('--reset-moments: is for fused runs of ppo; leave it out')
  if config.fused and config.actor.num_actors > 1:
    raise ValueError(
      f'actor.num_actors={config.actor.num_actors}: a fused run has no actors of its own; use 1, or '
      'add --no-fused'
    )
  return config


def _check_environment(config: Any) -> None:
  """Refuses an environment that is unknown or cannot be learned from, before anything is written."""
  import jax

  from hephaestus.actors.environments import host, wrappers
  from hephaestus.launch.run import local

  if not config.accelerator or not config.fused:
    jax.config.update('jax_platforms', 'cpu')  # an accelerator is the learner's, not the launcher's
  # Compiling is most of it, and the same at every start.
  jax.config.update('jax_compilation_cache_dir', local.COMMON['JAX_COMPILATION_CACHE_DIR'])
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  environment = config.make_environment()
  if isinstance(environment, host.HostEnvironment):  # making it has played a step
    if config.fused:
      raise ValueError(f'environment.name={config.environment["name"]!r}: {host.REFUSAL}')
    return
  try:
    wrappers.check_values(environment, jax.random.key(config.seed))
  except ValueError as error:
    raise ValueError(f'environment.name={config.environment["name"]!r}: {error}') from error


def _train(arguments: argparse.Namespace) -> int:
  from hephaestus.launch.run import fused, local
  from hephaestus.learner import profile as profile_lib

  config = make_config(arguments)
  with contextlib.nullcontext() if config.fused else _forks() as forks:
    if arguments.expose and config.fused:
      raise ValueError('--expose: a fused run listens at no port; leave it out, or add --no-fused')
    profile = None if arguments.profile is None else profile_lib.parse(arguments.profile)
    folder = arguments.run or _new_folder(config)
    _check_environment(config)
    memory = '' if config.fused else local.check_memory(config)
    if profile is not None:
      local.prepare_profile(profile, config, folder)
    local.open_run(folder, config)
    print(f'run folder: {folder}', flush=True)
    if config.fused:
      return fused.train(config, folder, reset_moments=arguments.reset_moments, profile=profile)
    print(memory, flush=True)
    assert forks is not None
    return local.train(config, folder, forks, exposed=arguments.expose, profile=profile)


@contextlib.contextmanager
def _forks() -> Iterator[Any]:
  """Forks into nodes, made once all is imported and before anything starts the threads of JAX."""
  from hephaestus.launch.run import fork_server, program  # noqa: F401, program for the nodes: they import nothing

  with contextlib.closing(fork_server.Template()) as forks:
    yield forks


def _new_folder(config: Any) -> pathlib.Path:
  name = config.environment['name'].replace('/', '-').replace(':', '-')
  return pathlib.Path('runs') / f'{name}-{time.strftime("%Y%m%d-%H%M%S")}'


def _make_shared_config(arguments: argparse.Namespace, hosts: Any) -> Any:
  """`make_config`, of a run that has several hosts."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.run import local

  given = getattr(arguments, 'config', None)
  known = arguments.run is not None and (arguments.run / local.CONFIG).exists()
  if given is not None:
    if flags := _config_flags(arguments):
      raise ValueError(f'{flags[0]}: --config {given} says all of it; leave one of them out')
    config = launch_config.load(given)
  elif arguments.preset is None and not known:
    raise ValueError('--preset: give one; without it each host would choose by what it has itself')
  else:
    config = make_config(arguments)
  hosts_lib.check(hosts, config)
  return config


def _node(arguments: argparse.Namespace) -> int:
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.cluster import handshake as order_lib
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.cluster import node
  from hephaestus.launch.run import local

  with _forks() as forks:
    attached = arguments.hosts == '-'
    profile = arguments.profile
    if attached:
      order = order_lib.receive(sys.stdin.fileno())
      profile = profile or order.profile
      hosts = hosts_lib.parse(order.hosts, 'HOSTS')
      config, launch_id = launch_config.from_yaml(order.config, local.CONFIG), order.launch_id
      hosts_lib.check(hosts, config)
    else:
      hosts = hosts_lib.load(pathlib.Path(arguments.hosts))
      config = _make_shared_config(arguments, hosts)
      launch_id = _launch_id(arguments, config)
    host = hosts.find(arguments.host)
    if arguments.stay:
      node.check_stays(hosts, host)
    _check_environment(config)
    memory = local.check_memory(config, shards=1) if host.replay else ''
    folder = arguments.run or _new_folder(config)
    span = None if profile is None else node.prepare_profile(profile, config, folder)
    local.open_run(folder, config)
    print(f'run folder: {folder}', flush=True)
    if memory:
      print(memory, flush=True)
    return node.run(
      hosts, host, config, folder, launch_id, forks,
      attached=attached, stays=arguments.stay, profile=span,
    )  # fmt: skip


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
  from hephaestus.launch.cluster import kubernetes as manifests

  options = manifests.Options(
    name=arguments.name,
    namespace=arguments.namespace,
    **({} if arguments.image is None else {'image': arguments.image}),
    gpus=arguments.gpus,
    tpu=arguments.tpu,
    topology=arguments.topology,
    storage_class=arguments.storage_class,
    resources=manifests.parse_resources(arguments.resources),
    launch_id=arguments.launch_id,
  )
  hosts = hosts_lib.load(pathlib.Path(arguments.hosts))
  config = _make_shared_config(arguments, hosts)
  _launch_id(arguments, config)  # refuses what the pods would refuse
  _check_environment(config)
  text = manifests.to_yaml(manifests.make(hosts, config, options))
  if arguments.out is None:
    print(text, end='')
    return 0
  try:
    arguments.out.write_text(text)
  except OSError as error:
    raise ValueError(f'--out {arguments.out}: cannot be written ({error.strerror})') from None
  return 0


def _launch(arguments: argparse.Namespace) -> int:
  import portpicker

  from hephaestus.launch import config as launch_config
  from hephaestus.launch.cluster import handshake as order_lib
  from hephaestus.launch.cluster import hosts as hosts_lib
  from hephaestus.launch.cluster import node, remote
  from hephaestus.launch.run import local
  from hephaestus.learner import profile as profile_lib

  path = pathlib.Path(arguments.hosts)
  hosts = hosts_lib.load(path)
  config = _make_shared_config(arguments, hosts)
  folder = arguments.run or _new_folder(config)
  if arguments.profile is not None:  # of what hosts know, each speaks itself
    local.check_profile(profile_lib.parse(arguments.profile), config, folder)
  launch_id = time.time_ns()
  ports = [portpicker.pick_unused_port() for _ in hosts.keepers]
  commands = {host.name: remote.command(hosts, host, str(folder), ports) for host in hosts.hosts}
  for name, words in commands.items():
    nodes = ', '.join(node.names(hosts, hosts.find(name)))
    if words is None:
      words = ['hephaestus', 'node', str(path), '--host', name, '--run', str(folder)]
      words += ['--launch-id', str(launch_id)]
      words += [] if arguments.profile is None else ['--profile', arguments.profile]
      words += _config_flags(arguments)
      print(f'# {name}: {nodes}; is started by somebody else:', shlex.join(words), sep='\n')
    elif arguments.dry_run:
      print(f'# {name}: {nodes}', shlex.join(words), sep='\n')
  if arguments.dry_run:
    print('# nothing was started; hosts file and config reach each command through its stdin')
    return 0
  print(f'run folder on each host: {folder}', flush=True)
  order = order_lib.Order(
    path.read_text(), launch_config.to_yaml(config), launch_id, arguments.profile
  )
  reached = {name: words for name, words in commands.items() if words is not None}
  if not reached:
    raise ValueError(f'{path}: no host has ssh, gcloud or local; start `hephaestus node` on each')
  return remote.Launch(hosts, reached, order, _say).run()


def _say(line: str) -> None:
  with contextlib.suppress(OSError):  # a closed terminal is no reason to stop
    print(line, flush=True)


def _evaluate(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # read when JAX is imported; a run may own the rest
  from hephaestus.launch.run import local

  if arguments.episodes < 1:
    raise ValueError(f'--episodes {arguments.episodes}: must be at least 1')
  if arguments.video is not None and arguments.video.suffix not in ('.gif', '.mp4'):
    raise ValueError(f'--video {arguments.video}: the name must end in .gif or .mp4')
  result = local.evaluate(
    arguments.run, arguments.episodes, arguments.video, arguments.seed, at_random=arguments.random
  )
  if arguments.json:
    print(local.to_json(result))
  else:
    for name, value in result.items():
      print(f'{name:<18} {value}')
  return 0


def _watch(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # as above
  if arguments.episodes < 1:
    raise ValueError(f'--episodes {arguments.episodes}: must be at least 1')
  if not arguments.fps > 0:
    raise ValueError(f'--fps {arguments.fps}: must be positive')
  if arguments.output is not None and arguments.output.suffix not in ('.gif', '.mp4'):
    raise ValueError(f'--output {arguments.output}: the name must end in .gif or .mp4')
  if arguments.dream and arguments.output is None:
    raise ValueError('--dream: is a video; add --output FILE, .gif or .mp4')
  try:
    from hephaestus.launch.report import play as watch

    watch.watch(
      arguments.run,
      seed=arguments.seed,
      episodes=arguments.episodes,
      frames_per_second=arguments.fps,
      greedy=arguments.greedy,
      output=arguments.output,
      dream=arguments.dream,
    )
  except KeyboardInterrupt:  # before anything was played
    print('stopped')
  return 0


def _environments(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # read when JAX is imported; a run may own the rest
  warnings.simplefilter('ignore')  # of packages, on themselves
  from hephaestus.launch.inspect import environments as catalogue

  report = catalogue.look_up(arguments.name)
  print(json.dumps(report)) if arguments.json else catalogue.show(report)
  return 0


def _inspect(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # read when JAX is imported; a run may own the rest
  watching, sampling = arguments.watch is not None, arguments.sample is not None
  if watching and not arguments.watch > 0:
    raise ValueError(f'--watch {arguments.watch:g}: must be positive seconds')
  if sampling and arguments.sample < 1:
    raise ValueError(f'--sample {arguments.sample}: must be at least 1')
  if watching and (sampling or arguments.check):
    raise ValueError('--watch: looks at a live run; leave out --check and --sample, or call twice')
  serving = arguments.prometheus is not None
  if serving and (watching or sampling or arguments.check or arguments.json):
    raise ValueError('--prometheus: goes with no other option; leave them out, or call twice')
  if arguments.gif is not None and not sampling:
    raise ValueError(f'--gif {arguments.gif}: shows samples; add --sample N')
  from hephaestus.launch.inspect import live
  from hephaestus.launch.run import local

  if watching:
    live.watch(arguments.target, arguments.watch, as_json=arguments.json)
    return 0
  if serving:
    with live.make_exporter(arguments.target, arguments.prometheus) as exporter:
      print(f'http://127.0.0.1:{exporter.server_port}/metrics, Ctrl-C ends', flush=True)
      with contextlib.suppress(KeyboardInterrupt):
        exporter.serve_forever()
    return 0
  if sampling or arguments.check:
    try:
      return _inspect_stored(arguments)
    except KeyboardInterrupt:
      print('stopped', file=sys.stderr)
      return 130
  report = live.inspect(arguments.target)
  print(local.to_json(report)) if arguments.json else live.show(report)
  return 0


def _inspect_stored(arguments: argparse.Namespace) -> int:
  """What is stored, from a copy; 1 when it was to be checked and something is wrong."""
  from hephaestus.launch.inspect import live, stored
  from hephaestus.launch.run import local

  found = stored.read(arguments.target, arguments.sample or 0)
  if arguments.json:
    try:
      report = live.inspect(arguments.target)
    except ConnectionError:  # what is stored can be looked at all the same
      report = {}
    report |= {'stored': found.summary, 'samples': stored.samples_json(found.samples)}
    print(local.to_json(report | {'violations': found.violations}))
  if arguments.sample is not None and not arguments.json:
    stored.show(arguments.target, found)
  if arguments.gif is not None:
    videos = stored.write_videos(found, arguments.gif)
    if not arguments.json:
      print(f'\n{arguments.gif}: {len(videos)} videos')
  if not arguments.check:
    return 0
  if not arguments.json:
    checked = f'{found.summary["checkpoint"]["sequences"]:,} sequences of its newest checkpoint'
    print('\n'.join(found.violations) or f'{arguments.target}: nothing is wrong with {checked}')
  return 1 if found.violations else 0


def _dashboard(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # read when JAX is imported; a run may own the rest
  from hephaestus.launch.report import dashboard

  dashboard.serve(arguments.runs, arguments.port)
  return 0


def _report(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # read when JAX is imported; a run may own the rest
  from hephaestus.launch.report import curves as report
  from hephaestus.launch.report import page

  absl_logging.set_verbosity(absl_logging.WARNING)  # rliable says what it calculates
  for name, *runs in arguments.label:
    if not runs:
      raise ValueError(f'--label {name}: give the runs as well, as in --label NAME RUN RUN')
  all_panels = arguments.out is not None and arguments.metric is None
  made = report.make(
    arguments.runs,
    [(name, [pathlib.Path(run) for run in runs]) for name, *runs in arguments.label],
    metric=arguments.metric,
    node=arguments.node,
    x=arguments.x,
    pictures=arguments.out is not None,
    all_panels=all_panels,
  )
  remarks = [f'left out: {reason}' for reason in made.left_out]
  if arguments.out is not None:
    remarks += page.write(made, arguments.out, x=arguments.x, all_panels=all_panels)
  print(made.markdown, end='')
  for remark in remarks:
    print(f'hephaestus report: {remark}', file=sys.stderr)
  return 0


def _bench(arguments: argparse.Namespace) -> int:
  if arguments.target == 'compare':
    from hephaestus.launch.bench import comparison

    return comparison.show(arguments.old, arguments.new, arguments.threshold)
  if arguments.target == 'scaling':  # read when JAX first looks for devices
    os.environ['JAX_PLATFORMS'] = 'cpu'
    simulated = f'--xla_force_host_platform_device_count={max(arguments.devices)}'
    os.environ.setdefault('XLA_FLAGS', simulated)
  from hephaestus.launch import config as launch_config
  from hephaestus.launch import presets
  from hephaestus.launch.bench import environments as bench
  from hephaestus.launch.run import local
  from hephaestus.learner import bench as learner_bench

  changes = ('ensemble', 'horizon', 'batch', 'length', 'dtype')
  logging.getLogger('jax').setLevel(logging.WARNING)  # which says what accelerators there are not
  if arguments.target == 'learner':
    work = _learner_work(arguments)
    figures = learner_bench.update(
      work.changed(**{name: getattr(arguments, name) for name in changes}),
      arguments.boredom,
      seconds=arguments.seconds,
      phases=arguments.phases,
    )
  elif arguments.target == 'end-to-end':
    from hephaestus.launch.bench import end_to_end as bench_run

    figures = bench_run.end_to_end(_preset_config(arguments), arguments.seconds)
  elif arguments.target == 'watching':
    from hephaestus.launch.bench import watching as bench_watching

    config = _preset_config(arguments)
    figures = bench_watching.watching(config, arguments.pairs, arguments.window, arguments.period)
  elif arguments.target == 'scaling':
    from hephaestus.learner import scaling

    work = learner_bench.Work.of_size(arguments.size)
    work = work.changed(**{name: getattr(arguments, name) for name in changes})
    figures = scaling.scaling(work, arguments.devices)
  elif arguments.target == 'replay':
    figures = _replay_figures(arguments)
  else:
    if arguments.set and len(arguments.env) > 1:
      raise ValueError(f'--set {arguments.set[0]}: goes with one environment; call once for each')
    foreign = [each for each in arguments.set if not each.startswith('environment.')]
    configs = {
      name: launch_config.override(presets.laptop(name), arguments.set) for name in arguments.env
    }
    if foreign:
      raise ValueError(f'--set {foreign[0]}: bench env knows only environment.KEY=VALUE')
    worlds = {name: config.make_environment for name, config in configs.items()}
    figures = bench.environments(
      worlds, arguments.worlds, arguments.seconds, of_actors=local.ONE_THREAD
    )
  if arguments.json:
    print(local.to_json([figure._asdict() for figure in figures]))
  else:
    learner_bench.show(figures)
  return 0


def _replay_figures(arguments: argparse.Namespace) -> Any:
  """What `bench replay` measures: sequences as an actor of the laptop preset makes them."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch import presets
  from hephaestus.launch.bench import replay
  from hephaestus.launch.run import parts as parts_lib

  config = launch_config.override(
    presets.laptop(arguments.env), [f'actor.sequence_length={arguments.length}']
  )
  return replay.replay(
    parts_lib.make_parts(config).sequence_schema,
    shards=arguments.shards,
    writers=arguments.writers,
    megabytes=arguments.parameters,
    batch_size=arguments.batch,
    stored=arguments.stored,
    seconds=arguments.seconds,
  )


def _preset_config(arguments: argparse.Namespace) -> Any:
  """Of --preset, --env and --set; ValueError where one of them cannot be."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch import presets

  preset = arguments.preset or 'laptop'
  if preset not in presets.PRESETS:
    raise ValueError(f'--preset {preset}: choose one of {", ".join(presets.PRESETS)}')
  config = presets.PRESETS[preset](arguments.env or 'catch')
  return launch_config.override(config, arguments.set)


def _learner_work(arguments: argparse.Namespace) -> Any:
  """What `bench learner` measures: a size that has a name, or a preset in an environment."""
  from hephaestus.learner import bench as learner_bench

  if arguments.size is not None:
    if arguments.preset or arguments.env or arguments.set:
      raise ValueError(f'--size {arguments.size}: takes neither --preset, --env nor --set')
    return learner_bench.Work.of_size(arguments.size)
  config = _preset_config(arguments)
  agent_config, learner_config = config.dreamer()
  world = config.make_environment()
  return learner_bench.Work(
    name=str(config.environment['name']),
    agent=agent_config,
    learner=learner_config,
    observation_spec=world.observation_spec,
    action_spec=world.action_spec,
    num_rows=config.actor.sequence_length,
  )


def _run(arguments: argparse.Namespace) -> int:
  sys.path.append(
    os.getcwd()
  )  # where a user's own environments are; last, lest its folders hide ours
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  # The launcher only starts programs; it never calls JAX in a forked copy of itself.
  warnings.filterwarnings('ignore', message='os.fork', category=RuntimeWarning)
  commands = {
    'train': _train,
    'launch': _launch,
    'node': _node,
    'manifests': _manifests,
    'evaluate': _evaluate,
    'watch': _watch,
    'environments': _environments,
    'inspect': _inspect,
    'dashboard': _dashboard,
    'report': _report,
    'bench': _bench,
  }
  try:
    exit_code = commands[arguments.command](arguments)
    sys.stdout.flush()
    return exit_code
  except BrokenPipeError:  # whoever read what is printed has gone
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # as of SIGPIPE
  except (ValueError, ConnectionError) as error:
    print(f'hephaestus {arguments.command}: {error}', file=sys.stderr)
    return 2


def main() -> None:
  """Entry point of the console script; bad input ends with exit code 2 and one line."""
  app.run(_run, flags_parser=_parse)


if __name__ == '__main__':
  main()
