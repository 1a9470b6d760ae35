"""Says how to install what is missing, by how and where this package itself was installed."""

import json
import pathlib
import shlex
import sys
import urllib.parse
from importlib import metadata

DISTRIBUTION = 'hephaestus-rl'  # on the package index `hephaestus` is another project


def install(extra: str, requirement: str | None = None) -> str:
  """The command that installs an extra of this package, or only one requirement of it, where this Python runs.

  It is `make`'s for the whole extra in the environment that a checkout's `make` has made, elsewhere that of pip
  or uv, for the folder, wheel, repository or index from which the package came.
  """
  # A build leaves an egg-info in a checkout, which Python finds there; an installation names its installer.
  # Where only the checkout is on the path, there is neither.
  found = list(metadata.distributions(name=DISTRIBUTION))
  installed = max(found, key=lambda each: each.read_text('INSTALLER') is not None, default=None)
  read = lambda name: (installed.read_text(name) if installed else None) or ''
  source = json.loads(read('direct_url.json') or '{}')  # PEP 610
  address = urllib.parse.urlparse(source.get('url', ''))
  is_editable = source.get('dir_info', {}).get('editable', False)
  place = pathlib.Path(urllib.parse.unquote(address.path))
  if is_editable and pathlib.Path(sys.prefix) == place / '.venv':
    return f'make -C {shlex.quote(str(place))} train EXTRAS={extra} ARGS=--help'
  target = f'{DISTRIBUTION}[{extra}]'
  if address.scheme == 'file':
    target = f'{place}[{extra}]'
  elif address.scheme:
    vcs = f'{source["vcs_info"]["vcs"]}+' if 'vcs_info' in source else ''
    target += f' @ {vcs}{source["url"]}'
  pip = 'uv pip' if read('INSTALLER').strip() == 'uv' else 'pip'
  if requirement is not None:
    return f'{pip} install {shlex.quote(requirement)}'
  return f'{pip} install {"-e " if is_editable else ""}{shlex.quote(target)}'
