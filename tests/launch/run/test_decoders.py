"""Text of files and peers is parsed or refused by a ValueError, and never executed."""

import contextlib
import io
import json
import sys

import hypothesis
import numpy as np
import pytest
import yaml
from hypothesis import strategies

from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.cluster import handshake, hosts
from hephaestus.launch.doctor import agent as doctor_agent
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history, metrics
from hephaestus.launch.inspect import live
from hephaestus.launch.report import dashboard
from hephaestus.launch.run import progress

EXAMPLES = hypothesis.settings(
  max_examples=25, deadline=None, derandomize=True, phases=[hypothesis.Phase.generate]
)
EXECUTION = ('os.system', 'os.exec', 'os.fork', 'os.posix_spawn', 'subprocess.Popen', 'pickle.find_class')  # fmt: skip
ATTACKS = (
  '!!python/object/apply:os.system ["true"]',
  '!!python/name:os.system',
  '!!python/object/new:subprocess.Popen [["true"]]',
  '{environment: !!python/module:os {}}',
  '${oc.env:NOBODY_HAS_THIS}',
  '${oc.create:${oc.decode:"!!python/name:os.system"}}',
  '__import__("os").system("true")',
  "\x80\x04cos\nsystem\n(S'true'\ntR.",
  '&a [*a]',
  '[' * 1100,
  '{"a":' * 1100,
  '\x00\ud800',
)  # fmt: skip
LEAVES = (
  strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats()
  | strategies.text(max_size=8) | strategies.sampled_from(ATTACKS)
)  # fmt: skip

executed: list[str] = []
watching = False


def _audit(event, arguments):
  if watching and event in EXECUTION:
    executed.append(f'{event} {arguments}')


@pytest.fixture(scope='module', autouse=True)
def audited():
  sys.addaudithook(_audit)  # it stays for ever, and sleeps


@contextlib.contextmanager
def nothing_but_a_refusal():
  """Ignores ValueErrors, and fails if anything was executed."""
  global watching
  watching = True
  try:
    with contextlib.suppress(ValueError):
      yield
  finally:
    watching = False
  assert executed == []


def trees(keys):
  """Trees of mappings and lists, with many known keys."""
  known = strategies.sampled_from(keys) | strategies.text(max_size=6)
  return strategies.recursive(
    LEAVES,
    lambda inner: strategies.lists(inner, max_size=4) | strategies.dictionaries(known, inner, max_size=5),
    max_leaves=12,
  )  # fmt: skip


def texts(keys):
  """YAML of such trees, text of any kind, and attacks."""
  return (
    trees(keys).map(lambda tree: yaml.safe_dump(tree, allow_unicode=True))
    | strategies.text(max_size=60)
    | strategies.sampled_from(ATTACKS)
  )


HOST = {
  'replay': {'address': '127.0.0.2', 'port': 22001},
  'learner': True,
  'evaluator': True,
  'actors': 1,
}
HOST_KEYS = ('hosts', 'directory', 'command', 'replay', 'address', 'port', 'learner', 'evaluator',
             'actors', 'ssh', 'target', 'options', 'gcloud', 'zone', 'workers', 'local', 'tunnel')  # fmt: skip


@EXAMPLES
@hypothesis.given(strategies.sampled_from(HOST_KEYS), trees(HOST_KEYS))
def test_value_in_hosts_file_parses_or_raises_value_error(key, value):
  with nothing_but_a_refusal():
    hosts.parse(yaml.safe_dump({'hosts': {'one': HOST | {key: value}}}), 'hosts.yaml')


@pytest.fixture(scope='module')
def sound():
  """A config, and all values of its file, by path."""
  made = presets.laptop('catch')
  return made, config.flatten(yaml.safe_load(config.to_yaml(made)))


@EXAMPLES
@hypothesis.given(data=strategies.data())
def test_value_in_config_file_parses_or_raises_value_error(sound, data):
  made, known = sound
  content = yaml.safe_load(config.to_yaml(made))
  place, path = content, data.draw(strategies.sampled_from(sorted(known))).split('.')
  for key in path[:-1]:
    place = place.get(key.split('[')[0], {})
  value = data.draw(trees(sorted(content)))
  if isinstance(place, dict):
    place[path[-1].split('[')[0]] = value
  with nothing_but_a_refusal():
    config.from_yaml(yaml.safe_dump(content, allow_unicode=True), 'config.yaml')


@EXAMPLES
@hypothesis.given(
  texts((*HOST_KEYS, 'environment', 'agent', 'replay', 'learner', 'actor', 'agent_name'))
)
def test_file_of_hosts_or_of_a_config_parses_or_raises_value_error(text):
  for parse in (hosts.parse, config.from_yaml):
    with nothing_but_a_refusal():
      parse(text, 'file.yaml')


@EXAMPLES
@hypothesis.given(data=strategies.data())
def test_override_applies_or_raises_value_error(sound, data):
  made, known = sound
  key = data.draw(strategies.sampled_from(sorted(known)) | strategies.text(max_size=12))
  value = data.draw(LEAVES.map(str) | texts(('name', 'max_size')))
  with nothing_but_a_refusal():
    config.override(made, [f'{key}={value}'])


@EXAMPLES
@hypothesis.given(
  strategies.binary(max_size=60)
  | strategies.dictionaries(
    strategies.sampled_from(handshake.RunSpec._fields) | strategies.text(max_size=4),
    LEAVES,
    max_size=4,
  ).map(lambda content: json.dumps(content).encode())
  | strategies.sampled_from(ATTACKS).map(lambda text: text.encode(errors='replace'))
)
def test_run_spec_parses_or_raises_value_error(line):
  with nothing_but_a_refusal():
    got = handshake.receive(io.BytesIO(line + b'\n'))
    assert isinstance(got.hosts, str) and isinstance(got.config, str)
    assert type(got.launch_id) is int


@EXAMPLES
@hypothesis.given(
  strategies.lists(
    trees(('time', 'learner_step')).map(lambda tree: json.dumps(tree).encode())
    | strategies.binary(max_size=40)
    | strategies.sampled_from(ATTACKS).map(lambda text: text.encode(errors='replace')),
    max_size=4,
  )
)
def test_metrics_file_parses_or_raises_value_error(tmp_path_factory, lines):
  path = tmp_path_factory.getbasetemp() / 'rows.jsonl'
  path.write_bytes(b''.join(line + b'\n' for line in lines))
  for look in (metrics.read, metrics.last):
    with nothing_but_a_refusal():
      rows = look(path)
      rows = rows if isinstance(rows, list) else [rows] if rows is not None else []
      assert all(isinstance(row['time'], int | float) for row in rows)


KEYS = (
  'time', 'kind', 'name', 'text', 'pid', 'restarts', 'exit_code', 'environment_step', 'learner_step',
  'parameter_version', 'final', 'episodes', 'episode_return', 'episode_length', 'normalised_score',
  'lost_steps', 'starved_fraction', 'throttled_fraction', 'unrolled_fraction', 'replay_ratio',
  'memory/filled', 'memory/evidence', 'intrinsic/vital_food', 'ppo/approx_kl', 'ppo/entropy',
  'episode_return/median', 'replay/episodic/age/median', 'replay/failed_saves', 'learner/loss',
)  # fmt: skip
NUMBERS = strategies.sampled_from((0, 1, -1, 0.5, 1e400, -1e308, 1e99, 10**400, 2**62, 1e12, 10.0))
VALUES = NUMBERS | LEAVES | strategies.sampled_from(('started', 'restarting', 'learner', 'warning'))
ROWS = strategies.lists(
  strategies.dictionaries(strategies.sampled_from(KEYS), VALUES, max_size=8).map(
    lambda row: json.dumps({'time': 10.0, **row}).encode()
  )
  | strategies.binary(max_size=20),
  max_size=6,
)


@EXAMPLES
@hypothesis.given(
  files=strategies.dictionaries(
    strategies.sampled_from(('events', 'learner', 'evaluator', 'actor-0', 'actor-x')), ROWS
  ),
)
def test_run_of_any_rows_is_shown(tmp_path_factory, files):
  """Each reader of a run's folder skips what it cannot read; nothing but valid JSON comes out."""
  folder = tmp_path_factory.mktemp('any') / 'run'
  given = presets.laptop('catch')
  folder_lib.open_run(folder, given)
  for name, lines in files.items():
    (folder / 'metrics' / f'{name}.jsonl').write_bytes(b''.join(line + b'\n' for line in lines))
  shown = dashboard.Dashboard([folder])
  with np.errstate(over='ignore'):
    (described,) = shown.runs()['runs']
    assert described['state'] != 'broken', described['messages']
    json.dumps(described, allow_nan=False)
    for x in history.X_AXES:
      json.loads(shown.curves(x), parse_constant=pytest.fail)
  live._of_nodes(live.Run(folder, given), [])
  progress.summary(folder)
  folder_lib.has_finished(folder, given)
  doctor_agent.of_metrics(folder, given, (0.0, 0.1))
  rows = metrics.read(folder / 'metrics' / 'evaluator.jsonl')
  assert all(0 <= row['time'] <= metrics.LATEST for row in rows)
