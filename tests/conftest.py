"""Eight simulated devices, caches of compiled programs, and quiet libraries; set before JAX is imported."""

import collections
import contextlib
import gc
import os
import pathlib
import resource
import signal
import sys

import pytest
import tiny as tiny_sizes

TESTS = pathlib.Path(__file__).parent

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# Programs of tests run a few times on tiny arrays, so their time is the compiler's: an update of the
# dreamer compiles in a third of the CPU time. The processes that tests start inherit it.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
# A twentieth of the time to trace and lower is for the Python frames of each instruction.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')

# Tracing makes millions of objects that live: with Python's threshold of 700, collections take a tenth
# of the time of tests that compile. `survivors_not_scanned` collects after each module.
gc.set_threshold(100_000, 20, 20)


def pytest_configure(config):
  """Shares compiled XLA programs and bytecode among all processes, and accepts SIGINT."""
  if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if cache := getattr(config, 'cache', None):
    if sys.dont_write_bytecode:
      # Without it every process compiles all of TensorFlow and JAX, which takes ten seconds of a core.
      sys.dont_write_bytecode = False
      sys.pycache_prefix = str(cache.mkdir('bytecode'))
      os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
      os.environ['PYTHONPYCACHEPREFIX'] = sys.pycache_prefix
    # Runs that tests start have their cache here, too.
    home = os.environ.setdefault('XDG_CACHE_HOME', str(cache.mkdir('home')))
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', os.path.join(home, 'hephaestus', 'jax'))
    # Small programs too: each worker runs the same primitives outside of a jitted function.
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')


# Files that share the fixtures of a session, such as compiled programs and finished runs: one worker
# takes a whole group. A file belongs to the first group that has a beginning of its path.
GROUPS = {
  'a run of the dreamer': (
    'launch/run/test_without_distributed.py',
    'launch/test_trust.py',
    'launch/doctor/',
    'launch/bench/test_dreams.py',
    'launch/interface/',
  ),
  'environments of other packages': (
    'launch/bench/test_learning.py',
    'launch/inspect/test_environments.py',
    'actors/environments/test_export.py',
    'actors/environments/test_host.py',
    'actors/environments/test_make.py',
  ),
  'updates of the dreamer': ('learner/test_dreamer_update.py', 'learner/test_update_digests.py'),
  'agents': ('agents/',),
}

# The order in which workers take groups and files: longest first, so that no worker is left with one
# of them; real runs, which mostly wait, next to programs that compile.
ORDER = (
  'launch/run/test_topology.py', 'agents/', 'test_notebook.py', 'learner/', 'launch/run/',
  'launch/bench/', 'launch/', 'actors/', 'replay/',
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Sorts the files, which workers take in this order."""

  def rank(item):
    path = item.path.relative_to(TESTS).as_posix()
    return next((at for at, start in enumerate(ORDER) if path.startswith(start)), len(ORDER))

  items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
  """Gives a whole file or group to one worker (`--dist loadgroup` fails with pytest 9.2)."""
  from xdist import scheduler

  class Scheduling(scheduler.LoadScopeScheduling):
    def _split_scope(self, nodeid):
      file = nodeid.partition('::')[0]
      path = file.removeprefix('tests/')
      return next((name for name, starts in GROUPS.items() if path.startswith(starts)), file)

  return Scheduling(config, log)


seconds_of_files = collections.Counter()


def pytest_runtest_logreport(report):
  """Adds the seconds of a test with its fixtures; workers send their reports to the first process."""
  seconds_of_files[report.nodeid.partition('::')[0]] += report.duration


def pytest_terminal_summary(terminalreporter):
  """Shows the slowest files of a whole suite."""
  if len(seconds_of_files) > 10:
    terminalreporter.section('slowest files, seconds of all workers')
    for file, seconds in seconds_of_files.most_common(10):
      terminalreporter.write_line(f'{seconds:6.1f}  {file}')
    terminalreporter.write_line(f'{seconds_of_files.total():6.1f}  of all files')


@pytest.fixture(scope='module', autouse=True)
def survivors_not_scanned():
  """Exempts what a module leaves behind, as compiled programs, from all later garbage collections."""
  yield
  gc.collect()
  gc.freeze()


@pytest.fixture
def full_optimization(monkeypatch):
  """Serves programs that run for minutes, or whose text is read, also in child processes."""
  import jax

  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', False)
  monkeypatch.delenv('JAX_DISABLE_MOST_OPTIMIZATIONS')
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
