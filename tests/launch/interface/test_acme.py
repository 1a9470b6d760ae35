"""Acme's core with ours: its environment loop plays a policy, and its loggers take a run's metrics."""

import json
import time

import pytest

import hephaestus
from hephaestus.actors import environments
from hephaestus.actors.environments import export
from hephaestus.launch import config
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib

acme = pytest.importorskip('acme')


def test_environment_loop_of_acme_plays_a_shipped_policy():
  from acme.utils import loggers

  environment = export.as_dm_env(environments.make('catch'), seed=0)
  spec = acme.make_environment_spec(environment)
  assert (spec.actions.num_values, spec.observations.shape) == (3, (50,))
  policy = hephaestus.load('catch')
  logger = loggers.InMemoryLogger()
  loop = acme.EnvironmentLoop(environment, policy.as_acme_actor(greedy=True), logger=logger)
  loop.run(num_episodes=8)
  assert [row['episode_return'] for row in logger.data] == [1.0] * 8  # a random policy: -0.6


def test_metrics_of_a_run_go_to_a_logger_of_acme(tmp_path):
  from acme.utils import loggers

  folder = tmp_path / 'run'
  folder_lib.open_run(folder, config.override(presets.ppo_laptop('catch'), []))
  rows = [{'learner_step': 1, 'episode_return': None}, {'learner_step': 2, 'ppo/entropy': 0.5}]
  (folder / 'metrics').mkdir(exist_ok=True)
  (folder / 'metrics' / 'learner.jsonl').write_text(
    ''.join(json.dumps({'time': time.time(), **row}) + '\n' for row in rows)
  )
  logger = loggers.InMemoryLogger()
  run = hephaestus.Run(folder)
  run.log_to(logger)
  first, second = logger.data
  assert (first['learner_step'], second['learner_step'], second['ppo/entropy']) == (1, 2, 0.5)
  with (tmp_path / 'curves.csv').open('a') as file:  # which needs the same keys in all rows
    table = loggers.CSVLogger(file, add_uid=False)
    run.log_to(table)
    table.close()
  assert len((tmp_path / 'curves.csv').read_text().splitlines()) == 3
