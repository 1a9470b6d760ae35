"""Fixtures of replay: real servers, sequences with an identity, and waits with a time-out."""

import os
import pathlib
import subprocess
import sys

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import time
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from hephaestus.replay import tables


class Step(NamedTuple):
  identity: Any
  noise: Any


@pytest.fixture(scope='session')
def schema():
  """A sequence with its identity: {'steps': Step([4], [4, 8]), 'identity': [], 'empty': [0]}.

  Agents store an empty leaf for a part that an environment does not have.
  """
  return {
    'steps': Step(jax.ShapeDtypeStruct((4,), np.int32), jax.ShapeDtypeStruct((4, 8), np.float32)),
    'identity': jax.ShapeDtypeStruct((), np.int32),
    'empty': jax.ShapeDtypeStruct((0,), np.float32),
  }


@pytest.fixture(scope='session')
def make_sequences():
  """Makes sequences `start` to `stop` of that schema, [N, ...]."""

  def make(start, stop):
    identity = np.arange(start, stop, dtype=np.int32)
    noise = np.random.default_rng(start).normal(size=(stop - start, 4, 8)).astype(np.float32)
    empty = np.zeros((stop - start, 0), np.float32)
    return {
      'steps': Step(np.repeat(identity[:, None], 4, 1), noise), 'identity': identity, 'empty': empty
    }  # fmt: skip

  return make


SERVER = """
import sys, jax, numpy as np
from hephaestus.replay import tables
from hephaestus.replay.tables import ReplayConfig, Stratum
config, batch_size, insert_size, port, folder = sys.argv[1:]
schema = {'identity': jax.ShapeDtypeStruct((), np.int32)}
made = tables.make_tables(
  eval(config), schema, batch_size=int(batch_size), insert_size=int(insert_size)
)
tables.make_server(made, port=int(port), directory=folder).wait()
"""


@pytest.fixture
def spawn():
  """(config, port, folder, batch_size, insert_size) -> a server of identities, as a process."""
  processes = []

  def run(config, port, folder, *, batch_size, insert_size):
    numbers = map(str, (config, batch_size, insert_size, port, folder))
    process = subprocess.Popen(
      [sys.executable, '-c', SERVER, *numbers],
      cwd=pathlib.Path(__file__).parents[2],
      env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3', 'JAX_PLATFORMS': 'cpu'},
      stderr=subprocess.DEVNULL,
    )
    processes.append(process)
    return process

  yield run
  for process in processes:
    process.kill()
    process.wait()


@pytest.fixture(scope='session')
def wait_until():
  """Polls a predicate until it is true; fails after a time-out."""

  def wait(predicate, seconds):
    end = time.monotonic() + seconds
    while not predicate():
      assert time.monotonic() < end, f'not true within {seconds} s'
      time.sleep(0.01)

  return wait


@pytest.fixture
def serve(schema):
  """Starts servers in this process; by default their limiters have a slack of 10,000 inserts."""
  servers = []

  def start(config, *, batch_size=16, insert_size=10_000, schema=schema, **options):
    server = tables.make_server(
      tables.make_tables(config, schema, batch_size=batch_size, insert_size=insert_size), **options
    )
    servers.append(server)
    return server, f'localhost:{server.port}'

  yield start
  for server in servers:
    server.stop()


@pytest.fixture
def unlimited():
  """Makes a config for such a server, whose limiter blocks nothing within a test."""

  def make(frontier=64, episodic=1000, share=0.5, **options):
    return tables.ReplayConfig(
      strata=(
        tables.Stratum(name='frontier', max_size=frontier, share=share),
        tables.Stratum(name='episodic', max_size=episodic, share=1 - share),
      ),
      **{'replay_ratio': 1.0, 'warm_up': 1, **options},
    )

  return make
