"""The agent of docs/agents.md, as a user's own: trained as nodes or in one process, evaluated, and resumed."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from hephaestus.launch import main, records
from hephaestus.launch.files import metrics

PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'agents.md'
HEPHAESTUS = pathlib.Path(sys.executable).parent / 'hephaestus'
TINY = (
  'environment.rows=4', 'environment.columns=3', 'learner.log_period=4', 'actor.log_period=0.5',
  'evaluator.num_episodes=8', 'evaluator.final_episodes=64', 'tensorboard=false',
)  # fmt: skip


@pytest.fixture
def run_in(monkeypatch, capsys):
  """Runs a command in a folder, as a new process would: returns exit code, output and errors."""

  def run_in(folder, *arguments):
    with monkeypatch.context() as patch:
      patch.chdir(folder)
      patch.setattr(sys, 'path', list(sys.path))
      records.find_record.cache_clear()
      code = main.run(main.parse(['hephaestus', *map(str, arguments)]))
      sys.modules.pop('reinforce', None)
    return code, *capsys.readouterr()

  return run_in


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """The folder of the module `reinforce` and of its finished run."""
  folder = tmp_path_factory.mktemp('own')
  (code,) = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
  (folder / 'reinforce.py').write_text(code)
  ended = subprocess.run(
    [HEPHAESTUS, *train('run', '--steps', '60000')],
    cwd=folder, env={name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'},
    capture_output=True, text=True, timeout=240,
  )  # fmt: skip
  assert ended.returncode == 0, ended.stdout + ended.stderr
  return folder


def train(run, *options):
  """The words of `hephaestus train` with the agent, in a folder that has its module."""
  begin = ('train', '--agent', 'reinforce:Reinforce', '--preset', 'laptop', '--run', run)
  return *begin, *options, '--set', *TINY


def test_own_agent_learns_as_nodes(trained):
  rows = {path.stem: metrics.read(path) for path in (trained / 'run' / 'metrics').glob('*.jsonl')}
  started = {row['name'] for row in rows['events'] if row['kind'] == 'started'}
  assert started == {'replay', 'learner', 'actor-0', 'evaluator'}
  assert 'reinforce/loss' in rows['learner'][-1]
  assert rows['actor-0'][-1]['parameter_version'] > 0
  final = rows['evaluator'][-1]
  assert final['final'] and final['episode_return'] > 0.9  # of a random policy it is negative


@pytest.mark.usefixtures('in_process')
def test_own_agent_is_trained_in_one_process(trained, run_in):
  code, _, errors = run_in(trained, *train('fused', '--fused', '--steps', '6000'))
  assert code == 0, errors
  folder = trained / 'fused' / 'metrics'
  assert {path.stem for path in folder.glob('*.jsonl')} == {'events', 'evaluator', 'learner'}
  rows = metrics.read(folder / 'learner.jsonl')
  assert [row['environment_step'] for row in rows] == [2304 * row['learner_step'] for row in rows]
  final = metrics.read(folder / 'evaluator.jsonl')[-1]
  assert final['final'] and final['environment_step'] == 3 * 2304


def test_own_agent_is_found_again_by_its_run(trained, run_in):
  (step,) = [int(path.name) for path in (trained / 'run' / 'checkpoints').iterdir()]
  code, output, errors = run_in(trained, 'evaluate', 'run', '--trust', '--episodes', 64, '--json')
  assert code == 0, errors
  scored = json.loads(output.splitlines()[-1])
  assert scored['learner_step'] == step
  assert scored['episode_return'] > 0.9
  other = ['--trust', '--run', 'run', '--agent', 'dreamer', '--preset', 'laptop']
  code, _, errors = run_in(trained, 'train', *other)
  assert code == 2
  assert '--agent: the folder has reinforce:Reinforce, you gave dreamer' in errors


def test_run_of_a_missing_module_is_refused_in_one_line(trained, run_in, tmp_path):
  code, _, errors = run_in(tmp_path, 'evaluate', trained / 'run', '--trust')
  assert code == 2
  assert errors.count('\n') == 1
  assert "agent_name='reinforce:Reinforce': there is no module 'reinforce'" in errors
