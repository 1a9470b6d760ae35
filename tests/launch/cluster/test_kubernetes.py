"""Manifests fit the schemas of Kubernetes, isolate the run, and their pods train it to its end."""

import functools
import pathlib

import jsonschema
import kubernetes_validate
import pytest
import yaml

from hephaestus.launch import config, main
from hephaestus.launch.agents import presets
from hephaestus.launch.cluster import hosts, kubernetes
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.run import preflight

OLDEST = '1.29'
ONE = """
hosts:
  all: {replay: {address: here, port: 22001}, learner: true, evaluator: true, actors: 1, local: true}
"""
MANY = """
directory: hephaestus
command: .venv/bin/hephaestus
hosts:
  tpu:
    replay: {address: 10.128.0.2, port: 22001}
    learner: true
    gcloud: {name: my-tpu, zone: us-central2-b, worker: 0}
  cpu_0: {actors: 8, evaluator: true, tunnel: true, ssh: {target: me@10.128.0.2}}
  cpu_1: {actors: 8}
  cpu_2: {actors: 3}
"""
SLICE = """
hosts:
  tpu: {learner: {address: tpu, port: 22100}, gcloud: {name: my-tpu, zone: us-central2-b, workers: 4}}
  cpu: {replay: {address: 10.128.0.2, port: 22001}, evaluator: true, actors: 4}
"""
TPU = {'tpu': 'tpu-v4-podslice', 'topology': '2x2x4'}


def make(text, *overrides, preset=presets.laptop, **options):
  placed = hosts.parse(text, 'hosts.yaml')
  overrides = [f'actor.num_actors={placed.num_actors}', *overrides]
  made = config.override(preset('catch'), overrides)
  written = kubernetes.to_yaml(kubernetes.make(placed, made, **options))
  return list(yaml.safe_load_all(written))


@pytest.fixture(autouse=True, scope='module')
def cached_schemas():
  with pytest.MonkeyPatch.context() as patch:
    cached = functools.cache(kubernetes_validate.utils.schema_contents)
    patch.setattr(kubernetes_validate.utils, 'schema_contents', cached)
    yield


@pytest.fixture(scope='module')
def cases():
  """Manifests of all kinds, by name."""
  return {
    'one': make(ONE),
    'many': make(MANY, name='big-run', namespace='rl', storage_class='fast', launch_id=7),
    'gpu': make(MANY, preset=presets.gpu, gpus=2, image='registry:5000/rl/hephaestus:1'),
    'slice': make(SLICE, 'learner.num_processes=4', preset=presets.tpu_v4_8, **TPU),
  }


CASES = pytest.mark.parametrize('case', ['many', 'slice'])


def workloads(objects):
  """(spec of the pods' template, how many there are, field with a pod's number) by name."""
  found = {}
  for each in objects:
    name, spec = each['metadata']['name'], each.get('spec')
    if each['kind'] == 'StatefulSet':
      found[name] = spec['template'], spec['replicas']
    if each['kind'] == 'JobSet':
      (replicated,) = spec['replicatedJobs']
      assert replicated['replicas'] == 1
      each = {'kind': 'Job', 'spec': replicated['template']['spec']}
      name, spec = f'{name}-{replicated["name"]}-0', each['spec']
    if each['kind'] == 'Job':
      assert spec['completionMode'] == 'Indexed' and spec['parallelism'] == spec['completions']
      found[name] = spec['template'], spec['completions']
  return found


def container(template):
  (only,) = template['spec']['containers']
  return only


def told(objects):
  """The text of the hosts file that the pods read."""
  (data,) = (each['data'] for each in objects if each['kind'] == 'ConfigMap')
  return data['hosts.yaml']


@CASES
@pytest.mark.parametrize('version', [OLDEST, kubernetes_validate.latest_version()])
def test_objects_fit_the_schemas_of_kubernetes(cases, case, version):
  frame = yaml.safe_load(pathlib.Path(__file__).with_name('jobset.yaml').read_text())
  kinds = set()
  for each in cases[case]:
    kinds.add(each['kind'])
    if each['kind'] != 'JobSet':
      kubernetes_validate.validate(each, version, strict=True)
      continue
    jsonschema.validate(each, frame)
    for replicated in each['spec']['replicatedJobs']:
      job = {'apiVersion': 'batch/v1', 'kind': 'Job', **replicated['template']}
      kubernetes_validate.validate(job, version, strict=True)
  assert kinds == {
    'ConfigMap', 'NetworkPolicy', 'Service', 'StatefulSet', 'PersistentVolumeClaim', 'JobSet', 'Job',
  }  # fmt: skip


@CASES
def test_each_host_runs_in_one_pod(cases, case):
  objects = cases[case]
  placed = hosts.parse(told(objects), 'hosts.yaml')
  run_by = []
  for template, count in workloads(objects).values():
    arguments = container(template)['args']
    for index in range(count):
      words = [word.replace('$(INDEX)', str(index)) for word in arguments]
      parsed = main.parse(['hephaestus', *words])
      assert (parsed.command, parsed.hosts) == ('node', '/etc/hephaestus/hosts.yaml')
      assert parsed.run == pathlib.Path('/data') / parsed.host
      assert parsed.stay == bool(placed.find(parsed.host).replay)
      run_by.append(parsed.host)
  assert sorted(run_by) == sorted(host.name for host in placed.hosts)
  for host in placed.hosts:  # one failure domain each
    assert sum(map(bool, (host.replay, host.learner, host.evaluator, host.actors))) == 1
  actors = {node for host in placed.hosts for node in placed.nodes(host) if 'actor' in node}
  (data,) = (each['data'] for each in objects if each['kind'] == 'ConfigMap')
  told_config = config.from_yaml(data[folder_lib.CONFIG], 'config.yaml')
  assert len(actors) == told_config.actor.num_actors  # no ID twice
  hosts.check(placed, told_config)


@CASES
def test_replay_address_resolves_to_its_pod(cases, case):
  objects = cases[case]
  placed = hosts.parse(told(objects), 'hosts.yaml')
  (service,) = (each for each in objects if each['kind'] == 'Service')
  (keeper,) = (each for each in objects if each['kind'] == 'StatefulSet')
  name = keeper['metadata']['name']
  shards = [host.replay for host in placed.hosts if host.replay]
  assert [shard.address for shard in shards] == [
    f'{name}-{index}.{service["metadata"]["name"]}' for index in range(keeper['spec']['replicas'])
  ]
  assert keeper['spec']['serviceName'] == service['metadata']['name']
  pod = keeper['spec']['template']
  assert service['spec']['selector'].items() <= pod['metadata']['labels'].items()
  (port,) = container(pod)['ports']
  assert {port['containerPort']} == {shard.port for shard in shards}
  assert service['spec']['ports'][0]['targetPort'] == port['name']


@CASES
def test_pods_are_restricted(cases, case):
  for template, _ in workloads(cases[case]).values():
    spec, only = template['spec'], container(template)
    assert spec['automountServiceAccountToken'] is False
    assert spec['securityContext']['runAsNonRoot'] and spec['securityContext']['runAsUser'] > 0
    assert spec['securityContext']['seccompProfile'] == {'type': 'RuntimeDefault'}
    assert only['securityContext'] == {
      'allowPrivilegeEscalation': False,
      'readOnlyRootFilesystem': True,
      'capabilities': {'drop': ['ALL']},
    }
    assert not spec.keys() & {'hostNetwork', 'hostPID', 'hostIPC'}
    volumes = {volume['name'] for volume in spec['volumes']}
    assert not any('hostPath' in volume for volume in spec['volumes'])
    mounts = {mount['name']: mount['mountPath'] for mount in only['volumeMounts']}
    # The StatefulSet makes the volumes of the shards.
    is_shard = template['metadata']['labels']['app.kubernetes.io/component'] == 'replay'
    assert mounts.keys() == volumes | ({'data'} if is_shard else set())
    written = [each['value'] for each in only['env'] if each['name'] in ('HOME', 'XDG_CACHE_HOME')]
    assert len(written) == 2 and all(path.startswith(tuple(mounts.values())) for path in written)
    assert only['resources']['limits']['memory'] == only['resources']['requests']['memory']


def is_allowed(policies, source, destination, port):
  """Whether a pod may connect to another of the same namespace, by the labels of both."""
  matches = lambda selector, labels: selector['matchLabels'].items() <= labels.items()

  def passes(direction, key, pod, peer):
    chosen = [
      policy
      for policy in policies
      if direction in policy['policyTypes'] and matches(policy['podSelector'], pod)
    ]
    rules = [rule for policy in chosen for rule in policy.get(direction.lower(), [])]
    selectors = lambda rule: [to['podSelector'] for to in rule[key] if to.keys() == {'podSelector'}]
    return not chosen or any(
      any(matches(selector, peer) for selector in selectors(rule))
      and port in [each['port'] for each in rule.get('ports', [{'port': port}])]
      for rule in rules
    )

  return passes('Egress', 'to', source, destination) and passes(
    'Ingress', 'from', destination, source
  )


@CASES
def test_network_policies_admit_only_pods_of_the_run(cases, case):
  objects = cases[case]
  policies = [each['spec'] for each in objects if each['kind'] == 'NetworkPolicy']
  pods = {}
  for template, _ in workloads(objects).values():
    labels = template['metadata']['labels']
    pods[labels['app.kubernetes.io/component']] = labels
  other_run = {role: labels | {'app.kubernetes.io/instance': 'x'} for role, labels in pods.items()}
  strangers = [{}, {'app.kubernetes.io/component': 'learner'}, *other_run.values()]
  num_learners = len(hosts.parse(told(objects), 'hosts.yaml').learners)
  for role, source in pods.items():
    assert is_allowed(policies, source, pods['replay'], 22001)
    for other, destination in pods.items():
      learners = (role, other) == ('learner', 'learner') and num_learners > 1
      assert is_allowed(policies, source, destination, 8476) == learners
      assert other == 'replay' or learners == is_allowed(policies, source, destination, 22001)
    for stranger in strangers:
      assert not is_allowed(policies, stranger, source, 22001)
      assert not is_allowed(policies, source, stranger, 22001)
  outside = [
    {each['port'] for each in rule['ports']}
    for policy in policies
    for rule in policy.get('egress', [])
    if any(to.keys() != {'podSelector'} for to in rule['to'])
  ]
  assert outside == [{53}]


def test_failed_actor_pod_restarts_without_others(cases):
  for each in cases['slice']:
    if each['kind'] == 'Job':
      assert 'backoffLimit' not in each['spec'] and each['spec']['backoffLimitPerIndex'] > 0
      assert each['spec']['podFailurePolicy']['rules'][0]['action'] == 'FailIndex'
    if each['kind'] == 'JobSet':
      (job,) = each['spec']['replicatedJobs']
      assert job['name'] == 'learner' and job['template']['spec']['backoffLimit'] == 0


def test_replay_memory_limit_fits_its_sequences(cases):
  objects = cases['gpu']
  needed = preflight.replay_bytes(presets.gpu('catch'))
  template, _ = workloads(objects)['hephaestus-replay']
  gibibytes = int(container(template)['resources']['limits']['memory'].removesuffix('Gi'))
  assert needed + 2**30 < gibibytes * 2**30 < needed + 2**32
  assert 'livenessProbe' not in container(template)
  assert container(template)['readinessProbe']['tcpSocket'] == {'port': 'reverb'}


def test_only_learner_pods_get_accelerators(cases):
  for case, name, count in (('gpu', 'nvidia.com/gpu', '2'), ('slice', 'google.com/tpu', '4')):
    for workload, (template, num_pods) in workloads(cases[case]).items():
      is_learner = workload == 'hephaestus-learner-0'
      limits = container(template)['resources']['limits']
      assert limits.get(name) == (count if is_learner else None)
      selected = template['spec'].get('nodeSelector')
      assert selected == (
        {
          'cloud.google.com/gke-tpu-accelerator': 'tpu-v4-podslice',
          'cloud.google.com/gke-tpu-topology': '2x2x4',
        }
        if is_learner and case == 'slice'
        else None
      )
      assert not is_learner or num_pods == (4 if case == 'slice' else 1)


def test_resources_override_estimates():
  given = ('actors.cpu=500m', 'replay.storage=2Ti', 'learner.memory=9G')
  objects = make(ONE, resources=given)
  requests = {
    name: container(template)['resources']['requests']
    for name, (template, _) in workloads(objects).items()
  }
  assert requests['hephaestus-actors-1']['cpu'] == '500m'
  assert requests['hephaestus-learner-0']['memory'] == '9G'
  (replay,) = (each for each in objects if each['kind'] == 'StatefulSet')
  claim = replay['spec']['volumeClaimTemplates'][0]
  assert claim['spec']['resources']['requests'] == {'storage': '2Ti'}


KUBERNETES = ('--kubernetes', '--preset', 'laptop')


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    ([*KUBERNETES, '--set', 'actor.num_actors=2'], 'the hosts have 1 actors in all'),
    ([*KUBERNETES, '--name', 'my_run'], '--name my_run: must begin with a letter'),
    ([*KUBERNETES, '--gpus', '1'], 'accelerator=False: this run keeps to the CPU'),
    ([*KUBERNETES, '--set', 'accelerator=true'], 'accelerator=True: say which one'),
    ([*KUBERNETES, '--tpu', 'tpu-v4-podslice'], '--tpu, --topology: go together'),
    ([*KUBERNETES, '--resources', 'learner.ram=1'], '--resources learner.ram=1: write it as'),
    ([*KUBERNETES, '--resources', 'actors.storage=1Gi'], 'actors have no storage'),
    ([*KUBERNETES, '--set', 'max_minutes=1'], '--launch-id: is needed for runs that end by'),
    ([*KUBERNETES, '--out', '/nowhere/run.yaml'], '/nowhere/run.yaml: No such file'),
  ],
)
def test_invalid_options_are_refused(tmp_path, capsys, arguments, words):
  path = tmp_path / 'hosts.yaml'
  path.write_text(ONE)
  assert main.run(main.parse(['hephaestus', 'manifests', str(path), *arguments])) == 2
  said = capsys.readouterr()
  assert words in said.err and said.err.count('\n') == 1 and not said.out


@pytest.mark.parametrize(
  ('text', 'options', 'words'),
  [
    (ONE.replace('22001', '80'), {}, 'port=80: pods are not root'),
    (SLICE, TPU | {'topology': '1x3'}, 'its 3 chips do not divide over 4 learner hosts'),
  ],
)
def test_hosts_that_cannot_be_pods_are_refused(text, options, words):
  with pytest.raises(ValueError, match=words):
    make(text, f'accelerator={bool(options)}', **options)


def test_command_writes_manifests(cases, tmp_path, capsys):
  path, out = tmp_path / 'hosts.yaml', tmp_path / 'run.yaml'
  path.write_text(ONE)
  command = ['hephaestus', 'manifests', str(path), *KUBERNETES, '--out', str(out)]
  assert main.run(main.parse(command)) == 0
  assert not capsys.readouterr().out
  assert list(yaml.safe_load_all(out.read_text())) == cases['one']
