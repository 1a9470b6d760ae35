"""The training loop on a real replay server: it stops anywhere, and resumes from there."""

import dataclasses
import json
import pathlib
import threading
import types

import jax
import numpy as np
import portpicker
import pytest
import reverb
import tiny

from hephaestus.actors import actor, environments, rollout
from hephaestus.actors import config as actors_config
from hephaestus.agents import agent as agent_lib
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry
from hephaestus.launch.files import metrics
from hephaestus.learner import advice, checkpoint, devices, dreamer_update, loop
from hephaestus.learner import config as learner_config
from hephaestus.learner.sources import collected, replayed, sampled
from hephaestus.replay import checkpoint as replay_checkpoint
from hephaestus.replay import connection, parameters, reader, tables, writer

NUM_WORLDS, NUM_ROWS, BATCH = 4, 6, 8
REPLAY = tables.ReplayConfig(
  strata=(
    tables.Stratum(name='frontier', max_size=16, share=0.5),
    tables.Stratum(name='episodic', max_size=1000, share=0.5),
  ),
  replay_ratio=16.0,
  warm_up=4,
  max_in_flight=1,
)
LEARNER = learner_config.LearnerConfig(batch_size=BATCH, publish_period=2, log_period=5)


def update(state, batch):
  """Moves all parameters by what replay holds; the agent's own update would take longer to compile."""
  reward = jax.lax.pmean(batch.reward.mean(), devices.DEVICES)
  params = jax.tree.map(lambda x: x + 1e-3 * (2 + reward), state.params)
  return state._replace(params=params, step=state.step + 1), {'reward': reward}


class Parts:
  """Environment, agent and programs of all runs, traced and compiled once."""

  def __init__(self):
    environment = environments.make('catch', **tiny.CATCH)
    self.dreamer = registry.make_dreamer(
      cognition_config.CognitionConfig(**tiny.DREAMER, warm_up_updates=3),
      environment.observation_spec,
      environment.action_spec,
    )
    agent = self.dreamer.agent
    self.unroll = rollout.make_unroll(
      environment, agent, num_envs=NUM_WORLDS, sequence_length=NUM_ROWS
    )
    self.params_schema = jax.eval_shape(
      lambda: agent.acting_params(agent.init_params(jax.random.key(0)))
    )
    self.schema = rollout.sequence_schema(self.unroll, self.params_schema)
    made = dreamer_update.make_update(self.dreamer, LEARNER)
    self.update = types.SimpleNamespace(init=jax.jit(made.init), update=update)


@pytest.fixture(scope='module')
def parts():
  return Parts()


class Run:
  """Replay, one actor in a thread, and successive learners on one folder."""

  def __init__(self, folder: pathlib.Path, parts: Parts):
    self.folder = folder
    self.parts = parts
    self.port = portpicker.pick_unused_port()
    self.address = f'127.0.0.1:{self.port}'
    self.server = None
    self.start_server()

  def start_server(self):
    made = tables.make_tables(REPLAY, self.parts.schema, batch_size=BATCH, insert_size=NUM_WORLDS)
    self.server = tables.make_server(made, port=self.port, directory=str(self.folder / 'replay'))

  def stop_server(self):
    self.server.stop()
    self.server = None

  def counts(self):
    infos = connection.Connection(self.address, 'test').info()
    return {
      name: (info.current_size, info.rate_limiter_info.insert_stats.completed)
      for name, info in infos.items()
      if name != tables.PARAMS
    }

  def inserted(self):
    infos = connection.Connection(self.address, 'test').info()
    return None if infos is None else infos['episodic'].rate_limiter_info.insert_stats.completed

  def make_learner(self, should_stop, max_environment_steps=10**9):
    client = reverb.Client(self.address)
    read = reader.Reader(
      self.address, REPLAY.strata, self.parts.schema, batch_size=BATCH, max_in_flight=1, prefetch=1
    )
    publisher = parameters.Publisher(self.address, self.parts.params_schema)
    source = replayed.FromReplay(
      sampled.Trained(self.parts.update, self.parts.dreamer.agent.acting_params),
      sampled.Link(read, publisher, launch_id=1, should_stop=should_stop),
      replayed.Experience(
        save=lambda: replay_checkpoint.save(client, str(self.folder / 'replay')),
        collected=collected.Collected(
          self.address,
          'learner',
          stratum='episodic',
          steps_per_sequence=NUM_ROWS - 1,
          file=self.folder / 'collected.json',
        ),
        steps_per_batch=BATCH * (NUM_ROWS - 1),
        warm_up_steps=REPLAY.warm_up * (NUM_ROWS - 1),
      ),
      publish_period=LEARNER.publish_period,
      devices=jax.local_devices()[:1],
    )
    make_logger = lambda step: metrics.make_logger(
      self.folder, 'learner', steps_key='learner_step', resume=('learner_step', step)
    )
    return loop.Loop(
      source,
      LEARNER,
      loop.Hooks(should_stop=should_stop, make_logger=make_logger),
      max_environment_steps=max_environment_steps,
      checkpointer=checkpoint.Checkpointer(self.folder / 'checkpoints'),
      seed=3,
    )

  def act(self):
    """Starts an actor; returns what stops it, or waits for it to end by itself."""
    stop = threading.Event()
    node = actor.Actor(
      unroll=self.parts.unroll,
      replay=actor.ReplayConnections(
        source=parameters.Subscription(self.address, self.parts.params_schema),
        writer=writer.Writer(self.address, REPLAY.strata, self.parts.schema),
        environment_step=lambda: (self.inserted() or 0) * (NUM_ROWS - 1),
      ),
      identity=actor.Identity(actor_id=0, seed=3, launch_id=1),
      config=actors_config.ActorConfig(
        num_envs=NUM_WORLDS, sequence_length=NUM_ROWS, log_period=0.01
      ),
      logger=metrics.make_logger(self.folder, 'actor-0', steps_key='environment_step'),
      should_stop=stop.is_set,
    )
    thread = threading.Thread(target=node.run)
    thread.start()

    def end(by_itself=False):
      if not by_itself:
        stop.set()
      thread.join(timeout=60)
      assert not thread.is_alive()

    return end


def rows_of(folder, name='learner'):
  return [json.loads(line) for line in (folder / 'metrics' / f'{name}.jsonl').open()]


def saved_state(run):
  like = jax.eval_shape(run.parts.update.init, jax.random.key(0))
  return checkpoint.Checkpointer(run.folder / 'checkpoints', read_only=True).restore(like)


def plain(state):
  return jax.tree.map(np.asarray, state)


def train(run, num_updates):
  """A learner that is asked to stop after so many updates of its own."""
  node = None
  start = None

  def should_stop():
    return node is not None and node.step >= start + num_updates

  node = run.make_learner(should_stop)
  start = node.step
  begun = plain(devices.first_replica(node.state))
  node.run()
  return node, begun


def test_interrupted_loop_resumes_where_it_stopped(tmp_path, parts):
  run = Run(tmp_path, parts)
  end_actor = run.act()
  first, _ = train(run, num_updates=13)
  end_actor()
  live = plain(devices.first_replica(first.state))
  saved = saved_state(run)
  assert saved.step == first.step == 13
  jax.tree.map(np.testing.assert_array_equal, plain(saved.state), live)
  assert int(saved.state.step) == saved.step

  # The actors stop before the learner saves, in a run; here they stopped after: save again.
  replay_checkpoint.save(reverb.Client(run.address), str(tmp_path / 'replay'))
  before = run.counts()
  run.stop_server()
  run.start_server()
  assert run.counts() == before

  end_actor = run.act()
  second, begun = train(run, num_updates=9)
  end_actor()
  jax.tree.map(np.testing.assert_array_equal, begun, live)
  assert second.step == 22
  assert run.inserted() >= before['episodic'][1]
  steps = [row['learner_step'] for row in rows_of(tmp_path)]
  assert steps == [5, 10, 13, 15, 20, 22]  # every five updates, and where it was stopped
  run.stop_server()


def test_loop_ends_at_its_budget_and_publishes_final_parameters(tmp_path, parts):
  run = Run(tmp_path, parts)
  end_actor = run.act()
  node = run.make_learner(lambda: False, max_environment_steps=400)
  node.run()
  end_actor(by_itself=True)
  snapshot = parameters.Subscription(run.address, run.parts.params_schema).newest()
  assert snapshot.ended_launch == 1
  assert snapshot.version == node.step
  assert snapshot.environment_step >= 400
  params = agent_lib.all_params(devices.first_replica(node.state))
  acting = run.parts.dreamer.agent.acting_params(params)
  jax.tree.map(np.testing.assert_array_equal, snapshot.params, acting)
  rows = rows_of(tmp_path)
  assert {'replay_ratio', 'starved_fraction', 'replayed_steps_per_second', 'environment_step',
          'rejected_sequences', 'reward'} <= set(rows[-1])  # fmt: skip
  # Actors fetched new parameters during training.
  versions = [row['parameter_version'] for row in rows_of(tmp_path, 'actor-0')]
  assert versions == sorted(versions) and len(set(versions)) > 1
  run.stop_server()


def test_failed_save_of_replay_is_a_warning_of_the_metrics(tmp_path, parts, monkeypatch):
  def fail(client, directory):
    raise OSError('the disk is gone')

  monkeypatch.setattr(replay_checkpoint, 'save', fail)
  monkeypatch.setitem(globals(), 'LEARNER', dataclasses.replace(LEARNER, checkpoint_updates=5))
  run = Run(tmp_path, parts)
  end_actor = run.act()
  train(run, num_updates=20)
  end_actor()
  run.stop_server()
  rows = rows_of(tmp_path)
  assert rows[0]['replay/failed_saves'] == 0 < rows[-1]['replay/failed_saves']
  assert not advice.of_replay(rows[:1]) and 'replay' in advice.of_replay(rows)


def test_last_checkpoint_does_not_wait_for_a_save_of_replay(tmp_path, parts, monkeypatch):
  """A save of replay takes minutes where it is large, and whoever stops a learner may kill it before."""
  saving, closing, waiting, found = (*(threading.Event() for _ in range(3)), [])
  close = sampled.Sampled.close

  def save(client, directory):
    saving.set()
    waiting.wait(20)
    found.append(is_saved())

  def note_and_close(source):
    closing.set()
    close(source)

  def should_stop():  # asked repeatedly while the source waits for this save
    if closing.is_set():
      waiting.set()
    return saving.is_set() and node.step % 5 > 0

  # A multiple of five is no last checkpoint.
  is_saved = lambda: any(step % 5 for step in checkpoint.saved_steps(tmp_path / 'checkpoints'))
  monkeypatch.setattr(replay_checkpoint, 'save', save)
  monkeypatch.setattr(sampled.Sampled, 'close', note_and_close)
  monkeypatch.setitem(globals(), 'LEARNER', dataclasses.replace(LEARNER, checkpoint_updates=5))
  run = Run(tmp_path, parts)
  end_actor = run.act()
  node = run.make_learner(should_stop)
  node.run()
  end_actor()
  run.stop_server()
  assert found == [True]  # and no other save followed


def test_loss_that_is_not_finite_raises_by_name():
  with pytest.raises(
    FloatingPointError, match=r'world_model/loss not finite.* the environment may give'
  ):
    loop.check_finite({'world_model/loss': float('nan'), 'dream/horizon': 3.0}, 7, LEARNER)


def test_batch_that_does_not_divide_is_refused():
  config = learner_config.LearnerConfig(batch_size=30)
  with pytest.raises(
    ValueError, match=r'learner.batch_size=30: does not divide over 8 devices; 32'
  ):
    config.batch_per_device(8)
