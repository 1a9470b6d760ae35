"""Check: one number of a diagnosis, its acceptable range, and the likely cause outside of it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import rich.console
import rich.table

from hephaestus.launch.inspect import console as console_lib


class Check(NamedTuple):
  """One number of a diagnosis.

  Attributes:
    part: part of the system that the number describes, such as 'world model'.
    name: name of the number, in words.
    value: the number; None where it could not be measured.
    limit: acceptable range, in words, such as 'at most 0.5'; '' if any value is fine.
    is_fine: whether `value` is within the range; True if it could not be measured.
    cause: likely cause of a value outside of the range; '' where it is fine.
    remedy: the setting to try; '' where it is fine.
  """

  part: str
  name: str
  value: float | None
  limit: str = ''
  is_fine: bool = True
  cause: str = ''
  remedy: str = ''


def judge(
  part: str,
  name: str,
  value: Any,
  *,
  above: float | None = None,
  below: float | None = None,
  cause: str,
  remedy: str,
) -> Check:
  """Checks that a number lies between two limits; one that could not be measured is fine.

  Args:
    value: the number; None or NaN if it could not be measured.
    above: smallest acceptable value; None for no limit.
    below: largest acceptable value; None for no limit.
    cause: likely cause of a value outside of the limits.
    remedy: setting to try in that case.

  Returns:
    The check; with `cause` and `remedy` only if the number is outside of the limits.
  """
  known = note(part, name, value).value
  pairs = (('at least', above), ('at most', below))
  limits = [f'{word} {limit:.3g}' for word, limit in pairs if limit is not None]
  is_fine = known is None or (
    (above is None or known >= above) and (below is None or known <= below)
  )
  words = ('', '') if is_fine else (cause, remedy)
  return Check(part, name, known, ', '.join(limits), is_fine, *words)


def note(part: str, name: str, value: Any) -> Check:
  """Makes a check of a number without limits, which is always fine; NaN becomes None."""
  return Check(part, name, None if value is None or math.isnan(value) else float(value))


def findings(checks: Sequence[Check]) -> list[Check]:
  """Returns the checks that are not fine."""
  return [check for check in checks if not check.is_fine]


def show(target: str, checks: Sequence[Check], console: rich.console.Console | None = None) -> None:
  """Prints all checks as a table, then each finding with its cause and remedy.

  Args:
    target: name of the run or environment, for the summary line.
    console: where to print; stdout by default.
  """
  console = console or console_lib.make()
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
