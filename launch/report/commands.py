"""`hephaestus evaluate`, `watch`, `dashboard` and `report`: results of runs."""

import argparse
import os
import pathlib
import sys
from typing import Any

from absl import logging as absl_logging


def add(commands: Any) -> None:
  """Declares the commands that show results of runs."""
  _add_evaluate(commands)
  _add_watch(commands)
  _add_dashboard(commands)
  _add_report(commands)


def _add_evaluate(commands: Any) -> None:
  evaluate = commands.add_parser(
    'evaluate', allow_abbrev=False, help='score the newest checkpoint of a run'
  )
  evaluate.add_argument('run', type=pathlib.Path)
  evaluate.add_argument('--episodes', type=int, default=256)
  evaluate.add_argument('--video', type=pathlib.Path, help='video of one episode, .gif or .mp4')
  evaluate.add_argument('--seed', type=int, default=0)
  evaluate.add_argument(
    '--random', action='store_true', help='play at random instead: what to compare a score with'
  )
  evaluate.add_argument('--json', action='store_true')
  evaluate.set_defaults(call=_evaluate)


def _add_watch(commands: Any) -> None:
  watch = commands.add_parser(
    'watch', allow_abbrev=False, help='see the newest checkpoint of a run play'
  )
  watch.add_argument('run', type=pathlib.Path)
  watch.add_argument('--seed', type=int, default=0)
  watch.add_argument('--fps', type=float, default=8.0, help='frames in a second')
  watch.add_argument('--episodes', type=int, default=1)
  watch.add_argument('--output', type=pathlib.Path, help='a video instead, .gif or .mp4')
  watch.add_argument(
    '--dream', action='store_true', help='the video shows beside it what its world model dreams'
  )
  watch.add_argument(
    '--greedy',
    action=argparse.BooleanOptionalAction,
    help='by the mode of the policy, or by chance (default: as the run is evaluated)',
  )
  watch.set_defaults(call=_watch)


def _add_dashboard(commands: Any) -> None:
  dashboard = commands.add_parser(
    'dashboard', allow_abbrev=False, help='a web page that shows runs, on this machine alone'
  )
  dashboard.add_argument(
    'runs', type=pathlib.Path, nargs='+', metavar='RUN', help='folder of a run'
  )
  dashboard.add_argument('--port', type=int, default=0, help='of 127.0.0.1 (default: a free one)')
  dashboard.set_defaults(call=_dashboard)


def _add_report(commands: Any) -> None:
  report = commands.add_parser(
    'report',
    allow_abbrev=False,
    help='learning curves of runs, with their spread over seeds',
    description='Runs that differ in nothing but their seed become one curve. Prints a table for each '
    'environment; with --out writes what the page of `dashboard` shows, as pictures and as one file. Needs '
    'the extra `report`.',
  )
  report.add_argument('runs', type=pathlib.Path, nargs='*', metavar='RUN', help='folder of a run')
  report.add_argument(
    '--out',
    type=pathlib.Path,
    help='folder for report.md, a PNG of each curve, and report.html, which has all in one file: '
    'curves, losses, drives, speed, nodes, videos, differences',
  )
  report.add_argument(
    '--metric',
    help='a key of metrics/*.jsonl, which is then shown alone (default: score, or return where there '
    'is none)',
  )
  report.add_argument(
    '--node',
    choices=['evaluator', 'learner', 'actor'],
    help='default: the first that has the metric',
  )
  report.add_argument(
    '--x',
    choices=['environment_step', 'learner_step', 'minutes'],
    default='environment_step',
    help='default: environment_step; minutes count from the first row on, while the run was running',
  )
  report.add_argument(
    '--label',
    nargs='+',
    action='append',
    default=[],
    metavar=('NAME', 'RUN'),
    help='name a curve and the runs that it is made of, whatever they differ in; may be repeated, as '
    'in --label small runs/small-* --label large runs/large-*',
  )
  report.set_defaults(call=_report)


def _evaluate(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # read when JAX is imported; a run may own the rest
  from hephaestus.launch.report import evaluate
  from hephaestus.launch.run import metrics

  if arguments.episodes < 1:
    raise ValueError(f'--episodes {arguments.episodes}: must be at least 1')
  if arguments.video is not None and arguments.video.suffix not in ('.gif', '.mp4'):
    raise ValueError(f'--video {arguments.video}: the name must end in .gif or .mp4')
  result = evaluate.evaluate(
    arguments.run, arguments.episodes, arguments.video, arguments.seed, at_random=arguments.random
  )
  if arguments.json:
    print(metrics.to_json(result))
  else:
    for name, value in result.items():
      print(f'{name:<18} {value}')
  return 0


def _watch(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # as above
  if arguments.episodes < 1:
    raise ValueError(f'--episodes {arguments.episodes}: must be at least 1')
  if not arguments.fps > 0:
    raise ValueError(f'--fps {arguments.fps}: must be positive')
  if arguments.output is not None and arguments.output.suffix not in ('.gif', '.mp4'):
    raise ValueError(f'--output {arguments.output}: the name must end in .gif or .mp4')
  if arguments.dream and arguments.output is None:
    raise ValueError('--dream: is a video; add --output FILE, .gif or .mp4')
  try:
    from hephaestus.launch.report import play

    play.watch(
      arguments.run,
      seed=arguments.seed,
      episodes=arguments.episodes,
      frames_per_second=arguments.fps,
      greedy=arguments.greedy,
      output=arguments.output,
      dream=arguments.dream,
    )
  except KeyboardInterrupt:  # before anything was played
    print('stopped')
  return 0


def _dashboard(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # read when JAX is imported; a run may own the rest
  from hephaestus.launch.report import dashboard

  dashboard.serve(arguments.runs, arguments.port)
  return 0


def _report(arguments: argparse.Namespace) -> int:
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # read when JAX is imported; a run may own the rest
  from hephaestus.launch.report import curves, page

  absl_logging.set_verbosity(absl_logging.WARNING)  # rliable says what it calculates
  for name, *runs in arguments.label:
    if not runs:
      raise ValueError(f'--label {name}: give the runs as well, as in --label NAME RUN RUN')
  all_panels = arguments.out is not None and arguments.metric is None
  made = curves.make(
    arguments.runs,
    [(name, [pathlib.Path(run) for run in runs]) for name, *runs in arguments.label],
    metric=arguments.metric,
    node=arguments.node,
    x=arguments.x,
    pictures=arguments.out is not None,
    all_panels=all_panels,
  )
  remarks = [f'left out: {reason}' for reason in made.left_out]
  if arguments.out is not None:
    remarks += page.write(made, arguments.out, x=arguments.x, all_panels=all_panels)
  print(made.markdown, end='')
  for remark in remarks:
    print(f'hephaestus report: {remark}', file=sys.stderr)
  return 0
