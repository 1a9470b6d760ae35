"""Puts the package manager `uv` into a folder, for a machine with nothing but `python3`.

  python3 launch/bootstrap.py .tools/uv     makes .tools/uv/bin/uv

It tries, in this order: a uv on the PATH, if it is new enough; pip in a new virtual environment; pip
without one; a download by the standard library. This is the one file that must also run on Python
3.8, and before anything is installed.
"""

import hashlib
import html.parser
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile

OLDEST = (0, 5)
TIMEOUT_SECONDS = 60
INDEX_VARIABLES = ('UV_DEFAULT_INDEX', 'UV_INDEX_URL', 'PIP_INDEX_URL')
PYPI = 'https://pypi.org/simple'


def main():
  folder = pathlib.Path(sys.argv[1]).absolute()
  failures = []
  for install in (link_from_path, install_by_venv, install_by_pip, install_by_urllib):
    shutil.rmtree(str(folder), ignore_errors=True)
    try:
      install(folder)
      if version_of(folder / 'bin' / 'uv') >= OLDEST:
        return
      failures.append(f'{install.__name__}: too old')
    except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
      failures.append(f'{install.__name__}: {getattr(error, "stderr", None) or error}')
  shutil.rmtree(str(folder), ignore_errors=True)
  sys.exit('Could not get uv; install it from https://docs.astral.sh/uv.\n' + '\n'.join(failures))


def link_from_path(folder):
  """Links to the uv on the PATH; LookupError where there is none."""
  found = shutil.which('uv')
  if not found:
    raise LookupError('there is none')
  (folder / 'bin').mkdir(parents=True)
  (folder / 'bin' / 'uv').symlink_to(pathlib.Path(found).absolute())


def install_by_venv(folder):
  run(sys.executable, '-m', 'venv', str(folder))
  pip_install(str(folder / 'bin' / 'python'))


def install_by_pip(folder):
  pip_install(sys.executable, '--target', str(folder))


def install_by_urllib(folder):
  """Downloads the newest wheel of uv for this machine, and extracts the program `uv` from it.

  Raises:
    LookupError: the package index has no wheel for this machine.
    ValueError: the wheel does not match its checksum.
  """
  page = index_url().rstrip('/') + '/uv/'
  links = Links()
  links.feed(download(page).decode())
  _, link = max(wheels(links.addresses), default=(None, None))
  if link is None:
    raise LookupError(f'{page} has no wheel for {platform.machine()}')
  address, _, checksum = urllib.parse.urljoin(page, link).partition('#sha256=')
  content = download(address)
  if hashlib.sha256(content).hexdigest() != checksum:
    raise ValueError(f'{address} does not match its sha256: {checksum or "none given"}')
  with tempfile.TemporaryFile() as file:
    file.write(content)
    with zipfile.ZipFile(file) as wheel:
      (name,) = [name for name in wheel.namelist() if name.endswith('.data/scripts/uv')]
      program = wheel.read(name)
  (folder / 'bin').mkdir(parents=True)
  path = folder / 'bin' / 'uv'
  path.write_bytes(program)
  path.chmod(0o755)


class Links(html.parser.HTMLParser):
  """Collects the links of a package index's page of one package, without those of yanked files.

  Attributes:
    addresses: URLs, as the page has them: possibly relative, with the checksum at the end.
  """

  def __init__(self):
    super().__init__()
    self.addresses = []

  def handle_starttag(self, tag, attrs):
    if tag == 'a' and dict(attrs).get('href') and 'data-yanked' not in dict(attrs):
      self.addresses.append(dict(attrs)['href'])


def wheels(addresses):
  """Yields (version, address) of each wheel of uv for this machine, without those of pre-releases."""
  library = 'manylinux' if platform.libc_ver()[0] == 'glibc' else 'musllinux'
  for address in addresses:
    path = urllib.parse.unquote(urllib.parse.urlsplit(address).path)
    match = re.search(r'/uv-(\d+(?:\.\d+)*)-py3-none-([\w.]+)\.whl$', path)
    if match and library in match.group(2) and match.group(2).endswith('_' + platform.machine()):
      yield tuple(map(int, match.group(1).split('.'))), address


def pip_install(python, *options):
  environment = dict(os.environ, PIP_NO_INPUT='1')
  if index_url() != PYPI:  # else pip's own configuration holds
    environment['PIP_INDEX_URL'] = index_url()
  requirement = f'uv>={OLDEST[0]}.{OLDEST[1]}'
  run(python, '-m', 'pip', 'install', *options, requirement, env=environment)


def index_url():
  return next((os.environ[name] for name in INDEX_VARIABLES if os.environ.get(name)), PYPI)


def download(address):
  request = urllib.request.Request(address, headers={'Accept': 'text/html, */*;q=0.1'})
  with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
    return response.read()


def version_of(uv):
  numbers = re.search(r'(\d+)\.(\d+)', run(str(uv), '--version'))
  return tuple(map(int, numbers.groups())) if numbers else (0, 0)


def run(*command, **options):
  completed = subprocess.run(
    command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options
  )
  return completed.stdout


if __name__ == '__main__':
  main()
