"""Describes an error in the user's own code by one line: message, type, file and line."""

import pathlib
import sysconfig
import traceback

PREFIX = 'error in your code: '
"""Prefix of the last line in the log of a node that such an error ended."""


def line(error: BaseException) -> str | None:
  """Describes an error by its message, its type and the innermost frame of the user's own code.

  If it was raised from another error, or while one was handled, TYPE and frame come from the
  earliest error with such a frame.

  Returns:
    'MESSAGE (TYPE at FILE:LINE, in FUNCTION)'; None if no frame is of the user's own code.
  """
  if getattr(error, 'names_place', False):  # of an environment, see `host.Failure`
    return str(error)
  place = None
  each: BaseException | None = error
  while each is not None:
    if isinstance(each, SyntaxError) and each.filename is not None:
      frames = [(each.filename, each.lineno, '')]
    else:
      found = traceback.extract_tb(each.__traceback__)
      frames = [(frame.filename, frame.lineno, f', in {frame.name}') for frame in found]
    own = [frame for frame in frames if _is_own(frame[0])]
    if own:
      file, number, function = own[-1]
      place = f'{type(each).__name__} at {file}:{number}{function}'
    each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
  return None if place is None else f'{message(error)} ({place})'


def message(error: BaseException) -> str:
  """The message of a ValueError, or the first line of another error's: libraries write whole pages."""
  if isinstance(error, SystemExit):
    return repr(error)  # its message is a code
  return str(error) if isinstance(error, ValueError) else str(error).strip().split('\n')[0]


def printable(text: str) -> str:
  """Escapes characters that a terminal obeys, which a text may have from a file or a name of somebody else."""
  return ''.join(each if each.isprintable() or each == '\n' else repr(each)[1:-1] for each in text)


def logged(log: pathlib.Path) -> str | None:
  """Reads the error of the user's code that ended a node from its log; None if anything else did.

  Returns:
    The text after `PREFIX`, see `line`; None also if there is no log.
  """
  try:
    with open(log, 'rb') as file:
      file.seek(max(0, log.stat().st_size - 4096))
      lines = file.read().decode(errors='replace').splitlines()
  except OSError:
    return None
  for text in reversed(lines):
    if text.startswith(PREFIX):
      return text.removeprefix(PREFIX)
    if text.startswith('--- '):  # the supervisor's header of the last start
      break
  return None


def _is_own(file: str) -> bool:
  """Whether a file is the user's: neither ours, nor Python's, nor of an installed package."""
  path = pathlib.Path(file)
  package = pathlib.Path(__file__).parents[1]
  rooms = [package / room for room in ('actors', 'agents', 'launch', 'learner', 'replay')]
  foreign = [*rooms, *map(pathlib.Path, sysconfig.get_paths().values())]
  is_installed = {'site-packages', 'dist-packages'} & set(path.parts)
  return path.is_absolute() and not is_installed and not any(map(path.is_relative_to, foreign))
