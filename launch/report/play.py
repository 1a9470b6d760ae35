"""Plays episodes of an agent: scores them, or shows them in a terminal, as lines of text, or as a video."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import rich.color
import rich.console
import rich.live
import rich.style
import rich.table
import rich.text
from PIL import Image

from hephaestus.actors import environments, rollout, videos
from hephaestus.actors import episodes as episodes_lib
from hephaestus.launch.interface import policy as policy_lib

NUMBERS = 30  # columns of a terminal that are reserved for the numbers next to the picture
LIKELIEST = 8  # most probable actions that are shown


def evaluate(
  path: pathlib.Path,
  episodes: int,
  seed: int,
  actions: str | None = None,
  checkpoint: str | None = None,
) -> dict[str, Any]:
  """Evaluates an agent on whole episodes; its run may still be training.

  Args:
    path, checkpoint: as of `policy.load`.
    episodes: least number of episodes.
    actions: 'greedy', 'sampled', or 'random' for the random policy, uniform over legal actions; None: as in
      the evaluations of the run.

  Returns:
    {'learner_step', the entries of `episodes.Evaluation.row`}; and 'package', name and version of the
    environment's package, on which a score may depend, if it is another's.

  Raises:
    ValueError: as `policy.load`.
  """
  params: Any
  if actions == 'random':
    config, step = policy_lib.load_config(path), 0
    environment = config.make_environment()
    agent, params = rollout.random_agent(environment.action_spec), ()
  else:
    policy = policy_lib.load(path, checkpoint)
    config, step, environment = policy.config, policy.learner_step, policy.environment
    agent, params = policy.agent, policy.params
  greedy = config.evaluator.greedy if actions is None else actions == 'greedy'
  play = episodes_lib.Play(environment, agent, min(episodes, 64), greedy=greedy)
  play_key, _ = jax.random.split(jax.random.key(seed))
  with contextlib.closing(play):
    result = play.evaluate(params, play_key, episodes)
  assert result is not None  # nothing stops it
  package = environments.package(config.environment['name'])
  return {'learner_step': step, **result.row(), **({'package': package} if package else {})}


def watch(
  policy: policy_lib.Policy,
  *,
  seed: int = 0,
  episodes: int = 1,
  frames_per_second: float = 8.0,
  greedy: bool | None = None,
  output: pathlib.Path | None = None,
  dream: bool = False,
  console: rich.console.Console | None = None,
) -> None:
  """Plays episodes of an agent on the console or into a video; Ctrl-C ends either early.

  Args:
    frames_per_second: speed of a video or of the live view; lines of text are printed at once.
    greedy: whether actions are greedy, else sampled; None: as in the evaluations of the run.
    output: path of a video, .gif or .mp4; None to show the episodes on the console.
    dream: whether the video shows the beginning of one episode next to the world model's prediction of it.
    console: where to show them, by default stdout; one that is not a terminal gets a line for each step.

  Raises:
    ValueError: a video is asked for and the environment has no renderer, or a dream and the policy
      has no world model or lacks its decoder.
  """
  if dream and policy.agent.foresee is None:
    raise ValueError(f'--dream: {policy.config.agent_name} has no model that dreams; leave it out')
  if dream and policy.all_params is None:
    raise ValueError(
      f'--dream: {policy.path} is exported, without the decoder of its model; give the folder of a run'
    )
  console = console or rich.console.Console(color_system='truecolor')
  greedy = policy.config.evaluator.greedy if greedy is None else greedy
  actions = 'greedy' if greedy else 'sampled'
  title = f'{policy.config.environment["name"]}, update {policy.learner_step:,}, {actions} actions'
  say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
  endings: list[str] = []

  def steps() -> Iterator[episodes_lib.PlayedStep]:
    for episode_key in jax.random.split(jax.random.key(seed), episodes):
      for played in play.steps(policy.params, episode_key):
        yield played
        if played.last:
          endings.append(
            f'episode {len(endings) + 1}: return {played.episode_return:.2f} in {played.step} steps'
            + ''.join(f'  {name} {value:.2f}' for name, value in played.metrics.items())
          )

  def show(view: rich.live.Live) -> None:
    for played in steps():
      begin = time.monotonic()
      heading = f'{title}\nepisode {len(endings) + 1} of {episodes}'
      view.update(_view(console, played, heading), refresh=True)
      time.sleep(max(0.0, begin + 1 / frames_per_second - time.monotonic()))

  frames: list[np.ndarray] = []
  play = episodes_lib.Play(policy.environment, policy.agent, 1, greedy=greedy)
  with contextlib.closing(play):
    say(f'{policy.path}: {title}')
    if dream:
      frames = play.dream(policy.all_params, jax.random.key(seed)) or []
    else:
      try:
        if output is None and console.is_terminal:
          with rich.live.Live(console=console, auto_refresh=False, screen=True) as view:
            show(view)
        else:
          for played in steps():
            say(_line(played)) if output is None else frames.append(_frame(policy, played, output))
      except KeyboardInterrupt:
        endings.append('stopped')
      say('\n'.join(endings))
    if frames and output is not None:
      videos.write(frames, output, frames_per_second)
      say(f'{output}: {len(frames)} frames')


def _frame(
  policy: policy_lib.Policy, played: episodes_lib.PlayedStep, output: pathlib.Path
) -> np.ndarray:
  """[H, W, 3] uint8, the rendered step, next to the policy's probabilities if the agent has them.

  Raises:
    ValueError: the environment has no renderer.
  """
  if played.frame is None:
    name = policy.config.environment['name']
    raise ValueError(f'--output {output}: {name} has no renderer; leave it out to see the numbers')
  if policy.agent.explain is None:
    return played.frame
  return videos.with_policy(played.frame, played.policy or {}, _open(played))


def _numbers(played: episodes_lib.PlayedStep) -> dict[str, str]:
  numbers = {'step': str(played.step), 'action': '-'}
  if played.action is not None:
    numbers['action'] = np.array2string(np.asarray(played.action), precision=2)
  if played.probability is not None:
    numbers['probability'] = f'{played.probability:.2f}'
  numbers |= {'reward': f'{played.reward:.2f}', 'return': f'{played.episode_return:.2f}'}
  shown = (played.intrinsic or {}) | (played.vitals or {})
  return numbers | {name: f'{value:.2f}' for name, value in shown.items()}


def _lists(played: episodes_lib.PlayedStep) -> dict[str, list[str]]:
  """Texts on what the agent reports of a step: its likeliest actions, and parts of its cognition."""
  # Value and evidence (0 to 1) of each action in episodic memory, that with most evidence first.
  recalled = sorted((played.recalled or {}).items(), key=lambda pair: -pair[1][1])[:LIKELIEST]
  lists = {
    'next': [
      f'{name} {chance:.2f}' for name, chance in videos.likeliest(played.policy or {}, LIKELIEST)
    ],
    'remembered': [
      f'{name} {v:.2f} x {count:.2f}' for name, (v, count) in recalled if count >= 0.01
    ],
    'open': [] if played.gates is None else _open(played) or ['nothing'],
    'nearest': [
      f'{entry.action} {entry.return_:.2f} at {entry.similarity:.2f}'
      for entry in played.nearest or []
    ],
  }
  return {name: each for name, each in lists.items() if each}


def _open(played: episodes_lib.PlayedStep) -> list[str]:
  """Names of the workspace's candidates whose gates are open, so that the actor reads them."""
  return [name for name, is_open in (played.gates or {}).items() if is_open]


def _line(played: episodes_lib.PlayedStep) -> str:
  """A step as a line of text."""
  text = '  '.join(f'{name} {value}' for name, value in _numbers(played).items())
  return text + ''.join(f'  {name}: {", ".join(each)}' for name, each in _lists(played).items())


def _view(
  console: rich.console.Console, played: episodes_lib.PlayedStep, heading: str
) -> rich.console.RenderableType:
  """The frame, as large as the terminal permits, and the numbers to its right."""
  numbers = rich.table.Table.grid(padding=(0, 2))
  for name, value in _numbers(played).items():
    numbers.add_row(name, value)
  lists = [['', name, *(f'  {text}' for text in each)] for name, each in _lists(played).items()]
  texts = map(rich.text.Text, [line for each in lists for line in each])
  column = rich.console.Group(heading, '', numbers, *texts)
  if played.frame is None:
    return column
  width, height = console.size
  view = rich.table.Table.grid(padding=(0, 2))
  view.add_row(picture(played.frame, max(1, width - NUMBERS), height), column)
  return view


def picture(frame: np.ndarray, columns: int, rows: int) -> rich.text.Text:
  """A frame as text: each character shows two pixels, one above the other.

  Args:
    frame: [H, W, 3] uint8.
    columns: most columns of the terminal to use.
    rows: most rows of the terminal to use. The frame keeps its proportions; a character is taken to
      be twice as high as wide.
  """
  height, width, _ = frame.shape
  scale = min(columns / width, 2 * rows / height)
  size = max(1, int(width * scale)), 2 * max(1, int(height * scale / 2))
  pixels = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX))
  text = rich.text.Text(no_wrap=True)
  for top, bottom in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
    for above, below in zip(top, bottom, strict=True):
      text.append('▀', _style(tuple(above), tuple(below)))
    text.append('\n')
  text.right_crop(1)
  return text


@functools.lru_cache(maxsize=4096)
def _style(above: tuple[int, int, int], below: tuple[int, int, int]) -> rich.style.Style:
  colour = rich.color.Color.from_rgb
  return rich.style.Style(color=colour(*above), bgcolor=colour(*below))
