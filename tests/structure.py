"""Imports of a checkout: circles of modules and folders, and the directions between top-level folders.

The code is all Python files that are tracked by Git and are not tests. Imports count wherever they
stand: at the top of a module, in a function, or under `TYPE_CHECKING`.
"""

import ast
import collections
import pathlib
import subprocess

PACKAGE = 'hephaestus'
ENVIRONMENTS = 'actors.environments'
MAY_IMPORT = {
  'agents': set(),
  'replay': set(),
  ENVIRONMENTS: set(),
  'actors': {'agents', 'replay', ENVIRONMENTS},
  'learner': {'agents', 'replay'},
  'launch': {'agents', 'replay', ENVIRONMENTS, 'actors', 'learner'},
}
"""The folders from which the code of each folder may import. Data travels the other way by hand-over."""


def measure(root: pathlib.Path) -> dict[str, set[str]]:
  """Maps each module of the checkout at `root` to the project's modules that it imports."""
  code = [path for path in tracked_files(root) if path.suffix == '.py' and path.parts[0] != 'tests']
  return _imports({path: ast.parse((root / path).read_text()) for path in code})


def module_circles(imports: dict[str, set[str]]) -> list[list[str]]:
  """Groups of modules that import each other."""
  return _circles(imports)


def folder_circles(imports: dict[str, set[str]]) -> list[list[str]]:
  """Groups of entries of one folder that import each other: sub-folders and modules."""
  return _circles(_entry_imports(imports))


def forbidden(imports: dict[str, set[str]]) -> list[str]:
  """Imports, `importer -> imported`, between top-level folders that MAY_IMPORT does not allow."""
  return sorted(
    f'{importer} -> {target}'
    for importer, targets in imports.items()
    for target in targets
    if (source := _folder(importer)) in MAY_IMPORT
    and (sink := _folder(target)) != source
    and sink not in MAY_IMPORT[source]
  )


def _folder(module: str) -> str:
  """The top-level folder of a module; environments count as a folder of their own."""
  name = module.partition('.')[2]
  return ENVIRONMENTS if f'{name}.'.startswith(f'{ENVIRONMENTS}.') else name.partition('.')[0]


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
  """Maps each entry of a folder to the other entries of that folder from which it imports.

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
        sibling = '.'.join(sink[: shared + 1])
        graph['.'.join(source[: shared + 1])].add(sibling)
        graph.setdefault(sibling, set())
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
