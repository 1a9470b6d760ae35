"""Runs of one process work without the packages of several processes; other runs are refused."""

import json
import shutil
import sys

import pytest
import runs

from hephaestus.launch import main
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.run import validation

EXTRA = f'needs {validation.DISTRIBUTED}'


@pytest.fixture
def without(monkeypatch):
  """Hides these packages from imports of this process."""
  for name in runs.DISTRIBUTED:
    monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.timeout(600)
def test_dreamer_trains_in_one_process_by_default(dreamer):
  first, *_, score, replay = dreamer.lines
  assert first.startswith('one process, as with --fused: several need the extra `distributed`')
  assert json.loads(score)['learner_step'] == json.loads(replay)['learner_step'] > 0
  assert {path.name for path in (dreamer.folder / 'tensorboard').iterdir()} == {
    'evaluator',
    'learner',
  }


def test_replay_of_a_fused_dreamer_is_shown_from_its_checkpoint(dreamer, tmp_path, capsys):
  folder = shutil.copytree(dreamer.folder, tmp_path / 'run')
  call = lambda *words: main.run(main.parse(['hephaestus', *map(str, words)]))
  assert call('inspect', folder, '--json') == 0
  shown = json.loads(capsys.readouterr().out)
  # 15 unrolls of 20 steps; all but two, the warm-up, allow eight updates.
  assert (shown['learner_step'], shown['environment_step'], shown['replay_ratio']) == (104, 300, 16)
  frontier = shown['strata']['frontier']
  assert {key: frontier[key] for key in ('size', 'max_size', 'share', 'steps')} == {
    'size': 60, 'max_size': 512, 'share': 0.5, 'steps': 300
  }  # fmt: skip
  learned = metrics.read(folder / 'metrics' / 'learner.jsonl')[-1]
  assert learned['replay_ratio'] == 16 and learned['learner_step'] == 104
  for name in ('lowest', 'median', 'highest'):
    assert frontier['age'][name] == learned[f'replay/frontier/age/{name}']
  assert not shown['warnings']
  assert {path.name for path in (folder / 'videos').iterdir()} >= {'104.gif', '104-dream.gif'}
  unread = {'time': 2e9, 'learner_step': 104, 'memory/filled': 0.5, 'memory/evidence': 0.0}
  with open(folder / 'metrics' / 'learner.jsonl', 'a') as file:
    file.write(f'{json.dumps(unread)}\n' * 16)
  assert call('inspect', folder) == 0
  printed = ' '.join(capsys.readouterr().out.split())  # the width of a terminal wraps lines
  assert 'checkpoint of update 104, with 60 sequences' in printed and '16.00 achieved' in printed
  assert 'warning memory is never read' in printed


@pytest.mark.parametrize(
  ('command', 'words', 'remedy'),
  [
    (['train', '--no-fused'], 'train: --no-fused', 'train in one process with --fused'),
    (['train', '--set', 'learner.fused=false'], 'train: --no-fused', '--fused'),
    (['train', '--expose'], 'train: --expose', 'leave it out'),
    (['train', '--set', 'actor.num_actors=2'], 'train: actor.num_actors=2', 'leave it out'),
    (['train', '--set', 'learner.num_processes=2'], 'learner.num_processes=2', 'leave it out'),
    (['launch', 'hosts.yaml'], 'launch: several hosts', '`hephaestus train --fused`'),
    (['node', 'hosts.yaml', '--host', 'a'], 'node: several hosts', '`hephaestus train --fused`'),
    (['inspect', 'localhost:8000'], 'inspect: localhost:8000', '`hephaestus dashboard`'),
    (
      ['bench', 'speed', 'replay'],
      'bench: bench speed replay',
      'give the other sections',
    ),
  ],
)
def test_several_processes_are_refused_in_one_line(
  without, monkeypatch, tmp_path, capsys, command, words, remedy
):
  monkeypatch.chdir(tmp_path)
  assert main.run(main.parse(['hephaestus', *command])) == 2
  message = capsys.readouterr().err
  assert f'{words}: {EXTRA}; ' in message.replace(': its replay', '') and remedy in message
  assert message.count('\n') == 1
  assert not list(tmp_path.iterdir())


def test_run_of_several_processes_is_not_resumed_as_one(without, tmp_path, capsys):
  folder_lib.open_run(tmp_path, presets.laptop('catch'))
  assert main.run(main.parse(['hephaestus', 'train', '--run', str(tmp_path)])) == 2
  message = capsys.readouterr().err
  assert f'--run {tmp_path}: {EXTRA}; it has several processes; begin another run' in message
