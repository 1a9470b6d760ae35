"""Check: one number of a diagnosis, its acceptable range, and the likely cause outside of it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.table

from hephaestus.launch.inspect import console as console_lib


class Check(NamedTuple):
  """One number of a diagnosis."""

  part: str  # of the system, such as 'world model'
  name: str  # in words
  value: float | None  # None where it could not be measured
  limit: str = ''  # acceptable range, in words, such as 'at most 0.5'; '' if any value is fine
  is_fine: bool = True  # also if it could not be measured
  cause: str = ''  # likely one of a value outside of the range
  remedy: str = ''  # the setting to try


def judge(
  part: str,
  name: str,
  value: Any,
  *,
  above: float | None = None,
  below: float | None = None,
  cause: str = '',
  remedy: str = '',
) -> Check:
  """Checks that a number is at least `above` and at most `below`; None and NaN, not measured, are fine."""
  known = None if value is None or math.isnan(value) else float(value)
  pairs = (('at least', above), ('at most', below))
  limits = ', '.join(f'{word} {limit:.3g}' for word, limit in pairs if limit is not None)
  if known is None or ((above is None or known >= above) and (below is None or known <= below)):
    return Check(part, name, known, limits)
  return Check(part, name, known, limits, False, cause, remedy)


def mean(values: Any) -> float:
  """Mean of some values; NaN of none."""
  return float(np.mean(values)) if len(values) else float('nan')


def findings(checks: Sequence[Check]) -> list[Check]:
  """Returns the checks that are not fine."""
  return [check for check in checks if not check.is_fine]


def show(target: str, checks: Sequence[Check]) -> None:
  """Prints all checks of a run or environment as a table, then each finding with its cause and remedy."""
  console = console_lib.make()
  table = rich.table.Table(box=None, header_style='bold')
  for heading in ('part', 'number', 'value', 'fine'):
    table.add_column(heading, justify='right' if heading == 'value' else 'left')
  part = None
  parts = list(dict.fromkeys(check.part for check in checks))
  for check in sorted(checks, key=lambda check: parts.index(check.part)):
    style = '' if check.is_fine else 'bold red'
    value = '-' if check.value is None else f'{check.value:,.3g}'
    table.add_row(check.part * (check.part != part), check.name, value, check.limit, style=style)
    part = check.part
  console.print(table)
  found = findings(checks)
  console.print(f'{target}: {len(found) or "no"} finding{"s" * (len(found) != 1)}')
  for check in found:
    console.print(text(check), highlight=False, soft_wrap=True)


def text(check: Check) -> str:
  """Describes a check that is not fine in one line, with its cause and remedy."""
  shown = '' if check.value is None else f' {check.value:,.3g}'
  limit = f' ({check.limit} is fine)' if check.limit else ''
  return f'{check.part}, {check.name}{shown}{limit}: {check.cause}; {check.remedy}'
