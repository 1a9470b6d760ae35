"""DreamerConfig: sizes and constants of the world-model agent; imports no JAX."""

import dataclasses

# The critic learns three times as fast as the actor: a value that lags behind is the same in all good
# states, and hides what will go wrong after more steps than it has learned of.
CRITIC_RATE = 3.0
# Gradient steps of actor and critic on a batch of dreams, each on other dreams; and by what share the probability
# of an action may change before it has no gradient: Schulman et al. (2017), "Proximal policy optimization algorithms".
POLICY_STEPS, MOST_CHANGE = 4, 0.2
SLOW_CRITIC_RATE = 0.05  # of the moving average of its parameters, which dreams read beside them
# Of the moving averages of ranges and errors of returns: Hafner et al. (2023); also of evidence and shares.
RETURN_RATE = 0.01
EXPLORERS = 0.25  # share of the environments that explore where both actors earn as much
LEAST_ACTING = 0.125  # least share of the environments of either actor, once rewards are known
NEW_UPDATES = 128  # updates for which a sequence counts as new: an unroll may take 64 of them
# Samples of new sequences, about, and the least number of them that say what an actor earns.
SAMPLES_COMPARED, LEAST_COMPARED = 512, 16
# Difference of real returns, in units of `return_floor`, that counts in full: see `intrinsic.evidence`.
LEAST_DIFFERENCE = 0.1
NOVELTY_FLOOR = 1e-3  # least divisor of novelty's advantages, and unit of its values
# Shares of the largest entropy at which the explorer's, and that of the task's actor, have their usual weight.
EXPLORER_ENTROPY, TASK_ENTROPY = 0.4, 0.1
CERTAINTY_EXPONENT = 5.0  # log of their weight for a certain policy: `actor_critic.entropy_weight`
INTRINSIC_FLOOR = 0.1  # least divisor of the advantages of other intrinsic rewards
LATENTS = ('categorical', 'gaussian')  # keys of `distributions.LATENTS`
AVERAGE_CHANGE_RATE = 0.02  # of the moving average of the networks that novelty reads
# Rates of the fast and slow averages of novelty, which give improvement: see `intrinsic.update`.
IMPROVEMENT_FAST, IMPROVEMENT_SLOW = 0.1, 0.005
LEAST_IMPROVEMENT = 0.01  # improvement below which boredom rises
BOREDOM_RISE, BOREDOM_FALL = 0.1, 0.2  # of boredom, which shortens rollouts, in an update
SCENE = 64.0  # nats beyond which what a step's numbers cost counts by its logarithm, where there are grids
IMAGINED_PERIOD = 4  # of the steps of a sequence, one of so many also trains the heads as imagined
BOOTSTRAP_SHARE = 0.8  # share of the sequences that train a member's prior, where there are several
MOST_STEPS_PER_CHUNK = 8  # of a rollout, whose gradient is computed at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class DreamerConfig:
  """Sizes and constants of the world-model agent, a DreamerV3 with an ensemble.

  The defaults are the model of the presets `gpu` and `tpu-v4-8`, for one GPU or the four chips of a
  TPU v4-8: 5 members of 1,024 units and a categorical latent of 16 x 16. `SIZES` has the others.

  Raises:
    ValueError: an invalid value, named with its field.
  """

  # World model.
  deterministic_size: int = 1024  # units of the recurrent state h
  memory_steps: int = 64  # longest time constant of these units, at initialisation
  latent: str = 'categorical'  # distribution of the latent z: 'categorical' or 'gaussian'
  stochastic_size: int = 16  # latent variables in z
  classes: int = 16  # classes of each latent variable, if categorical
  hidden_size: int = 512  # units of each hidden layer
  encoder_layers: int = 2  # hidden layers of encoder and decoder
  image_channels: int = 256  # channels of a CNN's last stage; 0: images are read as flat numbers
  ensemble_size: int = 5  # members: prior networks whose disagreement is the novelty
  free_nats: float = 1.0  # KL below which the posterior has no KL loss; priors always have
  representation_scale: float = 0.1  # weight of the posterior's KL loss
  reward_scale: float = 1.0  # weight of the reward loss; above 1 for rare, small rewards
  num_bins: int = 255  # bins of the two-hot distributions of rewards
  bin_limit: float = 20.0  # the last bin, the largest reward, is symexp(bin_limit)

  # Imagination rollouts ("dreams").
  horizon_max: int = 64  # imagined steps of the longest rollout
  horizon_min: int = 8  # imagined steps of the shortest rollout
  starts_per_sequence: int | None = None  # dreams of each sequence, best a multiple of 8; None: all

  # Actor and critic.
  policy_layers: int = 2  # hidden layers of actor and critic
  gamma: float = 0.99  # discount factor of rewards
  lambda_: float = 0.95  # lambda of lambda-returns
  entropy_scale: float = 3e-4  # weight of the policy's entropy: more explores more
  unimix: float = 0.01  # share of the uniform distribution in categorical latents and policies
  replayed_value_scale: float = 0.3  # weight of the critic's loss on replayed steps
  return_floor: float = 1.0  # least divisor of the task's advantages: smaller differences are noise
  warm_up_updates: int = 200  # updates of only the world model, before actor and critic learn

  # Intrinsic motivation.
  novelty: str = 'information_gain'  # its measure, or 'clean'
  novelty_scale: float = 0.03  # weight of novelty's advantage compared with entropy; 0: no explorer

  compute_dtype: str = 'bfloat16'  # dtype of the networks: 'float32' or 'bfloat16'

  def __post_init__(self):
    check = self._check
    choices = {
      'latent': LATENTS,
      'novelty': ('information_gain', 'clean'),
      'compute_dtype': ('float32', 'bfloat16'),
    }
    for name, known in choices.items():
      check(getattr(self, name) in known, name, f'choose one of {list(known)}')
    for name in (
      'deterministic_size', 'stochastic_size', 'classes', 'hidden_size', 'encoder_layers',
      'ensemble_size', 'horizon_min', 'policy_layers',
    ):  # fmt: skip
      check(getattr(self, name) >= 1, name, 'must be at least 1')
    check(self.memory_steps >= 2, 'memory_steps', 'must be at least 2')
    check(self.num_bins >= 3 and self.num_bins % 2 == 1, 'num_bins', 'must be odd and at least 3')
    check(self.image_channels >= 0, 'image_channels', 'must be 0 for flat images, or at least 1')
    check(self.reward_scale > 0, 'reward_scale', 'must be positive')
    check(0 < self.gamma <= 1, 'gamma', 'must lie in (0, 1]')
    check(0 <= self.lambda_ <= 1, 'lambda_', 'must lie in [0, 1]')
    check(0 <= self.unimix < 1, 'unimix', 'must lie in [0, 1)')
    check(
      self.horizon_max >= self.horizon_min,
      'horizon_max',
      f'must be at least agent.horizon_min={self.horizon_min}',
    )
    check(
      self.starts_per_sequence is None or self.starts_per_sequence >= 1 + self._explores,
      'starts_per_sequence',
      "must be at least 1, with an explorer 2 (half of them are the explorer's), or None for all steps",
    )

  def _check(self, fine: bool, name: str, remedy: str) -> None:
    if not fine:
      raise ValueError(f'agent.{name}={getattr(self, name)!r}: {remedy}')

  @property
  def _explores(self) -> bool:
    """Whether there is an explorer."""
    return self.ensemble_size > 1 and self.novelty_scale > 0

  @property
  def steps_per_chunk(self) -> int:
    """Imagined steps whose gradient is computed at once, a divisor of `horizon_max`."""
    chunks = range(1, MOST_STEPS_PER_CHUNK + 1)
    return max(steps for steps in chunks if self.horizon_max % steps == 0)

  @property
  def dtype(self):
    """Dtype of the networks.

    It is not looked up by name: once TensorFlow 2.8 is imported, the name 'bfloat16' gives
    TensorFlow's own type, which JAX does not accept.
    """
    import jax.numpy as jnp

    return jnp.bfloat16 if self.compute_dtype == 'bfloat16' else jnp.float32


SIZES = {
  # Two CPU cores.
  'laptop': DreamerConfig(
    deterministic_size=128,
    hidden_size=128,
    encoder_layers=1,
    stochastic_size=12,
    classes=12,
    image_channels=32,
    num_bins=127,
    bin_limit=6.0,
    horizon_max=16,
    horizon_min=8,
    starts_per_sequence=8,
    entropy_scale=0.001,
    novelty_scale=0.1,
    compute_dtype='float32',
  ),
  # With one member about as many parameters and imagined steps as `size1m` of DreamerV3.
  '1m': DreamerConfig(
    deterministic_size=300,
    hidden_size=64,
    latent='categorical',
    stochastic_size=32,
    classes=4,
    horizon_max=15,
    horizon_min=15,
    compute_dtype='float32',
  ),
  # One GPU: the agent of the preset `gpu`.
  'full': DreamerConfig(starts_per_sequence=16),
}
"""Configs by the name of their size."""
