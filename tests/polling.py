"""Waits of tests for what other threads and processes do."""

import time

PATIENCE = 240.0  # seconds; more than a busy machine needs to import and compile


def until(predicate, what='the condition', *, seconds=PATIENCE, alive=lambda: True):
  """Polls until the value of `predicate` is true, and returns it.

  Args:
    predicate: called every 20 ms.
    what: it waits for, for the message of a failure: text, or a function that returns it.
    seconds: after which the test fails.
    alive: whether the value can still become true; when it cannot, the test fails at once.
  """
  deadline = time.monotonic() + seconds
  while True:
    ended = not alive()  # asked first, so that what became true before the end counts
    if value := predicate():
      return value
    if ended or time.monotonic() > deadline:
      words = what() if callable(what) else what
      raise AssertionError(f'{"ended" if ended else "timed out"} while waiting for {words}')
    time.sleep(0.02)
