"""Videos: frames of observations, predictions next to observations, and bars of a policy."""

import imageio.v2 as imageio
import jax
import numpy as np
import tiny

from hephaestus.actors import episodes, evaluator, videos
from hephaestus.actors.environments import catch
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config

NUM_STEPS = 4


def no_drawing(observation):
  del observation


def frame_of(draw, observation, t):
  return videos.drawing(draw, observation)(jax.tree.map(lambda x: x[t], observation))


def test_small_image_is_enlarged():
  pictures = np.zeros((NUM_STEPS, 8, 9, 1), np.float32)
  pictures[3:, 0, 0] = 1.0
  first, last = (
    frame_of(no_drawing, {'eye': pictures, 'purse': np.ones((NUM_STEPS, 2))}, i) for i in (0, 3)
  )
  cell = first.shape[0] // 8
  assert first.shape == (8 * cell, 9 * cell, 3) and first.dtype == np.uint8
  assert cell > 1 and first.max() == 0
  assert (last[:cell, :cell] == 255).all() and last[:, cell:].max() == 0


def test_each_channel_of_a_binary_image_has_a_colour():
  image = np.zeros((1, 10, 10, 4), bool)
  image[0, 0, 0, 1] = image[0, 9, 9, 3] = True  # as MinAtar's
  frame = videos.picture(lambda observation: None, image)(image[0])
  cell = len(frame) // 10
  assert frame.shape == (10 * cell, 10 * cell, 3)
  assert frame[0, 0].tolist() == videos.CHANNELS[1].tolist()
  assert frame[-1, -1].tolist() == videos.CHANNELS[3].tolist()
  assert frame.any(axis=-1).sum() == 2 * cell**2  # all else is black
  frames = np.zeros((1, 84, 84, 4), np.uint8)  # a stack of frames, which no colour shows
  assert videos.picture(lambda observation: None, frames) is None


def test_numbers_are_drawn_as_cells_by_sign_and_magnitude():
  numbers = np.array([[0.0, 2.0, -2.0, 1.0]] * NUM_STEPS, np.float32)
  frame = frame_of(no_drawing, numbers, 0)
  cell = frame.shape[1] // 3  # columns of 4 cells
  zero, positive, negative = (frame[cell // 2, cell // 2 + i * cell].astype(int) for i in range(3))
  half = frame[cell + cell // 2, cell // 2].astype(int)
  assert tuple(zero) == videos.BACKGROUND
  assert tuple(positive) == tuple(videos.POSITIVE) and tuple(negative) == tuple(videos.NEGATIVE)
  np.testing.assert_allclose(half, (zero + positive) / 2, atol=1)


def test_observation_is_left_of_the_prediction():
  draw = lambda observation: np.full((20, 10, 3), 255 * observation[0], np.uint8)
  observation, predicted = np.zeros((NUM_STEPS, 1)), np.ones((NUM_STEPS, 1))
  salience = np.tile([0.25, 0.75], (NUM_STEPS, 1))
  frames = videos.comparison(draw, observation, predicted, salience, context=1)
  assert len(frames) == NUM_STEPS and len({frame.shape for frame in frames}) == 1
  height, width, _ = frames[0].shape
  assert frames[0][height // 3, width // 4].max() == 0
  assert frames[0][height // 3, 3 * width // 4].min() == 255
  line = [tuple(frame[videos.MARGIN, 3 * width // 4]) for frame in frames]
  assert line == [videos.OBSERVED] + [videos.PREDICTED] * 3
  bars = (
    (frames[0][-videos.MARGIN - videos.BARS : -videos.MARGIN] == videos.INK).all(-1).sum(axis=0)
  )
  none, short, long = sorted(set(bars.tolist()))
  assert none == 0 and long == 3 * short
  without_salience = videos.comparison(
    draw, observation, predicted, np.ones((NUM_STEPS, 1)), context=1
  )
  assert len(without_salience[0]) == height - videos.BARS - videos.MARGIN


def test_camera_writes_episode_and_prediction_at_the_end(tmp_path):
  env = catch.Catch(**tiny.CATCH)
  config = dreamer_config.DreamerConfig(**tiny.DREAMER)
  agent = dreamer_agent.make_dreamer(config, env.observation_spec, env.action_spec).agent
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(agent.init_params, jax.random.key(0))
  params = jax.tree.map(lambda x: rng.uniform(0.1, 0.5, x.shape).astype(x.dtype), shapes)
  acting = agent.acting_params(params)
  play = episodes.Play(env, agent, 2)
  camera = evaluator.Camera(play, tmp_path, period=3600, newest=lambda: (6, params))
  camera.video(7, acting, jax.random.key(0), final=False)
  assert not list(tmp_path.iterdir())
  camera.video(8, acting, jax.random.key(0), final=True)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['6-dream.gif', '8.gif']
  assert len(imageio.mimread(tmp_path / '6-dream.gif')) == 4


def test_further_choices_are_summed_up():
  policy = {'up': 0.5, 'siphon': 0.25, 'PUSH': 0.125, 'WAIT': 0.125}
  assert videos.likeliest(policy, 4) == list(policy.items())
  assert videos.likeliest(policy, 3) == [('up', 0.5), ('siphon', 0.25), ('2 others', 0.25)]


def test_frames_of_any_size_become_a_video(tmp_path):
  videos.write([np.zeros((65, 63, 3), np.uint8)] * 2, tmp_path / 'odd.mp4')
  assert (tmp_path / 'odd.mp4').stat().st_size > 0
