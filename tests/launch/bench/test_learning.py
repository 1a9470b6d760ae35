"""The learning bench: curves, retention and target scores by worked examples, and a real run of one environment."""

import json

import numpy as np
import pytest

from hephaestus.actors import environments
from hephaestus.launch import main
from hephaestus.launch.bench.learning import runs, scores, suite, table
from hephaestus.launch.files import metrics

TINY = [
  'agent.hidden_size=16', 'agent.num_layers=1', 'actor.num_envs=32', 'actor.sequence_length=33',
  'learner.num_minibatches=2',
]  # fmt: skip
CATCH = suite.chosen(['catch'])[0]


def call(*arguments):
  """Runs a command in this process; returns its exit code."""
  return main.run(main.parse(['hephaestus', *map(str, arguments)]))


def test_a_span_counts_in_each_tenth_by_its_share():
  spans = [scores.Ended(0, 10, 5, 1.0), scores.Ended(10, 25, 6, 0.0), scores.Ended(25, 30, 2, 3.0)]
  # From 20 to 30: 6 * 5 / 15 = 2 episodes of 0, and 2 of 3.
  assert scores.curve(spans, 100, 30)[:3] == pytest.approx([1.0, 0.0, 1.5])


def test_tenths_without_episodes_have_the_mean_before_and_none_before_the_first_or_after_the_end():
  spans = [scores.Ended(20, 30, 1, 2.0), scores.Ended(50, 60, 1, 4.0)]
  found = scores.curve(spans, 100, 75)
  assert found == [None, None, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, None, None]
  assert scores.curve([], 100, 75) == [None] * 10


def test_steps_beyond_the_budget_are_left_out():
  found = scores.curve([scores.Ended(0, 50, 5, 0.0), scores.Ended(50, 200, 15, 1.0)], 100, 200)
  assert found == [0.0] * 5 + [1.0] * 5


@pytest.mark.parametrize(
  ('points', 'base', 'expected'),
  [
    ([0, 0, 0.5, 1, 1, 1, 1, 1, 1, 1], 0.0, 1.0),  # learned and kept
    ([0, 0, 0.5, 1, 1, 1, 1, 1, 0.5, 0.5], 0.0, 0.5),  # lost a half
    ([0.9, 0.9, 0.9, 0, 0, 0, 0, 0, 0, 0], -0.6, 0.4),  # learned at once, then lost
    ([-1200, -1000, -600, -200, -200, -300, -300, -300, -400, -400], -1200, 0.8),  # negative
    ([0, 0, 1, 1, 1, 0, 0, 0, -1, -1], 0.0, -1.0),  # worse than a random policy
    ([22, 23, 24, 22, 21, 23, 22, 20, 20, 20], 22.0, 1.0),  # noise: 10 % of 23.5 was not gained
  ],
)
def test_retention_is_on_a_scale_from_the_random_policy(points, base, expected):
  assert scores.retention(points, base) == pytest.approx(expected)


def test_retention_of_a_gain_far_below_the_target_is_as_if_nothing_was_learned():
  points = [-0.006] * 4 + [0.01] * 2 + [-0.006] * 4
  assert scores.retention(points, -0.006) < 0.1
  assert scores.retention(points, -0.006, target=0.49) == 1.0


def test_target_is_reached_in_the_tenth_that_ends_at_its_step():
  early = [0.0] * 4 + [0.95] + [0.0] * 5  # 8,000 steps: the fifth ends at 4,000
  assert scores.reaches_target(CATCH, early, sampled=None)
  assert not scores.reaches_target(CATCH, early[::-1], sampled=1.0)
  assert not scores.reaches_target(CATCH, [1.0] * 4 + [None] * 6, sampled=None)
  (cartpole, umbrella, snake) = suite.chosen(['cartpole', 'umbrella_chain_20', 'snake'])
  assert scores.reaches_target(cartpole, [0.0] * 9 + [450.0], sampled=0.0)
  assert scores.reaches_target(umbrella, [0.0] * 10, sampled=0.9)  # evaluated
  assert scores.reaches_target(snake, [9.0] * 10, sampled=9.0) is None


def test_comparison_with_ppo_is_by_its_median_at_equal_steps():
  (grid, breakout) = suite.chosen(['grid_world_8', 'breakout'])
  ours = [0.0, 0.0, 0.0, 3.0, 0.0, 3.0, 0.0, 0.0, 0.0, 3.0]  # at 10,000, 15,000 and 25,000
  theirs = [[1.0] * 10, [2.0] * 10, [8.0] * 10]
  assert scores.beats_ppo(grid, ours, theirs)
  assert not scores.beats_ppo(grid, [*ours[1:], 3.0], theirs)
  assert not scores.beats_ppo(breakout, ours, theirs)  # 3 is not above 2 x 2
  assert scores.beats_ppo(breakout, [4.1] * 10, theirs)
  assert scores.beats_ppo(breakout, ours, []) is None
  assert scores.beats_ppo(CATCH, ours, theirs) is None


def test_resumed_runs_repeat_no_episodes_and_actors_add_up(tmp_path):
  rows = {
    'actor-0': [(100, 2, 1.0), (200, 2, 9.0), (150, 1, 3.0), (200, 2, 5.0)],
    'actor-1': [(None, 4, 7.0), (180, 0, None), (210, 3, 2.0)],
  }
  for name, found in rows.items():
    logger = metrics.JsonLines(tmp_path / 'metrics' / f'{name}.jsonl')
    for step, episodes, mean in found:
      logger.write({'environment_step': step, 'episodes': episodes, 'episode_return': mean})
    logger.close()
  spans, last_step = scores.read(tmp_path)
  assert spans == [(0, 100, 2, 1.0), (100, 150, 1, 3.0), (150, 200, 2, 5.0), (180, 210, 3, 2.0)]
  assert last_step == 210


def test_every_task_names_an_environment_with_its_options():
  names = [task.name for task in suite.SUITE]
  assert len(set(names)) == len(names) == 23
  for task in suite.SUITE:
    if task.options:  # the import of packages without any takes long
      environments.make(task.environment, **task.options)
    for step in (task.target_step, *task.ppo_steps):
      assert step is None or step * suite.NUM_POINTS % task.steps == 0


def row(name='catch', agent='ppo', seed=0, **more):
  """A row of results, without what tables do not read."""
  task = suite.chosen([name])[0]
  return {
    'environment': name, 'agent': agent, 'seed': seed, 'label': 'default', 'budget': task.steps,
    'curve': [0.5] * 10, 'final': 0.5, 'area': 0.5, 'retention': 1.0, 'greedy': 0.5, 'sampled': 0.5,
    'random': 0.0, 'reached': False, 'cpu_minutes': 2.0,
    'settings': runs.Settings('').recorded(), **more,
  }  # fmt: skip


def write_rows(out, *rows):
  logger = metrics.JsonLines(out / runs.ROWS)
  for each in rows:
    logger.write(each)
  logger.close()


def test_runs_with_a_row_of_the_same_budget_and_label_are_skipped(tmp_path):
  asked = [runs.SuiteRun(CATCH, agent, seed) for agent in ('dreamer', 'ppo') for seed in (0, 1)]
  settings = runs.Settings(tmp_path)
  assert runs.missing(asked, settings) == asked
  write_rows(
    tmp_path, row(seed=0), row(agent='dreamer', seed=1, budget=1), row(seed=1, label='other')
  )
  assert runs.missing(asked, settings) == [asked[0], asked[1], asked[3]]


def test_rows_of_other_settings_under_a_label_are_refused(tmp_path):
  write_rows(tmp_path, row())
  changed = runs.Settings(tmp_path, overrides=['agent.gamma=0.9'])
  with pytest.raises(ValueError, match=r'--label default: .* has rows of other settings'):
    runs.missing([], changed)
  assert runs.missing([], changed._replace(label='gamma')) == []


def test_table_has_medians_and_ranges_by_agent_and_label():
  rows = [row(seed=seed, final=final) for seed, final in ((0, 0.2), (1, 0.4), (2, 0.9))]
  rows += [row(agent='dreamer', reached=True), row(agent='dreamer', label='small')]
  lines = table.markdown(rows).splitlines()[2:5]
  assert lines[0].startswith('| catch | 8,000 | dreamer | 1 | 0.50 | ')
  assert '| 0.95 by 4,000 | 1/1 |' in lines[0]
  assert '| dreamer, small |' in lines[1]
  assert '| ppo | 3 | 0.40 (0.20 to 0.90) |' in lines[2]


def test_table_compares_with_ppo_of_the_default_settings():
  rows = [row('breakout'), row('breakout', 'dreamer', label='small', curve=[2.0] * 10)]
  assert '| 2 x PPO | 1/1 |' in table.markdown(rows)
  assert '| 2 x PPO | – |' in table.markdown(rows[1:])


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    (['--environments', 'catch', 'pong'], '--environments pong'),
    (['--preset', 'lap'], '--preset lap'),
    (['--set', 'environment.size=3'], '--set environment.size=3'),
    (['--set', 'agent.gama=3'], 'agent.gama=3'),
    (['--label', 'a/b'], '--label a/b'),
    (['--jobs', '0'], '--jobs 0'),
    (['--agents', 'a3c'], "agent_name='a3c'"),
  ],
)
def test_bad_input_is_named(capsys, tmp_path, arguments, expected):
  assert call('bench', 'learning', '--out', tmp_path, *arguments) == 2
  message = capsys.readouterr().err
  assert expected in message and message.count('\n') == 1
  assert not list(tmp_path.iterdir())


@pytest.mark.faults
def test_run_has_one_row_and_is_not_trained_again(tmp_path, monkeypatch, capsys):
  monkeypatch.delenv('XLA_FLAGS', raising=False)  # so that it has one device
  out = tmp_path / 'results'
  command = [
    'bench', 'learning', '--environments', 'catch', '--agents', 'ppo', '--seeds', '0', '--jobs', '1',
    '--out', out, '--set', *TINY,
  ]  # fmt: skip
  assert call(*command) == 0
  shown = capsys.readouterr()
  assert '[1/1] catch ppo seed 0: ' in shown.err
  assert '| catch | 8,000 | ppo | 1 | ' in shown.out
  assert (out / 'results.md').read_text() == shown.out
  (found,) = metrics.read(out / runs.ROWS)
  names = ('environment', 'agent', 'seed', 'label')
  assert tuple(found[name] for name in names) == ('catch', 'ppo', 0, 'default')
  assert CATCH.steps <= found['steps'] < CATCH.steps + 32 * 32
  assert len(found['curve']) == suite.NUM_POINTS and found['final'] == found['curve'][-1]
  assert found['area'] == pytest.approx(np.mean(found['curve']))
  assert all(-1 <= found[name] <= 1 for name in ('greedy', 'sampled', 'random'))
  assert found['episodes'] > 0.8 * CATCH.steps / 10  # each takes 9 steps, and one to reset
  assert 0 < found['cpu_minutes'] <= 1.1 * found['wall_minutes']  # on one core
  assert found['settings'] == {'preset': 'laptop', 'set': TINY}
  assert set(found['versions']) == {'python', 'jax', 'hephaestus'}
  assert found['reached'] is False and found['target'] == 0.95
  assert call(*command) == 0
  again = capsys.readouterr()
  assert again.out == shown.out and 'to do' not in again.err
  assert call('bench', 'learning', '--table', '--json', '--out', out) == 0
  assert json.loads(capsys.readouterr().out) == [found]
  # A row that is lost is made again from the finished run.
  (out / runs.ROWS).unlink()
  assert call(*command) == 0
  (after,) = metrics.read(out / runs.ROWS)
  assert after['curve'] == found['curve'] and after['greedy'] == found['greedy']
  assert after['cpu_minutes'] > found['cpu_minutes']
