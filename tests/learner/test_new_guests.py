"""A reward and a context of one's own: a class each, an entry of a registry, and a field of the config."""

import dataclasses

import dm_env
import jax
import jax.numpy as jnp
import pytest
from small_dreamer import RATES, make_batch, make_dreamer
from trainer import shapes_after

from hephaestus.agents import agent as agent_lib
from hephaestus.agents import networks
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import sockets
from hephaestus.learner import dreamer_update


@dataclasses.dataclass(frozen=True)
class Change(sockets.Reward):
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


class Trace(sockets.Context):
  """A moving average of the state of earlier steps, read through a layer."""

  size = 2

  @property
  def width(self):
    return self.networks.empty_features(1).state.shape[-1]

  def modules(self):
    return {'reader': (networks.MLP(8, 1, self.size), self.width)}

  def initial(self, batch):
    return jnp.zeros((batch, self.width))

  def advance(self, read):
    return read.memory + self.networks.config.trace_rate * (read.features.state - read.memory)

  def pool(self, params, read):
    return networks.apply(self.modules()['reader'][0], params['reader'], read.memory)

  def shown(self, params, read):
    return {'trace': self.pool(params, read)}

  def metrics(self, params, read, mean):
    return {'trace/size': mean(jnp.abs(read.memory).mean())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cognition_config.CognitionConfig):
  change_of_numbers_scale: float = 0.0
  trace_rate: float = 0.0


@pytest.fixture
def make(monkeypatch):
  """(**changes of the config) -> a Dreamer with both."""
  plain = make_dreamer()
  monkeypatch.setitem(registry.REWARDS, Change.name, Change)
  monkeypatch.setitem(registry.CONTEXTS, 'trace', (lambda config: config.trace_rate > 0, Trace))
  specs = plain.model.observation_spec, plain.model.action_spec
  fields = dataclasses.asdict(plain.config) | {'change_of_numbers_scale': 0.5, 'trace_rate': 0.5}
  return lambda **changes: registry.make_dreamer(Config(**fields | changes), *specs)


def test_new_guests_have_networks_a_head_a_memory_metrics_and_a_display(make):
  """The update is only traced: equations of guests have tests of their own."""
  dreamer = make()
  made, batch = dreamer_update.make_update(dreamer, RATES), make_batch(dreamer)
  assert dreamer.actor_critic.heads == ('task', 'novelty', 'change_of_numbers')
  state = jax.eval_shape(made.init, jax.random.key(0))
  assert 'predictor' in state.params['world_model'] and 'reader' in state.params['actor_critic']
  after, metrics = shapes_after(made, state, batch)
  assert 'change_of_numbers' in after.scales.spreads
  assert {
    'intrinsic/change_of_numbers', 'intrinsic/error_of_change',
    'actor_critic/change_of_numbers_advantage', 'trace/size',
  } <= metrics.keys()  # fmt: skip
  agent, now = dreamer.agent, jax.tree.map(lambda x: x[:, 0], (batch.step_type, batch.observation))
  policy_state = agent.initial_policy_state(len(now[0]))
  assert policy_state.memory.shape == (len(now[0]), dreamer.config.deterministic_size)
  timestep = dm_env.TimeStep(now[0], None, None, now[1])
  explain = lambda params, key: agent.explain(params, key, policy_state, timestep, greedy=True)
  acting = agent.acting_params(agent_lib.all_params(state))
  _, decision = jax.eval_shape(explain, acting, jax.random.key(0))
  assert decision.extras['trace'].shape == (*now[0].shape, Trace.size)
  assert decision.extras['intrinsic']['predicted change'].shape == now[0].shape


def test_several_contexts_are_refused(make):
  with pytest.raises(ValueError, match='salience and trace are both on'):
    make(window=2)
