"""The notebook of the guide: it runs from its first cell to its last, and is stored as it ran."""

import pathlib

import pytest

nbformat = pytest.importorskip('nbformat', reason='of the extra dev')
nbclient = pytest.importorskip('nbclient', reason='of the extra dev')

NOTEBOOK = pathlib.Path(__file__).parents[1] / 'docs' / 'hephaestus.ipynb'


def shown(notebook):
  """The kinds of content that the cells show, such as 'image/png'."""
  outputs = [output for cell in notebook.cells for output in cell.get('outputs', ())]
  return {kind for output in outputs for kind in output.get('data', ())}


@pytest.mark.slow
def test_notebook_trains_acts_and_shows_curves_and_video(tmp_path, monkeypatch):
  monkeypatch.delenv('XLA_FLAGS', raising=False)  # one device, as a reader has
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  for cell in notebook.cells:
    cell.pop('outputs', None)
    if cell.cell_type == 'code':
      cell.outputs = []
      # Training takes most of the time.
      cell.source = cell.source.replace('400_000', '8_000').replace('20_000', '4_000')
  resources = {'metadata': {'path': str(tmp_path)}}
  nbclient.NotebookClient(notebook, timeout=280, resources=resources).execute()
  assert {'image/png', 'image/gif'} <= shown(notebook)
  assert (tmp_path / 'runs' / 'notebook' / 'config.yaml').exists()


def test_stored_notebook_shows_what_it_printed_and_is_small():
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  nbformat.validate(notebook)
  assert {'image/png', 'image/gif'} <= shown(notebook)
  cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  assert NOTEBOOK.stat().st_size < 300_000
