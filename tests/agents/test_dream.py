"""Dreams: where they begin, that they follow the model and the policy, and where they end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import dream, intrinsic, world_model

WINDOW, HORIZON_MAX, NUM_MEMBERS = 3, 6, 3
NUM_ROWS, BATCH = 6, 3
KEYS = jax.random.split(jax.random.key(5), BATCH)
DREAM_KEYS = jax.random.split(jax.random.key(6), BATCH)


compiled = {}


def starts(dreamer, *arguments, num_steps=None):
  """`dream.starts`, compiled once for each agent and number."""
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
  """A compiled rollout that counts its traces."""

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
def dreamt(rollout, params, slow_critic, start):
  return rollout(params, slow_critic, start, 4)


def latent_at(dreamer, dreamt, row):
  """The latents at one row of a dream; row 0 is the start."""
  features = dreamt.features[:, row]
  size = dreamer.config.deterministic_size
  return world_model.Latent(features[:, :size], features[:, size:], features[:, :0])


# Where dreams begin.


def numbered_posterior(num_rows=NUM_ROWS, batch=BATCH):
  """Every feature says which row of which sequence it comes from: 100 b + t, for t from 1."""
  number = 100.0 * jnp.arange(batch) + jnp.arange(1, num_rows + 1)[:, None]
  first = jnp.zeros((num_rows, batch), bool).at[0, 0].set(True).at[3, 1].set(True)
  latent = world_model.Latent(number[..., None], -number[..., None], jnp.zeros((*number.shape, 0)))
  return world_model.Posterior(latent, (), first), number


@pytest.mark.parametrize('count', [None, 5])
def test_start_remembers_the_steps_before_it(dreamer, count):
  posterior, number = numbered_posterior()
  last = jnp.zeros(number.shape, bool).at[2, 1].set(True)
  start = starts(dreamer, posterior, last, number / 2, DREAM_KEYS, num_steps=count)
  total = BATCH * min(count or NUM_ROWS, NUM_ROWS)
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


def test_drawn_starts_differ_between_keys_and_not_between_neighbours(dreamer):
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


# What a dream follows.


def test_a_dream_begins_at_its_start(dreamt, start):
  np.testing.assert_array_equal(dreamt.features[:, 0], start.latent.features)
  np.testing.assert_array_equal(dreamt.novelty[0], start.novelty)


def test_track_of_a_dream_is_its_memory_and_then_its_steps(dreamer, dreamt, start):
  track = dream.track(dreamer.actor_critic, dreamt)
  before = jax.tree.map(lambda x: x[:, : WINDOW - 1], track)
  jax.tree.map(np.testing.assert_array_equal, before, start.memory)
  np.testing.assert_array_equal(track.features[:, WINDOW - 1 :], dreamt.features)
  np.testing.assert_array_equal(track.novelty[:, WINDOW - 1 :], dreamt.novelty[:-1].T)
  own = start.memory.episode[:, -1] + start.begins
  assert (track.episode[:, WINDOW - 1 :] == own[:, None]).all()


def test_each_imagined_row_follows_from_the_choice_before_it(dreamer, params, dreamt):
  model, world = dreamer.model, params['world_model']

  @jax.jit
  def next_row(latent, choice):
    members = model.members(world, world_model.Recurrent(latent, model.encode_action(choice)))
    return members.mean(0), intrinsic.information_gain(*model.priors(world, members).moments())

  for t in range(3):
    deterministic, novelty = next_row(latent_at(dreamer, dreamt, t), dreamt.choice[t])
    expected = latent_at(dreamer, dreamt, t + 1).deterministic
    np.testing.assert_allclose(deterministic, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(novelty, dreamt.novelty[t + 1], rtol=1e-3, atol=1e-5)
  other = next_row(latent_at(dreamer, dreamt, 0), (dreamt.choice[0] + 1) % 4)[0]
  assert np.abs(other - latent_at(dreamer, dreamt, 1).deterministic).max() > 1e-3


def test_without_a_window_the_rows_that_are_learned_from_are_all_that_is_kept(
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
  def next_rows(params, features, choice):
    deterministic, stochastic = jnp.split(features, [dreamer.config.deterministic_size], axis=-1)
    latent = world_model.Latent(deterministic, stochastic, features[:, :0])
    recurrent = world_model.Recurrent(latent, model.encode_action(choice))
    return model.members(params['world_model'], recurrent).mean(0)

  dreamt = rollout(params, start, HORIZON_MAX)
  assert dreamt.features.shape[1] == HORIZON_MAX
  np.testing.assert_array_equal(dreamt.features[:, 0], start.latent.features)
  for t in range(HORIZON_MAX - 1):
    expected = next_rows(params, dreamt.features[:, t], dreamt.choice[t])
    found = dreamt.features[:, t + 1, : dreamer.config.deterministic_size]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_predictions_are_those_of_the_row_they_stand_at(dreamer, params, slow_critic, dreamt):
  model, policy = dreamer.model, dreamer.actor_critic
  features, track = dreamt.features, dream.track(policy, dreamt)
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
  np.testing.assert_allclose(dreamt.reward[steps], reward[steps], **close)
  np.testing.assert_allclose(dreamt.discount[steps], discount[steps], **close)
  np.testing.assert_allclose(dreamt.value[:4], value[:4], **close)
  np.testing.assert_array_equal(dreamt.mask[:4], mask[:4])
  assert np.ptp(np.asarray(value[:4])) > 0.1  # not all the same, or nothing would be shown


def test_only_actions_believed_legal_are_dreamt(dreamt):
  chosen = np.take_along_axis(np.asarray(dreamt.mask), np.asarray(dreamt.choice)[..., None], -1)
  nothing_legal = ~np.asarray(dreamt.mask).any(-1)
  assert (chosen[:4, :, 0] | nothing_legal[:4]).all()
  assert not np.asarray(dreamt.mask)[:4].all()  # some were believed illegal


def test_choices_are_the_policys_at_their_own_row(dreamer, params, slow_critic, start, rollout):
  """A policy that has made up its mind chooses its mode, given features, context and mask."""
  policy = dreamer.actor_critic
  sure = jax.tree.map(lambda x: x, params)
  output = sure['actor_critic']['actor']['Dense_1']
  sure['actor_critic']['actor']['Dense_1'] = jax.tree.map(lambda x: 1000 * x, output)
  dreamt = rollout(sure, slow_critic, start, 4)
  steps = steps_of(dreamer, dreamt, 0, 4)

  @jax.jit
  def modes(params, steps):
    context = policy.context.pool(params, steps.track, steps.features)
    return policy.policy(params, steps.features, context, steps.mask).mode()

  expected = modes(sure['actor_critic'], steps)
  # One per cent of all choices is still drawn at random.
  assert (expected == dreamt.choice[:4].T).mean() > 0.9
  assert len(np.unique(expected)) > 1


def test_a_dream_follows_one_member_and_dreams_follow_all(
  dreamer, params, slow_critic, start, rollout
):
  """Member k believes that the next stochastic state is 100 k: who is believed shows."""
  size = dreamer.config.stochastic_size
  output = params['world_model']['prior']['Dense_1']
  bias = jnp.zeros_like(output['bias']).at[:, :size].set(100.0 * jnp.arange(NUM_MEMBERS)[:, None])
  prior = params['world_model']['prior'] | {
    'Dense_1': {'kernel': jnp.zeros_like(output['kernel']), 'bias': bias}
  }
  changed = params | {'world_model': params['world_model'] | {'prior': prior}}
  dreamt = rollout(changed, slow_critic, start, 4)
  stochastic = np.asarray(dreamt.features[:, 1:4, -size:])
  followed = np.rint(stochastic / 100)
  assert (followed == followed[:, :1, :1]).all()
  assert set(followed[:, 0, 0]) == set(range(NUM_MEMBERS))
  noise = stochastic - 100 * followed
  assert len(np.unique(noise)) == noise.size  # fresh at every row of every dream


def test_a_dream_does_not_depend_on_its_neighbours(params, slow_critic, start, rollout, dreamt):
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
    got, expected = (np.asarray(getattr(x, name)) for x in (result, dreamt))
    np.testing.assert_array_equal(got[:, column], expected[:, column])
  np.testing.assert_array_equal(result.features[column], dreamt.features[column])
  assert (result.features[:, 2] != dreamt.features[:, 2])[
    np.arange(18) != column
  ].any(-1).all()  # fmt: skip


def test_a_dream_alone_is_the_dream_in_a_batch(params, slow_critic, start, rollout, dreamt):
  alone = jax.tree.map(lambda x: x[7:8], start)
  result = rollout(params, slow_critic, alone, 4)
  np.testing.assert_array_equal(result.choice[:, 0], dreamt.choice[:, 7])
  close = {'rtol': 1e-3, 'atol': 1e-4}
  for name in ('reward', 'discount', 'value', 'novelty'):
    got, expected = (getattr(x, name) for x in (result, dreamt))
    np.testing.assert_allclose(got[:, 0], expected[:, 7], **close)
  np.testing.assert_allclose(result.features[0], dreamt.features[7], **close)


def test_two_dreams_from_one_state_differ_by_their_keys(params, slow_critic, start, rollout):
  same = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), start.latent)
  dreamt = rollout(params, slow_critic, start._replace(latent=same), 4)
  assert len(np.unique(np.asarray(dreamt.features)[:, 1, -1])) == 18


# Where a dream ends.


def test_a_longer_dream_continues_a_shorter_one(params, slow_critic, start, rollout, dreamt):
  longer = rollout(params, slow_critic, start, HORIZON_MAX)
  np.testing.assert_array_equal(longer.choice[:4], dreamt.choice[:4])
  np.testing.assert_array_equal(longer.features[:, :4], dreamt.features[:, :4])
  np.testing.assert_array_equal(longer.reward[:5], dreamt.reward[:5])
  assert (longer.features[:, -1] != 0).all()


def test_nothing_is_dreamt_beyond_the_horizon(dreamt):
  for name in ('reward', 'discount', 'value'):
    rows = np.asarray(getattr(dreamt, name))
    assert rows.shape == (HORIZON_MAX + 1, 18)
    assert (rows[5:] == 0).all() and (rows[1:5] != 0).all()
  assert (dreamt.novelty[5:] == 0).all() and (dreamt.novelty[1:5] != 0).all()
  assert (dreamt.features[:, 4:] == 0).all() and (dreamt.features[:, :4] != 0).all()


def test_no_horizon_is_traced_again(params, slow_critic, start, rollout):
  rollout(params, slow_critic, start, 2)
  traces = rollout.traces
  horizons = [rollout(params, slow_critic, start, h).horizon for h in range(HORIZON_MAX + 1)]
  assert horizons == list(range(HORIZON_MAX + 1))
  assert rollout.traces == traces


def test_as_many_rows_are_computed_as_the_horizon_says(dreamer, params, slow_critic, start):
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


# What a dream is worth.


def made_dream(horizon, *, reward=0.0, discount=1.0, value=0.0, weight=(1.0, 1.0)):
  """A dream of two columns, every row alike."""
  rows = lambda x: jnp.full((HORIZON_MAX + 1, 2), x, jnp.float32)
  start = dream.Start((), (), (), (), jnp.array(weight), ())
  return dream.Dream(
    start=start, features=(), novelty=(), mask=(),
    choice=jnp.zeros((HORIZON_MAX, 2), jnp.int32),
    reward=rows(reward), discount=rows(discount), value=rows(value), horizon=jnp.int32(horizon),
  )  # fmt: skip


def worth(dreamt, drive=0.0, *, gamma=0.5, lambda_=1.0):
  drive = jnp.broadcast_to(jnp.float32(drive), dreamt.value.shape)
  return dream.returns_and_weights(dreamt, drive, gamma=gamma, lambda_=lambda_)


@pytest.mark.parametrize('horizon', [1, 3, HORIZON_MAX])
def test_returns_end_with_the_value_at_the_horizon(horizon):
  dreamt = made_dream(horizon)
  dreamt = dreamt._replace(value=dreamt.value.at[horizon].set(8.0))
  return_, weight = worth(dreamt)
  expected = 8.0 * 0.5 ** np.arange(horizon, 0, -1)
  np.testing.assert_allclose(return_[:horizon], np.repeat(expected[:, None], 2, 1))
  np.testing.assert_array_equal(weight.sum(0), [horizon, horizon])


def test_rewards_and_drives_arrive_at_the_row_after_the_choice():
  dreamt = made_dream(3)
  dreamt = dreamt._replace(reward=dreamt.reward.at[2].set(4.0))
  drive = jnp.zeros_like(dreamt.reward).at[1].set(10.0)
  return_, _ = worth(dreamt, drive)
  np.testing.assert_allclose(return_[:3, 0], [10 + 0.5 * 4, 4, 0])


def test_rows_beyond_the_horizon_weigh_nothing_and_change_nothing(dreamt):
  noise = jnp.where(jnp.arange(HORIZON_MAX + 1)[:, None] > 4, jnp.nan, 0.0)
  garbage = dreamt._replace(
    reward=dreamt.reward + noise, discount=dreamt.discount + noise, value=dreamt.value + noise
  )
  return_, weight = worth(dreamt)
  same_return, same_weight = worth(garbage, noise)
  np.testing.assert_array_equal(weight[4:], np.zeros((2, 18)))
  np.testing.assert_array_equal(same_weight, weight)
  np.testing.assert_array_equal(same_return[:4], return_[:4])


def test_a_row_weighs_as_much_as_the_episode_is_likely_to_reach_it():
  dreamt = made_dream(4, discount=0.5, weight=(1.0, 0.0))
  # What the start's own row predicted of itself does not matter.
  dreamt = dreamt._replace(discount=dreamt.discount.at[0].set(0.0))
  _, weight = worth(dreamt)
  np.testing.assert_allclose(weight[:, 0], [1, 0.5, 0.25, 0.125, 0, 0])
  np.testing.assert_array_equal(weight[:, 1], np.zeros(HORIZON_MAX))


def test_a_dream_from_the_end_of_an_episode_weighs_nothing(dreamt, last):
  _, weight = worth(dreamt)
  ended = np.asarray(last).reshape(-1)
  assert ended.sum() == 2
  np.testing.assert_array_equal(weight[:, ended], np.zeros((HORIZON_MAX, 2)))
  assert (weight[:4, ~ended] > 0).all()


def test_a_dream_of_no_rows_weighs_nothing(params, slow_critic, start, rollout):
  return_, weight = worth(rollout(params, slow_critic, start, 0))
  np.testing.assert_array_equal(weight, np.zeros((HORIZON_MAX, 18)))
  assert np.isfinite(return_).all()


# What is learned from a dream.


@pytest.fixture(scope='module')
def policy_gradient(dreamer):
  return jax.jit(jax.value_and_grad(dreamer.actor_critic.loss, has_aux=True))


def steps_of(dreamer, dreamt, first=0, count=HORIZON_MAX):
  policy = dreamer.actor_critic
  return dream.steps(policy, dreamt, dream.track(policy, dreamt), first, count)


def targets_of(dreamt, rows=slice(None)):
  return_, weight = worth(dreamt, gamma=0.99, lambda_=0.95)
  targets = ac.Targets(return_, return_ - dreamt.value[:-1], dreamt.value[:-1], weight)
  return jax.tree.map(lambda x: x[rows].T, targets)


@pytest.mark.parametrize('trained', [False, True])
def test_salience_actor_and_critic_learn_from_a_dream(
  dreamer, params, fresh_params, slow_critic, start, rollout, policy_gradient, trained
):
  params = params if trained else fresh_params(dreamer)
  dreamt = rollout(params, slow_critic, start, 4)
  steps = steps_of(dreamer, dreamt)
  (loss, _), grads = policy_gradient(params['actor_critic'], steps, targets_of(dreamt))
  assert np.isfinite(loss)
  for name in ('salience', 'actor', 'critic'):
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads[name]))
    assert largest > 1e-4, name
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[name]))


def test_chunks_of_a_dream_add_up_to_the_whole(dreamer, params, dreamt, policy_gradient):
  """Chunks of steps, each with the window before it, give the loss of all steps at once."""
  policy_params, targets = params['actor_critic'], targets_of(dreamt)
  whole = policy_gradient(policy_params, steps_of(dreamer, dreamt), targets)
  parts = [
    policy_gradient(
      policy_params,
      steps_of(dreamer, dreamt, first, 2),
      targets_of(dreamt, slice(first, first + 2)),
    )
    for first in range(0, HORIZON_MAX, 2)
  ]
  summed = jax.tree.map(lambda *x: sum(x), *parts)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), summed, whole)


def test_steps_beyond_the_horizon_have_no_gradient(dreamer, params, dreamt, policy_gradient):
  targets = targets_of(dreamt)
  changed = dreamt._replace(
    features=dreamt.features.at[:, 4:].set(9.0), choice=dreamt.choice.at[4:].set(3)
  )
  results = [
    policy_gradient(params['actor_critic'], steps_of(dreamer, x), targets)
    for x in (dreamt, changed)
  ]
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_continuous_world_is_dreamt_and_learned_from(
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
    dreamt = dream.rollout(
      model, policy, params, params['actor_critic']['critic'], start, jnp.int32(3)
    )
    rows = steps_of(dreamer, dreamt)
    return dreamt, jax.grad(policy.loss, has_aux=True)(
      params['actor_critic'], rows, targets_of(dreamt)
    )[0]  # fmt: skip

  dreamt, grads = learn(params)
  assert dreamt.mask.all() and (dreamt.features[:, :3] != 0).all()
  assert dreamt.choice.shape == (HORIZON_MAX, 6, 2) and dreamt.choice.dtype == jnp.float32
  for name in ('salience', 'actor', 'critic'):
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads[name])) > 1e-4
