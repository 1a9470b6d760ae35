"""Writes a report: the dashboard's page as one HTML file, with its data and videos inside."""

import base64
import datetime
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import imageio.v2 as imageio

from hephaestus.launch.files import history, metrics
from hephaestus.launch.report import dashboard, panels, server
from hephaestus.launch.report import groups as groups_lib

MOST_VIDEO_BYTES = 4_000_000  # largest video in the page; a larger one is left out and named
MOST_VIDEOS_BYTES = 32_000_000  # of all videos together, after which no more are added
NO_DATA = '<script id="stored" type="application/json">null</script>'  # in the dashboard's page
# The page contains all that it shows.
POLICY = (
  "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
  'media-src data:'
)


def report(
  given: Sequence[tuple[pathlib.Path, str | None]],
  *,
  out: pathlib.Path | None = None,
  metric: str | None = None,
  node: str | None = None,
  x: str = 'environment_step',
) -> tuple[list[str], list[str]]:
  """Compares runs, finished or running, by their last scores and on a page.

  Args:
    given: folder of each run with the label of its curve; runs without a label that differ only in their
      seed become one curve. A folder that is repeated counts once.
    out: folder for report.html, the page without a server, made if it does not exist; None for no page.
    metric: key of the only metric to show; None: the score, or the return if there is none, and on the
      page all metrics.
    node: kind of process that has reported the metric, one of history.NODES; None for any.
    x: the x-axis, one of history.X_AXES.

  Returns:
    A line on each curve; and remarks on what is left out, damaged or written.

  Raises:
    ValueError: there is nothing to show, two curves have the same label, a package of the extra `report`
      is not installed, or the folder cannot be written to.
  """
  if out is not None:
    server.check_packages('report', 'uplot')
  known: dict[pathlib.Path, tuple[pathlib.Path, str | None]] = {}
  for folder, label in given:
    known.setdefault(folder.resolve(), (folder, label))
  runs: list[tuple[history.History, str | None]] = []
  remarks = []
  for folder, label in known.values():
    try:
      runs.append((_read(folder), label))
    except ValueError as error:
      remarks.append(f'left out: {error}')
  if not runs:
    raise ValueError('; '.join(remarks) or 'no runs are given; name their folders')
  remarks += [f'{run.folder}: {run.damage}' for run, _ in runs if run.damage]
  groups = groups_lib.make(*zip(*runs, strict=True))
  curves = [panels.drawn(group.runs, x) for group in groups]
  names = ('normalised_score', 'episode_return') if metric is None else (metric,)
  keys = [f'{each}/{name}' for name in names for each in ((node,) if node else history.NODES)]
  if metric is not None:
    found = sorted({key for each in curves for key in each})
    curves = [{key: each[key] for key in keys if key in each} for each in curves]
    if not any(curves):
      raise ValueError(f'--metric {metric}: no run has it; they have {", ".join(found)}')
  if out is not None:
    remarks += _write(groups, curves, out, x)
  pairs = zip(groups, curves, strict=True)
  return [_score(group, each, keys, history.X_AXES[x]) for group, each in pairs], remarks


def _read(folder: pathlib.Path) -> history.History:
  """Reads all metrics of a run; ValueError if it has none."""
  run = history.History(folder)
  run.read()
  if not any(map(run.names, history.NODES)):
    raise ValueError(f'{folder}: has no metrics yet; {run.damage or "wait for its nodes"}')
  return run


def _score(
  group: groups_lib.Group, curves: dict[str, panels.GroupCurve], keys: Sequence[str], axis: str
) -> str:
  """A line on the last value of a group's curve of the first of the keys that it has."""
  count = len(group.runs)
  names = f'{group.environment}  {group.label} ({count} seed{"s" * (count > 1)})'
  key = next((key for key in keys if key in curves and len(curves[key].x)), None)
  if key is None:
    return f'{names}  no {" or ".join(keys)}'
  x, mean, low, high, seeds = curves[key]
  values = f'{mean[-1]:.4g} ({low[-1]:.4g} to {high[-1]:.4g})' if seeds else f'{mean[-1]:.4g}'
  place = f'{x[-1]:,.1f}'.removesuffix('.0')
  return f'{names}  {key} {values} at {place} {axis}'


def _write(
  groups: Sequence[groups_lib.Group],
  curves: Sequence[dict[str, panels.GroupCurve]],
  out: pathlib.Path,
  x: str,
) -> list[str]:
  """Writes report.html; returns a line on it, and one for each video that was left out."""
  histories = [run for group in groups for run in group.runs]
  videos = _Videos(histories)
  charts = panels.charts(key for each in curves for key in each)
  content = panels.overview(histories, groups, videos.newest, throughout=True) | {
    'made': f'report of {datetime.datetime.now():%Y-%m-%d %H:%M}',
    'x_axes': {x: history.X_AXES[x]},
    'differences': groups_lib.differences(histories),
    'curves': {
      'groups': [panels.to_json(each) for each in curves],
      'charts': [chart._asdict() for chart in charts],
    },
  }
  file = out / 'report.html'
  try:
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(_page(content))
  except OSError as error:
    raise ValueError(f'--out {out}: cannot be written to ({error.strerror})') from None
  size = file.stat().st_size / 1e6
  return [f'{file}: {size:.1f} MB, {videos.count} videos', *videos.left_out]


class _Videos:
  """The newest video of each run of a report, and its newest one with a dream.

  Args:
    histories: the runs.

  Attributes:
    count: number of videos in the page.
    left_out: a line for each video that is not in the page, with the reason.
  """

  def __init__(self, histories: Sequence[history.History]) -> None:
    self.count = 0
    self.left_out: list[str] = []
    self._histories = histories
    self._nbytes = 0

  def newest(self, index: int) -> list[dict[str, Any]]:
    """The videos of a run, see `panels.overview`."""
    known = [
      (panels.subject(path), path) for _, path in panels.videos(self._histories[index].folder)
    ]
    of_kind = [[each for each in known if each[0]['dream'] is dream] for dream in (False, True)]
    return [about | self._source(path) for about, path in (each[0] for each in of_kind if each)]

  def _source(self, path: pathlib.Path) -> dict[str, str]:
    try:
      size = path.stat().st_size
      if size > MOST_VIDEO_BYTES or self._nbytes > MOST_VIDEOS_BYTES:
        return self._leave_out(path, f'{size / 1e6:.1f} MB, which would make the page too large')
      with tempfile.TemporaryDirectory() as folder:
        played = path
        if path.suffix == '.gif':
          played = pathlib.Path(folder) / 'video.mp4'
          panels.to_mp4(path, played)
        imageio.get_reader(str(played)).close()  # raises if it cannot be played
        content = played.read_bytes()
    except Exception as error:  # decoders raise any type
      return self._leave_out(path, f'cannot be played ({error})')
    self.count += 1
    self._nbytes += len(content)
    return {'source': _data_url(dashboard.MEDIA_TYPES[played.suffix], content)}

  def _leave_out(self, path: pathlib.Path, reason: str) -> dict[str, str]:
    self.left_out.append(f'{path}: is not in report.html: {reason}')
    return {'reason': f'{path.name}: {reason}'}


def _page(content: dict[str, Any]) -> str:
  """The dashboard's page with its scripts, styles and data inside, so that it needs no server."""
  index, *files = dashboard.files()
  page = index.read_text()
  for file in files:
    name, text = file.name, file.read_text()
    url = _data_url('image/svg+xml', text.encode())
    page = page.replace(f'<link rel="stylesheet" href="{name}">', f'<style>\n{text}</style>')
    page = page.replace(f'<script src="{name}"></script>', f'<script>\n{text}</script>')
    page = page.replace(f'href="{name}"', f'href="{url}"')
  data = metrics.to_json(content).replace('<', '\\u003c')  # no name ends the script
  page = page.replace(NO_DATA, NO_DATA.replace('null', data))
  policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
  return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}')


def _data_url(media_type: str, content: bytes) -> str:
  """A file as a URL that contains it; `media_type` is such as image/png."""
  return f'data:{media_type};base64,{base64.b64encode(content).decode()}'
