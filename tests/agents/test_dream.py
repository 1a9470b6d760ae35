"""Imagination: starts, rollouts by model and policy, horizons, returns and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import dream, intrinsic, rssm, world_model

HORIZON_MAX, NUM_MEMBERS = 6, 3
NUM_STEPS, BATCH = 6, 3
STOCHASTIC = slice(8, 20)  # in the features
KEYS = jax.random.split(jax.random.key(5), BATCH)
DREAM_KEYS = jax.random.split(jax.random.key(6), BATCH)


compiled = {}


def starts(dreamer, *arguments, num_steps=None):
  """`dream.starts`, jitted once for each agent and number."""
  key, policy = (id(dreamer), num_steps), dreamer.actor_critic
  if key not in compiled:
    picked = lambda *others: dream.starts(policy, {}, *others, num_steps=num_steps)[0]
    compiled[key] = jax.jit(picked)
  return compiled[key](*arguments)


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('masked_frames')


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)


@pytest.fixture(scope='module')
def slow_critic(dreamer, make_params):
  return make_params(dreamer, seed=1)['actor_critic']['critic']


@pytest.fixture(scope='module')
def sequence(dreamer, make_sequence):
  return make_sequence(dreamer)


@pytest.fixture(scope='module')
def last(sequence):
  return sequence.step_type == 2


@pytest.fixture(scope='module')
def posterior(dreamer, params, sequence, infer):
  return infer(dreamer.model, params['world_model'], KEYS, sequence)


@pytest.fixture(scope='module')
def start(dreamer, posterior, last):
  return starts(
    dreamer,
    posterior,
    last,
    intrinsic.novelty_of('information_gain', posterior.priors.moments()),
    DREAM_KEYS,
  )


class Counted:
  """A jitted rollout that counts its traces."""

  def __init__(self, dreamer):
    self.traces = 0

    def rollout(params, slow_critic, start, horizon):
      self.traces += 1
      return dream.rollout(dreamer.model, dreamer.actor_critic, params, slow_critic, start, horizon)

    self._rollout = jax.jit(rollout)

  def __call__(self, params, slow_critic, start, horizon):
    return self._rollout(params, slow_critic, start, jnp.int32(horizon))


@pytest.fixture(scope='module')
def rollout(dreamer):
  return Counted(dreamer)


@pytest.fixture(scope='module')
def imagined(rollout, params, slow_critic, start):
  return rollout(params, slow_critic, start, 4)


@pytest.fixture(scope='module')
def latents(params, imagined):
  """Latents of the start and the three steps after it; numbers are read from the features."""
  statistics = params['world_model']['statistics']
  scale = jnp.sqrt(statistics['square'] - statistics['mean'] ** 2) + 1e-4
  found = [imagined.start.latent]
  for features in imagined.features[1:4]:
    deterministic, stochastic = features[:, :8], features[:, STOCHASTIC]
    # The board, then 36 inputs that say the same by levels, and the purse in standard deviations.
    board, purse = features[:, 20:24], features[:, 60:61]
    numbers = jnp.concatenate([board, purse * scale + statistics['mean']], axis=-1)
    found.append(rssm.Latent(deterministic, stochastic, numbers))
  return found


# Starts.


@pytest.mark.parametrize('count', [None, 5])
def test_start_is_a_step_of_its_sequence(dreamer, numbered_posterior, count):
  posterior, number = numbered_posterior
  last = jnp.zeros(number.shape, bool).at[2, 1].set(True)
  start = starts(dreamer, posterior, last, number / 2, DREAM_KEYS, num_steps=count)
  total = BATCH * min(count or NUM_STEPS, NUM_STEPS)
  assert start.weight.shape == start.keys.shape == (total,)
  seen = set()
  for i in range(total):
    stream, step = divmod(int(start.latent.deterministic[i, 0]), 100)
    step -= 1
    seen.add((stream, step))
    assert start.latent.stochastic[i, 0] == -number[step, stream]
    assert start.latent.numbers[i, 0] == 2 * number[step, stream]
    np.testing.assert_array_equal(start.features[i], number[step, stream] * np.array([1, -1]))
    assert start.novelty[i] == number[step, stream] / 2
    assert start.weight[i] == (0.0 if (stream, step) == (1, 2) else 1.0)
    assert start.begins[i] == (step == 0 or (stream, step) == (1, 3))
  assert len(seen) == total  # without replacement
  assert start.memory == ()


@pytest.mark.parametrize('count', [None, 5])
def test_halves_of_even_starts_have_as_many_of_each_sequence(dreamer, numbered_posterior, count):
  posterior, number = numbered_posterior
  start, _ = dream.starts(
    dreamer.actor_critic, {}, posterior, jnp.zeros(number.shape, bool), number, DREAM_KEYS,
    num_steps=count, even=True,
  )  # fmt: skip
  stream, step = np.divmod(np.asarray(start.latent.deterministic[:, 0]).astype(int), 100)
  each = (NUM_STEPS if count is None else 4) // 2
  for half in np.split(stream, 2):
    np.testing.assert_array_equal(np.bincount(half), [each] * BATCH)
  assert len({*zip(stream, step, strict=True)}) == 2 * each * BATCH
  if count is None:  # both halves are of the whole sequence
    assert set(step[: each * BATCH]) == {1, 3, 5}


def test_second_half_of_the_dreams_follows_the_explorer(dreamer, params, slow_critic, start):
  actor_critic = dreamer.actor_critic
  certain = jax.tree.map(jnp.copy, params)
  for name, action in (('actor', 1), ('explorer', 2)):
    output = certain['actor_critic'][name]['rest']['Dense_0']
    output['bias'] = jnp.zeros(4).at[action].set(1e4)
    output['kernel'] *= 0
  mask = certain['world_model']['mask']['rest']['Dense_0']
  mask['bias'] = mask['bias'] + 1e4  # all actions are legal

  def choices(explore):
    dreamt = dream.rollout(
      dreamer.model, actor_critic, certain, slow_critic, start, jnp.int32(4), explore=explore
    )
    return np.asarray(dreamt.choice[:4]), np.asarray(dreamt.novelty[1:5])

  half = len(start.weight) // 2
  (task, novelty), (both, novelty_of_both) = choices(False), choices(True)
  assert (task == 1).mean() > 0.95
  assert (both[:, :half] == 1).mean() > 0.95 and (both[:, half:] == 2).mean() > 0.95
  # Nothing reads the novelty of the task's dreams, so it is not computed.
  assert (novelty > 0).all() and (novelty_of_both[:, half:] > 0).all()
  assert (novelty_of_both[:, :half] == 0).all()


def test_sampled_starts_depend_on_their_key_and_not_on_other_sequences(dreamer, numbered_posterior):
  posterior, number = numbered_posterior
  last = jnp.zeros(number.shape, bool)
  draw = lambda keys: np.asarray(
    starts(dreamer, posterior, last, number, keys, num_steps=2).latent.deterministic
  ).reshape(2, BATCH)
  draws = {tuple(draw(jax.random.split(jax.random.key(seed), BATCH))[:, 0]) for seed in range(8)}
  assert len(draws) > 2
  others = jnp.concatenate([DREAM_KEYS[:1], jax.random.split(jax.random.key(1), BATCH - 1)])
  np.testing.assert_array_equal(draw(DREAM_KEYS)[:, 0], draw(others)[:, 0])


# Rollouts.


def test_rollout_begins_at_its_start_and_stores_the_steps_of_the_loss(dreamer, imagined, start):
  np.testing.assert_array_equal(imagined.features[0], start.features)
  np.testing.assert_array_equal(imagined.novelty[0], start.novelty)
  assert len(imagined.features) == HORIZON_MAX
  assert dream.history(dreamer.actor_critic, imagined) == ()


def test_imagined_step_follows_from_the_previous_step_and_its_action(
  dreamer, params, start, imagined, latents
):
  """State, novelty and features; the features hold the imagined numbers."""
  model, model_params = dreamer.model, params['world_model']

  @jax.jit
  def next_step(latent, choice):
    action = model.networks.actions.encode(choice)
    latent, previous, priors = model.rssm.imagine(
      model_params,
      model.rssm.matrices(model_params),
      rssm.Recurrent(latent, action),
      jnp.zeros(len(action), jnp.int32),
      jax.vmap(model.rssm.imagined_noise)(start.keys),
    )
    novelty = intrinsic.novelty_of('information_gain', priors.moments())
    return latent.deterministic, previous, novelty

  for t in range(3):
    deterministic, previous, novelty = next_step(latents[t], imagined.choice[t])
    expected = latents[t + 1]
    np.testing.assert_allclose(deterministic, expected.deterministic, rtol=1e-4, atol=1e-5)
    features = model.rssm.features(model_params, expected, previous)
    np.testing.assert_allclose(imagined.features[t + 1], features, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(novelty, imagined.novelty[t + 1], rtol=1e-3, atol=1e-5)
  other = next_step(latents[0], (imagined.choice[0] + 1) % 4)[0]
  assert np.abs(other - latents[1].deterministic).max() > 1e-3
  assert np.abs(latents[1].numbers - latents[0].numbers).max() > 1e-2


def test_predictions_belong_to_their_step(dreamer, params, slow_critic, imagined):
  model, policy = dreamer.model, dreamer.actor_critic
  features, history = imagined.features, dream.history(policy, imagined)
  steps = slice(1, 4)

  @jax.jit
  def predict(params):
    context = policy.context.pool(params['actor_critic'], history, features)
    return (
      model.reward(params['world_model'], features).mean(),
      model.discount(params['world_model'], features),
      model.action_mask(params['world_model'], features),
      *(
        {name: value.mean() for name, value in policy.values(of, features, context).items()}
        for of in (params['actor_critic'], {'critic': slow_critic})
      ),
    )

  reward, discount, mask, values, slow_values = predict(params)
  close = {'rtol': 1e-3, 'atol': 1e-4}
  np.testing.assert_allclose(imagined.reward[steps], reward[steps], **close)
  np.testing.assert_allclose(imagined.discount[steps], discount[steps], **close)
  np.testing.assert_array_equal(imagined.mask[:4], mask[:4])
  for name in (ac.TASK, ac.NOVELTY):
    np.testing.assert_allclose(imagined.values[name][:4], values[name][:4], **close)
    np.testing.assert_allclose(imagined.slow_values[name][:4], slow_values[name][:4], **close)
  # Values differ between steps and heads, so the comparison is not trivial.
  assert np.ptp(np.asarray(values[ac.TASK][:4])) > 0.1
  assert np.abs(values[ac.TASK][:4] - values[ac.NOVELTY][:4]).max() > 0.1
  assert np.abs(values[ac.TASK][:4] - slow_values[ac.TASK][:4]).max() > 0.1


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
  rest['Dense_0'] = jax.tree.map(lambda x: 1000 * x, rest['Dense_0'])
  imagined = rollout(sure, slow_critic, start, 4)
  steps = steps_of(dreamer, imagined, 0, 4)

  @jax.jit
  def modes(params, steps):
    context = policy.context.pool(params, steps.history, steps.features)
    return policy.policy(params, steps.features, context, steps.mask).mode()

  expected = modes(sure['actor_critic'], steps)
  # One per cent of all choices is uniform.
  assert (expected == imagined.choice[:4]).mean() > 0.9
  assert len(np.unique(expected)) > 1


def test_rollout_follows_one_member(dreamer, params, slow_critic, start, rollout):
  """Member k is sure that the first variable is of class k; all are unsure of the others."""
  members = jnp.arange(NUM_MEMBERS)
  output = params['world_model']['prior']['Dense_1']
  prior = params['world_model']['prior'] | {
    'Dense_1': {
      'kernel': jnp.zeros_like(output['kernel']),
      'bias': jnp.zeros_like(output['bias']).at[members, members].set(100.0),
    }
  }
  changed = params | {'world_model': params['world_model'] | {'prior': prior}}
  imagined = rollout(changed, slow_critic, start, 4)
  shape = (3, 18, dreamer.config.stochastic_size, dreamer.config.classes)
  classes = np.asarray(imagined.features[1:4, :, STOCHASTIC]).reshape(shape).argmax(-1)
  followed = np.median(classes[..., 0], axis=0)
  assert (classes[..., 0] == followed).mean() > 0.9  # one per cent of all classes is uniform
  assert set(followed) == set(range(NUM_MEMBERS))
  # Noise differs between steps and dreams.
  assert len(np.unique(classes[..., 1:].reshape(-1, 3), axis=0)) > 15


def test_rollout_does_not_depend_on_the_rest_of_the_batch(
  params, slow_critic, start, rollout, imagined
):
  column = 7
  moved = jax.tree.map(lambda x: jnp.roll(x, 1, axis=-1) if x.ndim == 1 else x, start.keys)
  others = start._replace(
    latent=jax.tree.map(lambda x: x + 1, start.latent),
    features=start.features + 1,
    novelty=start.novelty * 2,
    keys=moved,
  )

  def put(other, own):
    return other.at[column].set(own[column])

  mixed = others._replace(
    latent=jax.tree.map(put, others.latent, start.latent),
    features=put(others.features, start.features),
    novelty=put(others.novelty, start.novelty),
    keys=put(others.keys, start.keys),
  )
  result = rollout(params, slow_critic, mixed, 4)
  for name in ('choice', 'reward', 'discount', 'values', 'slow_values', 'novelty'):
    got, expected = (
      jax.tree.map(lambda x: x[:, column], getattr(x, name)) for x in (result, imagined)
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)
  np.testing.assert_array_equal(result.features[:, column], imagined.features[:, column])
  assert (result.features[2] != imagined.features[2])[
    np.arange(18) != column
  ].any(-1).all()  # fmt: skip


def test_rollout_of_one_start_equals_its_rollout_in_a_batch(
  params, slow_critic, start, rollout, imagined
):
  alone = jax.tree.map(lambda x: x[7:8], start)
  result = rollout(params, slow_critic, alone, 4)
  np.testing.assert_array_equal(result.choice[:, 0], imagined.choice[:, 7])
  close = {'rtol': 1e-3, 'atol': 1e-4}
  for name in ('reward', 'discount', 'values', 'slow_values', 'novelty'):
    jax.tree.map(
      lambda got, expected: np.testing.assert_allclose(got[:, 0], expected[:, 7], **close),
      getattr(result, name),
      getattr(imagined, name),
    )
  np.testing.assert_allclose(result.features[:, 0], imagined.features[:, 7], **close)


def test_rollouts_from_one_state_differ_by_their_keys(params, slow_critic, start, rollout):
  broadcast = lambda x: jnp.broadcast_to(x[:1], x.shape)
  latent, features = jax.tree.map(broadcast, (start.latent, start.features))
  same = start._replace(latent=latent, features=features)
  imagined = rollout(params, slow_critic, same, 4)
  assert len(np.unique(np.asarray(imagined.features)[1, :, STOCHASTIC], axis=0)) > 9


def test_bfloat16_dreams_have_float32_rewards_values_and_novelty(
  make_dreamer, make_params, make_sequence
):
  dreamer = make_dreamer('masked_frames', compute_dtype='bfloat16')
  params, sequence = make_params(dreamer), make_sequence(dreamer)

  def imagine(params):
    posterior = dreamer.model.rssm.infer(params['world_model'], KEYS, sequence)
    novelty = intrinsic.novelty_of('information_gain', posterior.priors.moments())
    last, policy = sequence.step_type == 2, dreamer.actor_critic
    start, _ = dream.starts(policy, {}, posterior, last, novelty, DREAM_KEYS, num_steps=1)
    critic = params['actor_critic']['critic']
    return dream.rollout(dreamer.model, policy, params, critic, start, jnp.int32(2))

  imagined = jax.eval_shape(imagine, params)
  assert imagined.features.dtype == jnp.bfloat16
  numbers = (imagined.start.latent.numbers, imagined.reward, imagined.discount, imagined.novelty)
  float32 = jax.tree.leaves((numbers, imagined.values, imagined.slow_values))
  assert {leaf.dtype for leaf in float32} == {jnp.dtype('float32')}


# Horizons.


def test_longer_rollout_continues_a_shorter_one(params, slow_critic, start, rollout, imagined):
  longer = rollout(params, slow_critic, start, HORIZON_MAX)
  np.testing.assert_array_equal(longer.choice[:4], imagined.choice[:4])
  np.testing.assert_array_equal(longer.features[:4], imagined.features[:4])
  np.testing.assert_array_equal(longer.reward[:5], imagined.reward[:5])
  assert (longer.features[-1, :, STOCHASTIC] != 0).any(-1).all()


def test_steps_beyond_the_horizon_are_zero(imagined):
  arrived = (imagined.reward, imagined.discount, imagined.values, imagined.slow_values)
  for numbers in map(np.asarray, jax.tree.leaves(arrived)):
    assert numbers.shape == (HORIZON_MAX + 1, 18)
    assert (numbers[5:] == 0).all() and (numbers[1:5] != 0).all()
  assert (imagined.novelty[5:] == 0).all() and (imagined.novelty[1:5] != 0).all()
  assert (imagined.features[4:] == 0).all()
  assert (imagined.features[:4, :, STOCHASTIC] != 0).any(-1).all()


def test_rollout_is_traced_once_for_all_horizons(params, slow_critic, start, rollout):
  rollout(params, slow_critic, start, 2)
  traces = rollout.traces
  horizons = [rollout(params, slow_critic, start, h).horizon for h in range(HORIZON_MAX + 1)]
  assert horizons == list(range(HORIZON_MAX + 1))
  assert rollout.traces == traces


def test_rollout_computes_horizon_many_steps(dreamer, params, slow_critic, start):
  steps = []

  @dataclasses.dataclass(frozen=True)
  class CountingRSSM(rssm.RSSM):
    def imagine(self, *arguments):
      jax.debug.callback(steps.append, jnp.int32(1))
      return super().imagine(*arguments)

  class Counting(world_model.WorldModel):
    @property
    def rssm(self):
      return CountingRSSM(self.networks)

  config, model = dreamer.config, dreamer.model
  counting = Counting(config, model.observation_spec, model.action_spec)
  rollout = Counted(dreamer._replace(model=counting))
  for horizon in (5, 2, 0):
    steps.clear()
    jax.block_until_ready(rollout(params, slow_critic, start, horizon))
    jax.effects_barrier()
    assert len(steps) == horizon


def test_no_gradient_passes_through_a_rollout(dreamer, params, slow_critic, start):
  """JAX refuses to differentiate a loop whose trip count is data."""
  model, policy = dreamer.model, dreamer.actor_critic

  def imagined_reward(params):
    rollout = dream.rollout(model, policy, params, slow_critic, start, jnp.int32(2))
    return rollout.reward.sum()

  with pytest.raises(ValueError, match='Reverse-mode differentiation does not work'):
    jax.eval_shape(jax.jit(jax.grad(imagined_reward)), params)


@pytest.mark.parametrize('changes', [{'ensemble_size': 1}, {'novelty_scale': 0.0}])
def test_without_novelty_a_dream_has_values_of_the_task_alone(
  make_dreamer, make_params, posterior, last, changes
):
  dreamer = make_dreamer('masked_frames', **changes)
  params, model, policy = make_params(dreamer), dreamer.model, dreamer.actor_critic

  def imagine(params):
    novelty = jnp.zeros(last.shape)
    start, _ = dream.starts(policy, {}, posterior, last, novelty, DREAM_KEYS, num_steps=1)
    critic = params['actor_critic']['critic']
    return dream.rollout(model, policy, params, critic, start, jnp.int32(2))

  imagined = jax.eval_shape(imagine, params)
  assert set(imagined.values) == set(imagined.slow_values) == {ac.TASK}
  assert imagined.novelty.shape == (HORIZON_MAX + 1, BATCH)


# Returns and weights.


def made_dream(horizon, *, discount=1.0, weight=(1.0, 1.0)):
  """Two dreams, all steps alike."""
  start = dream.Start((), (), (), (), (), (), jnp.array(weight), ())
  return dream.Dream(
    start=start, features=(), novelty=(), mask=(),
    choice=jnp.zeros((HORIZON_MAX, 2), jnp.int32),
    reward=(), discount=fill(discount), values={}, slow_values={}, horizon=jnp.int32(horizon),
    context_inputs=(),
  )  # fmt: skip


def fill(x):
  """The same number at each of [H + 1, 2] steps."""
  return jnp.full((HORIZON_MAX + 1, 2), x, jnp.float32)


def returns_of(imagined, reward, value, *, gamma=0.5, lambda_=1.0):
  return dream.returns_of(imagined, reward, value, gamma=gamma, lambda_=lambda_)


@pytest.mark.parametrize('horizon', [1, 3, HORIZON_MAX])
def test_returns_end_with_the_value_at_the_horizon(horizon):
  imagined = made_dream(horizon)
  return_ = returns_of(imagined, fill(0.0), fill(0.0).at[horizon].set(8.0))
  expected = 8.0 * 0.5 ** np.arange(horizon, 0, -1)
  np.testing.assert_allclose(return_[:horizon], np.repeat(expected[:, None], 2, 1))
  np.testing.assert_array_equal(dream.weights(imagined).sum(0), [horizon, horizon])


def test_rewards_arrive_at_the_step_after_the_action():
  reward = fill(0.0).at[1].set(10.0).at[2].set(4.0)
  return_ = returns_of(made_dream(3), reward, fill(0.0))
  np.testing.assert_allclose(return_[:3, 0], [10 + 0.5 * 4, 4, 0])


def test_each_critic_has_returns_of_its_own_rewards_and_values():
  """Both are discounted by the probability that the episode continues."""
  imagined = made_dream(2, discount=0.5)
  rewards = {ac.TASK: fill(0.0).at[2].set(4.0), ac.NOVELTY: fill(1.0)}
  values = {ac.TASK: fill(8.0), ac.NOVELTY: fill(-16.0)}
  task, novelty = (
    returns_of(imagined, rewards[name], values[name])[:2, 0] for name in (ac.TASK, ac.NOVELTY)
  )
  np.testing.assert_allclose(task, [0 + 0.25 * 6, 4 + 0.25 * 8])
  np.testing.assert_allclose(novelty, [1 + 0.25 * -3, 1 + 0.25 * -16])


def test_steps_beyond_the_horizon_have_no_weight_and_no_effect(imagined):
  noise = jnp.where(jnp.arange(HORIZON_MAX + 1)[:, None] > 4, jnp.nan, 0.0)
  garbage = imagined._replace(discount=imagined.discount + noise)
  weight = dream.weights(imagined)
  np.testing.assert_array_equal(weight[4:], np.zeros((2, 18)))
  np.testing.assert_array_equal(dream.weights(garbage), weight)
  for value in imagined.values.values():
    return_ = returns_of(imagined, imagined.reward, value)
    same = returns_of(garbage, imagined.reward + noise, value + noise)
    np.testing.assert_array_equal(same[:4], return_[:4])


def test_weight_is_the_probability_of_reaching_the_step():
  imagined = made_dream(4, discount=0.5, weight=(1.0, 0.0))
  # The discount predicted at the start does not count.
  imagined = imagined._replace(discount=imagined.discount.at[0].set(0.0))
  weight = dream.weights(imagined)
  np.testing.assert_allclose(weight[:, 0], [1, 0.5, 0.25, 0.125, 0, 0])
  np.testing.assert_array_equal(weight[:, 1], np.zeros(HORIZON_MAX))


def test_start_at_the_end_of_an_episode_has_no_weight(imagined, last):
  weight = dream.weights(imagined)
  ended = np.asarray(last).reshape(-1)
  assert ended.sum() == 2
  np.testing.assert_array_equal(weight[:, ended], np.zeros((HORIZON_MAX, 2)))
  assert (weight[:4, ~ended] > 0).all()


def test_rollout_of_no_steps_has_no_weight(params, slow_critic, start, rollout):
  imagined = rollout(params, slow_critic, start, 0)
  np.testing.assert_array_equal(dream.weights(imagined), np.zeros((HORIZON_MAX, 18)))
  for value in imagined.values.values():
    assert np.isfinite(returns_of(imagined, imagined.reward, value)).all()


# Gradients.


@pytest.fixture(scope='module')
def policy_gradient(dreamer):
  return jax.jit(jax.value_and_grad(dreamer.actor_critic.loss, has_aux=True))


def steps_of(dreamer, imagined, first=0, count=HORIZON_MAX):
  policy = dreamer.actor_critic
  return dream.steps(policy, imagined, dream.history(policy, imagined), first, count)


def targets_of(imagined, part=slice(None)):
  """Targets by the slow critic, which is not zero with fresh parameters."""
  returns = {
    name: returns_of(imagined, imagined.reward, value, gamma=0.99, lambda_=0.95)
    for name, value in imagined.slow_values.items()
  }
  targets = ac.Targets(
    returns=returns,
    advantage=returns[ac.TASK] - imagined.slow_values[ac.TASK][:-1],
    slow_values={name: value[:-1] for name, value in imagined.slow_values.items()},
    weight=dream.weights(imagined),
  )
  return jax.tree.map(lambda x: x[part], targets)


@pytest.mark.parametrize('trained', [False, True])
def test_actor_and_critic_have_gradients_from_imagination(
  dreamer, params, fresh_params, slow_critic, start, rollout, policy_gradient, trained
):
  params = params if trained else fresh_params(dreamer)
  imagined = rollout(params, slow_critic, start, 4)
  steps = steps_of(dreamer, imagined)
  (loss, _), grads = policy_gradient(params['actor_critic'], steps, targets_of(imagined))
  assert np.isfinite(loss)
  for name in ('actor', 'critic'):
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads[name]))
    assert largest > 1e-4, name
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[name]))


def test_chunks_of_a_rollout_add_up_to_the_whole(dreamer, params, imagined, policy_gradient):
  policy_params, targets = params['actor_critic'], targets_of(imagined)
  whole = policy_gradient(policy_params, steps_of(dreamer, imagined), targets)
  parts = [
    policy_gradient(
      policy_params,
      steps_of(dreamer, imagined, first, 2),
      targets_of(imagined, slice(first, first + 2)),
    )
    for first in range(0, HORIZON_MAX, 2)
  ]
  summed = jax.tree.map(lambda *x: sum(x), *parts)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), summed, whole)


def test_steps_beyond_the_horizon_have_no_gradient(dreamer, params, imagined, policy_gradient):
  targets = targets_of(imagined)
  changed = imagined._replace(
    features=imagined.features.at[4:].set(9.0), choice=imagined.choice.at[4:].set(3)
  )
  results = [
    policy_gradient(params['actor_critic'], steps_of(dreamer, x), targets)
    for x in (imagined, changed)
  ]
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_continuous_actions_are_imagined_and_have_gradients(
  make_dreamer, make_params, make_sequence, infer
):
  dreamer = make_dreamer('continuous')
  model, policy = dreamer.model, dreamer.actor_critic
  params, sequence = make_params(dreamer), make_sequence(dreamer)
  posterior = infer(model, params['world_model'], KEYS, sequence)
  novelty = intrinsic.novelty_of('information_gain', posterior.priors.moments())
  last = sequence.step_type == 2
  start = starts(dreamer, posterior, last, novelty, DREAM_KEYS, num_steps=2)

  @jax.jit
  def learn(params):
    critic = params['actor_critic']['critic']
    imagined = dream.rollout(model, policy, params, critic, start, jnp.int32(3))
    steps = steps_of(dreamer, imagined)
    return imagined, jax.grad(policy.loss, has_aux=True)(
      params['actor_critic'], steps, targets_of(imagined)
    )[0]  # fmt: skip

  imagined, grads = learn(params)
  assert imagined.mask.all() and (imagined.features[:3, :, STOCHASTIC] != 0).any(-1).all()
  assert imagined.choice.shape == (HORIZON_MAX, 6, 2) and imagined.choice.dtype == jnp.float32
  for name in ('actor', 'critic'):
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads[name])) > 1e-4
