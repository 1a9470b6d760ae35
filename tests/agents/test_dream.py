"""Imagination: starts, rollouts by model and policy, horizons, returns and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_dreamer import read_of, starts_of

from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import dream, modules, rssm
from hephaestus.agents.dreamer import novelty as novelty_lib

HORIZON_MAX, NUM_MEMBERS = 6, 3
NUM_STEPS, BATCH = 6, 3
STOCHASTIC = slice(8, 20)  # in the state
NUM_ACTIONS = 3
KEYS = jax.random.split(jax.random.key(5), BATCH)
DREAM_KEYS = jax.random.split(jax.random.key(6), BATCH)


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('pictures')


@pytest.fixture(scope='module')
def starts(dreamer):
  """The function `dream.starts`, compiled once for each number of steps."""

  @functools.cache
  def compiled(num_steps, even):
    policy = dreamer.actor_critic
    picked = lambda *others: starts_of(policy, {}, *others, num_steps=num_steps, even=even)
    return jax.jit(picked)

  return lambda *arguments, num_steps=None, even=False: compiled(num_steps, even)(*arguments)


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)


@pytest.fixture(scope='module')
def slow_critic(dreamer, make_params):
  return make_params(dreamer, seed=1)['actor_critic']


@pytest.fixture(scope='module')
def sequence(dreamer, make_sequence):
  return make_sequence(dreamer)


@pytest.fixture(scope='module')
def last(sequence):
  return sequence.step_type == 2


@pytest.fixture(scope='module')
def posterior(dreamer, params, sequence, judge):
  return judge(dreamer.model, modules.world(params), KEYS, sequence).posterior


information_gain = jax.jit(
  lambda priors: novelty_lib.novelty_of('information_gain', priors.moments())
)


@pytest.fixture(scope='module')
def start(starts, posterior, last):
  start = starts(posterior, last, information_gain(posterior.priors), DREAM_KEYS)
  keys = start.keys
  return jax.device_get(start._replace(keys=()))._replace(keys=keys)


@pytest.fixture(scope='module')
def rollout(dreamer):
  """(params, slow critic, start, horizon) -> Dream, compiled once for all horizons."""
  compiled = jax.jit(functools.partial(dream.rollout, dreamer.model, dreamer.actor_critic))

  def run(params, slow_critic, start, horizon):
    found = compiled(params, slow_critic, start, np.int32(horizon))
    return jax.device_get(found._replace(start=()))._replace(start=start)

  return run


@pytest.fixture(scope='module')
def imagined(rollout, params, slow_critic, start):
  return rollout(params, slow_critic, start, 4)


@pytest.fixture(scope='module')
def latents(params, imagined):
  """Latents of the start and the three steps after it; numbers are read from the features."""
  statistics = params['statistics']['world_model']['numbers']
  scale = np.sqrt(statistics['variance']) + 1e-4
  found = [imagined.start.latent]
  for t in range(1, 4):
    state = imagined.read.features.state[t]
    deterministic, stochastic = state[:, :8], state[:, STOCHASTIC]
    purse = imagined.read.features.numbers[
      t, :, :2
    ]  # in standard deviations, before the same by levels
    found.append(rssm.Latent(deterministic, stochastic, purse * scale + statistics['mean']))
  return found


# Starts.


def test_start_has_the_mask_of_its_step(starts, numbered_posterior):
  posterior, number = numbered_posterior
  mask = number[..., None] // 2 ** np.arange(12) % 2 > 0  # the number of the step, by bits
  last = np.zeros(number.shape, bool)
  start = starts(posterior, last, number, DREAM_KEYS, mask, num_steps=5)
  np.testing.assert_array_equal(start.mask @ 2 ** np.arange(12), start.novelty)


@pytest.mark.parametrize('count', [None, 5])
def test_start_is_a_step_of_its_sequence(starts, numbered_posterior, count):
  posterior, number = numbered_posterior
  last = np.zeros(number.shape, bool)
  last[2, 1] = True
  start = starts(posterior, last, number / 2, DREAM_KEYS, num_steps=count)
  total = BATCH * min(count or NUM_STEPS, NUM_STEPS)
  assert start.weight.shape == start.keys.shape == (total,)
  seen = set()
  for i in range(total):
    stream, step = divmod(int(start.latent.deterministic[i, 0]), 100)
    step -= 1
    seen.add((stream, step))
    assert start.latent.stochastic[i, 0] == -number[step, stream]
    assert start.latent.numbers[i, 0] == 2 * number[step, stream]
    assert start.read.features.state[i] == -start.read.features.numbers[i] == number[step, stream]
    assert start.novelty[i] == number[step, stream] / 2
    assert start.weight[i] == (0.0 if (stream, step) == (1, 2) else 1.0)
  assert len(seen) == total  # without replacement
  assert start.read.memory == ()


def test_starts_are_where_an_episode_goes_on_as_far_as_there_are_enough(starts, numbered_posterior):
  posterior, number = numbered_posterior
  last = np.zeros(number.shape, bool)
  last[2] = last[:2, 1] = True
  start = starts(posterior, last, number, DREAM_KEYS, num_steps=NUM_STEPS - 1)
  left_out = start.weight.reshape(NUM_STEPS - 1, BATCH) == 0
  np.testing.assert_array_equal(left_out.sum(axis=0), last.sum(axis=0) - 1)


@pytest.mark.parametrize('count', [None, 5])
def test_halves_of_even_starts_have_as_many_of_each_sequence(starts, numbered_posterior, count):
  posterior, number = numbered_posterior
  nowhere = np.zeros(number.shape, bool)
  start = starts(posterior, nowhere, number, DREAM_KEYS, num_steps=count, even=True)
  stream, step = np.divmod(np.asarray(start.latent.deterministic[:, 0]).astype(int), 100)
  each = (NUM_STEPS if count is None else 4) // 2
  for half in np.split(stream, 2):
    np.testing.assert_array_equal(np.bincount(half), [each] * BATCH)
  assert len({*zip(stream, step, strict=True)}) == 2 * each * BATCH
  if count is None:  # both halves are of the whole sequence
    assert set(step[: each * BATCH]) == {1, 3, 5}


def test_second_half_of_the_dreams_follows_the_explorer(dreamer, params, slow_critic, start):
  actor_critic = dreamer.actor_critic
  certain = jax.tree.map(jnp.asarray, params)
  for name, action in (('actor', 1), ('explorer', 2)):
    output = certain['actor_critic'][name]['rest']['Dense_0']
    output['bias'] = jnp.zeros_like(output['bias']).at[action].set(1e4)
    output['kernel'] = jnp.zeros_like(output['kernel'])
  mask = certain['world_model']['mask']['rest']['Dense_0']
  mask['bias'] = mask['bias'] + 1e4  # all actions are legal

  @jax.jit
  def imagine(certain, slow_critic, start):
    dreamt = dream.rollout(
      dreamer.model, actor_critic, certain, slow_critic, start, jnp.int32(4), explore=True
    )
    return dreamt.choice[:4], dreamt.novelty[1:5]

  half = len(start.weight) // 2
  choice, novelty = jax.device_get(imagine(certain, slow_critic, start))
  assert (choice[:, :half] == 1).mean() > 0.95 and (choice[:, half:] == 2).mean() > 0.95
  # Nothing reads the novelty of the task's dreams, so it is not computed.
  assert (novelty[:, half:] > 0).all() and (novelty[:, :half] == 0).all()


def test_sampled_starts_depend_on_their_key_and_not_on_other_sequences(starts, numbered_posterior):
  posterior, number = numbered_posterior
  last = np.zeros(number.shape, bool)
  draw = lambda keys: np.asarray(
    starts(posterior, last, number, keys, num_steps=5).latent.deterministic
  ).reshape(5, BATCH)
  split = jax.jit(lambda seed: jax.random.split(jax.random.key(seed), BATCH))
  draws = {tuple(draw(split(seed))[:, 0]) for seed in range(8)}
  assert len(draws) > 2
  others = jnp.concatenate([DREAM_KEYS[:1], KEYS[1:]])
  np.testing.assert_array_equal(draw(DREAM_KEYS)[:, 0], draw(others)[:, 0])


# Rollouts.


def test_rollout_begins_at_its_start_and_stores_the_steps_of_the_loss(dreamer, imagined, start):
  for part, own in zip(imagined.read.features, start.read.features, strict=True):
    np.testing.assert_array_equal(part[0], own)
    assert len(part) == HORIZON_MAX
  np.testing.assert_array_equal(imagined.novelty[0], start.novelty)


def test_imagined_step_follows_from_the_previous_step_and_its_action(
  dreamer, params, start, imagined, latents
):
  """State, novelty and features; the features hold the imagined numbers."""
  model = dreamer.model

  @jax.jit
  def next_step(params, latent, choice, after):
    action = model.networks.actions.encode(choice)
    imagined = model.rssm.imagine(
      params,
      model.rssm.matrices(params),
      rssm.Recurrent(latent, action),
      jnp.zeros(len(action), jnp.int32),
      jax.vmap(model.rssm.imagined_noise)(start.keys),
    )
    features = model.rssm.features(params, after, imagined.previous)
    return imagined.latent.deterministic, model.novelty(imagined), features

  step = functools.partial(next_step, modules.world(params))
  for t in range(3):
    deterministic, novelty, features = step(latents[t], imagined.choice[t], latents[t + 1])
    np.testing.assert_allclose(deterministic, latents[t + 1].deterministic, rtol=1e-4, atol=1e-5)
    for part, expected in zip(imagined.read.features, features, strict=True):
      np.testing.assert_allclose(part[t + 1], expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(novelty, imagined.novelty[t + 1], rtol=1e-3, atol=1e-5)
  other = step(latents[0], (imagined.choice[0] + 1) % NUM_ACTIONS, latents[1])[0]
  assert np.abs(other - latents[1].deterministic).max() > 1e-3
  assert np.abs(latents[1].numbers - latents[0].numbers).max() > 1e-2


def test_predictions_belong_to_their_step(dreamer, params, slow_critic, imagined):
  model, policy = dreamer.model, dreamer.actor_critic
  features = imagined.read.features
  steps = slice(1, 4)

  @jax.jit
  def predict(params):
    context = policy.context.pool(params['actor_critic'], imagined.read)
    return (
      model.reward(modules.world(params), features).mean(),
      model.discount(modules.world(params), features),
      model.action_mask(modules.world(params), features),
      *(
        {name: value.mean() for name, value in policy.values(of, features, context).items()}
        for of in (params['actor_critic'], slow_critic)
      ),
    )

  reward, discount, mask, values, slow_values = jax.device_get(predict(params))
  close = {'rtol': 1e-3, 'atol': 1e-4}
  np.testing.assert_allclose(imagined.reward[steps], reward[steps], **close)
  np.testing.assert_allclose(imagined.discount[steps], discount[steps], **close)
  np.testing.assert_array_equal(imagined.mask[:4], mask[:4])
  lower = np.minimum(values[ac.TASK], slow_values[ac.TASK])[:4]
  np.testing.assert_allclose(imagined.values[ac.TASK][:4], lower, **close)
  assert 0 < (lower == values[ac.TASK][:4]).mean() < 1
  np.testing.assert_allclose(imagined.values[ac.NOVELTY][:4], values[ac.NOVELTY][:4], **close)
  # Values differ between steps and heads, so the comparison is not trivial.
  assert np.ptp(values[ac.TASK][:4]) > 0.1
  assert np.abs(values[ac.TASK][:4] - values[ac.NOVELTY][:4]).max() > 0.1


def test_dream_begins_with_the_real_mask(dreamer, params, rollout, slow_critic, start):
  real = np.arange(start.weight.size * 3).reshape(-1, 3) % 2 == 0
  found = rollout(params, slow_critic, start._replace(mask=real), 2)
  predicted = rollout(params, slow_critic, start, 2)
  np.testing.assert_array_equal(found.mask[0], real)
  assert (predicted.mask[0] != real).any()
  chosen = np.take_along_axis(real, np.asarray(found.choice)[0, :, None], -1)
  assert chosen.all()


def test_imagined_actions_are_legal_by_the_predicted_mask(imagined):
  chosen = np.take_along_axis(np.asarray(imagined.mask), np.asarray(imagined.choice)[..., None], -1)
  nothing_legal = ~np.asarray(imagined.mask).any(-1)
  assert (chosen[:4, :, 0] | nothing_legal[:4]).all()
  assert not np.asarray(imagined.mask)[:4].all()  # some are predicted illegal


def test_imagined_actions_come_from_the_policy_at_their_step(
  dreamer, params, slow_critic, start, rollout
):
  """A nearly deterministic policy takes its mode, given features, context and mask."""
  policy = dreamer.actor_critic
  sure = jax.tree.map(lambda x: x, params)
  rest = sure['actor_critic']['actor']['rest']
  rest['Dense_0'] = jax.tree.map(lambda x: np.float32(1000) * x, rest['Dense_0'])
  imagined = rollout(sure, slow_critic, start, 4)

  @jax.jit
  def modes(params, imagined):
    steps = jax.tree.map(lambda x: x[:4], dream.steps(imagined))
    context = policy.context.pool(params, steps.read)
    return policy.policy(params, steps.read.features, context, steps.mask).sample(0.0)

  expected = np.asarray(modes(sure['actor_critic'], imagined))
  # One per cent of all choices is uniform, and all where no action is predicted to be legal.
  some_legal = imagined.mask[:4].any(-1)
  assert (expected == imagined.choice[:4])[some_legal].mean() > 0.9
  assert len(np.unique(expected)) > 1


def test_rollout_follows_one_member(dreamer, params, slow_critic, start, rollout):
  """Member k is sure that the first variable is of class k; all are unsure of the others."""
  members = np.arange(NUM_MEMBERS)
  output = jax.tree.map(np.zeros_like, params['world_model']['prior']['Dense_1'])
  output['bias'][members, members] = 100.0
  prior = params['world_model']['prior'] | {'Dense_1': output}
  changed = params | {'world_model': params['world_model'] | {'prior': prior}}
  imagined = rollout(changed, slow_critic, start, 4)
  shape = (3, 18, dreamer.config.stochastic_size, dreamer.config.classes)
  classes = np.asarray(imagined.read.features.state[1:4, :, STOCHASTIC]).reshape(shape).argmax(-1)
  followed = np.median(classes[..., 0], axis=0)
  assert (classes[..., 0] == followed).mean() > 0.9  # one per cent of all classes is uniform
  assert set(followed) == set(range(NUM_MEMBERS))
  # Noise differs between steps and dreams.
  assert len(np.unique(classes[..., 1:].reshape(-1, 3), axis=0)) > 15


def test_rollout_does_not_depend_on_the_rest_of_the_batch(
  params, slow_critic, start, rollout, imagined
):
  column = 7
  moved = jnp.roll(start.keys, 1)
  others = start._replace(
    latent=jax.tree.map(lambda x: x + 1, start.latent),
    read=jax.tree.map(lambda x: x + 1, start.read),
    novelty=start.novelty * 2,
    keys=moved,
  )

  def put(other, own):
    other = np.array(other)
    other[column] = own[column]
    return other

  mixed = others._replace(
    latent=jax.tree.map(put, others.latent, start.latent),
    read=jax.tree.map(put, others.read, start.read),
    novelty=put(others.novelty, start.novelty),
    keys=others.keys.at[column].set(start.keys[column]),
  )
  result = rollout(params, slow_critic, mixed, 4)
  for name in ('read', 'choice', 'reward', 'discount', 'values', 'novelty'):
    got, expected = (
      jax.tree.map(lambda x: x[:, column], getattr(x, name)) for x in (result, imagined)
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)
  differs = result.read.features.state[2] != imagined.read.features.state[2]
  assert differs[np.arange(18) != column].any(-1).all()


def test_bfloat16_dreams_have_float32_rewards_values_and_novelty(
  make_dreamer, make_params, make_sequence
):
  dreamer = make_dreamer('pictures', compute_dtype='bfloat16')
  params, sequence = make_params(dreamer), make_sequence(dreamer)

  def imagine(params, sequence):
    posterior = dreamer.model.rssm.infer(modules.world(params), KEYS, sequence)
    novelty = novelty_lib.novelty_of('information_gain', posterior.priors.moments())
    last, policy = sequence.step_type == 2, dreamer.actor_critic
    start = starts_of(policy, {}, posterior, last, novelty, DREAM_KEYS, num_steps=1)
    critic = params['actor_critic']
    return dream.rollout(dreamer.model, policy, params, critic, start, jnp.int32(2))

  imagined = jax.eval_shape(imagine, params, sequence)
  assert {part.dtype for part in imagined.read.features} == {jnp.dtype(jnp.bfloat16)}
  numbers = (imagined.start.latent.numbers, imagined.reward, imagined.discount, imagined.novelty)
  float32 = jax.tree.leaves((numbers, imagined.values))
  assert {leaf.dtype for leaf in float32} == {jnp.dtype('float32')}


# Horizons.


def test_longer_rollout_continues_a_shorter_one(params, slow_critic, start, rollout, imagined):
  longer = rollout(params, slow_critic, start, HORIZON_MAX)
  np.testing.assert_array_equal(longer.choice[:4], imagined.choice[:4])
  np.testing.assert_array_equal(longer.read.features.state[:4], imagined.read.features.state[:4])
  np.testing.assert_allclose(longer.reward[:5], imagined.reward[:5], rtol=1e-5)
  assert (longer.read.features.state[-1, :, STOCHASTIC] != 0).any(-1).all()


def test_steps_beyond_the_horizon_are_zero(imagined):
  arrived = (imagined.reward, imagined.discount, imagined.values)
  for numbers in map(np.asarray, jax.tree.leaves(arrived)):
    assert numbers.shape == (HORIZON_MAX + 1, 18)
    assert (numbers[5:] == 0).all() and (numbers[1:5] != 0).all()
  assert (imagined.novelty[5:] == 0).all() and (imagined.novelty[1:5] != 0).all()
  assert all((part[4:] == 0).all() for part in imagined.read.features)
  assert (imagined.read.features.state[:4, :, STOCHASTIC] != 0).any(-1).all()


# Returns and weights.


def made_dream(horizon, *, discount=1.0, weight=(1.0, 1.0)):
  """Two dreams, all steps alike."""
  start = dream.Start((), (), (), np.array(weight, np.float32), ())
  return dream.Dream(
    start=start, read=(), novelty=(), log_prob=(), mask=(),
    choice=np.zeros((HORIZON_MAX, 2), np.int32),
    reward=(), discount=fill(discount), values={}, horizon=np.int32(horizon),
    rewards={},
  )  # fmt: skip


def fill(x, **others):
  """The same number at each of [H + 1, 2] steps, and others at steps t: `at_t`."""
  filled = np.full((HORIZON_MAX + 1, 2), x, np.float32)
  for step, other in others.items():
    filled[int(step.removeprefix('at_'))] = other
  return filled


def bare(imagined):
  """A dream with only those fields that returns and weights read."""
  start = dream.Start((), (), (), imagined.start.weight, ())
  fields = imagined._asdict()
  fields |= dict.fromkeys(('read', 'novelty', 'log_prob', 'mask', 'reward'), ())
  return dream.Dream(**fields | {'start': start, 'values': {}, 'rewards': {}})


compiled_returns = jax.jit(dream.returns_of)
compiled_weights = jax.jit(dream.weights)


def returns_of(imagined, reward, value, *, gamma=0.5, lambda_=1.0):
  return np.asarray(compiled_returns(bare(imagined), reward, value, gamma=gamma, lambda_=lambda_))


def weights_of(imagined):
  return np.asarray(compiled_weights(bare(imagined)))


@pytest.mark.parametrize('horizon', [1, 3, HORIZON_MAX])
def test_returns_end_with_the_value_at_the_horizon(horizon):
  imagined = made_dream(horizon)
  return_ = returns_of(imagined, fill(0.0), fill(0.0, **{f'at_{horizon}': 8.0}))
  expected = 8.0 * 0.5 ** np.arange(horizon, 0, -1)
  np.testing.assert_allclose(return_[:horizon], np.repeat(expected[:, None], 2, 1))
  np.testing.assert_array_equal(weights_of(imagined).sum(0), [horizon, horizon])


def test_each_critic_has_returns_of_its_own_rewards_and_values():
  """Both are discounted by the probability that the episode continues."""
  imagined = made_dream(2, discount=0.5)
  rewards = {ac.TASK: fill(0.0, at_2=4.0), ac.NOVELTY: fill(1.0)}
  values = {ac.TASK: fill(8.0), ac.NOVELTY: fill(-16.0)}
  task, novelty = (
    returns_of(imagined, rewards[name], values[name])[:2, 0] for name in (ac.TASK, ac.NOVELTY)
  )
  np.testing.assert_allclose(task, [0 + 0.25 * 6, 4 + 0.25 * 8])
  np.testing.assert_allclose(novelty, [1 + 0.25 * -3, 1 + 0.25 * -16])


def test_steps_beyond_the_horizon_have_no_weight_and_no_effect(imagined):
  beyond = np.arange(HORIZON_MAX + 1)[:, None] > 4
  noise = np.where(beyond, np.float32(np.nan), np.float32(0))
  garbage = imagined._replace(discount=imagined.discount + noise)
  weight = weights_of(imagined)
  np.testing.assert_array_equal(weight[4:], np.zeros((2, 18)))
  np.testing.assert_array_equal(weights_of(garbage), weight)
  for value in imagined.values.values():
    return_ = returns_of(imagined, imagined.reward, value)
    same = returns_of(garbage, imagined.reward + noise, value + noise)
    np.testing.assert_array_equal(same[:4], return_[:4])


def test_weight_is_the_probability_of_reaching_the_step():
  imagined = made_dream(4, discount=0.5, weight=(1.0, 0.0))
  # The discount predicted at the start does not count.
  weight = weights_of(imagined._replace(discount=fill(0.5, at_0=0.0)))
  np.testing.assert_allclose(weight[:, 0], [1, 0.5, 0.25, 0.125, 0, 0])
  np.testing.assert_array_equal(weight[:, 1], np.zeros(HORIZON_MAX))


def test_start_at_the_end_of_an_episode_has_no_weight(imagined, last):
  weight = weights_of(imagined)
  ended = last.reshape(-1)
  assert ended.sum() == 2
  np.testing.assert_array_equal(weight[:, ended], np.zeros((HORIZON_MAX, 2)))
  assert (weight[:4, ~ended] > 0).all()


# Gradients; `test_context.py` has the gradients of chunks.


def targets_of(imagined):
  returns = {
    name: dream.returns_of(imagined, imagined.reward, value, gamma=0.99, lambda_=0.95)
    for name, value in imagined.values.items()
  }
  return ac.Targets(
    returns=returns,
    advantage=returns[ac.TASK] - imagined.values[ac.TASK][:-1],
    weight=dream.weights(imagined),
  )


def policy_loss(policy, params, imagined, targets):
  steps = dream.steps(imagined)
  return policy.loss(params, steps, targets)


@pytest.fixture(scope='module')
def policy_gradient(dreamer):
  """(params, imagined, dream that gives the targets) -> loss and gradient of actor and critic."""
  policy = dreamer.actor_critic

  @jax.jit
  def gradient(params, imagined, judged):
    loss = lambda params: policy_loss(policy, params, imagined, targets_of(judged))
    (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, grads

  return lambda params, imagined, judged: jax.device_get(gradient(params, imagined, judged))


def largest(tree):
  return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize('trained', [False, True])
def test_actor_and_critic_have_gradients_from_imagination(
  params, slow_critic, start, rollout, policy_gradient, trained
):
  """They have gradients also where the outputs of both are 0, or almost, as in the beginning."""
  params = dict(params)
  if not trained:
    zero = lambda head: (
      head
      | {'rest': head['rest'] | {'Dense_0': jax.tree.map(np.zeros_like, head['rest']['Dense_0'])}}
    )
    heads = ('actor', 'explorer', 'critic', 'explorer_critic')
    params['actor_critic'] = params['actor_critic'] | {
      name: zero(params['actor_critic'][name]) for name in heads
    }
  imagined = rollout(params, slow_critic, start, 4)
  loss, grads = policy_gradient(params['actor_critic'], imagined, imagined)
  assert np.isfinite(loss)
  for name in ('actor', 'critic'):
    assert largest(grads[name]) > 1e-4, name
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[name]))


def test_steps_beyond_the_horizon_have_no_gradient(params, imagined, policy_gradient):
  features, choice = jax.tree.map(np.array, (imagined.read.features, imagined.choice))
  for part in features:
    part[4:] = 9.0
  choice[4:] = 2
  changed = imagined._replace(read=read_of(features), choice=choice)
  results = [policy_gradient(params['actor_critic'], x, imagined) for x in (imagined, changed)]
  jax.tree.map(np.testing.assert_array_equal, *results)
