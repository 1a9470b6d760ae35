"""Actor and critic, and their losses on imagined and on replayed steps.

    actor([f_t, context_t])      critic([f_t, context_t])

with f_t the features of step t and context_t a summary of earlier steps by a context module: see
`context`. With a workspace the actor reads the context alone, and the critic the features alone. The
critic has a head for the task and one for each intrinsic reward, so that their advantages can be scaled
each by itself; as in Burda et al. (2018), "Exploration by random network distillation", section 2.3.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from dm_env import specs

from hephaestus.agents import distributions, networks, returns
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import context as context_lib
from hephaestus.agents.dreamer import intrinsic
from hephaestus.agents.dreamer import workspace as workspace_lib

Tree = Any
TASK, NOVELTY = 'task', intrinsic.NOVELTY
"""Names of heads of the critic: of the environment's reward and of novelty; see `ActorCritic.heads`."""

GAUSSIAN_RANGE = 3.29
"""Range from the 5th to the 95th percentile of a Gaussian, in standard deviations."""


class Steps(NamedTuple):
  """R consecutive imagined steps of B dreams, inputs of `ActorCritic.loss`.

  Attributes:
    features: [R, B, F] in the compute dtype.
    history: the context module's history of these steps.
    choice: [R, B] or [R, B, M] int32 actions, or [R, B, A] float32 actions before tanh.
    mask: [R, B, A] bool, actions predicted to be legal.
  """

  features: jax.Array
  history: Tree
  choice: jax.Array
  mask: jax.Array


class Replayed(NamedTuple):
  """Replayed steps, inputs of `ActorCritic.replayed_value_loss`.

  Attributes:
    features: [T, B, F] in the compute dtype.
    history: the context module's history of these steps.
    rewards: [T, B] float32, rewards that arrived at the steps, by name of each head that the loss trains.
    discount: [T, B] float32, the environment's discount.
    last: [T, B] bool, steps that end an episode; their value is bootstrapped and has no loss.
  """

  features: jax.Array
  history: Tree
  rewards: dict[str, jax.Array]
  discount: jax.Array
  last: jax.Array


class Targets(NamedTuple):
  """Targets of actor and critic at imagined steps.

  Attributes:
    returns: [R, B] float32, lambda-returns for each head of the critic, by its name.
    advantage: [R, B] float32, the joint advantage of all heads, see `Divisors`.
    slow_values: [R, B] float32, values of the slow critic for each head, by its name.
    weight: [R, B] float32, a step's share of the loss; 0 beyond the horizon.
  """

  returns: dict[str, jax.Array]
  advantage: jax.Array
  slow_values: dict[str, jax.Array]
  weight: jax.Array


class Scales(NamedTuple):
  """Running statistics of imagined returns; equal on all replicas.

  Attributes:
    ranges: moving average of `returns.percentile_range` of the returns of each head, by its name.
    deviation: moving average of the standard deviation of the task's returns, times GAUSSIAN_RANGE.
    evidence: [] float32, decaying running maximum of `deviation` in units of the task's least divisor:
      how far the returns of the task have ever differed, which shows that rewards were found.
  """

  ranges: dict[str, returns.Average]
  deviation: returns.Average
  evidence: jax.Array


class Divisors(NamedTuple):
  """Scales and weights of the joint advantage: the sum over heads of weight * advantage / scale.

  Attributes:
    scale: [] float32, divisor of each head's advantages, by its name.
    weight: [] float32, weight of each head, by its name; 1 for the task.
  """

  scale: dict[str, jax.Array]
  weight: dict[str, Any]


def initial_scales(heads: tuple[str, ...]) -> Scales:
  """Scales before any returns; `heads` are the names of the critic's heads."""
  ranges = {name: returns.no_average() for name in heads}
  return Scales(ranges, returns.no_average(), jnp.zeros((), jnp.float32))


def update_scales(
  scales: Scales,
  first: Mapping[str, jax.Array],
  size: jax.Array,
  config: dreamer_config.DreamerConfig,
) -> tuple[Scales, Divisors]:
  """Updates the scales of advantages with the returns of one batch of imagination rollouts.

    task_scale    = max(range of the task's returns, floor),  floor = max(return_floor, 0.1 mean |G|)
    evidence     <- max(0.9997 evidence, 3.29 std of the task's returns / floor)
    weight        = config.novelty_scale max(0.5, 1 - evidence), of novelty
    scale         = max(range of its returns, INTRINSIC_FLOOR), of an intrinsic reward

  where range and std are moving averages over batches, the range from the 5th to the 95th percentile.
  Returns that are all alike mean that no reward was found yet, or that the task is solved. So the
  weight of novelty follows `evidence`, how far they have ever differed, by their standard deviation:
  percentiles do not see the few imagination rollouts that find the first rewards. The largest weight,
  `novelty_scale`, should be well below 1, to leave the policy some entropy: rollouts follow the policy,
  and those of a deterministic one find nothing new.

  Args:
    scales: the scales so far.
    first: [...] float32, returns at the starts of the rollouts on all devices, for each head of the
      critic by its name; NaN leaves one out.
    size: [] float32, mean |G| of the task over all imagined steps, by their weights.
    config: config of the agent.

  Returns:
    The next scales, and the divisors and weights of this batch's advantages.
  """
  rate = dreamer_config.RETURN_RATE
  ranges, range_of = {}, {}
  for name, average in scales.ranges.items():
    found = returns.percentile_range(first[name])
    ranges[name], range_of[name] = returns.update_average(average, found, rate=rate)
  # The critic's bins lie some 10 % apart, so smaller differences of returns are noise.
  floor = jnp.maximum(config.return_floor, dreamer_config.RELATIVE_FLOOR * size)
  deviation, mean_deviation = returns.update_average(
    scales.deviation, GAUSSIAN_RANGE * jnp.nanstd(first[TASK]), rate=rate
  )
  evidence = jnp.maximum(dreamer_config.EVIDENCE_DECAY * scales.evidence, mean_deviation / floor)
  floors = {TASK: floor} | dict.fromkeys(range_of.keys() - {TASK}, dreamer_config.INTRINSIC_FLOOR)
  scale = {name: jnp.maximum(range_of[name], floors[name]) for name in range_of}
  weight = {name: entry.weight(config, evidence) for name, entry in intrinsic.INTRINSIC.items()}
  return Scales(ranges, deviation, evidence), Divisors(scale, {TASK: 1.0} | weight)


@dataclasses.dataclass(frozen=True)
class ActorCritic:
  """Policy and value of one environment; it holds no arrays, and its methods are pure.

  Attributes:
    config: sizes and constants.
    action_spec: see `distributions.Actions`.
    feature_size: F, width of the world model's features, see `RSSM.features`.
    memory_size: width of their first part: the GRU's state, z if there are images, what is recalled.
    state_size: width of the part that actor and critic read: the first part, and the inputs of the
      numbers; the rest is the transition to the step.
    action_size: A, width of the world model's encoded action.
    workspace: the workspace that serves as the context module; None without one.
  """

  config: dreamer_config.DreamerConfig
  action_spec: specs.BoundedArray
  feature_size: int
  memory_size: int
  state_size: int
  action_size: int
  workspace: workspace_lib.Workspace | None = None

  @property
  def discrete(self) -> bool:
    return self._actions.discrete

  @property
  def context(self) -> context_lib.Context:
    """The context module."""
    return self.workspace or context_lib.make_context(self.config, self.feature_size)

  @property
  def critic_context(self) -> context_lib.Context:
    """The critic's context module; `NoContext` with a workspace, as the critic then reads all features."""
    return context_lib.NoContext() if self.workspace else self.context

  def context_inputs(
    self, params: Tree, features: jax.Array, novelty: jax.Array, numbers: jax.Array, priors: Any
  ) -> Any:
    """Inputs of the context module beside features: `novelty`; with a workspace its `Terms` instead.

    The other arguments are for these terms of the candidates' scores.

    Args:
      params: parameters of the actor-critic.
      features: [..., F].
      novelty: [...] float32.
      numbers: [..., F'] float32, numbers of the observation, as the model's state has them.
      priors: `rssm.Prior` of all members, [K, ...].
    """
    if self.workspace is None:
      return novelty
    return self.workspace.terms(params, features, numbers, priors.change)

  @property
  def _actions(self) -> distributions.Actions:
    return distributions.Actions(self.action_spec)

  @property
  def heads(self) -> tuple[str, ...]:
    """Names of the critic's heads: the task, and each intrinsic reward that is on."""
    return (TASK, *intrinsic.heads(self.config))

  def _modules(self) -> dict[str, networks.TwoTowers]:
    config = self.config
    mlp = lambda layers, size, scale: networks.TwoTowers(
      config.hidden_size, layers, size, scale, dtype=config.dtype
    )
    return {
      'actor': mlp(config.policy_layers, self._actions.num_outputs, 0.01),
      'critic': mlp(config.policy_layers, config.num_bins * len(self.heads), 0.0),
    }

  def init(self, key: chex.PRNGKey) -> Tree:
    """Initial parameters, float32, by network: those of the context module, 'actor' and 'critic'."""
    context = self.context
    modules = context.modules()
    own = self._modules()
    keys = dict(zip((*modules, *own), jax.random.split(key, len(modules) + len(own)), strict=True))
    features = jnp.zeros((1, self.feature_size))
    params = {
      name: module.init(keys[name], jnp.zeros((1, size)))['params']
      for name, (module, size) in modules.items()
    }
    inputs = lambda name: self._towers(name, features, jnp.zeros((1, context.size)))
    return params | {
      name: module.init(keys[name], *inputs(name))['params'] for name, module in own.items()
    }

  def _towers(
    self, name: str, features: jax.Array, context: jax.Array
  ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Both inputs of network `name`: the model's memory with the context, and inputs of the numbers.

    With a workspace, the actor's are nothing and the context; the critic's are without context.
    """
    if self.workspace and name == 'actor':
      return (), (context,)
    if self.workspace:
      context = context[..., :0]
    memory = features[..., : self.memory_size]
    return (memory, context), (features[..., self.memory_size : self.state_size],)

  def _apply(self, params: Tree, name: str, features: jax.Array, context: jax.Array) -> jax.Array:
    return networks.apply(
      self._modules()[name], params[name], *self._towers(name, features, context)
    )

  def policy(self, params: Tree, features: jax.Array, context: jax.Array, mask: jax.Array | None):
    """The distribution of actions at [..., F] features, [..., C] context and [..., A] mask, if any."""
    outputs = self._apply(params, 'actor', features, context)
    return self._actions.policy(outputs, mask, self.config.unimix)

  def noise(self, key: chex.PRNGKey) -> jax.Array:
    """Noise to sample one action with, [A] float32: see `Actions.noise`."""
    return self._actions.noise(key)

  def sample(self, policy, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Samples an action; also returns its `Steps.choice`, the argument of the policy's `log_prob`.

    Args:
      policy: a distribution from `policy`.
      noise: [..., A] from `noise`; zeros give the most likely action.
    """
    sampled = policy.sample(noise)
    return (sampled, sampled) if self.discrete else sampled

  def values(
    self, params: Tree, features: jax.Array, context: jax.Array
  ) -> dict[str, distributions.TwoHot]:
    """Predicted distributions of returns at [..., F] features with [..., C] context, by head."""
    logits = self._apply(params, 'critic', features, context)
    parts = jnp.split(logits, len(self.heads), axis=-1)
    return {
      name: distributions.TwoHot.from_logits(part, self.config.bin_limit)
      for name, part in zip(self.heads, parts, strict=True)
    }

  def loss(
    self, params: Tree, steps: Steps, targets: Targets
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Score-function loss of the actor and likelihood loss of the critic on imagined steps.

      actor:  - weight ( sg(advantage) log pi(a | f, context) + eta H[pi] )
      critic: - weight ( log p(sg(return)) + log p(sg(slow value)) )

    summed over steps, the critic's also over its heads; eta is `entropy_scale`. Contexts, policy and
    value are computed here, inside the gradient, from the features, actions and masks that the dream
    stored.

    Args:
      params: parameters of context module, actor and critic.
      steps: R steps of a dream.
      targets: targets for these steps; the weights sum to 1 over the whole dream.

    Returns:
      The loss [] (a weighted sum, so that parts of a dream add up), and metrics [] by name, which add
      up likewise.
    """
    config = self.config
    features = steps.features
    context = self.context.pool(params, steps.history, features)
    policy = self.policy(params, features, context, steps.mask)
    entropy = policy.entropy()
    log_prob = policy.log_prob(steps.choice)
    actor = -jax.lax.stop_gradient(targets.advantage) * log_prob - config.entropy_scale * entropy
    critic: Any = 0.0
    for name, value in self.values(params, features, context).items():
      critic -= value.log_prob(targets.returns[name]) + value.log_prob(targets.slow_values[name])
    total = lambda x: jnp.sum(targets.weight * x)
    metrics = {
      'actor_loss': total(actor),
      'critic_loss': total(critic),
      'entropy': total(entropy),
      'return': total(targets.returns[TASK]),
      'advantage_magnitude': total(jnp.abs(targets.advantage)),
    }
    if self.discrete:
      metrics['nothing_legal'] = total(~steps.mask.any(-1))
    return total(actor + critic), metrics

  def replayed_value_loss(self, params: Tree, slow_critic: Tree, replayed: Replayed) -> jax.Array:
    """The critic's loss on replayed steps, to lambda-returns of real rewards, so model errors do not bias it.

    Args:
      params: parameters of context module and critic.
      slow_critic: parameters of the slow critic.
      replayed: the [T, B] replayed steps.

    Returns:
      The loss [], a mean over all steps but the last, where those that end an episode count as 0.
    """
    config, features, last = self.config, replayed.features, replayed.last
    context = self.critic_context.pool(params, replayed.history, features)
    loss: Any = 0.0
    values, slow_values = (
      self.values(of, features, context) for of in (params, {'critic': slow_critic})
    )
    for name in replayed.rewards:
      value, slow = values[name], jax.lax.stop_gradient(slow_values[name].mean())
      return_ = returns.lambda_returns(
        replayed.rewards[name],
        replayed.discount,
        jax.lax.stop_gradient(value.mean()),
        gamma=config.gamma,
        lambda_=config.lambda_,
        bootstrap_t=last,
      )
      value = distributions.TwoHot(value.logits[:-1], value.bins)
      loss -= value.log_prob(return_) + value.log_prob(slow[:-1])
    return jnp.mean(jnp.where(last[:-1], 0.0, loss))
