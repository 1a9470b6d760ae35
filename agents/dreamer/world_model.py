"""The world model: an RSSM with heads for reward, continuation and legal actions, and its loss."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from dm_env import specs

from hephaestus.agents import agent as agent_lib
from hephaestus.agents import distributions, experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import modules, sockets
from hephaestus.agents.dreamer import novelty as novelty_lib
from hephaestus.agents.dreamer import numbers as numbers_lib
from hephaestus.agents.dreamer import rssm as rssm_lib

Tree = Any

MEMORY = 'memory'
"""Name of what a memory holds, among the statistics of the agent."""


@dataclasses.dataclass(frozen=True)
class WorldModel:
  """The world model of one environment; it holds no arrays, and its methods are pure.

  Parameters of the world model, below, are those of `modules.world`: its networks with its statistics.

  Attributes:
    config: sizes and constants.
    observation_spec: tree of `dm_env.specs.Array`.
    action_spec: see `distributions.Actions`.
    guests: what is plugged in.
  """

  config: dreamer_config.DreamerConfig
  observation_spec: Any
  action_spec: specs.BoundedArray
  guests: sockets.Guests = sockets.NO_GUESTS

  @functools.cached_property
  def networks(self) -> modules.Networks:
    return modules.Networks(self.config, self.observation_spec, self.action_spec, self.guests)

  @functools.cached_property
  def rssm(self) -> rssm_lib.RSSM:
    return rssm_lib.RSSM(self.networks)

  @functools.cached_property
  def rewards(self) -> dict[str, sockets.Reward]:
    """The intrinsic rewards that are on, by name.

    Raises:
      ValueError: the environment's specs do not fit one of them.
    """
    return {name: kind(self.rssm) for name, kind in self.networks.rewards.items()}

  def init(self, key: chex.PRNGKey) -> tuple[Tree, Tree]:
    """Initial parameters, see `Networks.init`, with networks of intrinsic rewards; and initial statistics."""
    others = [item for reward in self.rewards.values() for item in reward.modules().items()]
    params = self.networks.init(key, dict(others))
    statistics: Tree = {modules.NUMBERS: self.networks.numbers.initial_statistics()}
    if modules.CHANGE in params:
      statistics[modules.AVERAGE_CHANGE] = jax.tree.map(jnp.copy, params[modules.CHANGE])
    of_rewards = {name: reward.statistics() for name, reward in self.rewards.items()}
    if any(of_rewards.values()):
      statistics[modules.OF_REWARDS] = {name: x for name, x in of_rewards.items() if x}
    return params, statistics

  def recall(
    self, params: Tree, observation: Tree, version: jax.Array | None = None
  ) -> tuple[jax.Array | None, Any]:
    """What a memory recalls at observations, see `Memory.recall`; None and None without a memory.

    `params` are those of all parts of the agent.
    """
    memory = self.networks.memory
    if memory is None:
      return None, None
    return memory.recall(params[agent_lib.STATISTICS][MEMORY], observation, version)

  # Steps.

  def observe(
    self,
    params: Tree,
    recurrent: rssm_lib.Recurrent,
    observation: Tree,
    first: jax.Array,
    noise: jax.Array | None,
  ) -> tuple[rssm_lib.Step, Any]:
    """One observed step, as in acting; see `RSSM.observe`.

    Args:
      params: parameters of all parts of the agent.
      recurrent: state after the previous step, [B, ...].
      observation: tree of [B, ...] arrays.
      first: [B] bool, whether the step is FIRST.
      noise: [B, ...] from `RSSM.noise`, or None for the mode.

    Returns:
      The step [B, ...], and the second result of `recall`.
    """
    recalled, recall = self.recall(params, observation)
    world = modules.world(params)
    return self.rssm.observe(world, recurrent, observation, first, noise, recalled), recall

  def replay(self, params: Tree, keys: jax.Array, sequence: experience.Sequence) -> rssm_lib.Step:
    """The steps [T, B, ...] of real sequences; see `RSSM.infer`.

    Args:
      params: parameters of all parts of the agent.
      keys: [B] PRNG keys, one for each sequence.
      sequence: [T, B, ...].
    """
    recalled, _ = self.recall(params, sequence.observation)
    return self.rssm.infer(modules.world(params), keys, sequence, recalled)

  def imagine(self, params: Tree, *arguments: Any) -> rssm_lib.Step:
    """One imagined step [B', ...], with its predicted discount; arguments as of `RSSM.imagine`."""
    step = self.rssm.imagine(params, *arguments)
    return step._replace(discount=self.discount(params, step.features))

  def novelty(self, step: rssm_lib.Step) -> jax.Array:
    """Novelty of the transition to a step, [...] float32, by the measure of the config."""
    return novelty_lib.novelty_of(self.config.novelty, step.priors.moments())

  def intrinsic_rewards(
    self, params: Tree, before: rssm_lib.Step, after: rssm_lib.Step, novelty: jax.Array
  ) -> dict[str, jax.Array]:
    """The intrinsic rewards that arrive at a step, [...] float32 each by name; see `Reward.reward`.

    `novelty` [...] is computed already, since boredom and context modules read it, too.
    """
    return {
      name: novelty if name == novelty_lib.NAME else reward.reward(params, before, after)
      for name, reward in self.rewards.items()
    }

  def replayed_rewards(
    self, params: Tree, replayed: rssm_lib.Step, novelty: jax.Array
  ) -> dict[str, jax.Array]:
    """The intrinsic rewards [T, B] of replayed steps.

    They are 0 where no transition leads to a step, unless they are centred: their mean is over all steps.
    """
    shift = lambda x: jnp.concatenate([x[:1], x[:-1]])
    state, features = jax.tree.map(shift, (replayed.latent, replayed.features))
    before = replayed._replace(latent=state, features=features)
    begins = replayed.first.at[0].set(True)
    rewards = self.intrinsic_rewards(params, before, replayed, novelty)
    return {
      name: x if self.rewards[name].is_centred else jnp.where(begins, 0.0, x)
      for name, x in rewards.items()
    }

  # Heads.

  def reward(self, params: Tree, features: modules.Features) -> distributions.TwoHot:
    """The predicted distribution of the reward that arrived at the step, [...]."""
    logits = self.networks.head(params, modules.REWARD, features)
    return distributions.TwoHot.from_logits(logits, self.config.bin_limit)

  def discount(self, params: Tree, features: modules.Features) -> jax.Array:
    """The predicted probability that the episode continues, [...] float32."""
    return jax.nn.sigmoid(
      self.networks.head(params, modules.CONTINUE, features)[..., 0].astype(jnp.float32)
    )

  def action_mask(self, params: Tree, features: modules.Features) -> jax.Array:
    """The actions predicted to be legal, [..., A] bool; all without a mask."""
    if not self.networks.has_mask:
      return jnp.ones((*features.state.shape[:-1], self.networks.actions.size), bool)
    return self.networks.head(params, modules.MASK, features) > 0

  def decode(
    self,
    params: Tree,
    latent: rssm_lib.Latent,
    previous: jax.Array,
    before: jax.Array,
    first: jax.Array,
  ) -> Tree:
    """The most likely observation at a step.

    Args:
      params: parameters of the world model.
      latent: [..., H], [..., Z] and [..., F] of the step; its numbers are read only at `first`.
      previous: [..., C], inputs of the transition to the step.
      before: [..., F], numbers of the previous step.
      first: [...] bool, steps without a previous step.

    Returns:
      A tree of [..., *shape] float32 arrays, the observation without its action mask.
    """
    numbers, statistics = self.networks.numbers, params[modules.NUMBERS]
    earlier = rssm_lib.following(self.rssm.read(params, before), first)
    choose = lambda outputs, _: numbers.expected(
      numbers.predict(outputs, before, ~first, statistics), before, statistics
    )
    expected, images = self.rssm.decoded_numbers(params, latent, previous, earlier, choose)
    if earlier:  # what no step leads to is not learned, see `_reconstruction_loss`
      expected = jnp.where(first[..., None], latent.numbers, expected)
    flat = numbers.to_flat(expected)
    return self.networks.codec.assemble(flat, images)

  # The loss.

  def loss(
    self,
    params: Tree,
    keys: jax.Array,
    sequence: experience.Sequence,
    value_loss: Callable[[rssm_lib.Step], jax.Array] = lambda replayed: jnp.zeros(()),
    recalled: jax.Array | None = None,
  ) -> tuple[jax.Array, tuple[rssm_lib.Step, jax.Array, Tree, dict[str, jax.Array]]]:
    """The world model's loss on real sequences: the negative ELBO and auxiliary losses, in float32.

      reconstruction + heads + value + intrinsic rewards
        + mean_k [ m_k (KL(sg q || p_k) + change_k) + b_rep max(free, KL(q || sg p_k)) ]

      heads = sum_read [ reward_scale reward + continue + mask ]

    averaged over [T, B], with q the posterior, p_k the prior of member k, b_rep
    `representation_scale`, free `free_nats`, and change_k the loss of a member's predicted changes of
    numbers. m_k is the bootstrap mask of (member, sequence), which the sequence's identity seeds, so that it
    is the same in every replay. No transition leads to FIRST, whose reward and change are not learned, and with
    grids none of its numbers.
    The heads learn from two readings of each step: all its features, and those of its observation alone, as
    if h and the transition had been dropped out. With all features only, they would know the few rewarded
    steps of replay by their h, and not recognise another one. With grids the decoder learns from two, too:
    of all that it reads, and without the belief, else the posterior's z would tell it what follows, and what it knows of whole observations would hide what is the same in all cells. And the heads then also
    learn from steps that are imagined from real ones, see `_imagined`.

    Args:
      params: parameters of the world model.
      keys: [B] PRNG keys, one for each sequence.
      sequence: batch of sequences, [T, B, ...].
      value_loss: function of the steps, [T, B, ...], the critic's loss []; its gradient makes latents keep
        what later rewards depend on.
      recalled: [T, B, R] float32, from a memory; None without one.

    Returns:
      The loss [], and (steps [T, B, ...], predicted rewards [T, B], moments of numbers for `statistics`,
      metrics [] by name).
    """
    posterior = self.rssm.infer(params, keys, sequence, recalled)
    features = posterior.features
    reconstruction, moments, expected = self._reconstruction_loss(params, keys, posterior, sequence)
    expected_reward = self.reward(params, features).mean()
    reward, continues, mask = self._heads_loss(params, features, sequence)
    learns = bootstrap_mask(sequence.identity, self.config.ensemble_size)
    dynamics_kl, kl = self._kl(posterior, learns)
    change, change_moments = self._change_loss(params, posterior, sequence, learns)
    scaled_reward = self.config.reward_scale * reward
    loss = jnp.mean(reconstruction + scaled_reward + continues + mask + kl + change)
    if posterior.earlier:
      imagined, steps = self._imagined(params, keys, posterior, sequence)
      own_reward, *others = self._heads_loss(params, imagined, steps)
      own = self.config.reward_scale * own_reward + sum(others)
      loss += jnp.mean(jnp.where(steps.step_type == rssm_lib.FIRST, 0.0, own))
    of_rewards = [
      each.loss(params, keys, posterior, sequence, expected) for each in self.rewards.values()
    ]
    perception_loss, perceived = self._perception_loss(params, keys, posterior, sequence)
    loss += value_loss(posterior) + sum(own_loss for own_loss, _ in of_rewards) + perception_loss
    metrics = {
      'loss': loss,
      'reconstruction': reconstruction.mean(),
      'reward': reward.mean(),
      'continue': continues.mean(),
      'mask': mask.mean(),
      'change': change.mean(),
      'kl': dynamics_kl.mean(),
      # A mean over all steps, since devices average it without their counts of other than FIRST.
      'kl_after_first': jnp.where(posterior.first, 0.0, dynamics_kl).mean(),
      **{name: x for _, own_metrics in of_rewards for name, x in own_metrics.items()},
      **perceived,
    }
    stop = jax.lax.stop_gradient
    return loss, (*stop((posterior, expected_reward, moments | change_moments)), metrics)

  def averages(self, params: Tree, statistics: Tree, moments: Tree, batch: sockets.Batch) -> Tree:
    """The model's statistics after an update, but for those of intrinsic rewards.

    Args:
      params: parameters of the world model after the update.
      statistics: its statistics before.
      moments: moments of a part of the batch, from `loss`.
      batch: reductions over the whole batch.
    """
    updated = self.networks.numbers.updated(statistics[modules.NUMBERS], moments, batch)
    statistics = statistics | {modules.NUMBERS: updated}
    if modules.CHANGE in params:
      statistics[modules.AVERAGE_CHANGE] = optax.incremental_update(
        params[modules.CHANGE],
        statistics[modules.AVERAGE_CHANGE],
        dreamer_config.AVERAGE_CHANGE_RATE,
      )
    return statistics

  def followed(
    self,
    statistics: Tree,
    replayed: rssm_lib.Step,
    novelty: jax.Array,
    mean: Callable[[jax.Array], jax.Array],
  ) -> Tree:
    """The model's statistics with those of intrinsic rewards after an update; see `Reward.updated`."""
    if modules.OF_REWARDS not in statistics:
      return statistics
    of_rewards = {
      name: self.rewards[name].updated(own, replayed, novelty, mean)
      for name, own in statistics[modules.OF_REWARDS].items()
    }
    return statistics | {modules.OF_REWARDS: of_rewards}

  def _reconstruction_loss(
    self, params: Tree, keys: jax.Array, posterior: rssm_lib.Step, sequence: experience.Sequence
  ) -> tuple[jax.Array, Tree, jax.Array]:
    """Loss [T, B] of decoded observations, moments of numbers (see `averages`), and decoded numbers.

    With grids it is the sum of two, of all that the decoder reads, and of all but the belief; what is beside them counts
    once, given the real grid. It counts by its logarithm where it is large, see SCENE. Where numbers are
    `drawn without z <modules.Networks.draws_without_latent>` it is the sum of two, too: of all, with z in half of the
    sequences, and of the previous observation and the action only. On replayed steps h and the posterior's z tell what
    follows, and what is the same in all episodes would not be learned from them.
    """
    numbers, codec = self.networks.numbers, self.networks.codec
    latent, observed = posterior.latent, posterior.latent.numbers
    if self.networks.draws_without_latent:
      # Numbers of steps are folded in elsewhere, and the numbers before by `_imagined` and guests.
      coin = lambda key: jax.random.bernoulli(jax.random.fold_in(key, len(sequence.reward) + 3))
      tells = jax.vmap(coin)(keys)[:, None]
      latent = latent._replace(stochastic=jnp.where(tells, latent.stochastic, 0))
    outputs, decoded = self.rssm.decoder(params, latent, posterior.previous)
    if posterior.earlier:  # at once, since most of it is the same
      belief = self.rssm.decoder_inputs(latent, posterior.previous)
      beliefs = jnp.stack([belief, jnp.zeros_like(belief)])
      of_all, of_cells = self.rssm.decoded_cells(
        params, beliefs, posterior.previous, posterior.earlier
      )
      own = posterior.previous, posterior.earlier, posterior.features.changed
      beside = self.rssm.beside_grids(params, latent, *own)
      outputs = jnp.concatenate([outputs + of_all, beside], axis=-1)
      of_cells = jnp.concatenate([of_cells, jnp.zeros_like(beside)], axis=-1)
    statistics = jax.lax.stop_gradient(params[modules.NUMBERS])
    before = _before(observed, sequence.initial_state.latent.numbers)
    predict = lambda outputs: numbers.predict(outputs, before, ~posterior.first, statistics)
    predicted = predict(outputs)
    loss, error = numbers.loss(predicted, observed, statistics)
    if self.networks.draws_without_latent:
      nothing = latent._replace(
        deterministic=jnp.zeros_like(latent.deterministic),
        stochastic=jnp.zeros_like(latent.stochastic),
      )
      alone, _ = self.rssm.decoder(params, nothing, posterior.previous)
      nats, _ = numbers.loss(predict(alone), observed, statistics)
      loss += jnp.where(posterior.first, 0.0, nats)
    if posterior.earlier:
      loss += numbers.loss(predict(of_cells), observed, statistics, of_grids=True)[0]
      # No transition leads to FIRST, so nothing reads what is predicted there: new scenes, which cost most. Those
      # within an episode nobody can predict either, and Adam would divide all other gradients by theirs.
      loss = jnp.where(
        posterior.first, 0.0, dreamer_config.SCENE * jnp.log1p(loss / dreamer_config.SCENE)
      )
      error = jnp.where(posterior.first[..., None], statistics.get('error', 0.0), error)
    if self.networks.cnn_specs:
      _, *images = codec.encode(sequence.observation)
      loss += codec.image_loss(decoded, images)
    moments = numbers.moments(observed, error, statistics)
    return loss, moments, numbers.expected(predicted, before, statistics)

  def _heads_loss(
    self, params: Tree, features: modules.Features, sequence: experience.Sequence
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Losses [T, B] of the heads of reward, continuation and mask, each summed over both readings of features.

    The reward at FIRST is not learned.
    """
    legal = observation_lib.action_mask(sequence.observation)

    def losses(read: modules.Features) -> tuple[jax.Array, ...]:
      log_prob = self.reward(params, read).log_prob(sequence.reward)
      logits = lambda name: self.networks.head(params, name, read).astype(jnp.float32)
      loss = lambda logits, target: jax.nn.softplus(logits) - target * logits
      continues = loss(logits(modules.CONTINUE)[..., 0], sequence.discount)
      if legal is None:
        return -log_prob, continues, jnp.zeros_like(continues)
      return (
        -log_prob,
        continues,
        jnp.sum(loss(logits(modules.MASK), legal.astype(jnp.float32)), axis=-1),
      )

    both = losses(features), losses(self.networks.of_observation(features))
    reward, continues, mask = jax.tree.map(jnp.add, *both)
    return jnp.where(sequence.step_type == rssm_lib.FIRST, 0.0, reward), continues, mask

  def _imagined(
    self, params: Tree, keys: jax.Array, posterior: rssm_lib.Step, sequence: experience.Sequence
  ) -> tuple[modules.Features, experience.Sequence]:
    """Features of replayed steps as each would be imagined from the real step before it, and the steps.

    Heads that only ever saw real observations pay, at every step, for scenes that do not exist, as where a
    dream has lost the ball: from these they learn what really followed. Only the heads, with their vectors
    CHANGED, have a gradient. One step of IMAGINED_PERIOD in each sequence is imagined, [T', B, ...], for the
    time that it takes. At FIRST steps, which have none before them, the features mean nothing.
    """
    frozen, posterior = jax.lax.stop_gradient((params, posterior))
    num_steps, batch = sequence.reward.shape
    period = min(dreamer_config.IMAGINED_PERIOD, num_steps)
    count = num_steps // period

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array, rssm_lib.Noise]:
      # Numbers of steps are folded in elsewhere, and the next two numbers by guests.
      member_key, step_key, noise_key = jax.random.split(jax.random.fold_in(key, num_steps + 2), 3)
      noise = jax.vmap(self.rssm.imagined_noise)(jax.random.split(noise_key, count))
      step = jax.random.randint(step_key, (), 0, period) + period * jnp.arange(count)
      return jax.random.randint(member_key, (), 0, self.config.ensemble_size), step, noise

    member, step, noise = jax.vmap(draw, out_axes=(0, 1, 1))(keys)
    stream = jnp.arange(batch)
    pick = lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[step, stream], tree)
    prior = jax.tree.map(lambda x: x[member, step, stream], posterior.priors.belief)
    earlier, previous, latent = pick(
      (posterior.earlier, posterior.previous, posterior.latent._replace(inputs=None))
    )
    latent = latent._replace(
      stochastic=prior.sample(noise.latent).astype(self.config.dtype),
      numbers=pick(_before(posterior.latent.numbers, sequence.initial_state.latent.numbers)),
    )
    numbers = self.rssm.imagined_numbers(frozen, latent, previous, earlier, noise)
    percept = posterior.latent.percept
    if percept is not None:
      before = _before(percept, sequence.initial_state.latent.percept)
      percept = self.rssm.follow(frozen, pick(before), latent, previous)
    inputs = self.rssm.read(frozen, numbers, percept)
    latent = latent._replace(numbers=numbers, percept=percept, inputs=inputs)
    features = self.rssm.features(params, latent, previous, earlier=earlier)
    steps = {
      name: pick(getattr(sequence, name))
      for name in ('observation', 'reward', 'discount', 'step_type')
    }
    transition = pick(posterior.features.transition)  # with what was recalled at the step before
    return features._replace(transition=transition), sequence._replace(**steps)

  def _perception_loss(
    self, params: Tree, keys: jax.Array, posterior: rssm_lib.Step, sequence: experience.Sequence
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss [] of the perception, and its metrics [] by name; 0 without one."""
    perception, codec, percept = (
      self.networks.perception, self.networks.codec, posterior.latent.percept
    )  # fmt: skip
    if perception is None or percept is None:
      return jnp.zeros(()), {}
    _, images = codec.encode(sequence.observation)
    steps = sockets.Percepts(
      percept=percept,
      images=images,
      before=_before(percept, sequence.initial_state.latent.percept),
      context=self.rssm.decoder_inputs(posterior.latent, posterior.previous),
      follows=~posterior.first,
      image_loss=lambda painted, images: codec.image_loss([painted], [images]),
    )
    loss, metrics = perception.loss(params[perception.name], keys, steps)
    return loss, {f'{perception.name}/{name}': x for name, x in metrics.items()}

  def _change_loss(
    self, params: Tree, posterior: rssm_lib.Step, sequence: experience.Sequence, learns: jax.Array
  ) -> tuple[jax.Array, Tree]:
    """Loss [T, B] of the members' predicted changes of numbers, and the moment `change` by its name.

    No transition leads to a FIRST step: its loss is 0, and it adds the running statistic to the moment,
    so that it does not move the statistic.
    """
    numbers, first = self.networks.numbers, posterior.first
    if not numbers.num_changes:
      return jnp.zeros(first.shape), {}
    statistics = jax.lax.stop_gradient(params[modules.NUMBERS])
    observed = posterior.latent.numbers
    change = numbers.change(
      _before(observed, sequence.initial_state.latent.numbers), observed, statistics
    )
    scale = jnp.sqrt(jnp.maximum(statistics['change'], numbers_lib.MIN_CHANGE_SQUARE))
    predicted = self.rssm.change(params, posterior.latent.deterministic, posterior.previous)
    loss = predicted.loss(change / scale)
    square = jnp.where(first[..., None], statistics['change'], jnp.square(change))
    loss = jnp.where(first, 0.0, jnp.mean(learns[:, None] * loss, axis=0))
    return loss, {'change': jnp.mean(square, axis=(0, 1))}

  def _kl(self, posterior: rssm_lib.Step, learns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """KL(q || p_k) of each member, [K, T, B], and the weighted loss of both KL terms of `loss`, [T, B]."""
    config, stop = self.config, jax.lax.stop_gradient
    belief, priors = posterior.belief, posterior.priors.belief
    dynamics_kl = stop(belief).kl(priors)
    representation_kl = jnp.maximum(config.free_nats, belief.kl(stop(priors)))
    loss = learns[:, None] * dynamics_kl
    loss += config.representation_scale * representation_kl
    return dynamics_kl, jnp.mean(loss, axis=0)


def _before(x: jax.Array, initial: jax.Array) -> jax.Array:
  """What [T, B, ...] was at the step before each step, [T, B, ...], at the first `initial` [B, ...]."""
  return jnp.concatenate([initial.astype(x.dtype)[None], x[:-1]])


def bootstrap_mask(identity: jax.Array, num_members: int) -> jax.Array:
  """Chooses at random, by their IDs, which sequences each member of the ensemble learns from.

  Args:
    identity: [B] uint32, random ID of each sequence, the seed.
    num_members: K, size of the ensemble.

  Returns:
    [K, B] float32, weight of each sequence in a member's loss: 1 / BOOTSTRAP_SHARE or 0, so that the
    expected weight is 1; a single member learns from all.
  """
  if num_members == 1:
    return jnp.ones((1, *identity.shape), jnp.float32)
  share = dreamer_config.BOOTSTRAP_SHARE
  draw = lambda seed: jax.random.bernoulli(jax.random.key(seed), share, (num_members,))
  return jax.vmap(draw, out_axes=1)(identity).astype(jnp.float32) / share
