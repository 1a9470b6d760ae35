"""Masked PPO: its config, its network, a policy over the legal actions, and its loss.

Schulman et al. (2017), "Proximal policy optimization algorithms". `recurrent_size` puts a GRU
between the encoder and the heads, for environments that are only partially observed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import dm_env
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.agents import agent as agent_lib
from hephaestus.agents import distributions, experience, networks, returns
from hephaestus.agents import observation as observation_lib

Tree = Any
Memory = dict[str, jax.Array]  # states of GRUs by name, see `Network.initial_memory`
FIRST, LAST = int(dm_env.StepType.FIRST), int(dm_env.StepType.LAST)
MOST_IMPORTANCE = 2.0  # largest importance weight w of an action, see `Network.steps`
CELL_SIZE = 8  # width of the layer shared by the cells of a board


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig:
  """Sizes and constants of the PPO agent.

  Raises:
    ValueError: an invalid value, named with its field.
  """

  # Network.
  hidden_size: int = 256  # units of each hidden layer
  num_layers: int = 2  # hidden layers
  activation: str = 'silu'  # of the hidden layers, a key of `networks.ACTIVATIONS`
  layer_norm: bool = True  # whether hidden layers have a layer norm
  levels: int = 0  # over which numbers in [0, 1] are also two-hot encoded; 0: none
  symlog: bool = True  # whether numbers are encoded by their symlog
  image_channels: int = 0  # channels of a CNN's last stage; 0: images are read as flat numbers
  recurrent_size: int = 0  # width of the GRU; 0: no memory
  shared: bool = True  # whether actor and critic share encoder and GRU
  compute_dtype: str = 'float32'  # dtype of the networks: 'float32' or 'bfloat16'

  # Loss.
  gamma: float = 0.99  # discount factor of rewards
  lambda_: float = 0.95  # lambda of generalised advantage estimation
  clip: float = 0.2  # clip range of the likelihood ratio, to either side of 1
  value_clip: float | None = None  # clip range of the change of a value; None: no clipping
  value_scale: float = 0.5  # weight of the critic's loss
  entropy_scale: float = 0.01  # weight of the policy's entropy: more explores more

  def __post_init__(self):
    def check(fine: bool, name: str, remedy: str):
      if not fine:
        raise ValueError(f'agent.{name}={getattr(self, name)!r}: {remedy}')

    for name in ('hidden_size', 'num_layers'):
      check(getattr(self, name) >= 1, name, 'must be at least 1')
    choices = {'activation': sorted(networks.ACTIVATIONS), 'compute_dtype': ['bfloat16', 'float32']}
    for name, names in choices.items():
      check(getattr(self, name) in names, name, f'choose one of {names}')
    check(self.levels != 1 and self.levels >= 0, 'levels', 'must be 0, or at least 2')
    check(self.image_channels >= 0, 'image_channels', 'must be 0 for flat images, or at least 1')
    check(self.recurrent_size >= 0, 'recurrent_size', 'must be 0 for no memory, or at least 1')
    check(0 < self.gamma <= 1, 'gamma', 'must lie in (0, 1]')
    check(0 <= self.lambda_ <= 1, 'lambda_', 'must lie in [0, 1]')
    check(0 < self.clip < 1, 'clip', 'must lie in (0, 1)')
    check(self.value_clip is None or self.value_clip > 0, 'value_clip', 'must be positive, or null')
    for name in ('value_scale', 'entropy_scale'):
      check(getattr(self, name) >= 0, name, 'must not be negative')

  @property
  def dtype(self):
    """Dtype of the networks; see `DreamerConfig.dtype` for why it is not looked up by name."""
    return jnp.bfloat16 if self.compute_dtype == 'bfloat16' else jnp.float32


class Steps(NamedTuple):
  """Inputs of the loss: steps [R, ...] in any order; with a GRU, streams of steps [T, B, ...].

  `log_prob` is under the old policy, the denominator of the ratio rho of `Network.loss`: the policy that
  acted, or if `delayed` the proximal one. `importance` is the likelihood of the choice under the
  proximal policy, divided by its likelihood under the policy that acted.
  """

  inputs: tuple[jax.Array, ...]  # observations, as `Network.flatten` gives them
  mask: jax.Array | None  # [..., A] bool, the legal actions; None in an environment without a mask
  first: jax.Array  # [...] bool, steps that begin an episode
  choice: jax.Array  # [...] or [..., M] int32 actions, or [..., A] float32 actions before tanh
  log_prob: jax.Array  # [...] float32, log-likelihood of the choice
  value: jax.Array  # [...] float32, the critic's value before the update
  return_: jax.Array  # [...] float32, lambda-return, the target of the value
  advantage: jax.Array  # [...] float32, GAE; normalised by the learner before the loss
  weight: jax.Array  # [...] float32, equal for all steps but LAST, whose action is unread: 0
  importance: jax.Array | None = None  # [...] float32; None where the two policies are the same


@dataclasses.dataclass(frozen=True)
class Network:
  """Policy and value of one environment; it holds no arrays, and its methods are pure.

  Raises:
    ValueError: `distributions.Actions` does not support the action spec.
  """

  config: PPOConfig
  observation_spec: Tree  # of `dm_env.specs.Array`
  action_spec: specs.BoundedArray

  def __post_init__(self):
    _ = self.actions  # raises for an unsupported spec

  @functools.cached_property
  def actions(self) -> distributions.Actions:
    return distributions.Actions(self.action_spec)

  @property
  def _readers(self) -> tuple[str, str]:
    """Names of the torsos that actor and critic read."""
    return ('shared', 'shared') if self.config.shared else ('actor', 'critic')

  def _modules(self) -> dict[str, nn.Module]:
    config = self.config
    orthogonal = nn.initializers.orthogonal
    dense = lambda size, scale: networks.Dense(
      size, dtype=config.dtype, kernel_init=orthogonal(scale)
    )
    modules: dict[str, nn.Module] = {}
    for name in dict.fromkeys(self._readers):
      encoder: nn.Module = networks.MLP(
        config.hidden_size, config.num_layers, dtype=config.dtype, activation=config.activation,
        layer_norm=config.layer_norm, hidden_init=orthogonal(np.sqrt(2)), raw=config.layer_norm,
      )  # fmt: skip
      if self.codec.board_specs:
        encoder = networks.BoardEncoder(encoder, CELL_SIZE)
      if self.codec.image_specs:
        encoder = networks.Encoder(encoder, config.image_channels)
      modules[f'{name}_encoder'] = encoder
      if config.recurrent_size:
        modules[f'{name}_gates'] = dense(3 * config.recurrent_size, 1.0)
        modules[f'{name}_memory'] = dense(3 * config.recurrent_size, 1.0)
    modules['actor'] = dense(self.actions.num_outputs, 0.01)
    modules['critic'] = dense(1, 1.0)
    return modules

  def init(self, key: chex.PRNGKey) -> Tree:
    """Initial parameters, a tree of float32 arrays with orthogonal kernels."""
    config, modules = self.config, self._modules()
    keys = jax.random.split(key, len(modules))
    zeros = jax.tree.map(lambda spec: jnp.zeros((1, *spec.shape)), self.observation_spec)
    inputs = jax.eval_shape(lambda x: self._read(self.flatten(x)), zeros)
    vector = lambda size: (jax.ShapeDtypeStruct((1, size), jnp.float32),)
    shapes = {'encoder': inputs, 'gates': vector(self._feature_size)}
    head = vector(config.recurrent_size or self._feature_size)

    def init(key, name, module):
      parts = shapes.get(name.split('_')[-1], head)
      return module.init(key, *(jnp.zeros(part.shape) for part in parts))['params']

    return {
      name: init(key, name, module)
      for key, (name, module) in zip(keys, modules.items(), strict=True)
    }

  def initial_memory(self, num_envs: int) -> Memory:
    """Zero GRU states, [N, recurrent_size] float32, of 'shared', or of 'actor' and 'critic', if any."""
    if not self.config.recurrent_size:
      return {}
    zeros = jnp.zeros((num_envs, self.config.recurrent_size), jnp.float32)
    return {name: zeros for name in dict.fromkeys(self._readers)}

  def flatten(self, observation: Tree) -> tuple[jax.Array, ...]:
    """Flattens observations [..., *shape] in few bytes, once for a batch, before its first epoch.

    See `observation.Codec.compact`; where leaves have views, the first array is [..., F + V] float32.
    """
    flat, *others = self.codec.compact(observation)
    if self._has_view:
      numbers = self.codec.numbers(flat) if flat.dtype == bool else flat
      views = observation_lib.views(observation, self.observation_spec)
      flat = jnp.concatenate([numbers, views], axis=-1)
    return flat, *others

  @property
  def codec(self) -> observation_lib.Codec:
    config, spec = self.config, self.observation_spec
    cnn = config.image_channels > 0
    return observation_lib.Codec(spec, config.levels, cnn, boards=True, symlog=config.symlog)

  @property
  def _feature_size(self) -> int:
    """Width of the encoder's output: a hidden size for the numbers, if any, and for each image."""
    num_images = len(self.codec.image_specs)
    has_numbers = not num_images or observation_lib.unit_range(self.codec.flat_spec).size > 0
    return self.config.hidden_size * (num_images + has_numbers)

  @property
  def _has_view(self) -> bool:
    return observation_lib.view_size(self.observation_spec) > 0

  def _read(self, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Inputs of the encoder; a view is read in place of levels."""
    return inputs if self._has_view else self.codec.inputs(inputs)

  def apply(
    self, params: Tree, inputs: tuple[jax.Array, ...], first: jax.Array, memory: Memory
  ) -> tuple[Memory, jax.Array, jax.Array]:
    """Runs actor and critic on some steps.

    Args:
      params: parameters of this network.
      inputs: observations as `flatten` gives them, [..., F] and so on; [T, B, ...] with a GRU.
      first: [...] bool, FIRST steps, before which the GRU state is cleared.
      memory: GRU states of B streams before the first step.

    Returns:
      The GRU states after the last step; the actor's outputs, [..., outputs] float32, of which
      `actions` makes the policy; and the values, [...] float32.
    """
    inputs = self._read(inputs)
    modules, features, after = self._modules(), {}, {}
    for name in dict.fromkeys(self._readers):
      x = networks.apply(modules[f'{name}_encoder'], params[f'{name}_encoder'], *inputs)
      if self.config.recurrent_size:
        gates = networks.apply(modules[f'{name}_gates'], params[f'{name}_gates'], x)
        after[name], x = self._remember(params[f'{name}_memory'], gates, first, memory[name])
      features[name] = x
    actor, critic = self._readers
    outputs = networks.apply(modules['actor'], params['actor'], features[actor])
    value = networks.apply(modules['critic'], params['critic'], features[critic])[..., 0]
    return after, outputs.astype(jnp.float32), value.astype(jnp.float32)

  def _remember(self, params: Tree, gates: jax.Array, first: jax.Array, memory: jax.Array):
    """Runs a GRU: its last state, [B, H], and its states at all steps, [T, B, H].

    Cho et al. (2014), with the reset after the recurrent product as in cuDNN. `gates` [T, B, 3 H] are
    the terms of the inputs in the gates.
    """
    chex.assert_rank([gates, first], [3, 2])
    product = networks.Dense(gates.shape[-1], dtype=self.config.dtype)

    def step(memory, inputs):
      gates, first = inputs
      memory = jnp.where(first[:, None], 0.0, memory)
      own = networks.apply(product, params, memory)
      reset_x, update_x, new_x = jnp.split(gates.astype(jnp.float32), 3, axis=-1)
      reset_h, update_h, new_h = jnp.split(own.astype(jnp.float32), 3, axis=-1)
      update = jax.nn.sigmoid(update_x + update_h)
      new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
      memory = (1 - update) * new + update * memory
      return memory, memory

    return jax.lax.scan(step, memory, (gates, first))

  def steps(self, params: Tree, sequence: experience.Sequence, *, delayed: bool = False) -> Steps:
    """Makes the inputs of the loss from a batch of sequences, with advantages and value targets.

    With `delayed`, the ratio is clipped around a proximal policy pi_near of `params` instead of pi_old,
    the policy that acted, and actions are weighted by their importance w:

      actor    - w min( rho A, clip(rho) A ),     rho = pi / pi_near,     w = pi_near / pi_old

    Hilton et al. (2022), "Batch size-invariance for policy optimization". Clipped around pi_old, the
    updates since then would use up part of the clip range. w is at most MOST_IMPORTANCE.

    Args:
      params: parameters of this network, the same that acted unless `delayed`.
      sequence: [T, B, ...], its `extras` from `act`.
      delayed: whether the parameters that acted may be some updates old.

    Returns:
      Steps [T - 1, B, ...]; the last step of a sequence only lends its value.
    """
    inputs, first = self.flatten(sequence.observation), sequence.step_type == FIRST
    last = sequence.step_type == LAST
    # The value of the last step is computed, since no action was chosen there; a GRU must run along
    # the whole sequence for it. With delayed parameters all values are computed anew.
    begin = 0 if self.config.recurrent_size or delayed else -1
    some = tuple(x[begin:] for x in inputs)
    _, outputs, value = self.apply(params, some, first[begin:], sequence.initial_state)
    if not delayed:
      value = jnp.concatenate([sequence.extras['value'][:-1], value[-1:]])
    advantage, return_ = returns.generalised_advantages(
      sequence.reward, sequence.discount, value, last,
      gamma=self.config.gamma, lambda_=self.config.lambda_,
    )  # fmt: skip
    mask = observation_lib.action_mask(sequence.observation)
    discrete = self.actions.discrete
    mask = mask[:-1] if discrete and mask is not None else None
    choice = (sequence.action if discrete else sequence.extras['raw_action'])[:-1]
    log_prob, importance = sequence.extras['log_prob'][:-1], None
    if delayed:
      near = self.actions.policy(outputs[:-1], mask).log_prob(choice)
      ratio = jnp.exp(jnp.clip(near - log_prob, -20.0, np.log(MOST_IMPORTANCE)))
      log_prob, importance = near, jnp.where(last[:-1], 1.0, ratio)
    return Steps(
      inputs=tuple(x[:-1] for x in inputs),
      mask=mask,
      first=first[:-1],
      choice=choice,
      log_prob=log_prob,
      value=value[:-1],
      return_=return_,
      advantage=advantage,
      weight=1.0 - last[:-1].astype(jnp.float32),
      importance=importance,
    )

  def loss(
    self, params: Tree, steps: Steps, memory: Memory
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The PPO loss: clipped surrogate, squared error of the value, and entropy bonus.

      actor    - min( rho A, clip(rho, 1 - c, 1 + c) A ),     rho = pi(a | o) / pi_old(a | o),
               times `steps.importance` where it is given
      critic   1/2 (v - G)^2; with `value_clip` the larger of it and of the error of the clipped v
      KL       (rho - 1) - log rho, an unbiased estimate of KL(pi_old || pi) that is never negative

    pi_old is the policy of `steps.log_prob`, A the advantage, c `config.clip`, G the return.
    Schulman et al. (2017), equations 7 and 9; Schulman (2020), "Approximating KL divergence".

    Args:
      params: parameters of this network.
      steps: steps with normalised advantages, and with weights of sum 1.
      memory: GRU states before the first step.

    Returns:
      The loss [], and metrics [] by name, weighted sums over steps; entropy and KL are in nats.
    """
    config = self.config
    _, outputs, value = self.apply(params, steps.inputs, steps.first, memory)
    policy = self.actions.policy(outputs, steps.mask)
    log_ratio = policy.log_prob(steps.choice) - steps.log_prob
    # At LAST no action was chosen, so the ratio may be infinite, and would survive a weight of 0.
    log_ratio = jnp.where(steps.weight > 0, jnp.clip(log_ratio, -20.0, 20.0), 0.0)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    actor = -jnp.minimum(ratio * steps.advantage, clipped * steps.advantage)
    if steps.importance is not None:
      actor = steps.importance * actor
    critic = jnp.square(value - steps.return_)
    if config.value_clip is not None:
      near = steps.value + jnp.clip(value - steps.value, -config.value_clip, config.value_clip)
      critic = jnp.maximum(critic, jnp.square(near - steps.return_))
    critic = 0.5 * critic
    entropy = policy.entropy()
    total = lambda x: jnp.sum(steps.weight * x)
    metrics = {
      'actor_loss': total(actor),
      'critic_loss': total(critic),
      'entropy': total(entropy),
      'approx_kl': total(ratio - 1 - log_ratio),
      'clip_fraction': total((jnp.abs(ratio - 1) > config.clip).astype(jnp.float32)),
    }
    loss = total(actor + config.value_scale * critic - config.entropy_scale * entropy)
    return loss, metrics


class PPO(NamedTuple):
  """The parts of the agent, as the learner needs them."""

  config: PPOConfig
  network: Network  # policy, value and their loss
  agent: agent_lib.Agent  # made from `network`, for actors and evaluators


def make_ppo(config: PPOConfig, observation_spec: Tree, action_spec: Any) -> PPO:
  """Builds the agent for one environment's specs.

  Raises:
    ValueError: `distributions.Actions` does not support the action spec.
  """
  network = Network(config, observation_spec, action_spec)
  discrete = network.actions.discrete

  def act(params: Tree, key: Any, memory: Memory, timestep: Any, *, greedy: bool, explain=False):
    inputs, first = network.flatten(timestep.observation), timestep.step_type == FIRST
    one_step = tuple(x[None] for x in inputs)
    memory, outputs, value = network.apply(params, one_step, first[None], memory)
    mask = observation_lib.action_mask(timestep.observation) if discrete else None
    policy = network.actions.policy(outputs[0], mask)
    noise = network.actions.noise(key, timestep.step_type.shape[0])
    extras = {'value': value[0]}
    if discrete:
      action = policy.sample(jnp.zeros_like(noise) if greedy else noise)
      action = choice = action.astype(jnp.int32)
      if explain:
        extras['log_probs'] = policy.log_probs
    else:
      # Without noise a sample is the mode, with the likelihood of the action that is taken.
      action, choice = policy.sample(jnp.zeros_like(noise) if greedy else noise)
      extras['raw_action'] = choice
    return memory, experience.Decision(action, extras | {'log_prob': policy.log_prob(choice)})

  agent = agent_lib.Agent(
    init_params=network.init,
    acting_params=lambda params: params,  # `act` also gives the value of the critic
    initial_policy_state=network.initial_memory,
    stored_state=lambda memory: memory,
    act=act,
    explain=functools.partial(act, explain=True) if discrete else None,
  )
  return PPO(config, network, agent)
