"""Sizes of small, fast agents and runs; every other number is the default."""

DREAMER = {
  'deterministic_size': 8,
  'hidden_size': 16,
  'stochastic_size': 4,
  'classes': 3,
  'encoder_layers': 1,
  'ensemble_size': 2,
  'num_bins': 11,
  'horizon_min': 2,
  'horizon_max': 4,
  'starts_per_sequence': 2,
  'policy_layers': 1,
  'compute_dtype': 'float32',
}
"""Fields of a DreamerConfig, in an order in which they can be set one by one."""

CATCH = {'rows': 4, 'columns': 3}
"""Options of the environment `catch`, whose episodes then take three steps."""

SHAPES = (
  *(f'agent.{name}={value}' for name, value in DREAMER.items()),
  *(f'environment.{name}={value}' for name, value in CATCH.items()),
  'actor.sequence_length=6',
  'actor.num_envs=4',
  'learner.batch_size=8',
  'replay.warm_up=8',
)  # fmt: skip
"""Overrides of the laptop's `catch`: all that decides the shapes of its programs."""

RUN = (
  *SHAPES,
  'agent.warm_up_updates=5', 'learner.log_period=10', 'learner.publish_period=5',
  'actor.log_period=0.5', 'evaluator.num_episodes=8', 'evaluator.final_episodes=8',
  'tensorboard=false', 'replay.max_in_flight=1', 'replay.replay_ratio=16',
)  # fmt: skip
"""Overrides of the laptop's `catch`: a run that reports, publishes and evaluates all the time."""
