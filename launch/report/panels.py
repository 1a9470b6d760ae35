"""The panels of the web page and of reports: curves, state, videos and config differences of runs."""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import imageio.v2 as imageio
import numpy as np
from PIL import Image

from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history, metrics
from hephaestus.launch.report import curves

VIDEOS = ('.gif', '.mp4', '.webm')
MOST_EVENTS = 12  # newest events of a run that are shown
MOST_PIXELS, MOST_VIDEO_PIXELS = (
  1 << 22,
  1 << 29,
)  # of a frame, and of all frames of a converted GIF
MOST_DIAGNOSIS = 1 << 20  # bytes of doctor.json that are read
DIGITS = 5  # significant digits of a number in a curve
FRAMES_PER_SECOND = 8.0  # assumed for a GIF that does not store its speed
LEARNING, ENVIRONMENT, REPLAY = 'Learning', 'Environment', 'Replay over the run'
# Sections of the page with titles of charts, by 'NODE/METRIC'. A chart is in the first section that has a
# beginning of its key, and is titled by the end of its key where this names no title.
SECTIONS = {
  LEARNING: {
    'evaluator/normalised_score': 'score (0: random policy, 1: scripted policy)',
    'evaluator/episode_return': 'episode return, evaluation',
    'actor/episode_return': 'episode return, acting',
    'actor/episode_return/median': 'episode return, acting, median and 5 to 95 %',
    'actor/episode_length': 'episode length, acting',
    'learner/episode_return': 'episode return, acting',
    'evaluator/episode_length': 'episode length, evaluation',
    'learner/episode_length': 'episode length, acting',
    'actor/explorer_return': 'episode return, exploring',
    'learner/explorer_return': 'episode return, exploring',
    'evaluator/episode': '', 'actor/episode': '', 'learner/episode': '',
    'actor/explorer': '', 'learner/explorer': '',
  },
  ENVIRONMENT: dict.fromkeys(
    ('evaluator/', 'actor/environment/', 'learner/environment/', 'learner/option/'), ''
  ),
  'Cognition': {
    'learner/intrinsic/survival': 'reward of survival, replayed steps',
    'learner/intrinsic/empowerment': 'empowerment, share of the largest',
    'learner/intrinsic/progress': 'learning progress, replayed steps',
    'learner/intrinsic/regions': 'regions reached, for learning progress',
    'learner/intrinsic/vital_error': 'mean error of decoded vitals',
    'learner/memory/filled': 'memory, share of entries in use',
    'learner/memory/written': 'memory, entries written by an update',
    'learner/memory/evidence': 'memory, evidence of all actions at a replayed step',
    'learner/memory/similarity': 'memory, similarity of the nearest entry',
    'learner/memory/age': 'memory, age of an entry, updates',
    'learner/memory/latent_age': 'memory, age of a latent at which dreams begin, updates',
    'learner/workspace/open': 'workspace, candidates open at a step',
    'learner/workspace/entropy': 'workspace, entropy of the shares, nats',
    'learner/slots/used': 'slots that hold most of some pixel',
    'learner/slots/image': 'loss of the image that slots paint',
    'learner/slots/change': 'change of slots, mean square',
    'learner/slots/change_error': 'error of predicted slots, mean square',
    'learner/intrinsic/vital_': '', 'learner/memory/': '', 'learner/workspace/': '', 'learner/slots/': '',
  },
  'Intrinsic rewards': {
    'learner/intrinsic/exploring': 'share of environments that explore',
    'learner/intrinsic/novelty': 'novelty',
    'learner/intrinsic/novelty_fast': 'novelty, fast average',
    'learner/intrinsic/novelty_slow': 'novelty, slow average',
    'learner/intrinsic/improvement': 'improvement',
    'learner/intrinsic/clean_novelty_positive': 'share of steps with clean novelty',
    'learner/dream/horizon': 'imagination horizon, steps',
    'learner/intrinsic/': '',
  },
  'World model': {
    'learner/world_model/reward_correlation': 'correlation of predicted and true rewards',
    'learner/world_model/': '',
  },
  'Dreams': {'learner/dream/': ''},
  'Actor and critic': {'learner/actor_critic/': '', 'learner/ppo/': ''},
  REPLAY: {
    'learner/replay_ratio': 'replay ratio',
    'learner/replay/frontier/age/median': 'age of sampled sequences, frontier, updates',
    'learner/replay/episodic/age/median': 'age of sampled sequences, episodic, updates',
    'learner/rejected_sequences': 'rejected sequences',
    'learner/lost_steps': 'environment steps lost by restarts of replay',
    'learner/staleness': 'staleness, updates',
    'learner/discarded_fraction': 'share of sequences discarded as too old',
    'learner/replay/': '',
  },
  'Speed': {
    'learner/replayed_steps_per_second': 'replayed steps per second',
    'learner/starved_fraction': 'share of time that the learner waits for data',
    'actor/steps_per_second': 'environment steps per second and actor',
    'learner/steps_per_second': 'environment steps per second',
    'actor/throttled_fraction': 'share of time that the rate limiter blocks actors',
    'actor/unrolled_fraction': 'share of time that actors unroll',
    'actor/inserted_fraction': 'share of time that actors insert',
    'learner/': '', 'actor/': '',
  },
}  # fmt: skip
# Share of time of a node by activity, and the activity with the time that its metrics leave.
ACTIVITIES = {
  'learner': ('updates', {'starved_fraction': 'waits for data'}),
  'actor': (
    'other',
    {
      'throttled_fraction': 'blocked by the rate limiter',
      'unrolled_fraction': 'unrolls',
      'inserted_fraction': 'inserts',
    },
  ),
}


class Chart(NamedTuple):
  """One picture of a metric's curves.

  Attributes:
    key: 'NODE/METRIC', where NODE is one of history.NODES.
    section: name of its section of the page, a key of SECTIONS.
    title: name of the metric in words, with its unit.
  """

  key: str
  section: str
  title: str


class GroupCurve(NamedTuple):
  """A metric of a group of runs along the x-axis.

  On the page it is {'x', 'mean', 'low', 'high', 'seeds': [{'x', 'mean'}]}, see `to_json`.

  Attributes:
    x: [N] f64, increasing positions.
    mean: [N] f64, interquartile mean over seeds; with one run, `mean` of `history.Curve`.
    low: [N] f64, lowest seed; with one run, `low` of `history.Curve`.
    high: [N] f64, highest seed; with one run, `high` of `history.Curve`.
    seeds: the curves of the single runs; empty with one run.
  """

  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  seeds: list[history.Series]


def names(folders: Sequence[pathlib.Path]) -> list[str]:
  """Short name of each folder: its last part, with the parent's name where several are equal."""
  lasts = [folder.name for folder in folders]
  return [
    folder.name if lasts.count(folder.name) == 1 else f'{folder.parent.name}/{folder.name}'
    for folder in folders
  ]


def keys(histories: Sequence[history.History]) -> list[str]:
  """Keys of the charts of all metrics of some runs, 'NODE/METRIC'."""
  return list(dict.fromkeys('/'.join(pair) for each in histories for pair in each.metrics()))


def charts(keys: Iterable[str]) -> list[Chart]:
  """Charts by their keys, ordered by section; those with a title in SECTIONS come first in theirs."""
  sections = list(SECTIONS)

  def order(chart: Chart) -> tuple[int, int, str]:
    named = list(SECTIONS[chart.section])
    at = named.index(chart.key) if SECTIONS[chart.section].get(chart.key) else len(named)
    return sections.index(chart.section), at, chart.key

  return sorted(map(_chart, set(keys)), key=order)


def _chart(key: str) -> Chart:
  section = next(name for name, starts in SECTIONS.items() if key.startswith(tuple(starts)))
  last = key.removesuffix(history.MEDIAN).rsplit('/', 1)[-1].replace('_', ' ')
  if key.startswith('learner/workspace/'):
    last = last.replace('share ', 'workspace, share of steps with ')
  if section == ENVIRONMENT:  # the same metric, of evaluations and of training
    of = {'evaluator/': ', evaluation', 'learner/option/': ', option'}
    last += next((text for start, text in of.items() if key.startswith(start)), ', acting')
  return Chart(key, section, SECTIONS[section].get(key) or last)


def curve(members: Sequence[history.History], key: str, x: str) -> GroupCurve | None:
  """Makes the curve of a group of runs.

  Args:
    members: the runs of the group.
    key: key of a chart, 'NODE/METRIC'.
    x: the x-axis, one of history.X_AXES.

  Returns:
    The curve; None if no run has the metric. With several seeds that have no x in common it has no
    points.
  """
  node, metric = key.split('/', 1)
  known = [thin for each in members if (thin := each.thinned(node, metric, x)) is not None]
  if len(known) < 2:
    return GroupCurve(*known[0][:4], seeds=[]) if known else None
  seeds = [history.Series(thin.x, thin.mean) for thin in known]
  together = curves.Curve('', [], seeds)
  start, end = together.range
  places = curves.grid(together) if start <= end else np.zeros(0)
  values = together.at(places)
  mean = curves.interquartile_mean(values)
  return GroupCurve(places, mean, values.min(axis=0), values.max(axis=0), seeds)


def drawn(members: Sequence[history.History], x: str) -> dict[str, GroupCurve]:
  """The curves of a group of runs by the keys of their charts, see `curve`."""
  found = {key: curve(members, key, x) for key in keys(members)}
  return {key: each for key, each in found.items() if each is not None}


def to_json(drawn: Mapping[str, GroupCurve]) -> dict[str, Any]:
  """Curves as JSON values, by the keys of their charts."""
  return {
    key: {name: rounded(getattr(each, name)) for name in ('x', 'mean', 'low', 'high')}
    | {'seeds': [{'x': rounded(seed.x), 'mean': rounded(seed.value)} for seed in each.seeds]}
    for key, each in drawn.items()
  }


def rounded(values: np.ndarray) -> list[float]:
  """Rounds finite numbers [N] to DIGITS significant digits; those with more before the point to integers."""
  with np.errstate(divide='ignore'):
    power = np.floor(np.log10(np.abs(values)))
  scale = 10.0 ** np.clip(DIGITS - 1 - np.where(np.isfinite(power), power, 0), 0, 300)
  return (np.round(values * scale) / scale).tolist()


def overview(
  histories: Sequence[history.History],
  groups: Sequence[curves.Group],
  show_videos: Callable[[int], list[dict[str, Any]]],
  *,
  throughout: bool = False,
) -> dict[str, Any]:
  """Describes runs for the page.

  Args:
    histories: the runs.
    groups: their groups, see `curves.groups`.
    show_videos: function from the index of a run to its videos: their `subject`, and 'source', an
      address, or 'reason', why they are not shown.
    throughout: see `times`.

  Returns:
    {'groups': [{'label', `'world'`: name of the environment, 'seeds': number of runs}],
    'runs': [the entries of `state`, 'times': see `times`, 'videos', 'name': short name,
    'group': index of its group]}
  """
  group_of = {run: at for at, group in enumerate(groups) for run in group.runs}
  short = names([each.folder for each in histories])
  return {
    'groups': [
      {'label': group.label, 'world': group.environment, 'seeds': len(group.runs)}
      for group in groups
    ],
    'runs': [
      state(each)
      | {'times': times(each, throughout=throughout), 'videos': show_videos(index)}
      | {'name': name, 'group': group_of[each]}
      for index, (each, name) in enumerate(zip(histories, short, strict=True))
    ],
  }


def gone(folder: pathlib.Path) -> str:
  """Returns the message for a run whose folder was deleted."""
  return f'the folder {folder} is gone, or no longer one of a run'


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
  known = {
    'folder': str(run.folder),
    'world': str(run.config.environment['name']),
    'agent': run.config.agent_name,
    'seed': run.config.seed,
    'fused': run.config.fused,
    'max_environment_steps': run.config.max_environment_steps,
  }
  try:
    return known | _state(run)
  except Exception as error:  # whatever the folder contains, other runs are shown
    unknown = ('environment_step', 'learner_step', 'score', 'episode_return', 'written')
    message = f'cannot be shown: {type(error).__name__}: {str(error)[:200]}'
    lists: dict[str, Any] = {'messages': [message], 'nodes': [], 'events': []}
    return known | dict.fromkeys(unknown) | lists | {'state': 'broken'}


def _state(run: history.History) -> dict[str, Any]:
  """The entries of `state` that are read from files."""
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
      'no metrics yet: nodes import and compile; logs/learner.log has what they do'
      if running
      else f'no metrics; start the run with: {folder_lib.resume_command(run.folder, run.config)}'
    )
  messages += _diagnosed(run.folder)
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


def _diagnosed(folder: pathlib.Path) -> list[str]:
  """Lines on the findings of the newest diagnosis of a run by `hephaestus doctor`."""
  path = folder / folder_lib.DIAGNOSIS
  if not path.exists():
    return []
  try:
    with metrics.open_regular(path) as file:
      diagnosis = json.loads(file.read(MOST_DIAGNOSIS))
    at = f'doctor at update {int(diagnosis["learner_step"]):,}'
    return [f'{at}: {text}' for text in diagnosis['findings']] or [f'{at}: no findings']
  except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
    return [f'{folder_lib.DIAGNOSIS} is damaged; `hephaestus doctor {folder}` writes it again']


def _nodes(run: history.History, running: bool) -> list[dict[str, Any]]:
  """State of each node, the number of its restarts, and the time of its newest metrics."""
  newest = {row['name']: row for row in run.events if 'pid' in row and 'name' in row}
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


def times(run: history.History, *, throughout: bool = False) -> list[dict[str, Any]]:
  """Share of time that the learner and each actor spend by activity, see ACTIVITIES.

  Args:
    run: the run.
    throughout: whether to average over the whole run; else the newest row of metrics counts.

  Returns:
    {'name', 'shares': {ACTIVITY: share}} of each learner process and actor with such metrics.
  """
  found = []
  share_of = run.mean if throughout else run.last
  for node, (rest, activities) in ACTIVITIES.items():
    for name in run.names(node):
      shares = {activity: share_of(name, key) for key, activity in activities.items()}
      known = {activity: share for activity, share in shares.items() if share is not None}
      if known:
        shares = {rest: max(0.0, 1 - sum(known.values())), **known}
        found.append({'name': name, 'shares': shares})
  return found


def videos(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
  """Modification time (unix milliseconds) and path of each video of a run, the newest first."""
  dated = []
  for path in (folder / 'videos').glob('*'):
    with contextlib.suppress(OSError):
      if path.suffix in VIDEOS and path.is_file() and not path.is_symlink():
        dated.append((path.stat().st_mtime_ns // 10**6, path))
  return sorted(dated, reverse=True)


def subject(video: pathlib.Path) -> dict[str, Any]:
  """Describes a video of a run by the name of its file.

  Returns:
    {'update': learner step of the agent, None if unknown, 'dream': whether it shows a dream, too}
  """
  number, _, dream = video.stem.partition('-')
  known = number.isdecimal() and dream in ('', 'dream')
  return {'update': int(number) if known else None, 'dream': known and bool(dream)}


def to_mp4(video: pathlib.Path, made: pathlib.Path) -> None:
  """Converts a GIF, which browsers cannot pause or seek, to MP4.

  Args:
    video: path of the GIF.
    made: path of the MP4 to write; its length is bounded by MOST_VIDEO_PIXELS.

  Raises:
    Exception: the GIF cannot be decoded, or its frames are too large; decoders raise errors of any type.
  """
  with metrics.open_regular(video) as file, Image.open(file, formats=['GIF']) as image:
    pixels = image.width * image.height
    if pixels > MOST_PIXELS:
      raise ValueError(f'its frames have {pixels:,} pixels; at most {MOST_PIXELS:,} are shown')
    milliseconds = image.info.get('duration') or 1000 / FRAMES_PER_SECOND
    temporary = made.with_suffix('.part.mp4')
    writer: Any = imageio.get_writer(
      str(temporary), fps=1000 / milliseconds, codec='libx264', macro_block_size=2,
      output_params=['-movflags', 'faststart'],
    )  # fmt: skip
    with writer:
      # A few bytes of a GIF may stand for gigabytes.
      for index in range(max(1, MOST_VIDEO_PIXELS // pixels)):
        try:
          image.seek(index)
        except EOFError:
          break
        if image.width * image.height > MOST_PIXELS:  # a later frame may be larger
          raise ValueError(f'a frame has more than {MOST_PIXELS:,} pixels')
        writer.append_data(np.asarray(image.convert('RGB')))
  temporary.replace(made)


def differences(histories: Sequence[history.History]) -> dict[str, list[Any]]:
  """Config values in which runs differ: {PATH: [the value of each run, None where it has none]}.

  For runs of several agents these are the values that all of them have, and options of environments.
  """
  flat = [each.config_values for each in histories]
  keys = dict.fromkeys(key for each in flat for key in each)
  if len({each.config.agent_name for each in histories}) > 1:
    keys = {
      key: None
      for key in keys
      if key.startswith('environment.') or all(key in each for each in flat)
    }
  values = {key: [each.get(key) for each in flat] for key in keys}
  return {key: each for key, each in values.items() if any(value != each[0] for value in each)}
