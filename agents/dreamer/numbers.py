"""Numbers of an observation in a world model: how they are read and predicted, and their loss."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import networks
from hephaestus.agents import observation as observation_lib

MAX_COPY = 0.999
"""Largest predicted probability that a number stays as it was, so that a change always has a gradient."""

MIN_LIKELIHOOD = 1e-20
"""Least likelihood in a loss. Where decoders reached it, rare changes would have no gradient."""

MIN_ERROR = 1e-4
"""Least mean squared error of real numbers that scales their loss, in squared standard deviations."""

NUM_PROJECTIONS = 32
"""Random directions along which an ensemble predicts the change of the numbers."""

MIN_CHANGE_VARIANCE = 0.05
"""Least predicted variance of a change, as a share of the mean square of changes."""

MIN_CHANGE_SQUARE = 1e-6
"""Least mean square of changes, so that an observation that never changes has a finite loss."""


class Predicted(NamedTuple):
  """A predicted distribution of the numbers of an observation.

  Attributes:
    bits: [..., N] float32 each, probabilities that a binary number is 0 and that it is 1. Both,
      since 1 - p would round to 0 where p is almost 1; apart, since XLA's CPU is slow on axes of 2.
    levels: [..., M, L] float32, probabilities of the L levels of discrete numbers.
    reals: [..., R] float32, means of real numbers, in symlog.
  """

  bits: tuple[jax.Array, jax.Array]
  levels: jax.Array
  reals: jax.Array


class Change(NamedTuple):
  """Predicted changes of the numbers along random directions; see `Numbers.change`.

  Attributes:
    mean: [..., C] float32, predicted change along each direction.
    variance: [..., C] float32, predicted squared error of `mean`.
  """

  mean: jax.Array
  variance: jax.Array

  @classmethod
  def from_outputs(cls, outputs: jax.Array) -> 'Change':
    """The change from a network's [..., 2 C] outputs; its variance is about 1 where they are 0."""
    mean, scale = jnp.split(outputs.astype(jnp.float32), 2, axis=-1)
    return cls(mean, MIN_CHANGE_VARIANCE + jnp.exp(scale))

  def loss(self, change: jax.Array) -> jax.Array:
    """The loss, [...] float32, of mean and variance at an observed change [..., C].

      sum_C [ log(1 + error / (2 sg(variance))) + 1/2 ( sg(error) / variance + log(variance) ) ]

    with error the squared error of the mean, in sg(error) clipped to 4. The first term measures errors
    relative to the noise of each direction, and large ones by their logarithm. With a Gaussian
    likelihood, the mean would learn least where its errors are still largest.
    """
    stop = jax.lax.stop_gradient
    error = jnp.square(self.mean - change)
    fit = jnp.log1p(error / stop(self.variance) / 2)
    calibration = stop(jnp.minimum(error, 4.0)) / self.variance + jnp.log(self.variance)
    return jnp.sum(fit + calibration / 2, axis=-1)


@dataclasses.dataclass(frozen=True)
class Numbers:
  """The F numbers of an observation: how a world model reads and predicts them, and their loss.

  Each number either stays as it was at the previous step, or is predicted from the features:

    p(x_t) = g delta(x_t-1) + (1 - g) D,    g, D = decoder(features)

  so that static parts of an observation need no features. D is Bernoulli for binary numbers (bool,
  in [0, 1] where there are many, or bytes of an image), categorical over levels for other numbers in
  [0, 1] ("discrete"). A real number, of any other bounds, has no g and is predicted by the change of its
  mean: x_t-1 + sigma D, sigma being its standard deviation.

  Real numbers are read as symlog and standardised by running statistics, since their scales are
  unknown. Their loss is relative to the running mean squared error, so that each of them counts
  whatever its scale. "Numbers" [..., F] are ordered by kind: N binary, M discrete, R real.

  Attributes:
    spec: tree of `dm_env.specs.Array`; images for a CNN have no channels: see `without_images`.
  """

  spec: Any

  @functools.cached_property
  def _kinds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices of binary, discrete and real numbers."""
    # Bytes of images are binary: most of the images that are flat have few values.
    binary = observation_lib.which(
      self.spec, lambda leaf: leaf.dtype == bool or observation_lib.is_picture(leaf)
    )
    unit = observation_lib.unit_range(self.spec) | binary
    discrete = unit & ~binary
    if discrete.sum() > observation_lib.MAX_DISCRETE_PREDICTED:
      discrete &= False
    return np.flatnonzero(unit & ~discrete), np.flatnonzero(discrete), np.flatnonzero(~unit)

  @property
  def size(self) -> int:
    """F, how many numbers an observation has."""
    return sum(len(kind) for kind in self._kinds)

  @property
  def num_reals(self) -> int:
    """R, how many of the numbers are real."""
    return len(self._kinds[2])

  @property
  def input_size(self) -> int:
    """Width of `inputs`."""
    _, discrete, real = map(len, self._kinds)
    levels = observation_lib.DISCRETE_LEVELS * discrete if self._reads_discrete else 0
    levels += observation_lib.REAL_LEVELS * real if self._reads_real else 0
    return self.size + levels + observation_lib.view_size(self.spec)

  @functools.cached_property
  def leaves(self) -> np.ndarray:
    """[input_size] int, index of the observation's leaf to which each of the `inputs` belongs."""
    specs = jax.tree.leaves(observation_lib.without_mask(self.spec))
    leaf_of = np.repeat(np.arange(len(specs)), [math.prod(leaf.shape) for leaf in specs])
    binary, discrete, real = (leaf_of[kind] for kind in self._kinds)
    parts = [binary, discrete]
    if self._reads_discrete:
      parts.append(np.repeat(discrete, observation_lib.DISCRETE_LEVELS))
    parts.append(real)
    if self._reads_real:
      parts.append(np.repeat(real, observation_lib.REAL_LEVELS))
    shown = [observation_lib.view_size(leaf) for leaf in specs]
    return np.concatenate([*parts, np.repeat(np.arange(len(specs)), shown)])

  @property
  def num_changes(self) -> int:
    """C, width of `change`; 0 without numbers."""
    return NUM_PROJECTIONS if self.size else 0

  @property
  def _reads_discrete(self) -> bool:
    """Whether discrete numbers are also read by levels."""
    return len(self._kinds[1]) <= observation_lib.MAX_DISCRETE_READ

  @property
  def _reads_real(self) -> bool:
    """Whether real numbers are also read by levels."""
    return self.num_reals <= observation_lib.MAX_REAL_READ

  @property
  def num_outputs(self) -> int:
    """Number of a decoder's outputs: gates, logits, and changes of real numbers."""
    binary, discrete, real = map(len, self._kinds)
    return 2 * binary + (1 + observation_lib.DISCRETE_LEVELS) * discrete + real

  def initial_statistics(self) -> dict[str, jax.Array]:
    """Initial values of the running statistics, arrays by name; those of width 0 are left out.

    `mean`, `square`, `error` [R]: moments of real numbers in symlog, and their squared prediction error,
    see `loss`; `between` [N]: of each binary number x the largest 4 x (1 - x) in a batch, 0 if it only is
    0 or 1; `change` [C]: mean square of what the method `change` returns; `count` []: number of batches.
    """
    reals, ones = jnp.zeros(self.num_reals), jnp.ones(self.num_reals)
    between = jnp.ones(len(self._kinds[0]))
    statistics = {
      'mean': reals,
      'square': ones,
      'error': ones,
      'between': between,
      'change': jnp.ones(self.num_changes),
    }
    return {name: x for name, x in statistics.items() if x.size} | {'count': jnp.zeros(())}

  def moments(self, numbers: jax.Array, error: jax.Array) -> dict[str, jax.Array]:
    """Statistics of one batch for `updated`, less `change`: means over it, for `between` the maximum.

    Args:
      numbers: [T, B, F] float32, observed.
      error: [T, B, R] float32, squared errors from `loss`.
    """
    bits, _, reals = self._split(numbers)
    means = {'mean': reals, 'square': jnp.square(reals), 'error': jnp.minimum(error, 1.0)}
    moments = {name: jnp.mean(x, axis=(0, 1)) for name, x in means.items() if x.shape[-1]}
    if not bits.shape[-1]:
      return moments
    # The largest, not the mean: a rare fraction, such as a grey pixel, is none to be rounded.
    return moments | {'between': jnp.max(4 * bits * (1 - bits), axis=(0, 1))}

  def updated(
    self, statistics: dict[str, jax.Array], moments: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Running statistics after one more batch: means over up to about 500 batches, 50 for `error`."""
    rate = jnp.maximum(1 / (statistics['count'] + 1), 0.002)
    rates = {name: jnp.maximum(rate, 0.02) if name == 'error' else rate for name in moments}
    followed = {
      name: statistics[name] + rates[name] * (new - statistics[name])
      for name, new in moments.items()
    }
    return followed | {'count': statistics['count'] + 1}

  def read(self, observation: Any) -> jax.Array:
    """The numbers of an observation [..., *shape], [..., F] float32; real ones in symlog."""
    flat = observation_lib.join(observation, self.spec).astype(jnp.float32)
    binary, discrete, real = self._kinds
    return jnp.concatenate(
      [flat[..., binary], flat[..., discrete], networks.symlog(flat[..., real])], axis=-1
    )

  def _split(self, numbers: jax.Array) -> list[jax.Array]:
    binary, discrete, _ = map(len, self._kinds)
    return jnp.split(numbers, [binary, binary + discrete], axis=-1)

  def centred(self, numbers: jax.Array) -> jax.Array:
    """The numbers [..., F] with those in [0, 1] scaled to [-1, 1]."""
    bits, discrete, reals = self._split(numbers)
    return jnp.concatenate([2 * bits - 1, 2 * discrete - 1, reals], axis=-1)

  def inputs(self, numbers: jax.Array, statistics: Any) -> jax.Array:
    """Inputs of a network, [..., input_size], from numbers [..., F], in their dtype.

    Some numbers are also read by level, real ones after scaling by `statistics`; views are added.
    """
    parts = [self._without_views(numbers, statistics)]
    if observation_lib.view_size(self.spec):
      flat = self.to_flat(numbers.astype(jnp.float32))
      parts.append(
        observation_lib.views(observation_lib.to_observation(flat, [], self.spec), self.spec)
      )
    return jnp.concatenate([part.astype(numbers.dtype) for part in parts], axis=-1)

  def _without_views(self, numbers: jax.Array, statistics: Any) -> jax.Array:
    """The part of `inputs` other than views, from numbers [..., F], in their dtype."""
    bits, discrete, reals = self._split(numbers)
    parts = [bits, discrete]
    if self._reads_discrete:
      parts.append(
        observation_lib.by_level(discrete, observation_lib.DISCRETE_LEVELS).reshape(
          *discrete.shape[:-1], -1
        )
      )
    if self.num_reals:
      scaled = (reals.astype(jnp.float32) - statistics['mean']) / self._scale(statistics)
      parts.append(jnp.clip(scaled, -5.0, 5.0))
      if self._reads_real:  # such as an end of the track, which ends an episode
        within = jnp.clip(scaled / observation_lib.REAL_RANGE, -1.0, 1.0) / 2 + 0.5
        levels = observation_lib.by_level(within, observation_lib.REAL_LEVELS)
        parts.append(levels.reshape(*levels.shape[:-2], -1))
    return jnp.concatenate([part.astype(numbers.dtype) for part in parts], axis=-1)

  def _scale(self, statistics: Any) -> jax.Array:
    """[R] standard deviations of real numbers."""
    variance = statistics['square'] - jnp.square(statistics['mean'])
    return jnp.sqrt(jnp.maximum(variance, 0.0)) + 1e-4

  def predict(
    self,
    outputs: jax.Array,
    before: jax.Array,
    follows: jax.Array,
    statistics: Any,
    max_copy: float = MAX_COPY,
  ) -> Predicted:
    """The predicted distribution of the numbers of a step.

    Args:
      outputs: [..., num_outputs] float32, outputs of a decoder.
      before: [..., F], numbers of the previous step.
      follows: [...] bool, whether there is a previous step.
      statistics: see `initial_statistics`.
      max_copy: largest probability that a number is copied. Less than 1 gives each change a gradient;
        in samples it would change one of some hundred numbers in every few steps, so there it is 1.
    """
    binary, discrete, _ = map(len, self._kinds)
    ends = np.cumsum([binary + discrete, binary, discrete * observation_lib.DISCRETE_LEVELS])
    gates, bits, levels, reals = jnp.split(outputs, ends, axis=-1)
    follows = follows[..., None].astype(jnp.float32)
    copy = max_copy * jax.nn.sigmoid(gates) * follows
    copy_bits, copy_levels = jnp.split(copy, [binary], axis=-1)
    bits_before, discrete_before, reals_before = self._split(before.astype(jnp.float32))
    zero, one = (
      copy_bits * copied + (1 - copy_bits) * jax.nn.sigmoid(logits)
      for copied, logits in ((1 - bits_before, -bits), (bits_before, bits))
    )
    levels = jax.nn.softmax(
      levels.reshape(*levels.shape[:-1], discrete, observation_lib.DISCRETE_LEVELS), axis=-1
    )
    copy_levels = copy_levels[..., None]
    levels = (
      copy_levels * observation_lib.by_level(discrete_before, observation_lib.DISCRETE_LEVELS)
      + (1 - copy_levels) * levels
    )
    if self.num_reals:
      base = jnp.where(follows > 0, reals_before, statistics['mean'])
      reals = base + self._scale(statistics) * reals
    return Predicted((zero, one), levels, reals)

  def loss(
    self, predicted: Predicted, numbers: jax.Array, statistics: Any
  ) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of observed numbers, less that of a perfect decoder.

    Args:
      predicted: from `predict`.
      numbers: [..., F] float32, observed.
      statistics: see `initial_statistics`.

    Returns:
      The loss, [...] float32 nats, summed over numbers; and the squared errors of real numbers,
      [..., R] float32, in squared standard deviations.
    """
    bits, discrete, reals = self._split(numbers)
    bits, discrete = jnp.clip(bits, 0.0, 1.0), jnp.clip(discrete, 0.0, 1.0)
    zero, one = predicted.bits
    loss = _divergence(1 - bits, zero) + _divergence(bits, one)
    loss += jnp.sum(
      _divergence(
        observation_lib.by_level(discrete, observation_lib.DISCRETE_LEVELS), predicted.levels
      ),
      axis=-1,
    )
    if not self.num_reals:
      return loss, jnp.zeros(reals.shape)
    error = jnp.square((reals - predicted.reals) / self._scale(statistics))
    relative = error / self.noise(statistics)
    return loss + jnp.sum(jnp.log1p(relative / 2), axis=-1), jax.lax.stop_gradient(error)

  def noise(self, statistics: Any) -> jax.Array:
    """[R] running mean squared errors of real numbers, in squared standard deviations; see MIN_ERROR."""
    return jnp.maximum(statistics['error'], MIN_ERROR)

  def change(self, before: jax.Array, numbers: jax.Array, statistics: Any) -> jax.Array:
    """Change between the numbers [..., F] of two steps, along fixed random directions: [..., C] float32.

    It is the change of `inputs` other than views, so numbers of all kinds count alike.
    """
    inputs = lambda x: self._without_views(x.astype(jnp.float32), statistics)
    difference = inputs(numbers) - inputs(before)
    return difference @ self._directions

  @functools.cached_property
  def _directions(self) -> np.ndarray:
    """[I, C] float32, the directions of changes in the I inputs other than views."""
    shape = self.input_size - observation_lib.view_size(self.spec), self.num_changes
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)

  def changes_of_inputs(self, change: Change) -> tuple[jax.Array, jax.Array]:
    """Estimates the change of each of the I inputs other than views from changes along random directions.

    Args:
      change: predicted change, [..., C].

    Returns:
      Means and variances, [..., I] float32, in the (squared) units of `change`.
    """
    back = self._directions.T / self.num_changes  # the directions are nearly orthogonal
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return product(change.mean, back), product(change.variance, np.square(back))

  def expected(self, predicted: Predicted, statistics: Any) -> jax.Array:
    """The predicted numbers, without noise, [..., F] float32: modes of discrete ones, means of real ones.

    Numbers in [0, 1] are rounded where nearly all observed ones were 0 or 1; others, such as grey
    pixels, are means. `statistics`: see `initial_statistics`.
    """
    _, bits = predicted.bits
    if bits.shape[-1]:
      bits = jnp.where(statistics['between'] < 0.01, jnp.round(bits), bits)
    levels = around(jnp.argmax(predicted.levels, axis=-1), predicted.levels)
    return jnp.concatenate([bits, levels, predicted.reals], axis=-1)

  def sample(
    self, predicted: Predicted, before: jax.Array, statistics: Any, noise: jax.Array
  ) -> jax.Array:
    """Samples numbers, [..., F] float32; real ones are means.

    The most likely numbers would never change where a change has a probability below one half, and a
    policy would exploit that. All numbers share one random number, so that those that change in the
    same event change together, and so that a change of any of hundreds of static numbers is as rare as
    that of one.

    Args:
      predicted: from `predict`.
      before: [..., F], numbers of the previous step.
      statistics: see `initial_statistics`.
      noise: [...] float32, uniform in [0, 1).
    """
    noise = noise[..., None]
    bits_before, discrete_before, _ = self._split(before.astype(jnp.float32))
    zero, one = predicted.bits
    bits = one
    if bits.shape[-1]:  # fractions among them are as expected
      changes = noise * (zero + one) < jnp.where(bits_before > 0.5, zero, one)
      drawn = jnp.where(changes, jnp.round(1 - bits_before), jnp.round(bits_before))
      bits = jnp.where(statistics['between'] < 0.01, drawn, one)
    most = predicted.levels.shape[-1] - 1
    old = jnp.round(discrete_before * most).astype(jnp.int32)
    others = jnp.where(jnp.arange(most + 1) == old[..., None], 0.0, predicted.levels)
    ends = jnp.cumsum(others, axis=-1)
    level = jnp.sum(noise[..., None] >= ends, axis=-1)
    levels = around(jnp.where(level > most, old, level), predicted.levels)
    return jnp.concatenate([bits, levels, predicted.reals], axis=-1)

  def differences(
    self, numbers: jax.Array, others: jax.Array, statistics: Any
  ) -> tuple[jax.Array, jax.Array]:
    """How far [..., F] numbers are from [..., F] others.

    Returns:
      [...] bool, whether any binary number differs by more than 1/2, or any discrete one by more than
      half a level; and [...] float32, the mean absolute difference of real numbers, in standard deviations.
    """
    error = jnp.abs(numbers - others)
    bits, discrete, reals = self._split(error)
    wrong = jnp.any(bits > 0.5, axis=-1)
    wrong |= jnp.any(discrete > 0.5 / (observation_lib.DISCRETE_LEVELS - 1), axis=-1)
    if not self.num_reals:
      return wrong, jnp.zeros(wrong.shape)
    return wrong, jnp.mean(reals / self._scale(statistics), axis=-1)

  def pick(self, numbers: jax.Array, indices: np.ndarray) -> jax.Array:
    """Picks the numbers at [V] indices of a flat observation, [..., V] float32 in its units."""
    places = np.argsort(np.concatenate(self._kinds))[indices]
    picked = numbers[..., places].astype(jnp.float32)
    return jnp.where(places >= self.size - self.num_reals, networks.symexp(picked), picked)

  def warnings(self) -> list[str]:
    """A line for each limit of `observation`, such as MAX_REAL_READ, that this observation exceeds."""
    _, discrete, real = map(len, self._kinds)
    fractions = sum(
      math.prod(leaf.shape)
      for leaf in jax.tree.leaves(observation_lib.without_mask(self.spec))
      if leaf.dtype != bool and observation_lib.is_bounded(leaf, 0, 1)
    )
    found = []
    if fractions > observation_lib.MAX_DISCRETE_PREDICTED:
      found.append(
        f'{fractions:,} numbers in [0, 1], more than {observation_lib.MAX_DISCRETE_PREDICTED}: '
        'predicted as binary, so values between 0 and 1 are predicted poorly'
      )
    elif discrete and not self._reads_discrete:
      found.append(
        f'{discrete:,} numbers in [0, 1], more than {observation_lib.MAX_DISCRETE_READ}: read '
        'without levels, so nearby values are harder to tell apart'
      )
    if real and not self._reads_real:
      found.append(
        f'{real:,} real numbers, more than {observation_lib.MAX_REAL_READ}: read without levels, '
        'so thresholds of single numbers are harder to learn'
      )
    return found

  def to_flat(self, numbers: jax.Array) -> jax.Array:
    """Converts numbers [..., F] of the model back to a flat observation [..., F], the inverse of `read`."""
    bits, discrete, reals = self._split(numbers)
    values = jnp.concatenate([bits, discrete, networks.symexp(reals)], axis=-1)
    return values[..., np.argsort(np.concatenate(self._kinds))]


def around(level: jax.Array, shares: jax.Array) -> jax.Array:
  """Decodes numbers in [0, 1], [...] float32, from distributions over levels, near a given level.

  A number between two levels is two-hot, so the result is the mean over the level and its neighbours.
  A mean over all levels would average distant modes.

  Args:
    level: [...] int32, index of one of the L levels.
    shares: [..., L] float32, probabilities of all levels.
  """
  place = jnp.arange(shares.shape[-1])
  near = jnp.where(jnp.abs(place - level[..., None]) <= 1, shares, 0.0)
  total = jnp.maximum(jnp.sum(near, axis=-1), MIN_LIKELIHOOD)
  return jnp.sum(near * place, axis=-1) / total / (shares.shape[-1] - 1)


def _divergence(shares: jax.Array, predicted: jax.Array) -> jax.Array:
  """Sum over N of shares ln( shares / predicted ), [...] float32, from [..., N] arrays: terms of a KL."""
  return jnp.sum(_xlogx(shares) - shares * jnp.log(jnp.maximum(predicted, MIN_LIKELIHOOD)), axis=-1)


def _xlogx(x: jax.Array) -> jax.Array:
  return jax.scipy.special.xlogy(x, x)
