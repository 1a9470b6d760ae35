"""What is shown of runs, on the web page and in a report: curves, nodes, videos, differences."""

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import imageio.v2 as imageio
import numpy as np
from omegaconf import OmegaConf

from hephaestus.launch import config as launch_config
from hephaestus.launch.report import curves, history
from hephaestus.launch.run import folder as folder_lib

PAGE = pathlib.Path(__file__).parent / 'assets'  # how it looks, also in a report
VIDEOS = ('.gif', '.mp4', '.webm')
MOST_EVENTS = 12  # of a run, the newest
FRAMES_PER_SECOND = 8.0  # of a video that does not say
LEARNING, REPLAY = 'Learning', 'Replay over the run'
# Beginnings of 'NODE/METRIC', by the section in which they are drawn; the first that fits.
SECTIONS = {
  LEARNING: ('evaluator/', 'actor/episode', 'learner/episode'),
  'Intrinsic drives': ('learner/intrinsic/', 'learner/dream/horizon'),
  'World model': ('learner/world_model/',),
  'Dreams': ('learner/dream/',),
  'Actor and critic': ('learner/actor_critic/', 'learner/ppo/'),
  REPLAY: (
    'learner/replay/', 'learner/replay_ratio', 'learner/rejected_sequences', 'learner/staleness',
    'learner/discarded_fraction',
  ),
  'Speed': ('learner/', 'actor/'),
}  # fmt: skip
TITLES = {
  'evaluator/normalised_score': 'score (0 is random play, 1 scripted play)',
  'evaluator/episode_return': 'return of an episode, evaluated',
  'actor/episode_return': 'return of an episode, while acting',
  'actor/episode_return/median': 'return while acting, median and middle 90 %',
  'actor/episode_length': 'steps of an episode, while acting',
  'learner/episode_return': 'return of an episode, while acting',
  'evaluator/episode_length': 'steps of an episode, evaluated',
  'learner/episode_length': 'steps of an episode, while acting',
  'learner/intrinsic/novelty': 'novelty',
  'learner/intrinsic/novelty_fast': 'novelty, fast average',
  'learner/intrinsic/novelty_slow': 'novelty, slow average',
  'learner/intrinsic/competence': 'competence',
  'learner/intrinsic/clean_novelty_positive': 'share of rows with clean novelty',
  'learner/world_model/reward_correlation': 'correlation of rewards expected and real',
  'learner/dream/horizon': 'horizon, rows of a dream',
  'learner/replayed_steps_per_second': 'replayed steps learned per second',
  'learner/replay_ratio': 'replay ratio',
  'learner/replay/frontier/age/median': 'age of what is drawn from frontier, updates',
  'learner/replay/episodic/age/median': 'age of what is drawn from episodic, updates',
  'learner/starved_fraction': 'share of time the learner waits for data',
  'learner/rejected_sequences': 'sequences that the learner rejected',
  'learner/staleness': 'staleness, updates',
  'learner/discarded_fraction': 'share of sequences too old to learn from',
  'actor/steps_per_second': 'environment steps per second of an actor',
  'learner/steps_per_second': 'environment steps per second',
  'actor/throttled_fraction': 'share of time replay holds actors back',
  'actor/unrolled_fraction': 'share of time actors act and step their environments',
  'actor/inserted_fraction': 'share of time actors insert',
}

DREAM_NOTE = (
  'Beside its dream: left is what happened, right what the model made of it, under the green line of '
  'what it sees, under the purple one of what it dreams, told only the actions. The bars below are '
  'how much each row that it looked back on counted, the newest at the right.'
)


class Group(NamedTuple):
  """Runs that are seeds of one curve.

  Attributes:
    label: what tells it from the others of its environment.
    environment: of all of them.
    members: places of the runs.
  """

  label: str
  world: str
  members: list[int]


class Chart(NamedTuple):
  """One picture of curves.

  Attributes:
    key: 'NODE/METRIC'.
    section: in which it is drawn, one of SECTIONS.
    title: what it shows, with its unit.
  """

  key: str
  section: str
  title: str


class Curve(NamedTuple):
  """A metric of a group along an axis.

  Attributes:
    x: [N] f64, increasing.
    mean: [N] f64, the interquartile mean where all seeds are known; of one run, its mean.
    low: [N] f64, the lowest of the seeds; of one run, see `history.Thinned`.
    high: [N] f64, likewise.
    seeds: the runs of it, where there are several.
  """

  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  seeds: list[history.Series]


def groups(
  histories: Sequence[history.History], labels: Sequence[str | None] | None = None
) -> list[Group]:
  """In the order in which they come, those of an environment together.

  Args:
    histories: of the runs.
    labels: of each run that of the user's, if any; None: there are none.
  """
  runs = [curves.Run(each.folder, each.config, {}, []) for each in histories]
  given = labels or [None] * len(runs)
  found_groups = []
  for world in dict.fromkeys(run.world for run in runs):
    found = [(given[at], run, at) for at, run in enumerate(runs) if run.world == world]
    for label, members in curves.grouped(found):
      words = label or runs[members[0][1]].config.agent_name
      found_groups.append(Group(words, world, [index for _, index in members]))
  return found_groups


def names(folders: Sequence[pathlib.Path]) -> list[str]:
  """Of folders, as short as tells them apart."""
  lasts = [folder.name for folder in folders]
  return [
    folder.name if lasts.count(folder.name) == 1 else f'{folder.parent.name}/{folder.name}'
    for folder in folders
  ]


def charts(histories: Sequence[history.History]) -> list[Chart]:
  """Of all metrics of some runs: sections in their order, and first what has a title of its own."""
  keys = dict.fromkeys('/'.join(pair) for each in histories for pair in each.metrics())
  titled = list(TITLES)

  def order(chart: Chart) -> tuple[int, int, str]:
    place = titled.index(chart.key) if chart.key in TITLES else len(titled)
    return list(SECTIONS).index(chart.section), place, chart.key

  return sorted((_chart(key) for key in keys), key=order)


def _chart(key: str) -> Chart:
  section = next(name for name, starts in SECTIONS.items() if key.startswith(starts))
  last = key.removesuffix(history.MEDIAN).rsplit('/', 1)[-1]
  return Chart(key, section, TITLES.get(key) or last.replace('_', ' '))


def curve(members: Sequence[history.History], key: str, x: str) -> Curve | None:
  """Of all runs that have it; None of none.

  Args:
    members: of a group.
    key: of a chart.
    x: one of history.X_AXES.
  """
  node, metric = key.split('/', 1)
  found = [(each, each.thinned(node, metric, x)) for each in members]
  known = [(each, thin) for each, thin in found if thin is not None]
  if not known:
    return None
  if len(known) == 1:
    return Curve(*known[0][1], seeds=[])
  runs = [curves.Run(each.folder, each.config, {}, []) for each, _ in known]
  seeds = [history.Series(thin.x, thin.mean) for _, thin in known]
  together = curves.Curve('', runs, seeds)
  start, end = together.range
  places = curves.grid(together) if start <= end else np.zeros(0)
  values = together.at(places)
  mean = curves.interquartile_mean(values)
  return Curve(places, mean, values.min(axis=0), values.max(axis=0), seeds)


def gone(folder: pathlib.Path) -> str:
  """What to say of a run that is no more."""
  return f'the folder {folder} is gone, or no longer one of a run'


def state(run: history.History) -> dict[str, Any]:
  """A run as it is now.

  Returns:
    {'folder', 'environment', 'agent', 'seed', 'fused', 'state': in words, 'messages': what is to be said
    of it, 'environment_step', 'max_environment_steps', 'learner_step', 'score', 'episode_return',
    'written': unix seconds of its newest row, 'nodes', 'events'}; what is not known is None.
  """
  evaluator, learner = run.names('evaluator'), run.names('learner')
  newest = lambda names, key: max(
    (value for name in names if (value := run.last(name, key)) is not None), default=None
  )
  everyone = [name for node in history.NODES for name in run.names(node)]
  written = newest(everyone, 'time')
  running = folder_lib.is_running(run.folder)
  final = newest(evaluator, 'final') == 1
  ended = final and (newest(evaluator, 'time') or 0) >= (newest(learner, 'time') or 0)
  word = 'running' if running else 'finished' if ended else 'stopped' if written else 'not started'
  messages = []
  if run.is_gone:
    word = 'gone'
    messages.append(gone(run.folder))
  elif written is None:
    messages.append(
      'nothing has been measured yet: nodes import and compile, about half a minute'
      if running
      else f'nothing was measured; start it with: hephaestus train --run {run.folder}'
    )
  if run.broken:
    lines = 'line of its metrics is no row and is' if run.broken == 1 else 'lines of its metrics are no rows and are'  # fmt: skip
    messages.append(f'{run.broken} {lines} left out')
  return {
    'folder': str(run.folder),
    'world': str(run.config.environment['name']),
    'agent': run.config.agent_name,
    'seed': run.config.seed,
    'fused': run.config.fused,
    'state': word,
    'messages': messages,
    'environment_step': newest(everyone, 'environment_step'),
    'max_environment_steps': run.config.max_environment_steps,
    'learner_step': newest([*learner, *evaluator], 'learner_step'),
    'score': newest(evaluator, 'normalised_score'),
    'episode_return': newest(evaluator, 'episode_return'),
    'written': written,
    'nodes': _nodes(run, running),
    'events': _happened(run)[-MOST_EVENTS:],
  }


def _nodes(run: history.History, running: bool) -> list[dict[str, Any]]:
  """Each node with how it is, how often it was started again, and when it last wrote a row."""
  newest = {row['name']: row for row in run.events if 'pid' in row}
  words = {
    'started': 'running' if running else 'gone with its launcher',
    'restarting': 'waits for its restart',
    'gave_up': 'failed again and again',
    'finished': 'finished',
    'stopping': 'stopping' if running else 'gone with its launcher',
  }
  return [
    {
      'name': name,
      'state': words.get(row['kind'], 'stopped'),
      'restarts': sum(
        each.get('name') == name and each['kind'] == 'restarting' for each in run.events
      ),
      'since': row['time'],
      'wrote': run.last(name, 'time'),
    }
    for name, row in newest.items()
  ]


def _happened(run: history.History) -> list[dict[str, Any]]:
  """Restarts, failures and warnings, in words."""
  told = []
  for row in run.events:
    name, code = row.get('name'), row.get('exit_code')
    if row.get('kind') == 'restarting':
      text = f'{name} ended with code {code}; restart {row.get("restarts")}'
    elif row.get('kind') == 'gave_up':
      text = f'{name} failed again and again, the last time with code {code}'
    elif row.get('kind') == 'warning':
      text = str(row.get('text'))
    else:
      continue
    told.append({'time': row['time'], 'text': text})
  return told


def times(run: history.History, *, throughout: bool = False) -> list[dict[str, Any]]:
  """Where the time of learner and actors went, as shares: {'name', 'shares': {doing: share}} each.

  What no row speaks of is called by the first name.

  Args:
    run: to tell of.
    throughout: whether of all rows; else between the last two.
  """
  found = []
  for node, doings in (
    ('learner', {'updates': None, 'waits for data': 'starved_fraction'}),
    (
      'actor',
      {
        'other': None,
        'held back by replay': 'throttled_fraction',
        'acts and steps its environments': 'unrolled_fraction',
        'inserts': 'inserted_fraction',
      },
    ),
  ):
    for name in run.names(node):
      share_of = run.mean if throughout else run.last
      known = {
        doing: share
        for doing, key in doings.items()
        if key is not None and (share := share_of(name, key)) is not None
      }
      if known:
        rest = max(0.0, 1 - sum(known.values()))
        found.append({'name': name, 'shares': {next(iter(doings)): rest, **known}})
  return found


def videos(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
  """Of a run, the newest first, and when each was written, in milliseconds."""
  dated = []
  for path in (folder / 'videos').glob('*'):
    with contextlib.suppress(OSError):
      if path.suffix in VIDEOS and path.is_file():
        dated.append((path.stat().st_mtime_ns // 10**6, path))
  return sorted(dated, reverse=True)


def subject(video: pathlib.Path) -> dict[str, Any]:
  """What a video shows: {'update': of the agent, 'dream': whether beside its dream}."""
  number, _, dream = video.stem.partition('-')
  known = number.isdigit() and dream in ('', 'dream')
  return {'update': int(number) if known else None, 'dream': known and bool(dream)}


def to_mp4(video: pathlib.Path, made: pathlib.Path) -> None:
  """Turns a GIF, which has no pause and no place to jump to, into what a video element plays.

  Raises:
    Exception: whatever a decoder raises.
  """
  reader: Any = imageio.get_reader(str(video))
  with contextlib.closing(reader):
    milliseconds = reader.get_meta_data().get('duration') or 1000 / FRAMES_PER_SECOND
    frames = [np.asarray(frame)[..., :3] for frame in reader]
  temporary = made.with_suffix('.part.mp4')
  writer = imageio.get_writer(
    str(temporary), fps=1000 / milliseconds, codec='libx264', macro_block_size=2,
    output_params=['-movflags', 'faststart'],
  )  # fmt: skip
  with writer:
    for frame in frames:
      writer.append_data(frame)
  temporary.replace(made)


def differences(histories: Sequence[history.History]) -> dict[str, list[Any]]:
  """By path, the values of each run's config, where not all are the same."""
  flat = [
    launch_config.flatten(OmegaConf.to_container(OmegaConf.structured(each.config)))
    for each in histories
  ]
  keys = dict.fromkeys(key for each in flat for key in each)
  values = {key: [each.get(key) for each in flat] for key in keys}
  return {key: each for key, each in values.items() if any(value != each[0] for value in each)}
