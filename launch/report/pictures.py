"""Draws curves as PNG files, in the colours of the page, and embeds them in HTML."""

import base64
import functools
import html
import io
import pathlib
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from hephaestus.launch.files import history
from hephaestus.launch.report import server

COLOURS = 7  # colours of curves; further curves reuse them with dashed lines
LINES = ('-', '--', ':')
DOTS_PER_INCH = 200
TONES = 64  # colours of a PNG, which has a quarter of the size of one in full colour


class Line(NamedTuple):
  """A curve with its band, to be drawn in a picture.

  Attributes:
    label: its name in the legend.
    colour: index of its colour, which is its index among the groups of its environment.
    x: [N] f64, increasing positions.
    point: [N] f64, values of the curve.
    low: [N] f64, lower end of the band.
    high: [N] f64, upper end of the band.
    seeds: curves of single runs, drawn as thin lines.
  """

  label: str
  colour: int
  x: np.ndarray
  point: np.ndarray
  low: np.ndarray
  high: np.ndarray
  seeds: Sequence[history.Series]


def draw_lines(
  title: str,
  x_label: str,
  y_label: str,
  lines: Sequence[Line],
  *,
  large: bool = False,
  narrow: bool = True,
  levels: Sequence[float] = (),
  dark: bool = False,
) -> bytes:
  """Draws curves with their bands, and seeds as thin lines, in the page's colours.

  Args:
    title: title above the picture.
    x_label: label of the x-axis.
    y_label: label of the y-axis; '' if the title is enough.
    lines: the curves, at least one.
    large: whether it is the main picture, with step curves and always a legend.
    narrow: whether the picture is for a narrow column.
    levels: y positions of dashed horizontal lines.
    dark: whether the picture is for a dark page.

  Returns:
    The content of a PNG file.
  """
  from matplotlib import figure as figures

  palette = _palettes()[dark]
  size, points = ((4.2, 3.4 if large else 2.35), 9.5) if narrow else ((6.4, 3.9), 10.5)
  wrapped = textwrap.wrap(title, 46 if narrow else 60)
  figure = figures.Figure(figsize=size, dpi=DOTS_PER_INCH, facecolor=palette['card'])
  axes = figure.add_subplot(facecolor=palette['card'])
  # Matplotlib's own layouts draw twice. These margins put the axes of all pictures at one place.
  left = 0.135 + 0.06 * (narrow and bool(y_label))
  em = points / 72 / size[1]  # of text, as a share of the height
  title_points = points + 1.5 * large
  above = (1.25 * title_points * len(wrapped) + 12) / 72 / size[1]  # 6 below the title, 6 above it
  figure.subplots_adjust(left=left, right=0.97, bottom=3.6 * em, top=1 - above)
  for line in lines:
    _draw_line(axes, line, palette, large=large)
  for level in levels:
    axes.axhline(level, color=palette['faint'], linewidth=0.9, linestyle=(0, (4, 4)), zorder=1)
  axes.set_title(
    '\n'.join(wrapped),
    loc='left',
    fontsize=title_points,
    fontweight='bold' if large else 'normal',
    color=palette['text'],
  )
  axes.set_xlabel(x_label, fontsize=points if large else points - 1, color=palette['faint'])
  if y_label:
    axes.set_ylabel(y_label, fontsize=points, color=palette['faint'])
  _draw_grid(axes, palette, points, marks=(5 if narrow else 7, 7 if large else 5))
  if large or len(lines) > 1:
    axes.legend(
      fontsize=points - (2 if narrow else 1), frameon=True, framealpha=0.8, edgecolor='none',
      facecolor=palette['card'], labelcolor=palette['text'], handlelength=1.4,
    )  # fmt: skip
  return _to_png(figure)


def _draw_line(axes: Any, line: Line, palette: dict[str, str], *, large: bool) -> None:
  """Draws a curve, its band, a dot at its end, and its seeds as thin lines."""
  drawstyle = 'steps-post' if large else 'default'
  colour = palette[f'c{line.colour % COLOURS}']
  style = LINES[line.colour // COLOURS % len(LINES)]
  for seed in line.seeds:
    axes.plot(seed.x, seed.value, color=colour, linewidth=0.7, alpha=0.4, drawstyle=drawstyle)
  axes.fill_between(
    line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0,
    step='post' if large else None,
  )  # fmt: skip
  width = 2.0 if large else 1.6
  axes.plot(
    line.x, line.point, style, color=colour, linewidth=width, drawstyle=drawstyle,
    label=line.label,
  )  # fmt: skip
  axes.plot(line.x[-1:], line.point[-1:], 'o', color=colour, markersize=2.2 * width)


def _draw_grid(axes: Any, palette: dict[str, str], points: float, marks: tuple[int, int]) -> None:
  """Draws the grid and ticks at round numbers, at most `marks` of them along x and y."""
  from matplotlib import ticker

  axes.tick_params(labelsize=points - 1, colors=palette['faint'], length=3)
  for axis, most in zip((axes.xaxis, axes.yaxis), marks, strict=True):
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _short(value)))
    axis.set_major_locator(ticker.MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
  axes.grid(color=palette['grid'], linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color(palette['line'])


def _to_png(figure: Any) -> bytes:
  """Content of a PNG file with TONES colours."""
  drawn, content = io.BytesIO(), io.BytesIO()
  figure.savefig(drawn, format='png')
  few = Image.open(drawn).convert('RGB').quantize(TONES, Image.Quantize.MEDIANCUT)
  few.save(content, 'PNG', optimize=True)
  return content.getvalue()


@functools.cache
def _palettes() -> tuple[dict[str, str], dict[str, str]]:
  """The page's colours by name, light and dark."""
  style = (server.PAGE / 'page.css').read_text()
  light, dark = re.findall(r':root \{(.*?)\}', style, re.DOTALL)
  read = lambda text: dict(re.findall(r'--(\w+): (#\w+);', text))
  return read(light), read(dark)


def _short(value: float) -> str:
  """Formats a number for an axis, such as 1.5k."""
  size = abs(value)
  for unit, letter in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if size >= unit:
      return f'{value / unit:.4g}{letter}'
  return f'{value:.4g}'


class Pictures:
  """Writes the pictures of a report as files, and embeds them in the page.

  Args:
    out: folder of the files.
    say: called with a line at every tenth picture, since a report may have hundreds.

  Attributes:
    count: number of pictures so far.
  """

  def __init__(self, out: pathlib.Path, say: Callable[[str], None]):
    self._out = out
    self._say = say
    self.count = 0

  def add(self, stem: str, text: str, draw: Any, *, wide: bool = False) -> str:
    """Writes OUT/STEM.png; returns HTML with a light and a dark version of the picture.

    Args:
      stem: name of the file, without its suffix.
      text: alternative text.
      draw: function of `narrow` and `dark` that returns a PNG, see `draw_lines`.
      wide: whether the picture is larger on a wide page.
    """
    self.count += 1
    if self.count % 10 == 1:
      self._say(f'draws picture {self.count}: {text}')
    light = draw(narrow=not wide)
    (self._out / f'{stem}.png').write_bytes(light)
    dark, little = '(prefers-color-scheme: dark)', '(max-width: 600px)'
    sources = {dark: draw(narrow=not wide, dark=True)}
    if wide:
      small = {f'{little} and {dark}': draw(narrow=True, dark=True), little: draw(narrow=True)}
      sources = small | sources
    listed = ''.join(
      f'<source media="{media}" srcset="{data_url("image/png", content)}">'
      for media, content in sources.items()
    )
    shown = f'<img alt="{html.escape(text)}" src="{data_url("image/png", light)}">'
    return f'<picture>{listed}{shown}</picture>'


def data_url(media_type: str, content: bytes) -> str:
  """A file as a URL that contains it; `media_type` is such as image/png."""
  return f'data:{media_type};base64,{base64.b64encode(content).decode()}'
