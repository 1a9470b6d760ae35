"""LearnerConfig: settings of the training loop and of its optimizers."""

import dataclasses

# Global norms to which the gradients of world model and actor-critic are clipped.
MODEL_MAX_GRADIENT, POLICY_MAX_GRADIENT = 100.0, 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
  """Settings of the training loop, which the learner of every agent has; ValueError if a number is not positive."""

  log_period: int = 100  # updates between two reports of metrics
  checkpoint_period: float = 60.0  # seconds between two checkpoints, of learner and replay alike
  checkpoint_updates: int | None = None  # updates after which a checkpoint is also written
  keep: int = 3  # newest checkpoints that stay, in addition to the best by evaluation
  num_processes: int = 1  # processes of the learner, each on a host of its own; 1 in a fused run
  stuck_seconds: float = 300.0  # seconds until a node that hangs ends; 0: never

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
  """Settings of the learner of an agent that samples its batches from replay; ValueError names a wrong field."""

  batch_size: int = 256  # sequences of an update, over all devices
  publish_period: int = 25  # updates between two publications of acting parameters

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
    """Number of sequences that each process of the learner reads for a batch."""
    return self.batch_size // self.num_processes

  def batch_per_device(self, num_devices: int) -> int:
    """Sequences of a batch on each device, of all processes; ValueError, with a size that divides, if it does not."""
    if self.batch_size % num_devices:
      raise ValueError(
        f'learner.batch_size={self.batch_size}: does not divide over {num_devices} devices; '
        f'{self._divides(num_devices)} would'
      )
    return self.batch_size // num_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(LoopConfig):
  """Settings of the learner of an agent that reads each sequence once, from a queue.

  Each update learns from as many sequences as all actors collect in one unroll; each process reads
  an equal part of them.
  """

  log_period: int = 8  # updates between two reports of metrics, each update of one unroll
  max_staleness: int = 2  # updates by which a policy may be old; older sequences are discarded

  def in_flight(self, most: int, batch_size: int) -> int:
    """Number of sequences that a process may prefetch: `most`, at most an eighth of its part of a batch.

    They lengthen the queue, and so raise the age of the sequences read.
    """
    return max(1, min(most, batch_size // self.num_processes // 8))

  @property
  def publish_period(self) -> int:
    """Updates between two publications of acting parameters: 1, as actors need the newest policy."""
    return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig(OffPolicyConfig):
  """Settings of the dreamer's learner; the defaults are as in the preset `tpu-v4-8`."""

  model_learning_rate: float = 3e-4  # learning rate of the world model
  policy_learning_rate: float = 1e-4  # learning rate of the actor
  adam_epsilon: float = 1e-8  # epsilon of both Adam optimizers
  rate_warm_up: int = 100  # gradient steps over which the learning rates rise linearly
  fused: bool = False  # environments, replay and update in one program; else over processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOLearnerConfig(OnPolicyConfig):
  """Settings of PPO's learner.

  Minibatches, epochs and learning rate that are None follow from the number of environments and
  steps, see `ppo_update.auto_scale`. A run is fused, one program in one process; or actors run in
  processes of their own.
  """

  num_minibatches: int | None = None  # minibatches of each epoch
  num_epochs: int | None = None  # epochs over each unroll
  learning_rate: float | None = None  # learning rate of Adam
  anneal: bool = True  # whether the learning rate falls linearly to 0 at max_environment_steps
  max_gradient: float = 0.5  # global norm to which gradients are clipped
  adam_epsilon: float = 1e-5  # epsilon of Adam
  checkpoint_period: float = 600.0  # seconds between two checkpoints
  fused: bool = True  # environments and update in one program; else over processes, with a queue
