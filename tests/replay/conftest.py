"""Fixtures of replay: real servers, sequences with an identity, and waits with a time-out."""

import contextlib
import json
import os
import pathlib
import signal
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


SERVERS = """
import json, os, signal, sys
import jax, numpy as np, reverb
from hephaestus.replay import tables
from hephaestus.replay.tables import ReplayConfig, Stratum

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps killed servers
schema = {'identity': jax.ShapeDtypeStruct((), np.int32)}
for line in sys.stdin:
  config, batch_size, insert_size, port, folder = json.loads(line)
  pid = os.fork()
  if not pid:
    made = tables.make_tables(eval(config), schema, batch_size=batch_size, insert_size=insert_size)
    tables.make_server(made, port=port, directory=folder).wait()
  print(pid, flush=True)
"""


@pytest.fixture(scope='session')
def fork_server():
  """A process that forks servers, so that Reverb is imported once for all of them."""
  process = subprocess.Popen(
    [sys.executable, '-c', SERVERS],
    cwd=pathlib.Path(__file__).parents[2],
    env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3', 'JAX_PLATFORMS': 'cpu'},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  yield process
  process.kill()
  process.communicate()


class ServerProcess(NamedTuple):
  """A forked server."""

  pid: int

  def kill(self):
    """Kills it, and waits for its end."""
    with contextlib.suppress(ProcessLookupError):
      while True:
        os.kill(self.pid, signal.SIGKILL)
        time.sleep(0.01)


@pytest.fixture
def spawn(fork_server):
  """(config, port, folder, batch_size, insert_size) -> a server of identities, as a process."""
  servers = []

  def run(config, port, folder, *, batch_size, insert_size):
    request = json.dumps([str(config), batch_size, insert_size, port, folder])
    print(request, file=fork_server.stdin, flush=True)
    servers.append(ServerProcess(int(fork_server.stdout.readline())))
    return servers[-1]

  yield run
  for server in servers:
    server.kill()


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
