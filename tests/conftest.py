"""Eight simulated devices, and quiet libraries; set before anything imports JAX or TensorFlow."""

import contextlib
import os
import resource

import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


@pytest.fixture(scope='module')
def little_optimization():
  """For programs that run a few times on tiny arrays: their time is the compiler's."""
  import jax

  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


@pytest.fixture
def no_room():
  """A context in which files of this process cannot grow beyond so many bytes, as on a full disk."""

  @contextlib.contextmanager
  def limit(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
      yield
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)

  return limit
