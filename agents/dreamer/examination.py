"""Predictions of a trained world-model agent, part by part, on sequences that it was not trained on."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import actor_critic, modules, rssm
from hephaestus.agents.dreamer import agent as dreamer_agent

Tree = Any


class Examination(NamedTuple):
  """Predictions of [T, B] steps, float32 each.

  Attributes:
    reward: predicted reward that arrived at the step, given its observation.
    discount: predicted probability that the episode continues, given its observation.
    value: the critic's value of the task.
    novelty: novelty of the transition to the step.
    scrambled: as `novelty`, with each number of the observations permuted over the sequences by
      itself, which gives observations that never occurred.
    surprise: negative log-likelihood, nats, of the numbers and the reward of the step, predicted by one
      imagined step from the step before with the action that was taken; 0 at step 0.
    surprise_of_other: as `surprise`, with the action of another sequence at the same step.
  """

  reward: jax.Array
  discount: jax.Array
  value: jax.Array
  novelty: jax.Array
  scrambled: jax.Array
  surprise: jax.Array
  surprise_of_other: jax.Array


def examine(
  dreamer: dreamer_agent.Dreamer, params: Tree, key: chex.PRNGKey, sequence: experience.Sequence
) -> Examination:
  """Examines a model and a critic on sequences of the agent's own policy.

  Args:
    dreamer: the agent.
    params: parameters of all parts of the agent.
    key: PRNG key of latents, of imagined steps and of the scrambling.
    sequence: [T, B, ...], with B at least 2 for the comparisons with other sequences.

  Returns:
    Predictions of all [T, B] steps.
  """
  model, world = dreamer.model, params['world_model']
  infer_key, scramble_key, imagine_key = jax.random.split(key, 3)
  replayed, novelty = _replay(dreamer, params, infer_key, sequence)
  scrambled = sequence._replace(observation=_scrambled(scramble_key, sequence.observation))
  # Both of a comparison have the same noise, and so the same key.
  others = jnp.roll(sequence.action, 1, axis=1)
  surprise, of_other = (
    _surprise(dreamer, params, imagine_key, sequence._replace(action=action), replayed)
    for action in (sequence.action, others)
  )
  return Examination(
    reward=model.reward(world, replayed.features).mean(),
    discount=model.discount(world, replayed.features),
    value=_value(dreamer, params, replayed, novelty),
    novelty=novelty,
    scrambled=_replay(dreamer, params, infer_key, scrambled)[1],
    surprise=surprise,
    surprise_of_other=of_other,
  )


class Restart(NamedTuple):
  """Values of [T, B] replayed steps by different initial states, float32 each.

  Attributes:
    stored: from the state that was stored with the sequence, computed by older parameters.
    inferred: from the state that the given parameters infer along the sequence before it (burn-in).
    again: as `inferred`, with other random numbers: the noise of the comparison.
  """

  stored: jax.Array
  inferred: jax.Array
  again: jax.Array


def restart(
  dreamer: dreamer_agent.Dreamer,
  params: Tree,
  key: chex.PRNGKey,
  before: experience.Sequence,
  after: experience.Sequence,
) -> Restart:
  """Compares the values of replayed sequences by stored and by recomputed initial states.

  As the state discrepancy of Kapturowski et al. (2019), "Recurrent experience replay in distributed
  reinforcement learning", in units of values.

  Args:
    dreamer: the agent.
    params: parameters of all parts of the agent.
    key: PRNG key of latents.
    before: sequences [T, B, ...].
    after: the next sequences [T, B, ...] of the same streams; they begin with the last steps of
      `before`.

  Returns:
    Values of the steps of `after`.
  """
  joined = before._replace(
    **{
      name: jax.tree.map(
        lambda x, y: jnp.concatenate([x[:-1], y]), getattr(before, name), getattr(after, name)
      )
      for name in ('observation', 'action', 'reward', 'discount', 'step_type', 'extras')
    }
  )
  tail = len(before.reward) - 1
  values = [
    _value(dreamer, params, *_replay(dreamer, params, each, sequence))
    for each, sequence in zip(jax.random.split(key, 3), (after, joined, joined), strict=True)
  ]
  return Restart(values[0], values[1][tail:], values[2][tail:])


def _value(
  dreamer: dreamer_agent.Dreamer, params: Tree, replayed: rssm.Step, novelty: jax.Array
) -> jax.Array:
  """The critic's values of the task, [T, B]."""
  policy, own = dreamer.actor_critic, params['actor_critic']
  context = policy.context.pool(own, policy.along(own, replayed, novelty))
  return policy.values(own, replayed.features, context)[actor_critic.TASK].mean()


def _replay(
  dreamer: dreamer_agent.Dreamer, params: Tree, key: chex.PRNGKey, sequence: experience.Sequence
) -> tuple[rssm.Step, jax.Array]:
  """The [T, B] steps of a sequence, and their novelty."""
  keys = jax.random.split(key, sequence.reward.shape[1])
  replayed = dreamer.model.replay(params, keys, sequence)
  return replayed, dreamer.model.novelty(replayed)


def _scrambled(key: chex.PRNGKey, observation: Tree) -> Tree:
  """Permutes each number of [T, B, ...] observations over the batch, by itself; masks stay as they are."""

  def permute(key, x):
    flat = x.reshape(*x.shape[:2], -1)
    one = lambda key, column: jax.random.permutation(key, column, axis=1)
    columns = jax.random.split(key, flat.shape[-1])
    return jax.vmap(one, in_axes=(0, 2), out_axes=2)(columns, flat).reshape(x.shape)

  leaves, tree = jax.tree.flatten(observation_lib.without_mask(observation))
  scrambled = jax.tree.unflatten(tree, map(permute, jax.random.split(key, len(leaves)), leaves))
  mask = observation_lib.action_mask(observation)
  return scrambled if mask is None else scrambled | {observation_lib.ACTION_MASK: mask}


def _surprise(
  dreamer: dreamer_agent.Dreamer,
  params: Tree,
  key: chex.PRNGKey,
  sequence: experience.Sequence,
  replayed: rssm.Step,
) -> jax.Array:
  """See `Examination.surprise`, [T, B]."""
  model, world = dreamer.model, params['world_model']
  total, batch = sequence.reward.shape
  merged = lambda tree: jax.tree.map(lambda x: x[:-1].reshape(-1, *x.shape[2:]), tree)
  before = merged(replayed.latent)
  count = (total - 1) * batch
  member_key, noise_key = jax.random.split(key)
  imagined = model.rssm.imagine(
    world,
    model.rssm.matrices(world),
    rssm.Recurrent(before, merged(model.networks.actions.encode(sequence.action))),
    jax.random.randint(member_key, (count,), 0, dreamer.config.ensemble_size),
    jax.vmap(model.rssm.imagined_noise)(jax.random.split(noise_key, count)),
  )
  after = lambda x: x[1:].reshape(-1, *x.shape[2:])
  surprise = -model.reward(world, imagined.features).log_prob(after(sequence.reward))
  numbers, statistics = model.networks.numbers, world[modules.STATISTICS]
  if numbers.size:
    outputs, _ = model.rssm.decoder(world, imagined.latent, imagined.previous)
    follows = jnp.ones(count, bool)
    predicted = numbers.predict(outputs, before.numbers, follows, statistics)
    surprise += numbers.loss(predicted, after(replayed.latent.numbers), statistics)[0]
  return jnp.pad(surprise.reshape(total - 1, batch), ((1, 0), (0, 0)))
