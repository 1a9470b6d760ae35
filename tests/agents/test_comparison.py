"""Dreams compared with reality: which steps are compared, what is counted, and what each step depends on."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.dreamer import comparison, modules, rssm

NUM_STEPS, BATCH, LENGTH, CONTEXT = 6, 3, 3, 3
FIRST, LAST = 0, 2
KEY = jax.random.key(0)
ENVS = ['masked', 'pictures']


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('masked', workspace_size=1)


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)


@pytest.fixture(scope='module')
def measure(dreamer, params):
  """(sequence, params) -> tallies by name, jitted once."""

  @jax.jit
  def compiled(params, sequence):
    return comparison.measure(dreamer, params, KEY, sequence, LENGTH)

  def run(sequence, changed=params):
    return types.SimpleNamespace(**jax.device_get(compiled(changed, sequence)))

  return run


@pytest.fixture(scope='module')
def sequence(dreamer, make_sequence):
  return make_sequence(dreamer)


def dreams(sequence):
  """Begin (t, b) of each dream, and how many steps of its episode follow, at most LENGTH."""
  step_type = np.asarray(sequence.step_type)
  for t in range(NUM_STEPS - LENGTH):
    for b in range(BATCH):
      if step_type[t, b] != LAST:
        ends = np.flatnonzero(step_type[t + 1 :, b] == LAST)
        yield t, b, min(LENGTH, ends[0] + 1 if ends.size else LENGTH)


def test_real_rewards_are_from_the_episode_in_which_the_dream_begins(measure, sequence):
  found = measure(sequence)
  assert np.isfinite(jax.tree.leaves(found.imagined)).all()
  reward = np.asarray(sequence.reward)
  limited = np.asarray(sequence.discount) > 0
  for k in range(LENGTH):
    # A time limit ends the comparison, a termination ends the rewards.
    whole = [(t, b, n) for t, b, n in dreams(sequence) if k < n or not limited[t + n, b]]
    sums = [reward[t + 1 : t + 1 + min(k + 1, n), b].sum() for t, b, n in whole]
    assert found.real.number[k] == found.imagined.number[k] == len(sums) > 0
    np.testing.assert_allclose(found.real.total[k], np.sum(sums), rtol=1e-5, atol=1e-6)


def test_ends_are_terminations_and_each_is_counted_at_its_distance(measure, sequence):
  found = measure(sequence)
  discount = np.asarray(sequence.discount)
  for k in range(LENGTH):
    reached = [discount[t + k + 1, b] for t, b, n in dreams(sequence) if k < n]
    assert found.continues.number[k] == reached.count(0)
    assert found.lasts.number[k] == len(reached) - reached.count(0)
  assert found.continues.number.sum() > 0 and found.end.number == (discount == 0).sum()


def test_nothing_beyond_the_end_of_an_episode_matters(measure, sequence):
  last = np.asarray(sequence.step_type) == LAST
  after = np.cumsum(last, axis=0) - last > 0  # the next episode
  assert after.any()
  changed = np.where(
    after & ~np.asarray(sequence.step_type == FIRST), np.float32(50), sequence.reward
  )
  begins = [t for t, b, _ in dreams(sequence) if after[t, b]]
  plain, other = measure(sequence), measure(sequence._replace(reward=changed))
  assert not begins  # else they would begin in the changed episode
  np.testing.assert_array_equal(plain.real.total, other.real.total)
  np.testing.assert_array_equal(plain.reward.total, other.reward.total)


def test_each_imagined_step_has_the_action_that_was_taken_there(measure, sequence):
  def predicted(sequence):
    found = measure(sequence)
    return found.reward.total

  # The third step's action: dreams begin at steps 0, 1 and 2, so none of them begins with it.
  action = np.array(sequence.action)
  action[3] = (action[3] + 1) % 3
  other = sequence._replace(action=action)
  changed = predicted(sequence) != predicted(other)
  assert changed.tolist() == [False, True, True]


def test_reward_of_the_observed_step_does_not_depend_on_imagined_numbers(
  dreamer, measure, params, sequence
):
  world = params['world_model']
  decoder = jax.tree.map(lambda x: x + 1, world['decoder'])
  # Of the first imagined step: later ones follow from imagined numbers by the state, too.
  before, after = (
    measure(sequence, params | {'world_model': world | {'decoder': each}})
    for each in (world['decoder'], decoder)
  )
  assert before.observed.total[0] == after.observed.total[0] != 0
  assert before.reward.total[0] != after.reward.total[0]


def test_rewards_predicted_where_there_is_none_are_relative_to_the_real_ones(
  measure, params, sequence
):
  found = measure(sequence._replace(reward=np.zeros_like(sequence.reward)))
  real = measure(sequence)
  assert real.unpaid.number == real.paid.number == np.abs(sequence.reward).sum() > 0
  assert found.unpaid.total > real.unpaid.total >= 0 and found.paid.total == 0


def test_a_model_that_copies_is_wrong_where_numbers_change(dreamer, measure, params, sequence):
  still = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), sequence.observation)
  numbers = dreamer.model.networks.numbers
  decoder = jax.tree.map(np.zeros_like, params['world_model']['decoder'])
  begin = 0  # the gates of each kind come first; a real number has none, and a change of 0
  for kind in numbers.kinds:
    if kind.num_outputs > len(kind.indices):
      decoder['Dense_1']['bias'][begin : begin + len(kind.indices)] = 30
    begin += kind.num_outputs
  copying = params | {'world_model': params['world_model'] | {'decoder': decoder}}
  assert measure(sequence._replace(observation=still), copying).wrong.total.max() == 0
  found = measure(sequence, copying).wrong
  assert found.total[0] == found.number[0] > 0  # random observations change at every step


@pytest.fixture(scope='module')
def examine(dreamer, make_params):
  """(sequence) -> Examination, jitted once."""
  params = make_params(dreamer)
  compiled = jax.jit(lambda params, sequence: comparison.examine(dreamer, params, KEY, sequence))
  return lambda sequence: jax.device_get(compiled(params, sequence))


@pytest.fixture(scope='module')
def acted(sequence):
  action = np.random.default_rng(0).integers(0, 4, sequence.action.shape, np.int32)
  return sequence._replace(action=action)


def test_another_action_is_of_another_sequence_at_the_same_step(examine, acted):
  found = examine(acted)
  assert all(x.shape == acted.reward.shape and np.isfinite(x).all() for x in found)
  assert np.abs(found.surprise - found.surprise_of_other)[1:].max() > 1e-3
  equal = acted._replace(action=np.zeros_like(acted.action))
  found = examine(equal)
  np.testing.assert_array_equal(found.surprise, found.surprise_of_other)


def test_surprise_is_of_the_step_after_the_action(examine, acted):
  reward = np.array(acted.reward)
  reward[2] += 3
  changed = acted._replace(reward=reward)
  difference = examine(acted).surprise != examine(changed).surprise
  assert difference[2].all() and not difference[[0, 1, 3, 4, 5]].any()


def test_leaves_of_equal_width_are_scrambled_apart_and_masks_stay():
  x = np.tile(np.arange(64.0, dtype=np.float32)[None, :, None], (2, 1, 3))
  mask = np.arange(64)[None, :, None] % 2 > 0
  observation = {'a': x, 'b': x, 'action_mask': mask}
  found = jax.device_get(jax.jit(comparison._scrambled)(jax.random.key(0), observation))
  np.testing.assert_array_equal(np.sort(found['a'], axis=1), x)
  assert (found['a'] != found['b']).any() and (found['a'][..., 0] != found['a'][..., 1]).any()
  np.testing.assert_array_equal(found['action_mask'], mask)


@pytest.fixture(scope='module')
def foresee(make_dreamer, make_params, make_sequence):
  """(env, context, change of (observation, action), seed of params) -> Foresight of a stream."""
  compiled = {}

  def run(env, context=CONTEXT, change=lambda *stream: stream, seed=0):
    dreamer = make_dreamer(env)
    params = make_params(dreamer, seed)
    sequence = jax.tree.map(np.array, make_sequence(dreamer))
    stream = jax.tree.map(lambda x: x[:, 0], (sequence.observation, sequence.action))
    function = compiled.setdefault(env, jax.jit(dreamer.agent.foresee))
    return jax.device_get(function(params, KEY, *change(*stream), np.int32(context)))

  return run


def differs(one, other):
  """[T] bool, steps at which two trees differ."""
  by_leaf = [
    (np.asarray(x) != np.asarray(y)).reshape(NUM_STEPS, -1).any(1)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  ]
  return np.any(by_leaf, axis=0)


@pytest.mark.parametrize('env', ENVS)
def test_prediction_depends_on_observed_steps_and_earlier_actions_only(foresee, env):
  def change_observation(step):
    def change(observation, action):
      change = lambda x: np.concatenate([x[:step], 1 - x[step : step + 1], x[step + 1 :]])
      return jax.tree.map(lambda x: change(x).astype(x.dtype), observation), action

    return change

  def change_action(step):
    def change(observation, action):
      action[step] = (action[step] + 1) % 3 if action.dtype == np.int32 else action[step] / 2
      return observation, action

    return change

  plain = foresee(env).observation
  step = np.arange(NUM_STEPS)
  change = change_observation(1)
  by_observation = [  # the most likely class of a latent may stay with some parameters
    differs(foresee(env, seed=seed).observation, foresee(env, change=change, seed=seed).observation)
    for seed in range(5)
  ]
  first, second, *rest = np.transpose(by_observation)
  assert not first.any() and second.any() and np.any(rest[CONTEXT - 2 :])
  assert not differs(plain, foresee(env, change=change_observation(CONTEXT)).observation).any()
  by_action = differs(plain, foresee(env, change=change_action(CONTEXT)).observation)
  assert not by_action[step <= CONTEXT].any()
  assert by_action[step > CONTEXT].any()


@pytest.mark.parametrize('env', ENVS)
def test_decoded_observation_has_the_least_loss(make_dreamer, make_params, make_sequence, env):
  dreamer = make_dreamer(env)
  model, sizes = dreamer.model, dreamer.model.networks
  numbers = sizes.numbers
  rng = np.random.default_rng(1)
  normal = lambda size: rng.normal(size=(NUM_STEPS, size)).astype(np.float32)
  states = normal(sizes.config.deterministic_size), normal(sizes.latent_size)
  previous = normal(sizes.previous_size)

  @jax.jit
  def losses(params, observation):
    before, first = numbers.read(observation), jnp.arange(NUM_STEPS) == 0
    latent = rssm.Latent(*states, before)
    statistics = params[modules.NUMBERS]

    def loss(observation):
      outputs, decoded = model.rssm.decoder(params, latent, previous)
      predicted = numbers.predict(outputs, before, ~first, statistics)
      loss, _ = numbers.loss(predicted, numbers.read(observation), statistics)
      return loss + sizes.codec.image_loss(decoded, sizes.codec.encode(observation)[1:])

    likeliest = model.decode(params, latent, previous, before, first)
    other = jax.tree.map(lambda x: x + 0.2, likeliest)
    return loss(likeliest), loss(other)

  observation = jax.tree.map(lambda x: x[:, 0], make_sequence(dreamer).observation)
  least, other = jax.device_get(losses(modules.world(make_params(dreamer)), observation))
  assert (other > least + 1e-3).all()


def test_imagination_carries_numbers_sampled_from_what_is_decoded(make_dreamer, make_params):
  dreamer = make_dreamer('masked')
  model, params = dreamer.model, modules.world(make_params(dreamer))
  sizes, statistics = model.networks.numbers, params[modules.NUMBERS]

  @jax.jit
  def imagine(params, numbers):
    before = model.rssm.initial(NUM_STEPS)
    before = before._replace(latent=before.latent._replace(numbers=numbers))
    noise = jax.vmap(model.rssm.imagined_noise)(jax.random.split(jax.random.key(1), NUM_STEPS))
    member, matrices = jnp.zeros(NUM_STEPS, jnp.int32), model.rssm.matrices(params)
    imagined = model.rssm.imagine(params, matrices, before, member, noise)
    outputs, _ = model.rssm.decoder(params, imagined.latent, imagined.previous)
    follows = jnp.ones(NUM_STEPS, bool)
    predicted = sizes.predict(outputs, numbers, follows, statistics, max_copy=1.0)
    sampled = sizes.sample(predicted, numbers, statistics, noise.numbers)
    return imagined.latent.numbers, sampled, sizes.expected(predicted, numbers, statistics)

  numbers = np.random.default_rng(2).uniform(size=(NUM_STEPS, sizes.size)).astype(np.float32)
  imagined, sampled, expected = jax.device_get(imagine(params, numbers))
  np.testing.assert_allclose(sampled, imagined, rtol=1e-5, atol=1e-6)
  assert np.abs(sampled - expected).max() > 0.05
