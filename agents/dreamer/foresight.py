"""A dream beside the real rollout: what the model expects when told only what was done."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents import agent as agent_lib
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import dream, intrinsic, world_model

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
  """Runs along an episode awake, and from row `context` on also asleep; see `Agent.foresee`.

  Asleep it follows the prior of one member, as dreams do, and plays what was really played. Its
  salience is that of the one who stays awake, as it acted.

  Args:
    model: the world model.
    actor_critic: whose salience it is.
    params: of 'world_model' and 'actor_critic'.
    key: of the dream.
    observation: [T, ...] of one episode, which begins at row 0.
    action: [T, ...].
    context: [] int32, rows that it sees.
  """
  model_params, policy_params = params['world_model'], params['actor_critic']
  num_steps = len(action)
  novelty_of = intrinsic.NOVELTIES[model.config.novelty]
  member_key, noise_key = jax.random.split(key)
  member = jax.random.randint(member_key, (1,), 0, model.config.ensemble_size)
  noise = jax.vmap(model.noise)(jax.random.split(noise_key, num_steps))
  is_first = jnp.arange(num_steps) == 0
  rows = (
    model.embed(model_params, observation),
    model.look(observation),
    is_first,
    jnp.arange(num_steps) < context,
    model.encode_action(action),
    noise,
  )

  def step(carry, row):
    awake, asleep = carry
    embedded, seen, first, sees, action, noise = jax.tree.map(lambda x: x[None], row)
    real, members, _ = model.observe(model_params, awake, embedded, seen, first, None)
    dreamt, _ = dream.imagine(model, model_params, asleep, member, noise)
    latent = jax.tree.map(lambda real, dreamt: jnp.where(sees[0], real, dreamt), real, dreamt)
    carry = world_model.Recurrent(real, action), world_model.Recurrent(latent, action)
    expected = model.decode(model_params, latent.belief, asleep.latent.seen, asleep.action, first)
    return carry, (real, members, jax.tree.map(lambda x: x[0], expected))

  initial = model.initial(1)
  _, (latent, members, expected) = jax.lax.scan(step, (initial, initial), rows)
  moments = model.priors(model_params, jnp.swapaxes(members, 0, 1)).moments()
  context_module = actor_critic.context
  track = context_module.replayed(latent.features, novelty_of(*moments), is_first[:, None])
  weights = context_module.weights(policy_params, track, num_steps)
  return agent_lib.Foresight(expected, weights[0])
