"""The site of docs/, its gallery and its tables of results."""

import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys

import pytest

from hephaestus.actors import environments
from hephaestus.launch.bench.learning import runs

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_site_builds_without_a_warning(tmp_path):
  """Broken links and anchors, unlisted pages and unknown names of the reference are warnings."""
  pytest.importorskip('mkdocs', reason='of the extra docs, which has packages for Python 3.10')
  built = subprocess.run(
    [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(tmp_path)],
    cwd=ROOT / 'docs' / 'site', env={**os.environ, 'NO_MKDOCS_2_WARNING': 'true'},
    capture_output=True, text=True,
  )  # fmt: skip
  assert built.returncode == 0 and 'WARNING' not in built.stderr, built.stderr
  reference = (tmp_path / 'reference' / 'interface.html').read_text()
  assert 'id="hephaestus.launch.interface.training.train"' in reference


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


def test_all_tables_of_results_are_made_from_the_rows():
  script, rows = _script('results'), runs.read_rows(ROOT / 'docs' / 'results')
  for path in script.PAGES:
    assert script.page(path, rows) == path.read_text()


def test_rows_of_one_environment_and_agent_are_of_one_commit():
  rows = runs.read_rows(ROOT / 'docs' / 'results')
  assert _script('results').newest(rows) == rows


def test_leaderboard_tells_reaching_a_target_from_keeping_it():
  script = _script('results')
  rows = [
    {'environment': 'cartpole', 'agent': 'dreamer', 'label': 'default', 'budget': 15_000, 'seed': seed, 'curve': curve,
     'time': 1.0, 'commit': script.MEASURED[0], 'final': curve[-1], 'sampled': 0.0, 'cpu_minutes': 3.0}
    for seed, curve in enumerate(([9.0] * 4 + [460.0] + [20.0] * 5, [9.0] * 6 + [500.0] * 4))
  ]  # fmt: skip
  (line,) = script.leaderboard(rows)[1:]
  assert line[:5] == ('cartpole', '15,000', '450', '2, 1 of 2: 9,000', '–')
  (line,) = script.readme(rows)[1:]
  assert line == ('CartPole', '15,000', '2, 0, 0', '260 (20.0 to 500)', '–', '–')


def test_gallery_renders_an_environment_without_script():
  gallery = _script('gallery')
  shown = list(itertools.islice(gallery.frames('noisy_corridor'), 4))
  assert {frame.shape for frame in shown} == {(32, 320, 3)}
  assert any((frame != shown[0]).any() for frame in shown)
