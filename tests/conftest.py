"""Eight simulated devices, programs compiled once, and quiet libraries; before anything imports JAX."""

import contextlib
import os
import resource

import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


def pytest_configure(config):
  """What one process has compiled no other compiles, now or when the tests are run again."""
  if cache := getattr(config, 'cache', None):
    # Where runs that tests start would look for it below the user's folder.
    home = os.environ.setdefault('XDG_CACHE_HOME', str(cache.mkdir('home')))
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', os.path.join(home, 'hephaestus', 'jax'))
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')


@pytest.fixture(scope='module')
def little_optimization():
  """For programs that run a few times on tiny arrays: their time is the compiler's.

  It holds for processes that are started meanwhile, too.
  """
  import jax

  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
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
