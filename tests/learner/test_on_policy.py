"""PPO's learner on a real queue: what is too old is discarded, and what was read is counted."""

import jax
import numpy as np
import portpicker
import pytest
import reverb

from hephaestus.actors import environments, rollout
from hephaestus.agents import masked_ppo
from hephaestus.launch.run import metrics
from hephaestus.learner import checkpoint, learner, on_policy, ppo_update
from hephaestus.learner import config as learner_config
from hephaestus.replay import parameters, reader, tables, writer

pytestmark = pytest.mark.usefixtures('little_optimization')

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
  """A queue, into which the test writes what parameters of any version did; and learners."""

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

  def learn(self, until):
    """A learner that is stopped at a step."""
    intake = on_policy.Intake(max_staleness=1)
    scale = ppo_update.auto_scale(LEARNER, num_envs=NUM_WORLDS, num_steps=NUM_ROWS - 1)
    node = learner.Learner(
      update=ppo_update.make_update(self.ppo, LEARNER, scale),
      acting_params=self.ppo.agent.acting_params,
      config=LEARNER,
      batch_size=NUM_WORLDS,
      reader=reader.Reader(
        self.address, REPLAY.strata, self.schema, batch_size=NUM_WORLDS, max_in_flight=1,
        prefetch=0, keep=intake.keep,
      ),
      publisher=parameters.Publisher(self.address, self.params_schema),
      checkpointer=checkpoint.Checkpointer(self.folder / 'checkpoints'),
      save_replay=lambda: None,
      environment_step=lambda: None,
      make_logger=lambda step: metrics.make_logger(
        self.folder, 'learner', steps_key='learner_step', resume=('learner_step', step)
      ),
      should_stop=lambda: node._step >= until,
      max_environment_steps=10**9,
      steps_per_sequence=NUM_ROWS - 1,
      warm_up_steps=0,
      seed=0,
      launch_id=1,
      intake=intake,
      devices=jax.local_devices()[:1],
    )  # fmt: skip
    node.run()
    return node

  def newest(self):
    return parameters.Source(self.address, self.params_schema).newest()


def test_what_is_too_old_is_discarded_and_what_was_read_is_counted_for_good(tmp_path):
  run = Run(tmp_path)
  # One update behind is fine, two are not; of a learner that went back, all is newer.
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
  # The first parameters, those of each update, and the last once more.
  published = reverb.Client(run.address).server_info()[tables.PARAMS].rate_limiter_info.insert_stats
  assert published.completed == 1 + 3 + 1

  run.server.stop()

  run = Run(tmp_path)  # whose queue knows nothing of what was inserted into the one before
  for version in (1, 2, 3, 5):  # the first is two updates old by now
    run.write(version)
  second = run.learn(until=6)
  rows = metrics.read(tmp_path / 'metrics' / 'learner.jsonl')
  assert [row['learner_step'] for row in rows] == [3, 6]
  assert rows[-1]['environment_step'] == 8 * STEPS
  assert rows[-1]['discarded_fraction'] == 0.0  # since the first update of this learner
  assert int(checkpoint.replica(second._state).step) == 6
  changed = jax.tree.map(
    lambda x, y: not np.array_equal(x, y),
    checkpoint.replica(first._state).params,
    checkpoint.replica(second._state).params,
  )
  assert all(jax.tree.leaves(changed))
  run.server.stop()
