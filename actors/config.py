"""Settings of actors and the evaluator; imports no JAX, so that wrong values are refused soon."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
  """Number of actors and environments, and length of sequences.

  Raises:
    ValueError: a number is out of range; the message names its field.
  """

  num_actors: int = 1  # actor processes
  num_envs: int = 16  # parallel environments of each actor
  sequence_length: int = 32  # T time steps of a stored sequence, which take T - 1 environment steps
  log_period: float = 5.0  # seconds between two lines of metrics

  def __post_init__(self):
    for name, least in (('num_actors', 1), ('num_envs', 1), ('sequence_length', 2)):
      if getattr(self, name) < least:
        raise ValueError(f'actor.{name}={getattr(self, name)!r}: must be at least {least}')
    if self.sequence_length > 1024:
      raise ValueError(
        f'actor.sequence_length={self.sequence_length}: must be at most 1024; gradients go '
        'through whole sequences, and longer ones do not fit into memory'
      )
    if self.log_period <= 0:
      raise ValueError(f'actor.log_period={self.log_period!r}: must be positive seconds')


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
  """Period and number of episodes of evaluations.

  Raises:
    ValueError: a number is not positive; the message names its field.
  """

  period: float = 20.0  # seconds between the starts of two evaluations, less in a fast run
  period_steps: int | None = None  # environment steps between two evaluations; replaces `period`
  num_episodes: int = 64  # episodes of an evaluation
  final_episodes: int = 256  # episodes of the evaluation of the final parameters
  greedy: bool = False  # the most probable actions; False: sampled ones, as policies are trained
  video_period: float = 300.0  # seconds between two videos; the last is made at the end

  def __post_init__(self):
    for name in ('period', 'num_episodes', 'final_episodes', 'video_period'):
      if getattr(self, name) <= 0:
        raise ValueError(f'evaluator.{name}={getattr(self, name)!r}: must be positive')
    if self.period_steps is not None and self.period_steps < 1:
      raise ValueError(f'evaluator.period_steps={self.period_steps}: must be at least 1, or null')
