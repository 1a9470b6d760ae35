"""Salience: pools the features f of the last W steps of the episode by attention with learned scores.

score_i = MLP([f_i, log(1 + novelty_i)])      w = softmax(score)      context = sum_i w_i f_i
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hephaestus.agents import networks
from hephaestus.agents.dreamer import modules, rssm, sockets

Tree = sockets.Tree
NAME = 'salience'


class Window(NamedTuple):
  """The last S steps, oldest first: the W - 1 before a step, or these and the step.

  Attributes:
    features: [..., S, F] in the compute dtype, all features of a step, concatenated.
    novelty: [..., S] float32.
    is_there: [..., S] float32, 1 at steps of this episode, which are pooled, else 0.
  """

  features: jax.Array
  novelty: jax.Array
  is_there: jax.Array


@dataclasses.dataclass(frozen=True)
class Salience(sockets.Context):
  """Pools the features of the last W = `window` steps by attention; see the equations of this module."""

  @functools.cached_property
  def size(self) -> int:
    """F, width of all features of a step, and of the context."""
    return sum(x.shape[-1] for x in self.networks.empty_features(1))

  def modules(self) -> dict[str, tuple[networks.MLP, int]]:
    config = self.networks.config
    return {NAME: (networks.MLP(config.hidden_size, 1, 1, 0.1, dtype=config.dtype), self.size + 1)}

  def inputs(self, params: Tree, step: rssm.Step, novelty: jax.Array) -> jax.Array:
    """The novelty."""
    return novelty

  def initial(self, batch: int) -> Window:
    shape = batch, self.networks.config.window - 1
    return Window(
      features=jnp.zeros((*shape, self.size), self.networks.config.dtype),
      novelty=jnp.zeros(shape, jnp.float32),
      is_there=jnp.zeros(shape, jnp.float32),
    )

  def advance(self, read: sockets.PolicyInputs) -> Window:
    return jax.tree.map(lambda x: x[:, 1:], _window(read))

  def pool(self, params: Tree, read: sockets.PolicyInputs) -> jax.Array:
    window = _window(read)
    weights = self.weights(params, window).astype(window.features.dtype)
    return jnp.einsum('...w,...wf->...f', weights, window.features)

  def scores(self, params: Tree, window: Window) -> jax.Array:
    """Attention logits of the steps of a window, [..., S] float32."""
    novelty = jnp.log1p(window.novelty)[..., None].astype(window.features.dtype)
    module, _ = self.modules()[NAME]
    scores = networks.apply(module, params[NAME], window.features, novelty)
    return scores[..., 0].astype(jnp.float32)

  def weights(self, params: Tree, window: Window) -> jax.Array:
    """Attention weights of the steps of a window, [..., S] float32; 0 for steps that are not there."""
    return jax.nn.softmax(
      jnp.where(window.is_there > 0, self.scores(params, window), -jnp.inf), axis=-1
    )

  def shown(self, params: Tree, read: sockets.PolicyInputs) -> Tree:
    """The weights of the last W steps, oldest first, `salience`: [..., W] float32."""
    return {NAME: self.weights(params, _window(read))}


def _window(read: sockets.PolicyInputs) -> Window:
  """The last W steps: those before, and the step itself."""
  step = Window(_joined(read.features), read.own, jnp.ones(read.own.shape, jnp.float32))
  axis = read.own.ndim
  join = lambda before, now: jnp.concatenate([before, jnp.expand_dims(now, axis)], axis)
  return jax.tree.map(join, read.memory, step)


def _joined(features: modules.Features) -> jax.Array:
  """All features of a step, concatenated, [..., F]."""
  parts = [features.state, features.recalled, features.numbers, features.transition]
  parts += [features.cells, features.changed, features.places, features.difference]
  return jnp.concatenate(parts, axis=-1)
