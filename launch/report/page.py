"""Writes a report: pictures as PNG, tables as Markdown, and everything in one HTML file."""

import datetime
import functools
import html
import json
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import imageio.v2 as imageio

from hephaestus.launch.files import history
from hephaestus.launch.report import curves, panels, server
from hephaestus.launch.report import pictures as pictures_lib

MOST_VIDEO_BYTES = 4_000_000  # largest video in the page; a larger one is left out and named
MOST_VIDEOS_BYTES = 32_000_000  # of all videos together, after which no more are added
# Added to the style of the dashboard's page.
STYLE = """
header { position: static; }
h2 small { font-weight: 400; color: var(--faint); font-size: 14px; }
h3 { margin: 18px 0 8px; font-size: 15px; }
.card h3 { margin: 0; font-size: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 10px; font-size: 14px; }
.legend .dot, td .dot { margin-right: 7px; }
picture { display: block; }
img { display: block; width: 100%; }
.large img { max-width: 760px; margin: 0 auto; }
.list { color: var(--text); font-size: 14px; list-style: disc; padding-left: 20px; }
.card + .card { margin-top: 12px; }
.card + .grid { margin-top: 12px; }
.grid > .card { margin-top: 0; }
.curves { grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); }
.left .g, td.wrap { white-space: normal; min-width: 180px; }
"""


def write(
  made: curves.Report,
  out: pathlib.Path,
  *,
  x: str = 'environment_step',
  all_panels: bool = True,
  say: Callable[[str], None] = lambda text: None,
) -> list[str]:
  """Writes report.md, a PNG of each picture, and a self-contained report.html.

  Args:
    made: a report that `curves.make` made with `pictures=True`.
    out: folder, created if it does not exist.
    x: the x-axis, one of history.X_AXES.
    all_panels: whether report.html shows all panels of the dashboard, or only the report's curves.
    say: called with a line of progress now and then.

  Returns:
    A line on what was written, and one for each video that was left out.

  Raises:
    ValueError: the folder cannot be written to, or two curves of an environment have the same label.
  """
  try:
    out.mkdir(parents=True, exist_ok=True)
    pictures = pictures_lib.Pictures(out, say)
    videos = _Videos()
    histories = [run for run, _ in made.runs] if all_panels else []
    body = _body(made, histories, pictures, videos, x)
    (out / 'report.md').write_text(made.markdown)
    (out / 'report.html').write_text(_page(made, body))
  except OSError as error:
    raise ValueError(f'--out {out}: cannot be written to ({error.strerror})') from None
  megabytes = (out / 'report.html').stat().st_size / 1e6
  return [
    f'{out / "report.html"}: {megabytes:.1f} MB, {pictures.count} pictures (also as PNG), '
    f'{videos.count} videos',
    *videos.left_out,
  ]


def _page(made: curves.Report, body: str) -> str:
  environments = dict.fromkeys(figure.name for figure in made.figures)
  style = (server.PAGE / 'page.css').read_text() + STYLE
  title = html.escape(', '.join(environments) or 'runs')
  day = f'{datetime.datetime.now():%Y-%m-%d %H:%M}'
  return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · Hephaestus</title>
<style>
{style}</style>
</head>
<body>
<header><h1>Hephaestus</h1><span class="note">report of {day}</span></header>
<main>
{body}
</main>
</body>
</html>
"""


def _body(
  made: curves.Report,
  histories: Sequence[history.History],
  pictures: pictures_lib.Pictures,
  videos: '_Videos',
  x: str,
) -> str:
  groups = curves.groups(histories, [label for _, label in made.runs]) if histories else []
  group_of = {index: at for at, group in enumerate(groups) for index in group.members}
  # As in a table, each environment has its own colours, from the first.
  environments = list(dict.fromkeys(group.environment for group in groups)) or [
    figure.name for figure in made.figures
  ]
  groups_of = {
    name: [group for group in groups if group.environment == name] for name in environments
  }
  colour_of = {
    index: groups_of[groups[at].environment].index(groups[at]) for index, at in group_of.items()
  }
  states = [panels.state(run) for run in histories]
  names = panels.names([run.folder for run in histories])
  parts = []
  if histories:
    parts.append(_section('Runs', _runs(states, names, colour_of)))
  tables = {
    figure.name: (figure, table) for figure, table in zip(made.figures, made.tables, strict=True)
  }
  for name in environments:
    heading = f' <small>{html.escape(name)}</small>' if len(environments) > 1 else ''
    parts += _sections(name, heading, tables.get(name), groups_of[name], histories, pictures, x)
  named = [
    _Named(run, name, state) for run, name, state in zip(histories, names, states, strict=True)
  ]
  for title, content in (
    ('Where time goes', _times(named)),
    ('Nodes', _nodes(named)),
    ('Videos of evaluations', _videos_of(named, videos)),
    ('Config differences', _differences(histories, names, colour_of)),
  ):
    if content:
      parts.append(_section(title, content))
  if made.left_out:
    parts.append(_section('Left out', _list(made.left_out)))
  return '\n'.join(parts)


def _section(title: str, content: str, more: str = '') -> str:
  slug = re.sub(r'\W+', '-', title.lower())
  return f'<section class="{slug}"><h2>{html.escape(title)}{more}</h2>\n{content}\n</section>'


def _sections(
  name: str,
  heading: str,
  table: tuple[curves.Comparison, str] | None,
  groups: Sequence[curves.Group],
  histories: Sequence[history.History],
  pictures: pictures_lib.Pictures,
  x: str,
) -> list[str]:
  """HTML of the sections of one environment, one for each of panels.SECTIONS with content."""
  sections: dict[str, list[str]] = {}
  shown: dict[str, set[int]] = {}  # indices of groups, by section
  zeros: dict[str, list[str]] = {}
  first = ''
  main = None
  if table is not None:
    figure, markdown = table
    main = f'{figure.node}/{figure.metric}'
    first = _main_picture(figure, pictures) + _tables(markdown)
  members = [[histories[index] for index in group.members] for group in groups]
  for chart in panels.charts([run for runs in members for run in runs]) if members else ():
    if chart.key == main:
      continue
    found = [
      (colour, group.label, curve)
      for colour, (group, runs) in enumerate(zip(groups, members, strict=True))
      if (curve := panels.curve(runs, chart.key, x)) is not None and len(curve.x)
    ]
    if not found:
      continue
    shown.setdefault(chart.section, set()).update(colour for colour, _, _ in found)
    if all(not curve.low.any() and not curve.high.any() for _, _, curve in found):
      zeros.setdefault(chart.section, []).append(chart.title)
      continue
    lines = [pictures_lib.Line(label, colour, *curve) for colour, label, curve in found]
    stem = f'{curves.file_name(name)}-{chart.key.replace("/", "-")}'
    draw = functools.partial(pictures_lib.draw_lines, chart.title, history.X_AXES[x], '', lines)
    picture = pictures.add(stem, chart.title, draw)
    sections.setdefault(chart.section, []).append(f'<figure class="card">{picture}</figure>')
  labels = list(enumerate(group.label for group in groups))

  def legend(section: str) -> str:
    if len(groups) < 2:
      return ''
    is_first = section == panels.LEARNING
    return _legend([pair for pair in labels if is_first or pair[0] in shown[section]])

  made = []
  for title in panels.SECTIONS:
    content = first if title == panels.LEARNING else ''
    pictures_of = ''.join(sections.get(title, ()))
    if pictures_of:
      content += f'<div class="grid curves">{pictures_of}</div>'
    if title in zeros:
      content += f'<p class="zeros">0 throughout: {html.escape(", ".join(zeros[title]))}</p>'
    if content:
      made.append(_section(title, legend(title) + content, heading))
  return made


def _main_picture(figure: curves.Comparison, pictures: pictures_lib.Pictures) -> str:
  """HTML of the large picture of learning curves with confidence intervals."""
  lines = []
  for colour, curve in zip(figure.colours, figure.curves, strict=True):
    places = curves.grid(curve)
    seeds = f'{len(curve.runs)} seed{"s" * (len(curve.runs) > 1)}'
    thin = curve.series if len(curve.runs) > 1 else []
    estimate = curves.estimate(curve.at(places), 'iqm')
    lines.append(
      pictures_lib.Line(f'{curve.label} ({seeds})', colour, places, *estimate, seeds=thin)
    )
  y_label = curves.Y_AXES.get(figure.metric, f'{figure.metric} ({figure.node})')
  levels = (0, 1) if figure.metric == 'normalised_score' else ()
  draw = functools.partial(
    pictures_lib.draw_lines,
    figure.name,
    history.X_AXES[figure.x],
    y_label,
    lines,
    large=True,
    levels=levels,
  )
  picture = pictures.add(curves.file_name(figure.name), f'Curves of {figure.name}', draw, wide=True)
  return f'<figure class="card large">{picture}</figure>'


def _tables(markdown: str) -> str:
  """HTML of a Markdown table without its heading and picture, which the section has already."""
  import markdown_it

  lines = [line for line in markdown.splitlines() if not line.startswith(('## ', '!['))]
  parser = markdown_it.MarkdownIt('commonmark', {'html': False}).enable('table')
  body = parser.render('\n'.join(lines))
  body = body.replace('<table>', '<div class="scroll"><table>')
  body = body.replace('</table>', '</table></div>').replace('<ul>', '<ul class="list">')
  return f'<div class="card">{body}</div>'


class _Videos:
  """Embeds the videos of a report.

  Attributes:
    count: number of videos in the page.
    left_out: a line for each video that is not in the page, with the reason.
  """

  def __init__(self) -> None:
    self.count = 0
    self.left_out: list[str] = []
    self._nbytes = 0

  def add(self, path: pathlib.Path) -> str:
    """Returns HTML of a video, or of the reason why it is not in the page."""
    try:
      size = path.stat().st_size
      if size > MOST_VIDEO_BYTES or self._nbytes > MOST_VIDEOS_BYTES:
        return self._leave_out(path, f'{size / 1e6:.1f} MB, which would make the page too large')
      with tempfile.TemporaryDirectory() as folder:
        played = path
        if path.suffix == '.gif':
          played = pathlib.Path(folder) / 'video.mp4'
          panels.to_mp4(path, played)
        content = played.read_bytes()
        reader: Any = imageio.get_reader(str(played))
        width, height = reader.get_meta_data()['size']
        reader.close()
    except Exception as error:  # decoders raise any type
      return self._leave_out(path, f'cannot be played ({error})')
    self.count += 1
    self._nbytes += len(content)
    media_type = 'video/webm' if played.suffix == '.webm' else 'video/mp4'
    # Room below the picture, so that the controls do not cover it; as in page.js.
    room = height + max(0.25 * height, 0.26 * width)
    style = f'aspect-ratio: {width} / {room:g}; width: min(100%, {400 * width / room:.0f}px)'
    return (
      f'<video style="{style}" controls muted loop autoplay playsinline '
      f'src="{pictures_lib.data_url(media_type, content)}"></video>'
    )

  def _leave_out(self, path: pathlib.Path, reason: str) -> str:
    self.left_out.append(f'{path}: is not in report.html: {reason}')
    return f'<p class="note">{html.escape(path.name)}: {html.escape(reason)}</p>'


class _Named(NamedTuple):
  """A run with its short name and its `panels.state`."""

  run: history.History
  name: str
  state: dict[str, Any]


def _cell(content: Any) -> str:
  """HTML of a table's cell; text is escaped, `_Html` is not."""
  return content.text if isinstance(content, _Html) else html.escape(str(content))


class _Html(NamedTuple):
  """HTML that must not be escaped."""

  text: str


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> str:
  """HTML of a table as on the dashboard's page; a narrow screen shows each row as a block."""
  side = lambda index: ' class="left"' if index < left else ''
  head = ''.join(f'<th{side(at)}>{html.escape(text)}</th>' for at, text in enumerate(headings))
  body = ''.join(
    '<tr>'
    + ''.join(
      f'<td{side(at)} data-name="{html.escape(headings[at])}">{_cell(cell)}</td>'
      for at, cell in enumerate(row)
    )
    + '</tr>'
    for row in rows
  )
  return (
    f'<div class="scroll"><table class="stack"><thead><tr>{head}</tr></thead>'
    f'<tbody>{body}</tbody></table></div>'
  )


def _card(content: str) -> str:
  return f'<div class="card">{content}</div>'


def _list(lines: Iterable[str]) -> str:
  items = ''.join(f'<li>{html.escape(line)}</li>' for line in lines)
  return _card(f'<ul class="list">{items}</ul>')


def _dot(colour: int) -> str:
  return f'<span class="dot g{colour % pictures_lib.COLOURS}"></span>'


def _legend(labels: Sequence[tuple[int, str]]) -> str:
  items = ''.join(f'<span>{_dot(colour)}{html.escape(label)}</span>' for colour, label in labels)
  return f'<div class="legend">{items}</div>'


def _number(value: float | None) -> str:
  if value is None:
    return '–'
  return f'{value:,.0f}' if float(value).is_integer() or abs(value) >= 1e5 else f'{value:.3g}'


def _moment(seconds: float | None) -> str:
  return '–' if seconds is None else f'{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}'


def _runs(states: Sequence[dict[str, Any]], names: Sequence[str], colour_of: dict[int, int]) -> str:
  rows = [
    [
      _Html(_dot(colour_of[index]) + html.escape(name)),
      run['world'],
      run['agent'],
      run['seed'],
      _Html(f'<span class="state {run["state"].split(" ")[0]}">{run["state"]}</span>'),
      _number(run['environment_step']),
      _number(run['max_environment_steps']),
      _number(run['learner_step']),
      _number(run['episode_return'] if run['score'] is None else run['score']),
      _moment(run['written']),
    ]
    for index, (run, name) in enumerate(zip(states, names, strict=True))
  ]
  headings = [
    'run', 'environment', 'agent', 'seed', 'state', 'steps', 'of', 'updates', 'score or return',
    'last metrics',
  ]  # fmt: skip
  messages = [
    f'{name}: {text}' for name, run in zip(names, states, strict=True) for text in run['messages']
  ]
  return _card(_table(headings, rows, 5)) + (_list(messages) if messages else '')


def _times(runs: Sequence[_Named]) -> str:
  cards = []
  for run, name, _ in runs:
    bars = ''
    for node in panels.times(run, throughout=True):
      shown = [(at, activity, share) for at, (activity, share) in enumerate(node['shares'].items())]
      shown = [each for each in shown if each[2] >= 0.005]
      bar = ''.join(
        f'<span class="g{at % pictures_lib.COLOURS}" style="flex-grow: {share:.3f}"></span>'
        for at, _, share in shown
      )
      words = ''.join(
        f'<span>{_dot(at)}{html.escape(activity)} {100 * share:.0f} %</span>'
        for at, activity, share in shown
      )
      bars += (
        f'<p class="zeros">{html.escape(node["name"])}</p><div class="bar">{bar}</div>'
        f'<div class="shares">{words}</div>'
      )
    if bars:
      cards.append(_card(f'<h3>{html.escape(name)} <small>mean over the run</small></h3>{bars}'))
  return f'<div class="grid">{"".join(cards)}</div>' if cards else ''


def _nodes(runs: Sequence[_Named]) -> str:
  kinds = {
    'running': 'running',
    'finished': 'running',
    'stopped': 'stopped',
    'waits for its restart': 'waits',
  }
  cards = []
  for _, name, state in runs:
    if not state['nodes'] and not state['events']:
      continue
    rows = [
      [
        node['name'],
        _Html(f'<span class="{kinds.get(node["state"], "failed")}">{node["state"]}</span>'),
        node['restarts'],
        _moment(node['wrote']),
      ]
      for node in state['nodes']
    ]
    events = ''.join(
      f'<li><time>{_moment(event["time"])}</time>{html.escape(event["text"])}</li>'
      for event in reversed(state['events'])
    )
    table = _table(['node', 'state', 'restarts', 'last metrics'], rows, 2) if rows else ''
    cards.append(_card(f'<h3>{html.escape(name)}</h3>{table}{events and f"<ul>{events}</ul>"}'))
  return f'<div class="grid wide">{"".join(cards)}</div>' if cards else ''


def _videos_of(runs: Sequence[_Named], videos: _Videos) -> str:
  """HTML of the newest evaluation video of each run, and of its newest one with a dream."""
  figures = []
  dreams = False
  for run, name, _ in runs:
    known = [(panels.subject(path), path) for _, path in panels.videos(run.folder)]
    for dream in (False, True):
      newest = next((each for each in known if each[0]['dream'] == dream), None)
      if newest is None:
        continue
      about, path = newest
      words = path.name if about['update'] is None else f'update {about["update"]:,}'
      words += ', with its dream' * dream
      dreams = dreams or dream
      figures.append(
        f'<figure class="card"><h3>{html.escape(name)} <small>{html.escape(words)}</small></h3>'
        f'{videos.add(path)}</figure>'
      )
  if not figures:
    return ''
  note = f'<p class="note" id="videos-note">{html.escape(panels.DREAM_NOTE)}</p>' if dreams else ''
  return f'{note}<div class="grid">{"".join(figures)}</div>'


def _differences(
  histories: Sequence[history.History], names: Sequence[str], colour_of: dict[int, int]
) -> str:
  if len(histories) < 2:
    return ''
  found = panels.differences(histories)
  show = lambda value: value if isinstance(value, str) else json.dumps(value)
  if len(found) > len(names):  # a page has more room for rows than for columns
    by_key = [[key, *map(show, values)] for key, values in found.items()]
    return _card(_table(['', *names], by_key))
  rows = [
    [
      _Html(_dot(colour_of[index]) + html.escape(name)),
      *(show(values[index]) for values in found.values()),
    ]
    for index, name in enumerate(names)
  ]
  return _card(_table(['run', *found], rows))
