"""`bench compare`: verdicts on figures, and files that are refused."""

import json

import pytest

from hephaestus.launch import main


def compare(*arguments):
  return main.run(main.parse(['hephaestus', 'bench', 'compare', *map(str, arguments)]))


@pytest.fixture
def write(tmp_path):
  """Writes figures {name: (value, unit)} to a file of that name."""

  def write(name, figures, machine='EPYC, 2 CPU cores'):
    rows = [
      {'name': key, 'value': value, 'unit': unit, 'limit': None, 'ratio': None, 'machine': machine}
      for key, (value, unit) in figures.items()
    ]
    path = tmp_path / name
    path.write_text(json.dumps(rows))
    return path

  return write


@pytest.mark.parametrize(
  ('unit', 'old', 'new', 'worse'),
  [
    ('steps/s', 1000, 890, True),
    ('steps/s', 1000, 910, False),
    ('steps/s', 1000, 2000, False),
    ('s', 1.0, 1.11, True),
    ('s', 1.0, 0.5, False),
    ('bytes', 100, 111, True),
    ('bytes/s', 100, 111, False),
    ('us of CPU/sequence', 30.0, 34.0, True),
    ('rows', 12, 6, False),  # neither way is better
    ('s', 0, 1, True),
  ],
)
def test_unit_gives_direction_of_worse(write, unit, old, new, worse):
  paths = write('old.json', {'it': (old, unit)}), write('new.json', {'it': (new, unit)})
  assert compare(*paths) == int(worse)


def test_threshold_is_the_tolerated_change(write):
  paths = write('old.json', {'it': (100, 'steps/s')}), write('new.json', {'it': (80, 'steps/s')})
  assert [compare(*paths, '--threshold', each) for each in (0.1, 0.19, 0.21)] == [1, 1, 0]


def test_limits_of_the_machine_have_no_verdict(write):
  slow = {'copy': (1e9, 'bytes/s'), 'matmul/float32': (1e9, 'FLOP/s')}
  fast = {'copy': (1e10, 'bytes/s'), 'matmul/float32': (1e10, 'FLOP/s')}
  assert compare(write('old.json', fast), write('new.json', slow)) == 0


def test_table_has_common_figures_and_names_the_others(write, capsys):
  old = write('old.json', {'b': (2.0, 's'), 'a': (1e6, 'steps/s'), 'gone': (1, 's')}, machine='M1')
  new = write('new.json', {'b': (1.0, 's'), 'a': (5e5, 'steps/s'), 'here': (1, 's')}, machine='M2')
  assert compare(old, new) == 1
  said = capsys.readouterr()
  header, *rows = said.out.splitlines()
  assert header.split() == ['old', 'new', 'ratio']
  assert [row.split() for row in rows[:2]] == [
    ['a', '1,000,000', '500,000', 'steps/s', '0.500', 'worse'],
    ['b', '2', '1', 's', '0.500', 'better'],
  ]
  assert rows[0].index('0.500') == rows[1].index('0.500')
  assert rows[2:] == [f'gone: only in {old}', f'here: only in {new}']
  assert said.err == 'warning: M1 is compared with M2\n'


FIGURE = {'name': 'it', 'value': 1, 'unit': 's', 'limit': None, 'ratio': None, 'machine': 'M'}


@pytest.mark.parametrize(
  ('content', 'words'),
  [
    (None, 'new.json: cannot be read (No such file or directory)'),
    ('{', 'new.json: is no JSON'),
    ('{"name": "it"}', 'new.json: is no list of figures'),
    ('[{"name": "it"}]', 'new.json: is no list of figures'),
    (json.dumps([FIGURE | {'value': 'much'}]), "'it' has value 'much': a finite number"),
    (json.dumps([FIGURE | {'value': float('nan')}]), "'it' has value nan: a finite number"),
    (json.dumps([FIGURE, FIGURE]), 'it is there twice'),
    (json.dumps([FIGURE | {'unit': 'bytes'}]), "it: is in 's' and in 'bytes'"),
    (json.dumps([FIGURE | {'name': 'other'}]), 'OLD and NEW: have no figure in common'),
    ('[]', 'OLD and NEW: have no figure in common'),
  ],
)
def test_other_files_are_refused(write, tmp_path, capsys, content, words):
  old, new = write('old.json', {'it': (1, 's')}), tmp_path / 'new.json'
  if content is not None:
    new.write_text(content)
  assert compare(old, new) == 2
  message = capsys.readouterr().err
  assert words in message and message.count('\n') == 1


@pytest.mark.parametrize('threshold', ['-0.1', '1', 'nan'])
def test_threshold_outside_of_its_range_is_refused(write, capsys, threshold):
  path = write('old.json', {'it': (1, 's')})
  assert compare(path, path, f'--threshold={threshold}') == 2
  assert f'--threshold {float(threshold):g}: must be' in capsys.readouterr().err
