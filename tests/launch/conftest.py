"""The config of small, fast runs."""

import pytest


@pytest.fixture(scope='session')
def tiny():
  """Overrides of the laptop's `catch`: its smallest networks, sequences and batches."""
  return (
    'agent.deterministic_size=8', 'agent.hidden_size=16', 'agent.stochastic_size=4',
    'agent.ensemble_size=2', 'agent.horizon_min=2', 'agent.steps_per_chunk=2', 'agent.horizon_max=4',
    'agent.starts_per_sequence=2', 'agent.window=2', 'agent.num_bins=11', 'agent.warm_up_updates=5',
    'environment.rows=4', 'environment.columns=3', 'actor.sequence_length=6', 'actor.num_envs=4',
    'learner.batch_size=8', 'learner.log_period=10', 'learner.publish_period=5',
    'learner.checkpoint_period=3', 'actor.log_period=0.5', 'evaluator.period=3',
    'evaluator.num_episodes=8', 'evaluator.final_episodes=8', 'tensorboard=false',
    'replay.warm_up=8', 'replay.max_in_flight=1', 'replay.replay_ratio=16',
  )  # fmt: skip
