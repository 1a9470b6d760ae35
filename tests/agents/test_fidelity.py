"""Dreams compared with the environment: which steps are compared, and what is counted."""

import jax
import numpy as np
import pytest

from hephaestus.agents.dreamer import fidelity

NUM_STEPS, BATCH, LENGTH = 6, 3, 3
FIRST, LAST = 0, 2


@pytest.fixture(scope='module')
def dreamer(make_dreamer):
  return make_dreamer('masked', workspace_size=1)


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)


@pytest.fixture(scope='module')
def measure(dreamer, params):
  """(sequence, params) -> Fidelity, jitted once."""

  @jax.jit
  def compiled(params, sequence):
    return fidelity.measure(dreamer, params, jax.random.key(0), sequence, LENGTH)

  return lambda sequence, changed=params: jax.device_get(compiled(changed, sequence))


@pytest.fixture(scope='module')
def sequence(dreamer, make_sequence):
  return make_sequence(dreamer)


def dreams(sequence):
  """Begin (t, b) of each dream, and how many steps of its episode follow, at most LENGTH."""
  step_type = np.asarray(sequence.step_type)
  for t in range(NUM_STEPS - LENGTH):
    for b in range(BATCH):
      if step_type[t, b] != LAST:
        ends = np.flatnonzero(step_type[t + 1 :, b] == LAST)
        yield t, b, min(LENGTH, ends[0] + 1 if ends.size else LENGTH)


def test_real_rewards_are_from_the_episode_in_which_the_dream_begins(measure, sequence):
  found = measure(sequence)
  assert np.isfinite(jax.tree.leaves(found.imagined)).all()
  reward = np.asarray(sequence.reward)
  limited = np.asarray(sequence.discount) > 0
  for k in range(LENGTH):
    # A time limit ends the comparison, a termination ends the rewards.
    whole = [(t, b, n) for t, b, n in dreams(sequence) if k < n or not limited[t + n, b]]
    sums = [reward[t + 1 : t + 1 + min(k + 1, n), b].sum() for t, b, n in whole]
    assert found.real.number[k] == found.imagined.number[k] == len(sums) > 0
    np.testing.assert_allclose(found.real.total[k], np.sum(sums), rtol=1e-5, atol=1e-6)


def test_ends_are_terminations_and_each_is_counted_at_its_distance(measure, sequence):
  found = measure(sequence)
  discount = np.asarray(sequence.discount)
  for k in range(LENGTH):
    reached = [discount[t + k + 1, b] for t, b, n in dreams(sequence) if k < n]
    assert found.continues.number[k] == reached.count(0)
    assert found.lasts.number[k] == len(reached) - reached.count(0)
  assert found.continues.number.sum() > 0 and found.end.number == (discount == 0).sum()


def test_nothing_beyond_the_end_of_an_episode_matters(measure, sequence):
  last = np.asarray(sequence.step_type) == LAST
  after = np.cumsum(last, axis=0) - last > 0  # the next episode
  assert after.any()
  changed = np.where(
    after & ~np.asarray(sequence.step_type == FIRST), np.float32(50), sequence.reward
  )
  begins = [t for t, b, _ in dreams(sequence) if after[t, b]]
  plain, other = measure(sequence), measure(sequence._replace(reward=changed))
  assert not begins  # else they would begin in the changed episode
  np.testing.assert_array_equal(plain.real.total, other.real.total)
  np.testing.assert_array_equal(plain.reward.total, other.reward.total)


def test_each_imagined_step_has_the_action_that_was_taken_there(measure, sequence):
  def predicted(sequence):
    found = measure(sequence)
    return found.reward.total

  # The third step's action: dreams begin at steps 0, 1 and 2, so none of them begins with it.
  action = np.array(sequence.action)
  action[3] = (action[3] + 1) % 3
  other = sequence._replace(action=action)
  changed = predicted(sequence) != predicted(other)
  assert changed.tolist() == [False, True, True]


def test_a_model_that_copies_is_wrong_where_numbers_change(dreamer, measure, params, sequence):
  still = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), sequence.observation)
  numbers = dreamer.model.networks.numbers
  decoder = jax.tree.map(np.zeros_like, params['world_model']['decoder'])
  begin = 0  # the gates of each kind come first; a real number has none, and a change of 0
  for kind in numbers.kinds:
    if kind.num_outputs > len(kind.indices):
      decoder['Dense_1']['bias'][begin : begin + len(kind.indices)] = 30
    begin += kind.num_outputs
  copying = params | {'world_model': params['world_model'] | {'decoder': decoder}}
  assert measure(sequence._replace(observation=still), copying).wrong.total.max() == 0
  found = measure(sequence, copying).wrong
  assert found.total[0] == found.number[0] > 0  # random observations change at every step


@pytest.mark.parametrize(
  ('wrong', 'error', 'expected'),
  [
    ([0.0, 0.05, 0.2], [0.0, 0.0, 0.0], (2, 4)),
    ([0.0, 0.0, 0.0], [0.1, 0.6, 0.9], (1, 2)),
    ([0.2, 0.0, 0.0], [0.0, 0.0, 0.0], (None, 1)),  # not even one step
    ([0.0, 0.0, None], [0.0, 0.0, None], (2, None)),  # episodes of fewer than four steps
  ],
)
def test_dreams_are_trusted_until_an_error_is_too_large(wrong, error, expected):
  nothing = dict.fromkeys(fidelity.Row._fields)
  rows = [
    fidelity.Row(**nothing | {'steps': 2**k, 'wrong': wrong[k], 'error': error[k]})
    for k in range(3)
  ]
  found = fidelity.trusted(fidelity.Summary(None, None, None, rows))
  assert tuple(row and row.steps for row in found) == expected
