"""`bench accelerator`: refusals, one tiny section measured, a failing one, and continuing."""

import importlib.util
import json
import signal
import subprocess
import sys

import polling
import pytest

from hephaestus.launch import main
from hephaestus.launch.bench import accelerator

SPEED = ['bench', 'speed', '--json', '--seconds', '0.01']
REFUSED = [*SPEED, 'learner', '--size', 'huge']
ENVIRONMENT = [*SPEED, 'environments', '--num-envs', '2']


def call(*arguments):
  """Runs the command in this process; returns its exit code."""
  return main.run(main.parse(['hephaestus', 'bench', 'accelerator', *map(str, arguments)]))


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
  """The file of a section that fails, one that takes too long, and a real one after them."""
  out, lines = tmp_path_factory.mktemp('bench') / 'results.json', []
  sections = [
    accelerator.Section('failing', REFUSED, 300.0),
    accelerator.Section('slow', ENVIRONMENT, 0.2),
    accelerator.Section('real', ENVIRONMENT, 300.0),
  ]
  report = accelerator.Report(out, rehearsal=True)
  code = accelerator.measure(sections, report, 20.0, out.with_suffix(''), lines.append)
  return code, out, lines


def test_failing_and_slow_sections_are_recorded_and_the_next_is_measured(measured):
  code, out, lines = measured
  content = json.loads(out.read_text())
  assert code == 1 and content['rehearsal']
  assert list(content['sections']) == ['failing', 'slow', 'real']
  assert '--size huge: choose one of laptop' in content['sections']['failing']['error']
  assert content['sections']['slow']['error'].startswith('killed after ')
  values = {each['name']: each['value'] for each in content['sections']['real']['figures']}
  assert values['env/catch/2_envs'] > 0
  assert '3 sections of 3 to do' in lines[0] and any('warning: failing:' in each for each in lines)


def test_same_call_continues_with_sections_that_failed_or_are_missing(measured):
  _, out, _ = measured
  before = json.loads(out.read_text())['sections']
  lines = []
  sections = [
    accelerator.Section('real', REFUSED, 300.0),
    accelerator.Section('failing', ENVIRONMENT, 300.0),
  ]
  report = accelerator.Report(out, rehearsal=True)
  assert accelerator.measure(sections, report, 20.0, out.with_suffix(''), lines.append) == 0
  after = json.loads(out.read_text())['sections']
  assert lines[0].startswith('1 sections of 2 to do')
  assert after['real'] == before['real'] and after['slow'] == before['slow']
  assert after['failing']['figures'][0]['value'] > 0


def test_nothing_begins_once_no_time_is_left(tmp_path):
  """The error of an earlier call stays."""
  out = tmp_path / 'results.json'
  out.write_text('{"rehearsal": false, "sections": {"learner": {"error": "was killed"}}}')
  sections = accelerator.sections('laptop', tmp_path)
  code = accelerator.measure(
    sections, accelerator.Report(out, rehearsal=False), 1e-9, tmp_path, lambda line: None
  )
  found = json.loads(out.read_text())['sections']
  assert code == 1 and list(found) == [section.name for section in sections]
  assert found.pop('learner') == {'error': 'was killed'}
  assert all(each['error'].startswith('no time left') for each in found.values())


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    ([], 'JAX finds no accelerator here; --rehearse measures the smallest sizes on the CPU'),
    (['--rehearse', '--sections', 'none'], '--sections none: choose from learner, update, '),
    (['--rehearse', '--minutes', '0'], '--minutes 0: must be positive'),
    (['--rehearse', '--out', 'text.json'], '--out text.json: is not a file of this command'),
    (['--rehearse', '--out', 'real.json'], '--out real.json: is not of a rehearsal'),
  ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, words):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')  # restored afterwards
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  (tmp_path / 'text.json').write_text('a line')
  (tmp_path / 'real.json').write_text('{"rehearsal": false}')
  assert call(*arguments) == 2
  message = capsys.readouterr().err
  assert words in message and message.count('\n') == 1


@pytest.mark.skipif(sys.platform != 'linux', reason='children end with their parent on Linux')
def test_interrupt_ends_the_section_and_keeps_the_file(tmp_path):
  out = tmp_path / 'results.json'
  out.write_text('{"rehearsal": true, "sections": {"learner": {"seconds": 1.0}}}')
  command = [
    'bench',
    'accelerator',
    '--rehearse',
    '--out',
    str(out),
    '--sections',
    'learner',
    'update',
  ]
  process = subprocess.Popen(
    [sys.executable, '-m', 'hephaestus.launch.main', *command], stderr=subprocess.PIPE, text=True
  )
  log = out.with_suffix('') / 'update.log'
  polling.until(log.exists, 'the log of a section', alive=lambda: process.poll() is None)
  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 130, errors
  content = json.loads(out.read_text())
  assert content['sections']['learner'] == {'seconds': 1.0}
  assert 'figures' not in content['sections'].get('update', {})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rehearsal_measures_every_section(tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '')
  out = tmp_path / 'results.json'
  code = call('--rehearse', '--out', out, '--minutes', '25')
  found = json.loads(out.read_text())['sections']
  has_craftax = importlib.util.find_spec('craftax') is not None
  assert code == (0 if has_craftax else 1)
  assert {name for name, each in found.items() if 'error' in each} == set(
    () if has_craftax else ('craftax',)
  )
  assert found['fused']['updates'] > 0 and found['fused']['environment_steps'] > 0
  assert all(found[name]['figures'] for name in ('learner', 'update', 'batch/2', 'horizon/2'))
