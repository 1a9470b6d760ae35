"""Programs forked by the fork server, in a process that has imported little."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import polling
import psutil
import pytest

from hephaestus.launch import user_errors

ROOT = pathlib.Path(__file__).parents[3]
DEADLINE_SECONDS = polling.PATIENCE

# A launcher: makes its fork server, then supervises the script it is given until that has finished.
LAUNCHER = """
import pathlib, signal, sys
import imported_before
from hephaestus.launch.processes import supervisor
from hephaestus.launch.processes import fork_server
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # of the launcher only
forks = fork_server.ForkServer()
imported_before.value = 'of the launcher, later'
if len(sys.argv) > 3:
  import os
  os.kill(forks._pid, int(sys.argv[3]))
  forks._socket.settimeout(0.2)
folder, script = map(pathlib.Path, sys.argv[1:3])
outcome = supervisor.Supervisor(
  [supervisor.Process(
    'actor-0', [sys.executable, str(script), '--some', 'flag'], {'OWN': 'variable'}, folder / 'log',
  )],
  is_over={'actor-0'}.issubset,
  restarts=supervisor.Restarts(backoff_seconds=0.01, max_fast_failures=2, max_fast_kills=2), forks=forks,
  on_event=lambda event: print(event.kind, event.exit_code, event.pid, flush=True),
).run()
forks.close()
print('outcome', int(outcome.failed is not None), outcome.failed_exit_code, *outcome.last_lines, flush=True)
"""

TELL = """
import atexit, json, os, sys
import imported_before
atexit.register(print, 'at exit')
print(json.dumps({
  'value': imported_before.value, 'imported_by': imported_before.pid, 'arguments': sys.argv[1:],
  'variable': os.environ['OWN'], 'session': os.getsid(0), 'pid': os.getpid(), 'name': __name__,
  'comm': open('/proc/self/comm').read().strip(), 'descriptors': len(os.listdir('/proc/self/fd')),
}))
"""


@pytest.fixture
def launch(tmp_path):
  """Starts a launcher of a script."""
  (tmp_path / 'imported_before.py').write_text("import os\npid, value = os.getpid(), 'imported'\n")
  (tmp_path / 'launcher.py').write_text(LAUNCHER)

  def launch(script, *arguments, **options):
    (tmp_path / 'script.py').write_text(script)
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    return subprocess.Popen(
      [sys.executable, 'launcher.py', tmp_path, tmp_path / 'script.py', *arguments],
      cwd=tmp_path, env=os.environ | {'PYTHONPATH': paths}, stdout=subprocess.PIPE, text=True,
      **options,
    )  # fmt: skip

  return launch


def ended(launcher):
  """Output lines of a launcher, once it has ended by itself."""
  output, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
  assert launcher.returncode == 0
  return output.splitlines()


def said(folder):
  """Lines that the script wrote to its log, without headers."""
  return [line for line in (folder / 'log').read_text().splitlines() if line[:3] != '---']


def test_forked_program_shares_imports_and_has_its_own_session(launch, tmp_path):
  launcher = launch(TELL)
  lines = ended(launcher)
  line, last = said(tmp_path)
  told = json.loads(line)
  assert told['value'] == 'imported'  # as of the fork, whatever the launcher changed later
  assert last == 'at exit'
  assert told['imported_by'] == launcher.pid
  assert told['arguments'] == ['--some', 'flag'] and told['name'] == '__main__'
  assert told['variable'] == 'variable'
  assert told['session'] == told['pid'] != launcher.pid
  assert told['comm'] == 'actor-0'
  assert told['descriptors'] <= 4, 'it holds files that are not its own'
  assert lines[0] == f'started None {told["pid"]}'
  assert lines[-1] == 'outcome 0 None'


@pytest.mark.parametrize(
  'script, code',
  [
    ('raise ValueError("last words")', 1),
    ('import sys; print("last words"); sys.exit(3)', 3),
    ('import sys\ndef last_words():\n  sys.exit(0)\nlast_words()', 1),
    ('import os; print("last words"); os.kill(os.getpid(), 15)', -15),
  ],
)
def test_forked_program_keeps_its_exit_code_and_is_restarted(launch, script, code):
  lines = ended(launch(script))
  assert sum(line.startswith('started') for line in lines) == 2
  assert lines[-1].startswith(f'outcome 1 {code} ') and re.search('last.words', lines[-1])


def test_error_of_own_code_ends_the_log_with_its_place(launch, tmp_path):
  ended(launch('def step():\n  raise KeyError("lamp 7")\n\nstep()\n'))
  place = f'(KeyError at {tmp_path / "script.py"}:2, in step)'
  assert user_errors.logged(tmp_path / 'log') == f"'lamp 7' {place}"
  with (tmp_path / 'log').open('a') as log:
    log.write('--- 2026-11-25 10:00:00 actor-0: start 3\nKilled\n')
  assert user_errors.logged(tmp_path / 'log') is None  # that was another start


def test_forked_program_is_killed_with_its_launcher(launch, tmp_path):
  launcher = launch('import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n')
  pid = int(polling.until(lambda: (tmp_path / 'log').exists() and said(tmp_path))[0])
  children = [child.pid for child in psutil.Process(launcher.pid).children()]
  assert pid in children  # not of the fork server, so that the supervisor can wait for it
  launcher.send_signal(signal.SIGKILL)
  launcher.communicate(timeout=DEADLINE_SECONDS)
  polling.until(lambda: all(map(is_gone, children)))


def test_forked_program_accepts_sigint_in_background(launch):
  script = 'import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n'
  ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
  lines = ended(launch(script, preexec_fn=ignore))
  assert lines[-1].startswith('outcome 1 ') and 'KeyboardInterrupt' in lines[-1]


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSTOP])
def test_programs_start_if_the_fork_server_is_gone_or_frozen(launch, tmp_path, number):
  launcher = launch(TELL, str(int(number)))
  assert ended(launcher)[-1] == 'outcome 0 None'
  words = said(tmp_path)
  assert 'starting it as a new program' in words[0]
  assert json.loads(words[1])['imported_by'] == json.loads(words[1])['pid']


def test_forked_program_applies_variables_to_jax_and_the_allocator(tmp_path):
  program = """
import os, sys, jax
from hephaestus.launch.processes import fork_server
forks = fork_server.ForkServer()
node = forks.start('node', [sys.executable, sys.argv[1]], {
  'JAX_PLATFORMS': 'cpu', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.25',
  'JAX_COMPILATION_CACHE_DIR': 'somewhere', 'MALLOC_ARENA_MAX': '2',
}, 1, os.open(os.devnull, os.O_WRONLY))
sys.exit(node.wait())
"""
  script = """
import os, jax
print(jax.config.jax_platforms, jax.config.jax_persistent_cache_min_compile_time_secs,
      jax.config.jax_compilation_cache_dir, os.environ['JAX_PLATFORMS'])
"""
  (tmp_path / 'script.py').write_text(script)
  environment = {name: value for name, value in os.environ.items() if not name.startswith('JAX')}
  said = subprocess.run(
    [sys.executable, '-c', program, tmp_path / 'script.py'], env=environment, cwd=ROOT,
    capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS,
  ).stdout  # fmt: skip
  assert said.split() == ['cpu', '0.25', 'somewhere', 'cpu']


def is_gone(pid):
  try:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return True
