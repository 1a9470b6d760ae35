"""`hephaestus evaluate`, `watch`, `dashboard` and `report`: show the results of runs."""

import argparse
import pathlib
import sys
from typing import Any

from hephaestus.launch.run import flags
from hephaestus.launch.run import request as request_lib

MOST_EPISODES = 1_000_000


def add(commands: Any) -> None:
  """Adds the commands that show results of runs to the parser."""
  evaluate = commands.add_parser('evaluate', allow_abbrev=False, help='score an agent')
  add_agent(evaluate)
  add = evaluate.add_argument
  add('--episodes', type=int, default=256)
  add('--seed', type=int, default=0)
  add('--actions', nargs='+', choices=['greedy', 'sampled', 'random'],
      help='one result for each of these; random is a baseline (default: as the run is evaluated)')  # fmt: skip
  add('--json', action='store_true')
  evaluate.set_defaults(call=_evaluate)

  watch = commands.add_parser('watch', allow_abbrev=False, help='show episodes of an agent')
  add_agent(watch)
  add = watch.add_argument
  add('--seed', type=int, default=0)
  add('--fps', type=float, default=8.0, help='frames per second')
  add('--episodes', type=int, default=1)
  add('--output', type=pathlib.Path, help='write a video instead, .gif or .mp4')
  add('--dream', action='store_true',
      help="show the world model's prediction next to the episode")  # fmt: skip
  add('--greedy', action=argparse.BooleanOptionalAction,
      help='greedy or sampled actions (default: as the run is evaluated)')  # fmt: skip
  watch.set_defaults(call=_watch)

  dashboard = commands.add_parser(
    'dashboard', allow_abbrev=False, help='serve a web page of runs on the loopback interface'
  )
  runs = {'type': pathlib.Path, 'metavar': 'RUN', 'help': 'folder of a run'}
  dashboard.add_argument('runs', nargs='+', **runs)
  dashboard.add_argument(
    '--port', type=int, default=0, help='port of 127.0.0.1 (default: a free one)'
  )
  dashboard.set_defaults(call=_dashboard)

  report = commands.add_parser(
    'report',
    allow_abbrev=False,
    help='compare runs: their last scores, and the page of `dashboard` as one HTML file',
    description='Runs that differ only in their seed become one curve. Prints the last score of each '
    'curve; with --out also writes report.html, which needs the extra `report`.',
  )
  add = report.add_argument
  add('runs', nargs='*', **runs)
  add('--out', type=pathlib.Path,
      help='folder for report.html with curves, losses, intrinsic rewards, speed, nodes, videos and '
      'config differences in one file')  # fmt: skip
  add('--x', choices=['environment_step', 'learner_step', 'minutes'], default='environment_step',
      help='default: environment_step; minutes count from the first metrics, without pauses')  # fmt: skip
  report.set_defaults(call=_report)
  for each in (evaluate, watch, dashboard, report):
    request_lib.add(each, 'trust')


def add_agent(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments that name an agent: `run` and `--checkpoint`."""
  parser.add_argument(
    'run',
    type=pathlib.Path,
    help='folder of a run or of an exported policy, or the name of an agent that comes with the package: '
    'catch, grid_world, hackmatrix or gymnax/CartPole-v1',
  )
  parser.add_argument(
    '--checkpoint', metavar='best|STEP', help='by evaluation or by update (default: the newest)'
  )


def _check(arguments: argparse.Namespace) -> None:
  """Raises ValueError, before imports that take seconds, for episodes that cannot be played."""
  from hephaestus.launch.interface import places

  if not 1 <= arguments.episodes <= MOST_EPISODES:
    raise ValueError(f'--episodes {arguments.episodes}: must be from 1 to {MOST_EPISODES:,}')
  flags.check_seed(arguments.seed)
  places.check(arguments.run)


def _evaluate(arguments: argparse.Namespace) -> int:
  flags.leave_accelerators()
  _check(arguments)
  from hephaestus.launch.files import metrics
  from hephaestus.launch.report import play

  for actions in arguments.actions or [None]:
    result = play.evaluate(
      arguments.run, arguments.episodes, arguments.seed, actions, arguments.checkpoint
    )
    if actions:
      result = {'actions': actions, **result}
    if arguments.json:
      print(metrics.to_json(result), flush=True)
    else:
      for name, value in result.items():
        if value is not None:  # such as a score without a scripted policy
          print(f'{name:<18} {value}')
  return 0


def _watch(arguments: argparse.Namespace) -> int:
  flags.leave_accelerators()
  if not arguments.fps > 0:
    raise ValueError(f'--fps {arguments.fps}: must be positive')
  if arguments.dream and arguments.output is None:
    raise ValueError('--dream: is a video; add --output FILE, .gif or .mp4')
  if arguments.output is not None and arguments.output.suffix not in ('.gif', '.mp4'):
    raise ValueError(f'--output {arguments.output}: the name must end in .gif or .mp4')
  _check(arguments)
  try:
    from hephaestus.launch.interface import policy
    from hephaestus.launch.report import play

    play.watch(
      policy.load(arguments.run, arguments.checkpoint),
      seed=arguments.seed,
      episodes=arguments.episodes,
      frames_per_second=arguments.fps,
      greedy=arguments.greedy,
      output=arguments.output,
      dream=arguments.dream,
    )
  except KeyboardInterrupt:  # before the first step
    print('stopped')
  return 0


def _dashboard(arguments: argparse.Namespace) -> int:
  flags.leave_accelerators()
  from hephaestus.launch.report import dashboard

  dashboard.serve(arguments.runs, arguments.port)
  return 0


def _report(arguments: argparse.Namespace) -> int:
  flags.leave_accelerators()
  from hephaestus.launch.report import page

  lines, remarks = page.report(arguments.runs, out=arguments.out, x=arguments.x)
  print('\n'.join(lines))
  for remark in remarks:
    print(f'hephaestus report: {remark}', file=sys.stderr)
  return 0
