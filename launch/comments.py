"""Comments on the fields of dataclasses, read from docstrings and sources."""

import dataclasses
import inspect
import re


def of(kind: type) -> dict[str, str]:
  """Reads a comment for each field of a dataclass.

  Returns:
    Name of a field -> its text under `Attributes:` of the docstring, or else the comment on its line.
  """
  found: dict[str, str] = {}
  for each in reversed(kind.__mro__):
    if dataclasses.is_dataclass(each):
      found |= _comments_on_lines(each) | attributes(each.__doc__ or '')
  return found


def attributes(docstring: str) -> dict[str, str]:
  """Name -> text, in one line, of each entry under `Attributes:` of a docstring."""
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


def _comments_on_lines(kind: type) -> dict[str, str]:
  try:
    source = inspect.getsource(kind)
  except (OSError, TypeError):  # made by a program, or installed without its source
    return {}
  return dict(re.findall(r'^\s+(\w+): .*  # (.+)$', source, re.MULTILINE))
