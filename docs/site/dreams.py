"""Makes docs/images/dreams.gif: episodes of four environments of the suite, each next to the dream of it.

  hephaestus bench learning --agents dreamer --seeds 0 --environments deep_sea_12 cartpole snake hackmatrix --out OUT
  python docs/site/dreams.py OUT

Needs the extra `envs`; the runs take about an hour of a core.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import hephaestus
from hephaestus.actors import episodes, videos

PATH = pathlib.Path(__file__).resolve().parents[1] / 'images' / 'dreams.gif'
FRAMES = 48
FRAMES_PER_SECOND = 6.0
SIDE = 180  # pixels of a drawn CartPole
TILE = 372, 200  # width and height of an episode and its dream
TITLE = 22  # pixels of the title above
BOARD = (44, 44, 48)
COLOURS = np.array([(228, 228, 231), (230, 159, 0), (86, 180, 233), (0, 158, 115), (213, 94, 0)])


TITLES = {  # of environments of the suite
  'deep_sea_12': 'DeepSea', 'snake': 'Snake', 'hackmatrix': 'HackMatrix', 'cartpole': 'CartPole',
}  # fmt: skip


def planes(observation: np.ndarray) -> np.ndarray:
  """Draws a board [H, W], or planes [H, W, C] with a colour each, [H, W, 3] uint8."""
  values = np.clip(np.asarray(observation, np.float32), 0, 1)
  values = values[..., None] if values.ndim == 2 else values
  frame = np.tile(np.array(BOARD, np.float32), (*values.shape[:2], 1))
  for plane, colour in zip(np.moveaxis(values, -1, 0), COLOURS, strict=False):
    frame += plane[..., None] * (colour - frame)
  return frame.astype(np.uint8)


def cart(observation: np.ndarray) -> np.ndarray:
  """Draws CartPole from its four numbers, of which position and angle are shown, [SIDE, SIDE, 3] uint8."""
  position, _, angle, _ = np.asarray(observation, np.float32)
  image = Image.new('RGB', (SIDE, SIDE), videos.BACKGROUND)
  draw = ImageDraw.Draw(image)
  x, y = SIDE / 2 + float(np.clip(position / 2.4, -1, 1)) * SIDE * 0.4, SIDE * 0.75
  draw.line((0, y + 14, SIDE, y + 14), fill=videos.INK)
  draw.rectangle((x - 18, y - 6, x + 18, y + 12), fill=videos.INK)
  tip = x + 90 * np.sin(3 * angle), y - 90 * np.cos(3 * angle)  # enlarged three times
  draw.line((x, y - 6, *tip), fill=videos.OBSERVED, width=6)
  return np.asarray(image)


def board(observation: dict[str, np.ndarray]) -> np.ndarray:
  """Draws HackMatrix: blocks white, announced enemies orange, the player blue, the exit green, enemies red."""
  numbers, cells = np.split(np.asarray(observation['features'], np.float32), [33])
  cells, player = cells.reshape(6, 6, 42), np.zeros((6, 6))
  player[tuple(np.rint(5 * numbers[:2]).astype(int).clip(0, 5))] = 1
  blocks, exit_, enemies = cells[..., 7:10].max(-1), cells[..., 40], cells[..., :4].max(-1)
  return planes(
    np.stack([blocks / 2, cells[..., 36], player, exit_ * (1 - player), enemies], axis=-1)
  )


DRAWINGS = {
  'cartpole': cart, 'deep_sea_12': planes, 'snake': lambda x: planes(x['grid']), 'hackmatrix': board,
}  # fmt: skip


def drawn(environment: Any, drawing: Callable[[np.ndarray], np.ndarray]) -> Any:
  """The same environment, a dataclass, with another drawing of its observations."""
  draw = lambda self, observation: drawing(observation)
  return type('Drawn', (type(environment),), {'draw': draw})(**vars(environment))


def dream(name: str, out: pathlib.Path) -> list[np.ndarray]:
  """Frames of episodes of an environment, each with the dream of the suite's run with seed 0."""
  policy = hephaestus.load(out / 'runs' / 'default' / f'{name}-dreamer-0')
  environment = policy.environment
  if name in DRAWINGS:
    environment = drawn(environment, DRAWINGS[name])
  play = episodes.Play(environment, policy.agent, 1, greedy=False)
  frames: list[np.ndarray] = []
  for number in range(FRAMES):  # several episodes, where they are short
    frames += play.dream(policy.all_params, jax.random.key(number)) or []
    if len(frames) >= FRAMES:
      break
  assert len(frames) >= FRAMES, name
  return [tile(frame, TITLES[name]) for frame in frames[:FRAMES]]


def tile(frame: np.ndarray, title: str) -> np.ndarray:
  """Scales a frame of `videos.comparison` to TILE pixels, below its title."""
  image = Image.new('RGB', (TILE[0], TILE[1] + TITLE), videos.BACKGROUND)
  font = ImageFont.load_default(13)
  ImageDraw.Draw(image).text((8, 5), title, videos.INK, font)
  image.paste(Image.fromarray(frame).resize(TILE, Image.Resampling.BOX), (0, TITLE))
  return np.asarray(image)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('out', type=pathlib.Path)
  out = parser.parse_args().out
  tiles = [dream(name, out) for name in TITLES]
  frames = [
    np.concatenate([np.concatenate(four[:2], axis=1), np.concatenate(four[2:], axis=1)])
    for four in zip(*tiles, strict=True)
  ]
  videos.write(frames, PATH, FRAMES_PER_SECOND)
  print(f'{PATH}: {PATH.stat().st_size / 1000:.0f} kB')


if __name__ == '__main__':
  main()
