"""What every registered world promises; a new one is held to it by its line in WORLDS."""

import functools
import itertools

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import actors.environments
from actors.environments import wrappers

NUM_STEPS = 200
# Options that bring several episodes, and so LAST rows, into so few steps.
SHORT = {
  'grid_world': {'size': 4, 'num_resources': 3, 'max_steps': 45},
  'hackmatrix': {'max_steps': 45},
}
FIRST, MID, LAST = (step_type.value for step_type in dm_env.StepType)


@pytest.fixture(params=sorted(actors.environments.WORLDS), scope='module')
def environment(request):
  world = actors.environments.make(request.param, **SHORT.get(request.param, {}))
  return wrappers.AutoReset(world)


def random_step(environment, key, state, observation):
  action_key, step_key = jax.random.split(key)
  action = wrappers.random_action(action_key, environment.action_spec, observation)
  return environment.step(step_key, state, action)


@pytest.fixture(scope='module')
def played(environment):
  """Number of traces of the step, the state after reset and each step, and their timesteps."""
  num_traces = 0

  @jax.jit
  def step(key, state, observation):
    nonlocal num_traces
    num_traces += 1
    return random_step(environment, key, state, observation)

  reset_key, *step_keys = jax.random.split(jax.random.key(1), NUM_STEPS + 1)
  rows = [jax.jit(environment.reset)(reset_key)]
  for step_key in step_keys:
    state, timestep = rows[-1]
    rows.append(step(step_key, state, timestep.observation))
  states, timesteps = zip(*rows, strict=True)
  return num_traces, states, timesteps


def abstract(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_the_step_is_traced_once(played):
  num_traces, _, _ = played
  assert num_traces == 1


def test_observations_stay_within_their_spec(environment, played):
  _, _, timesteps = played
  for timestep in timesteps:
    jax.tree.map(
      lambda spec, value: spec.validate(np.asarray(value)),
      environment.observation_spec,
      timestep.observation,
    )


def test_shapes_and_dtypes_never_change(played):
  _, states, timesteps = played
  for state, timestep in zip(states, timesteps, strict=True):
    assert abstract(state) == abstract(states[0])
    assert abstract(timestep) == abstract(timesteps[0])


def test_everything_is_finite(played):
  _, states, timesteps = played
  for leaf in jax.tree.leaves((states, timesteps)):
    assert np.isfinite(leaf).all()


def test_episodes_run_from_first_to_last(environment, played):
  _, _, timesteps = played
  step_types = [int(timestep.step_type) for timestep in timesteps]
  assert step_types[0] == FIRST
  assert step_types.count(LAST) >= 2
  follows = {FIRST: {MID, LAST}, MID: {MID, LAST}, LAST: {FIRST}}
  for step_type, next_step_type in itertools.pairwise(step_types):
    assert next_step_type in follows[step_type]
  ends = [t for t, step_type in enumerate(step_types) if step_type == LAST]
  assert max(np.diff([-1, *ends])) <= environment.max_steps + 1


def test_first_earns_nothing_and_only_last_may_discount(played):
  _, _, timesteps = played
  for timestep in timesteps:
    if timestep.first():
      assert timestep.reward == 0.0
    if not timestep.last():
      assert timestep.discount == 1.0
    assert timestep.discount in (0.0, 1.0)


def unroll(environment, seed):
  """[T] timesteps of random play in one world."""

  def step(carry, _):
    key, state, observation = carry
    key, step_key = jax.random.split(key)
    state, timestep = random_step(environment, step_key, state, observation)
    return (key, state, timestep.observation), timestep

  key, reset_key = jax.random.split(jax.random.key(seed))
  state, timestep = environment.reset(reset_key)
  _, timesteps = jax.lax.scan(step, (key, state, timestep.observation), length=50)
  return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), timestep, timesteps)


def test_many_worlds_are_each_what_one_would_be(environment):
  seeds = jnp.arange(3)
  play = functools.partial(unroll, environment)
  together = jax.jit(jax.vmap(play))(seeds)
  alone = jax.jit(play)
  for n in range(3):
    one, many = alone(seeds[n]), jax.tree.map(lambda x, n=n: x[n], together)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), many, one)


def test_the_key_decides_the_trajectory(environment):
  play = jax.jit(functools.partial(unroll, environment))
  one, same, other = (jax.tree.leaves(play(seed)) for seed in (3, 3, 4))
  assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
  assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_script_beats_chance(environment):
  reference = wrappers.reference_returns(environment, num_episodes=64)
  assert reference is not None
  assert reference.scripted > reference.random


def test_a_frame_is_an_rgb_image(environment, played):
  _, states, _ = played
  frame = environment.render(states[0])
  if frame is None:
    pytest.skip('this world shows no frames')
  assert frame.dtype == np.uint8
  assert frame.ndim == 3 and frame.shape[-1] == 3
