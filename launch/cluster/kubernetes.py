"""Writes a run on several hosts as Kubernetes manifests; pods take the place of a hosts file's hosts.

kubernetes.yaml is the template of the objects. Each role is a workload of its own, so that the loss of
one restarts no other: replay a StatefulSet behind a headless Service, the learner a JobSet whose pods
fail and restart together, actors an indexed Job for each number of actors in a pod, the evaluator a
Job. Actors are no Deployment: its pods have no indices, which every actor needs, and it would restart
pods that end with the run for ever.

Every pod runs `hephaestus node` with a hosts file in which each pod is a host: `actors-8-2` is the third
pod of the Job `NAME-actors-8`. The hosts file and config.yaml come from a ConfigMap.
"""

import collections
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hephaestus.launch import config as launch_config
from hephaestus.launch.cluster import hosts as hosts_lib
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.run import preflight

Object = dict[str, Any]

TEMPLATE = pathlib.Path(__file__).with_suffix('.yaml')
REPLAY, LEARNER, ACTORS, EVALUATOR = ROLES = ('replay', 'learner', 'actors', 'evaluator')
KINDS = ('cpu', 'memory', 'storage')
GIBIBYTE = 2**30


def place(hosts: hosts_lib.Hosts, name: str) -> hosts_lib.Hosts:
  """Converts hosts to pods of the run `name`, one role each, which are again hosts of a run."""
  port = hosts.ports[0]
  if port < 1024:
    raise ValueError(f'port={port}: pods are not root and cannot listen there; use 1024 to 65535')
  pods = []
  for index in range(len(hosts.keepers)):
    # A pod resolves names in its own namespace.
    address = f'{name}-{REPLAY}-{index}.{name}-{REPLAY}'
    replay = hosts_lib.Endpoint(address=address, port=port)
    pods.append(hosts_lib.Host(name=f'{REPLAY}-{index}', replay=replay))
  for index, learner in enumerate(host.learner for host in hosts.hosts if host.learner):
    if isinstance(learner, hosts_lib.Endpoint):  # the first of several, to which the others connect
      learner = dataclasses.replace(learner, address=f'{name}-{LEARNER}-0-{index}.{name}')
    pods.append(hosts_lib.Host(name=f'{LEARNER}-{index}', learner=learner))
  for num_actors, num_pods in _acting(hosts).items():
    for index in range(num_pods):
      pods.append(hosts_lib.Host(name=f'{ACTORS}-{num_actors}-{index}', actors=num_actors))
  pods.append(hosts_lib.Host(name=f'{EVALUATOR}-0', evaluator=True))
  return hosts_lib.Hosts(hosts=tuple(pods))


def _accelerators(
  gpus: int, tpu: str | None, topology: str | None, num_learners: int
) -> tuple[str, int] | None:
  """Resource name and number of the accelerators of each learner pod; None for none."""
  if gpus and tpu:
    raise ValueError(f'--gpus {gpus}: goes with no --tpu; leave one of them out')
  if (tpu is None) != (topology is None):
    raise ValueError('--tpu, --topology: go together, as in --tpu tpu-v4-podslice --topology 2x2x1')
  if topology is None:
    return ('nvidia.com/gpu', gpus) if gpus else None
  if not re.fullmatch(r'[1-9]\d*(x[1-9]\d*){1,2}', topology, re.ASCII):
    raise ValueError(f'--topology {topology}: write it as 2x4 or 2x2x4')
  chips = math.prod(map(int, topology.split('x')))
  if chips % num_learners:
    raise ValueError(
      f'--topology {topology}: its {chips} chips do not divide over {num_learners} learner hosts'
    )
  return 'google.com/tpu', chips // num_learners


def _quantities(resources: Sequence[str]) -> dict[tuple[str, str], str]:
  """(One of ROLES, one of KINDS) -> quantity for each pod, from ROLE.KIND=QUANTITY."""
  quantities = {}
  for assignment in resources:
    path, _, quantity = assignment.partition('=')
    role, _, kind = path.partition('.')
    if role not in ROLES or kind not in KINDS or path == 'actors.storage':  # actors keep nothing
      raise ValueError(
        f'--resources {assignment}: write it as ROLE.KIND=QUANTITY, with a role of '
        f'{", ".join(ROLES)} and a kind of {", ".join(KINDS)}; actors have no storage'
      )
    quantities[role, kind] = quantity
  return quantities


def _acting(hosts: hosts_lib.Hosts) -> Mapping[int, int]:
  """Number of actors on a host -> number of such hosts."""
  return collections.Counter(host.actors for host in hosts.hosts if host.actors)


def make(
  hosts: hosts_lib.Hosts,
  config: launch_config.ExperimentConfig,
  *,
  name: str = 'hephaestus',
  namespace: str | None = None,
  image: str | None = None,
  gpus: int = 0,
  tpu: str | None = None,
  topology: str | None = None,
  storage_class: str | None = None,
  resources: Sequence[str] = (),
  launch_id: int | None = None,
) -> list[Object]:
  """Makes the Kubernetes objects of a run, in the order in which they are to be created.

  The options are the flags of `hephaestus manifests`. ValueError if one is invalid, the accelerators of config
  and options contradict each other, or replay's port is below 1024.
  """
  if len(name) > 40 or not re.fullmatch(r'[a-z]([a-z0-9-]*[a-z0-9])?', name):
    raise ValueError(  # with suffixes it is a DNS label, too
      f'--name {name}: must begin with a letter and continue with small letters, digits and '
      'dashes, 40 at most'
    )
  pods = place(hosts, name)
  num_shards, num_learners = len(pods.keepers), len(pods.learners)
  chips, quantities = _accelerators(gpus, tpu, topology, num_learners), _quantities(resources)
  if config.accelerator and chips is None:
    raise ValueError(
      'accelerator=True: say which one each learner pod gets, by --gpus 1 or by --tpu TYPE --topology '
      'AxBxC; or add --set accelerator=false'
    )
  if not config.accelerator and chips is not None:
    raise ValueError('accelerator=False: this run keeps to the CPU; leave --gpus and --tpu out')
  values = {
    'namespace': namespace,
    'image': image or f'hephaestus:{importlib.metadata.version("hephaestus")}',
    'storage_class': storage_class,
    'launch_id': launch_id and f'--launch-id={launch_id}',
    'port': pods.ports[0],
    'tpu': tpu,
    'topology': topology,
    'slice': tpu and 'cloud.google.com/gke-nodepool',
    'tolerations': chips and [{'key': chips[0], 'operator': 'Exists', 'effect': 'NoSchedule'}],
    'access': 'ReadWriteOnce' if num_learners == 1 else 'ReadWriteMany',
    # The first of several learners may also exit with 2 before the cluster can resolve its name.
    'refusal': 'FailJob' if num_learners == 1 else 'Count',
    'accelerators': {chips[0]: str(chips[1])} if chips else {},
  }

  def fill(
    role: str, num_pods: int, cpu: str, memory: str, storage: str | None = None, suffix: str = ''
  ) -> dict[str, list[Object]]:
    """Returns the lists of the template for the pods of a role, by their names."""
    usual = zip(KINDS, (cpu, memory, storage), strict=True)
    own: Object = {kind: quantities.get((role, kind), quantity) for kind, quantity in usual}
    own['num_pods'] = num_pods
    own['volume'] = {'persistentVolumeClaim': {'claimName': f'{name}-{role}'}}
    if role == ACTORS:  # which keep nothing
      own['volume'] = {'emptyDir': {'sizeLimit': '4Gi'}}
    text = string.Template(TEMPLATE.read_text()).substitute(
      {key: json.dumps(value) for key, value in (values | own).items()},
      name=name,
      role=role,
      host=f'{role}{suffix}',
    )
    return _without_nulls(yaml.safe_load(text))

  # docs/kubernetes.md has measurements of `node` itself. Replay keeps two checkpoints, and a third while
  # it is written.
  shard = -(-preflight.replay_bytes(config) // num_shards)
  replay = fill(
    REPLAY, num_shards, '1', _gibibytes(shard + 2 * GIBIBYTE), _gibibytes(3 * shard + GIBIBYTE)
  )
  learner = fill(LEARNER, num_learners, *(('4', '16Gi') if chips else ('2', '4Gi')), '10Gi')
  # The port is in the hosts file, and may be the same for all shards, which have pods of their own.
  told = dataclasses.replace(config, replay=dataclasses.replace(config.replay, port=None))
  replay['run'][0]['data'] = {
    'hosts.yaml': hosts_lib.to_yaml(pods),
    folder_lib.CONFIG: launch_config.to_yaml(told),
  }
  objects = replay['run'] + replay[REPLAY]
  objects += (learner['learners'] if num_learners > 1 else []) + learner[LEARNER]
  for num_actors, num_pods in _acting(pods).items():
    memory = _gibibytes((1 + num_actors) * GIBIBYTE)
    objects += fill(ACTORS, num_pods, str(num_actors), memory, suffix=f'-{num_actors}')[ACTORS]
  return objects + fill(EVALUATOR, 1, '1', '2Gi', '1Gi')[EVALUATOR]


def _without_nulls(tree: Any) -> Any:
  """Leaves out entries that are null; a mapping of nulls only is null itself."""
  if isinstance(tree, list):
    return [value for value in map(_without_nulls, tree) if value is not None]
  if not isinstance(tree, dict):
    return tree
  kept = {key: _without_nulls(value) for key, value in tree.items()}
  return {key: value for key, value in kept.items() if value is not None} or (None if tree else {})


def _gibibytes(count: int) -> str:
  return f'{math.ceil(count / GIBIBYTE)}Gi'


def to_yaml(objects: Sequence[Object]) -> str:
  """Converts objects to the text of a file for `kubectl apply -f`."""
  return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, explicit_start=True)


class _Dumper(yaml.SafeDumper):
  """Writes texts of several lines as blocks, and repeated objects in full."""

  def ignore_aliases(self, data: Any) -> bool:
    return True


_Dumper.add_representer(
  str,
  lambda dumper, text: dumper.represent_scalar(
    'tag:yaml.org,2002:str', text, style='|' if '\n' in text else None
  ),
)
