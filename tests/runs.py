"""Real runs of `hephaestus train`, seen from outside."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import polling
import psutil
import pytest

from hephaestus.launch.files import metrics

HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'
TESTS = pathlib.Path(__file__).parent
ENVIRONMENT = 'slow_catch:SlowCatch'
DISTRIBUTED = ('acme', 'launchpad', 'portpicker', 'reverb', 'tensorflow', 'tensorflow_probability')
"""Packages that runs of one process must not need."""


class Launch:
  """`hephaestus train` on one folder."""

  def __init__(self, folder, *overrides, agent='dreamer', environment=ENVIRONMENT, fused=False):
    self.folder = folder
    variables = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    variables['PYTHONPATH'] = str(TESTS)
    variables['http_proxy'] = variables['grpc_proxy'] = 'http://127.0.0.1:9'  # where nobody listens
    self.output = (folder.parent / 'output.txt').open('a+')
    self.process = subprocess.Popen(
      [HEPHAESTUS, 'train', '--run', folder, '--preset', 'laptop',
       '--env', 'catch' if fused else environment,
       '--agent', agent, '--fused' if fused else '--no-fused', '--set', *overrides],
      stdout=self.output, stderr=subprocess.STDOUT, env=variables, cwd=folder.parent,
    )  # fmt: skip

  def wait_for(self, predicate, what):
    """Polls until `predicate` holds; fails with the output of the run when it does not."""
    polling.until(
      predicate, lambda: f'{what}: {self.words()}', alive=lambda: self.process.poll() is None
    )

  def end(self):
    """The exit code, once it has ended by itself."""
    try:
      return self.process.wait(timeout=polling.PATIENCE)
    except subprocess.TimeoutExpired:
      pytest.fail(f'does not end: {self.words()}')

  def words(self):
    logs = [f'{log.name}:\n{log.read_text()[-2000:]}' for log in (self.folder / 'logs').glob('*')]
    return '\n'.join([(self.folder.parent / 'output.txt').read_text(), *logs])

  def rows(self, node):
    return metrics.read(self.folder / 'metrics' / f'{node}.jsonl')

  def step(self, node='learner', key='learner_step'):
    row = metrics.last(self.folder / 'metrics' / f'{node}.jsonl')
    return -1 if row is None or row[key] is None else row[key]

  def pid(self, node):
    started = [row for row in self.rows('events')
               if row['name'] == node and row['kind'] == 'started']  # fmt: skip
    return started[-1]['pid'] if started else None

  def is_reached_from_outside(self):
    """Whether replay answers at an address that is visible to other machines."""
    port = int((self.folder / 'address').read_text().rsplit(':', 1)[1])
    for entries in psutil.net_if_addrs().values():
      for entry in entries:
        if entry.family == socket.AF_INET and not entry.address.startswith('127.'):
          with contextlib.suppress(OSError):
            socket.create_connection((entry.address, port), timeout=5.0).close()
            return True
    return False

  def kill(self, *nodes, by=signal.SIGKILL):
    """Kills nodes at once, or asks them to stop, and waits until they are restarted."""
    before = {node: self.pid(node) for node in nodes}
    for pid in before.values():
      os.kill(pid, by)
    for node, pid in before.items():
      self.wait_for(lambda node=node, pid=pid: self.pid(node) != pid, f'another {node}')


def living(folder):
  """Running processes whose command names the folder of a run."""
  found = []
  for process in psutil.process_iter(['cmdline', 'status']):
    command = ' '.join(process.info['cmdline'] or [])
    if str(folder) in command and process.info['status'] != psutil.STATUS_ZOMBIE:
      found.append(command)
  return found


def kill_all(folder):
  """Kills all processes whose command names the folder of a run."""
  for process in psutil.process_iter(['cmdline']):
    if str(folder) in ' '.join(process.info['cmdline'] or []):
      process.kill()


def resumed_at(log):
  """The update of each resume in a log of the learner."""
  return [
    int(update) for update in re.findall(r'Training resumes at update (\d+)', log.read_text())
  ]


def check_steps(rows, log_period, stops=()):
  """The learner's rows are at multiples of the period and at stops, each once, and the last is the run's end."""
  steps = [row['learner_step'] for row in rows]
  expected = sorted({*range(log_period, steps[-1], log_period), *stops, steps[-1]})
  assert steps == expected, 'a step is missing or there twice'
