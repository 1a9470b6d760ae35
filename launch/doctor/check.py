"""Check: one number of a diagnosis, its threshold, and what to do where it is beyond."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import rich.console
import rich.table


class Check(NamedTuple):
  """One number of a diagnosis.

  Attributes:
    part: that it is of, such as 'world model'.
    name: of the number, in words.
    value: of it; None where it could not be measured.
    limit: the values that are fine, in words; '' where any is.
    is_fine: whether `value` is among them.
    cause: likely, in words; '' where it is fine.
    remedy: the setting to try; '' likewise.
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
    part: see `Check`.
    name: likewise.
    value: likewise; NaN is as None.
    above: smallest fine value; None for no limit.
    below: largest.
    cause: of one beyond.
    remedy: for it.
  """
  known = None if value is None or math.isnan(value) else float(value)
  pairs = (('at least', above), ('at most', below))
  limits = [f'{word} {limit:.3g}' for word, limit in pairs if limit is not None]
  is_fine = known is None or (
    (above is None or known >= above) and (below is None or known <= below)
  )
  words = ('', '') if is_fine else (cause, remedy)
  return Check(part, name, known, ', '.join(limits), is_fine, *words)


def note(part: str, name: str, value: Any) -> Check:
  """A number that has no limit."""
  return Check(part, name, None if value is None or math.isnan(value) else float(value))


def findings(checks: Sequence[Check]) -> list[Check]:
  """Those that are not fine."""
  return [check for check in checks if not check.is_fine]


def show(target: str, checks: Sequence[Check], console: rich.console.Console | None = None) -> None:
  """Prints all numbers as a table, and below it what was found."""
  console = console or rich.console.Console(width=100)
  table = rich.table.Table(box=None, header_style='bold')
  for heading, justify in (
    ('part', 'left'),
    ('number', 'left'),
    ('value', 'right'),
    ('fine', 'left'),
  ):
    table.add_column(heading, justify=justify)  # type: ignore[arg-type]
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
  """A finding in one line."""
  shown = '' if check.value is None else f' {check.value:,.3g}'
  limit = f' ({check.limit} is fine)' if check.limit else ''
  return f'{check.part}, {check.name}{shown}{limit}: {check.cause}; {check.remedy}'
