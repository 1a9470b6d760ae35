"""Open-loop prediction along a real episode: observations imagined from its actions only."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents import agent as agent_lib
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import rssm, world_model

Tree = Any


def foresee(
  model: world_model.WorldModel,
  actor_critic: ac.ActorCritic,
  params: Tree,
  key: chex.PRNGKey,
  observation: Tree,
  action: jax.Array,
  context: jax.Array,
) -> agent_lib.Foresight:
  """Reconstructs the first `context` steps of an episode and imagines the rest; see `Agent.foresee`.

  Imagination samples the prior of one member, as dreams do, with the actions of the episode.
  Salience is computed from the posteriors of the whole episode, as in acting.

  Args:
    model: the world model.
    actor_critic: actor-critic, whose context module gives the salience.
    params: parameters of all parts: 'world_model', 'actor_critic' and any 'memory'.
    key: PRNG key of the member and of its samples.
    observation: tree of [T, ...] arrays, one episode, which begins at step 0.
    action: [T, ...], the actions of the episode.
    context: [] int32, number of observed steps.

  Returns:
    Foresight of predicted observations, [T, ...] float32, the salience, [T, W] float32, and the masks of
    slots.
  """
  model_params, policy_params = params['world_model'], params['actor_critic']
  num_steps = len(action)
  member_key, noise_key = jax.random.split(key)
  member = jax.random.randint(member_key, (1,), 0, model.config.ensemble_size)
  noise = jax.vmap(model.rssm.imagined_noise)(jax.random.split(noise_key, num_steps))
  is_first = jnp.arange(num_steps) == 0
  is_observed = jnp.arange(num_steps) < context
  inputs = (observation, is_first, is_observed, model.networks.actions.encode(action), noise)
  matrices = model.rssm.matrices(model_params)

  def step(carry, inputs):
    closed, open_, memory = carry
    observation, first, observed, action, noise = jax.tree.map(lambda x: x[None], inputs)
    seen, _ = model.observe(params, closed, observation, first, None)
    imagined = model.rssm.imagine(model_params, matrices, open_, member, noise)
    state = lambda step: (step.latent._replace(recalled=None), step.previous)
    latent, previous = jax.tree.map(
      lambda x, y: jnp.where(observed[0], x, y), state(seen), state(imagined)
    )
    predicted = model.decode(model_params, latent, previous, open_.latent.numbers, first)
    read = actor_critic.read(policy_params, memory, seen, model.novelty(seen), first)
    memory = actor_critic.context.advance(read)
    carry = rssm.Recurrent(state(seen)[0], action), rssm.Recurrent(latent, action), memory
    salience = actor_critic.context.shown(policy_params, read).get('salience', jnp.ones((1, 1)))
    masks = None if latent.percept is None else model.rssm.paint(model_params, latent)[1][0]
    return carry, (jax.tree.map(lambda x: x[0], predicted), masks, salience[0])

  initial = model.rssm.initial(1)
  carry = initial, initial, actor_critic.context.initial(1)
  _, (predicted, masks, salience) = jax.lax.scan(step, carry, inputs)
  return agent_lib.Foresight(predicted, salience, masks)
