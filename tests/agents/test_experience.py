"""A Sequence changes its leading axes in one place."""

import jax
import numpy as np

from agents import experience


def test_time_major_swaps_rows_and_leaves_what_has_no_time():
  rows = lambda *shape: np.arange(2 * 3 * int(np.prod(shape))).reshape(2, 3, *shape)
  sequence = experience.Sequence(
    observation={'map': rows(4), 'alive': rows()},
    action=rows(),
    reward=rows(),
    discount=rows() + 1,
    step_type=rows() + 2,
    extras={'log_prob': rows()},
    initial_state={'latent': np.ones((2, 5))},
    identity=np.arange(2),
    version=np.arange(2),
    actor_id=np.arange(2),
  )
  result = experience.time_major(sequence)
  without_time = ('initial_state', 'identity', 'version', 'actor_id')
  for name in sequence._fields:
    axes = (0, 1) if name in without_time else (1, 0)
    jax.tree.map(
      lambda x, y, axes=axes: (
        np.testing.assert_array_equal(np.moveaxis(x, (0, 1), axes), y)
        if x.ndim > 1
        else np.testing.assert_array_equal(x, y)
      ),
      getattr(sequence, name),
      getattr(result, name),
    )
