"""`--cognition`: one configuration for all environments, of which each run takes what suits it."""

import pytest

from hephaestus.launch import config, main, seeds
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.run import request

LAPTOP = ('--preset', 'laptop')
IMAGE = ('oasis', 'environment.image=true')
OFF = {'slots': 'slots are of one image', 'survival': 'this environment names no vitals'}


def make(*words):
  arguments = main.parse(['hephaestus', 'train', *map(str, words)])
  return request.make_config(request.of(arguments))


def values(made):
  """The values of all keys that the preset has, by part."""
  known = config.flatten(config.to_tree(made))
  return {name: {key: known[key] for key in keys} for name, keys in presets.COGNITION.items()}


@pytest.mark.parametrize(
  ('env', 'options', 'off'),
  [
    (*IMAGE, {}),
    ('catch', None, OFF),
    ('errands', None, OFF),
    (
      'oasis',
      'environment.level_bonus=1',
      {
        'slots': OFF['slots'],
        'survival': 'already depends on its vitals',
        'workspace': 'there are only 3 candidates',
      },
    ),
  ],
)
def test_parts_are_on_where_they_suit_the_environment(capsys, env, options, off):
  given = [*LAPTOP, '--env', env, *(['--set', options] if options else [])]
  made, plain = make(*given, '--cognition'), make(*given)
  (line,) = capsys.readouterr().out.splitlines()
  on, _, left = line.partition(', and leaves off ')
  for name, expected in presets.COGNITION.items():
    found = values(made)[name]
    assert found == (values(plain)[name] if name in off else expected), name
    assert (f'{name} (' in left, f'{name} (' in on) == (name in off, name not in off)
  assert all(why in left for why in off.values())
  assert line.endswith('see docs/cognition.md')
  rest = {key for each in presets.COGNITION.values() for key in each}
  before, after = (config.flatten(config.to_tree(each)) for each in (plain, made))
  assert {key for key in before if before[key] != after[key]} <= rest


def test_explicit_settings_win(capsys, tmp_path):
  """Values of a file win, too; a part without its size is off, and what needs it says so."""
  (tmp_path / 'mine.yaml').write_text('agent: {workspace_score: learned}\n')
  own = ['agent.slots=5', 'agent.survival_scale=0', 'agent.memory_size=0']
  given = [*LAPTOP, '--env', IMAGE[0], '--config', tmp_path / 'mine.yaml', '--set', IMAGE[1], *own]
  agent = make('--cognition', *given).agent
  assert (agent.slots, agent.survival_scale, agent.memory_size) == (5, 0, 0)
  assert (agent.memory_dream_share, agent.empowerment_scale) == (0, 1)
  assert (agent.workspace_size, agent.workspace_score) == (4, 'learned')
  line = capsys.readouterr().out
  assert 'switches on slots, empowerment (agent.empowerment_scale=1.0)' in line
  assert 'survival (agent.survival_scale=0 is given)' in line
  assert 'memory (agent.memory_size=0 is given), dreams from memory (needs a memory)' in line


def test_run_resumes_without_the_flag_and_refuses_it_where_it_was_not_given(tmp_path):
  for name, words in (('on', ['--cognition']), ('off', [])):
    made = make(*LAPTOP, '--env', 'catch', *words)
    folder_lib.open_run(tmp_path / name, made)
    assert make('--run', tmp_path / name) == made
  again = make('--run', tmp_path / 'on', '--cognition')
  assert not config.conflicts(folder_lib.load_config(tmp_path / 'on'), again)
  with pytest.raises(ValueError, match=r'agent\.memory_size: the folder has 0, you gave 4096'):
    folder_lib.check(tmp_path / 'off', make('--run', tmp_path / 'off', '--cognition'))


def test_runs_of_several_seeds_have_it_and_say_so_once(tmp_path, capsys):
  words = [*LAPTOP, '--env', IMAGE[0], '--cognition', '--run', str(tmp_path), '--set', IMAGE[1]]
  found = seeds.plan(request.of(main.parse(['hephaestus', 'train', *words])), [0, 1])
  assert [run.config.agent.memory_size for run in found] == [4096, 4096]
  assert capsys.readouterr().out.count('--cognition switches on') == 1
