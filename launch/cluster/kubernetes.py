"""Writes a run on several hosts as Kubernetes manifests; pods take the place of a hosts file's hosts.

Each role is a workload of its own, so that the loss of one restarts no other:

  replay     a StatefulSet, for each shard a pod with a volume, behind a headless Service
  learner    a JobSet with one indexed Job, a pod for each host; they fail and restart together
  actors     an indexed Job, a pod for each host with actors (a Job for each number of them)
  evaluator  a Job with one pod

Actors are no Deployment: its pods have no indices, which every actor needs, and it would restart
pods that end with the run for ever. Every pod runs `hephaestus node` with a hosts
file in which each pod is a host: `actors-8-2` is the third pod of the Job `NAME-actors-8`. The hosts
file and config.yaml come from a ConfigMap. Only pods of the run reach the port of replay. Several
learners reach each other at any port, since the all-reduce of gradients chooses its own.
"""

import dataclasses
import importlib.metadata
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from hephaestus.launch import config as launch_config
from hephaestus.launch.cluster import hosts as hosts_lib
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.run import preflight

Object = dict[str, Any]

USER = 10001  # user and group ID in the image
ETC, DATA, TMP = '/etc/hephaestus', '/data', '/tmp'
RESTARTS = 100  # of one pod, before its workload counts as failed
GIBIBYTE = 2**30
REPLAY, LEARNER, ACTORS, EVALUATOR = 'replay', 'learner', 'actors', 'evaluator'
ROLES = (REPLAY, LEARNER, ACTORS, EVALUATOR)
KINDS = ('cpu', 'memory', 'storage')
_LABEL = re.compile(r'[a-z]([a-z0-9-]*[a-z0-9])?')
_LONGEST_NAME = 40  # with a suffix it must fit a DNS label as well
_IMAGE = re.compile(
  r'([a-z0-9.-]+(:\d+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*'
  r'(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?',
  re.ASCII,
)
_QUANTITY = re.compile(r'\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Options of the manifests in addition to hosts and config.

  Attributes:
    name: name of the run; every object's name begins with it.
    namespace: Kubernetes namespace of all objects; None for kubectl's default.
    image: name of the container image, which is built from the Dockerfile.
    gpus: number of GPUs (nvidia.com/gpu) of each learner pod.
    tpu: GKE's name for the type of the learner's TPUs, such as tpu-v4-podslice; None for no TPU.
    topology: topology of their slice, such as 2x2x4; None for no TPU.
    storage_class: storage class of all volumes; None for the cluster's default.
    resources: (one of ROLES, one of KINDS) -> quantity for each pod, in place of the estimate.
    launch_id: value of --launch-id for `hephaestus node`; None for its default.

  Raises:
    ValueError: no cluster would accept a value; names the flag.
  """

  name: str = 'hephaestus'
  namespace: str | None = None
  image: str = f'hephaestus:{importlib.metadata.version("hephaestus")}'
  gpus: int = 0
  tpu: str | None = None
  topology: str | None = None
  storage_class: str | None = None
  resources: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
  launch_id: int | None = None

  def __post_init__(self):
    for flag, value, longest in (
      ('--name', self.name, _LONGEST_NAME),
      ('--namespace', self.namespace, 63),
      ('--tpu', self.tpu, 63),
      ('--storage-class', self.storage_class, 253),
    ):
      labels = [] if value is None else value.split('.') if longest > 63 else [value]
      if not all(map(_LABEL.fullmatch, labels)) or len(value or '') > longest:
        raise ValueError(
          f'{flag} {value}: must begin with a letter and continue with small letters, digits and dashes, '
          f'{longest} at most'
        )
    if not _IMAGE.fullmatch(self.image):
      raise ValueError(f'--image {self.image}: write it as registry.example.com/name:tag')
    if self.gpus < 0:
      raise ValueError(f'--gpus {self.gpus}: must be at least 0')
    if self.gpus and self.tpu:
      raise ValueError(f'--gpus {self.gpus}: goes with no --tpu; leave one of them out')
    if (self.tpu is None) != (self.topology is None):
      raise ValueError(
        '--tpu, --topology: go together, as in --tpu tpu-v4-podslice --topology 2x2x1'
      )
    if self.topology and not re.fullmatch(r'[1-9]\d*(x[1-9]\d*){1,2}', self.topology, re.ASCII):
      raise ValueError(f'--topology {self.topology}: write it as 2x4 or 2x2x4')

  def accelerators(self, num_learners: int) -> tuple[str, int] | None:
    """Returns the accelerators of each learner pod.

    Args:
      num_learners: number of learner pods.

    Returns:
      Resource name, such as 'nvidia.com/gpu', and count; None for no accelerators.

    Raises:
      ValueError: the chips of the TPU's topology do not divide over the pods.
    """
    if self.gpus:
      return 'nvidia.com/gpu', self.gpus
    if self.topology is None:
      return None
    chips = math.prod(map(int, self.topology.split('x')))
    if chips % num_learners:
      raise ValueError(
        f'--topology {self.topology}: its {chips} chips do not divide over {num_learners} learner hosts'
      )
    return 'google.com/tpu', chips // num_learners


def parse_resources(assignments: Sequence[str]) -> dict[tuple[str, str], str]:
  """Parses words such as 'learner.memory=32Gi' to `Options.resources`; ValueError for others."""
  resources = {}
  for assignment in assignments:
    path, _, quantity = assignment.partition('=')
    role, _, kind = path.partition('.')
    if role not in ROLES or kind not in KINDS:
      raise ValueError(
        f'--resources {assignment}: write it as ROLE.KIND=QUANTITY, with a role of '
        f'{", ".join(ROLES)} and a kind of {", ".join(KINDS)}'
      )
    if (role, kind) == (ACTORS, 'storage'):
      raise ValueError(f'--resources {assignment}: actors keep nothing; leave it out')
    if not _QUANTITY.fullmatch(quantity) or not float(re.sub('[^0-9.]', '', quantity)):
      raise ValueError(f'--resources {assignment}: give a quantity such as 2, 500m or 4Gi')
    resources[role, kind] = quantity
  return resources


def place(hosts: hosts_lib.Hosts, name: str) -> hosts_lib.Hosts:
  """Converts hosts to pods, one role each, which are again hosts of a run.

  Args:
    hosts: hosts of a hosts file; how they are reached does not matter here.
    name: name of the run in the cluster.

  Returns:
    The hosts of the hosts file in the ConfigMap: one for each pod, with its address in the cluster.

  Raises:
    ValueError: pods may not listen at replay's port, since it is below 1024.
  """
  shards = [host.replay for host in hosts.hosts if host.replay is not None]
  port = shards[0].port
  if port < 1024:
    raise ValueError(f'port={port}: pods are not root and cannot listen there; use 1024 to 65535')
  pods = [
    hosts_lib.Host(
      name=f'{REPLAY}-{index}',
      # A pod resolves names in its own namespace.
      replay=hosts_lib.Endpoint(address=f'{name}-{REPLAY}-{index}.{name}-{REPLAY}', port=port),
    )
    for index in range(len(shards))
  ]
  for index, learner in enumerate(host.learner for host in hosts.hosts if host.learner):
    if dataclasses.is_dataclass(learner):  # the first of several, to which the others connect
      learner = dataclasses.replace(learner, address=f'{name}-{LEARNER}-0-{index}.{name}')
    pods.append(hosts_lib.Host(name=f'{LEARNER}-{index}', learner=learner))
  acting: dict[int, int] = {}
  for host in hosts.hosts:
    if host.actors:
      index = acting[host.actors] = acting.get(host.actors, -1) + 1
      pods.append(hosts_lib.Host(name=f'{ACTORS}-{host.actors}-{index}', actors=host.actors))
  pods.append(hosts_lib.Host(name=f'{EVALUATOR}-0', evaluator=True))
  return hosts_lib.Hosts(hosts=tuple(pods))


def make(
  hosts: hosts_lib.Hosts, config: launch_config.ExperimentConfig, options: Options
) -> list[Object]:
  """Makes the Kubernetes objects of a run.

  Args:
    hosts: hosts of a hosts file.
    config: config of the run, which fits the hosts, see `hosts.check`.
    options: options of the manifests.

  Returns:
    The objects as dictionaries, in the order in which they are to be created.

  Raises:
    ValueError: accelerators of config and options contradict each other, TPU chips do not divide over
      the learner pods, or replay's port is below 1024.
  """
  if config.accelerator and not (options.gpus or options.tpu):
    raise ValueError(
      'accelerator=True: say which one each learner pod gets, by --gpus 1 or by --tpu TYPE --topology '
      'AxBxC; or add --set accelerator=false'
    )
  if not config.accelerator and (options.gpus or options.tpu):
    raise ValueError('accelerator=False: this run keeps to the CPU; leave --gpus and --tpu out')
  return list(_Run(hosts, config, options).objects())


def to_yaml(objects: Sequence[Object]) -> str:
  """Converts objects to the text of a file for `kubectl apply -f`."""
  return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, explicit_start=True)


class _Dumper(yaml.SafeDumper):
  """Writes texts of several lines as blocks, and repeated objects in full."""

  def ignore_aliases(self, data: Any) -> bool:
    return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
  style = '|' if '\n' in text else None
  return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


_Dumper.add_representer(str, _represent_text)


_JOB_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SET_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
  """Pods that differ only by their index.

  Attributes:
    role: role of the pods, one of ROLES.
    hosts: prefix of the names of their hosts, before '-INDEX'.
    stop_seconds: time between SIGTERM and SIGKILL.
    index: field of a pod's metadata that has its index.
    arguments: further command-line arguments of `hephaestus node`.
    container: further keys of the container.
    actors: number of actor processes in each pod.
    claim: name of the claim of the volume that outlives the pod; None for a StatefulSet, which has
      claims of its own, and for pods without such a volume.
    restarts: whether a container is restarted after any exit.
  """

  role: str
  hosts: str
  stop_seconds: int
  index: str = _JOB_INDEX
  arguments: Sequence[str] = ()
  container: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  actors: int = 0
  claim: str | None = None
  restarts: bool = False


class _Run:
  """Makes the Kubernetes objects of one run."""

  def __init__(
    self, hosts: hosts_lib.Hosts, config: launch_config.ExperimentConfig, options: Options
  ):
    self._name = options.name
    self._options = options
    # The port is in the hosts file, and may be the same for all shards, which have pods of their own.
    self._config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, port=None))
    self._pods = place(hosts, options.name)
    shards = [host.replay for host in self._pods.hosts if host.replay is not None]
    self._num_shards, self._port = len(shards), shards[0].port
    self._num_learners = len(self._pods.learners)
    self._accelerators = options.accelerators(self._num_learners)
    self._shard_bytes = -(-preflight.replay_bytes(config) // self._num_shards)

  def objects(self) -> Iterator[Object]:
    yield self._object(
      'v1',
      'ConfigMap',
      '',
      data={
        'hosts.yaml': hosts_lib.to_yaml(self._pods),
        folder_lib.CONFIG: launch_config.to_yaml(self._config),
      },
    )
    yield from self._network_policies()
    yield from self._replay()
    yield from self._learner()
    acting = [host.actors for host in self._pods.hosts if host.actors]
    for count in dict.fromkeys(acting):
      yield self._job(f'{ACTORS}-{count}', ACTORS, acting.count(count), actors=count)
    yield self._claim(EVALUATOR)
    yield self._job(EVALUATOR, EVALUATOR, 1, claim=f'{self._name}-{EVALUATOR}')

  def _object(self, api: str, kind: str, suffix: str, role: str = '', **content: Any) -> Object:
    metadata = {
      'name': f'{self._name}-{suffix}' if suffix else self._name,
      **({'namespace': self._options.namespace} if self._options.namespace else {}),
      'labels': self._labels(role),
    }
    return {'apiVersion': api, 'kind': kind, 'metadata': metadata, **content}

  def _labels(self, role: str = '') -> dict[str, str]:
    """Labels of the objects and pods of one role; without a role, those that all of the run have."""
    return {
      'app.kubernetes.io/name': 'hephaestus',
      'app.kubernetes.io/instance': self._name,
      **({'app.kubernetes.io/component': role} if role else {}),
    }

  def _network_policies(self) -> Iterator[Object]:
    run = {'podSelector': {'matchLabels': self._labels()}}
    replay = {'podSelector': {'matchLabels': self._labels(REPLAY)}}
    learner = {'podSelector': {'matchLabels': self._labels(LEARNER)}}
    port = [{'protocol': 'TCP', 'port': self._port}]

    def policy(suffix: str, pods: Object, types: Sequence[str], **rules: Any) -> Object:
      spec = {**pods, 'policyTypes': list(types), **rules}
      return self._object('networking.k8s.io/v1', 'NetworkPolicy', suffix, spec=spec)

    yield policy('deny', run, ('Ingress', 'Egress'))
    dns = [{'protocol': protocol, 'port': 53} for protocol in ('UDP', 'TCP')]
    servers = [
      {
        'namespaceSelector': {'matchLabels': {'kubernetes.io/metadata.name': 'kube-system'}},
        'podSelector': {'matchLabels': {'k8s-app': 'kube-dns'}},
      },
      # The address of NodeLocal DNSCache, a cache on each node, and of GKE's Cloud DNS.
      {'ipBlock': {'cidr': '169.254.20.10/32'}},
      {'ipBlock': {'cidr': '169.254.169.254/32'}},
    ]
    yield policy('dns', run, ('Egress',), egress=[{'to': servers, 'ports': dns}])
    yield policy('to-replay', run, ('Egress',), egress=[{'to': [replay], 'ports': port}])
    yield policy('replay', replay, ('Ingress',), ingress=[{'from': [run], 'ports': port}])
    if self._num_learners > 1:
      both = {'ingress': [{'from': [learner]}], 'egress': [{'to': [learner]}]}
      yield policy('learners', learner, ('Ingress', 'Egress'), **both)

  def _replay(self) -> Iterator[Object]:
    # Without readiness, so that the name of a shard resolves from the start of its pod.
    service = {
      'clusterIP': 'None',
      'publishNotReadyAddresses': True,
      'selector': self._labels(REPLAY),
      'ports': [{'name': 'reverb', 'port': self._port, 'targetPort': 'reverb'}],
    }
    yield self._object('v1', 'Service', REPLAY, REPLAY, spec=service)
    opened = {'tcpSocket': {'port': 'reverb'}}
    container = {
      'ports': [{'name': 'reverb', 'containerPort': self._port}],
      # Replay listens once it has read its checkpoint. There is no liveness probe: a server that
      # hangs still accepts connections, and a crashed one is restarted within the pod.
      'startupProbe': opened | {'periodSeconds': 5, 'failureThreshold': 360},
      'readinessProbe': opened | {'periodSeconds': 10},
    }
    shards = _Group(
      role=REPLAY,
      hosts=REPLAY,
      stop_seconds=90,
      index=_SET_INDEX,
      arguments=['--stay'],
      container=container,
      restarts=True,
    )
    claim = {'metadata': {'name': 'data', 'labels': self._labels(REPLAY)}}
    spec = {
      'serviceName': f'{self._name}-{REPLAY}',
      'replicas': self._num_shards,
      'podManagementPolicy': 'Parallel',
      'selector': {'matchLabels': self._labels(REPLAY)},
      'template': self._pod(shards),
      'volumeClaimTemplates': [claim | {'spec': self._claim_spec(REPLAY)}],
    }
    yield self._object('apps/v1', 'StatefulSet', REPLAY, REPLAY, spec=spec)

  def _learner(self) -> Iterator[Object]:
    yield self._claim(LEARNER, shared=self._num_learners > 1)
    pod = self._pod(
      _Group(
        role=LEARNER,
        hosts=LEARNER,
        stop_seconds=120,
        claim=f'{self._name}-{LEARNER}',
      )
    )
    if self._options.tpu:
      pod['spec']['nodeSelector'] = {
        'cloud.google.com/gke-tpu-accelerator': self._options.tpu,
        'cloud.google.com/gke-tpu-topology': self._options.topology,
      }
    # With several, the first may also exit with 2 before the cluster can resolve its name.
    refusal = 'FailJob' if self._num_learners == 1 else None
    rule = {
      'name': 'refused',
      'action': 'FailJobSet',
      'onJobFailureReasons': ['PodFailurePolicy'],
    }
    failures = {'maxRestarts': RESTARTS, **({'rules': [rule]} if refusal else {})}
    # One that fails ends the others, which cannot continue without it.
    job = self._job_spec(pod, self._num_learners, refusal, backoffLimit=0)
    spec = {
      'network': {'enableDNSHostnames': True},
      'failurePolicy': failures,
      'replicatedJobs': [{'name': LEARNER, 'replicas': 1, 'template': {'spec': job}}],
    }
    jobset = self._object('jobset.x-k8s.io/v1alpha2', 'JobSet', '', LEARNER, spec=spec)
    if self._options.tpu:  # all of it on one slice, which is a node pool
      jobset['metadata']['annotations'] = {
        'alpha.jobset.sigs.k8s.io/exclusive-topology': 'cloud.google.com/gke-nodepool'
      }
    yield jobset

  def _job(
    self, hosts: str, role: str, num_pods: int, *, actors: int = 0, claim: str | None = None
  ) -> Object:
    pod = self._pod(_Group(role=role, hosts=hosts, stop_seconds=30, actors=actors, claim=claim))
    # Each pod counts on its own, so one that failed for good ends no other.
    spec = self._job_spec(pod, num_pods, 'FailIndex', backoffLimitPerIndex=RESTARTS)
    return self._object('batch/v1', 'Job', hosts, role, spec=spec)

  def _job_spec(self, pod: Object, num_pods: int, refusal: str | None, **limits: int) -> Object:
    exit_code = {'containerName': 'hephaestus', 'operator': 'In', 'values': [2]}
    refused = {'action': refusal, 'onExitCodes': exit_code}  # a restart fails again
    # The pod was drained, preempted or evicted, which is no failure of the node.
    disrupted = {
      'action': 'Ignore',
      'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}],
    }
    return {
      'completionMode': 'Indexed',
      'completions': num_pods,
      'parallelism': num_pods,
      **limits,
      'podFailurePolicy': {'rules': [refused, disrupted] if refusal else [disrupted]},
      'template': pod,
    }

  def _claim(self, role: str, *, shared: bool = False) -> Object:
    spec = self._claim_spec(role, shared=shared)
    return self._object('v1', 'PersistentVolumeClaim', role, role, spec=spec)

  def _claim_spec(self, role: str, *, shared: bool = False) -> Object:
    storage_class = self._options.storage_class
    return {
      'accessModes': ['ReadWriteMany' if shared else 'ReadWriteOnce'],
      **({'storageClassName': storage_class} if storage_class else {}),
      'resources': {'requests': {'storage': self._quantity(role, 'storage')}},
    }

  def _pod(self, group: _Group) -> Object:
    """Makes the template of the pods of a group."""
    spec: Object = {
      'restartPolicy': 'Always' if group.restarts else 'Never',
      'terminationGracePeriodSeconds': group.stop_seconds,
      'automountServiceAccountToken': False,
      'enableServiceLinks': False,
      'shareProcessNamespace': True,  # process 1 must reap orphans
      'securityContext': {
        'runAsNonRoot': True,
        'runAsUser': USER,
        'runAsGroup': USER,
        'fsGroup': USER,
        'fsGroupChangePolicy': 'OnRootMismatch',
        'seccompProfile': {'type': 'RuntimeDefault'},
      },
      'containers': [self._container(group)],
      'volumes': self._volumes(group),
    }
    if group.role == LEARNER and self._accelerators is not None:
      spec['tolerations'] = [
        {'key': self._accelerators[0], 'operator': 'Exists', 'effect': 'NoSchedule'}
      ]
    return {'metadata': {'labels': self._labels(group.role)}, 'spec': spec}

  def _container(self, group: _Group) -> Object:
    host = f'{group.hosts}-$(INDEX)'
    launch_id = self._options.launch_id
    config = f'{ETC}/{folder_lib.CONFIG}'
    command = ['node', f'{ETC}/hosts.yaml', '--host', host, '--config', config]
    command += ['--trust', '--run', f'{DATA}/{host}', *group.arguments]
    command += [] if launch_id is None else ['--launch-id', str(launch_id)]
    return {
      'name': 'hephaestus',
      'image': self._options.image,
      'args': command,
      'env': [
        {'name': 'INDEX', 'valueFrom': {'fieldRef': {'fieldPath': group.index}}},
        {'name': 'HOME', 'value': TMP},
        {'name': 'XDG_CACHE_HOME', 'value': f'{DATA}/cache'},
      ],
      'resources': self._resources(group.role, group.actors),
      'securityContext': {
        'allowPrivilegeEscalation': False,
        'readOnlyRootFilesystem': True,
        'capabilities': {'drop': ['ALL']},
      },
      'volumeMounts': [
        {'name': 'config', 'mountPath': ETC, 'readOnly': True},
        {'name': 'tmp', 'mountPath': TMP},
        {'name': 'data', 'mountPath': DATA},
      ],
      **group.container,
    }

  def _volumes(self, group: _Group) -> list[Object]:
    volumes: list[Object] = [
      {'name': 'config', 'configMap': {'name': self._name}},
      {'name': 'tmp', 'emptyDir': {'sizeLimit': '1Gi'}},
    ]
    if group.claim is not None:
      volumes.append({'name': 'data', 'persistentVolumeClaim': {'claimName': group.claim}})
    elif group.role == ACTORS:
      volumes.append({'name': 'data', 'emptyDir': {'sizeLimit': '4Gi'}})
    return volumes

  def _resources(self, role: str, actors: int) -> Object:
    """Makes the resources of a container: memory is limited to the request, CPU is not limited."""
    cpu, memory = (self._quantity(role, kind, actors) for kind in ('cpu', 'memory'))
    requests, limits = {'cpu': cpu, 'memory': memory}, {'memory': memory}
    if role == LEARNER and self._accelerators is not None:
      name, count = self._accelerators
      requests[name] = limits[name] = str(count)
    return {'requests': requests, 'limits': limits}

  def _quantity(self, role: str, kind: str, actors: int = 0) -> str:
    given = self._options.resources.get((role, kind))
    if given is not None:
      return given
    large = self._accelerators is not None
    # docs/kubernetes.md has measurements of `node` itself. Replay keeps two checkpoints, and a third while
    # it is written.
    usual = {
      (REPLAY, 'cpu'): '1',
      (REPLAY, 'memory'): _gibibytes(self._shard_bytes + 2 * GIBIBYTE),
      (REPLAY, 'storage'): _gibibytes(3 * self._shard_bytes + GIBIBYTE),
      (LEARNER, 'cpu'): '4' if large else '2',
      (LEARNER, 'memory'): '16Gi' if large else '4Gi',
      (LEARNER, 'storage'): '10Gi',
      (ACTORS, 'cpu'): str(max(1, actors)),
      (ACTORS, 'memory'): _gibibytes((1 + actors) * GIBIBYTE),
      (EVALUATOR, 'cpu'): '1',
      (EVALUATOR, 'memory'): '2Gi',
      (EVALUATOR, 'storage'): '1Gi',
    }
    return usual[role, kind]


def _gibibytes(count: int) -> str:
  return f'{math.ceil(count / GIBIBYTE)}Gi'
