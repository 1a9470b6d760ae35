"""Fused runs from the command: a run ends, is evaluated, resumes, and stops when asked."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading

import climb
import jax
import numpy as np
import own_logger
import polling
import pytest
import runs
import safetensors
import tiny

import hephaestus
from hephaestus.actors import episodes
from hephaestus.agents import agent as agent_lib
from hephaestus.launch import config, main
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import history
from hephaestus.launch.processes import supervisor
from hephaestus.launch.report import panels
from hephaestus.launch.run import fused, origin, parts, progress
from hephaestus.learner import checkpoint, loop
from hephaestus.learner.sources import unrolled

# Without annealing a run's program does not depend on its length, and is compiled once.
TINY = [
  'environment.rows=4', 'environment.columns=3', 'agent.hidden_size=16', 'agent.num_layers=1',
  'actor.num_envs=16', 'actor.sequence_length=9', 'learner.num_minibatches=2',
  'learner.log_period=2', 'learner.anneal=false', 'evaluator.num_episodes=8', 'evaluator.final_episodes=8',
  'tensorboard=false',
]  # fmt: skip

PLAY = episodes.Play  # the fixture `in_process` puts a function in its place


def run(*arguments):
  return main.run(main.parse(['hephaestus', *map(str, arguments)]))


@pytest.fixture
def train(in_process, tmp_path):
  """Trains in this process, on one folder."""

  def train(*arguments):
    return run('train', '--run', tmp_path / 'run', *arguments)

  return train


@pytest.fixture(scope='module')
def finished(in_process, tmp_path_factory):
  """A finished run of PPO: its folder, and what the command has printed."""
  folder = tmp_path_factory.mktemp('finished') / 'run'
  begin = ['--agent', 'ppo', '--preset', 'laptop', '--steps', 600, '--set', *TINY]
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert run('train', '--run', folder, *begin) == 0
  return folder, printed.getvalue()


def digests(folder, step):
  """The headers of the files of a checkpoint, which have the digests of all arrays."""
  place = folder / 'checkpoints' / str(step)
  return [
    safetensors.safe_open(place / file, 'numpy').metadata()
    for file in (checkpoint.STATE, checkpoint.REST)
  ]


def rows(folder, name):
  return [json.loads(line) for line in (folder / 'metrics' / f'{name}.jsonl').open()]


def test_run_ends_resumes_and_is_evaluated(finished, train, tmp_path, capsys):
  done, out = finished
  folder = shutil.copytree(done, tmp_path / 'run')
  assert '16 environments x 8 steps: 2 minibatches of 64, 3 epochs' in out
  assert out.splitlines()[-1].startswith(
    'done: environment_step=640 learner_step=5 episode_return='
  )
  assert list((folder / 'videos').glob('5.gif'))
  assert config.load(folder / 'config.yaml').agent_name == 'ppo'

  # Agent and environment come from the folder.
  assert train('--steps', 900, '--profile', '6:7') == 0
  out = capsys.readouterr().out
  assert 'learner_step=8' in out.splitlines()[-1]
  assert 'learner, updates 6 to 7: ' in out
  assert (folder / 'profile' / '6-7' / 'learner' / 'perfetto.json.gz').exists()
  steps = [row['learner_step'] for row in rows(folder, 'learner')]
  assert steps == [2, 4, 5, 6, 8]
  scored = rows(folder, 'evaluator')
  assert [row['learner_step'] for row in scored if row['final']] == [5, 8]
  assert {'environment_step', 'episode_return', 'episode_length', 'normalised_score'} <= set(
    scored[0]
  )
  started = [row['name'] for row in rows(folder, 'events') if row['kind'] == 'started']
  assert started == ['learner', 'learner']

  kinds = ['greedy', 'sampled', 'random']
  assert run('evaluate', folder, '--episodes', 8, '--json', '--actions', *kinds) == 0
  results = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-3:]]
  assert [(each['actions'], each['learner_step']) for each in results] == [
    ('greedy', 8), ('sampled', 8), ('random', 0)
  ]  # fmt: skip
  assert run('evaluate', folder, '--episodes', 8, '--json', '--checkpoint', 'best') == 0
  _, highest = max((row['episode_return'], row['learner_step']) for row in scored)
  best = json.loads(capsys.readouterr().out.splitlines()[-1])['learner_step']
  assert best == min((5, 8), key=lambda step: abs(step - highest))
  assert run('evaluate', folder, '--checkpoint', 6) == 2
  message = '--checkpoint 6: is not the update of a checkpoint, nor best; there are 5, 8'
  assert message in capsys.readouterr().err

  wider = ['--steps', 1200, '--set', 'actor.num_envs=32']
  assert train(*wider) == 0
  out = capsys.readouterr().out
  assert 'warning: the saved environments do not fit actor.num_envs' in out
  assert 'environment_step=1280 learner_step=9' in out.splitlines()[-1]
  assert config.load(folder / 'config.yaml').actor.num_envs == 32

  assert run('inspect', folder) == 2
  assert f'without a replay server; `hephaestus dashboard {folder}`' in capsys.readouterr().err
  assert train('--agent', 'dreamer') == 2
  assert '--agent: the folder has ppo, you gave dreamer' in capsys.readouterr().err
  assert train('--set', 'agent.hidden_size=8') == 2
  assert 'agent.hidden_size: the folder has 16, you gave 8' in capsys.readouterr().err


def test_run_writes_and_shows_metrics_of_its_environment(train, tmp_path, capsys):
  folder = tmp_path / 'run'
  options = [*TINY[2:-1], 'tensorboard=true', 'logger=own_logger:Kept']
  begin = ['--agent', 'ppo', '--env', 'climb:Climb', '--preset', 'laptop', '--steps', 400]
  assert train(*begin, '--set', *options) == 0
  for name in ('learner', 'evaluator'):
    for row in rows(folder, name):
      found = {key: value for key, value in row.items() if key.startswith('environment/')}
      assert found == pytest.approx(climb.expected(row['episode_length']))
    own = own_logger.made[name]  # the user's own logger gets the same
    assert own.is_closed and own.rows == [
      {key: value for key, value in row.items() if key != 'time'} for row in rows(folder, name)
    ]
    assert own.steps_key == ('learner_step' if name == 'learner' else 'environment_step')
  written = history.History(folder)
  written.read()
  charts = panels.charts(written.curves('environment_step'))
  titles = {chart['title'] for chart in charts if chart['section'] == panels.ENVIRONMENT}
  names = ('height', 'steps', 'depth', 'top')
  assert titles == {f'{name}, {of}' for name in names for of in ('acting', 'evaluation')}
  capsys.readouterr()
  assert run('watch', folder, '--trust') == 0
  ending = capsys.readouterr().out.splitlines()[-1]
  assert re.search(r'in (\d) steps .* steps \1\.00  top \1\.00', ending)


def test_run_begins_with_the_agent_of_another(finished, tmp_path, capsys):
  folder, other = finished[0], tmp_path / 'other'
  assert run('train', '--run', other, '--from', f'{folder}@best', '--steps', 300, '--seed', 7) == 0
  out = capsys.readouterr().out
  assert f'begins with parameters and optimizer of {folder}@best, update 5' in out
  assert out.splitlines()[-1].startswith('done: environment_step=384 learner_step=3 ')
  assert config.load(other / 'config.yaml').agent.hidden_size == 16
  made = config.load(folder / 'config.yaml')
  like = parts.saved_shapes(made, parts.make_parts(made))
  (_, old), (_, new) = parts.find_train(folder, like, None), parts.find_train(other, like, '0')
  for name in ('params', 'opt_state', 'return_square'):
    jax.tree.map(np.testing.assert_array_equal, getattr(old, name), getattr(new, name))
  assert int(new.step) == 0 and int(old.step) == 5

  # A run with actors can begin with the parameters of a fused run.
  queue = ['replay.strata[0].max_size=8', 'learner.fused=false']
  made = config.override(config.load(folder / 'config.yaml'), queue)
  third = tmp_path / 'third'
  first = lambda: origin.begin(origin.load(str(folder), made), made, third, None)
  folder_lib.open_run(third, made, first)
  jax.tree.map(
    np.testing.assert_array_equal, agent_lib.all_params(old), hephaestus.load(third).all_params
  )

  def refusal(*arguments):
    assert run('train', *arguments) == 2
    return capsys.readouterr().err

  fourth = ['--run', tmp_path / 'fourth', '--from']
  assert f'--from {folder}@6: 6: is not the update' in refusal(*fourth, f'{folder}@6')
  words = refusal(*fourth, folder, '--env', 'noisy_corridor')
  assert f"--from {folder}: the parameter params['" in words and "'noisy_corridor'; give" in words
  assert '--run' in refusal('--run', folder, '--from', other) and not fourth[1].exists()
  assert '--preset gpu: a run --from another has' in refusal(*fourth, folder, '--preset', 'gpu')
  assert 'is not the folder of a run' in refusal(*fourth, tmp_path / 'nothing')


def test_run_that_begins_with_another_agent_has_an_empty_memory(tmp_path):
  """The other agent's memory dates its entries by its updates, and this run's begin at 0."""
  made = config.of_preset('dreamer', 'laptop', 'catch')
  made = config.override(made, [*tiny.SHAPES, 'agent.memory_size=64', 'learner.fused=false'])
  like = parts.saved_shapes(made)
  ones = lambda name: jax.tree.map(lambda x: np.ones(x.shape, x.dtype), getattr(like, name))
  fields = {name: ones(name) for name in origin.COPIED if hasattr(like, name)}
  origin.begin(origin.Origin('old', 'old@9', 9, fields), made, tmp_path, None)
  _, state = parts.find_train(tmp_path, like, '0')
  assert state.statistics.pop('memory')['written'].tolist() == [0] * 64
  jax.tree.map(lambda x: np.testing.assert_array_equal(x, 1), (state.params, state.statistics))


def test_run_exists_once_the_parameters_that_it_begins_with_are_saved(
  finished, tmp_path, monkeypatch, capsys
):
  def crash(*unused):
    raise MemoryError('before the first checkpoint')

  other = tmp_path / 'other'
  monkeypatch.setattr(origin, 'begin', crash)
  assert run('train', '--run', other, '--from', finished[0], '--steps', 300) == 2
  capsys.readouterr()
  assert run('train', '--run', other) == 2
  assert 'is not empty and has no config.yaml' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('agent', 'words'),
  [
    ('dreamer', 'learner.batch_size=256: .* needs 12.0 GiB .* smaller replay'),
    ('ppo', 'actor.num_envs=4096: .* 2048 would fit'),
  ],
)
def test_compiled_program_beyond_the_memory_is_refused(agent, words):
  made = config.of_preset(agent, 'tpu-v4-8', 'catch')
  fused.check_memory(made, 8 * 2**30, 8 * 2**30, 4)
  with pytest.raises(ValueError, match=words):
    fused.check_memory(made, 12 * 2**30, 8 * 2**30, 4)


def test_run_that_cannot_be_longer_here_stays_as_it_was(
  finished, train, tmp_path, capsys, monkeypatch
):
  shutil.copytree(finished[0], tmp_path / 'run')
  before = (tmp_path / 'run' / folder_lib.CONFIG).read_text()
  monkeypatch.setattr(fused, '_available_bytes', lambda devices: 1)
  assert train('--steps', 100_000) == 2
  assert (tmp_path / 'run' / folder_lib.CONFIG).read_text() == before
  monkeypatch.undo()
  assert train() == 0


def test_runs_of_one_seed_have_equal_global_generators():
  made = config.of_preset('ppo', 'laptop', 'catch')
  state, words = random.getstate(), np.random.get_state()
  drawn = []
  for _ in range(2):
    fused.prepare(made)
    drawn.append((random.random(), np.random.random()))
  random.setstate(state)
  np.random.set_state(words)
  assert drawn[0] == drawn[1]


def test_non_finite_metrics_end_the_run(finished, train, tmp_path, capsys, monkeypatch):
  shutil.copytree(finished[0], tmp_path / 'run')
  broken = lambda totals, *unused: check_finite({**totals, 'loss': np.nan}, *unused)
  check_finite = loop.check_finite
  monkeypatch.setattr(loop, 'check_finite', broken)
  assert train('--steps', 900) == 1
  last = capsys.readouterr().out.splitlines()[-1]
  assert 'environment catch: learner step' in last and 'lower learner.learning_rate' in last


def test_a_run_whose_environment_failed_keeps_its_traceback_and_resumes(train, tmp_path, capsys):
  gymnasium = pytest.importorskip('gymnasium')

  class Failing(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)
    steps_left = 5_000  # more than the check of the environment takes

    def reset(self, seed=None, options=None):
      return 0, {}

    def step(self, action):
      Failing.steps_left -= 1
      if Failing.steps_left == 0:
        raise OSError('the game has crashed')
      return 1, float(action), False, False, {}

  gymnasium.register('Failing-v0', Failing, max_episode_steps=5)
  begin = ['--agent', 'ppo', '--fused', '--steps', 9000, '--env', 'gymnasium/Failing-v0']
  begin += ['--preset', 'laptop']
  assert train(*begin, '--set', *TINY[2:]) == 2
  printed = capsys.readouterr()
  assert 'gymnasium/Failing-v0' in printed.err and 'the game has crashed' in printed.err
  log = (tmp_path / 'run' / 'logs' / 'learner.log').read_text()
  assert 'Traceback' in log and 'OSError: the game has crashed' in log
  assert max(checkpoint.saved_steps(tmp_path / 'run' / 'checkpoints')) > 0
  assert train() == 0


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_killed_dreamer_resumes_bitwise(tmp_path):
  options = (*tiny.RUN, 'max_environment_steps=1000', 'learner.checkpoint_updates=50')
  launch = lambda name: runs.Launch(tmp_path / name / 'run', *options, fused=True)
  saved = lambda run: sorted(int(path.name) for path in (run.folder / 'checkpoints').glob('[0-9]*')
                             if path.name.isdigit())  # fmt: skip
  for name in ('whole', 'killed'):
    (tmp_path / name).mkdir()
  whole = launch('whole')
  try:
    assert whole.end() == 0, whole.words()
    killed = launch('killed')
    killed.wait_for(lambda: saved(killed), 'a checkpoint')
    killed.process.kill()
    assert killed.end() == -signal.SIGKILL
    # 50 unrolls of 20 steps, two of them warm-up, allow eight updates each.
    assert saved(killed)[-1] < saved(whole)[-1] == 48 * 8
    assert not any(row['final'] for row in killed.rows('evaluator'))
    first = killed.rows('learner')[0]
    resumed = launch('killed')
    assert resumed.end() == 0, resumed.words()
  finally:
    runs.kill_all(tmp_path)
  assert digests(resumed.folder, 384) == digests(whole.folder, 384)
  assert resumed.rows('learner')[0] == first  # kept: the run has resumed, not restarted
  runs.check_steps(resumed.rows('learner'), log_period=10)
  score = lambda run: run.rows('evaluator')[-1]['normalised_score']
  assert score(resumed) == score(whole)


def test_ctrl_c_saves_and_prints_how_to_resume(train, tmp_path, capfd):
  folder = tmp_path / 'run'

  def interrupt():
    saved = lambda: (folder / 'metrics' / 'learner.jsonl').exists() and rows(folder, 'learner')
    polling.until(saved, 'a row of the learner')
    os.kill(os.getpid(), signal.SIGINT)

  user = threading.Thread(target=interrupt)
  user.start()
  begin = ['--agent', 'ppo', '--preset', 'laptop', '--steps', 1_000_000_000]
  code = train(*begin, '--set', *TINY)
  user.join()
  out, error = capfd.readouterr()
  assert code == 130, error
  assert out.splitlines()[-1] == f'stopped; resume with: hephaestus train --run {folder}'
  assert '\nstopping: saving the last checkpoint' in out
  assert 'Traceback' not in error
  assert list((folder / 'checkpoints').iterdir())


def test_ctrl_c_in_the_last_evaluation_is_no_end_of_the_run(train, tmp_path, capfd, monkeypatch):
  evaluate = PLAY.evaluate

  def interrupt(play, params, key, num_episodes, should_stop):
    if num_episodes == 8:
      return evaluate(play, params, key, num_episodes, should_stop)
    os.kill(os.getpid(), signal.SIGINT)
    polling.until(should_stop, 'the signal')
    return None

  monkeypatch.setattr(PLAY, 'evaluate', interrupt)
  begin = ['--agent', 'ppo', '--preset', 'laptop', '--steps', 512]
  assert train(*begin, '--set', *TINY, 'evaluator.final_episodes=16') == 130
  assert 'stopped; resume with' in capfd.readouterr().out.splitlines()[-1]
  monkeypatch.undo()
  assert train() == 0
  assert rows(tmp_path / 'run', 'evaluator')[-1]['final']


def test_signal_after_the_first_ends_the_process_whatever_its_kind(capfd):
  before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
  with supervisor.Interrupts(fused._say_stopping) as interrupts:
    assert not interrupts.count
    signal.raise_signal(signal.SIGINT)
    assert (interrupts.count, interrupts.first) == (1, signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
  assert capfd.readouterr().out.count(folder_lib.STOPPING) == 1


def test_signals_work_while_a_library_keeps_the_main_thread():
  """As XLA does while it compiles: the first signal is confirmed, the second ends the process."""
  deaf = (
    'import hashlib, sys, threading\nfrom hephaestus.launch.processes import supervisor\n'
    'begun = threading.Lock()\nbegun.acquire()\n'
    'def tell():\n  begun.acquire()\n  print("ready", flush=True)\n'
    'with supervisor.Interrupts(lambda: print("stopping", flush=True)):\n'
    '  threading.Thread(target=tell, daemon=True).start()\n'
    '  sys.setswitchinterval(1000)\n'  # the other thread then runs only once the library has begun
    '  begun.release()\n'
    '  hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)\n'
  )
  with subprocess.Popen([sys.executable, '-c', deaf], stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == 'ready\n'
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == 'stopping\n'

    def interrupted() -> bool:
      process.send_signal(signal.SIGINT)  # those that follow at once belong to the first
      return process.poll() is not None

    polling.until(interrupted, 'the end of the process')
    assert process.returncode == 130


@pytest.mark.timeout(600)
def test_signal_while_the_run_compiles_stops_it_and_train_raises(in_process, tmp_path, capfd):
  """And while the program is compiled, the line says so."""
  folder, shown = tmp_path / 'run', []
  compile_program = unrolled.FusedProgram.compile

  def interrupted(program):
    polling.until(lambda: shown, 'a line of progress')
    os.kill(os.getpid(), signal.SIGINT)
    return compile_program(program)

  with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(progress.Progress, 'tick', lambda line: shown.append(line.line()))
    patch.setattr(unrolled.FusedProgram, 'compile', interrupted)
    hephaestus.train('catch', agent='ppo', preset='laptop', steps=600, run=folder, set=TINY)
  assert shown[0].endswith('  compiling collection and updates')
  out = capfd.readouterr().out
  assert out.splitlines()[-1] == f'stopped; resume with: hephaestus train --run {folder}'
  assert folder_lib.STOPPING in out
