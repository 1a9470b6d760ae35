"""The console of stdout, and tables for it."""

import itertools
from collections.abc import Sequence

import rich.console
import rich.text

PIPE_WIDTH = 10_000  # characters, more than any table has


def make() -> rich.console.Console:
  """Makes the console; in a pipe or a file it is so wide that no table cuts or wraps its cells."""
  console = rich.console.Console()
  return console if console.is_terminal else rich.console.Console(width=PIPE_WIDTH)


def table(
  headings: Sequence[str], blocks: Sequence[Sequence[Sequence[str]]], left: int
) -> rich.text.Text:
  """Text of headings, and of blocks of rows below them, with a ruled line above each block.

  `rich.table` takes ten times as long, on the cores that the run needs.

  Args:
    headings: headings of the columns.
    blocks: rows of cells of each block.
    left: number of columns, from the first, that are aligned left; the others are aligned right.
  """
  columns = zip(headings, *itertools.chain(*blocks), strict=True)
  widths = [max(map(len, column)) for column in columns]

  def line(row: Sequence[str]) -> str:
    cells = zip(row, widths, strict=True)
    return '  '.join(
      cell.ljust(width) if at < left else cell.rjust(width)
      for at, (cell, width) in enumerate(cells)
    )

  text = rich.text.Text.assemble((line(headings), 'bold'), no_wrap=True)
  for block in blocks:
    text.append('\n'.join(['', '─' * len(line(headings)), *map(line, block)]))
  return text
