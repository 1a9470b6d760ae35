"""Draws curves of several runs as a PNG file, in the colours of the page; needs matplotlib."""

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
  """Draws a metric of several runs: for each group, such as the seeds of one config, a curve with its band.

  Args:
    out: path of the PNG file.
    groups: folders of the runs of each curve, by its label.
    metric: 'NODE/METRIC', a kind of node and a key of its rows of metrics.
    x: the x-axis, one of history.X_AXES.

  Raises:
    ValueError: a folder is not one of a run, no run of a group has the metric, or matplotlib is not installed.
  """
  server.check_packages('report', 'matplotlib')
  from matplotlib import figure as figures
  from matplotlib import ticker

  style = (server.PAGE / 'page.css').read_text()
  colours = dict(re.findall(r'--(\w+): (#\w+);', style[: style.index('}')]))  # the light ones
  figure = figures.Figure((6.4, 3.9), 200, facecolor=colours['card'], layout='constrained')
  axes = figure.add_subplot(facecolor=colours['card'])
  for index, (label, folders) in enumerate(groups.items()):
    members = [history.History(pathlib.Path(folder)) for folder in folders]
    for each in members:
      each.read()
    found = panels.drawn(members, x)
    if metric not in found:
      raise ValueError(f'{metric}: no run of {label} has it; they have {", ".join(sorted(found))}')
    places, mean, low, high, seeds = found[metric]
    steps: Any = {'color': colours[f'c{index % COLOURS}'], 'drawstyle': 'steps-post'}
    for seed in seeds:
      axes.plot(seed.x, seed.mean, linewidth=0.7, alpha=0.4, **steps)
    axes.fill_between(places, low, high, color=steps['color'], alpha=0.18, linewidth=0, step='post')
    name = f'{label} ({len(seeds)} seeds)' if seeds else label
    name = name.replace('$', r'\$')  # which begins a formula
    line = LINES[index // COLOURS % len(LINES)]
    axes.plot(places, mean, line, linewidth=2.0, label=name, **steps)
    axes.plot(places[-1:], mean[-1:], 'o', color=steps['color'], markersize=4.4)
  title = '\n'.join(textwrap.wrap(metric, 60)).replace('$', r'\$')
  axes.set_title(title, loc='left', fontsize=POINTS + 1.5)
  axes.set_xlabel(history.X_AXES[x], fontsize=POINTS, color=colours['faint'])
  axes.tick_params(labelsize=POINTS - 1, colors=colours['faint'])
  axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
  axes.grid(color=colours['grid'], linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color(colours['line'])
  axes.legend(fontsize=POINTS - 1, edgecolor='none', labelcolor=colours['text'])
  figure.savefig(out, format='png')
