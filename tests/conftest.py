"""Eight simulated devices, and quiet libraries; set before anything imports JAX or TensorFlow."""

import os

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
