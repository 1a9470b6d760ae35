"""`hephaestus bench dreams`: a run's imagination compared with its environment."""

import functools
import json

import pytest

from hephaestus.launch import config as launch_config
from hephaestus.launch import main
from hephaestus.launch.bench import dreams
from hephaestus.launch.files import folder as folder_lib


def call(*words):
  return main.run(main.parse(['hephaestus', *map(str, words)]))


@pytest.mark.timeout(600)
def test_rows_are_after_1_2_and_4_steps_of_the_longest_dream(dreamer, monkeypatch, capsys):
  # Both commands show one result, so that it is computed once.
  monkeypatch.setattr(dreams, 'dreams', functools.cache(dreams.dreams))
  run = dreamer.folder
  assert call('bench', 'dreams', run, '--steps', 1000, '--json') == 0
  result = json.loads(capsys.readouterr().out)
  assert [row['steps'] for row in result['rows']] == [1, 2, 4]
  assert result['learner_step'] > 0
  first, *_, last = result['rows']
  # An episode of this catch takes three steps, and a reward comes with its end.
  assert 0 < abs(first['real']) < 1 and first['continues'] is not None
  assert 0 <= first['wrong'] <= 1 and last['continues'] is None
  assert call('bench', 'dreams', run, '--steps', 1000) == 0
  words = capsys.readouterr().out
  assert words.startswith('Dreams can') and 'of them have a wrong number. In ' in words
  assert 'imagined' in words and f'{first["real"]:,.3g}' in words


@pytest.mark.parametrize(
  ('words', 'error'),
  [
    (['--steps', 0], '--steps 0: must be at least 1'),
    (['--checkpoint', '7'], '7'),
  ],
)
def test_bad_input_is_named(dreamer, capsys, words, error):
  assert call('bench', 'dreams', dreamer.folder, *words) == 2
  assert error in capsys.readouterr().err


def test_an_agent_without_dreams_is_refused(tmp_path, capsys):
  folder_lib.open_run(tmp_path / 'ppo', launch_config.of_preset('ppo', 'laptop', 'catch'))
  assert call('bench', 'dreams', tmp_path / 'ppo') == 2
  assert 'this needs the dreamer, but the run has ppo' in capsys.readouterr().err
