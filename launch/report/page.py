"""Writes a report: the dashboard's page as one HTML file, with its data and videos inside."""

import base64
import datetime
import pathlib
from collections.abc import Sequence
from typing import Any

from hephaestus.launch.files import history, metrics
from hephaestus.launch.report import dashboard, panels, server
from hephaestus.launch.report import groups as groups_lib

SCORES = ('normalised_score', 'episode_return')  # the first that a run has is printed
MOST_VIDEO_BYTES = 4_000_000  # largest video in the page; a larger one is left out and named
NO_DATA = '<script id="stored" type="application/json">null</script>'  # in the dashboard's page
# The page contains all that it shows.
POLICY = (
  "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
  'media-src data:'
)


def report(
  folders: Sequence[pathlib.Path],
  *,
  out: pathlib.Path | None = None,
  x: str = 'environment_step',
) -> tuple[list[str], list[str]]:
  """Compares runs, finished or running, by their last scores and on a page.

  Args:
    folders: folders of the runs.
    out: folder for report.html, the page without a server, made if it does not exist; None for no page.
    x: the x-axis, one of history.X_AXES.

  Returns:
    A line on the score of each curve, or its return if there is none; and remarks on what is left out,
    damaged or written.

  Raises:
    ValueError: there is nothing to show, a package of the extra `report` is not installed, or the folder
      cannot be written to.
  """
  if out is not None:
    server.check_packages('report', 'uplot')
  groups, remarks = groups_lib.read(folders, whole=True)
  remarks += [f'{run.folder}: {run.damage}' for group in groups for run in group.runs if run.damage]
  curves = [panels.drawn(group.runs, x) for group in groups]
  if out is not None:
    remarks += _write(groups, curves, out, x)
  pairs = zip(groups, curves, strict=True)
  return [_score(group, each, history.X_AXES[x]) for group, each in pairs], remarks


def _score(group: groups_lib.Group, curves: dict[str, panels.GroupCurve], axis: str) -> str:
  """A line on the last score of a group, or its last return."""
  count = len(group.runs)
  names = f'{group.environment}  {group.label} ({{}}{count} seed{"s" * (count > 1)})'
  keys = [f'{node}/{name}' for name in SCORES for node in history.NODES]
  key = next((key for key in keys if key in curves and len(curves[key].x)), None)
  if key is None:
    return f'{names.format("")}  no score or return yet'
  x, mean, low, high, seeds = curves[key]
  known = len(seeds) or 1
  names = names.format(f'{known} of ' * (known < count))
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
  videos, left_out = _videos([run for group in groups for run in group.runs])
  content = panels.overview(groups, videos) | {
    'made': f'report of {datetime.datetime.now():%Y-%m-%d %H:%M}',
    'x_axes': {x: history.X_AXES[x]},
    'curves': {
      'groups': [panels.to_json(each) for each in curves],
      'charts': panels.charts(key for each in curves for key in each),
    },
  }
  file = out / 'report.html'
  try:
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(_page(content))
  except OSError as error:
    raise ValueError(f'--out {out}: cannot be written to ({error.strerror})') from None
  size = file.stat().st_size / 1e6
  count = sum('source' in video for of_run in videos for video in of_run)
  return [f'{file}: {size:.1f} MB, {count} videos', *left_out]


def _videos(runs: Sequence[history.History]) -> tuple[list[list[dict[str, Any]]], list[str]]:
  """The newest video of each run, and its newest one with a dream.

  Returns:
    The videos of each run, see `panels.overview`; and a line for each that is not in the page, with the
    reason.
  """
  found: list[list[dict[str, Any]]] = []
  left_out = []
  for run in runs:
    newest: dict[bool, panels.Video] = {}
    for video in panels.videos(run.folder):
      newest.setdefault(video.dream, video)
    found.append([])
    for _, video in sorted(newest.items()):
      about = {'name': video.path.name, 'update': video.update, 'dream': video.dream}
      try:
        with metrics.open_regular(video.path) as file:
          content = file.read(MOST_VIDEO_BYTES + 1)
        reason = 'would make the page too large' if len(content) > MOST_VIDEO_BYTES else ''
      except OSError as error:
        reason = f'cannot be read ({error.strerror})'
      if reason:
        left_out.append(f'{video.path}: is not in report.html: it {reason}')
        about['reason'] = f'{video.path.name}: it {reason}'
      else:
        about['source'] = _data_url(panels.VIDEOS[video.path.suffix], content)
      found[-1].append(about)
  return found, left_out


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
