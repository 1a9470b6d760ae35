"""Draws curves as PNG files, in the colours of the page."""

import functools
import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from PIL import Image

from hephaestus.launch.report import panels, server

COLOURS = 7  # colours of curves; further curves reuse them with dashed lines
LINES = ('-', '--', ':')
SIZE, DOTS_PER_INCH = (6.4, 3.9), 200  # inches
POINTS = 10.5  # size of the text
TONES = 64  # colours of a PNG, which has a quarter of the size of one in full colour


class Line(NamedTuple):
  """A curve to be drawn in a picture, with its band and thin lines of its seeds.

  Attributes:
    label: its name in the legend, which adds the number of seeds.
    colour: index of its colour, which is its index among the groups of its environment.
    curve: the curve.
  """

  label: str
  colour: int
  curve: panels.GroupCurve


def draw_lines(
  title: str, x_label: str, y_label: str, lines: Sequence[Line], levels: Sequence[float] = ()
) -> bytes:
  """Draws step curves with their bands, and seeds as thin lines, in the page's colours.

  Args:
    title: title above the picture.
    x_label: label of the x-axis.
    y_label: label of the y-axis; '' if the title is enough.
    lines: the curves, at least one.
    levels: y positions of dashed horizontal lines.

  Returns:
    The content of a PNG file.
  """
  from matplotlib import figure as figures
  from matplotlib import layout_engine

  palette = _palette()
  figure = figures.Figure(
    figsize=SIZE,
    dpi=DOTS_PER_INCH,
    facecolor=palette['card'],
    layout=layout_engine.ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1),
  )
  axes = figure.add_subplot(facecolor=palette['card'])
  for line in lines:
    _draw_line(axes, line, palette)
  for level in levels:
    axes.axhline(level, color=palette['faint'], linewidth=0.9, linestyle=(0, (4, 4)), zorder=1)
  axes.set_title(
    '\n'.join(textwrap.wrap(title, 60)),
    loc='left',
    fontsize=POINTS + 1.5,
    fontweight='bold',
    color=palette['text'],
  )
  axes.set_xlabel(x_label, fontsize=POINTS, color=palette['faint'])
  axes.set_ylabel(y_label, fontsize=POINTS, color=palette['faint'])
  _draw_grid(axes, palette)
  axes.legend(
    fontsize=POINTS - 1, frameon=True, framealpha=0.8, edgecolor='none',
    facecolor=palette['card'], labelcolor=palette['text'], handlelength=1.4,
  )  # fmt: skip
  return _to_png(figure)


def _draw_line(axes: Any, line: Line, palette: dict[str, str]) -> None:
  """Draws a curve, its band, a dot at its end, and its seeds as thin lines."""
  colour = palette[f'c{line.colour % COLOURS}']
  style = LINES[line.colour // COLOURS % len(LINES)]
  steps = {'color': colour, 'drawstyle': 'steps-post'}
  x, mean, low, high, seeds = line.curve
  label = f'{line.label} ({len(seeds)} seeds)' if seeds else f'{line.label} (1 seed)'
  for seed in seeds:
    axes.plot(seed.x, seed.value, linewidth=0.7, alpha=0.4, **steps)
  axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0, step='post')
  axes.plot(x, mean, style, linewidth=2.0, label=label, **steps)
  axes.plot(x[-1:], mean[-1:], 'o', color=colour, markersize=4.4)


def _draw_grid(axes: Any, palette: dict[str, str]) -> None:
  """Draws the grid and a few ticks at round numbers."""
  from matplotlib import ticker

  axes.tick_params(labelsize=POINTS - 1, colors=palette['faint'], length=3)
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _short(value)))
    axis.set_major_locator(ticker.MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
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
def _palette() -> dict[str, str]:
  """The page's light colours by name."""
  style = (server.PAGE / 'page.css').read_text()
  return dict(re.findall(r'--(\w+): (#\w+);', style[: style.index('}')]))


def _short(value: float) -> str:
  """Formats a number for an axis, such as 1.5k."""
  size = abs(value)
  for unit, letter in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if size >= unit:
      return f'{value / unit:.4g}{letter}'
  return f'{value:.4g}'
