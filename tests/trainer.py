"""An update on some devices, for tests of the learner."""

import dataclasses

import jax
import numpy as np
import pytest
import small_dreamer

from hephaestus.agents.dreamer import actor_critic, rssm, world_model
from hephaestus.learner import devices as devices_lib
from hephaestus.learner import dreamer_update

WARM_UP = 2


class Trainer:
  """The update on the first D devices, compiled once.

  Args:
    made: with `init(key) -> state` and `update(state, sequence) -> (state, metrics)`.
    num_devices: D.

  Attributes:
    state: replicated, [D, ...]
    traces: how often the update was traced.
  """

  def __init__(self, made, num_devices=1):
    self.devices = jax.local_devices()[:num_devices]
    self.traces = 0
    self._init = jax.jit(made.init)

    def update(state, sequence):
      self.traces += 1
      return made.update(state, sequence)

    self._update = jax.pmap(update, axis_name=devices_lib.DEVICES, devices=self.devices)
    self._program = None
    self.begin()

  def begin(self):
    """A fresh state; what was compiled stays."""
    self.state = devices_lib.replicate(self._init(jax.random.key(0)), self.devices)
    return self

  def step(self, batch):
    """Takes one update on a batch [B, ...], which is split over the devices; returns its metrics."""
    shard = lambda x: x.reshape(len(self.devices), -1, *x.shape[1:])
    sequence = jax.tree.map(shard, batch)
    if self._program is None:
      self._program = self._update.lower(self.state, sequence).compile()
    self.state, metrics = self._program(self.state, sequence)
    return {name: float(np.asarray(value)[0]) for name, value in metrics.items()}

  def text(self):
    """The compiled program; there is one after the first step."""
    return self._program.as_text()

  def arrays(self, device=0):
    """One replica as host arrays; keys as their data."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    plain = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)[device]
    return jax.tree.map(plain, self.state)


def counting(dreamer, count_step, count_chunk):
  """The same agent, which calls a function at each imagined step and each chunk of its loss."""

  @dataclasses.dataclass(frozen=True)
  class CountingRSSM(rssm.RSSM):
    def imagine(self, *arguments):
      jax.debug.callback(count_step)
      return super().imagine(*arguments)

  class CountingModel(world_model.WorldModel):
    @property
    def rssm(self):
      return CountingRSSM(self.networks)

  @dataclasses.dataclass(frozen=True)
  class CountingActorCritic(actor_critic.ActorCritic):
    def loss(self, *arguments):
      jax.debug.callback(count_chunk)
      return super().loss(*arguments)

  copy = lambda made, part: made(
    **{x.name: getattr(part, x.name) for x in dataclasses.fields(part)}
  )
  return dreamer._replace(
    model=copy(CountingModel, dreamer.model),
    actor_critic=copy(CountingActorCritic, dreamer.actor_critic),
  )


class Counted(Trainer):
  """The update of the default dreamer on some devices, with a warm-up of WARM_UP updates.

  Attributes:
    counts: imagined steps, and chunks of the policy's loss.
  """

  def __init__(self, num_devices=1):
    self.counts = np.zeros(2, int)
    add = lambda i: lambda: np.add.at(self.counts, i, 1)
    made = counting(small_dreamer.make_dreamer(warm_up_updates=WARM_UP), add(0), add(1))
    super().__init__(dreamer_update.make_update(made, small_dreamer.RATES), num_devices)

  def begin(self, step=WARM_UP, boredom=0.0):
    """A fresh state at a step, after warm-up unless told otherwise."""
    super().begin()
    bored = self.state.intrinsic._replace(boredom=self.state.intrinsic.boredom + boredom)
    self.state = self.state._replace(step=self.state.step + step, intrinsic=bored)
    return self


def shapes_after(made, state, batch):
  """Shapes of the next state and of the metrics of one device; an error where it cannot be traced.

  Under `vmap`, which names an axis, too, tracing would take twice as long.
  """
  trace = jax.make_jaxpr(made.update, axis_env=[(devices_lib.DEVICES, 1)], return_shape=True)
  return trace(state, batch)[1]


def assert_same_step(one, eight, batch):
  """Trainers of one and of eight devices take the same first update of the dreamer on a batch."""
  expected, found = one.begin().step(batch), eight.begin().step(batch)
  for name, value in expected.items():
    assert found[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
  # Adam's moments are sums of gradients; its first steps would only show their signs.
  moments = lambda trainer: jax.tree.leaves(
    (trainer.arrays().model_opt_state, trainer.arrays().policy_opt_state)
  )
  for first, second in zip(moments(one), moments(eight), strict=True):
    np.testing.assert_allclose(second, first, rtol=1e-2, atol=1e-6)
