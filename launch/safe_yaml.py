"""Reads YAML that may be of somebody else: config files, hosts files, and values of --set."""

import pathlib
import re
from typing import Any

import yaml
from omegaconf import OmegaConf

MOST_CHARACTERS = 1 << 18  # a hosts file of a thousand hosts has about 100,000
MOST_NESTED = 100  # dictionaries and lists
_CONTROL = re.compile(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]')  # a terminal obeys these


def read(path: pathlib.Path, name: str) -> Any:
  """Parses a file as `parse` does; also OSError if it cannot be read."""
  with open(path, errors='replace') as file:
    return parse(file.read(MOST_CHARACTERS + 1), name)


def parse(text: str, name: str) -> Any:
  """Parses YAML to nested dictionaries and lists of plain types; a text such as '${a}' stays that text.

  ValueError, which begins with `name`, if it is none, too long, or nested too deeply.
  """
  try:
    _check(text)
    return OmegaConf.to_container(OmegaConf.create(text))
  except Exception as error:  # parsers raise many types for a broken file
    reason = str(error).split('\n')[0]
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
      reason = f'line {error.problem_mark.line + 1}: {error.problem}'
    raise ValueError(f'{name}: is not YAML ({reason})') from None


def parse_value(text: str) -> Any:
  """Parses one value as `parse` does; errors of YAML or OmegaConf if it is none."""
  _check(text)
  found: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f'value={text}']))
  return found['value']


def literal(value: Any) -> Any:
  """Escapes the texts in a tree of plain types, in which OmegaConf then finds no '${a}' to resolve."""
  if isinstance(value, dict):
    return {key: literal(each) for key, each in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(map(literal, value))
  if isinstance(value, str):
    return re.sub(r'(\\*)\$\{', lambda found: 2 * found[1] + r'\${', value)
  return value


def _check(text: str) -> None:
  """Raises YAMLError for control characters, or where the parser would exceed its stack, or be slow."""
  if len(text) > MOST_CHARACTERS:
    raise yaml.YAMLError(f'it has more than {MOST_CHARACTERS:,} characters')
  depth = 0
  for event in yaml.parse(text, Loader=yaml.SafeLoader):  # one after the other, without recursion
    if isinstance(event, yaml.ScalarEvent) and _CONTROL.search(event.value):
      raise yaml.YAMLError(f'{event.value[:40]!r} has a control character')
    depth += isinstance(event, yaml.CollectionStartEvent)
    depth -= isinstance(event, yaml.CollectionEndEvent)
    if depth > MOST_NESTED:
      raise yaml.YAMLError(f'it is nested more than {MOST_NESTED} deep')
