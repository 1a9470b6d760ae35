"""Observations: from a spec, how each leaf is encoded, decoded, and its likelihood.

| leaf                      | encoded                    | likelihood                            |
| image of bytes, [0, 255]  | CNN, pixels in [-0.5, 0.5] | Gaussian of variance 1/2              |
| image bounded to [0, 1]   | CNN, unscaled              | Bernoulli                             |
| other image               | CNN, symlog                | Gaussian of variance 1/2, of symlog   |
| numbers bounded to [0, 1] | MLP, and by level          | Bernoulli, or categorical over levels |
| other numbers             | MLP, symlog                | Cauchy, of symlog                     |
| board (PPO)               | dense layer per cell, MLP  |                                       |
| action mask               | not encoded                | Bernoulli, by the world model         |

Numbers may also stay as they were: see `Numbers`. Beside them, agents read the views of a leaf.
An image is a leaf [H, W, C] with H and W at least SMALLEST_IMAGE, other than at most MAX_CELLS
numbers in [0, 1], such as planes of bits; without CNNs it is flat numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.agents import networks

ACTION_MASK = 'action_mask'
"""Key of the action mask in an observation that is a dictionary; True is legal."""

SMALLEST_IMAGE = 8
"""Least height and width of an image, which one stage of a CNN halves to 4; others are flat."""

MAX_CELLS = 1024
"""Most numbers of a leaf [H, W, C] in [0, 1] that are flat: a world model carries them exactly."""


def without_mask(observation: Any) -> Any:
  """The observation without its action mask."""
  if isinstance(observation, dict):
    return {name: value for name, value in observation.items() if name != ACTION_MASK}
  return observation


def action_mask(observation: Any) -> jax.Array | None:
  """[..., A] bool, the legal actions; None in an environment without a mask."""
  return observation.get(ACTION_MASK) if isinstance(observation, dict) else None


def is_image(spec: specs.Array) -> bool:
  """Whether a leaf is [H, W, C] and large enough for a CNN: see SMALLEST_IMAGE and MAX_CELLS."""
  if len(spec.shape) != 3 or min(spec.shape[:2]) < SMALLEST_IMAGE or not spec.shape[2]:
    return False
  return math.prod(spec.shape) > MAX_CELLS or not is_bounded(spec, 0, 1)


def image_specs(spec: Any) -> list[specs.Array]:
  """Specs of the images of an observation, in the order of its leaves."""
  return [leaf for leaf in jax.tree.leaves(without_mask(spec)) if is_image(leaf)]


def pick_images(observation: Any, spec: Any) -> list[jax.Array]:
  """The images of an observation, [..., H, W, C] in their own dtypes."""
  leaves, leaf_specs = (jax.tree.leaves(without_mask(tree)) for tree in (observation, spec))
  return [x for x, leaf in zip(leaves, leaf_specs, strict=True) if is_image(leaf)]


def images(observation: Any, spec: Any) -> list[jax.Array]:
  """The images of an observation, encoded for a CNN, [..., H, W, C] float32.

  Pixels bounded to [0, 255] are scaled to [-0.5, 0.5], numbers bounded to [0, 1] are unscaled, and
  others are symlog, as in a flat observation.
  """

  def read(leaf, spec):
    leaf = leaf.astype(jnp.float32)
    if is_bounded(spec, 0, 255):
      return leaf / 255 - 0.5
    return leaf if is_bounded(spec, 0, 1) else networks.symlog(leaf)

  return list(map(read, pick_images(observation, spec), image_specs(spec)))


def to_observation(flat: jax.Array, images: list[jax.Array], spec: Any) -> Any:
  """The inverse of `join` and `images`: an observation from its numbers and images.

  Args:
    flat: [..., F] float32, in the observation's units, without symlog.
    images: [..., H, W, C] float32 each, from `images`; if empty, `flat` holds the images too.
    spec: of the observation.

  Returns:
    A tree like an observation without its mask, [..., *shape] float32 each.
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
    return part.reshape(*part.shape[:-1], *leaf.shape)

  return jax.tree.map(take, without_mask(spec))


def without_images(spec: Any) -> Any:
  """A spec whose images have no channels, so that a flat observation leaves images out."""

  def bare(leaf: specs.Array) -> specs.Array:
    return specs.Array((*leaf.shape[:2], 0), leaf.dtype, leaf.name) if is_image(leaf) else leaf

  return jax.tree.map(bare, spec)


def board_specs(spec: Any) -> list[Any]:
  """Specs of the leaves that have a `board_shape`: rows, columns, features of a cell.

  Such a leaf is a vector that ends with the cells of a board, row by row.
  """
  return [leaf for leaf in jax.tree.leaves(without_mask(spec)) if hasattr(leaf, 'board_shape')]


def boards(observation: Any, spec: Any) -> list[jax.Array]:
  """The boards of an observation, [..., rows times columns, features] float32, unscaled."""

  def read(leaf, spec):
    *_, features = spec.board_shape
    begin = spec.shape[0] - math.prod(spec.board_shape)
    return leaf[..., begin:].reshape(*leaf.shape[:-1], -1, features).astype(jnp.float32)

  leaves, leaf_specs = (jax.tree.leaves(without_mask(tree)) for tree in (observation, spec))
  pairs = zip(leaves, leaf_specs, strict=True)
  return [read(x, leaf) for x, leaf in pairs if hasattr(leaf, 'board_shape')]


def views(observation: Any, spec: Any) -> jax.Array:
  """The views of an observation: of each leaf whose spec has a `view`, a function of the leaf.

  Args:
    observation: tree of [..., *shape] arrays.
    spec: the same tree of specs.

  Returns:
    [..., V] float32; V is 0 without a view.
  """
  leaves, leaf_specs = (jax.tree.leaves(without_mask(tree)) for tree in (observation, spec))
  shown = [jnp.zeros((*leaves[0].shape[: leaves[0].ndim - len(leaf_specs[0].shape)], 0))]
  for leaf, leaf_spec in zip(leaves, leaf_specs, strict=True):
    if hasattr(leaf_spec, 'view'):
      one_axis = leaf.reshape(-1, *leaf_spec.shape)
      shown.append(jax.vmap(leaf_spec.view)(one_axis).reshape(*shown[0].shape[:-1], -1))
  return jnp.concatenate(shown, axis=-1).astype(jnp.float32)


def view_size(spec: Any) -> int:
  """V, the width of `views`."""
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), without_mask(spec))
  return jax.eval_shape(lambda: views(zeros, spec)).shape[-1]


def without_boards(spec: Any) -> Any:
  """A spec of the numbers before the boards, so that a flat observation leaves boards out."""

  def bare(leaf: Any) -> specs.Array:
    if not hasattr(leaf, 'board_shape'):
      return leaf
    return specs.Array((leaf.shape[0] - math.prod(leaf.board_shape),), leaf.dtype, leaf.name)

  return jax.tree.map(bare, spec)


def is_bounded(spec: specs.Array, low: float, high: float) -> bool:
  """Whether these are the bounds of all numbers of a leaf, by its spec or dtype."""
  if not isinstance(spec, specs.BoundedArray):
    return spec.dtype == np.uint8 and (low, high) == (0, 255)
  return bool(np.all(spec.minimum == low) and np.all(spec.maximum == high))


def join(observation: Any, spec: Any) -> jax.Array:
  """Concatenates the leaves of an observation, without its mask, into one vector.

  Args:
    observation: tree of [..., *shape] arrays.
    spec: the same tree of specs, whose shapes separate leading axes from the leaf's axes. Numbers
      beyond a spec's last axis are left out: see `without_images` and `without_boards`.

  Returns:
    [..., F] bool if all leaves are, else float32.
  """
  leaves = jax.tree.leaves(without_mask(observation))
  shapes = [leaf.shape for leaf in jax.tree.leaves(without_mask(spec))]
  dtype = bool if all(leaf.dtype == bool for leaf in leaves) else jnp.float32
  flat = [
    (leaf[..., : shape[-1]] if shape else leaf)
    .reshape(*leaf.shape[: leaf.ndim - len(shape)], -1)
    .astype(dtype)
    for leaf, shape in zip(leaves, shapes, strict=True)
  ]
  return jnp.concatenate(flat, axis=-1)


def flatten(observation: Any, spec: Any) -> jax.Array:
  """`join`, then symlog: [..., F] float32, input of a network."""
  return networks.symlog(join(observation, spec))


def unit_range(spec: Any) -> np.ndarray:
  """[F] bool, numbers of a flat observation that their spec bounds to [0, 1]."""
  leaves = jax.tree.leaves(without_mask(spec))
  return np.concatenate([np.full(math.prod(leaf.shape), is_bounded(leaf, 0, 1)) for leaf in leaves])


def by_level(number: jax.Array, num_levels: int) -> jax.Array:
  """[...] numbers in [0, 1] to [..., L], two-hot over evenly spaced levels."""
  levels = jnp.linspace(0.0, 1.0, num_levels)
  distance = jnp.abs(number[..., None] - levels)
  return jax.nn.relu(1.0 - distance * (num_levels - 1))


def with_levels(
  flat: jax.Array, spec: Any, num_levels: int, *, is_symlog: bool = True
) -> jax.Array:
  """Appends the numbers in [0, 1] by levels to a flat observation.

  Levels help a network to distinguish few discrete values, such as coordinates of a small grid.

  Args:
    flat: [..., F] float32, from `flatten`.
    spec: of the observation.
    num_levels: L, at least 2; or 0 for none.
    is_symlog: whether `flat` is symlog.

  Returns:
    [..., F + L times the numbers in [0, 1]] float32.
  """
  if not num_levels:
    return flat
  numbers = flat[..., unit_range(spec)]
  shares = by_level(networks.symexp(numbers) if is_symlog else numbers, num_levels)
  return jnp.concatenate([flat, shares.reshape(*flat.shape[:-1], -1)], axis=-1)


def most_likely(logits: jax.Array) -> jax.Array:
  """[..., L] logits of L levels to the most likely number in [0, 1], [...] float32.

  A number between two levels is two-hot, so the result is the mean over the best level and its
  neighbours. A mean over all levels would average distant modes.
  """
  levels = logits.shape[-1]
  level = jnp.arange(levels)
  near = jnp.abs(level - jnp.argmax(logits, axis=-1)[..., None]) <= 1
  shares = jax.nn.softmax(jnp.where(near, logits.astype(jnp.float32), -jnp.inf), axis=-1)
  return jnp.sum(shares * level, axis=-1) / (levels - 1)


@dataclasses.dataclass(frozen=True)
class Codec:
  """Encoding of one environment's observations.

  Attributes:
    spec: tree of `dm_env.specs.Array`.
    levels: L, of numbers in [0, 1], which are also encoded by levels; 0: they are not.
    cnn: whether CNNs encode images; otherwise images are flat numbers.
    boards: whether boards are encoded cell by cell; beside images of a CNN they are flat numbers.
    symlog: whether numbers are encoded by their symlog.
  """

  spec: Any
  levels: int = 0
  cnn: bool = False
  boards: bool = False
  symlog: bool = True

  @property
  def image_specs(self) -> list[specs.Array]:
    """Specs of the images that a CNN reads."""
    return image_specs(self.spec) if self.cnn else []

  @property
  def board_specs(self) -> list[Any]:
    """Specs of the boards that are read cell by cell."""
    return board_specs(self.spec) if self.boards and not self.image_specs else []

  @property
  def flat_spec(self) -> Any:
    """Spec of the numbers that an MLP reads."""
    if self.image_specs:
      return without_images(self.spec)
    return without_boards(self.spec) if self.board_specs else self.spec

  @property
  def unit(self) -> np.ndarray:
    """[F] bool, numbers in [0, 1]."""
    return unit_range(self.flat_spec)

  def compact(self, observation: Any) -> tuple[jax.Array, ...]:
    """An observation in few bytes: [..., F] bool or float32, unscaled images, and boards.

    It is computed once for a batch; `inputs` completes the encoding in every epoch.
    """
    flat = join(observation, self.flat_spec)
    if flat.dtype != bool:
      flat = self.numbers(flat)
    if self.image_specs:
      return flat, *pick_images(observation, self.spec)
    return flat, *(boards(observation, self.spec) if self.board_specs else [])

  def numbers(self, joined: jax.Array) -> jax.Array:
    """[..., F] bool or float32 observed numbers to float32 encoded ones."""
    return networks.symlog(joined) if self.symlog else joined.astype(jnp.float32)

  def inputs(self, compact: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Inputs of an encoder: [..., F + L S] numbers, then images or boards, float32."""
    flat, *others = compact
    if flat.dtype == bool:
      flat = self.numbers(flat)
    if self.image_specs:
      others = images(others, self.image_specs)
    return with_levels(flat, self.flat_spec, self.levels, is_symlog=self.symlog), *others

  def encode(self, observation: Any) -> tuple[jax.Array, ...]:
    """[..., observation] to the inputs of an encoder."""
    return self.inputs(self.compact(observation))

  def image_loss(
    self, decoded: Sequence[jax.Array], images: Sequence[jax.Array]
  ) -> jax.Array | float:
    """Negative log-likelihood of the images, less that of a perfect decoder.

    Args:
      decoded: [..., H, W, C] float32 each, of a decoder.
      images: [..., H, W, C] float32 each, encoded.

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
    """A tree of [..., *shape] float32 from numbers in its units and decoded images.

    Args:
      flat: [..., F] float32.
      decoded: [..., H, W, C] float32 each, of a decoder.
    """
    means = [
      jax.nn.sigmoid(image) if is_bounded(spec, 0, 1) else image
      for spec, image in zip(self.image_specs, decoded, strict=True)
    ]
    return to_observation(flat, means, self.spec)


class Predicted(NamedTuple):
  """A distribution of the numbers of an observation.

  Attributes:
    bits: [..., N] float32 each, probabilities that a binary number is 0 and that it is 1. Both,
      since 1 - p would round to 0 where p is almost 1; apart, since XLA's CPU is slow on axes of 2.
    levels: [..., M, L] float32, probabilities of the levels of graded numbers.
    reals: [..., R] float32, means of real numbers, symlog.
  """

  bits: tuple[jax.Array, jax.Array]
  levels: jax.Array
  reals: jax.Array


NUM_LEVELS = 9
"""Levels of a graded number: they keep multiples of 1/8 apart."""

MAX_LEVEL_INPUTS, MAX_LEVEL_OUTPUTS = 256, 1024
"""Beyond so many levels, numbers are read without; all numbers in [0, 1] are predicted as binary."""

REAL_LEVELS, REAL_RANGE = 33, 4.0
"""Real numbers are also read by so many levels, between so many standard deviations from the mean."""

MAX_COPY = 0.999
"""Largest probability of a copy, so that a change always has a gradient."""

MIN_LIKELIHOOD = 1e-20
"""Bounds the loss of a number. A bound that decoders reach would stop the gradient of rare changes."""

MIN_ERROR = 1e-4
"""Least mean squared error, in standard deviations, to which real numbers are predicted."""


@dataclasses.dataclass(frozen=True)
class Numbers:
  """The numbers of an observation: how a world model reads, predicts and judges them.

  Each number either stays as it was at the previous step, or is predicted from the features:

    p(x_t) = g delta(x_t-1) + (1 - g) D,    g, D = decoder(features)

  so that static parts of an observation need no features. D is Bernoulli for binary numbers (bool,
  or in [0, 1] where there are many), categorical over levels for other numbers in [0, 1]. A real
  number, of any other bounds, is predicted as its change: x_t-1 + sigma D.

  Real numbers are read as symlog and standardised by running statistics, since their scales are
  unknown. Their loss is relative to the running mean squared error, so that each of them counts
  whatever its scale.

  Attributes:
    spec: tree of `dm_env.specs.Array`; images have no channels.
  """

  spec: Any

  @functools.cached_property
  def _kinds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices of binary, graded and real numbers."""
    leaves = jax.tree.leaves(without_mask(self.spec))
    is_bool = np.concatenate(
      [np.full(math.prod(leaf.shape), leaf.dtype == bool) for leaf in leaves] or [np.zeros(0, bool)]
    )
    unit = unit_range(self.spec) | is_bool
    graded = unit & ~is_bool
    if graded.sum() * NUM_LEVELS > MAX_LEVEL_OUTPUTS:
      graded &= False
    return np.flatnonzero(unit & ~graded), np.flatnonzero(graded), np.flatnonzero(~unit)

  @property
  def size(self) -> int:
    """F."""
    return sum(len(kind) for kind in self._kinds)

  @property
  def num_reals(self) -> int:
    """R."""
    return len(self._kinds[2])

  @property
  def input_size(self) -> int:
    """Width of `inputs`."""
    levels = self._levels_read * len(self._kinds[1]) + self._real_levels * self.num_reals
    return self.size + levels + view_size(self.spec)

  @property
  def _levels_read(self) -> int:
    """Levels by which graded numbers are read; 0 where there are many."""
    return NUM_LEVELS if len(self._kinds[1]) * NUM_LEVELS <= MAX_LEVEL_INPUTS else 0

  @property
  def _real_levels(self) -> int:
    """Levels of each real number; 0 where there are many."""
    return REAL_LEVELS if self.num_reals * REAL_LEVELS <= MAX_LEVEL_INPUTS else 0

  @property
  def num_outputs(self) -> int:
    """Outputs of a decoder: gates and logits, and changes of real numbers."""
    binary, graded, real = map(len, self._kinds)
    return 2 * binary + (1 + NUM_LEVELS) * graded + real

  def initial_statistics(self) -> dict[str, jax.Array]:
    """Statistics of no observations: of real numbers, and how far binary ones lie between 0 and 1."""
    reals, ones = jnp.zeros(self.num_reals), jnp.ones(self.num_reals)
    between = jnp.ones(len(self._kinds[0]))
    statistics = {'mean': reals, 'square': ones, 'error': ones, 'between': between}
    return {name: x for name, x in statistics.items() if x.size} | {'count': jnp.zeros(())}

  def moments(self, numbers: jax.Array, error: jax.Array) -> dict[str, jax.Array]:
    """Means over a batch that `updated` follows.

    Args:
      numbers: [T, B, F] float32, observed.
      error: [T, B, R] float32, of `loss`.
    """
    bits, _, reals = self._split(numbers)
    means = {
      'mean': reals,
      'square': jnp.square(reals),
      'error': jnp.minimum(error, 1.0),
      'between': 4 * bits * (1 - bits),
    }
    return {name: jnp.mean(x, axis=(0, 1)) for name, x in means.items() if x.shape[-1]}

  def updated(
    self, statistics: dict[str, jax.Array], moments: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Running statistics after one more batch: a mean over all, later over some 500 batches."""
    rate = jnp.maximum(1 / (statistics['count'] + 1), 0.002)
    rates = {name: jnp.maximum(rate, 0.02) if name == 'error' else rate for name in moments}
    followed = {
      name: statistics[name] + rates[name] * (new - statistics[name])
      for name, new in moments.items()
    }
    return followed | {'count': statistics['count'] + 1}

  def read(self, observation: Any) -> jax.Array:
    """[..., observation] to [..., F] float32; real numbers are symlog."""
    flat = join(observation, self.spec).astype(jnp.float32)
    binary, graded, real = self._kinds
    return jnp.concatenate(
      [flat[..., binary], flat[..., graded], networks.symlog(flat[..., real])], axis=-1
    )

  def _split(self, numbers: jax.Array) -> list[jax.Array]:
    binary, graded, _ = map(len, self._kinds)
    return jnp.split(numbers, [binary, binary + graded], axis=-1)

  def inputs(self, numbers: jax.Array, statistics: Any) -> jax.Array:
    """[..., F] numbers to [..., input_size], input of a network, in their dtype."""
    bits, graded, reals = self._split(numbers)
    parts = [bits, graded]
    if self._levels_read:
      parts.append(by_level(graded, NUM_LEVELS).reshape(*graded.shape[:-1], -1))
    if self.num_reals:
      scaled = (reals.astype(jnp.float32) - statistics['mean']) / self._scale(statistics)
      parts.append(jnp.clip(scaled, -5.0, 5.0))
      if self._real_levels:  # such as an end of the track, which ends an episode
        within = jnp.clip(scaled / REAL_RANGE, -1.0, 1.0) / 2 + 0.5
        levels = by_level(within, REAL_LEVELS)
        parts.append(levels.reshape(*levels.shape[:-2], -1))
    if view_size(self.spec):
      flat = self.to_flat(numbers.astype(jnp.float32))
      parts.append(views(to_observation(flat, [], self.spec), self.spec))
    return jnp.concatenate([part.astype(numbers.dtype) for part in parts], axis=-1)

  def _scale(self, statistics: Any) -> jax.Array:
    """[R] standard deviations of real numbers."""
    variance = statistics['square'] - jnp.square(statistics['mean'])
    return jnp.sqrt(jnp.maximum(variance, 0.0)) + 1e-4

  def predict(
    self, outputs: jax.Array, before: jax.Array, follows: jax.Array, statistics: Any
  ) -> Predicted:
    """The distribution of the next numbers.

    Args:
      outputs: [..., num_outputs] float32, of a decoder.
      before: [..., F] numbers of the previous step.
      follows: [...] bool, whether there is a previous step.
      statistics: see `initial_statistics`.
    """
    binary, graded, _ = map(len, self._kinds)
    ends = np.cumsum([binary + graded, binary, graded * NUM_LEVELS])
    gates, bits, levels, reals = jnp.split(outputs, ends, axis=-1)
    follows = follows[..., None].astype(jnp.float32)
    copy = MAX_COPY * jax.nn.sigmoid(gates) * follows
    copy_bits, copy_levels = jnp.split(copy, [binary], axis=-1)
    bits_before, graded_before, reals_before = self._split(before.astype(jnp.float32))
    zero, one = (
      copy_bits * copied + (1 - copy_bits) * jax.nn.sigmoid(logits)
      for copied, logits in ((1 - bits_before, -bits), (bits_before, bits))
    )
    levels = jax.nn.softmax(levels.reshape(*levels.shape[:-1], graded, NUM_LEVELS), axis=-1)
    copy_levels = copy_levels[..., None]
    levels = copy_levels * by_level(graded_before, NUM_LEVELS) + (1 - copy_levels) * levels
    if self.num_reals:
      base = jnp.where(follows > 0, reals_before, statistics['mean'])
      reals = base + self._scale(statistics) * reals
    return Predicted((zero, one), levels, reals)

  def loss(
    self, predicted: Predicted, numbers: jax.Array, statistics: Any
  ) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood, less that of a perfect decoder.

    Args:
      predicted: of `predict`.
      numbers: [..., F] float32, observed.
      statistics: see `initial_statistics`.

    Returns:
      [...] float32, nats, summed over numbers; and the squared errors of real numbers, [..., R], in
      standard deviations.
    """
    bits, graded, reals = self._split(numbers)
    bits, graded = jnp.clip(bits, 0.0, 1.0), jnp.clip(graded, 0.0, 1.0)
    zero, one = predicted.bits
    loss = _divergence(1 - bits, zero) + _divergence(bits, one)
    loss += jnp.sum(_divergence(by_level(graded, NUM_LEVELS), predicted.levels), axis=-1)
    if not self.num_reals:
      return loss, jnp.zeros(reals.shape)
    error = jnp.square((reals - predicted.reals) / self._scale(statistics))
    relative = error / self.noise(statistics)
    return loss + jnp.sum(jnp.log1p(relative / 2), axis=-1), jax.lax.stop_gradient(error)

  def noise(self, statistics: Any) -> jax.Array:
    """[R] mean squared errors of real numbers, in standard deviations, bounded from below."""
    return jnp.maximum(statistics['error'], MIN_ERROR)

  def change(self, before: jax.Array, numbers: jax.Array, statistics: Any) -> jax.Array:
    """[..., R] changes of real numbers between two steps [..., F], in standard deviations."""
    *_, reals_before = self._split(before)
    *_, reals = self._split(numbers)
    return (reals - reals_before) / self._scale(statistics)

  def expected(self, predicted: Predicted, statistics: Any) -> jax.Array:
    """The most likely numbers, [..., F] float32; binary ones are 0 or 1 where they always were."""
    _, bits = predicted.bits
    if bits.shape[-1]:
      bits = jnp.where(statistics['between'] < 0.01, jnp.round(bits), bits)
    levels = most_likely(jnp.log(jnp.maximum(predicted.levels, 1e-20)))
    return jnp.concatenate([bits, levels, predicted.reals], axis=-1)

  def to_flat(self, numbers: jax.Array) -> jax.Array:
    """The inverse of `read`, up to the tree: [..., F] in the observation's units and order."""
    bits, graded, reals = self._split(numbers)
    values = jnp.concatenate([bits, graded, networks.symexp(reals)], axis=-1)
    return values[..., np.argsort(np.concatenate(self._kinds))]


def _divergence(shares: jax.Array, predicted: jax.Array) -> jax.Array:
  """Terms of the KL of observed shares from predicted probabilities, [..., N]; summed over N."""
  return jnp.sum(_xlogx(shares) - shares * jnp.log(jnp.maximum(predicted, MIN_LIKELIHOOD)), axis=-1)


def _xlogx(x: jax.Array) -> jax.Array:
  return jax.scipy.special.xlogy(x, x)


def _bernoulli_divergence(logits: jax.Array, target: jax.Array) -> jax.Array:
  """KL of Bernoulli(target) from Bernoulli(sigmoid(logits))."""
  likelihood = target * logits - jax.nn.softplus(logits)
  return _xlogx(target) + _xlogx(1 - target) - likelihood
