"""PPO's training loop on a real queue: old sequences are discarded, and all are counted."""

import dataclasses

import jax
import numpy as np
import portpicker
import pytest
import reverb

from hephaestus.actors import environments, rollout
from hephaestus.agents import masked_ppo
from hephaestus.launch.files import metrics
from hephaestus.learner import checkpoint, devices, loop, ppo_update
from hephaestus.learner import config as learner_config
from hephaestus.learner.sources import on_policy, sampled
from hephaestus.replay import parameters, reader, tables, writer

NUM_WORLDS, NUM_ROWS = 4, 5
STEPS = NUM_WORLDS * (NUM_ROWS - 1)
REPLAY = tables.ReplayConfig(
  strata=(tables.Stratum(name='on_policy', max_size=64, share=1.0, read_once=True),),
  replay_ratio=1.0,
  warm_up=1,
)
LEARNER = learner_config.PPOLearnerConfig(
  num_minibatches=2, num_epochs=1, learning_rate=1e-3, log_period=3, fused=False
)


class Run:
  """A queue, into which the test writes sequences of any version; and learners."""

  def __init__(self, folder):
    environment = environments.make('catch', rows=4, columns=3)
    config = masked_ppo.PPOConfig(hidden_size=8, num_layers=1)
    self.ppo = masked_ppo.make_ppo(config, environment.observation_spec, environment.action_spec)
    self.unroll = rollout.make_unroll(
      environment, self.ppo.agent, num_envs=NUM_WORLDS, sequence_length=NUM_ROWS
    )
    self.params = self.ppo.agent.init_params(jax.random.key(0))
    self.params_schema = jax.eval_shape(lambda: self.params)
    self.schema = rollout.sequence_schema(self.unroll, self.params)
    self.folder = folder
    port = portpicker.pick_unused_port()
    self.address = f'127.0.0.1:{port}'
    made = tables.make_tables(REPLAY, self.schema, batch_size=NUM_WORLDS, insert_size=NUM_WORLDS)
    self.server = tables.make_server(made, port=port)
    self.writer = writer.Writer(self.address, REPLAY.strata, self.schema)

  def write(self, version):
    state = self.unroll.init(jax.random.key(1))
    _, sequence, _ = self.unroll.unroll(self.params, jax.random.key(2), state, version, 0)
    self.writer.write(jax.device_get(sequence), lambda: False)

  def learn(self, until, config=LEARNER):
    """A loop that is stopped at a step."""
    taken = on_policy.StaleFilter(max_staleness=1)
    scale = ppo_update.auto_scale(config, num_envs=NUM_WORLDS, num_steps=NUM_ROWS - 1)
    read = reader.Reader(
      self.address, REPLAY.strata, self.schema, batch_size=NUM_WORLDS, max_in_flight=1,
      prefetch=0, keep=taken.keep,
    )  # fmt: skip
    should_stop = lambda: node is not None and node.step >= until
    node = None
    source = on_policy.OnPolicy(
      sampled.Trained(
        ppo_update.make_update(self.ppo, config, scale), self.ppo.agent.acting_params
      ),
      sampled.Link(
        read,
        parameters.Publisher(self.address, self.params_schema),
        launch_id=1,
        should_stop=should_stop,
      ),
      taken,
      steps_per_sequence=NUM_ROWS - 1,
      devices=jax.local_devices()[:1],
    )
    make_logger = lambda step: metrics.make_logger(
      self.folder, 'learner', steps_key='learner_step', resume=('learner_step', step)
    )
    node = loop.Loop(
      source,
      config,
      loop.Hooks(should_stop=should_stop, make_logger=make_logger),
      max_environment_steps=10**9,
      checkpointer=checkpoint.Checkpointer(self.folder / 'checkpoints'),
      seed=0,
    )
    node.run()
    return node

  def newest(self):
    return parameters.Subscription(self.address, self.params_schema).newest()


def test_old_sequences_are_discarded_and_the_count_survives_restarts(tmp_path):
  run = Run(tmp_path)
  # One update behind is fine, two are not; 7: made before a learner resumed from a checkpoint.
  for version in (0, 0, 0, 7):
    run.write(version)
  first = run.learn(until=3)
  (row,) = metrics.read(tmp_path / 'metrics' / 'learner.jsonl')
  assert row['environment_step'] == 4 * STEPS
  assert row['discarded_fraction'] == pytest.approx(1 / 3)  # since the first update
  assert row['staleness'] == pytest.approx((1 - 5) / 2)
  assert row['starved_fraction'] <= 1 and row['steps_per_second'] > 0
  assert {'ppo/approx_kl', 'ppo/entropy', 'ppo/learning_rate'} <= set(row)
  snapshot = run.newest()
  assert (snapshot.version, snapshot.environment_step) == (3, 4 * STEPS)
  # Published are the first parameters, the result of each update, and the last once more.
  published = reverb.Client(run.address).server_info()[tables.PARAMS].rate_limiter_info.insert_stats
  assert published.completed == 1 + 3 + 1

  run.server.stop()

  run = Run(tmp_path)  # whose queue has forgotten its insertions
  for version in (1, 2, 3, 5):  # the first is two updates old by now
    run.write(version)
  second = run.learn(until=6)
  rows = metrics.read(tmp_path / 'metrics' / 'learner.jsonl')
  assert [row['learner_step'] for row in rows] == [3, 6]
  assert rows[-1]['environment_step'] == 8 * STEPS
  assert rows[-1]['discarded_fraction'] == 0.0  # since the first update of this learner
  assert int(devices.first_replica(second.state).step) == 6
  changed = jax.tree.map(
    lambda x, y: not np.array_equal(x, y),
    devices.first_replica(first.state).params,
    devices.first_replica(second.state).params,
  )
  assert all(jax.tree.leaves(changed))
  run.server.stop()


def test_parameters_that_are_not_finite_end_the_run_before_actors_get_them(tmp_path):
  run = Run(tmp_path)
  run.write(0)
  with pytest.raises(FloatingPointError, match=r'learner step 1: parameters .* lower the learning'):
    run.learn(until=3, config=dataclasses.replace(LEARNER, learning_rate=1e38))
  assert run.newest().version == 0  # finite parameters, those of the beginning
  run.server.stop()
