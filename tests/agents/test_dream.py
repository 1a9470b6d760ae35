"""Imagination: starts, rollouts by model and policy, horizons, returns and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import dream, intrinsic, world_model

WINDOW, HORIZON_MAX, NUM_MEMBERS = 3, 6, 3
NUM_STEPS, BATCH = 6, 3
KEYS = jax.random.split(jax.random.key(5), BATCH)
DREAM_KEYS = jax.random.split(jax.random.key(6), BATCH)


compiled = {}


def starts(dreamer, *arguments, num_steps=None):
  """`dream.starts`, jitted once for each agent and number."""
  key, policy = (id(dreamer), num_steps), dreamer.actor_critic
  if key not in compiled:
    compiled[key] = jax.jit(lambda *others: dream.starts(policy, *others, num_steps=num_steps)[0])
  return compiled[key](*arguments)


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('masked')


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
    dreamer, posterior, last, intrinsic.information_gain(*posterior.moments), DREAM_KEYS
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


def latent_at(dreamer, imagined, step):
  """The latents at one imagined step; step 0 is the start."""
  features = imagined.features[:, step]
  size = dreamer.config.deterministic_size
  return world_model.Latent(features[:, :size], features[:, size:], features[:, :0])


# Starts.


def numbered_posterior(num_steps=NUM_STEPS, batch=BATCH):
  """Features are numbered by sequence and step: 100 b + t, for t from 1."""
  number = 100.0 * jnp.arange(batch) + jnp.arange(1, num_steps + 1)[:, None]
  first = jnp.zeros((num_steps, batch), bool).at[0, 0].set(True).at[3, 1].set(True)
  latent = world_model.Latent(number[..., None], -number[..., None], jnp.zeros((*number.shape, 0)))
  return world_model.Posterior(latent, (), first), number


@pytest.mark.parametrize('count', [None, 5])
def test_start_remembers_the_steps_before_it(dreamer, count):
  posterior, number = numbered_posterior()
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
    assert start.novelty[i] == number[step, stream] / 2
    assert start.weight[i] == (0.0 if (stream, step) == (1, 2) else 1.0)
    assert start.begins[i] == (step == 0 or (stream, step) == (1, 3))
    for w in range(WINDOW - 1):
      before = step - (WINDOW - 1) + w
      expected = number[before, stream] if before >= 0 else 0.0
      assert start.memory.novelty[i, w] == expected / 2
      np.testing.assert_array_equal(start.memory.features[i, w], [expected, -expected])
      same_episode = before >= 0 and not (stream == 1 and before < 3 <= step)
      own = start.memory.episode[i, -1] + start.begins[i]
      assert (start.memory.episode[i, w] == own) == same_episode
  assert len(seen) == total  # drawn without replacement


def test_drawn_starts_depend_on_their_key_and_not_on_other_sequences(dreamer):
  posterior, number = numbered_posterior()
  last = jnp.zeros(number.shape, bool)
  draw = lambda keys: np.asarray(
    starts(dreamer, posterior, last, number, keys, num_steps=2).latent.deterministic
  ).reshape(2, BATCH)
  draws = {tuple(draw(jax.random.split(jax.random.key(seed), BATCH))[:, 0]) for seed in range(8)}
  assert len(draws) > 2
  others = jnp.concatenate([DREAM_KEYS[:1], jax.random.split(jax.random.key(1), BATCH - 1)])
  np.testing.assert_array_equal(draw(DREAM_KEYS)[:, 0], draw(others)[:, 0])


def test_start_without_context_remembers_nothing(make_dreamer):
  posterior, number = numbered_posterior()
  last = jnp.zeros(number.shape, bool)
  start = starts(make_dreamer('masked', window=1), posterior, last, number, DREAM_KEYS)
  assert start.memory == () and start.novelty.shape == (18,)


def test_track_of_a_sequence_leaves_out_the_steps_before_it(dreamer):
  posterior, number = numbered_posterior()
  track = dreamer.actor_critic.context.replayed(posterior.latent.features, number, posterior.first)
  np.testing.assert_array_equal(
    track.episode[:2], [[-1, -1, 0, 0, 0, 0, 0, 0], [-1, -1, 0, 0, 0, 1, 1, 1]]
  )
  np.testing.assert_array_equal(track.features[:, WINDOW - 1 :, 0], number.T)
  np.testing.assert_array_equal(track.novelty[:, WINDOW - 1 :], number.T)


# Rollouts.


def test_rollout_begins_at_its_start(imagined, start):
  np.testing.assert_array_equal(imagined.features[:, 0], start.latent.features)
  np.testing.assert_array_equal(imagined.novelty[0], start.novelty)


def test_track_of_a_dream_is_its_memory_and_then_its_steps(dreamer, imagined, start):
  track = dream.track(dreamer.actor_critic, imagined)
  before = jax.tree.map(lambda x: x[:, : WINDOW - 1], track)
  jax.tree.map(np.testing.assert_array_equal, before, start.memory)
  np.testing.assert_array_equal(track.features[:, WINDOW - 1 :], imagined.features)
  np.testing.assert_array_equal(track.novelty[:, WINDOW - 1 :], imagined.novelty[:-1].T)
  own = start.memory.episode[:, -1] + start.begins
  assert (track.episode[:, WINDOW - 1 :] == own[:, None]).all()


def test_imagined_step_follows_from_the_previous_action(dreamer, params, imagined):
  model, model_params = dreamer.model, params['world_model']

  @jax.jit
  def next_step(latent, choice):
    recurrent = world_model.Recurrent(latent, model.encode_action(choice))
    members = model.members(model_params, recurrent)
    moments = model.priors(model_params, members).moments()
    return members.mean(0), intrinsic.information_gain(*moments)

  for t in range(3):
    deterministic, novelty = next_step(latent_at(dreamer, imagined, t), imagined.choice[t])
    expected = latent_at(dreamer, imagined, t + 1).deterministic
    np.testing.assert_allclose(deterministic, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(novelty, imagined.novelty[t + 1], rtol=1e-3, atol=1e-5)
  other = next_step(latent_at(dreamer, imagined, 0), (imagined.choice[0] + 1) % 4)[0]
  assert np.abs(other - latent_at(dreamer, imagined, 1).deterministic).max() > 1e-3


def test_rollout_without_context_stores_the_steps_of_the_loss_only(
  make_dreamer, make_params, posterior, last
):
  dreamer = make_dreamer('masked', window=1)
  params, model = make_params(dreamer), dreamer.model
  novelty = intrinsic.information_gain(*posterior.moments)
  start = starts(dreamer, posterior, last, novelty, DREAM_KEYS)

  @jax.jit
  def rollout(params, start, horizon):
    critic = params['actor_critic']['critic']
    return dream.rollout(model, dreamer.actor_critic, params, critic, start, horizon)

  @jax.jit
  def next_steps(params, features, choice):
    deterministic, stochastic = jnp.split(features, [dreamer.config.deterministic_size], axis=-1)
    latent = world_model.Latent(deterministic, stochastic, features[:, :0])
    recurrent = world_model.Recurrent(latent, model.encode_action(choice))
    return model.members(params['world_model'], recurrent).mean(0)

  imagined = rollout(params, start, HORIZON_MAX)
  assert imagined.features.shape[1] == HORIZON_MAX
  np.testing.assert_array_equal(imagined.features[:, 0], start.latent.features)
  for t in range(HORIZON_MAX - 1):
    expected = next_steps(params, imagined.features[:, t], imagined.choice[t])
    found = imagined.features[:, t + 1, : dreamer.config.deterministic_size]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_predictions_belong_to_their_step(dreamer, params, slow_critic, imagined):
  model, policy = dreamer.model, dreamer.actor_critic
  features, track = imagined.features, dream.track(policy, imagined)
  steps = slice(1, 4)

  @jax.jit
  def predict(params):
    context = policy.context.pool(params['actor_critic'], track, features)
    predicted = (
      model.reward(params['world_model'], features, features[..., :0], features[..., :0]).mean(),
      model.discount(params['world_model'], features),
      policy.value({'critic': slow_critic}, features, context).mean(),
      model.action_mask(params['world_model'], features),
    )
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), predicted)

  reward, discount, value, mask = predict(params)
  close = {'rtol': 1e-3, 'atol': 1e-4}
  np.testing.assert_allclose(imagined.reward[steps], reward[steps], **close)
  np.testing.assert_allclose(imagined.discount[steps], discount[steps], **close)
  np.testing.assert_allclose(imagined.value[:4], value[:4], **close)
  np.testing.assert_array_equal(imagined.mask[:4], mask[:4])
  assert np.ptp(np.asarray(value[:4])) > 0.1  # values differ, so the comparison is not trivial


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
  output = sure['actor_critic']['actor']['Dense_1']
  sure['actor_critic']['actor']['Dense_1'] = jax.tree.map(lambda x: 1000 * x, output)
  imagined = rollout(sure, slow_critic, start, 4)
  steps = steps_of(dreamer, imagined, 0, 4)

  @jax.jit
  def modes(params, steps):
    context = policy.context.pool(params, steps.track, steps.features)
    return policy.policy(params, steps.features, context, steps.mask).mode()

  expected = modes(sure['actor_critic'], steps)
  # One per cent of all choices is uniform.
  assert (expected == imagined.choice[:4].T).mean() > 0.9
  assert len(np.unique(expected)) > 1


def test_rollout_follows_one_member(dreamer, params, slow_critic, start, rollout):
  """The prior of member k has the mean 100 k, which identifies the member. Dreams follow all."""
  size = dreamer.config.stochastic_size
  output = params['world_model']['prior']['Dense_1']
  bias = jnp.zeros_like(output['bias']).at[:, :size].set(100.0 * jnp.arange(NUM_MEMBERS)[:, None])
  prior = params['world_model']['prior'] | {
    'Dense_1': {'kernel': jnp.zeros_like(output['kernel']), 'bias': bias}
  }
  changed = params | {'world_model': params['world_model'] | {'prior': prior}}
  imagined = rollout(changed, slow_critic, start, 4)
  stochastic = np.asarray(imagined.features[:, 1:4, -size:])
  followed = np.rint(stochastic / 100)
  assert (followed == followed[:, :1, :1]).all()
  assert set(followed[:, 0, 0]) == set(range(NUM_MEMBERS))
  noise = stochastic - 100 * followed
  assert len(np.unique(noise)) == noise.size  # noise differs between all steps


def test_rollout_does_not_depend_on_the_rest_of_the_batch(
  params, slow_critic, start, rollout, imagined
):
  column = 7
  moved = jax.tree.map(lambda x: jnp.roll(x, 1, axis=-1) if x.ndim == 1 else x, start.keys)
  others = start._replace(
    latent=jax.tree.map(lambda x: x + 1, start.latent),
    novelty=start.novelty * 2,
    memory=start.memory._replace(features=start.memory.features - 1),
    keys=moved,
  )

  def put(other, own):
    return other.at[column].set(own[column])

  mixed = others._replace(
    latent=jax.tree.map(lambda other, own: put(other, own), others.latent, start.latent),
    novelty=put(others.novelty, start.novelty),
    memory=jax.tree.map(put, others.memory, start.memory),
    keys=put(others.keys, start.keys),
  )
  result = rollout(params, slow_critic, mixed, 4)
  for name in ('choice', 'reward', 'discount', 'value', 'novelty'):
    got, expected = (np.asarray(getattr(x, name)) for x in (result, imagined))
    np.testing.assert_array_equal(got[:, column], expected[:, column])
  np.testing.assert_array_equal(result.features[column], imagined.features[column])
  assert (result.features[:, 2] != imagined.features[:, 2])[
    np.arange(18) != column
  ].any(-1).all()  # fmt: skip


def test_rollout_of_one_start_equals_its_rollout_in_a_batch(
  params, slow_critic, start, rollout, imagined
):
  alone = jax.tree.map(lambda x: x[7:8], start)
  result = rollout(params, slow_critic, alone, 4)
  np.testing.assert_array_equal(result.choice[:, 0], imagined.choice[:, 7])
  close = {'rtol': 1e-3, 'atol': 1e-4}
  for name in ('reward', 'discount', 'value', 'novelty'):
    got, expected = (getattr(x, name) for x in (result, imagined))
    np.testing.assert_allclose(got[:, 0], expected[:, 7], **close)
  np.testing.assert_allclose(result.features[0], imagined.features[7], **close)


def test_rollouts_from_one_state_differ_by_their_keys(params, slow_critic, start, rollout):
  same = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), start.latent)
  imagined = rollout(params, slow_critic, start._replace(latent=same), 4)
  assert len(np.unique(np.asarray(imagined.features)[:, 1, -1])) == 18


# Horizons.


def test_longer_rollout_continues_a_shorter_one(params, slow_critic, start, rollout, imagined):
  longer = rollout(params, slow_critic, start, HORIZON_MAX)
  np.testing.assert_array_equal(longer.choice[:4], imagined.choice[:4])
  np.testing.assert_array_equal(longer.features[:, :4], imagined.features[:, :4])
  np.testing.assert_array_equal(longer.reward[:5], imagined.reward[:5])
  assert (longer.features[:, -1] != 0).all()


def test_steps_beyond_the_horizon_are_zero(imagined):
  for name in ('reward', 'discount', 'value'):
    numbers = np.asarray(getattr(imagined, name))
    assert numbers.shape == (HORIZON_MAX + 1, 18)
    assert (numbers[5:] == 0).all() and (numbers[1:5] != 0).all()
  assert (imagined.novelty[5:] == 0).all() and (imagined.novelty[1:5] != 0).all()
  assert (imagined.features[:, 4:] == 0).all() and (imagined.features[:, :4] != 0).all()


def test_rollout_is_traced_once_for_all_horizons(params, slow_critic, start, rollout):
  rollout(params, slow_critic, start, 2)
  traces = rollout.traces
  horizons = [rollout(params, slow_critic, start, h).horizon for h in range(HORIZON_MAX + 1)]
  assert horizons == list(range(HORIZON_MAX + 1))
  assert rollout.traces == traces


def test_rollout_computes_horizon_many_steps(dreamer, params, slow_critic, start):
  steps = []

  @dataclasses.dataclass(frozen=True)
  class Counting(world_model.WorldModel):
    def members(self, params, recurrent):
      jax.debug.callback(steps.append, jnp.int32(1))
      return super().members(params, recurrent)

  config, model = dreamer.config, dreamer.model
  counting = Counting(config, model.observation_spec, model.action_spec)
  rollout = Counted(dreamer._replace(model=counting))
  for horizon in (5, 2, 0):
    steps.clear()
    jax.block_until_ready(rollout(params, slow_critic, start, horizon))
    jax.effects_barrier()
    assert len(steps) == horizon


# Returns and weights.


def made_dream(horizon, *, reward=0.0, discount=1.0, value=0.0, weight=(1.0, 1.0)):
  """Two dreams, all steps alike."""
  fill = lambda x: jnp.full((HORIZON_MAX + 1, 2), x, jnp.float32)
  start = dream.Start((), (), (), (), jnp.array(weight), ())
  return dream.Dream(
    start=start, features=(), novelty=(), mask=(),
    choice=jnp.zeros((HORIZON_MAX, 2), jnp.int32),
    reward=fill(reward), discount=fill(discount), value=fill(value), horizon=jnp.int32(horizon),
  )  # fmt: skip


def weighed(imagined, drive=0.0, *, gamma=0.5, lambda_=1.0):
  drive = jnp.broadcast_to(jnp.float32(drive), imagined.value.shape)
  return dream.returns_and_weights(imagined, drive, gamma=gamma, lambda_=lambda_)


@pytest.mark.parametrize('horizon', [1, 3, HORIZON_MAX])
def test_returns_end_with_the_value_at_the_horizon(horizon):
  imagined = made_dream(horizon)
  imagined = imagined._replace(value=imagined.value.at[horizon].set(8.0))
  return_, weight = weighed(imagined)
  expected = 8.0 * 0.5 ** np.arange(horizon, 0, -1)
  np.testing.assert_allclose(return_[:horizon], np.repeat(expected[:, None], 2, 1))
  np.testing.assert_array_equal(weight.sum(0), [horizon, horizon])


def test_rewards_and_drives_arrive_at_the_step_after_the_action():
  imagined = made_dream(3)
  imagined = imagined._replace(reward=imagined.reward.at[2].set(4.0))
  drive = jnp.zeros_like(imagined.reward).at[1].set(10.0)
  return_, _ = weighed(imagined, drive)
  np.testing.assert_allclose(return_[:3, 0], [10 + 0.5 * 4, 4, 0])


def test_steps_beyond_the_horizon_have_no_weight_and_no_effect(imagined):
  noise = jnp.where(jnp.arange(HORIZON_MAX + 1)[:, None] > 4, jnp.nan, 0.0)
  garbage = imagined._replace(
    reward=imagined.reward + noise, discount=imagined.discount + noise, value=imagined.value + noise
  )
  return_, weight = weighed(imagined)
  same_return, same_weight = weighed(garbage, noise)
  np.testing.assert_array_equal(weight[4:], np.zeros((2, 18)))
  np.testing.assert_array_equal(same_weight, weight)
  np.testing.assert_array_equal(same_return[:4], return_[:4])


def test_weight_is_the_probability_of_reaching_the_step():
  imagined = made_dream(4, discount=0.5, weight=(1.0, 0.0))
  # The discount predicted at the start does not count.
  imagined = imagined._replace(discount=imagined.discount.at[0].set(0.0))
  _, weight = weighed(imagined)
  np.testing.assert_allclose(weight[:, 0], [1, 0.5, 0.25, 0.125, 0, 0])
  np.testing.assert_array_equal(weight[:, 1], np.zeros(HORIZON_MAX))


def test_start_at_the_end_of_an_episode_has_no_weight(imagined, last):
  _, weight = weighed(imagined)
  ended = np.asarray(last).reshape(-1)
  assert ended.sum() == 2
  np.testing.assert_array_equal(weight[:, ended], np.zeros((HORIZON_MAX, 2)))
  assert (weight[:4, ~ended] > 0).all()


def test_rollout_of_no_steps_has_no_weight(params, slow_critic, start, rollout):
  return_, weight = weighed(rollout(params, slow_critic, start, 0))
  np.testing.assert_array_equal(weight, np.zeros((HORIZON_MAX, 18)))
  assert np.isfinite(return_).all()


# Gradients.


@pytest.fixture(scope='module')
def policy_gradient(dreamer):
  return jax.jit(jax.value_and_grad(dreamer.actor_critic.loss, has_aux=True))


def steps_of(dreamer, imagined, first=0, count=HORIZON_MAX):
  policy = dreamer.actor_critic
  return dream.steps(policy, imagined, dream.track(policy, imagined), first, count)


def targets_of(imagined, part=slice(None)):
  return_, weight = weighed(imagined, gamma=0.99, lambda_=0.95)
  targets = ac.Targets(return_, return_ - imagined.value[:-1], imagined.value[:-1], weight)
  return jax.tree.map(lambda x: x[part].T, targets)


@pytest.mark.parametrize('trained', [False, True])
def test_salience_actor_and_critic_have_gradients_from_imagination(
  dreamer, params, fresh_params, slow_critic, start, rollout, policy_gradient, trained
):
  params = params if trained else fresh_params(dreamer)
  imagined = rollout(params, slow_critic, start, 4)
  steps = steps_of(dreamer, imagined)
  (loss, _), grads = policy_gradient(params['actor_critic'], steps, targets_of(imagined))
  assert np.isfinite(loss)
  for name in ('salience', 'actor', 'critic'):
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads[name]))
    assert largest > 1e-4, name
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[name]))


def test_chunks_of_a_rollout_add_up_to_the_whole(dreamer, params, imagined, policy_gradient):
  """Chunks of steps, each with the window before it, give the loss of all steps at once."""
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
    features=imagined.features.at[:, 4:].set(9.0), choice=imagined.choice.at[4:].set(3)
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
  novelty = intrinsic.information_gain(*posterior.moments)
  last = sequence.step_type == 2
  start = starts(dreamer, posterior, last, novelty, DREAM_KEYS, num_steps=2)

  @jax.jit
  def learn(params):
    imagined = dream.rollout(
      model, policy, params, params['actor_critic']['critic'], start, jnp.int32(3)
    )
    steps = steps_of(dreamer, imagined)
    return imagined, jax.grad(policy.loss, has_aux=True)(
      params['actor_critic'], steps, targets_of(imagined)
    )[0]  # fmt: skip

  imagined, grads = learn(params)
  assert imagined.mask.all() and (imagined.features[:, :3] != 0).all()
  assert imagined.choice.shape == (HORIZON_MAX, 6, 2) and imagined.choice.dtype == jnp.float32
  for name in ('salience', 'actor', 'critic'):
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads[name])) > 1e-4
