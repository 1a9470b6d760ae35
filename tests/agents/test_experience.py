"""Sequences: their leading axes, their rules, and the returns of their episodes."""

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents import experience


def test_time_major_swaps_time_and_batch_of_fields_with_a_time_axis():
  numbers = lambda *shape: np.arange(2 * 3 * int(np.prod(shape))).reshape(2, 3, *shape)
  sequence = experience.Sequence(
    observation={'map': numbers(4), 'alive': numbers()},
    action=numbers(),
    reward=numbers(),
    discount=numbers() + 1,
    step_type=numbers() + 2,
    extras={'log_prob': numbers()},
    initial_state={'latent': np.ones((2, 5))},
    identity=np.arange(2),
    version=np.arange(2),
    actor_id=np.arange(2),
  )
  result = experience.time_major(sequence)
  for name in ('observation', 'action', 'reward', 'discount', 'step_type', 'extras'):
    given, found = getattr(sequence, name), getattr(result, name)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.swapaxes(x, 0, 1), y), given, found)
  assert result.initial_state is sequence.initial_state and result.version is sequence.version


FIRST, MID, LAST = (int(kind) for kind in dm_env.StepType)


@pytest.fixture
def sound():
  """Four steps: the third ends an episode and the fourth begins another."""
  return experience.Sequence(
    observation={'map': np.zeros((4, 2), np.float32)},
    action=np.zeros(4, np.int32),
    reward=np.array([0.5, 0.5, 1.0, 0.0], np.float32),
    discount=np.array([1.0, 0.9, 0.0, 1.0], np.float32),
    step_type=np.array([MID, MID, LAST, FIRST], np.int32),
    extras={'log_prob': np.zeros(4, np.float32)},
    initial_state={'latent': np.zeros(3, jnp.bfloat16)},
    identity=np.uint32(7),
    version=np.int32(0),
    actor_id=np.int32(0),
  )


def test_sound_sequence_has_no_faults(sound):
  assert experience.faults(sound) == []


@pytest.mark.parametrize(
  ('field', 'values', 'step', 'words'),
  [
    ('step_type', [MID, MID, LAST, MID], 3, 'a reset that is not marked'),
    ('step_type', [MID, MID, LAST, LAST], 3, 'a reset that is not marked'),
    ('step_type', [MID, MID, MID, FIRST], 3, 'FIRST follows a step that is not LAST'),
    ('step_type', [MID, 7, LAST, FIRST], 1, 'none of FIRST, MID and LAST'),
    ('reward', [0.5, 0.5, 1.0, 0.1], 3, 'FIRST has a reward'),
    ('discount', [1.0, 0.9, 0.0, 0.0], 3, 'FIRST has a discount other than 1'),
    ('discount', [1.0, 0.0, 0.0, 1.0], 1, 'MID has a discount of 0'),
    ('discount', [1.0, 1.0, 1.5, 1.0], 2, 'outside [0, 1]'),
    ('reward', [0.5, np.inf, 1.0, 0.0], 1, 'reward is not finite'),
  ],
)
def test_fault_names_its_step(sound, field, values, step, words):
  values = np.asarray(values, getattr(sound, field).dtype)
  found = experience.faults(sound._replace(**{field: values}))
  assert [each for each, text in found if words in text] == [step]


def test_fields_without_a_time_axis_are_checked_too(sound):
  state = {'latent': np.array([0.0, np.nan, 0.0], jnp.bfloat16)}
  broken = sound._replace(initial_state=state)
  assert experience.faults(broken) == [(None, 'initial_state/latent is not finite')]
