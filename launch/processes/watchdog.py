"""Ends a node that hangs, so that its supervisor restarts it."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from absl import logging

_BUSY = 0.02  # share of a core; a waiting process takes less
_CHECKS = 10  # in the time after which a node counts as hung


def watched(should_stop: Callable[[], bool], stuck_seconds: float) -> Callable[[], bool]:
  """Wraps `should_stop`, and starts a thread that ends the process once it hangs.

  A node calls the wrapper in every iteration of its loops, also while it waits for replay, for
  parameters or for the rate limiter, and after each step of an environment on the host. A node hangs if
  it has neither called the wrapper nor used the CPU for `stuck_seconds`, so compiling and long episodes
  are no hang. Time in which the whole process is frozen does not count. A node that hangs writes the
  stack of each thread to stderr and exits with code 1.

  Args:
    should_stop: whether this node was asked to stop.
    stuck_seconds: time after which the node counts as hung; 0: never.

  Returns:
    The wrapper, which returns what `should_stop` returns.
  """
  if not stuck_seconds:
    return should_stop
  rounds = 0

  def ask() -> bool:
    nonlocal rounds
    rounds += 1
    return should_stop()

  def watch() -> None:
    period = stuck_seconds / _CHECKS
    silent = 0
    while silent < _CHECKS:
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
      'This node has made no progress for %g s (learner.stuck_seconds) and exits, to be restarted. '
      'The stacks of its threads:', stuck_seconds,
    )  # fmt: skip
    logging.flush()
    faulthandler.dump_traceback(sys.stderr)
    os._exit(1)

  threading.Thread(target=watch, name='watchdog', daemon=True).start()
  return ask
