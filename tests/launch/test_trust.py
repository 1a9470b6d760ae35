"""Run folders of others: what they name is not imported, and nothing outside of them is touched."""

import contextlib
import subprocess
import sys

import pytest

import hephaestus
from hephaestus.actors import environments
from hephaestus.launch import config as launch_config
from hephaestus.launch import main


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


AGENT = {'agent_name': 'evil:Agent'}
ENVIRONMENT = {'environment': {'name': 'evil:Trap'}}
COMMANDS = {
  'train': ['train', '--run'],
  'config': ['config', '--run'],
  'config of a file': ['config', '--config'],
  'from': ['train', '--from'],
  'evaluate': ['evaluate'],
  'evaluate at random': ['evaluate', '--random'],
  'watch': ['watch'],
  'export': ['export', '--out', 'out'],
  'doctor': ['doctor'],
  'dreams': ['bench', 'dreams'],
}
READERS = {'inspect': ['inspect'], 'report': ['report'], 'dashboard': ['dashboard']}


@pytest.mark.parametrize(
  ('command', 'changes'),
  [
    *((each, AGENT) for each in (COMMANDS | READERS).values()),
    *((each, ENVIRONMENT) for each in COMMANDS.values()),
  ],
  ids=[*(f'{name}, agent' for name in COMMANDS | READERS), *(f'{name}, env' for name in COMMANDS)],
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
  assert run('evaluate', folder, '--episodes', 1, '--random', '--trust') == 0
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
