"""Observations: the encoding, decoding and likelihood of each leaf (array), chosen by its spec.

| leaf                      | encoded                    | likelihood                            |
| image of bytes, [0, 255]  | CNN, pixels in [-0.5, 0.5] | Gaussian of variance 1/2              |
| the same as flat numbers  | MLP, symlog of x / 255     | Bernoulli                             |
| image bounded to [0, 1]   | CNN, unscaled              | Bernoulli                             |
| other image               | CNN, symlog                | Gaussian of variance 1/2, of symlog   |
| integers of few values    | MLP, and one-hot           | categorical, Bernoulli if 0 or 1      |
| numbers bounded to [0, 1] | MLP, and by level          | Bernoulli, or categorical over levels |
| other numbers             | MLP, symlog                | Cauchy, of symlog                     |
| board (PPO)               | dense layer per cell, MLP  |                                       |
| grid (world model)        | as its numbers, and cells  | as them; but in [0, 1] none or some:  |
|                           |                            | Bernoulli, and Cauchy of how much     |
| action mask               | not encoded                | Bernoulli, by the world model         |

A grid is a leaf [H, W, C] of few cells that is flat numbers, or a board, see `grid`: `networks.Cells` reads its
cells.
"By level" is two-hot over evenly spaced levels. A world model also predicts whether a number stays as
it was: see `dreamer.numbers`. Agents read the views of a leaf together with its numbers: see `views`.
An image is a leaf [H, W, C] with H and W at least SMALLEST_IMAGE. Exceptions are leaves of at most
MAX_CELLS bytes or numbers in [0, 1], such as planes of bits; these, and all images where there are no
CNNs, are flat numbers.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.agents import networks

ACTION_MASK = 'action_mask'
"""Key of the action mask in an observation that is a dictionary; True is legal."""

# Thresholds at which a world model treats an observation in another way; measurements are in
# docs/log/agent.md. A run prints which of them its environment exceeds.

SMALLEST_IMAGE = 8
"""Least height and width of an image for a CNN, which halves them to about 4; others are flat."""

MAX_CELLS = 2048
"""Most bytes, or numbers in [0, 1], of a leaf [H, W, C] that are flat numbers: a world model carries them
exactly. 400 of them take 5.4 updates/s on one core; a CNN in their place takes 1.3. With 1,728 bytes catch
is solved at 2.2 updates/s: docs/log/agent.md."""

DISCRETE_LEVELS = 9
"""Number of levels over which numbers in [0, 1] are two-hot encoded: the multiples of 1/8."""

MAX_VALUES, MAX_CATEGORIES = 64, 4096
"""Most values of an integer, unless its spec is a discrete choice, and most one-hot numbers of a leaf, that are
encoded one-hot. Other integers are real numbers. 4,096 are the outputs that predict MAX_CELLS bytes."""

MAX_DISCRETE_PREDICTED = 113
"""Most numbers in [0, 1] outside of grids that are predicted by level, about 1,024 outputs; more are predicted as
binary.
As binary, positions in a grid world were wrong in 17 to 24 % of imagined steps, by level in 8 to 17."""

MAX_DISCRETE_READ = 32
"""Most numbers in [0, 1] that are also read by level, as 288 inputs: with more, the update of a grid
world took 1.5 times as long, and 1.2 times where they are predicted by level but not read so."""

MIN_SIDE, MAX_GRID = 3, 256
"""Least rows and columns, and most cells, of a leaf [H, W, C] that a world model reads cell by cell: `grid`.
Every layer over cells costs as much for each of them; 256 is a grid of 16 x 16."""

REAL_LEVELS, REAL_RANGE = 33, 4.0
"""Real numbers are also read by level: number of levels, and how many standard deviations they reach to
either side of the mean. Without levels, CartPole's model predicted that episodes continue at their ends
(with a probability of 0.92 to 0.98)."""

MAX_REAL_READ = 7
"""Most real numbers that are also read by level, as 231 inputs. Not measured beyond that."""

MAX_PATCHES, MAX_CHUNKS = 3, 8
"""Most patches along each axis, and most chunks of a vector, into which `parts` divides a single array."""


def without_mask(observation: Any) -> Any:
  """The observation without its action mask."""
  if isinstance(observation, dict):
    return {name: value for name, value in observation.items() if name != ACTION_MASK}
  return observation


def action_mask(observation: Any) -> jax.Array | None:
  """The action mask of an observation, [..., A] bool, True is legal; None without one."""
  return observation.get(ACTION_MASK) if isinstance(observation, dict) else None


class Image(specs.BoundedArray):
  """Spec of an image that is never flat numbers, however small: see `as_images`."""


def as_images(spec: Any) -> Any:
  """The spec in which every image, however small, goes to a CNN: see `is_image`."""

  def mark(leaf: specs.Array) -> specs.Array:
    if is_image(leaf) or not _may_be_image(leaf):
      return leaf
    low, high = getattr(leaf, 'minimum', 0), getattr(leaf, 'maximum', 255)
    return Image(leaf.shape, leaf.dtype, low, high, leaf.name)

  return jax.tree.map(mark, spec)


def is_image(spec: specs.Array) -> bool:
  """Whether a leaf is an image for a CNN, not flat numbers: see SMALLEST_IMAGE and MAX_CELLS."""
  if not _may_be_image(spec):
    return False
  is_large = isinstance(spec, Image) or math.prod(spec.shape) > MAX_CELLS
  return is_large or not (is_bounded(spec, 0, 1) or is_picture(spec))


def _is_large(spec: specs.Array) -> bool:
  return len(spec.shape) == 3 and min(spec.shape[:2]) >= SMALLEST_IMAGE


def _may_be_image(spec: specs.Array) -> bool:
  return _is_large(spec) and spec.shape[2] > 0 and not num_values(spec)


def is_picture(spec: specs.Array) -> bool:
  """Whether a leaf is an image of bytes, at least SMALLEST_IMAGE, for a CNN or as flat numbers."""
  return _is_large(spec) and spec.dtype == np.uint8 and is_bounded(spec, 0, 255)


class Grid(NamedTuple):
  """The cells of a grid, which are a leaf [H, W, C] or the last numbers of one with a `board_shape`, row by row."""

  begin: int  # position of the first of them in the leaf
  shape: tuple[int, int, int]  # (H, W, C)
  player: tuple[int, int] | None  # positions in the leaf of the numbers that tell the player's cell


def grid(spec: specs.Array) -> Grid | None:
  """The grid of a leaf, of few cells, each of C features, that no CNN reads; None without one."""
  shape = getattr(spec, 'board_shape', spec.shape)
  if len(shape) != 3 or not shape[2] or is_image(spec):
    return None
  height, width, _ = shape
  if min(height, width) < MIN_SIDE or height * width > MAX_GRID:
    return None
  return Grid(math.prod(spec.shape) - math.prod(shape), shape, getattr(spec, 'player', None))


def image_specs(spec: Any) -> list[specs.Array]:
  """Specs of the images (see `is_image`) of an observation, in the order of its leaves."""
  return [leaf for leaf in jax.tree.leaves(without_mask(spec)) if is_image(leaf)]


def _with_specs(observation: Any, spec: Any) -> Iterator[tuple[Any, Any]]:
  """The leaves of an observation without its mask, each with its spec."""
  leaves, leaf_specs = (jax.tree.leaves(without_mask(tree)) for tree in (observation, spec))
  return zip(leaves, leaf_specs, strict=True)


def pick_images(observation: Any, spec: Any) -> list[jax.Array]:
  """The images (see `is_image`) of an observation, [..., H, W, C] each in its own dtype."""
  return [x for x, leaf in _with_specs(observation, spec) if is_image(leaf)]


def images(observation: Any, spec: Any) -> list[jax.Array]:
  """The images of an observation, [..., H, W, C] float32 each, encoded for a CNN as the table above says."""

  def read(leaf, spec):
    leaf = leaf.astype(jnp.float32)
    if is_bounded(spec, 0, 255):
      return leaf / 255 - 0.5
    return leaf if is_bounded(spec, 0, 1) else networks.symlog(leaf)

  return list(map(read, pick_images(observation, spec), image_specs(spec)))


def to_observation(flat: jax.Array, images: list[jax.Array], spec: Any) -> Any:
  """The inverse of `join` and `images`: an observation without its mask, [..., *shape] float32 leaves.

  Args:
    flat: [..., F] float32, as from `join`.
    images: [..., H, W, C] float32 each, as from `images`; if empty, `flat` holds the images too.
    spec: tree of specs of the observation.
  """
  rest = iter(images)

  def take(leaf: specs.Array) -> jax.Array:
    nonlocal flat
    if images and is_image(leaf):
      image = next(rest)
      if is_bounded(leaf, 0, 255):
        return 255 * (image + 0.5)
      return image if is_bounded(leaf, 0, 1) else networks.symexp(image)
    size = math.prod(leaf.shape)
    part, flat = flat[..., :size], flat[..., size:]
    part = part.reshape(*part.shape[:-1], *leaf.shape)
    return 255 * part if is_picture(leaf) else part

  return jax.tree.map(take, without_mask(spec))


def without_images(spec: Any) -> Any:
  """The spec with images of 0 channels, so that `join` with it leaves images out."""

  def bare(leaf: specs.Array) -> specs.Array:
    return specs.Array((*leaf.shape[:2], 0), leaf.dtype, leaf.name) if is_image(leaf) else leaf

  return jax.tree.map(bare, spec)


def boards(observation: Any, spec: Any) -> list[jax.Array]:
  """The boards of an observation, [..., rows times columns, features] float32 each, unscaled."""

  def read(leaf, spec):
    *_, features = spec.board_shape
    begin = spec.shape[0] - math.prod(spec.board_shape)
    return leaf[..., begin:].reshape(*leaf.shape[:-1], -1, features).astype(jnp.float32)

  pairs = _with_specs(observation, spec)
  return [read(x, leaf) for x, leaf in pairs if hasattr(leaf, 'board_shape')]


def views(observation: Any, spec: Any) -> jax.Array:
  """The views of an observation, features that an environment computes from its leaves.

  A leaf has a view if its spec has a function `view`, which is applied to the leaf [..., *shape].
  Their values are concatenated, [..., V] float32; V is 0 without a view.
  """
  pairs = list(_with_specs(observation, spec))
  leaf, leaf_spec = pairs[0]
  shown = [jnp.zeros((*leaf.shape[: leaf.ndim - len(leaf_spec.shape)], 0))]
  for leaf, leaf_spec in pairs:
    if hasattr(leaf_spec, 'view'):
      one_axis = leaf.reshape(-1, *leaf_spec.shape)
      shown.append(jax.vmap(leaf_spec.view)(one_axis).reshape(*shown[0].shape[:-1], -1))
  return jnp.concatenate(shown, axis=-1).astype(jnp.float32)


def view_size(spec: Any) -> int:
  """V, the width of `views`; 0 without a view."""
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), without_mask(spec))
  return jax.eval_shape(lambda: views(zeros, spec)).shape[-1]


class Vitals(NamedTuple):
  """Vitals: numbers of an observation, such as water, that the agent needs to keep up to survive."""

  names: tuple[str, ...]  # of the V vitals
  indices: np.ndarray  # [V] int, their positions in a flat observation, see `join`
  set_points: np.ndarray  # [V] float32, values at which nothing is lacking
  are_paid: bool  # whether the environment's reward depends on them already


def vitals(spec: Any) -> Vitals | None:
  """The vitals of all leaves whose specs name some in `vitals`; None where no leaf does."""
  found, are_paid, begin = [], False, 0
  for leaf in jax.tree.leaves(without_mask(spec)):
    for vital in getattr(leaf, 'vitals', ()):
      found.append((vital.name, begin + vital.position, vital.set_point))
      are_paid |= leaf.are_paid
    begin += math.prod(leaf.shape)
  if not found:
    return None
  names, indices, set_points = zip(*found, strict=True)
  return Vitals(names, np.array(indices), np.array(set_points, np.float32), are_paid)


class Parts(NamedTuple):
  """The parts of an observation, of which each of its F numbers belongs to one."""

  names: tuple[str, ...]
  owner: np.ndarray  # [F] int, index of the part of each number of a flat observation, see `join`
  of_views: tuple[int, ...]  # index of the part to which the view of each leaf belongs, see `views`


def parts(spec: Any) -> Parts:
  """Divides an observation into parts: its leaves, or if it is a single array groups of its numbers.

  A leaf without numbers, as `without_images` leaves of an image, is no part.

  Groups are the array's vitals, the player's place, and of its other numbers up to MAX_PATCHES x MAX_PATCHES
  patches of its first two axes, or of the board with which it ends; or up to MAX_CHUNKS chunks of a vector, and of what
  precedes a board. The view of a single array is a part of its own.
  """
  paths = jax.tree_util.tree_leaves_with_path(without_mask(spec))
  leaves = [leaf for _, leaf in paths]
  if len(leaves) > 1:
    sizes = np.array([math.prod(leaf.shape) for leaf in leaves])
    part = np.cumsum(sizes > 0) - 1
    names = tuple(
      '_'.join(str(getattr(at, 'key', at)) for at in path)
      for (path, _), size in zip(paths, sizes, strict=True)
      if size
    )
    return Parts(names, np.repeat(part, sizes), tuple(part.tolist()))
  (leaf,) = leaves
  labels = np.full(math.prod(leaf.shape), '', object)
  shape = getattr(leaf, 'board_shape', leaf.shape if len(leaf.shape) > 1 else (0, 0))
  begin = len(labels) - math.prod(shape)
  places = begin + np.arange(math.prod(shape)).reshape(shape)
  for row, band in enumerate(np.array_split(places, min(MAX_PATCHES, shape[0]) or 1)):
    columns = np.array_split(band, min(MAX_PATCHES, shape[1]) or 1, axis=1)
    for column, patch in enumerate(columns):
      labels[patch] = f'patch_{row}_{column}'
  for number, chunk in enumerate(np.array_split(np.arange(begin), min(MAX_CHUNKS, begin) or 1)):
    labels[chunk] = f'chunk_{number}'
  labels[list(getattr(leaf, 'player', None) or ())] = 'player'
  labels[[vital.position for vital in getattr(leaf, 'vitals', ())]] = 'vitals'
  names = tuple(dict.fromkeys(labels))
  owner = np.array([names.index(label) for label in labels], int)
  if view_size(spec):
    return Parts((*names, 'view'), owner, (len(names),))
  return Parts(names, owner, (0,))


def without_boards(spec: Any) -> Any:
  """The spec with the numbers before each board only, so that `join` with it leaves boards out."""

  def bare(leaf: Any) -> specs.Array:
    if not hasattr(leaf, 'board_shape'):
      return leaf
    return specs.Array((leaf.shape[0] - math.prod(leaf.board_shape),), leaf.dtype, leaf.name)

  return jax.tree.map(bare, spec)


def is_bounded(spec: specs.Array, low: float, high: float) -> bool:
  """Whether each number of a leaf has exactly these bounds; bytes without bounds have [0, 255]."""
  if not isinstance(spec, specs.BoundedArray):
    return spec.dtype == np.uint8 and (low, high) == (0, 255)
  return bool(np.all(spec.minimum == low) and np.all(spec.maximum == high))


def join(observation: Any, spec: Any) -> jax.Array:
  """Concatenates the leaves of an observation, without its mask, into one vector.

  Args:
    observation: tree of [..., *shape] arrays.
    spec: tree of their specs, whose shapes separate leading axes from a leaf's axes. Where a spec's
      last axis is shorter, the rest is left out: see `without_images` and `without_boards`.

  Returns:
    The flat observation, [..., F] bool if all leaves are bool, else float32; bytes of images are
    divided by 255.
  """
  pairs = list(_with_specs(observation, spec))
  dtype = bool if all(leaf.dtype == bool for leaf, _ in pairs) else jnp.float32

  def flat(leaf, spec):
    shape = spec.shape
    part = leaf[..., : shape[-1]] if shape else leaf
    part = part.reshape(*leaf.shape[: leaf.ndim - len(shape)], -1).astype(dtype)
    return part / 255 if is_picture(spec) else part

  return jnp.concatenate([flat(*pair) for pair in pairs], axis=-1)


def num_values(spec: specs.Array) -> int:
  """L, how many values each integer of a leaf can have, if it is a category; 0 if it is none.

  Categories are encoded one-hot: a leaf of integers with bounds, of at most MAX_VALUES values or by its
  spec a discrete choice, and of at most MAX_CATEGORIES one-hot numbers.
  """
  size = math.prod(spec.shape)
  if spec.dtype.kind not in 'iu' or not isinstance(spec, specs.BoundedArray) or not size:
    return 0
  count = int(np.max(np.asarray(spec.maximum, float) - spec.minimum)) + 1
  is_choice = isinstance(spec, specs.DiscreteArray)
  is_few = (is_choice or count <= MAX_VALUES) and size * count <= MAX_CATEGORIES
  return count if count >= 2 and is_few else 0


def unit_range(spec: Any) -> np.ndarray:
  """[F] bool, which numbers of a flat observation have the bounds [0, 1] by their spec."""
  return which(spec, lambda leaf: is_bounded(leaf, 0, 1))


def which(spec: Any, holds: Callable[[specs.Array], bool]) -> np.ndarray:
  """[F] bool, which numbers of a flat observation belong to a leaf whose spec satisfies `holds`."""
  return of_numbers(spec, holds).astype(bool)


def of_numbers(spec: Any, value: Callable[[specs.Array], Any]) -> np.ndarray:
  """[F], for each number of a flat observation what `value` is for its leaf: a scalar or [*shape]."""
  leaves = jax.tree.leaves(without_mask(spec))
  parts = [np.broadcast_to(value(leaf), leaf.shape).reshape(-1) for leaf in leaves]
  return np.concatenate(parts or [np.zeros(0)])


def by_level(number: jax.Array, num_levels: int) -> jax.Array:
  """Encodes [...] numbers in [0, 1] as two-hot over L evenly spaced levels, [..., L] float32."""
  levels = jnp.linspace(0.0, 1.0, num_levels)
  distance = jnp.abs(number[..., None] - levels)
  return jax.nn.relu(1.0 - distance * (num_levels - 1))


@dataclasses.dataclass(frozen=True)
class Codec:
  """Encoding of one environment's observations. Unless fields say otherwise, all numbers are flat."""

  spec: Any  # tree of `dm_env.specs.Array`
  levels: int = 0  # L, over which numbers in [0, 1] are also two-hot encoded; 0: none
  cnn: bool = False  # whether CNNs encode images
  boards: bool = False  # whether boards are encoded cell by cell, unless a CNN encodes images
  symlog: bool = True  # whether numbers are encoded by their symlog; otherwise as they are

  @property
  def image_specs(self) -> list[specs.Array]:
    """Specs of the images that a CNN reads."""
    return image_specs(self.spec) if self.cnn else []

  @property
  def board_specs(self) -> list[Any]:
    """Specs of the boards that are read cell by cell: leaves with a `board_shape`, (rows, columns, features).

    Such a leaf is a vector that ends with the features of all cells, row by row.
    """
    leaves = jax.tree.leaves(without_mask(self.spec))
    found = [leaf for leaf in leaves if hasattr(leaf, 'board_shape')]
    return found if self.boards and not self.image_specs else []

  @property
  def flat_spec(self) -> Any:
    """Spec of the numbers that an MLP reads."""
    if self.image_specs:
      return without_images(self.spec)
    return without_boards(self.spec) if self.board_specs else self.spec

  def compact(self, observation: Any) -> tuple[jax.Array, ...]:
    """The part of `encode` that is computed once for a batch and stored for all epochs, in few bytes.

    First the flat numbers, [..., F]: bool and not yet encoded if the specs of all are bool, else
    float32 and encoded as by `numbers`. Then the images, [..., H, W, C] in their own dtypes, or without
    images the boards, [..., cells, features] float32.
    """
    flat = join(observation, self.flat_spec)
    if flat.dtype != bool:
      flat = self.numbers(flat)
    if self.image_specs:
      return flat, *pick_images(observation, self.spec)
    return flat, *(boards(observation, self.spec) if self.board_specs else [])

  def numbers(self, joined: jax.Array) -> jax.Array:
    """Encodes [..., F] bool or float32 numbers, as from `join`: [..., F] float32."""
    return networks.symlog(joined) if self.symlog else joined.astype(jnp.float32)

  def inputs(self, compact: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Second half of `encode`: the inputs of an encoder, from the result of `compact`."""
    flat, *others = compact
    if flat.dtype == bool:
      flat = self.numbers(flat)
    if self.image_specs:
      others = images(others, self.image_specs)
    return self._with_levels(flat), *others

  def _with_levels(self, flat: jax.Array) -> jax.Array:
    """Appends to numbers [..., F] those in [0, 1], by level, and the categories, one-hot: [..., F + L S + V].

    V is the sum of `num_values` over all categories, and S the number of other numbers with the bounds [0, 1].
    Levels help a network to distinguish few discrete values, such as coordinates of a small grid.
    """
    values = of_numbers(self.flat_spec, num_values).astype(int)
    unit = unit_range(self.flat_spec) & (values == 0) & (self.levels > 0)
    if not values.any() and not unit.any():
      return flat
    numbers = networks.symexp(flat) if self.symlog else flat
    low = of_numbers(self.flat_spec, lambda leaf: getattr(leaf, 'minimum', 0))
    parts = [flat, by_level(numbers[..., unit], self.levels or 2).reshape(*flat.shape[:-1], -1)]
    for count in np.unique(values[values > 0]):
      at = values == count
      scaled = (numbers[..., at] - low[at].astype(np.float32)) / (count - 1)
      parts.append(by_level(scaled, int(count)).reshape(*flat.shape[:-1], -1))
    return jnp.concatenate(parts, axis=-1)

  def encode(self, observation: Any) -> tuple[jax.Array, ...]:
    """The inputs of an encoder network, all float32, from an observation [..., *shape].

    Numbers, see `levels`; then images, [..., H, W, C], or else boards, [..., cells, features].
    """
    return self.inputs(self.compact(observation))

  def image_loss(
    self, decoded: Sequence[jax.Array], images: Sequence[jax.Array]
  ) -> jax.Array | float:
    """Negative log-likelihood of the images, minus the same for a perfect decoder.

    Args:
      decoded: [..., H, W, C] float32 each, outputs of a decoder: means, or logits of images that are
        bounded to [0, 1].
      images: [..., H, W, C] float32 each, observed, as `encode` gives them.

    Returns:
      [...] float32, nats, summed over images; 0 without images.
    """
    loss: jax.Array | float = 0.0
    for spec, image, target in zip(self.image_specs, decoded, images, strict=True):
      if is_bounded(spec, 0, 1):
        error = _bernoulli_divergence(image, jnp.clip(target, 0.0, 1.0))
      else:
        error = jnp.square(image - target)
      loss += jnp.sum(error, axis=(-3, -2, -1))
    return loss

  def assemble(self, flat: jax.Array, decoded: Sequence[jax.Array]) -> Any:
    """The predicted observation, a tree of [..., *shape] float32 arrays without the action mask.

    Args:
      flat: [..., F] float32, predicted numbers in the units of `join`.
      decoded: [..., H, W, C] float32 each, outputs of a decoder, see `image_loss`.
    """
    means = [
      jax.nn.sigmoid(image) if is_bounded(spec, 0, 1) else image
      for spec, image in zip(self.image_specs, decoded, strict=True)
    ]
    return to_observation(flat, means, self.spec)


def _bernoulli_divergence(logits: jax.Array, target: jax.Array) -> jax.Array:
  """KL( Bernoulli(target) || Bernoulli(sigmoid(logits)) ), [...] nats."""
  entropy = jax.scipy.special.entr(target) + jax.scipy.special.entr(1 - target)
  return jax.nn.softplus(logits) - target * logits - entropy
