"""Progress, warnings and checks of the launcher, from metrics files and the config."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import types

import numpy as np
import polling
import pytest

from hephaestus.launch import config, user_errors
from hephaestus.launch.agents import presets
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import supervisor
from hephaestus.launch.run import composition, local, preflight, validation, variables
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import progress as progress_lib
from hephaestus.learner import checkpoint, loop
from hephaestus.replay import loopback

ROW = {
  'learner_step': 8, 'environment_step': 65536, 'steps_per_second': 9000.0, 'staleness': 1.0,
  'ppo/entropy': 1.0, 'ppo/approx_kl': 0.01, 'ppo/clip_fraction': 0.1, 'ppo/learning_rate': 1e-3,
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
  """(config, folder, write): a run of PPO with actors, and a function that writes a row of a node."""
  made = config.override(presets.ppo_laptop('catch'), ['learner.fused=false'])
  (tmp_path / 'metrics').mkdir()

  def write(node, row):
    with (tmp_path / 'metrics' / f'{node}.jsonl').open('a') as file:
      file.write(json.dumps({'time': time.time(), **row}) + '\n')

  return made, tmp_path, write


def test_high_kl_of_ppo_warns_once(run):
  made, folder, write = run
  write('learner', ROW | {'ppo/approx_kl': 1.0})  # of an earlier launch
  said = []
  events = metrics.JsonLines(folder / 'metrics' / 'events.jsonl')
  watch = progress_lib.Warnings(made, folder, events, said.append)
  watch.tick()
  write('learner', ROW)
  watch.tick()
  assert said == []
  write('actor-0', {'episode_return': 0.5, 'episode_length': 9.0})
  for step in (16, 24):
    write('learner', ROW | {'learner_step': step, 'ppo/approx_kl': 0.2})
    watch.tick()
  (text,) = said
  assert text.startswith('warning: KL 0.200 is above 0.08')
  (event,) = metrics.read(folder / 'metrics' / 'events.jsonl')
  assert (event['kind'], event['name']) == ('warning', 'learner')


def test_environment_beyond_a_threshold_of_the_agent_is_warned_of():
  given = ['environment.cells=false', 'environment.num_resources=2']
  made = config.override(presets.laptop('grid_world'), given)
  (warning,) = made.record.warnings(parts_lib.make_parts(made).trained)
  assert '266 numbers in [0, 1], more than 113: predicted as binary' in warning


@pytest.mark.parametrize(
  ('make', 'changes', 'line'),
  [
    (presets.ppo_laptop, ['max_environment_steps=1'], '1 steps are 1 update of ppo: too few'),
    (
      presets.ppo_laptop, ['learner.fused=false', 'max_environment_steps=20000'],
      '20,000 steps are 3 updates of ppo: too few',
    ),
    (presets.laptop, ['max_environment_steps=8000'], '8,000 steps are 960 updates of dreamer'),
    (
      presets.laptop, ['learner.fused=true', 'max_environment_steps=2000'],
      '2,000 steps are 192 updates of dreamer: too few to learn; give more --steps',
    ),
  ],
)  # fmt: skip
def test_steps_of_a_run_are_reported_in_updates(make, changes, line):
  line_of_run = validation.check_budget(config.override(make('catch'), changes))
  assert line_of_run.startswith(line) and ('too few' in line_of_run) == ('too few' in line)


def test_port_that_cannot_be_restricted_is_refused(monkeypatch):
  monkeypatch.setattr(loopback, 'refusal', lambda: 'SO_BINDTODEVICE: Operation not permitted')
  with pytest.raises(ValueError, match=r'Operation not permitted.*add --expose'):
    preflight.reach(False)
  words = 'reachable without a password from every machine that reaches this one'
  assert preflight.reach(True) == words
  monkeypatch.setattr(loopback, 'refusal', lambda: '')
  assert preflight.reach(False) == 'reachable from this machine only'


def test_replay_drains_until_hosts_disconnect(monkeypatch):
  monkeypatch.setattr(local, 'DRAIN_SECONDS', 0.0)
  with socket.create_server(('127.0.0.1', 0)) as server:
    is_drained = local.Drain([server.getsockname()[1]])
    with socket.create_connection(server.getsockname()) as client:
      served, _ = server.accept()
      assert not is_drained()
      client.close()
      served.close()
    polling.until(is_drained)  # it does not ask at every call


def test_progress_of_host_with_actors_sums_them(run):
  made, folder, write = run
  progress = progress_lib.make(made, folder, ['actor-3'])
  row = {'steps_per_second': 100.0, 'throttled_fraction': 0.5}
  assert 'starting' in progress.line()
  write('actor-3', row | {'environment_step': 70000, 'parameter_version': 8})
  write('actor-4', row | {'environment_step': 70008, 'parameter_version': 16})
  assert progress.line().endswith(
    '70,008/2,000,000 steps  actors 2  200 steps/s  throttled 50%  version 16'
  )


def test_line_is_printed_again_without_a_terminal(run, monkeypatch, capsys):
  made, folder, write = run
  progress = progress_lib.make(made, folder, ['learner'])
  monkeypatch.setattr(progress_lib, 'QUIET_PERIOD', -1.0)
  progress.tick()
  progress.say('ready')
  write('learner', ROW)
  progress.tick()
  first, said, line = capsys.readouterr().out.splitlines()
  assert (first, said) == ('catch  0:00  starting: nodes import and compile', 'ready')
  assert '65,536/2,000,000 steps' in line


def test_number_that_is_not_finite_leaves_its_place_on_the_line_empty(run):
  made, folder, write = run
  progress = progress_lib.make(made, folder, ['learner'])
  write('learner', ROW | {'ppo/entropy': None})
  line = progress.line()
  assert '65,536/2,000,000 steps' in line and 'KL 0.010' in line and 'None' not in line


@pytest.fixture
def clock(monkeypatch):
  """A function that lets seconds pass for the progress line."""
  passed = [0.0]
  at = time.time(), time.monotonic()
  fake = types.SimpleNamespace(time=lambda: at[0] + passed[0], monotonic=lambda: at[1] + passed[0])
  monkeypatch.setattr(progress_lib, 'time', fake)

  def wait(seconds):
    passed[0] += seconds

  return wait


def test_stale_numbers_have_their_age_and_the_eta_does_not_climb(run, clock):
  made, folder, write = run
  made = config.override(made, ['max_environment_steps=3000'])
  progress = progress_lib.make(made, folder, ['learner'])
  write('evaluator', {'normalised_score': 0.5, 'episode_return': 0.25})
  write('learner', ROW | {'environment_step': 1000})
  assert 'ETA ?' in progress.line()
  clock(50)
  write('../counts', {'learner_step': 3, 'environment_step': 1500})  # newer than its last report
  assert progress.line().startswith(
    'catch  0:50  1,500/3,000 steps  update 3  score 0.50  return 0.25  9,000 steps/s  entropy 1.000'
  )
  assert progress.line().endswith('ETA 2:30')
  clock(30)
  assert progress.line().endswith('staleness 1.0 (1:20 ago)  ETA 2:00')
  assert '1,500/3,000 steps  update 3  score 0.50  return 0.25 (1:20 ago)' in progress.line()
  clock(35)
  assert '1,500/3,000 steps (1:05 ago)' in progress.line()
  clock(100)
  assert progress.line().endswith('ETA ?')  # it should have come


def test_counts_of_a_learner_in_another_process_move_the_line_between_reports(run, clock):
  made, folder, _ = run
  made = config.override(made, ['max_environment_steps=3000'])
  progress = progress_lib.make(made, folder, ['learner'])
  note = progress_lib.count_writer(folder)
  status = lambda step, steps: loop.Status(step, steps, acting_params=dict, finished=False)
  note(status(2, 1000))  # of a checkpoint
  assert 'starting' in progress.line()
  note(status(2, 1500))
  assert '1,500/3,000 steps  update 2  ETA ?' in progress.line()
  clock(10)
  note(status(3, 2000))
  assert '0:10  2,000/3,000 steps  update 3  ETA 0:20' in progress.line()


def test_eta_of_one_process_counts_the_updates_after_the_last_step(run, clock):
  _, folder, write = run
  made = config.override(
    presets.laptop('catch'), ['learner.fused=true', 'max_environment_steps=8000']
  )
  progress = progress_lib.make(made, folder, ['learner'])  # 960 updates
  for seconds, update, steps in ((0, 100, 2000), (50, 200, 4000), (350, 900, 8432)):
    clock(seconds)
    write('../counts', {'learner_step': update, 'environment_step': steps})
    line = progress.line()
    assert line.endswith('ETA 6:20') == (update == 200)
  assert '8,432/8,000 steps  update 900' in line and line.endswith('ETA 0:30')
  write('../counts', {'learner_step': 960, 'environment_step': 8432})
  assert progress.line().endswith('ETA 0:00')


def test_summary_leaves_out_a_score_that_there_is_not(run):
  _, folder, write = run
  row = {'environment_step': 8, 'learner_step': 2, 'episode_return': 0.5, 'normalised_score': None}
  write('evaluator', row)
  assert progress_lib.summary(folder) == (
    'done: environment_step=8 learner_step=2 episode_return=0.500'
  )


def test_evaluations_of_lost_updates_do_not_choose_the_best_checkpoint(run):
  _, folder, write = run
  for step, score in ((500, 1), (900, 9), (700, 2)):  # the learner resumed at an update before 700
    write('evaluator', {'learner_step': step, 'episode_return': score})
  saver = checkpoint.Checkpointer(folder / 'checkpoints', keep=2)
  for step in (700, 900):
    saver.save(step, {'kernel': np.ones(3)})
  saver.close()
  with contextlib.closing(parts_lib.checkpointer(folder, read_only=True)) as saved:
    assert saved.find('best') == 700


def test_node_that_fails_again_and_again_shows_errors_of_own_code_in_one_line(run, capsys):
  made, folder, _ = run
  (folder / 'logs').mkdir()
  log = folder / 'logs' / 'actor-0.log'
  launch = composition.Launch(config=made, folder=folder)
  watcher = local._Watcher(launch, local.whole(made))
  for prefix, shown in (('', ['Traceback', 'lamp 7']), (user_errors.PREFIX, ['lamp 7'])):
    log.write_text(f'Traceback\n{prefix}lamp 7\n')
    assert watcher.report(supervisor.Outcome(0, 'actor-0', 1, ['Traceback', 'lamp 7'])) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [*(f'  {line}' for line in shown), f'the whole log: {log}']


@pytest.mark.usefixtures('full_optimization')
def test_program_of_actor_is_not_divided_over_cores():
  program = """
import jax
numbers = jax.ShapeDtypeStruct((1 << 22,), 'float32')
print(jax.jit(jax.numpy.tanh).lower(numbers).compile().as_text().count('partitions'))
"""
  divided = []
  for added in ({}, variables.ONE_THREAD):
    environment = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': '', 'PJRT_NPROC': '2', **added}
    said = subprocess.run(
      [sys.executable, '-c', program], env=environment, capture_output=True, check=True, timeout=120
    )
    divided.append(int(said.stdout))
  assert divided[0] > 0  # else the search term is outdated
  assert divided[1] == 0


def test_exported_cache_of_compiled_programs_is_used():
  program = """
import jax
from hephaestus.launch.agents import presets
from hephaestus.launch.run import variables
variables.keep_compiled()
of_node = variables.of_node('actor-0', presets.laptop('catch'))
print(jax.config.jax_compilation_cache_dir, of_node['JAX_COMPILATION_CACHE_DIR'])
"""
  said = subprocess.run(
    [sys.executable, '-c', program], env={**os.environ, 'JAX_COMPILATION_CACHE_DIR': '/exported'},
    capture_output=True, text=True, check=True, timeout=120,
  ).stdout  # fmt: skip
  assert said.split() == ['/exported', '/exported']
