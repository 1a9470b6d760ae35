"""Hosts files are checked, commands reach every host, and no process is left on any of them."""

import contextlib
import getpass
import io
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import types

import polling
import portpicker
import psutil
import pytest

from hephaestus.launch import config, main
from hephaestus.launch.agents import machine, presets
from hephaestus.launch.cluster import handshake, hosts, remote
from hephaestus.launch.files import metrics

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'
SLICE = """
directory: hephaestus
command: .venv/bin/hephaestus
hosts:
  tpu:
    learner: {address: 10.128.0.12, port: 22100}
    gcloud: {name: my-tpu, zone: us-central2-b, project: mine, workers: 4}
  cpu-0:
    replay: {address: 10.128.0.2, port: 22001}
    evaluator: true
    ssh: {target: me@10.128.0.2}
""" + ''.join(
  f'  cpu-{i}: {{actors: 8, ssh: {{target: me@10.128.0.{2 + i}, options: [-p, "2222"]}}}}\n'
  for i in range(1, 9)
)
TWO = """
hosts:
  trainer:
    replay: {address: 127.0.0.2, port: 22001}
    learner: true
    local: true
  cpu:
    evaluator: true
    actors: 2
    local: true
"""


def run(*arguments):
  return main.run(main.parse(['hephaestus', *map(str, arguments)]))


@pytest.fixture
def write(tmp_path):
  def write(text, name='hosts.yaml'):
    path = tmp_path / name
    path.write_text(text)
    return path

  return write


@pytest.mark.parametrize(
  ('old', 'new', 'words'),
  [
    ('    evaluator', '    evaluatr', "hosts.cpu.evaluatr: Key 'evaluatr' not in 'Host'"),
    ('hosts:', 'comand: x\nhosts:', 'comand: unknown key'),
    ('port: 22001', 'port: 70000', 'hosts.trainer: port=70000: use 1 to 65535'),
    ('127.0.0.2,', '"127.0.0.2:22001",', "hosts.trainer: address='127.0.0.2:22001': give a"),
    ('    replay: {address: 127.0.0.2, port: 22001}\n', '', 'replay: is on no host'),
    ('    actors: 2', '    replay: {address: 127.0.0.2, port: 22001}', 'have the same address and'),
    ('    learner: true\n', '', 'learner: is on no host'),
    ('    evaluator: true\n', '', 'evaluator: give'),
    ('    actors: 2\n', '', 'actors: are on no host'),
    ('    actors: 2', '    ssh: {target: me@there}', 'hosts.cpu: ssh, local: there are several'),
    ('    actors: 2', '    tunnel: true', 'hosts.cpu: tunnel=True: '),
    ('    local: true\n  cpu', '    ssh: {target: -oProxyCommand=x}\n  cpu', "target='-oProxyCo"),
    ('    learner: true', '    learner: !!python/object/apply:os.getcwd []', 'is not YAML'),
    ('learner: true', 'learner: 1', 'hosts.trainer: learner=1: '),
    (
      '    evaluator',
      '    learner: {address: a, port: 1}\n    evaluator',
      'hosts.trainer.learner=True: ',
    ),
    ('  cpu:', '  "c pu":', 'hosts.c pu: the name'),
  ],
)
def test_invalid_hosts_file_names_key_and_remedy(write, capsys, old, new, words):
  assert old in TWO
  path = write(TWO.replace(old, new, 1))
  assert run('launch', path, '--preset', 'laptop', '--dry-run') == 2
  message = capsys.readouterr().err
  assert words in message and str(path) in message
  assert message.count('\n') == 1


SIZED = ['--preset', 'laptop', '--set', 'actor.num_actors=2']


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    ([], '--preset: give one'),
    (SIZED[:2], 'the hosts have 2 actors in all; add --set actor.num_actors=2'),
    ([*SIZED, 'replay.num_shards=2'], 'replay.num_shards=2: the hosts keep 1'),
    ([*SIZED, 'learner.num_processes=2'], 'learner.num_processes=2: the learner is on trainer'),
    ([*SIZED, 'replay.port=22'], 'replay.port=22: the hosts say 22001'),
    ([*SIZED, 'max_minutes=1'], '--launch-id: is needed for runs that end by max_minutes'),
    ([*SIZED, '--host', 'gpu'], '--host gpu: there is'),
    (['--config', '/nowhere.yaml', '--seed', '1'], '--seed: --config /nowhere.yaml says all of it'),
    (['--config', '/nowhere.yaml'], '/nowhere.yaml: No such file or directory'),
  ],
)
def test_node_refuses_flags_that_do_not_fit_hosts(write, tmp_path, capsys, arguments, words):
  node = ['node', write(TWO), '--host', 'cpu', '--run', tmp_path / 'run']
  assert run(*node, *arguments) == 2
  message = capsys.readouterr().err
  assert words in message and message.count('\n') == 1
  assert not (tmp_path / 'run').exists()


def test_host_that_learns_needs_the_accelerator(write, tmp_path, capsys, monkeypatch):
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  monkeypatch.setattr(machine, 'find', lambda: machine.Machine('gpu', is_usable=False))
  config = ['--preset', 'gpu', '--run', tmp_path / 'run']
  assert run('node', write(TWO), '--host', 'trainer', *config) == 2
  message = capsys.readouterr().err
  assert 'accelerator=true: this machine has an NVIDIA GPU' in message and message.count('\n') == 1
  assert not (tmp_path / 'run').exists()


def test_slice_has_a_learner_on_each_host_and_actors_with_their_own_ids():
  placed = hosts.parse(SLICE, 'hosts.yaml')
  nodes = [node for host in placed.hosts for node in placed.nodes(host)]
  assert nodes[:6] == [*(f'learner-{worker}' for worker in range(4)), 'replay', 'evaluator']
  assert nodes[6:] == [f'actor-{i}' for i in range(64)]
  assert placed.coordinator == '10.128.0.12:22100'
  assert placed.replay_addresses(placed.find('cpu-3')) == ['10.128.0.2:22001']
  assert placed.replay_addresses(placed.find('cpu-0')) == ['127.0.0.1:22001']
  one = hosts.parse(TWO, 'hosts.yaml')
  assert one.coordinator is None and one.nodes(one.find('trainer')) == ['replay', 'learner']
  second = SLICE.replace('evaluator: true', 'learner: {address: b, port: 1}\n    evaluator: true')
  with pytest.raises(ValueError, match=r'hosts.cpu-0.learner: tpu-0 is the first and listens; use'):
    hosts.parse(second, 'hosts.yaml')


def test_dry_run_prints_commands_of_slice_and_cpu_hosts(write, capsys):
  sizes = ['--set', 'actor.num_actors=64', 'learner.num_processes=4']
  arguments = ['--preset', 'tpu-v4-8', *sizes, '--run', 'runs/big']
  assert run('launch', write(SLICE), '--dry-run', *arguments) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[-1].startswith('# nothing was started')
  printed = dict(zip(lines[:-1:2], map(shlex.split, lines[1::2]), strict=True))
  assert len(printed) == 4 + 9
  there = 'cd hephaestus && exec .venv/bin/hephaestus node - --host tpu-3 --run runs/big'
  assert printed['# tpu-3: learner-3'] == [
    'gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'my-tpu', '--zone=us-central2-b',
    '--project=mine', '--worker=3', '--quiet', '--ssh-flag=-oConnectTimeout=60',
    '--ssh-flag=-oServerAliveInterval=30', '--ssh-flag=-oServerAliveCountMax=10', f'--command={there}',
  ]  # fmt: skip
  acting = ', '.join(f'actor-{i}' for i in range(56, 64))
  assert printed[f'# cpu-8: {acting}'] == [
    'ssh', '-T', '-p', '2222', '-oBatchMode=yes', '-oConnectTimeout=60',
    '-oServerAliveInterval=30', '-oServerAliveCountMax=10', 'me@10.128.0.10',
    'cd hephaestus && exec .venv/bin/hephaestus node - --host cpu-8 --run runs/big',
  ]  # fmt: skip
  assert printed['# cpu-0: replay, evaluator'][-2] == 'me@10.128.0.2'


SHARDS = """
hosts:
  trainer: {learner: true, evaluator: true, local: true}
  store-0: {replay: {address: 10.128.0.2, port: 22001}, ssh: {target: me@10.128.0.2}}
  store-1: {replay: {address: 10.128.0.3, port: 22002}, actors: 1, ssh: {target: me@10.128.0.3}}
  cpu: {actors: 1, tunnel: true, ssh: {target: me@10.128.0.4}}
"""


def test_each_replay_host_keeps_one_reachable_shard():
  placed = hosts.parse(SHARDS, 'hosts.yaml')
  assert placed.replay_addresses(placed.find('trainer')) == ['10.128.0.2:22001', '10.128.0.3:22002']
  assert placed.replay_addresses(placed.find('store-1')) == ['10.128.0.2:22001', '127.0.0.1:22002']
  assert placed.replay_addresses(placed.find('cpu')) == ['127.0.0.1:22001', '127.0.0.1:22002']
  names = {host.name: placed.nodes(host) for host in placed.hosts}
  assert names['store-0'] == ['replay-0', 'ending']
  assert names['store-1'] == ['replay-1', 'actor-0']
  words = {host.name: remote.command(placed, host, 'run', [4000, 4001]) for host in placed.hosts}
  assert '-R127.0.0.1:22001:127.0.0.1:4000' in words['cpu']
  assert '-R127.0.0.1:22002:127.0.0.1:4001' in words['cpu']
  assert '-L127.0.0.1:4001:127.0.0.1:22002' in words['store-1']
  assert '-L127.0.0.1:4000:127.0.0.1:22001' not in words['store-1']
  with pytest.raises(ValueError, match='give each host with replay another port'):
    hosts.parse(SHARDS.replace('22002', '22001'), 'hosts.yaml')


def test_replay_is_exposed_unless_all_hosts_use_tunnels():
  text = """
hosts:
  store: {replay: {address: 10.128.0.2, port: 22001}, learner: true, evaluator: true, local: true}
  near: {actors: 1, tunnel: true, ssh: {target: me@10.128.0.3}}
  far: {actors: 1, TUNNEL ssh: {target: me@10.128.0.4}}
"""
  assert hosts.parse(text.replace('TUNNEL', ''), 'hosts.yaml').exposed
  assert not hosts.parse(text.replace('TUNNEL', 'tunnel: true,'), 'hosts.yaml').exposed


def test_launch_prints_command_for_unreachable_host(write, capsys):
  path = write(TWO.replace('    actors: 2\n    local: true\n', '    actors: 2\n'))
  arguments = ['--preset', 'laptop', '--run', 'runs/two', '--seed', '3', '--profile', '5:7']
  assert run('launch', path, '--dry-run', *arguments, '--set', 'actor.num_actors=2') == 0
  by_hand = capsys.readouterr().out.splitlines()[3]
  assert re.fullmatch(
    rf'hephaestus node {re.escape(str(path))} --host cpu --run runs/two --launch-id \d+ '
    '--profile 5:7 --preset laptop --seed 3 --set actor.num_actors=2',
    by_hand,
  )


# Stands in for hephaestus on a host; only the connection to it is tested.
STAND_IN = """
import json, pathlib, sys, time
name, folder = sys.argv[4], pathlib.Path(__file__).parent
spec = json.loads(sys.stdin.readline())
print('up:', name, flush=True)
(folder / f'{name}.up').write_text(spec['config'])
if (folder / f'{name}.fail').exists():
  sys.exit(1)
while sys.stdin.readline():
  pass
with open(folder / 'ended', 'a') as file:
  file.write(f'{name}\\n')
"""

# The last step of `hephaestus launch`, without its seconds of imports.
LAUNCH = """
import pathlib, sys
from hephaestus.launch.cluster import handshake, hosts, remote
text = pathlib.Path('hosts.yaml').read_text()
placed = hosts.parse(text, 'hosts.yaml')
here = pathlib.Path.cwd()  # in the commands, so that remaining processes can be found
commands = {
  host.name: remote.command(placed, host, str(here / host.name / 'run'), [1] * len(placed.keepers))
  for host in placed.hosts
}
spec = handshake.RunSpec(text, pathlib.Path('config.yaml').read_text(), 7, *sys.argv[1:])
say = lambda line: print(line, flush=True)
sys.exit(remote.Launch(placed, commands, spec, say).run())
"""


class Launched:
  """A launch of hosts that run a command of this machine."""

  def __init__(self, folder, text, command, made='the config', profile=()):
    self.folder = folder
    (folder / 'hosts.yaml').write_text(f'command: {command}\n{text}')
    (folder / 'config.yaml').write_text(made)
    environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    with open(folder / 'output', 'w') as output:
      self.process = subprocess.Popen(
        [sys.executable, '-c', LAUNCH, *profile],
        stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment,
      )  # fmt: skip

  def wait_for(self, *names):
    polling.until(
      lambda: all((self.folder / name).exists() for name in names),
      lambda: f'{names}: {self.words()}',
      alive=lambda: self.process.poll() is None,
    )

  def end(self):
    try:
      return self.process.wait(timeout=polling.PATIENCE)
    except subprocess.TimeoutExpired:
      pytest.fail(f'does not end: {self.words()}')

  def words(self):
    return (self.folder / 'output').read_text()

  def node(self, name):
    """The process of a host's share."""
    children = psutil.Process(self.process.pid).children()
    (node,) = [child for child in children if f'--host {name} ' in ' '.join(child.cmdline())]
    return node

  def wait_for_end(self, name=''):
    """Waits until no process names a file of the folder."""
    left = lambda: [
      command
      for process in psutil.process_iter(['cmdline'])
      if str(self.folder / name) in (command := ' '.join(process.info['cmdline'] or []))
    ]
    polling.until(lambda: not left(), lambda: f'the end of {left()}', seconds=20)


@pytest.fixture
def launch(tmp_path):
  """Launches hosts that run the stand-in, or another command; stops them when the test fails."""
  (tmp_path / 'stand_in.py').write_text(STAND_IN)
  with contextlib.ExitStack() as stack:

    def launch(text, command=f'{sys.executable} {tmp_path}/stand_in.py', **options):
      launched = Launched(tmp_path, text, command, **options)
      stack.callback(launched.process.wait)
      stack.callback(launched.process.kill)  # its hosts end without it
      return launched

    yield launch


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_two_hosts_train_one_run(tmp_path, launch, tiny):
  text = TWO.replace('22001', str(portpicker.pick_unused_port())).replace('actors: 2', 'actors: 1')
  made = config.override(presets.laptop('catch'), ['max_environment_steps=400', *tiny])
  launched = launch(text, HEPHAESTUS, made=config.to_yaml(made), profile=['6:8'])
  # A preempted machine sends SIGTERM to its processes.
  launched.wait_for('cpu/run/logs/actor-0.log')
  launched.node('cpu').terminate()
  assert launched.end() == 0, launched.words()
  # 143 once its nodes are supervised, and the bare signal before.
  assert re.search(r'cpu is lost \(exit (143|-15)\); restarting it in 1 s', launched.words())
  assert 'trainer| learner, updates 6 to 8: ' in launched.words()
  assert re.search(r'cpu\| actor-0, versions \d+ to \d+: ', launched.words())
  assert 'trainer: exit 0  cpu: exit 0' in launched.words()
  launched.wait_for_end()
  rows = {name: tmp_path / name / 'run' / 'metrics' for name in ('trainer', 'cpu')}
  assert metrics.last(rows['trainer'] / 'learner.jsonl')['learner_step'] >= 10
  assert metrics.last(rows['cpu'] / 'actor-0.jsonl')['parameter_version'] > 0
  final = metrics.last(rows['cpu'] / 'evaluator.jsonl')
  assert final['final'] and final['environment_step'] >= 400
  started = {
    name: {row['name'] for row in metrics.read(path / 'events.jsonl') if row['kind'] == 'started'}
    for name, path in rows.items()
  }
  assert started == {'trainer': {'replay', 'learner'}, 'cpu': {'actor-0', 'evaluator'}}


def ended(folder):
  path = folder / 'ended'
  return path.read_text().split() if path.exists() else []


def test_ctrl_c_stops_actors_before_replay(tmp_path, launch):
  launched = launch(TWO)
  launched.wait_for('cpu.up', 'trainer.up')
  assert (tmp_path / 'cpu.up').read_text() == 'the config'
  launched.process.send_signal(signal.SIGINT)
  assert launched.end() == 0, launched.words()
  assert ended(tmp_path) == ['cpu', 'trainer']
  assert 'cpu| up: cpu' in launched.words()
  assert 'trainer: exit 0  cpu: exit 0' in launched.words()
  launched.wait_for_end()


def test_killed_launch_leaves_no_process_on_hosts(tmp_path, launch):
  launched = launch(TWO)
  launched.wait_for('cpu.up', 'trainer.up')
  for name in ('cpu', 'trainer'):  # a killed node is restarted
    (tmp_path / f'{name}.up').unlink()
    launched.node(name).kill()
    launched.wait_for(f'{name}.up')
    assert f'{name} is lost (exit -9); restarting it in 1 s' in launched.words()
  launched.process.kill()
  launched.process.wait()
  launched.wait_for_end()
  assert sorted(ended(tmp_path)) == ['cpu', 'trainer']


def test_missing_ssh_is_named(monkeypatch):
  monkeypatch.setenv('PATH', '')
  text = TWO.replace('local: true', 'ssh: {target: me@there}')
  placed = hosts.parse(text, 'hosts.yaml')
  commands = {host.name: remote.command(placed, host, 'run', [1]) for host in placed.hosts}
  with pytest.raises(ValueError, match=r'hosts.trainer: needs ssh here, which cannot be run'):
    remote.Launch(placed, commands, handshake.RunSpec(text, '', 1), lambda line: None).run()


def test_lost_host_that_never_answers_again_is_given_up(tmp_path, monkeypatch):
  monkeypatch.setattr(remote, 'LOST_SECONDS', 0.5)
  first = tmp_path / 'first'
  command = f'if [ -e {first} ]; then exec sleep 600; fi; touch {first}; echo "up: 1"; exit 255'
  said = []
  connection = remote._Connection(
    host=types.SimpleNamespace(name='one'),
    command=['sh', '-c', command],
    first_line=b'',
    say=said.append,
  )
  polling.until(lambda: connection.exit_code is not None, 'its end')
  assert connection.failed and any('is lost' in line for line in said)


def test_all_hosts_stop_when_replay_fails(tmp_path, launch):
  (tmp_path / 'trainer.fail').touch()
  launched = launch(TWO)
  assert launched.end() == 1, launched.words()
  assert 'trainer failed: stopping the others' in launched.words()
  assert 'trainer failed: exit 1' in launched.words()
  launched.wait_for_end()


def test_run_continues_without_one_host_of_each_kind(tmp_path, launch):
  (tmp_path / 'store.fail').touch()
  (tmp_path / 'more.fail').touch()
  launched = launch(
    TWO.replace('actors: 2', 'actors: 1')
    + '  more: {actors: 1, local: true}\n'
    + '  store: {replay: {address: 127.0.0.2, port: 22002}, local: true}\n'
  )
  launched.wait_for('store.up', 'more.up', 'cpu.up', 'trainer.up')
  for name in ('store', 'more'):
    polling.until(lambda name=name: f'{name}: exit 1' in launched.words(), launched.words)
  assert launched.process.poll() is None, launched.words()
  launched.process.send_signal(signal.SIGTERM)
  assert launched.end() == 1, launched.words()
  assert ended(tmp_path) == ['cpu', 'trainer']
  assert 'more failed: exit 1' in launched.words()


SSHD = shutil.which('sshd', path=f'/usr/sbin:{os.environ["PATH"]}')


@pytest.fixture
def sshd(tmp_path):
  """The options of ssh for a server at 127.0.0.1 that lets this user in."""
  key, port = tmp_path / 'key', portpicker.pick_unused_port()
  subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', key], check=True)
  if os.getuid() == 0:
    os.makedirs('/run/sshd', exist_ok=True)
  settings = [
    'ListenAddress=127.0.0.1', f'AuthorizedKeysFile={key}.pub', 'StrictModes=no', 'PidFile=none',
    'PermitRootLogin=yes',
  ]  # fmt: skip
  server = subprocess.Popen(
    [SSHD, '-D', '-f', '/dev/null', '-h', key, '-p', str(port)]
    + [f'-o{setting}' for setting in settings],
    stderr=subprocess.DEVNULL,
  )
  polling.until(
    lambda: socket.socket().connect_ex(('127.0.0.1', port)) == 0,
    'sshd',
    alive=lambda: server.poll() is None,
  )
  yield f'[-F, none, -p, "{port}", -i, {key}, -oStrictHostKeyChecking=no, -oUserKnownHostsFile=/dev/null]'
  server.kill()
  server.wait()


@pytest.mark.skipif(SSHD is None, reason='there is no sshd')
def test_host_behind_ssh_ends_with_its_connection_and_is_restarted(tmp_path, launch, sshd):
  ssh = f'ssh: {{target: {getpass.getuser()}@127.0.0.1, options: {sshd}}}'
  launched = launch(TWO.replace('local: true', ssh))
  launched.wait_for('cpu.up', 'trainer.up')
  # A host that is lost before the launch has heard that it came up has failed.
  polling.until(lambda: 'trainer: up  cpu: up' in launched.words(), launched.words)
  for name in ('cpu', 'trainer'):
    (tmp_path / f'{name}.up').unlink()
  for client in psutil.Process(launched.process.pid).children():
    client.kill()
  launched.wait_for('cpu.up', 'trainer.up')
  launched.process.send_signal(signal.SIGINT)
  assert launched.end() == 0, launched.words()
  launched.wait_for_end('stand_in.py')
  assert sorted(ended(tmp_path)) == ['cpu', 'cpu', 'trainer', 'trainer']


SHARE = """
import pathlib, sys
from hephaestus.launch.cluster import handshake
from hephaestus.launch.processes import supervisor
handshake.TIMEOUT_SECONDS = float(sys.argv[2])
heartbeats = handshake.HeartbeatMonitor(sys.stdin.fileno())
sleeper = supervisor.Process('actor', ['sleep', '987654'], {}, pathlib.Path(sys.argv[1]))
on_event = lambda event: print(event.kind, event.pid, flush=True)
outcome = supervisor.Supervisor(
  [sleeper], on_tick=heartbeats.tick, on_event=on_event
).run()
sys.exit(5 if outcome.interrupted else 1)
"""


@pytest.mark.parametrize(('timeout', 'closes'), [('1000', True), ('0.5', False)])
def test_share_ends_when_heartbeats_stop(tmp_path, timeout, closes):
  share = subprocess.Popen(
    [sys.executable, '-c', SHARE, tmp_path / 'log', timeout],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
  )  # fmt: skip
  kind, pid = share.stdout.readline().split()
  assert kind == 'started'
  share.stdin.write('\n')  # a heartbeat
  share.stdin.flush()
  if closes:
    share.stdin.close()
  assert share.wait(timeout=polling.PATIENCE) == 5
  assert not psutil.pid_exists(int(pid))


@pytest.mark.parametrize('line', [b'', b'\n', b'{"hosts": 1}\n', b'x' * 100])
def test_invalid_run_spec_is_named(line):
  with pytest.raises(ValueError, match='HOSTS -: '):
    handshake.receive(io.BytesIO(line))
