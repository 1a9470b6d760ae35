"""The command line: bad input ends with exit code 2 and one line that names it; nothing is written."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from hephaestus.launch import config, main, user_errors
from hephaestus.launch.agents import dreamer, presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.run import flags, parts, preflight, request
from hephaestus.learner import checkpoint, process

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'


def run(*arguments):
  return main.run(main.parse(['hephaestus', *map(str, arguments)]))


@pytest.fixture
def folder(tmp_path):
  return tmp_path / 'run'


@pytest.fixture(scope='module', autouse=True)
def once():
  """Computes the shapes of a config, and checks its environment, once: each takes most of a second."""

  def remembered(function):
    made = {}

    def call(given):
      text = config.to_yaml(given)
      if text not in made:
        made[text] = function(given)
      return made[text]

    return call

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(parts, 'make_parts', remembered(parts.make_parts))
    patch.setattr(preflight, 'check_environment', remembered(preflight.check_environment))
    yield


@pytest.mark.parametrize(
  ('arguments', 'key'),
  [
    ('--env cach', "environment.name='cach'"),
    ('--preset laptp', '--preset laptp'),
    ('--agent nowhere:Agent', "agent_name='nowhere:Agent'"),
    ('--agent os:system', "agent_name='os:system'"),
    ('--agent hephaestus.actors.environments.catch:Catch', 'agent_name='),
    ('--set agent_name=ppo', 'agent_name=ppo'),
    ('--env=', "--env ''"),
    ('--set agent={}', 'agent={}: is a section'),
    ('--set max_minutes=.inf', 'max_minutes='),
    ('--set environment.name=[1]', 'environment.name=[1]'),
    ('--set seed=${seed}', 'seed=${seed}'),
    (f'--seed {"1" * 23}', 'seed='),
    (f'--seed {2**32 + 3}', 'seed='),
    (f'--steps {"9" * 400}', 'max_environment_steps='),
    ('--preset laptop --steps 500', 'max_environment_steps=500'),
    ('--env grid_world --set environment.size=1', 'environment.size=1'),
    ('--env catch --set agent.survival_scale=1', 'agent.survival_scale=1'),
    ('--profile 5', '--profile 5'),
    ('--fused --set learner.num_processes=2', 'learner.num_processes=2'),
    ('--fused --expose', '--expose'),
    ('--fused --set actor.num_actors=2', 'actor.num_actors=2'),
    ('--fused --set replay.num_shards=2', 'replay.num_shards=2'),
    ('--agent ppo --cognition', '--cognition'),
    ('--from RUN --cognition', '--cognition'),
    ('--set logger=nosuch', "logger='nosuch'"),
  ],
)  # fmt: skip
def test_bad_input_is_named_and_writes_nothing(folder, capsys, arguments, key):
  assert run('train', '--run', folder, *arguments.split()) == 2
  message = capsys.readouterr().err
  assert message.startswith(f'hephaestus train: {key}') and message.count('\n') == 1
  assert not folder.exists()


WITHOUT_JAX = """
import contextlib, io, json, sys
from hephaestus.launch import main
rows = []
for arguments in json.load(sys.stdin):
  with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
    code = main.run(main.parse(['hephaestus', *arguments]))
  rows.append([code, out.getvalue(), err.getvalue()])
heavy = {'jax', 'flax', 'optax', 'orbax', 'launchpad', 'reverb', 'tensorflow'}
print(json.dumps([rows, sorted(heavy & sys.modules.keys())]))
"""


def test_wrong_input_is_refused_before_imports_that_take_seconds(tmp_path):
  (tmp_path / 'interpolation.yaml').write_text('seed: ${seed}\n')
  arguments = [
    ['train', '--run', 'x' * 300],
    ['train', '--run', '/proc/x'],
    ['train', '--run', '/dev/null/x'],
    ['train', '--steps', '0'],
    ['config', '--set', 'environment.name.x=1'],
    ['evaluate', 'x' * 300],
    ['train', '--env', ''],
    ['train', '--agent', ''],
    ['train', '--env', 'nosuch'],
    ['train', '--env', 'nosuch:Thing'],
    ['train', '--set', 'learner.batch_size=x'],
    ['train', '--agent', 'nosuch:Thing'],
    ['train', '--preset', 'nosuch'],
    ['train', '--from', 'nosuch'],
    ['train', '--config', 'interpolation.yaml'],
    ['train', '--env', 'gymnasium/CartPole-v99'],
    ['train', '--profile', '3'],
    ['inspect', 'nosuch'],
    ['evaluate', '.'],
    ['watch', 'nosuch'],
    ['export', 'nosuch', '--out', 'policy'],
    ['report', 'nosuch'],
    ['dashboard', 'nosuch'],
    ['doctor', 'nosuch'],
  ]
  process = subprocess.run(
    [sys.executable, '-c', WITHOUT_JAX],
    cwd=tmp_path, input=json.dumps(arguments), capture_output=True, text=True, check=True,
  )  # fmt: skip
  rows, heavy = json.loads(process.stdout)
  assert heavy == []
  for given, row in zip(arguments, rows, strict=True):
    code, out, err = row
    assert (code, out, err.count('\n')) == (2, '', 1), given
    if '--run' in given:
      assert f'--run {given[2]}: cannot be ' in err
  assert [path.name for path in tmp_path.iterdir()] == ['interpolation.yaml']


@pytest.mark.parametrize('name', ['gymnasium/CartPole', 'catch'])
def test_config_of_a_known_environment(name, capsys):
  assert run('config', '--env', name) == 0
  assert f'name: {name}' in capsys.readouterr().out
  assert run('config', '--env', 'catch', '--set', 'environment.nosuch=1') == 2


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(folder_lib.time, 'strftime', lambda form: 'now')
  with contextlib.ExitStack() as stack:
    config = presets.laptop('catch')
    names = [stack.enter_context(folder_lib.claimed(config)).name for _ in range(3)]
  assert names == ['catch-now', 'catch-now-2', 'catch-now-3']
  assert not list(tmp_path.iterdir())  # nothing was written into them


OWN = """
from hephaestus.actors.environments import catch, environment

class Broken(catch.Catch):
  def step(self, key, state, action):
    raise KeyError('the deck is empty')

class Wrong(catch.Catch):
  def step(self, key, state, action):
    return state, environment.transition(0.0, self.deck)

class Abstract(environment.Environment):
  observation_spec = action_spec = reset = step = None
"""


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('Broken', "'the deck is empty' (KeyError at FILE:6, in step)"),
    ('Wrong', "'Wrong' object has no attribute 'deck' (AttributeError at FILE:10, in step)"),
    ('Abstract', "environment.name='own_Abstract:Abstract': the class lacks max_steps: attributes"),
    ('Syntax', '(SyntaxError at FILE:'),
  ],
)
def test_mistake_in_own_environment_is_one_line_that_names_its_place(
  tmp_path, folder, capsys, monkeypatch, name, words
):
  path = tmp_path / f'own_{name}.py'
  path.write_text(OWN + 'b = = 2\n' * (name == 'Syntax'))
  monkeypatch.syspath_prepend(tmp_path)
  assert run('train', '--run', folder, '--env', f'{path.stem}:{name}') == 2
  message = capsys.readouterr().err
  assert words.replace('FILE', str(path)) in message and message.count('\n') == 1


def test_process_is_set_up_before_an_own_environment_may_start_jax(tmp_path, folder, monkeypatch):
  path = tmp_path / 'own_early.py'
  seen = "pathlib.Path(__file__).with_suffix('.flags').write_text(os.environ.get('XLA_FLAGS', ''))"
  path.write_text(f'import os, pathlib\n{seen}\n')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  assert run('train', '--fused', '--run', folder, '--env', 'own_early:Missing') == 2
  assert process.AUTOTUNING in path.with_suffix('.flags').read_text()


def test_error_of_ours_keeps_its_traceback(folder, monkeypatch):
  def fail(arguments):
    raise KeyError('ours')

  monkeypatch.setattr(request, 'make_config', fail)
  monkeypatch.setattr(user_errors, '_is_own', lambda file: False)  # `fail` is in this file
  with pytest.raises(KeyError, match='ours'):
    run('train', '--run', folder)


def test_steps_are_read_as_people_write_them(capsys):
  read = lambda text: main.parse(['hephaestus', 'train', '--steps', text]).steps
  assert [read('1e5'), read('100_000'), read('7')] == [100_000, 100_000, 7]
  for text in ('1.5', 'many', 'inf'):
    with pytest.raises(SystemExit) as ended:
      read(text)
    assert ended.value.code == 2
    assert f"'{text}': write a whole number, such as 100000 or 1e5" in capsys.readouterr().err


def test_ctrl_c_before_training_is_one_line(monkeypatch, capsys, folder):
  def interrupt(arguments):
    raise KeyboardInterrupt

  monkeypatch.setattr(request, 'make_config', interrupt)
  assert run('train', '--run', folder) == 130
  assert capsys.readouterr().err == 'stopped\n'


def test_help_of_train_lists_basic_keys(capsys):
  with pytest.raises(SystemExit) as ended:
    run('train', '--help')
  assert ended.value.code == 0
  out = capsys.readouterr().out
  assert all(f'  {key} ' in out for key in dreamer.BASIC)
  assert '`hephaestus config`' in out and 'helpfull' not in out


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['train', '--foo'], 'train: unrecognized arguments: --foo; did you mean --from?; see'),
    (['train', '--stpes=3'], 'train: unrecognized arguments: --stpes=3; did you mean --steps '),
    (['train', 'catch'], 'train: unrecognized arguments: catch; did you mean --env catch?; see'),
    (['trian'], "there is no command 'trian'; did you mean train? known are: bench, "),
  ],
)
def test_unknown_arguments_end_with_code_two_and_a_guess(arguments, message, capsys):
  with pytest.raises(SystemExit) as ended:
    run(*arguments)
  assert ended.value.code == 2
  error = capsys.readouterr().err
  assert message in error and error.count('\n') == 1


def test_closed_pipe_ends_without_message():
  reading, writing = os.pipe()
  os.close(reading)
  with open(writing, 'w') as gone:
    command = [sys.executable, '-m', 'hephaestus.launch.main', 'config']
    ended = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, timeout=120)
  assert (ended.returncode, ended.stderr) == (141, b'')


def test_run_with_a_key_of_another_version_is_refused_in_one_line(folder, capsys):
  folder_lib.open_run(folder, presets.laptop('catch'))
  path = folder / 'config.yaml'
  old = path.read_text().replace('agent:\n', 'agent:\n  levels: 0\n')
  path.write_text(old)
  assert run('train', '--run', folder) == 2
  message = capsys.readouterr().err
  assert message.startswith(f'hephaestus train: {path}: is not a config of this version')
  assert "'levels'" in message and message.count('\n') == 1
  assert path.read_text() == old


def test_checkpoint_of_another_network_is_refused_before_anything_starts(folder, capsys):
  folder_lib.open_run(folder, presets.laptop('catch'))
  with contextlib.closing(checkpoint.Checkpointer(folder / 'checkpoints')) as saved:
    saved.save(3, {'weights': np.zeros(2, np.float32)})
    saved.wait()
  assert run('train', '--run', folder) == 2
  output, message = capsys.readouterr()
  assert not output
  assert message.startswith(f'hephaestus train: checkpoint {folder / "checkpoints" / "3"}: ')
  assert 'a version whose network differs; choose another run folder' in message
  assert message.count('\n') == 1


def test_folder_in_use_is_refused_and_keeps_its_config(folder, capsys):
  folder_lib.open_run(folder, presets.laptop('catch'))
  before = (folder / 'config.yaml').read_text()
  with folder_lib.only_one(folder):
    assert run('train', '--run', folder, '--steps', 1000) == 2
  assert 'is being trained already' in capsys.readouterr().err
  assert (folder / 'config.yaml').read_text() == before


def test_port_in_use_is_named(folder, capsys):
  with socket.socket(socket.AF_INET6) as taken:
    taken.bind(('::', 0))
    taken.listen()
    port = taken.getsockname()[1]
    assert run('train', '--run', folder, '--set', f'replay.port={port}') == 2
  assert f'replay.port={port}: cannot be used' in capsys.readouterr().err


def test_inspect_names_missing_run(tmp_path, folder, capsys):
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    dead = f'127.0.0.1:{probe.getsockname()[1]}'
  assert run('inspect', dead) == 2
  assert f'no replay server answered at {dead}' in capsys.readouterr().err
  assert run('inspect', tmp_path) == 2
  assert 'is not the folder of a run' in capsys.readouterr().err
  assert run('inspect', tmp_path / 'gone') == 2
  assert 'neither the folder of a run nor HOST:PORT' in capsys.readouterr().err
  folder_lib.open_run(folder, presets.laptop('catch'))
  assert run('inspect', folder) == 2
  assert 'was never started' in capsys.readouterr().err


def test_evaluate_names_missing_checkpoint(tmp_path, folder, capsys):
  assert run('evaluate', tmp_path) == 2
  assert 'is not the folder of a run' in capsys.readouterr().err
  folder_lib.open_run(folder, presets.laptop('catch'))
  assert run('evaluate', folder) == 2
  assert 'nothing has been saved yet' in capsys.readouterr().err
  (folder / 'checkpoints' / '3').mkdir()
  assert run('evaluate', folder) == 2
  assert 'no checkpoint is intact of 3' in capsys.readouterr().err


def test_file_in_place_of_a_folder_of_a_run_is_named(folder, capsys):
  folder_lib.open_run(folder, presets.laptop('catch'))
  (folder / 'videos').rmdir()
  (folder / 'videos').write_bytes(b'')
  assert run('train', '--run', folder) == 2
  assert f'cannot be written to (File exists: {folder / "videos"})' in capsys.readouterr().err


def test_command_says_that_it_imports_before_it_imports(tmp_path):
  (tmp_path / 'jax.py').write_text('import sys\nsys.exit("imported")\n')
  variables = os.environ | {
    'PYTHONPATH': os.pathsep.join(filter(None, [str(tmp_path), os.environ.get('PYTHONPATH')]))
  }
  said = subprocess.run(
    [sys.executable, '-m', 'hephaestus.launch.main', 'inspect', 'run'],
    cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60,
  )  # fmt: skip
  assert said.stderr.splitlines()[0] == f'hephaestus inspect: {flags.IMPORTING}'


def test_resume_takes_what_is_not_given_from_the_folder(folder):
  agent = 'ppo'
  made = config.of_preset(agent, 'gpu', 'catch')
  made = config.override(made, ['environment.rows=7', 'seed=7', 'max_environment_steps=9'])
  folder_lib.open_run(folder, made)

  def resumed(*words):
    return request.make_config(
      request.of(main.parse(['hephaestus', 'train', '--run', str(folder), *words]))
    )

  assert resumed('--env', 'catch') == resumed('--agent', agent) == made
  assert resumed('--preset', 'gpu') == made
  differences = config.conflicts(made, resumed('--preset', 'laptop'))
  assert differences and not any('agent_name' in each or 'seed' in each for each in differences)


def test_background_command_stops_at_sigint(tmp_path):
  """A shell starts background programs with SIGINT ignored."""
  (tmp_path / 'blocking.py').write_text(
    'import time\nprint("ready", flush=True)\ntime.sleep(600)\n'  # while it is imported
  )
  process = subprocess.Popen(
    ['sh', '-c', 'trap "" INT; exec "$@"', '', HEPHAESTUS, 'environments', 'blocking:Environment'],
    cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )  # fmt: skip
  assert process.stdout.readline() == 'ready\n'
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=60)
  assert process.returncode == 130
