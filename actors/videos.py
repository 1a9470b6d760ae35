"""Videos: writes frames to files, and draws observations, policies, and a world model's predictions."""

import colorsys
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import imageio.v2 as imageio
import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

Tree = Any
Draw = Callable[[Tree], np.ndarray | None]

SIDE = 160  # pixels of the smaller side of an enlarged frame, at least
MARGIN = 8
BARS = 32  # height in pixels of the chart of attention weights
PANEL, LINE, NAME, BAR = 200, 14, 84, 64  # pixels: of the panel next to a frame, and of its parts
BACKGROUND = (24, 24, 27)
INK = (228, 228, 231)
OBSERVED, PREDICTED = (0, 158, 115), (204, 121, 167)  # green and purple of Okabe and Ito
CHANNELS = np.array(  # of images that are not grey or RGB: the other colours of Okabe and Ito
  ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0))
)
POSITIVE, NEGATIVE = np.array((240, 228, 66)), np.array((86, 180, 233))


def write(frames: list[np.ndarray], path: pathlib.Path, frames_per_second: float = 8.0) -> None:
  """Writes frames, [H, W, 3] uint8 of one size, as a .gif or .mp4 file, in a folder that may be new.

  Raises:
    ValueError: the path has another suffix.
    OSError: the file cannot be written.
  """
  if path.suffix not in ('.gif', '.mp4'):
    raise ValueError(f'{path}: the name of a video must end in .gif or .mp4')
  path.parent.mkdir(parents=True, exist_ok=True)
  images: list[Any] = [_even(frame) for frame in frames]
  if path.suffix == '.gif':
    imageio.mimsave(str(path), images, duration=1000 / frames_per_second, loop=0)
  else:
    imageio.mimsave(str(path), images, fps=frames_per_second, macro_block_size=1)


def picture(draw: Draw, observation: Tree) -> Callable[[Tree], np.ndarray] | None:
  """Chooses how to draw the observations of an episode, [T, ...] host arrays, as a picture.

  The first of these that is possible: the environment's own drawing, `Environment.draw`; the first leaf
  that is an image, [H, W, C] of at least 8 x 8. Its channels are grey (1), red, green and blue (3), or
  have a colour each, as in MinAtar; the latter only for numbers of at most 1.

  Returns:
    A function from one observation, [...], to its frame, [H, W, 3] uint8, of a constant size; small
    frames are enlarged. None if neither is possible.
  """
  if draw(jax.tree.map(lambda x: x[0], observation)) is not None:

    def from_environment(observation: Tree) -> np.ndarray:
      frame = draw(observation)
      assert frame is not None
      return _enlarge(frame)

    return from_environment
  for index, leaf in enumerate(jax.tree.leaves(observation)):
    if leaf.ndim == 4 and min(leaf.shape[1:3]) >= 8:
      white = 1 if leaf.dtype.kind in 'bf' and leaf.max(initial=0) <= 1 else 255
      channels = leaf.shape[-1]
      if channels not in (1, 3) and white == 255:
        continue
      others = np.resize(CHANNELS, (channels, 3)) / 255
      colours = {1: np.ones((1, 3)), 3: np.eye(3)}.get(channels, others).astype(np.float32)

      def from_image(observation: Tree, index=index, white=white, colours=colours) -> np.ndarray:
        pixels = np.asarray(jax.tree.leaves(observation)[index], np.float32) * (255 / white)
        return _enlarge((pixels @ colours).clip(0, 255).astype(np.uint8))

      return from_image
  return None


def drawing(draw: Draw, observation: Tree) -> Callable[[Tree], np.ndarray]:
  """As `picture`; where there is none, all numbers are cells: 0 is dark, positive yellow, negative blue."""
  found = picture(draw, observation)
  if found is not None:
    return found
  leaves = jax.tree.leaves(observation)
  most = max((float(np.abs(leaf.astype(np.float32)).max(initial=0)) for leaf in leaves), default=0)

  def from_numbers(observation: Tree) -> np.ndarray:
    flat = [np.ravel(leaf).astype(np.float32) for leaf in jax.tree.leaves(observation)]
    return _enlarge(_cells(np.concatenate(flat) / (most or 1)))

  return from_numbers


def _cells(shares: np.ndarray) -> np.ndarray:
  """Draws [F] numbers in [-1, 1], a pixel each: [rows, about twice as many columns, 3] uint8."""
  columns = math.ceil(math.sqrt(2 * len(shares)))
  shares = np.append(shares, np.zeros(-len(shares) % columns)).clip(-1, 1)
  colour = np.where(shares[:, None] > 0, POSITIVE, NEGATIVE)
  pixels = BACKGROUND + np.abs(shares)[:, None] * (colour - BACKGROUND)
  return pixels.astype(np.uint8).reshape(-1, columns, 3)


def _enlarge(frame: np.ndarray) -> np.ndarray:
  """Enlarges a small frame by an integer, and pads it to even sizes."""
  scale = max(1, -(-SIDE // min(frame.shape[:2])))
  return _even(frame.repeat(scale, axis=0).repeat(scale, axis=1))


def _even(frame: np.ndarray) -> np.ndarray:
  """Pads a frame to even sizes, which video codecs need."""
  odd = [(0, length % 2) for length in frame.shape[:2]]
  return np.pad(frame, (*odd, (0, 0)), mode='edge')


def likeliest(policy: dict[str, float], most: int) -> list[tuple[str, float]]:
  """The `most` likeliest choices and probabilities of a policy, in which they are in that order.

  If there are more, the last entry sums up the others, such as '3 others'.
  """
  pairs = list(policy.items())
  if len(pairs) <= most:
    return pairs
  shown, rest = pairs[: most - 1], pairs[most - 1 :]
  return [*shown, (f'{len(rest)} others', sum(probability for _, probability in rest))]


def with_policy(
  frame: np.ndarray, policy: dict[str, float], opened: Sequence[str] = ()
) -> np.ndarray:
  """Adds a panel with the policy's probabilities, the likeliest first, at the right of a frame, uint8.

  The frame, [H, W, 3], is enlarged if it is small, and wider by `PANEL` pixels; its size depends only on
  the size of the given one. The panel ends with the names of the candidates whose gates are open, see
  `episodes.PlayedStep`; if there is no room for all, the last ones are shown.
  """
  frame = _enlarge(frame)
  height = frame.shape[0]
  panel = Image.new('RGB', (PANEL, height), BACKGROUND)
  draw, font = ImageDraw.Draw(panel), ImageFont.load_default(11)
  left = MARGIN + NAME
  lines = max(1, (height - 2 * MARGIN) // LINE)
  opened = list(opened)[-(lines - 1) :] if lines > 1 else []
  entries = likeliest(policy, lines - len(opened))
  for top, (name, probability) in zip(range(MARGIN, height, LINE), entries, strict=False):
    while font.getlength(name) > NAME - MARGIN // 2:
      name = name[:-1]
    draw.text((MARGIN, top), name, INK, font)
    draw.rectangle((left, top + 2, left + round(probability * BAR), top + LINE - 4), OBSERVED)
    draw.text((left + BAR + MARGIN // 2, top), f'{probability:.2f}', INK, font)
  for line, name in enumerate(reversed(opened), 1):
    draw.text((MARGIN, height - MARGIN - line * LINE), f'open: {name}', PREDICTED, font)
  return np.concatenate([frame, np.asarray(panel)], axis=1)


def with_masks(frame: np.ndarray, masks: np.ndarray) -> np.ndarray:
  """Tints a frame, [H, W, 3] uint8, by masks [S, H', W'] of slots, each in a colour of its own."""
  hues = [colorsys.hsv_to_rgb(slot / len(masks), 1.0, 1.0) for slot in range(len(masks))]
  height, width = frame.shape[:2]
  row, column = (
    np.arange(n) * m // n for n, m in zip((height, width), masks.shape[1:], strict=True)
  )
  tint = np.einsum('shw,sc->hwc', masks[:, row[:, None], column], 255 * np.array(hues))
  return (0.5 * frame + 0.5 * tint).astype(np.uint8)


def comparison(
  draw: Draw,
  observation: Tree,
  predicted: Tree,
  salience: np.ndarray,
  context: int,
  masks: np.ndarray | None = None,
) -> list[np.ndarray]:
  """Draws each observation on the left and the world model's prediction of it on the right.

  The line above the prediction is green while the model is given the observations, of which there are
  `context`, and purple in the open-loop prediction. With masks of slots, [T, S, H, W], the prediction is
  shown once more at the right, tinted by them: of what is observed, then of what is imagined. The bars
  below are the attention weights `salience`, [T, W], over a window of W steps, the newest on the right;
  there are none for W = 1.

  Args:
    draw: the environment's `Environment.draw`.
    observation: [T, ...] host arrays, without 'action_mask'.
    predicted: [T, ...] host arrays, likewise.

  Returns:
    T frames, [height, width, 3] uint8 each.
  """
  show = drawing(draw, observation)
  frames = []
  for t, weights in enumerate(salience):
    at = functools.partial(jax.tree.map, lambda x, t=t: x[t])
    left, right = show(at(observation)), show(at(predicted))
    pictures = [left, right] if masks is None else [left, right, with_masks(right, masks[t])]
    height, width = left.shape[:2]
    below = BARS + MARGIN if len(weights) > 1 else 0
    wide = len(pictures) * (width + MARGIN) + MARGIN
    frame = np.empty((height + below + 3 * MARGIN, wide, 3), np.uint8)
    frame[...] = BACKGROUND
    top = 2 * MARGIN
    for index, shown in enumerate(pictures):
      begin = MARGIN + index * (width + MARGIN)
      frame[top : top + height, begin : begin + width] = shown
    colour = OBSERVED if t < context else PREDICTED
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
