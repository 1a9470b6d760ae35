"""Configuration files: reads the file of `--config`; writes a config as one, with comments on its keys."""

import ast
import dataclasses
import inspect
import io
import pathlib
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from hephaestus.launch import config as launch_config
from hephaestus.launch import records

PRESET = 'preset'


class ConfigFile(NamedTuple):
  """Content of a configuration file, which need not have all keys.

  Attributes:
    preset: name of the preset that gives the values which the file lacks; None if not given.
    agent: name of the agent, as given to `--agent`; None if not given.
    env: name of the environment, as given to `--env`; None if not given.
    values: all other values by their path, such as 'agent.gamma'.
  """

  preset: str | None = None
  agent: str | None = None
  env: str | None = None
  values: Mapping[str, Any] = {}


def read(path: pathlib.Path | None, agent: str | None = None) -> ConfigFile:
  """Reads a configuration file, which may be config.yaml of a run.

  Args:
    path: path of the file; None gives an empty content.
    agent: value of `--agent`, which overrides the file's; None if not given.

  Raises:
    ValueError: the file cannot be read or is no mapping, or its preset or agent is not a name.
  """
  if path is None:
    return ConfigFile()
  try:
    content: Any = launch_config.parse_yaml(path.read_text())
  except OSError as error:
    raise ValueError(f'--config {path}: cannot be read ({error.strerror})') from None
  except Exception as error:  # parsers raise many types for a broken file
    first_line = str(error).split('\n')[0]
    raise ValueError(f'--config {path}: is not YAML ({first_line})') from None
  if not isinstance(content, dict):
    raise ValueError(f'--config {path}: must be a mapping, as `hephaestus config` prints one')
  names = {key: content.pop(key, None) for key in (PRESET, launch_config.AGENT)}
  for key, name in names.items():
    if not isinstance(name, str | None):
      raise ValueError(f'--config {path}: {key}={name}: must be a name')
  values = dict(launch_config.leaves(content))
  env = values.pop('environment.name', None)
  records.read_names((names[launch_config.AGENT], env), f'--config {path}')
  agent = agent or names[launch_config.AGENT]
  return ConfigFile(names[PRESET], agent, env, values)


def to_yaml(config: launch_config.ExperimentConfig) -> str:
  """Converts a config to the text of a configuration file, with a comment on each key."""
  tree = {launch_config.AGENT: config.agent_name, **launch_config.to_tree(config)}
  text = OmegaConf.to_yaml(OmegaConf.create(tree))
  lines = text.splitlines()
  known = meanings(config)
  for key, line in _lines_of_keys(yaml.compose(text)):
    if key in known:
      lines[line] += f'  # {known[key]}'
  return '\n'.join(lines) + '\n'


def _lines_of_keys(node: yaml.Node, path: str = '') -> Iterator[tuple[str, int]]:
  """Yields (path, index of its line) of each key below a node, whose own path is `path`."""
  if isinstance(node, yaml.MappingNode):
    for key, value in node.value:
      name = f'{path}.{key.value}' if path else key.value
      yield name, key.start_mark.line
      yield from _lines_of_keys(value, name)
  elif isinstance(node, yaml.SequenceNode):
    for index, value in enumerate(node.value):
      yield from _lines_of_keys(value, f'{path}[{index}]')


def meanings(config: Any, path: str = '') -> dict[str, str]:
  """Collects the comments on all fields of a config.

  Args:
    config: a dataclass, which may hold others, also in lists.
    path: path of `config` itself, if it is a section of another one.

  Returns:
    Path of each field -> its comment, see `comments`.
  """
  found = {}
  known = comments(type(config))
  for field in dataclasses.fields(config):
    name = f'{path}.{field.name}' if path else field.name
    if field.name in known:
      found[name] = known[field.name]
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      found |= meanings(value, name)
    elif isinstance(value, list | tuple):
      parts = [
        meanings(each, f'{name}[{index}]')
        for index, each in enumerate(value)
        if dataclasses.is_dataclass(each)
      ]
      found |= {key: text for part in parts for key, text in part.items()}
  return found


def comments(kind: type) -> dict[str, str]:
  """Reads a comment for each field of a dataclass.

  Returns:
    Name of a field -> its text under `Attributes:` of the docstring, or else the comment beside it.
  """
  found: dict[str, str] = {}
  for each in reversed(kind.__mro__):
    if dataclasses.is_dataclass(each):
      found |= _beside_fields(each) | _attributes(each.__doc__ or '')
  return found


def _attributes(docstring: str) -> dict[str, str]:
  _, _, section = inspect.cleandoc(docstring).partition('\nAttributes:\n')
  entries: dict[str, str] = {}
  name = ''
  for line in section.split('\n'):
    indent = len(line) - len(line.lstrip())
    if not line.strip() or indent < 2:
      break
    if indent == 2:
      name, _, text = line.strip().partition(': ')
      entries[name] = text
    else:
      entries[name] += f' {line.strip()}'
  return {name: text.rstrip('.') for name, text in entries.items()}


def _beside_fields(kind: type) -> dict[str, str]:
  try:
    source = textwrap.dedent(inspect.getsource(kind))
  except (OSError, TypeError):  # made by a program, or installed without its source
    return {}
  by_line = {
    token.start[0]: token.string.lstrip('# ')
    for token in tokenize.generate_tokens(io.StringIO(source).readline)
    if token.type == tokenize.COMMENT and token.line.strip() != token.string
  }
  (definition,) = ast.parse(source).body
  assert isinstance(definition, ast.ClassDef)
  return {
    each.target.id: by_line[each.lineno]
    for each in definition.body
    if isinstance(each, ast.AnnAssign)
    and isinstance(each.target, ast.Name)
    and each.lineno in by_line
  }
