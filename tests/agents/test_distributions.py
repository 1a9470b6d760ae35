"""Distributions: against arithmetic in float64, in their limits, and at the edges of float32."""

import functools
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from hypothesis import strategies as st

from hephaestus.agents import distributions

ACTIONS = 5
few_examples = hypothesis.settings(max_examples=25, deadline=None)
# Extreme outputs of a network: infinities, NaN, and the largest numbers of bfloat16.
extremes = st.one_of(
  st.sampled_from([np.inf, -np.inf, np.nan, 3.3e38, -3.3e38, 1e-38, 0.0]),
  st.floats(-50, 50, width=32),
)
any_logits = st.lists(extremes, min_size=ACTIONS, max_size=ACTIONS)
any_mask = st.lists(st.booleans(), min_size=ACTIONS, max_size=ACTIONS)


class Masked(NamedTuple):
  """A masked categorical over [..., A] logits, with 256 samples and their log probabilities."""

  log_probs: Any
  entropy: Any
  mode: Any
  samples: Any
  log_prob: Any


@functools.partial(jax.jit, static_argnames='unimix')
def compiled_masked(logits, mask, unimix):
  policy = distributions.MaskedCategorical.from_logits(logits, mask, unimix)
  gumbel = jax.random.gumbel(jax.random.key(0), (256, *logits.shape))
  samples = jax.vmap(policy.sample)(gumbel)
  log_prob = jax.vmap(policy.log_prob)(samples)
  return Masked(
    policy.log_probs, policy.entropy(), policy.sample(jnp.zeros_like(logits)), samples, log_prob
  )


def masked(logits, mask, unimix=0.0):
  return jax.device_get(compiled_masked(logits, mask, unimix))


def legal_among(mask):
  return np.array(mask) if any(mask) else np.ones(len(mask), bool)


@few_examples
@hypothesis.given(any_logits, any_mask, st.sampled_from([np.float32, jnp.bfloat16]), st.booleans())
def test_legal_actions_share_all_probability(logits, mask, dtype, mixed):
  policy = masked(np.float32(logits).astype(dtype), np.array(mask), 0.01 if mixed else 0.0)
  legal = legal_among(mask)
  assert legal[policy.samples].all()
  assert legal[policy.mode]
  probs = np.exp(np.asarray(policy.log_probs, np.float64))
  assert policy.log_probs.dtype == np.float32
  np.testing.assert_allclose(probs.sum(), 1, rtol=1e-5)
  assert (probs[~legal] == 0).all() and (probs[legal] > 0).all()
  assert 0 <= float(policy.entropy) <= np.log(legal.sum()) + 1e-5
  if mixed:
    assert (probs[legal] >= 0.01 / legal.sum() * 0.999).all()


@jax.jit
@jax.grad
def gradient_of_log_prob_and_entropy(logits, mask, action):
  policy = distributions.MaskedCategorical.from_logits(logits, mask, 0.01)
  return policy.log_prob(jnp.asarray(action)) + policy.entropy()


@few_examples
@hypothesis.given(any_logits, any_mask, st.integers(0, ACTIONS - 1))
def test_gradients_of_a_masked_categorical_are_finite(logits, mask, action):
  gradient = gradient_of_log_prob_and_entropy(np.float32(logits), np.array(mask), action)
  assert np.isfinite(gradient).all()


def five(*numbers):
  """Numbers as five logits, the last of which are 0."""
  return np.float32([*numbers, *[0] * (ACTIONS - len(numbers))])


def test_probabilities_by_hand():
  logits, mask = five(*np.log([1.0, 2.0, 7.0])), five(1, 1) > 0
  policy = masked(logits, mask)
  np.testing.assert_allclose(np.exp(policy.log_probs), [1 / 3, 2 / 3, 0, 0, 0], rtol=1e-6)
  assert set(policy.samples) == {0, 1}
  np.testing.assert_array_equal(policy.log_prob, policy.log_probs[policy.samples])
  # Unimix is shared by the legal two, not by all five.
  mixed = np.exp(masked(five(100.0, 0, 100), mask, 0.01).log_probs)
  np.testing.assert_allclose(mixed, [0.995, 0.005, 0, 0, 0], rtol=1e-5)


def test_without_legal_actions_the_distribution_is_uniform_without_gradient():
  nothing = np.zeros(ACTIONS, bool)
  probs = np.exp(masked(np.float32([9.0, -9.0, 0.0, np.inf, np.nan]), nothing).log_probs)
  np.testing.assert_allclose(probs, np.full(ACTIONS, 1 / ACTIONS), rtol=1e-6)
  gradient = gradient_of_log_prob_and_entropy(five(9, -9, 0, 1, 2), nothing, 0)
  assert not np.any(gradient)


LOW, HIGH = np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32)


def tanh_normal(mean, scale, low, high):
  return distributions.TanhNormal(mean, scale, jnp.asarray(low), jnp.asarray(high))


@jax.jit
def compiled_density(mean, scale, low, high, raw):
  log_prob = lambda mean, scale, raw: tanh_normal(mean, scale, low, high).log_prob(raw)
  gradient = jax.vmap(jax.value_and_grad(log_prob, argnums=(0, 1)), in_axes=(None, None, 0))
  return *gradient(mean, scale, raw), tanh_normal(mean, scale, low, high).entropy()


def density(mean, scale, raw, low=LOW, high=HIGH):
  """Log densities at N values before tanh [N, 2], their gradients, and the entropy."""
  arguments = map(np.float32, (mean, scale, low, high, raw))
  return jax.device_get(compiled_density(*arguments))


@few_examples
@hypothesis.given(
  st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32)),
  st.tuples(st.floats(0.125, 1, width=32), st.floats(0.125, 1, width=32)),
  st.tuples(st.floats(-12, 12, width=32), st.floats(-12, 12, width=32)),
)
def test_squashed_density_is_the_change_of_variables(mean, scale, raw):
  result = density(mean, scale, [raw])[0][0]
  mean, scale, raw, low, high = (np.array(x, np.float64) for x in (mean, scale, raw, LOW, HIGH))
  normal = -0.5 * ((raw - mean) / scale) ** 2 - np.log(scale * np.sqrt(2 * np.pi))
  slope = (high - low) / 2 / np.cosh(raw) ** 2  # of the action by its value before tanh
  np.testing.assert_allclose(result, np.sum(normal - np.log(slope)), rtol=1e-4, atol=1e-4)


def test_squashed_density_is_finite_and_exact_where_tanh_is_flat():
  # In float32 tanh(9.1) is 1, so arctanh of the action would be infinite, or wrong if clipped.
  raw = np.array([-1e4, -50.0, -20.0, 9.1, 20.0, 50.0, 1e4])[:, None] * np.ones(2)
  values, grads, _ = density(np.zeros(2), np.ones(2), raw)
  slope = 2 * (np.log(2) - abs(raw) - np.log1p(np.exp(-2 * abs(raw)))) + np.log((HIGH - LOW) / 2)
  exact = np.sum(-0.5 * raw**2 - 0.5 * np.log(2 * np.pi) - slope, axis=-1)
  np.testing.assert_allclose(values, exact, rtol=1e-5)
  assert all(np.isfinite(grad).all() for grad in grads)


@jax.jit
def squashed(outputs, low, high, noise):
  """The policy of network outputs: itself, samples, medians, log densities and entropies."""
  policy = distributions.TanhNormal.from_outputs(outputs, low, high)
  action, raw = policy.sample(noise)
  without_noise, _ = policy.sample(jnp.zeros_like(noise))
  return policy, action, raw, without_noise, policy.log_prob(raw), policy.entropy()


def test_squashed_sample_lies_within_bounds_and_matches_its_value_before_tanh():
  rng = np.random.default_rng(0)
  outputs, noise = (rng.normal(size=(500, size)).astype(np.float32) for size in (4, 2))
  policy, action, raw, median, *_ = jax.device_get(squashed(10 * outputs, LOW, HIGH, noise))
  assert (action >= LOW).all() and (action <= HIGH).all()
  np.testing.assert_allclose(action, LOW + (np.tanh(raw) + 1) / 2 * (HIGH - LOW), atol=1e-5)
  expected = LOW + (np.tanh(policy.mean) + 1) / 2 * (HIGH - LOW)
  np.testing.assert_allclose(median, expected, atol=1e-5)
  assert np.std(action, axis=0).min() > 0.1


def test_extreme_outputs_give_a_finite_squashed_policy():
  outputs = np.array([[1e30, -1e30, 1e30, -1e30]], jnp.bfloat16)
  policy, action, *others = jax.device_get(
    squashed(outputs, LOW, HIGH, np.ones((1, 2), np.float32))
  )
  assert (np.abs(policy.mean) <= 5).all() and (policy.scale >= 0.1).all()
  assert action.dtype == np.float32 and np.isfinite(action).all()
  assert all(np.isfinite(x).all() for x in others)


@pytest.mark.parametrize('mean', [-2.0, 0.8])
def test_squashed_entropy_is_exact_if_narrow_and_an_upper_bound_if_wide(mean):
  def entropies(scale):
    raw = np.linspace(mean - 8 * scale, mean + 8 * scale, 20_001)
    normal = np.exp(-0.5 * ((raw - mean) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
    slope = 2 / np.cosh(raw) ** 2  # bounds 0 and 4
    exact = np.trapz(normal * (np.log(slope) - np.log(np.maximum(normal, 1e-300))), raw)
    return density([mean], [scale], np.zeros((40_001, 1)), [0.0], [4.0])[-1], exact

  estimate, exact = entropies(0.01)
  np.testing.assert_allclose(estimate, exact, atol=2e-4)
  estimate, exact = entropies(1.0)
  assert exact < estimate < exact + 1


@pytest.mark.parametrize(
  'make',
  [
    lambda outputs: distributions.Gaussian.from_outputs(outputs, 1, 0.0),
    lambda outputs: distributions.Categorical.from_outputs(outputs, 4, 0.01),
    lambda outputs: distributions.TwoHot.from_logits(outputs[..., 1:], 3.0),
    lambda outputs: distributions.MaskedCategorical.from_logits(outputs, None, 0.01),
    lambda outputs: distributions.TanhNormal.from_outputs(outputs, -np.ones(4), np.ones(4)),
  ],
  ids=['gaussian', 'categorical', 'two_hot', 'masked', 'tanh_normal'],
)
def test_bfloat16_outputs_give_float32_distributions(make):
  outputs = 3 * np.random.default_rng(0).normal(size=(16, 8))
  low = outputs.astype(jnp.bfloat16)
  both = jax.jit(lambda *outputs: tuple(map(make, outputs)))(low, low.astype(np.float32))
  for found, expected in zip(*map(jax.tree.leaves, both), strict=True):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


divergence = jax.jit(lambda one, other: one.kl(other))


def test_gaussian_divergence_by_hand():
  normal = lambda mean, variance: distributions.Gaussian(np.float32([mean]), np.float32([variance]))
  np.testing.assert_allclose(divergence(normal(0.0, 1.0), normal(1.0, 1.0)), 0.5, rtol=1e-6)
  np.testing.assert_allclose(
    divergence(normal(0.0, 4.0), normal(0.0, 1.0)), 0.5 * (4 - 1 - np.log(4)), rtol=1e-6
  )


def test_categorical_divergence_by_hand():
  log_probs = lambda *probs: distributions.Categorical(np.log(np.float32(probs)), np.float32(probs))
  p, q = log_probs([0.5, 0.5], [0.2, 0.8]), log_probs([0.25, 0.75], [0.2, 0.8])
  np.testing.assert_allclose(divergence(p, q), 0.5 * np.log(2) + 0.5 * np.log(2 / 3), rtol=1e-5)


def test_gaussian_sample_has_gradients_by_mean_and_variance():
  belief = distributions.Gaussian(np.float32([1.0]), np.float32([4.0]))
  sample = lambda belief: belief.sample(np.float32([3.0]))[0]
  value, grads = jax.jit(jax.value_and_grad(sample))(belief)
  np.testing.assert_allclose(value, 7.0)
  np.testing.assert_allclose([grads.mean[0], grads.variance[0]], [1.0, 3 / (2 * 2)])


def test_categorical_samples_are_one_hot_with_their_probabilities():
  probs = np.float32([[0.2, 0.8, 0.0], [0.1, 0.3, 0.6]])

  @jax.jit
  def draw(log_probs):
    belief = distributions.Categorical(log_probs, jnp.exp(log_probs))
    noise = jax.random.uniform(jax.random.key(0), (20_000, 2))
    return jax.vmap(belief.sample)(noise), belief.moments()

  with np.errstate(divide='ignore'):
    sample, (means, variances) = jax.device_get(draw(np.log(probs)))
  sample = sample.reshape(-1, 2, 3)
  np.testing.assert_allclose(np.sort(sample, axis=-1)[..., -1], 1, atol=1e-6)
  np.testing.assert_allclose(sample.sum(-1), 1, atol=1e-6)
  np.testing.assert_allclose(sample.mean(0), probs, atol=0.011)
  np.testing.assert_allclose(means, probs.reshape(6), rtol=1e-5)
  np.testing.assert_allclose(variances, sample.var(0).reshape(6), atol=0.011)


def test_categorical_sample_has_the_straight_through_gradient():
  outputs, noise = np.float32([0.3, -0.2, 0.1]), np.zeros(1, np.float32)
  scores = np.float32([1.0, 2.0, 4.0])

  def sampled(outputs):
    return distributions.Categorical.from_outputs(outputs, 3, 0.01).sample(noise) @ scores

  def expected(outputs):
    return (0.99 * jax.nn.softmax(outputs) + 0.01 / 3) @ scores

  value, gradient = jax.jit(jax.value_and_grad(sampled))(outputs)
  np.testing.assert_allclose(value, 1.0, rtol=1e-6)
  assert np.abs(gradient).min() > 0.01
  np.testing.assert_allclose(gradient, jax.jit(jax.grad(expected))(outputs), rtol=1e-4)


def test_deterministic_categoricals_without_unimix_have_a_finite_divergence():
  @jax.jit
  def divergences(*outputs):
    p, q = (distributions.Categorical.from_outputs(each, 2, 0.0) for each in outputs)
    return p.kl(q), p.kl(p)

  from_other, from_itself = divergences(np.float32([500, 0]), np.float32([0, 500]))
  assert np.isfinite(from_other) and from_other > 10
  np.testing.assert_allclose(from_itself, 0, atol=1e-6)


def test_loss_of_a_scaled_prediction_is_quadratic_in_its_units():
  scaled = distributions.Scaled(np.float32([0.5, 0.5, -1]), np.float32(4))
  np.testing.assert_array_equal(scaled.mean(), [2, 2, -4])
  np.testing.assert_allclose(scaled.loss(np.float32([2, 4, 12])), [0, 0.5 * 0.5**2, 0.5 * 4**2])


def two_hot(logits, limit=20.0):
  return distributions.TwoHot.from_logits(logits, limit)


@functools.partial(jax.jit, static_argnames='limit')
def judge_two_hot(logits, targets, limit):
  """Mean and positions of the bins, and log likelihoods of N targets."""
  belief = two_hot(logits, limit)
  return belief.mean(), belief.bins, jax.vmap(belief.log_prob)(targets)


NOTHING = np.zeros(1, np.float32)


def test_mean_of_equal_probabilities_is_exactly_zero():
  assert float(judge_two_hot(np.zeros(255, np.float32), NOTHING, 20.0)[0]) == 0.0


@pytest.mark.parametrize('index', [0, 20, 27])
def test_mean_of_one_bin_is_its_position(index):
  logits = np.where(np.arange(41) == index, np.float32(0), np.float32(-200))
  position = -5 + index * 10 / 40
  expected = np.sign(position) * (np.exp(abs(position)) - 1)
  mean, _, (log_prob,) = judge_two_hot(logits, np.float32([expected]), 5.0)
  np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(log_prob, 0, atol=2e-3)


def test_bins_are_fine_near_zero_and_antisymmetric():
  _, bins, _ = judge_two_hot(np.zeros(255, np.float32), NOTHING, 20.0)
  bins = np.asarray(bins, np.float64)
  np.testing.assert_allclose(bins, -bins[::-1], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(bins[-1], np.exp(20.0) - 1, rtol=1e-5)
  assert np.diff(bins).argmin() in (126, 127) and np.diff(bins).min() < 0.2


def test_target_between_two_bins_is_two_hot():
  logits = np.float32([0.0, 0.1, 0.2, 0.3, 0.4])
  log_probs = logits - np.log(np.exp(logits).sum())
  # Bins are at 0, +-1.718, +-6.389. Beyond the last bin, the last bin counts.
  targets = np.float32([0.25 * (np.e - 1), -1e9, 1e9])
  expected = [0.75 * log_probs[2] + 0.25 * log_probs[3], *log_probs[[0, 4]]]
  _, _, found = judge_two_hot(logits, targets, 2.0)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize('bins', [5, 101])
def test_two_hot_gradients_equal_the_formula(bins):
  """Gradients are by logits and by target; the maximum of many bins is in overlapping pieces."""
  rng = np.random.default_rng(0)
  logits = (5 * rng.normal(size=(7, bins))).astype(np.float32)
  target = rng.uniform(-6, 6, 7).astype(np.float32)
  weight = rng.normal(size=7).astype(np.float32)

  def by_formula(logits, target):
    edges = two_hot(logits, 2.0).bins
    upper = jnp.searchsorted(edges, target)
    share = (target - edges[upper - 1]) / (edges[upper] - edges[upper - 1])
    log_probs = jax.nn.log_softmax(logits)
    index = jnp.arange(7)
    log_prob = (1 - share) * log_probs[index, upper - 1] + share * log_probs[index, upper]
    return jnp.sum(weight * log_prob)

  given = lambda logits, target: jnp.sum(weight * two_hot(logits, 2.0).log_prob(target))
  results = [
    jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(logits, target) for f in (given, by_formula)
  ]
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, *results)


# Several choices at once.

CHOICES = (3, 1, 2)
COMBINATIONS = np.array([[i, 0, j] for i in range(3) for j in range(2)])


@pytest.mark.parametrize('num_outputs', [5, 6], ids=['one choice', 'three choices'])
def test_entropies_of_a_uniform_and_of_a_certain_policy_are_the_bounds(num_outputs):
  mask = np.arange(num_outputs) != 1
  make = distributions.MaskedCategorical.from_logits
  if num_outputs == 6:
    make = lambda *args: distributions.MultiCategorical.from_logits(args[0], CHOICES, args[1])
  uniform, certain = (
    make(np.zeros(num_outputs, np.float32), mask),
    make(np.float32([500, 0, 0, 9, 300, 0][:num_outputs]), mask),
  )
  for policy in (uniform, certain):
    least, most = policy.entropy_bounds()
    np.testing.assert_allclose(least, certain.entropy(), atol=1e-6)
    np.testing.assert_allclose(most, uniform.entropy(), rtol=1e-6)


def test_entropies_of_the_extreme_scales_are_the_bounds_of_a_squashed_policy():
  make = lambda scale: distributions.TanhNormal.from_outputs(
    np.float32([0, 0, scale, scale]), np.zeros(2, np.float32), np.float32([2, 5])
  )
  least, most = make(0).entropy_bounds()
  np.testing.assert_allclose((make(-50).entropy(), make(50).entropy()), (least, most), rtol=1e-5)


@functools.partial(jax.jit, static_argnames='unimix')
def several(logits, mask, unimix):
  policy = distributions.MultiCategorical.from_logits(logits, CHOICES, mask, unimix)
  mode = policy.sample(jnp.zeros_like(logits))
  return jax.vmap(policy.log_prob)(COMBINATIONS), policy.entropy(), mode


@few_examples
@hypothesis.given(
  st.lists(st.floats(-8, 8, width=32), min_size=6, max_size=6),
  st.lists(st.booleans(), min_size=6, max_size=6),
  st.sampled_from([0.0, 0.1]),
)
def test_multi_categorical_equals_the_product_of_its_parts(logits, mask, unimix):
  """The product is over all combinations, in float64; a part without legal choices is uniform."""
  log_probs, entropy, mode = several(np.float32(logits), np.array(mask), unimix)
  cuts, probs = np.cumsum(CHOICES)[:-1], []
  for part, given in zip(*(np.split(np.array(x), cuts) for x in (logits, mask)), strict=True):
    legal = legal_among(given)
    weights = np.where(legal, np.exp(part if given.any() else 0 * part), 0)
    probs.append((1 - unimix) * weights / weights.sum() + unimix * legal / legal.sum())
  expected = np.prod([part[COMBINATIONS[:, i]] for i, part in enumerate(probs)], axis=0)
  np.testing.assert_allclose(np.exp(log_probs), expected, rtol=1e-4, atol=1e-8)
  likely = expected[expected > 0]
  np.testing.assert_allclose(entropy, -np.sum(likely * np.log(likely)), rtol=1e-4, atol=1e-5)
  assert expected[(np.asarray(mode) == COMBINATIONS).all(-1)] >= expected.max() * (1 - 1e-5)


def test_multi_categorical_samples_parts_independently_by_their_probabilities():
  logits = np.log(np.float32([0.5, 0.3, 0.2, 1.0, 0.9, 0.1]))
  actions = distributions.Actions(specs.BoundedArray((3,), np.int32, 0, [2, 0, 1]))

  @jax.jit
  def draw(key):
    policy = distributions.MultiCategorical.from_logits(logits, CHOICES)
    keys = jax.random.split(key, 4000)
    return jax.vmap(lambda key: policy.sample(actions.noise(key)))(keys)

  drawn = np.asarray(draw(jax.random.key(0)))
  assert drawn.shape == (4000, 3) and (drawn[:, 1] == 0).all()
  found = np.histogram2d(drawn[:, 0], drawn[:, 2], bins=(range(4), range(3)))[0] / 4000
  np.testing.assert_allclose(found, np.outer([0.5, 0.3, 0.2], [0.9, 0.1]), atol=0.04)


def test_action_of_several_choices_is_encoded_as_one_hots():
  actions = distributions.Actions(specs.BoundedArray((3,), np.int32, 0, [2, 0, 1]))
  assert (actions.size, actions.num_choices) == (6, CHOICES)
  encoded = jax.jit(actions.encode)(np.array([[2, 0, 1], [0, 0, 0]], np.int32))
  np.testing.assert_array_equal(encoded, [[0, 0, 1, 1, 0, 1], [1, 0, 0, 1, 1, 0]])


@pytest.mark.parametrize(
  ('spec', 'words'),
  [
    (specs.BoundedArray((2,), np.int32, 1, 3), 'must begin with 0'),
    (specs.BoundedArray((2, 2), np.int32, 0, 3), 'one axis'),
    (specs.BoundedArray((), np.float32, 0, 3), 'one axis'),
  ],
)
def test_unsupported_action_spec_is_refused(spec, words):
  with pytest.raises(ValueError, match=rf'action_spec=.*{words}'):
    distributions.Actions(spec)
