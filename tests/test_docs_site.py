"""The site of docs/: it builds without a warning, and a broken page would be one."""

import importlib.util
import itertools
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from hephaestus.actors import environments
from hephaestus.launch.bench.learning import runs

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = pathlib.Path('docs', 'site', 'mkdocs.yml')


def build(root, site):
  """Runs `mkdocs build` as `make docs` does; its exit code and what it printed."""
  pytest.importorskip('mkdocs', reason='of the extra docs, which has packages for Python 3.10')
  command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(site)]
  built = subprocess.run(
    command,
    cwd=(root / CONFIG).parent,
    env={**os.environ, 'NO_MKDOCS_2_WARNING': 'true'},
    capture_output=True,
    text=True,
  )
  return built.returncode, built.stderr


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """The folder of the built site."""
  folder = tmp_path_factory.mktemp('site')
  exit_code, printed = build(ROOT, folder)
  assert exit_code == 0 and 'WARNING' not in printed, printed
  return folder


def text(site, page):
  return (site / page).read_text()


def test_site_has_every_page_and_image_of_docs(site):
  pages = [path.relative_to(ROOT / 'docs') for path in (ROOT / 'docs').rglob('*.md')]
  assert len(pages) > 20
  names = [page.with_name('index.md') if page.name == 'README.md' else page for page in pages]
  assert [page for page in names if not (site / page).with_suffix('.html').is_file()] == []
  for path in (ROOT / 'docs' / 'images').rglob('*.*'):
    assert (site / path.relative_to(ROOT / 'docs')).is_file()
  assert [path.name for path in (site / 'site').iterdir()] == ['style.css']


def test_reference_shows_the_python_interface(site):
  page = text(site, 'reference/interface.html')
  assert 'id="hephaestus.launch.interface.training.train"' in page
  assert 'Trains an agent, or resumes a run' in page
  assert 'id="hephaestus.actors.environments.environment.Environment.scripted_action"' in text(
    site, 'reference/environments.html'
  )


def test_links_out_of_docs_lead_to_a_page_or_become_text(site):
  assert 'href="SECURITY.html"' in text(site, 'usage.html')
  assert 'href="hosts.html#ports-and-firewalls"' in text(site, 'SECURITY.html')
  assert 'href="../agents/observation.py"' not in text(site, 'environments.html')


def test_broken_link_anchor_and_unlisted_page_are_warnings(tmp_path):
  docs = tmp_path / 'docs'
  shutil.copytree(ROOT / 'docs' / 'site', docs / 'site')
  shutil.copy(ROOT / 'docs' / 'usage.md', docs)
  shutil.copy(ROOT / 'SECURITY.md', tmp_path)
  docs.joinpath('unlisted.md').write_text(
    '[a](missing.md) [b](usage.md#missing) [c](../gone.md) [d][hephaestus.Missing]\n'
  )
  exit_code, printed = build(tmp_path, tmp_path / 'out')
  assert exit_code == 1
  for part in ('- unlisted.md', "'missing.md'", "'#missing'", "'../gone.md'", 'hephaestus.Missing'):
    assert part in printed


def test_gallery_has_a_small_picture_of_each_environment():
  page = (ROOT / 'docs' / 'gallery.md').read_text()
  pictures = {path.stem: path.stat().st_size for path in (ROOT / 'docs/images/gallery').iterdir()}
  assert set(environments.ENVIRONMENTS) <= set(pictures)
  assert all(f'(images/gallery/{name}.gif)' in page for name in pictures)
  assert max(pictures.values()) <= 150_000 and sum(pictures.values()) <= 2_000_000


def _script(name):
  spec = importlib.util.spec_from_file_location(name, ROOT / 'docs' / 'site' / f'{name}.py')
  script = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(script)
  return script


def test_leaderboard_is_made_from_the_rows():
  script = _script('leaderboard')
  assert script.page(runs.read_rows(ROOT / 'docs' / 'results')) == script.PAGE.read_text()


def test_leaderboard_tells_reaching_a_target_from_keeping_it():
  script = _script('leaderboard')
  rows = [
    {'environment': 'cartpole', 'agent': 'dreamer', 'label': 'default', 'budget': 15_000, 'seed': seed,
     'time': script.SINCE, 'curve': curve, 'final': curve[-1], 'sampled': 0.0, 'cpu_minutes': 3.0,
     'steps': 15_000, 'commit': 'abc'}
    for seed, curve in enumerate(([9.0] * 4 + [460.0] + [20.0] * 5, [9.0] * 6 + [500.0] * 4))
  ]  # fmt: skip
  line = next(line for line in script.page(rows).splitlines() if line.startswith('| cartpole'))
  assert '| 450 | 2, 1 of 2 | 9,000 | 260 |' in line


def test_gallery_renders_an_environment_without_script():
  gallery = _script('gallery')
  shown = list(itertools.islice(gallery.frames('noisy_corridor'), 4))
  assert {frame.shape for frame in shown} == {(32, 320, 3)}
  assert any((frame != shown[0]).any() for frame in shown)
