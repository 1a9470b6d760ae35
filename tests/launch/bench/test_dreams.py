"""`hephaestus bench dreams`: a run's imagination compared with its environment."""

import json

import pytest

from hephaestus.agents.dreamer import comparison
from hephaestus.launch import config as launch_config
from hephaestus.launch import main
from hephaestus.launch.bench import dreams
from hephaestus.launch.files import folder as folder_lib


def call(*words):
  return main.run(main.parse(['hephaestus', 'bench', 'dreams', *map(str, words)]))


@pytest.mark.timeout(600)
def test_rows_are_after_1_2_and_4_steps_of_the_longest_dream(dreamer, capsys):
  assert call(dreamer.folder, '--steps', 500, '--json') == 0
  result = json.loads(capsys.readouterr().out)
  assert [row['steps'] for row in result['rows']] == [1, 2, 4]
  assert result['learner_step'] > 0
  first, *_, last = result['rows']
  # An episode of this catch takes three steps, and a reward comes with its end.
  assert 0 < abs(first['real']) < 1 and first['continues'] is not None
  assert 0 <= first['wrong'] <= 1 and last['continues'] is None


@pytest.mark.parametrize(
  ('wrong', 'error', 'expected'),
  [
    ([0.0, 0.05, 0.2], [0.0, 0.0, 0.0], 'about 2 steps: after 2 steps, 5% of'),
    ([0.0, 0.0, 0.0], [0.1, 0.6, 0.9], 'about 1 step: after 1 step, numbers are off by 0.10'),
    ([0.2, 0.0, 0.0], [0.0, 0.0, 0.0], 'from the first step on: after 1 step, 20% of'),
    ([0.0, 0.0, None], [0.0, 0.0, None], '2 steps or longer: after 2 steps, 0% of'),
    ([None] * 3, [None] * 3, 'too short'),
  ],
)
def test_dreams_are_trusted_until_an_error_is_too_large(wrong, error, expected):
  nothing = dict.fromkeys(comparison.Row._fields)
  rows = [
    comparison.Row(**nothing | {'steps': 2**k, 'wrong': wrong[k], 'error': error[k]})
    for k in range(3)
  ]
  found = comparison.Summary(1.25, None, None, None, rows)
  assert expected in dreams.trust(found)
  sentence, values, heading, *lines = dreams.table(found, 7).splitlines()
  assert sentence == dreams.trust(found) and values.startswith('update 7: value 1.25; ')
  assert heading.split() == list(comparison.Row._fields) and len(lines) == 3


def test_bad_input_is_named(dreamer, tmp_path, capsys):
  assert call(dreamer.folder, '--steps', 0) == 2
  assert '--steps 0' in capsys.readouterr().err
  folder_lib.open_run(tmp_path / 'ppo', launch_config.of_preset('ppo', 'laptop', 'catch'))
  assert call(tmp_path / 'ppo') == 2
  assert 'this needs the dreamer, but the run has ppo' in capsys.readouterr().err
