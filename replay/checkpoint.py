"""Checkpoints of a Reverb server: flushed to disk, checked before loading, the last two kept.

Reverb deletes every older checkpoint once a new one is complete, and crashes on a broken one. So:

    DIRECTORY/newest/     Reverb's own, where it keeps only its newest
    DIRECTORY/kept/       hard links to the last two complete ones
    DIRECTORY/corrupt/    broken ones, moved here for inspection

Reverb names a checkpoint by the clock, and deletes the one that it has just written if the clock was set
back. So each one is renamed to a number, which sorts before any date: the number after the last one.

All functions run on the server's machine. Folders with other names are not touched. Each file of a
checkpoint is one zlib stream, whose checksum tells whether the file is whole. Reverb writes the empty
file DONE last.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from typing import TYPE_CHECKING

from absl import logging

if TYPE_CHECKING:
  import reverb

_FILES = ('tables.tfrecord', 'items.tfrecord', 'chunks.tfrecord', 'DONE')
_NUMBER, _DATE = r'0\d{11}', r'\d{4}-\d\d-\d\dT[\d:.]+[+-][\d:]+'
_KEPT = 2
_BLOCK = 1 << 18  # bytes read at once


def checkpointer(directory: str) -> reverb.checkpointers.CheckpointerBase:
  """Prepares a directory, see `prepare`, and makes Reverb's checkpointer for it."""
  import reverb

  prepare(directory)
  return reverb.checkpointers.DefaultCheckpointer(os.path.join(directory, 'newest'))


def save(client: reverb.Client, directory: str) -> str:
  """Makes the server write a checkpoint, and keeps it together with the one before.

  Blocks while the server writes (about 30 MB/s); inserts and samples continue.

  Args:
    client: client of a server on this machine whose `checkpointer` has the same directory.
    directory: the folder given to `checkpointer`.

  Returns:
    Path of the checkpoint's folder.

  Raises:
    RuntimeError: the server crashed, or its disk is full; earlier checkpoints stay.
    OSError: the checkpoint was written, and cannot be flushed or kept; a FileNotFoundError if the
      server writes to another directory.
  """
  try:
    path = client.checkpoint()
  except Exception as error:  # such as an IndexError for a full disk
    _remove_unfinished(os.path.join(directory, 'newest'))
    raise RuntimeError(str(error)) from error
  _number(directory)
  newest = _folders(os.path.join(directory, 'newest'))[:1]
  if not newest:
    raise FileNotFoundError(f'{path}: Reverb wrote its checkpoint to another directory')
  _keep(newest[0], directory)
  return newest[0]


def keep(directory: str) -> None:
  """Keeps a newest checkpoint that a client on another machine made the server write.

  To be called periodically with the folder given to `checkpointer`; cheap without a new checkpoint.

  Raises:
    OSError: the server meanwhile replaced the checkpoint by a newer one; the next call keeps that.
  """
  _number(directory)
  for folder in _folders(os.path.join(directory, 'newest'))[:1]:
    kept = os.path.join(directory, 'kept', os.path.basename(folder))
    if os.path.exists(os.path.join(folder, 'DONE')) and not os.path.exists(kept):
      _keep(folder, directory)


def prepare(directory: str) -> str | None:
  """Makes `directory` ready for a server that is not yet running.

  Broken checkpoints are logged and set aside, and the newest whole one is linked into `newest`.

  Returns:
    Path of the checkpoint that the server will load; None without a whole one.
  """
  newest, kept = os.path.join(directory, 'newest'), os.path.join(directory, 'kept')
  os.makedirs(newest, exist_ok=True)
  for place in (newest, kept):
    _remove_unfinished(place)
  _number(directory)
  broken = False
  for folder in sorted(_folders(newest) + _folders(kept), key=os.path.basename, reverse=True):
    found = fault(folder)
    if found:
      logging.error('replay: checkpoint %s is broken (%s); set aside', folder, found)
      broken = True
      _set_aside(folder, directory)
      continue
    if broken:
      logging.warning('replay: going back to checkpoint %s', folder)
    path = os.path.join(newest, os.path.basename(folder))
    _link(folder, newest)
    _link(path, kept)
    return path
  if broken:
    logging.error('replay: no whole checkpoint is left in %s; starting empty', directory)
  return None


def complete(directory: str) -> list[str]:
  """Paths of the complete checkpoints under `directory`, newest first; a server may be running."""
  found = set()
  for place in ('newest', 'kept'):
    path = os.path.join(directory, place)
    found |= {(name, place) for name in (os.listdir(path) if os.path.isdir(path) else ())}
  folders = [
    os.path.join(directory, place, name)
    for name, place in sorted(found, reverse=True)
    if re.fullmatch(f'{_NUMBER}|{_DATE}', name)
  ]
  return [folder for folder in folders if os.path.exists(os.path.join(folder, 'DONE'))]


def size(directory: str) -> int:
  """Bytes of the newest complete checkpoint under `directory`; 0 without one, or if it is replaced meanwhile."""
  newest = complete(directory)[:1]
  try:
    return sum(entry.stat().st_size for folder in newest for entry in os.scandir(folder))
  except FileNotFoundError:
    return 0


def _number(directory: str) -> None:
  """Renames complete checkpoints with a date to the next numbers, the oldest first."""
  places = [os.path.join(directory, place) for place in ('newest', 'kept')]
  names = {os.path.basename(folder) for place in places for folder in _folders(place)}
  last = max((int(name) for name in names if re.fullmatch(_NUMBER, name)), default=0)
  dates = sorted(name for name in names if not re.fullmatch(_NUMBER, name))
  for number, name in enumerate(dates, last + 1):
    for place in places:
      folder = os.path.join(place, name)
      if os.path.exists(os.path.join(folder, 'DONE')):
        os.rename(folder, os.path.join(place, f'{number:012d}'))


def _keep(newest: str, directory: str) -> None:
  """Flushes a complete checkpoint and keeps it together with the one before."""
  for name in _FILES:
    _sync(os.path.join(newest, name))
  _sync(newest)
  _sync(os.path.dirname(newest))
  kept = os.path.join(directory, 'kept')
  _link(newest, kept)
  for old in _folders(kept)[_KEPT:]:
    shutil.rmtree(old)


def fault(folder: str) -> str:
  """Describes the fault of a checkpoint; empty if every file exists and its checksum holds."""
  for name in _FILES:
    path = os.path.join(folder, name)
    if not os.path.exists(path):
      return f'{name} is missing'
    if name == 'DONE':
      continue
    stream = zlib.decompressobj()
    try:
      with open(path, 'rb') as file:
        while block := file.read(_BLOCK):
          stream.decompress(block)
    except (OSError, zlib.error) as error:
      return f'{name}: {error}'
    if not stream.eof:
      return f'{name} ends early'
    if stream.unused_data:
      return f'{name} has data after its end'
  return ''


def _link(folder: str, place: str) -> None:
  """Links a complete checkpoint into `place`, atomically; copies where links are not possible."""
  target = os.path.join(place, os.path.basename(folder))
  if os.path.exists(target):
    return
  partial = f'{target}.partial'
  shutil.rmtree(partial, ignore_errors=True)
  os.makedirs(partial)
  for name in sorted(os.listdir(folder), key='DONE'.__eq__):
    source, link = os.path.join(folder, name), os.path.join(partial, name)
    try:
      os.link(source, link)
    except OSError:
      shutil.copyfile(source, link)
      _sync(link)
  _sync(partial)
  os.replace(partial, target)
  _sync(place)


def _set_aside(folder: str, directory: str) -> None:
  corrupt = os.path.join(directory, 'corrupt')
  os.makedirs(corrupt, exist_ok=True)
  target = os.path.join(corrupt, f'{os.path.basename(folder)}.corrupt')
  if os.path.exists(target):
    shutil.rmtree(folder)
  else:
    os.replace(folder, target)


def _remove_unfinished(place: str) -> None:
  """Removes incomplete checkpoints of a server that crashed or whose disk was full."""
  for folder in _folders(place):
    if not os.path.exists(os.path.join(folder, 'DONE')):
      shutil.rmtree(folder, ignore_errors=True)


def _folders(place: str) -> list[str]:
  """Paths of the checkpoints in a folder, newest first, by their names; deletes unfinished links."""
  if not os.path.isdir(place) or os.path.islink(place):
    return []
  for name in os.listdir(place):
    if re.fullmatch(rf'({_NUMBER}|{_DATE})\.partial', name):
      shutil.rmtree(os.path.join(place, name))
  names = [name for name in os.listdir(place) if re.fullmatch(f'{_NUMBER}|{_DATE}', name)]
  paths = [os.path.join(place, name) for name in sorted(names, reverse=True)]
  return [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]


def _sync(path: str) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
