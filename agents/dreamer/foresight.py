"""Open-loop prediction along a real episode: observations imagined from its actions alone."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents import agent as agent_lib
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import intrinsic, rssm, world_model

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
    Foresight of predicted observations, [T, ...] float32, and the salience, [T, W] float32.
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
    closed, open_ = carry
    observation, first, observed, action, noise = jax.tree.map(lambda x: x[None], inputs)
    closed_step = model.rssm.observe(model_params, closed, observation, first, None)
    *open_step, _ = model.rssm.imagine(model_params, matrices, open_, member, noise)
    latent, previous = jax.tree.map(
      lambda x, y: jnp.where(observed[0], x, y), closed_step, tuple(open_step)
    )
    predicted = model.decode(model_params, latent, previous, open_.latent.numbers, first)
    carry = rssm.Recurrent(closed_step[0], action), rssm.Recurrent(latent, action)
    return carry, (*closed_step, jax.tree.map(lambda x: x[0], predicted))

  initial = model.rssm.initial(1)
  _, (latent, previous, predicted) = jax.lax.scan(step, (initial, initial), inputs)
  priors = model.rssm.prior(model_params, latent.deterministic, previous, is_first[:, None])
  novelty = intrinsic.novelty_of(model.config.novelty, priors.moments())
  recalled, _ = model.recall(params, jax.tree.map(lambda x: x[:, None], observation))
  features = model.rssm.features(model_params, latent._replace(recalled=recalled), previous)
  context_module = actor_critic.context
  beside = actor_critic.context_inputs(policy_params, features, novelty, latent.numbers, priors)
  history = context_module.replayed(features, beside, is_first[:, None])
  weights = context_module.weights(policy_params, history, num_steps)
  return agent_lib.Foresight(predicted, weights[:, 0])
