"""The world model and the actor-critic, bound into an Agent that acts."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import (
  actor_critic,
  comparison,
  intrinsic,
  modules,
  rssm,
  sockets,
  world_model,
)
from hephaestus.agents.dreamer import config as dreamer_config

Tree = Any


class PolicyState(NamedTuple):
  """The policy's state between steps, in N environments.

  Attributes:
    recurrent: state of the world model, [N, ...].
    memory: memory of the context module, a tree of [N, ...] arrays; () without one.
  """

  recurrent: rssm.Recurrent
  memory: Tree


class Dreamer(NamedTuple):
  """The parts of the world-model agent, as the learner needs them.

  Attributes:
    config: sizes and constants.
    model: the world model.
    actor_critic: the policy and the value.
    agent: the functions that actors and evaluators need, made from `model` and `actor_critic`.
  """

  config: dreamer_config.DreamerConfig
  model: world_model.WorldModel
  actor_critic: actor_critic.ActorCritic
  agent: agent_lib.Agent


def make_dreamer(
  config: dreamer_config.DreamerConfig,
  observation_spec: Tree,
  action_spec: Any,
  guests: sockets.Guests = sockets.NO_GUESTS,
) -> Dreamer:
  """Builds the agent for one environment's specs, with what is plugged into it.

  Raises:
    ValueError: `distributions.Actions` does not support the action spec, or the specs do not fit a guest.
  """
  model = world_model.WorldModel(config, observation_spec, action_spec, guests)
  policy = actor_critic.ActorCritic(model.networks)
  _ = model.networks.perception, model.rewards, policy.context  # made, so errors are raised here
  acting = _Acting(model, policy)
  agent = agent_lib.Agent(
    init_params=acting.init_params,
    acting_params=acting.acting_params,
    initial_policy_state=acting.initial_policy_state,
    stored_state=lambda state: state.recurrent,
    act=acting.act,
    explain=functools.partial(acting.act, explain=True) if policy.discrete else None,
    foresee=functools.partial(comparison.foresee, model, policy),
    exploring=acting.exploring if policy.explores else None,
  )
  return Dreamer(config, model, policy, agent)


@dataclasses.dataclass(frozen=True)
class _Acting:
  """The functions of an Agent."""

  model: world_model.WorldModel
  policy: actor_critic.ActorCritic

  def init_params(self, key: chex.PRNGKey) -> Tree:
    model_key, policy_key = jax.random.split(key)
    model_params, of_model = self.model.init(model_key)
    statistics = {'world_model': of_model}
    if self.policy.explores:
      statistics[intrinsic.EXPLORING] = jnp.ones((), jnp.float32)
    if memory := self.model.networks.memory:
      statistics[world_model.MEMORY] = memory.init()
    return {
      'world_model': model_params,
      'actor_critic': self.policy.init(policy_key),
      agent_lib.STATISTICS: statistics,
    }

  def acting_params(self, params: Tree) -> Tree:
    networks, statistics = self.model.networks, params[agent_lib.STATISTICS]
    pick = lambda tree, *names: {name: tree[name] for name in names if name in tree}
    of_model = pick(statistics['world_model'], modules.NUMBERS, modules.AVERAGE_CHANGE)
    acting = pick(statistics, intrinsic.EXPLORING) | {'world_model': of_model}
    if networks.memory:
      acting[world_model.MEMORY] = pick(statistics[world_model.MEMORY], *networks.memory.acted)
    return {
      'world_model': pick(
        params['world_model'],
        'encoder',
        'image_encoder',
        'recurrence',
        'posterior',
        'prior',
        *([networks.perception.name] if networks.perception else []),
        *itertools.chain.from_iterable(map(networks.of_grids, modules.READ)),
        *(name for reward in self.model.rewards.values() for name in reward.shown),
      ),
      'actor_critic': pick(
        params['actor_critic'],
        *self.policy.context.modules(),
        actor_critic.ACTOR,
        actor_critic.EXPLORER,
      ),
      agent_lib.STATISTICS: acting,
    }

  def exploring(self, params: Tree, key: chex.PRNGKey, num_envs: int) -> jax.Array:
    """See `Agent.exploring`: the first environments, on average as many as the share of `intrinsic.exploring`."""
    share = params[agent_lib.STATISTICS][intrinsic.EXPLORING]
    return jnp.arange(num_envs) + jax.random.uniform(key) < share * num_envs

  def initial_policy_state(self, num_envs: int) -> PolicyState:
    return PolicyState(self.model.rssm.initial(num_envs), self.policy.context.initial(num_envs))

  def act(
    self,
    params: Tree,
    key: Any,
    state: PolicyState,
    timestep: Any,
    *,
    greedy: bool,
    explores: jax.Array | None = None,
    explain: bool = False,
  ) -> tuple[PolicyState, experience.Decision]:
    """See `Agent.act` and `Agent.explain`."""
    model, policy = self.model, self.policy
    first = timestep.step_type == rssm.FIRST
    makers = (model.rssm.noise, policy.noise)
    keys = (jax.random.split(each, len(first)) for each in jax.random.split(key))
    latent_noise, noise = (jax.vmap(make)(own) for make, own in zip(makers, keys, strict=True))
    step, recall = model.observe(params, state.recurrent, timestep.observation, first, latent_noise)
    own = params['actor_critic']
    read = policy.read(own, state.memory, step, model.novelty(step), first)
    mask = observation_lib.action_mask(timestep.observation)
    context = policy.context.pool(own, read)
    distribution = policy.policy(own, step.features, context, mask, explores)
    # Without noise a sample is the mode, with the likelihood of the action that is taken.
    action, choice = policy.sample(distribution, jnp.zeros_like(noise) if greedy else noise)
    latent = step.latent._replace(recalled=None)  # recalled anew wherever the state is used
    recurrent = rssm.Recurrent(latent, model.networks.actions.encode(action))
    extras = {'log_prob': distribution.log_prob(choice)}
    if policy.explores:
      extras['explores'] = jnp.zeros(first.shape, bool) if explores is None else explores
    if explain:
      extras['log_probs'] = distribution.log_probs
      extras['intrinsic'] = {
        name: shown
        for reward in model.rewards.values()
        for name, shown in reward.explain(modules.world(params), step).items()
      }
      extras |= policy.context.shown(own, read)
      if model.networks.memory:
        held = params[agent_lib.STATISTICS][world_model.MEMORY]
        extras |= model.networks.memory.explain(held, recall)
    return PolicyState(recurrent, policy.context.advance(read)), experience.Decision(action, extras)
