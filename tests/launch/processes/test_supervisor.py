"""The supervisor with real, tiny processes."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import polling
import psutil
import pytest

from hephaestus.launch.processes import supervisor

# Another test of this process may have loaded JAX, which no launcher does.
pytestmark = pytest.mark.filterwarnings('ignore:os.fork:RuntimeWarning')

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('ready', flush=True)
time.sleep(600)
"""

OBEDIENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print('ready', flush=True)
time.sleep(600)
"""

# Starts a process of its own and waits; prints the other's number.
PARENT = """
import subprocess, time
print('grandchild', subprocess.Popen(['sleep', '600']).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def make(tmp_path):
  """Makes a process from a Python program."""

  def make(name, program, **environment):
    return supervisor.Process(
      name=name,
      command=[sys.executable, '-I', '-S', '-c', textwrap.dedent(program)],
      environment=environment,
      log=tmp_path / 'logs' / f'{name}.log',
    )

  return make


def supervise(*processes, over='actor', on_event=lambda event: None, restarts=None, **options):
  """Runs processes until those named by `over` have finished; returns the outcome and the events."""
  events = []

  def note(event):
    events.append(event)
    on_event(event)

  rules = supervisor.Restarts(**{'backoff_seconds': 0.01, **(restarts or {})})
  outcome = supervisor.Supervisor(
    processes, is_over=set(over.split()).issubset, on_event=note, restarts=rules, **options
  ).run()
  return outcome, events


def names(events, kind):
  return [event.name for event in events if event.kind == kind]


def is_gone(pid):
  try:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return True


def words_after(path: pathlib.Path, word):
  """Words that follow `word` at the beginning of lines."""
  lines = path.read_text().splitlines() if path.exists() else []
  return [line.split()[1] for line in lines if line.startswith(f'{word} ')]


def interrupt():
  os.kill(os.getpid(), signal.SIGINT)


def wait_until_ready(process):
  polling.until(lambda: process.log.exists() and 'ready' in process.log.read_text())


def in_background(function):
  """Runs in a thread, because the supervisor needs the main one; interrupts the run at the end."""

  def run():
    try:
      function()
    finally:
      interrupt()

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  return thread


def test_run_ends_when_the_named_processes_have_finished(make):
  processes = [make('actor', OBEDIENT), make('learner', ''), make('evaluator', '')]
  outcome, events = supervise(*processes, over='learner evaluator')
  assert outcome == supervisor.Outcome()
  assert names(events, 'started') == ['actor', 'learner', 'evaluator']
  assert set(names(events, 'finished')) == {'learner', 'evaluator'}
  assert all(is_gone(event.pid) for event in events)


def test_killed_process_is_restarted_and_others_continue(make):
  pids = []

  def on_event(event):
    if (event.kind, event.name) == ('started', 'actor'):
      pids.append(event.pid)
      if len(pids) == 1:
        os.kill(event.pid, signal.SIGKILL)
      else:
        interrupt()

  processes = [make('replay', OBEDIENT), make('actor', 'import time; time.sleep(600)')]
  outcome, events = supervise(*processes, on_event=on_event)
  assert outcome == supervisor.Outcome(interrupted=signal.SIGINT)
  assert names(events, 'restarting') == ['actor']
  first_exit = next(event for event in events if event.kind == 'exited' and event.name == 'actor')
  assert first_exit.exit_code == -signal.SIGKILL


def test_processes_that_share_a_fate_restart_together(make):
  seen, pids = [], {}

  def on_event(event):
    seen.append((event.kind, event.name))
    if seen.count(('started', 'learner-0')) == 2 and seen[-1] == ('started', 'learner-1'):
      interrupt()
    elif seen[-1] == ('finished', 'learner-0'):  # of which nothing is left without the other
      os.kill(pids['learner-1'], signal.SIGKILL)
    pids[event.name] = event.pid

  together = ('learner-0', 'learner-1', 'learner-2')
  processes = [make('learner-0', ''), *(make(name, OBEDIENT) for name in (*together[1:], 'actor'))]
  outcome, events = supervise(*processes, on_event=on_event, restarts={'together': together})
  assert outcome.failed is None
  assert names(events, 'restarting') == ['learner-1']
  assert sorted(names(events, 'started')[4:]) == ['learner-0', 'learner-1', 'learner-2']
  assert seen.index(('killed', 'learner-2')) < seen.index(('started', 'learner-0'), 5)
  assert ('killed', 'actor') not in seen


def test_children_of_killed_process_end_before_its_restart(make):
  parent = make('actor', PARENT)

  def kill_the_parent():
    (grandchild,) = polling.until(lambda: words_after(parent.log, 'grandchild'))
    os.kill(psutil.Process(int(grandchild)).ppid(), signal.SIGKILL)
    polling.until(lambda: len(words_after(parent.log, 'grandchild')) == 2)
    assert is_gone(int(grandchild))

  in_background(kill_the_parent)
  _, events = supervise(parent)
  assert names(events, 'restarting') == ['actor']
  assert len(pids := words_after(parent.log, 'grandchild')) == 2
  assert all(is_gone(int(pid)) for pid in pids)


def test_backoff_doubles_up_to_its_bound_before_giving_up(make):
  failing = make('learner', 'for line in range(30): print("line", line)\nraise SystemExit(3)')
  outcome, events = supervise(
    make('replay', OBEDIENT),
    failing,
    over='learner',
    restarts={'max_backoff_seconds': 0.05, 'max_fast_failures': 5},
  )
  delays = [event.delay_seconds for event in events if event.kind == 'restarting']
  assert delays == [0.01, 0.02, 0.04, 0.05]
  assert outcome == supervisor.Outcome(0, 'learner', 3, [f'line {line}' for line in range(10, 30)])
  assert names(events, 'gave_up') == ['learner']
  assert all(is_gone(event.pid) for event in events)


def test_healthy_run_resets_failure_count(make, tmp_path):
  """Fails three times although two in a row are too many: every run is healthy."""
  process = make(
    'actor',
    f"""
    with open({str(tmp_path / 'count')!r}, 'a+') as file:
      file.write('.')
      file.flush()
      raise SystemExit(0 if file.tell() == 4 else 1)
    """,
  )
  rules = {'healthy_seconds': 0.0, 'max_fast_failures': 2}
  outcome, events = supervise(process, restarts=rules)
  assert outcome.failed is None
  delays = [event.delay_seconds for event in events if event.kind == 'restarting']
  assert delays == [0.01] * 3


@pytest.mark.parametrize(
  'program, code',
  [('import os, signal; os.kill(os.getpid(), signal.SIGKILL)', -signal.SIGKILL),
   ('raise SystemExit(75)', 75)],
)  # fmt: skip
def test_kills_and_external_exit_codes_get_more_restarts_than_failures(make, program, code):
  process = make('actor', program)._replace(external_exit_codes={75})
  rules = {'max_fast_failures': 1, 'max_fast_kills': 4, 'max_backoff_seconds': 0.02}
  outcome, events = supervise(process, restarts=rules)
  assert outcome.failed == 'actor' and outcome.failed_exit_code == code
  delays = [event.delay_seconds for event in events if event.kind == 'restarting']
  assert delays == [0.01, 0.02, 0.02]


def test_command_that_does_not_exist_is_given_up(make):
  outcome, _ = supervise(make('actor', '')._replace(command=['/no/such/program']))
  assert outcome.failed_exit_code == supervisor.CANNOT_START
  assert 'No such file' in outcome.last_lines[-1]


def test_groups_stop_one_after_another(make):
  processes = [make(name, OBEDIENT) for name in ('replay', 'learner', 'actor-0', 'actor-1')]
  groups = [(['actor-0', 'actor-1'], 10.0), (['learner'], 10.0), (['replay'], 10.0)]
  in_background(lambda: list(map(wait_until_ready, processes)))
  outcome, events = supervise(*processes, groups=groups)
  assert outcome.interrupted and outcome.failed is None
  ends = [(event.kind, event.name) for event in events if event.kind != 'started']
  assert set(ends[:2]) == {('stopping', 'actor-0'), ('stopping', 'actor-1')}
  assert set(ends[2:4]) == {('exited', 'actor-0'), ('exited', 'actor-1')}
  assert ends[4:] == [
    (kind, name) for name in ('learner', 'replay') for kind in ('stopping', 'exited')
  ]
  assert {event.exit_code for event in events if event.kind == 'exited'} == {0}


def test_process_that_ignores_sigterm_is_killed_after_its_grace(make):
  seen, ticks = [], []
  processes = [make('actor', STUBBORN), make('replay', OBEDIENT)]
  in_background(lambda: list(map(wait_until_ready, processes)))
  outcome, events = supervise(
    *processes,
    on_event=lambda event: seen.append(event.kind),
    on_tick=lambda: ticks.append(seen[-1]),
    groups=[(['actor'], 0.8), (['replay'], 30.0)],
  )
  assert outcome.failed is None and 'stopping' in ticks
  assert [(event.kind, event.name, event.exit_code) for event in events[2:]] == [
    ('stopping', 'actor', None),
    ('killed', 'actor', -signal.SIGKILL),
    ('stopping', 'replay', None),
    ('exited', 'replay', 0),
  ]
  assert all(is_gone(event.pid) for event in events)


def test_second_interrupt_kills_at_once(make):
  process, ended = make('actor', STUBBORN), threading.Event()

  def interrupt_until_ended():
    wait_until_ready(process)
    while not ended.wait(0.2):
      interrupt()

  previous = signal.signal(signal.SIGINT, lambda *_: None)  # one may come after the run
  thread = in_background(interrupt_until_ended)
  try:
    # A grace beyond the test's own timeout: only the second interrupt ends this.
    outcome, events = supervise(process, groups=[(['actor'], 1e4)])
  finally:
    ended.set()
    thread.join()
    signal.signal(signal.SIGINT, previous)
  assert outcome.interrupted
  assert [event.kind for event in events] == ['started', 'stopping', 'killed']


def test_signal_that_arrives_twice_counts_once(make):
  """`timeout` does this: it signals its child and then its group."""
  process = make('actor', OBEDIENT)
  in_background(lambda: wait_until_ready(process))
  _, events = supervise(
    process, on_event=lambda event: interrupt() if event.kind == 'stopping' else None
  )
  assert [event.kind for event in events] == ['started', 'stopping', 'exited']


def test_killed_supervisor_leaves_no_process(make, tmp_path):
  parent, stubborn = make('actor', PARENT), make('replay', STUBBORN)
  program = f"""
    import pathlib
    from hephaestus.launch.processes import supervisor
    processes = [
      supervisor.Process(name, command, {{}}, pathlib.Path(log))
      for name, command, log in {[(p.name, p.command, str(p.log)) for p in (parent, stubborn)]}
    ]
    on_event = lambda event: print(event.kind, event.pid, flush=True)
    supervisor.Supervisor(processes, on_event=on_event).run()
  """
  output = tmp_path / 'supervisor.txt'
  with open(output, 'w') as file:
    running = subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(program)],
      stdout=file,
      cwd=pathlib.Path(__file__).parents[3],
    )
  try:
    grandchildren = polling.until(lambda: words_after(parent.log, 'grandchild'))
    wait_until_ready(stubborn)
    children = polling.until(lambda: len(pids := words_after(output, 'started')) == 2 and pids)
    helpers = [child.pid for child in psutil.Process(running.pid).children(recursive=True)]
    pids = {int(pid) for pid in [*grandchildren, *children]} | set(helpers)
    assert len(pids) == 4  # two children, one grandchild and the guard
    assert not any(is_gone(pid) for pid in pids)
  finally:
    running.kill()
    running.wait()
  polling.until(lambda: all(is_gone(pid) for pid in pids))


def test_failing_callback_leaves_no_process(make):
  pids, handler = [], signal.getsignal(signal.SIGINT)

  def on_event(event):
    pids.append(event.pid)
    raise RuntimeError('a broken callback')

  with pytest.raises(RuntimeError, match='a broken callback'):
    supervise(make('actor', STUBBORN), on_event=on_event)
  assert all(is_gone(pid) for pid in pids)
  assert signal.getsignal(signal.SIGINT) is handler


def test_closed_terminal_does_not_end_a_run(make):
  def on_event(event):
    raise OSError('the terminal is gone')

  outcome, _ = supervise(make('actor', ''), on_event=on_event)
  assert outcome == supervisor.Outcome()
