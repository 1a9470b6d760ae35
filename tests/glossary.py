"""Checks that code and documents use the field's terms; `make lint` runs it.

  python tests/glossary.py            prints each finding: file, line, term, replacement
  python tests/glossary.py --count    prints the number of findings by folder

Read are docstrings, comments, string literals that contain a space, names of tests, and Markdown
outside of code. `docs/log` is history and keeps its words.
"""

import argparse
import ast
import collections
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

import structure

TARGET = 'threshold, or target score'
INPUTS = 'previous action and observation, or inputs of the transition'
MAXIMUM = 'running maximum'
RANGE = 'percentile range, or the quantity that spreads'
SAMPLED = 'sample, or sampled'
# Each term, as a regular expression in which a space is any white space, and what to write instead.
BANNED = {
  r'(?<!grid\s)(?<!grid_)(?<!grid-)worlds?(?! model|-model|[_=])': 'environment',
  r'by chance': 'sampled actions, or a random policy',
  r'by the mode': 'greedy actions',
  r'side by side': 'parallel',
  r'asleep|awake|woken|(?:actor|policy|agent) (?:wakes|sleeps)|sleeping actor': 'warm-up, frozen',
  r'rows? of (?:a|the|each|every|one|its|their) dreams?': 'imagined step',
  r'(?:dreamt|dreamed|imagined) rows?|rows? dreamt': 'imagined step',
  r'(?:FIRST|MID|LAST) rows?|rows? of (?:an?|the|each|every|one) (?:episode|sequence|unroll)': (
    'step'
  ),
  r'what (?:it )?pays': 'return, or reward',
  r'(?:is|are|was|were|be) held back|waits? for room': 'the rate limiter blocks',
  r'films?|filmed|filming': 'video, or GIF',
  r'glances?|in sight|looked at with': 'observation, or check',
  r'dies': 'crashes, or exits',
  r'comes? back|came back': 'restarts, or returns',
  r'(?:is|are|was|were) silent': 'does not answer, or times out',
  r'saves? itself|saved itself': 'writes a checkpoint',
  r'goes on|went on': 'resumes, or continues',
  r'(?:is|are|was|were) cut off': 'is truncated',
  r'(?:is|are|was) (?:said|told)(?! apart)': 'is reported, or is printed',
  r'what is seen': 'observation',
  r'those who|whoever|he who': 'name the thing',
  r'knows? nothing|what (?:it|they|the \w+) knows?': 'model error, or does not depend on',
  r'(?:the|its|their|each|every|whose|\w+\'s) bars? (?:was|were|is|are|of|for|at|that)': TARGET,
  r'(?:reach\w*|meets?|met|miss\w*|above|below) (?:an?|the|its|their|each|both) bars?': TARGET,
  r'bars? (?:is|are|was|were) (?:reached|met|missed)': TARGET,
  r'(?:an?|the|one|each|every|first|next|last)(?: \w+)? looks?(?! like| up| for)': 'observation',
  r'looked at|looks? whether': 'inspected, or checks',
  r'(?<!lock\s)(?:is|are|was|were|be|been) held(?! constant| fixed| out)': 'is stored, or blocked',
  r'what (?:led|leads) to|(?:its|their|the) causes?(?=, \[)|causes?(?=: \[)': INPUTS,
  r'causes? of (?:an?|the|each|every) (?:step|state|latent|transition|observation)s?': INPUTS,
  r'(?:action|latent|numbers|state) and causes?|causes? is the (?:previous )?action': INPUTS,
  r'(?<!end\sof\s)(?:an?|the|each|every|its|whole|test|\w+\'s) tracks?': (
    'sequence, or running statistics'
  ),
  r'peaks?(?=: \[)|(?:the|its|and) peaks?(?= (?:of|stays?|is|was|never|rises|falls)|[.,;)])': MAXIMUM,
  r'peaks? of novelty': MAXIMUM,
  r'spreads?(?=: (?:\[|before|of ))': RANGE,
  r'(?:the|an?|new|its|their|largest|and) spreads?(?! (?:of|over|across|between)|-)': RANGE,
  r'(?<!\()(?<!hard\s)drives(?! (?:the|an?|its|their|all|each|it)\b)': 'intrinsic rewards',
  r'(?:an?|each|every|intrinsic) drive': 'intrinsic rewards',
  r'intakes?': 'validation, or filter',
  r'blameless': 'the reason, or where the cause lies',
  r'draw(?:s|n|ing)? (?:(?:an?|the|each|every|whole|next) )*(?:batch(?:es)?|sequences?)': SAMPLED,
  r'(?:batch(?:es)?|sequences?) (?:(?:that|which) )?(?:is|are|was|were) drawn': SAMPLED,
  r'begins? to draw|stops? drawing|draws? uniformly': SAMPLED,
  r'drawn (?:at random|anew|without replacement|uniformly|from)': SAMPLED,
  r'(?:begin|start|restart)(?:s|ning|ed|ing)?(?: \w+)? anew|began anew': 'restarts, or is reset',
  'beside': 'next to, with, in addition to, or compared with',
  'alone': 'only, by itself, or without',
  '(?:that|those) of': 'the noun again, or another sentence',
}
TERMS = [
  (re.compile(rf'(?<![\w-])(?:{term})(?![\w-])'.replace(' ', r'\s+'), re.I), instead)
  for term, instead in BANNED.items()
]
# Nouns that are clauses; a question may begin like this.
OPENING = re.compile(
  r'(?:\A|(?<=[.!?:]\s)|(?<=\n\n))\s*(?:[*-]\s+)?\**((?:What|Whatever|Who|Of)\s)[^?]*?(?:[.!;:](?:\s|$)|\Z)'
)


class Finding(NamedTuple):
  """A banned term in a text, on a line counted from 0."""

  line: int
  term: str
  instead: str


def check(text: str) -> list[Finding]:
  """Finds banned terms in prose; code between backticks is skipped."""
  text = re.sub(r'`[^`]*`', lambda code: re.sub(r'\S', '`', code[0]), text)
  found = []
  for pattern, instead in TERMS:
    for match in pattern.finditer(text):
      found.append((match.start(), match[0], instead))
  for match in OPENING.finditer(text):
    found.append((match.start(1), match[1], 'a sentence that begins with its subject'))
  return [
    Finding(text.count('\n', 0, start), ' '.join(term.split()), instead)
    for start, term, instead in sorted(found)
  ]


def check_file(root: pathlib.Path, path: pathlib.Path) -> list[Finding]:
  """Finds banned terms in one file of the checkout, lines counted from 1."""
  text = (root / path).read_text()
  texts = _markdown(text) if path.suffix == '.md' else _python(text)
  return sorted(
    {
      finding._replace(line=finding.line + first)
      for first, part in texts
      for finding in check(part)
    }
  )


def _markdown(text: str) -> Iterator[tuple[int, str]]:
  """Yields the text without its code and link targets, whose lines are left empty."""
  text = re.sub(r'^ *```.*?^ *```', lambda m: '\n' * m[0].count('\n'), text, flags=re.M | re.S)
  text = re.sub(r'\]\([^)]*\)', ']', text)
  yield 1, text


def _python(text: str) -> Iterator[tuple[int, str]]:
  """Yields docstrings, literals with spaces, blocks of comments and names of tests."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and ' ' in node.value:
      yield node.lineno, node.value
    elif isinstance(node, ast.FunctionDef) and node.name.startswith('test_'):
      yield node.lineno, node.name.replace('_', ' ')
  block, first, last = [], 0, 0
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      line = token.start[0]
      if block and line != last + 1:
        yield first, '\n'.join(block)
        block = []
      first = first if block else line
      last = line
      block.append(token.string.lstrip('# '))
  if block:
    yield first, '\n'.join(block)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('paths', nargs='*', type=pathlib.Path, help='files (default: all tracked)')
  parser.add_argument('--count', action='store_true', help='print the findings of each folder only')
  flags = parser.parse_args()
  root = pathlib.Path(__file__).resolve().parents[1]
  counts: collections.Counter[str] = collections.Counter()
  for path in flags.paths or structure.tracked_files(root):
    if path.suffix not in ('.py', '.md') or path.parts[:2] == ('docs', 'log'):
      continue
    if path.name in ('glossary.py', 'test_glossary.py'):
      continue
    for finding in check_file(root, path):
      counts[str(path if path.suffix == '.md' else path.parent)] += 1
      if not flags.count:
        print(f'{path}:{finding.line}: {finding.term!r}: write {finding.instead}')
  if flags.count:
    for folder, count in sorted(counts.items()):
      print(f'{count:5}  {folder}')
    print(f'{sum(counts.values()):5}  in all')
  return 1 if counts else 0


if __name__ == '__main__':
  sys.exit(main())
