"""`watch`: live in a terminal, a line for each step elsewhere, videos, and Ctrl-C."""

import io

import imageio.v2 as imageio
import jax
import numpy as np
import pytest
import rich.console

from hephaestus.actors import episodes
from hephaestus.launch import config, main
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.interface import policy
from hephaestus.launch.report import play
from hephaestus.launch.run import fused, parts
from hephaestus.learner import checkpoint

TINY = [
  'environment.rows=5', 'environment.columns=3', 'agent.hidden_size=16', 'agent.num_layers=1',
  'actor.num_envs=16', 'actor.sequence_length=9', 'learner.num_minibatches=2',
]  # fmt: skip
STEPS = 4  # of an episode
UNSEEN = """
from hephaestus.actors.environments import catch
class Unseen(catch.Catch):
  def render(self, state):
    return None
"""


def save(folder, environment='catch'):
  """Makes a run with a checkpoint of initial parameters at update 7."""
  made = config.override(presets.ppo_laptop(environment), TINY)
  folder_lib.open_run(folder, made)
  program = fused.build(made, parts.make_parts(made), jax.local_devices()[:1])
  checkpointer = checkpoint.Checkpointer(folder / 'checkpoints')
  checkpointer.save(7, jax.jit(program.init)(jax.random.key(0)))
  checkpointer.close()
  return folder


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return save(tmp_path_factory.mktemp('watch') / 'run')


def run(*arguments):
  return main.run(main.parse(['hephaestus', 'watch', *map(str, arguments)]))


def test_watch_without_terminal_prints_a_line_for_each_step(folder, capsys):
  assert run(folder, '--episodes', 2, '--seed', 3) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == f'{folder}: catch, update 7, sampled actions'
  assert lines[1].startswith('step 0  action -  reward 0.00  return 0.00  next: ')
  assert all('action' in line and 'probability 0.' in line for line in lines[2 : 2 + STEPS])
  assert [line.split()[1] for line in lines[1:-2]] == [*map(str, range(STEPS + 1))] * 2
  # The actions of an untrained policy, the most probable first.
  pairs = [pair.split() for pair in lines[1].split('next: ')[1].split(', ')]
  chances = [float(chance) for _, chance in pairs]
  assert {name for name, _ in pairs} == {'left', 'stay', 'right'}
  assert chances == sorted(chances, reverse=True) and sum(chances) == pytest.approx(1.0, abs=0.02)
  played = int(lines[2].split('action ')[1].split()[0])
  chosen = float(lines[2].split('probability ')[1].split()[0])
  assert dict(pairs)[['left', 'stay', 'right'][played]] == f'{chosen:.2f}'
  assert 'next' not in lines[1 + STEPS]
  final = lines[1 + STEPS].split()[-1]
  assert lines[-2] == f'episode 1: return {final} in {STEPS} steps'


def test_terminal_shows_picture_and_numbers(folder):
  screen = io.StringIO()
  console = rich.console.Console(
    file=screen, force_terminal=True, color_system='truecolor', width=60, height=12
  )
  play.watch(policy.load(folder), frames_per_second=1e6, greedy=True, console=console)
  shown = screen.getvalue()
  assert '▀' in shown and '38;2;' in shown and '48;2;' in shown
  assert 'episode 1 of 1' in shown and 'reward' in shown and 'greedy actions' in shown
  assert all(name in shown for name in ('left', 'stay', 'right'))
  assert f'in {STEPS} steps' in shown.splitlines()[-1]


def test_parts_of_cognition_are_shown_where_there_are_any():
  played = episodes.PlayedStep(
    step=0, observation=None, frame=None, action=None, probability=None, reward=0.0,
    episode_return=0.0, last=False, policy={'left': 0.6, 'right': 0.4},
    recalled={'left': (0.5, 0.75), 'stay': (3.0, 1.0), 'right': (2.0, 0.0)},
    vitals={'food': 0.5, 'water': 1.0}, intrinsic={'empowerment': 1.25}, gates={'eye': True, 'ear': False, 'recall': True},
    nearest=[episodes.Remembered(0.98, 'stay', 3.0), episodes.Remembered(0.95, 'left', 0.5)],
  )  # fmt: skip
  line = play._line(played)
  for words in ('remembered: stay 3.00 x 1.00', 'open: eye, recall', 'empowerment 1.25  food 0.50'):
    assert words in line
  console = rich.console.Console(file=io.StringIO(), width=80, height=30)
  console.print(play._view(console, played, 'title'))
  shown = console.file.getvalue()
  for words in ('food  ', 'left 0.60', 'stay 3.00 x 1.00', 'left 0.50 at 0.95', 'recall'):
    assert words in shown
  assert 'right' not in shown.split('remembered')[1]
  assert 'remembered' not in play._line(played._replace(recalled=None))


def test_picture_fits_terminal_and_keeps_its_colours():
  frame = np.zeros((40, 20, 3), np.uint8)
  frame[:20] = (200, 100, 0)
  small = play.picture(frame, columns=30, rows=5)
  assert small.plain == '\n'.join(['▀' * 5] * 5)  # of two pixels each
  colours = [span.style.color.triplet for span in small.spans]
  assert colours[:10] == [(200, 100, 0)] * 10 and colours[-10:] == [(0, 0, 0)] * 10
  assert play.picture(frame, columns=60, rows=40).plain == '\n'.join(['▀' * 40] * 40)
  assert play.picture(frame, columns=1, rows=1).plain == '▀'


def test_video_has_every_frame(folder, tmp_path, capsys):
  video = tmp_path / 'video.gif'
  assert run(folder, '--output', video, '--episodes', 2, '--fps', 20) == 0
  frames = imageio.mimread(video)
  assert len(frames) <= 2 * (STEPS + 1)  # equal neighbours are one
  assert frames[0].shape[1] > 200  # the policy's probabilities are next to the picture
  assert capsys.readouterr().out.splitlines()[-1] == f'{video}: {2 * (STEPS + 1)} frames'


def test_environment_without_renderer_shows_numbers(tmp_path, monkeypatch, capsys):
  (tmp_path / 'unseen_environment.py').write_text(UNSEEN)
  monkeypatch.syspath_prepend(tmp_path)
  folder = save(tmp_path / 'run', 'unseen_environment:Unseen')
  screen = io.StringIO()
  console = rich.console.Console(file=screen, force_terminal=True, width=60, height=12)
  play.watch(policy.load(folder, trust=True), frames_per_second=1e6, console=console)
  assert 'reward' in screen.getvalue() and '▀' not in screen.getvalue()
  assert run(folder, '--output', tmp_path / 'video.gif') == 2
  assert 'has no renderer; leave it out to see the numbers' in capsys.readouterr().err
  assert not (tmp_path / 'video.gif').exists()


def test_dream_of_model_free_agent_is_refused(folder, tmp_path, capsys):
  assert run(folder, '--dream', '--output', tmp_path / 'video.gif') == 2
  printed = capsys.readouterr()
  assert '--dream: ppo has no model that dreams; leave it out' in printed.err
  assert not printed.out


def test_ctrl_c_keeps_video_of_played_steps(folder, tmp_path, monkeypatch, capsys):
  def interrupted(self, params, key):
    for step in range(2):
      yield episodes.PlayedStep(
        step, np.zeros(1), np.zeros((8, 8, 3), np.uint8), None, None, 0.0, 0.0, False
      )
    raise KeyboardInterrupt

  monkeypatch.setattr(episodes.Play, 'steps', interrupted)
  assert run(folder) == 0
  assert capsys.readouterr().out.splitlines()[-1] == 'stopped'
  assert run(folder, '--output', tmp_path / 'video.gif') == 0
  assert capsys.readouterr().out.splitlines()[-1].endswith('2 frames')
  assert (tmp_path / 'video.gif').exists()


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--output', 'video.avi'], '--output video.avi: the name must end in .gif or .mp4'),
    (['--dream'], '--dream: is a video; add --output FILE'),
    (['--fps', '0'], '--fps 0.0: must be positive'),
    (['--episodes', '0'], '--episodes 0: must be from 1 to 1,000,000'),
    (['--episodes', '99999999999'], '--episodes 99999999999: must be from 1'),
    ([], 'is not the folder of a run'),
  ],
)
def test_watch_names_bad_input(tmp_path, capsys, arguments, words):
  assert run(tmp_path, *arguments) == 2
  assert words in capsys.readouterr().err
