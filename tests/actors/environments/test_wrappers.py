import dataclasses

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors.environments import catch, environment, wrappers

FIRST, MID, LAST = (step_type.value for step_type in dm_env.StepType)


class Corridor(environment.Environment):
  """Terminates at the third step; the reward is the action; only action 1 of 3 is legal."""

  action_spec = specs.DiscreteArray(3)
  max_steps = 3

  @property
  def observation_spec(self):
    return {
      'count': specs.BoundedArray((), np.float32, 0.0, 3.0),
      'action_mask': specs.BoundedArray((3,), bool, False, True),
    }

  def reset(self, key):
    del key
    count = jnp.zeros((), jnp.float32)
    return count, environment.restart(self._observe(count))

  def step(self, key, state, action):
    del key
    count = state + 1
    over = jax.lax.cond(
      count == 3,
      environment.termination,
      environment.transition,
      jnp.float32(action),
      self._observe(count),
    )
    return count, over

  def _observe(self, count):
    return {'count': count, 'action_mask': jnp.array([False, True, False])}


class ScriptedCorridor(Corridor):
  def scripted_action(self, state):
    del state
    return jnp.int32(2)


def test_last_observation_is_a_step_and_first_follows():
  env = wrappers.AutoReset(Corridor())
  state, timestep = jax.jit(env.reset)(jax.random.key(0))
  timesteps, step = [timestep], jax.jit(env.step)
  for seed in range(5):
    state, timestep = step(jax.random.key(seed), state, 2)
    timesteps.append(timestep)
  assert [int(timestep.step_type) for timestep in timesteps] == [FIRST, MID, MID, LAST, FIRST, MID]
  assert [float(timestep.observation['count']) for timestep in timesteps] == [0, 1, 2, 3, 0, 1]
  assert [float(timestep.reward) for timestep in timesteps] == [0, 2, 2, 2, 0, 2]
  assert [float(timestep.discount) for timestep in timesteps] == [1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(('limit', 'discount'), [(2, 1.0), (3, 0.0), (4, 0.0)])
def test_time_limit_truncates_and_does_not_terminate(limit, discount):
  """At a limit of three steps the episode terminates, because that is its end."""
  env = wrappers.TimeLimit(Corridor(), limit)
  key = jax.random.key(0)
  state, timestep = jax.jit(env.reset)(key)
  timesteps, step = [timestep], jax.jit(env.step)
  while not timesteps[-1].last():
    state, timestep = jax.device_get(step(key, state, 1))
    timesteps.append(timestep)
  assert len(timesteps) - 1 == min(limit, 3)
  assert [float(timestep.discount) for timestep in timesteps] == [1.0] * (len(timesteps) - 1) + [
    discount
  ]


@pytest.fixture(scope='module')
def played():
  """(which of ten environments are over) -> a step with resets of all, and one with resets in groups."""

  class Costly(catch.Catch):
    has_costly_reset = True

  assert wrappers.TimeLimit(Costly()).has_costly_reset

  @jax.jit
  def play(is_over):
    reset_key, step_key = jax.random.split(jax.random.key(0))
    results = []
    for env in (catch.Catch(), Costly()):
      env = wrappers.AutoReset(env)
      state, _ = jax.vmap(env.reset)(jax.random.split(reset_key, 10))
      step = jax.vmap(env.step, in_axes=(0, 0, None))
      keys, state = jax.random.split(step_key, 10), state._replace(is_over=is_over)
      results.append(step(keys, state, 1))
    return results

  return lambda is_over: jax.device_get(play(is_over))


@pytest.mark.parametrize('num_over', [0, 1, 10])
def test_resets_in_groups_match_resets_of_all(played, num_over):
  """Ten environments, which are no multiple of the group size, with different keys."""
  is_over = np.random.default_rng(0).permutation(np.arange(10) < num_over)
  one, other = played(is_over)
  assert (one[1].first() == is_over).all()
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize('num_envs', [4, 6, 9])
def test_next_episode_of_resets_in_groups_follows_the_last_state_once(num_envs):
  class Counting(catch.Catch):
    has_costly_reset = True

    def reset(self, key):
      state, timestep = super().reset(key)
      return (0, state), timestep

    def step(self, key, state, action):
      following, timestep = super().step(key, state[1], action)
      return (state[0], following), timestep

    def next_episode(self, key, state):
      (_, following), timestep = self.reset(key)
      return (state[0] + 1, following), timestep

  env = wrappers.AutoReset(Counting())
  state, _ = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), num_envs))
  step = jax.jit(jax.vmap(env.step, in_axes=(0, 0, None)))
  for number in range(3):
    keys = jax.random.split(jax.random.key(number), num_envs)
    state, _ = step(keys, state._replace(is_over=jnp.ones(num_envs, bool)), 1)
  assert state.env_state[0].tolist() == [3] * num_envs


def test_reference_returns_of_catch_are_exact():
  reference = wrappers.reference_returns(catch.Catch(), num_episodes=4096)
  assert reference.scripted == 1.0
  # In any column of the paddle, the ball falls there with probability 1/5: 1/5 - 4/5.
  # Returns of ±1 deviate by 0.8 there: four standard errors of the mean are 0.05.
  assert reference.random == pytest.approx(-0.6, abs=0.05)


def test_scripted_policy_no_better_than_random_gives_no_reference():
  class Aimless(Corridor):
    def scripted_action(self, state):
      del state
      return jnp.int32(1)

  assert wrappers.reference_returns(Aimless()) is wrappers.reference_returns(Corridor()) is None


def test_scores_are_0_for_legal_random_actions_and_1_for_the_script():
  reference = wrappers.reference_returns(ScriptedCorridor(), num_episodes=64)
  assert reference == wrappers.ReferenceReturns(random=3.0, scripted=6.0)
  assert [wrappers.normalised_score(x, reference) for x in (3.0, 6.0, 4.5)] == [0.0, 1.0, 0.5]


def test_reference_returns_of_an_environment_without_a_hash():
  @dataclasses.dataclass
  class Unhashable(ScriptedCorridor):
    width: int = 1

  reference = wrappers.reference_returns(Unhashable(), num_episodes=64)
  assert reference == wrappers.ReferenceReturns(random=3.0, scripted=6.0)


def test_episode_beyond_max_steps_is_rejected():
  class Endless(ScriptedCorridor):
    max_steps = 2

  with pytest.raises(ValueError, match=r'environment\.max_steps=2'):
    wrappers.reference_returns(Endless())


def test_score_by_an_unknown_metric_is_rejected():
  class Misnamed(ScriptedCorridor):
    scored_by = 'distance'

  with pytest.raises(ValueError, match="scored_by='distance'"):
    wrappers.reference_returns(Misnamed())


def test_continuous_random_actions_fill_their_bounds():
  low, high = np.array([-1.0, 2.0]), np.array([1.0, 4.0])
  spec = specs.BoundedArray((2,), np.float32, low, high)
  draw = jax.jit(jax.vmap(lambda key: wrappers.random_action(key, spec, jnp.zeros(()))))
  actions = np.asarray(draw(jax.random.split(jax.random.key(0), 256)))
  assert actions.dtype == np.float32
  np.testing.assert_allclose(actions.min(axis=0), low, atol=0.1)
  np.testing.assert_allclose(actions.max(axis=0), high, atol=0.1)


def test_random_choice_among_very_many_actions_is_compiled_without_large_constants():
  spec = specs.DiscreteArray(10_000)
  mask = np.isin(np.arange(10_000), (7, 9_999))
  draw = lambda key: wrappers.random_action(key, spec, {'action_mask': jnp.asarray(mask)})
  keys = jax.random.split(jax.random.key(0), 32)
  traced = jax.make_jaxpr(jax.vmap(draw))(keys)
  assert sum(np.size(x) for x in traced.consts) < 100_000
  assert set(np.asarray(jax.vmap(draw)(keys)).tolist()) == {7, 9_999}


def test_several_random_choices_are_uniform_among_the_legal():
  spec = specs.BoundedArray((2,), np.int32, 0, [2, 1])
  mask = np.array([True, False, True, False, False])  # of the second, none is legal
  keys = jax.random.split(jax.random.key(0), 512)
  for observation, first in ((np.zeros(()), [0, 1, 2]), ({'action_mask': mask}, [0, 2])):
    draw = jax.jit(jax.vmap(lambda key, seen: wrappers.random_action(key, spec, seen), (0, None)))
    actions = np.asarray(draw(keys, observation))
    assert actions.dtype == np.int32 and actions.shape == (512, 2)
    assert sorted(set(actions[:, 0])) == first
    for choice in first:
      among = actions[actions[:, 0] == choice, 1]
      np.testing.assert_allclose(len(among) / 512, 1 / len(first), atol=0.09)
      np.testing.assert_allclose(among.mean(), 0.5, atol=0.15)  # independent of the other
