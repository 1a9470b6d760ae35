"""Draws curves of several runs as a PNG file, in the colours of the page; needs matplotlib."""

import functools
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from hephaestus.launch.files import history
from hephaestus.launch.report import panels, server

COLOURS = 7  # colours of curves; further curves reuse them with dashed lines
LINES = ('-', '--', ':')
POINTS = 10.5  # size of the text


def runs(
  out: pathlib.Path,
  groups: Mapping[str, Sequence[pathlib.Path]],
  metric: str = 'evaluator/episode_return',
  x: str = 'environment_step',
) -> None:
  """Draws a metric of several runs: a curve for each group, such as the seeds of one config.

  Args:
    out: path of the PNG file.
    groups: folders of the runs of each curve, by its label.
    metric: 'NODE/METRIC', a kind of node and a key of its rows of metrics.
    x: the x-axis, one of history.X_AXES.

  Raises:
    ValueError: a folder is not one of a run, or no run of a group has the metric.
  """
  curves = {}
  for label, folders in groups.items():
    members = [history.History(pathlib.Path(folder)) for folder in folders]
    for each in members:
      each.read()
    found = panels.drawn(members, x)
    if metric not in found:
      raise ValueError(f'{metric}: no run of {label} has it; they have {", ".join(sorted(found))}')
    curves[label] = found[metric]
  draw(out, curves, title=metric, x_label=history.X_AXES[x])


def draw(
  out: pathlib.Path,
  curves: Mapping[str, panels.GroupCurve],
  *,
  title: str,
  x_label: str,
  y_label: str = '',
  levels: Sequence[float] = (),
) -> None:
  """Draws step curves with their bands, seeds as thin lines, and dashed horizontal lines at `levels`.

  Args:
    out: path of the PNG file.
    curves: the curves by their labels, at least one.
    title, x_label, y_label: texts; no y_label if the title is enough.

  Raises:
    ValueError: matplotlib is not installed.
  """
  server.check_packages('report', 'matplotlib')
  from matplotlib import figure as figures
  from matplotlib import ticker

  colours = _palette()
  figure = figures.Figure((6.4, 3.9), 200, facecolor=colours['card'], layout='constrained')
  axes = figure.add_subplot(facecolor=colours['card'])
  for index, (label, (x, mean, low, high, seeds)) in enumerate(curves.items()):
    steps: Any = {'color': colours[f'c{index % COLOURS}'], 'drawstyle': 'steps-post'}
    for seed in seeds:
      axes.plot(seed.x, seed.mean, linewidth=0.7, alpha=0.4, **steps)
    axes.fill_between(x, low, high, color=steps['color'], alpha=0.18, linewidth=0, step='post')
    name = f'{label} ({len(seeds)} seeds)' if seeds else label
    style = LINES[index // COLOURS % len(LINES)]
    axes.plot(x, mean, style, linewidth=2.0, label=name, **steps)
    axes.plot(x[-1:], mean[-1:], 'o', color=steps['color'], markersize=4.4)
  for level in levels:
    axes.axhline(level, color=colours['faint'], linewidth=0.9, linestyle=(0, (4, 4)), zorder=1)
  axes.set_title('\n'.join(textwrap.wrap(title, 60)), loc='left', fontsize=POINTS + 1.5)
  axes.set_xlabel(x_label, fontsize=POINTS, color=colours['faint'])
  axes.set_ylabel(y_label, fontsize=POINTS, color=colours['faint'])
  axes.tick_params(labelsize=POINTS - 1, colors=colours['faint'])
  axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
  axes.grid(color=colours['grid'], linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color(colours['line'])
  axes.legend(fontsize=POINTS - 1, edgecolor='none', labelcolor=colours['text'])
  figure.savefig(out, format='png')


@functools.cache
def _palette() -> dict[str, str]:
  """The page's light colours by name."""
  style = (server.PAGE / 'page.css').read_text()
  return dict(re.findall(r'--(\w+): (#\w+);', style[: style.index('}')]))
