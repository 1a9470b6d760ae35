"""Live inspection of a run: one report for all views, also where parts of a run are missing."""

import io
import itertools
import json
import re
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest
import rich.console

from hephaestus.launch import config, main
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.inspect import live, terminal
from hephaestus.replay import checkpoint, inspector, tables, writer

SCHEMA = {'x': jax.ShapeDtypeStruct((250,), np.float32)}  # 1 kB


@pytest.fixture(scope='module')
def made():
  return config.override(presets.laptop('catch'), ['replay.warm_up=4', 'actor.num_actors=2'])


class Run:
  """A run's folder with a replay server; the test writes the metrics of its nodes."""

  def __init__(self, folder, made):
    folder_lib.open_run(folder, made)
    self.folder, self.strata = folder, made.replay.strata
    self.server = tables.make_server(
      tables.make_tables(made.replay, SCHEMA, batch_size=8, insert_size=10_000)
    )
    self.address = f'localhost:{self.server.port}'
    (folder / 'address').write_text(self.address)

  def insert(self, count):
    entry = writer.Writer(self.address, self.strata, SCHEMA)
    entry.write({'x': np.zeros((count, 250), np.float32)}, lambda: False)
    entry.close()

  def write(self, node, *rows):
    """Rows of (seconds ago, values)."""
    path = self.folder / 'metrics' / f'{node}.jsonl'
    lines = [json.dumps({'time': time.time() - ago, **row}) for ago, row in rows]
    path.write_text('\n'.join(lines) + '\n')
    return path


@pytest.fixture
def run(tmp_path, made):
  started = Run(tmp_path / 'run', made)
  yield started
  started.server.stop()


@pytest.fixture
def nodes(run):
  """A learner at step 500, two actors that wait most of the time, and one of before the run was resumed with two."""
  actor = lambda version, throttled: {'parameter_version': version, 'throttled_fraction': throttled}
  run.write('learner', (30, {'learner_step': 400, 'starved_fraction': 0.5}),
            (0, {'learner_step': 500, 'starved_fraction': 0.0}))  # fmt: skip
  run.write('actor-0', (300, actor(0, 0.0)), (40, actor(480, 0.0)), (0, actor(496, 0.9)))
  run.write('actor-1', (20, actor(470, 0.8)))
  run.write('actor-2', (5000, actor(3, 0.0)))
  return run


def report_on(run):
  """The second report, which has rates."""
  inspection = live.Inspection(str(run.folder))
  inspection.report()
  return inspection.report()


def inspect(*arguments):
  return main.run(main.parse(['hephaestus', 'inspect', *map(str, arguments)]))


def test_report_names_bottleneck_of_last_minute(nodes, made):
  nodes.insert(6)
  report = report_on(nodes)
  # A row is weighted by the time since the row before: 30 of 60 seconds; 40 of 60, and all.
  assert report.learner_starved_fraction == pytest.approx(0.25, abs=0.05)
  assert report.actors_throttled_fraction == pytest.approx((0.6 + 0.8) / 2, abs=0.05)
  words = r'actors throttled (\d+) % of the last minute: the learner is the bottleneck'
  (percent,) = re.fullmatch(words, report.bottleneck).groups()
  assert int(percent) == round(100 * report.actors_throttled_fraction)
  assert report.parameter_version == 496
  assert report.staleness == {'newest_updates': 4, 'oldest_updates': 30}
  assert report.environment_step == 6 * made.steps_per_sequence
  assert report.replay_ratio['configured'] == 64.0
  assert report.seconds is not None and report.address == nodes.address


@pytest.mark.parametrize(
  ('starved', 'throttled', 'words'),
  [
    (0.96, 0.9, 'the actors are the bottleneck'),
    (0.001, 0.0, 'neither actors nor the learner wait'),
  ],
)
def test_report_names_actors_as_bottleneck_of_starved_learner(nodes, starved, throttled, words):
  nodes.write('learner', (0, {'learner_step': 500, 'starved_fraction': starved}))
  for actor in ('actor-0', 'actor-1'):
    nodes.write(actor, (0, {'parameter_version': 1, 'throttled_fraction': throttled}))
  assert live.Inspection(str(nodes.folder)).report().bottleneck.endswith(words)


def test_json_report_has_its_public_keys(nodes, capsys):
  nodes.insert(6)
  assert inspect(nodes.folder, '--json') == 0
  report = json.loads(capsys.readouterr().out)
  counts = {'size': 6, 'max_size': 50_000, 'inserted': 6, 'sampled': 0, 'unique_sampled': 0}
  assert report['tables']['episodic'].items() >= counts.items()
  assert report['replay_ratio'].keys() >= {'configured', 'achieved'}
  assert report.keys() >= {
    'parameter_version', 'environment_step', 'learner_starved_fraction',
    'actors_throttled_fraction', 'staleness',
  }  # fmt: skip


def test_report_sums_shards_and_names_lost_shard(run, made):
  other = Run(run.folder.parent / 'other', made)
  (run.folder / 'address').write_text(f'{run.address}\n{other.address}')
  run.insert(6)
  other.insert(10)
  inspection = live.Inspection(str(run.folder), timeout_seconds=1.0)
  report = inspection.report()
  row = report.tables['episodic']
  assert (row['size'], row['inserted'], row['max_size']) == (16, 16, 100_000)
  assert row['bytes'] == 16 * 1000 and report.environment_step == 16 * made.steps_per_sequence
  assert [shard['tables']['episodic']['size'] for shard in report.shards] == [6, 10]
  assert report.limiter == {'table': 'episodic', 'state': 'open', 'missing': 0}
  assert inspection.report().tables['episodic']['inserts_per_second'] == 0

  other.server.stop()
  report = inspection.report()
  assert [shard['alive'] for shard in report.shards] == [True, False]
  assert report.tables['episodic']['size'] == 6
  assert report.environment_step == 16 * made.steps_per_sequence  # does not go back
  screen = io.StringIO()
  terminal.show(report, rich.console.Console(file=screen, width=120))
  assert f'1 of 2 answer; no answer: {other.address}' in screen.getvalue()
  assert '1: no answer' in screen.getvalue() and '0: episodic' in screen.getvalue()


@pytest.fixture
def held(run):
  """A full frontier, and what the learner has told of the ages of its strata."""
  run.insert(600)
  ages = {
    f'replay/{stratum}/age/{name}': value
    for stratum, values in (('frontier', (4, 8, 20, 30, 40)), ('episodic', (4, 20, 50, 80, 90)))
    for name, value in zip(inspector.QUANTILES, values, strict=True)
  }
  run.write('learner', (0, {'learner_step': 100, 'starved_fraction': 0.0, **ages}))
  return run


@pytest.mark.parametrize('width', [80, 160])
def test_report_needs_no_sample_and_fits_terminal(held, width):
  report = report_on(held)
  assert report.ages['frontier']['median'] == 20
  assert all(row['sampled'] == 0 for row in report.tables.values())
  screen = io.StringIO()
  terminal.show(report, rich.console.Console(file=screen, width=width, height=50))
  shown = screen.getvalue()
  assert '50,000' in shown and '600.0 kB' in shown and '4 to 90 updates, median 50' in shown
  assert '…' not in shown and max(map(len, shown.splitlines())) <= width
  assert ('sampled ' in shown.splitlines()[0]) == (width == 160)


def test_server_without_run_is_reported(run, capsys):
  assert inspect(run.address) == 0
  printed = capsys.readouterr().out
  assert 'blocks sampling until 4 more sequences are inserted' in printed
  assert 'neither actors nor the learner wait' in printed and 'environment steps' not in printed
  assert 'published 0 times' in printed


def test_error_names_reason_of_unreachable_server(tmp_path, made):
  folder = tmp_path / 'run'
  folder_lib.open_run(folder, made)
  (folder / 'address').write_text('localhost:1')
  unreachable = live.Inspection(str(folder), timeout_seconds=1.0)
  resume = f'; the run is not running, resume it with: hephaestus train --run {folder}'
  with pytest.raises(ConnectionError, match=re.escape(resume)):
    unreachable.report()
  with folder_lib.only_one(folder), pytest.raises(ConnectionError, match='the run is running: '):
    unreachable.report()


@pytest.fixture
def stopped(tmp_path, made):
  """A run that has ended: metrics, and a checkpoint of replay with 6 of 8 inserted sequences."""
  made = config.override(made, ['replay.strata[0].max_size=6'])
  folder = tmp_path / 'run'
  folder_lib.open_run(folder, made)
  made_tables = tables.make_tables(made.replay, SCHEMA, batch_size=8, insert_size=10_000)
  server = tables.make_server(made_tables, directory=str(folder / 'replay'))
  address = f'localhost:{server.port}'
  (folder / 'address').write_text(address)
  entry = writer.Writer(address, made.replay.strata, SCHEMA)
  entry.write({'x': np.zeros((8, 250), np.float32)}, lambda: False)
  entry.close()
  checkpoint.save(server.localhost_client(), str(folder / 'replay'))
  server.stop()
  row = {'learner_step': 500, 'environment_step': 900, 'lost_steps': 652, 'starved_fraction': 0.0}
  row['intrinsic/vital_food'] = 0.5
  line = json.dumps({'time': time.time(), **row}) + '\n'
  (folder / 'metrics' / 'learner.jsonl').write_text(16 * line)
  return folder


def test_stopped_run_shows_its_newest_checkpoint_and_metrics(stopped, capsys):
  folder = stopped
  assert inspect(folder, '--json') == 0
  report = json.loads(capsys.readouterr().out)
  assert not report['running'] and abs(report['saved'] - time.time()) < 60
  sizes = {name: (row['size'], row['inserted']) for name, row in report['tables'].items()}
  assert sizes == {'frontier': (6, 8), 'episodic': (8, 8), 'params': (0, 0)}
  assert (report['environment_step'], report['lost_steps']) == (900, 652)
  (warning,) = report['warnings']
  assert warning.startswith('vital food stays at 0.5: nothing changes it')
  assert inspect(folder) == 0
  shown = ' '.join(capsys.readouterr().out.split())
  for words in ('the run is not running', '900, 652 of them lost by replay', warning):
    assert words in shown


def interrupted_after(monkeypatch, count, between=lambda index: None):
  """Interrupts `terminal.watch` after some reports."""
  reports = terminal._reports

  def some(target, period):
    for index, report in enumerate(itertools.islice(reports(target, period), count)):
      between(index)
      yield report
    raise KeyboardInterrupt

  monkeypatch.setattr(terminal, '_reports', some)


def test_watch_prints_a_line_for_each_report(nodes, monkeypatch, capsys):
  interrupted_after(monkeypatch, 2, lambda index: nodes.insert(3))
  assert inspect(nodes.folder, '--watch', 0.01) == 0
  first, second, last = capsys.readouterr().out.splitlines()
  assert 'episodic 0/50,000' in first and 'throttled -' in first
  assert 'episodic 3/50,000' in second and 'inserts/s' in second and last == 'stopped'
  assert inspect(nodes.folder, '--watch', 0.01, '--json') == 0
  lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [line['tables']['episodic']['size'] for line in lines] == [6, 9]


def test_watch_retries_lost_server(run, made, monkeypatch, capsys):
  # The restarted server has another address, as in a run.
  other = Run(run.folder.parent / 'other', made)
  polls = []

  def change(index):
    polls.append(index)
    if index == 0:
      (run.folder / 'address').write_text('localhost:1')
    if index == 1:
      (run.folder / 'address').write_text(other.address)

  monkeypatch.setattr(live.Inspection.__init__, '__defaults__', (1.0,))
  interrupted_after(monkeypatch, 3, change)
  assert inspect(run.folder, '--watch', 0.01) == 0
  other.server.stop()
  lines = capsys.readouterr().out.splitlines()
  assert 'no replay server answered at localhost:1' in lines[1]
  assert lines[1].endswith('retrying')
  assert 'episodic 0/50,000' in lines[2] and lines[3] == 'stopped'


def test_watch_ends_when_folder_is_deleted(run, monkeypatch, capsys):
  interrupted_after(monkeypatch, 2, lambda index: shutil.rmtree(run.folder))
  assert inspect(run.folder, '--watch', 0.01) == 2
  message = capsys.readouterr().err
  assert 'run: the folder is gone, or no longer one of a run' in message


def test_ctrl_c_ends_watch_during_a_call(monkeypatch, capsys):
  # Reverb's client crashes the process when Ctrl-C interrupts it in the main thread. A server that
  # does not answer keeps the watch within a call nearly all of the time.
  monkeypatch.setattr(live.Inspection.__init__, '__defaults__', (2.0,))
  called = threading.Event()
  poll = inspector.Inspector.poll

  def note_call(self):
    called.set()
    return poll(self)

  def press_ctrl_c():
    called.wait()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

  monkeypatch.setattr(inspector.Inspector, 'poll', note_call)
  threading.Thread(target=press_ctrl_c, daemon=True).start()
  assert inspect('localhost:1', '--watch', 0.01) == 0
  assert capsys.readouterr().out.splitlines()[-1] == 'stopped'


@pytest.mark.parametrize(
  ('options', 'key'),
  [
    (['--watch', 0], '--watch 0: '),
    (['--watch', 1, '--check'], '--watch: '),
  ],
)
def test_impossible_options_are_refused(nodes, capsys, options, key):
  assert inspect(nodes.folder, *options) == 2
  assert key in capsys.readouterr().err
