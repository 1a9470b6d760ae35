"""The world model and the actor-critic, bound into an Agent that acts."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import actor_critic, foresight, intrinsic, world_model
from hephaestus.agents.dreamer import config as dreamer_config

Tree = Any


class PolicyState(NamedTuple):
  """The memory of N policies.

  Attributes:
    recurrent: what the world model carries.
    features: [N, W, F], of the last rows, oldest first.
    novelty: [N, W] float32.
    episode: [N, W] int32, a count of FIRST rows.
  """

  recurrent: world_model.Recurrent
  features: jax.Array
  novelty: jax.Array
  episode: jax.Array


class Dreamer(NamedTuple):
  """The parts of the agent, for those who train it.

  Attributes:
    config: its numbers.
    model: the world model.
    actor_critic: the policy and the value.
    agent: the same, for those who act with it.
  """

  config: dreamer_config.DreamerConfig
  model: world_model.WorldModel
  actor_critic: actor_critic.ActorCritic
  agent: agent_lib.Agent


def make_dreamer(
  config: dreamer_config.DreamerConfig, observation_spec: Tree, action_spec: Any
) -> Dreamer:
  """Builds the agent for one environment's specs."""
  model = world_model.WorldModel(config, observation_spec, action_spec)
  policy = actor_critic.ActorCritic(
    config, action_spec, model.feature_size, model.action_size, model.sight
  )
  novelty_of = intrinsic.NOVELTIES[config.novelty]

  def init_params(key: chex.PRNGKey) -> Tree:
    model_key, policy_key = jax.random.split(key)
    return {'world_model': model.init(model_key), 'actor_critic': policy.init(policy_key)}

  def acting_params(params: Tree) -> Tree:
    read = {
      'world_model': ('encoder', 'posterior', 'transition', 'prior'),
      'actor_critic': ('salience', 'actor') if policy.looks_back else ('actor',),
    }
    return {room: {name: params[room][name] for name in names} for room, names in read.items()}

  def initial_policy_state(num_envs: int) -> PolicyState:
    return PolicyState(
      recurrent=model.initial(num_envs),
      features=jnp.zeros((num_envs, config.window, model.feature_size), model.dtype),
      novelty=jnp.zeros((num_envs, config.window), jnp.float32),
      episode=jnp.full((num_envs, config.window), -1, jnp.int32),
    )

  def act(
    params: Tree,
    key: chex.PRNGKey,
    state: PolicyState,
    timestep: Any,
    *,
    greedy: bool,
    explain: bool = False,
  ) -> tuple[PolicyState, experience.Decision]:
    num_envs = timestep.step_type.shape[0]
    latent_key, action_key = jax.random.split(key)
    first = timestep.step_type == world_model.FIRST
    embedded = model.embed(params['world_model'], timestep.observation)
    seen = model.look(timestep.observation)
    noise = jax.vmap(model.noise)(jax.random.split(latent_key, num_envs))
    latent, members, _ = model.observe(
      params['world_model'], state.recurrent, embedded, seen, first, None if greedy else noise
    )
    novelty = novelty_of(*model.priors(params['world_model'], members).moments())

    shift = lambda rows, row: jnp.concatenate([rows[:, 1:], row[:, None]], axis=1)
    features = shift(state.features, latent.features)
    past_novelty = shift(state.novelty, novelty)
    # The first row of all is FIRST, so what no row has filled yet stays in episode -1.
    episode = shift(state.episode, state.episode[:, -1] + first)
    scores = policy.scores(params['actor_critic'], features, past_novelty)
    context = policy.pool(actor_critic.Window(features, scores, episode))

    mask = observation_lib.action_mask(timestep.observation)
    chances = policy.policy(params['actor_critic'], latent.features, context, mask)
    noise = jax.vmap(policy.noise)(jax.random.split(action_key, num_envs))
    # Without noise a sample is the mode, and its likelihood that of what is played.
    action, choice = policy.sample(chances, jnp.zeros_like(noise) if greedy else noise)
    recurrent = world_model.Recurrent(latent, model.encode_action(action))
    extras = {'log_prob': chances.log_prob(choice)}
    if explain:
      extras['log_probs'] = chances.log_probs
    return (
      PolicyState(recurrent, features, past_novelty, episode),
      experience.Decision(action, extras),
    )

  agent = agent_lib.Agent(
    init_params=init_params,
    acting_params=acting_params,
    initial_policy_state=initial_policy_state,
    stored_state=lambda state: state.recurrent,
    act=act,
    explain=functools.partial(act, explain=True) if policy.discrete else None,
    foresee=functools.partial(foresight.foresee, model, policy),
  )
  return Dreamer(config, model, policy, agent)
