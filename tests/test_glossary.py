"""Tests of the glossary that `make lint` applies."""

import glossary
import pytest


@pytest.mark.parametrize(
  'text',
  [
    'Each world has its own key.',
    'The policy acts by\n  the mode.',
    'Whoever reads it goes first.',
    'Returns a tree. What is stored is a copy.',
    'Of the two, the newer one is kept.',
    'The horizon is 12 dreamt rows.',
  ],
)
def test_private_terms_are_found(text):
  assert glossary.check(text)


@pytest.mark.parametrize(
  'text',
  [
    'The world model predicts each step of the grid world.',
    'What is stored? A copy.',
    'The key is called `worlds` in older files.',
    'Each row of the table names one host.',
  ],
)
def test_terms_of_the_field_pass(text):
  assert glossary.check(text) == []


def test_findings_in_code_name_their_line(tmp_path):
  path = tmp_path / 'module.py'
  path.write_text(
    'def f():\n  """Steps an environment.\n\n  Films it.\n  """\n  # Some are\n  # asleep.\n'
    "  raise ValueError('no such world')\n"
  )
  found = glossary.check_file(tmp_path, path.relative_to(tmp_path))
  assert [(f.line, f.term) for f in found] == [(4, 'Films'), (7, 'asleep'), (8, 'world')]


def test_code_in_documents_is_skipped(tmp_path):
  path = tmp_path / 'page.md'
  path.write_text('# Page\n\n```\nworlds: 3\n```\n\nSee [videos](films.md) of a film.\n')
  found = glossary.check_file(tmp_path, path.relative_to(tmp_path))
  assert [(f.line, f.term) for f in found] == [(7, 'film')]
