"""The world model: inputs of its latents, the terms of its loss, and gradients of its modules."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from dm_env import specs
from small_dreamer import ALONE, random_features

from hephaestus.actors.environments import environment
from hephaestus.agents import networks
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import modules, rssm, world_model
from hephaestus.agents.dreamer import novelty as novelty_lib
from hephaestus.agents.dreamer import numbers as numbers_lib

NUM_MEMBERS = 3
KEYS = jax.random.split(jax.random.key(5), 3)
OTHER_KEYS = jax.random.split(jax.random.key(7), 3)


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('masked')


@pytest.fixture(scope='module')
def model(dreamer):
  return dreamer.model


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return modules.world(make_params(dreamer))


@pytest.fixture(scope='module')
def fresh(fresh_params):
  return modules.world(fresh_params())


@pytest.fixture(scope='module')
def sequence(dreamer, make_sequence):
  return make_sequence(dreamer)


@pytest.fixture(scope='module')
def judged(model, params, judge):
  """(sequence, keys) -> loss, posterior, gradients and so on, with the parameters above."""
  return lambda sequence, keys=KEYS, **options: judge(model, params, keys, sequence, **options)


@pytest.fixture(scope='module')
def latents(judged):
  """A sequence to inputs of its decoder, as one array [T, B, H + Z + C]."""
  return lambda sequence, keys=KEYS: belief(judged(sequence, keys).posterior)


def with_values(x, index, value):
  """A copy of an array with other values at an index."""
  changed = np.array(x)
  changed[index] = value
  return changed


def disturbed(tree, steps, streams=slice(None)):
  """The same tree [T, B, ...] with other numbers at some steps."""
  at = steps, streams
  return jax.tree.map(lambda x: with_values(x, at, ~x[at] if x.dtype == bool else x[at] + 1), tree)


def belief(posterior):
  """States and inputs of transitions, [T, B, H + Z + C]."""
  latent = posterior.latent
  return np.concatenate([latent.deterministic, latent.stochastic, posterior.previous], axis=-1)


def trained(params):
  untrained = ('numbers', 'average_change')
  return {name: params[name] for name in params if name not in untrained}


def size(tree):
  return sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(tree))


# Initial parameters.


@pytest.mark.parametrize('name', modules.MEMBERS)
def test_members_are_initialised_independently(fresh, name):
  for layer, leaves in fresh[name].items():
    assert all(leaf.shape[0] == NUM_MEMBERS for leaf in leaves.values())
    if 'kernel' in leaves:
      kernels = np.asarray(leaves['kernel'])
      for k in range(1, NUM_MEMBERS):
        assert np.abs(kernels[k] - kernels[0]).mean() > 0.01, layer


def test_independent_members_disagree_and_copies_of_one_do_not(model, fresh, sequence, judge):
  copied = fresh | {
    name: jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), fresh[name])
    for name in (*modules.MEMBERS, modules.AVERAGE_CHANGE)
  }
  gain = jax.jit(lambda priors: novelty_lib.novelty_of('information_gain', priors.moments()))
  novelty = lambda params: np.asarray(gain(judge(model, params, KEYS, sequence).posterior.priors))
  # At a FIRST step the state is zero, so fresh members agree.
  first = sequence.step_type == rssm.FIRST
  assert (novelty(fresh)[~first] > 1e-3).all()
  np.testing.assert_allclose(novelty(copied), 0, atol=1e-5)


def test_parameters_are_float32_and_only_members_are_stacked(dreamer, param_shapes):
  params = param_shapes(dreamer)['world_model']
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  assert sorted(params) == [
    'change', 'continue', 'decoder', 'encoder', 'mask', 'posterior', 'prior', 'recurrence', 'reward',
  ]  # fmt: skip
  assert params['posterior']['kernel'].shape == (8 + 16, 16)
  for name in ('prior', 'change'):
    assert params[name]['Dense_0']['kernel'].shape == (NUM_MEMBERS, 8 + 4 + 16, 16)
  # A state of 8, an action of 4 and the embedding of the numbers, of 16.
  assert params['recurrence']['kernel'].shape == (8 + 4 + 16, 3 * 8)


def test_without_a_mask_there_is_no_mask_head_and_all_actions_are_legal(make_dreamer, param_shapes):
  dreamer = make_dreamer('continuous')
  model = dreamer.model
  assert 'mask' not in param_shapes(dreamer)['world_model']
  mask = model.action_mask({}, model.networks.empty_features(2, 3))
  assert mask.shape == (2, 3, 2) and mask.all()


def test_fresh_heads_predict_zero_reward_and_an_uncertain_discount(dreamer, model, fresh):
  features = random_features(dreamer, np.random.default_rng(1), 4)

  @jax.jit
  def predict(params, features):
    return model.reward(params, features).mean(), model.discount(params, features)

  reward, discount = predict(fresh, features)
  np.testing.assert_array_equal(reward, np.zeros(4))
  assert (np.asarray(discount) > 0.02).all() and (np.asarray(discount) < 0.98).all()


# Inputs of a latent.


def test_latents_after_first_do_not_depend_on_the_last_episode(sequence, latents):
  before = latents(sequence)
  # FIRST steps: 0 and 4 of stream 0, 3 of stream 1, none of stream 2.
  for stream, first in ((0, 4), (1, 3)):
    steps = slice(0, first)
    changed = sequence._replace(
      observation=disturbed(sequence.observation, steps, stream),
      action=with_values(sequence.action, (steps, stream), 2 - sequence.action[steps, stream]),
      initial_state=jax.tree.map(
        lambda x: with_values(x, slice(2), np.nan), sequence.initial_state
      ),
    )
    after = latents(changed)
    np.testing.assert_array_equal(after[first:, stream], before[first:, stream])
    # At step 0 only a sample can differ.
    assert (after[1:first, stream] != before[1:first, stream]).any(-1).all()


def test_stored_state_is_read_by_sequences_that_begin_within_an_episode(sequence, latents):
  before = latents(sequence)
  for part in ('deterministic', 'numbers', 'action'):  # z is not, without images
    initial = sequence.initial_state
    if part == 'action':
      initial = initial._replace(action=initial.action + 1)
    else:
      latent = initial.latent._replace(**{part: getattr(initial.latent, part) + 1})
      initial = initial._replace(latent=latent)
    after = latents(sequence._replace(initial_state=initial))
    changed = np.abs(after - before).max(-1) > 0
    assert not changed[:, 0].any()  # begins with FIRST
    assert changed[:3, 1].all() and not changed[3:, 1].any()
    assert changed[:, 2].all()


def test_sequence_model_reads_no_latents_without_images(sequence, judged):
  """Without images z has no information beyond the numbers; a test below has images."""
  one, other = (judged(sequence, keys).posterior.latent for keys in (KEYS, OTHER_KEYS))
  assert (one.stochastic != other.stochastic).any()
  np.testing.assert_array_equal(one.deterministic, other.deterministic)


def test_latent_depends_on_the_previous_action_and_not_on_its_own(sequence, judged):
  other = sequence._replace(action=with_values(sequence.action, (2, 2), 3))
  before, after = (judged(each).posterior for each in (sequence, other))
  # Both the recurrent state and the belief, which also reads the inputs of the transition, differ.
  states = [x.latent.deterministic for x in (before, after)]
  for one, another in (states, [belief(before), belief(after)]):
    changed = np.abs(another - one).max(-1) > 0
    np.testing.assert_array_equal(changed[:, 2], [False, False, False, True, True, True])
    assert not changed[:, :2].any()


def test_posterior_depends_on_its_own_observation_and_on_no_later_one(sequence, judged):
  means = lambda sequence: judged(sequence).posterior.belief.log_probs
  observation = disturbed(sequence.observation, 2, 2)
  difference = np.abs(means(sequence._replace(observation=observation)) - means(sequence))
  changed = difference.max((-2, -1)) > 0
  np.testing.assert_array_equal(changed[:, 2], [False, False, True, True, True, True])


def test_latent_does_not_depend_on_mask_reward_or_discount(sequence, latents):
  before = latents(sequence)
  observation = sequence.observation | {'action_mask': ~sequence.observation['action_mask']}
  changed = sequence._replace(
    observation=observation, reward=sequence.reward + 1, discount=1 - sequence.discount
  )
  np.testing.assert_array_equal(latents(changed), before)


# The loss.

bootstrap_mask = jax.jit(world_model.bootstrap_mask, static_argnums=1)


def test_every_module_and_member_has_a_gradient_at_the_start(model, fresh, sequence, judge):
  learns = bootstrap_mask(sequence.identity, NUM_MEMBERS)
  assert (learns.sum(1) > 0).all()
  grads = judge(model, fresh, KEYS, sequence).grads
  for name in trained(fresh):
    assert size(grads[name]) > 1e-4, name
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[name]))
  for name, k in itertools.product(modules.MEMBERS, range(NUM_MEMBERS)):
    assert size(jax.tree.map(lambda x, k=k: x[k], grads[name])) > 1e-4, (name, k)


def test_every_layer_has_a_gradient_when_heads_are_not_zero(sequence, judged):
  grads = judged(sequence).grads
  for path, leaf in jax.tree_util.tree_leaves_with_path(trained(grads)):
    assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)
  assert size(grads['numbers']) == size(grads['average_change']) == 0


def test_member_has_no_gradient_from_sequences_outside_its_bootstrap(sequence, judged):
  identity = np.arange(1000, dtype=np.uint32)
  learns = np.asarray(bootstrap_mask(identity, NUM_MEMBERS))
  wanted = np.array([1.25, 0.0, 1.25], np.float32)
  chosen = identity_of(True, False, True)
  assert (learns[:, identity == chosen] == wanted[:, None]).all()
  grads = judged(sequence._replace(identity=np.full(3, chosen, np.uint32))).grads
  for name, k in itertools.product(modules.MEMBERS, range(NUM_MEMBERS)):
    magnitude = size(jax.tree.map(lambda x, k=k: x[k], grads[name]))
    assert (magnitude > 0) == (wanted[k] > 0)


def test_reward_of_a_first_step_is_not_learned(sequence, judged):
  first = sequence.step_type == rssm.FIRST
  loss = lambda where: (
    judged(sequence._replace(reward=sequence.reward + np.where(where, np.float32(2), 0))).loss
  )
  assert loss(first) == loss(np.zeros_like(first))
  assert loss(~first) != loss(np.zeros_like(first))


def test_continue_head_learns_termination_and_not_truncation(sequence, judged):
  """Step 3 of stream 0 terminates, step 2 of stream 1 is truncated; only the first has target 0."""

  def push(discount):
    """Gradient of the loss by the continue head's bias; positive where episodes terminate."""
    grads = judged(sequence._replace(discount=discount)).grads
    return float(grads['continue']['rest']['Dense_0']['bias'][0])

  continues = np.ones_like(sequence.discount)
  assert push(continues) < 0 < push(0 * continues)
  difference = push(sequence.discount) - push(continues)
  np.testing.assert_allclose(difference, 2 / continues.size, rtol=1e-3)  # of two readings


def identity_of(*learns):
  """Identity of a sequence that just those members learn from."""
  identity = np.arange(1000, dtype=np.uint32)
  masks = np.asarray(bootstrap_mask(identity, NUM_MEMBERS)) > 0
  return identity[(masks == np.array(learns)[:, None]).all(0)][0]


def test_heads_also_learn_from_the_observation_alone(model, params, sequence, judged):
  """So they recognise the reward of an observation whatever the state beside it."""
  found = judged(sequence)
  features = jax.tree.map(jnp.asarray, found.posterior.features)
  alone = model.networks.of_observation(features)
  assert not alone.state.any() and not alone.transition.any()
  np.testing.assert_array_equal(alone.numbers, features.numbers)

  def loss(read):
    log_prob = model.reward(params, read).log_prob(jnp.asarray(sequence.reward))
    return float(jnp.mean(jnp.where(found.posterior.first, 0.0, -log_prob)))

  losses = loss(features), loss(alone)
  assert losses[0] != losses[1]
  assert found.metrics['reward'] == pytest.approx(sum(losses), rel=1e-4)


def test_loss_weighs_reward_and_divergence(sequence, judged):
  """Sequences that every member learns from count 1 / 0.8 times in its divergence and changes."""
  everyone = np.full(3, identity_of(True, True, True), np.uint32)
  found = judged(sequence._replace(identity=everyone))
  metrics = found.metrics
  heads = metrics['reconstruction'] + metrics['continue'] + metrics['mask']
  divergence = found.loss - heads - 3 * metrics['reward'] - metrics['change']
  np.testing.assert_allclose(divergence, (1 / 0.8 + 0.1) * metrics['kl'], rtol=1e-3)


def test_free_nats_clip_the_loss_of_the_posterior_and_not_of_the_priors(
  make_dreamer, sequence, judged
):
  """Priors that stopped learning below the free nats would disagree, and give false novelty."""
  divergence = jax.jit(make_dreamer(free_nats=200.0).model._kl)
  kl, loss = divergence(judged(sequence).posterior, np.ones((NUM_MEMBERS, 3), np.float32))
  assert 0 < np.mean(kl) < 100
  np.testing.assert_allclose(np.mean(loss), np.mean(kl) + 0.1 * 200, rtol=1e-4)


@pytest.fixture(scope='module')
def reconstruct(model, params, sequence, judge):
  """(outputs of the decoder, purse before) -> mean reconstruction loss of constant observations.

  The board has the levels 0, 8, 4 and 8, the purse holds log 8, in a scale of 1.
  """
  board = np.broadcast_to(np.array([[0.0, 1.0], [0.5, 1.0]], np.float32), (6, 3, 2, 2))
  carried = sequence.initial_state
  numbers = np.broadcast_to(np.array([0.0, 1.0, 0.5, 1.0, np.log(8)], np.float32), (3, 5))
  sequence = sequence._replace(
    observation=sequence.observation | {'board': board, 'purse': np.full((6, 3), 7, np.int32)},
    initial_state=carried._replace(latent=carried.latent._replace(numbers=numbers)),
  )
  one = np.ones(1, np.float32)
  mean = np.float32(np.log(8)) * one
  statistics = {'mean': mean, 'variance': one, 'error': one, 'count': one[0]}

  def run(gate, levels, change):
    decoder = jax.tree.map(np.zeros_like, params['decoder'])
    outputs = np.concatenate([[gate] * 4, np.ravel(levels), [change]])
    decoder['Dense_1']['bias'] = np.asarray(outputs, np.float32)
    changed = params | {'decoder': decoder, 'numbers': params['numbers'] | statistics}
    return float(judge(model, changed, KEYS, sequence).metrics['reconstruction'])

  return run


def test_reconstruction_loss_is_zero_for_a_perfect_decoder_and_exact_for_others(reconstruct):
  right = 30 * np.eye(9)[[0, 8, 4, 8]]
  np.testing.assert_allclose(reconstruct(-30, right, 0), 0, atol=1e-5)
  np.testing.assert_allclose(reconstruct(-30, right, 2), np.log(1 + 4 / 2), rtol=1e-3)
  unsure, wrong = right.copy(), right.copy()
  unsure[3], wrong[3] = 0, 10 * np.eye(9)[0]
  np.testing.assert_allclose(reconstruct(-30, unsure, 0), np.log(9), rtol=1e-4)
  np.testing.assert_allclose(reconstruct(-30, wrong, 0), 10, rtol=1e-4)


def test_numbers_that_stay_are_copied_but_at_first_steps(reconstruct):
  """Three of 18 steps are FIRST."""
  unsure = reconstruct(30, np.zeros((4, 9)), 0)
  copied = -4 * np.log(0.999 + 0.001 / 9)
  np.testing.assert_allclose(unsure, (15 * copied + 3 * 4 * np.log(9)) / 18, rtol=1e-4)


def test_numbers_before_a_sequence_come_from_the_stored_state(sequence, judged):
  """Streams 1 and 2 begin within an episode, stream 0 begins with FIRST."""

  def reconstruction(stream):
    carried = sequence.initial_state
    at = stream, -1
    numbers = with_values(carried.latent.numbers, at, carried.latent.numbers[at] + 1)
    changed = carried._replace(latent=carried.latent._replace(numbers=numbers))
    return float(judged(sequence._replace(initial_state=changed)).metrics['reconstruction'])

  unchanged = reconstruction(slice(3, 3))
  assert reconstruction(0) == unchanged
  assert reconstruction(1) != unchanged != reconstruction(2)


def test_predicted_changes_train_nothing_but_themselves(params, sequence, judged):
  """They serve novelty; with a gradient into the state they would compete with what is decoded."""
  grads = judged(sequence, only_change=True).grads
  assert {name for name in params if size(grads[name]) > 0} == {'change'}


def test_change_of_a_first_step_is_neither_learned_nor_counted(model, params, sequence, judge):
  """No transition leads to it: whatever it shows, loss and moments stay."""
  fresh = jax.device_get(model.networks.numbers.initial_statistics())
  params = params | {'numbers': fresh}
  unrelated = sequence._replace(step_type=np.zeros_like(sequence.step_type))
  found = judge(model, params, KEYS, unrelated)
  assert found.metrics['change'] == 0
  np.testing.assert_allclose(found.moments['change'], fresh['change'], rtol=1e-6)
  found = judge(model, params, KEYS, sequence)
  assert found.metrics['change'] > 0 and np.abs(found.moments['change'] - 1).min() > 0


def test_observation_that_never_changes_has_a_finite_loss_of_changes(
  model, params, sequence, judge
):
  carried = sequence.initial_state
  constant = sequence._replace(
    observation=jax.tree.map(np.zeros_like, sequence.observation),
    initial_state=carried._replace(
      latent=carried.latent._replace(numbers=np.zeros((3, 5), np.float32))
    ),
  )
  unchanged = np.zeros(numbers_lib.NUM_PROJECTIONS, np.float32)
  still = params['numbers'] | {'change': unchanged}
  found = judge(model, params | {'numbers': still}, KEYS, constant, only_change=True)
  assert np.isfinite(found.metrics['change']) and (found.moments['change'] == 0).all()
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.grads))


def test_value_loss_is_part_of_the_loss_and_trains_latents(model, params, sequence, judged):
  """Its gradient reaches whatever the features depend on: not decoder and heads, nor the posterior."""
  found, without = judged(sequence, value=2.0), judged(sequence)
  value = 2 * np.sum(found.posterior.features.state)
  np.testing.assert_allclose(found.loss - without.loss, value, rtol=1e-3)
  difference = jax.tree.map(np.subtract, found.grads, without.grads)
  assert {name for name in params if size(difference[name])} == {'encoder', 'recurrence'}


def test_mask_head_learns_the_mask_of_its_step(sequence, judged):
  """Descent raises the mask head's bias where all actions are legal, lowers it where none is."""
  name = observation_lib.ACTION_MASK
  mask = lambda legal: {name: np.full_like(sequence.observation[name], legal)}
  bias = lambda legal: judged(
    sequence._replace(observation=sequence.observation | mask(legal))
  ).grads['mask']['rest']['Dense_0']['bias']
  assert (bias(True) < 0).all() and (bias(False) > 0).all()


# Images.


@pytest.fixture(scope='module')
def pictures(make_dreamer, make_params, make_sequence, judge):
  """(model, params, sequence, (params, sequence) -> Judged) for an environment with images."""
  dreamer = make_dreamer('pictures')
  params = modules.world(make_params(dreamer))
  step = lambda params, sequence: judge(dreamer.model, params, KEYS, sequence)
  return dreamer.model, params, make_sequence(dreamer), step


def test_gradient_reaches_every_parameter_of_encoder_and_decoder(pictures):
  _, params, sequence, step = pictures
  grads = step(params, sequence).grads
  for name in ('image_encoder', 'image_decoder'):
    convolutions = [layer for layer in grads[name] if layer.startswith('Conv')]
    assert len(convolutions) == 2, sorted(grads[name])  # two images, a stage each
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads[name]):
      assert np.abs(leaf).max() > 0, (name, jax.tree_util.keystr(path))


def test_loss_of_an_image_sums_over_its_numbers(pictures):
  model, _, sequence, _ = pictures
  codec = model.networks.codec
  observation = jax.tree.map(lambda x: x[0, 0], sequence.observation)
  pixels, planes = jax.device_get(jax.jit(codec.encode)(observation)[1:])
  right = 60 * planes - 30
  image_loss = jax.jit(lambda *decoded: codec.image_loss(decoded, [pixels, planes]))
  loss = lambda *decoded: float(image_loss(*decoded))
  np.testing.assert_allclose(loss(pixels, right), 0, atol=1e-4)
  wrong = np.array(pixels)
  wrong[[0, 8], [0, 10], [0, 2]] += [0.5, 2]
  np.testing.assert_allclose(loss(wrong, right), 0.25 + 4, rtol=1e-4)
  unsure = with_values(right, (-1, -1, -1), 0)
  np.testing.assert_allclose(loss(pixels, unsure), np.log(2), rtol=1e-4)


@pytest.fixture(scope='module')
def frames(make_dreamer, make_params, make_sequence, judge):
  """(params, keys -> Judged) of only images, with Gaussian latents in bfloat16."""
  dreamer = make_dreamer('frames', latent='gaussian', compute_dtype='bfloat16')
  params, sequence = modules.world(make_params(dreamer)), make_sequence(dreamer)
  return params, lambda keys: judge(dreamer.model, params, keys, sequence)


def test_environment_of_only_images_has_no_numbers_to_carry(frames):
  params, judged = frames
  assert not {'encoder', 'decoder'} & set(params) and set(params['numbers']) == {'count'}
  posterior = judged(KEYS).posterior
  assert posterior.latent.numbers.shape == (6, 3, 0)
  features = np.concatenate([posterior.features.state, posterior.features.transition], axis=-1)
  np.testing.assert_array_equal(features, belief(posterior))


def test_every_module_has_a_gradient_with_gaussian_latents_in_bfloat16(frames):
  params, judged = frames
  found = judged(KEYS)
  assert np.isfinite(found.loss)
  for name in trained(params):
    assert size(found.grads[name]) > 1e-4, name


def test_sequence_model_reads_latents_where_there_are_images(frames):
  one, other = (frames[1](keys).posterior.latent for keys in (KEYS, OTHER_KEYS))
  assert (one.stochastic != other.stochastic).any()
  assert (one.deterministic != other.deterministic).any()


def test_units_have_geometric_time_constants():
  kept = networks.gru(jnp.zeros((1, 9)), jnp.ones((1, 3)), 50)
  np.testing.assert_allclose(kept[0], 1 - 1 / np.array([2, 10, 50]), rtol=1e-5)


# Bootstrap.


def test_bootstrap_depends_only_on_identity():
  identity = np.array([5, 9, 5, 2**32 - 1], np.uint32)
  mask, other = (np.asarray(bootstrap_mask(ids, 4)) for ids in (identity, identity[[1, 1, 1, 1]]))
  assert mask.shape == (4, 4)
  np.testing.assert_array_equal(mask[:, 0], mask[:, 2])
  np.testing.assert_array_equal(mask[:, 1:2], other[:, :1])


def test_bootstrap_selects_its_share_for_each_member_and_has_mean_one():
  mask = np.asarray(bootstrap_mask(np.arange(4000, dtype=np.uint32), 5))
  np.testing.assert_allclose(np.unique(mask), [0, 1.25])
  np.testing.assert_allclose(mask.mean(1), np.ones(5), atol=0.04)  # five standard deviations
  for k in range(1, 5):  # independent members agree on 0.68 of all sequences
    np.testing.assert_allclose((mask[k] == mask[0]).mean(), 0.68, atol=0.04)


def test_single_member_learns_from_all_sequences():
  mask = bootstrap_mask(np.arange(100, dtype=np.uint32), 1)
  np.testing.assert_array_equal(mask, np.ones((1, 100)))


# Precision, and the other latent.


def test_bfloat16_latents_have_float32_losses_and_gradients(
  make_dreamer, make_params, make_sequence
):
  dreamer = make_dreamer('masked', compute_dtype='bfloat16')
  model, params = dreamer.model, modules.world(make_params(dreamer))
  sequence = make_sequence(dreamer)
  gradient = jax.value_and_grad(model.loss, has_aux=True)
  (loss, aux), grads = jax.eval_shape(gradient, params, KEYS, sequence)
  posterior, expected_rewards, moments, metrics = aux
  low = (posterior.latent.deterministic, posterior.latent.stochastic, *posterior.features)
  assert {x.dtype for x in low} == {jnp.dtype(jnp.bfloat16)}
  observed = (posterior.latent.numbers, moments)
  float32 = (
    params,
    loss,
    expected_rewards,
    metrics,
    grads,
    posterior.belief,
    posterior.priors,
    observed,
  )
  assert {leaf.dtype for leaf in jax.tree.leaves(float32)} == {jnp.dtype('float32')}
  heads = lambda features: (
    model.reward(params, features).mean(),
    model.discount(params, features),
  )
  features = jax.eval_shape(lambda: model.networks.empty_features(2))
  assert {head.dtype for head in jax.eval_shape(heads, features)} == {jnp.dtype('float32')}


def test_prior_reads_the_previous_action_and_numbers(model, params):
  """Prior and decoder are then equally certain of what follows from these inputs."""
  state = jnp.full((4, 8), 0.3)
  previous = jnp.zeros((4, 4 + 16)).at[1, 0].set(1.0).at[2, 3].set(1.0).at[3, 4 + 7].set(1.0)
  priors = jax.jit(model.rssm.prior)(params, state, previous, jnp.zeros(4, bool))
  means, _ = priors.belief.moments()
  for i in (1, 2, 3):
    assert (jnp.abs(means[:, i] - means[:, 0]).max(-1) > 1e-2).all()


def test_moments_equal_each_members_prior(model, params, sequence, judged):
  """The moments of the numbers' changes are included."""
  posterior = judged(sequence).posterior

  @jax.jit
  def imagine(params, latent, action):
    """Step 3, again, from step 2."""
    recurrent = rssm.Recurrent(latent, model.networks.actions.encode(action))
    noise = rssm.Noise(jnp.full((3, 4), 0.5), jnp.full(3, 0.5), jnp.full(3, 0.5))
    member, matrices = jnp.zeros(3, jnp.int32), model.rssm.matrices(params)
    imagined = model.rssm.imagine(params, matrices, recurrent, member, noise)
    return imagined, imagined.priors.belief.moments()

  moments = jax.jit(lambda priors: priors.moments())(posterior.priors)
  (means, variances, _), (changes, noise, usual) = jax.device_get(moments)
  assert usual == 1  # the mean square of changes
  assert means.shape == variances.shape == (NUM_MEMBERS, 6, 3, 12)
  assert changes.shape == noise.shape == (NUM_MEMBERS, 6, 3, numbers_lib.NUM_PROJECTIONS)
  latent = jax.tree.map(lambda x: x[2], posterior.latent)
  found = jax.device_get(imagine(params, latent, sequence.action[2]))
  (imagined, moments), prior = found, found[0].priors
  close = {'rtol': 1e-4, 'atol': 1e-5}
  # Stream 2, whose step 3 is not FIRST.
  states = imagined.latent.deterministic[2], posterior.latent.deterministic[3, 2]
  np.testing.assert_allclose(*states, **close)
  np.testing.assert_allclose(imagined.previous[2], posterior.previous[3, 2], **close)
  for one, expected in zip(moments, (means, variances), strict=True):
    np.testing.assert_allclose(one[:, 2], expected[:, 3, 2], **close)
  np.testing.assert_allclose(prior.change.mean[:, 2], changes[:, 3, 2], **close)
  np.testing.assert_allclose(np.minimum(prior.change.variance[:, 2], 1), noise[:, 3, 2], **close)
  assert noise.max() == usual
  spread = np.ptp(changes, axis=0).max(-1)
  first = sequence.step_type == rssm.FIRST
  assert (spread[~first] > 1e-3).all() and (spread[first] == 0).all()  # members differ


# Statistics of numbers.


def test_novelty_reads_a_moving_average_of_the_networks_of_changes(model, params, sequence, judged):
  statistics = {name: params[name] for name in ('numbers', 'average_change')}
  follow = jax.jit(functools.partial(model.averages, batch=ALONE))
  followed = follow(params, statistics, judged(sequence).moments)
  expected = jax.tree.map(
    lambda old, new: 0.98 * old + 0.02 * new, params['average_change'], params['change']
  )
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
    followed['average_change'],
    expected,
  )
  priors = judged(sequence).posterior.priors
  state, previous = (getattr(judged(sequence).posterior, name) for name in ('latent', 'previous'))
  same = params | {'change': params['average_change']}
  change = jax.jit(model.rssm.change)(same, state.deterministic, previous)
  where = sequence.step_type != rssm.FIRST
  np.testing.assert_allclose(
    priors.change.mean[:, where], np.asarray(change.mean)[:, where], rtol=1e-3, atol=1e-4
  )


def test_loss_gives_the_moments_that_statistics_follow(model, params, sequence, judged):
  moments = judged(sequence).moments
  purse = np.log1p(np.asarray(sequence.observation['purse'], np.float32))
  np.testing.assert_allclose(moments['mean'], [purse.mean()], rtol=1e-5)
  mean = params['numbers']['mean'][0]
  np.testing.assert_allclose(moments['variance'], [np.square(purse - mean).mean()], rtol=1e-4)
  assert 0 < moments['error'][0] <= 1
  fresh = {
    'numbers': model.networks.numbers.initial_statistics(),
    'average_change': params['average_change'],
  }
  follow = jax.jit(functools.partial(model.averages, batch=ALONE))
  followed = follow(params, fresh, moments)['numbers']
  shifted = moments['variance'] - np.square(moments['mean'])  # from the mean so far, 0
  for name, expected in {**moments, 'variance': np.maximum(shifted, 0), 'count': 1}.items():
    np.testing.assert_allclose(followed[name], expected, rtol=1e-5)


def test_features_hold_memory_inputs_of_the_numbers_and_of_the_transition(make_dreamer):
  """They also hold the observed view of the numbers, but without images no stochastic state."""
  spec = environment.ViewSpec((3,), np.float32, -4, 4, lambda x: jnp.square(x[1:]))
  config = make_dreamer('masked').config
  model = registry.make_dreamer(config, spec, specs.DiscreteArray(3)).model
  rng = np.random.default_rng(0)
  normal = lambda size: rng.normal(size=(6, 3, size)).astype(np.float32)
  deterministic, stochastic, observation, previous = map(normal, (8, 12, 3, 3 + 16))
  statistics = jax.device_get(model.networks.numbers.initial_statistics())

  @jax.jit
  def features(observation):
    numbers = model.networks.numbers.read(observation)
    latent = rssm.Latent(deterministic, stochastic, numbers)
    return model.rssm.features({'numbers': statistics}, latent, previous)

  found = jax.device_get(features(observation))
  assert [part.shape for part in found] == [
    (6, 3, size) for size in (8, 3 * (1 + 33) + 2, 3 + 16, 0, 0, 0, 0, 0)
  ]
  np.testing.assert_array_equal(found.state, deterministic)
  view = found.numbers[..., -2:]
  np.testing.assert_allclose(view, np.square(observation[..., 1:]), rtol=1e-4)
  np.testing.assert_array_equal(found.transition, previous)


def test_inputs_of_a_transition_are_from_the_previous_step_and_zero_at_first(sequence, judged):
  previous = judged(sequence).posterior.previous
  first = sequence.step_type == rssm.FIRST
  assert not previous[first].any()
  action = np.eye(4)[sequence.action[:-1]]
  expected = np.where(first[1:, :, None], 0, action)
  np.testing.assert_array_equal(previous[1:, :, :4], expected)
  assert np.ptp(previous[1:, :, 4:], axis=0).max() > 0.01  # the numbers of the step before


@pytest.mark.parametrize('low', [0, -1])
def test_dreams_of_bits_do_not_read_the_latent_and_those_of_real_numbers_do(low, make_params):
  """On fresh steps the prior's z misleads the decoder, and what is drawn of bits needs none."""
  spec = specs.BoundedArray((5,), np.float32, low, 1)
  made = registry.make_dreamer(
    cognition_config.CognitionConfig(**tiny.DREAMER), spec, specs.DiscreteArray(3)
  )
  model, world = made.model, modules.world(make_params(made))
  assert model.networks.draws_without_latent == (low == 0)

  @jax.jit
  def imagine(world, noise):
    before = model.rssm.initial(8)
    member, matrices = jnp.zeros(8, jnp.int32), model.rssm.matrices(world)
    return model.rssm.imagine(world, matrices, before, member, noise).latent

  draw = lambda seed: jax.vmap(model.rssm.imagined_noise)(jax.random.split(jax.random.key(seed), 8))
  one, other = imagine(world, draw(0)), imagine(world, draw(0)._replace(latent=draw(1).latent))
  assert np.any(one.stochastic != other.stochastic)
  assert np.any(one.numbers != other.numbers) == (low < 0)
