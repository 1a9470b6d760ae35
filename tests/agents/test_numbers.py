"""Numbers of an observation: how the world model reads, predicts and judges them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from small_dreamer import ALONE

from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import numbers as numbers_lib
from hephaestus.agents.dreamer import sockets

NUMBERS_SPEC = {
  'action_mask': specs.BoundedArray((3,), bool, False, True),
  'alive': specs.Array((), bool),
  'grade': specs.BoundedArray((2,), np.float32, 0, 1),
  'purse': specs.Array((2,), np.int32),
  'walls': specs.BoundedArray((1, 2), bool, False, True),
}
NUMBERS = numbers_lib.Numbers(NUMBERS_SPEC)
NUMBERS_READ = [1.0, 0, 1, 0.25, 0.8125, np.log(4), -np.log(8)]  # bits, grades, reals
READ = np.array(NUMBERS_READ, np.float32)
NUMBERS_SEEN = {
  'action_mask': np.array([True, True, False]),
  'alive': np.array(True),
  'grade': np.array([0.25, 0.8125], np.float32),
  'purse': np.array([3, -7], np.int32),
  'walls': np.array([[False, True]]),
}
STATISTICS = {
  'mean': np.float32([1.0, 0.0]),
  'variance': np.float32([4.0, 1.0]),
  'error': np.float32([0.5, 1.0]),
  'between': np.zeros(3, np.float32),
  'off_level': np.full(2, 0.5, np.float32),
  'change': np.full(numbers_lib.NUM_PROJECTIONS, 4.0, np.float32),
  'count': np.float32(1),
}
SOFT = STATISTICS | {'between': np.ones(3, np.float32)}
LEVEL = 1 / 8


def outputs(*, gate=-30.0, bits=(0.0, 0.0, 0.0), levels=((0.0,) * 9,) * 2, change=(0.0, 0.0)):
  """Outputs of a decoder: 3 gates and 3 logits of bits, 2 gates and 2 x 9 logits of levels, 2 changes."""
  parts = ([gate] * 3, bits, [gate] * 2, np.reshape(levels, -1), change)
  return np.concatenate(parts).astype(np.float32)


def perfect(numbers):
  """Outputs that predict bits and grades without an error, and without copying them."""
  shares = np.asarray(by_level(np.float32(numbers[3:5])))
  return {'bits': 60 * np.asarray(numbers[:3]) - 30, 'levels': np.log(shares + 1e-12)}


by_level = jax.jit(lambda numbers: observation_lib.by_level(numbers, 9))


def loss_of(outputs, before, numbers, follows, statistics):
  predicted = NUMBERS.predict(outputs, before, follows, statistics)
  loss, error = NUMBERS.loss(predicted, numbers, statistics)
  return loss, (error, NUMBERS.expected(predicted, before, statistics), predicted[0])


compiled_loss = jax.jit(jax.value_and_grad(loss_of, has_aux=True))


class Judged(NamedTuple):
  """A prediction of numbers from those before: loss, squared errors, mean, bits and gradient."""

  loss: Any
  error: Any
  expected: Any
  bits: Any
  grads: Any


def judge(outputs, before, numbers=READ, follows=True, statistics=STATISTICS):
  before, numbers = np.asarray(before, np.float32), np.asarray(numbers, np.float32)
  (loss, aux), grads = compiled_loss(outputs, before, numbers, np.asarray(follows), statistics)
  return Judged(*jax.device_get((loss, *aux, grads)))


def with_number(index, value):
  return [*NUMBERS_READ[:index], value, *NUMBERS_READ[index + 1 :]]


def test_numbers_are_binary_discrete_or_real_by_their_specs():
  assert (NUMBERS.size, NUMBERS.num_reals) == (7, 2)
  assert NUMBERS.input_size == 7 + 9 * 2 + 33 * 2
  assert NUMBERS.num_outputs == 2 * 3 + (1 + 9) * 2 + 2
  np.testing.assert_allclose(jax.jit(NUMBERS.read)(NUMBERS_SEEN), NUMBERS_READ, rtol=1e-6)
  only = lambda *arguments: numbers_lib.Numbers(specs.BoundedArray(*arguments))
  assert only((2,), np.uint8, 0, 255).num_reals == only((2,), np.float32, -1, 1).num_reals == 2
  assert only((2,), np.int32, 0, 1).num_outputs == 2 * 2


CATEGORIES = {
  'dial': specs.BoundedArray((2,), np.int32, [-2, 0], [1, 2]),  # 4 and 3 values, both read as 4
  'room': specs.DiscreteArray(70),
  'switch': specs.BoundedArray((1,), np.int8, 0, 1),
}


def test_integers_of_few_values_are_categories():
  numbers = numbers_lib.Numbers(CATEGORIES)
  binary, dials, room = numbers.kinds
  assert isinstance(binary, numbers_lib.Binary) and binary.indices.tolist() == [3]
  assert (dials.count, room.count) == (4, 70)
  assert numbers.num_outputs == 2 + 2 * (1 + 4) + (1 + 70) and numbers.num_reals == 0
  seen = {'dial': np.array([-1, 2]), 'room': np.array(69), 'switch': np.array([1])}
  read, inputs = jax.jit(lambda seen: (numbers.read(seen), numbers.inputs(numbers.read(seen), {})))(
    seen
  )
  np.testing.assert_allclose(jax.jit(numbers.to_flat)(read), [-1, 2, 69, 1], rtol=1e-6)
  np.testing.assert_allclose(inputs[:3], [1, 1 / 3, 2 / 3], rtol=1e-5)
  np.testing.assert_allclose(inputs[3:11], [0, 1, 0, 0, 0, 0, 1, 0], atol=1e-5)
  np.testing.assert_allclose(inputs[12:], np.eye(70)[69], atol=1e-4)


@pytest.mark.parametrize(
  'spec',
  [
    specs.BoundedArray((1,), np.int32, 0, 64),  # 65 values
    specs.BoundedArray((65,), np.int32, 0, 63),  # 4,160 one-hot numbers
    specs.BoundedArray((1,), np.float32, 0, 3),
    specs.Array((1,), np.int32),
    specs.BoundedArray((1,), np.int32, 3, 3),
  ],
)
def test_other_numbers_are_no_categories(spec):
  assert observation_lib.num_values(spec) == 0
  assert numbers_lib.Numbers(spec).num_reals == spec.shape[0]


def test_categories_are_sampled_with_their_probabilities():
  numbers = numbers_lib.Numbers(specs.BoundedArray((2,), np.int32, 5, 8))
  shares = np.float32([[0.2, 0.3, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0]])

  @jax.jit
  def draw(noise):
    before = jnp.broadcast_to(jnp.float32([1 / 3, 1.0]), (len(noise), 2))
    new = jnp.broadcast_to(shares, (len(noise), 2, 4))
    predicted = (numbers_lib.Level(jnp.zeros(before.shape), before, new, new),)
    return numbers.to_flat(numbers.sample(predicted, before, {}, noise))

  found = np.asarray(draw((np.arange(1000) + 0.5) / 1000))
  near = np.rint(found)
  np.testing.assert_allclose(found, near, atol=1e-5)
  assert [np.mean(near[:, 0] == value) for value in (5, 6, 7, 8)] == pytest.approx(
    shares[0], abs=0.01
  )
  assert (near[:, 1] == 7).all()


def test_to_flat_inverts_read():
  axes = (4, 5)
  rng = np.random.default_rng(0)
  draw = {
    'alive': rng.uniform(size=axes) < 0.5,
    'grade': rng.uniform(size=(*axes, 2)).astype(np.float32),
    'purse': rng.integers(-100, 100, (*axes, 2), np.int32),
    'walls': rng.uniform(size=(*axes, 1, 2)) < 0.5,
  }

  @jax.jit
  def through(observation):
    flat = NUMBERS.to_flat(NUMBERS.read(observation))
    joined = observation_lib.join(observation, NUMBERS_SPEC)
    return flat, joined, observation_lib.to_observation(flat, [], NUMBERS_SPEC)

  flat, joined, again = through(draw)
  assert flat.shape == (*axes, 7)
  np.testing.assert_allclose(flat, joined, rtol=1e-4)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), again, draw)


@pytest.mark.parametrize(('side', 'outputs'), [(8, 3), (32, 2)])
def test_bytes_of_an_image_are_amounts_of_few_cells_or_binary_numbers(side, outputs):
  spec = specs.Array((side, 9, 3), np.uint8)
  numbers = numbers_lib.Numbers(spec)
  size = side * 9 * 3
  assert (numbers.size, numbers.num_reals, numbers.num_outputs) == (size, 0, outputs * size)
  image = np.random.default_rng(0).integers(0, 256, (2, *spec.shape)).astype(np.uint8)

  @jax.jit
  def through(image):
    read = numbers.read(image)
    return read, observation_lib.to_observation(numbers.to_flat(read), [], spec)

  read, again = through(image)
  np.testing.assert_allclose(read, image.reshape(2, -1) / 255, rtol=1e-6)
  np.testing.assert_allclose(again, image, atol=1e-3)


compiled_inputs = jax.jit(NUMBERS.inputs)


def inputs_of(numbers, statistics=STATISTICS):
  return np.asarray(compiled_inputs(np.asarray(numbers, np.float32), statistics))


def test_inputs_hold_standardised_reals_and_both_by_levels():
  inputs = inputs_of(READ)
  np.testing.assert_allclose(inputs[:5], NUMBERS_READ[:5])
  levels = np.zeros((2, 9))
  levels[0, 2], levels[1, 6:8] = 1, 0.5  # 0.25 is level 2; 0.8125 is halfway between 6 and 7
  np.testing.assert_allclose(inputs[5:23].reshape(2, 9), levels, atol=1e-6)
  # Mean 1 and standard deviation 2; mean 0 and standard deviation 1.
  reals = np.array([(np.log(4) - 1) / 2, -np.log(8)])
  np.testing.assert_allclose(inputs[23:25], reals, rtol=1e-3)
  levels = inputs[25:].reshape(2, 33)
  np.testing.assert_allclose(levels @ np.linspace(-4, 4, 33), reals, atol=1e-3)
  np.testing.assert_array_equal((levels > 0).sum(axis=1), 2)
  far = inputs_of(with_number(5, 1e3))
  assert far[23] == 5 and far[25 + 32] == 1
  low = jax.eval_shape(NUMBERS.inputs, READ.astype(jnp.bfloat16), STATISTICS)
  assert low.dtype == jnp.bfloat16


def test_copy_gives_the_previous_numbers_at_no_loss():
  """The logits do not matter. A number that changed costs the log of the least share without a copy."""
  wrong = perfect([0, 1, 0, 1.0, 0.0])
  copies = outputs(gate=30.0, **wrong)
  before = np.float32(with_number(4, 0.75))
  same = judge(copies, before, before)
  np.testing.assert_allclose(same.expected, before, atol=2e-3)
  np.testing.assert_allclose(same.loss, -5 * np.log(0.999), rtol=1e-2)
  changed = judge(copies, before, [0, *before[1:]])
  np.testing.assert_allclose(changed.loss, -4 * np.log(0.999) - np.log(0.001), rtol=1e-3)


def test_first_step_copies_nothing():
  copies = outputs(gate=30.0)
  predict = lambda before, follows: judge(copies, before, follows=follows, statistics=SOFT).expected
  other = [0.0, 1, 0, 1, 0, 3, 4]
  np.testing.assert_array_equal(predict(NUMBERS_READ, False), predict(other, False))
  assert (predict(NUMBERS_READ, True) != predict(other, True)).all()
  np.testing.assert_allclose(predict(other, False)[:3], [0.5, 0.5, 0.5])
  np.testing.assert_array_equal(predict(other, False)[5:], STATISTICS['mean'])
  loss = judge(copies, other, [1.0, 1, 1, 0, 1, 1, 0], False).loss
  np.testing.assert_allclose(loss, 3 * np.log(2) + 2 * np.log(9), rtol=1e-5)


@pytest.mark.parametrize(
  ('index', 'value', 'loss'),
  [
    (0, 0.0, 30),  # logit 30
    (3, 1.0, -np.log(1e-12)),
    (3, 3 * LEVEL, -np.log(1e-12)),  # whatever the distance
    (4, 6 * LEVEL, np.log(2)),  # predicted to be level 6 or 7
    (5, np.log(4) + 2, np.log1p(1 / 0.5 / 2)),  # one standard deviation; squared error 0.5
    (6, -np.log(8) + 2, np.log1p(4 / 1 / 2)),  # two; squared error 1
  ],
)
def test_loss_of_a_number_that_is_predicted_wrongly(index, value, loss):
  found = judge(outputs(**perfect(NUMBERS_READ)), NUMBERS_READ, with_number(index, value)).loss
  np.testing.assert_allclose(found, loss, rtol=1e-3, atol=1e-4)


def test_real_number_is_predicted_as_its_change_in_standard_deviations():
  right = outputs(**perfect(NUMBERS_READ), change=(1.0, -0.5))
  numbers = [*NUMBERS_READ[:5], np.log(4) + 2, -np.log(8) - 0.5]
  loss, error, *_ = judge(right, NUMBERS_READ, numbers)
  np.testing.assert_allclose(loss, 0, atol=1e-3)
  np.testing.assert_allclose(error, [0, 0], atol=1e-6)


def test_change_of_a_number_that_was_copied_for_long_has_a_gradient():
  """It has one also if its logits have followed; a clipped likelihood would have none."""
  levels = np.full((2, 9), -10.0)
  levels[:, 0] = 0
  stays = outputs(gate=10.0, bits=(-10.0,) * 3, levels=levels)
  for index, gate, logit in ((0, 0, 3), (3, 6, 16)):  # of the bit, and of the last level
    numbers = [0.0] * 7
    numbers[index] = 1.0
    grads = judge(stays, [0.0] * 7, numbers).grads
    assert grads[gate] > 0.01  # the gate closes
    assert grads[logit] < -0.5


def test_bits_are_imagined_as_bits_where_all_observed_ones_were():
  """The first was observed as 0 or 1 only, the second between them."""
  statistics = STATISTICS | {'between': np.float32([0.0, 0.5, 0.0])}
  logits = np.log([0.7 / 0.3, 0.7 / 0.3, 0.2 / 0.8])
  expected = judge(outputs(bits=logits), np.zeros(7), statistics=statistics).expected
  np.testing.assert_allclose(expected[:3], [1, 0.7, 0], rtol=1e-5)


# Changes, which the members of an ensemble predict.


compiled_change = jax.jit(NUMBERS.change)


def change(before, numbers):
  return np.asarray(compiled_change(np.float32(before), np.float32(numbers), STATISTICS))


@pytest.mark.parametrize(('index', 'value'), [(0, 0.0), (3, 0.75), (6, 1.0)])
def test_number_of_each_kind_has_a_change(index, value):
  assert (change(NUMBERS_READ, NUMBERS_READ) == 0).all()
  there = change(NUMBERS_READ, with_number(index, value))
  assert there.shape == (numbers_lib.NUM_PROJECTIONS,) and np.abs(there).min() > 0
  np.testing.assert_allclose(change(with_number(index, value), NUMBERS_READ), -there, rtol=1e-4)


def test_loss_of_a_change_fits_its_mean_and_fits_the_variance_to_the_squared_error():
  observed = np.float32([1.0, 2.0])
  loss = lambda mean, variance: numbers_lib.Change(mean, variance).loss(observed)
  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  judge = lambda mean, variance: compiled(np.float32(mean), np.float32(variance))
  np.testing.assert_allclose(judge([1.0, 2.0], [1.0, 1.0])[0], 0, atol=1e-6)
  np.testing.assert_allclose(judge([1.0, 3.0], [1.0, 1.0])[0], np.log(1.5) + 0.5, rtol=1e-5)
  pull, slope = (
    lambda variance, i=i: float(judge([1.0, 3.0], [1.0, variance])[1][i][1]) for i in (0, 1)
  )
  assert slope(0.5) < 0 < slope(2.0) and abs(slope(1.0)) < 1e-6
  assert pull(0.1) > pull(1.0) > 0  # less where noise is predicted, but never nothing


# Statistics of numbers.


@jax.jit
def followed(statistics, numbers, error):
  errors = jnp.full((*numbers.shape[:1], 1, 2), error)
  moments = NUMBERS.moments(numbers[:, None], errors, statistics)
  return NUMBERS.updated(statistics, moments, ALONE)


def follow(statistics, batch, error=1.0):
  """Statistics after a batch of numbers [B, 7], whose real ones have one error."""
  return jax.device_get(followed(statistics, np.asarray(batch, np.float32), np.float32(error)))


def test_first_batch_sets_the_statistics():
  statistics = NUMBERS.initial_statistics()
  inputs = inputs_of(READ, statistics)
  unscaled = NUMBERS_READ[5:]
  np.testing.assert_allclose(inputs[23:25], unscaled, rtol=1e-3)
  batch = [[0, 0.5, 1, 0, 0, 1, -2], [0, 0.5, 0, 0, 0, 5, -2]]
  statistics = follow(statistics, batch, error=0.5)
  np.testing.assert_allclose(statistics['mean'], [3, -2])
  np.testing.assert_allclose(statistics['variance'], [4, 0])
  np.testing.assert_allclose(statistics['error'], [0.5, 0.5])
  np.testing.assert_allclose(statistics['between'], [0, 1, 0])
  assert statistics['count'] == 1
  # The standard deviations are 2 and 0.
  reals = inputs_of([0, 0, 0, 0, 0, 5.0, -2], statistics)[23:25]
  np.testing.assert_allclose(reals, [1, 0], atol=1e-3)


def test_statistics_follow_a_shift_of_the_data_slowly_and_errors_faster():
  old = STATISTICS | {'count': np.float32(1e6)}
  statistics = follow(old, [[1, 1, 1, 0, 0, 11, 10]] * 2, error=0.0)
  np.testing.assert_allclose(statistics['mean'], [1 + 0.002 * 10, 0.002 * 10], rtol=1e-4)
  np.testing.assert_allclose(statistics['error'], [0.98 * 0.5, 0.98], rtol=1e-4)


@pytest.mark.parametrize(('mean', 'deviation'), [(300, 1), (1e4, 10), (4e4, 100), (1e6, 1e3)])
def test_scale_of_numbers_far_from_zero(mean, deviation):
  numbers = numbers_lib.Numbers(specs.Array((1,), np.float32))
  (kind,) = numbers.kinds

  @jax.jit
  def follow(statistics, observed):
    moments = numbers.moments(numbers.read(observed), jnp.ones((32, 16, 1)), statistics)
    return numbers.updated(statistics, moments, ALONE)

  rng, statistics = np.random.default_rng(0), numbers.initial_statistics()
  for _ in range(200):
    batch = rng.normal(mean, deviation, (32, 16, 1)).astype(np.float32)
    statistics = follow(statistics, batch)
  np.testing.assert_allclose(kind.scale(statistics) - 1e-4, deviation / mean, rtol=0.2)


def test_statistics_do_not_depend_on_how_a_batch_is_spread_over_devices():
  """A fraction that only one of two devices has observed is none to be rounded."""
  observed = np.zeros((8, 2, NUMBERS.size), np.float32)
  observed[0, 0] = [0, 0.03, 0, 0.3, 0, 11, 10]
  statistics = NUMBERS.initial_statistics()
  moments = lambda part: NUMBERS.moments(part, jnp.ones((8, part.shape[1], 2)), statistics)
  one = NUMBERS.updated(statistics, moments(observed), ALONE)
  batch = sockets.Batch(mean=lambda x: x.mean(0), largest=lambda x: x.max(0), gather=lambda x: x)
  halves = jax.tree.map(lambda *parts: jnp.stack(parts), *map(moments, np.split(observed, 2, 1)))
  two = NUMBERS.updated(statistics, halves, batch)
  assert one.keys() == two.keys()
  for name, x in one.items():
    np.testing.assert_allclose(two[name], x, rtol=1e-5, atol=1e-6)


# Levels.


around = jax.jit(numbers_lib.around)


@pytest.mark.parametrize('number', [0.0, 0.3, 0.625, 1.0])
def test_number_around_a_level_inverts_levels(number, levels=9):
  distance = np.abs(number * (levels - 1) - np.arange(levels))
  two_hot = np.maximum(0, 1 - distance).astype(np.float32)
  np.testing.assert_allclose(around(np.argmax(two_hot), two_hot), number, atol=1e-5)


@jax.jit
def drawn(one, level, before, statistics):
  count = 4096
  wide = lambda x: jnp.broadcast_to(x, (count, *x.shape))
  levels, reals = jnp.stack([level, level]), jnp.array([4.0, -3.0])
  before, levels = wide(before), wide(levels)
  grades = numbers_lib.Level(jnp.zeros((count, 2)), before[:, 3:5], levels, levels)
  predicted = ((wide(1 - one), wide(one)), grades, wide(reals))
  noise = jax.random.uniform(jax.random.key(0), (count,))
  return NUMBERS.sample(predicted, before, statistics, noise)


def sample(one, level, before, statistics=STATISTICS):
  """Samples of one prediction, by 4,096 draws: probabilities of each bit to be 1, shares of each level."""
  return np.asarray(drawn(*map(np.float32, (one, level, before)), statistics))


NINTHS = np.array([0.0, 0.25, 0.0, 0.0, 0.1, 0.0, 0.0, 0.65, 0.0])


def test_sampled_numbers_have_their_probabilities():
  found = sample([0.3, 0.7, 0.0], NINTHS, [1, 0, 0, 4 * LEVEL, 7 * LEVEL, 0, 0])
  np.testing.assert_allclose(found[:, :3].mean(axis=0), [0.3, 0.7, 0.0], atol=0.03)
  assert set(np.unique(found[:, :3])) == {0.0, 1.0}
  for grade in (found[:, 3], found[:, 4]):
    for level in range(9):
      assert np.mean(np.abs(grade - level * LEVEL) < 1e-6) == pytest.approx(NINTHS[level], abs=0.03)
  np.testing.assert_array_equal(found[:, 5:], np.broadcast_to([4.0, -3.0], (4096, 2)))


def test_numbers_that_were_only_at_levels_are_sampled_at_levels():
  stay_or_move = 0.6 * np.eye(9)[4] + 0.4 * np.eye(9)[5]
  before = [1, 0, 0, 4 * LEVEL, 4 * LEVEL, 0, 0]
  at_levels = STATISTICS | {'off_level': np.float32([0.0, 0.5])}
  found = sample([1.0, 0.0, 0.0], stay_or_move, before, at_levels)
  assert set(np.unique(found[:, 3])) == {4 * LEVEL, 5 * LEVEL}
  assert np.mean(found[:, 3] == 5 * LEVEL) == pytest.approx(0.4, abs=0.03)
  np.testing.assert_allclose(found[:, 4], 4.4 * LEVEL, rtol=1e-5)  # some lay between levels


@pytest.mark.parametrize(('before', 'after'), [(0.0, 0.1), (0.9, 0.8), (0.3, 0.35)])
def test_fraction_that_may_change_stays_or_is_what_it_changes_to(before, after):
  """An average, such as half of what is gained, would be an amount that never occurs."""
  kind = numbers_lib.Levels(np.arange(1), np.zeros(1, np.float32), 1 / 8, 9, is_exact=False)
  two_hot = lambda x: np.maximum(0, 1 - np.abs(8 * x - np.arange(9)))[None].astype(np.float32)
  was = np.float32([before])
  predicted = numbers_lib.Level(np.float32([0.7]), was, two_hot(before), two_hot(after))
  statistics = {'off_level': np.ones(1, np.float32)}
  draw = jax.jit(lambda noise: kind.sample(predicted, was, statistics, noise))
  found = np.asarray(draw(UNIFORM[:, None]))[..., 0, 0]
  assert np.mean(np.abs(found - before) < 1e-5) == pytest.approx(0.7, abs=2e-3)
  assert np.mean(np.abs(found - after) < 1e-5) == pytest.approx(0.3, abs=2e-3)
  np.testing.assert_allclose(kind.expected(predicted, statistics), before, atol=1e-6)


UNIFORM = ((np.arange(1000) + 0.5) / 1000)[:, None].astype(np.float32)
occurs = jax.jit(lambda probability: numbers_lib.occurs(probability, UNIFORM))


@pytest.mark.parametrize(
  ('probability', 'least', 'most'),
  [
    ([0.25] * 4, 1, 1),  # a thing enters one of four cells
    ([0.5, 0.3, 0.9], 1, 2),
    ([0.001] * 200, 0, 200),  # rare changes occur together, so that they are rare
    ([0.005] * 200, 1, 1),  # a thing appears in one of many cells
  ],
)
def test_events_have_their_probabilities_and_nearly_the_same_number(probability, least, most):
  found, share = map(
    np.asarray, occurs(np.broadcast_to(np.float32(probability), (1000, len(probability))))
  )
  np.testing.assert_allclose(found.mean(axis=0), probability, atol=2e-3)
  assert (found.sum(axis=1).min(), found.sum(axis=1).max()) == (least, most)
  assert ((share[found] >= 0) & (share[found] < 1)).all()
  for event in np.flatnonzero(np.asarray(probability) > 0.1):
    assert share[found[:, event], event].mean() == pytest.approx(0.5, abs=0.02)


def test_number_that_ends_and_one_that_begins_change_together():
  before = [1, 0, 0, 4 * LEVEL, 4 * LEVEL, 0, 0]
  found = sample([0.7, 0.3, 0.0], 0.7 * np.eye(9)[4] + 0.3 * np.eye(9)[7], before)
  changed = found[:, :5] != np.asarray(before[:5])
  assert np.mean(changed[:, 0]) == pytest.approx(0.3, abs=0.03)
  np.testing.assert_array_equal(changed[:, 0], changed[:, 1])
  assert not changed[:, 2].any()
  assert not (changed[:, 3] & changed[:, 4]).any() and changed[:, 3:].any(axis=0).all()


def test_thing_that_may_move_is_in_one_of_two_places_that_are_read_by_level():
  moves = np.zeros((2, 9), np.float32)
  moves[:, [0, 8]] = 0.5  # of a one-hot pair of reals in [0, 1]
  pair = numbers_lib.Levels(np.arange(2), np.zeros(2, np.float32), 1 / 8, 9, is_exact=False)
  before = np.float32([1, 0])
  predicted = numbers_lib.Level(np.zeros(2, np.float32), before, moves, moves)
  draw = lambda noise: pair.sample(predicted, before, {'off_level': np.zeros(2)}, noise)
  found = np.asarray(jax.jit(draw)(UNIFORM[:, None])).reshape(-1, 2)
  assert (found.sum(axis=1) == 1).all()
  assert found[:, 0].mean() == pytest.approx(0.5, abs=2e-3)


def test_copy_has_no_bound_in_samples():
  copies = outputs(gate=30.0, bits=(-30.0, 30.0, -30.0))
  assert judge(copies, READ).bits[0][0] == pytest.approx(1 - numbers_lib.MAX_COPY, rel=0.01)
  unbounded = jax.jit(lambda *arguments: NUMBERS.predict(*arguments, STATISTICS, max_copy=1.0)[0])
  assert unbounded(copies, READ, True)[0][0] == 0


def test_differences_tell_wrong_numbers_from_rounding():
  compiled = jax.jit(NUMBERS.differences)

  def change(index, by):
    changed = np.array(READ)
    changed[index] += by
    return compiled(READ, changed, STATISTICS)

  for index, right, wrong in ((0, -0.4, -0.6), (3, 0.4 * LEVEL, 0.6 * LEVEL)):
    assert [bool(change(index, by)[0]) for by in (right, wrong)] == [False, True]
  is_wrong, error = change(5, 3.0)  # a standard deviation of 2, one of two real numbers
  assert not is_wrong and error == pytest.approx(1.5 / 2, rel=1e-3)
