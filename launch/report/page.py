"""Writes a report: the dashboard's page with its data inside, tables as Markdown, and pictures as PNG."""

import base64
import datetime
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import imageio.v2 as imageio

from hephaestus.launch.files import history, metrics
from hephaestus.launch.report import curves, dashboard, panels, pictures

MOST_VIDEO_BYTES = 4_000_000  # largest video in the page; a larger one is left out and named
MOST_VIDEOS_BYTES = 32_000_000  # of all videos together, after which no more are added
NO_DATA = '<script id="stored" type="application/json">null</script>'  # in the dashboard's page
# The page contains all that it shows.
POLICY = (
  "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
  'media-src data:'
)


def write(
  made: curves.Report,
  out: pathlib.Path,
  *,
  x: str = 'environment_step',
  all_panels: bool = True,
  say: Callable[[str], None] = lambda text: None,
) -> list[str]:
  """Writes report.md, a PNG of each curve, and report.html, the page without a server.

  Args:
    made: a report that `curves.make` made with `pictures=True`.
    out: folder, created if it does not exist.
    x: the x-axis, one of history.X_AXES.
    all_panels: whether to show all panels of the dashboard, or only the report's curves.
    say: called with a line of progress now and then.

  Returns:
    A line on what was written, and one for each video that was left out.

  Raises:
    ValueError: the folder cannot be written to.
  """
  groups = made.groups
  histories = [run for group in groups for run in group.runs]
  drawn: list[dict[str, panels.GroupCurve]] = [
    panels.drawn(group.runs, x) if all_panels else {} for group in groups
  ]
  at = {(group.environment, group.label): index for index, group in enumerate(groups)}
  for figure in made.figures:  # with confidence intervals, which the dashboard lacks
    for curve in figure.curves:
      drawn[at[figure.environment, curve.label]][figure.key] = _with_interval(curve)
  charts = panels.charts(key for each in drawn for key in each)
  videos = _Videos(histories)
  try:
    out.mkdir(parents=True, exist_ok=True)
    count = _draw(made.figures, charts, groups, drawn, x, out, say)
    content = panels.overview(histories, groups, videos.newest, throughout=True)
    if not all_panels:
      content['runs'] = []
    content |= {
      'made': f'report of {datetime.datetime.now():%Y-%m-%d %H:%M}',
      'x_axes': {x: history.X_AXES[x]},
      'differences': panels.differences(histories),
      'curves': {
        'groups': [panels.to_json(each) for each in drawn],
        'charts': [chart._asdict() for chart in charts],
      },
      'tables': [figure.table() for figure in made.figures],
      'left_out': made.left_out,
    }
    (out / 'report.md').write_text(made.markdown)
    (out / 'report.html').write_text(_page(content))
  except OSError as error:
    raise ValueError(f'--out {out}: cannot be written to ({error.strerror})') from None
  megabytes = (out / 'report.html').stat().st_size / 1e6
  return [
    f'{out / "report.html"}: {megabytes:.1f} MB, {count} pictures (as PNG), {videos.count} videos',
    *videos.left_out,
  ]


def _with_interval(curve: curves.Curve) -> panels.GroupCurve:
  """A curve of the report with the confidence interval of its mean as band."""
  places = curves.grid(curve)
  seeds = curve.series if len(curve.runs) > 1 else []
  return panels.GroupCurve(places, *curves.estimate(curve.at(places), 'iqm'), seeds=seeds)


def _draw(
  figures: Sequence[curves.Comparison],
  charts: Sequence[panels.Chart],
  groups: Sequence[curves.Group],
  drawn: Sequence[dict[str, panels.GroupCurve]],
  x: str,
  out: pathlib.Path,
  say: Callable[[str], None],
) -> int:
  """Writes a PNG of each chart in each environment, unless it is 0 throughout; returns how many."""
  figure_of = {(figure.environment, figure.key): figure for figure in figures}
  x_label, count = history.X_AXES[x], 0
  for environment in dict.fromkeys(group.environment for group in groups):
    members = [at for at, group in enumerate(groups) if group.environment == environment]
    for key, _, title in charts:
      lines = [
        pictures.Line(groups[at].label, colour, drawn[at][key])
        for colour, at in enumerate(members)
        if key in drawn[at] and len(drawn[at][key].x)
      ]
      figure = figure_of.get((environment, key))
      if figure is None and not any(
        each.curve.low.any() or each.curve.high.any() for each in lines
      ):
        continue
      count += 1
      if count % 10 == 1:
        say(f'draws picture {count}: {title}')
      stem = curves.file_name(environment)
      if figure is None:
        stem += f'-{key.replace("/", "-")}'
        picture = pictures.draw_lines(title, x_label, '', lines)
      else:
        y_label = curves.Y_AXES.get(figure.metric, f'{figure.metric} ({figure.node})')
        levels = (0, 1) if figure.metric == 'normalised_score' else ()
        picture = pictures.draw_lines(environment, x_label, y_label, lines, levels)
      (out / f'{stem}.png').write_bytes(picture)
  return count


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
