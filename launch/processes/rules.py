"""Rules of a supervisor: what asks to stop, when a process is restarted, and how all are stopped."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Sequence

# One press of Ctrl-C may arrive twice: `timeout`, for one, signals its child and then its group.
SAME_INTERRUPT_SECONDS = 0.5


class Interrupts:
  """Counts the signals that ask to stop, while it is entered; in the main thread only.

  These are SIGINT, SIGTERM and, unless it is ignored as under `nohup`, SIGHUP.

  Attributes:
    count: number of these signals so far; those within half a second count as one.
    first: number of the first signal; 0 before.
  """

  def __init__(self):
    self.count = self.first = 0
    self._at = 0.0
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> 'Interrupts':
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
      numbers.append(signal.SIGHUP)
    for number in numbers:
      self._stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
    return self

  def __exit__(self, *unused: object) -> None:
    self._stack.close()

  def _on_signal(self, number, frame) -> None:
    del frame
    self.first = self.first or number
    now = time.monotonic()
    if not self.count or now - self._at > SAME_INTERRUPT_SECONDS:
      self.count += 1
      self._at = now


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts:
  """Rules by which a process is restarted, or given up, which ends the run.

  Raises:
    ValueError: a maximum is below 1.

  Attributes:
    backoff_seconds: time before the first restart; doubles with each further failure in a row.
    max_backoff_seconds: longest time before a restart.
    healthy_seconds: a process that ran this long has recovered from earlier failures.
    max_fast_failures: number of failures in a row, each before `healthy_seconds`, after which a
      process is given up.
    max_fast_kills: the same for ends by SIGKILL, by a person or for want of memory, and by the
      `external_exit_codes` of a process.
    together: groups of names of processes that are restarted as one: when one exits with an error,
      the others are killed.
  """

  backoff_seconds: float = 0.5
  max_backoff_seconds: float = 30.0
  healthy_seconds: float = 60.0
  max_fast_failures: int = 5
  max_fast_kills: int = 20
  together: Sequence[Sequence[str]] = ()

  def __post_init__(self):
    for name in ('max_fast_failures', 'max_fast_kills'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}.')

  def delay(self, failures: int) -> float:
    """Seconds before the restart after `failures` failures in a row."""
    doublings = min(max(failures - 1, 0), 30)
    return min(self.backoff_seconds * 2**doublings, self.max_backoff_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopping:
  """How processes are stopped at the end of the run: by SIGTERM, after a grace period by SIGKILL.

  Attributes:
    order: groups of names of processes, stopped one group after another; None for all at once.
    grace_seconds: time between SIGTERM and SIGKILL, one for all groups or one for each.
    total_seconds: time for all groups together, after which every process is killed.
    on_signal: called, before anything is stopped, if a signal has asked to stop.
  """

  order: Sequence[Sequence[str]] | None = None
  grace_seconds: float | Sequence[float] = 10.0
  total_seconds: float = 30.0
  on_signal: Callable[[], None] = lambda: None

  def groups(self, names: Sequence[str]) -> list[tuple[Sequence[str], float]]:
    """Pairs each group of names with its seconds of grace; ValueError if `order` does not match `names`."""
    order = [names] if self.order is None else self.order
    if sorted(name for group in order for name in group) != sorted(names):
      raise ValueError(f'`order` must name each of {names} once, got {order}.')
    grace = self.grace_seconds
    graces = [float(grace)] * len(order) if isinstance(grace, int | float) else grace
    if len(graces) != len(order):
      raise ValueError(f'{len(graces)} values of grace for {len(order)} groups.')
    return list(zip(order, graces, strict=True))
