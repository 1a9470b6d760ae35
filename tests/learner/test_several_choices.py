"""Both agents act and learn with actions of several choices, some of them illegal."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from dm_env import specs

from hephaestus.actors import episodes, rollout
from hephaestus.actors.environments import environment
from hephaestus.agents import masked_ppo
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.learner import config as learner_config
from hephaestus.learner import devices as devices_lib
from hephaestus.learner import dreamer_update, ppo_update

pytestmark = pytest.mark.usefixtures('little_optimization')

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


@pytest.fixture(scope='module', params=['dreamer', 'ppo'])
def trained(request):
  """(parameters before, after, a Sequence [N, T, ...], metrics) of one unroll and one update."""
  world = Dials()
  environment.check(world)
  if request.param == 'dreamer':
    sizes = tiny.DREAMER | {'horizon_max': 2}
    config = dreamer_config.DreamerConfig(**sizes, warm_up_updates=0, unimix=0.3)
    made = dreamer_agent.make_dreamer(config, world.observation_spec, world.action_spec)
    rates = learner_config.LearnerConfig(batch_size=NUM_WORLDS, rate_warm_up=1)
    learner = dreamer_update.make_update(made, rates)
    devices = devices_lib.DEVICES
  else:
    made = masked_ppo.make_ppo(
      masked_ppo.PPOConfig(hidden_size=8), world.observation_spec, world.action_spec
    )
    rates = learner_config.PPOLearnerConfig(num_minibatches=2, num_epochs=1, learning_rate=1e-2)
    scale = ppo_update.auto_scale(
      rates, num_envs=NUM_WORLDS, num_steps=NUM_ROWS - 1, num_devices=1, recurrent=False
    )
    learner = ppo_update.make_update(made, rates, scale, max_environment_steps=None)
    devices = devices_lib.DEVICES
  state = jax.jit(learner.init)(jax.random.key(0))
  unroll = rollout.make_unroll(world, made.agent, num_envs=NUM_WORLDS, sequence_length=NUM_ROWS)
  zero = np.int32(0)
  _, sequence, _ = unroll.unroll(
    made.agent.acting_params(state.params),
    jax.random.key(1),
    unroll.init(jax.random.key(2)),
    zero,
    zero,
  )
  one = jax.tree.map(lambda x: x[None], (state, sequence))
  after, metrics = jax.pmap(learner.update, axis_name=devices, devices=jax.local_devices()[:1])(
    *one
  )
  return state.params, jax.tree.map(lambda x: x[0], after.params), sequence, metrics


def test_only_legal_choices_are_sampled(trained):
  _, _, sequence, _ = trained
  assert sequence.action.shape == (NUM_WORLDS, NUM_ROWS, 2)
  assert sequence.action.dtype == jnp.int32
  action, mask = (
    np.asarray(x)[:, :-1] for x in (sequence.action, sequence.observation['action_mask'])
  )
  one_hots = np.concatenate([np.eye(3, dtype=bool)[action[..., 0]], np.eye(2)[action[..., 1]]], -1)
  assert not (one_hots.astype(bool) & ~mask).any()
  assert (sequence.extras['log_prob'][:, :-1] < -0.1).all()


def test_one_update_changes_the_actor_by_finite_numbers(trained):
  before, after, _, metrics = trained
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, metrics)))
  find = lambda params: params.get('actor_critic', params)['actor']
  for old, new in zip(*(jax.tree.leaves(find(params)) for params in (before, after)), strict=True):
    assert np.abs(old - new).max() > 0


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
