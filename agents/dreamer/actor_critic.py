"""Salience pooling, actor and critic, and their losses on dreams and on replayed rows.

    score_i = MLP([f_i, novelty_i])      w = softmax(score)      context = sum_i w_i f_i
    actor([f_t, context_t])              critic([f_t, context_t])

In an environment with a map, all three also read it as seen from the agent: see `sight`. The window of the
last W features is pooled in acting, in dreams and in replay alike; rows before an episode's FIRST
are left out. With W = 1 there is nothing to look back on: no score, and a context of no numbers.
"""

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from dm_env import specs

from hephaestus.agents import distributions, networks, returns, sight
from hephaestus.agents.dreamer import config as dreamer_config

Tree = Any


class Window(NamedTuple):
  """The last W rows that salience pooling looks back on, oldest first, or W - 1 + R for R rows.

  Attributes:
    features: [B, W, F] in the compute dtype.
    scores: [B, W] float32.
    episode: [B, W] int32; only rows of the newest row's episode count.
  """

  features: jax.Array
  scores: jax.Array
  episode: jax.Array


class Rows(NamedTuple):
  """Consecutive dreamt rows and the W - 1 before them, all that their losses read.

  Attributes:
    features: [B, W - 1 + R, F] in the compute dtype.
    novelty: [B, W - 1 + R] float32.
    episode: [B, W - 1 + R] int32.
    choice: [B, R] or [B, R, M] int32 actions, or [B, R, A] float32 actions before tanh.
    mask: [B, R, A] bool.
  """

  features: jax.Array
  novelty: jax.Array
  episode: jax.Array
  choice: jax.Array
  mask: jax.Array


class Targets(NamedTuple):
  """What the rows of a dream are taught.

  Attributes:
    return_: [B, R] float32.
    advantage: [B, R] float32, divided by the spread of returns.
    slow_value: [B, R] float32, of the slow critic.
    weight: [B, R] float32, a row's share of the loss; 0 beyond the horizon.
  """

  return_: jax.Array
  advantage: jax.Array
  slow_value: jax.Array
  weight: jax.Array


@dataclasses.dataclass(frozen=True)
class ActorCritic:
  """Policy and value of one environment; every method is a pure function of `params`.

  Attributes:
    config: sizes and constants.
    action_spec: see `distributions.Actions`.
    feature_size: F, of the world model.
    action_size: A, of the world model's encoded action.
    sight: of the world model.
  """

  config: dreamer_config.DreamerConfig
  action_spec: specs.BoundedArray
  feature_size: int
  action_size: int
  sight: sight.Sight

  @property
  def discrete(self) -> bool:
    return self._actions.discrete

  @property
  def looks_back(self) -> bool:
    """Whether there is a context."""
    return self.config.window > 1

  @property
  def _actions(self) -> distributions.Actions:
    return distributions.Actions(self.action_spec)

  def _modules(self) -> dict[str, networks.MLP]:
    config = self.config
    mlp = lambda layers, size, scale: networks.MLP(
      config.hidden_size, layers, size, scale, dtype=config.dtype
    )
    modules = {
      'actor': mlp(config.policy_layers, self._actions.num_outputs, 0.01),
      'critic': mlp(config.policy_layers, config.num_bins, 0.0),
    }
    return {'salience': mlp(1, 1, 0.1)} | modules if self.looks_back else modules

  def init(self, key: chex.PRNGKey) -> Tree:
    """Parameters, float32, of 'salience' where it looks back, 'actor' and 'critic'."""
    modules = self._modules()
    keys = jax.random.split(key, len(modules))
    context_size = self.feature_size if self.looks_back else 0
    beside = {'salience': 1, 'actor': context_size, 'critic': context_size}
    size = self.feature_size + self.sight.view_size
    return {
      name: module.init(key, jnp.zeros((1, size + beside[name])))['params']
      for key, (name, module) in zip(keys, modules.items(), strict=True)
    }

  def _apply(self, params: Tree, name: str, features: jax.Array, beside: jax.Array) -> jax.Array:
    """A network that reads features, the map in them as seen from the agent, and one thing more."""
    seen = features[..., self.feature_size - self.sight.size :]
    return networks.apply(
      self._modules()[name], params[name], features, self.sight.view(seen), beside
    )

  def scores(self, params: Tree, features: jax.Array, novelty: jax.Array) -> jax.Array:
    """[..., F] features and [...] novelty to [...] float32 salience; zeros unless it looks back."""
    if not self.looks_back:
      return jnp.zeros(novelty.shape, jnp.float32)
    novelty = jnp.log1p(novelty)[..., None].astype(features.dtype)
    return self._apply(params, 'salience', features, novelty)[..., 0].astype(jnp.float32)

  def pool(self, window: Window) -> jax.Array:
    """[B, W, ...] to the context of the newest row, [B, F]; [B, 0] unless it looks back."""
    if not self.looks_back:
      return window.features[:, -1, :0]
    same = window.episode == window.episode[:, -1:]
    weights = jax.nn.softmax(jnp.where(same, window.scores, -jnp.inf), axis=1)
    return jnp.sum(weights[..., None].astype(window.features.dtype) * window.features, axis=1)

  def pool_rows(self, window: Window) -> jax.Array:
    """[B, W - 1 + R, ...] to the context of each of the last R rows, [B, R, F], or [B, R, 0].

    A product of matrices for each dream, or sequence; so the rows of one lie beside each other.
    """
    if not self.looks_back:
      return window.features[..., :0]
    return self.weights(window).astype(window.features.dtype) @ window.features

  def weights(self, window: Window) -> jax.Array:
    """[B, W - 1 + R, ...] to what each row counts for the context of the last R, [B, R, W - 1 + R].

    They sum to 1 over the rows that are looked back on; those outside the window, or of another
    episode, have none. Float32.
    """
    before = self.config.window - 1
    newest = window.episode[:, before:]
    age = jnp.arange(before, window.episode.shape[1])[:, None] - jnp.arange(window.episode.shape[1])
    counts = (window.episode[:, None] == newest[..., None]) & (age >= 0) & (age <= before)
    return jax.nn.softmax(jnp.where(counts, window.scores[:, None], -jnp.inf), axis=-1)

  def policy(self, params: Tree, features: jax.Array, context: jax.Array, mask: jax.Array | None):
    """The distribution over actions at [..., F] features with [..., F] context."""
    outputs = self._apply(params, 'actor', features, context)
    return self._actions.policy(outputs, mask, self.config.unimix)

  def noise(self, key: chex.PRNGKey) -> jax.Array:
    """Standard noise for one action, [A]."""
    return self._actions.noise(key)

  def sample(self, policy, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An action, and the choice behind it whose likelihood is known (see `Rows.choice`)."""
    sampled = policy.sample(noise)
    return (sampled, sampled) if self.discrete else sampled

  def value(self, params: Tree, features: jax.Array, context: jax.Array) -> distributions.TwoHot:
    """The belief about the return from [..., F] features with [..., F] context."""
    return distributions.TwoHot.from_logits(
      self._apply(params, 'critic', features, context), self.config.bin_limit
    )

  def loss(
    self, params: Tree, rows: Rows, targets: Targets
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Score-function loss of the actor and likelihood loss of the critic on dreamt rows.

      actor:  - weight ( sg(advantage) log pi(a | f, context) + eta H[pi] )
      critic: - weight ( log p(sg(return)) + log p(sg(slow value)) )

    Pooling, policy and value are computed here, inside what is differentiated, from the features,
    actions and masks that the dream stored.

    Args:
      params: of salience, actor and critic.
      rows: R rows of a dream.
      targets: for these rows; the weights sum to 1 over the whole dream.

    Returns:
      The loss [] (a sum, so that parts of a dream add up), and metrics that add up likewise.
    """
    config = self.config
    window = Window(rows.features, self.scores(params, rows.features, rows.novelty), rows.episode)
    context = self.pool_rows(window)
    features = rows.features[:, config.window - 1 :]
    policy = self.policy(params, features, context, rows.mask)
    entropy = policy.entropy()
    log_prob = policy.log_prob(rows.choice)
    actor = -jax.lax.stop_gradient(targets.advantage) * log_prob - config.entropy_scale * entropy
    value = self.value(params, features, context)
    critic = -value.log_prob(targets.return_)
    critic -= config.slow_critic_scale * value.log_prob(targets.slow_value)
    total = lambda x: jnp.sum(targets.weight * x)
    metrics = {
      'actor_loss': total(actor),
      'critic_loss': total(critic),
      'entropy': total(entropy),
      'return': total(targets.return_),
      'advantage_magnitude': total(jnp.abs(targets.advantage)),
    }
    if self.discrete:
      metrics['nothing_legal'] = total(~rows.mask.any(-1))
    return total(actor + critic), metrics

  def replayed_value_loss(
    self,
    params: Tree,
    slow_critic: Tree,
    window: Window,
    novelty: jax.Array,
    reward: jax.Array,
    discount: jax.Array,
    last: jax.Array,
  ) -> jax.Array:
    """The critic's loss on what really happened, where no model can flatter it.

    Args:
      params: of salience and critic.
      slow_critic: parameters of the slow critic.
      window: [B, W - 1 + T, ...] replayed rows, W - 1 of no episode before them; its scores are
        unread.
      novelty: [B, W - 1 + T] float32.
      reward: [T, B] float32, the task's and the drives'.
      discount: [T, B] float32.
      last: [T, B] bool, rows that end an episode: they lend a value and earn no loss.
    """
    config = self.config
    window = window._replace(scores=self.scores(params, window.features, novelty))
    by_row = lambda x: jnp.swapaxes(x, 0, 1)
    context = by_row(self.pool_rows(window))
    features = by_row(window.features[:, config.window - 1 :])
    slow = self.value({'critic': slow_critic}, features, jax.lax.stop_gradient(context)).mean()
    return_ = returns.lambda_returns(
      reward, discount, slow, gamma=config.gamma, lambda_=config.lambda_, bootstrap_t=last
    )
    value = self.value(params, features[:-1], context[:-1])
    loss = -value.log_prob(return_) - config.slow_critic_scale * value.log_prob(slow[:-1])
    return jnp.mean(jnp.where(last[:-1], 0.0, loss))
