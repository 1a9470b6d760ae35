"""Run folders of others: what they name is not imported, and nothing outside of them is touched."""

import contextlib
import itertools
import json
import shutil
import subprocess
import sys

import pytest

import hephaestus
from hephaestus.actors import environments
from hephaestus.launch import config as launch_config
from hephaestus.launch import main
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.report import dashboard, panels


def run(*arguments):
  return main.run(main.parse(['hephaestus', *map(str, arguments)]))


@pytest.fixture
def evil(tmp_path, monkeypatch):
  """Path of a file that exists once the module `evil`, which is on the import path, was imported."""
  mark = tmp_path / 'imported'
  (tmp_path / 'evil.py').write_text(
    f'open({str(mark)!r}, "w").close()\n'
    'from hephaestus.actors.environments import catch\n'
    'from hephaestus.launch.agents import dreamer\n'
    'class Agent(dreamer.Dreamer):\n  name = "evil:Agent"\n'
    'class Trap(catch.Catch):\n  pass\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(environments.names, '_trusted', set())
  monkeypatch.setattr(environments.names, '_read', {})
  yield mark
  sys.modules.pop('evil', None)


@pytest.fixture
def stranger(dreamer, tmp_path):
  """Copies a finished run and changes its config, as somebody else may have made it."""

  def stranger(name, **changes):
    folder = tmp_path / name
    subprocess.run(['cp', '-r', dreamer.folder, folder], check=True)
    path = folder / 'config.yaml'
    content = launch_config.OmegaConf.load(path)
    path.write_text(
      launch_config.OmegaConf.to_yaml(launch_config.OmegaConf.merge(content, changes))
    )
    return folder

  return stranger


def test_modules_of_the_working_directory_are_found_only_for_a_name_of_ones_own(
  tmp_path, monkeypatch, capsys
):
  """Packages import optional modules, such as JAX its plugins, which a stranger's folder may hold."""
  monkeypatch.setattr(sys, 'path', [each for each in sys.path if each not in ('', str(tmp_path))])
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.py').write_text(
    'from hephaestus.actors.environments import catch\nclass Mine(catch.Catch):\n  pass\n'
  )
  assert run('config', '--env', 'catch') == 0
  assert run('inspect', '.') == 2
  assert str(tmp_path) not in sys.path
  assert run('config', '--env', 'mine:Mine') == 0
  assert sys.path[-1] == str(tmp_path)
  capsys.readouterr()
  sys.modules.pop('mine')


AGENT = {'agent_name': 'evil:Agent'}
ENVIRONMENT = {'environment': {'name': 'evil:Trap'}}
LOGGER = {'logger': 'evil:Trap'}
COMMANDS = {
  'train': ['train', '--run'],
  'config': ['config', '--run'],
  'config of a file': ['config', '--config'],
  'from': ['train', '--from'],
  'evaluate': ['evaluate'],
  'evaluate at random': ['evaluate', '--actions=random'],
  'watch': ['watch'],
  'export': ['export', '--out', 'out'],
  'doctor': ['doctor'],
  'dreams': ['bench', 'dreams'],
}
OF_ENVIRONMENT = ('train', 'evaluate at random', 'doctor')
READERS = {'inspect': ['inspect'], 'report': ['report'], 'dashboard': ['dashboard']}


@pytest.mark.parametrize(
  ('command', 'changes'),
  [
    *((each, AGENT) for each in (COMMANDS | READERS).values()),
    *((COMMANDS[name], ENVIRONMENT) for name in OF_ENVIRONMENT),
    (COMMANDS['train'], LOGGER),
    (COMMANDS['config of a file'], LOGGER),
  ],
  ids=[
    *(f'{name}, agent' for name in COMMANDS | READERS),
    *(f'{name}, env' for name in OF_ENVIRONMENT),
    'train, logger',
    'config of a file, logger',
  ],
)
def test_names_of_a_folder_are_not_imported_without_trust(evil, stranger, capsys, command, changes):
  folder = stranger('theirs', **changes)
  before = sorted(folder.rglob('*'))
  target = folder / 'config.yaml' if '--config' in command else folder
  assert run(*command, target) == 2
  error = capsys.readouterr().err
  assert 'would import and run the module evil' in error
  assert '--trust' in error
  assert error.count('\n') == 1
  assert not evil.exists()
  assert sorted(folder.rglob('*')) == before


def test_trust_or_a_name_on_the_command_line_imports_it(evil, stranger, capsys):
  folder = stranger('theirs', **ENVIRONMENT)
  with contextlib.suppress(OSError):
    evil.unlink()
  assert run('config', '--run', folder, '--env', 'evil:Trap') == 0
  assert run('evaluate', folder, '--episodes', 1, '--actions', 'random', '--trust') == 0
  assert evil.exists()
  assert hephaestus.load(stranger('again', **ENVIRONMENT), trust=True).environment is not None
  assert capsys.readouterr().err == ''


def test_python_names_of_a_folder_are_not_imported_without_trust(evil, stranger):
  folder = stranger('theirs', **ENVIRONMENT)
  for read in (hephaestus.load, lambda path: hephaestus.train(run=path, steps=600)):
    with pytest.raises(ValueError, match=r'module evil;.*trust=True'):
      read(folder)
  assert not evil.exists()


@pytest.mark.parametrize('name', ['psutil:Popen', 'dm_env/psutil:Popen', 'jax.numpy:ndarray'])
def test_class_is_checked_before_it_is_called(tmp_path, name):
  with pytest.raises(ValueError, match=r'environment.name=.*[eE]nvironment'):
    environments.make(name, args=['touch', str(tmp_path / 'touched')])
  assert not (tmp_path / 'touched').exists()


@pytest.mark.parametrize('entry', ['checkpoints/7', 'metrics/learner.jsonl', 'origin', 'lock'])
def test_links_of_a_folder_are_refused_by_name(stranger, tmp_path, capsys, entry):
  folder, outside = stranger('theirs'), tmp_path / 'outside'
  (outside / 'thesis').mkdir(parents=True)
  (outside / 'thesis' / 'text').write_text('text')
  at = folder / entry
  subprocess.run(['rm', '-rf', at], check=True)
  at.symlink_to(outside if entry == 'checkpoints/7' else outside / 'thesis' / 'text')
  before = [(path, path.lstat().st_mtime_ns) for path in sorted(outside.rglob('*'))]
  for command in (
    ['train', '--run', folder, '--steps', 600], ['evaluate', folder], ['inspect', folder],
    ['report', folder], ['dashboard', folder], ['doctor', folder],
  ):  # fmt: skip
    assert run(*command) == 2
    error = capsys.readouterr().err
    assert f'its entry {entry} is a symbolic link' in error and error.count('\n') == 1
  assert [(path, path.lstat().st_mtime_ns) for path in sorted(outside.rglob('*'))] == before
  assert (outside / 'thesis' / 'text').read_text() == 'text'


def test_entry_that_becomes_a_link_is_not_followed(stranger, tmp_path):
  """A folder may change while a page shows it."""
  folder, secret = stranger('theirs'), tmp_path / 'secret.mp4'
  secret.write_text('secret')
  shown = dashboard.Dashboard([folder])
  (folder / 'videos' / '9.mp4').symlink_to(secret)
  (folder / 'metrics' / 'actor-9.jsonl').symlink_to(secret)
  (described,) = shown.runs()['runs']
  assert not [video for video in described['videos'] if '9.mp4' in video['source']]
  assert shown.video(0, '9.mp4') is None
  assert described['messages'] == ['1 line of its metrics is damaged and left out']


def test_entry_whose_name_a_terminal_obeys_is_refused(tmp_path, capsys):
  folder_lib.open_run(tmp_path / 'run', launch_config.override(presets.laptop('catch'), []))
  (tmp_path / 'run' / 'videos' / f'{TITLE}.gif').write_bytes(b'')
  assert run('config', '--run', tmp_path / 'run') == 2
  printed = capsys.readouterr().err
  assert 'has a control character' in printed and TITLE[:4] not in printed


def test_error_does_not_let_a_terminal_obey_a_name(tmp_path, capsys):
  assert run('inspect', tmp_path / TITLE) == 2
  printed = capsys.readouterr().err
  assert TITLE[:4] not in printed and r'\x1b]0;title' in printed


def test_broken_run_does_not_hide_healthy_ones(stranger, tmp_path, monkeypatch):
  healthy, broken = stranger('healthy'), stranger('broken')
  (broken / 'checkpoints' / '²').mkdir()
  with open(broken / 'metrics' / 'events.jsonl', 'a') as file:
    file.write('{"time": 1e400, "kind": "started"}\n{"time": 1, "kind": "started", "pid": "one"}\n')
  shown = dashboard.Dashboard([broken, healthy])
  described = shown.runs()['runs']
  assert '2 lines of its metrics are damaged and left out' in described[0]['messages']
  assert described[1]['state'] == 'finished'
  assert json.loads(shown.curves('environment_step'))['groups']
  monkeypatch.setattr(panels, '_nodes', lambda run, running: 1 // (run.folder != broken))
  assert [each['state'] for each in shown.runs()['runs']] == ['broken', 'finished']


LAUGHS = 'a: &a [x,x,x,x,x,x,x,x,x]\n' + ''.join(
  f'{after}: &{after} [{",".join([f"*{before}"] * 9)}]\n'
  for before, after in itertools.pairwise('abcdefghi')
)
TITLE = '\x1b]0;title of the terminal\x07'


@pytest.mark.parametrize(
  ('entry', 'content'),
  [
    ('config.yaml', LAUGHS.encode()),
    ('config.yaml', f'environment: {{name: {json.dumps(TITLE)}}}\n'.encode()),
    ('address', b'unix:/tmp/none\n'),
    ('origin', b'/etc@3\n'),
    ('collected.json', b'[' * 100_000),
    ('counts.jsonl', b'{"time": 1e10, "learner_step": "x"}\n'),
    ('metrics/learner.jsonl', b'[' * 200_000 + b'\n'),
    ('metrics/actor-99999999999999999999.jsonl', b'{"time": 1, "environment_step": 5}\n'),
    (
      'metrics/events.jsonl',
      json.dumps({'time': 1, 'kind': 'started', 'name': TITLE, 'pid': 1}).encode() + b'\n',
    ),
    ('checkpoints', b'no folder'),
  ],
)
def test_damaged_entry_is_skipped_or_named(tmp_path, capsys, entry, content):
  folder = tmp_path / 'run'
  several = launch_config.override(presets.laptop('catch'), ['learner.fused=false'])
  folder_lib.open_run(folder, several)
  row = {'time': 1, 'environment_step': 8, 'learner_step': 2, 'episode_return': 0.5}
  for name in ('learner', 'evaluator'):
    (folder / 'metrics' / f'{name}.jsonl').write_text(json.dumps(row) + '\n')
  path = folder / entry
  if path.is_dir():
    shutil.rmtree(path)
  path.write_bytes(content)
  for command in (['config', '--run', folder], ['report', folder], ['inspect', folder]):
    code = run(*command)
    printed = capsys.readouterr()
    assert code == 0 or (code == 2 and printed.err.count('\n') <= 2 and str(folder) in printed.err)
    if entry == 'address':
      assert code == 2 * (command[0] == 'inspect')
    assert TITLE[:4] not in printed.out + printed.err
  with contextlib.suppress(ValueError):  # as it is shown where no run can be read
    dashboard.Dashboard([folder]).runs()
