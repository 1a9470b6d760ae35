"""Distributions: against arithmetic in float64, in their limits, and at the edges of float32."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from hypothesis import strategies as st

from hephaestus.agents import distributions

ACTIONS = 5
few_examples = hypothesis.settings(max_examples=40, deadline=None)
# Extreme outputs of a network: infinities, NaN, and the largest numbers of bfloat16.
extremes = st.one_of(
  st.sampled_from([np.inf, -np.inf, np.nan, 3.3e38, -3.3e38, 1e-38, 0.0]),
  st.floats(-50, 50, width=32),
)
any_logits = st.lists(extremes, min_size=ACTIONS, max_size=ACTIONS)
any_mask = st.lists(st.booleans(), min_size=ACTIONS, max_size=ACTIONS)


@functools.partial(jax.jit, static_argnames='unimix')
def masked(logits, mask, unimix=0.0):
  return distributions.MaskedCategorical.from_logits(logits, mask, unimix)


def legal_among(mask):
  return np.array(mask) if any(mask) else np.ones(len(mask), bool)


@few_examples
@hypothesis.given(any_logits, any_mask, st.sampled_from([jnp.float32, jnp.bfloat16]), st.booleans())
def test_illegal_action_is_never_chosen(logits, mask, dtype, mixed):
  policy = masked(jnp.array(logits, dtype), jnp.array(mask), 0.01 if mixed else 0.0)
  gumbel = jax.random.gumbel(jax.random.key(0), (256, ACTIONS))
  legal = legal_among(mask)
  assert legal[jax.vmap(policy.sample)(gumbel)].all()
  assert legal[policy.mode()]


@few_examples
@hypothesis.given(any_logits, any_mask, st.sampled_from([jnp.float32, jnp.bfloat16]), st.booleans())
def test_legal_actions_share_all_probability(logits, mask, dtype, mixed):
  policy = masked(jnp.array(logits, dtype), jnp.array(mask), 0.01 if mixed else 0.0)
  legal = legal_among(mask)
  probs = np.exp(np.asarray(policy.log_probs, np.float64))
  assert policy.log_probs.dtype == jnp.float32
  np.testing.assert_allclose(probs.sum(), 1, rtol=1e-5)
  assert (probs[~legal] == 0).all() and (probs[legal] > 0).all()
  assert 0 <= float(policy.entropy()) <= np.log(legal.sum()) + 1e-5
  if mixed:
    assert (probs[legal] >= 0.01 / legal.sum() * 0.999).all()


@jax.jit
@jax.grad
def gradient_of_log_prob_and_entropy(logits, mask, action):
  policy = masked(logits, mask, 0.01)
  return policy.log_prob(jnp.asarray(action)) + policy.entropy()


@few_examples
@hypothesis.given(any_logits, any_mask, st.integers(0, ACTIONS - 1))
def test_gradients_of_a_masked_categorical_are_finite(logits, mask, action):
  gradient = gradient_of_log_prob_and_entropy(
    jnp.array(logits, jnp.float32), jnp.array(mask), action
  )
  assert np.isfinite(gradient).all()


def test_probabilities_by_hand():
  logits, mask = jnp.log(jnp.array([1.0, 2.0, 7.0])), jnp.array([True, True, False])
  probs = jnp.exp(masked(logits, mask).log_probs)
  np.testing.assert_allclose(probs, [1 / 3, 2 / 3, 0], rtol=1e-6)
  np.testing.assert_allclose(masked(logits, mask).log_prob(jnp.array(1)), np.log(2 / 3), rtol=1e-6)
  # Unimix is shared by the legal two, not by all three.
  mixed = jnp.exp(masked(jnp.array([100.0, 0, 100]), mask, 0.1).log_probs)
  np.testing.assert_allclose(mixed, [0.95, 0.05, 0], rtol=1e-5)


def test_no_mask_means_all_legal():
  policy = masked(jnp.zeros((2, 3)), None)
  np.testing.assert_allclose(jnp.exp(policy.log_probs), np.full((2, 3), 1 / 3), rtol=1e-6)


def test_without_legal_actions_the_distribution_is_uniform_without_gradient():
  nothing = jnp.zeros(ACTIONS, bool)
  logits = jnp.array([9.0, -9.0, 0.0, jnp.inf, jnp.nan])
  probs = jnp.exp(masked(logits, nothing).log_probs)
  np.testing.assert_allclose(probs, np.full(ACTIONS, 1 / ACTIONS), rtol=1e-6)
  gradient = gradient_of_log_prob_and_entropy(jnp.array([9.0, -9, 0, 1, 2]), nothing, 0)
  assert not np.any(gradient)


@pytest.mark.parametrize('num_legal', [1, 2, 5])
def test_entropy_of_a_uniform_distribution_is_log_n(num_legal):
  mask = jnp.arange(ACTIONS) < num_legal
  policy = masked(jnp.where(mask, 3.0, 50.0), mask, 0.01)
  np.testing.assert_allclose(policy.entropy(), np.log(num_legal), atol=1e-6)


def test_entropy_of_a_deterministic_distribution_is_zero():
  np.testing.assert_allclose(masked(jnp.array([500.0, 0, 0, 0, 0]), None).entropy(), 0, atol=1e-6)


def test_sample_frequencies_equal_probabilities():
  policy = masked(jnp.log(jnp.array([1.0, 3.0, 6.0, 9.0])), jnp.array([True, True, True, False]))
  gumbel = jax.random.gumbel(jax.random.key(0), (20_000, 4))
  counts = np.bincount(jax.vmap(policy.sample)(gumbel), minlength=4)
  # Three standard deviations of a count are at most 0.011 of all.
  np.testing.assert_allclose(counts / 20_000, [0.1, 0.3, 0.6, 0], atol=0.011)


LOW, HIGH = np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32)


def tanh_normal(mean, scale, low=LOW, high=HIGH):
  array = lambda x: jnp.asarray(x, jnp.float32)
  return distributions.TanhNormal(array(mean), array(scale), array(low), array(high))


@few_examples
@hypothesis.given(
  st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32)),
  st.tuples(st.floats(0.125, 1, width=32), st.floats(0.125, 1, width=32)),
  st.tuples(st.floats(-12, 12, width=32), st.floats(-12, 12, width=32)),
)
def test_squashed_density_is_the_change_of_variables(mean, scale, raw):
  result = tanh_normal(mean, scale).log_prob(jnp.array(raw))
  mean, scale, raw, low, high = (np.array(x, np.float64) for x in (mean, scale, raw, LOW, HIGH))
  normal = -0.5 * ((raw - mean) / scale) ** 2 - np.log(scale * np.sqrt(2 * np.pi))
  slope = (high - low) / 2 / np.cosh(raw) ** 2  # of the action by its value before tanh
  np.testing.assert_allclose(result, np.sum(normal - np.log(slope)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('raw', [-1e4, -50.0, -20.0, 9.1, 20.0, 50.0, 1e4])
def test_squashed_density_is_finite_and_exact_where_tanh_is_flat(raw):
  # In float32 tanh(9.1) is 1, so arctanh of the action would be infinite, or wrong if clipped.
  log_prob = lambda mean, scale: tanh_normal(mean, scale).log_prob(jnp.full(2, raw))
  value, grads = jax.value_and_grad(log_prob, argnums=(0, 1))(jnp.zeros(2), jnp.ones(2))
  slope = 2 * (np.log(2) - abs(raw) - np.log1p(np.exp(-2 * abs(raw)))) + np.log((HIGH - LOW) / 2)
  exact = np.sum(-0.5 * raw**2 - 0.5 * np.log(2 * np.pi) - slope)
  np.testing.assert_allclose(value, exact, rtol=1e-5)
  assert all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize(('mean', 'scale'), [(0.0, 0.1), (0.7, 1.1), (-2.0, 0.5)])
def test_squashed_density_integrates_to_one(mean, scale):
  raw = np.linspace(-9, 9, 40_001)
  action = -3 + (np.tanh(raw) + 1) / 2 * 5
  one = tanh_normal([mean], [scale], [-3.0], [2.0])
  density = np.exp(one.log_prob(jnp.asarray(raw, jnp.float32)[:, None]))
  np.testing.assert_allclose(np.trapz(density, action), 1, rtol=1e-3)


def test_squashed_sample_lies_within_bounds_and_matches_its_value_before_tanh():
  outputs = jax.random.normal(jax.random.key(0), (500, 4)) * 10
  policy = distributions.TanhNormal.from_outputs(outputs, LOW, HIGH)
  action, raw = policy.sample(jax.random.normal(jax.random.key(1), (500, 2)))
  assert (action >= LOW).all() and (action <= HIGH).all()
  np.testing.assert_allclose(action, LOW + (np.tanh(raw) + 1) / 2 * (HIGH - LOW), atol=1e-5)
  np.testing.assert_array_equal(policy.mode(), policy.sample(jnp.zeros((500, 2)))[0])
  assert np.std(np.asarray(action), axis=0).min() > 0.1


def test_scalar_bounds_apply_to_every_axis():
  outputs, raw = jnp.array([[0.3, -0.2, 0.1, 0.4]]), jnp.array([[0.5, -1.0]])
  bounds = [(np.float32(-2), np.float32(2)), (np.full(2, -2, 'f'), np.full(2, 2, 'f'))]
  one, each = (distributions.TanhNormal.from_outputs(outputs, *pair) for pair in bounds)
  np.testing.assert_allclose(one.log_prob(raw), each.log_prob(raw), rtol=1e-6)
  np.testing.assert_allclose(one.entropy(), each.entropy(), rtol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_extreme_outputs_give_a_finite_squashed_policy(dtype):
  outputs = jnp.array([[1e30, -1e30, 1e30, -1e30]], dtype)
  policy = distributions.TanhNormal.from_outputs(outputs, LOW, HIGH)
  action, raw = policy.sample(jnp.ones((1, 2)))
  assert (jnp.abs(policy.mean) <= 5).all() and (policy.scale >= 0.1).all()
  assert action.dtype == jnp.float32 and np.isfinite(action).all()
  assert np.isfinite(policy.log_prob(raw)).all() and np.isfinite(policy.entropy()).all()


@pytest.mark.parametrize('mean', [-2.0, 0.0, 0.8])
def test_squashed_entropy_is_exact_if_narrow_and_an_upper_bound_if_wide(mean):
  def entropies(scale):
    raw = np.linspace(mean - 8 * scale, mean + 8 * scale, 20_001)
    normal = np.exp(-0.5 * ((raw - mean) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
    slope = 2 / np.cosh(raw) ** 2  # bounds 0 and 4
    exact = np.trapz(normal * (np.log(slope) - np.log(np.maximum(normal, 1e-300))), raw)
    return float(tanh_normal([mean], [scale], [0.0], [4.0]).entropy()), exact

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
  outputs = (3 * jax.random.normal(jax.random.key(0), (16, 8))).astype(jnp.bfloat16)
  exact = jax.tree.leaves(make(outputs.astype(jnp.float32)))
  for found, expected in zip(jax.tree.leaves(make(outputs)), exact, strict=True):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def gaussian(rng, *shape):
  return distributions.Gaussian(
    jnp.asarray(rng.normal(size=shape), jnp.float32),
    jnp.asarray(np.exp(rng.normal(size=shape)), jnp.float32),
  )


def categorical(rng, *shape):
  outputs = jnp.asarray(rng.normal(size=(*shape[:-2], shape[-2] * shape[-1])), jnp.float32)
  return distributions.Categorical.from_outputs(outputs, shape[-1], 0.01)


def test_gaussian_divergence_by_hand():
  normal = lambda mean, variance: distributions.Gaussian(jnp.array([mean]), jnp.array([variance]))
  np.testing.assert_allclose(normal(0.0, 1.0).kl(normal(1.0, 1.0)), 0.5, rtol=1e-6)
  np.testing.assert_allclose(
    normal(0.0, 4.0).kl(normal(0.0, 1.0)), 0.5 * (4 - 1 - np.log(4)), rtol=1e-6
  )


def test_gaussian_divergence_is_the_mean_log_ratio_of_samples():
  rng = np.random.default_rng(0)
  p, q = gaussian(rng, 3), gaussian(rng, 3)
  x = np.asarray(p.sample(jnp.asarray(rng.normal(size=(200_000, 3)), jnp.float32)), np.float64)
  log_density = lambda d: np.sum(
    -0.5 * (x - d.mean) ** 2 / d.variance - 0.5 * np.log(2 * np.pi * d.variance), axis=-1
  )
  ratio = log_density(p) - log_density(q)
  np.testing.assert_allclose(p.kl(q), ratio.mean(), atol=5 * ratio.std() / np.sqrt(200_000))


def test_categorical_divergence_by_hand():
  log_probs = lambda *probs: distributions.Categorical(jnp.log(jnp.array(probs)))
  p, q = log_probs([0.5, 0.5], [0.2, 0.8]), log_probs([0.25, 0.75], [0.2, 0.8])
  np.testing.assert_allclose(p.kl(q), 0.5 * np.log(2) + 0.5 * np.log(2 / 3), rtol=1e-5)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([gaussian, categorical]))
def test_divergence_is_zero_from_itself_and_positive_from_another(seed, make):
  rng = np.random.default_rng(seed)
  p, q = make(rng, 4, 3), make(rng, 4, 3)
  np.testing.assert_allclose(p.kl(p), np.zeros_like(p.kl(p)), atol=1e-6)
  assert (p.kl(q) > 0).all()


@pytest.mark.parametrize('make', [gaussian, categorical])
def test_divergence_broadcasts_over_members(make):
  rng = np.random.default_rng(0)
  shape = (4, 3) if make is gaussian else (4, 2, 3)
  posterior, priors = make(rng, *shape), make(rng, 5, *shape)
  assert posterior.kl(priors).shape == (5, 4)
  one = jax.tree.map(lambda x: x[2], priors)
  np.testing.assert_allclose(posterior.kl(priors)[2], posterior.kl(one), rtol=1e-6)
  np.testing.assert_allclose(priors.kl(posterior)[2], one.kl(posterior), rtol=1e-6)


def test_untrained_gaussian_is_about_standard():
  belief = distributions.Gaussian.from_outputs(jnp.zeros(6, jnp.bfloat16), 1, 0.0)
  assert belief.mean.dtype == belief.variance.dtype == jnp.float32
  np.testing.assert_allclose(belief.mean, np.zeros(3))
  np.testing.assert_allclose(jnp.sqrt(belief.variance), np.ones(3), atol=0.15)
  narrow = distributions.Gaussian.from_outputs(jnp.full(6, -1e4), 1, 0.0)
  np.testing.assert_allclose(jnp.sqrt(narrow.variance), np.full(3, 0.1), rtol=1e-5)


def test_gaussian_sample_has_gradients_by_mean_and_variance():
  belief = distributions.Gaussian(jnp.array([1.0]), jnp.array([4.0]))
  grads = jax.grad(lambda belief: belief.sample(jnp.array([3.0]))[0])(belief)
  np.testing.assert_allclose(belief.sample(jnp.array([3.0])), [7.0])
  np.testing.assert_allclose([grads.mean[0], grads.variance[0]], [1.0, 3 / (2 * 2)])


def test_categorical_samples_are_one_hot_with_their_probabilities():
  probs = jnp.array([[0.2, 0.8, 0.0], [0.1, 0.3, 0.6]])
  belief = distributions.Categorical(jnp.log(probs))
  noise = jax.random.uniform(jax.random.key(0), (20_000, 2))
  sample = np.asarray(jax.vmap(belief.sample)(noise)).reshape(-1, 2, 3)
  np.testing.assert_allclose(np.sort(sample, axis=-1)[..., -1], 1, atol=1e-6)
  np.testing.assert_allclose(sample.sum(-1), 1, atol=1e-6)
  np.testing.assert_allclose(sample.mean(0), probs, atol=0.011)
  means, variances = belief.moments()
  np.testing.assert_allclose(means, probs.reshape(6), rtol=1e-5)
  np.testing.assert_allclose(variances, sample.var(0).reshape(6), atol=0.011)


def test_categorical_sample_has_the_straight_through_gradient():
  outputs, noise = jnp.array([0.3, -0.2, 0.1]), jnp.zeros(1)
  scores = jnp.array([1.0, 2.0, 4.0])

  def sampled(outputs):
    return distributions.Categorical.from_outputs(outputs, 3, 0.01).sample(noise) @ scores

  def expected(outputs):
    return (0.99 * jax.nn.softmax(outputs) + 0.01 / 3) @ scores

  np.testing.assert_allclose(sampled(outputs), 1.0, rtol=1e-6)
  gradient = jax.grad(sampled)(outputs)
  assert np.abs(gradient).min() > 0.01
  np.testing.assert_allclose(gradient, jax.grad(expected)(outputs), rtol=1e-4)


def test_unimix_keeps_every_class_possible():
  belief = distributions.Categorical.from_outputs(jnp.array([1e4, 0, 0, 0.0]), 2, 0.02)
  np.testing.assert_allclose(jnp.exp(belief.log_probs), [[0.99, 0.01], [0.5, 0.5]], rtol=1e-5)


def test_deterministic_categoricals_without_unimix_have_a_finite_divergence():
  p, q = (
    distributions.Categorical.from_outputs(jnp.array(outputs), 2, 0.0)
    for outputs in ([500.0, 0.0], [0.0, 500.0])
  )
  assert np.isfinite(p.kl(q)) and p.kl(q) > 10
  np.testing.assert_allclose(p.kl(p), 0, atol=1e-6)


@pytest.mark.parametrize('name', sorted(distributions.LATENTS))
def test_latents_have_their_declared_sizes(name):
  latent = distributions.LATENTS[name]
  belief = latent.from_outputs(jnp.ones((2, latent.num_outputs(4, 3))), 3, 0.01)
  noise = jax.vmap(lambda key: latent.noise(key, 4, 3))(jax.random.split(jax.random.key(0)))
  assert belief.sample(noise).shape == belief.mode().shape == (2, latent.size(4, 3))
  assert all(moment.shape == (2, latent.size(4, 3)) for moment in belief.moments())


def two_hot(logits, limit=20.0):
  return distributions.TwoHot.from_logits(logits, limit)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(('bins', 'limit'), [(255, 20.0), (41, 6.0), (3, 1.0)])
def test_mean_of_equal_probabilities_is_exactly_zero(bins, limit, dtype):
  assert float(two_hot(jnp.zeros(bins, dtype), limit).mean()) == 0.0


@pytest.mark.parametrize('index', [0, 10, 20, 27, 40])
def test_mean_of_one_bin_is_its_position(index):
  belief = two_hot(jnp.where(jnp.arange(41) == index, 0.0, -200.0), 5.0)
  position = -5 + index * 10 / 40
  expected = np.sign(position) * (np.exp(abs(position)) - 1)
  np.testing.assert_allclose(belief.mean(), expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(belief.log_prob(jnp.array(expected, jnp.float32)), 0, atol=2e-3)


def test_bins_are_fine_near_zero_and_antisymmetric():
  bins = np.asarray(two_hot(jnp.zeros(255)).bins, np.float64)
  np.testing.assert_allclose(bins, -bins[::-1], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(bins[-1], np.exp(20.0) - 1, rtol=1e-5)
  assert np.diff(bins).argmin() in (126, 127) and np.diff(bins).min() < 0.2


def test_target_between_two_bins_is_two_hot():
  logits = jnp.array([0.0, 0.1, 0.2, 0.3, 0.4])
  belief = two_hot(logits, 2.0)  # bins at 0, +-1.718, +-6.389
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  target = 0.25 * (np.e - 1)
  np.testing.assert_allclose(
    belief.log_prob(jnp.array(target, jnp.float32)),
    0.75 * log_probs[2] + 0.25 * log_probs[3],
    rtol=1e-5,
  )
  # Beyond the last bin, the last bin.
  beyond = jax.vmap(belief.log_prob)(jnp.array([-1e9, 1e9]))
  np.testing.assert_allclose(beyond, log_probs[[0, 4]], rtol=1e-5)


@pytest.mark.parametrize('bins', [5, 101])
def test_two_hot_gradients_equal_those_of_the_formula(bins):
  """By logits and by target; the maximum of many bins is computed in overlapping pieces."""
  rng = np.random.default_rng(0)
  logits = jnp.asarray(5 * rng.normal(size=(7, bins)), jnp.float32)
  target = jnp.asarray(rng.uniform(-6, 6, 7), jnp.float32)
  weight = jnp.asarray(rng.normal(size=7), jnp.float32)
  edges = two_hot(logits, 2.0).bins

  def by_formula(logits, target):
    upper = jnp.searchsorted(edges, target)
    share = (target - edges[upper - 1]) / (edges[upper] - edges[upper - 1])
    log_probs = jax.nn.log_softmax(logits)
    index = jnp.arange(7)
    log_prob = (1 - share) * log_probs[index, upper - 1] + share * log_probs[index, upper]
    return jnp.sum(weight * log_prob)

  given = lambda logits, target: jnp.sum(weight * two_hot(logits, 2.0).log_prob(target))
  results = [jax.value_and_grad(f, argnums=(0, 1))(logits, target) for f in (given, by_formula)]
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, *results)


def test_likelihood_is_largest_at_the_target():
  target = jnp.array([-0.01, 0.09, 3.0, -700.0])

  @jax.jit
  def fit(logits):
    likelihood = lambda logits: two_hot(logits).log_prob(target).sum()
    return jax.lax.fori_loop(0, 3000, lambda _, x: x + jax.grad(likelihood)(x), logits)

  fitted = two_hot(fit(jnp.zeros((4, 255)))).mean()
  np.testing.assert_allclose(fitted, target, rtol=0.02, atol=0.002)


# Several choices at once.

CHOICES = (3, 1, 2)
COMBINATIONS = np.array([[i, 0, j] for i in range(3) for j in range(2)])


@functools.partial(jax.jit, static_argnames='unimix')
def several(logits, mask, unimix):
  policy = distributions.MultiCategorical.from_logits(logits, CHOICES, mask, unimix)
  return jax.vmap(policy.log_prob)(COMBINATIONS), policy.entropy(), policy.mode()


@few_examples
@hypothesis.given(
  st.lists(st.floats(-8, 8, width=32), min_size=6, max_size=6),
  st.lists(st.booleans(), min_size=6, max_size=6),
  st.sampled_from([0.0, 0.1]),
)
def test_multi_categorical_equals_the_product_of_its_parts(logits, mask, unimix):
  """Against all combinations, by arithmetic in float64; a part without legal choices is uniform."""
  log_probs, entropy, mode = several(jnp.array(logits, jnp.float32), jnp.array(mask), unimix)
  cuts, probs = np.cumsum(CHOICES)[:-1], []
  for part, given in zip(*(np.split(np.array(x), cuts) for x in (logits, mask)), strict=True):
    legal = legal_among(given)
    weights = np.where(legal, np.exp(part if given.any() else 0 * part), 0)
    probs.append((1 - unimix) * weights / weights.sum() + unimix * legal / legal.sum())
  expected = np.prod([part[COMBINATIONS[:, i]] for i, part in enumerate(probs)], axis=0)
  np.testing.assert_allclose(np.exp(log_probs), expected, rtol=1e-4, atol=1e-8)
  likely = expected[expected > 0]
  np.testing.assert_allclose(entropy, -np.sum(likely * np.log(likely)), rtol=1e-4, atol=1e-5)
  assert expected[(mode == COMBINATIONS).all(-1)] >= expected.max() * (1 - 1e-5)


def test_multi_categorical_samples_parts_independently_by_their_probabilities():
  logits = jnp.log(jnp.array([0.5, 0.3, 0.2, 1.0, 0.9, 0.1]))
  policy = distributions.MultiCategorical.from_logits(logits, CHOICES)
  actions = distributions.Actions(specs.BoundedArray((3,), np.int32, 0, [2, 0, 1]))
  draw = jax.vmap(lambda key: policy.sample(actions.noise(key)))
  drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
  assert drawn.shape == (4000, 3) and (drawn[:, 1] == 0).all()
  found = np.histogram2d(drawn[:, 0], drawn[:, 2], bins=(range(4), range(3)))[0] / 4000
  np.testing.assert_allclose(found, np.outer([0.5, 0.3, 0.2], [0.9, 0.1]), atol=0.04)


def test_action_of_several_choices_is_encoded_as_one_hots():
  actions = distributions.Actions(specs.BoundedArray((3,), np.int32, 0, [2, 0, 1]))
  assert (actions.size, actions.num_choices) == (6, CHOICES)
  encoded = actions.encode(jnp.array([[2, 0, 1], [0, 0, 0]]))
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
