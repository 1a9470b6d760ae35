"""Numbers of an observation in a world model: how they are read and predicted, and their loss."""

import abc
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import kernels, networks
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import sockets

MAX_COPY = 0.999
"""Largest predicted probability that a number stays as it was, so that a change always has a gradient."""

MIN_LIKELIHOOD = 1e-20
"""Least likelihood in a loss. Where decoders reached it, rare changes would have no gradient."""

MIN_ERROR = 1e-4
"""Least mean squared error of real numbers that scales their loss, in squared standard deviations."""

MIN_FRACTION = 0.01
"""Least `between` or `off_level` of a number that has other values than 0 and 1, or than its levels."""

LARGEST = 'between', 'off_level'
"""Prefixes of the names of statistics that are maxima over a batch, and so over its parts."""

OPEN = 0.01
"""Least probability that a number changes, and that it does not, where changes exclude each other: `occurs`."""

OPEN_WITH_NUMBER = 0.1
"""Least sum of the probabilities of rare events at which one of them may occur, where the number of events is
known, in place of 1/2: a fruit that is eaten is still predicted where it was, but less and less."""

MAX_SPREAD = 0.01
"""Largest variance of the number of cells that have a feature with which it counts as constant."""

AMOUNT_ERROR = 0.1
"""Error of an amount in a grid at which its likelihood is one half; a larger one is wrong: see `Amounts`."""

NUM_PROJECTIONS = 32
"""Random directions along which an ensemble predicts the change of the numbers."""

MIN_CHANGE_VARIANCE = 0.05
"""Least predicted variance of a change, as a share of the mean square of changes."""

MIN_CHANGE_SQUARE = 1e-6
"""Least mean square of changes, so that an observation that never changes has a finite loss."""


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


class Amount(NamedTuple):
  """Predicted distributions of `Amounts`, [..., N] float32 each.

  Attributes:
    none: probability of 0.
    stays: probability that an amount other than 0 is copied.
    some: probability of `amount`.
    before: the number at the previous step.
    amount: the most likely amount where it is not copied.
  """

  none: jax.Array
  stays: jax.Array
  some: jax.Array
  before: jax.Array
  amount: jax.Array


class Level(NamedTuple):
  """Predicted distributions of `Levels`.

  Attributes:
    copy: [..., N] float32, probability of a copy.
    before: [..., N] float32, the numbers at the previous step.
    old: [..., N, L] float32, the same, two-hot.
    new: [..., N, L] float32, probabilities of what is not copied.
  """

  copy: jax.Array
  before: jax.Array
  old: jax.Array
  new: jax.Array

  def all(self) -> jax.Array:
    """[..., N, L] float32, probabilities of all levels."""
    copy = self.copy[..., None]
    return copy * self.old + (1 - copy) * self.new


class Before(NamedTuple):
  """Numbers of the previous step, of one kind, which the model may copy.

  Attributes:
    numbers: [..., N] float32.
    follows: [..., 1] float32, 1 where there is a previous step, else 0.
    max_copy: largest probability of a copy.
  """

  numbers: jax.Array
  follows: jax.Array
  max_copy: float

  def copies(self, gates: jax.Array) -> jax.Array:
    """g, the probability that each number is copied, [..., N] float32, from [..., N] outputs."""
    return self.max_copy * jax.nn.sigmoid(gates) * self.follows


def occurs(
  probability: jax.Array, noise: jax.Array, number: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Samples which of N events occur, by one random number: systematic sampling (Madow, 1949).

  The events lie one after another on a line, each as long as its probability, and those occur that hold
  one of the points noise, noise + 1, noise + 2, ... So each has its probability, and their number is as
  close to its mean as it can be: of four cells that a thing may enter, it enters exactly one. Events whose
  probability is nearly 1, or nearly 0 and in all less than 1/2 (with a `number` OPEN_WITH_NUMBER), begin at 0
  instead, so that any of hundreds of changes that a decoder holds for nearly impossible is as rare as one of
  them.

  Args:
    probability: [..., N] float32.
    noise: [..., 1] float32, uniform in [0, 1).
    number: [..., 1] float32, how many events are known to occur; then the probabilities of those that are
      uncertain are scaled, so that in all they are as many as are left; of rare ones, too, where else there
      are too few. None where it is not known.

  Returns:
    [..., N] bool; and where an event occurs a number uniform in [0, 1), [..., N] float32.
  """
  is_rare, is_sure = probability <= OPEN, probability >= 1 - OPEN
  least = 0.5 if number is None else OPEN_WITH_NUMBER
  opens = kernels.total(jnp.where(is_rare, probability, 0.0))[..., None] >= least
  if number is not None:
    left = jnp.maximum(number - jnp.sum(is_sure, axis=-1, keepdims=True), 0.0)
    opens |= jnp.sum(~is_rare & ~is_sure, axis=-1, keepdims=True) < left
  is_open = ~is_sure & (~is_rare | opens)
  length = jnp.where(is_open, probability, 0.0)
  if number is not None:
    total = jnp.maximum(kernels.total(length)[..., None], MIN_LIKELIHOOD)
    length = jnp.minimum(length * left / total, 1.0)
    probability = jnp.where(is_sure, 1.0, length)
  begin = jnp.where(is_open, jnp.cumsum(length, axis=-1) - length, 0.0)
  point = noise + jnp.ceil(begin - noise) - begin
  return point < probability, point / jnp.maximum(probability, MIN_LIKELIHOOD)


@dataclasses.dataclass(frozen=True, eq=False)
class Kind(abc.ABC):
  """N numbers of one kind, as a world model reads and predicts them.

  A prediction is what `predict` returns. Statistics are the running ones of `initial_statistics`.

  Attributes:
    indices: [N] int, positions in a flat observation, ascending; with a `player` those of the board and its two.
    grid: (H, W, C) where they are the features of the cells of one grid, row by row; else None.
    player: positions in a flat observation of two numbers that tell the player's cell of the grid, by row and
      column, each divided by the largest; or None. In their place the last feature of a cell is 1 at the player's.
  """

  indices: np.ndarray
  grid: tuple[int, int, int] | None = dataclasses.field(default=None, kw_only=True)
  player: tuple[int, int] | None = dataclasses.field(default=None, kw_only=True)

  def named(self, statistic: str) -> str:
    """The name of a statistic: each grid has its own."""
    return f'{statistic}_{self.indices[0]}' if self.grid else statistic

  @property
  def sources(self) -> np.ndarray:
    """[N] int, position in a flat observation of what each of the model's numbers is of."""
    return self.indices

  @property
  def size(self) -> int:
    """N."""
    return len(self.sources)

  @property
  @abc.abstractmethod
  def parts(self) -> tuple[int, ...]:
    """How many of a decoder's outputs each part of the prediction of one number reads."""

  @property
  def num_outputs(self) -> int:
    """Number of a decoder's outputs that `predict` reads."""
    return sum(self.parts) * self.size

  @property
  def cell_outputs(self) -> tuple[int, ...]:
    """How many of them are of one cell of a grid, in each of the parts; the cells of a part are in order."""
    assert self.grid
    return tuple(count * self.grid[-1] for count in self.parts)

  @property
  def cell_inputs(self) -> int:
    """Width of what `Numbers.cells` gives for a cell of a grid."""
    assert self.grid
    return self.grid[-1] * (1 + self.num_levels)

  @property
  def num_levels(self) -> int:
    """Number of levels by which each number is also read; 0: by its value only."""
    return 0

  @property
  @abc.abstractmethod
  def description(self) -> str:
    """How each of the numbers is read, in words."""

  @abc.abstractmethod
  def initial_statistics(self) -> dict[str, jax.Array]:
    """Initial values of the running statistics, arrays by name."""

  @abc.abstractmethod
  def moments(self, numbers: jax.Array, statistics: Any) -> dict[str, jax.Array]:
    """The contribution of one batch [T, B, N] to each of the `statistics` so far, other than errors."""

  def read(self, flat: jax.Array) -> jax.Array:
    """The model's numbers, from [..., N] in the units of a flat observation."""
    return flat

  def to_flat(self, numbers: jax.Array) -> jax.Array:
    """The inverse of `read`."""
    return numbers

  @abc.abstractmethod
  def inputs(self, numbers: jax.Array, statistics: Any) -> list[jax.Array]:
    """Inputs of a network, [..., N] by value, then [..., N * num_levels] if they are read by level."""

  @abc.abstractmethod
  def predict(self, outputs: jax.Array, before: Before, statistics: Any) -> Any:
    """The predicted distribution, from [..., num_outputs] float32 outputs of a decoder."""

  @abc.abstractmethod
  def loss(self, predicted: Any, numbers: jax.Array, statistics: Any) -> jax.Array:
    """Negative log-likelihood of [..., N] observed numbers, minus the same for a perfect decoder: [...]."""

  @abc.abstractmethod
  def expected(self, predicted: Any, statistics: Any) -> jax.Array:
    """The predicted numbers without noise, [..., N] float32."""

  @abc.abstractmethod
  def sample(
    self, predicted: Any, before: jax.Array, statistics: Any, noise: jax.Array
  ) -> jax.Array:
    """Sampled numbers, [..., N] float32, by uniform noise [..., 1]; see `Numbers.sample`."""

  @abc.abstractmethod
  def wrong(self, numbers: jax.Array, others: jax.Array) -> jax.Array:
    """[...] bool, whether any of [..., N] numbers has another value than in `others`, up to rounding."""


@dataclasses.dataclass(frozen=True, eq=False)
class Counted(Kind):
  """Numbers in [0, 1] of which 0 is nothing. Of a grid, the cells that have something are counted by feature."""

  def initial_statistics(self) -> dict[str, jax.Array]:
    """`between` [N]: the largest 4 x (1 - x) in a batch, 0 where a number only is 0 or 1.

    Of a grid also `cells` and `square` [C]: mean and mean square of the number of cells with each feature.
    """
    statistics = {self.named('between'): jnp.ones(self.size)}
    if self.grid:
      counts = {'cells': jnp.zeros(self.grid[-1]), 'square': jnp.ones(self.grid[-1])}
      statistics |= {self.named(name): x for name, x in counts.items()}
    return statistics

  def moments(self, numbers: jax.Array, statistics: Any) -> dict[str, jax.Array]:
    # The largest, not the mean: a rare fraction, such as a grey pixel, is none to be rounded.
    moments = {self.named('between'): jnp.max(4 * numbers * (1 - numbers), axis=(0, 1))}
    if self.grid:
      cells = jnp.sum(self._by_feature(numbers) > 0, axis=-1).astype(jnp.float32)
      counts = {'cells': cells, 'square': jnp.square(cells)}
      moments |= {self.named(name): jnp.mean(x, axis=(0, 1)) for name, x in counts.items()}
    return moments

  def _by_feature(self, numbers: jax.Array) -> jax.Array:
    """A grid's numbers [..., N] as [..., C, H W]."""
    assert self.grid
    return jnp.swapaxes(numbers.reshape(*numbers.shape[:-1], -1, self.grid[-1]), -1, -2)

  def _is_whole(self, statistics: Any) -> jax.Array:
    """[N] bool, numbers of which nearly all that were observed are 0 or 1."""
    whole: jax.Array = statistics[self.named('between')] < MIN_FRACTION
    return whole

  def inputs(self, numbers: jax.Array, statistics: Any) -> list[jax.Array]:
    return [numbers]

  def _conserved(
    self,
    drawn: jax.Array,
    before: jax.Array,
    probability: jax.Array,
    statistics: Any,
    noise: jax.Array,
  ) -> jax.Array:
    """Drawn numbers [..., N] of a grid in which a feature that always was in as many cells is in as many.

    Else a rare event, such as a snake that eats, would lose its head or the fruit, and what follows would be
    a scene of which nothing is known. `probability` [..., N] is that of a 1. Where it is too little in all, the
    rest appears where nothing was `before`: that a fruit is eaten is learned sooner than where the next one is.
    """
    cells, square = (statistics[self.named(name)] for name in ('cells', 'square'))
    number = jnp.round(cells)[:, None]
    is_constant = (square - jnp.square(cells) < MAX_SPREAD) & (number[:, 0] > 0)
    likely = self._by_feature(probability)
    new = jnp.where(self._by_feature(before) > 0, 0.0, likely)
    total = lambda x: jnp.maximum(kernels.total(x)[..., None], MIN_LIKELIHOOD)
    missing = jnp.maximum(number - total(likely), 0.0)
    likely = jnp.minimum(likely + new * missing / total(new), 1.0)
    kept, _ = occurs(likely, noise[..., None], number)
    conserved = jnp.where(is_constant[:, None], kept, self._by_feature(drawn))
    return jnp.swapaxes(conserved, -1, -2).reshape(drawn.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Binary(Counted):
  """Numbers that are 0 or 1: Bernoulli. A prediction is the probabilities of 0 and of 1, [..., N] each.

  Both, since 1 - p would round to 0 where p is almost 1; apart, since XLA's CPU is slow on axes of 2.
  """

  parts = 1, 1
  description = '0 or 1'

  def predict(
    self, outputs: jax.Array, before: Before, statistics: Any
  ) -> tuple[jax.Array, jax.Array]:
    gates, logits = jnp.split(outputs, 2, axis=-1)
    copy, was = before.copies(gates), before.numbers
    zero = copy * (1 - was) + (1 - copy) * jax.nn.sigmoid(-logits)
    return zero, copy * was + (1 - copy) * jax.nn.sigmoid(logits)

  def loss(
    self, predicted: tuple[jax.Array, jax.Array], numbers: jax.Array, statistics: Any
  ) -> jax.Array:
    zero, one = predicted
    numbers = jnp.clip(numbers, 0.0, 1.0)
    return _divergence(1 - numbers, zero) + _divergence(numbers, one)

  def expected(self, predicted: tuple[jax.Array, jax.Array], statistics: Any) -> jax.Array:
    """Rounded where nearly all observed numbers were 0 or 1; others, such as grey pixels, are means."""
    _, one = predicted
    return jnp.where(self._is_whole(statistics), jnp.round(one), one)

  def sample(
    self,
    predicted: tuple[jax.Array, jax.Array],
    before: jax.Array,
    statistics: Any,
    noise: jax.Array,
  ) -> jax.Array:
    zero, one = predicted
    was_one = before > 0.5
    ends = jnp.where(was_one, zero / (zero + one), 0.0)
    begins = jnp.where(was_one, 0.0, one / (zero + one))
    ends, _ = occurs(ends, noise)
    begins, _ = occurs(begins, noise)
    drawn = ((was_one & ~ends) | begins).astype(jnp.float32)
    if self.grid:
      drawn = self._conserved(drawn, before, one / (zero + one), statistics, noise)
    return jnp.where(self._is_whole(statistics), drawn, one)

  def wrong(self, numbers: jax.Array, others: jax.Array) -> jax.Array:
    return jnp.any(jnp.abs(numbers - others) > 0.5, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Amounts(Counted):
  """Numbers in [0, 1] of a grid: whether there is anything, a Bernoulli, and how much, a Cauchy.

  Amounts that were always 1 are bits, as `Binary` ones. A mean over none and some would be an amount that never
  occurs, of which networks know nothing, such as a quarter of an enemy.
  """

  parts = 1, 1, 1
  description = 'in [0, 1], none or some'

  def _is_whole(self, statistics: Any) -> jax.Array:
    """[N] bool, numbers of the features of which all amounts that were observed are 1."""
    by_feature = self._by_feature(statistics[self.named('between')])
    return jnp.tile(jnp.max(by_feature, axis=-1) < MIN_FRACTION, by_feature.shape[-1])

  @property
  def sources(self) -> np.ndarray:
    if not self.player:
      return self.indices
    assert self.grid
    board = np.setdiff1d(self.indices, self.player).reshape(-1, self.grid[-1] - 1)
    return np.insert(board, self.grid[-1] - 1, self.player[0], axis=-1).reshape(-1)

  def read(self, flat: jax.Array) -> jax.Array:
    if not self.player:
      return flat
    assert self.grid
    height, width, features = self.grid
    of_board = ~np.isin(self.indices, self.player)
    board = flat[..., of_board].reshape(*flat.shape[:-1], height, width, features - 1)
    row, column = (flat[..., np.searchsorted(self.indices, place)] for place in self.player)
    row, column = (observation_lib.by_level(x, n) for x, n in ((row, height), (column, width)))
    player = jnp.round(row[..., :, None] * column[..., None, :])
    return jnp.concatenate([board, player[..., None]], axis=-1).reshape(*flat.shape[:-1], -1)

  def to_flat(self, numbers: jax.Array) -> jax.Array:
    if not self.player:
      return numbers
    assert self.grid
    by_cell = numbers.reshape(*numbers.shape[:-1], *self.grid)
    board = by_cell[..., :-1].reshape(*numbers.shape[:-1], -1)
    of_board = ~np.isin(self.indices, self.player)
    flat = jnp.zeros((*numbers.shape[:-1], len(self.indices))).at[..., of_board].set(board)
    for place, axis in zip(self.player, (-1, -2), strict=True):  # the mean where there are several
      along = jnp.sum(by_cell[..., -1], axis=axis)
      at = along @ jnp.linspace(0.0, 1.0, along.shape[-1])
      at /= jnp.maximum(jnp.sum(along, axis=-1), 1.0)
      flat = flat.at[..., np.searchsorted(self.indices, place)].set(at)
    return flat

  def inputs(self, numbers: jax.Array, statistics: Any) -> list[jax.Array]:
    """0 for none, and from 1/2 to 1 for some: little of something is more than nothing."""
    return [jnp.where(numbers > 0, (1 + numbers) / 2, 0.0)]

  def predict(self, outputs: jax.Array, before: Before, statistics: Any) -> Amount:
    gates, logits, amounts = jnp.split(outputs, 3, axis=-1)
    copy, was = before.copies(gates), before.numbers
    is_some = (was > 0).astype(jnp.float32)
    amount = jnp.where(self._is_whole(statistics), 1.0, jax.nn.sigmoid(amounts))
    return Amount(
      none=copy * (1 - is_some) + (1 - copy) * jax.nn.sigmoid(-logits),
      stays=copy * is_some,
      some=(1 - copy) * jax.nn.sigmoid(logits),
      before=was,
      amount=amount,
    )

  def loss(self, predicted: Amount, numbers: jax.Array, statistics: Any) -> jax.Array:
    is_same = jnp.abs(numbers - predicted.before) < networks.SAME
    fit = 1 / (1 + jnp.square((numbers - predicted.amount) / AMOUNT_ERROR))
    some = jnp.where(is_same, predicted.stays, 0.0) + predicted.some * fit
    likelihood = jnp.where(numbers > 0, some, predicted.none)
    return -jnp.sum(jnp.log(jnp.maximum(likelihood, MIN_LIKELIHOOD)), axis=-1)

  def expected(self, predicted: Amount, statistics: Any) -> jax.Array:
    """The most likely of none, the amount before, and the predicted amount."""
    none, stays, some, before, amount = predicted
    return jnp.where(none > stays + some, 0.0, jnp.where(stays >= some, before, amount))

  def sample(
    self, predicted: Amount, before: jax.Array, statistics: Any, noise: jax.Array
  ) -> jax.Array:
    none, stays, some, _, amount = predicted
    is_some, total = before > 0, none + stays + some
    # A new amount that is the same is no event: the loss does not tell it from a copy.
    new = jnp.where(jnp.abs(amount - before) < networks.SAME, 0.0, some)
    happens, share = occurs(jnp.where(is_some, (none + new) / total, 0.0), noise)
    ends = happens & (share * (none + new) < none)
    begins, _ = occurs(jnp.where(is_some, 0.0, some / total), noise)
    drawn = self._conserved(
      jnp.where(is_some, ~ends, begins).astype(jnp.float32),
      before,
      (stays + some) / total,
      statistics,
      noise,
    )
    return drawn * jnp.where(is_some & (ends | ~happens), before, amount)

  def wrong(self, numbers: jax.Array, others: jax.Array) -> jax.Array:
    return jnp.any(jnp.abs(numbers - others) > AMOUNT_ERROR, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Levels(Kind):
  """Numbers of L levels, scaled to [0, 1]: categorical.

  Attributes:
    low: [N] float32, the first level, in the units of a flat observation.
    step: distance between two levels, in the same units.
    count: L.
    is_read: whether they are also read by level.
    is_exact: whether they only have values at the levels, as integers do; others are two-hot.
  """

  low: np.ndarray
  step: float
  count: int
  is_read: bool = True
  is_exact: bool = True

  @property
  def num_levels(self) -> int:
    return self.count if self.is_read else 0

  @property
  def parts(self) -> tuple[int, ...]:
    return 1, self.count

  def _shares(self, numbers: jax.Array) -> jax.Array:
    """Two-hot encoded numbers, [..., N, L] float32."""
    return observation_lib.by_level(numbers, self.count)

  @property
  def description(self) -> str:
    return f'one of {self.count} values' if self.is_exact else 'in [0, 1], by level'

  def initial_statistics(self) -> dict[str, jax.Array]:
    """`off_level` [N]: the largest distance from a level in a batch, in levels; none where exact."""
    return {} if self.is_exact else {self.named('off_level'): jnp.ones(len(self.indices))}

  def moments(self, numbers: jax.Array, statistics: Any) -> dict[str, jax.Array]:
    if self.is_exact:
      return {}
    levels = numbers * (self.count - 1)
    return {self.named('off_level'): jnp.max(jnp.abs(levels - jnp.round(levels)), axis=(0, 1))}

  def read(self, flat: jax.Array) -> jax.Array:
    return (flat - jnp.asarray(self.low)) / (self.step * (self.count - 1))

  def to_flat(self, numbers: jax.Array) -> jax.Array:
    return jnp.asarray(self.low) + self.step * (self.count - 1) * numbers

  def inputs(self, numbers: jax.Array, statistics: Any) -> list[jax.Array]:
    levels = self._shares(numbers).reshape(*numbers.shape[:-1], -1)
    return [numbers, levels] if self.is_read else [numbers]

  def predict(self, outputs: jax.Array, before: Before, statistics: Any) -> Level:
    gates, logits = jnp.split(outputs, [len(self.indices)], axis=-1)
    new = jax.nn.softmax(logits.reshape(*gates.shape, self.count), axis=-1)
    old = self._shares(before.numbers)
    return Level(before.copies(gates), before.numbers, old, new)

  def loss(self, predicted: Level, numbers: jax.Array, statistics: Any) -> jax.Array:
    shares = self._shares(jnp.clip(numbers, 0.0, 1.0))
    return jnp.sum(_divergence(shares, predicted.all()), axis=-1)

  def expected(self, predicted: Level, statistics: Any) -> jax.Array:
    """The most likely level. Where numbers lie between levels, the number before, or what is near the most likely."""
    level = jnp.argmax(predicted.all(), axis=-1) / (self.count - 1)
    if self.is_exact:
      return level
    new = around(jnp.argmax(predicted.new, axis=-1), predicted.new)
    between = jnp.where(predicted.copy > 0.5, predicted.before, new)
    return jnp.where(self._at_levels(statistics), level, between)

  def sample(
    self, predicted: Level, before: jax.Array, statistics: Any, noise: jax.Array
  ) -> jax.Array:
    old = jnp.round(before * (self.count - 1)).astype(jnp.int32)
    is_old = jnp.arange(self.count) == old[..., None]
    new, changes = self._changed(old, jnp.where(is_old, 0.0, predicted.all()), noise)
    level = jnp.where(changes, new, old) / (self.count - 1)
    if self.is_exact:
      return level
    # Between levels an average of both would be an amount that never occurs, such as half of what is gained.
    own = (1 - predicted.copy)[..., None] * predicted.new
    stays = is_old & (jnp.argmax(own, axis=-1) == old)[..., None]
    new, changes = self._changed(old, jnp.where(stays, 0.0, own), noise)
    moves = changes | (jnp.sum(jnp.where(stays, own, 0.0), axis=-1) > predicted.copy)
    near = around(jnp.where(changes, new, old), predicted.new)
    return jnp.where(self._at_levels(statistics), level, jnp.where(moves, near, before))

  def _changed(
    self, old: jax.Array, others: jax.Array, noise: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Levels [..., N] that numbers change to, of probabilities `others` [..., N, L], and [..., N] bool, which do."""
    ends = jnp.cumsum(others, axis=-1)
    change = ends[..., -1]
    below = jnp.sum(jnp.where(jnp.arange(self.count) < old[..., None], others, 0.0), axis=-1)
    # What falls in one number may rise in another, as where a thing moves: these exclude no one another.
    each = [
      occurs(jnp.where(is_own, change, 0.0), noise)
      for is_own in (below > change / 2, below <= change / 2)
    ]
    share = jnp.where(each[0][0], each[0][1], each[1][1])
    level = jnp.sum((share * change)[..., None] >= ends, axis=-1)
    return jnp.minimum(level, self.count - 1), each[0][0] | each[1][0]

  def _at_levels(self, statistics: Any) -> jax.Array:
    """[N] bool, numbers that were always at a level, up to rounding."""
    at_levels: jax.Array = statistics[self.named('off_level')] < MIN_FRACTION
    return at_levels

  def wrong(self, numbers: jax.Array, others: jax.Array) -> jax.Array:
    half_a_level: float = 0.5 / (self.count - 1)
    return jnp.any(jnp.abs(numbers - others) > half_a_level, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Real(Kind):
  """Real numbers, in symlog: Cauchy. A prediction is means [..., N], from the changes of the numbers.

  They are read standardised by running statistics, since their scales are unknown. Their loss is relative
  to the running mean squared error, so that each of them counts whatever its scale. They have no gate: a
  prediction is x_t-1 + sigma D, sigma being the standard deviation.
  """

  parts = (1,)
  description = 'real'

  @property
  def num_levels(self) -> int:
    few = len(self.indices) <= observation_lib.MAX_REAL_READ
    return observation_lib.REAL_LEVELS if few else 0

  def initial_statistics(self) -> dict[str, jax.Array]:
    """`mean`, `variance`, `error` [N]: of the numbers, and their squared error, see `errors`."""
    zeros, ones = jnp.zeros(len(self.indices)), jnp.ones(len(self.indices))
    return {'mean': zeros, 'variance': ones, 'error': ones}

  def moments(self, numbers: jax.Array, statistics: Any) -> dict[str, jax.Array]:
    # Squares about the mean so far: of 1e4 +- 10, in symlog, those about 0 have too few digits in float32.
    means = {'mean': numbers, 'variance': jnp.square(numbers - statistics['mean'])}
    return {name: jnp.mean(x, axis=(0, 1)) for name, x in means.items()}

  def read(self, flat: jax.Array) -> jax.Array:
    return networks.symlog(flat)

  def to_flat(self, numbers: jax.Array) -> jax.Array:
    return networks.symexp(numbers)

  def inputs(self, numbers: jax.Array, statistics: Any) -> list[jax.Array]:
    scaled = (numbers.astype(jnp.float32) - statistics['mean']) / self.scale(statistics)
    parts = [jnp.clip(scaled, -5.0, 5.0)]
    if self.num_levels:  # such as an end of the track, which ends an episode
      within = jnp.clip(scaled / observation_lib.REAL_RANGE, -1.0, 1.0) / 2 + 0.5
      levels = observation_lib.by_level(within, self.num_levels)
      parts.append(levels.reshape(*levels.shape[:-2], -1))
    return parts

  def scale(self, statistics: Any) -> jax.Array:
    """[N] standard deviations."""
    return jnp.sqrt(statistics['variance']) + 1e-4

  def predict(self, outputs: jax.Array, before: Before, statistics: Any) -> jax.Array:
    base = jnp.where(before.follows > 0, before.numbers, statistics['mean'])
    return base + self.scale(statistics) * outputs

  def errors(self, predicted: jax.Array, numbers: jax.Array, statistics: Any) -> jax.Array:
    """Squared errors, [..., N] float32, in squared standard deviations."""
    return jnp.square((numbers - predicted) / self.scale(statistics))

  def loss(self, predicted: jax.Array, numbers: jax.Array, statistics: Any) -> jax.Array:
    noise = jnp.maximum(statistics['error'], MIN_ERROR)
    relative = self.errors(predicted, numbers, statistics) / noise
    return jnp.sum(jnp.log1p(relative / 2), axis=-1)

  def expected(self, predicted: jax.Array, statistics: Any) -> jax.Array:
    return predicted

  def sample(
    self, predicted: jax.Array, before: jax.Array, statistics: Any, noise: jax.Array
  ) -> jax.Array:
    """The means."""
    return predicted

  def wrong(self, numbers: jax.Array, others: jax.Array) -> jax.Array:
    """Never: their errors are measured by their size."""
    return jnp.zeros(jnp.broadcast_shapes(numbers.shape, others.shape)[:-1], bool)


@dataclasses.dataclass(frozen=True)
class Numbers:
  """The F numbers of an observation: how a world model reads and predicts them, and their loss.

  Each number either stays as it was at the previous step, or is predicted from the features:

    p(x_t) = g delta(x_t-1) + (1 - g) D,    g, D = decoder(features)

  so that static parts of an observation need no features. D is by `Kind`; `observation` has a table of which
  numbers are of which kind. `Real` numbers have no g.

  "Numbers" [..., F] are ordered by kind, and all but real ones are scaled to [0, 1]. A prediction is a tuple
  with the prediction of each kind. Each grid is a kind of its own, whose cells networks read and predict
  alike, see `observation.grid`.

  Attributes:
    spec: tree of `dm_env.specs.Array`; images for a CNN have no channels: see `without_images`.
  """

  spec: Any

  @functools.cached_property
  def kinds(self) -> tuple[Kind, ...]:
    """The kinds of which there are numbers, in their order."""
    which = functools.partial(observation_lib.which, self.spec)
    values = observation_lib.of_numbers(self.spec, observation_lib.num_values)
    # Bytes of images are binary: most of the images that are flat have few values.
    picture = which(observation_lib.is_picture)
    binary = picture | which(lambda leaf: leaf.dtype == bool)
    binary |= (values == 2) & observation_lib.unit_range(self.spec)
    whole = (values > 0) & ~binary
    unit = observation_lib.unit_range(self.spec) | which(lambda leaf: hasattr(leaf, 'board_shape'))
    unit &= ~binary & ~whole
    real = ~(binary | whole | unit)
    low = observation_lib.of_numbers(self.spec, lambda leaf: getattr(leaf, 'minimum', 0))

    def discrete(within: np.ndarray, **grid: Any) -> list[Kind]:
      fractions, bits = unit & within, binary & within
      amounts = np.flatnonzero((unit | picture) & within)
      if grid and len(amounts):
        return [Amounts(amounts, **grid)]
      if fractions.sum() > observation_lib.MAX_DISCRETE_PREDICTED:
        fractions, bits = fractions & False, bits | fractions
      integers = [
        Levels(np.flatnonzero(at), low[at].astype(np.float32), 1.0, int(count), **grid)
        for count in np.unique(values[whole & within])
        for at in [whole & within & (values == count)]
      ]
      count, at = observation_lib.DISCRETE_LEVELS, np.flatnonzero(fractions)
      zeros, step = np.zeros(len(at), np.float32), 1 / (count - 1)
      is_read = len(at) <= observation_lib.MAX_DISCRETE_READ
      by_level = Levels(at, zeros, step, count, is_read=is_read, is_exact=False, **grid)
      return [Binary(np.flatnonzero(bits), **grid), *integers, by_level]

    kinds, outside, begin = [], ~real, 0
    for leaf in jax.tree.leaves(observation_lib.without_mask(self.spec)):
      end, found = begin + math.prod(leaf.shape), observation_lib.grid(leaf)
      if found and not real[begin + found.begin : end].any():
        position = np.arange(len(real))
        player = found.player and (begin + found.player[0], begin + found.player[1])
        within = (begin + found.begin <= position) & (position < end)
        within |= np.isin(position, player or ())
        height, width, features = found.shape
        shape = height, width, features + (player is not None)
        kinds += discrete(within, grid=shape, player=player)
        outside &= ~within
      begin = end
    kinds += [*discrete(outside), Real(np.flatnonzero(real))]
    return tuple(kind for kind in kinds if len(kind.indices))

  @property
  def grids(self) -> list[Kind]:
    """Those of the kinds that are grids."""
    return [kind for kind in self.kinds if kind.grid]

  @property
  def _real(self) -> Real:
    """The real numbers, of which there may be none."""
    return next((kind for kind in self.kinds if isinstance(kind, Real)), Real(np.zeros(0, int)))

  @property
  def size(self) -> int:
    """F, how many numbers an observation has."""
    return sum(kind.size for kind in self.kinds)

  @property
  def num_reals(self) -> int:
    """R, how many of the numbers are real."""
    return len(self._real.indices)

  @property
  def input_size(self) -> int:
    """Width of `inputs`."""
    read = sum((1 + kind.num_levels) * kind.size for kind in self.kinds)
    return read + observation_lib.view_size(self.spec)

  @property
  def placed_size(self) -> int:
    """Width of the first of the `inputs`, those of grids: each says what is in one place."""
    return sum((1 + kind.num_levels) * kind.size for kind in self.grids)

  @property
  def num_changes(self) -> int:
    """C, width of `change`; 0 without numbers."""
    return NUM_PROJECTIONS if self.size else 0

  @property
  def num_outputs(self) -> int:
    """Number of the decoders' outputs, for all kinds in their order."""
    return sum(kind.num_outputs for kind in self.kinds)

  @property
  def grid_outputs(self) -> int:
    """Number of the first of them, those for grids."""
    return sum(kind.num_outputs for kind in self.grids)

  def initial_statistics(self) -> dict[str, jax.Array]:
    """Initial values of the running statistics, arrays by name, for each kind and for all numbers.

    `change` [C]: mean square of what the method `change` returns; `count` []: number of batches.
    """
    statistics = {'change': jnp.ones(self.num_changes)} if self.size else {}
    for kind in self.kinds:
      statistics |= kind.initial_statistics()
    return statistics | {'count': jnp.zeros(())}

  def moments(
    self, numbers: jax.Array, error: jax.Array, statistics: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Statistics of one batch for `updated`, less `change`.

    Args:
      numbers: [T, B, F] float32, observed.
      error: [T, B, R] float32, squared errors from `loss`.
      statistics: running statistics before the batch.
    """
    moments: dict[str, jax.Array] = {}
    for kind, part in zip(self.kinds, self._split(numbers), strict=True):
      moments |= kind.moments(part, statistics)
    if self.num_reals:
      moments['error'] = jnp.mean(jnp.minimum(error, 1.0), axis=(0, 1))
    return moments

  def updated(
    self, statistics: dict[str, jax.Array], moments: dict[str, jax.Array], batch: sockets.Batch
  ) -> dict[str, jax.Array]:
    """Running statistics after one more batch: means over up to about 500 batches, 50 for `error`.

    Args:
      statistics: those before.
      moments: what `moments` returned for a part of the batch, and `change`.
      batch: reductions over the whole batch.
    """
    moments = {
      name: batch.largest(x) if name.startswith(LARGEST) else batch.mean(x)
      for name, x in moments.items()
    }
    rate = jnp.maximum(1 / (statistics['count'] + 1), 0.002)
    rates = {name: jnp.maximum(rate, 0.02) if name == 'error' else rate for name in moments}
    followed = {
      name: statistics[name] + rates[name] * (new - statistics[name])
      for name, new in moments.items()
    }
    if self.num_reals:
      shift = followed['mean'] - statistics['mean']
      followed['variance'] = jnp.maximum(followed['variance'] - jnp.square(shift), 0.0)
    return followed | {'count': statistics['count'] + 1}

  def read(self, observation: Any) -> jax.Array:
    """The numbers of an observation [..., *shape], [..., F] float32; real ones in symlog."""
    flat = observation_lib.join(observation, self.spec).astype(jnp.float32)
    return self._joined(flat, [kind.read(flat[..., kind.indices]) for kind in self.kinds])

  def _split(self, numbers: jax.Array) -> list[jax.Array]:
    """[..., F] by kind."""
    ends = np.cumsum([kind.size for kind in self.kinds])[:-1]
    return jnp.split(numbers, ends, axis=-1) if self.kinds else []

  def _joined(self, like: jax.Array, parts: list[jax.Array]) -> jax.Array:
    """[..., F] of its parts by kind; with the leading axes and dtype of `like` where there are none."""
    return jnp.concatenate([like[..., :0], *parts], axis=-1)

  def centred(self, numbers: jax.Array) -> jax.Array:
    """The numbers [..., F] with those in [0, 1] scaled to [-1, 1]."""
    scaled, reals = jnp.split(numbers, [self.size - self.num_reals], axis=-1)
    return jnp.concatenate([2 * scaled - 1, reals], axis=-1)

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
    parts = []
    for kind, part in zip(self.kinds, self._split(numbers), strict=True):
      parts += kind.inputs(part, statistics)
    return self._joined(numbers, [part.astype(numbers.dtype) for part in parts])

  def cells(self, numbers: jax.Array, statistics: Any) -> list[jax.Array]:
    """Each grid by its cells, [..., H, W, inputs of a cell] float32, from numbers [..., F]."""
    found = []
    for kind, part in zip(self.kinds, self._split(numbers), strict=True):
      if kind.grid:
        inputs = kind.inputs(part.astype(jnp.float32), statistics)
        by_cell = [x.reshape(*x.shape[:-1], *kind.grid[:2], -1) for x in inputs]
        found.append(jnp.concatenate(by_cell, axis=-1))
    return found

  def of_cells(self, outputs: list[jax.Array]) -> jax.Array:
    """A decoder's outputs, [..., grid_outputs] float32, from [..., H W, outputs of a cell] for each grid."""
    parts = []
    for kind, own in zip(self.grids, outputs, strict=True):
      by_part = jnp.split(own, np.cumsum(kind.cell_outputs)[:-1], axis=-1)
      parts += [part.astype(jnp.float32).reshape(*own.shape[:-2], -1) for part in by_part]
    return jnp.concatenate(parts, axis=-1)

  def predict(
    self,
    outputs: jax.Array,
    before: jax.Array,
    follows: jax.Array,
    statistics: Any,
    max_copy: float = MAX_COPY,
  ) -> tuple[Any, ...]:
    """The predicted distribution of the numbers of a step, by kind.

    Args:
      outputs: [..., num_outputs] float32, outputs of a decoder.
      before: [..., F], numbers of the previous step.
      follows: [...] bool, whether there is a previous step.
      statistics: see `initial_statistics`.
      max_copy: largest probability that a number is copied. Less than 1 gives each change a gradient;
        in samples it would change one of some hundred numbers in every few steps, so there it is 1.
    """
    follows = follows[..., None].astype(jnp.float32)
    predicted = []
    for kind, was in zip(self.kinds, self._split(before.astype(jnp.float32)), strict=True):
      own, outputs = outputs[..., : kind.num_outputs], outputs[..., kind.num_outputs :]
      predicted.append(kind.predict(own, Before(was, follows, max_copy), statistics))
    return tuple(predicted)

  def loss(
    self,
    predicted: tuple[Any, ...],
    numbers: jax.Array,
    statistics: Any,
    of_grids: bool = False,
  ) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of observed numbers, minus the same for a perfect decoder.

    Args:
      predicted: from `predict`.
      numbers: [..., F] float32, observed.
      statistics: see `initial_statistics`.
      of_grids: whether to sum over those of grids only.

    Returns:
      The loss, [...] float32 nats, summed over numbers; and the squared errors of real numbers,
      [..., R] float32, in squared standard deviations.
    """
    loss, error = jnp.zeros(numbers.shape[:-1]), numbers[..., :0]
    for kind, found, part in zip(self.kinds, predicted, self._split(numbers), strict=True):
      if kind.grid or not of_grids:
        loss += kind.loss(found, part, statistics)
      if isinstance(kind, Real):
        error = jax.lax.stop_gradient(kind.errors(found, part, statistics))
    return loss, error

  def change(self, before: jax.Array, numbers: jax.Array, statistics: Any) -> jax.Array:
    """Change between the numbers [..., F] of two steps, along fixed random directions: [..., C] float32.

    It is the change of `inputs` other than views, so numbers of all kinds count alike.
    """
    inputs = lambda x: self._without_views(x.astype(jnp.float32), statistics)
    difference = inputs(numbers) - inputs(before)
    return difference @ self.directions

  @functools.cached_property
  def directions(self) -> np.ndarray:
    """[I, C] float32, the directions of changes in the I inputs other than views."""
    shape = self.input_size - observation_lib.view_size(self.spec), self.num_changes
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)

  def expected(self, predicted: tuple[Any, ...], before: jax.Array, statistics: Any) -> jax.Array:
    """The predicted numbers, without noise, [..., F] float32: most likely values, means of real ones.

    The arguments are as of `predict`, and its result.
    """
    kinds = zip(self.kinds, predicted, strict=True)
    return self._joined(
      before.astype(jnp.float32), [kind.expected(found, statistics) for kind, found in kinds]
    )

  def sample(
    self, predicted: tuple[Any, ...], before: jax.Array, statistics: Any, noise: jax.Array
  ) -> jax.Array:
    """Samples numbers, [..., F] float32; real ones are means.

    The most likely numbers would never change where a change has a probability below one half, and a
    policy would exploit that. All numbers share one random number, so that what appears and what
    disappears in the same event do so together; uncertain changes of one kind exclude each other, see
    `occurs`. Other joint changes are the stochastic state's to tell.

    Args:
      predicted: from `predict`.
      before: [..., F], numbers of the previous step.
      statistics: see `initial_statistics`.
      noise: [...] float32, uniform in [0, 1).
    """
    before, noise = before.astype(jnp.float32), noise[..., None]
    parts = zip(self.kinds, predicted, self._split(before), strict=True)
    return self._joined(
      before, [kind.sample(found, was, statistics, noise) for kind, found, was in parts]
    )

  def differences(
    self, numbers: jax.Array, others: jax.Array, statistics: Any
  ) -> tuple[jax.Array, jax.Array]:
    """How far [..., F] numbers are from [..., F] others.

    Returns:
      [...] bool, whether any binary number differs by more than 1/2, or any other in [0, 1] by more than
      half a level; and [...] float32, the mean absolute difference of real numbers, in standard deviations.
    """
    wrong = jnp.zeros(jnp.broadcast_shapes(numbers.shape, others.shape)[:-1], bool)
    for kind, *both in zip(self.kinds, self._split(numbers), self._split(others), strict=True):
      wrong |= kind.wrong(*both)
    if not self.num_reals:
      return wrong, jnp.zeros(wrong.shape)
    reals = jnp.abs(numbers - others)[..., -self.num_reals :]
    return wrong, jnp.mean(reals / self._real.scale(statistics), axis=-1)

  def pick(self, numbers: jax.Array, indices: np.ndarray) -> jax.Array:
    """Picks the numbers at [V] indices of a flat observation, [..., V] float32 in its units."""
    return self.to_flat(numbers.astype(jnp.float32))[..., indices]

  def descriptions(self) -> dict[str, dict[str, int]]:
    """How many numbers of each leaf are read in which way, by path of the leaf and `Kind.description`."""
    found: dict[str, dict[str, int]] = {}
    begin = 0
    leaves, _ = jax.tree_util.tree_flatten_with_path(observation_lib.without_mask(self.spec))
    for path, leaf in leaves:
      end = begin + math.prod(leaf.shape)
      counts: dict[str, int] = {}
      for kind in self.kinds:
        name = f'{kind.description}, by cell' if kind.grid else kind.description
        is_own = (kind.indices >= begin) & (kind.indices < end)
        counts[name] = counts.get(name, 0) + int(np.sum(is_own))
      found[jax.tree_util.keystr(path)] = {name: count for name, count in counts.items() if count}
      begin = end
    return found

  def warnings(self) -> list[str]:
    """A line for each limit of `observation`, such as MAX_REAL_READ, that this observation exceeds."""
    discrete = sum(len(kind.indices) for kind in self.kinds if not getattr(kind, 'is_exact', True))
    may_lie_between = observation_lib.which(
      self.spec,
      lambda leaf: (
        leaf.dtype != bool
        and observation_lib.is_bounded(leaf, 0, 1)
        and not observation_lib.num_values(leaf)
      ),
    )
    rounded = [may_lie_between[kind.indices] for kind in self.kinds if isinstance(kind, Binary)]
    fractions = sum(int(np.sum(part)) for part in rounded)
    found = []
    if fractions:
      found.append(
        f'{fractions:,} numbers in [0, 1], more than {observation_lib.MAX_DISCRETE_PREDICTED}: '
        'predicted as binary, so values between 0 and 1 are predicted poorly'
      )
    elif discrete > observation_lib.MAX_DISCRETE_READ:
      found.append(
        f'{discrete:,} numbers in [0, 1], more than {observation_lib.MAX_DISCRETE_READ}: read '
        'without levels, so nearby values are harder to tell apart'
      )
    if self.num_reals > observation_lib.MAX_REAL_READ:
      found.append(
        f'{self.num_reals:,} real numbers, more than {observation_lib.MAX_REAL_READ}: read without '
        'levels, so thresholds of single numbers are harder to learn'
      )
    return found

  def to_flat(self, numbers: jax.Array) -> jax.Array:
    """Converts numbers [..., F] of the model back to a flat observation [..., F], the inverse of `read`."""
    parts = zip(self.kinds, self._split(numbers), strict=True)
    flat = self._joined(numbers, [kind.to_flat(part) for kind, part in parts])
    order = np.concatenate([np.zeros(0, int), *(kind.indices for kind in self.kinds)])
    return flat[..., np.argsort(order)]


def places(grid: jax.Array, dtype: Any) -> jax.Array:
  """Where what a grid holds is: of each input of a cell, the mean row and column, and whether there is any.

  Rows and columns lie in [-1, 1], and are 0 where there is none. What is left of what is linear in them, which
  networks would otherwise have to learn for each pair of cells. As the feature points of Finn et al. (2016),
  "Deep spatial autoencoders for visuomotor learning", but of what is observed.

  Args:
    grid: [..., H, W, I] float32, from `Numbers.cells`.
    dtype: of the result.

  Returns:
    [..., 3 I]: rows, columns, and 1 where there is any.
  """
  total, found = jnp.sum(grid, axis=(-3, -2)), []
  is_any = total > networks.SAME  # shares of levels are 0 but for rounding
  for other_axis, size in ((-2, grid.shape[-3]), (-3, grid.shape[-2])):
    along = jnp.sum(grid, axis=other_axis)
    place = jnp.linspace(-1.0, 1.0, size)[:, None]
    found.append(jnp.sum(along * place, axis=-2) / jnp.where(is_any, total, 1.0))
  return jnp.concatenate([*found, is_any], axis=-1).astype(dtype)


def surroundings(grid: jax.Array, cells: jax.Array) -> jax.Array:
  """What is around what a grid holds: of each input of a cell, the mean features of the cells that have it.

  Args:
    grid: [..., H, W, I] float32, from `Numbers.cells`.
    cells: [..., H W, D + I] features of the cells, of which the first D count.

  Returns:
    [..., I D] in the dtype of the cells; 0 where there is none.
  """
  *axes, height, width, contents = grid.shape
  grid = grid.reshape(*axes, height * width, contents)
  total = jnp.sum(grid, axis=-2, keepdims=True)
  shares = grid / jnp.where(total > 0, total, 1.0)
  found = jnp.einsum('...mi,...md->...id', shares.astype(cells.dtype), cells[..., :-contents])
  return found.reshape(*axes, -1)


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
  found = shares * jnp.log(jnp.maximum(predicted, MIN_LIKELIHOOD))
  return jnp.sum(jax.scipy.special.xlogy(shares, shares) - found, axis=-1)
