"""An environment of dm_env that waits in each step, and notes its instances in a file."""

import os
import pathlib
import time

import dm_env
import numpy as np
from dm_env import specs

NOTES = pathlib.Path('instances.txt')  # lines 'make PID' and 'close PID'
STEP_SECONDS = 0.05


class SlowProgram(dm_env.Environment):
  """Rewards its second choice, in episodes of five steps."""

  def __init__(self):
    self._note('make')

  def _note(self, event):
    with NOTES.open('a') as file:
      file.write(f'{event} {os.getpid()}\n')

  def observation_spec(self):
    return specs.BoundedArray((1,), np.float32, 0, 1)

  def action_spec(self):
    return specs.DiscreteArray(2)

  def reset(self):
    self._count = 0
    return dm_env.restart(np.zeros(1, np.float32))

  def step(self, action):
    time.sleep(STEP_SECONDS)
    self._count += 1
    end = dm_env.termination if self._count == 5 else dm_env.transition
    return end(float(action), np.full(1, self._count / 5, np.float32))

  def close(self):
    self._note('close')
