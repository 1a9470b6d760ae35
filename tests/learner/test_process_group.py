"""Processes that learn as one stop as one, fail as one, and go on from what was saved."""

import signal

import numpy as np
import pytest

BOUND = 30  # seconds in which the others end once a process is dead or stuck


@pytest.mark.timeout(300)
def test_when_one_dies_the_other_fails_and_both_go_on_from_the_last_checkpoint(processes):
  first = processes('mean', 0, 'go on')
  first.wait_for(first.saved, 'a checkpoint')
  first.running[1].kill()
  assert first.end(0, BOUND) != 0
  saved = first.saved()[-1]

  second = processes('mean', saved + 7, 'stop')
  assert second.end(1) == 0, second.words(0, 1)
  # It was not asked to stop itself, so that its supervisor starts it again.
  assert second.end(0) == 1, second.words(0, 1)
  assert 'another process of this learner was asked to stop' in second.words(0)
  for rank in (0, 1):
    assert f'begins at {saved}' in second.words(rank)
  one, other = (np.load(second.folder / f'{rank}.npz') for rank in (0, 1))
  for name in one.files:
    np.testing.assert_array_equal(one[name], other[name])
  assert second.saved()[-1] == int(one['arr_2']) >= saved + 7


@pytest.mark.timeout(300)
def test_a_process_that_is_stuck_in_an_update_is_noticed_by_the_other(processes):
  both = processes('mean', 20, 'freeze')
  both.wait_for(lambda: both.running[0].poll() is not None, 'the end of who waits')
  assert both.end(0) == 1
  assert 'has not ended within 2 s (learner.stuck_seconds)' in both.words(0)
  both.running[1].send_signal(signal.SIGCONT)
  assert both.end(1, BOUND) != 0
