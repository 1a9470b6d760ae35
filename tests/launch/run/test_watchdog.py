"""A node that hangs ends, and says where; one that waits, computes or is frozen does not."""

import pathlib
import subprocess
import sys
import textwrap

WATCHED = """
from hephaestus.launch.run import watchdog

ask = watchdog.watched(lambda: False, stuck_seconds=0.5)
"""

HANGS = """
def wait_for_what_never_comes():
  threading.Event().wait()

ask()
wait_for_what_never_comes()
"""

DOES_NOT = """
def until(done):
  end = time.monotonic() + 1.0
  while time.monotonic() < end:
    done()

until(lambda: None)  # computes
until(lambda: (ask(), time.sleep(0.05)))  # waits
subprocess.Popen(['sh', '-c', 'sleep 1; kill -CONT $PPID'])
os.kill(os.getpid(), signal.SIGSTOP)
print('goes on', ask())
"""


SERVES = """
import reverb
from hephaestus.launch.run import program

uniform, fifo = reverb.selectors.Uniform(), reverb.selectors.Fifo()
server = reverb.Server([reverb.Table('t', uniform, fifo, 10, reverb.rate_limiters.MinSize(1))])

def serve(stop):
  program.serve(stop, f'elsewhere:{server.port}', stuck_seconds=0.5)

asked = threading.Event()
threading.Timer(1.5, asked.set).start()  # three times as long as one that hangs is left alone
serve(asked)
print('asked to stop', flush=True)
server.stop()
serve(threading.Event())
"""


def end_of(program):
  head = """
  import os, signal, subprocess, threading, time
  """
  return subprocess.run(
    [sys.executable, '-c', textwrap.dedent(head) + program],
    cwd=pathlib.Path(__file__).parents[3], capture_output=True, text=True, timeout=60,
  )  # fmt: skip


def test_a_node_that_hangs_says_where_and_ends():
  ended = end_of(WATCHED + HANGS)
  assert ended.returncode == 1
  assert 'neither gone on nor computed for 0.5 s (learner.stuck_seconds)' in ended.stderr
  assert 'in wait_for_what_never_comes' in ended.stderr


def test_who_waits_or_computes_or_is_frozen_goes_on():
  ended = end_of(WATCHED + DOES_NOT)
  assert (ended.returncode, ended.stdout) == (0, 'goes on False\n'), ended.stderr


def test_replay_ends_when_its_server_no_longer_answers():
  ended = end_of(SERVES)
  assert (ended.returncode, ended.stdout) == (1, 'asked to stop\n'), ended.stderr
  assert 'neither gone on nor computed for 0.5 s' in ended.stderr
