"""The watchdog ends a node that hangs and prints its stacks; waiting and computing are no hang."""

import pathlib
import subprocess
import sys
import textwrap

import polling

WATCHED = """
from hephaestus.launch.processes import watchdog

ask = watchdog.watched(lambda: False, stuck_seconds=0.5)
"""

HANGS = """
def wait_forever():
  threading.Event().wait()

ask()
wait_forever()
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
print('continues', ask())
"""


SERVES = """
import reverb
from hephaestus.launch.run import program

uniform, fifo = reverb.selectors.Uniform(), reverb.selectors.Fifo()
server = reverb.Server([reverb.Table('t', uniform, fifo, 10, reverb.rate_limiters.MinSize(1))])

def serve(stop):
  program.serve(stop, f'elsewhere:{server.port}', stuck_seconds=0.5)

asked = threading.Event()
threading.Timer(1.5, asked.set).start()  # three times the time-out of a hang
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
    cwd=pathlib.Path(__file__).parents[3], capture_output=True, text=True, timeout=polling.PATIENCE,
  )  # fmt: skip


def test_hanging_node_prints_its_stack_and_exits():
  ended = end_of(WATCHED + HANGS)
  assert ended.returncode == 1
  assert 'has made no progress for 0.5 s (learner.stuck_seconds)' in ended.stderr
  assert 'in wait_forever' in ended.stderr


def test_waiting_computing_or_frozen_node_continues():
  ended = end_of(WATCHED + DOES_NOT)
  assert (ended.returncode, ended.stdout) == (0, 'continues False\n'), ended.stderr


def test_replay_node_exits_when_its_server_hangs():
  ended = end_of(SERVES)
  assert (ended.returncode, ended.stdout) == (1, 'asked to stop\n'), ended.stderr
  assert 'has made no progress for 0.5 s' in ended.stderr
