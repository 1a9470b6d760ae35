"""Actors and critics, and their losses on imagined and on replayed steps.

    actor([f_t, context_t])         critic([f_t, context_t])             of the task
    explorer([f_t, context_t])      explorer_critic([f_t, context_t])    of novelty, and rewards that explore

with f_t the features of step t and context_t what a context module makes of this and earlier steps: see
`sockets.Context`.
Each critic has a head for each of its rewards, the task's also for all intrinsic rewards but the explorer's,
so that their advantages can be scaled each by itself; as in Burda et al. (2018), "Exploration by random network
distillation", section 2.3.

Novelty has an actor and a critic of its own, the explorer: no weight of novelty suits a common actor before
and after rewards are found. Each actor imagines dreams of its own, half of all. As in Sekar et al. (2020),
"Planning to explore via self-supervised world models", with both actors at once.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import dm_env
import jax
import jax.numpy as jnp

from hephaestus.agents import distributions, experience, returns
from hephaestus.agents import networks as networks_lib
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import modules as modules_lib
from hephaestus.agents.dreamer import novelty, rssm, sockets

Tree = Any
Features = modules_lib.Features
LAST = int(dm_env.StepType.LAST)
TASK, NOVELTY = 'task', novelty.NAME
"""Names of heads of the critics: of the environment's reward and of novelty; see `ActorCritic.heads`."""

ACTOR, EXPLORER = 'actor', 'explorer'
"""Names of the networks of both policies: of the task with other intrinsic rewards, and of novelty."""

CRITIC, EXPLORER_CRITIC = 'critic', 'explorer_critic'
"""Names of the networks of their values."""

UNITS = 'units'
"""Name, among a critic's parameters, of the units of its outputs: [heads] float32, which no optimizer changes."""


class ImaginedSteps(NamedTuple):
  """R consecutive imagined steps of B dreams, inputs of `ActorCritic.loss`; see `ActorCritic.dreams`.

  Attributes:
    read: [R, B, ...].
    choice: [R, B] or [R, B, M] int32 actions, or [R, B, A] float32 actions before tanh.
    log_prob: [R, B] float32, log of their probability when they were chosen.
    mask: [R, B, A] bool, actions predicted to be legal.
  """

  read: sockets.PolicyInputs
  choice: jax.Array
  log_prob: jax.Array
  mask: jax.Array


class Replayed(NamedTuple):
  """Replayed steps, inputs of `ActorCritic.replayed_value_loss`.

  Attributes:
    read: [T, B, ...].
    rewards: [T, B] float32, rewards that arrived at the steps, by name of each head that the loss trains.
    discount: [T, B] float32, the environment's discount.
    last: [T, B] bool, steps that end an episode; their value is bootstrapped and has no loss.
    action: [T, B, A] float32, encoded actions; only `ActorCritic.context_loss` reads them.
    explores: [T, B] bool, steps at which the explorer acted.
  """

  read: sockets.PolicyInputs
  rewards: dict[str, jax.Array]
  discount: jax.Array
  last: jax.Array
  action: jax.Array
  explores: jax.Array


class Targets(NamedTuple):
  """Targets of actor and critic at imagined steps.

  Attributes:
    returns: [R, B] float32, lambda-returns for each head of the critic, by its name; read where they are
      in dreams of the head's actor.
    advantage: [R, B] float32, sum over the heads of the dream's actor of weight * advantage / divisor, see
      `update_scales`.
    weight: [R, B] float32, a step's share of the loss of its actor; 0 beyond the horizon.
  """

  returns: dict[str, jax.Array]
  advantage: jax.Array
  weight: jax.Array


class Spread(NamedTuple):
  """How far returns of a head of a critic differ in a batch, [] float32 each; NaN where nothing is imagined.

  Or a moving average of each, a `returns.Average`.

  Attributes:
    range: `returns.percentile_range` of the returns at the starts of the rollouts.
    squared_advantage: mean square of the centred errors G - V over all imagined steps.
    squared_error: mean square of the errors over all imagined steps, or of those over all replayed ones
      where it is larger.
  """

  range: Any
  squared_advantage: Any
  squared_error: Any


class Scales(NamedTuple):
  """Running statistics of returns; equal on all replicas.

  Attributes:
    spreads: moving averages of each head of a critic, by its name.
    divisors: divisor of the advantages of each head, [] float32 by its name; see `update_scales`.
    units: unit of the values of each head, likewise.
    evidence: [] float32 in [0, 1], that real returns differ: see `intrinsic.evidence`.
  """

  spreads: dict[str, Spread]
  divisors: dict[str, jax.Array]
  units: dict[str, jax.Array]
  evidence: jax.Array


def initial_scales(heads: tuple[str, ...]) -> Scales:
  """Scales before any returns; `heads` are the names of the critic's heads."""
  spreads = {name: Spread(*(returns.no_average() for _ in Spread._fields)) for name in heads}
  divisors, units = ({name: jnp.ones(()) for name in heads} for _ in range(2))
  return Scales(spreads, divisors, units, jnp.zeros((), jnp.float32))


def update_scales(
  scales: Scales, observed: Mapping[str, Spread], config: dreamer_config.DreamerConfig
) -> Scales:
  """Updates the scales of advantages and values with one batch of imagination rollouts.

    divisor = max(range of returns, root mean square of centred errors, floor)
    unit    = max(divisor, root mean square of errors)

  where range is from the 5th to the 95th percentile, all are of moving averages over batches, and floor is
  `return_floor` for the task, for an intrinsic reward NOVELTY_FLOOR or INTRINSIC_FLOOR. Below the floors an
  advantage shrinks with the differences of returns. Large returns that are rare have a range of 0; there the
  root mean squares keep advantages, and errors in units, near 1 once the averages have followed.

  Args:
    scales: the scales so far.
    observed: of each head of the critic by its name.
    config: config of the agent.

  Returns:
    The next scales.
  """
  floors = {TASK: config.return_floor, NOVELTY: dreamer_config.NOVELTY_FLOOR}
  follow = functools.partial(returns.update_average, rate=dreamer_config.RETURN_RATE)
  spreads, divisors, units = {}, {}, {}
  for name, new in observed.items():
    averages, values = zip(*map(follow, scales.spreads[name], new), strict=True)
    spreads[name], average = Spread(*averages), Spread(*values)
    floor = floors.get(name, dreamer_config.INTRINSIC_FLOOR)
    divisors[name] = jnp.maximum(
      jnp.maximum(average.range, jnp.sqrt(average.squared_advantage)), floor
    )
    units[name] = jnp.maximum(divisors[name], jnp.sqrt(average.squared_error))
  return Scales(spreads, divisors, units, scales.evidence)


def entropy_weight(policy, share: float, least_lack: float = -jnp.inf) -> jax.Array:
  """Weight of the entropy of a policy, [...] float32, in units of `entropy_scale`.

    weight = exp(CERTAINTY_EXPONENT clip((kept - H) / (kept - least), least_lack, 1))
    kept = least + share (most - least)

  where H is the policy's entropy, and least and most are its bounds. The weight is 1 at the kept entropy, larger
  below it, and smaller above it. An action whose probability is almost 0 has almost no gradient, so a policy that
  became certain of another never returns to it, whatever its critic learns later.

  Args:
    policy: a distribution of `distributions`, with leading axes [...].
    share: of the largest entropy, that is kept.
    least_lack: least exponent in units of CERTAINTY_EXPONENT; 0: the weight is at least 1.
  """
  least, most = policy.entropy_bounds()
  span = jnp.maximum(share * (most - least), 1e-6)
  lack = jax.lax.stop_gradient(least + span - policy.entropy()) / span
  return jnp.exp(dreamer_config.CERTAINTY_EXPONENT * jnp.clip(lack, least_lack, 1.0))


@dataclasses.dataclass(frozen=True)
class ActorCritic:
  """Policies and values of one environment; it holds no arrays, and its methods are pure.

  Attributes:
    networks: the networks of the world model, whose features they read.
  """

  networks: modules_lib.Networks

  @property
  def config(self) -> dreamer_config.DreamerConfig:
    return self.networks.config

  @property
  def discrete(self) -> bool:
    return self.networks.actions.discrete

  @property
  def context(self) -> sockets.Context:
    return self.networks.context

  @property
  def heads(self) -> tuple[str, ...]:
    """Names of the critics' heads: the task, and each intrinsic reward that is on."""
    return (TASK, *self.networks.rewards)

  @property
  def explores(self) -> bool:
    """Whether there is an explorer: where novelty or another reward that explores is on."""
    return any(map(self.is_explorers, self.heads))

  def is_explorers(self, head: str) -> bool:
    """Whether a head of the critics is of a reward that trains the explorer; novelty is, also while it is off."""
    return head == NOVELTY or (head != TASK and self.networks.rewards[head].explores)

  @property
  def _critics(self) -> dict[str, tuple[str, ...]]:
    """The heads of each critic by its name: values of the explorer's rewards have a network of their own."""
    if not self.explores:
      return {CRITIC: self.heads}
    own = tuple(filter(self.is_explorers, self.heads))
    return {CRITIC: tuple(name for name in self.heads if name not in own), EXPLORER_CRITIC: own}

  def critics(self, params: Tree) -> Tree:
    """The parameters of all critics by name, out of all of the actor-critic."""
    return {name: params[name] for name in self._critics}

  def dreams(self, head: str, batch: int) -> slice:
    """Which of `batch` dreams a head of the critic has: the first half the task's, the second the explorer's.

    All where there is no explorer.
    """
    if not self.explores:
      return slice(0, batch)
    return slice(batch // 2, batch) if self.is_explorers(head) else slice(0, batch // 2)

  def part(self, tree: Tree, index: jax.Array, count: int, starts: int) -> Tree:
    """One of `count` parts of dreams [R, B, ...], [R, B / count, ...] with as many of each actor's; see `dreams`.

    Either actor has `starts` dreams of each sequence, ordered by their number first; each part has every
    `count`-th of them.
    """
    actors = 1 + self.explores

    def cut(x: jax.Array) -> jax.Array:
      steps, batch, *shape = x.shape
      split = steps, actors, starts // count, count, batch // actors // starts, *shape
      own = jax.lax.dynamic_index_in_dim(x.reshape(split), index, axis=3, keepdims=False)
      return own.reshape(steps, batch // count, *shape)

    return jax.tree.map(cut, tree)

  @property
  def _last(self) -> str:
    """Name, in `rest` of actors and critics, of their last layer."""
    return f'Dense_{self.config.policy_layers - 1}'

  def _modules(self) -> dict[str, networks_lib.Towers]:
    config = self.config
    mlp = functools.partial(
      networks_lib.Towers, config.hidden_size, config.policy_layers, dtype=config.dtype
    )
    actors = (ACTOR, EXPLORER) if self.explores else (ACTOR,)
    size = self.networks.actions.num_outputs
    # In bfloat16 values of 97 would lie 0.5 apart, and ratios of probabilities differ from 1 by rounding.
    output = functools.partial(mlp, output_dtype=jnp.float32)
    return {
      **{name: output(output_size=size, output_scale=0.01) for name in actors},
      **{
        name: output(output_size=len(heads), output_scale=0.0)
        for name, heads in self._critics.items()
      },
    }

  def cast(self, params: Tree) -> Tree:
    """Parameters, for loops without gradients, with kernels in the compute dtype but for those of last layers."""
    cast = networks_lib.cast_kernels(params, self.config.dtype)
    for name in self._modules():
      rest = cast[name]['rest'] | {self._last: params[name]['rest'][self._last]}
      cast[name] = cast[name] | {'rest': rest}
    return cast

  def init(self, key: chex.PRNGKey) -> Tree:
    """Initial parameters, float32, by network: of the context module, actors and critics."""
    context = self.context
    modules = context.modules()
    own = self._modules()
    keys = dict(zip((*modules, *own), jax.random.split(key, len(modules) + len(own)), strict=True))
    features = self.networks.empty_features(1)
    params = {
      name: module.init(keys[name], jnp.zeros((1, size)))['params']
      for name, (module, size) in modules.items()
    }
    inputs = lambda name: self._towers(name, features, jnp.zeros((1, context.size)))
    params |= {
      name: module.init(keys[name], *inputs(name))['params'] for name, module in own.items()
    }
    units = {name: jnp.ones(len(heads)) for name, heads in self._critics.items()}
    return params | {name: params[name] | {UNITS: unit} for name, unit in units.items()}

  def in_units(self, critics: Tree, units: Mapping[str, jax.Array]) -> Tree:
    """Parameters of critics of the same values, whose outputs are in other units.

    As the scale of van Hasselt et al. (2016), "Learning values across many orders of magnitude", section 2.2.

    Args:
      critics: parameters by name of critic.
      units: [] float32, positive, by name of head.
    """
    changed = {}
    for name, heads in self._critics.items():
      own = critics[name]
      new = jnp.stack([units[head] for head in heads])
      layer = jax.tree.map(lambda x, ratio=own[UNITS] / new: ratio * x, own['rest'][self._last])
      changed[name] = own | {'rest': own['rest'] | {self._last: layer}, UNITS: new}
    return changed

  # Inputs.

  def read(
    self, params: Tree, memory: Tree, step: rssm.Step, novelty: jax.Array, begins: jax.Array
  ) -> sockets.PolicyInputs:
    """What actors and critics read at steps [B, ...] of novelty [B], with the context module's memory.

    The memory is cleared at the steps `begins`, [B] bool, which are the first of their episode.
    """
    own = self.context.inputs(params, step, novelty)
    return sockets.PolicyInputs(step.features, self._cleared(memory, begins), own)

  def along(self, params: Tree, replayed: rssm.Step, novelty: jax.Array) -> sockets.PolicyInputs:
    """As `read`, at replayed steps [T, B, ...], whose step 0 counts as the beginning of an episode."""
    own = self.context.inputs(params, replayed, novelty)
    begins = replayed.first.at[0].set(True)
    initial = self.context.initial(begins.shape[1])
    if not jax.tree.leaves(initial):
      return sockets.PolicyInputs(replayed.features, initial, own)

    def step(memory: Tree, inputs: tuple[Any, ...]) -> tuple[Tree, Tree]:
      features, own, begins = inputs
      memory = self._cleared(memory, begins)
      return self.context.advance(sockets.PolicyInputs(features, memory, own)), memory

    _, memory = jax.lax.scan(step, initial, (replayed.features, own, begins))
    return sockets.PolicyInputs(replayed.features, memory, own)

  def _cleared(self, memory: Tree, begins: jax.Array) -> Tree:
    """The context module's memory, at the beginnings of episodes the initial one."""
    clear = lambda x, old: jnp.where(begins.reshape(-1, *[1] * (old.ndim - 1)), x, old)
    return jax.tree.map(clear, self.context.initial(len(begins)), memory)

  def _towers(
    self, name: str, features: Features, context: jax.Array
  ) -> tuple[tuple[jax.Array, ...], ...]:
    """The inputs of network `name`, an actor or a critic, a `networks.Towers`."""
    state = jnp.concatenate([features.state, features.recalled], axis=-1)
    observed = (features.numbers,), (features.cells,), (features.places,)
    if not self.context.replaces_features:
      return (state, context), *observed
    if name in (ACTOR, EXPLORER):
      return (), (context,)
    return (state, context[..., :0]), *observed

  def _apply(self, params: Tree, name: str, features: Features, context: jax.Array) -> jax.Array:
    own = {part: x for part, x in params[name].items() if part != UNITS}
    return networks_lib.apply(self._modules()[name], own, *self._towers(name, features, context))

  def policy(
    self,
    params: Tree,
    features: Features,
    context: jax.Array,
    mask: jax.Array | None,
    explores: jax.Array | None = None,
  ):
    """The distribution of actions at steps, one of `distributions` with leading axes [...].

    Legal actions are in `mask`, [..., A] bool, or None where all are. The explorer acts at the steps
    `explores`, [...] bool, or None for none. `context` is [..., C].
    """
    outputs = self._apply(params, ACTOR, features, context)
    if explores is not None:
      novel = self._apply(params, EXPLORER, features, context)
      outputs = jnp.where(explores[..., None], novel, outputs)
    return self.networks.actions.policy(outputs, mask, self.config.unimix)

  def dreamt_policy(
    self, params: Tree, features: Features, context: jax.Array, mask: jax.Array | None
  ):
    """As `policy`, at features [..., B, ...] of B dreams, each by its own actor: see `dreams`.

    Each network is computed only for its own dreams.
    """
    if not self.explores:
      return self.policy(params, features, context, mask)
    outputs = []
    for name, head in ((ACTOR, TASK), (EXPLORER, NOVELTY)):
      outputs.append(self._apply(params, name, *self._own(head, features, context)))
    return self.networks.actions.policy(jnp.concatenate(outputs, axis=-2), mask, self.config.unimix)

  def noise(self, key: chex.PRNGKey) -> jax.Array:
    """Noise to sample one action with, [A] float32: see `Actions.noise`."""
    return self.networks.actions.noise(key)

  def sample(self, policy, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Samples an action; also returns its `ImaginedSteps.choice`, the argument of the policy's `log_prob`.

    Args:
      policy: a distribution from `policy`.
      noise: [..., A] from `noise`; zeros give the most likely action.
    """
    sampled = policy.sample(noise)
    return (sampled, sampled) if self.discrete else sampled

  def values(
    self, params: Tree, features: Features, context: jax.Array
  ) -> dict[str, distributions.Scaled]:
    """Predicted returns at features [..., ...] with [..., C] context, by head.

    The heads are of the critics that `params` has; parameters of critics are enough.
    """
    values: dict[str, distributions.Scaled] = {}
    for critic, heads in self._critics.items():
      if critic in params:
        outputs = self._apply(params, critic, features, context)
        units = jax.lax.stop_gradient(params[critic][UNITS])
        for i, head in enumerate(heads):
          values[head] = distributions.Scaled(outputs[..., i], units[i])
    return values

  def dreamt_values(
    self, params: Tree, features: Features, context: jax.Array
  ) -> dict[str, distributions.Scaled]:
    """As `values`, at features [..., B, ...]: of each head only in dreams of its actor, see `dreams`."""
    values: dict[str, distributions.Scaled] = {}
    for critic, (head, *_) in self._critics.items():
      values |= self.values({critic: params[critic]}, *self._own(head, features, context))
    return values

  def _own(self, head: str, features: Features, context: jax.Array) -> tuple[Features, jax.Array]:
    """The features and contexts of the dreams of a head, see `dreams`."""
    own = self.dreams(head, context.shape[-2])
    part: tuple[Features, jax.Array] = jax.tree.map(lambda x: x[..., own, :], (features, context))
    return part

  def loss(
    self, params: Tree, steps: ImaginedSteps, targets: Targets
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Losses of actors and critics on R imagined steps: the loss [], and metrics [] by name.

    Contexts, policy and value are computed here, inside the gradient, from what the dreams stored. Weights
    of each actor sum to 1 over all its dreams, so parts of a dream add up.
    """
    context = self.context.pool(params, steps.read)
    actor_loss, metrics = self.actor_loss(params, steps, context, targets)
    critic_loss = self.critic_loss(params, steps, context, targets)
    of_task = self.dreams(TASK, steps.choice.shape[1])
    metrics['critic_loss'] = critic_loss
    metrics['return'] = jnp.sum((targets.weight * targets.returns[TASK])[:, of_task])
    return actor_loss + critic_loss, metrics

  def actor_loss(
    self, params: Tree, steps: ImaginedSteps, context: jax.Array, targets: Targets
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of the actors, each on its own dreams, see `dreams`; by ratios, as they learn several times from a batch.

      - sum weight ( min(ratio A, clip(ratio, 1 - MOST_CHANGE, 1 + MOST_CHANGE) A) + eta sg(k) H[pi] )
      ratio = pi(a | f, context) / pi_of_the_dream(a | f, context)

    with A the advantage of `targets.imagined` and eta the config's `entropy_scale`; k is `entropy_weight`, by
    EXPLORER_ENTROPY for the explorer, and by TASK_ENTROPY, but at least 1, for the task's discrete actions.
    `context` is [R, B, C].
    """
    policy = self.dreamt_policy(params, steps.read.features, context, steps.mask)
    entropy = policy.entropy()
    advantage = jax.lax.stop_gradient(targets.advantage)
    # Densities at steps that no dream reached may be too large for float32.
    change = jnp.where(targets.weight > 0, policy.log_prob(steps.choice) - steps.log_prob, 0.0)
    ratio, most = jnp.exp(change), dreamer_config.MOST_CHANGE
    gain = jnp.minimum(advantage * ratio, advantage * jnp.clip(ratio, 1 - most, 1 + most))
    scale = jnp.full_like(entropy, self.config.entropy_scale)
    if self.discrete:
      scale *= entropy_weight(policy, dreamer_config.TASK_ENTROPY, 0.0)
    if self.explores:
      own = self.dreams(NOVELTY, steps.choice.shape[1])
      weight = entropy_weight(policy, dreamer_config.EXPLORER_ENTROPY)[:, own]
      scale = scale.at[:, own].set(self.config.entropy_scale * weight)
    loss = jnp.sum(targets.weight * (-gain - scale * entropy))

    def total(x: jax.Array, name: str = TASK) -> jax.Array:
      own = self.dreams(name, steps.choice.shape[1])
      return jnp.sum(targets.weight[:, own] * x[:, own])

    metrics = {
      'actor_loss': loss,
      'entropy': total(entropy),
      'advantage_magnitude': total(jnp.abs(targets.advantage)),
    }
    if self.explores:
      metrics['explorer_entropy'] = total(entropy, NOVELTY)
    if self.discrete:
      metrics['nothing_legal'] = total(~steps.mask.any(-1))
    return loss, metrics

  def critic_loss(
    self, params: Tree, steps: ImaginedSteps, context: jax.Array, targets: Targets
  ) -> jax.Array:
    """Loss [] of the critics: `Scaled.loss` of the returns, summed over heads, each on the dreams of its actor."""
    loss: Any = 0.0
    for name, value in self.dreamt_values(params, steps.read.features, context).items():
      own = self.dreams(name, steps.choice.shape[1])
      loss += jnp.sum(targets.weight[:, own] * value.loss(targets.returns[name][:, own]))
    return loss

  def replayed_value_loss(
    self, params: Tree, replayed: Replayed, features: Features | None = None
  ) -> jax.Array:
    """The critic's loss on replayed steps, to lambda-returns of real rewards, so model errors do not bias it.

    A mean [] over all steps but the last, where those at which a time limit ends an episode count as 0. At a
    termination the return is 0. A return is cut where the actor of another head acted. `features` stand in
    for those of `replayed`, if given.
    """
    judged, counts = self._judged(params, replayed, features)
    loss: Any = sum(value.loss(return_) for value, return_ in judged.values())
    return jnp.mean(jnp.where(counts, loss, 0.0))

  def replayed_squared_errors(self, params: Tree, replayed: Replayed) -> dict[str, jax.Array]:
    """Mean square [] of the errors of values on replayed steps, by head; as `replayed_value_loss`."""
    judged, counts = self._judged(params, replayed)
    errors = {name: return_ - value.mean() for name, (value, return_) in judged.items()}
    return {name: jnp.mean(jnp.where(counts, jnp.square(x), 0.0)) for name, x in errors.items()}

  def _judged(
    self, params: Tree, replayed: Replayed, features: Features | None = None
  ) -> tuple[dict[str, tuple[distributions.Scaled, jax.Array]], jax.Array]:
    """Values and returns by head at the replayed steps but the last, and which of them count, [T - 1, B] each."""
    context = self.context.pool(params, replayed.read)
    inputs = replayed.read.features if features is None else features, context
    last, discount, explores = replayed.last, replayed.discount, replayed.explores
    values = self.values(params, *inputs)
    terminated = last & (discount == 0)
    judged = {}
    for name, reward in replayed.rewards.items():
      value = values[name]
      others = ~explores if self.is_explorers(name) else explores
      return_ = returns.lambda_returns(
        reward,
        discount,
        jax.lax.stop_gradient(value.mean()),
        gamma=self.config.gamma,
        lambda_=self.config.lambda_,
        bootstrap_t=last | others,
      )
      return_ = jnp.where(terminated[:-1], 0.0, return_)
      judged[name] = value._replace(output=value.output[:-1]), return_
    return judged, ~(last & ~terminated)[:-1]

  def latent_loss(
    self, params: Tree, replayed: rssm.Step, novelty: jax.Array, sequence: experience.Sequence
  ) -> jax.Array:
    """The task's loss of `replayed_value_loss` [], as a function of the features only.

    Its gradient reaches the world model, whose latents then keep what later rewards depend on. `novelty`,
    [T, B], and `sequence` are of the same steps as `replayed`, [T, B, ...].
    """
    params, frozen, novelty = jax.lax.stop_gradient((params, replayed, novelty))
    read = self.along(params, frozen, novelty)
    steps = Replayed(
      read, {TASK: sequence.reward}, sequence.discount, sequence.step_type == LAST,
      sequence.action, self.explored(sequence),
    )  # fmt: skip
    return self.replayed_value_loss(params, steps, replayed.features)

  def explored(self, sequence: experience.Sequence) -> jax.Array:
    """At which steps [T, B] of replayed sequences the explorer acted, bool."""
    nowhere = jnp.zeros(sequence.reward.shape, bool)
    return sequence.extras.get('explores', nowhere)

  def context_loss(self, params: Tree, replayed: Replayed) -> jax.Array | None:
    """The context module's own loss on replayed steps, [], see `Context.loss`; None without one.

    The module learns from how far the critic errs, r + gamma d V' - V summed over the rewards that train the
    task's actor (the task's own, and others that do not explore), in units of `return_floor`.
    """
    config, read = self.config, replayed.read
    pooled = self.context.pool(params, read)
    values = jax.lax.stop_gradient(self.values(params, read.features, pooled))
    names = [name for name in replayed.rewards if not self.is_explorers(name)]
    value: Any = sum(values[name].mean() for name in names)
    reward = sum(replayed.rewards[name] for name in names)
    target = reward + config.gamma * replayed.discount * value
    error = (target[1:] - value[:-1]) / config.return_floor
    before, action = jax.tree.map(lambda x: x[:-1], (read, replayed.action))
    loss = self.context.loss(params, before, action, error)
    return None if loss is None else jnp.mean(jnp.where(replayed.last[:-1], 0.0, loss))
