"""Distributions over actions, latents and scalars, and the divergence between latents.

All arithmetic on probabilities is float32, whatever the networks compute in.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dm_env import specs

from hephaestus.agents import kernels, networks

SCALES = (0.1, 1.1)  # least and largest standard deviation of a continuous action, before tanh
# Small enough that exp() of it is 0, large enough that sums of it stay finite.
ILLEGAL = -1e9


class MaskedCategorical(NamedTuple):
  """A categorical distribution over the legal actions, mixed with a uniform one."""

  log_probs: jax.Array  # [..., A] float32, normalised log-probabilities; ILLEGAL where illegal
  mask: jax.Array  # [..., A] bool, True is legal; all True where no action is legal

  @classmethod
  def from_logits(
    cls, logits: jax.Array, mask: jax.Array | None = None, unimix: float = 0.0
  ) -> 'MaskedCategorical':
    """Normalises `logits` over the legal actions.

    Args:
      logits: [..., A], clipped to [-1e8, 1e8]; NaN counts as 0.
      mask: [..., A] bool, the legal actions; None if all are. Without any legal action the
        distribution is uniform over all actions and does not depend on the logits, so that illegal
        actions have no gradient.
      unimix: share of the probability spread evenly over the legal actions.
    """
    logits = jnp.nan_to_num(logits.astype(jnp.float32), posinf=1e8, neginf=-1e8).clip(-1e8, 1e8)
    mask = jnp.ones(logits.shape, bool) if mask is None else jnp.broadcast_to(mask, logits.shape)
    any_legal = mask.any(-1, keepdims=True)
    logits, mask = jnp.where(any_legal, logits, 0.0), mask | ~any_legal
    probs = jax.nn.softmax(jnp.where(mask, logits, ILLEGAL), axis=-1)
    uniform = mask / mask.sum(-1, keepdims=True)
    probs = (1 - unimix) * probs + unimix * uniform
    # The inner `where` keeps the gradient of log away from 0.
    log_probs = jnp.log(jnp.where(mask, jnp.maximum(probs, 1e-20), 1.0))
    return cls(jnp.where(mask, log_probs, ILLEGAL), mask)

  def sample(self, gumbel: jax.Array) -> jax.Array:
    """Samples actions, [...] int32, by the Gumbel-max trick from standard Gumbel noise [..., A]."""
    return jnp.argmax(jnp.where(self.mask, self.log_probs + gumbel, -jnp.inf), axis=-1)

  def log_prob(self, action: jax.Array) -> jax.Array:
    """Log-probabilities, [...] float32 nats, of actions [...] int32."""
    return jnp.take_along_axis(self.log_probs, action[..., None], axis=-1)[..., 0]

  def entropy(self) -> jax.Array:
    """Entropy, [...] float32, nats."""
    log_probs = jnp.where(self.mask, self.log_probs, 0.0)
    return -jnp.sum(jnp.where(self.mask, jnp.exp(log_probs) * log_probs, 0.0), axis=-1)

  def entropy_bounds(self) -> tuple[jax.Array, jax.Array]:
    """Entropies of a certain and of a uniform policy, [...] float32 nats each."""
    most = jnp.log(jnp.sum(self.mask, axis=-1).astype(jnp.float32))
    return jnp.zeros_like(most), most


def _split(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
  return jnp.split(x, np.cumsum(sizes)[:-1], axis=-1)


class MultiCategorical(NamedTuple):
  """A distribution of actions of M independent parts, each of which is one of several choices.

  Logits, masks and noise of all parts are concatenated.
  """

  parts: tuple[MaskedCategorical, ...]

  @property
  def log_probs(self) -> jax.Array:
    """Log-probabilities of the choices of all parts, concatenated, [..., A] float32."""
    return jnp.concatenate([part.log_probs for part in self.parts], axis=-1)

  @classmethod
  def from_logits(
    cls,
    logits: jax.Array,
    num_choices: tuple[int, ...],
    mask: jax.Array | None = None,
    unimix: float = 0.0,
  ) -> 'MultiCategorical':
    """Normalises [..., A] `logits` within each part; see `MaskedCategorical.from_logits`.

    Args:
      logits: [..., A].
      num_choices: number of choices of each part; they sum to A.
      mask: [..., A] bool; a part without any legal choice is uniform.
      unimix: share of each part's probability spread evenly over its legal choices.
    """
    masks = [None] * len(num_choices) if mask is None else _split(mask, num_choices)
    parts = zip(_split(logits, num_choices), masks, strict=True)
    return cls(tuple(MaskedCategorical.from_logits(*part, unimix) for part in parts))

  def sample(self, gumbel: jax.Array) -> jax.Array:
    """Samples actions, [..., M] int32, by the Gumbel-max trick from standard Gumbel noise [..., A]."""
    noises = _split(gumbel, [part.mask.shape[-1] for part in self.parts])
    samples = [part.sample(noise) for part, noise in zip(self.parts, noises, strict=True)]
    return jnp.stack(samples, axis=-1)

  def log_prob(self, action: jax.Array) -> jax.Array:
    """Log-probabilities, [...] float32 nats, of actions [..., M] int32: a sum over the M parts."""
    log_probs = [part.log_prob(action[..., i]) for i, part in enumerate(self.parts)]
    return jnp.sum(jnp.stack(log_probs), axis=0)

  def entropy(self) -> jax.Array:
    """Entropy, [...] float32, nats: a sum over the M parts."""
    return jnp.sum(jnp.stack([part.entropy() for part in self.parts]), axis=0)

  def entropy_bounds(self) -> tuple[jax.Array, jax.Array]:
    """Entropies of a certain and of a uniform policy, [...] float32 nats each: sums over the M parts."""
    least, most = zip(*(part.entropy_bounds() for part in self.parts), strict=True)
    return sum(least), sum(most)


class TanhNormal(NamedTuple):
  """A normal variable squashed by tanh, rescaled to the bounds of the action."""

  mean: jax.Array  # [..., A] float32, before tanh
  scale: jax.Array  # [..., A] float32, standard deviation before tanh, positive
  low: jax.Array  # [A] float32, lower bounds of the action
  high: jax.Array  # [A] float32, upper bounds of the action

  @classmethod
  def from_outputs(cls, outputs: jax.Array, low: np.ndarray, high: np.ndarray) -> 'TanhNormal':
    """The distribution from a network's [..., 2 A] outputs; the scale lies between both of SCALES."""
    mean, scale = jnp.split(outputs.astype(jnp.float32), 2, axis=-1)
    # Softly bounded: beyond +-5 tanh is flat, and the mean would have no gradient.
    return cls(
      5 * jnp.tanh(mean / 5), jax.nn.sigmoid(scale) + SCALES[0], jnp.asarray(low), jnp.asarray(high)
    )

  def _scaled(self, raw: jax.Array) -> jax.Array:
    return self.low + (jnp.tanh(raw) + 1) / 2 * (self.high - self.low)

  def sample(self, normal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Samples actions from standard normal noise; returns also their values before tanh; all [..., A]."""
    raw = self.mean + self.scale * normal
    return self._scaled(raw), raw

  def log_prob(self, raw: jax.Array) -> jax.Array:
    """Log-density, [...] float32 nats, of the action whose value before tanh is `raw` [..., A].

    log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)): no arctanh of a clipped action.
    """
    normal = -0.5 * jnp.square((raw - self.mean) / self.scale) - jnp.log(self.scale)
    normal = normal - 0.5 * np.log(2 * np.pi)
    squash = 2 * (np.log(2) - raw - jax.nn.softplus(-2 * raw))
    return jnp.sum(normal - squash - jnp.log((self.high - self.low) / 2), axis=-1)

  def entropy(self) -> jax.Array:
    """Approximate entropy, [...] float32 nats: of the normal, plus the log slope of `_scaled` at its mean.

    Exact for a small scale; otherwise an upper estimate (log tanh' is concave), whose gradient
    keeps the scale from collapsing and the mean away from the bounds.
    """
    normal = 0.5 * np.log(2 * np.pi * np.e) + jnp.log(self.scale)
    squash = 2 * (np.log(2) - self.mean - jax.nn.softplus(-2 * self.mean))
    return jnp.sum(normal + squash + jnp.log((self.high - self.low) / 2), axis=-1)

  def entropy_bounds(self) -> tuple[jax.Array, jax.Array]:
    """Entropies with the least and with the largest scale at mean 0, [...] float32 nats each."""
    at = lambda scale: TanhNormal(
      jnp.zeros_like(self.mean), jnp.full_like(self.scale, scale), self.low, self.high
    ).entropy()
    return at(SCALES[0]), at(SCALES[1])


class Actions:
  """The actions that one action spec describes, and distributions over them.

  A `DiscreteArray` is one choice, [] int32. A `BoundedArray` of integers is several choices at
  once, [M] int32, each from 0 to its maximum. A `BoundedArray` of floats is a continuous action, a
  vector between its bounds, [A] float32.

  Attributes:
    spec: the action spec.
    num_choices: number of choices of each part of a discrete action; empty for a continuous one.
    size: A, the number of choices summed over the parts, or the length of a continuous action.
    num_outputs: number of network outputs that parametrise a distribution.

  Raises:
    ValueError: the spec has more than one axis, is a scalar but no `DiscreteArray`, or has choices
      that do not begin with 0.
  """

  def __init__(self, spec: specs.BoundedArray):
    self.spec = spec
    is_one = isinstance(spec, specs.DiscreteArray)
    if not is_one and len(spec.shape) != 1:
      raise ValueError(f'action_spec={spec}: several choices or continuous actions need one axis')
    self.num_choices: tuple[int, ...] = ()
    if spec.dtype.kind in 'iu':
      low, high = (np.broadcast_to(x, spec.shape).ravel() for x in (spec.minimum, spec.maximum))
      if (low != 0).any():
        raise ValueError(f'action_spec={spec}: choices must begin with 0')
      self.num_choices = tuple(int(x) + 1 for x in high)
    self.size = sum(self.num_choices) or spec.shape[0]
    self.num_outputs = self.size if self.num_choices else 2 * self.size

  @property
  def discrete(self) -> bool:
    return bool(self.num_choices)

  def policy(self, outputs: jax.Array, mask: jax.Array | None, unimix: float = 0.0) -> Any:
    """The MaskedCategorical, MultiCategorical or TanhNormal from the outputs of a network.

    Args:
      outputs: [..., num_outputs], logits of all choices, or means and scales.
      mask: [..., A] bool, the legal choices of all parts; None if all are, and for continuous actions.
      unimix: see `MaskedCategorical.from_logits`; continuous actions do not use it.
    """
    if isinstance(self.spec, specs.DiscreteArray):
      return MaskedCategorical.from_logits(outputs, mask, unimix)
    if self.discrete:
      return MultiCategorical.from_logits(outputs, self.num_choices, mask, unimix)
    return TanhNormal.from_outputs(outputs, self.spec.minimum, self.spec.maximum)

  def noise(self, key: chex.PRNGKey, *axes: int) -> jax.Array:
    """Standard Gumbel (discrete) or normal noise to sample actions with, [*axes, A] float32."""
    return (jax.random.gumbel if self.discrete else jax.random.normal)(key, (*axes, self.size))

  def encode(self, action: jax.Array) -> jax.Array:
    """Encodes actions for a network, [..., A] float32: one-hot by part, or scaled to [-1, 1]."""
    if self.discrete:
      parts = action.reshape(*action.shape[: action.ndim - len(self.spec.shape)], -1)
      one_hots = [jax.nn.one_hot(parts[..., i], n) for i, n in enumerate(self.num_choices)]
      return jnp.concatenate(one_hots, axis=-1)
    low, high = self.spec.minimum, self.spec.maximum
    return (2 * (action - low) / (high - low) - 1).astype(jnp.float32)


class Gaussian(NamedTuple):
  """A distribution of a latent state: a Gaussian with a diagonal covariance.

  It has the same methods as `Categorical`; arguments that concern only the other are ignored.
  """

  mean: jax.Array  # [..., Z] float32, of each latent variable
  variance: jax.Array  # [..., Z] float32, positive

  @staticmethod
  def num_outputs(size: int, classes: int) -> int:
    """Number of network outputs that parametrise `size` latent variables."""
    return 2 * size

  @staticmethod
  def size(size: int, classes: int) -> int:
    """Width of a sample of `size` latent variables."""
    return size

  @classmethod
  def from_outputs(cls, outputs: jax.Array, classes: int, unimix: float) -> 'Gaussian':
    """The distribution from a network's [..., 2 Z] outputs: Z means, then what gives the deviations.

    Standard deviations lie above 0.1.
    """
    mean, scale = jnp.split(outputs.astype(jnp.float32), 2, axis=-1)
    # The shift makes an untrained standard deviation about 1.
    return cls(mean, jnp.square(jax.nn.softplus(scale + 0.54) + 0.1))

  @staticmethod
  def noise(key: chex.PRNGKey, size: int, classes: int) -> jax.Array:
    """Standard normal noise for one sample, [Z] float32."""
    return jax.random.normal(key, (size,))

  def sample(self, noise: jax.Array) -> jax.Array:
    """A reparameterised sample, [..., Z] float32, from `noise` [..., Z]."""
    return self.mean + jnp.sqrt(self.variance) * noise

  def mode(self) -> jax.Array:
    """The mean, [..., Z] float32."""
    return self.mean

  def moments(self) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of each coordinate, [..., Z]; ensemble disagreement is computed from them."""
    return self.mean, self.variance

  def kl(self, other: 'Gaussian') -> jax.Array:
    """KL(self || other), [...] float32, nats."""
    ratio = self.variance / other.variance
    distance = jnp.square(self.mean - other.mean) / other.variance
    return 0.5 * jnp.sum(ratio + distance - 1 - jnp.log(ratio), axis=-1)


class Categorical(NamedTuple):
  """A distribution of a latent state: Z independent categorical variables of C classes each.

  A sample concatenates their one-hot vectors.
  """

  log_probs: jax.Array  # [..., Z, C] float32, normalised
  probs: jax.Array  # [..., Z, C] float32, their exponentials

  @staticmethod
  def num_outputs(size: int, classes: int) -> int:
    """Number of network outputs that parametrise `size` latent variables of `classes` each."""
    return size * classes

  @staticmethod
  def size(size: int, classes: int) -> int:
    """Width of a sample of `size` latent variables of `classes` each."""
    return size * classes

  @classmethod
  def from_outputs(cls, outputs: jax.Array, classes: int, unimix: float) -> 'Categorical':
    """The distribution from a network's [..., Z C] logits; `unimix` is the share of a uniform one."""
    logits = outputs.astype(jnp.float32).reshape(*outputs.shape[:-1], -1, classes)
    probs = (1 - unimix) * jax.nn.softmax(logits, axis=-1) + unimix / classes
    # Without unimix a softmax may underflow.
    return cls(jnp.log(jnp.maximum(probs, 1e-20)), probs)

  @staticmethod
  def noise(key: chex.PRNGKey, size: int, classes: int) -> jax.Array:
    """Uniform noise for one sample, [Z] in [0, 1): a number for each latent, not for each class."""
    return jax.random.uniform(key, (size,))

  def sample(self, noise: jax.Array) -> jax.Array:
    """A sample, [..., Z C] float32 one-hot, with the straight-through gradient of the probabilities.

    By the inverse of the cumulative distribution, from `noise` [..., Z] in [0, 1); a remainder from
    rounding goes to the last class.
    """
    ends = jnp.cumsum(self.probs, axis=-1)[..., :-1]
    choice = jnp.sum(noise[..., None] >= ends, axis=-1)
    one_hot = jax.nn.one_hot(choice, self.log_probs.shape[-1])
    return _join(one_hot + self.probs - jax.lax.stop_gradient(self.probs))

  def mode(self) -> jax.Array:
    """The most likely classes, [..., Z C] float32 one-hot."""
    return _join(jax.nn.one_hot(jnp.argmax(self.log_probs, axis=-1), self.log_probs.shape[-1]))

  def moments(self) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of each coordinate of the one-hot sample, [..., Z C]."""
    probs = _join(self.probs)
    return probs, probs * (1 - probs)

  def kl(self, other: 'Categorical') -> jax.Array:
    """KL(self || other), [...] float32, nats."""
    ratio = self.log_probs - other.log_probs
    return jnp.sum(self.probs * ratio, axis=(-2, -1))


def _join(x: jax.Array) -> jax.Array:
  return x.reshape(*x.shape[:-2], -1)


LATENTS = {'gaussian': Gaussian, 'categorical': Categorical}
"""Distributions of the world model's latent state, by the name of `DreamerConfig.latent`."""


class Scaled(NamedTuple):
  """A prediction of a scalar in units of its own, so that its loss does not depend on the scalar's scale."""

  output: jax.Array  # [...] float32, the prediction in these units
  unit: jax.Array  # [] float32, positive

  def mean(self) -> jax.Array:
    """The prediction, [...] float32."""
    return self.unit * self.output

  def loss(self, target: jax.Array) -> jax.Array:
    """Half of the squared error, [...] float32, of `target` [...]."""
    return optax.losses.l2_loss(self.output, target / self.unit)


class TwoHot(NamedTuple):
  """A distribution of a scalar over symexp-spaced bins, which are fine near zero.

  Hafner et al. (2023), "Mastering diverse domains through world models", equations 10 to 12.
  """

  logits: jax.Array  # [..., bins] float32
  bins: jax.Array  # [bins] float32, their values, odd in number and antisymmetric around zero

  @classmethod
  def from_logits(cls, logits: jax.Array, limit: float) -> 'TwoHot':
    """The distribution from [..., bins] logits, with bins from -symexp(limit) to symexp(limit)."""
    positions = jnp.linspace(-limit, limit, logits.shape[-1], dtype=jnp.float32)
    return cls(logits.astype(jnp.float32), networks.symexp(positions))

  def mean(self) -> jax.Array:
    """Mean, [...] float32; sums differences of opposite bins, so equal probabilities give exactly 0."""
    middle = self.bins.shape[0] // 2
    highest = jax.lax.stop_gradient(kernels.largest(self.logits))
    logits = self.logits - highest[..., None]
    above, below = jnp.exp(logits[..., middle + 1 :]), jnp.exp(logits[..., :middle])
    total = kernels.total(above) + kernels.total(below) + jnp.exp(logits[..., middle])
    return (above - below[..., ::-1]) @ self.bins[middle + 1 :] / total

  def log_prob(self, target: jax.Array) -> jax.Array:
    """Log-likelihood, [...] float32 nats, of `target` [...], two-hot encoded over the bins around it."""
    target = jnp.clip(target, self.bins[0], self.bins[-1])
    upper = jnp.searchsorted(self.bins, target, side='right', method='scan_unrolled')
    upper = jnp.clip(upper, 1, self.bins.shape[0] - 1)
    low, high = self.bins[upper - 1], self.bins[upper]
    share = (target - low) / (high - low)
    return _shared_log_prob(self.logits, upper, share)


@jax.custom_vjp
def _shared_log_prob(logits: jax.Array, upper: jax.Array, share: jax.Array) -> jax.Array:
  """Mean log-probability of bin `upper` [...] (weight `share`) and of the bin below: [...] float32.

  The gradient by the logits [..., bins] is written out, as one pass: target less probabilities.
  """
  return _shared_log_prob_forward(logits, upper, share)[0]


def _shared_log_prob_forward(logits: jax.Array, upper: jax.Array, share: jax.Array):
  highest = kernels.largest(logits)
  normaliser = highest + jnp.log(kernels.total(jnp.exp(logits - highest[..., None])))
  take = lambda index: jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
  below, above = take(upper - 1), take(upper)
  log_prob = (1 - share) * below + share * above - normaliser
  return log_prob, (logits, normaliser, upper, share, above - below)


def _shared_log_prob_backward(saved: tuple[jax.Array, ...], grad: jax.Array):
  logits, normaliser, upper, share, slope = saved
  place = jnp.arange(logits.shape[-1])
  at = lambda index, weight: jnp.where(place == index[..., None], weight[..., None], 0.0)
  target = at(upper, share) + at(upper - 1, 1 - share)
  probs = jnp.exp(logits - normaliser[..., None])
  return grad[..., None] * (target - probs), None, grad * slope


_shared_log_prob.defvjp(_shared_log_prob_forward, _shared_log_prob_backward)
