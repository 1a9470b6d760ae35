"""Observed and imagined steps one at a time, for a dream that somebody steers, with all that they predict."""

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import modules, rssm

Tree = Any


class Belief(NamedTuple):
  """The state that the agent carries from one step to the next, [1, ...] arrays.

  Attributes:
    latent: the model's latent at the step.
    memory: memory of the context module, which has read the step.
  """

  latent: rssm.Latent
  memory: Tree


class Prediction(NamedTuple):
  """All predictions of the agent at one step, without a batch axis.

  A tree of observations is float32 and has no action mask.

  Attributes:
    observation: the observation that the model's state holds: its numbers (the observed ones at an observed
      step, else imagined), and images as the decoder reads them from the latent.
    reward: [] float32, reward that arrives at the step; it means nothing at FIRST.
    discount: [] float32, probability that the episode continues.
    values: [] float32, mean value of each head of the critics, by its name.
    mask: [A] bool, actions predicted to be legal; all without a mask.
    action: action that the policy takes at the step, as in the action spec.
    chances: [A] float32, probabilities of all choices; None for continuous actions.
    novelty: [] float32, novelty of the transition to the step.
    members: tree of [K, *shape], observation of the step as each member of the ensemble predicts it.
    disagreement: tree of [*shape], standard deviation of the members' predictions, before any is rounded to
      a value that occurs.
    recalled: value and evidence, [A] float32 each, of `memory.Recall` at an observed step; None at an imagined
      one, or without an episodic memory.
    masks: [S, H, W] float32, share of each slot of the model's state in each pixel of the image, of sum 1 over
      slots; None without slots.
  """

  observation: Tree
  reward: jax.Array
  discount: jax.Array
  values: dict[str, jax.Array]
  mask: jax.Array
  action: jax.Array
  chances: jax.Array | None
  novelty: jax.Array
  members: Tree
  disagreement: Tree
  recalled: tuple[jax.Array, jax.Array] | None
  masks: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Steering:
  """The steps of one agent; it holds no arrays, and its methods are pure.

  Attributes:
    dreamer: the agent.
    greedy: whether the policy takes the most likely action; else it is sampled.
  """

  dreamer: dreamer_agent.Dreamer
  greedy: bool

  def initial(self) -> Belief:
    """The belief before a FIRST step."""
    return Belief(
      self.dreamer.model.rssm.initial(1).latent, self.dreamer.actor_critic.context.initial(1)
    )

  def observe(
    self,
    params: Tree,
    key: chex.PRNGKey,
    before: Belief,
    action: jax.Array,
    observation: Tree,
    first: jax.Array,
  ) -> tuple[Belief, Prediction]:
    """Advances by an observed step, to the most likely latent of the posterior.

    Args:
      params: parameters of all parts of the agent.
      key: PRNG key of the policy's action.
      before: belief at the step before.
      action: the action that led to the step, as in the action spec; unread at FIRST.
      observation: observation of the step, with its action mask if there is one.
      first: [] bool, whether the step is FIRST.
    """
    model = self.dreamer.model
    # Recalled anew by each observed step, so that a belief may also be the start of a dream.
    recurrent = self._recurrent(
      before._replace(latent=before.latent._replace(recalled=None)), action
    )
    observation, first = jax.tree.map(lambda x: jnp.asarray(x)[None], (observation, first))
    step, recall = model.observe(params, recurrent, observation, first, None)
    mask = observation_lib.action_mask(observation)
    return self._predict(params, key, before, step, self._held(params, step), mask, recall)

  def imagine(
    self,
    params: Tree,
    key: chex.PRNGKey,
    before: Belief,
    action: jax.Array,
    member: jax.Array | None,
    *,
    sampled: bool,
  ) -> tuple[Belief, Prediction]:
    """Advances by an imagined step.

    Args:
      params: parameters of all parts of the agent.
      key: PRNG key of the sample and of the policy's action.
      before: belief at the step before, observed or imagined.
      action: the action that is taken there, as in the action spec.
      member: [] int32, the member of the ensemble that predicts; None for the mean of all, see
        `RSSM.imagine`.
      sampled: whether the step is sampled; else it is the most likely one.
    """
    model, world = self.dreamer.model, params['world_model']
    noise_key, action_key = jax.random.split(key)
    noise = jax.tree.map(lambda x: x[None], model.rssm.imagined_noise(noise_key))
    recurrent = self._recurrent(before, action)
    step = model.imagine(
      world,
      model.rssm.matrices(world),
      recurrent,
      None if member is None else member[None],
      noise if sampled else None,
    )
    mask = model.action_mask(world, step.features) if model.networks.has_mask else None
    held = self._held(params, step)
    return self._predict(params, action_key, before, step, held, mask)

  def _held(self, params: Tree, step: rssm.Step) -> Tree:
    """The observation [1, ...] that the model's state holds: its numbers, and images by the decoder."""
    networks = self.dreamer.model.networks
    _, images = self.dreamer.model.rssm.decoder(params['world_model'], step.latent, step.previous)
    return networks.codec.assemble(networks.numbers.to_flat(step.latent.numbers), images)

  def _recurrent(self, before: Belief, action: jax.Array) -> rssm.Recurrent:
    encoded = self.dreamer.model.networks.actions.encode(jnp.asarray(action)[None])
    return rssm.Recurrent(before.latent, encoded)

  def _predict(
    self,
    params: Tree,
    key: chex.PRNGKey,
    before: Belief,
    step: rssm.Step,
    observation: Tree,
    mask: jax.Array | None,
    recall: Any = None,
  ) -> tuple[Belief, Prediction]:
    """The belief and the predictions at a step [1, ...].

    Args:
      params: parameters of all parts of the agent.
      key: PRNG key of the policy's action.
      before: belief at the step before.
      step: the step.
      observation: the observation to show, [1, ...].
      mask: [1, A] bool, legal actions; None where all are.
      recall: [1, ...], result of the read of the episodic memory; None where it was not read.
    """
    model, policy = self.dreamer.model, self.dreamer.actor_critic
    world, own = params['world_model'], params['actor_critic']
    novelty = model.novelty(step)
    read = policy.read(own, before.memory, step, novelty, step.first)
    context = policy.context.pool(own, read)
    distribution = policy.policy(own, step.features, context, mask)
    noise = policy.noise(key)[None]
    action, _ = policy.sample(distribution, jnp.zeros_like(noise) if self.greedy else noise)
    values = policy.values(own, step.features, context)
    members, unrounded = self._members(world, step, before.latent)
    prediction = Prediction(
      observation=observation,
      reward=model.reward(world, step.features).mean(),
      discount=model.discount(world, step.features),
      values={name: value.mean() for name, value in values.items()},
      mask=model.action_mask(world, step.features),
      action=action,
      chances=jnp.exp(distribution.log_probs) if policy.discrete else None,
      novelty=novelty,
      members=jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), members),
      disagreement=jax.tree.map(lambda x: jnp.std(x, axis=0), unrounded),
      recalled=None if recall is None else (recall.value, recall.evidence),
      masks=None if step.latent.percept is None else model.rssm.paint(world, step.latent)[1],
    )
    return Belief(step.latent, policy.context.advance(read)), jax.tree.map(
      lambda x: x[0], prediction
    )

  def _members(self, world: Tree, step: rssm.Step, before: rssm.Latent) -> tuple[Tree, Tree]:
    """The observations [K, 1, ...] by each member's most likely latent: as they occur, and unrounded."""
    # As if numbers between the values that occur had been observed, to which predictions are rounded.
    statistics = {
      name: jnp.ones_like(x) if name in ('between', 'off_level') else x
      for name, x in world[modules.STATISTICS].items()
    }

    def decode(world: Tree, stochastic: jax.Array) -> Tree:
      latent, model = step.latent._replace(stochastic=stochastic), self.dreamer.model
      percept = model.rssm.follow(world, before.percept, latent, step.previous)
      if percept is not None and latent.percept is not None:
        latent = latent._replace(percept=jnp.where(step.first[:, None], latent.percept, percept))
      return model.decode(world, latent, step.previous, before.numbers, step.first)

    latents = step.priors.belief.mode().astype(step.latent.stochastic.dtype)
    each = jax.vmap(decode, in_axes=(None, 0))
    return each(world, latents), each(world | {modules.STATISTICS: statistics}, latents)
