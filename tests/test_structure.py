"""Imports run one way between the folders of the code, wherever in a module they stand."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
ENVIRONMENTS = 'actors.environments'
MAY_IMPORT = {
  'agents': set(),
  'replay': set(),
  ENVIRONMENTS: set(),
  'actors': {'agents', 'replay', ENVIRONMENTS},
  'learner': {'agents', 'replay'},
  'launch': {'agents', 'replay', ENVIRONMENTS, 'actors', 'learner'},
}
"""The folders from which the code of each folder may import. Data travels the other way by hand-over."""


def folder(module):
  """The folder of a module `actors.environments.catch`; environments are a folder of their own."""
  return ENVIRONMENTS if f'{module}.'.startswith(f'{ENVIRONMENTS}.') else module.partition('.')[0]


def imported(text):
  """The project's modules that the text of a module imports, by names such as `agents.returns`."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, 'imports are absolute'
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    else:
      continue
    yield from (name[11:] for name in names if name.startswith('hephaestus.'))


def forbidden(module, text):
  """Imports that the direction forbids in a module `agents.returns` of this text."""
  source = folder(module)
  allowed = MAY_IMPORT[source] | {source, '__version__'}
  return [f'{module} -> {target}' for target in imported(text) if folder(target) not in allowed]


def test_folders_import_in_one_direction():
  found = []
  for top in {name.partition('.')[0] for name in MAY_IMPORT}:
    for path in (ROOT / top).rglob('*.py'):
      module = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
      found += forbidden(module, path.read_text())
  assert found == []


def test_import_against_the_direction_is_found():
  text = 'def load():\n  from hephaestus.actors import actor\n  import hephaestus.agents.returns\n'
  for module in ('actors.environments.catch', 'replay.tables'):
    assert forbidden(module, text) == [
      f'{module} -> actors.actor', f'{module} -> agents.returns'
    ]  # fmt: skip
  assert forbidden('launch.main', text) == forbidden('actors.episodes', text) == []
