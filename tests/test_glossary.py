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
    'Three of five seeds reach the bar.',
    'The bar of 25,000 steps/s is not reached.',
    'The policy has one look at the board.',
    'What was made is held until the learner asks.',
    'The latent and its cause, [B, C].',
    'The decoder reads what led to a step.',
    'Salience is pooled over a track of T steps.',
    'The intake discards old sequences.',
    'Exits of a blameless process count apart.',
    'The batches are drawn by a thread.',
    'Layouts are drawn anew in every episode.',
    'A restarted queue begins anew.',
    'Before warm-up is over, the peak stays 0.',
    'Divides by the largest spread.',
    'Curves, losses, drives and speed.',
    'It is shown next to it, beside the score.',
    'The mean alone.',
    'It is that\n  of the last step.',
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
    'A progress bar, error bars, and a bar chart; the bars below are attention weights.',
    'It is looked up by name, because a look-up is cheap.',
    'The lock is held while held-out episodes are scored.',
    'Each row names a symptom and its cause; a restart does not cause it.',
    'Precision and recall of the classifier.',
    'It keeps track of tracked files; the car stops at an end of the track.',
    'Peak memory of the program, at the peak rate of the chip.',
    'Curves with their spread over seeds, divided by the spread of returns.',
    'Intrinsic rewards (drives) are added; the clock drives the loop.',
    'Curves are drawn as thin lines; the environment draws its state.',
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
