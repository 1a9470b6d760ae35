"""Catch whose steps take time: a run that learns from it leaves most of the cores to other tests."""

import time

import jax
import numpy as np

from hephaestus.actors.environments import catch

STEP_SECONDS = 0.05  # of all parallel environments together


class SlowCatch(catch.Catch):
  """Catch that sleeps in every step."""

  def step(self, key, state, action):
    # Nothing is read from the argument, so that the callback never waits for a device.
    zero = jax.pure_callback(
      _sleep, jax.ShapeDtypeStruct((), np.int32), state.ball_row, vmap_method='expand_dims'
    )
    return super().step(key, state.replace(ball_row=state.ball_row + zero), action)


def _sleep(like):
  time.sleep(STEP_SECONDS)
  return np.zeros(like.shape, np.int32)
