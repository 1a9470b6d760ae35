"""An actor: its metrics, of episodes of the task's policy and of an explorer, and its restart."""

import types

import numpy as np
import pytest

from hephaestus.actors import actor, rollout
from hephaestus.actors import config as actors_config
from hephaestus.actors.environments import catch
from hephaestus.replay import parameters

CONFIG = actors_config.ActorConfig(num_envs=3, sequence_length=2)


def report(explores):
  """Metrics of one step of three environments, whose episodes end with the returns 1, 2 and 6."""
  window = actor._Window()
  ended, returns = np.ones((1, 3), bool), np.array([[1.0, 2.0, 6.0]])
  metrics = {'environment/keys': 2 * returns}
  explored, everywhere = np.array([explores]), np.all(explores)
  window.add(rollout.Episodes(ended, returns, 5 * ended, explored, everywhere, metrics), CONFIG)
  window.start -= 60
  return window.report(3, 0)


@pytest.mark.parametrize(
  ('explores', 'episodes', 'of_task', 'of_explorer'),
  [
    ([False, False, False], 3, 3.0, None),
    ([True, False, False], 2, 4.0, 1.0),
    ([True, True, True], 3, 3.0, 3.0),  # there is no other episode to report
  ],
)
def test_episode_return_is_the_tasks_unless_all_environments_explore(
  explores, episodes, of_task, of_explorer
):
  row = report(explores)
  assert row['episodes_per_minute'] == pytest.approx(3, abs=0.5)  # of task and explorer
  assert row['episodes'] == episodes and row['episode_return'] == of_task
  assert row['environment/keys'] == 2 * of_task
  assert row.get('explorer_return') == of_explorer


def test_restarted_actor_does_not_repeat_its_episodes():
  environment = catch.Catch()
  agent = rollout.random_agent(environment.action_spec)
  snapshot = parameters.Snapshot(version=5, environment_step=0, ended_launch=0, params=())

  def first_identities(environment_step):
    written = []
    writer = types.SimpleNamespace(
      write=lambda sequence, give_up: written.append(sequence) or 0.0, close=lambda: None
    )
    source = types.SimpleNamespace(newest=lambda timeout_seconds: snapshot)
    actor.Actor(
      unroll=rollout.make_unroll(environment, agent, num_envs=3, sequence_length=2),
      replay=actor.ReplayConnections(source, writer, lambda: environment_step),
      identity=actor.Identity(actor_id=0, seed=3, launch_id=1),
      config=CONFIG,
      logger=types.SimpleNamespace(close=lambda: None),
      should_stop=lambda: bool(written),
    ).run()
    return set(written[0].identity.tolist())

  assert first_identities(0) == first_identities(None)
  assert not first_identities(0) & first_identities(496)
