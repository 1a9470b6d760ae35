"""Fork server: a copy of the launcher, made after its imports, that forks into nodes.

Importing TensorFlow and JAX costs every node ten seconds of a core, at its start and at each
restart. A process that has imported both, and called neither, can be forked instead: no thread runs
in it and no device is open.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from hephaestus.launch import user_errors

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
LIBC = ctypes.CDLL(None, use_errno=True)
# glibc reads these variables when a program starts; a fork sets them by mallopt.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MALLOC = {
  'MALLOC_TRIM_THRESHOLD_': M_TRIM_THRESHOLD,
  'MALLOC_MMAP_THRESHOLD_': M_MMAP_THRESHOLD,
  'MALLOC_ARENA_MAX': M_ARENA_MAX,
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_REQUEST_BYTES = 1 << 16
ADOPTION_SECONDS = 10.0
ANSWER_SECONDS = 10.0  # after which the server counts as frozen


class Forked(NamedTuple):
  """A program that `ForkServer.start` has started, with what the supervisor uses of `Popen`."""

  pid: int

  def wait(self) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
  """Starts Python programs as children of this process, by forking a copy of this process.

  Make the fork server in the main thread, after the imports and before anything uses JAX or a thread.
  Programs begin with the modules, working directory and environment variables that this process then has.
  """

  def __init__(self):
    """Forks the server process, which ends with this process, or by `close`."""
    sys.stdout.flush()
    sys.stderr.flush()
    self._pid = 0
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
      ours.close()
      _serve(theirs, parent_pid)  # a node leaves it by SystemExit, as programs end
    theirs.close()
    self._pid = pid
    ours.settimeout(ANSWER_SECONDS)
    self._socket = ours

  def start(
    self, name: str, command: Sequence[str], environment: Mapping[str, str], log: int, pipe: int
  ) -> Forked:
    """Starts a program as a child process of the caller, with a session of its own, that ends with it.

    Args:
      name: name of the process in `top` and `ps -o comm`; the kernel keeps 15 bytes of it.
      command: this Python, a script and its arguments, see `runs`.
      environment: environment variables, added to the server's own.
      log: file descriptor that becomes its stdout and stderr.
      pipe: file descriptor to which it writes `+PID` and a newline before it runs.

    Raises:
      OSError: the server is gone, cannot fork or does not answer; then it is closed.
    """
    request = {'name': name, 'command': list(command), 'environment': dict(environment)}
    # Meanwhile a grandchild whose parent has exited becomes a child of this process.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
      socket.send_fds(self._socket, [json.dumps(request).encode()], [log, pipe])
      reply = self._socket.recv(32).decode() or 'the fork server is gone'
    except TimeoutError:
      reply = f'the fork server has not answered for {self._socket.gettimeout():g} s'
    finally:
      LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0)
    if not reply.isdigit():
      self.close()  # one that wakes up must not start the program, too
      raise OSError(f'{name} could not be forked: {reply}')
    return Forked(int(reply))

  @staticmethod
  def runs(command: Sequence[str]) -> bool:
    """Whether a command is this Python with a script, which is all that `start` can run."""
    return len(command) > 1 and command[0] == sys.executable and command[1].endswith('.py')

  def close(self) -> None:
    """Ends the server, also if it is frozen; the programs it has started continue."""
    if self._socket.fileno() >= 0:
      self._socket.close()
      os.kill(self._pid, signal.SIGKILL)
      os.waitpid(self._pid, 0)


def accept_interrupts() -> None:
  """Makes SIGINT raise KeyboardInterrupt again if it is ignored; in the main thread only.

  Shells without job control start programs in the background so, and their children inherit it.
  """
  if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


PARENT = 'HEPHAESTUS_PARENT'
"""Variable of the environment with the PID of the process with which a command ends; without it, it goes on."""


def bind_to(parent_pid: int, pipe: int | None = None) -> None:
  """Has the kernel kill this process when its parent ends; exits with code 1 if the parent has ended.

  Also accepts SIGINT again, see `accept_interrupts`.

  Args:
    parent_pid: process ID of the parent.
    pipe: file descriptor to which `+PID` of this process and a newline are written; None for none.
  """
  accept_interrupts()
  if hasattr(LIBC, 'prctl'):  # on Linux
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent_pid:  # it ended before the line above
    os._exit(1)
  if pipe is not None:
    os.write(pipe, f'+{os.getpid()}\n'.encode())


def _serve(requests: socket.socket, parent_pid: int) -> NoReturn:
  """Forks a program for every request until the launcher ends or closes its end; never returns."""
  LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  LIBC.prctl(PR_SET_NAME, b'hephaestus-fork')
  # Only the launcher obeys these.
  handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
  while os.getppid() == parent_pid:
    message, files, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 2)
    if not message:
      break
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
      # Forks once more and exits: the launcher adopts the orphan, and can then wait for it as for
      # any child.
      if os.fork():
        os._exit(0)
      requests.close()
      os.close(reader)
      for number, handler in handlers.items():
        # As a new program would: ignored signals stay so, and functions of the launcher go.
        is_own = callable(handler) and handler is not signal.default_int_handler
        signal.signal(number, signal.SIG_DFL if is_own else handler)
      _become(json.loads(message), files[0], files[1], writer, parent_pid)
    os.waitpid(child, 0)
    for file in (*files, writer):
      os.close(file)
    with os.fdopen(reader) as reply:  # empty if the program ended before it wrote its PID
      requests.send(reply.read().encode() or b'it ended at once')
  os._exit(0)


def _become(request: dict[str, Any], log: int, pipe: int, reply: int, parent_pid: int) -> NoReturn:
  """Runs the program of a request in this process, and never returns: raises SystemExit at its end."""
  os.setsid()
  deadline = time.monotonic() + ADOPTION_SECONDS
  while os.getppid() != parent_pid:
    if time.monotonic() > deadline:
      os._exit(1)
    time.sleep(1e-3)
  bind_to(parent_pid, pipe)
  os.write(reply, str(os.getpid()).encode())
  silence = os.open(os.devnull, os.O_RDONLY)
  for file, standard in ((silence, 0), (log, 1), (log, 2)):
    os.dup2(file, standard)
  for file in (silence, log, pipe, reply):
    os.close(file)
  sys.stdout = os.fdopen(1, 'w', buffering=1, closefd=False)
  LIBC.prctl(PR_SET_NAME, request['name'].encode())
  _adopt_environment(request['environment'])
  sys.argv = request['command'][1:]
  try:
    runpy.run_path(sys.argv[0], run_name='__main__')
  except (Exception, SystemExit) as error:
    line = user_errors.line(error)
    # No node finishes by sys.exit(0) in the user's code; other codes are failures as they are.
    if isinstance(error, SystemExit) and (line is None or error.code):
      raise
    traceback.print_exc()
    if line is not None:  # the last line of the log, which the launcher shows
      print(user_errors.PREFIX + ' '.join(line.split('\n')), file=sys.stderr)
    raise SystemExit(1) from None
  raise SystemExit(0)


def _adopt_environment(environment: Mapping[str, str]) -> None:
  """Sets environment variables, also in JAX and the allocator, which have read theirs already."""
  os.environ.update(environment)
  for name, value in environment.items():
    if name in MALLOC:
      LIBC.mallopt(MALLOC[name], int(value))
  if 'jax' in sys.modules:
    config = sys.modules['jax'].config
    for name, value in environment.items():
      if name.startswith('JAX_'):
        kind = type(config.values[name.lower()])
        config.update(name.lower(), kind(value) if kind in (int, float) else value)
