"""The panels of the web page and of reports: curves, state, videos and config differences of runs."""

import collections
import contextlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history
from hephaestus.launch.report import groups as groups_lib

VIDEOS = {'.gif': 'image/gif', '.mp4': 'video/mp4'}  # media types
MOST_EVENTS = 12  # newest events of a run that are shown
SEED_POINTS = 101  # most points of a curve of several seeds
DIGITS = 5  # significant digits of a number in a curve
ENVIRONMENT, COGNITION = 'Environment', 'Cognition'
# Sections of the page, by beginnings of the keys 'NODE/METRIC' of their charts: the first that has one.
SECTIONS = {
  'Learning': (
    *(f'{node}/{metric}' for node in history.NODES for metric in ('episode_', 'explorer')),
    'evaluator/normalised_score',
  ),
  ENVIRONMENT: ('evaluator/', 'actor/environment/', 'learner/environment/'),
  COGNITION: (
    'learner/intrinsic/survival', 'learner/intrinsic/empowerment', 'learner/intrinsic/progress',
    'learner/intrinsic/regions', 'learner/intrinsic/vital_', 'learner/memory/', 'learner/workspace/',
    'learner/slots/',
  ),
  'Intrinsic rewards': ('learner/intrinsic/', 'learner/dream/horizon'),
  'World model': ('learner/world_model/',),
  'Dreams': ('learner/dream/',),
  'Actor and critic': ('learner/actor_critic/', 'learner/ppo/'),
  'Replay over the run': (
    'learner/replay/', 'learner/replay_ratio', 'learner/rejected_sequences', 'learner/lost_steps',
    'learner/staleness', 'learner/discarded_fraction',
  ),
  'Speed': ('learner/', 'actor/'),
}  # fmt: skip
# Titles of charts that begin their sections; others are titled by their keys.
TITLES = {
  'evaluator/normalised_score': 'score (0: random policy, 1: scripted policy)',
  'evaluator/episode_return': 'episode return, evaluation',
  'actor/episode_return': 'episode return, acting',
  'actor/episode_return/median': 'episode return, acting, median and 5 to 95 %',
  'learner/episode_return': 'episode return, acting',
  'actor/explorer_return': 'episode return, exploring',
  'learner/explorer_return': 'episode return, exploring',
  'learner/intrinsic/exploring': 'share of environments that explore',
  'learner/intrinsic/novelty': 'novelty',
  'learner/intrinsic/clean_novelty_positive': 'share of steps with clean novelty',
  'learner/dream/horizon': 'imagination horizon, steps',
  'learner/world_model/reward_correlation': 'correlation of predicted and true rewards',
  'learner/replay_ratio': 'replay ratio',
  'learner/replay/frontier/age/median': 'age of sampled sequences, frontier, updates',
  'learner/replay/episodic/age/median': 'age of sampled sequences, episodic, updates',
  'learner/staleness': 'staleness, updates',
  'learner/discarded_fraction': 'share of sequences discarded as too old',
  'learner/replayed_steps_per_second': 'replayed steps per second',
  'learner/starved_fraction': 'share of time that the learner waits for data',
  'actor/steps_per_second': 'environment steps per second and actor',
  'learner/steps_per_second': 'environment steps per second',
  'actor/episodes_per_minute': 'episodes per minute and actor',
  'learner/episodes_per_minute': 'episodes per minute',
  'actor/throttled_fraction': 'share of time that the rate limiter blocks actors',
}

# Of metrics by the last word of their keys; others are numbers without a unit.
UNITS = {
  'approx kl': 'nats', 'entropy': 'nats', 'episode length': 'steps', 'explorer entropy': 'nats',
  'kl': 'nats', 'kl after first': 'nats',
}  # fmt: skip


class GroupCurve(NamedTuple):
  """A metric of a group of runs along the x-axis; of one run, its `history.Curve`, without seeds."""

  x: np.ndarray  # [N] f64, increasing positions
  mean: np.ndarray  # [N] f64, interquartile mean over seeds
  low: np.ndarray  # [N] f64, lowest seed
  high: np.ndarray  # [N] f64, highest seed
  seeds: Sequence[history.Curve]


def charts(keys: Iterable[str]) -> list[dict[str, str]]:
  """Describes the charts of metrics by their keys 'NODE/METRIC', in the order of the page.

  Returns:
    [{'key', 'section': one of SECTIONS, 'title': name of the metric in words, with its unit; each has its own}],
    by section; charts of TITLES come first in theirs.
  """
  sections, titled = list(SECTIONS), list(TITLES)
  found = []
  for key in set(keys):
    section = next(name for name, starts in SECTIONS.items() if key.startswith(starts))
    node, *words = key.removesuffix(history.MEDIAN).replace('_', ' ').split('/')
    title = ', '.join(words[-2:] if section == COGNITION else words[-1:])
    if section in (ENVIRONMENT, 'Learning'):  # the same metric, of evaluations and of training
      title += ', evaluation' if node == 'evaluator' else ', acting'
    if words[-1] in UNITS:
      title += f', {UNITS[words[-1]]}'
    place = titled.index(key) if key in TITLES else len(titled)
    chart = {'key': key, 'section': section, 'title': TITLES.get(key, title)}
    found.append((sections.index(section), place, key, chart))
  count = collections.Counter(chart['title'] for *_, chart in found)
  for *_, key, chart in found:
    if count[chart['title']] > 1:
      where, _, _ = key.removesuffix(history.MEDIAN).replace('_', ' ').rpartition('/')
      chart['title'] += f' ({where.removeprefix("learner/")})'
  return [chart for *_, chart in sorted(found)]


def drawn(runs: Sequence[history.History], x: str) -> dict[str, GroupCurve]:
  """The curves of a group of runs by the keys of their charts, over one of history.X_AXES."""
  of_runs = [run.curves(x) for run in runs]
  keys = dict.fromkeys(key for curves in of_runs for key in curves)
  return {key: _together([curves[key] for curves in of_runs if key in curves]) for key in keys}


def _together(seeds: Sequence[history.Curve]) -> GroupCurve:
  """The curve of one or more seeds where all have values: nowhere, if they have no x in common."""
  if len(seeds) == 1:
    return GroupCurve(*seeds[0][:4], seeds=[])
  start, end = max(each.x[0] for each in seeds), min(each.x[-1] for each in seeds)
  places = np.unique(np.concatenate([each.x for each in seeds]))
  places = places[(places >= start) & (places <= end)]
  if len(places) > SEED_POINTS:
    places = np.linspace(start, end, SEED_POINTS)
  values = np.stack([history.at(each.x, each.mean, places) for each in seeds])
  quarter = len(values) // 4  # that the interquartile mean leaves out at both ends
  mean = np.sort(values, axis=0)[quarter : len(values) - quarter].mean(axis=0)
  return GroupCurve(places, mean, values.min(axis=0), values.max(axis=0), seeds)


def to_json(drawn: Mapping[str, GroupCurve]) -> dict[str, Any]:
  """Curves as JSON values by the keys of their charts: {'x', 'mean', 'low', 'high', 'seeds': [{'x', 'mean'}]}."""
  return {
    key: {name: rounded(getattr(each, name)) for name in ('x', 'mean', 'low', 'high')}
    | {'seeds': [{'x': rounded(seed.x), 'mean': rounded(seed.mean)} for seed in each.seeds]}
    for key, each in drawn.items()
  }


def rounded(values: np.ndarray) -> list[float]:
  """Rounds finite numbers [N] to DIGITS significant digits; those with more before the point to integers."""
  with np.errstate(divide='ignore'):
    power = np.floor(np.log10(np.abs(values)))
  scale = 10.0 ** np.clip(DIGITS - 1 - np.where(np.isfinite(power), power, 0), 0, 300)
  return (np.round(values * scale) / scale).tolist()


def overview(
  groups: Sequence[groups_lib.Group], videos: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:
  """Describes runs for the page, in the order of their groups.

  Args:
    groups: the groups of the runs.
    videos: the videos of each run: {'name', 'update', 'dream'}, see `Video`, and 'source', an address, or
      'reason', why it is not shown.

  Returns:
    {'groups': [{'label', `'world'`: name of the environment, 'seeds': number of runs}],
    'runs': [the entries of `state`, 'videos', 'name': short name, 'group': index of its group], 'differences': see `groups.differences`}
  """
  runs = [(at, run) for at, group in enumerate(groups) for run in group.runs]
  lasts = [run.folder.name for _, run in runs]
  short = lambda path: '/'.join(path.parts[-1 - (lasts.count(path.name) > 1) :])
  return {
    'groups': [
      {'label': group.label, 'world': group.environment, 'seeds': len(group.runs)}
      for group in groups
    ],
    'runs': [
      {**state(run), 'videos': shown, 'name': short(run.folder), 'group': at}
      for (at, run), shown in zip(runs, videos, strict=True)
    ],
    'differences': groups_lib.differences([run for _, run in runs]),
  }


def state(run: history.History) -> dict[str, Any]:
  """Describes the present state of a run.

  Returns:
    {'folder', `'world'`: name of the environment, 'agent', 'seed', 'fused', 'state': 'running',
    'finished', 'stopped', 'not started', 'gone' or 'broken', 'messages': a line for each remark,
    'environment_step', 'max_environment_steps', 'learner_step', 'score': newest normalised score,
    'episode_return': mean of the newest evaluation, 'written': unix seconds of its newest metrics,
    'nodes': [{'name', 'state': in words, 'style': class of page.css, 'restarts', 'wrote': unix
    seconds of its newest metrics}], 'events': [{'time': unix seconds, 'text'}]}; unknown values are
    None.
  """
  config = run.config
  known: dict[str, Any] = {
    'folder': str(run.folder), 'world': str(config.environment['name']), 'agent': config.agent_name,
    'seed': config.seed, 'fused': config.fused, 'max_environment_steps': config.max_environment_steps,
    **dict.fromkeys(('environment_step', 'learner_step', 'score', 'episode_return', 'written')),
    'state': 'broken', 'nodes': [], 'events': [],
  }  # fmt: skip
  try:
    return known | _state(run)
  except Exception as error:  # whatever the folder contains, other runs are shown
    message = f'cannot be shown: {type(error).__name__}: {str(error)[:200]}'
    return known | {'messages': [message]}


def _state(run: history.History) -> dict[str, Any]:
  """The entries of `state` that are read from files."""
  evaluator, learner = run.names('evaluator'), run.names('learner')
  newest = lambda names, key: max(
    (value for name in names if (value := run.last(name, key)) is not None), default=None
  )
  everyone = [name for node in history.NODES for name in run.names(node)]
  written = newest(everyone, 'time')
  running = folder_lib.is_running(run.folder)
  is_at_end = folder_lib.reaches_end(run.config, newest(evaluator, 'environment_step'))
  final = newest(evaluator, 'final') == 1 and is_at_end
  ended = final and (newest(evaluator, 'time') or 0) >= (newest(learner, 'time') or 0)
  word = 'running' if running else 'finished' if ended else 'stopped' if written else 'not started'
  messages = []
  if run.is_gone:
    word = 'gone'
    messages.append(f'the folder {run.folder} is gone, or no longer one of a run')
  elif written is None:
    messages.append(
      'no metrics yet: nodes import and compile; logs/learner.log has what they do'
      if running
      else f'no metrics; start the run with: {folder_lib.resume_command(run.folder, run.config)}'
    )
  if run.damage:
    messages.append(run.damage)
  return {
    'state': word,
    'messages': messages,
    'environment_step': newest(everyone, 'environment_step'),
    'learner_step': newest([*learner, *evaluator], 'learner_step'),
    'score': newest(evaluator, 'normalised_score'),
    'episode_return': newest(evaluator, 'episode_return'),
    'written': written,
    'nodes': _nodes(run, running),
    'events': _events(run)[-MOST_EVENTS:],
  }


def _nodes(run: history.History, running: bool) -> list[dict[str, Any]]:
  """State of each node, the number of its restarts, and the time of its newest metrics."""
  rows = [row for row in run.events if 'pid' in row and 'name' in row]
  newest = {row['name']: row for row in rows if folder_lib.is_node(row['name'], run.config)}
  killed = ('killed with its launcher', 'failed')
  states = {
    'started': ('running', 'running') if running else killed,
    'restarting': ('waits for its restart', 'waits'),
    'gave_up': ('failed again and again', 'failed'),
    'finished': ('finished', 'finished'),
    'stopping': ('stopping', 'waits') if running else killed,
  }
  nodes = []
  for name, row in newest.items():
    words, style = states.get(row['kind'], ('stopped', 'stopped'))
    restarts = sum(each.get('name') == name and each['kind'] == 'restarting' for each in run.events)
    known = {'name': name, 'state': words, 'style': style, 'restarts': restarts}
    nodes.append(known | {'wrote': run.last(name, 'time')})
  return nodes


def _events(run: history.History) -> list[dict[str, Any]]:
  """Restarts, failures and warnings, in words."""
  events = []
  for row in run.events:
    name, code = row.get('name'), row.get('exit_code')
    if row.get('kind') == 'restarting':
      text = f'{name} exited with code {code}; restart {row.get("restarts", 0) + 1}'
    elif row.get('kind') == 'gave_up':
      text = f'{name} failed again and again, the last time with code {code}'
    elif row.get('kind') == 'warning':
      text = str(row.get('text'))
    else:
      continue
    events.append({'time': row['time'], 'text': text})
  return events


class Video(NamedTuple):
  """A video of a run."""

  written: int  # unix milliseconds of its last change
  path: pathlib.Path
  update: int | None  # learner step of the agent, by the name of the file
  dream: bool  # whether it shows a dream, too


def videos(folder: pathlib.Path) -> list[Video]:
  """The videos of a run, the newest first."""
  found = []
  for path in (folder / 'videos').glob('*'):
    with contextlib.suppress(OSError):
      if path.suffix in VIDEOS and path.is_file() and not path.is_symlink():
        update, _, dream = path.stem.partition('-')
        known = update.isdecimal() and dream in ('', 'dream')
        written = path.stat().st_mtime_ns // 10**6
        found.append(Video(written, path, int(update) if known else None, known and bool(dream)))
  return sorted(found, reverse=True)
