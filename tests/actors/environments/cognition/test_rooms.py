import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.actors.environments import wrappers
from hephaestus.actors.environments.cognition import rooms


def stream(env, num_choices, seed=0):
  """Names [n] uint32 and visits [n] of one stream with auto-reset, always through the first door."""
  env_ = wrappers.AutoReset(env)

  def choose(carry, key):
    state, _ = carry
    keys = jax.random.split(key)
    name, visit = state.env_state.name, env.visit(state.env_state.choices)
    last, _ = env_.step(keys[0], state, jnp.int32(0))
    return env_.step(keys[1], last, jnp.int32(0)), (name, visit)

  @jax.jit
  def play(key):
    reset_key, steps_key = jax.random.split(key)
    keys = jax.random.split(steps_key, num_choices)
    return jax.lax.scan(choose, env_.reset(reset_key), keys)[1]

  return tuple(jax.device_get(play(jax.random.key(seed))))


@pytest.fixture(scope='module')
def opened():
  """The first state and observation, the right door, and the results of the right and a wrong door."""
  env = rooms.Rooms()

  @jax.jit
  def play(key):
    state, first = env.reset(key)
    door = rooms.right_door(state.name)
    step = lambda action: env.step(key, state, action)
    return (state, first), door, step(door), step((door + 1) % 4)

  return jax.device_get(play(jax.random.key(0)))


def test_right_door_is_rewarded_and_ends_the_episode(opened):
  (_, first), door, (_, right), (_, wrong) = opened
  assert (right.reward, wrong.reward) == (1.0, 0.0)
  assert right.last() and wrong.last() and right.discount == 0.0
  np.testing.assert_array_equal(right.observation[:24], first.observation[:24])
  assert not first.observation[24:].any()
  np.testing.assert_array_equal(np.flatnonzero(right.observation[24:]), [door])


def test_names_differ_and_each_door_is_right_as_often():
  scrambled = jax.jit(lambda: rooms.scramble(jnp.arange(1024)) >> 8)
  names = np.asarray(scrambled())
  assert len(set(names.tolist())) == 1024
  counts = np.bincount(jax.jit(rooms.right_door)(names), minlength=4)
  assert counts.min() > 200
  bits = (names[:, None].astype(np.int64) >> np.arange(24)) & 1
  assert bits.mean(axis=0).min() > 0.4 and bits.mean(axis=0).max() < 0.6


def test_all_streams_share_rooms_before_the_fresh_ones():
  env = rooms.Rooms(num_rooms=8)
  first, second = (set(stream(env, 100, seed)[0].tolist()) for seed in (0, 1))
  assert first == second and len(first) == 8


def test_fresh_rooms_are_visited_four_times_in_turn_and_then_replaced():
  env = rooms.Rooms(num_rooms=8, fresh_after=5, fresh_rooms=3)
  names, visits = stream(env, 5 + 2 * 12)
  assert visits[:5].tolist() == [0] * 5
  assert visits[5:].tolist() == 2 * [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
  sets = names[5:].reshape(2, rooms.VISITS, 3)
  np.testing.assert_array_equal(sets, np.repeat(sets[:, :1], rooms.VISITS, axis=1))
  assert len({*names[:5].tolist(), *sets[:, 0].reshape(-1).tolist()}) == 6 + len(set(names[:5]))
  other, _ = stream(env, 8, seed=1)
  assert not set(other[5:].tolist()) & set(names.tolist())
