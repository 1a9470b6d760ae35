"""Compares two JSON files of `hephaestus bench`, and marks figures that are worse."""

import json
import math
import pathlib
import sys
from typing import NamedTuple

from hephaestus.learner import bench

_LOWER_IS_BETTER = ('s', 'us', 'bytes', 'us of CPU/sequence', 's of CPU', 's of CPU/min')
_OF_THE_MACHINE = ('copy', 'matmul/')  # prefixes of limits of the machine


class Change(NamedTuple):
  """One figure before and after.

  Attributes:
    name: of the figure.
    old: its value before.
    new: its value after.
    unit: of both.
    ratio: new / old; None where old is 0.
    verdict: 'worse', 'better', or '' if it changed by less than the threshold, or has no better
      direction.
  """

  name: str
  old: float
  new: float
  unit: str
  ratio: float | None
  verdict: str


def read(path: pathlib.Path) -> dict[str, bench.Figure]:
  """Reads the figures of a file of `bench TARGET --json`, by name.

  Raises:
    ValueError: it cannot be read, or has other content.
  """
  try:
    rows = json.loads(path.read_text())
  except OSError as error:
    raise ValueError(f'{path}: cannot be read ({error.strerror})') from None
  except ValueError:  # neither JSON nor, perhaps, text
    raise ValueError(f'{path}: is no JSON; write it with `hephaestus bench ... --json`') from None
  fields = set(bench.Figure._fields)
  figures = {}
  for row in rows if isinstance(rows, list) else [None]:
    if not isinstance(row, dict) or set(row) != fields:
      raise ValueError(
        f'{path}: is no list of figures; write it with `hephaestus bench ... --json`'
      )
    words = all(isinstance(row[field], str) for field in ('name', 'unit', 'machine'))
    value = row['value']
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not words or not number or not math.isfinite(value):
      raise ValueError(f'{path}: {row["name"]!r} has value {value!r}: a finite number is needed')
    if row['name'] in figures:
      raise ValueError(f'{path}: {row["name"]} is there twice; compare one call with one call')
    figures[row['name']] = bench.Figure(**row)
  return figures


def compare(
  old: dict[str, bench.Figure], new: dict[str, bench.Figure], threshold: float
) -> list[Change]:
  """Compares the figures that both files have, by name.

  Rates should rise; seconds and bytes should fall. Counts and limits of the machine have no verdict.

  Args:
    old: figures before.
    new: figures after.
    threshold: share of the old value by which a figure may be worse.

  Raises:
    ValueError: a threshold outside of [0, 1), no figure in common, or different units.
  """
  if not 0 <= threshold < 1:
    raise ValueError(f'--threshold {threshold:g}: must be at least 0 and below 1')
  if not old.keys() & new.keys():
    raise ValueError('OLD and NEW: have no figure in common; give files of the same target')
  changes = []
  for name in sorted(old.keys() & new.keys()):
    before, after, unit = old[name].value, new[name].value, new[name].unit
    if old[name].unit != unit:
      raise ValueError(f'{name}: is in {old[name].unit!r} and in {unit!r}; measure it again')
    ratio = after / before if before else None
    falls, rises = after < before * (1 - threshold), after > before * (1 + threshold)
    if unit in _LOWER_IS_BETTER:
      falls, rises = rises, falls
    elif not unit.endswith('/s') or name.startswith(_OF_THE_MACHINE):
      falls = rises = False
    verdict = 'worse' if falls else 'better' if rises else ''
    changes.append(Change(name, before, after, unit, ratio, verdict))
  return changes


def show(old_path: pathlib.Path, new_path: pathlib.Path, threshold: float) -> int:
  """Prints a table, and a warning if the machines differ.

  Returns:
    1 if something is worse, else 0.

  Raises:
    ValueError: as `read` and `compare`.
  """
  old, new = read(old_path), read(new_path)
  changes = compare(old, new, threshold)
  machines = [
    ', '.join(sorted({figure.machine for figure in each.values()})) for each in (old, new)
  ]
  if machines[0] != machines[1]:
    print(f'warning: {machines[0]} is compared with {machines[1]}', file=sys.stderr)
  rows = [('', 'old', 'new', '', 'ratio', '')]
  for name, before, after, unit, ratio, verdict in changes:
    shown = '-' if ratio is None else f'{ratio:.3f}'
    rows.append((name, _number(before), _number(after), unit, shown, verdict))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    left = (True, False, False, True, False, True)
    cells = [
      cell.ljust(width) if to_the_left else cell.rjust(width)
      for cell, width, to_the_left in zip(row, widths, left, strict=True)
    ]
    print('  '.join(cells).rstrip())
  for path, names in ((old_path, old.keys() - new.keys()), (new_path, new.keys() - old.keys())):
    for name in sorted(names):
      print(f'{name}: only in {path}')
  return int(any(change.verdict == 'worse' for change in changes))


def _number(value: float) -> str:
  """A number with separators of thousands, or with four digits."""
  whole = abs(value) >= 1000 or value == int(value)
  return f'{value:,.0f}' if whole else f'{value:.4g}'
