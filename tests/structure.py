"""Measures the structure of a checkout: folders, modules, functions and classes, and import circles.

  python tests/structure.py                      this checkout
  python tests/structure.py OTHER                another one, also of a layout before the package
  python tests/structure.py --sample --seed 3    ten sentences and ten docstrings, against the glossary

The code is all Python files that are tracked by Git and are not tests. Imports count wherever they
stand: at the top of a module, in a function, or under `TYPE_CHECKING`. `test_structure.py` asserts
the limits.
"""

import argparse
import ast
import collections
import pathlib
import random
import re
import subprocess
import sys
from typing import NamedTuple

PACKAGE = 'hephaestus'
MAX_LINES = 60
MAX_PARAMETERS = 8
MAX_MODULE_LINES = 500
MAX_ENTRIES = 12
MAX_README_LINES = 150
LARGEST_CLASSES = 5  # that are printed


class Function(NamedTuple):
  """A function or method, named like `launch/main.py:main`."""

  name: str
  lines: int
  parameters: int


class Class(NamedTuple):
  """A class, named like `agents/agent.py:Agent`, and the number of its own methods."""

  name: str
  methods: int


class Structure(NamedTuple):
  """The figures of one checkout.

  Attributes:
    files: Python files by folder.
    entries: files and folders that a listing of a folder of code shows.
    lines: lines of Python by folder.
    modules: lines of Python by file.
    functions: every function and method, nested ones included.
    classes: every class, nested ones included.
    circles: modules that import each other, one list for each circle.
    folder_circles: likewise the entries of one folder, so sub-folders and the modules beside them.
    readme_lines: lines of README.md.
  """

  files: dict[str, int]
  entries: dict[str, int]
  lines: dict[str, int]
  modules: dict[str, int]
  functions: list[Function]
  classes: list[Class]
  circles: list[list[str]]
  folder_circles: list[list[str]]
  readme_lines: int

  def long_functions(self) -> list[Function]:
    return sorted((f for f in self.functions if f.lines > MAX_LINES), key=lambda f: -f.lines)

  def wide_functions(self) -> list[Function]:
    wide = (f for f in self.functions if f.parameters > MAX_PARAMETERS)
    return sorted(wide, key=lambda f: -f.parameters)

  def long_modules(self) -> dict[str, int]:
    long = {name: lines for name, lines in self.modules.items() if lines > MAX_MODULE_LINES}
    return dict(sorted(long.items(), key=lambda item: -item[1]))

  def full_folders(self) -> dict[str, int]:
    return {name: entries for name, entries in self.entries.items() if entries > MAX_ENTRIES}

  def largest_classes(self) -> list[Class]:
    return sorted(self.classes, key=lambda c: -c.methods)[:LARGEST_CLASSES]


def measure(root: pathlib.Path) -> Structure:
  """Measures the checkout at `root`, by its tracked files."""
  tracked = tracked_files(root)
  code = [path for path in tracked if path.suffix == '.py' and path.parts[0] != 'tests']
  files: collections.Counter[str] = collections.Counter()
  lines: collections.Counter[str] = collections.Counter()
  modules = {}
  shown: dict[str, set[str]] = collections.defaultdict(set)
  functions, classes = [], []
  trees = {}
  for path in code:
    text = (root / path).read_text()
    trees[path] = ast.parse(text)
    files[str(path.parent)] += 1
    modules[str(path)] = len(text.splitlines())
    lines[str(path.parent)] += modules[str(path)]
    functions += _functions(path, trees[path])
    classes += _classes(path, trees[path])
  for path in tracked:
    for folder, entry in zip(path.parents, (path, *path.parents), strict=False):
      shown[str(folder)].add(entry.name)
  imports = _imports(trees)
  return Structure(
    files=dict(files),
    entries={folder: len(shown[folder]) for folder in files},
    lines=dict(lines),
    modules=modules,
    functions=functions,
    classes=classes,
    circles=_circles(imports),
    folder_circles=_circles(_entry_imports(imports)),
    readme_lines=len((root / 'README.md').read_text().splitlines()),
  )


def tracked_files(root: pathlib.Path) -> list[pathlib.Path]:
  """Lists the files in Git's index that exist, relative to `root`."""
  listed = subprocess.run(
    ['git', '-C', str(root), 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
    capture_output=True,
    text=True,
    check=True,
  )
  paths = sorted({pathlib.Path(name) for name in listed.stdout.split('\0') if name})
  return [path for path in paths if (root / path).is_file()]


def packages(root: pathlib.Path) -> set[str]:
  """Names of the packages in the tree: each folder of code that has an `__init__.py`."""
  return {
    '.'.join((PACKAGE, *path.parent.parts))
    for path in tracked_files(root)
    if path.name == '__init__.py' and path.parts[0] != 'tests'
  }


def _functions(path: pathlib.Path, tree: ast.AST, owner: str = '') -> list[Function]:
  found = []
  for node in ast.iter_child_nodes(tree):
    name = owner
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      name = f'{owner}.{node.name}' if owner else node.name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      given = node.args
      names = [a.arg for a in (*given.posonlyargs, *given.args)]
      if isinstance(tree, ast.ClassDef) and names[:1] in (['self'], ['cls']):
        names = names[1:]
      count = len(names) + len(given.kwonlyargs) + bool(given.vararg) + bool(given.kwarg)
      found.append(Function(f'{path}:{name}', node.end_lineno - node.lineno + 1, count))
    found += _functions(path, node, name)
  return found


def _classes(path: pathlib.Path, tree: ast.Module) -> list[Class]:
  kinds = ast.FunctionDef | ast.AsyncFunctionDef
  return [
    Class(f'{path}:{node.name}', sum(isinstance(child, kinds) for child in node.body))
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
  ]


def _imports(trees: dict[pathlib.Path, ast.Module]) -> dict[str, set[str]]:
  """Maps each module to the project's modules that it imports, wherever in it."""
  modules = {_module(path): path for path in trees}
  graph: dict[str, set[str]] = {name: set() for name in modules}
  for name, path in modules.items():
    package = name if path.name == '__init__.py' else name.rpartition('.')[0]
    for node in ast.walk(trees[path]):
      targets = []
      if isinstance(node, ast.Import):
        targets = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        base = node.module or ''
        if node.level:
          above = package.split('.')[: len(package.split('.')) - node.level + 1]
          base = '.'.join((*above, *filter(None, [node.module])))
        # `from package import name` names a module where there is one, and else the package.
        named = [f'{base}.{alias.name}' for alias in node.names]
        targets = [target if _ours(target) in modules else base for target in named]
      graph[name] |= {_ours(target) for target in targets if _ours(target) in modules} - {name}
  return graph


def _entry_imports(imports: dict[str, set[str]]) -> dict[str, set[str]]:
  """Maps each entry of a folder to the entries beside it that it imports from.

  An import from `launch.run.commands` to `launch.records` is one from the entry `launch.run` to the
  entry `launch.records`. Imports between a package's `__init__.py` and its own modules do not count.
  """
  graph: dict[str, set[str]] = collections.defaultdict(set)
  for importer, targets in imports.items():
    for target in targets:
      source, sink = importer.split('.'), target.split('.')
      pairs = list(zip(source, sink, strict=False))
      shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
      if shared < len(pairs):
        beside = '.'.join(sink[: shared + 1])
        graph['.'.join(source[: shared + 1])].add(beside)
        graph.setdefault(beside, set())
  return dict(graph)


def _module(path: pathlib.Path) -> str:
  parts = path.parent.parts if path.name == '__init__.py' else (*path.parent.parts, path.stem)
  return '.'.join((PACKAGE, *parts))


def _ours(target: str) -> str:
  """The module under the package's name; before the package, `agents.x` was imported as such."""
  return target if target.partition('.')[0] == PACKAGE else f'{PACKAGE}.{target}'


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
  """Groups of nodes that reach each other, by following imports from each."""
  reached = {}
  for start in graph:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
      module = todo.pop()
      if module not in seen:
        seen.add(module)
        todo += graph[module]
    reached[start] = seen
  groups = {
    tuple(sorted(other for other in seen if start in reached[other]))
    for start, seen in reached.items()
    if start in seen
  }
  return [list(group) for group in sorted(groups)]


def _report(structure: Structure) -> str:
  width = max(map(len, structure.files))
  rows = [f'{"folder":{width}}  files  entries   lines']
  for folder in sorted(structure.files):
    counts = structure.files[folder], structure.entries[folder], structure.lines[folder]
    rows.append(f'{folder:{width}}  {counts[0]:5}  {counts[1]:7}  {counts[2]:6,}')
  files, lines = sum(structure.files.values()), sum(structure.lines.values())
  rows.append(f'{"all":{width}}  {files:5}  {"":7}  {lines:6,}')
  long, wide = structure.long_functions(), structure.wide_functions()
  rows.append(f'\nmodules over {MAX_MODULE_LINES} lines: {len(structure.long_modules())}')
  rows += [f'  {lines:4}  {name}' for name, lines in structure.long_modules().items()]
  rows.append(f'functions over {MAX_LINES} lines: {len(long)}')
  rows += [f'  {function.lines:4}  {function.name}' for function in long]
  rows.append(f'functions with more than {MAX_PARAMETERS} parameters: {len(wide)}')
  rows += [f'  {function.parameters:4}  {function.name}' for function in wide]
  rows.append(f'folders with more than {MAX_ENTRIES} entries: {len(structure.full_folders())}')
  rows += [f'  {entries:4}  {name}' for name, entries in structure.full_folders().items()]
  rows.append('largest classes:')
  rows += [f'        {each.name}: {each.methods} methods' for each in structure.largest_classes()]
  rows.append(f'import circles: {len(structure.circles)}')
  rows += [f'        {" <-> ".join(circle)}' for circle in structure.circles]
  rows.append(f'import circles of folders: {len(structure.folder_circles)}')
  rows += [f'        {" <-> ".join(circle)}' for circle in structure.folder_circles]
  rows.append(f'lines of README.md: {structure.readme_lines}')
  return '\n'.join(rows)


def _sentences(text: str) -> list[str]:
  """Sentences of Markdown prose: no code, no tables, no headings."""
  text = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
  kept = [line for line in text.splitlines() if not re.match(r'\s*(\||#|!\[)', line)]
  paragraphs = re.split(r'\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )', '\n'.join(kept))
  found = []
  for paragraph in paragraphs:
    flat = ' '.join(paragraph.split())
    found += [s for s in re.split(r'(?<=[.!?]) +(?=[A-Z`*])', flat) if len(s.split()) > 4]
  return found


def sample(root: pathlib.Path, seed: int, count: int = 10) -> list[tuple[str, str]]:
  """Samples sentences of the documents and docstrings of the code, each with its file."""
  sentences, docstrings = [], []
  for path in tracked_files(root):
    text = (root / path).read_text() if path.suffix in ('.md', '.py') else ''
    if path.suffix == '.md' and path.parts[:2] != ('docs', 'log'):
      sentences += [(str(path), sentence) for sentence in _sentences(text)]
    elif path.suffix == '.py':
      for node in ast.walk(ast.parse(text)):
        kinds = ast.FunctionDef | ast.ClassDef | ast.Module | ast.AsyncFunctionDef
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
          docstrings.append((str(path), docstring))
  rng = random.Random(seed)
  sampled = [rng.sample(kind, min(count, len(kind))) for kind in (sentences, docstrings)]
  return [text for kind in sampled for text in kind]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('root', nargs='?', type=pathlib.Path, help='a checkout (default: this one)')
  parser.add_argument('--sample', action='store_true', help='sample sentences and docstrings')
  parser.add_argument('--seed', type=int, default=0, help='of --sample')
  flags = parser.parse_args()
  root = flags.root or pathlib.Path(__file__).resolve().parents[1]
  if not flags.sample:
    print(_report(measure(root)))
    return 0
  import glossary

  found = 0
  for path, text in sample(root, flags.seed):
    print(f'{path}: {text}')
    for finding in glossary.check(text):
      found += 1
      print(f'  ! {finding.term!r}: write {finding.instead}')
  print(f'{found} banned terms')
  return 1 if found else 0


if __name__ == '__main__':
  sys.exit(main())
