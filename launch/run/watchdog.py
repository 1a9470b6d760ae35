"""Ends a node that hangs, so that its supervisor starts it again."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from absl import logging

_BUSY = 0.02  # of a core; what only waits takes less
_LOOKS = 10  # in the time after which a node counts as hung


def watched(should_stop: Callable[[], bool], stuck_seconds: float) -> Callable[[], bool]:
  """`should_stop`, whose caller is ended once it hangs.

  A node asks this whenever it goes round a loop, also of those in which it waits for replay, for
  parameters or for room behind the rate limiter. It hangs when it has neither asked nor computed
  for so long; who compiles, or plays a long episode, computes. Time for which the whole process is
  frozen does not count. A node that hangs writes where each of its threads is to stderr and exits
  with code 1.

  Args:
    should_stop: whether this node was asked to stop.
    stuck_seconds: see above; 0: never.
  """
  if not stuck_seconds:
    return should_stop
  rounds = 0

  def ask() -> bool:
    nonlocal rounds
    rounds += 1
    return should_stop()

  def watch() -> None:
    period = stuck_seconds / _LOOKS
    silent = 0
    while silent < _LOOKS:
      before = rounds, time.process_time()
      began = time.monotonic()
      time.sleep(period)
      is_frozen = time.monotonic() - began > 2 * period
      computed = time.process_time() - before[1] > _BUSY * period
      if rounds != before[0] or computed:
        silent = 0
      elif not is_frozen:
        silent += 1
    logging.error(
      'This node has neither gone on nor computed for %g s (learner.stuck_seconds); it ends, to be '
      'started again. Where it hangs:', stuck_seconds,
    )  # fmt: skip
    logging.flush()
    faulthandler.dump_traceback(sys.stderr)
    os._exit(1)

  threading.Thread(target=watch, name='watchdog', daemon=True).start()
  return ask
