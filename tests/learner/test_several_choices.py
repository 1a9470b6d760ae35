"""Both agents act and learn with actions of several choices, some of them illegal."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from dm_env import specs
from small_dreamer import random_features, read_of
from trainer import shapes_after

from hephaestus.actors import episodes, rollout
from hephaestus.actors.environments import environment
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience, masked_ppo
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import actor_critic
from hephaestus.learner import config as learner_config
from hephaestus.learner import devices as devices_lib
from hephaestus.learner import dreamer_update, ppo_update

NUM_WORLDS, NUM_ROWS = 4, 6


class Dials(environment.Environment):
  """Two dials, of 3 and of 2 numbers; their sum is observed and rewarded, one value is illegal."""

  action_spec = specs.BoundedArray((2,), np.int32, 0, [2, 1])
  observation_spec = {  # noqa: RUF012  as a property would give it
    'sum': specs.Array((1,), np.float32),
    'action_mask': specs.BoundedArray((5,), bool, False, True),
  }
  max_steps = 3

  def reset(self, key):
    state = (jnp.int32(0), jax.random.bernoulli(key))
    return state, environment.restart(self._observe(0, state))

  def step(self, key, state, action):
    state = (state[0] + 1, jax.random.bernoulli(key))
    total = jnp.sum(action)
    end, go_on = environment.termination, environment.transition
    return state, jax.lax.cond(state[0] == 3, end, go_on, total, self._observe(total, state))

  def _observe(self, total, state):
    mask = jnp.ones(5, bool).at[1].set(state[1]).at[4].set(~state[1])
    return {'sum': jnp.full(1, total, jnp.float32), 'action_mask': mask}


@pytest.fixture(scope='module')
def world():
  made = Dials()
  environment.check(made)
  return made


def make_dreamer(world):
  """The model has one member, and so no novelty."""
  sizes = tiny.DREAMER | {'horizon_max': 2, 'ensemble_size': 1}
  config = cognition_config.CognitionConfig(**sizes, warm_up_updates=0, unimix=0.3)
  return registry.make_dreamer(config, world.observation_spec, world.action_spec)


def make_ppo(world):
  config = masked_ppo.PPOConfig(hidden_size=8)
  return masked_ppo.make_ppo(config, world.observation_spec, world.action_spec)


def unrolled(world, made, params):
  """A Sequence [N, T, ...] of one unroll."""
  unroll = rollout.make_unroll(world, made.agent, num_envs=NUM_WORLDS, sequence_length=NUM_ROWS)
  zero, state = np.int32(0), unroll.init(jax.random.key(2))
  params = made.agent.acting_params(params)
  _, sequence, _ = unroll.unroll(params, jax.random.key(1), state, zero, zero)
  return sequence


def assert_legal(sequence):
  assert sequence.action.shape == (NUM_WORLDS, NUM_ROWS, 2)
  assert sequence.action.dtype == jnp.int32
  action, mask = (
    np.asarray(x)[:, :-1] for x in (sequence.action, sequence.observation['action_mask'])
  )
  one_hots = np.concatenate([np.eye(3, dtype=bool)[action[..., 0]], np.eye(2)[action[..., 1]]], -1)
  assert not (one_hots.astype(bool) & ~mask).any()
  assert (sequence.extras['log_prob'][:, :-1] < -0.1).all()


def test_ppo_samples_legal_choices_and_learns_from_them(world):
  made = make_ppo(world)
  rates = learner_config.PPOLearnerConfig(num_minibatches=2, num_epochs=1, learning_rate=1e-2)
  scale = ppo_update.auto_scale(
    rates, num_envs=NUM_WORLDS, num_steps=NUM_ROWS - 1, num_devices=1, recurrent=False
  )
  learner = ppo_update.make_update(made, rates, scale, max_environment_steps=None)
  state = jax.jit(learner.init)(jax.random.key(0))
  sequence = unrolled(world, made, agent_lib.all_params(state))
  assert_legal(sequence)
  one = jax.tree.map(lambda x: x[None], (state, sequence))
  update = jax.pmap(learner.update, axis_name=devices_lib.DEVICES, devices=jax.local_devices()[:1])
  after, metrics = update(*one)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, metrics)))
  moved = jax.tree.map(lambda a, b: np.abs(a - b[0]).max(), state.params, after.params)
  assert all(x > 0 for x in jax.tree.leaves(moved['actor']))


def test_dreamer_samples_legal_choices_and_its_actor_learns_from_them(world):
  """The policy samples imagined choices, too, so the update, of one member, is only traced."""
  made = make_dreamer(world)
  learner = dreamer_update.make_update(made, learner_config.LearnerConfig(batch_size=NUM_WORLDS))
  state = jax.jit(learner.init)(jax.random.key(0))
  sequence = unrolled(world, made, agent_lib.all_params(state))
  assert_legal(sequence)
  after, metrics = shapes_after(learner, state, sequence)
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(after) == shapes(state) and 'actor_critic/critic_loss' in metrics

  policy, num_steps = made.actor_critic, NUM_ROWS - 1
  features = random_features(made, np.random.default_rng(0), num_steps, NUM_WORLDS)
  time_major = experience.time_major(sequence)
  steps = actor_critic.ImaginedSteps(
    read=read_of(features),
    choice=time_major.action[:-1],
    log_prob=jnp.full((num_steps, NUM_WORLDS), -1.0),
    mask=time_major.observation['action_mask'][:-1],
  )
  zeros = {name: jnp.zeros((num_steps, NUM_WORLDS)) for name in policy.heads}
  ones = jnp.ones((num_steps, NUM_WORLDS))
  targets = actor_critic.Targets(returns=zeros, advantage=ones, weight=0.1 * ones)
  params = state.params['actor_critic']
  grads, _ = jax.jit(jax.grad(policy.loss, has_aux=True))(params, steps, targets)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(grads['actor']))


def test_explained_policy_lists_every_choice():
  world = Dials()
  config = masked_ppo.PPOConfig(hidden_size=8)
  agent = masked_ppo.make_ppo(config, world.observation_spec, world.action_spec).agent
  play = episodes.Play(world, agent, 1, greedy=False)
  params = jax.jit(agent.init_params)(jax.random.key(0))
  moments = list(play.steps(params, jax.random.key(1)))
  names = np.array(['0: 0', '0: 1', '0: 2', '1: 0', '1: 1'])
  for before, after in itertools.pairwise(moments):
    legal = before.observation['action_mask']
    assert set(before.policy) == set(names[legal])
    assert list(before.policy.values()) == sorted(before.policy.values(), reverse=True)
    assert sum(before.policy.values()) == pytest.approx(2.0, abs=1e-5)
    first, second = after.action
    chosen = before.policy[f'0: {first}'] * before.policy[f'1: {second}']
    assert after.probability == pytest.approx(chosen, rel=1e-5)
  assert moments[-1].policy is None
