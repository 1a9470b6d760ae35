"""Hooks of mkdocs: the package that the reference reads, and links to files outside of docs/."""

import os
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure import files as mkdocs_files

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'build' / 'package' / 'hephaestus'
PARTS = ('__init__.py', 'actors', 'agents', 'launch', 'learner', 'replay')
PAGES = ('SECURITY.md',)  # of the root, which are pages of the site, too
LINK = re.compile(r'\[([^]\n]+)\]\(([^)#\s]+)((?:#[^)\s]*)?)\)')


def on_startup(**_: Any) -> None:
  """Links the folders of code below the name of their package, as an installation does."""
  PACKAGE.mkdir(parents=True, exist_ok=True)
  for name in PARTS:
    link = PACKAGE / name
    if not link.is_symlink():
      link.symlink_to(os.path.relpath(ROOT / name, PACKAGE))


def on_files(files: mkdocs_files.Files, config: Any) -> mkdocs_files.Files:
  """Adds the pages that lie at the root of the repository."""
  for name in PAGES:
    files.append(mkdocs_files.File.generated(config, name, abs_src_path=str(ROOT / name)))
  return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
  """Resolves links by the layout of the repository.

  A file that is no page of the site becomes the link's text; one that does not exist stays a link,
  about which mkdocs warns.
  """
  source = page.file.src_uri
  here = posixpath.dirname(source if source in PAGES else f'docs/{source}')

  def resolve(link: re.Match[str]) -> str:
    text, target, anchor = link.groups()
    path = posixpath.normpath(posixpath.join(here, target))
    if not (ROOT / path).is_file():
      return link[0]
    if not path.startswith('docs/') and path not in PAGES:
      return text
    there = posixpath.relpath(path.removeprefix('docs/'), posixpath.dirname(source) or '.')
    return f'[{text}]({there}{anchor})'

  return LINK.sub(resolve, markdown)
