"""PPO's update: every part learns, devices agree, minibatches follow the environments."""

import dm_env
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trainer as trainer_lib
from hypothesis import strategies as st
from small_ppo import BATCH, LAST, NUM_STEPS, make_batch, make_ppo, make_update

from hephaestus.agents import returns
from hephaestus.learner import checkpoint, devices, ppo_update
from hephaestus.learner import config as learner_config
from hephaestus.learner.sources import on_policy


def make_trainer(ppo, num_devices=1, max_environment_steps=None, **changes):
  return trainer_lib.Trainer(
    make_update(ppo, num_devices, max_environment_steps, **changes), num_devices
  )


@pytest.fixture(scope='module')
def ppo():
  return make_ppo()


ANNEALED = 1000 * BATCH * NUM_STEPS  # steps at which the learning rate of `one_device` is 0


@pytest.fixture(scope='module')
def one_device(ppo):
  return make_trainer(ppo, max_environment_steps=ANNEALED)


def test_one_update_changes_every_module(ppo, one_device):
  before = one_device.begin().arrays()
  metrics = one_device.step(make_batch(ppo))
  after = one_device.arrays()
  for module, params in before.params.items():
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, after.params[module])
    assert min(jax.tree.leaves(moved)) > 1e-5, f'{module} did not learn'
  assert after.step == 1
  assert all(np.isfinite(value) for value in metrics.values())
  assert metrics['ppo/learning_rate'] == pytest.approx(1e-2)


def test_return_and_value_are_means_of_steps_that_act(ppo, one_device):
  """At LAST steps there is neither."""
  batch = make_batch(ppo)
  last = np.arange(NUM_STEPS + 1) % 2 == 1
  ends = np.broadcast_to(
    np.where(last, LAST, dm_env.StepType.FIRST).astype(np.int32), batch.reward.shape
  )
  one = np.broadcast_to(last.astype(np.float32), batch.reward.shape)
  batch = batch._replace(step_type=ends, reward=one, discount=1 - one)
  assert one_device.begin().step(batch)['ppo/return'] == pytest.approx(1)


def test_eight_devices_take_the_step_of_one():
  ppo = make_ppo(recurrent_size=4)
  trainers = [make_trainer(ppo, num_devices) for num_devices in (1, 8)]
  batch = make_batch(ppo)
  expected, found = (trainer.step(batch) for trainer in trainers)
  for name, value in expected.items():
    assert found[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
  one, eight = (trainer.arrays() for trainer in trainers)
  # Adam's moments are sums of gradients; its first steps would only show their signs.
  for a, b in zip(jax.tree.leaves(one.opt_state), jax.tree.leaves(eight.opt_state), strict=True):
    np.testing.assert_allclose(b, a, rtol=1e-2, atol=1e-5)
  for device in range(1, 8):
    jax.tree.map(np.testing.assert_array_equal, eight, trainers[1].arrays(device))


@pytest.mark.timeout(600)
def test_two_processes_take_the_steps_of_one_of_as_many_devices(ppo, processes):
  both = processes('ppo', 3, 'starve', devices=1)
  single = make_trainer(ppo, 2)
  for seed in range(3):
    single.step(make_batch(ppo, seed))
  both.wait_for(lambda: 3 in both.saved(), 'three updates')
  saved = checkpoint.Checkpointer(both.folder / 'checkpoints', read_only=True)
  expected = single.arrays()
  found, _ = saved.restore(on_policy.saved_shapes(expected))
  jax.tree.map(np.testing.assert_array_equal, found.train, expected)
  # One of them also reads an old sequence with each batch. All are counted before the next batch is
  # read, and before parameters are published, for which `process.py` makes the other one wait.
  published = [both.folder / f'published-{version}' for version in range(4)]
  read = [update * (BATCH + 1) for update in range(4)]
  steps = [int(path.read_text().split()[0]) for path in published]
  assert steps == [NUM_STEPS * count for count in read]
  assert found.sequences == read[-1]
  # The first process has a batch, and the other one waits for actors, which may have no parameters.
  both.wait_for(lambda: len(published[-1].read_text().split()) > 1, 'the same parameters again')
  both.running[1].kill()
  assert both.end(0, seconds=30) != 0


def test_updates_are_traced_once_and_each_has_its_own_key(ppo, one_device):
  one_device.begin()
  keys = []
  for seed in range(3):
    keys.append(tuple(one_device.arrays().key))
    one_device.step(make_batch(ppo, seed))
  assert len(set(keys)) == 3 and one_device.traces == 1


def test_no_key_is_used_twice(ppo):
  made = make_update(ppo)
  with jax.debug_key_reuse(True):  # noticed when it is traced
    state = jax.eval_shape(made.init, jax.random.key(0))
    trainer_lib.shapes_after(made, state, make_batch(ppo))


def test_update_raises_the_probability_of_the_better_action(ppo, one_device):
  trainer = one_device.begin()
  batch = make_batch(ppo)
  action = np.random.default_rng(1).integers(0, 3, batch.action.shape).astype(np.int32)
  everything = batch.observation | {'action_mask': np.ones((*action.shape, 3), bool)}
  reward = np.zeros(action.shape, np.float32)
  reward[:, 1:] = action[:, :-1] == 2  # earned by the action of the row before
  network = ppo.network
  apply = jax.jit(
    lambda params, features: network.apply(
      params, network.flatten({'features': features}), jnp.zeros(()), {}
    )[1:]
  )

  def likelihood():
    params = jax.tree.map(jnp.asarray, trainer.arrays().params)
    outputs, value = apply(params, batch.observation['features'])
    policy = network.actions.policy(outputs, None)
    return (
      policy.log_prob(jnp.asarray(action)),
      value,
      float(jnp.exp(policy.log_probs[..., 2]).mean()),
    )

  before = likelihood()[2]
  for _ in range(20):
    log_prob, value, _ = likelihood()
    trainer.step(
      batch._replace(
        observation=everything, action=action, reward=reward,
        extras={'log_prob': np.asarray(log_prob), 'value': np.asarray(value)},
      )
    )  # fmt: skip
  assert before < 0.4
  assert likelihood()[2] > 0.6


@pytest.mark.parametrize('unit', [1e-6, 1e6])
def test_update_does_not_depend_on_the_unit_of_rewards(ppo, one_device, unit):
  def learn(unit):
    one_device.begin()
    batches = (make_batch(ppo, seed) for seed in range(3))
    metrics = [one_device.step(x._replace(reward=np.float32(unit) * x.reward)) for x in batches]
    return metrics[-1], one_device.arrays().params

  (expected, params), (found, others) = learn(1.0), learn(unit)
  for name, value in expected.items():
    factor = unit if name in ('ppo/return', 'ppo/value') else 1.0
    assert found[name] == pytest.approx(factor * value, rel=2e-3, abs=1e-5 * factor), name
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), params, others)


def test_learning_rate_anneals_to_zero_over_the_run(ppo, one_device):
  before, rates = one_device.begin().arrays().params, []
  for environment_step in (ANNEALED + 1, ANNEALED // 4):
    halves = jnp.array([[environment_step, 0]], jnp.uint32)
    one_device.state = one_device.state._replace(environment_step=halves)
    rates.append(one_device.step(make_batch(ppo))['ppo/learning_rate'])
    if environment_step > ANNEALED:
      jax.tree.map(np.testing.assert_array_equal, before, one_device.arrays().params)
  np.testing.assert_allclose(rates, [0, 7.5e-3], rtol=1e-5)
  assert make_update(ppo, 1, ANNEALED, anneal=False).anneal_until is None


def test_environment_steps_are_counted_beyond_32_bits(ppo, one_device):
  state = one_device.begin().state
  assert ppo_update.environment_step(jax.tree.map(lambda x: x[0], state)) == 0
  full = jnp.array([[2**32 - 1, 2]], jnp.uint32)
  one_device.state = state._replace(environment_step=full)
  one_device.step(make_batch(ppo))
  steps = ppo_update.environment_step(jax.tree.map(lambda x: x[0], one_device.state))
  assert steps == 3 * 2**32 - 1 + BATCH * NUM_STEPS


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_the_mean():
  return_, weight = jnp.array([1.0, 2, 3, 1e6]), jnp.array([1.0, 1, 1, 0])
  explained = lambda value: returns.explained_variance(return_, jnp.asarray(value), weight, jnp.sum)
  assert explained([1.0, 2, 3, 0]) == pytest.approx(1)
  assert explained([5.0, 5, 5, 0]) == pytest.approx(0)
  assert explained([3.0, 2, 1, 0]) == pytest.approx(1 - 4)


# Numbers of minibatches and epochs.

AUTO = learner_config.PPOLearnerConfig()


@pytest.mark.parametrize(
  ('num_envs', 'num_steps', 'expected'),
  [
    (256, 128, (4, 4, 2.5e-4)),
    (512, 128, (8, 2, 2.5e-4)),
    (2048, 128, (32, 2, 6.25e-5)),
    (4, 128, (4, 4, 2.5e-4)),
    (4096, 16, (8, 2, 2.5e-4)),
    (65536, 16, (128, 2, 1.5625e-5)),
  ],
)
def test_auto_scale_follows_the_number_of_environments(num_envs, num_steps, expected):
  assert ppo_update.auto_scale(AUTO, num_envs=num_envs, num_steps=num_steps) == expected


def test_auto_scale_keeps_set_numbers_and_scales_the_rate():
  scale = lambda **changes: ppo_update.auto_scale(
    learner_config.PPOLearnerConfig(**changes), num_envs=2048, num_steps=128
  )
  assert scale(num_minibatches=16) == (16, 2, 1.25e-4)
  assert scale(num_epochs=4) == (32, 4, 3.125e-5)
  assert scale(learning_rate=1e-3) == (32, 2, 1e-3)
  assert scale(num_minibatches=8, num_epochs=1, learning_rate=1.0) == (8, 1, 1.0)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  local=st.integers(1, 300), num_steps=st.integers(1, 200), num_devices=st.sampled_from([1, 2, 8]),
  recurrent=st.booleans(),
)  # fmt: skip
def test_auto_scale_chooses_numbers_that_divide(local, num_steps, num_devices, recurrent):
  scale = ppo_update.auto_scale(
    AUTO, num_envs=local * num_devices, num_steps=num_steps, num_devices=num_devices,
    recurrent=recurrent,
  )  # fmt: skip
  block = ppo_update.envs_per_block(scale.num_minibatches, num_steps, recurrent)
  assert local % block == 0
  assert (block if recurrent else block * num_steps) % scale.num_minibatches == 0
  assert 2 <= scale.num_epochs <= 4
  by_hand = learner_config.PPOLearnerConfig(
    num_minibatches=scale.num_minibatches, num_epochs=scale.num_epochs
  )
  assert scale == ppo_update.auto_scale(
    by_hand, num_envs=local * num_devices, num_steps=num_steps, num_devices=num_devices,
    recurrent=recurrent,
  )  # fmt: skip


@pytest.mark.parametrize(
  ('changes', 'options', 'words'),
  [
    ({}, {'num_devices': 3}, r'actor.num_envs=16: does not divide over 3 devices; 15 would'),
    (
      {'num_minibatches': 5},
      {},
      r'learner.num_minibatches=5: does not divide 16 environments of 6 steps',
    ),
    ({'num_minibatches': 3}, {'recurrent': True}, r'into whole streams; (2|4) would'),
    ({'num_minibatches': 32}, {'recurrent': True}, r'learner.num_minibatches=32.*16 would'),
  ],
)
def test_numbers_that_do_not_divide_are_refused_by_name(changes, options, words):
  config = learner_config.PPOLearnerConfig(**changes)
  with pytest.raises(ValueError, match=words):
    ppo_update.auto_scale(config, num_envs=16, num_steps=6, **options)


@pytest.mark.parametrize('name', ['num_minibatches', 'learning_rate', 'max_gradient', 'log_period'])
def test_impossible_number_is_refused_by_name(name):
  with pytest.raises(ValueError, match=f'learner.{name}=0: must be positive'):
    learner_config.PPOLearnerConfig(**{name: 0})


@pytest.mark.parametrize(('memory', 'minibatches'), [(0, 4), (4, 4)])
def test_each_epoch_reads_every_step_once(memory, minibatches):
  """Steps carry their number as their value; the loss is replaced by one that returns it."""
  ppo = make_ppo(recurrent_size=memory)
  read = []

  class Spy:
    def __getattr__(self, name):
      return getattr(ppo.network, name)

    def loss(self, params, steps, memory):
      jax.debug.callback(lambda value: read.append(np.asarray(value).ravel()), steps.value)
      return 0.0 * jax.tree.leaves(params)[0].sum(), {}

  config = learner_config.PPOLearnerConfig(num_minibatches=minibatches, num_epochs=2)
  scale = ppo_update.auto_scale(config, num_envs=BATCH, num_steps=NUM_STEPS, recurrent=bool(memory))
  made = ppo_update.make_update(ppo._replace(network=Spy()), config, scale)
  batch = make_batch(ppo)
  number = np.arange(BATCH * (NUM_STEPS + 1), dtype=np.float32).reshape(BATCH, -1)
  batch = batch._replace(extras=batch.extras | {'value': number})
  add_axis = lambda x: jnp.asarray(x)[None]
  state = jax.jit(made.init)(jax.random.key(0))
  update = jax.jit(jax.vmap(made.update, axis_name=devices.DEVICES))
  update(jax.tree.map(add_axis, state), jax.tree.map(add_axis, batch))
  jax.effects_barrier()
  assert len(read) == 2 * minibatches
  epochs = np.concatenate(read).reshape(2, -1)
  for epoch in epochs:
    np.testing.assert_array_equal(np.sort(epoch), np.sort(number[:, :-1].ravel()))
  assert not np.array_equal(*epochs)
