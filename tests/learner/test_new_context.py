"""A context module of one's own: a class, an entry of the registry, and a field of the config."""

import dataclasses

import dm_env
import jax
import jax.numpy as jnp
import pytest
from small_dreamer import RATES, make_batch, make_dreamer

from hephaestus.agents import networks
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer.contexts import context, registry
from hephaestus.learner import devices, dreamer_update


class Trace(context.Context):
  """A moving average of the state, read through a layer; its history has the averages of R steps."""

  size = 2

  @classmethod
  def is_on(cls, config):
    return config.trace_rate > 0

  @property
  def width(self):
    return self.networks.empty_features(1).state.shape[-1]

  def modules(self):
    return {'reader': (networks.MLP(8, 1, self.size), self.width)}

  def initial(self, batch):
    return jnp.zeros((batch, self.width))

  def advance(self, params, memory, features, inputs, begins):
    rate = jnp.where(begins, 1.0, self.networks.config.trace_rate)[:, None]
    memory = memory + rate * (features.state - memory)
    return memory, self.read(params, memory)

  def read(self, params, average):
    return networks.apply(self.modules()['reader'][0], params['reader'], average)

  def follow(self, memory, features, begins):
    def step(memory, inputs):
      features, begins = inputs
      rate = jnp.where(begins, 1.0, self.networks.config.trace_rate)[:, None]
      after = memory + rate * (features.state - memory)
      return after, (memory, after)

    _, history = jax.lax.scan(step, memory, (features, begins))
    return history

  def replayed(self, features, inputs, begins):
    return self.follow(self.initial(begins.shape[1]), features, begins.at[0].set(True))

  def memory_at(self, history, step, stream):
    return history[0][step, stream]

  def imagined(self, memory, features, inputs, begins):
    every = jnp.zeros(features.state.shape[:2], bool).at[0].set(begins)
    return self.follow(memory, features, every)

  def pool(self, params, history, features):
    return self.read(params, history[1])

  def explain(self, context):
    return {'trace': context}

  def metrics(self, params, history, features, mean):
    return {'trace/size': mean(jnp.abs(history[1]).mean())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(dreamer_config.DreamerConfig):
  trace_rate: float = 0.0


@pytest.fixture
def make(monkeypatch):
  """(**changes of the config) -> a Dreamer with the context."""
  plain = make_dreamer()
  monkeypatch.setitem(registry.CONTEXTS, 'trace', Trace)
  specs = plain.model.observation_spec, plain.model.action_spec
  fields = dataclasses.asdict(plain.config) | {'trace_rate': 0.5}
  return lambda **changes: dreamer_agent.make_dreamer(Config(**fields | changes), *specs)


def test_new_context_has_networks_a_memory_metrics_and_a_display(make):
  """The update is only traced: equations of contexts have tests of their own."""
  dreamer = make()
  made, batch = dreamer_update.make_update(dreamer, RATES), make_batch(dreamer)
  state = jax.eval_shape(made.init, jax.random.key(0))
  assert 'reader' in state.params['actor_critic']
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), (state, batch))
  _, metrics = jax.eval_shape(jax.vmap(made.update, axis_name=devices.DEVICES), *one)
  assert 'trace/size' in metrics
  agent, now = dreamer.agent, jax.tree.map(lambda x: x[:, 0], (batch.step_type, batch.observation))
  policy_state = agent.initial_policy_state(len(now[0]))
  assert policy_state.memory.shape == (len(now[0]), dreamer.config.deterministic_size)
  timestep = dm_env.TimeStep(now[0], None, None, now[1])
  explain = lambda params, key: agent.explain(params, key, policy_state, timestep, greedy=True)
  acting = agent.acting_params(state.params)
  _, decision = jax.eval_shape(explain, acting, jax.random.key(0))
  assert decision.extras['trace'].shape == (*now[0].shape, Trace.size)


def test_several_contexts_are_refused(make):
  with pytest.raises(ValueError, match='salience and trace are both on'):
    make(window=2)
