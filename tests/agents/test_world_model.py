"""The world model: inputs of its latents, the terms of its loss, and gradients of its modules."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hephaestus.agents import networks
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import intrinsic, modules, rssm, world_model
from hephaestus.agents.dreamer import numbers as numbers_lib

NUM_MEMBERS = 3
KEYS = jax.random.split(jax.random.key(5), 3)


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('masked')


@pytest.fixture(scope='module')
def model(dreamer):
  return dreamer.model


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)['world_model']


@pytest.fixture(scope='module')
def fresh(dreamer, fresh_params):
  return fresh_params(dreamer)['world_model']


@pytest.fixture(scope='module')
def sequence(dreamer, make_sequence):
  return make_sequence(dreamer)


@pytest.fixture(scope='module')
def latents(model, params, infer):
  """A sequence to inputs of its decoder, as one array [T, B, H + Z + C]."""

  def run(sequence, keys=KEYS):
    posterior = infer(model, params, keys, sequence)
    return np.asarray(belief(posterior))

  return run


@pytest.fixture(scope='module')
def loss_and_grads(model):
  """(params, keys, sequence) -> ((loss, (posterior, rewards, moments, metrics)), grads)."""
  return jax.jit(jax.value_and_grad(model.loss, has_aux=True))


def disturbed(tree, steps, streams=slice(None)):
  """The same tree [T, B, ...] with other numbers at some steps."""

  def disturb(x):
    changed = ~x if x.dtype == bool else x + 1
    return x.at[steps, streams].set(changed[steps, streams])

  return jax.tree.map(disturb, tree)


def belief(posterior):
  """States and inputs of transitions, [T, B, H + Z + C]."""
  latent = posterior.latent
  return jnp.concatenate([latent.deterministic, latent.stochastic, posterior.previous], axis=-1)


def trained(params):
  return {name: params[name] for name in params if name != 'statistics'}


def size(tree):
  return sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(tree))


# Initial parameters.


@pytest.mark.parametrize('name', modules.MEMBERS)
def test_members_are_initialised_independently(fresh, name):
  for layer, leaves in fresh[name].items():
    assert all(leaf.shape[0] == NUM_MEMBERS for leaf in leaves.values())
    if 'kernel' in leaves:
      kernels = np.asarray(leaves['kernel'])
      for k in range(1, NUM_MEMBERS):
        assert np.abs(kernels[k] - kernels[0]).mean() > 0.01, layer


def test_independent_members_disagree_and_copies_of_one_do_not(model, fresh, sequence, infer):
  copy = lambda x: jnp.broadcast_to(x[:1], x.shape)
  copied = fresh | {name: jax.tree.map(copy, fresh[name]) for name in modules.MEMBERS}
  novelty = lambda params: np.asarray(
    intrinsic.novelty_of('information_gain', infer(model, params, KEYS, sequence).priors.moments())
  )
  # At a FIRST step the state is zero, so fresh members agree.
  first = np.asarray(sequence.step_type == rssm.FIRST)
  assert (novelty(fresh)[~first] > 1e-3).all()
  np.testing.assert_allclose(novelty(copied), 0, atol=1e-5)


def test_parameters_are_float32_and_only_members_are_stacked(model):
  params = jax.eval_shape(model.init, jax.random.key(0))
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  assert sorted(params) == [
    'change', 'continue', 'decoder', 'encoder', 'mask', 'posterior', 'prior', 'recurrence',
    'reward', 'statistics',
  ]  # fmt: skip
  assert params['posterior']['kernel'].shape == (8 + 16, 16)
  for name in ('prior', 'change'):
    assert params[name]['Dense_0']['kernel'].shape == (NUM_MEMBERS, 8 + 4 + 16, 16)
  # A state of 8, an action of 4 and the embedding of the numbers, of 16.
  assert params['recurrence']['kernel'].shape == (8 + 4 + 16, 3 * 8)


def test_without_a_mask_there_is_no_mask_head_and_all_actions_are_legal(make_dreamer):
  model = make_dreamer('plain').model
  assert 'mask' not in jax.eval_shape(model.init, jax.random.key(0))
  mask = model.action_mask({}, jnp.zeros((2, 3, model.networks.feature_size)))
  assert mask.shape == (2, 3, 3) and mask.all()


def test_fresh_heads_predict_zero_reward_and_an_uncertain_discount(model, fresh):
  features = jax.random.normal(jax.random.key(1), (4, model.networks.feature_size))
  reward = model.reward(fresh, features)
  np.testing.assert_array_equal(reward.mean(), np.zeros(4))
  discount = model.discount(fresh, features)
  assert (discount > 0.02).all() and (discount < 0.98).all()


def test_actions_are_encoded_as_one_hot_or_between_minus_one_and_one(make_dreamer):
  discrete, continuous = (make_dreamer(env).model for env in ('plain', 'continuous'))
  np.testing.assert_array_equal(
    discrete.networks.actions.encode(jnp.array([2, 0])), [[0.0, 0, 1], [1, 0, 0]]
  )
  action = jnp.array([[-1.0, 0.0], [1.0, 4.0], [0.0, 1.0]])  # bounds [-1, 1] and [0, 4]
  encoded = continuous.networks.actions.encode(action)
  np.testing.assert_allclose(encoded, [[-1, -1], [1, 1], [0, -0.5]])
  assert encoded.dtype == jnp.float32


# Inputs of a latent.


def test_latents_after_first_do_not_depend_on_the_last_episode(sequence, latents):
  before = latents(sequence)
  # FIRST steps: 0 and 4 of stream 0, 3 of stream 1, none of stream 2.
  for stream, first in ((0, 4), (1, 3)):
    steps = slice(0, first)
    changed = sequence._replace(
      observation=disturbed(sequence.observation, steps, stream),
      action=sequence.action.at[steps, stream].set(2 - sequence.action[steps, stream]),
      initial_state=jax.tree.map(lambda x: x.at[:2].set(jnp.nan), sequence.initial_state),
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


def test_sequence_model_reads_latents_only_where_there_are_images(
  make_dreamer, make_params, make_sequence, infer
):
  """Without them z tells nothing that the numbers do not."""

  def later_states_change(name):
    dreamer = make_dreamer(name)
    params, sequence = make_params(dreamer)['world_model'], make_sequence(dreamer)
    state = lambda keys: infer(dreamer.model, params, keys, sequence).latent
    one, other = state(KEYS), state(jax.random.split(jax.random.key(7), len(KEYS)))
    assert (one.stochastic != other.stochastic).any()
    return bool((one.deterministic != other.deterministic).any())

  assert not later_states_change('plain')
  assert later_states_change('frames')


def test_without_stored_state_sequences_begin_with_zeros(
  make_dreamer, model, params, sequence, infer
):
  zeros = jax.tree.map(jnp.zeros_like, sequence.initial_state)
  features = lambda model, initial: (
    infer(model, params, KEYS, sequence._replace(initial_state=initial)).features
  )
  forgetful = make_dreamer(stored_state=False).model
  np.testing.assert_array_equal(features(forgetful, sequence.initial_state), features(model, zeros))
  assert (features(model, sequence.initial_state) != features(model, zeros)).any()


def test_latent_depends_on_the_previous_action_and_not_on_its_own(sequence, latents):
  before = latents(sequence)
  after = latents(sequence._replace(action=sequence.action.at[2, 2].set(3)))
  changed = np.abs(after - before).max(-1) > 0
  np.testing.assert_array_equal(changed[:, 2], [False, False, False, True, True, True])
  assert not changed[:, :2].any()


def test_posterior_depends_on_its_own_observation_and_on_no_later_one(
  model, params, sequence, infer
):
  means = lambda sequence: np.asarray(infer(model, params, KEYS, sequence).belief.moments()[0])
  observation = disturbed(sequence.observation, 2, 2)
  changed = np.abs(means(sequence._replace(observation=observation)) - means(sequence)).max(-1) > 0
  np.testing.assert_array_equal(changed[:, 2], [False, False, True, True, True, True])


def test_latent_does_not_depend_on_mask_reward_or_discount(sequence, latents):
  before = latents(sequence)
  observation = sequence.observation | {'action_mask': ~sequence.observation['action_mask']}
  changed = sequence._replace(
    observation=observation, reward=sequence.reward + 1, discount=1 - sequence.discount
  )
  np.testing.assert_array_equal(latents(changed), before)


def test_latents_do_not_depend_on_other_sequences(sequence, latents):
  before = latents(sequence)
  changed = sequence._replace(
    observation=disturbed(sequence.observation, slice(None), slice(1, None)),
    initial_state=jax.tree.map(lambda x: x.at[1:].add(1), sequence.initial_state),
  )
  keys = jnp.concatenate([KEYS[:1], jax.random.split(jax.random.key(6))])
  after = latents(changed, keys)
  np.testing.assert_array_equal(after[:, 0], before[:, 0])
  assert (np.abs(after[:, 1:] - before[:, 1:]).max(-1) > 0).all()


def test_noise_differs_between_steps_and_sequences(sequence, latents):
  same = jax.tree.map(lambda x: jnp.broadcast_to(x[:1, :1], x.shape), sequence.observation)
  every = sequence._replace(
    observation=same,
    action=jnp.ones_like(sequence.action),
    step_type=jnp.zeros_like(sequence.step_type),  # all FIRST, so all beliefs are equal
  )
  stochastic = latents(every)[..., 8:20].reshape(18, 12)
  assert len(np.unique(stochastic, axis=0)) > 6  # as many as steps, or fewer, if they shared noise


# The loss.


def test_every_module_and_member_has_a_gradient_at_the_start(fresh, sequence, loss_and_grads):
  learns = world_model.bootstrap_mask(sequence.identity, NUM_MEMBERS, 0.8)
  assert (learns.sum(1) > 0).all()
  _, grads = loss_and_grads(fresh, KEYS, sequence)
  for name in trained(fresh):
    assert size(grads[name]) > 1e-4, name
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[name]))
  for name, k in itertools.product(modules.MEMBERS, range(NUM_MEMBERS)):
    assert size(jax.tree.map(lambda x, k=k: x[k], grads[name])) > 1e-4, (name, k)


def test_every_layer_has_a_gradient_when_heads_are_not_zero(params, sequence, loss_and_grads):
  _, grads = loss_and_grads(params, KEYS, sequence)
  for path, leaf in jax.tree_util.tree_leaves_with_path(trained(grads)):
    assert float(jnp.abs(leaf).max()) > 0, jax.tree_util.keystr(path)
  assert size(grads['statistics']) == 0


def test_member_has_no_gradient_from_sequences_outside_its_bootstrap(
  params, sequence, loss_and_grads
):
  identity = np.arange(1000, dtype=np.uint32)
  learns = np.asarray(world_model.bootstrap_mask(jnp.asarray(identity), NUM_MEMBERS, 0.8))
  wanted = np.array([1.25, 0.0, 1.25], np.float32)
  chosen = identity[(learns == wanted[:, None]).all(0)][0]
  alone = sequence._replace(identity=jnp.full(3, chosen, jnp.uint32))
  _, grads = loss_and_grads(params, KEYS, alone)
  for name, k in itertools.product(modules.MEMBERS, range(NUM_MEMBERS)):
    magnitude = size(jax.tree.map(lambda x, k=k: x[k], grads[name]))
    assert (magnitude > 0) == (wanted[k] > 0)


def test_reward_of_a_first_step_is_not_learned(params, sequence, loss_and_grads):
  first = sequence.step_type == rssm.FIRST
  loss = lambda where: loss_and_grads(
    params, KEYS, sequence._replace(reward=sequence.reward + jnp.where(where, 2.0, 0.0))
  )[0][0]
  assert loss(first) == loss(jnp.zeros_like(first))
  assert loss(~first) != loss(jnp.zeros_like(first))


def test_continue_head_learns_termination_and_not_truncation(params, sequence, loss_and_grads):
  """Step 3 of stream 0 terminates, step 2 of stream 1 is truncated; only the first has target 0."""

  def push(discount):
    """Gradient of the loss by the continue head's bias; positive where episodes terminate."""
    _, grads = loss_and_grads(params, KEYS, sequence._replace(discount=discount))
    return float(grads['continue']['rest']['Dense_0']['bias'][0])

  continues = jnp.ones_like(sequence.discount)
  assert push(continues) < 0 < push(0 * continues)
  difference = push(sequence.discount) - push(continues)
  np.testing.assert_allclose(difference, 1 / continues.size, rtol=1e-3)


def test_loss_weighs_reward_and_divergence(make_dreamer, make_params, make_sequence):
  """With every sequence in every bootstrap, the divergence has the weight 1.1."""
  dreamer = make_dreamer('grid', bootstrap_share=1.0, reward_scale=3.0)
  params, sequence = make_params(dreamer)['world_model'], make_sequence(dreamer)
  loss, (*_, metrics) = jax.jit(dreamer.model.loss)(params, KEYS, sequence)
  heads = metrics['reconstruction'] + metrics['continue']
  divergence = loss - heads - 3 * metrics['reward'] - metrics['change']
  np.testing.assert_allclose(divergence, 1.1 * metrics['kl'], rtol=1e-4)


def test_free_nats_clip_the_loss_of_the_posterior_and_not_of_the_priors(
  make_dreamer, make_params, make_sequence
):
  """Priors that stopped learning below the free nats would disagree, and give false novelty."""
  dreamer = make_dreamer('grid', bootstrap_share=1.0, free_nats=200.0)
  params, sequence = make_params(dreamer)['world_model'], make_sequence(dreamer)
  loss, (*_, metrics) = jax.jit(dreamer.model.loss)(params, KEYS, sequence)
  heads = sum(metrics[name] for name in ('reconstruction', 'reward', 'continue', 'change'))
  assert 0 < metrics['kl'] < 100
  np.testing.assert_allclose(loss - heads, metrics['kl'] + 0.1 * 200, rtol=1e-4)


@pytest.fixture(scope='module')
def reconstruct(model, params, sequence):
  """(outputs of the decoder, purse before) -> mean reconstruction loss of constant observations.

  The board has the levels 0, 8, 4 and 8, the purse holds log 8, in a scale of 1.
  """
  board = jnp.broadcast_to(jnp.array([[0.0, 1.0], [0.5, 1.0]]), (6, 3, 2, 2))
  carried = sequence.initial_state
  numbers = jnp.broadcast_to(jnp.array([0.0, 1.0, 0.5, 1.0, np.log(8)]), (3, 5))
  sequence = sequence._replace(
    observation=sequence.observation | {'board': board, 'purse': jnp.full((6, 3), 7)},
    initial_state=carried._replace(latent=carried.latent._replace(numbers=numbers)),
  )
  one = jnp.ones(1)
  square = one + np.square(np.log(8))
  statistics = {'mean': np.log(8) * one, 'square': square, 'error': one, 'count': one[0]}
  loss = jax.jit(model.loss)

  def run(gate, levels, change):
    decoder = jax.tree.map(jnp.zeros_like, params['decoder'])
    outputs = np.concatenate([[gate] * 4, np.ravel(levels), [change]])
    decoder['Dense_1']['bias'] = jnp.asarray(outputs, jnp.float32)
    changed = params | {'decoder': decoder, 'statistics': params['statistics'] | statistics}
    _, (*_, metrics) = loss(changed, KEYS, sequence)
    return float(metrics['reconstruction'])

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


def test_numbers_before_a_sequence_are_those_of_the_stored_state(
  model, params, sequence, loss_and_grads
):
  """Streams 1 and 2 begin within an episode, stream 0 begins with FIRST."""

  def reconstruction(stream):
    carried = sequence.initial_state
    numbers = carried.latent.numbers.at[stream, -1].add(1.0)
    changed = carried._replace(latent=carried.latent._replace(numbers=numbers))
    _, aux = loss_and_grads(params, KEYS, sequence._replace(initial_state=changed))[0]
    return float(aux[-1]['reconstruction'])

  unchanged = reconstruction(slice(3, 3))
  assert reconstruction(0) == unchanged
  assert reconstruction(1) != unchanged != reconstruction(2)


@pytest.fixture(scope='module')
def change_loss(make_dreamer, make_sequence):
  """(params, sequence) -> the members' loss of changes, its gradient, and moments of changes."""
  model = make_dreamer('plain', bootstrap_share=1.0).model

  @jax.jit
  def judge(params, sequence):
    def loss(params):
      _, (*_, moments, metrics) = model.loss(params, KEYS, sequence)
      return metrics['change'], moments

    (value, moments), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, grads, moments

  return judge


def test_predicted_changes_train_nothing_but_themselves(
  make_dreamer, make_params, make_sequence, change_loss
):
  """They serve novelty; with a gradient into the state they would compete with what is decoded."""
  params, sequence = (
    make_params(make_dreamer('plain'))['world_model'],
    make_sequence(make_dreamer('plain')),
  )
  _, grads, _ = change_loss(params, sequence)
  assert {name for name in params if size(grads[name]) > 0} == {'change'}


def test_change_of_a_first_step_is_neither_learned_nor_counted(
  make_dreamer, make_params, make_sequence, change_loss
):
  """No transition leads to it: whatever it shows, loss and moments stay."""
  dreamer = make_dreamer('plain')
  params, sequence = make_params(dreamer)['world_model'], make_sequence(dreamer)
  params = params | {'statistics': dreamer.model.networks.numbers.initial_statistics()}
  alone = jax.tree.map(lambda x: x, sequence)._replace(step_type=jnp.zeros_like(sequence.step_type))
  value, _, moments = change_loss(params, alone)
  assert value == 0
  np.testing.assert_allclose(moments['change'], params['statistics']['change'], rtol=1e-6)
  value, _, moments = change_loss(params, sequence)
  assert value > 0 and np.abs(moments['change'] - 1).min() > 0


def test_observation_that_never_changes_has_a_finite_loss_of_changes(
  make_dreamer, make_params, make_sequence, change_loss
):
  dreamer = make_dreamer('plain')
  params, sequence = make_params(dreamer)['world_model'], make_sequence(dreamer)
  carried = sequence.initial_state
  constant = sequence._replace(
    observation=jnp.zeros((6, 3, 5)),
    initial_state=carried._replace(latent=carried.latent._replace(numbers=jnp.zeros((3, 5)))),
  )
  still = params['statistics'] | {'change': jnp.zeros(numbers_lib.NUM_PROJECTIONS)}
  value, grads, moments = change_loss(params | {'statistics': still}, constant)
  assert np.isfinite(value) and (moments['change'] == 0).all()
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_value_loss_is_part_of_the_loss_and_trains_latents(model, params, sequence):
  """Its gradient reaches whatever the features depend on: not decoder and heads, nor the posterior."""

  @jax.jit
  def gradient(scale):
    value_loss = lambda features: scale * jnp.sum(features[..., : model.networks.memory_size])
    gradient = jax.value_and_grad(model.loss, has_aux=True)
    (loss, (posterior, *_)), grads = gradient(params, KEYS, sequence, value_loss)
    return loss, value_loss(posterior.features), grads

  loss, value, grads = gradient(2.0)
  without, _, others = gradient(0.0)
  np.testing.assert_allclose(loss - without, value, rtol=1e-3)
  changed = {name for name in params if size(jax.tree.map(jnp.subtract, grads[name], others[name]))}
  assert changed == {'encoder', 'recurrence'}


def test_mask_head_learns_the_mask_of_its_step(model, params, sequence, loss_and_grads):
  """Descent raises the mask head's bias where all actions are legal, lowers it where none is."""
  bias = lambda legal: loss_and_grads(
    params,
    KEYS,
    sequence._replace(
      observation=sequence.observation
      | {
        observation_lib.ACTION_MASK: jnp.full(
          sequence.observation[observation_lib.ACTION_MASK].shape, legal
        )
      }
    ),
  )[1]['mask']['rest']['Dense_0']['bias']
  assert (bias(True) < 0).all() and (bias(False) > 0).all()


# Images.


@pytest.fixture(scope='module')
def pictures(make_dreamer, make_params, make_sequence):
  """(model, params, optimizer state, sequence, update) for an environment with images."""
  dreamer = make_dreamer('pictures')
  optimizer = optax.adam(1e-2)

  @jax.jit
  def update(params, opt_state, sequence):
    gradient = jax.value_and_grad(dreamer.model.loss, has_aux=True)
    (_, (*_, metrics)), grads = gradient(params, KEYS, sequence)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, metrics, grads

  params = make_params(dreamer)['world_model']
  step = lambda sequence, params, opt_state: update(params, opt_state, sequence)
  return dreamer.model, params, optimizer.init(params), make_sequence(dreamer), step


def test_gradient_reaches_every_parameter_of_encoder_and_decoder(pictures):
  _, params, opt_state, sequence, step = pictures
  *_, grads = step(sequence, params, opt_state)
  for name in ('image_encoder', 'image_decoder'):
    convolutions = [layer for layer in grads[name] if layer.startswith('Conv')]
    assert len(convolutions) == 2, sorted(grads[name])  # two images, a stage each
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads[name]):
      assert float(jnp.abs(leaf).max()) > 0, (name, jax.tree_util.keystr(path))


def test_reconstruction_distinguishes_two_images_after_some_updates(pictures):
  _, params, opt_state, sequence, step = pictures
  is_other = (jnp.arange(18).reshape(6, 3) // 2) % 2 == 1  # steps of one and of the other
  show = lambda x: jnp.where(is_other.reshape(6, 3, *[1] * (x.ndim - 2)), x[:1, :1], x[1:2, 1:2])
  sequence = sequence._replace(observation=jax.tree.map(show, sequence.observation))
  for _ in range(200):
    params, opt_state, metrics, _ = step(sequence, params, opt_state)
  # Loss of the best constant decoder: log 2 for each cell of a plane in which the images differ,
  # and the squared distance of the pixels from the mean of both.
  one, other = (jax.tree.map(lambda x, i=i: x[i // 3, i % 3], sequence.observation) for i in (0, 2))
  pixels = np.square((one['pixels'].astype(np.float32) - other['pixels']) / 255 / 2).sum()
  constant = float(pixels + np.log(2) * (one['planes'] != other['planes']).sum())
  assert metrics['reconstruction'] < 0.7 * constant


def test_loss_of_an_image_sums_over_its_numbers(pictures):
  model, _, _, sequence, _ = pictures
  observation = jax.tree.map(lambda x: x[0, 0], sequence.observation)
  pixels, planes = model.networks.codec.encode(observation)[1:]
  right = 60 * planes - 30
  loss = lambda *decoded: float(model.networks.codec.image_loss(decoded, [pixels, planes]))
  np.testing.assert_allclose(loss(pixels, right), 0, atol=1e-4)
  wrong = pixels.at[0, 0, 0].add(0.5).at[8, 10, 2].add(2)
  np.testing.assert_allclose(loss(wrong, right), 0.25 + 4, rtol=1e-4)
  np.testing.assert_allclose(loss(pixels, right.at[-1, -1, -1].set(0)), np.log(2), rtol=1e-4)


def test_environment_of_images_alone_has_no_numbers_to_carry(
  make_dreamer, make_params, make_sequence
):
  dreamer = make_dreamer('frames')
  model, params, sequence = dreamer.model, make_params(dreamer), make_sequence(dreamer)
  params = params['world_model']
  assert not {'encoder', 'decoder'} & set(params) and set(params['statistics']) == {'count'}
  gradient = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
  (loss, (posterior, *_)), grads = gradient(params, KEYS, sequence)
  assert np.isfinite(loss) and posterior.latent.numbers.shape == (6, 3, 0)
  np.testing.assert_array_equal(posterior.features, belief(posterior))
  assert all(size(grads[name]) > 1e-4 for name in trained(params))


def test_images_are_flat_without_channels(make_dreamer):
  model = make_dreamer('pictures', image_channels=0).model
  params = jax.eval_shape(model.init, jax.random.key(0))
  inputs = 9 * 11 * 21 + 8 * 8 * 33 + 2 * (1 + 33) + 1  # the purse by levels, too
  assert params['encoder']['Dense_0']['kernel'].shape == (inputs, 16)
  assert sorted(params['decoder']) == ['Dense_0', 'Dense_1', 'LayerNorm_0']


def test_small_image_is_part_of_the_state(make_dreamer):
  model = make_dreamer('small_frames').model
  params = jax.eval_shape(model.init, jax.random.key(0))
  assert model.networks.numbers.size == 9 * 8 * 3
  assert 'decoder' in params and not {'image_encoder', 'image_decoder'} & set(params)


def test_units_have_geometric_time_constants():
  kept = networks.gru(jnp.zeros((1, 9)), jnp.ones((1, 3)), 50)
  np.testing.assert_allclose(kept[0], 1 - 1 / np.array([2, 10, 50]), rtol=1e-5)


def test_observation_and_its_multiple_have_different_embeddings(make_dreamer, fresh_params):
  dreamer = make_dreamer('plain')
  model, params = dreamer.model, fresh_params(dreamer)['world_model']
  _, (once, many) = model.rssm.encoder(params, jnp.array([[1.0, 0, 0, 0, 0], [30.0, 0, 0, 0, 0]]))
  assert jnp.max(jnp.abs(once - many)) > 0.1


# Bootstrap.


def test_bootstrap_depends_on_identity_alone():
  identity = jnp.array([5, 9, 5, 2**32 - 1], jnp.uint32)
  mask = world_model.bootstrap_mask(identity, 4, 0.5)
  assert mask.shape == (4, 4)
  np.testing.assert_array_equal(mask[:, 0], mask[:, 2])
  np.testing.assert_array_equal(mask[:, 1:2], world_model.bootstrap_mask(identity[1:2], 4, 0.5))


def test_bootstrap_selects_its_share_for_each_member_and_has_mean_one():
  mask = np.asarray(world_model.bootstrap_mask(jnp.arange(4000, dtype=jnp.uint32), 5, 0.8))
  np.testing.assert_allclose(np.unique(mask), [0, 1.25])
  np.testing.assert_allclose(mask.mean(1), np.ones(5), atol=0.04)  # five standard deviations
  for k in range(1, 5):  # independent members agree on 0.68 of all sequences
    np.testing.assert_allclose((mask[k] == mask[0]).mean(), 0.68, atol=0.04)


def test_bootstrap_share_of_one_masks_nothing():
  mask = world_model.bootstrap_mask(jnp.arange(100, dtype=jnp.uint32), 5, 1.0)
  np.testing.assert_array_equal(mask, np.ones((5, 100)))


# Precision, and the other latent.


def test_bfloat16_latents_have_float32_losses_and_gradients(
  make_dreamer, make_params, make_sequence
):
  dreamer = make_dreamer('masked', compute_dtype='bfloat16')
  model, params = dreamer.model, make_params(dreamer)['world_model']
  sequence = make_sequence(dreamer)
  gradient = jax.value_and_grad(model.loss, has_aux=True)
  (loss, aux), grads = jax.eval_shape(gradient, params, KEYS, sequence)
  posterior, expected_rewards, moments, metrics = aux
  low = (posterior.latent.deterministic, posterior.latent.stochastic, posterior.features)
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
  features = jax.ShapeDtypeStruct((2, model.networks.feature_size), jnp.bfloat16)
  assert {head.dtype for head in jax.eval_shape(heads, features)} == {jnp.dtype('float32')}


def test_every_module_has_a_gradient_with_gaussian_latents_in_bfloat16(
  make_dreamer, make_params, make_sequence
):
  dreamer = make_dreamer('masked', latent='gaussian', compute_dtype='bfloat16')
  params, sequence = make_params(dreamer)['world_model'], make_sequence(dreamer)
  gradient = jax.jit(jax.value_and_grad(dreamer.model.loss, has_aux=True))
  (loss, _), grads = gradient(params, KEYS, sequence)
  assert np.isfinite(loss)
  for name in trained(params):
    assert size(grads[name]) > 1e-4, name


def test_prior_reads_the_previous_action_and_numbers(model, params):
  """So what follows from them for certain is as certain to the prior as to the decoder."""
  state = jnp.full((4, 8), 0.3)
  previous = jnp.zeros((4, 4 + 16)).at[1, 0].set(1.0).at[2, 3].set(1.0).at[3, 4 + 7].set(1.0)
  priors = jax.jit(model.rssm.prior)(params, state, previous, jnp.zeros(4, bool))
  means, _ = priors.belief.moments()
  for i in (1, 2, 3):
    assert (jnp.abs(means[:, i] - means[:, 0]).max(-1) > 1e-2).all()


def test_moments_equal_those_of_each_members_prior(model, params, sequence, infer):
  """Also those of the numbers' changes."""
  posterior = infer(model, params, KEYS, sequence)
  (means, variances), (changes, noise) = posterior.priors.moments()
  assert means.shape == variances.shape == (NUM_MEMBERS, 6, 3, 12)
  assert changes.shape == noise.shape == (NUM_MEMBERS, 6, 3, numbers_lib.NUM_PROJECTIONS)
  # Step 3 of stream 2, again, from the previous step.
  latent = jax.tree.map(lambda x: x[2], posterior.latent)
  recurrent = rssm.Recurrent(latent, model.networks.actions.encode(sequence.action[2]))
  imagine = lambda params: model.rssm.imagine(
    params,
    model.rssm.matrices(params),
    recurrent,
    jnp.zeros(3, jnp.int32),
    rssm.Noise(jnp.full((3, 4), 0.5), jnp.full(3, 0.5)),
  )
  imagined, previous, prior = jax.jit(imagine)(params)
  np.testing.assert_allclose(
    imagined.deterministic[2], posterior.latent.deterministic[3, 2], rtol=1e-4, atol=1e-5
  )
  np.testing.assert_allclose(previous[2], posterior.previous[3, 2], rtol=1e-4, atol=1e-5)
  close = {'rtol': 1e-4, 'atol': 1e-5}
  for found, expected in zip(prior.belief.moments(), (means, variances), strict=True):
    np.testing.assert_allclose(found[:, 2], expected[:, 3, 2], **close)
  np.testing.assert_allclose(prior.change.mean[:, 2], changes[:, 3, 2], **close)
  np.testing.assert_allclose(prior.change.variance[:, 2], noise[:, 3, 2], **close)
  spread = np.ptp(np.asarray(changes), axis=0).max(-1)
  first = np.asarray(sequence.step_type == rssm.FIRST)
  assert (spread[~first] > 1e-3).all() and (spread[first] == 0).all()  # members differ


# Statistics of numbers.


def test_loss_gives_the_moments_that_statistics_follow(model, params, sequence, loss_and_grads):
  (_, (_, _, moments, _)), _ = loss_and_grads(params, KEYS, sequence)
  purse = np.log1p(np.asarray(sequence.observation['purse'], np.float32))
  np.testing.assert_allclose(moments['mean'], [purse.mean()], rtol=1e-5)
  np.testing.assert_allclose(moments['square'], [np.square(purse).mean()], rtol=1e-5)
  assert 0 < moments['error'][0] <= 1
  fresh = params | {'statistics': model.networks.numbers.initial_statistics()}
  followed = model.statistics(fresh, moments)
  for name, expected in {**moments, 'count': 1}.items():
    np.testing.assert_allclose(followed['statistics'][name], expected, rtol=1e-5)
  assert all(followed[name] is params[name] for name in trained(params))


def test_environment_without_real_numbers_has_no_statistics_of_them(
  make_dreamer, make_params, make_sequence
):
  """Only whether its two bits lie between 0 and 1."""
  dreamer = make_dreamer('grid')
  model, params = dreamer.model, make_params(dreamer)['world_model']
  _, (*_, moments, _) = jax.eval_shape(model.loss, params, KEYS, make_sequence(dreamer))
  changes = (numbers_lib.NUM_PROJECTIONS,)
  shapes = {name: x.shape for name, x in moments.items()}
  assert shapes == {'between': (2,), 'change': changes}
  assert set(params['statistics']) == {*shapes, 'count'}


def test_features_hold_memory_inputs_of_the_numbers_and_of_the_transition(
  make_dreamer, make_params, make_sequence, infer
):
  """Also the view of the numbers, as observed; not the stochastic state, without an image."""
  dreamer = make_dreamer('view')
  model, params, sequence = dreamer.model, make_params(dreamer), make_sequence(dreamer)
  posterior = infer(model, params['world_model'], KEYS, sequence)
  latent = posterior.latent
  numbers = 3 * (1 + 33) + 2
  assert (
    posterior.features.shape == (6, 3, model.networks.feature_size) == (6, 3, 8 + numbers + 3 + 16)
  )
  np.testing.assert_array_equal(posterior.features[..., :8], latent.deterministic)
  view = posterior.features[..., 8 + numbers - 2 : 8 + numbers]
  np.testing.assert_allclose(view, np.square(sequence.observation[..., 1:]), rtol=1e-4)
  np.testing.assert_array_equal(posterior.features[..., 8 + numbers :], posterior.previous)


def test_inputs_of_a_transition_are_those_of_the_previous_step_and_nothing_at_first(
  make_dreamer, make_params, make_sequence, infer
):
  dreamer = make_dreamer('masked')
  params, sequence = make_params(dreamer)['world_model'], make_sequence(dreamer)
  previous = infer(dreamer.model, params, KEYS, sequence).previous
  first = sequence.step_type == rssm.FIRST
  assert not np.asarray(previous)[np.asarray(first)].any()
  action = jax.nn.one_hot(sequence.action[:-1], 4)
  expected = jnp.where(first[1:, :, None], 0, action)
  np.testing.assert_array_equal(previous[1:, :, :4], expected)
  assert np.ptp(previous[1:, :, 4:], axis=0).max() > 0.01  # the numbers of the step before
