"""Examination of a dreamer: which predictions are of which steps."""

import dm_env
import jax
import numpy as np
import pytest

from hephaestus.agents.dreamer import examination


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('masked', workspace_size=1)


@pytest.fixture(scope='module')
def examine(dreamer, make_params):
  """(sequence) -> Examination, jitted once."""
  params = make_params(dreamer)
  compiled = jax.jit(
    lambda params, sequence: examination.examine(dreamer, params, jax.random.key(0), sequence)
  )
  return lambda sequence: jax.device_get(compiled(params, sequence))


@pytest.fixture(scope='module')
def sequence(dreamer, make_sequence):
  sequence = make_sequence(dreamer)
  action = np.random.default_rng(0).integers(0, 4, sequence.action.shape, np.int32)
  return sequence._replace(action=action)


def test_another_action_is_of_another_sequence_at_the_same_step(examine, sequence):
  found = examine(sequence)
  assert all(x.shape == sequence.reward.shape and np.isfinite(x).all() for x in found)
  assert np.abs(found.surprise - found.surprise_of_other)[1:].max() > 1e-3
  equal = sequence._replace(action=np.zeros_like(sequence.action))
  found = examine(equal)
  np.testing.assert_array_equal(found.surprise, found.surprise_of_other)


def test_surprise_is_of_the_step_after_the_action(examine, sequence):
  reward = np.array(sequence.reward)
  reward[2] += 3
  changed = sequence._replace(reward=reward)
  difference = examine(sequence).surprise != examine(changed).surprise
  assert difference[2].all() and not difference[[0, 1, 3, 4, 5]].any()


def test_values_from_stored_and_inferred_states_differ_only_after_a_start(
  dreamer, make_params, sequence
):
  params = make_params(dreamer)
  compiled = jax.jit(
    lambda *arguments: examination.restart(dreamer, params, jax.random.key(0), *arguments)
  )
  restart = lambda after: jax.device_get(compiled(sequence, after))
  begins = np.arange(sequence.reward.shape[1]) % 2 == 0
  step_type = np.full_like(sequence.step_type, int(dm_env.StepType.MID))
  step_type[0, begins] = int(dm_env.StepType.FIRST)
  after = sequence._replace(step_type=step_type)
  found = restart(after)
  # An episode that begins has no state of before.
  np.testing.assert_array_equal(found.stored[0, begins], found.inferred[0, begins])
  assert (found.stored[0, ~begins] != found.inferred[0, ~begins]).all()
  seen = jax.tree.map(np.array, after.observation)
  for name in ('board', 'purse'):
    seen[name][2] += 1
  changed = restart(after._replace(observation=seen))
  for name in ('stored', 'inferred', 'again'):
    same = getattr(found, name) == getattr(changed, name)
    assert same[:2].all() and not same[2].any(), name


def test_scrambled_observations_have_the_numbers_of_each_step(sequence):
  scrambled = jax.jit(examination._scrambled)(jax.random.key(1), sequence.observation)
  differs = False
  for old, new in zip(
    jax.tree.leaves(sequence.observation), jax.tree.leaves(scrambled), strict=True
  ):
    np.testing.assert_array_equal(np.sort(old, axis=1), np.sort(new, axis=1))
    differs |= (old != new).any()
  assert differs


def test_leaves_of_equal_width_are_scrambled_apart_and_masks_stay():
  x = np.tile(np.arange(64.0, dtype=np.float32)[None, :, None], (2, 1, 3))
  mask = np.arange(64)[None, :, None] % 2 > 0
  observation = {'a': x, 'b': x, 'action_mask': mask}
  found = jax.device_get(jax.jit(examination._scrambled)(jax.random.key(0), observation))
  assert (found['a'] != found['b']).any() and (found['a'][..., 0] != found['a'][..., 1]).any()
  np.testing.assert_array_equal(found['action_mask'], mask)
