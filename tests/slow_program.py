"""An environment of dm_env that waits in each step, notes its instances in a file, and can press Ctrl-C."""

import os
import pathlib
import signal
import threading
import time

import dm_env
import numpy as np
import polling
from dm_env import specs

NOTES = pathlib.Path('instances.txt')  # lines 'make PID' and 'close PID'
STEP_SECONDS = 0.05
LOCK = threading.Lock()


class SlowProgram(dm_env.Environment):
  """Rewards its second choice, in episodes of five steps."""

  def __init__(self, seconds=STEP_SECONDS, interrupt_after=0, interrupt_reset=False):
    """Args: duration of a step; the step that presses Ctrl-C, 0 for none; whether the first reset does.

    The third instance does so: the first one after the two for the checks before a run.
    """
    self._seconds = seconds
    with LOCK:
      self._note('make')
      is_third = NOTES.read_text().count('make') == 3
    self._steps_left = interrupt_after if is_third else 0
    self._interrupt_reset = interrupt_reset and is_third

  def _note(self, event):
    with NOTES.open('a') as file:
      file.write(f'{event} {os.getpid()}\n')

  def observation_spec(self):
    return specs.BoundedArray((1,), np.float32, 0, 1)

  def action_spec(self):
    return specs.DiscreteArray(2)

  def reset(self):
    if self._interrupt_reset:
      self._interrupt_reset, before = False, signal.getsignal(signal.SIGINT)
      os.kill(os.getpid(), signal.SIGINT)
      polling.until(lambda: signal.getsignal(signal.SIGINT) != before, 'its handler')
    self._count = 0
    return dm_env.restart(np.zeros(1, np.float32))

  def step(self, action):
    time.sleep(self._seconds)
    self._steps_left -= 1
    if self._steps_left == 0:
      os.kill(os.getpid(), signal.SIGINT)
    self._count += 1
    end = dm_env.termination if self._count == 5 else dm_env.transition
    return end(float(action), np.full(1, self._count / 5, np.float32))

  def close(self):
    self._note('close')
