"""Eight simulated devices, caches of compiled programs, and quiet libraries; set before JAX is imported."""

import contextlib
import gc
import os
import pathlib
import resource
import signal
import sys

import pytest
import tiny as tiny_sizes

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

# Tracing makes millions of objects that live: with Python's threshold of 700, collections take a tenth
# of the time of tests that compile. `survivors_not_scanned` collects after each module.
gc.set_threshold(100_000, 20, 20)


def pytest_configure(config):
  """Shares compiled XLA programs and bytecode among all processes, and accepts SIGINT."""
  if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if cache := getattr(config, 'cache', None):
    if sys.dont_write_bytecode:
      # Else every process compiles all of TensorFlow and JAX, which takes ten seconds of a core.
      sys.dont_write_bytecode = False
      sys.pycache_prefix = str(cache.mkdir('bytecode'))
      os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
      os.environ['PYTHONPYCACHEPREFIX'] = sys.pycache_prefix
    # Runs that tests start have their cache here, too.
    home = os.environ.setdefault('XDG_CACHE_HOME', str(cache.mkdir('home')))
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', os.path.join(home, 'hephaestus', 'jax'))
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')


# Longest first, so that no worker is left alone with one of them; real runs, which mostly wait,
# beside programs that compile.
ORDER = (
  'launch/run/test_topology.py', 'learner/test_dreamer_update.py',
  'launch/run/test_several_learners.py', 'launch/run/test_ppo_with_actors.py',
  'launch/cluster/test_hosts.py', 'learner/', 'launch/', 'agents/', 'replay/', 'actors/',
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Sorts the files, which workers take in this order."""
  tests = pathlib.Path(__file__).parent

  def rank(item):
    path = item.path.relative_to(tests).as_posix()
    return next((at for at, start in enumerate(ORDER) if path.startswith(start)), len(ORDER))

  items.sort(key=rank)


@pytest.fixture(scope='module', autouse=True)
def survivors_not_scanned():
  """Exempts what a module leaves behind, as compiled programs, from all later garbage collections."""
  yield
  gc.collect()
  gc.freeze()


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


@pytest.fixture(scope='session')
def tiny_dreamer():
  """Fields of the config of a small dreamer; the others have their defaults."""
  return dict(tiny_sizes.DREAMER)


@pytest.fixture(scope='session')
def tiny():
  """Overrides of the laptop's `catch`: a small, fast run of the default agent."""
  return (*tiny_sizes.RUN, 'learner.checkpoint_period=3', 'evaluator.period=3')


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
