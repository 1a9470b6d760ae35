"""Puts the package manager `uv` into a folder, for a machine with nothing but `python3`.

  python3 launch/bootstrap.py .tools/uv     makes .tools/uv/bin/uv

It tries, in this order: a uv on the PATH, if it is new enough; pip; a download by the standard library.
This is the one file that must also run on Python 3.8, and before anything is installed.
"""

import hashlib
import io
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile

OLDEST = (0, 5)
PINNED = '0.13.9'  # the version that the standard library downloads, without pip's checks
CHECKSUMS = frozenset((  # SHA-256 of its wheels for Linux on x86-64 and aarch64, with glibc and musl
  'd7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19',
  'ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375',
  '5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe',
  '2c45530751517d6c3bbc69a19473f6effe47cce047bede01ffd8af7ea7b36b25',
))  # fmt: skip
TIMEOUT_SECONDS = 60
INDEX_VARIABLES = ('UV_DEFAULT_INDEX', 'UV_INDEX_URL', 'PIP_INDEX_URL')
PYPI = 'https://pypi.org/simple'


def main():
  folder = pathlib.Path(sys.argv[1]).absolute()
  failures = []
  for install in (link_from_path, install_by_pip, install_by_urllib):
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


def install_by_pip(folder):
  environment = dict(os.environ, PIP_NO_INPUT='1')
  if index_url() != PYPI:  # else pip's own configuration holds
    environment['PIP_INDEX_URL'] = index_url()
  requirement = f'uv>={OLDEST[0]}.{OLDEST[1]}'
  command = (sys.executable, '-m', 'pip', 'install', '--target', str(folder), requirement)
  run(*command, env=environment)


def install_by_urllib(folder):
  """Downloads the pinned wheel of uv for this machine, and extracts the program `uv` from it.

  Raises:
    LookupError: the package index has no such wheel for this machine.
    ValueError: the wheel is not one of CHECKSUMS.
  """
  page = index_url().rstrip('/') + '/uv/'
  library = 'manylinux' if platform.libc_ver()[0] == 'glibc' else 'musllinux'
  name = rf'/uv-{re.escape(PINNED)}-py3-none-[\w.]*{library}[\w.]*_{platform.machine()}\.whl'
  link = re.search(rf'href="([^"]*{name})', download(page).decode())
  if link is None:
    raise LookupError(f'{page} has no wheel of uv {PINNED} for {platform.machine()}')
  address = urllib.parse.urljoin(page, link.group(1))
  content = download(address)
  if hashlib.sha256(content).hexdigest() not in CHECKSUMS:
    raise ValueError(f'{address} is not the wheel of uv {PINNED} that is known here')
  with zipfile.ZipFile(io.BytesIO(content)) as wheel:
    (name,) = [name for name in wheel.namelist() if name.endswith('.data/scripts/uv')]
    program = wheel.read(name)
  (folder / 'bin').mkdir(parents=True)
  path = folder / 'bin' / 'uv'
  path.write_bytes(program)
  path.chmod(0o755)


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
