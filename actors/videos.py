"""Videos: frames into a file, pictures of what is observed, a dream beside what really happened."""

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import imageio.v2 as imageio
import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

Tree = Any
Draw = Callable[[Tree], np.ndarray | None]

SIDE = 160  # pixels of the smaller side of what is small, at least
MARGIN = 8
BARS = 32  # pixels of height
PANEL, LINE, NAME, BAR = 200, 14, 84, 64  # pixels: of what stands beside a frame, and of its parts
GROUND = (24, 24, 27)
INK = (228, 228, 231)
SEEN, DREAMT = (0, 158, 115), (204, 121, 167)  # Okabe and Ito's green and purple
POSITIVE, NEGATIVE = np.array((240, 228, 66)), np.array((86, 180, 233))


def write(frames: list[np.ndarray], path: pathlib.Path, frames_per_second: float = 8.0) -> None:
  """Writes frames as what the path's suffix says, .gif or .mp4.

  Raises:
    ValueError: another suffix.
  """
  if path.suffix not in ('.gif', '.mp4'):
    raise ValueError(f'{path}: the name of a video must end in .gif or .mp4')
  path.parent.mkdir(parents=True, exist_ok=True)
  images: list[Any] = list(frames)
  if path.suffix == '.gif':
    imageio.mimsave(str(path), images, duration=1000 / frames_per_second, loop=0)
  else:
    imageio.mimsave(str(path), images, fps=frames_per_second, macro_block_size=1)


def drawing(draw: Draw, observation: Tree) -> Callable[[Tree], np.ndarray]:
  """How the rows of an episode are best shown.

  As their environment draws them; else the first leaf that is a picture, [H, W, 1 or 3] of at least
  8 x 8; else all numbers as cells, row by row: 0 is dark, above it yellow, below it blue.

  Args:
    draw: of the environment; see `Environment.draw`.
    observation: [T, ...] host arrays, all rows that are to be compared.

  Returns:
    A function from one row, [...], to its frame [H, W, 3] uint8, always of the same size.
  """
  if draw(jax.tree.map(lambda x: x[0], observation)) is not None:

    def by_the_world(row: Tree) -> np.ndarray:
      frame = draw(row)
      assert frame is not None
      return _enlarge(frame)

    return by_the_world
  leaves = jax.tree.leaves(observation)
  for index, leaf in enumerate(leaves):
    if leaf.ndim == 4 and leaf.shape[-1] in (1, 3) and min(leaf.shape[1:3]) >= 8:
      white = 1 if leaf.dtype.kind in 'bf' and leaf.max(initial=0) <= 1 else 255

      def of_pixels(row: Tree, index=index, white=white) -> np.ndarray:
        pixels = np.asarray(jax.tree.leaves(row)[index], np.float32) * (255 / white)
        shape = (*pixels.shape[:2], 3)
        return _enlarge(np.broadcast_to(pixels, shape).clip(0, 255).astype(np.uint8))

      return of_pixels
  most = max((float(np.abs(leaf.astype(np.float32)).max(initial=0)) for leaf in leaves), default=0)

  def of_numbers(row: Tree) -> np.ndarray:
    numbers = np.concatenate([np.ravel(leaf).astype(np.float32) for leaf in jax.tree.leaves(row)])
    return _enlarge(_cells(numbers / (most or 1)))

  return of_numbers


def _cells(shares: np.ndarray) -> np.ndarray:
  """[F] numbers in [-1, 1] as coloured cells, twice as many columns as rows."""
  columns = math.ceil(math.sqrt(2 * len(shares)))
  shares = np.append(shares, np.zeros(-len(shares) % columns)).clip(-1, 1)
  colour = np.where(shares[:, None] > 0, POSITIVE, NEGATIVE)
  pixels = GROUND + np.abs(shares)[:, None] * (colour - GROUND)
  return pixels.astype(np.uint8).reshape(-1, columns, 3)


def _enlarge(frame: np.ndarray) -> np.ndarray:
  """By a whole number, so that a small frame is seen; to even sizes, which videos want."""
  scale = max(1, -(-SIDE // min(frame.shape[:2])))
  frame = frame.repeat(scale, axis=0).repeat(scale, axis=1)
  odd = [(0, length % 2) for length in frame.shape[:2]]
  return np.pad(frame, (*odd, (0, 0)), mode='edge')


def likeliest(policy: dict[str, float], most: int) -> list[tuple[str, float]]:
  """At most so many choices; of those that have no place, how many there are and their sum.

  Args:
    policy: probabilities by name, the likeliest first.
    most: at least 1.
  """
  pairs = list(policy.items())
  if len(pairs) <= most:
    return pairs
  shown, rest = pairs[: most - 1], pairs[most - 1 :]
  return [*shown, (f'{len(rest)} others', sum(chance for _, chance in rest))]


def with_policy(frame: np.ndarray, policy: dict[str, float]) -> np.ndarray:
  """A frame, and right of it what may be done there and how likely it is.

  Args:
    frame: [H, W, 3] uint8; a small one is enlarged.
    policy: as of `likeliest`; as many as there is room for.

  Returns:
    [H, W, 3] uint8, equal for equal frames whatever the policy.
  """
  frame = _enlarge(frame)
  height = frame.shape[0]
  panel = Image.new('RGB', (PANEL, height), GROUND)
  draw, font = ImageDraw.Draw(panel), ImageFont.load_default(11)
  left = MARGIN + NAME
  rows = likeliest(policy, max(1, (height - 2 * MARGIN) // LINE))
  for top, (name, chance) in zip(range(MARGIN, height, LINE), rows, strict=False):
    while font.getlength(name) > NAME - MARGIN // 2:
      name = name[:-1]
    draw.text((MARGIN, top), name, INK, font)
    draw.rectangle((left, top + 2, left + round(chance * BAR), top + LINE - 4), SEEN)
    draw.text((left + BAR + MARGIN // 2, top), f'{chance:.2f}', INK, font)
  return np.concatenate([frame, np.asarray(panel)], axis=1)


def beside(
  draw: Draw, observation: Tree, expected: Tree, salience: np.ndarray, context: int
) -> list[np.ndarray]:
  """Frames with what happened on the left and what the model made of it on the right.

  The line above the right is green while the model sees, and purple where it dreams. Below are the
  rows that the agent looked back on, the newest right, each bar as high as it counted; none where
  it looks back on itself alone.

  Args:
    draw: of the environment; see `Environment.draw`.
    observation: [T, ...] host arrays, without a mask.
    expected: [T, ...] host arrays, likewise.
    salience: [T, W].
    context: rows that the model saw.

  Returns:
    T frames, [H, W, 3] uint8.
  """
  show = drawing(draw, observation)
  frames = []
  for row, weights in enumerate(salience):
    at = functools.partial(jax.tree.map, lambda x, row=row: x[row])
    left, right = show(at(observation)), show(at(expected))
    height, width = left.shape[:2]
    below = BARS + MARGIN if len(weights) > 1 else 0
    frame = np.empty((height + below + 3 * MARGIN, 2 * width + 3 * MARGIN, 3), np.uint8)
    frame[...] = GROUND
    top = 2 * MARGIN
    frame[top : top + height, MARGIN : MARGIN + width] = left
    frame[top : top + height, 2 * MARGIN + width : -MARGIN] = right
    colour = SEEN if row < context else DREAMT
    frame[MARGIN // 2 : MARGIN // 2 + MARGIN, 2 * MARGIN + width : -MARGIN] = colour
    frames.append(frame)
    if not below:
      continue
    bars = frame[-MARGIN - BARS : -MARGIN, MARGIN : MARGIN + width]
    edges = np.linspace(0, width, len(weights) + 1).astype(int)
    for weight, begin, end in zip(weights, edges[:-1], edges[1:], strict=True):
      bars[BARS - round(float(weight) * BARS) :, begin : max(begin + 1, end - 2)] = INK
      bars[-1:, begin : max(begin + 1, end - 2)] = INK
  return frames
