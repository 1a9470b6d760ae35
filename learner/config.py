"""LearnerConfig: settings of the training loop and of its optimizers."""

import dataclasses

# Global norms to which the gradients of world model and actor-critic are clipped.
MODEL_MAX_GRADIENT, POLICY_MAX_GRADIENT = 100.0, 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
  """Periods of the training loop, which every agent's learner has.

  Raises:
    ValueError: a number that is not positive, named with its field.
  """

  log_period: int = 100  # updates
  checkpoint_period: float = 60.0  # seconds, of learner and replay alike
  checkpoint_updates: int | None = None  # also saves whenever so many are done
  keep: int = 3  # newest checkpoints that stay, beside the best by evaluation
  num_processes: int = 1  # of the learner, each on a host of its own; 1 in a fused run
  stuck_seconds: float = 300.0  # after which a node that hangs, or an update, ends; 0: never

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, bool) or not isinstance(value, int | float):
        continue
      may_be_zero = field.name == 'stuck_seconds'
      if value < 0 if may_be_zero else value <= 0:
        remedy = ', or 0' if may_be_zero else ', or null' if field.default is None else ''
        raise ValueError(f'learner.{field.name}={value!r}: must be positive{remedy}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(LoopConfig):
  """The learner of an agent that samples its batches from replay.

  Raises:
    ValueError: a number that cannot work, named with its field.
  """

  batch_size: int = 256  # sequences, over all devices
  publish_period: int = 25  # updates

  def __post_init__(self):
    super().__post_init__()
    if self.batch_size % self.num_processes:
      raise ValueError(
        f'learner.batch_size={self.batch_size}: does not divide over learner.num_processes='
        f'{self.num_processes}; {self._divides(self.num_processes)} would'
      )

  def _divides(self, count: int) -> int:
    return max(1, round(self.batch_size / count)) * count

  @property
  def batch_per_process(self) -> int:
    """Sequences that each process reads for a batch."""
    return self.batch_size // self.num_processes

  def batch_per_device(self, num_devices: int) -> int:
    """Sequences for each device; there are so many in all processes together.

    Raises:
      ValueError: the batch does not divide.
    """
    if self.batch_size % num_devices:
      raise ValueError(
        f'learner.batch_size={self.batch_size}: does not divide over {num_devices} devices; '
        f'{self._divides(num_devices)} would'
      )
    return self.batch_size // num_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(LoopConfig):
  """The learner of an agent that reads each sequence once, from a queue.

  Each update learns from as many sequences as all actors collect in one unroll; each process reads
  an equal part of them.

  Raises:
    ValueError: a number that cannot work, named with its field.
  """

  log_period: int = 8  # updates, each of one unroll
  max_staleness: int = 2  # updates; sequences of an older policy are discarded

  @property
  def publish_period(self) -> int:
    """Updates between two publications: actors need the newest policy."""
    return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig(OffPolicyConfig):
  """Optimizers of the dreamer's learner; the defaults are those of the preset `tpu-v4-8`."""

  model_learning_rate: float = 3e-4  # of the world model
  policy_learning_rate: float = 1e-4  # of the actor
  adam_epsilon: float = 1e-8  # of both optimizers
  rate_warm_up: int = 100  # updates until the learning rates are reached
  fused: bool = False  # environments, replay and update in one program; else over processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOLearnerConfig(OnPolicyConfig):
  """Rates of PPO's learner.

  Minibatches, epochs and rate that are None follow from the number of environments and steps.
  A run is fused, one program of one process; or actors run in processes of their own.
  """

  num_minibatches: int | None = None  # of each epoch
  num_epochs: int | None = None  # of each unroll
  learning_rate: float | None = None  # of Adam
  anneal: bool = True  # the learning rate, linearly to 0 at max_environment_steps
  max_gradient: float = 0.5  # global norm
  adam_epsilon: float = 1e-5  # of the optimizer
  checkpoint_period: float = 600.0  # seconds
  fused: bool = True  # else with actors of their own, and a queue
