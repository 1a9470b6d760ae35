"""Learners of several processes."""

import os
import pathlib
import subprocess
import sys

import polling
import pytest
import trainer


class Processes:
  """`process.py`, two times, each with some devices."""

  def __init__(self, folder, kind, num_updates, ending, devices=4):
    import portpicker  # of the extra `distributed`; others of this folder need no process

    self.folder = folder
    self._logs = [folder / f'{rank}.log' for rank in (0, 1)]
    self.running = []
    address = f'127.0.0.1:{portpicker.pick_unused_port()}'
    program = pathlib.Path(__file__).with_name('process.py')
    environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
      'TF_CPP_MIN_LOG_LEVEL': '3',
      'PYTHONPATH': str(program.parents[2]),
    }
    for rank, log in enumerate(self._logs):
      arguments = map(str, (program, folder, address, rank, 2, kind, num_updates, ending))
      with log.open('w') as output:
        self.running.append(
          subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
          )
        )

  def wait_for(self, predicate, what):
    """Polls while both run until `predicate` holds; else fails with the processes' own words."""
    alive = lambda: all(process.poll() is None for process in self.running)
    polling.until(predicate, lambda: f'{what}: {self.words(0, 1)}', alive=alive)

  def end(self, rank, seconds=polling.PATIENCE):
    """The exit code of a process that ends in time."""
    try:
      return self.running[rank].wait(timeout=seconds)
    except subprocess.TimeoutExpired:
      pytest.fail(f'process {rank} does not end: {self.words(0, 1)}')

  def words(self, *ranks):
    return '\n'.join(self._logs[rank].read_text()[-4000:] for rank in ranks)

  def saved(self):
    """The steps of its checkpoints."""
    paths = (self.folder / 'checkpoints').glob('*')
    return sorted(int(path.name) for path in paths if path.name.isdigit())


@pytest.fixture(scope='session')
def one_device():
  """The update of the default dreamer on one device, which is compiled once for several files."""
  return trainer.Counted()


@pytest.fixture
def processes(tmp_path):
  """Starts the two processes on one folder, and ends them with the test."""
  started = []

  def start(*arguments, **options):
    started.append(Processes(tmp_path, *arguments, **options))
    return started[-1]

  yield start
  for process in (process for each in started for process in each.running):
    process.kill()
    process.wait()
