"""An intrinsic reward of one's own: a class, an entry of the registry, and a field of the config."""

import dataclasses

import dm_env
import jax
import jax.numpy as jnp
import pytest
from small_dreamer import RATES, make_batch, make_dreamer

from hephaestus.agents import networks
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer.rewards import registry, reward
from hephaestus.learner import devices, dreamer_update


@dataclasses.dataclass(frozen=True)
class Change(reward.Reward):
  """How far the numbers change, as a network predicts it from the state."""

  name = 'change_of_numbers'
  shown = ('predictor',)

  def modules(self):
    features = self.rssm.networks.empty_features(1)
    return {'predictor': (networks.MLP(8, 1, 1), (features.state,))}

  def predict(self, params, features):
    module, _ = self.modules()['predictor']
    return networks.apply(module, params['predictor'], features.state)[..., 0]

  def loss(self, params, keys, replayed, sequence, expected):
    change = jnp.abs(expected - replayed.latent.numbers).mean(-1)
    error = jnp.square(self.predict(params, replayed.features) - change).mean()
    return error, {'intrinsic/error_of_change': error}

  def reward(self, params, before, after):
    return jnp.abs(after.latent.numbers - before.latent.numbers).mean(-1)

  def explain(self, params, step):
    return {'predicted change': self.predict(params, step.features)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(dreamer_config.DreamerConfig):
  change_of_numbers_scale: float = 0.0


@pytest.fixture
def dreamer(monkeypatch):
  plain = make_dreamer()
  monkeypatch.setitem(registry.REWARDS, Change.name, Change)
  fields = dataclasses.asdict(plain.config) | {'change_of_numbers_scale': 0.5}
  specs = plain.model.observation_spec, plain.model.action_spec
  return dreamer_agent.make_dreamer(Config(**fields), *specs)


def test_new_reward_has_a_head_networks_metrics_and_a_display(dreamer):
  """The update is only traced: equations of rewards have tests of their own."""
  made, batch = dreamer_update.make_update(dreamer, RATES), make_batch(dreamer)
  assert dreamer.actor_critic.heads == ('task', 'novelty', 'change_of_numbers')
  state = jax.eval_shape(made.init, jax.random.key(0))
  assert 'predictor' in state.params['world_model']
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), (state, batch))
  after, metrics = jax.eval_shape(jax.vmap(made.update, axis_name=devices.DEVICES), *one)
  assert 'change_of_numbers' in after.scales.ranges
  assert {
    'intrinsic/change_of_numbers', 'intrinsic/error_of_change',
    'actor_critic/change_of_numbers_advantage',
  } <= metrics.keys()  # fmt: skip
  agent, now = dreamer.agent, jax.tree.map(lambda x: x[:, 0], (batch.step_type, batch.observation))
  policy_state = agent.initial_policy_state(len(now[0]))
  timestep = dm_env.TimeStep(now[0], None, None, now[1])
  explain = lambda params, key: agent.explain(params, key, policy_state, timestep, greedy=True)
  acting = agent.acting_params(state.params)
  _, decision = jax.eval_shape(explain, acting, jax.random.key(0))
  assert decision.extras['intrinsic']['predicted change'].shape == now[0].shape
