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


def interrupt_when_ready(*processes):
  """Interrupts the supervisor once all of them have set their handlers of signals."""

  def wait():
    for process in processes:
      polling.until(lambda log=process.log: log.exists() and 'ready' in log.read_text())
    interrupt()

  return in_background(wait)


def in_background(function):
  """Runs in a thread, because the supervisor needs the main one; ends the run when it fails."""

  def run():
    try:
      function()
    except BaseException:
      interrupt()
      raise

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  return thread


def test_run_ends_when_the_named_processes_have_finished(make):
  events = []
  processes = [make('actor', OBEDIENT), make('learner', ''), make('evaluator', '')]
  outcome = supervisor.Supervisor(
    processes, is_over={'learner', 'evaluator'}.issubset, on_event=events.append
  ).run()
  assert outcome.exit_code == 0
  assert not outcome.interrupted
  assert outcome.failed is None
  assert outcome.restarts == {'actor': 0, 'learner': 0, 'evaluator': 0}
  assert [event.name for event in events if event.kind == 'started'] == [
    'actor',
    'learner',
    'evaluator',
  ]
  assert {event.name for event in events if event.kind == 'finished'} == {'learner', 'evaluator'}
  assert all(is_gone(event.pid) for event in events)


def test_process_gets_its_variables_and_log(make):
  process = make(
    'learner',
    """
    import os, sys
    print(os.environ['VARIABLE'], flush=True)
    print('in trouble', file=sys.stderr)
    """,
    VARIABLE='catch',
  )
  process.log.parent.mkdir()
  process.log.write_text('an earlier run\n')
  supervisor.Supervisor([process], is_over={'learner'}.issubset).run()
  lines = process.log.read_text().splitlines()
  assert lines[0] == 'an earlier run'
  assert lines[1].startswith('--- ')
  assert lines[1].endswith('learner: start 1')
  assert lines[2:] == ['catch', 'in trouble']


def test_killed_process_is_restarted_and_others_continue(make):
  events = []

  def on_event(event):
    events.append(event)
    starts = [other for other in events if other.kind == 'started' and other.name == 'actor']
    if event.kind == 'started' and event.name == 'actor':
      if len(starts) == 1:
        os.kill(event.pid, signal.SIGKILL)
      else:
        interrupt()

  processes = [make('replay', OBEDIENT), make('actor', 'import time; time.sleep(600)')]
  outcome = supervisor.Supervisor(
    processes,
    is_over={'actor'}.issubset,
    on_event=on_event,
    restarts=supervisor.Restarts(backoff_seconds=0.01),
  ).run()
  assert outcome.restarts == {'replay': 0, 'actor': 1}
  assert outcome.interrupted
  assert outcome.exit_code == 0
  (first_exit,) = [event for event in events if event.kind == 'exited' and event.name == 'actor'][
    :1
  ]
  assert first_exit.exit_code == -signal.SIGKILL


def test_processes_that_share_a_fate_restart_together(make):
  events = []

  def on_event(event):
    events.append((event.kind, event.name))
    if events.count(('started', 'learner-0')) == 2 and events[-1] == ('started', 'learner-1'):
      interrupt()
    elif events[-1] == ('finished', 'learner-0'):  # of which nothing is left without the other
      os.kill(pids['learner-1'], signal.SIGKILL)
    pids[event.name] = event.pid

  pids = {}
  names = ('learner-0', 'learner-1', 'learner-2')
  processes = [make('learner-0', ''), *(make(name, OBEDIENT) for name in (*names[1:], 'actor'))]
  outcome = supervisor.Supervisor(
    processes,
    is_over={'actor'}.issubset,
    on_event=on_event,
    restarts=supervisor.Restarts(together=names, backoff_seconds=0.01),
  ).run()
  assert outcome.restarts == {'learner-0': 1, 'learner-1': 1, 'learner-2': 1, 'actor': 0}
  assert [name for kind, name in events if kind == 'restarting'] == ['learner-1']
  assert events.index(('killed', 'learner-2')) < events.index(('started', 'learner-0'), 5)
  assert ('killed', 'actor') not in events and outcome.exit_code == 0


def test_children_of_killed_process_end_before_its_restart(make):
  parent = make('actor', PARENT)

  def kill_the_parent():
    (grandchild,) = polling.until(lambda: words_after(parent.log, 'grandchild'))
    os.kill(psutil.Process(int(grandchild)).ppid(), signal.SIGKILL)
    polling.until(lambda: len(words_after(parent.log, 'grandchild')) == 2)
    assert is_gone(int(grandchild))
    interrupt()

  in_background(kill_the_parent)
  outcome = supervisor.Supervisor(
    [parent], is_over={'actor'}.issubset, restarts=supervisor.Restarts(backoff_seconds=0.01)
  ).run()
  first, second = map(int, words_after(parent.log, 'grandchild'))
  assert outcome.restarts == {'actor': 1}
  assert is_gone(first)
  assert is_gone(second)


def test_backoff_doubles_up_to_its_bound_before_giving_up(make):
  events = []
  failing = make(
    'learner',
    """
    for line in range(30):
      print('line', line)
    raise SystemExit(3)
    """,
  )
  replay = make('replay', OBEDIENT)
  outcome = supervisor.Supervisor(
    [replay, failing],
    is_over={'learner'}.issubset,
    on_event=events.append,
    restarts=supervisor.Restarts(backoff_seconds=0.01, max_backoff_seconds=0.05),
  ).run()
  delays = [event.delay_seconds for event in events if event.kind == 'restarting']
  assert delays == [0.01, 0.02, 0.04, 0.05]
  assert outcome == supervisor.Outcome(
    exit_code=1,
    interrupted=False,
    failed='learner',
    failed_exit_code=3,
    last_lines=[f'line {line}' for line in range(10, 30)],
    restarts={'replay': 0, 'learner': 4},
  )
  assert [event.name for event in events if event.kind == 'gave_up'] == ['learner']
  assert all(is_gone(event.pid) for event in events)


def test_healthy_run_resets_failure_count(make, tmp_path):
  """Fails eight times although three in a row are too many: every run is healthy."""
  events = []
  counter = tmp_path / 'count'
  process = make(
    'learner',
    f"""
    with open({str(counter)!r}, 'a+') as file:
      file.write('.')
      file.flush()
      count = file.tell()
    raise SystemExit(0 if count == 9 else 1)
    """,
  )
  outcome = supervisor.Supervisor(
    [process],
    is_over={'learner'}.issubset,
    on_event=events.append,
    restarts=supervisor.Restarts(healthy_seconds=0.0, max_fast_failures=3, backoff_seconds=0.01),
  ).run()
  assert outcome.exit_code == 0
  assert outcome.restarts == {'learner': 8}
  assert {event.delay_seconds for event in events if event.kind == 'restarting'} == {0.01}


@pytest.mark.parametrize(
  'program, code',
  [('import os, signal; os.kill(os.getpid(), signal.SIGKILL)', -signal.SIGKILL),
   ('raise SystemExit(75)', 75)],
)  # fmt: skip
def test_kills_and_external_exit_codes_get_more_restarts_than_failures(make, program, code):
  events = []
  process = make('actor', program)._replace(external_exit_codes={75})
  outcome = supervisor.Supervisor(
    [process],
    is_over={'actor'}.issubset,
    on_event=events.append,
    restarts=supervisor.Restarts(
      max_fast_failures=1, max_fast_kills=4, backoff_seconds=0.01, max_backoff_seconds=0.02
    ),
  ).run()
  assert outcome.failed == 'actor' and outcome.failed_exit_code == code
  delays = [event.delay_seconds for event in events if event.kind == 'restarting']
  assert delays == [0.01, 0.02, 0.02]


def test_command_that_does_not_exist_is_given_up(make):
  process = make('learner', '')._replace(command=['/no/such/program'])
  outcome = supervisor.Supervisor(
    [process],
    is_over={'learner'}.issubset,
    restarts=supervisor.Restarts(max_fast_failures=2, backoff_seconds=0.01),
  ).run()
  assert outcome.exit_code == 1
  assert outcome.failed_exit_code == supervisor.CANNOT_START
  assert 'No such file' in outcome.last_lines[-1]


def test_groups_stop_one_after_another(make):
  events = []
  names = ['replay', 'learner', 'actor-0', 'actor-1']
  processes = {name: make(name, OBEDIENT) for name in names}

  interrupt_when_ready(*processes.values())
  outcome = supervisor.Supervisor(
    list(processes.values()),
    is_over={'learner'}.issubset,
    on_event=events.append,
    stopping=supervisor.Stopping(
      groups=[(['actor-0', 'actor-1'], 10.0), (['learner'], 10.0), (['replay'], 10.0)]
    ),
  ).run()
  assert outcome.interrupted
  assert outcome.exit_code == 0
  ends = [(event.kind, event.name) for event in events if event.kind != 'started']
  assert set(ends[:2]) == {('stopping', 'actor-0'), ('stopping', 'actor-1')}
  assert set(ends[2:4]) == {('exited', 'actor-0'), ('exited', 'actor-1')}
  assert ends[4:] == [
    ('stopping', 'learner'),
    ('exited', 'learner'),
    ('stopping', 'replay'),
    ('exited', 'replay'),
  ]
  assert {event.exit_code for event in events if event.kind == 'exited'} == {0}


def test_process_that_ignores_sigterm_is_killed_after_its_grace(make):
  events, ticks = [], []
  processes = [make('actor', STUBBORN), make('replay', OBEDIENT)]
  interrupt_when_ready(*processes)
  outcome = supervisor.Supervisor(
    processes,
    is_over={'actor'}.issubset,
    on_event=events.append,
    on_tick=lambda: ticks.append(events[-1].kind),
    stopping=supervisor.Stopping(groups=[(['actor'], 0.8), (['replay'], 30.0)]),
  ).run()
  assert outcome.exit_code == 0 and 'stopping' in ticks
  assert [(event.kind, event.name, event.exit_code) for event in events[2:]] == [
    ('stopping', 'actor', None),
    ('killed', 'actor', -signal.SIGKILL),
    ('stopping', 'replay', None),
    ('exited', 'replay', 0),
  ]
  assert all(is_gone(event.pid) for event in events)


def test_second_interrupt_kills_at_once(make):
  events = []
  process = make('actor', STUBBORN)
  ended = threading.Event()

  def interrupt_until_ended():
    polling.until(lambda: process.log.exists() and 'ready' in process.log.read_text())
    while not ended.wait(0.2):
      interrupt()

  thread = in_background(interrupt_until_ended)
  previous = signal.signal(signal.SIGINT, lambda *_: None)  # one may come after the run
  try:
    # A grace beyond the test's own timeout: only the second interrupt ends this.
    outcome = supervisor.Supervisor(
      [process],
      is_over={'actor'}.issubset,
      on_event=events.append,
      stopping=supervisor.Stopping(groups=[(['actor'], 1e4)]),
    ).run()
  finally:
    ended.set()
    thread.join()
    signal.signal(signal.SIGINT, previous)
  assert outcome.interrupted
  assert [event.kind for event in events] == ['started', 'stopping', 'killed']


def test_signal_that_arrives_twice_counts_once(make):
  """`timeout` does this: it signals its child and then its group."""
  events = []

  def on_event(event):
    events.append(event.kind)
    if event.kind == 'stopping':
      interrupt()

  process = make('actor', OBEDIENT)

  interrupt_when_ready(process)
  supervisor.Supervisor([process], is_over={'actor'}.issubset, on_event=on_event).run()
  assert events == ['started', 'stopping', 'exited']


def test_killed_supervisor_leaves_no_process(make, tmp_path):
  parent, stubborn = make('actor', PARENT), make('replay', STUBBORN)
  program = f"""
    import pathlib
    from hephaestus.launch.processes import supervisor
    processes = [
      supervisor.Process(name, command, {{}}, pathlib.Path(log))
      for name, command, log in {[(p.name, p.command, str(p.log)) for p in (parent, stubborn)]}
    ]
    supervisor.Supervisor(
      processes,
      on_event=lambda event: print(event.kind, event.pid, flush=True),
    ).run()
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
    polling.until(lambda: stubborn.log.exists() and 'ready' in stubborn.log.read_text())
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
    supervisor.Supervisor([make('actor', STUBBORN)], on_event=on_event).run()
  assert all(is_gone(pid) for pid in pids)
  assert signal.getsignal(signal.SIGINT) is handler


def test_closed_terminal_does_not_end_a_run(make):
  def on_event(event):
    raise OSError('the terminal is gone')

  outcome = supervisor.Supervisor(
    [make('learner', '')], is_over={'learner'}.issubset, on_event=on_event
  ).run()
  assert outcome.exit_code == 0
