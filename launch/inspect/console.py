"""The console of stdout."""

import rich.console

PIPE_WIDTH = 10_000  # characters, more than any table has


def make() -> rich.console.Console:
  """Makes the console; in a pipe or a file it is so wide that no table cuts or wraps its cells."""
  console = rich.console.Console()
  return console if console.is_terminal else rich.console.Console(width=PIPE_WIDTH)
