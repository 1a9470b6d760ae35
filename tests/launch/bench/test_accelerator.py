"""`bench accelerator`: refusals, sections that fail or take too long, and continuing."""

import importlib.util
import json
import signal
import subprocess
import sys
import textwrap

import polling
import pytest

from hephaestus.launch import main
from hephaestus.launch.bench import accelerator
from hephaestus.launch.processes import jobs

# Does what its first word says, in place of a `hephaestus` command.
COMMAND = textwrap.dedent("""
  import json, sys, time
  if sys.argv[1] == 'fail':
    sys.exit('no such size')
  time.sleep(100 * (sys.argv[1] == 'wait'))
  print(json.dumps([{'name': 'updates', 'value': 2.0}]))
""")


def call(*arguments):
  """Runs the command in this process; returns its exit code."""
  return main.run(main.parse(['hephaestus', 'bench', 'accelerator', *map(str, arguments)]))


def section(name, word, seconds=300.0):
  return accelerator.Section(name, [word], seconds)


def test_failed_sections_are_recorded_and_measured_by_the_same_call_again(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(jobs, 'COMMAND', (sys.executable, '-c', COMMAND))
  out = tmp_path / 'results.json'
  first = [section('failing', 'fail'), section('slow', 'wait', 0.2), section('real', 'measure')]
  assert accelerator.measure(first, out, 20.0, rehearsal=True) == 1
  before = json.loads(out.read_text())['sections']
  assert list(before) == ['failing', 'slow', 'real']
  assert 'no such size' in before['failing']['error']
  assert before['slow']['error'].startswith('killed after ')
  assert before['real']['figures'] == [{'name': 'updates', 'value': 2.0}]
  assert 'warning: failing:' in capsys.readouterr().err
  again = [section('real', 'fail'), section('failing', 'measure')]
  assert accelerator.measure(again, out, 20.0, rehearsal=True) == 0
  after = json.loads(out.read_text())['sections']
  assert after['real'] == before['real'] and after['slow'] == before['slow']
  assert after['failing']['figures'] == before['real']['figures']
  assert '1 sections of 2 to do' in capsys.readouterr().err


def test_nothing_begins_once_no_time_is_left(tmp_path):
  """The error of an earlier call stays."""
  out = tmp_path / 'results.json'
  out.write_text('{"rehearsal": false, "sections": {"learner": {"error": "was killed"}}}')
  sections = accelerator.sections('laptop', tmp_path)
  assert accelerator.measure(sections, out, 1e-9, rehearsal=False) == 1
  found = json.loads(out.read_text())['sections']
  assert list(found) == [section.name for section in sections]
  assert found.pop('learner') == {'error': 'was killed'}
  assert all(each['error'].startswith('no time left') for each in found.values())


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    ([], '--rehearse'),
    (['--rehearse', '--sections', 'none'], '--sections none'),
    (['--rehearse', '--minutes', '0'], '--minutes 0'),
    (['--rehearse', '--out', 'text.json'], '--out text.json'),
    (['--rehearse', '--out', 'real.json'], '--out real.json'),
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
  command = ['--rehearse', '--out', str(out), '--sections', 'learner', 'update']
  process = subprocess.Popen(
    [*jobs.COMMAND, 'bench', 'accelerator', *command], stderr=subprocess.PIPE, text=True
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
