"""Processes of one learner stop together, and resume from a checkpoint."""

import jax
import numpy as np
import pytest
import small_dreamer
import trainer

from hephaestus.learner import checkpoint, devices, dreamer_update, process_group


@pytest.mark.timeout(500)
def test_processes_stop_together_and_resume(processes):
  first = processes('mean', 7, 'stop')
  assert first.end(1) == 0, first.words(0, 1)
  # It was not asked to stop itself, so that its supervisor starts it again.
  assert first.end(0) in process_group.PEER_GONE, first.words(0, 1)
  assert 'another process of this learner was asked to stop' in first.words(0)
  one, other = (np.load(first.folder / f'{rank}.npz') for rank in (0, 1))
  for name in one.files:
    np.testing.assert_array_equal(one[name], other[name])
  params, _, step = (one[name] for name in one.files)
  assert first.saved()[-1] == step >= 7
  # Batch n holds n to n + 7, half of it in each process.
  np.testing.assert_allclose(params, 3.5 + (step - 1) / 2, rtol=1e-5)

  saved = first.saved()
  second = processes('mean', step + 1, 'compile')  # asked to stop before its first update
  assert [second.end(rank) for rank in (0, 1)] == [process_group.ASKED] * 2, second.words(0, 1)
  for rank in (0, 1):  # of which only one has the checkpoint
    assert f'begins at {step}' in second.words(rank)
  assert [second.words(rank).count('replay is saved') for rank in (0, 1)] == [1, 0]
  assert second.saved() == saved


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_two_processes_of_the_dreamer_take_the_step_of_one_of_eight_devices(processes):
  both = processes('dreamer', 1, 'starve')
  dreamer = small_dreamer.make_dreamer()
  single = trainer.Trainer(dreamer_update.make_update(dreamer, small_dreamer.RATES), 8)
  single.step(small_dreamer.make_batch(dreamer))
  both.wait_for(both.saved, 'an update')
  ours = checkpoint.Checkpointer(both.folder / 'checkpoints', read_only=True)
  state, step = ours.restore(devices.first_replica(single.state))
  assert step == 1
  moments = lambda state: jax.tree.leaves((state.model_opt_state, state.policy_opt_state))
  for found, expected in zip(moments(state), moments(single.arrays()), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-6)
  # Waiting for something to learn from, both are there; one does not outlive the other.
  both.running[1].kill()
  assert both.end(0, seconds=30) != 0


NCCL = 'INTERNAL: NCCL operation ncclGroupEnd() failed: {}. Last NCCL warning(error) log entry {}.'


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('UNAVAILABLE: failed to connect to all addresses', True),
    ('INTERNAL: Gloo all-reduce failed: Connection closed by peer', True),
    (NCCL.format('remote process exited or there was a network error', "'Broken pipe'"), True),
    (NCCL.format('unhandled system error', "'Connection closed by remote peer'"), True),
    (NCCL.format('unhandled cuda error', "'Cuda failure 2 out of memory'"), False),
    ('RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes', False),
  ],
)
def test_errors_about_other_processes_are_recognised(text, expected):
  assert process_group.is_of_peers(jax.errors.JaxRuntimeError(text)) == expected
  assert not process_group.is_of_peers(ValueError(text))
