"""Salience: pools the features f of the last W steps of the episode by attention with learned scores.

score_i = MLP([f_i, log(1 + novelty_i)])      w = softmax(score)      context = sum_i w_i f_i
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hephaestus.agents import networks
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer.contexts import context

Features = context.Features
Tree = context.Tree
NAME = 'salience'


class Window(NamedTuple):
  """S consecutive steps, oldest first: S = W - 1 as a memory, W - 1 + R as a history of R steps.

  Attributes:
    features: [S, B, F] in the compute dtype, all features of a step, concatenated.
    novelty: [S, B] float32.
    episode: [S, B] int32, number of the episode; a step pools only steps of its own episode.
  """

  features: jax.Array
  novelty: jax.Array
  episode: jax.Array


@dataclasses.dataclass(frozen=True)
class Salience(context.Context):
  """Pools the features of the last W = `window` steps by attention; see the equations of this module."""

  @classmethod
  def is_on(cls, config: dreamer_config.DreamerConfig) -> bool:
    return config.window > 1

  @property
  def window(self) -> int:
    return self.networks.config.window

  @functools.cached_property
  def size(self) -> int:
    """F, width of all features of a step, and of the context."""
    return sum(x.shape[-1] for x in self.networks.empty_features(1))

  def modules(self) -> dict[str, tuple[networks.MLP, int]]:
    config = self.networks.config
    return {NAME: (networks.MLP(config.hidden_size, 1, 1, 0.1, dtype=config.dtype), self.size + 1)}

  def initial(self, batch: int) -> Window:
    """Empty steps of episode -1, which no step pools, since an actor's first step is FIRST."""
    before = self.window - 1
    return Window(
      features=jnp.zeros((before, batch, self.size), self.networks.config.dtype),
      novelty=jnp.zeros((before, batch), jnp.float32),
      episode=jnp.full((before, batch), -1, jnp.int32),
    )

  def advance(
    self, params: Tree, memory: Window, features: Features, inputs: jax.Array, begins: jax.Array
  ) -> tuple[Window, jax.Array]:
    features, inputs = jax.tree.map(lambda x: x[None], (features, inputs))
    window = self.imagined(memory, features, inputs, begins)
    return jax.tree.map(lambda x: x[1:], window), self.pool(params, window, features)[0]

  def replayed(self, features: Features, inputs: jax.Array, begins: jax.Array) -> Window:
    """See `Context.replayed`; steps before the sequence are of episode -1, which no step pools."""

    def before(x: jax.Array, fill: int) -> jax.Array:
      padding = ((self.window - 1, 0), *[(0, 0)] * (x.ndim - 1))
      return jnp.pad(x, padding, constant_values=fill)

    episode = jnp.cumsum(begins.at[0].set(True), axis=0, dtype=jnp.int32) - 1
    return Window(before(_joined(features), 0), before(inputs, 0), before(episode, -1))

  def memory_at(self, history: Window, step: jax.Array, stream: jax.Array) -> Window:
    index = step + jnp.arange(self.window - 1)[:, None]  # into a history that begins W - 1 earlier
    return jax.tree.map(lambda x: x[index, stream], history)

  def imagined(
    self, memory: Window, features: Features, inputs: jax.Array, begins: jax.Array
  ) -> Window:
    episode = jnp.broadcast_to(memory.episode[-1] + begins, inputs.shape)
    window: Window = jax.tree.map(
      lambda before, after: jnp.concatenate([before, after]),
      memory,
      Window(_joined(features), inputs, episode),
    )
    return window

  def cut(self, history: Window, first: jax.Array | int, count: int) -> Window:
    size = self.window - 1 + count
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), history)

  def pool(self, params: Tree, history: Window, features: Features) -> jax.Array:
    """See `Context.pool`; one matrix product for each stream."""
    del features
    weights = self._weights(self.scores(params, history), history)
    return jnp.einsum('rwb,wbf->rbf', weights.astype(history.features.dtype), history.features)

  def scores(self, params: Tree, history: Window) -> jax.Array:
    """Attention logits of the W - 1 + R steps of a history of R steps, [W - 1 + R, B] float32."""
    novelty = jnp.log1p(history.novelty)[..., None].astype(history.features.dtype)
    module, _ = self.modules()[NAME]
    scores = networks.apply(module, params[NAME], history.features, novelty)
    return scores[..., 0].astype(jnp.float32)

  def _weights(self, scores: jax.Array, history: Window) -> jax.Array:
    """Attention weights, [R, W - 1 + R, B] float32; 0 outside a step's window and in other episodes."""
    before, total = self.window - 1, len(history.episode)
    age = jnp.arange(before, total)[:, None] - jnp.arange(total)
    same = history.episode == history.episode[before:, None]
    counts = same & ((age >= 0) & (age <= before))[..., None]
    return jax.nn.softmax(jnp.where(counts, scores, -jnp.inf), axis=1)

  def weights(self, params: Tree, history: Window, num_steps: int) -> jax.Array:
    weights = self._weights(self.scores(params, history), history)
    step = jnp.arange(num_steps)[:, None]
    return jnp.swapaxes(weights[step, step + jnp.arange(self.window)], 1, 2)


def _joined(features: Features) -> jax.Array:
  """All features of a step, concatenated, [..., F]."""
  parts = [features.state, features.recalled, features.numbers, features.transition]
  return jnp.concatenate(parts, axis=-1)
