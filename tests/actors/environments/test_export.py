"""Our environments in the hands of other trainers."""

import warnings

import corridor
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from dm_env import test_utils

from hephaestus.actors import environments
from hephaestus.actors.environments import catch, export, wrappers
from hephaestus.actors.environments.cognition import rooms


@pytest.fixture(scope='module', params=['catch', 'corridor'])
def environment(request):
  """Observes an array, or a dictionary with an action mask."""
  return corridor.make('jax') if request.param == 'corridor' else environments.make('catch')


def test_gymnasium_checks_the_environment(environment):
  pytest.importorskip('gymnasium')
  from gymnasium.utils import env_checker

  exported = export.as_gymnasium(environment, render_mode='rgb_array')
  with warnings.catch_warnings():
    warnings.simplefilter('error')  # such as observations beyond their space
    # The wind of the corridor has no bounds.
    warnings.filterwarnings('ignore', '.*imum value is -?infinity')
    env_checker.check_env(exported, skip_render_check=True)
  observation, info = exported.reset(seed=3)
  again, _ = exported.reset(seed=3)
  jax.tree.map(np.testing.assert_array_equal, observation, again)
  assert ('action_mask' in info) == isinstance(environment.observation_spec, dict)


def test_gymnasium_episode_ends_as_the_environment_says():
  pytest.importorskip('gymnasium')
  exported = export.as_gymnasium(wrappers.TimeLimit(environments.make('catch'), 3))
  exported.reset(seed=0)
  ends = [exported.step(1)[2:4] for _ in range(3)]
  assert ends == [(False, False), (False, False), (False, True)]
  for _ in range(2):
    with pytest.raises(ValueError, match='the episode is over; call reset'):
      exported.step(1)


def test_dm_env_checks_the_environment(environment):
  exported = export.as_dm_env(environment)

  class Checked(test_utils.EnvironmentTestMixin, absltest.TestCase):
    def make_object_under_test(self):
      exported.restart(1)  # compiled for all checks
      return exported

    def make_action_sequence(self):
      mask = None
      timestep = self.environment.reset()
      rng = np.random.default_rng(0)
      for _ in range(40):
        if isinstance(timestep.observation, dict):
          mask = timestep.observation.get('action_mask')
        spec = self.environment.action_spec()
        legal = np.arange(spec.num_values) if mask is None else np.flatnonzero(mask)
        yield spec.dtype.type(rng.choice(legal))

  result = absltest.unittest.TestResult()
  absltest.unittest.defaultTestLoader.loadTestsFromTestCase(Checked).run(result)
  assert result.testsRun > 3 and not result.errors and not result.failures, result


def test_gymnax_environment_runs_in_a_scan_as_in_purejaxrl(environment):
  exported, params = export.as_gymnax(environment)

  def act(key, observation):
    mask = observation.get('action_mask') if isinstance(observation, dict) else None
    logits = jnp.zeros(exported.num_actions)
    return jax.random.categorical(key, logits if mask is None else jnp.where(mask, 0.0, -jnp.inf))

  @jax.jit
  def rollout(key):
    key, reset_key = jax.random.split(key)
    observation, state = jax.vmap(exported.reset, in_axes=(0, None))(
      jax.random.split(reset_key, 4), params
    )

    def one(carry, _):
      observation, state, key = carry
      key, act_key, step_key = jax.random.split(key, 3)
      action = jax.vmap(act)(jax.random.split(act_key, 4), observation)
      following, state, reward, done, info = jax.vmap(exported.step, in_axes=(0, 0, 0, None))(
        jax.random.split(step_key, 4), state, action, params
      )
      return (following, state, key), (following, reward, done, info)

    return jax.lax.scan(one, (observation, state, key), None, 64)[1]

  observation, reward, done, info = rollout(jax.random.key(0))
  assert reward.shape == done.shape == (64, 4) and reward.dtype == jnp.float32
  assert np.isfinite(np.asarray(reward)).all()
  shapes = jax.tree.map(lambda x: x.shape[2:], observation)
  assert shapes == jax.tree.map(lambda spec: spec.shape, environment.observation_spec)
  if isinstance(environment.observation_spec, dict):
    np.testing.assert_array_equal(info['action_mask'], observation['action_mask'])


def test_gymnax_step_resets_at_the_end_and_shows_the_last_observation():
  exported, params = export.as_gymnax(catch.Catch())
  observation, state = jax.jit(exported.reset)(jax.random.key(0), params)
  step = jax.jit(exported.step)
  dones = []
  for index in range(9):
    observation, state, _, done, info = step(jax.random.key(index), state, 1, params)
    dones.append(bool(done))
  assert dones == [False] * 8 + [True]
  assert not info['truncated'] and info['discount'] == 0.0
  assert not np.array_equal(observation, info['terminal_observation'])
  truncated, _ = export.as_gymnax(wrappers.TimeLimit(catch.Catch(), 2))
  _, state = jax.jit(truncated.reset)(jax.random.key(0))
  step = jax.jit(truncated.step)
  for index in range(2):
    _, state, _, done, info = step(jax.random.key(index), state, 1)
  assert done and info['truncated'] and info['discount'] == 1.0


def test_gymnax_spaces_equal_the_specs(environment):
  pytest.importorskip('gymnax')
  exported, params = export.as_gymnax(environment)
  observation, _ = jax.eval_shape(exported.reset, jax.random.key(0), params)
  space = exported.observation_space(params)
  if isinstance(environment.observation_spec, dict):
    assert {name: each.shape for name, each in space.spaces.items()} == {
      name: each.shape for name, each in observation.items()
    }
  else:
    assert space.shape == observation.shape
  assert exported.action_space(params).n == environment.action_spec.num_values


def test_environment_of_a_library_is_refused():
  pytest.importorskip('gymnasium')
  with pytest.raises(ValueError, match='make it with that library'):
    export.as_dm_env(environments.make('gymnasium/CartPole-v1'))


def test_stream_continues_from_one_episode_to_the_next():
  """Each of two streams enters the only room twice, then a fresh one."""
  environment = rooms.Rooms(num_rooms=1, fresh_after=2)
  stepper = export.as_dm_env(environment, seed=0)
  exported, params = export.as_gymnax(environment)
  observation, state = jax.jit(exported.reset)(jax.random.key(0), params)
  step = jax.jit(exported.step)
  entered = [[], []]
  for index in range(3):
    entered[0].append(stepper.reset().observation)
    assert stepper.step(0).last()
    entered[1].append(observation)
    observation, state, _, done, _ = step(jax.random.key(index), state, 0, params)
    assert done
  for first, second, fresh in entered:
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, fresh)
