"""Configuration files: values over a preset, flags over them, and the config that is printed with comments."""

import dataclasses

import pytest

from hephaestus.launch import comments, config, main, records
from hephaestus.launch.agents import presets
from hephaestus.launch.cluster import hosts
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.run import request

MACHINES = ('laptop', 'gpu', 'tpu-v4-8')


@pytest.fixture
def make(tmp_path):
  """The config of `train` with a file of this text and these flags."""

  def make(text, *words):
    (tmp_path / 'my.yaml').write_text(text)
    command = ['hephaestus', 'train', '--config', str(tmp_path / 'my.yaml'), *map(str, words)]
    return request.make_config(request.of(main.parse(command)))

  return make


@pytest.mark.parametrize('agent', records.AGENTS)
@pytest.mark.parametrize('preset', MACHINES)
def test_printed_config_is_a_file_of_the_same_config(preset, agent, make):
  made = config.override(config.of_preset(agent, preset, 'catch'), ['environment.rows=7', 'seed=3'])
  assert make(config.to_commented_yaml(made), '--preset', 'laptop') == made


@pytest.mark.parametrize('agent', records.AGENTS)
def test_every_key_has_a_comment(agent):
  made = config.of_preset(agent, 'laptop', 'catch')
  known = config.meanings(made)
  keys = config.flatten(dataclasses.asdict(made))
  assert [key for key in keys if key not in known and not key.startswith('environment.')] == []
  text = config.to_commented_yaml(made)
  assert all(f'  # {comment}\n' in text for comment in known.values())


def test_comment_is_of_the_docstring_or_of_the_line_of_the_field():
  @dataclasses.dataclass
  class Sizes:
    """Sizes.

    Attributes:
      width: units of a layer,
        in all of them.
    """

    width: int = 3
    depth: int = 2  # layers
    dropout: float = 0.0

  assert comments.of(Sizes) == {
    'width': 'units of a layer, in all of them',
    'depth': 'layers',
  }


def test_values_of_a_file_override_its_preset(make):
  made = make(
    'preset: gpu\nagent_name: ppo\nenvironment: {name: grid_world, size: 6}\n'
    'agent: {clip: 0.1}\nlearner.num_epochs: 2\n'
  )
  expected = ['environment.size=6', 'agent.clip=0.1', 'learner.num_epochs=2']
  assert made == config.override(presets.ppo_gpu('grid_world'), expected)


def test_flags_override_a_file(make):
  text = 'preset: gpu\nagent: {gamma: 0.9, window: 4}\nseed: 1\nmax_environment_steps: 5\n'
  words = ['--preset', 'laptop', '--set', 'agent.gamma=0.8', '--seed', 2, '--steps', 900]
  made = make(text, *words)
  expected = ['agent.gamma=0.8', 'agent.window=4', 'seed=2', 'max_environment_steps=900']
  assert made == config.override(presets.laptop('catch'), expected)


def test_values_of_a_file_are_checked_with_the_overrides(make):
  text = 'preset: laptop\nagent: {horizon_max: 8}\n'
  assert make(text, '--set', 'agent.horizon_min=8').agent.horizon_min == 8
  with pytest.raises(
    ValueError, match=r'agent.horizon_max=8: must be at least agent.horizon_min=9'
  ):
    make(text, '--set', 'agent.horizon_min=9')


def test_other_environment_leaves_out_the_options_of_the_file(make):
  text = 'preset: laptop\nenvironment: {name: catch, rows: 7}\n'
  assert make(text, '--env', 'catch').environment == {'name': 'catch', 'rows': 7}
  assert make(text, '--env', 'grid_world').environment == {'name': 'grid_world'}


def test_resumed_run_takes_what_a_file_does_not_say_from_its_folder(make, tmp_path):
  known = config.override(presets.laptop('catch'), ['environment.rows=7', 'seed=5'])
  folder_lib.open_run(tmp_path / 'run', known)
  made = make('max_environment_steps: 9\n', '--run', tmp_path / 'run')
  assert made == config.override(known, ['max_environment_steps=9'])
  with pytest.raises(ValueError, match=r'--agent: the folder has dreamer, you gave ppo'):
    make('agent_name: ppo\n', '--run', tmp_path / 'run')


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('a: 1\nb: }', r'--config .*my.yaml: is not YAML \(line 2: '),
    ('- 3', r'--config .*my.yaml: must be a mapping'),
    ('agent: 3', r'agent=3: is a section; give its values, such as agent.deterministic_size'),
    ('environment: catch', r'environment=catch: is a section; .* environment.name'),
    ('agent: {gama: 0.9}', r'agent.gama=0.9: unknown key; did you mean agent.gamma'),
    ('preset: [laptop]', r"preset=\['laptop'\]: must be a name"),
  ],
)
def test_bad_file_is_named_with_its_key(make, text, words):
  with pytest.raises(ValueError, match=words):
    make(text)


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('[' * 100_000, 'nested more than 100 deep'),
    ('- 1\n' * 100_000, 'more than 262,144 characters'),
  ],
)
@pytest.mark.parametrize('read', [config.load, config.read_partial, hosts.load])
def test_file_that_would_end_its_parser_is_refused(read, text, words, tmp_path):
  """The parser in C ends the process by a segmentation fault."""
  path = tmp_path / 'config.yaml'
  path.write_text(text)
  with pytest.raises(ValueError, match=f'{path}.*{words}'):
    read(path)


def test_deeply_nested_value_is_refused():
  with pytest.raises(ValueError, match=r'environment.rows=.*nested more than 100 deep'):
    config.override(presets.laptop('catch'), ['environment.rows=' + '[' * 100_000])


def test_text_of_a_file_is_not_resolved(make, monkeypatch, tmp_path):
  """Nor does it read the environment or its own keys, which would take 10^20 characters."""
  monkeypatch.setenv('SECRET', 'secret')
  bomb = ''.join(f'  a{i + 1}: "{f"${{.a{i}}}" * 10}"\n' for i in range(20))
  made = make(f'environment:\n  name: catch\n  a0: "${{oc.env:SECRET}}"\n{bomb}')
  assert made.environment['a0'] == '${oc.env:SECRET}'
  assert made.environment['a20'] == '${.a19}' * 10
  config.save(made, tmp_path / 'config.yaml')
  loaded = config.override(
    config.load(tmp_path / 'config.yaml'), ['seed=3', 'environment.b=${seed}']
  )
  assert loaded.environment == made.environment | {'b': '${seed}'}
  text = 'hosts: {a: {replay: {address: h, port: 9}, learner: true, evaluator: true, actors: 1}}'
  read = hosts.parse(f'command: "${{oc.env:SECRET}}"\n{text}', 'hosts.yaml')
  assert read.hosts[0].command == '${oc.env:SECRET}'
